//! Leases: decides with permits that this node has borrowed from a shared backend, and asks the backend when they run out.
//!
//! Borrowed permits are charged in the store at once, so the shared limit holds whatever happens here. The backend itself decides on keys
//! with too few requests for a lease, and on limits with too many nodes.

mod local;
mod table;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use tokio::time::{Instant, sleep};
use tollgate_core::{Ask, LeaseTerms, Limit, Micros, Outcome, Timestamp};

use self::local::{Part, Rest};
use self::table::{GivenUp, Table};
use crate::backend::{Backend, Deadlines, LeaseRequest, Store};
use crate::by_limit::ByLimit;
use crate::check::{Check, HashedKey, LimitId, OwnedKey};
use crate::deadline::within;
use crate::memory::TooManyLimits;
use crate::redis::StoreError;
use crate::settings::LimitSettings;
use crate::tasks::Leading;
use crate::verdict::{Basis, Verdict, Verdicts};

/// The assumed number of nodes until the store reports it.
const NODES_ASSUMED: u64 = 3;
/// Returns that are under way at the same time.
const RETURNS_AT_ONCE: usize = 64;
/// Attempts to give a lease back: other nodes may give back to the same key at the same time.
const RETURN_ATTEMPTS: usize = 4;
/// How long a store counts as slow after a late answer.
const FAR_BELIEVED: Micros = Micros::from_secs(1);
/// The shortest and the longest pause between two sweeps for ended and idle leases.
const SWEEP_MIN: Duration = Duration::from_millis(25);
const SWEEP_MAX: Duration = Duration::from_millis(100);

/// Counts of borrowed permits. Granted permits are spent, returned, expired, lost or held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LeaseStats {
    /// Permits that the store has lent.
    pub granted: u64,
    /// Permits spent on requests.
    pub spent: u64,
    /// Permits that were given back.
    pub returned: u64,
    /// Permits that were not spent in time.
    pub expired: u64,
    /// Permits that could not be given back.
    pub lost: u64,
    /// Permits that are held now.
    pub held: u64,
    /// Keys in the table.
    pub keys: u64,
    /// By how many permits a burst can be too large.
    pub overshoot: u64,
}

impl LeaseStats {
    /// Adds the counts of another limit. The larger overshoot counts.
    pub fn add(&mut self, other: &Self) {
        self.granted += other.granted;
        self.spent += other.spent;
        self.returned += other.returned;
        self.expired += other.expired;
        self.lost += other.lost;
        self.held += other.held;
        self.keys += other.keys;
        self.overshoot = self.overshoot.max(other.overshoot);
    }
}

/// A backend that decides with borrowed permits where that is worth it. Clones share everything.
pub struct Lease<B: Store>(Arc<Inner<B>>);

impl<B: Store> Clone for Lease<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

struct Inner<B: Store> {
    backend: B,
    /// The limits that nodes borrow from. The backend decides on all others.
    limits: ByLimit<Leased<B>>,
    /// Set when nothing is borrowed any more.
    closed: Arc<AtomicBool>,
    /// Whether the sweep runs.
    is_swept: AtomicBool,
}

/// A limit that nodes borrow from.
pub(crate) struct Leased<B: Store> {
    backend: B,
    id: LimitId,
    limit: Limit,
    terms: LeaseTerms,
    /// The leases of this node, by key.
    table: Table,
    /// How long a caller waits for the store, and how long a borrowing call may take.
    deadlines: Deadlines,
    closed: Arc<AtomicBool>,
    /// Calls under way that borrow or give back.
    under_way: AtomicUsize,
    /// How long the store takes to lend, in microseconds. Slower answers count at once, faster ones gradually.
    trip_us: AtomicU64,
    /// When the store was last found to be slow, or asked although it is.
    far_us: AtomicU64,
}

impl<B: Store> Lease<B> {
    /// Decorates a backend. Calls whose callers have left go on with the tasks of the backend.
    pub fn new(backend: B) -> Self {
        let inner = Inner {
            backend,
            limits: ByLimit::default(),
            closed: Arc::default(),
            is_swept: AtomicBool::new(false),
        };
        Self(Arc::new(inner))
    }

