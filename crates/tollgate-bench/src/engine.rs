//! Decisions in process. Each contender decides on the same keys in the same order; the loop that touches and hashes the
//! key and reads the clock is measured alone, in the same round, and subtracted from every figure.

use std::hash::BuildHasher;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::process::Command;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use governor::{DefaultKeyedRateLimiter, Quota};
use throttlecrab::{AdaptiveStore, RateLimiter};
use tollgate::{
    Clock, FixedWindow, LeakyBucket, LeakyMode, Limit, MemoryConfig, MemoryEngine, MemoryLimiter, Micros,
    Rate, SlidingCounter, TokenBucket,
};

use crate::growth;
use crate::instructions::{Checks, count};
use crate::keys::{Popularity, keys, sequence};
use crate::report::{Options, Report, median};

/// What decides. `decide` is called for every request.
trait Contender: Sync {
    #[expect(clippy::ptr_arg, reason = "governor looks keys up as owned strings only")]
    fn decide(&self, key: &String) -> bool;
}

/// The loop itself: the key is touched and hashed, the clock is read, nothing is decided.
struct Bare(std::hash::RandomState);

impl Contender for Bare {
    fn decide(&self, key: &String) -> bool {
        black_box(Instant::now());
        self.0.hash_one(key) & 1 == 0
    }
}

/// Whether, and no more: what the others answer too.
struct Tollgate(MemoryLimiter);

impl Contender for Tollgate {
    fn decide(&self, key: &String) -> bool {
        self.0.take(key, 1).is_admitted()
    }
}

/// With what is left and when it resets, as the service answers.
struct WholeDecision<'a>(&'a MemoryLimiter);

impl Contender for WholeDecision<'_> {
    fn decide(&self, key: &String) -> bool {
        black_box(self.0.try_acquire(key, 1)).is_admitted()
    }
}

struct Governor(DefaultKeyedRateLimiter<String>);

impl Contender for Governor {
    fn decide(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }
}

/// The library is made for one owner; threads take turns.
struct Throttlecrab(Mutex<RateLimiter<AdaptiveStore>>);

impl Contender for Throttlecrab {
    fn decide(&self, key: &String) -> bool {
        let mut limiter = self.0.lock().expect("no thread panics");
        let decided = limiter.rate_limit(key, BURST as i64, PER_MINUTE as i64, 60, 1, SystemTime::now());
        decided.is_ok_and(|(admitted, _)| admitted)
    }
}

/// A burst that no key uses up, so that every request is admitted, as most are in service; and a refill so slow that no key
/// comes back to full, and leaves, while it is measured.
const BURST: u64 = 10_000_000;
const PER_MINUTE: u64 = 1;

fn refill() -> Rate {
    Rate::per_minute(PER_MINUTE)
}

fn token_bucket() -> Limit {
    Limit::TokenBucket(TokenBucket::new(BURST, refill()).expect("valid"))
}

fn tollgate(max_keys: usize, limit: Limit) -> (MemoryEngine, Tollgate) {
    let engine = MemoryEngine::new(MemoryConfig { max_keys }, Clock::system());
    let limiter = engine.limiter("bench", limit).expect("one limit");
    (engine, Tollgate(limiter))
}

fn governor() -> Governor {
    let per_minute = NonZeroU32::new(PER_MINUTE as u32).expect("not zero");
    let burst = NonZeroU32::new(BURST as u32).expect("not zero");
    Governor(DefaultKeyedRateLimiter::dashmap(Quota::per_minute(per_minute).allow_burst(burst)))
}

fn throttlecrab(keys: usize) -> Throttlecrab {
    Throttlecrab(Mutex::new(RateLimiter::new(AdaptiveStore::builder().capacity(keys).build())))
}

