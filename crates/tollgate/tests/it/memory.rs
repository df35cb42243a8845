//! The memory engine: the same answers as the bare algorithms, whatever it does with its memory and its threads.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use tollgate::algorithm::Algorithm;
use tollgate::{
    Ask, Clock, Decision, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, Limit, MemoryConfig,
    MemoryEngine, MemoryLimiter, Micros, Outcome, Rate, RateLimiter, Retention, SlidingCounter, SlidingLog,
    State, Timestamp, TokenBucket,
};

/// Today, on a clock that is handed in.
fn clock() -> Clock {
    Clock::manual(Timestamp::from_micros(1_763_000_000_000_000))
}

fn engine(max_keys: usize, clock: &Clock) -> MemoryEngine {
    MemoryEngine::new(MemoryConfig { max_keys }, clock.clone())
}

/// One of each kind, and counters and logs that do not fit into a slot.
fn limits() -> Vec<Limit> {
    let minute = |permits| Rate::per_minute(permits);
    vec![
        Limit::TokenBucket(TokenBucket::new(10, Rate::per_second(1)).unwrap()),
        Limit::IntervalBucket(IntervalBucket::new(10, Rate::per_second(3)).unwrap()),
        Limit::LeakyBucket(LeakyBucket::new(10, Rate::per_second(1), LeakyMode::Meter).unwrap()),
        Limit::LeakyBucket(LeakyBucket::new(10, Rate::per_second(1), LeakyMode::Queue).unwrap()),
        Limit::FixedWindow(FixedWindow::new(minute(10)).unwrap()),
        Limit::SlidingLog(SlidingLog::new(minute(10)).unwrap()),
        Limit::SlidingCounter(SlidingCounter::new(minute(10), 1, false).unwrap()),
        Limit::SlidingCounter(SlidingCounter::new(minute(1 << 40), 1, false).unwrap()),
        Limit::SlidingCounter(SlidingCounter::new(minute(10), 10, true).unwrap()),
    ]
}

#[derive(Clone, Debug)]
enum Act {
    Acquire { cost: u64, wait_secs: Option<u64> },
    Peek { cost: u64 },
    Refund { back_us: u64 },
    Charge { cost: u64 },
    Reset,
    Sweep,
}

fn acts() -> impl Strategy<Value = Vec<(usize, u8, u64, Act)>> {
    let act = prop_oneof![
        8 => (prop_oneof![Just(1_u64), 0..=12_u64, Just(1 << 39)], prop::option::weighted(0.2, 0..=70_u64))
            .prop_map(|(cost, wait_secs)| Act::Acquire { cost, wait_secs }),
        1 => (0..=12_u64).prop_map(|cost| Act::Peek { cost }),
        1 => (0..=10_000_000_u64).prop_map(|back_us| Act::Refund { back_us }),
        1 => (0..=30_u64).prop_map(|cost| Act::Charge { cost }),
        1 => Just(Act::Reset),
        1 => Just(Act::Sweep),
    ];
    let advance = prop_oneof![4 => Just(0_u64), 2 => 0..=2_000_000_u64, 1 => 0..=200_000_000_u64];
    prop::collection::vec((0..9_usize, 0..40_u8, advance, act), 1..200)
}

/// What the engine should answer: the algorithm and a map.
fn model(limit: &Limit, state: &mut State, now: Timestamp, act: &Act) -> Option<Decision> {
    let outcome = match *act {
        Act::Acquire { cost, wait_secs } => {
            limit.decide(state, now, Ask { cost, wait: wait_secs.map(Micros::from_secs) })
        }
        Act::Peek { cost } => limit.peek(state, now, Ask::of(cost)),
        Act::Refund { back_us } => {
            limit.refund(state, now, 1, Timestamp::from_micros(now.as_micros() - back_us));
            return None;
        }
        Act::Charge { cost } => {
            limit.charge(state, now, cost);
            return None;
        }
        Act::Reset => {
            *state = limit.fresh(now);
            return None;
        }
        Act::Sweep => return None,
    };
    let status = limit.status(state, now);
    Some(Decision { outcome, limit: limit.size(), remaining: status.remaining, reset: status.reset, at: now })
}

fn in_engine(engine: &MemoryEngine, limiter: &MemoryLimiter, key: &str, act: &Act) -> Option<Decision> {
    match *act {
        Act::Acquire { cost, wait_secs } => {
            return Some(limiter.acquire(key, Ask { cost, wait: wait_secs.map(Micros::from_secs) }));
        }
        Act::Peek { cost } => return Some(limiter.peek(key, Ask::of(cost))),
        Act::Refund { back_us } => {
            limiter.refund(key, 1, Timestamp::from_micros(engine.clock().now().as_micros() - back_us));
        }
        Act::Charge { cost } => limiter.charge(key, cost),
        Act::Reset => limiter.reset(key),
        Act::Sweep => {
            engine.sweep(0, engine.parts());
        }
    }
    None
}

