//! Primaries that change under load: decisions go on by themselves, and what is not concerned does not notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tollgate::{Backend, Check, Decision, Limit, Rate, RateLimiter, RedisEngine, StoreError, TokenBucket};
use tollgate_testkit::{Cluster, SentinelTrio};

use crate::exact::judge;
use crate::store::engine_with;
use crate::worker::Seen;

/// Blocking fixtures on this thread, the load on others.
fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(test);
}

/// A limit that the load does not reach, and one that it does.
fn ample() -> Limit {
    Limit::TokenBucket(TokenBucket::new(1_000, Rate::per_second(1_000)).unwrap())
}

fn tight() -> Limit {
    Limit::TokenBucket(TokenBucket::new(100, Rate::per_second(50)).unwrap())
}

/// One check of a load: when it was answered, and how.
type Answered = (Instant, Result<Decision, StoreError>);

/// A task that asks about a key until told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    tasks: Vec<(String, JoinHandle<Vec<Answered>>)>,
}

impl Load {
    fn on(engine: &RedisEngine, limit: Limit, keys: &[String]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let limiter = engine.limiter("token_bucket", limit);
        let task = |key: &String| {
            let (limiter, name, stop) = (limiter.clone(), key.clone(), Arc::clone(&stop));
            let task = tokio::spawn(async move {
                let mut seen = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let answer = limiter.try_acquire(&name, 1).await;
                    seen.push((Instant::now(), answer));
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                seen
            });
            (key.clone(), task)
        };
        let tasks = keys.iter().map(task).collect();
        Self { stop, tasks }
    }

    async fn finish(self) -> Vec<(String, Vec<Answered>)> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for (key, task) in self.tasks {
            all.push((key, task.await.unwrap()));
        }
        all
    }
}

fn keys(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("user:{number}")).collect()
}

