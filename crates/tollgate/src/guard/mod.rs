//! The guard: every check gets an answer in time, whatever becomes of the store.
//!
//! What the store decides is passed on. Where it gives no decision, the limit's own choice counts: let through, refuse, or
//! decide here with this node's share of the limit. Every answer says on what ground it was given.

mod debts;
mod outages;
mod several;
mod share;

use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tollgate_core::{
    Ask, Consistency, Decision, LeaseTerms, Limit, Micros, Outcome, StaysStrict, TokenBucket,
};

use self::debts::{Account, Debts};
use self::outages::Outages;
pub use self::share::{Share, ShareError};
use crate::clock::Clock;
use crate::engine::lease::{DecidedBy, LeaseLimiter, LeaseStats, WeakLeaseLimiter};
use crate::engine::memory::{MemoryConfig, MemoryEngine, MemoryLimiter, TooManyLimits};
use crate::engine::redis::{RedisEngine, RedisLimiter, StoreError};

/// On what ground an answer was given.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Basis {
    /// The whole state was known.
    Exact,
    /// Decided by this node, with permits that it has borrowed from the store, or by what the store has said of them.
    Leased,
    /// Decided by this node alone, with its share of the limit.
    Local,
    /// Let through: the store gave no decision.
    Open,
    /// Refused: the store gave no decision.
    Closed,
}

impl Basis {
    /// All of them, as metrics list them.
    pub const ALL: [Self; 5] = [Self::Exact, Self::Leased, Self::Local, Self::Open, Self::Closed];

    /// The word for it, in answers, headers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Leased => "leased",
            Self::Local => "local",
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }
}

/// A decision, and on what ground it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// What was decided.
    pub decision: Decision,
    /// On what ground.
    pub basis: Basis,
}

impl Verdict {
    /// A decision by the whole state.
    pub const fn exact(decision: Decision) -> Self {
        Self { decision, basis: Basis::Exact }
    }

    /// Whether the request may go ahead, now or after its delay.
    pub const fn is_admitted(&self) -> bool {
        self.decision.is_admitted()
    }
}

/// What happens to checks that the store does not decide.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FailureMode {
    /// They are let through while the store cannot be reached. While it can, but does not decide (too slow, out of memory,
    /// loading), they are decided as with `Local`: a client that overloads the store gets no free pass.
    #[default]
    Open,
    /// They are refused.
    Closed,
    /// They are decided by this node alone, with its share of the limit.
    Local,
}

/// What a limit asks of the guard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OnFailure {
    /// What happens to checks that the store does not decide.
    pub mode: FailureMode,
    /// Whether what was admitted by this node alone is taken from the store's state afterwards, into bounded debt.
    pub settle: bool,
    /// For each check, in place of the store's own deadline.
    pub deadline: Option<Duration>,
}

/// What is settled for a limit beyond its numbers, where a store keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LimitSettings {
    /// Whether nodes borrow from it and decide by themselves.
    pub consistency: Consistency,
    /// The most permits that one node borrows of one key; all of them if not set.
    pub lease_ceiling: Option<u64>,
    /// Whether keys count as used up when a server takes over from another, until everything that may have been lost with the
    /// other one has come back.
    pub failover_guard: bool,
    /// What happens while the store does not decide.
    pub on_failure: OnFailure,
    /// Of a rule of a policy: how many subjects in a second may be new to this node before further ones share one bucket.
    pub max_new_subjects: Option<NonZeroU32>,
}

impl LimitSettings {
    /// The terms on which nodes borrow, or why they do not.
    pub fn lease_terms(&self, limit: &Limit) -> Result<LeaseTerms, StaysStrict> {
        let terms = LeaseTerms::new(limit, self.consistency)?;
        Ok(self.lease_ceiling.map_or(terms, |permits| terms.with_ceiling(permits)))
    }
}

impl From<OnFailure> for LimitSettings {
    fn from(on_failure: OnFailure) -> Self {
        Self { on_failure, ..Self::default() }
    }
}

/// What all limits share when the store is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuardConfig {
    /// This node's share of each limit, where it is not known how many nodes there are.
    pub share: Share,
    /// Keys that are decided by this node alone.
    pub local: MemoryConfig,
    /// How many requests the whole node lets through in mode `Open`.
    pub ceiling: Option<TokenBucket>,
    /// An outage is over when the store was well and has decided everything for so long. Then what was decided here is
    /// forgotten. Sooner, and a store that stutters would give every key a fresh share at each stutter.
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

