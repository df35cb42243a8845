//! The lease engine: decides by permits that it has borrowed from a store, and asks the store when they run out.
//!
//! What is borrowed is charged in the store at once, so whatever happens here, the shared limit holds. A key that is not asked for
//! often enough to be worth a lease, and every key of a limit with too many nodes, is decided by the store itself.

mod table;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use tokio::time::sleep;
use tollgate_core::{Ask, Decision, LeaseTerms, Limit, Outcome, Standing, Timestamp};

use self::table::{GivenUp, Local, Table};
use super::redis::{RedisLimiter, StoreError, Wanted};
use crate::clock::Clock;

/// Nodes that are assumed while the store has not said how many there are.
const NODES_ASSUMED: u64 = 3;
/// Returns that are under way at the same time.
const RETURNS_AT_ONCE: usize = 64;
/// Attempts to give something back: others may give back to the same key meanwhile.
const RETURN_ATTEMPTS: usize = 4;
/// How often is looked for what has ended and for what nobody asks for, at most and at least.
const SWEEP_MIN: Duration = Duration::from_millis(25);
const SWEEP_MAX: Duration = Duration::from_millis(100);

/// What became of borrowed permits. Those that were granted were spent, given back, have expired or were lost; or they are held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LeaseStats {
    /// Permits that the store has lent.
    pub granted: u64,
    /// Permits that requests were admitted by.
    pub spent: u64,
    /// Permits that were given back.
    pub returned: u64,
    /// Permits that were not spent in time.
    pub expired: u64,
    /// Permits that should have been given back, and could not.
    pub lost: u64,
    /// Permits that are held now.
    pub held: u64,
    /// Keys that are looked after.
    pub keys: u64,
    /// By how many permits a burst can be too large.
    pub overshoot: u64,
}

use LeaseStats as Stats;

impl LeaseStats {
    /// Adds the counts of another limit. The overshoot is that of the larger one.
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

/// A limit over keys of a store, decided by leases where they are worth it. Cheap to clone.
#[derive(Clone)]
pub struct LeaseLimiter(Arc<Inner>);

/// A limiter that may be gone.
#[derive(Clone)]
pub struct WeakLeaseLimiter(Weak<Inner>);

impl WeakLeaseLimiter {
    /// The limiter, if it is still there.
    pub fn upgrade(&self) -> Option<LeaseLimiter> {
        self.0.upgrade().map(LeaseLimiter)
    }
}

struct Inner {
    store: RedisLimiter,
    terms: LeaseTerms,
    table: Table,
    clock: Clock,
    /// Nothing is borrowed any more.
    closed: AtomicBool,
    /// Calls under way that borrow.
    borrowing: AtomicUsize,
}

/// Who has decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecidedBy {
    /// The store.
    Store,
    /// This node, by what it has borrowed or by what the store has said.
    Lease,
}

impl LeaseLimiter {
    /// A limiter that borrows from `store`. What must go on when its callers are gone runs with the store's driver.
    pub fn new(store: RedisLimiter, terms: LeaseTerms) -> Self {
        let clock = store.engine().own_clock().clone();
        let inner = Arc::new(Inner {
            terms,
            table: Table::new(),
            clock,
            closed: AtomicBool::new(false),
            borrowing: AtomicUsize::new(0),
            store: store.clone(),
        });
        let swept = Arc::downgrade(&inner);
        store.keep_running(move || sweep(Weak::clone(&swept)));
        Self(inner)
    }

    /// The same without keeping it.
    pub fn downgrade(&self) -> WeakLeaseLimiter {
        WeakLeaseLimiter(Arc::downgrade(&self.0))
    }

    /// The limit.
    pub fn limit(&self) -> &Limit {
        self.0.store.limit()
    }

    /// On what terms it borrows.
    pub fn terms(&self) -> &LeaseTerms {
        &self.0.terms
    }

    /// Takes permits, perhaps after a delay that the caller accepts, and says who has decided.
    #[inline]
    pub async fn acquire(&self, key: &str, ask: Ask) -> Result<(Decision, DecidedBy), StoreError> {
        match self.0.decide(key, ask) {
            Ok(decision) => Ok((decision, DecidedBy::Lease)),
            Err(ahead) => {
                let decision = Box::pin(self.ask_store(key, ask, ahead)).await?;
                Ok((decision, DecidedBy::Store))
            }
        }
    }

