//! Decisions by leases, in process, on a real Redis: how many, how few of them reach the store, and at what price in exactness.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use serde_json::json;
use tollgate::{
    Ask, Basis, Clock, Consistency, GuardConfig, LeaseTerms, Limit, LimitSettings, Limiter, Rate,
    RedisConfig, RedisEngine, SharedEngine, TokenBucket,
};
use tollgate_testkit::{Bound, RedisServer};

use crate::keys::{Popularity, keys, sequence};
use crate::report::{Options, Report, median};

/// The number of rounds, and the length of each.
type Scenario = fn(&mut Report, usize, Duration) -> Result<()>;

/// Measures and judges.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut report = Report::default();
    let rounds = if options.quick { 1 } else { 5 };
    let secs = Duration::from_secs(if options.quick { 1 } else { 4 });
    let scenarios: [(&str, Scenario); 3] =
        [("hot keys", hot_keys), ("zipf", zipf), ("side by side", side_by_side)];
    for (name, scenario) in scenarios {
        if name.contains(&options.only) {
            println!("\n{name}");
            scenario(&mut report, rounds, secs)?;
        }
    }
    report.finish(options)
}

/// A node: an engine of its own on the store.
pub(crate) struct Node {
    pub(crate) engine: RedisEngine,
    pub(crate) guard: SharedEngine,
}

impl Node {
    fn limiter(&self, limit: Limit, consistency: Consistency) -> Result<Limiter> {
        let settings = LimitSettings { consistency, ..LimitSettings::default() };
        Ok(self.guard.limiter("bench", limit, settings)?)
    }
}

pub(crate) async fn node(server: &RedisServer) -> Result<Node> {
    let mut config = RedisConfig::new(format!("redis://{}", server.tcp_address()).parse()?);
    config.deadline = Duration::from_secs(1);
    let (engine, driver) = RedisEngine::new(config);
    tokio::spawn(driver.run());
    let (guard, driver) = SharedEngine::new(engine.clone(), GuardConfig::default(), Clock::system());
    tokio::spawn(driver.run());
    engine.connected(Duration::from_secs(5)).await?;
    Ok(Node { engine, guard })
}

/// Nodes that know of each other.
pub(crate) async fn nodes(server: &RedisServer, count: u32) -> Result<Vec<Node>> {
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(node(server).await?);
    }
    let end = Instant::now() + Duration::from_secs(10);
    while all.iter().any(|node| node.engine.nodes() != Some(count)) {
        ensure!(Instant::now() < end, "the nodes do not find each other");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(all)
}

pub(crate) fn bucket(capacity: u64, per_second: u64) -> Result<Limit> {
    Ok(Limit::TokenBucket(TokenBucket::new(capacity, Rate::per_second(per_second))?))
}

/// Two threads, and nothing else of this process.
pub(crate) fn on_two_threads<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(work)
}

/// What one task has seen.
struct Seen {
    decisions: u64,
    leased: u64,
    admitted: u64,
    took: Histogram<u64>,
}

impl Seen {
    fn new() -> Result<Self> {
        Ok(Self { decisions: 0, leased: 0, admitted: 0, took: Histogram::new(3)? })
    }

    fn add(&mut self, other: &Self) -> Result<()> {
        self.decisions += other.decisions;
        self.leased += other.leased;
        self.admitted += other.admitted;
        Ok(self.took.add(&other.took)?)
    }
}

const HOT_KEYS: usize = 100;
/// Reading the clock twice takes as long as a decision: only some are timed.
const TIMED_EVERY: u64 = 64;