/// What the guard holds and has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GuardStats {
    /// Keys that this node decides alone.
    pub local_keys: u64,
    /// Permits that were admitted here and are not settled yet. Some of them may have flowed back by then.
    pub debt: u64,
    /// Permits that were taken afterwards.
    pub debt_settled: u64,
    /// Permits that are never taken: too many keys owed, or it is unknown whether they were.
    pub debt_lost: u64,
    /// How often its driver has panicked, and went on.
    pub panics: u64,
}

/// A caller who is refused because the store is gone is told to come back after this long.
const CLOSED_RETRY: Micros = Micros::from_secs(1);
/// How often is looked whether an outage is over, while there is one.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The longest pause between two attempts to settle debts while their server is gone.
const PAUSE_MAX: Duration = Duration::from_millis(400);

/// An engine on a store, and what answers in its place. Clones share it.
#[derive(Clone)]
pub struct Guard(Arc<Inner>);

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").field("engine", &self.0.shared.engine).finish_non_exhaustive()
    }
}

struct Inner {
    shared: Arc<Shared>,
    _stop: DropGuard,
}

struct Shared {
    engine: RedisEngine,
    clock: Clock,
    share: Share,
    forget_after: Duration,
    local: MemoryEngine,
    ceiling: Option<MemoryLimiter>,
    debts: Debts,
    outages: Outages,
    /// Limiters that borrow.
    lessees: Mutex<Vec<WeakLeaseLimiter>>,
    /// Whether anything was answered without the store since the last outage was over.
    used: AtomicBool,
    /// When that last happened, in microseconds after `zero`.
    used_at: AtomicU64,
    zero: Instant,
    begun: Notify,
    panics: AtomicU64,
    /// Told when the store has decided although there are debts: it is back.
    decided: Notify,
}

/// Ends outages: settles debts and forgets what was decided alone. Debts are settled only while this runs.
#[must_use = "debts are settled only while the driver runs"]
pub struct GuardDriver {
    shared: Arc<Shared>,
    stop: CancellationToken,
}

