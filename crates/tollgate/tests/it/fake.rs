//! Guards and leases on a store in memory that fails when it is told to. Time is virtual: nothing waits.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tollgate::{
    Ask, Backend, Basis, Check, Clock, Consistency, FailureMode, Guard, GuardConfig, Lease, LeaseRequest,
    LeaseTerms, Limit, LimitId, LimitSettings, Micros, OnFailure, Rate, Share, Store, StoreError, Timestamp,
    TokenBucket, Verdict,
};
use tollgate_testkit::FakeStore;

use crate::guard::slow;

/// Runs a test in virtual time.
pub(crate) fn run_paused(test: impl Future<Output = ()>) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true).build().unwrap().block_on(test);
}

/// Waits for something that background tasks bring about.
pub(crate) async fn until(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_true().await {
        assert!(start.elapsed() < Duration::from_secs(10), "waited until {what}");
        sleep(Duration::from_millis(1)).await;
    }
}

/// A node with a store of its own, whose tasks run.
pub(crate) struct Node {
    pub(crate) store: FakeStore,
    pub(crate) lease: Lease<Guard<FakeStore>>,
}

impl Node {
    /// A node whose clock shows virtual time.
    pub(crate) fn new(config: GuardConfig) -> Self {
        let start = Instant::now();
        let now = move || Timestamp::from_micros(1_700_000_000_000_000 + start.elapsed().as_micros() as u64);
        Self::with_clock(config, Clock::derived(now))
    }

    fn with_clock(config: GuardConfig, clock: Clock) -> Self {
        let (store, driver) = FakeStore::new(clock.clone());
        tokio::spawn(driver.run());
        let (guard, driver) = Guard::new(store.clone(), config, clock);
        tokio::spawn(driver.run());
        Self { store, lease: Lease::new(guard) }
    }

    fn guard(&self) -> &Guard<FakeStore> {
        self.lease.backend()
    }

    fn add(&self, on_failure: OnFailure) -> LimitId {
        self.lease.add_limit("slow", slow(), &on_failure.into()).unwrap()
    }

    /// A limit of 200 that hardly refills and that nodes borrow from.
    fn add_leased(&self) -> LimitId {
        let limit = Limit::TokenBucket(TokenBucket::new(200, "1/1h".parse().unwrap()).unwrap());
        let on_failure = OnFailure { mode: FailureMode::Local, ..OnFailure::default() };
        let settings =
            LimitSettings { consistency: Consistency::Lease, on_failure, ..LimitSettings::default() };
        self.lease.add_limit("leased", limit, &settings).unwrap()
    }

    pub(crate) async fn take(&self, limit: LimitId, permits: u64) -> Verdict {
        self.take_of(limit, "user:1", permits).await
    }

    async fn take_of(&self, limit: LimitId, key: &str, permits: u64) -> Verdict {
        let Ok(verdicts) = self.lease.decide(&[Check::new(limit, key, permits)]).await;
        verdicts[0].unwrap()
    }
}

fn in_mode(mode: FailureMode) -> OnFailure {
    OnFailure { mode, ..OnFailure::default() }
}

/// The store cannot be reached.
fn gone() -> Option<StoreError> {
    Some(StoreError::Unreachable { server: "the store".into(), why: "connection refused".into() })
}

/// The store can be reached, and does not decide.
fn refusing() -> Option<StoreError> {
    Some(StoreError::Unavailable { server: "the store".into(), why: "NOREPLICAS".into() })
}

#[test]
fn node_that_knows_no_other_nodes_takes_the_configured_share() {
    run_paused(async {
        let admitted_with = async |share: Share, permits| {
            let node = Node::new(GuardConfig { share, ..GuardConfig::default() });
            node.store.fail_with(gone());
            let local = node.add(in_mode(FailureMode::Local));
            let mut admitted = 0;
            while node.take(local, permits).await.is_admitted() {
                admitted += permits;
            }
            admitted
        };
        assert_eq!(admitted_with(Share::HALF, 1).await, 50);
        assert_eq!(admitted_with("30%".parse().unwrap(), 1).await, 25, "a permit weighs four, rounded up");
        assert_eq!(admitted_with("30%".parse().unwrap(), 3).await, 30);
        // What is more than the share but not more than the limit is admitted once, not never.
        assert_eq!(admitted_with(Share::HALF, 80).await, 80);
    });
}