proptest! {
    #[test]
    fn the_engine_answers_as_the_algorithm_does(acts in acts()) {
        let clock = clock();
        let engine = engine(100_000, &clock);
        let limits = limits();
        let limiters: Vec<_> =
            limits.iter().enumerate().map(|(n, limit)| engine.limiter(&format!("scope {n}"), *limit).unwrap()).collect();
        let mut states: HashMap<(usize, u8), State> = HashMap::new();
        for (which, key, advance, act) in acts {
            clock.advance(Micros::new(advance));
            let now = clock.now();
            let state = states.entry((which, key)).or_insert_with(|| limits[which].fresh(now));
            // A state that decides like a missing one may be dropped at any time.
            if limits[which].full_at(state) <= now {
                *state = limits[which].fresh(now);
            }
            let expected = model(&limits[which], state, now, &act);
            prop_assert_eq!(in_engine(&engine, &limiters[which], &format!("user:{key}"), &act), expected);
        }
    }
}

#[test]
fn many_threads_on_one_key_admit_exactly_the_limit() {
    for limit in limits().into_iter().filter(|limit| limit.size() == 10) {
        let engine = engine(1_000, &clock());
        let admitted = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                let limiter = engine.limiter("api", limit).unwrap();
                let admitted = &admitted;
                scope.spawn(move || {
                    for _ in 0..2_000 {
                        admitted.fetch_add(
                            u64::from(limiter.try_acquire("user:1", 1).is_admitted()),
                            Ordering::Relaxed,
                        );
                    }
                });
            }
        });
        assert_eq!(admitted.into_inner(), 10, "{limit:?}");
    }
}

#[test]
fn many_threads_on_many_keys_admit_exactly_the_limit_of_each_while_keys_come_and_go() {
    let clock = clock();
    let engine = engine(50_000, &clock);
    let limit = Limit::TokenBucket(TokenBucket::new(3, Rate::per_minute(1)).unwrap());
    let admitted = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let limiter = engine.limiter("api", limit).unwrap();
            let (admitted, engine) = (&admitted, &engine);
            scope.spawn(move || {
                for round in 0..4 {
                    for n in 0..20_000 {
                        let key = format!("user:{}", (n * 7 + thread * 1_000 + round) % 20_000);
                        admitted.fetch_add(
                            u64::from(limiter.try_acquire(&key, 1).is_admitted()),
                            Ordering::Relaxed,
                        );
                    }
                    engine.sweep(0, engine.parts());
                }
            });
        }
    });
    assert_eq!(admitted.into_inner(), 60_000);
    assert_eq!(engine.stats().keys, 20_000);
}

#[test]
fn flood_of_new_keys_cannot_evict_keys_at_their_limit() {
    let clock = clock();
    let engine = engine(10_000, &clock);
    let limiter = engine
        .limiter("api", Limit::TokenBucket(TokenBucket::new(100, Rate::per_minute(100)).unwrap()))
        .unwrap();
    let victims: Vec<_> = (0..500).map(|n| format!("attacker:{n}")).collect();
    for victim in &victims {
        assert!(limiter.try_acquire(victim, 100).is_admitted());
    }
    for n in 0..400_000 {
        limiter.try_acquire(&format!("flood:{n}"), 1);
    }
    let stats = engine.stats();
    assert!(stats.evicted > 0 && stats.keys < 16_000, "{stats:?}");
    let freed = victims.iter().filter(|victim| limiter.remaining(victim) > 0).count();
    assert_eq!(freed, 0, "attackers that the flood has freed");
}

#[test]
fn full_keys_are_dropped_before_other_keys() {
    let clock = clock();
    let engine = engine(10_000, &clock);
    let slow =
        engine.limiter("slow", Limit::FixedWindow(FixedWindow::new(Rate::per_minute(10)).unwrap())).unwrap();
    let quick = engine
        .limiter("quick", Limit::TokenBucket(TokenBucket::new(10, Rate::per_second(10)).unwrap()))
        .unwrap();
    for n in 0..4_000 {
        slow.try_acquire(&format!("user:{n}"), 1);
        quick.try_acquire(&format!("user:{n}"), 1);
    }
    clock.advance(Micros::from_secs(1));
    for n in 4_000..10_000 {
        quick.try_acquire(&format!("user:{n}"), 1);
    }
    assert!((0..4_000).all(|n| slow.remaining(&format!("user:{n}")) == 9));
    assert_eq!(engine.stats().evicted, 0);
}

