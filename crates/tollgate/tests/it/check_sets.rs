//! Several limits of one request whose keys are in different slots of a cluster.

use std::time::{Duration, Instant};

use tollgate::{Ask, Backend, Check, Limit, OnFailure, RateLimiter, RedisLimiter, StoreError, TokenBucket};
use tollgate_testkit::Cluster;

use crate::guard::until;
use crate::run;
use crate::store::{engine_with, slow_bucket};

/// Keys of the limit in [`slow_bucket`], each on another primary, with a slot of that primary.
fn keys_apart(cluster: &Cluster) -> [(String, u16); 3] {
    let mut found: Vec<(String, u16, std::net::SocketAddr)> = Vec::new();
    for number in 0.. {
        let key = format!("user:{number}");
        let slot = cluster.slot_of(&format!("rate_limiter:token_bucket:{key}"));
        let primary = cluster.primary_of(slot);
        if found.iter().all(|(_, _, known)| *known != primary) {
            found.push((key, slot, primary));
        }
        if found.len() == 3 {
            break;
        }
    }
    let keys: Vec<_> = found.into_iter().map(|(key, slot, _)| (key, slot)).collect();
    keys.try_into().expect("three primaries")
}

async fn remaining(limiter: &RedisLimiter, keys: &[&str]) -> Vec<u64> {
    let mut all = Vec::new();
    for key in keys {
        all.push(limiter.remaining(key).await.unwrap());
    }
    all
}

#[test]
fn a_denied_request_takes_no_permit_in_any_slot() {
    run(async {
        let cluster = Cluster::start();
        let engine = engine_with(&cluster.url(), |_| ());
        let limiter = slow_bucket(&engine);
        let [(one, _), (two, _), (three, _)] = &keys_apart(&cluster);
        let all = [one.as_str(), two, three];
        let take = async |permits: [u64; 3]| {
            let checks: Vec<_> =
                all.iter().zip(permits).map(|(key, it)| Check::new(limiter.id(), key, it)).collect();
            let decisions = engine.decide(&checks).await.unwrap();
            decisions.iter().flatten().map(|it| it.is_admitted()).collect::<Vec<_>>()
        };
        assert_eq!(take([10, 20, 30]).await, [true; 3]);
        assert_eq!(remaining(&limiter, &all).await, [90, 80, 70]);
        // The first, the second, the last limit denies; the others say that they would have admitted.
        assert_eq!(take([91, 1, 1]).await, [false, true, true]);
        assert_eq!(take([1, 81, 1]).await, [true, false, true]);
        assert_eq!(take([1, 1, 71]).await, [true, true, false]);
        assert_eq!(remaining(&limiter, &all).await, [90, 80, 70]);
        // What can never be admitted, and what is only counted.
        assert_eq!(take([1, 101, 1]).await, [true, false, true]);
        let shadow = Check::new(limiter.id(), three, 71).counted_only();
        let decisions = engine.decide(&[Check::new(limiter.id(), one, 1), shadow]).await.unwrap();
        let admitted: Vec<_> = decisions.iter().flatten().map(|it| it.is_admitted()).collect();
        assert_eq!(admitted, [true, false]);
        assert_eq!(remaining(&limiter, &all).await, [89, 80, 70]);
    });
}

#[test]
fn a_cancelled_request_leaves_no_permit_consumed() {
    run(async {
        let cluster = Cluster::start();
        let engine = engine_with(&cluster.url(), |_| ());
        let limiter = slow_bucket(&engine);
        let [(one, _), (two, slot), _] = &keys_apart(&cluster);
        for key in [one, two] {
            limiter.try_acquire(key, 1).await.unwrap();
        }
        let second = cluster.node(cluster.primary_of(*slot));
        second.pause();
        let checks = [Check::new(limiter.id(), one, 5), Check::new(limiter.id(), two, 5)];
        tokio::select! {
            _ = engine.decide(&checks) => panic!("the second primary is stopped"),
            () = until("the first slot is charged", async || limiter.remaining(one).await.unwrap() == 94) => {}
        }
        // The request is gone. Its second take is decided as soon as the primary goes on.
        second.resume();
        until("everything is given back", async || {
            let left = remaining(&limiter, &[one, two]).await;
            left == [99, 99]
        })
        .await;
    });
}

#[test]
fn one_deadline_covers_takes_and_refunds() {
    run(async {
        let cluster = Cluster::start();
        let engine = engine_with(&cluster.url(), |_| ());
        let limit = TokenBucket::new(100, "1/1h".parse().unwrap()).unwrap();
        let deadline = Duration::from_millis(400);
        let on_failure = OnFailure { deadline: Some(deadline), ..OnFailure::default() };
        let limiter = engine.limiter_with("token_bucket", Limit::TokenBucket(limit), &on_failure.into());
        let [(one, first), (two, second), (three, _)] = &keys_apart(&cluster);
        let [first, second] = [first, second].map(|slot| cluster.node(cluster.primary_of(*slot)));
        limiter.try_acquire(one, 1).await.unwrap();
        limiter.try_acquire(two, 1).await.unwrap();
        limiter.try_acquire(three, 100).await.unwrap();
        second.pause();
        let checks = [
            Check::new(limiter.id(), one, 5),
            Check::new(limiter.id(), two, 5),
            Check::new(limiter.id(), three, 1),
        ];
        let start = Instant::now();
        let timer = async {
            tokio::time::sleep(deadline).await;
            start.elapsed()
        };
        let request = async {
            let answer = engine.decide(&checks).await;
            (start.elapsed(), answer)
        };
        // The first slot is charged, the second does not answer, and then the first cannot take the charge back in time.
        let stop_first = async {
            until("the first slot is charged", async || {
                first.cli(&["HGET", &format!("rate_limiter:token_bucket:{one}"), "tokens"]).trim() == "94"
            })
            .await;
            first.pause();
        };
        let (timer, (took, answer), ()) = tokio::join!(timer, request, stop_first);
        assert!(matches!(answer, Err(StoreError::Timeout(_))), "{answer:?}");
        assert!(
            took <= timer + deadline / 2,
            "answered after {took:?}, a timer of the deadline after {timer:?}"
        );
        first.resume();
        second.resume();
        until(
            "the first slot has its permits back",
            async || matches!(limiter.peek(one, Ask::of(0)).await, Ok(it) if it.remaining == 99),
        )
        .await;
    });
}
