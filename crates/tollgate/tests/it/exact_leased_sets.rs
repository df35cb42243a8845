//! Many nodes whose requests have one to four limits that they borrow from, some shared and some their own, and one that is decided by
//! the store: all nodes together never exceed a limit, in any interval.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tollgate::{
    Basis, Check, Clock, Consistency, Engine, FailureMode, GuardConfig, Limit, LimitSettings, Limiter,
    OnFailure, Rate, SharedEngine, TokenBucket,
};
use tollgate_testkit::{Bound, Cluster, Random, RedisServer, SentinelTrio};

use crate::worker::{Worker, patient_engine, told, write_seen};

const NODES: usize = 4;
const TASKS: u64 = 16;
/// Subjects that all nodes share, and those of each node.
const SHARED: u64 = 2;
const OWN: u64 = 2;
/// Burst and rate of each limit; the last one is not lent.
const LIMITS: [(u64, u64); 5] = [(900, 3_000), (1_500, 2_000), (700, 5_000), (2_000, 4_000), (800, 2_500)];
const STRICT: usize = 4;

/// Permits that were taken from one limit.
#[derive(Clone, Copy)]
struct Take {
    limit: usize,
    subject: u64,
    cost: u64,
    at_us: u64,
    is_leased: bool,
}

fn limit(number: usize) -> Limit {
    let (burst, rate) = LIMITS[number];
    Limit::TokenBucket(TokenBucket::new(burst, Rate::per_second(rate)).unwrap())
}

fn subject(number: u64, in_one_slot: bool) -> String {
    if in_one_slot { format!("{{all}}:{number}") } else { format!("{{{number}}}") }
}

/// Only in a process that was started for it.
#[test]
fn hammer_leased_sets() {
    let Some([url, number, slots, output]) = told() else { return };
    let (number, in_one_slot) = (number.parse().unwrap(), slots == "one slot");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let seen = runtime.block_on(hammer(&url, number, in_one_slot));
    let line = |it: &Take| {
        format!("{} {} {} {} {}", it.limit, it.subject, it.cost, it.at_us, u8::from(it.is_leased))
    };
    write_seen(&output, seen.map(|takes| takes.iter().map(line).collect()));
}

async fn hammer(url: &str, node: u64, in_one_slot: bool) -> Result<Vec<Take>, String> {
    let (shared, driver) = SharedEngine::new(patient_engine(url)?, GuardConfig::default(), Clock::system());
    tokio::spawn(driver.run());
    let engine = Engine::Shared(shared.clone());
    let limiters: Vec<Limiter> = (0..LIMITS.len())
        .map(|number| {
            let consistency = if number == STRICT { Consistency::Strict } else { Consistency::Lease };
            let on_failure = OnFailure { mode: FailureMode::Closed, ..OnFailure::default() };
            let settings = LimitSettings { consistency, on_failure, ..LimitSettings::default() };
            shared.limiter(&format!("limit-{number}"), limit(number), settings).unwrap()
        })
        .collect();
    let end = Instant::now() + Duration::from_millis(2_500);
    let tasks = (0..TASKS).map(|task| {
        let (engine, limiters) = (engine.clone(), limiters.clone());
        tokio::spawn(async move {
            let mut random = Random::new(node * 1_000 + task);
            let mut takes = Vec::new();
            while Instant::now() < end {
                let parts = parts(&mut random, node);
                let subjects: Vec<_> = parts.iter().map(|it| subject(it.1, in_one_slot)).collect();
                let checks: Vec<_> = parts
                    .iter()
                    .zip(&subjects)
                    .map(|(it, subject)| Check::new(limiters[it.0].id(), subject, it.2))
                    .collect();
                let verdicts = engine.decide(&checks).await;
                let admitted = verdicts.iter().all(|it| it.is_some_and(|it| it.is_admitted()));
                for ((limit, subject, cost), verdict) in parts.into_iter().zip(&verdicts) {
                    let Some(verdict) = verdict.filter(|_| admitted) else { continue };
                    let is_leased = match verdict.basis {
                        Basis::Leased => true,
                        Basis::Exact => false,
                        other => return Err(format!("decided without the store: {other:?}")),
                    };
                    let at_us = verdict.decision.at.as_micros();
                    takes.push(Take { limit, subject, cost, at_us, is_leased });
                }
                if admitted {
                    tokio::task::yield_now().await;
                } else {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            Ok::<_, String>(takes)
        })
    });
    let mut all = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        all.extend(task.await.map_err(|why| why.to_string())??);
    }
    shared.give_leases_back().await;
    Ok(all)
}

/// Limit, subject and cost of one to four different limits.
fn parts(random: &mut Random, node: u64) -> Vec<(usize, u64, u64)> {
    let count = 1 + random.below(4);
    let mut parts: Vec<(usize, u64, u64)> = Vec::new();
    while (parts.len() as u64) < count {
        // Most requests have leased limits only.
        let most = if random.one_in(8) { LIMITS.len() } else { STRICT };
        let limit = random.below(most as u64) as usize;
        if parts.iter().all(|it| it.0 != limit) {
            let own = SHARED + node * OWN + random.below(OWN);
            let subject = if random.one_in(2) { random.below(SHARED) } else { own };
            parts.push((limit, subject, 1 + random.below(2)));
        }
    }
    parts
}

/// Permits that may be dated a little too early or too late: the times of leases are read from the nodes' clocks, those of the store from
/// its own.
fn noise(rate: u64) -> u64 {
    2 + rate / 1_000
}

fn judge(what: &str, url: &str, slots: &str) {
    let directory = tempfile::tempdir().unwrap();
    let workers: Vec<_> = (0..NODES)
        .map(|number| {
            let told = format!("{url}\n{number}\n{slots}");
            let test = "exact_leased_sets::hammer_leased_sets";
            Worker::start_as(test, directory.path(), number, &told, 0)
        })
        .collect();
    let mut takes: HashMap<(u64, u64), Vec<(u64, u64)>> = HashMap::new();
    let (mut leased, mut by_store) = (0_u64, 0_u64);
    for line in workers.into_iter().flat_map(Worker::finish_lines) {
        let [limit, subject, cost, at_us, is_leased] = line[..] else { panic!("{line:?}") };
        takes.entry((limit, subject)).or_default().push((at_us, cost));
        (leased, by_store) = (leased + is_leased, by_store + 1 - is_leased);
    }
    let mut worst = 0;
    for ((number, subject), admissions) in &mut takes {
        let (burst, rate) = LIMITS[*number as usize];
        let excess = Bound { burst, permits: rate, period_us: 1_000_000 }.excess(admissions);
        assert!(
            excess.permits <= noise(rate),
            "{what}: limit {number} of subject {subject} was exceeded: {excess:?}"
        );
        worst = worst.max(excess.permits);
    }
    println!("{what}: {leased} takes by leases, {by_store} by the store, excess at most {worst}");
    assert!(leased > 1_000 && by_store > 500, "{what}: {leased} by leases, {by_store} by the store");
}

#[test]
fn on_one_server() {
    let server = RedisServer::start();
    judge("standalone", &server.url(), "any slot");
}

#[test]
fn on_a_primary_that_sentinels_know() {
    let trio = SentinelTrio::start();
    judge("Sentinel", &trio.url(), "any slot");
}

#[test]
fn in_one_slot_of_a_cluster() {
    let cluster = Cluster::start();
    judge("Cluster, one slot", &cluster.url(), "one slot");
}

#[test]
fn in_several_slots_of_a_cluster() {
    let cluster = Cluster::start();
    judge("Cluster, several slots", &cluster.url(), "any slot");
}
