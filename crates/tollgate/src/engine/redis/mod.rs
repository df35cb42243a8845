//! The Redis engine: the state of all keys in Redis or Valkey, shared by many nodes.
//!
//! Every check is decided by one script call, on the server's own clock. Checks of a key that come while a call for it is in
//! flight go together in the next one, and denials are remembered for a moment; both leave every answer exact.

mod call;
mod config;
mod control;
mod discovery;
mod driver;
mod error;
mod eviction;
mod expiry;
mod fuse;
mod late;
mod lines;
mod node;
mod presence;
mod reach;
mod replay;
mod routes;
mod script;
mod set;
mod several;
mod slot;
mod takeover;
mod url;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::DropGuard;
use tollgate_core::lease::Lease;
use tollgate_core::{Ask, Decision, LeaseTerms, Limit, Micros, Standing, Timestamp};

use self::call::{Call, Leading};
pub use self::config::{LogStorage, RedisConfig, TlsConfig};
pub use self::control::{ASSIGNED_MAX, Assigned, AssignedTier, Control, News, Version};
pub use self::driver::RedisDriver;
use self::driver::{Tasks, driver};
pub use self::error::StoreError;
use self::late::within;
pub use self::lines::Lent;
use self::lines::{Done, Entered, LineKey, Lines, Remembering, Step};
use self::node::Bearings;
use self::presence::Presence;
pub use self::routes::ServerStatus;
use self::routes::{Reply, Routes};
pub use self::script::Wanted;
use self::script::{Change, Command, Question};
pub use self::url::{StoreUrl, StoreUrlError};
use super::RateLimiter;
use crate::clock::Clock;

/// Every key in the store begins with this.
pub const KEY_PREFIX: &str = "rate_limiter";

/// The longest that a denial is remembered: resets, refunds and raised limits on other nodes are seen within this.
pub const REMEMBER_MAX: Duration = Duration::from_millis(100);

/// What the engine has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RedisStats {
    /// Calls to the store.
    pub calls: u64,
    /// Checks that these calls have answered.
    pub asked: u64,
    /// Checks that were answered by a remembered denial.
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
    presence: Arc<Presence>,
    lines: Lines,
    tasks: Tasks,
    deadline: Duration,
    logs: LogStorage,
    clock: Option<Clock>,
    /// By which leases end: the time that is handed in, or this node's own.
    own_clock: Clock,
    counters: Counters,
    /// By [`StoreError::CLASSES`]: one failure, and when it was noted.
    last_failures: [Mutex<Option<(Instant, StoreError)>>; StoreError::CLASSES.len()],
    limiters: AtomicU32,
    _stop: DropGuard,
}

/// How long a failure is reported by [`RedisEngine::recent_failures`].
const KEEP_FOR: Duration = Duration::from_secs(10);

impl RedisEngine {
    /// An engine, and the driver that must run for it to answer. Connecting is the driver's work: an unreachable store is no
    /// error here.
    pub fn new(config: RedisConfig) -> (Self, RedisDriver) {
        // The first of several engines of a process settles it, and any will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (tasks, driver, stop) = driver();
        let (entry, sentinel_entry) = (config.entry(), config.sentinel_entry());
        let StoreUrl { shape, seeds, .. } = config.url;
        let remembering =
            Remembering { longest: config.remember_denials.min(REMEMBER_MAX), clock: config.clock.clone() };
        let routes = Routes::new(shape, seeds, entry, sentinel_entry, tasks.clone());
        let presence = Presence::new();
        if config.count_nodes {
            let (presence, routes) = (Arc::clone(&presence), Arc::clone(&routes));
            tasks.keep_running(move || Arc::clone(&presence).keep_up(Arc::clone(&routes)));
        }
        let inner = Inner {
            routes,
            presence,
            lines: Lines::new(remembering),
            tasks,
            deadline: config.deadline,
            logs: config.sliding_log,
            own_clock: config.clock.clone().unwrap_or_else(Clock::system),
            clock: config.clock,
            counters: Counters::default(),
            last_failures: Default::default(),
            limiters: AtomicU32::new(0),
            _stop: stop,
        };
        (Self(Arc::new(inner)), driver)
    }

    /// A limiter over the keys of `scope`: `rate_limiter:SCOPE:KEY` in the store, `rate_limiter:SCOPE_chunks:KEY` for a
    /// packed log.
    pub fn limiter(&self, scope: &str, limit: Limit) -> RedisLimiter {
        let id = self.0.limiters.fetch_add(1, Ordering::Relaxed);
        let own = Settings {
            limit,
            id,
            deadline: self.0.deadline,
            distrust: None,
            prefix: format!("{KEY_PREFIX}:{scope}{}:", self.0.logs.suffix(&limit)).into(),
        };
        RedisLimiter { inner: Arc::clone(&self.0), own: Arc::new(own) }
    }

    /// Whether the store can be asked now, or why not.
    pub fn health(&self) -> Result<(), StoreError> {
        self.0.routes.health()
    }

