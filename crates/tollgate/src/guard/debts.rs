//! What this node has admitted alone and owes to the store's state. Each debt is taken at most once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use futures_util::future::join_all;
use parking_lot::Mutex;

use crate::engine::redis::RedisLimiter;

/// Keys that owe: some 10 MB, if each has 100 bytes.
const DEBTORS_MAX: usize = 65_536;
/// Debts that are taken at the same time.
const SETTLED_AT_ONCE: usize = 256;

#[derive(Default)]
pub(super) struct Debts {
    /// By limiter and key.
    owed: Mutex<HashMap<(u32, String), Debt>>,
    /// How many there are, to be read without the lock.
    debtors: AtomicUsize,
    settled: AtomicU64,
    lost: AtomicU64,
}

struct Debt {
    limiter: RedisLimiter,
    permits: u64,
}

impl Debts {
    /// Notes permits that were admitted.
    pub(super) fn owe(&self, limiter: &RedisLimiter, key: &str, permits: u64) {
        let mut owed = self.owed.lock();
        if let Some(debt) = owed.get_mut(&(limiter.id(), key.to_owned())) {
            debt.permits = debt.permits.saturating_add(permits);
        } else if owed.len() < DEBTORS_MAX {
            owed.insert((limiter.id(), key.to_owned()), Debt { limiter: limiter.clone(), permits });
            self.debtors.store(owed.len(), Ordering::Relaxed);
        } else {
            self.lost.fetch_add(permits, Ordering::Relaxed);
        }
    }

    /// Whether nobody owes.
    pub(super) fn is_empty(&self) -> bool {
        self.debtors.load(Ordering::Relaxed) == 0
    }

    /// Permits that are owed, that were taken, and that will never be.
    pub(super) fn permits(&self) -> (u64, u64, u64) {
        let owed = self.owed.lock().values().map(|debt| debt.permits).fold(0, u64::saturating_add);
        (owed, self.settled.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed))
    }

    /// Takes what a key owes.
    pub(super) async fn settle_one(&self, limiter: &RedisLimiter, key: &str) {
        if self.is_empty() {
            return;
        }
        if let Some(debt) = self.take(limiter, key) {
            self.settle(key, debt).await;
        }
    }

    /// Takes what all keys owe.
    pub(super) async fn settle_all(&self) {
        loop {
            let keys: Vec<_> = {
                let owed = self.owed.lock();
                let limiters = owed.iter().take(SETTLED_AT_ONCE);
                limiters.map(|((_, key), debt)| (debt.limiter.clone(), key.clone())).collect()
            };
            let before = self.debtors.load(Ordering::Relaxed);
            join_all(keys.iter().map(|(limiter, key)| self.settle_one(limiter, key))).await;
            // If the store is gone again, all of them are back.
            if keys.is_empty() || self.debtors.load(Ordering::Relaxed) >= before {
                return;
            }
        }
    }

    /// Forgets what a key owes: it was made as good as new.
    pub(super) fn forgive(&self, limiter: &RedisLimiter, key: &str) {
        drop(self.take(limiter, key));
    }

    fn take(&self, limiter: &RedisLimiter, key: &str) -> Option<Debt> {
        let mut owed = self.owed.lock();
        let debt = owed.remove(&(limiter.id(), key.to_owned()));
        self.debtors.store(owed.len(), Ordering::Relaxed);
        debt
    }

    async fn settle(&self, key: &str, debt: Debt) {
        let mut taking = Taking { debts: self, lost: debt.permits };
        match debt.limiter.charge(key, debt.permits).await {
            Ok(()) => {
                taking.lost = 0;
                self.settled.fetch_add(debt.permits, Ordering::Relaxed);
            }
            // Once more, and it might be taken twice.
            Err(why) if why.may_have_run() => {}
            Err(_) => {
                taking.lost = 0;
                self.owe(&debt.limiter, key, debt.permits);
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
        self.debts.lost.fetch_add(self.lost, Ordering::Relaxed);
    }
}