/// As many decisions as two threads make, on keys whose limit is never reached.
fn hot_keys(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let limit = bucket(10_000_000, 10_000_000)?;
    let life = LeaseTerms::new(&limit, Consistency::Lease).map(|terms| terms.life().get() / 1_000)?;
    println!("  {HOT_KEYS} keys, 10,000,000/s and as much at once for each; a lease lasts {life} ms");
    let (mut rates, mut shares, mut late) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let server = RedisServer::build().tcp().start();
        let (seen, calls) = on_two_threads(async {
            let node = node(&server).await?;
            let limiter = node.limiter(limit, Consistency::Lease)?;
            let stop = Arc::new(AtomicBool::new(false));
            let tasks: Vec<_> =
                (0..2).map(|number| tokio::spawn(ask(limiter.clone(), number, Arc::clone(&stop)))).collect();
            // The first moments are those in which demand is learned.
            tokio::time::sleep(duration).await;
            stop.store(true, Ordering::Relaxed);
            let mut all = Seen::new()?;
            for task in tasks {
                all.add(&task.await??)?;
            }
            Ok((all, node.engine.stats().calls))
        })?;
        ensure!(seen.admitted == seen.decisions, "a limit that is never reached was reached");
        let rate = seen.decisions as f64 / duration.as_secs_f64();
        let share = calls as f64 / seen.decisions as f64 * 100.0;
        let p99 = seen.took.value_at_quantile(0.99) as f64 / 1e6;
        println!(
            "  {rate:>9.0} decisions/s, {:.3} % by the store in {calls} calls, p50 {:.0} ns, p99 {:.4} ms, p99.99 {:.3} ms",
            (seen.decisions - seen.leased) as f64 / seen.decisions as f64 * 100.0,
            seen.took.value_at_quantile(0.5),
            p99,
            seen.took.value_at_quantile(0.9999) as f64 / 1e6
        );
        rates.push(rate);
        shares.push(share);
        late.push(p99);
    }
    let (rate, share, p99) = (median(rates), median(shares), median(late));
    report.bar("100 hot keys, decisions/s", rate, rate >= 2_000_000.0, ">= 2,000,000");
    report.bar("100 hot keys, % of decisions that reach Redis", share, share <= 1.0, "<= 1");
    report.bar("100 hot keys, p99 of a decision, ms", p99, p99 < 1.0, "< 1");
    Ok(())
}

