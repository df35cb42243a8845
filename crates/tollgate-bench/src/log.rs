//! Three ways to keep the sliding log in Redis: a sorted set, a stream and a packed string. Memory of a key, and time of a
//! check in the server.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use redis::{Connection, ConnectionLike, Value};
use serde_json::json;
use tollgate_testkit::{RedisServer, ServerProgram};

use crate::redis::{LOAD_CORE, SERVER_CORE, pin};
use crate::report::{Options, Report, median};

/// Entries that count at the same time, which is also the limit.
const SIZES: [u64; 3] = [100, 10_000, 100_000];
/// The window. Long enough for no key to leave by itself while it is measured.
const WINDOW_US: u64 = 60_000_000;
/// When the log begins.
const BEGIN_US: u64 = 1_763_000_000_000_000;
/// Commands that are sent before an answer is read.
const PIPELINE: usize = 1_000;

const PRELUDE: &str = include_str!("../../tollgate/src/engine/redis/lua/prelude.lua");
/// Each takes the same arguments and gives the same answers.
const STORAGES: [(&str, &str); 3] = [
    ("sorted set", include_str!("../../tollgate/src/engine/redis/lua/sliding_log.lua")),
    ("stream", include_str!("lua/sliding_log_stream.lua")),
    ("packed string", include_str!("../../tollgate/src/engine/redis/lua/sliding_log_packed.lua")),
];

/// What is measured, in the order of the table, with its unit.
const FIGURES: [(&str, &str); 7] = [
    ("memory", "bytes"),
    ("one in, one out", "us"),
    ("one in, one out, pipelined", "checks/s"),
    ("denial of 1", "us"),
    ("denial of half the limit", "us"),
    ("after a tenth expired", "us"),
    ("longest check while it grew", "us"),
];
const LONGEST: usize = 6;

/// Measures and prints.
pub(crate) fn run(options: &Options) -> Result<()> {
    pin(std::process::id(), LOAD_CORE)?;
    let mut report = Report::default();
    let (rounds, sizes) = if options.quick { (1, &SIZES[..2]) } else { (5, &SIZES[..]) };
    for (name, program) in [("Redis 7", ServerProgram::Redis), ("Valkey 9", ServerProgram::Valkey)] {
        if !name.contains(&options.only) {
            continue;
        }
        let server = RedisServer::build().program(program).start();
        pin(server.process_id(), SERVER_CORE)?;
        println!("\n{name} ({}): median of {rounds}", version(&server));
        for size in sizes {
            compare(&mut report, &server, name, *size, rounds)?;
        }
    }
    report.finish(options)
}

fn version(server: &RedisServer) -> String {
    let info = server.cli(&["INFO", "server"]);
    let line = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    line("valkey_version:").or_else(|| line("redis_version:")).unwrap_or_default()
}

/// All storages at one size, one after the other in every round.
fn compare(
    report: &mut Report,
    server: &RedisServer,
    server_name: &str,
    size: u64,
    rounds: usize,
) -> Result<()> {
    let mut seen = vec![vec![Vec::new(); FIGURES.len()]; STORAGES.len()];
    let mut answers: Vec<Vec<Vec<Value>>> = Vec::new();
    for _ in 0..rounds {
        answers.clear();
        for (number, (_, body)) in STORAGES.iter().enumerate() {
            let mut log = Log::new(server, body, size)?;
            for (figure, value) in log.measure()?.into_iter().enumerate() {
                seen[number][figure].push(value);
            }
            answers.push(log.answers);
        }
        ensure!(answers.windows(2).all(|pair| pair[0] == pair[1]), "the storages gave different answers");
    }
    println!("\n  {size} entries{:>38}{:>14}{:>16}", STORAGES[0].0, STORAGES[1].0, STORAGES[2].0);
    for (figure, (what, unit)) in FIGURES.iter().enumerate() {
        // Of the longest, the least of all rounds: whatever else the machine does only adds to it.
        let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
        let middle: Vec<_> = seen
            .iter()
            .map(|of_storage| match figure {
                LONGEST => least(&of_storage[figure]),
                _ => median(of_storage[figure].clone()),
            })
            .collect();
        let shown = |value: f64| if *unit == "us" { format!("{value:.1}") } else { format!("{value:.0}") };
        println!(
            "  {:<38}{:>16}{:>14}{:>16}",
            format!("{what}, {unit}"),
            shown(middle[0]),
            shown(middle[1]),
            shown(middle[2])
        );
        for ((storage, _), value) in STORAGES.iter().zip(middle) {
            report.figure(&format!("{server_name}, {size} entries, {storage}: {what}, {unit}"), json!(value));
        }
    }
    Ok(())
}

/// One log in one storage, on an empty server.
struct Log {
    connection: Connection,
    sha: String,
    size: u64,
    /// Between two entries of a log that is always full.
    step: u64,
    now: u64,
    /// Of the checks that were timed: those of all storages must be the same.
    answers: Vec<Vec<Value>>,
}