#[test]
fn full_keys_leave_and_free_their_memory() {
    for limit in limits().into_iter().filter(|limit| limit.size() == 10) {
        let clock = clock();
        let engine = engine(100_000, &clock);
        let limiter = engine.limiter("api", limit).unwrap();
        for n in 0..20_000 {
            limiter.try_acquire(&format!("user:{n}"), 2);
        }
        let full = engine.stats();
        assert_eq!(full.keys, 20_000, "{limit:?}");
        clock.advance(Micros::from_secs(180));
        let mut part = 0;
        for _ in 0..engine.parts() {
            part = engine.sweep(part, 1);
        }
        let swept = engine.stats();
        assert_eq!((swept.keys, part, swept.evicted), (0, 0, 0), "{limit:?}");
        assert!(swept.bytes * 10 < full.bytes, "{limit:?}: {} of {}", swept.bytes, full.bytes);
    }
}

#[test]
fn remaining_takes_nothing_and_creates_no_state() {
    for limit in limits() {
        let engine = engine(1_000, &clock());
        let limiter = engine.limiter("api", limit).unwrap();
        assert_eq!(limiter.remaining("user:1"), limit.size());
        assert_eq!(limiter.status("user:1").reset, Micros::ZERO);
        assert!(limiter.peek("user:1", Ask::of(limit.size())).is_admitted());
        assert_eq!(limiter.try_acquire("user:1", limit.size() + 1).outcome, Outcome::Impossible);
        limiter.reset("user:1");
        assert_eq!(engine.stats().keys, 0);
    }
}

#[test]
fn scopes_do_not_share_keys_and_limiters_of_a_scope_do() {
    let engine = engine(1_000, &clock());
    let limit = limits()[0];
    let [one, same, other] = ["a", "a", "b"].map(|scope| engine.limiter(scope, limit).unwrap());
    one.try_acquire("user:1", 7);
    assert_eq!([one.remaining("user:1"), same.remaining("user:1"), other.remaining("user:1")], [3, 3, 10]);
    let tighter = Limit::TokenBucket(TokenBucket::new(2, Rate::per_second(1)).unwrap());
    let tighter = engine.limiter("a", tighter).unwrap();
    for _ in 0..3 {
        one.try_acquire("user:1", 1);
        tighter.try_acquire("user:1", 1);
    }
    assert_eq!(
        [one.remaining("user:1"), tighter.remaining("user:1")],
        [0, 0],
        "neither forgets for the other"
    );
}

/// Limits that a key may come under one after the other, by algorithm.
fn families() -> Vec<Vec<Limit>> {
    let minute = |permits| Rate::per_minute(permits);
    let leaky = |size, mode| Limit::LeakyBucket(LeakyBucket::new(size, Rate::per_second(1), mode).unwrap());
    let counter =
        |permits, parts| Limit::SlidingCounter(SlidingCounter::new(minute(permits), parts, false).unwrap());
    let log = |permits, rate: u64| {
        let rate = Rate::new(permits, Micros::from_secs(rate)).unwrap();
        let retention = Retention { time: Micros::from_secs(60), entries: 8 };
        Limit::SlidingLog(SlidingLog::new(rate).unwrap().retaining(retention))
    };
    vec![
        vec![
            limits()[0],
            limits()[1],
            Limit::TokenBucket(TokenBucket::new(4, Rate::per_second(2)).unwrap()),
            Limit::TokenBucket(TokenBucket::new(40, minute(7)).unwrap()),
        ],
        vec![leaky(10, LeakyMode::Meter), leaky(10, LeakyMode::Queue), leaky(3, LeakyMode::Meter)],
        vec![
            limits()[4],
            Limit::FixedWindow(FixedWindow::new(minute(3)).unwrap().counting_denied(true)),
            Limit::FixedWindow(FixedWindow::new(Rate::per_second(5)).unwrap()),
        ],
        vec![log(10, 60), log(3, 60), log(5, 1)],
        vec![counter(10, 1), counter(3, 1), counter(12, 10)],
    ]
}

proptest! {
    #[test]
    fn the_engine_carries_over_as_the_algorithms_do(
        family in prop::sample::select(families()),
        acts in prop::collection::vec((0..4_usize, acts()), 1..60),
    ) {
        let clock = clock();
        let engine = engine(100_000, &clock);
        let limiters: Vec<_> = family.iter().map(|limit| engine.limiter("scope", *limit).unwrap()).collect();
        let mut states: HashMap<u8, (Limit, State)> = HashMap::new();
        for (which, acts) in acts {
            let (limit, limiter) = (family[which % family.len()], &limiters[which % family.len()]);
            for (_, key, advance, act) in acts.into_iter().take(3) {
                let key = key % 4;
                clock.advance(Micros::new(advance));
                let now = clock.now();
                // A state that decides like a missing one may be dropped at any time.
                states.retain(|_, (under, state)| under.full_at(state) > now);
                let found = match states.get(&key) {
                    Some((under, state)) => limit.migrate(under, state.clone(), now),
                    None => limit.fresh(now),
                };
                let mut state = found.clone();
                let expected = model(&limit, &mut state, now, &act);
                prop_assert_eq!(in_engine(&engine, limiter, &format!("user:{key}"), &act), expected, "{:?}", act);
                let takes = match act {
                    Act::Acquire { cost, .. } => cost > 0 && cost <= limit.size(),
                    Act::Charge { cost } => cost > 0,
                    _ => false,
                };
                if takes || state != found {
                    states.insert(key, (limit, state));
                }
            }
        }
    }
}