/// The longest time without a decision, of one key.
fn outage(seen: &[Answered]) -> Duration {
    let decided: Vec<_> = seen.iter().filter(|(_, answer)| answer.is_ok()).map(|(at, _)| *at).collect();
    decided.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

fn failures(seen: &[Answered]) -> usize {
    seen.iter().filter(|(_, answer)| answer.is_err()).count()
}

fn ends_well(key: &str, seen: &[Answered]) {
    let tail = &seen[seen.len() - seen.len().min(20)..];
    for (_, answer) in tail {
        assert!(answer.is_ok(), "{key} does not go on: {answer:?}");
    }
}

/// Waits until a key is decided on again, as it must be by itself.
async fn goes_on(engine: &RedisEngine, key: &str) {
    let (limiter, start) = (engine.limiter("token_bucket", ample()), Instant::now());
    while let Err(why) = limiter.try_acquire(key, 1).await {
        assert!(start.elapsed() < Duration::from_secs(10), "{key} does not go on: {why}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Long enough for a good number of decisions after a change.
const AFTER: Duration = Duration::from_millis(500);

#[test]
fn a_new_primary_is_followed_by_itself() {
    run(async {
        let mut trio = SentinelTrio::start();
        let engine = engine_with(&trio.url(), |config| config.deadline = Duration::from_millis(500));
        engine.connected(Duration::from_secs(10)).await.unwrap();
        let load = Load::on(&engine, ample(), &keys(10));
        tokio::time::sleep(AFTER).await;
        trio.failover();
        goes_on(&engine, "user:0").await;
        tokio::time::sleep(AFTER).await;
        let seen = load.finish().await;
        let longest = seen.iter().map(|(_, seen)| outage(seen)).max().unwrap();
        println!("SENTINEL FAILOVER: at most {longest:?} without a decision");
        seen.iter().for_each(|(key, seen)| ends_well(key, seen));

        let load = Load::on(&engine, ample(), &keys(10));
        tokio::time::sleep(AFTER).await;
        let killed = trio.kill_primary();
        trio.wait_for_another_primary(killed);
        goes_on(&engine, "user:0").await;
        tokio::time::sleep(AFTER).await;
        let seen = load.finish().await;
        let longest = seen.iter().map(|(_, seen)| outage(seen)).max().unwrap();
        println!("kill -9 of the primary: at most {longest:?} without a decision");
        seen.iter().for_each(|(key, seen)| ends_well(key, seen));
    });
}

#[test]
fn a_cluster_that_loses_a_primary_goes_on_and_only_its_keys_notice() {
    run(async {
        let mut cluster = Cluster::start();
        let engine = engine_with(&cluster.url(), |config| config.deadline = Duration::from_secs(1));
        let (keys, slot) = (keys(30), slot_of(&cluster, "user:0"));
        engine.connected(Duration::from_secs(10)).await.unwrap();
        let load = Load::on(&engine, ample(), &keys);
        tokio::time::sleep(AFTER).await;
        let lost = cluster.primary_of(slot);
        let of_lost: Vec<_> =
            keys.iter().map(|key| cluster.primary_of(slot_of(&cluster, key)) == lost).collect();
        assert!(of_lost.contains(&true) && of_lost.contains(&false));
        cluster.kill_primary_of(slot);
        let found = cluster.primary_of(slot);
        assert_ne!(found, lost);
        for key in &keys {
            goes_on(&engine, key).await;
        }
        tokio::time::sleep(AFTER).await;
        let seen = load.finish().await;
        let mut longest = Duration::ZERO;
        for ((key, seen), of_lost) in seen.iter().zip(of_lost) {
            ends_well(key, seen);
            if of_lost {
                longest = longest.max(outage(seen));
            } else {
                assert_eq!(failures(seen), 0, "{key} lives elsewhere and is not concerned");
            }
        }
        println!("kill -9 of a primary in a cluster: at most {longest:?} without a decision, others none");
    });
}

#[test]
fn slots_move_under_load_without_an_error_and_without_excess() {
    run(async {
        let cluster = Cluster::start();
        let engine = engine_with(&cluster.url(), |config| config.deadline = Duration::from_secs(5));
        engine.connected(Duration::from_secs(10)).await.unwrap();
        // All in one slot, as the limits of one subject are.
        let keys: Vec<String> = (0..10).map(|number| format!("{number}:{{subject}}")).collect();
        let slot = slot_of(&cluster, &keys[0]);
        let (one, other) = (engine.limiter("one", ample()), engine.limiter("other", ample()));
        let load = Load::on(&engine, tight(), &keys);
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, several_engine) = (Arc::clone(&stop), engine.clone());
        let several = tokio::spawn(async move {
            let mut decided = 0;
            while !stopped.load(Ordering::Relaxed) {
                several_engine
                    .decide(&[Check::new(one.id(), "{subject}", 1), Check::new(other.id(), "{subject}", 1)])
                    .await
                    .unwrap();
                decided += 1;
            }
            decided
        });
        tokio::time::sleep(AFTER).await;
        for _ in 0..2 {
            let here = cluster.primary_of(slot);
            let there = cluster.primary_of((slot + 8_000) % 16_384);
            assert_ne!(here, there);
            cluster.begin_move(slot, there);
            tokio::time::sleep(AFTER).await;
            cluster.move_keys(slot);
            tokio::time::sleep(AFTER).await;
            cluster.end_move(slot);
            tokio::time::sleep(AFTER).await;
            cluster.move_slot(slot, here);
        }
        tokio::time::sleep(AFTER).await;
        stop.store(true, Ordering::Relaxed);
        let decided = several.await.unwrap();
        assert!(decided > 100, "several limits of the subject were decided {decided} times");
        for (key, seen) in load.finish().await {
            assert_eq!(failures(&seen), 0, "{key}");
            let mut checks: Vec<_> = seen
                .into_iter()
                .filter_map(|(_, answer)| answer.ok())
                .map(|it| Seen { at: it.at.as_micros(), denied: !it.is_admitted(), remaining: it.remaining })
                .collect();
            checks.sort_unstable();
            judge(&key, &tight(), &checks);
        }
    });
}

/// The slot of a key of the load.
fn slot_of(cluster: &Cluster, key: &str) -> u16 {
    cluster.slot_of(&format!("rate_limiter:token_bucket:{key}"))
}