#[test]
fn a_node_that_fails_open_can_have_a_ceiling() {
    run_paused(async {
        let ceiling = TokenBucket::new(10, "1/1h".parse().unwrap()).ok();
        let node = Node::new(GuardConfig { ceiling, ..GuardConfig::default() });
        node.store.fail_with(gone());
        let open = node.add(in_mode(FailureMode::Open));
        for _ in 0..10 {
            let verdict = node.take(open, 7).await;
            let Verdict { decision, basis } = verdict;
            assert_eq!((decision.is_admitted(), basis, decision.remaining), (true, Basis::Open, 100));
        }
        let verdict = node.take_of(open, "user:2", 1).await;
        assert_eq!((verdict.is_admitted(), verdict.basis), (false, Basis::Open));
        assert!(verdict.decision.outcome.retry() > Micros::from_secs(3_000), "{verdict:?}");
    });
}

#[test]
fn borrowing_that_fails_takes_nothing_from_the_ceiling_and_owes_nothing() {
    run_paused(async {
        let ceiling = TokenBucket::new(1, "1/1h".parse().unwrap()).ok();
        let node = Node::new(GuardConfig { ceiling, ..GuardConfig::default() });
        node.store.fail_with(gone());
        let settling = OnFailure { settle: true, ..in_mode(FailureMode::Local) };
        let (open, local) = (node.add(in_mode(FailureMode::Open)), node.add(settling));
        let terms = LeaseTerms::of_any_size(&slow(), Consistency::Lease).unwrap();
        for limit in [open, local] {
            let wanted = LeaseRequest { permits: 10, parts: 1, terms };
            let nothing = Check::new(limit, "user:1", 0);
            let lent = node.guard().borrow(&nothing, wanted, Duration::from_millis(10)).await;
            assert!(lent.is_err(), "{lent:?}");
        }
        assert_eq!(node.guard().stats().local_keys, 0);
        assert!(node.guard().health().is_err(), "the outage is noted");
        assert!(node.take(open, 1).await.is_admitted());
        assert!(!node.take(open, 1).await.is_admitted(), "one request is the ceiling");
    });
}

#[test]
fn a_request_that_is_answered_before_its_call_has_failed_is_decided_once() {
    run_paused(async {
        let node = Node::new(GuardConfig::default());
        node.store.set_nodes(Some(1));
        let leased = node.add_leased();
        // Often enough to be worth a lease, on a store that never answers: each caller is answered when its deadline is over, and the
        // calls that go on fail later.
        node.store.set_silent(true);
        let mut admitted = 0;
        for _ in 0..20 {
            let verdict = node.take(leased, 1).await;
            assert_eq!(verdict.basis, Basis::Local);
            admitted += u64::from(verdict.is_admitted());
        }
        sleep(Duration::from_secs(2)).await;
        let verdict = node.take(leased, 1).await;
        assert_eq!(
            verdict.decision.remaining,
            200 - admitted - 1,
            "each request was taken from the share once"
        );
    });
}

#[test]
fn permits_that_flowed_back_are_not_owed() {
    run_paused(async {
        let clock = Clock::manual(Timestamp::from_micros(1_700_000_000_000_000));
        let node = Node::with_clock(GuardConfig::default(), clock.clone());
        node.store.set_nodes(Some(1));
        let on_failure = OnFailure { settle: true, ..in_mode(FailureMode::Local) };
        let limit = Limit::TokenBucket(TokenBucket::new(100, Rate::per_second(10)).unwrap());
        let settling = node.lease.add_limit("settling", limit, &on_failure.into()).unwrap();
        node.store.fail_with(refusing());
        // Five a second for a minute are well within the limit.
        for _ in 0..60 {
            assert_eq!(node.take(settling, 5).await.basis, Basis::Local);
            clock.advance(Micros::from_secs(1));
        }
        let Verdict { decision, basis } = node.take(settling, 40).await;
        assert_eq!((decision.is_admitted(), basis, decision.remaining), (true, Basis::Local, 60));
        clock.advance(Micros::from_secs(1));
        assert_eq!(node.guard().stats().debt, 340);
        node.store.fail_with(None);
        until("the debt is settled", async || node.guard().stats().debt == 0).await;
        let stats = node.guard().stats();
        assert_eq!((stats.debt_settled, stats.debt_lost), (30, 0));
        assert_eq!(node.take(settling, 0).await.decision.remaining, 70, "the store has taken it");
    });
}

