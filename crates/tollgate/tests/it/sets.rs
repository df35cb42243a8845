//! Several limits of one request on one server: requests go together as those with one limit do.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tollgate::{
    Backend, Check, FixedWindow, Limit, RateLimiter, RedisEngine, RedisLimiter, SlidingLog, StoreError,
    TokenBucket, Verdicts,
};
use tollgate_testkit::{Random, RedisServer};

use crate::guard::until;
use crate::run;
use crate::store::engine;

/// Four limits of a subject: three large ones, and a bucket of `permits` that does not refill while the test runs.
fn four(engine: &RedisEngine, permits: u64) -> [RedisLimiter; 4] {
    let bucket = |permits| Limit::TokenBucket(TokenBucket::new(permits, "1/1h".parse().unwrap()).unwrap());
    [
        ("a", bucket(10_000)),
        ("b", Limit::FixedWindow(FixedWindow::new("10000/1d".parse().unwrap()).unwrap())),
        ("c", Limit::SlidingLog(SlidingLog::new("10000/1h".parse().unwrap()).unwrap())),
        ("d", bucket(permits)),
    ]
    .map(|(scope, limit)| engine.limiter(scope, limit))
}

fn checks<'a>(limiters: &'a [RedisLimiter; 4], subject: &'a str) -> [Check<'a>; 4] {
    limiters.each_ref().map(|limiter| Check::new(limiter.id(), subject, 1))
}

fn is_admitted(decisions: &Verdicts) -> bool {
    decisions.iter().all(|it| it.is_some_and(|it| it.is_admitted()))
}

async fn connected(server: &RedisServer) -> RedisEngine {
    let engine = engine(&server.url());
    engine.connected(Duration::from_secs(5)).await.unwrap();
    engine
}

#[test]
fn equal_requests_share_a_call_and_each_is_decided_alone() {
    run(async {
        let server = RedisServer::start();
        let engine = connected(&server).await;
        let limiters = four(&engine, 700);
        let before = engine.stats().calls;
        let asked = (0..1_000).map(|_| async {
            let decisions = engine.decide(&checks(&limiters, "user:1")).await.unwrap();
            (is_admitted(&decisions), decisions[3].unwrap().decision.remaining)
        });
        let mut answers = join_all(asked).await;
        let calls = engine.stats().calls - before;
        assert!(calls <= 5, "a thousand requests made {calls} calls");
        answers.sort_unstable();
        let expected: Vec<_> =
            std::iter::repeat_n((false, 0), 300).chain((0..700).map(|left| (true, left))).collect();
        assert_eq!(answers, expected, "each admission has seen another number of permits left");
        for limiter in &limiters[..3] {
            let left = limiter.remaining("user:1").await.unwrap();
            assert_eq!(
                limiter.limit().size() - left,
                700,
                "a request that one limit denies takes nothing from the others"
            );
        }
    });
}

#[test]
fn requests_that_share_a_key_go_together() {
    run(async {
        let server = RedisServer::start();
        let engine = connected(&server).await;
        let [own, _, _, shared] = four(&engine, 10_000);
        let users: Vec<_> = (0..600).map(|number| format!("user:{number}")).collect();
        // One user has nothing left, and is asked for twice: that costs the shared limit nothing.
        let few =
            engine.limiter("few", Limit::TokenBucket(TokenBucket::new(1, "1/1h".parse().unwrap()).unwrap()));
        few.try_acquire("user:7", 1).await.unwrap();
        let before = engine.stats().calls;
        let asked = users.iter().chain([&users[7]]).map(async |user| {
            let all = [
                Check::new(own.id(), user, 1),
                Check::new(few.id(), user, 1),
                Check::new(shared.id(), "all", 1),
            ];
            is_admitted(&engine.decide(&all).await.unwrap())
        });
        let admitted = join_all(asked).await.into_iter().filter(|it| *it).count();
        let calls = engine.stats().calls - before;
        assert_eq!(admitted, 599);
        assert!(calls <= 40, "601 requests made {calls} calls");
        assert_eq!(shared.remaining("all").await.unwrap(), 10_000 - 599);
        assert_eq!(own.remaining("user:8").await.unwrap(), 9_999);
        assert_eq!(own.remaining("user:7").await.unwrap(), 10_000);
    });
}

