//! Tollgate's scripts beside plain ones: instructions of the server for one check, as callgrind counts them.
//!
//! A plain script is what a service writes for itself: floating-point numbers, no check of what it finds, no state that another limit has
//! written. It reads the server's clock, as Tollgate's does, takes nothing from denied requests, and answers whether the request is allowed,
//! what is left, and when that is reset.

use std::path::Path;
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use redis::{Connection, Value};
use tollgate::{
    Ask, FixedWindow, LeakyBucket, LeakyMode, Limit, Rate, RedisConfig, RedisEngine, SlidingCounter,
    SlidingLog, TokenBucket,
};
use tollgate_testkit::wait_until;

use crate::instructions::{Checks, collected, stopped_with_this_process};
use crate::redis::on_one_core;
use crate::report::Report;

/// Keys that are asked about in turn: every one many times, as a service that has been running for a while asks.
const KEYS: u64 = 200;
/// Commands that are sent before an answer is read.
const PIPELINE: u64 = 16;
/// The least that Tollgate's script may reach of the plain one's speed.
const BAR: f64 = 0.95;

const TIME: &str = "local time = redis.call('TIME')\nlocal now = time[1] + time[2] / 1000000\n";
const PLAIN: [(&str, &str); 5] = [
    ("token bucket", include_str!("plain/token_bucket.lua")),
    ("leaky bucket", include_str!("plain/leaky_bucket.lua")),
    ("fixed window", include_str!("plain/fixed_window.lua")),
    ("sliding log", include_str!("plain/sliding_log.lua")),
    ("sliding counter", include_str!("plain/sliding_counter.lua")),
];

/// 1,000,000 a minute, so that no request is denied during the measurement.
fn limits() -> Result<[Limit; 5]> {
    let minute = Rate::per_minute(1_000_000);
    Ok([
        Limit::TokenBucket(TokenBucket::new(1_000_000, minute)?),
        Limit::LeakyBucket(LeakyBucket::new(1_000_000, minute, LeakyMode::Meter)?),
        Limit::FixedWindow(FixedWindow::new(minute)?),
        Limit::SlidingLog(SlidingLog::new(minute)?),
        Limit::SlidingCounter(SlidingCounter::new(minute, 1, false)?),
    ])
}

/// Counts and judges, algorithm by algorithm.
pub(crate) fn run(report: &mut Report, _: usize, duration: Duration) -> Result<()> {
    let checks = Checks { few: 1_000, many: 1_000 + 1_000 * duration.as_secs() };
    for ((name, plain), limit) in PLAIN.into_iter().zip(limits()?) {
        let ours = checks.instructions(|count| count_own(limit, count))?;
        let theirs = checks.instructions(|count| count_plain(plain, count))?;
        let ratio = theirs / ours;
        println!(
            "  {name}: tollgate's {ours:.0} instructions a check, the plain one {theirs:.0}: {ratio:.2}"
        );
        report.figure(&format!("script, {name}, instructions"), ours);
        report.figure(&format!("plain script, {name}, instructions"), theirs);
        let what = format!("script, {name}, against the plain one");
        report.bar(&what, ratio, ratio >= BAR, &format!(">= {BAR}"));
    }
    Ok(())
}

/// A server under callgrind.
struct Counted {
    process: Child,
    connection: Connection,
    directory: tempfile::TempDir,
}

impl Counted {
    fn start() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("socket");
        let mut command = stopped_with_this_process("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "redis-server"]);
        command
            .args(["--port", "0", "--save", "", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(directory.path());
        command.stdout(std::process::Stdio::null());
        command.stderr(std::fs::File::create(directory.path().join("count"))?);
        let process = command.spawn().context("cannot run valgrind")?;
        wait_until("the server listens", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
        let connection = redis::Client::open(url(&socket))?.get_connection()?;
        Ok(Self { process, connection, directory })
    }

    fn url(&self) -> String {
        url(&self.directory.path().join("socket"))
    }

    /// Makes `count` calls of a script, each on the next key.
    fn call(&mut self, script: &str, arguments: &[&[u8]], count: u64) -> Result<()> {
        let sha: String = redis::cmd("SCRIPT").arg("LOAD").arg(script).query(&mut self.connection)?;
        for first in (0..count).step_by(PIPELINE as usize) {
            let mut pipeline = redis::pipe();
            for number in first..(first + PIPELINE).min(count) {
                let key = format!("rate_limiter:bench:user:{:04}", number % KEYS);
                pipeline.cmd("EVALSHA").arg(&sha).arg(1).arg(key).arg(arguments);
            }
            let answers: Vec<Value> = pipeline.query(&mut self.connection)?;
            ensure!(!answers.is_empty(), "no answer");
        }
        Ok(())
    }

    /// Ends the server, and says how many instructions it has run.
    fn end(mut self) -> Result<u64> {
        // The server closes the connection instead of an answer.
        let _ = redis::cmd("SHUTDOWN").arg("NOSAVE").exec(&mut self.connection);
        self.process.wait()?;
        collected(&std::fs::read_to_string(self.directory.path().join("count"))?)
    }
}

fn url(socket: &Path) -> String {
    format!("redis+unix://{}", socket.display())
}

fn count_own(limit: Limit, count: u64) -> Result<u64> {
    let mut server = Counted::start()?;
    let url = server.url();
    let (script, argument) = on_one_core(async {
        let mut config = RedisConfig::new(url.parse()?);
        config.count_nodes = false;
        let (engine, _driver) = RedisEngine::new(config);
        Ok(engine.limiter("bench", limit).wire(Ask::of(1)))
    })?;
    server.call(script, &[&argument], count)?;
    server.end()
}

fn count_plain(script: &str, count: u64) -> Result<u64> {
    let mut server = Counted::start()?;
    let whole = format!("{TIME}{script}");
    // Size, permits a second, window in seconds, cost.
    server.call(&whole, &[b"1000000", b"16666.666", b"60", b"1"], count)?;
    server.end()
}
