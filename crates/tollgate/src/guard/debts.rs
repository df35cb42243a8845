//! Debts: permits that this node has admitted without the store. Each debt is taken from the store at most once, and permits that have
//! flowed back since are not owed any more.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use parking_lot::Mutex;

use crate::backend::Store;
use crate::check::{HashedKey, LimitId, OwnedKey};
use crate::hash::Hash;
use crate::memory::MemoryLimiter;
use crate::redis::StoreError;

/// The most keys with debts: some 20 MB, if each has 100 bytes.
const DEBTORS_MAX: usize = 65_536;
/// Debts that are settled at the same time.
const SETTLED_AT_ONCE: usize = 256;
/// The deadline for settling one debt. No caller waits for it, and a store that has just recovered may be slow.
const SETTLED_WITHIN: Duration = Duration::from_secs(1);

pub(super) struct Debts<S: Store> {
    owed: Mutex<Owed<S>>,
    /// The number of keys with debts, to be read without the lock.
    debtors: AtomicUsize,
    settled: AtomicU64,
    lost: AtomicU64,
}

impl<S: Store> Default for Debts<S> {
    fn default() -> Self {
        Self {
            owed: Mutex::new(Owed { debts: HashMap::new(), being_taken: 0 }),
            debtors: AtomicUsize::new(0),
            settled: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }
}

/// A key of a limit that has a debt.
type Debtor = (LimitId, Hash);

struct Owed<S: Store> {
    debts: HashMap<Debtor, Debt<S>>,
    /// Permits of debts that are no longer in `debts`, because the store is being asked to take them.
    being_taken: u64,
}

/// The debts of one limit.
pub(super) struct Account<S: Store> {
    /// The store that settles them.
    store: S,
    limit: LimitId,
    /// The limit as if it had decided on the debts alone. Permits that flow back here are not owed any more.
    book: MemoryLimiter,
}

struct Debt<S: Store> {
    account: Arc<Account<S>>,
    key: OwnedKey,
    /// Permits that were admitted.
    permits: u64,
}

impl<S: Store> Account<S> {
    pub(super) fn new(store: S, limit: LimitId, book: MemoryLimiter) -> Self {
        Self { store, limit, book }
    }

    fn debtor(&self, key: HashedKey<'_>) -> Debtor {
        (self.limit, key.hash())
    }
}

/// Removes a limit that is no longer used and has no debts.
impl<S: Store> Drop for Account<S> {
    fn drop(&mut self) {
        self.store.remove_limit(self.limit);
    }
}

impl<S: Store> Debts<S> {
    /// Records admitted permits that the store has not taken.
    pub(super) fn owe(&self, account: &Arc<Account<S>>, key: HashedKey<'_>, permits: u64) {
        let debtor = account.debtor(key);
        let mut owed = self.owed.lock();
        if let Some(debt) = owed.debts.get_mut(&debtor) {
            debt.permits = debt.permits.saturating_add(permits);
        } else if owed.debts.len() < DEBTORS_MAX {
            owed.debts.insert(debtor, Debt { account: Arc::clone(account), key: key.into(), permits });
            self.debtors.store(owed.debts.len(), Ordering::Relaxed);
        } else {
            self.lose(permits);
            return;
        }
        drop(owed);
        account.book.charge(key.text(), permits);
    }

    /// Counts admitted permits that the store may have taken, and that are never taken again.
    pub(super) fn lose(&self, permits: u64) {
        self.lost.fetch_add(permits, Ordering::Relaxed);
    }

    /// Whether there are no debts.
    pub(super) fn is_empty(&self) -> bool {
        self.debtors.load(Ordering::Relaxed) == 0
    }

    /// Permits that are not settled yet, that were settled, and that are lost.
    pub(super) fn permits(&self) -> (u64, u64, u64) {
        let owed = self.owed.lock();
        let waiting = owed.debts.values().map(|debt| debt.permits).fold(0, u64::saturating_add);
        let unsettled = waiting.saturating_add(owed.being_taken);
        (unsettled, self.settled.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed))
    }

