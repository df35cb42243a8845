//! Requests with several limits, some or all of which nodes borrow from: permits are taken from all of them, or from none.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tollgate::rules::{
    ALL_KEYS, Descriptors, KeyPart, KeySpec, Limits, Match, Policy, PolicyParts, Rule, RuleLimit, RuleLimits,
};
use tollgate::{
    Ask, Basis, Check, Clock, Consistency, Engine, FailureMode, GuardConfig, LeaseStats, Limit,
    LimitSettings, Limiter, OnFailure, PolicyLimiter, RedisConfig, RedisEngine, SharedEngine, TokenBucket,
    Verdicts,
};
use tollgate_testkit::{Bound, ChaosProxy, Fault, Random, RedisServer};

use crate::guard::until;
use crate::run;

/// So many permits that hardly refill: what is taken stays taken.
fn bucket(permits: u64) -> Limit {
    Limit::TokenBucket(TokenBucket::new(permits, "1/1h".parse().unwrap()).unwrap())
}

struct Node {
    shared: SharedEngine,
    engine: Engine,
}

impl Node {
    async fn start(url: &str, deadline: Duration) -> Self {
        let mut config = RedisConfig::new(url.parse().unwrap());
        config.deadline = deadline;
        let (redis, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        let (shared, driver) = SharedEngine::new(redis, GuardConfig::default(), Clock::system());
        tokio::spawn(driver.run());
        shared.redis().connected(Duration::from_secs(5)).await.unwrap();
        until("the store has counted this node", async || shared.redis().nodes() == Some(1)).await;
        Self { engine: Engine::Shared(shared.clone()), shared }
    }

    fn limiter(&self, scope: &str, limit: Limit, consistency: Consistency) -> Limiter {
        let on_failure = OnFailure { mode: FailureMode::Closed, ..OnFailure::default() };
        let settings = LimitSettings { consistency, on_failure, ..LimitSettings::default() };
        self.shared.limiter(scope, limit, settings).unwrap()
    }

    async fn decide(&self, limiters: &[&Limiter], key: &str) -> Verdicts {
        let checks: Vec<_> = limiters.iter().map(|it| Check::new(it.id(), key, 1)).collect();
        self.engine.decide(&checks).await
    }

    /// Asks until something is held of each limit.
    async fn warm_up(&self, limiters: &[&Limiter], key: &str) -> u64 {
        let mut admitted = 0;
        for _ in 0..10_000 {
            let verdicts = self.decide(limiters, key).await;
            admitted += u64::from(is_admitted(&verdicts));
            if verdicts.iter().all(|it| it.is_some_and(|it| it.basis == Basis::Leased)) {
                return admitted;
            }
            tokio::task::yield_now().await;
        }
        panic!("nothing was lent: {:?}", self.shared.lease_stats());
    }

    /// What the store says is left, and what this node holds: everything that was not spent.
    async fn left(&self, limiter: &Limiter, key: &str) -> u64 {
        limiter.peek(key, Ask::of(0)).await.decision.remaining
    }
}

fn is_admitted(verdicts: &Verdicts) -> bool {
    verdicts.iter().all(|it| it.is_some_and(|it| it.is_admitted()))
}

const PATIENT: Duration = Duration::from_secs(2);

#[test]
fn requests_whose_limits_are_all_leased_are_decided_without_the_store() {
    run(async {
        let server = RedisServer::start();
        let node = Node::start(&server.url(), PATIENT).await;
        let limiters = ["a", "b", "c", "d"].map(|it| node.limiter(it, bucket(100_000), Consistency::Lease));
        let limiters: Vec<_> = limiters.iter().collect();
        let mut admitted = node.warm_up(&limiters, "user:1").await;
        let calls = node.shared.redis().stats().calls;
        for _ in 0..20_000 {
            let verdicts = node.decide(&limiters, "user:1").await;
            assert!(is_admitted(&verdicts), "{verdicts:?}");
            admitted += 1;
        }
        let calls = node.shared.redis().stats().calls - calls;
        assert!(calls <= 800, "20,000 requests made {calls} calls");
        node.shared.give_leases_back().await;
        for limiter in limiters {
            assert_eq!(node.left(limiter, "user:1").await, 100_000 - admitted);
        }
    });
}

#[test]
fn a_denial_by_one_limit_takes_nothing_from_leased_ones() {
    run(async {
        let server = RedisServer::start();
        let node = Node::start(&server.url(), PATIENT).await;
        let leased = node.limiter("leased", bucket(100_000), Consistency::Lease);
        let strict = node.limiter("strict", bucket(1), Consistency::Strict);
        let small = node.limiter("small", bucket(300), Consistency::Lease);
        let mut taken = node.warm_up(&[&leased], "user:1").await;
        assert!(is_admitted(&node.decide(&[&leased, &strict], "user:1").await));
        taken += 1;
        for _ in 0..1_000 {
            let verdicts = node.decide(&[&leased, &strict], "user:1").await;
            assert!(!is_admitted(&verdicts), "{verdicts:?}");
        }
        assert_eq!(node.left(&leased, "user:1").await, 100_000 - taken, "the strict limit denies");
        // Two leased limits, one of which runs out.
        let mut together = 0;
        for _ in 0..2_000 {
            together += u64::from(is_admitted(&node.decide(&[&leased, &small], "user:2").await));
        }
        assert_eq!(together, 300);
        node.shared.give_leases_back().await;
        assert_eq!(node.left(&leased, "user:2").await, 100_000 - together, "the small limit denies");
        assert_eq!(node.left(&small, "user:2").await, 0);
    });
}

#[test]
fn callers_that_leave_while_the_store_decides_lose_no_leased_permit() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let proxy = ChaosProxy::start(server.tcp_address(), 1);
        let (each_way, jitter) = (Duration::from_millis(1), Duration::from_millis(2));
        proxy.set(Fault::Delay { each_way, jitter });
        let node = Node::start(&format!("redis://{}", proxy.address()), PATIENT).await;
        let leased = node.limiter("leased", bucket(100_000), Consistency::Lease);
        let strict = node.limiter("strict", bucket(100_000), Consistency::Strict);
        let mut admitted = node.warm_up(&[&leased], "user:1").await;
        let mut random = Random::new(3);
        for _ in 0..100 {
            let requests = (0..20).map(|_| {
                let patience = Duration::from_micros(random.below(20_000));
                let (node, limiters) = (&node, [&leased, &strict]);
                async move {
                    let decided = tokio::time::timeout(patience, node.decide(&limiters, "user:1")).await;
                    decided.is_ok_and(|it| is_admitted(&it))
                }
            });
            admitted += join_all(requests).await.into_iter().filter(|it| *it).count() as u64;
        }
        assert!((10..1_990).contains(&admitted), "{admitted} of 2000 stayed");
        node.shared.give_leases_back().await;
        // Leases that ended before they were spent stay charged, as those of a node that dies.
        until("what was taken for those who left is back", async || {
            let LeaseStats { expired, lost, .. } = node.shared.lease_stats();
            node.left(&leased, "user:1").await + expired + lost == 100_000 - admitted
        })
        .await;
    });
}