    /// The servers of the store, as far as they are known.
    pub fn servers(&self) -> Vec<ServerStatus> {
        self.0.routes.servers()
    }

    /// How many nodes share the store, as it last said: those that have said a word within five seconds.
    pub fn nodes(&self) -> Option<u32> {
        self.0.presence.nodes()
    }

    /// When the store last took in that this node lives.
    pub(crate) fn last_presence(&self) -> Option<Instant> {
        self.0.presence.last_said()
    }

    /// The clock by which leases end.
    pub(crate) fn own_clock(&self) -> &Clock {
        &self.0.own_clock
    }

    /// What went wrong in the last ten seconds or so, if anything did: one failure of each kind.
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

    /// What it has done so far.
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
    /// Counts a call that gave no decision, and keeps one of each kind for health.
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
        hash: u64,
        deadline: Instant,
        command: impl Fn(Bearings) -> Command,
    ) -> Result<Reply, StoreError> {
        let handed_in = self.clock.as_ref().map(Clock::now);
        let called = self.routes.call(key, slot, hash, deadline, |bearings| {
            let now = handed_in.or(bearings.now);
            command(Bearings { now, about: now.unwrap_or(bearings.about), ..bearings })
        });
        let called = called.await;
        if !matches!(called, Err(StoreError::BreakerOpen { .. })) {
            self.counters.calls.fetch_add(1, Ordering::Relaxed);
        }
        called.inspect_err(|why| self.count_failure(why))
    }
}

/// A limit over keys in the store. Cheap to clone.
#[derive(Clone)]
pub struct RedisLimiter {
    inner: Arc<Inner>,
    own: Arc<Settings>,
}

#[derive(Clone)]
struct Settings {
    limit: Limit,
    /// Limiters do not share what they remember, even where they share keys.
    id: u32,
    prefix: Box<str>,
    deadline: Duration,
    /// Whether what a failover may have lost counts as taken, and for how long permits are lent.
    distrust: Option<Micros>,
}