    /// The backend that is borrowed from.
    pub fn backend(&self) -> &B {
        &self.0.backend
    }

    /// Gives all leases back, and borrows nothing any more: before a program ends.
    pub async fn close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
        let limits: Vec<_> = self.0.limits.read().values().cloned().collect();
        join_all(limits.iter().map(|it| it.close())).await;
    }

    /// Counts of borrowed permits, over all limits. Reads every part of the tables, so it is for reports only.
    pub fn stats(&self) -> LeaseStats {
        let mut all = LeaseStats::default();
        for leased in self.0.limits.read().values() {
            all.add(&leased.stats());
        }
        all
    }

    /// Decides on a request with held permits, or returns the part that the store has to decide. Separate from
    /// [`Lease::decide_in_store`], because most requests end here and need no future.
    #[inline]
    pub(crate) fn decide_locally<'a>(&self, checks: &[Check<'a>]) -> Result<Verdicts, Rest<'a, B>> {
        self.0.decide_locally(checks)
    }

    /// Decides on a request that could not be decided locally.
    pub(crate) async fn decide_in_store<'a>(
        &self,
        checks: &[Check<'a>],
        rest: Rest<'a, B>,
    ) -> Result<Verdicts, B::Error> {
        match rest {
            Rest::All => self.0.backend.decide(checks).await,
            Rest::One(leased, ahead) => Box::pin(self.ask_store(&leased, &checks[0], ahead)).await,
            Rest::Part(part) => Box::pin(self.decide_rest(*part)).await,
        }
    }

    /// Decides on one check whose limit has no permits here, and borrows `ahead` permits with the same call.
    async fn ask_store(
        &self,
        leased: &Arc<Leased<B>>,
        check: &Check<'_>,
        ahead: u64,
    ) -> Result<Verdicts, B::Error> {
        let Deadlines { wait, call: at_most } = leased.deadlines;
        let late = || self.0.backend.late(std::slice::from_ref(check), wait);
        if leased.is_far() {
            if ahead > 0 {
                leased.fetch(check.key, ahead);
            }
            return late();
        }
        if ahead == 0 {
            let sent = leased.now();
            let verdicts = self.0.backend.decide(std::slice::from_ref(check)).await?;
            if let Some(Some(verdict)) = verdicts.first() {
                leased.note_near(verdict);
                leased.note(check, verdict, sent);
            }
            return Ok(verdicts);
        }
        // Other requests count on this call, so it goes on if the caller leaves.
        let call = Borrowing::begin(leased, check.key).borrow(check.ask, ahead);
        let call = Leading::new(call, self.0.backend.tasks().clone());
        let answer = if at_most <= wait {
            call.await
        } else {
            match within(Instant::now() + wait, call).await {
                Ok(answer) => answer,
                Err(_) => return late(),
            }
        };
        match answer {
            Ok(verdict) => {
                leased.note_near(&verdict);
                Ok(Verdicts::from_iter([Some(verdict)]))
            }
            Err(why) => self.0.backend.undecided(std::slice::from_ref(check), &why),
        }
    }

    /// Decides on a request some of whose limits need the backend. Permits spent here are put back unless all limits admit.
    async fn decide_rest(&self, part: Part<'_, B>) -> Result<Verdicts, B::Error> {
        let Part { mut verdicts, spent, rest, asked, numbers } = part;
        let sent = self.0.backend.clock().exact_now();
        let far = asked.iter().find(|(_, it)| it.is_far());
        let decided = match far {
            Some((_, it)) => self.0.backend.late(&rest, it.deadlines.wait)?,
            None => self.0.backend.decide(&rest).await?,
        };
        let mut all = true;
        for ((number, check), verdict) in numbers.into_iter().zip(&rest).zip(decided) {
            all &= !check.enforced || verdict.is_some_and(|verdict| verdict.is_admitted());
            verdicts[number] = verdict;
            if let (Some(verdict), Some((_, leased))) = (verdict, asked.iter().find(|(it, _)| *it == number))
            {
                leased.note_near(&verdict);
                // Checks of the same key were decided as one, for the sum. A denial says nothing about a smaller cost.
                let same =
                    rest.iter().filter(|it| it.limit == check.limit && it.key.hash() == check.key.hash());
                let cost = same.fold(0, |sum: u64, it| sum.saturating_add(it.ask.cost));
                leased.note(&check.with_ask(Ask { cost, ..check.ask }), &verdict, sent);
            }
        }
        if all {
            spent.keep();
        }
        Ok(verdicts)
    }
}