#[test]
fn numbers_of_limits_are_given_back_and_never_confused() {
    let clock = clock();
    let engine = engine(1_000, &clock);
    let bucket = |size, per_minute| TokenBucket::new(size, Rate::per_minute(per_minute)).unwrap();
    let held = engine.limiter("held", Limit::TokenBucket(bucket(7, 1))).unwrap();
    held.try_acquire("user:1", 5);
    // Every thousandth limit leaves a key behind, and the same key is asked for under every limit. There are twice as many limits as
    // numbers.
    let mut left = Vec::new();
    for n in 0..140_000_u64 {
        let limit = Limit::TokenBucket(bucket(200_000 + n, 1));
        let limiter = engine.limiter("changing", limit).unwrap();
        assert_eq!(limiter.try_acquire("user:1", 1).remaining, 200_000 + n - (n + 1), "{n} were used");
        if n % 1_000 == 0 {
            limiter.try_acquire(&format!("left:{n}"), 100);
            left.push(n);
        }
    }
    assert_eq!(held.remaining("user:1"), 2);
    for n in left {
        let limiter = engine.limiter("changing", Limit::TokenBucket(bucket(200_000 + n, 1))).unwrap();
        assert_eq!(limiter.remaining(&format!("left:{n}")), 199_900 + n, "of the limit that was left");
        let other = engine.limiter("changing", Limit::TokenBucket(bucket(200, 1))).unwrap();
        assert_eq!(other.remaining(&format!("left:{n}")), 100, "and of another");
    }
}

#[test]
fn more_limits_than_there_are_numbers_are_refused_and_the_others_go_on() {
    let engine = engine(1_000, &clock());
    let limit = |size| Limit::TokenBucket(TokenBucket::new(size, Rate::per_minute(1)).unwrap());
    let mut limiters: Vec<_> = (1..=65_534).map(|size| engine.limiter("api", limit(size)).unwrap()).collect();
    assert!(engine.limiter("api", limit(70_000)).is_err());
    assert!(engine.limiter("other", limit(1)).is_ok(), "a limit that has a number in another scope");
    assert_eq!(limiters[65_533].try_acquire("user:1", 65_000).remaining, 534);
    limiters.truncate(1);
    assert_eq!(engine.limiter("api", limit(70_000)).unwrap().remaining("user:1"), 5_000);
}

#[test]
fn another_algorithm_in_the_same_scope_starts_afresh() {
    let engine = engine(1_000, &clock());
    for limit in limits().iter().chain(&limits()) {
        let limiter = engine.limiter("api", *limit).unwrap();
        limiter.try_acquire("user:1", 1);
        limiter.refund("user:1", 1, Timestamp::default());
        limiter.charge("user:1", 1);
    }
    assert_eq!(engine.stats().keys, 1);
}

#[tokio::test]
async fn the_async_trait_wraps_the_same_functions() {
    async fn through<L: RateLimiter>(limiter: &L) -> Result<(u64, u64), L::Error> {
        limiter.try_acquire("user:1", 4).await?;
        let left = limiter.remaining("user:1").await?;
        limiter.reset("user:1").await?;
        Ok((left, limiter.remaining("user:1").await?))
    }
    let limiter = engine(1_000, &clock()).limiter("api", limits()[0]).unwrap();
    assert_eq!(through(&limiter).await, Ok((6, 10)));
}

#[test]
fn a_key_costs_at_most_48_bytes_at_every_size() {
    let limits = limits();
    for limit in [limits[0], limits[2], limits[4], limits[6]] {
        let engine = engine(1_000_000, &clock());
        let limiter = engine.limiter("api", limit).unwrap();
        let empty = engine.stats().bytes;
        for n in 1..=400_000_u64 {
            limiter.try_acquire(&format!("user:{n}"), 1);
            if n % 40_000 == 0 {
                let bytes = (engine.stats().bytes - empty) as f64 / n as f64;
                assert!(bytes <= 48.0, "{bytes} bytes a key at {n} keys of {limit:?}");
            }
        }
    }
}
