//! Three ways to keep the sliding log in Redis: a sorted set, a stream and packed chunks. Memory of a key, and time of a
//! check in the server.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use redis::{Connection, Value};
use serde_json::json;
use tollgate_testkit::{RedisServer, ServerProgram};

use crate::longest;
use crate::redis::{LOAD_CORE, SERVER_CORE, cpu, pin};
use crate::report::{Options, Report, median};

/// Entries that count at the same time, which is also the limit.
const SIZES: [u64; 3] = [100, 10_000, 100_000];
/// The window. Long enough for no key to leave by itself while it is measured.
const WINDOW_US: u64 = 60_000_000;
/// When the log begins.
const BEGIN_US: u64 = 1_763_000_000_000_000;
/// Checks that take less are none of the longest.
const LONG_US: i64 = 50;
/// Commands that are sent before an answer is read.
const PIPELINE: usize = 1_000;

pub(crate) const PRELUDE: &str = include_str!("../../tollgate/src/redis/lua/prelude.lua");
const LOG_HEAD: &str = include_str!("../../tollgate/src/redis/lua/log_head.lua");
const LOG: &str = include_str!("../../tollgate/src/redis/lua/log.lua");
/// Each takes the same arguments and gives the same answers. The stream is a script of the benchmark's own.
pub(crate) const STORAGES: [(&str, &[&str]); 3] = [
    ("sorted set", &[LOG_HEAD, include_str!("../../tollgate/src/redis/lua/sliding_log.lua"), LOG]),
    ("stream", &[include_str!("lua/sliding_log_stream.lua")]),
    ("packed", &[LOG_HEAD, include_str!("../../tollgate/src/redis/lua/sliding_log_packed.lua"), LOG]),
];

/// What is measured, in the order of the table.
const FIGURES: [&str; 5] = [
    "memory, bytes",
    "one in, one out, us",
    "denial of 1, us",
    "denial of half the limit, us",
    "after a tenth has expired, us",
];
/// At least [`LONG_US`].
const LONGEST: &str = "longest check while it grows, us";

