//! Every check is answered, whatever becomes of the store: by the limit's own choice, and it says so.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tollgate::{
    Ask, Basis, BreakerConfig, BreakerState, Clock, FailureMode, GuardConfig, Limit, Limiter, Micros,
    OnFailure, Outcome, Rate, RedisConfig, SharedEngine, StoreError, TokenBucket,
};
use tollgate_testkit::RedisServer;

use crate::run;
use crate::store::engine_with;

/// A bucket of 100 that hardly refills: what is taken stays taken.
pub(crate) fn slow() -> Limit {
    Limit::TokenBucket(TokenBucket::new(100, "1/1h".parse().unwrap()).unwrap())
}

pub(crate) fn guard_with(url: &str, config: GuardConfig, set: impl FnOnce(&mut RedisConfig)) -> SharedEngine {
    let (guard, driver) = SharedEngine::new(engine_with(url, set), config, Clock::system());
    tokio::spawn(driver.run());
    guard
}

pub(crate) fn limiter(guard: &SharedEngine, mode: FailureMode) -> Limiter {
    guard.limiter("token_bucket", slow(), OnFailure { mode, ..OnFailure::default() }).unwrap()
}

pub(crate) async fn take(limiter: &Limiter, permits: u64) -> (bool, Basis, u64) {
    let verdict = limiter.acquire("user:1", Ask::of(permits)).await;
    (verdict.is_admitted(), verdict.basis, verdict.decision.remaining)
}

/// Waits for something that real programs bring about.
pub(crate) async fn until(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_true().await {
        assert!(start.elapsed() < Duration::from_secs(10), "waited until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn each_limit_has_its_own_failure_mode_and_every_verdict_names_its_basis() {
    run(async {
        let mut server = RedisServer::build().tcp().start();
        let guard = guard_with(&format!("redis://{}", server.tcp_address()), GuardConfig::default(), |_| ());
        let [open, closed, local] =
            [FailureMode::Open, FailureMode::Closed, FailureMode::Local].map(|mode| limiter(&guard, mode));
        assert_eq!(take(&open, 40).await, (true, Basis::Exact, 60));
        until("the store has counted this node", async || guard.redis().nodes() == Some(1)).await;
        server.kill();
        until("the breaker is open", async || {
            take(&closed, 1).await;
            guard.redis().servers()[0].breaker == BreakerState::Open
        })
        .await;
        for _ in 0..3 {
            assert_eq!(take(&open, 100).await, (true, Basis::Open, 100), "as if nothing was used");
        }
        let verdict = closed.acquire("user:1", Ask::of(1)).await;
        assert_eq!((verdict.basis, verdict.decision.remaining), (Basis::Closed, 0));
        assert_eq!(verdict.decision.outcome, Outcome::Denied { retry: Micros::from_secs(1) });
        // The only node has the whole limit.
        assert_eq!(take(&local, 70).await, (true, Basis::Local, 30));
        assert_eq!(take(&local, 40).await, (false, Basis::Local, 30));
        assert_eq!(take(&local, 30).await, (true, Basis::Local, 0));
        // Looking takes nothing, and says its ground as well.
        assert_eq!(local.peek("user:1", Ask::of(0)).await.decision.remaining, 0);
        assert_eq!(local.peek("user:2", Ask::of(0)).await.decision.remaining, 100);
        assert_eq!(open.peek("user:1", Ask::of(0)).await.basis, Basis::Open);
        assert_eq!(closed.peek("user:1", Ask::of(0)).await.basis, Basis::Closed);
        // What could never be admitted is not, store or no store.
        for limiter in [&open, &closed, &local] {
            assert_eq!(limiter.acquire("user:1", Ask::of(101)).await.decision.outcome, Outcome::Impossible);
        }
        assert!(open.reset("user:1").await.is_err(), "what cannot be done is said");
        server.restart();
        until("all is exact again", async || take(&open, 1).await.1 == Basis::Exact).await;
        until("the breaker is closed", async || {
            take(&open, 1).await;
            guard.redis().servers()[0].breaker == BreakerState::Closed
        })
        .await;
        assert_eq!(take(&local, 1).await.1, Basis::Exact);
        assert!(guard.redis().health().is_ok());
    });
}

#[test]
fn nodes_that_know_each_other_share_the_limit() {
    run(async {
        let mut server = RedisServer::build().tcp().start();
        let url = format!("redis://{}", server.tcp_address());
        let guards = [(); 3].map(|()| guard_with(&url, GuardConfig::default(), |_| ()));
        until("all have heard of all", async || guards.iter().all(|it| it.redis().nodes() == Some(3))).await;
        server.kill();
        for guard in &guards {
            let local = limiter(guard, FailureMode::Local);
            let mut admitted = 0;
            while take(&local, 1).await.0 {
                admitted += 1;
            }
            assert_eq!(admitted, 33);
        }
    });
}

#[test]
fn a_limit_can_have_a_deadline_of_its_own_that_does_not_count_against_the_server() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let url = format!("redis://{}", server.tcp_address());
        let guard = guard_with(&url, GuardConfig::default(), |config| {
            config.deadline = Duration::from_secs(3_600);
        });
        let hasty = OnFailure { deadline: Some(Duration::from_millis(5)), ..OnFailure::default() };
        let hasty = guard.limiter("token_bucket", slow(), hasty).unwrap();
        until("the store decides", async || take(&hasty, 1).await.1 == Basis::Exact).await;
        server.pause();
        for _ in 0..8 {
            assert_eq!(take(&hasty, 1).await.1, Basis::Local);
        }
        assert_eq!(guard.redis().servers()[0].breaker, BreakerState::Closed);
        server.resume();
        until("all is exact again", async || take(&hasty, 0).await.1 == Basis::Exact).await;
    });
}

