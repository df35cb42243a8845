//! What a check costs as the table grows from ten thousand keys to ten million: in time, beside one bare read of as much
//! memory, and in cache lines, as cachegrind counts them.
//!
//! Keys are written anew for each request, so that only the table grows and not what the benchmark itself touches.

use std::fmt::Write;
use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use tollgate::{Clock, Limit, MemoryConfig, MemoryEngine, MemoryLimiter, Rate, Timestamp, TokenBucket};

use crate::keys::Random;
use crate::report::{Report, median};

const SIZES: [u64; 4] = [10_000, 100_000, 1_000_000, 10_000_000];

/// A table with its maximum and its current number of keys.
fn filled(max_keys: u64, keys: u64, clock: Clock) -> (MemoryEngine, MemoryLimiter) {
    let limit = Limit::TokenBucket(TokenBucket::new(1_000_000, Rate::per_minute(1)).expect("valid"));
    let engine = MemoryEngine::new(MemoryConfig { max_keys: max_keys as usize }, clock);
    let limiter = engine.limiter("growth", limit).expect("one limit");
    let mut text = String::new();
    for key in 0..keys {
        limiter.take(write_key(&mut text, key), 1);
    }
    (engine, limiter)
}

fn write_key(text: &mut String, key: u64) -> &str {
    text.clear();
    // Writing to a string does not fail.
    let _ = write!(text, "user:{key:016x}");
    text
}

/// Nanoseconds a check of any key.
fn check_ns(limiter: &MemoryLimiter, keys: u64, ops: u64, random: &mut Random) -> f64 {
    let mut text = String::new();
    let start = Instant::now();
    for _ in 0..ops {
        black_box(limiter.take(write_key(&mut text, random.next() % keys), 1));
    }
    start.elapsed().as_nanos() as f64 / ops as f64
}

/// Nanoseconds a read of any line of as much memory, the next one known only when the last one has come.
fn probe_ns(memory: &[[u64; 8]], ops: u64, random: &mut Random) -> f64 {
    let start = Instant::now();
    let mut last = 0;
    for _ in 0..ops {
        last = memory[((random.next() ^ last) % memory.len() as u64) as usize][0];
    }
    black_box(last);
    start.elapsed().as_nanos() as f64 / ops as f64
}

pub(crate) fn run(quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, ops) = if quick { (3, 200_000) } else { (9, 1_000_000) };
    println!(
        "\nGrowth: nanoseconds a check of any key, beside one bare read of a table as large; median of {rounds} rounds."
    );
    println!("{:>12} {:>9} {:>12} {:>12}", "keys", "check", "bare read", "table MiB");
    let mut costs = Vec::new();
    for keys in SIZES {
        let (engine, limiter) = filled(keys, keys, Clock::system());
        let bytes = engine.stats().bytes;
        let memory = vec![[0_u64; 8]; bytes as usize / 64];
        let mut random = Random(keys);
        // Zeroed memory is one page until it is written.
        let memory = touched(memory);
        let (mut checks, mut probes) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            checks.push(check_ns(&limiter, keys, ops, &mut random));
            probes.push(probe_ns(&memory, ops, &mut random));
        }
        let (check, probe) = (median(checks), median(probes));
        println!("{keys:>12} {check:>9.1} {probe:>12.1} {:>12.1}", bytes as f64 / 1_048_576.0);
        report.figure(&format!("check ns, {keys} keys"), check);
        report.figure(&format!("bare read ns, {keys} keys"), probe);
        costs.push((check, probe));
    }
    let (Some(first), Some(last)) = (costs.first(), costs.last()) else { return Ok(()) };
    let growth = (last.0 - first.0) / last.1;
    report.bar("growth from 10k to 10M keys, in bare reads", growth, growth <= 2.0, "<= 2");
    lines(report)
}

fn touched(mut memory: Vec<[u64; 8]>) -> Vec<[u64; 8]> {
    for line in &mut memory {
        line[1] = 1;
    }
    memory
}

/// Keys that the tables watched by cachegrind are made for: the same number of parts, however many keys are in them.
const TOUCHED_MAX: u64 = 1_000_000;

/// Makes checks, for cachegrind to watch.
#[derive(Args)]
pub(crate) struct Touch {
    keys: u64,
    checks: u64,
}

impl Touch {
    pub(crate) fn run(&self) -> Result<()> {
        let (_engine, limiter) =
            filled(TOUCHED_MAX, self.keys, Clock::manual(Timestamp::from_micros(1_763_000_000_000_000)));
        check_ns(&limiter, self.keys, self.checks, &mut Random(1));
        Ok(())
    }
}

/// Lines that a check brings in, by cachegrind, with caches so small that no line of the table survives until its next
/// use. Filling the table costs lines too, a few more or fewer each time, because hashes are random: so there are many
/// checks, and what filling alone costs is taken off.
fn lines(report: &mut Report) -> Result<()> {
    println!("\nCache lines that a check brings into a cache of 16 KiB (cachegrind, some minutes):");
    let mut counts = Vec::new();
    for keys in [10_000, TOUCHED_MAX] {
        let checks = 1_000_000.max(3 * keys);
        let (with, without) = (misses(keys, checks)?, misses(keys, 0)?);
        let count = (with - without) as f64 / checks as f64;
        println!("{keys:>12} keys: {count:.2}");
        report.figure(&format!("lines a check, {keys} keys"), count);
        counts.push(count);
    }
    let growth = counts[1] / counts[0];
    // A tenth of a line is what the randomness of filling leaves uncertain.
    report.bar("lines a check, at 1M keys / at 10k keys", growth, growth <= 1.25, "constant: <= 1.25");
    Ok(())
}

/// Data misses of the last level.
fn misses(keys: u64, checks: u64) -> Result<i64> {
    let mut command = Command::new("valgrind");
    command.args(["--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null"]);
    command.args(["--D1=8192,4,64", "--LL=16384,8,64"]).arg(std::env::current_exe()?);
    let output = command
        .args(["touch", &keys.to_string(), &checks.to_string()])
        .output()
        .context("cannot run valgrind")?;
    ensure!(output.status.success(), "valgrind ended with {}", output.status);
    let text = String::from_utf8(output.stderr)?;
    let line =
        text.lines().find(|line| line.contains("LLd misses:")).context("cachegrind counted nothing")?;
    let number = line
        .split("LLd misses:")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next())
        .context("no number")?;
    Ok(number.replace(',', "").parse()?)
}
