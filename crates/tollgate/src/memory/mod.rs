//! The memory engine: the state of all keys in this process, behind many small locks.

mod numbers;
mod sets;
mod slot_codec;
mod stripe;

use std::convert::Infallible;
use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::{Mutex, RwLock};
use tollgate_core::{Algorithm, Ask, Decision, Limit, Micros, Outcome, Status, Timestamp, with_algorithm};

pub use self::numbers::TooManyLimits;
use self::numbers::{LIMITS_MAX, LimitNumber, Limits};
use self::slot_codec::SlotCodec;
use self::stripe::{Asker, FILL_MEAN, Stripe, stripe_of};
use crate::backend::Backend;
use crate::by_limit::ByLimit;
use crate::check::{Check, HashedKey, LimitId};
use crate::clock::Clock;
use crate::hash::Hash;
use crate::rate_limiter::RateLimiter;
use crate::redis::StoreError;
use crate::settings::LimitSettings;
use crate::sync::Lock;
use crate::verdict::{Verdict, Verdicts};

/// Stripes of a small table. Threads in the same stripe wait for each other, so there are more stripes than cores.
const STRIPES_MIN: usize = 64;

/// How large the engine may become.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryConfig {
    /// Keys kept at the same time. Beyond it, new keys evict the keys that have used the least of their limit, of scopes that hold more
    /// than their part: the keys divided by the number of scopes. Keys are spread over stripes at random, so an eighth more (in small
    /// tables more) may be held before that.
    pub max_keys: usize,
}

impl Default for MemoryConfig {
    /// A million keys: 48 MB if all of them are in use at once, next to nothing before.
    fn default() -> Self {
        Self { max_keys: 1_000_000 }
    }
}

/// The state of all keys of this process. Clones share it.
#[derive(Clone)]
pub struct MemoryEngine {
    table: Arc<Table>,
    added: Arc<Added>,
}

/// Limits that checks name by their id.
#[derive(Default)]
struct Added {
    limiters: ByLimit<MemoryLimiter>,
    count: AtomicU32,
}

impl std::fmt::Debug for MemoryEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryEngine").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

struct Table {
    stripes: Box<[Padded]>,
    /// The limits that states refer to by number, so that a state can be read without its limiter. Read only with a stripe
    /// locked, never the other way round.
    limits: RwLock<Limits>,
    /// Locked while a limit is numbered, so that an unused number stays unused until it is assigned again.
    numbering: Mutex<()>,
    clock: Clock,
}

/// A stripe in its own cache lines, so that threads on neighbouring stripes do not slow each other down.
#[repr(align(128))]
struct Padded(Lock<Stripe>);

/// Counts of the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryStats {
    /// Keys with a state.
    pub keys: u64,
    /// Bytes allocated for them.
    pub bytes: u64,
    /// Keys that were evicted before they were full again.
    pub evicted: u64,
}

impl MemoryEngine {
    /// An empty engine.
    pub fn new(config: MemoryConfig, clock: Clock) -> Self {
        let stripes = config.max_keys.div_ceil(FILL_MEAN).max(STRIPES_MIN);
        let keys = config.max_keys.div_ceil(stripes).max(1);
        let stripes = (0..stripes).map(|_| Padded(Lock::new(Stripe::new(keys)))).collect();
        let table = Table { stripes, limits: RwLock::default(), numbering: Mutex::default(), clock };
        Self { table: Arc::new(table), added: Arc::default() }
    }

    /// A limiter for the keys of `scope`. Limiters of the same scope share their states: the permits consumed under one limit count under
    /// another limit of the same algorithm. A key whose algorithm changes starts afresh, so scopes should name the algorithm.
    pub fn limiter(&self, scope: &str, limit: Limit) -> Result<MemoryLimiter, TooManyLimits> {
        let scope = Hash::of_scope(scope);
        let (number, held) = self.table.number(scope, limit).ok_or(TooManyLimits)?;
        Ok(MemoryLimiter { table: Arc::clone(&self.table), limit, number, _held: held, scope })
    }

    /// The engine's clock.
    pub fn clock(&self) -> &Clock {
        &self.table.clock
    }

