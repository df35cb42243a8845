//! The longest script calls: how long one holds the server up, on the worst states that Tollgate writes.
//!
//! Times are the server's own, by its statistics of commands. Each call is made on the same state again and again, and the shortest time
//! counts: what else the machine did is not in it.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::join_all;
use redis::{Connection, Value};
use tollgate::algorithm::SUB_BUCKETS_MAX;
use tollgate::rules::{CHECKS_MAX, WORK_MAX};
use tollgate::{
    Ask, Backend, Check, Clock, Limit, Micros, Rate, RateLimiter, RedisConfig, RedisEngine, RedisLimiter,
    SlidingCounter, SlidingLog, Timestamp, TokenBucket,
};
use tollgate_testkit::{RedisServer, ServerProgram};

use crate::redis::{LOAD_CORE, SERVER_CORE, pin};
use crate::report::{Options, Report};

/// What a call may take.
const BAR_US: f64 = 1_000.0;
/// Entries of the logs: the default of the largest limit, and what a large service asked for.
const SIZES: [u64; 2] = [100_000, 600_000];
const WINDOW_US: u64 = 3_600_000_000;
const BEGIN_US: u64 = 1_763_000_000_000_000;
const KEY: &str = "rate_limiter:sliding_window:log";
/// Calls that are sent before an answer is read.
const PIPELINE: u64 = 1_000;
/// The shortest time that the server notes while a log grows.
const NOTED_US: u64 = 300;

/// Measures and judges.
pub(crate) fn run(options: &Options) -> Result<()> {
    pin(std::process::id(), LOAD_CORE)?;
    let mut report = Report::default();
    for (name, program) in [("Redis 7", ServerProgram::Redis), ("Valkey 9", ServerProgram::Valkey)] {
        if name.contains(&options.only) {
            on_server(&mut report, name, program, options.quick)?;
        }
    }
    report.finish(options)
}

/// Measures and judges all calls on one kind of server.
fn on_server(report: &mut Report, name: &str, program: ServerProgram, quick: bool) -> Result<()> {
    let (rounds, sizes) = if quick { (2, &SIZES[..1]) } else { (7, &SIZES[..]) };
    let server = RedisServer::build().program(program).args(&["--lazyfree-lazy-expire", "yes"]).start();
    pin(server.process_id(), SERVER_CORE)?;
    println!("\n{name}: the longest call of a script, us (shortest of {rounds} on the same state)");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut bar =
        |what: String, us: f64| report.bar(&format!("{name}: {what}"), us, us <= BAR_US, "<= 1000 us");
    for size in sizes {
        let mut calls = runtime.block_on(Calls::new(&server))?;
        let log = OneLog { limiter: calls.limiter(log_limit(*size)), size: *size };
        bar(format!("log growing to {size} entries"), calls.grow(&log, rounds.min(5))?);
        let bytes = calls.bytes()?;
        println!("         a log of {size} entries takes {bytes} bytes");
        for (what, call) in CALLS {
            let us = runtime.block_on(calls.shortest(&log, rounds, call))?;
            bar(format!("log of {size} entries, {what}"), us);
        }
    }
    let mut calls = runtime.block_on(Calls::new(&server))?;
    let minute = |permits| Rate::per_minute(permits);
    let counter = |parts| SlidingCounter::new(minute(600_000), parts, false).map(Limit::SlidingCounter);
    let bucket = TokenBucket::new(100, minute(100)).map(Limit::TokenBucket)?;
    let log = SlidingLog::new(minute(1_000)).map(Limit::SlidingLog)?;
    for (what, limit, many) in [
        ("counter with as many sub-buckets as it may have", counter(SUB_BUCKETS_MAX)?, 1),
        ("buckets together", bucket, at_once(&bucket)),
        ("counters together", counter(1)?, at_once(&counter(1)?)),
        ("counters with 10 sub-buckets together", counter(10)?, at_once(&counter(10)?)),
        ("logs of 1,000 entries together", log, at_once(&log)),
    ] {
        bar(format!("{many} {what}"), runtime.block_on(calls.together(limit, many, rounds))?);
    }
    Ok(())
}

/// How many of a limit one request may have.
fn at_once(limit: &Limit) -> usize {
    CHECKS_MAX.min(WORK_MAX / limit.work())
}