#[test]
fn counted_only_checks_delay_no_request_that_leases_decide() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let node = Node::start(&format!("redis://{}", server.tcp_address()), PATIENT).await;
        let leased = node.limiter("leased", bucket(100_000), Consistency::Lease);
        let counted = node.limiter("counted", bucket(100), Consistency::Strict);
        node.warm_up(&[&leased], "user:1").await;
        server.pause();
        let checks =
            [Check::new(leased.id(), "user:1", 1), Check::new(counted.id(), "user:1", 1).counted_only()];
        let start = Instant::now();
        let verdicts = node.engine.decide(&checks).await;
        assert!(verdicts[0].is_some_and(|it| it.is_admitted() && it.basis == Basis::Leased), "{verdicts:?}");
        assert!(verdicts[1].is_none(), "{verdicts:?}");
        assert!(start.elapsed() < PATIENT / 2, "the store is stopped");
        server.resume();
    });
}

/// A rule for each address with one limit.
fn rule(name: &str, limit: usize, enforced: u64) -> Rule {
    Rule {
        name: name.into(),
        matching: Match::default(),
        key: KeySpec(vec![vec![KeyPart::Ip]]),
        limits: RuleLimits::Own(Limits::All(vec![limit])),
        cost: 1,
        max_wait: None,
        stop: false,
        deny_empty_key: None,
        enforced,
        code: None,
    }
}

