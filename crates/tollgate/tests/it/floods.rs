//! Floods of new keys against the memory engine: which keys they can evict, and which they cannot.

use tollgate::{
    Clock, Limit, MemoryConfig, MemoryEngine, MemoryLimiter, Micros, Rate, Timestamp, TokenBucket,
};

fn engine(max_keys: usize) -> (MemoryEngine, Clock) {
    let clock = Clock::manual(Timestamp::from_micros(1_763_000_000_000_000));
    (MemoryEngine::new(MemoryConfig { max_keys }, clock.clone()), clock)
}

/// A bucket of `size` permits that takes `fill_secs` to fill.
fn bucket(size: u64, fill_secs: u64) -> Limit {
    let rate = Rate::new(size, Micros::from_secs(fill_secs)).unwrap();
    Limit::TokenBucket(TokenBucket::new(size, rate).unwrap())
}

/// Takes a permit from each of `keys` new keys.
fn flood(limiter: &MemoryLimiter, keys: u64) {
    for n in 0..keys {
        limiter.try_acquire(&format!("flood:{n}"), 1);
    }
}

/// How many of the keys have their permits back.
fn freed(limiter: &MemoryLimiter, keys: &[String]) -> usize {
    keys.iter().filter(|key| limiter.remaining(key) == limiter.limit().size()).count()
}

fn victims(limiter: &MemoryLimiter, count: usize, permits: u64) -> Vec<String> {
    let keys: Vec<_> = (0..count).map(|n| format!("victim:{n}")).collect();
    assert!(keys.iter().all(|key| limiter.try_acquire(key, permits).is_admitted()));
    keys
}

#[test]
fn flooding_a_limit_of_one_permit_cannot_evict_keys_that_are_at_their_limit_for_longer() {
    let (engine, _) = engine(10_000);
    // Two tiers of one rule: they share a scope, and every key has used all of its limit.
    let (slow, quick) =
        (engine.limiter("login", bucket(1, 3_600)).unwrap(), engine.limiter("login", bucket(1, 60)).unwrap());
    let keys = victims(&slow, 500, 1);
    flood(&quick, 400_000);
    assert!(engine.stats().evicted > 300_000, "{:?}", engine.stats());
    assert_eq!(freed(&slow, &keys), 0, "of 500 keys that were at their limit");
}

#[test]
fn flooding_one_rule_cannot_evict_keys_of_another() {
    let (engine, _) = engine(10_000);
    let limiters = ["one", "two", "three"].map(|rule| engine.limiter(rule, bucket(100, 60)).unwrap());
    // They have used the least of their limit, so that nothing but their part of the table protects them.
    let keys = limiters.each_ref().map(|limiter| victims(limiter, 1_500, 1));
    // The same limit, and another one.
    for limit in [bucket(100, 60), bucket(1, 3_600)] {
        let flooded = engine.limiter("flooded", limit).unwrap();
        for n in 0..300_000 {
            flooded.try_acquire(&format!("flood:{n}"), limit.size());
        }
    }
    assert!(engine.stats().evicted > 500_000, "{:?}", engine.stats());
    let freed: usize = limiters.iter().zip(&keys).map(|(limiter, keys)| freed(limiter, keys)).sum();
    assert_eq!(freed, 0, "of 4,500 keys of other rules");
}

#[test]
fn one_rule_may_fill_the_table_and_makes_room_when_another_is_used() {
    let (engine, _) = engine(10_000);
    let (first, second) = (
        engine.limiter("first", bucket(100, 60)).unwrap(),
        engine.limiter("second", bucket(100, 60)).unwrap(),
    );
    let keys = victims(&first, 10_000, 50);
    assert_eq!((freed(&first, &keys), engine.stats().evicted), (0, 0), "no other scope needs the room");
    let newcomers = victims(&second, 4_000, 1);
    assert_eq!(freed(&second, &newcomers), 0, "a rule gets its part, whatever the other has used");
}

#[test]
fn rules_that_change_their_limit_keep_their_part() {
    let (engine, clock) = engine(10_000);
    let limiter = engine.limiter("tiers", bucket(100, 60)).unwrap();
    let keys = victims(&limiter, 1_000, 100);
    // The state is carried over to a smaller limit, which has no room for all that was consumed.
    let smaller = engine.limiter("tiers", bucket(10, 60)).unwrap();
    assert!(keys.iter().all(|key| !smaller.try_acquire(key, 1).is_admitted()));
    let flooded = engine.limiter("flooded", bucket(1, 3_600)).unwrap();
    flood(&flooded, 100_000);
    assert_eq!(freed(&smaller, &keys), 0);
    // Full again, the keys leave, and the room is anyone's.
    clock.advance(Micros::from_secs(7_200));
    engine.sweep(0, engine.parts());
    assert_eq!(engine.stats().keys, 0);
    flood(&limiter, 10_000);
    assert!(engine.stats().keys >= 10_000, "{:?}", engine.stats());
}
