//! What this node has admitted alone and owes to the store's state. Each debt is taken at most once, and what has flowed back since
//! is not owed any more.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use parking_lot::Mutex;

use crate::engine::memory::MemoryLimiter;
use crate::engine::redis::{RedisLimiter, StoreError};

/// Keys that owe: some 20 MB, if each has 100 bytes.
const DEBTORS_MAX: usize = 65_536;
/// Debts that are taken at the same time.
const SETTLED_AT_ONCE: usize = 256;
/// For taking one. Nobody waits for it, and a store that has just come back may be slow.
const SETTLED_WITHIN: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Debts {
    owed: Mutex<Owed>,
    /// How many keys owe, to be read without the lock.
    debtors: AtomicUsize,
    settled: AtomicU64,
    lost: AtomicU64,
}

#[derive(Default)]
struct Owed {
    /// By limiter and key.
    debts: HashMap<(u32, String), Debt>,
    /// Permits of debts that have left `debts`, and for which the store has not answered yet.
    being_taken: u64,
}

/// Where debts of one limit are noted, and taken from.
pub(super) struct Account {
    /// Where they are taken.
    store: RedisLimiter,
    /// The limit as it would stand if the store had decided all of it, and nothing else: what flows back here is not owed.
    book: MemoryLimiter,
}

struct Debt {
    account: Arc<Account>,
    /// Permits that were admitted.
    permits: u64,
}

impl Account {
    pub(super) fn new(store: &RedisLimiter, book: MemoryLimiter) -> Self {
        Self { store: store.clone().with_deadline(SETTLED_WITHIN), book }
    }
}

impl Debts {
    /// Notes permits that were admitted, and that the store surely has not taken.
    pub(super) fn owe(&self, account: &Arc<Account>, key: &str, permits: u64) {
        let mut owed = self.owed.lock();
        if let Some(debt) = owed.debts.get_mut(&(account.store.id(), key.to_owned())) {
            debt.permits = debt.permits.saturating_add(permits);
        } else if owed.debts.len() < DEBTORS_MAX {
            let debt = Debt { account: Arc::clone(account), permits };
            owed.debts.insert((account.store.id(), key.to_owned()), debt);
            self.debtors.store(owed.debts.len(), Ordering::Relaxed);
        } else {
            self.lose(permits);
            return;
        }
        drop(owed);
        account.book.charge(key, permits);
    }

    /// Notes permits that were admitted, and that the store may have taken: never to be taken again.
    pub(super) fn lose(&self, permits: u64) {
        self.lost.fetch_add(permits, Ordering::Relaxed);
    }

    /// Whether nobody owes.
    pub(super) fn is_empty(&self) -> bool {
        self.debtors.load(Ordering::Relaxed) == 0
    }

    /// Permits that were admitted and not settled yet, that were taken, and that will never be.
    pub(super) fn permits(&self) -> (u64, u64, u64) {
        let owed = self.owed.lock();
        let waiting = owed.debts.values().map(|debt| debt.permits).fold(0, u64::saturating_add);
        let unsettled = waiting.saturating_add(owed.being_taken);
        (unsettled, self.settled.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed))
    }

    /// Takes what is owed to servers that can be asked, each debt at most once. Returns whether any was settled. Debts to
    /// servers that are gone stay where they are, and hold up no others.
    pub(super) async fn settle_all(&self) -> bool {
        let before = self.settled.load(Ordering::Relaxed);
        let ready: Vec<_> = {
            let owed = self.owed.lock();
            let is_ready = |((_, key), debt): &(&(u32, String), &Debt)| debt.account.store.is_available(key);
            owed.debts.iter().filter(is_ready).map(|(debtor, _)| debtor.clone()).collect()
        };
        stream::iter(&ready).for_each_concurrent(SETTLED_AT_ONCE, |debtor| self.settle(debtor)).await;
        self.settled.load(Ordering::Relaxed) > before
    }

    /// Forgets what a key owes: it was made as good as new.
    pub(super) fn forgive(&self, account: &Account, key: &str) {
        let mut owed = self.owed.lock();
        owed.debts.remove(&(account.store.id(), key.to_owned()));
        self.debtors.store(owed.debts.len(), Ordering::Relaxed);
        drop(owed);
        account.book.reset(key);
    }

    fn take<'a>(&'a self, debtor: &'a (u32, String)) -> Option<Taking<'a>> {
        let mut owed = self.owed.lock();
        let debt = owed.debts.remove(debtor)?;
        owed.being_taken = owed.being_taken.saturating_add(debt.permits);
        self.debtors.store(owed.debts.len(), Ordering::Relaxed);
        // If whoever takes it leaves, nobody knows whether it was taken.
        Some(Taking { debts: self, debtor, debt, due: 0, end: End::Lost })
    }

    async fn settle(&self, debtor: &(u32, String)) {
        let Some(mut taking) = self.take(debtor) else { return };
        let account = Arc::clone(&taking.debt.account);
        let (key, book) = (debtor.1.as_str(), &account.book);
        taking.due = taking.debt.permits.min(book.limit().size() - book.remaining(key));
        match account.store.charge(key, taking.due).await {
            Ok(()) => {
                book.reset(key);
                taking.end = End::Settled;
            }
            // Once more, and it might be taken twice; or it never could be.
            Err(why) if why.may_have_run() || matches!(why, StoreError::Foreign { .. }) => book.reset(key),
            Err(_) => taking.end = End::StillOwed,
        }
    }
}

/// A debt that is being taken.
struct Taking<'a> {
    debts: &'a Debts,
    debtor: &'a (u32, String),
    debt: Debt,
    /// What of it has not flowed back.
    due: u64,
    end: End,
}

/// What became of a debt.
enum End {
    Settled,
    Lost,
    StillOwed,
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        let (debts, permits) = (self.debts, self.debt.permits);
        // Both counts change together: permits that are neither owed nor settled would look forgotten.
        let mut owed = debts.owed.lock();
        owed.being_taken = owed.being_taken.saturating_sub(permits);
        match self.end {
            End::Settled => {
                debts.settled.fetch_add(self.due, Ordering::Relaxed);
            }
            End::Lost => debts.lose(self.due),
            End::StillOwed => {
                let nothing = || Debt { account: Arc::clone(&self.debt.account), permits: 0 };
                let debt = owed.debts.entry(self.debtor.clone()).or_insert_with(nothing);
                debt.permits = debt.permits.saturating_add(permits);
                debts.debtors.store(owed.debts.len(), Ordering::Relaxed);
            }
        }
    }
}
