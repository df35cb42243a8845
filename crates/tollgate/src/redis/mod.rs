//! The Redis engine: the state of all keys in Redis or Valkey, shared by many nodes.
//!
//! Every check is decided by one script call, on the clock of the server. Checks of a key that arrive while a call for it is
//! under way go together in the next call, and denials are cached for a moment. Both leave every answer exact.

mod config;
mod decide;
mod error;
mod evaluate;
mod key_prefix;
mod limit;
mod protocol;
mod queue;
mod server;
mod shared;
mod topology;
mod url;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot::error::RecvError;
use tokio::time::Instant;
use tokio_util::sync::DropGuard;
use tollgate_core::lease::Lease;
use tollgate_core::{Ask, Decision, LeaseTerms, Limit, Status, Timestamp};

pub use self::config::{RedisConfig, TlsConfig};
pub use self::error::StoreError;
pub use self::key_prefix::{KeyPrefix, KeyPrefixError};
use self::limit::StoredLimit;
use self::protocol::{Change, Command, Question};
use self::queue::call::Call;
use self::queue::{Coalescer, Done, Entered, QueueKey, Remembering, Step};
use self::server::ServerContext;
pub use self::shared::control::{
    ASSIGNED_MAX, Assigned, AssignedTier, Control, ControlUpdate, HistoryEntry, Pushed, Version,
};
use self::shared::membership::Membership;
pub use self::topology::ServerStatus;
use self::topology::{Reply, Routes};
use self::url::Shape;
pub use self::url::{StoreUrl, StoreUrlError};
use crate::backend::{Backend, Deadlines, LeaseGrant, LeaseRequest, Store};
use crate::by_limit::ByLimit;
use crate::check::{Check, HashedKey, LimitId};
use crate::clock::Clock;
use crate::deadline::within;
use crate::memory::TooManyLimits;
use crate::rate_limiter::RateLimiter;
use crate::settings::LimitSettings;
use crate::tasks::{Driver, Leading, Tasks};
use crate::verdict::{Verdict, Verdicts};

/// How long a denial is cached at most. Resets, refunds and raised limits on other nodes are seen within this time.
pub const REMEMBER_MAX: Duration = Duration::from_millis(100);

/// Counts of the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RedisStats {
    /// Calls to the store.
    pub calls: u64,
    /// Checks that these calls have answered.
    pub asked: u64,
    /// Checks that were answered by a cached denial.
    pub remembered: u64,
    /// Calls that gave no decision, by [`StoreError::CLASSES`].
    pub failed: [u64; StoreError::CLASSES.len()],
    /// Tasks of the driver that have panicked. Each was started again, or has answered its callers with an error.
    pub panics: u64,
}

#[derive(Default)]
struct Counters {
    calls: AtomicU64,
    asked: AtomicU64,
    remembered: AtomicU64,
    failed: [AtomicU64; StoreError::CLASSES.len()],
}

/// The state of all keys in a store. Clones share its connections.
#[derive(Clone)]
pub struct RedisEngine(Arc<Inner>);

impl std::fmt::Debug for RedisEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisEngine").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

struct Inner {
    routes: Arc<Routes>,
    membership: Arc<Membership>,
    limits: ByLimit<StoredLimit>,
    coalescer: Coalescer,
    tasks: Tasks,
    deadline: Duration,
    lease_deadline: Duration,
    key_prefix: KeyPrefix,
    clock: Option<Clock>,
    /// The clock by which leases end: the configured one, or the system clock.
    own_clock: Clock,
    counters: Counters,
    /// One failure of each of [`StoreError::CLASSES`], and when it happened.
    last_failures: [Mutex<Option<(Instant, StoreError)>>; StoreError::CLASSES.len()],
    /// Limits that were added so far.
    added: AtomicU32,
    _stop: DropGuard,
}

/// How long a failure is reported by [`RedisEngine::recent_failures`].
const KEEP_FOR: Duration = Duration::from_secs(10);