impl RedisLimiter {
    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.own.limit
    }

    /// A number that no other limiter of the engine has, but its clones.
    pub(crate) fn id(&self) -> u32 {
        self.own.id
    }

    /// For each check.
    fn deadline(&self) -> Duration {
        self.own.deadline
    }

    /// Whether what a failover may have lost counts as taken, and for how long permits are lent.
    fn distrust(&self) -> Option<Micros> {
        self.own.distrust
    }

    fn with(self, change: impl FnOnce(&mut Settings)) -> Self {
        let mut own = Settings::clone(&self.own);
        change(&mut own);
        Self { own: Arc::new(own), ..self }
    }

    /// The same limiter with another deadline for each check than the engine's.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        self.with(|own| own.deadline = deadline)
    }

    /// The same limiter, for which a key counts as used up when a server takes over from another or starts again, until everything
    /// that may have been lost has come back; where permits are lent for `life`, that much later. Logs keep every admission and
    /// have no such guard. Servers are asked for their history with INFO, when a connection is opened.
    #[must_use]
    pub fn guarding_failovers(self, life: Micros) -> Self {
        self.inner.routes.want_takeovers();
        self.with(|own| own.distrust = Some(life))
    }

    /// Takes `permits`, now or not at all.
    pub async fn try_acquire(&self, key: &str, permits: u64) -> Result<Decision, StoreError> {
        self.acquire(key, Ask::of(permits)).await
    }

    /// Takes permits, perhaps after a delay that the caller accepts.
    pub async fn acquire(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        self.ask(key, Question::Take(ask)).await
    }

    /// The answer that [`RedisLimiter::acquire`] would give, without taking anything.
    pub async fn peek(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        self.ask(key, Question::Peek(ask)).await
    }

    /// Where a key stands.
    pub async fn standing(&self, key: &str) -> Result<Standing, StoreError> {
        Ok(self.peek(key, Ask::of(0)).await?.standing())
    }

    /// Whole permits left. Takes nothing and creates nothing.
    pub async fn remaining(&self, key: &str) -> Result<u64, StoreError> {
        Ok(self.standing(key).await?.remaining)
    }

    /// Makes a key as good as new.
    pub async fn reset(&self, key: &str) -> Result<(), StoreError> {
        self.step(key, Step::Reset).await.map(drop)
    }

    /// Gives back `permits` of a grant that was to start at `at` (its decision's time and delay), as far as they are
    /// still owed.
    pub async fn refund(&self, key: &str, permits: u64, at: Timestamp) -> Result<(), StoreError> {
        self.step(key, Step::Change(Change::Refund { permits, at })).await.map(drop)
    }

    /// Takes `permits` without asking, into bounded debt: for costs that are known only afterwards.
    pub async fn charge(&self, key: &str, permits: u64) -> Result<(), StoreError> {
        self.step(key, Step::Change(Change::Charge { permits })).await.map(drop)
    }

    /// As [`RedisLimiter::acquire`], and borrows permits with the same call.
    pub async fn borrow(
        &self,
        key: &str,
        ask: Ask,
        wanted: Wanted,
    ) -> Result<(Decision, Option<Lent>), StoreError> {
        match self.step(key, Step::Ask(Question::Borrow(ask, Box::new(wanted)))).await? {
            Done::Answered(decision, lent) => Ok((decision, lent.map(|lent| *lent))),
            Done::Changed | Done::OutOfTurn(_) => Err(Self::unanswered()),
        }
    }

    /// Gives back what is left of a lease, as the return that follows `number` others. If there were more, they are told, and
    /// nothing is given back.
    pub async fn give_back(
        &self,
        key: &str,
        lease: &Lease,
        number: u64,
        terms: LeaseTerms,
    ) -> Result<Option<u64>, StoreError> {
        let counted = terms.counts_out();
        let change = Change::Return { permits: lease.left, at: lease.at, number, counted };
        match self.step(key, Step::Change(change)).await? {
            Done::Changed => Ok(None),
            Done::OutOfTurn(number) => Ok(Some(number)),
            Done::Answered(..) => Err(Self::unanswered()),
        }
    }

    /// Whether the server of a key can be asked now.
    pub(crate) fn is_available(&self, key: &str) -> bool {
        self.inner.routes.is_available(self.inner.routes.slot(&self.key(key)))
    }

    /// The engine that it belongs to.
    pub(crate) fn engine(&self) -> RedisEngine {
        RedisEngine(Arc::clone(&self.inner))
    }

    /// How many nodes share the store, as it last said.
    pub(crate) fn nodes(&self) -> Option<u32> {
        self.inner.presence.nodes()
    }

    /// A call that goes on with the driver if its caller leaves.
    pub(crate) fn leading<F, T>(&self, call: F) -> Leading<F, T>
    where
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        Leading::new(call, self.inner.tasks.clone())
    }

    /// Lets the engine's driver run something that nobody waits for.
    pub(crate) fn hand_over(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.inner.tasks.hand_over(task);
    }

    /// Lets the engine's driver run a task until it ends, and start it again if it panics.
    pub(crate) fn keep_running<F>(&self, task: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.inner.tasks.keep_running(task);
    }

    fn key(&self, key: &str) -> Arc<str> {
        let prefix = &*self.own.prefix;
        let mut whole = String::with_capacity(prefix.len() + key.len());
        whole.push_str(prefix);
        whole.push_str(key);
        whole.into()
    }

    fn line(&self, key: Arc<str>) -> LineKey {
        LineKey { limiter: self.id(), hash: self.inner.lines.hash(&key), key }
    }

    async fn ask(&self, key: &str, question: Question) -> Result<Decision, StoreError> {
        Self::answered(self.step(key, Step::Ask(question)).await?)
    }

    fn answered(done: Done) -> Result<Decision, StoreError> {
        match done {
            Done::Answered(decision, _) => Ok(decision),
            Done::Changed | Done::OutOfTurn(_) => Err(Self::unanswered()),
        }
    }

    fn unanswered() -> StoreError {
        StoreError::protocol("a question without an answer")
    }

    async fn step(&self, key: &str, step: Step) -> Result<Done, StoreError> {
        self.step_at(self.key(key), step).await
    }

    /// As `peek`, by the key in the store.
    async fn peek_key(&self, key: Arc<str>, ask: Ask) -> Result<Decision, StoreError> {
        Self::answered(self.step_at(key, Step::Ask(Question::Peek(ask))).await?)
    }

    /// As `refund`, by the key in the store.
    async fn refund_key(&self, key: Arc<str>, permits: u64, at: Timestamp) -> Result<(), StoreError> {
        self.step_at(key, Step::Change(Change::Refund { permits, at })).await.map(drop)
    }

    async fn step_at(&self, key: Arc<str>, step: Step) -> Result<Done, StoreError> {
        let now = Instant::now();
        let deadline = now + self.deadline();
        let line = self.line(key);
        match self.inner.lines.enter(&line, self.limit(), &step, now) {
            Entered::Denied(decision) => {
                self.inner.counters.remembered.fetch_add(1, Ordering::Relaxed);
                Ok(Done::Answered(decision, None))
            }
            Entered::Lead => {
                let call = Call::new(self, line);
                self.leading(call.lead(step, deadline)).await
            }
            Entered::Wait(answer) => match within(deadline, answer).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) if self.inner.tasks.is_stopped() => Err(StoreError::Stopped),
                Ok(Err(_)) => Err(StoreError::Panicked),
                Err(_) => {
                    let late = StoreError::Timeout(self.deadline());
                    self.inner.count_failure(&late);
                    Err(late)
                }
            },
            Entered::Full => {
                self.inner.count_failure(&StoreError::Overloaded);
                Err(StoreError::Overloaded)
            }
        }
    }
}

impl RateLimiter for RedisLimiter {
    type Error = StoreError;

    async fn acquire(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        RedisLimiter::acquire(self, key, ask).await
    }

    async fn standing(&self, key: &str) -> Result<Standing, StoreError> {
        RedisLimiter::standing(self, key).await
    }

    async fn reset(&self, key: &str) -> Result<(), StoreError> {
        RedisLimiter::reset(self, key).await
    }
}