    /// Drops the keys that are full again in `parts` of the table from `from` on, and returns where to continue. Such keys also
    /// leave when their room is needed; this frees memory while no new keys come.
    pub fn sweep(&self, from: usize, parts: usize) -> usize {
        let now = self.table.clock.now();
        let stripes = self.table.stripes.len();
        for index in from..from + parts.min(stripes) {
            self.table.stripes[index % stripes].0.lock().sweep(&self.table.limits, now);
        }
        (from + parts) % stripes
    }

    /// Forgets all keys.
    pub fn clear(&self) {
        for stripe in &self.table.stripes {
            stripe.0.lock().clear();
        }
    }

    /// In how many parts [`MemoryEngine::sweep`] sees the table.
    pub fn parts(&self) -> usize {
        self.table.stripes.len()
    }

    /// Its counts. Reads every part of the table, so it is for reports only.
    pub fn stats(&self) -> MemoryStats {
        let mut stats =
            MemoryStats { bytes: size_of_val(&*self.table.stripes) as u64, ..MemoryStats::default() };
        for stripe in &self.table.stripes {
            let stripe = stripe.0.lock();
            stats.keys += stripe.len() as u64;
            stats.bytes += stripe.bytes() as u64;
            stats.evicted += stripe.evicted();
        }
        stats
    }
}

impl Table {
    /// The number of a limit of a scope, and a handle that keeps the number. If all numbers are assigned, the numbers without limiter and
    /// states are freed: a walk over the whole table, once in 65,534 limits.
    fn number(&self, scope: Hash, limit: Limit) -> Option<(LimitNumber, Arc<()>)> {
        let _numbering = self.numbering.lock();
        let numbered = self.limits.write().number(scope, limit);
        if numbered.is_some() {
            return numbered;
        }
        // States are only written under limits with a limiter, so the numbers in use can only become fewer. A number that is released
        // during the walk may have been written after its stripe was read, and is freed the next time.
        let mut noted = vec![false; usize::from(LIMITS_MAX) + 1];
        self.limits.read().note_held(&mut noted);
        let now = self.clock.now();
        for stripe in &self.stripes {
            stripe.0.lock().note_limits(&self.limits, now, &mut noted);
        }
        let mut limits = self.limits.write();
        limits.forget(&noted);
        limits.number(scope, limit).or_else(|| limits.number_of_another_scope(limit))
    }

    #[inline]
    fn stripe(&self, hash: Hash) -> &Lock<Stripe> {
        &self.stripes[stripe_of(hash, self.stripes.len())].0
    }
}

/// One limit over the keys of one scope.
///
/// All of it is synchronous and in this process: a decision is one lock of a small part of the table. The async trait
/// [`RateLimiter`] wraps the same functions.
#[derive(Clone)]
pub struct MemoryLimiter {
    table: Arc<Table>,
    limit: Limit,
    number: LimitNumber,
    /// Keeps the number from being given to another limit.
    _held: Arc<()>,
    /// Separates the keys of this scope from equal keys of others.
    scope: Hash,
}

impl MemoryLimiter {
    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Takes `permits`, now or not at all.
    #[inline]
    pub fn try_acquire(&self, key: &str, permits: u64) -> Decision {
        self.acquire(key, Ask::of(permits))
    }

    /// Takes permits, perhaps after a delay that the caller accepts.
    #[inline]
    pub fn acquire(&self, key: &str, ask: Ask) -> Decision {
        self.acquire_hashed(Hash::of(key), ask)
    }

    #[inline]
    fn acquire_hashed(&self, key: Hash, ask: Ask) -> Decision {
        with_algorithm!(&self.limit, |it| self.decide(it, key, ask))
    }

    /// Takes `permits`, now or not at all, and returns the outcome alone. Faster than [`MemoryLimiter::try_acquire`], because the
    /// status is not computed.
    #[inline]
    pub fn take(&self, key: &str, permits: u64) -> Outcome {
        let (key, ask) = (Hash::of(key), Ask::of(permits));
        with_algorithm!(&self.limit, |it| self.outcome_of(it, key, ask))
    }