impl RedisEngine {
    /// An engine, and the driver that must run for it to answer. The driver connects, so an unreachable store is not an error
    /// here.
    pub fn new(config: RedisConfig) -> (Self, Driver) {
        // The first engine of a process sets the provider. Any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (tasks, driver, stop) = Tasks::new();
        let (options, sentinel_options) = (config.connect_options(), config.sentinel_options());
        let StoreUrl { shape, seeds, .. } = config.url;
        let remembering =
            Remembering { longest: config.remember_denials.min(REMEMBER_MAX), clock: config.clock.clone() };
        let routes = Routes::new(shape, seeds, options, sentinel_options, tasks.clone());
        let membership = Membership::new(&config.key_prefix);
        if config.count_nodes {
            let (membership, routes) = (Arc::clone(&membership), Arc::clone(&routes));
            tasks.keep_running(move || Arc::clone(&membership).keep_alive(Arc::clone(&routes)));
        }
        let inner = Inner {
            routes,
            membership,
            limits: ByLimit::default(),
            coalescer: Coalescer::new(remembering),
            tasks,
            deadline: config.deadline,
            lease_deadline: config.lease_deadline,
            key_prefix: config.key_prefix,
            own_clock: config.clock.clone().unwrap_or_else(Clock::system),
            clock: config.clock,
            counters: Counters::default(),
            last_failures: Default::default(),
            added: AtomicU32::new(0),
            _stop: stop,
        };
        (Self(Arc::new(inner)), driver)
    }

    /// A limiter over the keys of `scope`: `rate_limiter:SCOPE:KEY` in the store, or with another [`KeyPrefix`].
    pub fn limiter(&self, scope: &str, limit: Limit) -> RedisLimiter {
        self.limiter_with(scope, limit, &LimitSettings::default())
    }

    /// The same with settings: a deadline, a failover guard, and calls that may take as long as borrowing ones.
    pub fn limiter_with(&self, scope: &str, limit: Limit, settings: &LimitSettings) -> RedisLimiter {
        let stored = self.add(scope, limit, settings);
        let added = Added { engine: self.clone(), id: stored.id };
        RedisLimiter { stored, added: Arc::new(added) }
    }

    fn add(&self, scope: &str, limit: Limit, settings: &LimitSettings) -> Arc<StoredLimit> {
        let Inner { deadline, lease_deadline, routes, limits, added, key_prefix, .. } = &*self.0;
        if settings.failover_guard {
            routes.watch_failovers();
        }
        let id = LimitId(added.fetch_add(1, Ordering::Relaxed));
        limits.insert(
            id,
            StoredLimit::new(id, (key_prefix, scope), limit, settings, (*deadline, *lease_deadline)),
        )
    }

    /// Whether limits of different subjects may be on different servers, so that one call cannot decide on them together.
    pub(crate) fn is_cluster(&self) -> bool {
        self.0.routes.shape == Shape::Cluster
    }

    /// Whether the store can be asked now, or why not.
    pub fn health(&self) -> Result<(), StoreError> {
        self.0.routes.health()
    }

    /// The servers of the store, as far as they are known.
    pub fn servers(&self) -> Vec<ServerStatus> {
        self.0.routes.servers()
    }

    /// How many nodes share the store, by its last answer: nodes with a heartbeat in the last five seconds.
    pub fn nodes(&self) -> Option<u32> {
        self.0.membership.nodes()
    }

    /// Failures of about the last ten seconds: one of each kind.
    pub fn recent_failures(&self) -> Vec<StoreError> {
        let recent = |last: &Mutex<Option<(Instant, StoreError)>>| {
            last.lock().as_ref().filter(|(noted, _)| noted.elapsed() < KEEP_FOR).map(|(_, why)| why.clone())
        };
        self.0.last_failures.iter().filter_map(recent).collect()
    }

