//! Interleavings of the memory engine's locks, explored at random: `cargo test -p tollgate --features shuttle --test shuttle`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shuttle::thread;
use tollgate::{Clock, Limit, MemoryConfig, MemoryEngine, Rate, SlidingLog, Timestamp, TokenBucket};

fn engine() -> MemoryEngine {
    MemoryEngine::new(MemoryConfig { max_keys: 8 }, Clock::manual(Timestamp::from_micros(1_000_000)))
}

#[test]
fn three_threads_on_one_key_admit_exactly_the_limit_while_the_table_is_swept_and_grows() {
    shuttle::check_random(
        || {
            for limit in [
                Limit::TokenBucket(TokenBucket::new(4, Rate::per_minute(1)).unwrap()),
                Limit::SlidingLog(SlidingLog::new(Rate::per_minute(4)).unwrap()),
            ] {
                let engine = engine();
                let admitted = Arc::new(AtomicU64::new(0));
                let threads: Vec<_> = (0..3)
                    .map(|number| {
                        let (engine, admitted) = (engine.clone(), Arc::clone(&admitted));
                        thread::spawn(move || {
                            let limiter = engine.limiter("api", limit).unwrap();
                            for round in 0..3 {
                                let decided = limiter.try_acquire("user:1", 1);
                                admitted.fetch_add(u64::from(decided.is_admitted()), Ordering::Relaxed);
                                limiter.try_acquire(&format!("other:{number}:{round}"), 1);
                                engine.sweep(0, engine.parts());
                            }
                        })
                    })
                    .collect();
                for thread in threads {
                    thread.join().unwrap();
                }
                assert_eq!(admitted.load(Ordering::Relaxed), 4);
            }
        },
        200,
    );
}

#[test]
fn a_reset_is_before_or_after_a_decision_and_never_half_of_it() {
    shuttle::check_random(
        || {
            let engine = engine();
            let limit = Limit::TokenBucket(TokenBucket::new(2, Rate::per_minute(1)).unwrap());
            let limiter = engine.limiter("api", limit).unwrap();
            let resetter = limiter.clone();
            let taker = thread::spawn(move || {
                (0..4).filter(|_| limiter.try_acquire("user:1", 1).is_admitted()).count()
            });
            resetter.reset("user:1");
            let admitted = taker.join().unwrap();
            assert!((2..=4).contains(&admitted), "{admitted}");
        },
        500,
    );
}