impl Log {
    fn new(server: &RedisServer, body: &str, size: u64) -> Result<Self> {
        let mut connection = redis::Client::open(server.url())?.get_connection()?;
        let script = format!("{PRELUDE}{body}");
        redis::cmd("FLUSHALL").exec(&mut connection)?;
        let sha = redis::cmd("SCRIPT").arg("LOAD").arg(&script).query(&mut connection)?;
        Ok(Self { connection, sha, size, step: WINDOW_US / size, now: BEGIN_US, answers: Vec::new() })
    }

    /// In the order of [`FIGURES`].
    fn measure(&mut self) -> Result<[f64; FIGURES.len()]> {
        let growing = self.longest_growing()?;
        // Once through, so that what was measured is not what was just laid out in a row.
        self.fill(self.step, self.size + self.size / 2)?;
        let memory: u64 =
            redis::cmd("MEMORY").arg("USAGE").arg("log").arg("SAMPLES").arg(0).query(&mut self.connection)?;
        let (steady, pipelined) = self.timed(10_000, self.step, 1)?;
        let (denied, _) = self.timed(10_000, 0, 1)?;
        let (denied_deep, _) = self.timed(10_000, 0, self.size / 2)?;
        let after_tenth = self.after_tenth()?;
        Ok([memory as f64, steady, pipelined, denied, denied_deep, after_tenth, growing])
    }

    fn check(&self, cost: u64) -> redis::Cmd {
        let numbers = [self.size, WINDOW_US, 0, cost, 0, 1];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_be_bytes()).collect();
        let mut check = redis::cmd("EVALSHA");
        check.arg(&self.sha).arg(1).arg("log").arg(self.now).arg("ask").arg(bytes);
        check
    }

    /// Many checks, `step` apart. Says what the server took for one, and how many there were in a second.
    fn timed(&mut self, count: usize, step: u64, cost: u64) -> Result<(f64, f64)> {
        let busy = self.busy()?;
        let (mut left, mut took) = (count, 0.0);
        while left > 0 {
            let mut pipeline = redis::pipe();
            for _ in 0..left.min(PIPELINE) {
                self.now += step;
                pipeline.add_command(self.check(cost));
            }
            left -= left.min(PIPELINE);
            let bytes = pipeline.get_packed_pipeline();
            let start = Instant::now();
            let answers = self.connection.req_packed_commands(&bytes, 0, pipeline.len())?;
            took += start.elapsed().as_secs_f64();
            for answer in answers {
                self.answers.push(redis::from_redis_value(answer)?);
            }
        }
        Ok(((self.busy()? - busy) / count as f64, count as f64 / took))
    }

    /// A check when a tenth of the log has just expired, again and again.
    fn after_tenth(&mut self) -> Result<f64> {
        const TIMES: usize = 10;
        let mut took = 0.0;
        for _ in 0..TIMES {
            self.now += WINDOW_US / 10;
            let busy = self.busy()?;
            let answer = self.check(1).query(&mut self.connection)?;
            took += self.busy()? - busy;
            self.answers.push(answer);
            // As close together as they can be, so that hardly any more expire meanwhile.
            self.fill(1, self.size / 10 - 1)?;
        }
        Ok(took / TIMES as f64)
    }

    /// Admissions, one after the other, that are not timed.
    fn fill(&mut self, step: u64, mut count: u64) -> Result<()> {
        while count > 0 {
            let mut pipeline = redis::pipe();
            for _ in 0..count.min(PIPELINE as u64) {
                self.now += step;
                pipeline.add_command(self.check(1));
            }
            count -= count.min(PIPELINE as u64);
            let answers: Vec<Vec<Value>> = pipeline.query(&mut self.connection)?;
            ensure!(answers.iter().all(|answer| answer[0] == Value::Int(1)), "not admitted");
        }
        Ok(())
    }

    /// The longest that a check took in the server while the log grew to its size, if longer than 50 microseconds.
    fn longest_growing(&mut self) -> Result<f64> {
        const NOTED_US: i64 = 50;
        let noted = [("slowlog-max-len", self.size as i64), ("slowlog-log-slower-than", NOTED_US)];
        for (name, value) in noted {
            redis::cmd("CONFIG").arg("SET").arg(name).arg(value).exec(&mut self.connection)?;
        }
        redis::cmd("SLOWLOG").arg("RESET").exec(&mut self.connection)?;
        self.fill(self.step, self.size)?;
        let slow: Vec<Vec<Value>> = redis::cmd("SLOWLOG").arg("GET").arg(-1).query(&mut self.connection)?;
        redis::cmd("CONFIG").arg("SET").arg("slowlog-log-slower-than").arg(-1).exec(&mut self.connection)?;
        let took = slow.iter().filter_map(|entry| match entry.get(2) {
            Some(Value::Int(micros)) => Some(*micros),
            _ => None,
        });
        Ok(took.max().unwrap_or(NOTED_US) as f64)
    }

    /// Microseconds that the server has spent in scripts so far.
    fn busy(&mut self) -> Result<f64> {
        let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut self.connection)?;
        let line =
            stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).context("no EVALSHA yet")?;
        let usec = line.split(',').find_map(|field| field.strip_prefix("usec=")).context("no usec")?;
        Ok(usec.parse()?)
    }
}
