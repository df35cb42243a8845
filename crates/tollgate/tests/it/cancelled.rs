//! Reservations that are cancelled before they start leave no trace, in memory and in the store.

use std::time::Duration;

use tollgate::{
    Ask, Clock, Decision, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, Limit, MemoryConfig,
    MemoryEngine, Micros, Rate, RateLimiter, RedisConfig, RedisEngine, SlidingCounter, SlidingLog, Timestamp,
    TokenBucket,
};
use tollgate_testkit::RedisServer;

use crate::run;

/// The start of a minute.
const START_US: u64 = 1_763_000_040_000_000;

/// Each limit, with a cost that is taken first and another that must then wait.
fn limits() -> Vec<(&'static str, Limit, u64, u64)> {
    let (rate, interval) = (Rate::per_minute(100), IntervalBucket::new(100, Rate::per_minute(100)).unwrap());
    let counter = |parts, strict| {
        Limit::SlidingCounter(SlidingCounter::new(Rate::per_minute(10), parts, strict).unwrap())
    };
    let leaky = |mode| Limit::LeakyBucket(LeakyBucket::new(10, Rate::per_second(3), mode).unwrap());
    vec![
        ("fixed window", Limit::FixedWindow(FixedWindow::new(rate).unwrap()), 1, 100),
        ("interval", Limit::IntervalBucket(interval), 1, 100),
        (
            "token bucket",
            Limit::TokenBucket(TokenBucket::new(7, Rate::new(3, Micros::new(7)).unwrap()).unwrap()),
            3,
            7,
        ),
        ("meter", leaky(LeakyMode::Meter), 4, 10),
        ("queue", leaky(LeakyMode::Queue), 4, 6),
        ("log", Limit::SlidingLog(SlidingLog::new(rate).unwrap()), 1, 100),
        ("counter", counter(1, false), 9, 2),
        ("counter of six", counter(6, false), 9, 2),
        ("strict counter", counter(6, true), 9, 2),
    ]
}

/// The answers to takes at many instants after the reservations are cancelled, which is in the third quarter of a horizon.
async fn later(clock: &Clock, limit: &Limit, mut take: impl AsyncFnMut(Ask) -> Decision) -> Vec<Decision> {
    let mut answers = Vec::new();
    for step in 12..52 {
        clock.set(Timestamp::from_micros(START_US + limit.horizon().get() * step / 16));
        answers.push(take(Ask::of(1 + step * 7 % 3)).await);
    }
    answers
}

#[test]
fn a_cancelled_reservation_leaves_no_trace_in_memory_or_in_the_store() {
    run(async {
        let server = RedisServer::start();
        let clock = Clock::manual(Timestamp::default());
        let mut config = RedisConfig::new(server.url().parse().unwrap());
        (config.clock, config.deadline) = (Some(clock.clone()), Duration::from_secs(10));
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        let memory = MemoryEngine::new(MemoryConfig { max_keys: 64 }, clock.clone());
        for (name, limit, first, cost) in limits() {
            let (in_memory, in_store) = (memory.limiter(name, limit).unwrap(), engine.limiter(name, limit));
            let ask = Ask::of(cost).within(limit.horizon());
            for key in ["untouched", "cancelled"] {
                clock.set(Timestamp::from_micros(START_US));
                assert!(in_memory.try_acquire(key, first).is_admitted(), "{name}");
                assert!(in_store.try_acquire(key, first).await.unwrap().is_admitted(), "{name}");
            }
            clock.set(Timestamp::from_micros(START_US + limit.horizon().get() / 4));
            let reserved = in_memory.acquire("cancelled", ask);
            assert_eq!(in_store.acquire("cancelled", ask).await.unwrap(), reserved, "{name}");
            let delay = reserved.outcome.delay();
            assert!(reserved.is_admitted() && delay > Micros::ZERO, "{name}: {reserved:?}");
            let start = reserved.at.after(delay);
            clock.set(reserved.at.after(Micros::new(delay.get() / 2)));
            in_memory.refund("cancelled", cost, start);
            in_store.refund("cancelled", cost, start).await.unwrap();
            let (one, other) = (&in_memory, &in_store);
            let mut answers = Vec::new();
            for key in ["untouched", "cancelled"] {
                answers.push(later(&clock, &limit, async |ask| one.acquire(key, ask)).await);
                answers.push(later(&clock, &limit, async |ask| other.acquire(key, ask).await.unwrap()).await);
            }
            for other in &answers[1..] {
                assert_eq!(&answers[0], other, "{name}");
            }
        }
    });
}

/// States of nodes that know nothing of what is beside them are still read: what is not known is not given back.
#[test]
fn state_without_forgone_permits_gives_back_the_cost_alone() {
    run(async {
        let server = RedisServer::start();
        let clock = Clock::manual(Timestamp::from_micros(START_US));
        let mut config = RedisConfig::new(server.url().parse().unwrap());
        (config.clock, config.deadline) = (Some(clock.clone()), Duration::from_secs(10));
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        let (window, counter) = (limits()[0].1, limits()[6].1);
        let limiter = engine.limiter("fixed_window", window);
        let key = "rate_limiter:fixed_window:user:1";
        server.cli(&["HSET", key, "window", &START_US.to_string(), "count", "200", "later", "kept"]);
        limiter.refund("user:1", 100, Timestamp::from_micros(START_US + 60_000_000)).await.unwrap();
        assert_eq!(limiter.remaining("user:1").await.unwrap(), 0);
        assert_eq!(server.cli(&["HGET", key, "later"]).trim(), "kept");
        let limiter = engine.limiter("sliding_window_counter", counter);
        let key = "rate_limiter:sliding_window_counter:user:1";
        let (bucket, next) = ((START_US / 60_000_000).to_string(), (START_US / 60_000_000 + 1).to_string());
        let (seen, tail) = (START_US.to_string(), (START_US + 80_000_000).to_string());
        server.cli(&["HSET", key, "seen", &seen, "tail", &tail, "sub", "60000000", &bucket, "9", &next, "2"]);
        limiter.refund("user:1", 2, Timestamp::from_micros(START_US + 80_000_000)).await.unwrap();
        assert_eq!(limiter.remaining("user:1").await.unwrap(), 0, "the latest start is all that is known");
    });
}