impl<B: Store> Backend for Lease<B> {
    type Error = B::Error;

    fn add_limit(
        &self,
        scope: &str,
        limit: Limit,
        settings: &LimitSettings,
    ) -> Result<LimitId, TooManyLimits> {
        let inner = &self.0;
        let id = inner.backend.add_limit(scope, limit, settings)?;
        if let Ok(terms) = settings.lease_terms(&limit) {
            let leased = Leased {
                backend: inner.backend.clone(),
                id,
                limit,
                terms,
                table: Table::new(),
                deadlines: inner.backend.deadlines(id),
                closed: Arc::clone(&inner.closed),
                under_way: AtomicUsize::new(0),
                trip_us: AtomicU64::new(0),
                far_us: AtomicU64::new(0),
            };
            inner.limits.insert(id, leased);
            if !inner.is_swept.swap(true, Ordering::SeqCst) {
                let swept = Arc::downgrade(inner);
                inner.backend.tasks().keep_running(move || sweep(Weak::clone(&swept)));
            }
        }
        Ok(id)
    }

    fn remove_limit(&self, id: LimitId) {
        // Its leases are given back when the last check under way has ended. After that the backend removes the limit.
        if self.0.limits.get(id).is_none() {
            return self.0.backend.remove_limit(id);
        }
        self.0.limits.remove(id);
    }

    #[inline]
    async fn decide(&self, checks: &[Check<'_>]) -> Result<Verdicts, B::Error> {
        match self.decide_locally(checks) {
            Ok(verdicts) => Ok(verdicts),
            Err(rest) => self.decide_in_store(checks, rest).await,
        }
    }

    async fn peek(&self, check: &Check<'_>) -> Result<Verdict, B::Error> {
        let mut verdict = self.0.backend.peek(check).await?;
        if let (Some(leased), Basis::Exact) = (self.0.limits.get(check.limit), verdict.basis) {
            let left = leased.table.left(check.key, leased.now());
            let decision = &mut verdict.decision;
            if left >= check.ask.cost && matches!(decision.outcome, Outcome::Denied { .. }) {
                decision.outcome = Outcome::NOW;
            }
            decision.remaining = decision.remaining.saturating_add(left).min(decision.limit);
        }
        Ok(verdict)
    }

    /// Other nodes may still spend their leases of the key.
    async fn reset(&self, limit: LimitId, key: HashedKey<'_>) -> Result<(), StoreError> {
        self.0.backend.reset(limit, key).await?;
        if let Some(leased) = self.0.limits.get(limit) {
            let now = leased.now();
            leased.table.change(key, |cell, stats| {
                stats.lost += cell.lease.left(now);
                cell.lease.forget();
            });
        }
        Ok(())
    }

    /// Permits go back to the store, whichever node spent them. A denial that this node has cached ends with that.
    async fn refund(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        self.0.backend.refund(limit, key, permits, at).await?;
        if let Some(leased) = self.0.limits.get(limit) {
            leased.table.change(key, |cell, _| cell.lease.forget_denial());
        }
        Ok(())
    }
}

impl<B: Store> Leased<B> {
    fn now(&self) -> Timestamp {
        self.backend.clock().exact_now()
    }

    /// The number of parts that the permits left are cut into. `None` if nothing is borrowed.
    fn parts(&self) -> Option<u64> {
        if self.closed.load(Ordering::Relaxed) {
            return None;
        }
        self.terms.parts(self.nodes())
    }

    /// Whether the store takes longer to answer than a caller waits. Then it is asked for leases only. Now and then one caller asks it
    /// anyway, to find out whether the store is fast again where no key is worth a lease.
    fn is_far(&self) -> bool {
        if u128::from(self.trip_us.load(Ordering::Relaxed)) <= self.deadlines.wait.as_micros() {
            return false;
        }
        let (now_us, far_us) = (self.now().as_micros(), self.far_us.load(Ordering::Relaxed));
        now_us.saturating_sub(far_us) < FAR_BELIEVED.get()
            || self.far_us.compare_exchange(far_us, now_us, Ordering::Relaxed, Ordering::Relaxed).is_err()
    }