/// One of the two threads.
async fn ask(limiter: Limiter, number: u64, stop: Arc<AtomicBool>) -> Result<Seen> {
    let keys = keys(HOT_KEYS);
    let order = sequence(HOT_KEYS, 1 << 16, Popularity::Uniform, number);
    let mut seen = Seen::new()?;
    for index in order.iter().cycle() {
        let key = &keys[*index as usize];
        let begun = seen.decisions.is_multiple_of(TIMED_EVERY).then(Instant::now);
        let verdict = limiter.acquire(key, Ask::of(1)).await;
        if let Some(begun) = begun {
            seen.took.record(begun.elapsed().as_nanos() as u64)?;
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        seen.decisions += 1;
        seen.leased += u64::from(verdict.basis == Basis::Leased);
        seen.admitted += u64::from(verdict.is_admitted());
        // Answers that are there at once would keep the others from their turn.
        tokio::task::consume_budget().await;
    }
    Ok(seen)
}

const ZIPF_KEYS: usize = 200_000;
const ZIPF_RATE: f64 = 20_000.0;

/// A few hot keys and a long tail: which share of the decisions the store is not asked for, beside what can be had at best.
fn zipf(report: &mut Report, _: usize, duration: Duration) -> Result<()> {
    // Long enough for what is learned of the keys.
    let duration = duration * 3;
    let limit = bucket(5_000_000, 1_000_000)?;
    let life = LeaseTerms::new(&limit, Consistency::Lease).map(|terms| terms.life().get() as f64 / 1e6)?;
    println!("  {ZIPF_RATE:.0} requests/s on {ZIPF_KEYS} keys, Zipf 1.0; a lease lasts {life} s");
    for count in [1_u32, 3] {
        let server = RedisServer::build().tcp().start();
        let shares = on_two_threads(async {
            let nodes = nodes(&server, count).await?;
            let mut tasks = Vec::new();
            for (number, node) in nodes.iter().enumerate() {
                let limiter = node.limiter(limit, Consistency::Lease)?;
                let per_second = ZIPF_RATE / f64::from(count);
                tasks.push(tokio::spawn(steadily(limiter, number as u64, per_second, duration)));
            }
            let mut all = Seen::new()?;
            for task in tasks {
                all.add(&task.await??)?;
            }
            Ok((
                all.leased as f64 / all.decisions as f64,
                all.decisions as f64 / duration.as_secs_f64() * 2.0,
            ))
        })?;
        let (share, rate) = shares;
        let (plain, ahead) = best_share(f64::from(count), life, rate);
        println!(
            "  {count} node(s): {:.1} % local at {rate:.0}/s; the formula says {:.1} %, {:.1} % with permits fetched ahead",
            share * 100.0,
            plain * 100.0,
            ahead * 100.0
        );
        report.figure(
            &format!("zipf, {count} node(s), local share"),
            json!({"measured": share, "formula": plain, "formula, fetched ahead": ahead, "requests/s": rate}),
        );
    }
    Ok(())
}

/// Requests at a constant rate, whatever becomes of them. Only the second half counts.
async fn steadily(limiter: Limiter, seed: u64, per_second: f64, duration: Duration) -> Result<Seen> {
    let keys = Arc::new(keys(ZIPF_KEYS));
    let order =
        sequence(ZIPF_KEYS, (per_second * duration.as_secs_f64()) as usize + 1, Popularity::Zipf, seed);
    let mut seen = Seen::new()?;
    let begun = Instant::now();
    let mut running = tokio::task::JoinSet::new();
    let mut sent = 0;
    while begun.elapsed() < duration {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let due = (begun.elapsed().as_secs_f64() * per_second) as usize;
        while sent < due.min(order.len()) {
            let (limiter, keys, index) = (limiter.clone(), Arc::clone(&keys), order[sent] as usize);
            let counts = begun.elapsed() >= duration / 2;
            running.spawn(async move { (limiter.acquire(&keys[index], Ask::of(1)).await, counts) });
            sent += 1;
        }
        while let Some(verdict) = running.try_join_next() {
            let (verdict, counts) = verdict?;
            seen.decisions += u64::from(counts);
            seen.leased += u64::from(counts && verdict.basis == Basis::Leased);
        }
    }
    Ok(seen)
}

/// What a lease for each key that is asked for often enough can save: without fetching ahead each of them holds up one decision.
fn best_share(nodes: f64, life_secs: f64, per_second: f64) -> (f64, f64) {
    let sum: f64 = (1..=ZIPF_KEYS).map(|rank| 1.0 / rank as f64).sum();
    (1..=ZIPF_KEYS).fold((0.0, 0.0), |(plain, ahead), rank| {
        let share = 1.0 / rank as f64 / sum;
        let asked = share * per_second * life_secs / nodes;
        (plain + share * (1.0 - 1.0 / asked).max(0.0), ahead + if asked > 1.0 { share } else { 0.0 })
    })
}

const SIDE_NODES: u32 = 8;
const SIDE_PERMITS: u64 = 10_000;
/// Tasks that each ask, wait for the answer and ask again.
const SIDE_TASKS: u64 = 256;

/// The same limit in three ways: never reached, as fast as it is answered; and at three times what it admits.
fn side_by_side(report: &mut Report, _: usize, duration: Duration) -> Result<()> {
    let limit = bucket(SIDE_PERMITS, SIDE_PERMITS)?;
    println!("  never reached: {HOT_KEYS} keys, one node, {SIDE_TASKS} tasks on two threads");
    println!(
        "  at its end: one key, {SIDE_PERMITS}/s and as much at once, {SIDE_NODES} nodes, {} requests/s",
        SIDE_PERMITS * 3
    );
    let mut table = vec![
        "| | never reached: decisions/s | calls per decision | at its end: calls per decision | excess | promised | utilisation |"
            .to_owned(),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |".to_owned(),
    ];
    for consistency in Consistency::ALL {
        let name = consistency.as_str();
        let (free, free_calls) = never_reached(consistency, duration)?;
        let Exhausted { mut admitted, decisions, calls, promised } =
            at_its_end(limit, consistency, duration * 3)?;
        let bound = Bound { burst: SIDE_PERMITS, permits: SIDE_PERMITS, period_us: 1_000_000 };
        let excess = bound.excess(&mut admitted).permits;
        let used = admitted.len() as f64 / (SIDE_PERMITS as f64 * (1.0 + (duration * 3).as_secs_f64()));
        let calls = calls as f64 / decisions as f64;
        table.push(format!(
            "| `{name}` | {free:.0} | {free_calls:.5} | {calls:.3} | {excess} | {promised} | {:.1} % |",
            used * 100.0
        ));
        report.figure(
            &format!("side by side, {name}"),
            json!({"never reached, decisions/s": free, "never reached, calls per decision": free_calls,
                   "at its end, calls per decision": calls, "excess": excess, "promised": promised,
                   "utilisation": used}),
        );
        report.bar(
            &format!("{name}: excess, permits"),
            excess as f64,
            excess <= promised + NOISE,
            &format!("<= {promised}, and {NOISE} for clocks that differ"),
        );
    }
    table.iter().for_each(|line| println!("  {line}"));
    Ok(())
}

/// Decisions a second, and calls for each of them, on keys whose limit is never reached.
fn never_reached(consistency: Consistency, duration: Duration) -> Result<(f64, f64)> {
    let server = RedisServer::build().tcp().start();
    on_two_threads(async {
        let node = node(&server).await?;
        let limiter = node.limiter(bucket(10_000_000, 10_000_000)?, consistency)?;
        let stop = Arc::new(AtomicBool::new(false));
        let tasks: Vec<_> = (0..SIDE_TASKS)
            .map(|number| tokio::spawn(ask(limiter.clone(), number, Arc::clone(&stop))))
            .collect();
        tokio::time::sleep(duration).await;
        stop.store(true, Ordering::Relaxed);
        let mut all = Seen::new()?;
        for task in tasks {
            all.add(&task.await??)?;
        }
        let rate = all.decisions as f64 / duration.as_secs_f64();
        Ok((rate, node.engine.stats().calls as f64 / all.decisions as f64))
    })
}

/// What was seen of a key that is asked for more often than it can be admitted.
struct Exhausted {
    /// When, and how many.
    admitted: Vec<(u64, u64)>,
    decisions: u64,
    calls: u64,
    promised: u64,
}

fn at_its_end(limit: Limit, consistency: Consistency, duration: Duration) -> Result<Exhausted> {
    let server = RedisServer::build().tcp().start();
    on_two_threads(async {
        let nodes = nodes(&server, SIDE_NODES).await?;
        let calls = || nodes.iter().map(|node| node.engine.stats().calls).sum::<u64>();
        let before = calls();
        let per_node = SIDE_PERMITS as f64 * 3.0 / f64::from(SIDE_NODES);
        let mut tasks = Vec::new();
        for node in &nodes {
            let limiter = node.limiter(limit, consistency)?;
            tasks.push(tokio::spawn(admissions(per_node, duration, move || admitted_at(limiter.clone()))));
        }
        let (mut admitted, mut decisions) = (Vec::new(), 0);
        for task in tasks {
            let (times, count) = task.await??;
            admitted.extend(times);
            decisions += count;
        }
        let promised = nodes.iter().map(|node| node.guard.lease_stats().overshoot).max().unwrap_or(0);
        Ok(Exhausted { admitted, decisions, calls: calls() - before, promised })
    })
}

/// What flows in the millisecond by which the store's clock and this process's may differ.
const NOISE: u64 = SIDE_PERMITS / 1_000;

/// When a request was admitted, by the clock that it was decided on.
async fn admitted_at(limiter: Limiter) -> Option<u64> {
    let verdict = limiter.acquire("hot", Ask::of(1)).await;
    verdict.is_admitted().then_some(verdict.decision.at.as_micros())
}

/// Requests at a constant rate: when they were admitted, and how many were decided.
pub(crate) async fn admissions<F: Future<Output = Option<u64>> + Send + 'static>(
    per_second: f64,
    duration: Duration,
    ask: impl Fn() -> F,
) -> Result<(Vec<(u64, u64)>, u64)> {
    let (mut admitted, mut decided, mut sent) = (Vec::new(), 0, 0);
    let begun = Instant::now();
    let mut running = tokio::task::JoinSet::new();
    while begun.elapsed() < duration {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let due = (begun.elapsed().as_secs_f64() * per_second) as u64;
        while sent < due {
            running.spawn(ask());
            sent += 1;
        }
        while let Some(admitted_at) = running.try_join_next() {
            decided += 1;
            admitted.extend(admitted_at?.map(|at_us| (at_us, 1)));
        }
    }
    Ok((admitted, decided))
}
