//! The guard: answers every check in time, also if the store fails.
//!
//! Decisions of the store are passed on. If the store gives no decision, the failure mode of each limit applies: admit, deny, or decide
//! here with this node's share of the limit. Every verdict names its basis.

mod debts;
mod outages;
mod share;
mod without_store;

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tollgate_core::lease::Lease as HeldLease;
use tollgate_core::{LeaseTerms, Limit, Timestamp, TokenBucket};

use self::debts::{Account, Debts};
use self::outages::Outages;
pub use self::share::{Share, ShareError};
use crate::backend::{Backend, Deadlines, LeaseGrant, LeaseRequest, Store};
use crate::by_limit::ByLimit;
use crate::check::{Check, HashedKey, LimitId};
use crate::clock::Clock;
use crate::memory::{MemoryConfig, MemoryEngine, MemoryLimiter, TooManyLimits};
use crate::redis::StoreError;
use crate::settings::{FailureMode, LimitSettings};
use crate::tasks::Tasks;
use crate::verdict::{Verdict, Verdicts};

/// Settings of the guard that all limits share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuardConfig {
    /// This node's share of each limit while the number of nodes is unknown.
    pub share: Share,
    /// Keys that are decided by this node alone.
    pub local: MemoryConfig,
    /// How many requests the whole node admits in mode `Open`.
    pub ceiling: Option<TokenBucket>,
    /// An outage is over when the store has been healthy and has decided all checks for this long. Then local states are dropped. If
    /// that happened sooner, an unstable store would give every key a fresh share after each failure.
    pub forget_after: Duration,
}

impl Default for GuardConfig {
    /// One half, 100,000 keys (5 MB), no ceiling, ten seconds.
    fn default() -> Self {
        Self {
            share: Share::HALF,
            local: MemoryConfig { max_keys: 100_000 },
            ceiling: None,
            forget_after: Duration::from_secs(10),
        }
    }
}

/// Counts of the guard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GuardStats {
    /// Keys that this node decides alone.
    pub local_keys: u64,
    /// Permits that were admitted here and are not settled yet. Some of them may flow back before.
    pub debt: u64,
    /// Permits that were settled.
    pub debt_settled: u64,
    /// Permits that are never settled: too many keys had debts, or it is unknown whether the store took them.
    pub debt_lost: u64,
    /// How often its driver has panicked and continued.
    pub panics: u64,
}

/// How often the driver checks whether an outage is over.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The longest pause between two attempts to settle debts while their server is gone.
const PAUSE_MAX: Duration = Duration::from_millis(400);

/// A store, with answers for checks that it does not decide. Clones share it.
pub struct Guard<S: Store<Error = StoreError>>(Arc<Inner<S>>);

impl<S: Store<Error = StoreError>> Clone for Guard<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

struct Inner<S: Store<Error = StoreError>> {
    shared: Arc<Shared<S>>,
    _stop: DropGuard,
}

struct Shared<S: Store<Error = StoreError>> {
    store: S,
    limits: ByLimit<Guarded<S>>,
    clock: Clock,
    share: Share,
    forget_after: Duration,
    /// Decides with the whole limits. Costs are scaled up instead of the limits down.
    local: MemoryEngine,
    ceiling: Option<MemoryLimiter>,
    debts: Debts<S>,
    outages: Outages,
    /// Whether anything was answered without the store since the last outage was over.
    used: AtomicBool,
    /// When that last happened, in microseconds after `zero`.
    used_at: AtomicU64,
    zero: Instant,
    begun: Notify,
    panics: AtomicU64,
    /// Notified when the store decides while there are debts: it is back.
    decided: Notify,
}

/// The data of the guard for a limit.
struct Guarded<S: Store<Error = StoreError>> {
    limit: Limit,
    /// The limit in the memory engine that decides while the store does not.
    local: LimitId,
    /// The debts, if they are settled.
    account: Option<Arc<Account<S>>>,
    /// The name of the limit in log lines.
    scope: Box<str>,
    mode: FailureMode,
}

/// Ends outages: settles debts and drops local states. Debts are settled only while this runs.
#[must_use = "debts are settled only while the driver runs"]
pub struct GuardDriver<S: Store<Error = StoreError>> {
    shared: Arc<Shared<S>>,
    stop: CancellationToken,
}