fn log_limit(permits: u64) -> Limit {
    let rate = Rate::new(permits, Micros::new(WINDOW_US)).expect("valid");
    Limit::SlidingLog(SlidingLog::new(rate).expect("valid"))
}

/// A log that is full, its entries evenly over the window that ends now.
struct OneLog {
    limiter: RedisLimiter,
    size: u64,
}

/// The question to a full log, and how long after its newest entry it is asked, in parts of the window.
#[derive(Clone, Copy)]
enum Asked {
    Take {
        permits_percent: u64,
        later_percent: i64,
    },
    Refund,
    Reset,
    /// As many different denials as one call may search for, and one that goes ahead of them.
    Different,
}

const CALLS: [(&str, Asked); 8] = [
    ("all expired", Asked::Take { permits_percent: 0, later_percent: 101 }),
    ("half expired", Asked::Take { permits_percent: 0, later_percent: 50 }),
    ("denied", Asked::Take { permits_percent: 0, later_percent: 0 }),
    ("half of the limit denied", Asked::Take { permits_percent: 50, later_percent: 0 }),
    ("clock set back", Asked::Take { permits_percent: 0, later_percent: -150 }),
    ("refund of half", Asked::Refund),
    ("reset", Asked::Reset),
    ("nine different denials, in two calls", Asked::Different),
];

/// An engine on a server, and a connection beside it.
struct Calls {
    engine: RedisEngine,
    clock: Clock,
    connection: Connection,
}

impl Calls {
    async fn new(server: &RedisServer) -> Result<Self> {
        let clock = Clock::manual(Timestamp::from_micros(BEGIN_US));
        let mut config = RedisConfig::new(server.url().parse()?);
        config.clock = Some(clock.clone());
        config.deadline = Duration::from_secs(10);
        config.remember_denials = Duration::ZERO;
        config.count_nodes = false;
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        engine.connected(Duration::from_secs(10)).await?;
        let connection = redis::Client::open(server.url())?.get_connection()?;
        Ok(Self { engine, clock, connection })
    }

    fn limiter(&self, limit: Limit) -> RedisLimiter {
        self.engine.limiter("sliding_window", limit)
    }

    /// Fills a log, some times over: the longest of its calls. The last one is left, and kept aside.
    fn grow(&mut self, log: &OneLog, rounds: usize) -> Result<f64> {
        let (script, argument) = log.limiter.wire(Ask::of(1));
        let size = log.size;
        let sha: String = redis::cmd("SCRIPT").arg("LOAD").arg(script).query(&mut self.connection)?;
        let mut longest: Option<HashMap<Vec<u8>, i64>> = None;
        for _ in 0..rounds {
            self.say(&["FLUSHALL"])?;
            self.say(&["CONFIG", "SET", "slowlog-max-len", "100000"])?;
            self.say(&["CONFIG", "SET", "slowlog-log-slower-than", &NOTED_US.to_string()])?;
            self.say(&["SLOWLOG", "RESET"])?;
            for first in (1..=size).step_by(PIPELINE as usize) {
                let mut pipeline = redis::pipe();
                for number in first..(first + PIPELINE).min(size + 1) {
                    let now = BEGIN_US + number * (WINDOW_US / size);
                    let mut check = redis::cmd("EVALSHA");
                    check.arg(&sha).arg(1).arg(KEY).arg(&argument).arg(now);
                    pipeline.add_command(check);
                }
                let answers: Vec<Value> = pipeline.query(&mut self.connection)?;
                ensure!(answers.iter().all(is_admission), "not admitted");
            }
            self.say(&["CONFIG", "SET", "slowlog-log-slower-than", "-1"])?;
            let noted = self.noted()?;
            longest = Some(match longest {
                None => noted,
                Some(before) => {
                    let both = |(now, us): (Vec<u8>, i64)| Some((now.clone(), us.min(*before.get(&now)?)));
                    noted.into_iter().filter_map(both).collect()
                }
            });
        }
        self.say(&["COPY", KEY, "saved"])?;
        let longest = longest.unwrap_or_default().into_values().max();
        Ok(longest.unwrap_or(NOTED_US as i64) as f64)
    }

    /// Bytes that the log takes.
    fn bytes(&mut self) -> Result<u64> {
        let mut usage = redis::cmd("MEMORY");
        Ok(usage.arg("USAGE").arg(KEY).arg("SAMPLES").arg(0).query(&mut self.connection)?)
    }