    /// The decision that [`MemoryLimiter::acquire`] would make, without taking anything.
    pub fn peek(&self, key: &str, ask: Ask) -> Decision {
        self.peek_hashed(Hash::of(key), ask)
    }

    fn peek_hashed(&self, key: Hash, ask: Ask) -> Decision {
        let asker = self.asker(key);
        self.look(&self.table.stripe(asker.hash).lock(), asker, ask)
    }

    /// Whole permits left. Takes nothing and creates no state.
    pub fn remaining(&self, key: &str) -> u64 {
        self.status(key).remaining
    }

    /// The status of a key.
    pub fn status(&self, key: &str) -> Status {
        self.peek(key, Ask::of(0)).status()
    }

    /// Resets a key.
    pub fn reset(&self, key: &str) {
        self.reset_hashed(Hash::of(key));
    }

    fn reset_hashed(&self, key: Hash) {
        let hash = key.within(self.scope);
        self.table.stripe(hash).lock().remove(hash, &self.table.limits);
    }

    /// Gives back `permits` of a grant that was to start at `at` (its decision's time and delay), as far as they are
    /// still owed.
    pub fn refund(&self, key: &str, permits: u64, at: Timestamp) {
        self.change(Hash::of(key), Change::Refund { permits, at });
    }

    /// Takes `permits` without a decision, into bounded debt: for costs that are known only afterwards.
    pub fn charge(&self, key: &str, permits: u64) {
        self.change(Hash::of(key), Change::Charge { permits });
    }

    /// Whether an ask may change the data beside a state: a reservation can take more than its cost, and a denial can count the permits
    /// that a reservation has skipped.
    #[inline]
    const fn changes_beside(&self, ask: Ask) -> bool {
        (ask.wait.is_some() || self.limit.counts_denied_in_window()) && self.limit.forgoes()
    }

    #[inline]
    fn outcome_of<A: SlotCodec>(&self, algorithm: &A, key: Hash, ask: Ask) -> Outcome {
        if self.changes_beside(ask) {
            return self.decide(algorithm, key, ask).outcome;
        }
        let asker = self.asker(key);
        let mut stripe = self.table.stripe(asker.hash).lock();
        stripe.update(asker, algorithm, || self.takes(ask), |state| algorithm.decide(state, asker.now, ask))
    }

    /// Whether an ask depends on the state: a cost of 0 is always admitted, and a cost above the size never.
    #[inline]
    fn takes(&self, ask: Ask) -> bool {
        ask.cost > 0 && ask.cost <= self.limit.size()
    }

    /// The data of a request before its stripe is locked. The time is read here, after the key and before the lock, because
    /// reading it stalls the processor, as the lock does, and must not stall it while a slot is being loaded.
    #[inline(always)]
    fn asker(&self, key: Hash) -> Asker<'_> {
        self.asker_at(key.within(self.scope), self.table.clock.now())
    }

    #[inline(always)]
    fn asker_at(&self, hash: Hash, now: Timestamp) -> Asker<'_> {
        Asker { hash, id: self.number, limit: &self.limit, now, limits: &self.table.limits }
    }

    #[inline]
    fn decide<A: SlotCodec>(&self, algorithm: &A, key: Hash, ask: Ask) -> Decision {
        let asker = self.asker(key);
        self.decide_in(algorithm, self.table.stripe(asker.hash).lock(), asker, ask)
    }

    /// Decides in a locked stripe, and computes the status after `stripe` is dropped.
    #[inline]
    fn decide_in<A: SlotCodec>(
        &self,
        algorithm: &A,
        mut stripe: impl DerefMut<Target = Stripe>,
        asker: Asker<'_>,
        ask: Ask,
    ) -> Decision {
        let now = asker.now;
        if self.changes_beside(ask) {
            let (outcome, status) = stripe.update_whole(asker, algorithm, self.takes(ask), |state| {
                let outcome = self.limit.decide(state, now, ask);
                (outcome, self.limit.status(state, now))
            });
            return self.decision(outcome, status, now);
        }
        let (outcome, snapshot) = stripe.update(
            asker,
            algorithm,
            || self.takes(ask),
            |state| {
                let outcome = algorithm.decide(state, now, ask);
                (outcome, algorithm.snapshot(state, now))
            },
        );
        drop(stripe);
        self.decision(outcome, algorithm.status_of(snapshot, now), now)
    }

    fn decision(&self, outcome: Outcome, status: Status, at: Timestamp) -> Decision {
        Decision { outcome, limit: self.limit.size(), remaining: status.remaining, reset: status.reset, at }
    }

    fn change(&self, key: Hash, change: Change) {
        with_algorithm!(&self.limit, |it| self.apply(it, key, change))
    }

    fn apply<A: SlotCodec>(&self, algorithm: &A, key: Hash, change: Change) {
        let asker = self.asker(key);
        let now = asker.now;
        let mut stripe = self.table.stripe(asker.hash).lock();
        let takes = matches!(change, Change::Charge { permits: 1.. });
        if let (Change::Refund { permits, at }, true) = (change, self.limit.forgoes()) {
            return stripe.update_whole(asker, algorithm, false, |state| {
                self.limit.refund(state, now, permits, at);
            });
        }
        stripe.update(
            asker,
            algorithm,
            || takes,
            |state| match change {
                Change::Refund { permits, at } => algorithm.refund(state, now, permits, at),
                Change::Charge { permits } => algorithm.charge(state, now, permits),
            },
        );
    }
}