#[test]
fn local_states_are_dropped_when_the_outage_is_over() {
    run_paused(async {
        let config = GuardConfig { forget_after: Duration::from_millis(50), ..GuardConfig::default() };
        let node = Node::new(config);
        node.store.set_nodes(Some(1));
        let local = node.add(in_mode(FailureMode::Local));
        for _ in 0..2 {
            node.store.fail_with(refusing());
            assert_eq!(node.take(local, 1).await.basis, Basis::Local);
            until("the share is used up", async || !node.take(local, 1).await.is_admitted()).await;
            assert_eq!(node.guard().stats().local_keys, 1);
            node.store.fail_with(None);
            until("it is forgotten", async || node.guard().stats().local_keys == 0).await;
            let Ok(peeked) = node.lease.peek(&Check::new(local, "user:1", 0).with_ask(Ask::of(0))).await;
            assert_eq!(peeked.basis, Basis::Exact);
        }
    });
}

#[test]
fn a_silent_store_is_not_waited_for_beyond_the_deadline() {
    run_paused(async {
        let node = Node::new(GuardConfig::default());
        let hasty = OnFailure { deadline: Some(Duration::from_millis(5)), ..in_mode(FailureMode::Closed) };
        let (closed, hasty) = (node.add(in_mode(FailureMode::Closed)), node.add(hasty));
        node.store.set_silent(true);
        for (limit, wait_ms) in [(closed, 10), (hasty, 5)] {
            let start = Instant::now();
            assert_eq!(node.take(limit, 1).await.basis, Basis::Closed);
            let waited_ms = start.elapsed().as_millis();
            assert!((wait_ms..=wait_ms + 1).contains(&waited_ms), "{waited_ms} ms instead of {wait_ms}");
        }
    });
}

#[test]
fn a_denial_of_several_checks_of_one_key_denies_no_smaller_request() {
    run_paused(async {
        let node = Node::new(GuardConfig::default());
        let leased = node.add_leased();
        assert!(node.take(leased, 195).await.is_admitted());
        let checks = [Check::new(leased, "user:1", 3), Check::new(leased, "user:1", 3)];
        let Ok(verdicts) = node.lease.decide(&checks).await;
        assert!(verdicts.iter().all(|verdict| verdict.is_some_and(|verdict| !verdict.is_admitted())));
        assert!(node.take(leased, 3).await.is_admitted(), "the store has at least 3 left");
    });
}

#[test]
fn closing_the_leases_waits_for_returns_under_way() {
    run_paused(async {
        let node = Node::new(GuardConfig::default());
        let leased = node.add_leased();
        until("permits are held", async || {
            node.take(leased, 5).await;
            node.lease.stats().held > 0
        })
        .await;
        node.store.set_latency(Duration::from_millis(300));
        until("they are being given back", async || node.lease.stats().held == 0).await;
        assert_eq!(node.lease.stats().returned, 0);
        node.lease.close().await;
        let stats = node.lease.stats();
        assert!(stats.returned > 0, "{stats:?}");
        assert_eq!(stats.granted, stats.spent + stats.returned + stats.expired + stats.lost, "{stats:?}");
    });
}

#[test]
fn slow_store_is_asked_again_even_if_no_key_is_worth_a_lease() {
    run_paused(async {
        let node = Node::new(GuardConfig::default());
        let leased = node.add_leased();
        node.store.set_latency(Duration::from_millis(100));
        assert_eq!(node.take(leased, 50).await.basis, Basis::Local, "the store is too far away");
        sleep(Duration::from_millis(200)).await;
        node.store.set_latency(Duration::ZERO);
        for _ in 0..3 {
            // What was borrowed has ended or is given back, and one permit in two seconds is not worth a lease.
            sleep(Duration::from_secs(2)).await;
            assert_eq!(node.take(leased, 1).await.basis, Basis::Exact);
        }
    });
}
