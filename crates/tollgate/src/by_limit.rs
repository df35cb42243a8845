//! The data that a layer keeps for each limit, by the id of the limit.

use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use hashbrown::HashMap;

use crate::check::LimitId;

/// Values by limit. Reads take no lock. Changes, which only reloads of a policy make, copy the table.
pub(crate) struct ByLimit<T>(ArcSwap<Table<T>>);

pub(crate) type Table<T> = HashMap<LimitId, Arc<T>, BuildHasherDefault<IdHasher>>;

impl<T> Default for ByLimit<T> {
    fn default() -> Self {
        Self(ArcSwap::from_pointee(Table::default()))
    }
}

impl<T> ByLimit<T> {
    pub(crate) fn insert(&self, id: LimitId, value: T) -> Arc<T> {
        let value = Arc::new(value);
        self.0.rcu(|table| {
            let mut table = Table::clone(table);
            table.insert(id, Arc::clone(&value));
            table
        });
        value
    }

    pub(crate) fn remove(&self, id: LimitId) {
        self.0.rcu(|table| {
            let mut table = Table::clone(table);
            table.remove(&id);
            table
        });
    }

    pub(crate) fn get(&self, id: LimitId) -> Option<Arc<T>> {
        self.0.load().get(&id).cloned()
    }

    /// The current table. Callers hold it for a few look-ups only.
    pub(crate) fn read(&self) -> Guard<Arc<Table<T>>> {
        self.0.load()
    }
}

/// Spreads ids, which are consecutive small numbers.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    #[inline]
    fn write_u32(&mut self, id: u32) {
        self.0 = u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