/// A change without a decision.
#[derive(Clone, Copy)]
enum Change {
    Refund { permits: u64, at: Timestamp },
    Charge { permits: u64 },
}

impl Backend for MemoryEngine {
    type Error = Infallible;

    fn add_limit(&self, scope: &str, limit: Limit, _: &LimitSettings) -> Result<LimitId, TooManyLimits> {
        let limiter = self.limiter(scope, limit)?;
        let id = LimitId(self.added.count.fetch_add(1, Ordering::Relaxed));
        self.added.limiters.insert(id, limiter);
        Ok(id)
    }

    fn remove_limit(&self, id: LimitId) {
        self.added.limiters.remove(id);
    }

    async fn decide(&self, checks: &[Check<'_>]) -> Result<Verdicts, Infallible> {
        Ok(self.decide_all(checks).into_iter().map(|decision| decision.map(Verdict::exact)).collect())
    }

    async fn peek(&self, check: &Check<'_>) -> Result<Verdict, Infallible> {
        Ok(Verdict::exact(self.peek_now(check)))
    }

    async fn reset(&self, limit: LimitId, key: HashedKey<'_>) -> Result<(), StoreError> {
        if let Some(limiter) = self.added.limiters.get(limit) {
            limiter.reset_hashed(key.hash());
        }
        Ok(())
    }

    async fn refund(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        if let Some(limiter) = self.added.limiters.get(limit) {
            limiter.change(key.hash(), Change::Refund { permits, at });
        }
        Ok(())
    }
}

impl MemoryEngine {
    /// The decision that [`MemoryEngine::decide_all`] would make on a check alone, without taking anything.
    pub fn peek_now(&self, check: &Check<'_>) -> Decision {
        match self.added.limiters.get(check.limit) {
            Some(limiter) => limiter.peek_hashed(check.key.hash(), check.ask),
            None => self.removed(),
        }
    }

    /// The decision on a check whose limit was removed: it admits nothing.
    fn removed(&self) -> Decision {
        let (at, reset) = (self.table.clock.now(), Micros::ZERO);
        Decision { outcome: Outcome::Impossible, limit: 0, remaining: 0, reset, at }
    }
}

impl RateLimiter for MemoryLimiter {
    type Error = Infallible;

    async fn acquire(&self, key: &str, ask: Ask) -> Result<Decision, Infallible> {
        Ok(MemoryLimiter::acquire(self, key, ask))
    }

    async fn status(&self, key: &str) -> Result<Status, Infallible> {
        Ok(MemoryLimiter::status(self, key))
    }

    async fn reset(&self, key: &str) -> Result<(), Infallible> {
        MemoryLimiter::reset(self, key);
        Ok(())
    }
}