    /// The answer that [`LeaseLimiter::acquire`] would give, without taking anything.
    pub async fn peek(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        let mut decision = self.0.store.peek(key, ask).await?;
        let left = self.0.table.left(key, self.0.clock.exact_now());
        if left >= ask.cost && matches!(decision.outcome, Outcome::Denied { .. }) {
            decision.outcome = Outcome::NOW;
        }
        decision.remaining = decision.remaining.saturating_add(left).min(decision.limit);
        Ok(decision)
    }

    /// Where a key stands.
    pub async fn standing(&self, key: &str) -> Result<Standing, StoreError> {
        Ok(self.peek(key, Ask::of(0)).await?.standing())
    }

    /// Makes a key as good as new. What other nodes have borrowed of it they may still spend.
    pub async fn reset(&self, key: &str) -> Result<(), StoreError> {
        self.0.store.reset(key).await?;
        let now = self.0.clock.exact_now();
        self.0.table.change(key, |cell, stats| {
            stats.lost += cell.holding.left(now);
            cell.holding.forget();
        });
        Ok(())
    }

    /// Gives everything back, and borrows nothing any more: before a program ends.
    pub async fn close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
        let given_up = self.0.table.sweep(self.0.clock.exact_now(), &self.0.terms, true);
        self.0.give_back(given_up).await;
        // What is being borrowed is given back when it comes.
        while self.0.borrowing.load(Ordering::SeqCst) > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    }

    /// What became of borrowed permits. Looks into every part of a table: for reports, not for the way of a request.
    pub fn stats(&self) -> LeaseStats {
        let overshoot = self.0.terms.overshoot(self.limit(), self.0.nodes());
        Stats { overshoot, ..self.0.table.stats(self.0.clock.exact_now()) }
    }

    async fn ask_store(&self, key: &str, ask: Ask, ahead: u64) -> Result<Decision, StoreError> {
        let inner = &self.0;
        if ahead == 0 {
            let sent = inner.clock.exact_now();
            let decision = inner.store.acquire(key, ask).await?;
            inner.note(key, ask, &decision, sent);
            return Ok(decision);
        }
        // Whoever leaves has started something that others count on.
        inner.store.leading(Borrowing::begin(inner, key.into()).borrow(ask, ahead)).await
    }
}

impl Inner {
    /// Decides by what is held, or says how many permits the store is to be asked for besides.
    #[inline]
    fn decide(self: &Arc<Self>, key: &str, ask: Ask) -> Result<Decision, u64> {
        let limit = self.store.limit();
        if ask.cost == 0 || ask.cost > limit.size() || self.closed.load(Ordering::SeqCst) {
            return Err(0);
        }
        let now = self.clock.exact_now();
        let asked = (ask.cost, ask.wait.is_some());
        match self.table.decide(key, asked, now, limit, &self.terms, self.parts()) {
            Local::Decided(decision) => Ok(decision),
            Local::DecidedFetch(decision, key, ahead) => {
                let fetch = Borrowing::begin(self, key).borrow(Ask::of(0), ahead);
                self.store.hand_over(async { drop(fetch.await) });
                Ok(decision)
            }
            Local::Ask(ahead) => Err(ahead),
        }
    }

    /// Into how many parts what is left is cut, or that nothing is borrowed.
    fn parts(&self) -> Option<u64> {
        if self.closed.load(Ordering::SeqCst) {
            return None;
        }
        self.terms.parts(self.nodes())
    }

    fn nodes(&self) -> u64 {
        self.store.nodes().map_or(NODES_ASSUMED, u64::from)
    }

    /// Notes what the store has decided on a request.
    fn note(&self, key: &str, ask: Ask, decision: &Decision, sent: Timestamp) {
        let (Outcome::Denied { retry }, None) = (decision.outcome, ask.wait) else { return };
        let now = self.clock.exact_now();
        self.table.change(key, |cell, _| {
            cell.holding.answered(now, sent, 0, None, Some((ask.cost, retry)), &self.terms);
            cell.hear(decision, 0, now);
        });
    }