#[test]
fn a_server_that_was_only_silent_or_gone_is_asked_again_before_its_time_is_over() {
    run(async {
        let mut server = RedisServer::build().tcp().start();
        let url = format!("redis://{}", server.tcp_address());
        let guard = guard_with(&url, GuardConfig::default(), |config| {
            config.deadline = Duration::from_millis(20);
            config.breaker = BreakerConfig::new(50, 10, Micros::from_secs(3_600), 3).unwrap();
        });
        let open = limiter(&guard, FailureMode::Open);
        let is = |state| guard.redis().servers()[0].breaker == state;
        until("the store decides", async || take(&open, 0).await.1 == Basis::Exact).await;
        server.pause();
        until("the breaker is open", async || {
            take(&open, 0).await;
            is(BreakerState::Open)
        })
        .await;
        server.resume();
        until("it is closed", async || take(&open, 0).await.1 == Basis::Exact && is(BreakerState::Closed))
            .await;
        server.kill();
        until("the breaker is open", async || {
            take(&open, 0).await.1 == Basis::Open && is(BreakerState::Open)
        })
        .await;
        server.restart();
        until("it is closed", async || take(&open, 0).await.1 == Basis::Exact && is(BreakerState::Closed))
            .await;
    });
}

/// While it has no replicas, and wants some, a server answers without deciding.
fn refuse_writes(server: &RedisServer, refuse: bool) {
    server.cli(&["CONFIG", "SET", "min-replicas-to-write", if refuse { "1" } else { "0" }]);
}

#[test]
fn debts_are_settled_once_if_the_limit_settles() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let url = format!("redis://{}", server.tcp_address());
        let guard = guard_with(&url, GuardConfig::default(), |_| ());
        let on_failure = OnFailure { mode: FailureMode::Local, settle: true, ..OnFailure::default() };
        let settling = guard.limiter("settling", slow(), on_failure).unwrap();
        let forgetting = limiter(&guard, FailureMode::Local);
        assert_eq!(take(&settling, 10).await, (true, Basis::Exact, 90));
        assert_eq!(take(&forgetting, 10).await, (true, Basis::Exact, 90));
        until("the store has counted this node", async || guard.redis().nodes() == Some(1)).await;
        refuse_writes(&server, true);
        for _ in 0..20 {
            assert_eq!(take(&settling, 1).await.1, Basis::Local);
            assert_eq!(take(&forgetting, 1).await.1, Basis::Local);
        }
        assert_eq!(guard.stats().debt, 20);
        refuse_writes(&server, false);
        // No request has to ask for it.
        until("the debt is settled", async || guard.stats().debt == 0).await;
        assert_eq!((guard.stats().debt_settled, guard.stats().debt_lost), (20, 0));
        let remaining = async |limiter: &Limiter| {
            let verdict = limiter.peek("user:1", Ask::of(0)).await;
            (verdict.basis == Basis::Exact).then_some(verdict.decision.remaining)
        };
        until("the breaker is closed", async || remaining(&forgetting).await.is_some()).await;
        assert_eq!((remaining(&settling).await, remaining(&forgetting).await), (Some(70), Some(90)));
        // A second outage owes nothing of the first.
        refuse_writes(&server, true);
        until("it is decided alone", async || take(&settling, 1).await.1 == Basis::Local).await;
        refuse_writes(&server, false);
        until("the debt is settled", async || guard.stats().debt == 0).await;
        until("the breaker is closed", async || remaining(&settling).await.is_some()).await;
        let taken = guard.stats().debt_settled;
        assert_eq!(remaining(&settling).await, Some(90 - taken));
    });
}

#[test]
fn callers_beyond_the_queue_limit_are_answered_at_once() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let url = format!("redis://{}", server.tcp_address());
        let guard = guard_with(&url, GuardConfig::default(), |_| ());
        let closed = limiter(&guard, FailureMode::Closed);
        let large = Limit::TokenBucket(TokenBucket::new(1_000_000, Rate::per_second(1)).unwrap());
        let open = guard.limiter("large", large, OnFailure::default()).unwrap();
        assert_eq!(take(&closed, 1).await.1, Basis::Exact);
        server.pause();
        // The deadline is ten seconds: the server is still silent when those who may not wait are answered.
        let waiting = join_all((0..70_000).map(|_| open.acquire("hot", Ask::of(1))));
        let mut waiting = std::pin::pin!(waiting);
        let overloaded = || {
            let class = StoreError::CLASSES.iter().position(|class| *class == "overloaded").unwrap();
            guard.redis().stats().failed[class]
        };
        tokio::select! {
            _ = &mut waiting => panic!("some must wait"),
            () = until("some are answered", async || overloaded() > 0) => {}
        }
        assert_eq!(overloaded(), 70_000 - 65_536 - 1);
        server.resume();
        let verdicts = waiting.await;
        let on = |basis| verdicts.iter().filter(|verdict| verdict.basis == basis).count() as u64;
        assert_eq!((on(Basis::Local), on(Basis::Exact)), (overloaded(), 65_537));
    });
}
