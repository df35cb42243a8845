//! Nodes as processes of their own: this test program, started again as a worker that hammers one key.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tollgate::{Limit, RateLimiter, RedisConfig, RedisEngine};
use tollgate_testkit::{Process, wait_at_most};

use crate::limits::named_limit;

/// What a worker is told, in this variable.
const WORKER: &str = "TOLLGATE_TEST_WORKER";

/// Tasks of a worker.
const TASKS: usize = 64;

/// What a worker saw of one check.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Seen {
    /// The store's time, in microseconds.
    pub(crate) at: u64,
    /// Admissions sort before denials of the same microsecond: they were decided by one call, in this order.
    pub(crate) denied: bool,
    pub(crate) remaining: u64,
}

/// A node that hammers `key` for a while.
pub(crate) struct Worker {
    process: Process,
    output: PathBuf,
}

impl Worker {
    /// Starts one whose wall clock is `skew_secs` ahead.
    pub(crate) fn start(
        directory: &Path,
        number: usize,
        url: &str,
        limit: &str,
        key: &str,
        skew_secs: u64,
    ) -> Self {
        let told = format!("{url}\n{limit}\n{key}");
        Self::start_as("worker::hammer", directory, number, &told, skew_secs)
    }

    /// Starts this test program with one test, which is told some lines and the name of a file to write.
    pub(crate) fn start_as(test: &str, directory: &Path, number: usize, told: &str, skew_secs: u64) -> Self {
        let output = directory.join(format!("worker-{number}"));
        let mut command = match skew_secs {
            0 => Command::new(std::env::current_exe().unwrap()),
            _ => {
                let mut command = Command::new("faketime");
                command.args(["-f", &format!("+{skew_secs}s")]).arg(std::env::current_exe().unwrap());
                command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
                command
            }
        };
        command.args([test, "--exact", "--nocapture"]);
        command.env(WORKER, format!("{told}\n{}", output.display()));
        Self { process: Process::start(&command), output }
    }

    /// Everything it saw.
    pub(crate) fn finish(self) -> Vec<Seen> {
        let seen =
            |numbers: Vec<u64>| Seen { at: numbers[0], denied: numbers[1] == 1, remaining: numbers[2] };
        self.finish_lines().into_iter().map(seen).collect()
    }

    /// The numbers of each line that it wrote.
    pub(crate) fn finish_lines(mut self) -> Vec<Vec<u64>> {
        wait_at_most(Duration::from_secs(60), "the worker ends", || self.process.has_ended());
        let text = std::fs::read_to_string(&self.output).unwrap_or_default();
        assert!(text.ends_with("end\n"), "a worker failed: {text:.2000}");
        let numbers = |line: &str| line.split(' ').map(|number| number.parse().unwrap()).collect();
        text.lines().filter(|line| *line != "end").map(numbers).collect()
    }
}

/// What a process was told that was started as a worker: some lines, the last of which is the name of a file to write.
pub(crate) fn told<const N: usize>() -> Option<[String; N]> {
    let told = std::env::var(WORKER).ok()?;
    told.lines().map(str::to_owned).collect::<Vec<_>>().try_into().ok()
}

/// Writes what a worker saw.
pub(crate) fn write_seen(output: &str, seen: Result<Vec<String>, String>) {
    let mut file = BufWriter::new(std::fs::File::create(output).unwrap());
    match seen {
        Ok(lines) => {
            lines.iter().for_each(|line| writeln!(file, "{line}").unwrap());
            writeln!(file, "end").unwrap();
        }
        Err(why) => writeln!(file, "{why}").unwrap(),
    }
}

/// An engine that waits rather than fails: everything that is asked must be decided.
pub(crate) fn patient_engine(url: &str) -> Result<RedisEngine, String> {
    let mut config = RedisConfig::new(url.parse().map_err(|why| format!("{why}"))?);
    config.deadline = Duration::from_secs(20);
    config.connect_timeout = Duration::from_secs(20);
    let (engine, driver) = RedisEngine::new(config);
    tokio::spawn(driver.run());
    Ok(engine)
}

/// Only in a process that was started for it.
#[test]
fn hammer() {
    let Some([url, limit, key, output]) = told() else { return };
    let seen = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(hammer_key(&url, named_limit(&limit), &key));
    let line = |Seen { at, denied, remaining }| format!("{at} {} {remaining}", u8::from(denied));
    write_seen(&output, seen.map(|seen| seen.into_iter().map(line).collect()));
}

async fn hammer_key(url: &str, limit: Limit, key: &str) -> Result<Vec<Seen>, String> {
    let engine = patient_engine(url)?;
    let limiter = engine.limiter(limit.algorithm().as_lowercase(), limit);
    // Long enough for the burst, and for as much again to come back.
    let end = Instant::now() + Duration::from_millis(1_500);
    let tasks = (0..TASKS).map(|_| {
        let (limiter, key) = (limiter.clone(), key.to_owned());
        tokio::spawn(async move {
            let mut seen = Vec::new();
            while Instant::now() < end {
                let decision = limiter.try_acquire(&key, 1).await.map_err(|why| why.to_string())?;
                let denied = !decision.is_admitted();
                seen.push(Seen { at: decision.at.as_micros(), denied, remaining: decision.remaining });
                // Denials are answered at once; without a breath one task would keep the others from asking.
                if denied {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            Ok::<_, String>(seen)
        })
    });
    let mut all = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        all.extend(task.await.map_err(|why| why.to_string())??);
    }
    Ok(all)
}