    async fn give_back(&self, given_up: Vec<GivenUp>) {
        let give_back = |given_up: GivenUp| async move {
            let number = given_up.give_back(&self.store, self.terms, &self.clock).await;
            self.table.change(&given_up.key, |cell, stats| match number {
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

/// Nobody asks any more: what is held is given back when the driver comes to it.
impl Drop for Inner {
    fn drop(&mut self) {
        let given_up = self.table.sweep(self.clock.exact_now(), &self.terms, true);
        if given_up.is_empty() {
            return;
        }
        let (store, terms, clock) = (self.store.clone(), self.terms, self.clock.clone());
        self.store.hand_over(async move {
            let give_back = |given_up: GivenUp| {
                let (store, clock) = (&store, &clock);
                async move {
                    given_up.give_back(store, terms, clock).await;
                }
            };
            stream::iter(given_up).for_each_concurrent(RETURNS_AT_ONCE, give_back).await;
        });
    }
}

impl GivenUp {
    /// Gives it back, and says how many returns there were then. It counts once, however often it is said. None: it is not known, or it
    /// is too late.
    async fn give_back(&self, store: &RedisLimiter, terms: LeaseTerms, clock: &Clock) -> Option<u64> {
        let (mut number, mut is_known) = (self.returns, true);
        for _ in 0..RETURN_ATTEMPTS {
            if clock.exact_now() >= self.lease.ends {
                return None;
            }
            match store.give_back(&self.key, &self.lease, number, terms).await {
                Ok(None) => return Some(number + 1),
                // Perhaps it was this one.
                Ok(Some(_)) if !is_known => return None,
                // Surely others: a connection carries what is said once, once.
                Ok(Some(others)) => number = others,
                Err(why) if why.may_have_run() => is_known = false,
                Err(_) => return None,
            }
        }
        None
    }
}

/// A call under way that borrows. Closing the limiter waits for it. However it ends, its key can be asked for again.
struct Borrowing {
    limiter: Arc<Inner>,
    key: Arc<str>,
    is_noted: bool,
}

impl Borrowing {
    fn begin(limiter: &Arc<Inner>, key: Arc<str>) -> Self {
        limiter.borrowing.fetch_add(1, Ordering::SeqCst);
        Self { limiter: Arc::clone(limiter), key, is_noted: false }
    }

    /// Asks the store for a request and for `ahead` permits more. The permits are there for the next requests, also if this one
    /// was cancelled.
    async fn borrow(mut self, ask: Ask, ahead: u64) -> Result<Decision, StoreError> {
        let inner = &*self.limiter;
        // Closed since it was wished for: nobody would give it back.
        let (permits, parts) = inner.parts().map_or((0, 1), |parts| (ahead, parts));
        let wanted = Wanted { permits, parts, terms: inner.terms };
        let answer = inner.store.borrow(&self.key, ask, wanted).await;
        let mut late = Vec::new();
        inner.table.change(&self.key, |cell, stats| {
            let now = inner.clock.exact_now();
            let Ok((decision, lent)) = &answer else { return cell.holding.failed(now, &inner.terms) };
            let denied = match decision.outcome {
                Outcome::Denied { retry } if ask.wait.is_none() => Some((ask.cost, retry)),
                Outcome::Denied { .. } | Outcome::Admitted { .. } | Outcome::Impossible => None,
            };
            let (grant, sent) = (lent.map(|lent| lent.grant), lent.map_or(now, |lent| lent.sent));
            let permits = grant.map_or(0, |grant| grant.permits);
            stats.granted += permits;
            stats.expired += cell.holding.answered(now, sent, ahead, grant, denied, &inner.terms);
            cell.hear(decision, permits, now);
            if inner.closed.load(Ordering::SeqCst) {
                late = cell.give_up(now);
            }
        });
        self.is_noted = true;
        inner.give_back(late).await;
        answer.map(|(decision, _)| decision)
    }
}

impl Drop for Borrowing {
    fn drop(&mut self) {
        let Inner { table, clock, terms, borrowing, .. } = &*self.limiter;
        if !self.is_noted {
            table.change(&self.key, |cell, _| cell.holding.failed(clock.exact_now(), terms));
        }
        borrowing.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Looks, again and again, for what has ended and for what nobody asks for any more.
async fn sweep(limiter: Weak<Inner>) {
    loop {
        let Some(inner) = limiter.upgrade() else { return };
        let given_up = inner.table.sweep(inner.clock.exact_now(), &inner.terms, false);
        inner.give_back(given_up).await;
        let pause = (Duration::from(inner.terms.life()) / 4).clamp(SWEEP_MIN, SWEEP_MAX);
        drop(inner);
        sleep(pause).await;
    }
}
