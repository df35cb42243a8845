//! Requests with limits in several slots of a cluster, whose clients leave before they are answered.

use std::sync::Arc;
use std::time::Duration;

use tollgate::{
    Backend, Check, FixedWindow, Limit, Micros, Rate, RateLimiter, RedisConfig, RedisEngine, RedisLimiter,
};
use tollgate_testkit::{Cluster, Random};

use crate::judge::Judge;
use crate::rig::Pace;

/// Requests, and how many are under way at the same time.
const REQUESTS: u64 = 5_000;
const AT_ONCE: u64 = 50;
/// The longest that a client waits before it leaves: some answers come sooner, also on a busy machine.
const PATIENCE_US: u64 = 60_000;
/// More than is asked for.
const PERMITS: u64 = 30_000;
/// Nothing flows back within a window, so that what is consumed is known to the permit. It does not end during the row, but once a month.
const WINDOW: Micros = Micros::from_secs(30 * 86_400);
/// Hash tags of three slots, each on another primary of the cluster.
const TAGS: [char; 3] = ['a', 'b', 'c'];
/// Clients that make requests. What is given back to one key goes one call at a time.
const USERS: u64 = 100;

pub(super) fn disconnected(_: Pace, seed: u64) -> Option<Judge> {
    let cluster = Cluster::start();
    let mut judge = Judge::bare(seed);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().ok()?;
    let (admitted, left, consumed) = runtime.block_on(ask(&cluster, seed));
    judge.note("requests", format!("{admitted} admitted, {left} left before their answer"));
    judge.decision(
        "each limit consumed by admitted requests only",
        format!("{consumed:?} consumed"),
        consumed == [admitted; 3] && left > 0 && admitted > 0,
    );
    Some(judge)
}

/// How many requests were admitted, how many were left, and what each limit has consumed in the end.
async fn ask(cluster: &Cluster, seed: u64) -> (u64, u64, [u64; 3]) {
    let mut config = RedisConfig::new(cluster.url().parse().expect("a store"));
    // An answer that comes too late is not the subject here.
    config.deadline = Duration::from_secs(10);
    let (engine, driver) = RedisEngine::new(config);
    tokio::spawn(driver.run());
    let limit =
        FixedWindow::new(Rate::new(PERMITS, WINDOW).expect("a rate")).expect("a limit that can be exact");
    let limiter = engine.limiter("fixed_window", Limit::FixedWindow(limit));
    let _ = engine.connected(Duration::from_secs(10)).await;
    let (engine, limiter) = (Arc::new(engine), Arc::new(limiter));
    let clients = (0..AT_ONCE).map(|client| {
        let (engine, limiter) = (Arc::clone(&engine), Arc::clone(&limiter));
        tokio::spawn(request(engine, limiter, Random::new(seed ^ client << 32)))
    });
    let (mut admitted, mut left) = (0, 0);
    for client in clients.collect::<Vec<_>>() {
        let (more_admitted, more_left) = client.await.unwrap_or_default();
        (admitted, left) = (admitted + more_admitted, left + more_left);
    }
    // What was under way is given back as soon as the store has answered.
    let mut consumed = [0; 3];
    for _ in 0..100 {
        consumed = [0; 3];
        for (consumed, tag) in consumed.iter_mut().zip(TAGS) {
            for user in 0..USERS {
                *consumed += PERMITS - limiter.remaining(&key(tag, user)).await.unwrap_or(0);
            }
        }
        if consumed == [admitted; 3] {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    (admitted, left, consumed)
}

fn key(tag: char, user: u64) -> String {
    format!("{{{tag}}}:{user}")
}

/// One client: some of its requests are admitted, others are left.
async fn request(engine: Arc<RedisEngine>, limiter: Arc<RedisLimiter>, mut random: Random) -> (u64, u64) {
    let (mut admitted, mut left) = (0, 0);
    for _ in 0..REQUESTS / AT_ONCE {
        let patience = Duration::from_micros(random.below(PATIENCE_US));
        let user = random.below(USERS);
        let keys = TAGS.map(|tag| key(tag, user));
        let checks = keys.each_ref().map(|key| Check::new(limiter.id(), key, 1));
        match tokio::time::timeout(patience, engine.decide(&checks)).await {
            Ok(Ok(decisions)) => admitted += u64::from(decisions.iter().flatten().all(|it| it.is_admitted())),
            Ok(Err(_)) => {}
            Err(_) => left += 1,
        }
    }
    (admitted, left)
}