#[test]
fn rules_in_shadow_are_counted_after_the_answer_to_a_leased_request() {
    run(async {
        let server = RedisServer::start();
        let node = Node::start(&server.url(), PATIENT).await;
        let limits = [("leased", bucket(100_000)), ("trial", bucket(5))].map(|(name, limit)| RuleLimit {
            scope: format!("token_bucket:{name}").into(),
            limit,
            candidate: None,
        });
        let rules = vec![rule("leased", 0, ALL_KEYS), rule("trial", 1, 0)];
        let parts = PolicyParts { rules, limits: limits.to_vec(), ipv6_prefix: 64, ..PolicyParts::default() };
        let settings = [Consistency::Lease, Consistency::Strict]
            .map(|consistency| LimitSettings { consistency, ..LimitSettings::default() });
        let counted = Arc::new(Mutex::new((0, 0)));
        let counts = Arc::clone(&counted);
        let limiter = PolicyLimiter::new(&node.engine, Policy::new(parts), &settings).unwrap().reporting(
            move |check, verdict| {
                assert_eq!(check.rule, 1);
                let (admitted, denied) = &mut *counts.lock().unwrap();
                *if verdict.is_admitted() { admitted } else { denied } += 1;
            },
        );
        let request = Descriptors { ip: Some([192, 0, 2, 1].into()), ..Descriptors::default() };
        let (mut later, mut at_once) = (0, 0);
        for _ in 0..1_000 {
            let verdict = limiter.check(&request, 1).await;
            assert!(verdict.is_admitted(), "{verdict:?}");
            match verdict.verdicts[1] {
                None => later += 1,
                Some(it) => at_once += u64::from(it.is_admitted()),
            }
            tokio::task::yield_now().await;
        }
        assert!(later > 100, "{later} of 1000 were decided after the answer");
        until("all of them are counted", async || {
            let (admitted, denied) = *counted.lock().unwrap();
            admitted + denied == later
        })
        .await;
        let (admitted, _) = *counted.lock().unwrap();
        assert_eq!(at_once + admitted, 5, "the rule in shadow counts as it would decide");
    });
}

#[test]
fn limit_removed_during_a_request_still_decides_on_it() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let node = Node::start(&format!("redis://{}", server.tcp_address()), PATIENT).await;
        let [one, other] = ["one", "other"].map(|it| node.limiter(it, bucket(100), Consistency::Strict));
        let (one_id, other_id) = (one.id(), other.id());
        server.pause();
        let checks = [Check::new(one_id, "user:1", 1), Check::new(other_id, "user:1", 1)];
        let request = node.engine.decide(&checks);
        let removal = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            drop((one, other));
            server.resume();
        };
        let (verdicts, ()) = tokio::join!(request, removal);
        assert!(is_admitted(&verdicts), "{verdicts:?}");
        // A check that names a removed limit is refused, and takes nothing from the others.
        let stays = node.limiter("one", bucket(100), Consistency::Strict);
        let checks = [Check::new(stays.id(), "user:1", 1), Check::new(other_id, "user:1", 1)];
        let verdicts = node.engine.decide(&checks).await;
        assert!(verdicts.iter().flatten().all(|it| !it.is_admitted()), "{verdicts:?}");
        assert_eq!(node.left(&stays, "user:1").await, 99);
    });
}

/// A store to which every byte takes 40 ms, and 40 ms back.
fn far_away(server: SocketAddr) -> ChaosProxy {
    let proxy = ChaosProxy::start(server, 1);
    proxy.set(Fault::Delay { each_way: Duration::from_millis(40), jitter: Duration::ZERO });
    proxy
}

#[test]
fn a_store_that_is_80_ms_away_lends_and_nearly_all_checks_are_decided_here() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let proxy = far_away(server.tcp_address());
        // The default deadline of a check.
        let node = Node::start(&format!("redis://{}", proxy.address()), Duration::from_millis(10)).await;
        let rate = "10000/s".parse().unwrap();
        let limit = Limit::TokenBucket(TokenBucket::new(10_000, rate).unwrap());
        let limiters = ["a", "b"].map(|it| node.limiter(it, limit, Consistency::Lease));
        let ids = limiters.each_ref().map(Limiter::id);
        let (start, mut requests) = (Instant::now(), tokio::task::JoinSet::new());
        // Requests come whether or not others wait.
        let mut ticks = tokio::time::interval(Duration::from_micros(500));
        while start.elapsed() < Duration::from_secs(4) {
            ticks.tick().await;
            let (engine, begun) = (node.engine.clone(), start.elapsed());
            requests.spawn(async move {
                let checks = ids.map(|id| Check::new(id, "user:1", 1));
                (begun, engine.decide(&checks).await)
            });
        }
        let (mut leased, mut others, mut admitted) = (0_u64, 0_u64, Vec::new());
        for (begun, verdicts) in requests.join_all().await {
            if is_admitted(&verdicts) {
                admitted.extend(verdicts[0].map(|it| (it.decision.at.as_micros(), 1)));
            }
            // The first second shows how much is asked for.
            if begun > Duration::from_secs(1) {
                let is_leased = verdicts.iter().flatten().all(|it| it.basis == Basis::Leased);
                if is_leased { leased += 1 } else { others += 1 }
            }
        }
        assert!(leased > 1_000 && others * 100 <= leased, "{leased} by leases, {others} not");
        let bound = Bound { burst: 10_000, permits: 10_000, period_us: 1_000_000 };
        assert!(admitted.len() > 4_000, "{} admitted", admitted.len());
        assert_eq!(bound.excess(&mut admitted).permits, 0);
    });
}