/// Nanoseconds a decision, as a thread sees it, with every thread on its own core and its own sequence.
fn measure(contender: &dyn Contender, keys: &[String], sequences: &[Vec<u32>], ops: usize) -> f64 {
    let barrier = Barrier::new(sequences.len());
    let times: Vec<Duration> = std::thread::scope(|scope| {
        let threads: Vec<_> = sequences
            .iter()
            .map(|sequence| {
                scope.spawn(|| {
                    barrier.wait();
                    let start = Instant::now();
                    let mut admitted = 0_u64;
                    for index in sequence.iter().cycle().take(ops) {
                        admitted += u64::from(contender.decide(&keys[*index as usize]));
                    }
                    black_box(admitted);
                    start.elapsed()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let total: Duration = times.iter().sum();
    total.as_nanos() as f64 / times.len() as f64 / ops as f64
}

/// One cell of the table: a number of keys, their popularity, and a number of threads.
struct Scenario {
    keys: usize,
    popularity: Popularity,
    threads: usize,
}

impl Scenario {
    fn name(&self) -> String {
        format!("{} keys, {}, {} thread(s)", self.keys, self.popularity.name(), self.threads)
    }
}

/// Decides in process, beside governor and throttlecrab, and measures the memory of a key.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut report = Report::default();
    let (rounds, ops) = if options.quick { (3, 200_000) } else { (15, 1_000_000) };
    println!(
        "Nanoseconds a decision (token bucket, burst {BURST}, {PER_MINUTE}/min); median of {rounds} interleaved rounds of {ops} decisions a thread."
    );
    println!(
        "net: without the loop's own cost (touching and hashing the key, reading the clock), measured in the same round.\n"
    );
    println!("whole: Tollgate with what is left and when it resets, which the others do not work out.\n");
    println!(
        "{:<34} {:>6} {:>9} {:>7} {:>9} {:>13} {:>7} {:>7}",
        "", "loop", "tollgate", "whole", "governor", "throttlecrab", "gross", "net"
    );
    let mut judged = Vec::new();
    for keys_count in [1_000_000, COUNTED_KEYS] {
        let keys = keys(keys_count);
        for popularity in [Popularity::Zipf, Popularity::Uniform] {
            for threads in [1, 2] {
                let scenario = Scenario { keys: keys_count, popularity, threads };
                if !scenario.name().contains(&options.only) {
                    continue;
                }
                let ratio = compare(&scenario, &keys, rounds, ops, &mut report);
                judged.push((scenario, ratio));
            }
        }
    }
    println!();
    for (scenario, ratio) in judged {
        let name = format!("times as fast as governor, {}", scenario.name());
        match (scenario.keys, scenario.popularity) {
            (1_000_000, Popularity::Zipf) => report.bar(&name, ratio.net, ratio.net >= 2.0, ">= 2, net"),
            (_, Popularity::Zipf | Popularity::Uniform) => report.figure(&name, ratio.net),
        }
    }
    for popularity in [Popularity::Zipf, Popularity::Uniform] {
        let scenario = Scenario { keys: COUNTED_KEYS, popularity, threads: 1 };
        if scenario.name().contains(&options.only) {
            instructions(popularity, if options.quick { 1 } else { 3 }, &mut report)?;
        }
    }
    if options.only.is_empty() {
        memory(&mut report)?;
        growth::run(options.quick, &mut report)?;
    }
    report.finish(options)
}

/// How many times as fast as governor, with and without the loop's own cost.
struct Ratio {
    net: f64,
}

fn compare(scenario: &Scenario, keys: &[String], rounds: usize, ops: usize, report: &mut Report) -> Ratio {
    let sequences: Vec<_> = (0..scenario.threads)
        .map(|thread| sequence(keys.len(), ops.min(4_000_000), scenario.popularity, thread as u64 + 1))
        .collect();
    let bare = Bare(std::hash::RandomState::new());
    let (_engine, ours) = tollgate(keys.len(), token_bucket());
    let theirs = governor();
    for key in keys {
        black_box((ours.decide(key), theirs.decide(key)));
    }
    // A million keys cost it tens of microseconds a decision: one short round says enough.
    let crab = throttlecrab(keys.len());
    let crab_ops = ops / if keys.len() > 100_000 { 200 } else { 10 };
    for key in keys.iter().take(crab_ops) {
        black_box(crab.decide(key));
    }
    let crab_ns = measure(&crab, keys, &sequences, crab_ops);

    let (mut loops, mut our, mut their, mut gross, mut net) = (vec![], vec![], vec![], vec![], vec![]);
    let mut whole = vec![];
    for round in 0..rounds {
        let bare_ns = measure(&bare, keys, &sequences, ops);
        // The first limiter of a round finds other caches than the second, so they take turns.
        let (ours_ns, theirs_ns) = if round % 2 == 0 {
            let first = measure(&ours, keys, &sequences, ops);
            (first, measure(&theirs, keys, &sequences, ops))
        } else {
            let first = measure(&theirs, keys, &sequences, ops);
            (measure(&ours, keys, &sequences, ops), first)
        };
        whole.push(measure(&WholeDecision(&ours.0), keys, &sequences, ops));
        loops.push(bare_ns);
        our.push(ours_ns);
        their.push(theirs_ns);
        gross.push(theirs_ns / ours_ns);
        net.push((theirs_ns - bare_ns) / (ours_ns - bare_ns).max(0.1));
    }
    let ratio = Ratio { net: median(net) };
    let gross = median(gross);
    let [loops, our, their, whole] = [loops, our, their, whole].map(median);
    println!(
        "{:<34} {loops:>6.1} {our:>9.1} {whole:>7.1} {their:>9.1} {crab_ns:>13.1} {gross:>6.2}x {:>6.2}x",
        scenario.name(),
        ratio.net
    );
    for (contender, ns) in [
        ("loop", loops),
        ("tollgate", our),
        ("tollgate whole", whole),
        ("governor", their),
        ("throttlecrab", crab_ns),
    ] {
        report.figure(&format!("{contender} ns, {}", scenario.name()), ns);
    }
    report.figure(&format!("gross ratio, {}", scenario.name()), gross);
    ratio
}

/// Keys of the rows that are judged by instructions. Their times are printed and not judged: they also depend on caches, on stalls of
/// the processor and on other load, which instructions do not show.
const COUNTED_KEYS: usize = 10_000;

/// A contender whose instructions are counted.
#[derive(Clone, Copy, ValueEnum)]
enum Counted {
    Tollgate,
    Governor,
}

/// Makes checks with one contender, on one thread.
#[derive(Args)]
pub(crate) struct Count {
    contender: Counted,
    popularity: Popularity,
    checks: usize,
}

impl Count {
    pub(crate) fn run(&self) -> Result<()> {
        let keys = keys(COUNTED_KEYS);
        // As long for few checks as for many, so that writing it is not in the difference.
        let order = [sequence(keys.len(), 100_000, self.popularity, 1)];
        let check = |contender: &dyn Contender| {
            for key in &keys {
                black_box(contender.decide(key));
            }
            measure(contender, &keys, &order, self.checks);
        };
        match self.contender {
            Counted::Tollgate => check(&tollgate(keys.len(), token_bucket()).1),
            Counted::Governor => check(&governor()),
        }
        Ok(())
    }
}

/// Counts the instructions of a check by Tollgate and by governor, in the same loop over the same keys.
fn instructions(popularity: Popularity, rounds: usize, report: &mut Report) -> Result<()> {
    const CHECKS: Checks = Checks { few: 500_000, many: 2_500_000 };
    let program = std::env::current_exe()?;
    let of = |contender: &str| {
        let counts: Result<Vec<_>> = (0..rounds)
            .map(|_| {
                CHECKS.instructions(|checks| {
                    count(&program, &["count", contender, popularity.name(), &checks.to_string()])
                })
            })
            .collect();
        counts.map(median)
    };
    let (ours, theirs) = (of("tollgate")?, of("governor")?);
    let name = format!("instructions a check, {COUNTED_KEYS} keys, {}", popularity.name());
    println!("         {name}: tollgate {ours:.1}, governor {theirs:.1}");
    report.figure(&format!("{name}, tollgate"), ours);
    report.figure(&format!("{name}, governor"), theirs);
    let ratio = ours / theirs;
    report.bar(&format!("{name}, against governor"), ratio, ratio <= 1.0, "<= 1");
    Ok(())
}

/// Who is filled with keys.
#[derive(Clone, Copy, ValueEnum, Debug)]
enum Filled {
    TokenBucket,
    LeakyBucket,
    FixedWindow,
    SlidingCounter,
    Governor,
    Throttlecrab,
}

/// Fills one contender with keys and prints the bytes a key.
#[derive(Args)]
pub(crate) struct Fill {
    contender: Filled,
    keys: usize,
}

impl Fill {
    pub(crate) fn run(&self) -> Result<()> {
        let keys = keys(self.keys);
        let window = Rate::new(BURST, Micros::from_secs(3_600))?;
        let limit = match self.contender {
            Filled::TokenBucket => token_bucket(),
            Filled::LeakyBucket => Limit::LeakyBucket(LeakyBucket::new(BURST, refill(), LeakyMode::Meter)?),
            Filled::FixedWindow => Limit::FixedWindow(FixedWindow::new(window)?),
            Filled::SlidingCounter => Limit::SlidingCounter(SlidingCounter::new(window, 1, false)?),
            Filled::Governor => return fill(&governor(), &keys),
            Filled::Throttlecrab => return fill(&throttlecrab(1_000), &keys),
        };
        fill(&tollgate(self.keys, limit).1, &keys)
    }
}

fn fill(contender: &dyn Contender, keys: &[String]) -> Result<()> {
    let before = resident_bytes()?;
    for key in keys {
        black_box(contender.decide(key));
    }
    println!("{:.1}", (resident_bytes()? - before) / keys.len() as f64);
    Ok(())
}

fn resident_bytes() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS in /proc/self/status")?;
    let kib: f64 = line.split_whitespace().nth(1).context("VmRSS has no number")?.parse()?;
    Ok(kib * 1024.0)
}

/// What a key costs, as the process grows by it: each contender in a process of its own, with a million keys.
fn memory(report: &mut Report) -> Result<()> {
    println!("\nResident bytes a key, a million keys (the keys themselves not counted):");
    for contender in Filled::value_variants() {
        let value = contender.to_possible_value().context("has a name")?;
        let name = value.get_name();
        // throttlecrab scans its keys as it grows: a tenth of them shows the same bytes a key in bearable time.
        let keys = if matches!(contender, Filled::Throttlecrab) { "100000" } else { "1000000" };
        let output = Command::new(std::env::current_exe()?).args(["fill", name, keys]).output()?;
        let bytes: f64 =
            String::from_utf8(output.stdout)?.trim().parse().context("the fill printed no number")?;
        let label = format!("bytes a key, {name}");
        match contender {
            Filled::Governor | Filled::Throttlecrab => {
                println!("         {label}: {bytes:.1}");
                report.figure(&label, bytes);
            }
            Filled::TokenBucket | Filled::LeakyBucket | Filled::FixedWindow | Filled::SlidingCounter => {
                report.bar(&label, bytes, bytes <= 48.0, "<= 48");
            }
        }
    }
    Ok(())
}