impl<S: Store<Error = StoreError>> Guard<S> {
    /// A guard, and the driver that ends outages. `clock` is read for decisions without the store.
    pub fn new(store: S, config: GuardConfig, clock: Clock) -> (Self, GuardDriver<S>) {
        let local = MemoryEngine::new(config.local, clock.clone());
        // In a table of its own, so that it is never evicted.
        let ceiling = config.ceiling.and_then(|it| {
            let engine = MemoryEngine::new(MemoryConfig { max_keys: 1 }, clock.clone());
            engine.limiter("ceiling", Limit::TokenBucket(it)).ok()
        });
        let shared = Arc::new(Shared {
            store,
            limits: ByLimit::default(),
            clock,
            share: config.share,
            forget_after: config.forget_after,
            local,
            ceiling,
            debts: Debts::default(),
            outages: Outages::default(),
            used: AtomicBool::new(false),
            used_at: AtomicU64::new(0),
            zero: Instant::now(),
            begun: Notify::new(),
            panics: AtomicU64::new(0),
            decided: Notify::new(),
        });
        let stop = CancellationToken::new();
        let driver = GuardDriver { shared: Arc::clone(&shared), stop: stop.clone() };
        (Self(Arc::new(Inner { shared, _stop: stop.drop_guard() })), driver)
    }

    /// The store that is guarded.
    pub fn store(&self) -> &S {
        &self.0.shared.store
    }

    /// Whether the store decides, as far as is known, or why not. A store that fails every check is not healthy, however rarely it is asked.
    pub fn health(&self) -> Result<(), StoreError> {
        self.store().health()?;
        self.0.shared.outages.why().map_or(Ok(()), Err)
    }

    /// Settles debts, as far as the store allows: before a program ends.
    pub async fn repay_debts(&self) {
        self.0.shared.debts.repay_all().await;
    }

    /// Its counts. Reads every part of a table, so it is for reports only.
    pub fn stats(&self) -> GuardStats {
        let shared = &self.0.shared;
        let (debt, debt_settled, debt_lost) = shared.debts.permits();
        let panics = shared.panics.load(Ordering::Relaxed);
        GuardStats { local_keys: shared.local.stats().keys, debt, debt_settled, debt_lost, panics }
    }
}

impl<S: Store<Error = StoreError>> Backend for Guard<S> {
    type Error = Infallible;

    fn add_limit(
        &self,
        scope: &str,
        limit: Limit,
        settings: &LimitSettings,
    ) -> Result<LimitId, TooManyLimits> {
        let Shared { store, local, limits, .. } = &*self.0.shared;
        let on_failure = settings.on_failure;
        let book = on_failure.settle.then(|| local.limiter(&format!("{scope} owed"), limit)).transpose()?;
        let here = local.add_limit(scope, limit, settings)?;
        let id = store.add_limit(scope, limit, settings)?;
        let account = book.map(|book| Arc::new(Account::new(store.clone(), id, book)));
        let guarded = Guarded { limit, local: here, account, scope: scope.into(), mode: on_failure.mode };
        limits.insert(id, guarded);
        Ok(id)
    }

    fn remove_limit(&self, id: LimitId) {
        let Shared { store, local, limits, .. } = &*self.0.shared;
        let Some(guarded) = limits.get(id) else { return };
        limits.remove(id);
        local.remove_limit(guarded.local);
        // With debts, the limit is removed from the store when the last debt is settled.
        if guarded.account.is_none() {
            store.remove_limit(id);
        }
    }

    async fn decide(&self, checks: &[Check<'_>]) -> Result<Verdicts, Infallible> {
        let shared = &self.0.shared;
        match shared.store.decide(checks).await {
            Ok(verdicts) => {
                shared.note_decision();
                Ok(verdicts)
            }
            Err(why) => Ok(shared.decide_without_store(checks, &why)),
        }
    }

    async fn peek(&self, check: &Check<'_>) -> Result<Verdict, Infallible> {
        let shared = &self.0.shared;
        let peeked = shared.store.peek(check).await;
        Ok(peeked.unwrap_or_else(|why| shared.peek_without_store(check, &why)))
    }

    /// Fails without the store.
    async fn reset(&self, limit: LimitId, key: HashedKey<'_>) -> Result<(), StoreError> {
        let Shared { store, limits, debts, local, .. } = &*self.0.shared;
        store.reset(limit, key).await?;
        if let Some(guarded) = limits.get(limit) {
            if let Some(account) = &guarded.account {
                debts.forgive(account, key);
            }
            local.reset(guarded.local, key).await?;
        }
        Ok(())
    }

    /// Without the store nothing is given back.
    async fn refund(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        self.store().refund(limit, key, permits, at).await
    }
}

impl<S: Store<Error = StoreError>> Store for Guard<S> {
    async fn borrow(
        &self,
        check: &Check<'_>,
        wanted: LeaseRequest,
        deadline: Duration,
    ) -> Result<(Verdict, Option<LeaseGrant>), StoreError> {
        let shared = &self.0.shared;
        let answer = shared.store.borrow(check, wanted, deadline).await;
        match &answer {
            Ok(_) => shared.note_decision(),
            // No request waits for this call. A waiting request would record the failure itself.
            Err(why) if check.ask.cost == 0 => shared.note_failure(check, why),
            Err(_) => {}
        }
        answer
    }