    fn note_trip(&self, trip: Micros) {
        let known = self.trip_us.load(Ordering::Relaxed);
        self.trip_us.store(trip.get().max(known - known / 8), Ordering::Relaxed);
        self.far_us.store(self.now().as_micros(), Ordering::Relaxed);
    }

    /// Records that the store has answered a caller in time.
    fn note_near(&self, verdict: &Verdict) {
        if verdict.basis == Basis::Exact {
            let wait_us = u64::try_from(self.deadlines.wait.as_micros()).unwrap_or(u64::MAX);
            self.trip_us.fetch_min(wait_us, Ordering::Relaxed);
        }
    }

    fn nodes(&self) -> u64 {
        self.backend.nodes().map_or(NODES_ASSUMED, u64::from)
    }

    fn stats(&self) -> LeaseStats {
        let overshoot = self.terms.overshoot(&self.limit, self.nodes());
        LeaseStats { overshoot, ..self.table.stats(self.now()) }
    }

    /// Borrows `ahead` permits of a key, in the background.
    fn fetch(self: &Arc<Self>, key: HashedKey<'_>, ahead: u64) {
        let borrowing = Borrowing::begin(self, key);
        self.backend.tasks().hand_over(async move {
            // The table records the result.
            let _ = borrowing.borrow(Ask::of(0), ahead).await;
        });
    }

    /// Caches a denial of the store.
    fn note(&self, check: &Check<'_>, verdict: &Verdict, sent: Timestamp) {
        let decision = &verdict.decision;
        let (Outcome::Denied { retry }, None | Some(Micros::ZERO), Basis::Exact) =
            (decision.outcome, check.ask.wait, verdict.basis)
        else {
            return;
        };
        let now = self.now();
        self.table.change(check.key, |cell, _| {
            cell.lease.answered(now, sent, 0, None, Some((check.ask.cost, retry)), &self.terms);
            cell.record(decision, 0, now);
        });
    }

    async fn close(&self) {
        let given_up = self.table.sweep(self.now(), &self.terms, true);
        self.give_back(given_up).await;
        // Leases that are being borrowed are given back on arrival. Idle ones may be on their way back already.
        while self.under_way.load(Ordering::SeqCst) > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    }

    async fn give_back(&self, given_up: Vec<GivenUp>) {
        let _under_way = UnderWay::begin(&self.under_way);
        let give_back = |given_up: GivenUp| async move {
            let number = given_up.give_back(&self.backend, self.id, self.terms).await;
            self.table.change(given_up.key(), |cell, stats| match number {
                Some(number) => {
                    cell.returns = number;
                    stats.returned += given_up.lease.left;
                }
                None => stats.lost += given_up.lease.left,
            });
        };
        stream::iter(given_up).for_each_concurrent(RETURNS_AT_ONCE, give_back).await;
    }
}

/// Gives back the leases of a limit that is no longer used, in the background, and then removes the limit.
impl<B: Store> Drop for Leased<B> {
    fn drop(&mut self) {
        let given_up = self.table.sweep(self.now(), &self.terms, true);
        let (backend, id, terms) = (self.backend.clone(), self.id, self.terms);
        if given_up.is_empty() {
            return backend.remove_limit(id);
        }
        self.backend.tasks().hand_over(async move {
            let give_back = |given_up: GivenUp| {
                let backend = &backend;
                async move {
                    given_up.give_back(backend, id, terms).await;
                }
            };
            stream::iter(given_up).for_each_concurrent(RETURNS_AT_ONCE, give_back).await;
            backend.remove_limit(id);
        });
    }
}

impl GivenUp {
    /// Gives it back, and returns the number of returns after that. Repeated calls count once. `None`: the result is unknown, or the lease
    /// has ended.
    async fn give_back<B: Store>(&self, backend: &B, limit: LimitId, terms: LeaseTerms) -> Option<u64> {
        let (mut number, mut is_known) = (self.returns, true);
        for _ in 0..RETURN_ATTEMPTS {
            if backend.clock().exact_now() >= self.lease.ends {
                return None;
            }
            match backend.give_back(limit, self.key(), &self.lease, number, terms).await {
                Ok(None) => return Some(number + 1),
                // This return may be among them.
                Ok(Some(_)) if !is_known => return None,
                // Other returns only: a call that did not fail is sent once.
                Ok(Some(others)) => number = others,
                Err(why) if why.may_have_run() => is_known = false,
                Err(_) => return None,
            }
        }
        None
    }
}

/// Returns under way. Closing the leases waits for them.
struct UnderWay<'a>(&'a AtomicUsize);