    /// Settles debts to available servers, each at most once. Returns whether any was settled. Debts to unavailable servers stay, and do
    /// not delay the others.
    pub(super) async fn repay_all(&self) -> bool {
        let before = self.settled.load(Ordering::Relaxed);
        let ready: Vec<_> = {
            let owed = self.owed.lock();
            let is_ready = |(_, debt): &(&Debtor, &Debt<S>)| {
                debt.account.store.is_available(debt.account.limit, debt.key.hashed())
            };
            owed.debts.iter().filter(is_ready).map(|(debtor, _)| *debtor).collect()
        };
        stream::iter(&ready).for_each_concurrent(SETTLED_AT_ONCE, |debtor| self.repay(*debtor)).await;
        self.settled.load(Ordering::Relaxed) > before
    }

    /// Drops the debt of a key that was reset.
    pub(super) fn forgive(&self, account: &Account<S>, key: HashedKey<'_>) {
        let mut owed = self.owed.lock();
        let forgiven = owed.debts.remove(&account.debtor(key));
        self.debtors.store(owed.debts.len(), Ordering::Relaxed);
        drop(owed);
        drop(forgiven);
        account.book.reset(key.text());
    }

    fn take(&self, debtor: Debtor) -> Option<Taking<'_, S>> {
        let mut owed = self.owed.lock();
        let debt = owed.debts.remove(&debtor)?;
        owed.being_taken = owed.being_taken.saturating_add(debt.permits);
        self.debtors.store(owed.debts.len(), Ordering::Relaxed);
        // If the settling is cancelled, it is unknown whether the store took the permits.
        Some(Taking { debts: self, debtor, debt, due: 0, end: End::Lost })
    }

    async fn repay(&self, debtor: Debtor) {
        let Some(mut taking) = self.take(debtor) else { return };
        let (account, owned) = (Arc::clone(&taking.debt.account), taking.debt.key.clone());
        let Account { store, limit, book } = &*account;
        let key = owned.hashed().text();
        taking.due = taking.debt.permits.min(book.limit().size() - book.remaining(key));
        match store.charge(*limit, owned.hashed(), taking.due, SETTLED_WITHIN).await {
            Ok(()) => {
                book.reset(key);
                taking.end = End::Repaid;
            }
            // The permits may have been taken already, or can never be taken.
            Err(why) if why.may_have_run() || matches!(why, StoreError::Foreign { .. }) => book.reset(key),
            Err(_) => taking.end = End::StillOwed,
        }
    }
}

/// A debt that is being settled.
struct Taking<'a, S: Store> {
    debts: &'a Debts<S>,
    debtor: Debtor,
    debt: Debt<S>,
    /// The part of it that has not flowed back.
    due: u64,
    end: End,
}

/// The end of a debt.
enum End {
    Repaid,
    Lost,
    StillOwed,
}

impl<S: Store> Drop for Taking<'_, S> {
    fn drop(&mut self) {
        let (debts, permits) = (self.debts, self.debt.permits);
        // Both counts change under one lock, so that no permits are missing from both.
        let mut owed = debts.owed.lock();
        owed.being_taken = owed.being_taken.saturating_sub(permits);
        match self.end {
            End::Repaid => {
                debts.settled.fetch_add(self.due, Ordering::Relaxed);
            }
            End::Lost => debts.lose(self.due),
            End::StillOwed => {
                let Debt { account, key, .. } = &self.debt;
                let nothing = || Debt { account: Arc::clone(account), key: key.clone(), permits: 0 };
                let debt = owed.debts.entry(self.debtor).or_insert_with(nothing);
                debt.permits = debt.permits.saturating_add(permits);
                debts.debtors.store(owed.debts.len(), Ordering::Relaxed);
            }
        }
    }
}
