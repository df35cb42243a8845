//! What this node has admitted alone and owes to the store's state. Each debt is taken at most once, and what has flowed back since
//! is not owed any more.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
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
    /// By limiter and key.
    owed: Mutex<HashMap<(u32, String), Debt>>,
    /// How many there are, to be read without the lock.
    debtors: AtomicUsize,
    settled: AtomicU64,
    lost: AtomicU64,
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
        if let Some(debt) = owed.get_mut(&(account.store.id(), key.to_owned())) {
            debt.permits = debt.permits.saturating_add(permits);
        } else if owed.len() < DEBTORS_MAX {
            owed.insert((account.store.id(), key.to_owned()), Debt { account: Arc::clone(account), permits });
            self.debtors.store(owed.len(), Ordering::Relaxed);
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
        let owed = self.owed.lock().values().map(|debt| debt.permits).fold(0, u64::saturating_add);
        (owed, self.settled.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed))
    }

    /// Takes what all keys owe.
    pub(super) async fn settle_all(&self) {
        loop {
            let keys: Vec<_> = {
                let owed = self.owed.lock();
                owed.keys().take(SETTLED_AT_ONCE).cloned().collect()
            };
            let before = self.debtors.load(Ordering::Relaxed);
            join_all(keys.iter().map(|key| self.settle(key))).await;
            // If the store is gone again, all of them are back.
            if keys.is_empty() || self.debtors.load(Ordering::Relaxed) >= before {
                return;
            }
        }
    }

    /// Forgets what a key owes: it was made as good as new.
    pub(super) fn forgive(&self, account: &Account, key: &str) {
        self.take(&(account.store.id(), key.to_owned()));
        account.book.reset(key);
    }

    fn take(&self, debtor: &(u32, String)) -> Option<Debt> {
        let mut owed = self.owed.lock();
        let debt = owed.remove(debtor);
        self.debtors.store(owed.len(), Ordering::Relaxed);
        debt
    }

    async fn settle(&self, debtor: &(u32, String)) {
        let Some(Debt { account, permits }) = self.take(debtor) else { return };
        let (key, book) = (debtor.1.as_str(), &account.book);
        let due = permits.min(book.limit().size() - book.remaining(key));
        let mut taking = Taking { debts: self, lost: due };
        match account.store.charge(key, due).await {
            Ok(()) => {
                taking.lost = 0;
                book.reset(key);
                self.settled.fetch_add(due, Ordering::Relaxed);
            }
            // Once more, and it might be taken twice; or it never could be.
            Err(why) if why.may_have_run() || matches!(why, StoreError::Foreign { .. }) => book.reset(key),
            Err(_) => {
                taking.lost = 0;
                let mut owed = self.owed.lock();
                let debt =
                    owed.entry(debtor.clone()).or_insert(Debt { account: Arc::clone(&account), permits: 0 });
                debt.permits = debt.permits.saturating_add(permits);
                self.debtors.store(owed.len(), Ordering::Relaxed);
            }
        }
    }
}

/// A debt that is being taken. If whoever takes it leaves, nobody knows whether it was.
struct Taking<'a> {
    debts: &'a Debts,
    lost: u64,
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.debts.lose(self.lost);
    }
}