    /// Script calls that took long, by the time that was handed in.
    fn noted(&mut self) -> Result<HashMap<Vec<u8>, i64>> {
        // Number, time, duration, command.
        type Noted = (Value, Value, i64, Vec<Vec<u8>>, Value, Value);
        let noted: Vec<Noted> = redis::cmd("SLOWLOG").arg("GET").arg(-1).query(&mut self.connection)?;
        let calls = noted.into_iter().filter(|(_, _, _, command, ..)| command[0] == b"EVALSHA");
        Ok(calls.map(|(_, _, us, mut command, ..)| (command.swap_remove(5), us)).collect())
    }

    /// The shortest time of a call on the log that was kept aside.
    async fn shortest(&mut self, log: &OneLog, rounds: usize, asked: Asked) -> Result<f64> {
        let newest = BEGIN_US + log.size * (WINDOW_US / log.size);
        let mut shortest = f64::INFINITY;
        for _ in 0..rounds {
            self.say(&["COPY", "saved", KEY, "REPLACE"])?;
            self.clock.set(Timestamp::from_micros(newest));
            let before = self.busy()?;
            match asked {
                Asked::Take { permits_percent, later_percent } => {
                    let later = WINDOW_US as i64 / 100 * later_percent;
                    self.clock.set(Timestamp::from_micros(newest.saturating_add_signed(later)));
                    let permits = (log.size * permits_percent / 100).max(1);
                    log.limiter.try_acquire("log", permits).await?;
                }
                Asked::Refund => {
                    let middle = Timestamp::from_micros(newest - WINDOW_US / 2);
                    log.limiter.refund("log", log.size / 2, middle).await?;
                }
                Asked::Reset => log.limiter.reset("log").await?,
                Asked::Different => {
                    let asks = (0..9).map(|number| log.limiter.try_acquire("log", log.size / 3 + number));
                    for answer in join_all(asks).await {
                        ensure!(!answer?.is_admitted(), "a full log admitted more");
                    }
                }
            }
            shortest = shortest.min(self.busy()? - before);
        }
        Ok(shortest)
    }

    /// The shortest time of a call that asks many limits at once, all of which are nearly used up.
    async fn together(&mut self, limit: Limit, many: usize, rounds: usize) -> Result<f64> {
        self.say(&["FLUSHALL"])?;
        let limiters: Vec<_> =
            (0..many).map(|number| self.engine.limiter(&format!("set:{number}"), limit)).collect();
        let horizon = limit.horizon().get();
        let parts = 1_000;
        for part in 0..parts {
            self.clock.set(Timestamp::from_micros(BEGIN_US + part * horizon / parts));
            for limiter in &limiters {
                limiter.try_acquire("user", (limit.size() / parts).max(1)).await?;
            }
        }
        let mut shortest = f64::INFINITY;
        for round in 0..rounds as u64 {
            self.clock.set(Timestamp::from_micros(BEGIN_US + horizon + round));
            let checks: Vec<_> = limiters
                .iter()
                .map(|limiter| Check::new(limiter.id(), "user", limit.size() / 2).counted_only())
                .collect();
            let before = self.busy()?;
            self.engine.decide(&checks).await?;
            shortest = shortest.min(self.busy()? - before);
        }
        Ok(shortest)
    }

    fn say(&mut self, words: &[&str]) -> Result<()> {
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        Ok(command.exec(&mut self.connection)?)
    }

    /// Microseconds that the server has spent on checks, refunds and resets so far. An UNLINK within a script counts twice.
    fn busy(&mut self) -> Result<f64> {
        let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut self.connection)?;
        let is_ours =
            |line: &&str| ["cmdstat_evalsha:", "cmdstat_unlink:"].iter().any(|it| line.starts_with(it));
        let mut sum = 0.0;
        for line in stats.lines().filter(is_ours) {
            let us = line.split(',').find_map(|field| field.strip_prefix("usec=")).context("no usec")?;
            sum += us.parse::<f64>()?;
        }
        Ok(sum)
    }
}

/// Whether a script has answered that it admitted one ask: numbers of which the first is 1.
fn is_admission(answer: &Value) -> bool {
    matches!(answer, Value::BulkString(numbers) if numbers.starts_with(&1_f64.to_be_bytes()))
}