impl<'a> UnderWay<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A call under way that borrows. Closing the leases waits for it. However it ends, its key can be asked for again.
struct Borrowing<B: Store> {
    leased: Arc<Leased<B>>,
    key: OwnedKey,
    is_noted: bool,
}

impl<B: Store> Borrowing<B> {
    fn begin(leased: &Arc<Leased<B>>, key: HashedKey<'_>) -> Self {
        leased.under_way.fetch_add(1, Ordering::SeqCst);
        Self { leased: Arc::clone(leased), key: OwnedKey::from(key), is_noted: false }
    }

    /// Asks the store to decide on a check and to lend `ahead` permits. The permits serve the next requests, also if this one
    /// was cancelled.
    async fn borrow(mut self, ask: Ask, ahead: u64) -> Result<Verdict, StoreError> {
        let leased = &*self.leased;
        // If the leases were closed meanwhile, nothing is borrowed: it would not be given back.
        let (permits, parts) = leased.parts().map_or((0, 1), |parts| (ahead, parts));
        let wanted = LeaseRequest { permits, parts, terms: leased.terms };
        let check = Check { limit: leased.id, key: self.key.hashed(), ask, enforced: true };
        let answer = leased.backend.borrow(&check, wanted, leased.deadlines.call).await;
        let mut late = Vec::new();
        leased.table.change(self.key.hashed(), |cell, stats| {
            let now = leased.now();
            let (decision, lent) = match &answer {
                Ok((Verdict { decision, .. }, lent)) => (decision, lent),
                Err(_) => return cell.lease.failed(now, &leased.terms),
            };
            let denied = match decision.outcome {
                Outcome::Denied { retry } if ask.wait.is_none() => Some((ask.cost, retry)),
                Outcome::Denied { .. } | Outcome::Admitted { .. } | Outcome::Impossible => None,
            };
            let (grant, sent) = (lent.map(|lent| lent.grant), lent.map_or(now, |lent| lent.sent));
            let permits = grant.map_or(0, |grant| grant.permits);
            leased.note_trip(now.since(sent));
            stats.granted += permits;
            stats.expired += cell.lease.answered(now, sent, ahead, grant, denied, &leased.terms);
            cell.record(decision, permits, now);
            if leased.closed.load(Ordering::SeqCst) {
                late = cell.give_up(now);
            }
        });
        self.is_noted = true;
        leased.give_back(late).await;
        answer.map(|(verdict, _)| verdict)
    }
}

impl<B: Store> Drop for Borrowing<B> {
    fn drop(&mut self) {
        let Leased { table, terms, under_way, .. } = &*self.leased;
        if !self.is_noted {
            let now = self.leased.now();
            table.change(self.key.hashed(), |cell, _| cell.lease.failed(now, terms));
        }
        under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Drops ended leases and gives back idle ones, again and again.
async fn sweep<B: Store>(leases: Weak<Inner<B>>) {
    loop {
        let Some(inner) = leases.upgrade() else { return };
        let limits: Vec<_> = inner.limits.read().values().cloned().collect();
        drop(inner);
        let mut pause = SWEEP_MAX;
        for leased in limits {
            let given_up = leased.table.sweep(leased.now(), &leased.terms, false);
            leased.give_back(given_up).await;
            pause = pause.min(Duration::from(leased.terms.life()) / 4);
        }
        sleep(pause.max(SWEEP_MIN)).await;
    }
}