    fn undecided(&self, checks: &[Check<'_>], why: &StoreError) -> Result<Verdicts, Infallible> {
        Ok(self.0.shared.decide_without_store(checks, why))
    }

    async fn give_back(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        lease: &HeldLease,
        number: u64,
        terms: LeaseTerms,
    ) -> Result<Option<u64>, StoreError> {
        self.store().give_back(limit, key, lease, number, terms).await
    }

    async fn charge(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        deadline: Duration,
    ) -> Result<(), StoreError> {
        self.store().charge(limit, key, permits, deadline).await
    }

    fn deadlines(&self, limit: LimitId) -> Deadlines {
        self.store().deadlines(limit)
    }

    fn late(&self, checks: &[Check<'_>], wait: Duration) -> Result<Verdicts, Infallible> {
        let answer = self.store().late(checks, wait);
        Ok(answer.unwrap_or_else(|why| self.0.shared.decide_without_store(checks, &why)))
    }

    fn nodes(&self) -> Option<u32> {
        self.store().nodes()
    }

    fn health(&self) -> Result<(), StoreError> {
        Guard::health(self)
    }

    fn is_available(&self, limit: LimitId, key: HashedKey<'_>) -> bool {
        self.store().is_available(limit, key)
    }

    fn last_heartbeat(&self) -> Option<Instant> {
        self.store().last_heartbeat()
    }

    fn clock(&self) -> &Clock {
        self.store().clock()
    }

    fn tasks(&self) -> &Tasks {
        self.store().tasks()
    }
}

impl<S: Store<Error = StoreError>> Shared<S> {
    /// This node's share of each limit, by the number of nodes that the store last reported.
    fn share(&self) -> Share {
        self.store.nodes().map_or(self.share, Share::one_of)
    }

    /// Records a decision of the store.
    fn note_decision(&self) {
        self.outages.decided();
        if !self.debts.is_empty() {
            self.decided.notify_one();
        }
    }

    fn note_use(&self) {
        self.used_at.store(self.zero.elapsed().as_micros() as u64, Ordering::Relaxed);
        if !self.used.swap(true, Ordering::Relaxed) {
            self.begun.notify_one();
        }
    }

    fn quiet_for(&self) -> Duration {
        self.zero.elapsed().saturating_sub(Duration::from_micros(self.used_at.load(Ordering::Relaxed)))
    }

    /// Settles debts as soon as the store is healthy, and drops local states when the outage is over.
    async fn end_outage(&self) {
        let mut pause = LOOK_EVERY;
        loop {
            // The first decision of a recovered store ends the pause: debts should be settled before many other requests. While
            // some debts cannot be settled, decisions by other servers do not end it.
            if pause == LOOK_EVERY {
                let _ = timeout(pause, self.decided.notified()).await;
            } else {
                sleep(pause).await;
            }
            let settled = self.debts.repay_all().await;
            pause = if settled || self.debts.is_empty() { LOOK_EVERY } else { PAUSE_MAX.min(pause * 2) };
            let is_well = self.store.health().is_ok();
            if is_well {
                // Without requests, a heartbeat shows that the only server writes again.
                if let Some(wrote) = self.store.last_heartbeat() {
                    self.outages.back(wrote);
                }
                self.outages.end();
            }
            if is_well && self.debts.is_empty() && self.quiet_for() >= self.forget_after {
                self.used.store(false, Ordering::Relaxed);
                self.local.clear();
                return;
            }
        }
    }
}

impl<S: Store<Error = StoreError>> GuardDriver<S> {
    /// Runs until all limiters and the guard are dropped. After a panic, which is counted, it continues.
    pub async fn run(self) {
        let Self { shared, stop } = self;
        let outages = async {
            loop {
                // After a panic the outage is not over.
                if !shared.used.load(Ordering::Relaxed) {
                    shared.begun.notified().await;
                }
                if AssertUnwindSafe(shared.end_outage()).catch_unwind().await.is_err() {
                    shared.panics.fetch_add(1, Ordering::Relaxed);
                    tracing::error!("the driver of the guard has panicked; this is a defect of Tollgate");
                    sleep(LOOK_EVERY).await;
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = outages => {}
        }
    }
}