    /// Waits until the store can be asked.
    pub async fn connected(&self, within: Duration) -> Result<(), StoreError> {
        let deadline = Instant::now() + within;
        loop {
            let health = self.health();
            if health.is_ok()
                || Instant::now() >= deadline
                || matches!(health, Err(StoreError::Refused { .. }))
            {
                return health;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Its counts.
    pub fn stats(&self) -> RedisStats {
        let counters = &self.0.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RedisStats {
            calls: read(&counters.calls),
            asked: read(&counters.asked),
            remembered: read(&counters.remembered),
            failed: counters.failed.each_ref().map(read),
            panics: self.0.tasks.panics(),
        }
    }
}

impl Inner {
    /// Counts a call without a decision, and keeps one failure of each kind for health.
    fn count_failure(&self, error: &StoreError) {
        let Some(class) = StoreError::CLASSES.iter().position(|class| *class == error.class()) else {
            return;
        };
        self.counters.failed[class].fetch_add(1, Ordering::Relaxed);
        let mut last = self.last_failures[class].lock();
        if last.as_ref().is_none_or(|(noted, _)| noted.elapsed() >= KEEP_FOR) {
            *last = Some((Instant::now(), error.clone()));
        }
    }

    async fn call(
        &self,
        key: &str,
        slot: u16,
        (hash, needs_time): (u64, bool),
        deadline: Instant,
        command: impl Fn(ServerContext) -> Command,
    ) -> Result<Reply, StoreError> {
        let handed_in = self.clock.as_ref().map(Clock::now);
        let called = self.routes.call(key, slot, (hash, needs_time), deadline, |context| {
            let now = handed_in.or(context.now);
            command(ServerContext { now, about: now.unwrap_or(context.about), ..context })
        });
        let called = called.await;
        if !matches!(called, Err(StoreError::BreakerOpen { .. })) {
            self.counters.calls.fetch_add(1, Ordering::Relaxed);
        }
        called.inspect_err(|why| self.count_failure(why))
    }
}

impl Inner {
    fn stored(&self, limit: LimitId) -> Result<Arc<StoredLimit>, StoreError> {
        self.limits.get(limit).ok_or(StoreError::Removed)
    }

    /// Queues a step for its key, or answers it from a cached denial. A call that may take longer than its caller waits goes on without
    /// the caller.
    async fn step(
        self: &Arc<Self>,
        limit: &Arc<StoredLimit>,
        queue_key: QueueKey,
        step: Step,
        Deadlines { wait, call }: Deadlines,
    ) -> Result<Done, StoreError> {
        let now = Instant::now();
        match self.coalescer.enter(&queue_key, &limit.limit, &step, now) {
            Entered::Denied(decision) => {
                self.counters.remembered.fetch_add(1, Ordering::Relaxed);
                Ok(Done::Answered(decision, None))
            }
            Entered::Lead => {
                let lead = Call::new(self, limit, queue_key).lead(step, now + call);
                let lead = Leading::new(lead, self.tasks.clone());
                if call <= wait {
                    return lead.await;
                }
                within(now + wait, lead).await.unwrap_or_else(|_| Err(self.late(wait)))
            }
            Entered::Wait(answer) => self.waited(now + wait, wait, answer).await,
            Entered::Full => Err(self.failed(StoreError::Overloaded)),
        }
    }

    /// Waits for the answer of a call that another caller or the driver makes.
    async fn waited<T>(
        &self,
        until: Instant,
        wait: Duration,
        answer: impl Future<Output = Result<Result<T, StoreError>, RecvError>>,
    ) -> Result<T, StoreError> {
        match within(until, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) if self.tasks.is_stopped() => Err(StoreError::Stopped),
            Ok(Err(_)) => Err(StoreError::Panicked),
            Err(_) => Err(self.late(wait)),
        }
    }

    fn late(&self, waited: Duration) -> StoreError {
        self.failed(StoreError::Timeout(waited))
    }

    fn failed(&self, why: StoreError) -> StoreError {
        self.count_failure(&why);
        why
    }

    async fn refund(
        self: &Arc<Self>,
        limit: &Arc<StoredLimit>,
        queue_key: QueueKey,
        permits: u64,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let step = Step::Change(Change::Refund { permits, at });
        self.step(limit, queue_key, step, Deadlines::of(limit.deadlines.wait)).await.map(drop)
    }
}

impl RedisEngine {
    /// Does a step on a key of a limit, within deadlines of its own or within those of the limit.
    async fn step(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        step: Step,
        deadline: Option<Duration>,
    ) -> Result<Done, StoreError> {
        let limit = self.0.stored(limit)?;
        let deadlines = deadline.map_or(limit.deadlines, Deadlines::of);
        self.0.step(&limit, limit.queue_key(key), step, deadlines).await
    }

    /// Asks for one key.
    async fn ask(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        question: Question,
    ) -> Result<Decision, StoreError> {
        let done = self.step(limit, key, Step::Ask(question), None).await?;
        answered(done).map(|(decision, _)| decision)
    }
}

fn answered(done: Done) -> Result<(Decision, Option<LeaseGrant>), StoreError> {
    match done {
        Done::Answered(decision, lent) => Ok((decision, lent.map(|lent| *lent))),
        Done::Changed | Done::OutOfTurn(_) => Err(unanswered()),
    }
}

fn unanswered() -> StoreError {
    StoreError::protocol("a question without an answer")
}

impl Backend for RedisEngine {
    type Error = StoreError;

    fn add_limit(
        &self,
        scope: &str,
        limit: Limit,
        settings: &LimitSettings,
    ) -> Result<LimitId, TooManyLimits> {
        Ok(self.add(scope, limit, settings).id)
    }

    fn remove_limit(&self, id: LimitId) {
        self.0.limits.remove(id);
    }

    /// At most [`CHECKS_MAX`](tollgate_core::policy::CHECKS_MAX) checks and [`WORK_MAX`](tollgate_core::policy::WORK_MAX) of their work.
    /// Where all limits are in one place (one server, or one slot of a cluster) they are decided in one step; else in one step for each
    /// slot, and permits taken before a denial are given back. So are permits taken for a caller that has left.
    async fn decide(&self, checks: &[Check<'_>]) -> Result<Verdicts, StoreError> {
        if let [check] = checks {
            let decision = self.ask(check.limit, check.key, Question::Take(check.ask)).await?;
            return Ok(Verdicts::from_iter([Some(Verdict::exact(decision))]));
        }
        let decisions = self.0.decide_together(checks).await?;
        Ok(decisions.into_iter().map(|decision| decision.map(Verdict::exact)).collect())
    }

    async fn peek(&self, check: &Check<'_>) -> Result<Verdict, StoreError> {
        self.ask(check.limit, check.key, Question::Peek(check.ask)).await.map(Verdict::exact)
    }

    async fn reset(&self, limit: LimitId, key: HashedKey<'_>) -> Result<(), StoreError> {
        let deadline = self.deadlines(limit).wait;
        self.step(limit, key, Step::Reset, Some(deadline)).await.map(drop)
    }

    async fn refund(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let limit = self.0.stored(limit)?;
        self.0.refund(&limit, limit.queue_key(key), permits, at).await
    }
}

impl Store for RedisEngine {
    async fn borrow(
        &self,
        check: &Check<'_>,
        wanted: LeaseRequest,
        deadline: Duration,
    ) -> Result<(Verdict, Option<LeaseGrant>), StoreError> {
        let step = Step::Ask(Question::Borrow(check.ask, Box::new(wanted)));
        let (decision, lent) = answered(self.step(check.limit, check.key, step, Some(deadline)).await?)?;
        Ok((Verdict::exact(decision), lent))
    }

    async fn give_back(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        lease: &Lease,
        number: u64,
        terms: LeaseTerms,
    ) -> Result<Option<u64>, StoreError> {
        let counted = terms.counts_out();
        let step = Step::Change(Change::Return { permits: lease.left, at: lease.at, number, counted });
        match self.step(limit, key, step, Some(self.deadlines(limit).call)).await? {
            Done::Changed => Ok(None),
            Done::OutOfTurn(number) => Ok(Some(number)),
            Done::Answered(..) => Err(unanswered()),
        }
    }

    async fn charge(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        deadline: Duration,
    ) -> Result<(), StoreError> {
        let step = Step::Change(Change::Charge { permits });
        self.step(limit, key, step, Some(deadline)).await.map(drop)
    }

    fn undecided(&self, _: &[Check<'_>], why: &StoreError) -> Result<Verdicts, StoreError> {
        Err(why.clone())
    }

    fn deadlines(&self, limit: LimitId) -> Deadlines {
        self.0.stored(limit).map_or(Deadlines::of(self.0.deadline), |it| it.deadlines)
    }

    fn late(&self, _: &[Check<'_>], wait: Duration) -> Result<Verdicts, StoreError> {
        Err(self.0.late(wait))
    }

    fn nodes(&self) -> Option<u32> {
        RedisEngine::nodes(self)
    }

    fn health(&self) -> Result<(), StoreError> {
        RedisEngine::health(self)
    }

    fn is_available(&self, limit: LimitId, key: HashedKey<'_>) -> bool {
        let Ok(limit) = self.0.stored(limit) else { return false };
        self.0.routes.is_available(self.0.routes.slot(&limit.queue_key(key).key))
    }

    fn last_heartbeat(&self) -> Option<Instant> {
        if self.servers().len() == 1 { self.0.membership.last_heartbeat() } else { None }
    }

    fn clock(&self) -> &Clock {
        &self.0.own_clock
    }

    fn tasks(&self) -> &Tasks {
        &self.0.tasks
    }
}

/// A limit that is removed with the last limiter for it.
struct Added {
    engine: RedisEngine,
    id: LimitId,
}

impl Drop for Added {
    fn drop(&mut self) {
        self.engine.remove_limit(self.id);
    }
}

/// A limit over keys in the store, without a guard. Cheap to clone.
#[derive(Clone)]
pub struct RedisLimiter {
    stored: Arc<StoredLimit>,
    added: Arc<Added>,
}

impl RedisLimiter {
    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.stored.limit
    }

    /// The id by which checks name the limit.
    pub fn id(&self) -> LimitId {
        self.stored.id
    }

    /// The script and the last argument that a check sends beside its key and the time, for benchmarks of the script alone.
    #[doc(hidden)]
    pub fn wire(&self, ask: Ask) -> (&'static str, Vec<u8>) {
        protocol::wire(&self.stored, ask)
    }

    /// The decision that [`RateLimiter::acquire`] would make, without taking anything.
    pub async fn peek(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        self.added.engine.ask(self.stored.id, HashedKey::new(key), Question::Peek(ask)).await
    }

    /// Gives back `permits` of a grant that was to start at `at` (its decision's time and delay), as far as they are
    /// still owed.
    pub async fn refund(&self, key: &str, permits: u64, at: Timestamp) -> Result<(), StoreError> {
        let queue_key = self.stored.queue_key(HashedKey::new(key));
        self.added.engine.0.refund(&self.stored, queue_key, permits, at).await
    }

    /// Takes `permits` without a decision, into bounded debt: for costs that are known only afterwards.
    pub async fn charge(&self, key: &str, permits: u64) -> Result<(), StoreError> {
        let deadline = self.stored.deadlines.wait;
        self.added.engine.charge(self.stored.id, HashedKey::new(key), permits, deadline).await
    }

    /// As [`RateLimiter::acquire`], and borrows permits with the same call.
    pub async fn borrow(
        &self,
        key: &str,
        ask: Ask,
        wanted: LeaseRequest,
    ) -> Result<(Decision, Option<LeaseGrant>), StoreError> {
        let check = Check::new(self.stored.id, key, 0).with_ask(ask);
        let (verdict, lent) = self.added.engine.borrow(&check, wanted, self.stored.deadlines.call).await?;
        Ok((verdict.decision, lent))
    }

    /// As [`Store::give_back`].
    pub async fn give_back(
        &self,
        key: &str,
        lease: &Lease,
        number: u64,
        terms: LeaseTerms,
    ) -> Result<Option<u64>, StoreError> {
        self.added.engine.give_back(self.stored.id, HashedKey::new(key), lease, number, terms).await
    }
}

impl RateLimiter for RedisLimiter {
    type Error = StoreError;

    async fn acquire(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        self.added.engine.ask(self.stored.id, HashedKey::new(key), Question::Take(ask)).await
    }

    async fn status(&self, key: &str) -> Result<Status, StoreError> {
        Ok(self.peek(key, Ask::of(0)).await?.status())
    }

    async fn reset(&self, key: &str) -> Result<(), StoreError> {
        Backend::reset(&self.added.engine, self.stored.id, HashedKey::new(key)).await
    }
}