#[test]
fn denial_of_one_limit_is_cached_for_every_request_that_has_it() {
    run(async {
        let server = RedisServer::start();
        let engine = connected(&server).await;
        let limiters = four(&engine, 1);
        let [own, _, _, exhausted] = &limiters;
        assert!(is_admitted(&engine.decide(&checks(&limiters, "user:1")).await.unwrap()));
        let denied = engine.decide(&checks(&limiters, "user:1")).await.unwrap();
        let calls = engine.stats().calls;
        for _ in 0..100 {
            let again = engine.decide(&checks(&limiters, "user:1")).await.unwrap();
            assert!(again.iter().all(Option::is_some), "an equal request gets the whole answer");
            assert_eq!(again[0], denied[0]);
            assert!(!again[3].unwrap().is_admitted());
        }
        for number in 0..100 {
            let user = format!("user:{number}");
            let other = [Check::new(own.id(), &user, 1), Check::new(exhausted.id(), "user:1", 1)];
            let known = engine.decide(&other).await.unwrap();
            assert!(known[0].is_none() && known[1].is_some_and(|it| !it.is_admitted()), "{known:?}");
        }
        // A denial lives for a tenth of a second: a slow machine may have had to ask again.
        assert!(
            engine.stats().calls - calls <= 5,
            "200 denied requests made {} calls",
            engine.stats().calls - calls
        );
        // A counted-only check denies no request and delays none.
        let counted = Check::new(exhausted.id(), "user:1", 1).counted_only();
        let decisions = engine.decide(&[Check::new(own.id(), "user:2", 1), counted]).await.unwrap();
        assert!(decisions[0].is_some_and(|it| it.is_admitted()));
        // A reset is seen at once on the node that made it.
        exhausted.reset("user:1").await.unwrap();
        assert!(is_admitted(&engine.decide(&checks(&limiters, "user:1")).await.unwrap()));
    });
}

#[test]
fn callers_that_leave_take_nothing() {
    run(async {
        let server = RedisServer::start();
        let engine = connected(&server).await;
        let limiters = four(&engine, 10_000);
        let mut random = Random::new(1);
        let mut admitted = 0;
        for _ in 0..200 {
            let asked = (0..20).map(|_| {
                let patience = Duration::from_micros(random.below(2_000));
                let user = format!("user:{}", random.below(3));
                let (engine, limiters) = (&engine, &limiters);
                async move {
                    let all = checks(limiters, &user);
                    tokio::time::timeout(patience, engine.decide(&all))
                        .await
                        .is_ok_and(|it| is_admitted(&it.unwrap()))
                }
            });
            admitted += join_all(asked).await.into_iter().filter(|it| *it).count() as u64;
        }
        assert!((100..3_900).contains(&admitted), "{admitted} of 4000 stayed");
        until("what was taken for those who left is given back", async || {
            let mut all_agree = true;
            // Windows and logs get back what was taken. (A bucket gets what has not flowed back since: a little less than a permit may
            // be missing.)
            for limiter in &limiters[1..3] {
                let mut consumed = 0;
                for user in ["user:0", "user:1", "user:2"] {
                    consumed += limiter.limit().size() - limiter.remaining(user).await.unwrap();
                }
                all_agree &= consumed == admitted;
            }
            all_agree
        })
        .await;
    });
}

#[test]
fn a_member_with_a_foreign_value_fails_the_request_and_nothing_is_taken() {
    run(async {
        let server = RedisServer::start();
        let engine = connected(&server).await;
        let limiters = four(&engine, 10);
        server.cli(&["SET", "rate_limiter:d:user:1", "something else"]);
        for _ in 0..20 {
            let answer = engine.decide(&checks(&limiters, "user:1")).await;
            assert!(matches!(answer, Err(StoreError::Foreign { .. })), "{answer:?}");
        }
        assert_eq!(limiters[0].remaining("user:1").await.unwrap(), 10_000);
        assert!(is_admitted(&engine.decide(&checks(&limiters, "user:2")).await.unwrap()));
        assert_eq!(server.cli(&["GET", "rate_limiter:d:user:1"]).trim(), "something else");
    });
}

#[test]
fn a_flood_that_one_of_four_limits_denies_costs_few_calls() {
    run(async {
        let server = RedisServer::start();
        let engine = connected(&server).await;
        let limiters = four(&engine, 1);
        let (before, end) = (engine.stats().calls, Instant::now() + Duration::from_millis(500));
        let tasks = (0..64).map(async |_| {
            let mut denied = 0_u64;
            while Instant::now() < end {
                let decisions = engine.decide(&checks(&limiters, "user:1")).await.unwrap();
                denied += u64::from(!is_admitted(&decisions));
                // Denials that are known are answered at once: others have their turn here.
                tokio::task::yield_now().await;
            }
            denied
        });
        let denied: u64 = join_all(tasks).await.into_iter().sum();
        let calls = engine.stats().calls - before;
        assert!(denied > 1_000 && calls <= 60, "{denied} denials made {calls} calls in half a second");
    });
}