/// Measures and prints.
pub(crate) fn run(options: &Options) -> Result<()> {
    pin(std::process::id(), LOAD_CORE)?;
    let mut report = Report::default();
    let (rounds, sizes) = if options.quick { (1, &SIZES[..2]) } else { (5, &SIZES[..]) };
    for (name, program) in [("Redis 7", ServerProgram::Redis), ("Valkey 9", ServerProgram::Valkey)] {
        if format!("{name}, longest calls").contains(&options.only) {
            longest::run(&mut report, name, program, options.quick)?;
        }
        if !format!("{name}, storages").contains(&options.only) {
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
    let mut growing: [Option<HashMap<_, _>>; STORAGES.len()] = [const { None }; STORAGES.len()];
    for _ in 0..rounds {
        let mut answers = Vec::new();
        for (number, (_, body)) in STORAGES.iter().enumerate() {
            let mut log = Log::new(server, body, size)?;
            // The same checks in every round: what else the machine did is not in the shortest time of each.
            let long = log.grow()?;
            let so_far = growing[number].get_or_insert_with(|| long.clone());
            so_far.retain(|check, least| {
                *least = long.get(check).map_or(0, |took| *took.min(least));
                *least > 0
            });
            for (figure, value) in log.measure()?.into_iter().enumerate() {
                seen[number][figure].push(value);
            }
            answers.push(log.answers);
        }
        ensure!(answers.windows(2).all(|pair| pair[0] == pair[1]), "the storages gave different answers");
    }
    println!("\n  {:<36}{:>14}{:>14}{:>16}", format!("{size} entries"), "sorted set", "stream", "packed");
    for (figure, what) in FIGURES.iter().enumerate() {
        row(report, server_name, size, what, seen.iter().map(|of| median(of[figure].clone())).collect());
    }
    let longest = |long: &Option<HashMap<_, i64>>| long.iter().flat_map(HashMap::values).copied().max();
    let longest = growing.iter().map(|long| longest(long).unwrap_or(LONG_US) as f64).collect();
    row(report, server_name, size, LONGEST, longest);
    Ok(())
}

fn row(report: &mut Report, server_name: &str, size: u64, what: &str, values: Vec<f64>) {
    let places = usize::from(what != FIGURES[0]);
    println!("  {what:<36}{:>14.places$}{:>14.places$}{:>16.places$}", values[0], values[1], values[2]);
    for ((storage, _), value) in STORAGES.iter().zip(values) {
        report.figure(&format!("{server_name}, {size} entries, {storage}: {what}"), json!(value));
    }
}

/// One log in one storage, on an empty server.
struct Log<'a> {
    server: &'a RedisServer,
    connection: Connection,
    sha: String,
    size: u64,
    /// Between two entries of a log that is always full.
    step: u64,
    now: u64,
    /// Of the checks that were timed: those of all storages must be the same.
    answers: Vec<Value>,
}

impl<'a> Log<'a> {
    fn new(server: &'a RedisServer, body: &[&str], size: u64) -> Result<Self> {
        let mut connection = redis::Client::open(server.url())?.get_connection()?;
        let script = format!("{PRELUDE}{}", body.concat());
        redis::cmd("FLUSHALL").exec(&mut connection)?;
        let sha = redis::cmd("SCRIPT").arg("LOAD").arg(&script).query(&mut connection)?;
        Ok(Self { server, connection, sha, size, step: WINDOW_US / size, now: BEGIN_US, answers: Vec::new() })
    }

    /// Fills it. Says which checks took the server long, by their time, and how long.
    fn grow(&mut self) -> Result<HashMap<Vec<u8>, i64>> {
        let mut set = |name: &str, value: i64| {
            redis::cmd("CONFIG").arg("SET").arg(name).arg(value).exec(&mut self.connection)
        };
        set("slowlog-max-len", self.size as i64)?;
        set("slowlog-log-slower-than", LONG_US)?;
        redis::cmd("SLOWLOG").arg("RESET").exec(&mut self.connection)?;
        self.fill(self.step, self.size)?;
        redis::cmd("CONFIG").arg("SET").arg("slowlog-log-slower-than").arg(-1).exec(&mut self.connection)?;
        // Number, time, duration, command. Commands of scripts are noted as well.
        type Noted = (Value, Value, i64, Vec<Vec<u8>>, Value, Value);
        let noted: Vec<Noted> = redis::cmd("SLOWLOG").arg("GET").arg(-1).query(&mut self.connection)?;
        redis::cmd("SLOWLOG").arg("RESET").exec(&mut self.connection)?;
        let checks = noted.into_iter().filter(|(_, _, _, command, ..)| command[0] == b"EVALSHA");
        Ok(checks.map(|(_, _, took, mut command, ..)| (command.swap_remove(4), took)).collect())
    }

    /// In the order of [`FIGURES`].
    fn measure(&mut self) -> Result<[f64; FIGURES.len()]> {
        // Once through, so that what is measured is not what was just laid out in a row.
        self.fill(self.step, self.size + self.size / 2)?;
        let memory: u64 =
            redis::cmd("MEMORY").arg("USAGE").arg("log").arg("SAMPLES").arg(0).query(&mut self.connection)?;
        Ok([
            memory as f64,
            self.timed(self.step, 1)?,
            self.timed(0, 1)?,
            self.timed(0, self.size / 2)?,
            self.after_tenth()?,
        ])
    }

    fn check(&self, cost: u64) -> redis::Cmd {
        let numbers = [self.size, WINDOW_US, 0, WINDOW_US, 0, WINDOW_US, 0, 0, cost, 0, 1];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_be_bytes()).collect();
        let mut check = redis::cmd("EVALSHA");
        check.arg(&self.sha).arg(1).arg("log").arg(self.now).arg("ask").arg(bytes);
        check
    }

    /// Many checks, `step` apart. Says how much of the server's processor one took.
    fn timed(&mut self, step: u64, cost: u64) -> Result<f64> {
        const COUNT: usize = 10 * PIPELINE;
        let before = self.busy()?;
        for _ in 0..COUNT / PIPELINE {
            let mut pipeline = redis::pipe();
            for _ in 0..PIPELINE {
                self.now += step;
                pipeline.add_command(self.check(cost));
            }
            self.answers.extend(pipeline.query::<Vec<Value>>(&mut self.connection)?);
        }
        Ok((self.busy()? - before) / COUNT as f64)
    }

    /// Microseconds of processor time that the server has taken.
    fn busy(&self) -> Result<f64> {
        // Until it sleeps, the system has not counted all of it.
        std::thread::sleep(Duration::from_millis(5));
        Ok(cpu(self.server)?.as_secs_f64() * 1e6)
    }

    /// A check when a tenth of the log has just expired, again and again: how long the script took.
    fn after_tenth(&mut self) -> Result<f64> {
        let mut took = Vec::new();
        for _ in 0..10 {
            self.now += WINDOW_US / 10;
            let before = self.in_scripts()?;
            let answer = self.check(1).query(&mut self.connection)?;
            took.push(self.in_scripts()? - before);
            self.answers.push(answer);
            // As close together as they can be, so that hardly any more expire meanwhile.
            self.fill(1, self.size / 10 - 1)?;
        }
        Ok(median(took))
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
            let answers: Vec<Value> = pipeline.query(&mut self.connection)?;
            ensure!(answers.iter().all(is_admission), "not admitted");
        }
        Ok(())
    }

    /// Microseconds that the server has spent in scripts so far.
    fn in_scripts(&mut self) -> Result<f64> {
        let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut self.connection)?;
        let line =
            stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).context("no EVALSHA yet")?;
        let usec = line.split(',').find_map(|field| field.strip_prefix("usec=")).context("no usec")?;
        Ok(usec.parse()?)
    }
}

/// Whether a script has answered that it admitted one ask: a short list in MessagePack whose first item is 1.
pub(crate) fn is_admission(answer: &Value) -> bool {
    matches!(answer, Value::BulkString(list) if matches!(list[..], [0x91..=0x9f, 1, ..]))
}