impl Guard {
    /// A guard, and the driver that ends outages. `clock` is read for what is decided without the store.
    pub fn new(engine: RedisEngine, config: GuardConfig, clock: Clock) -> (Self, GuardDriver) {
        let local = MemoryEngine::new(config.local, clock.clone());
        // In a table of its own, which nothing is evicted from.
        let ceiling = config.ceiling.and_then(|it| {
            let engine = MemoryEngine::new(MemoryConfig { max_keys: 1 }, clock.clone());
            engine.limiter("ceiling", Limit::TokenBucket(it)).ok()
        });
        let shared = Arc::new(Shared {
            engine,
            clock,
            share: config.share,
            forget_after: config.forget_after,
            local,
            ceiling,
            debts: Debts::default(),
            outages: Outages::default(),
            lessees: Mutex::new(Vec::new()),
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

    /// A limiter over the keys of `scope` that always answers.
    pub fn limiter(
        &self,
        scope: &str,
        limit: Limit,
        settings: impl Into<LimitSettings>,
    ) -> Result<GuardedLimiter, TooManyLimits> {
        let settings = settings.into();
        let on_failure = settings.on_failure;
        let mut limiter = self.engine().limiter(scope, limit);
        if let Some(deadline) = on_failure.deadline {
            limiter = limiter.with_deadline(deadline);
        }
        let terms = settings.lease_terms(&limit).ok();
        if settings.failover_guard {
            limiter = limiter.guarding_failovers(terms.map_or(Micros::ZERO, |terms| terms.life()));
        }
        let local = &self.0.shared.local;
        let book = on_failure.settle.then(|| local.limiter(&format!("{scope} owed"), limit)).transpose()?;
        let leases = terms.map(|terms| LeaseLimiter::new(limiter.clone(), terms));
        if let Some(leases) = &leases {
            let mut lessees = self.0.shared.lessees.lock();
            lessees.retain(|other| other.upgrade().is_some());
            lessees.push(leases.downgrade());
        }
        Ok(GuardedLimiter {
            guard: Arc::clone(&self.0),
            leases,
            local: local.limiter(scope, limit)?,
            account: book.map(|book| Arc::new(Account::new(&limiter, book))),
            limiter,
            scope: scope.into(),
            mode: on_failure.mode,
        })
    }

    /// The engine that is guarded.
    pub fn engine(&self) -> &RedisEngine {
        &self.0.shared.engine
    }

    /// Whether the store decides, as far as is known, or why not. A store that fails every check is not well, however seldom it is asked.
    pub fn health(&self) -> Result<(), StoreError> {
        self.engine().health()?;
        self.0.shared.outages.why().map_or(Ok(()), Err)
    }

    /// Takes what is owed, as far as the store lets it: before a program ends.
    pub async fn settle_debts(&self) {
        self.0.shared.debts.settle_all().await;
    }

    /// Gives back everything that was borrowed, and borrows nothing any more: before a program ends.
    pub async fn give_leases_back(&self) {
        join_all(self.lessees().iter().map(LeaseLimiter::close)).await;
    }

    /// What became of borrowed permits, of all limits together. Looks into every part of their tables: for reports.
    pub fn lease_stats(&self) -> LeaseStats {
        let mut all = LeaseStats::default();
        self.lessees().iter().for_each(|lessee| all.add(&lessee.stats()));
        all
    }

    fn lessees(&self) -> Vec<LeaseLimiter> {
        self.0.shared.lessees.lock().iter().filter_map(WeakLeaseLimiter::upgrade).collect()
    }

    /// What it holds and has done. Looks into every part of a table: for reports, not for the way of a request.
    pub fn stats(&self) -> GuardStats {
        let shared = &self.0.shared;
        let (debt, debt_settled, debt_lost) = shared.debts.permits();
        let panics = shared.panics.load(Ordering::Relaxed);
        GuardStats { local_keys: shared.local.stats().keys, debt, debt_settled, debt_lost, panics }
    }
}

/// A limit over the keys of a store. It always answers. Cheap to clone.
#[derive(Clone)]
pub struct GuardedLimiter {
    guard: Arc<Inner>,
    limiter: RedisLimiter,
    /// Where nodes borrow from the limit.
    leases: Option<LeaseLimiter>,
    /// With the whole limit: asks are made larger instead of the limit smaller.
    local: MemoryLimiter,
    /// Where debts are noted, if they are settled.
    account: Option<Arc<Account>>,
    /// What log lines call the limit.
    scope: Arc<str>,
    mode: FailureMode,
}

impl GuardedLimiter {
    /// The limit.
    pub fn limit(&self) -> &Limit {
        self.limiter.limit()
    }

    /// Takes permits, perhaps after a delay that the caller accepts.
    pub async fn acquire(&self, key: &str, ask: Ask) -> Verdict {
        let decided = match &self.leases {
            Some(leases) => leases.acquire(key, ask).await,
            None => self.limiter.acquire(key, ask).await.map(|decision| (decision, DecidedBy::Store)),
        };
        let why = match decided {
            Ok((decision, DecidedBy::Lease)) => return Verdict { decision, basis: Basis::Leased },
            Ok((decision, DecidedBy::Store)) => {
                self.guard.shared.note_decision();
                return Verdict::exact(decision);
            }
            Err(why) => why,
        };
        let Some(mode) = self.mode_after(key, ask, &why) else { return Verdict::exact(self.impossible()) };
        match mode {
            FailureMode::Closed => self.closed(),
            FailureMode::Open => self.open(),
            FailureMode::Local => {
                let verdict = self.as_share(self.local.acquire(key, self.weighed(ask)));
                if verdict.is_admitted() {
                    self.note_debt(key, ask.cost, &why);
                }
                verdict
            }
        }
    }

    /// The answer that [`GuardedLimiter::acquire`] would give, without taking anything.
    pub async fn peek(&self, key: &str, ask: Ask) -> Verdict {
        let peeked = match &self.leases {
            Some(leases) => leases.peek(key, ask).await,
            None => self.limiter.peek(key, ask).await,
        };
        let why = match peeked {
            Ok(decision) => return Verdict::exact(decision),
            Err(why) => why,
        };
        match self.mode_after(key, ask, &why) {
            None => Verdict::exact(self.impossible()),
            Some(FailureMode::Closed) => self.closed(),
            Some(FailureMode::Open) => Verdict { decision: self.untouched(), basis: Basis::Open },
            Some(FailureMode::Local) => self.as_share(self.local.peek(key, self.weighed(ask))),
        }
    }

    /// Makes a key as good as new. Without the store that cannot be done.
    pub async fn reset(&self, key: &str) -> Result<(), StoreError> {
        match &self.leases {
            Some(leases) => leases.reset(key).await?,
            None => self.limiter.reset(key).await?,
        }
        if let Some(account) = &self.account {
            self.guard.shared.debts.forgive(account, key);
        }
        self.local.reset(key);
        Ok(())
    }

    /// What happens to a check that was not decided. None: it could never be admitted, store or not.
    fn mode_after(&self, key: &str, ask: Ask, why: &StoreError) -> Option<FailureMode> {
        let shared = &self.guard.shared;
        shared.outages.note(&self.scope, key, why);
        shared.note_use();
        if ask.cost > self.limit().size() {
            return None;
        }
        let is_local = self.mode == FailureMode::Open && why.is_reachable();
        Some(if is_local { FailureMode::Local } else { self.mode })
    }

    fn closed(&self) -> Verdict {
        let outcome = Outcome::Denied { retry: CLOSED_RETRY };
        Verdict { decision: Decision { outcome, remaining: 0, ..self.untouched() }, basis: Basis::Closed }
    }

    fn open(&self) -> Verdict {
        let passed = self.guard.shared.ceiling.as_ref().map(|ceiling| ceiling.try_acquire("", 1));
        let decision = match passed {
            Some(Decision { outcome: outcome @ Outcome::Denied { .. }, reset, .. }) => {
                Decision { outcome, remaining: 0, reset, ..self.untouched() }
            }
            Some(_) | None => self.untouched(),
        };
        Verdict { decision, basis: Basis::Open }
    }

    /// Notes permits that were admitted without the store, if they are to be settled.
    fn note_debt(&self, key: &str, permits: u64, why: &StoreError) {
        let Some(account) = &self.account else { return };
        let debts = &self.guard.shared.debts;
        match why.may_have_run() {
            false => debts.owe(account, key, permits),
            true => debts.lose(permits),
        }
    }

    /// What is asked of this node alone: each request counts as many times as there are nodes.
    fn weighed(&self, ask: Ask) -> Ask {
        let share = self.guard.shared.share();
        Ask { cost: share.weigh(ask.cost).min(self.limit().size()), ..ask }
    }

    /// A decision of this node alone, as callers see it.
    fn as_share(&self, decision: Decision) -> Verdict {
        let remaining = self.guard.shared.share().of(decision.remaining);
        Verdict { decision: Decision { remaining, ..decision }, basis: Basis::Local }
    }

    /// An admission by a key that was never used.
    fn untouched(&self) -> Decision {
        let limit = self.limit().size();
        let at = self.guard.shared.clock.now();
        Decision { outcome: Outcome::NOW, limit, remaining: limit, reset: Micros::ZERO, at }
    }

    fn impossible(&self) -> Decision {
        Decision { outcome: Outcome::Impossible, ..self.untouched() }
    }
}

impl Shared {
    /// This node's share of each limit: one of the nodes that were there when the store last said so.
    fn share(&self) -> Share {
        self.engine.nodes().map_or(self.share, Share::one_of)
    }

    /// Notes that the store has decided.
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

    /// Settles what is owed as soon as the store is well, and forgets the rest when the outage is over.
    async fn end_outage(&self) {
        let mut pause = LOOK_EVERY;
        loop {
            // The first decision of a store that is back is a reason to look at once: what is owed should be taken before much
            // else is. While debts remain that cannot be taken, decisions by other servers are none.
            if pause == LOOK_EVERY {
                let _ = timeout(pause, self.decided.notified()).await;
            } else {
                sleep(pause).await;
            }
            let settled = self.debts.settle_all().await;
            pause = if settled || self.debts.is_empty() { LOOK_EVERY } else { PAUSE_MAX.min(pause * 2) };
            let is_well = self.engine.health().is_ok();
            if is_well {
                // Where nobody asks, the one server that there is may show it by taking in that this node lives.
                if let (1, Some(wrote)) = (self.engine.servers().len(), self.engine.last_presence()) {
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

impl GuardDriver {
    /// Runs until all limiters and the guard are gone. A panic is counted, and the work goes on.
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
