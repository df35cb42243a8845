//! The leases of this node for all keys of a limit. The table is bounded: the store decides on keys without room.

use hashbrown::HashTable;
use tollgate_core::lease::{Lease, LocalLease, Move, Spent};
use tollgate_core::{Decision, LeaseTerms, Limit, Micros, Outcome, Timestamp};

use super::LeaseStats;
use crate::check::{Check, HashedKey, OwnedKey};
use crate::hash::Hash;
use crate::sync::Lock;

/// Parts of the table, each with its own lock, so that threads seldom meet.
const STRIPES: usize = 64;
/// Keys in a stripe: some 20 MB in all stripes, if every one has 300 bytes.
const KEYS_MAX: usize = 1_024;
/// A key without leases is forgotten after this long without requests.
const FORGET_AFTER: Micros = Micros::from_secs(2);
/// The same while the table is nearly full. Only the estimate of demand is lost.
const FORGET_SOON: Micros = Micros::from_millis(100);

pub(super) struct Table {
    stripes: Box<[Lock<Stripe>]>,
}

#[derive(Default)]
struct Stripe {
    cells: HashTable<Cell>,
    stats: LeaseStats,
}

/// The leases of one key, and the last status from the store.
pub(super) struct Cell {
    key: OwnedKey,
    pub(super) lease: LocalLease,
    /// Permits that were left in the store.
    remaining: u64,
    /// When the key will be full again.
    reset_at: Timestamp,
    /// The number of returns to the store.
    pub(super) returns: u64,
}

/// The decision on a check.
pub(super) enum Moved {
    /// It is admitted. `fetch` permits are to be borrowed.
    Spent { decision: Decision, fetch: u64 },
    /// It is denied.
    Denied(Decision),
    /// The store decides, and lends `ahead` permits.
    Ask { ahead: u64 },
}

/// A lease that is to be given back.
pub(super) struct GivenUp {
    key: OwnedKey,
    pub(super) lease: Lease,
    pub(super) returns: u64,
}

impl GivenUp {
    pub(super) fn key(&self) -> HashedKey<'_> {
        self.key.hashed()
    }
}

impl Table {
    pub(super) fn new() -> Self {
        Self { stripes: (0..STRIPES).map(|_| Lock::new(Stripe::default())).collect() }
    }

    /// Decides on a check with held permits. `spent` records the permits, if they may have to be put back.
    #[inline]
    pub(super) fn decide(
        &self,
        check: &Check<'_>,
        now: Timestamp,
        limit: &Limit,
        terms: &LeaseTerms,
        parts: Option<u64>,
        spent: Option<&mut Spent>,
    ) -> Moved {
        let (cost, waits) = (check.ask.cost, check.ask.wait.is_some_and(|wait| wait > Micros::ZERO));
        let hash = check.key.hash();
        let mut stripe = self.stripe(hash).lock();
        let Stripe { cells, stats } = &mut *stripe;
        let Some(cell) = cells.find_mut(hash.high, |cell| cell.hash() == hash) else {
            if cells.len() < KEYS_MAX {
                let mut cell = Cell::new(check.key);
                let moved = cell.lease.decide(now, cost, waits, terms, parts, None);
                cells.insert_unique(hash.high, cell, |cell| cell.hash().high);
                if let Move::Ask { ahead } = moved {
                    return Moved::Ask { ahead };
                }
            }
            return Moved::Ask { ahead: 0 };
        };
        match cell.lease.decide(now, cost, waits, terms, parts, spent) {
            Move::Spend { fetch } => {
                stats.spent += cost;
                Moved::Spent { decision: cell.decision(Outcome::NOW, now, limit), fetch }
            }
            Move::Deny { retry } => Moved::Denied(cell.decision(Outcome::Denied { retry }, now, limit)),
            Move::Ask { ahead } => Moved::Ask { ahead },
        }
    }

    /// Puts back permits spent on a request that is not admitted after all.
    pub(super) fn unspend(&self, key: HashedKey<'_>, spent: &Spent, now: Timestamp) {
        self.change(key, |cell, stats| {
            let expired = cell.lease.unspend(spent, now);
            stats.spent -= spent.permits();
            stats.expired += expired;
        });
    }

    /// Changes the cell of a key, if it has one.
    pub(super) fn change(&self, key: HashedKey<'_>, change: impl FnOnce(&mut Cell, &mut LeaseStats)) {
        let hash = key.hash();
        let mut stripe = self.stripe(hash).lock();
        let Stripe { cells, stats } = &mut *stripe;
        match cells.find_mut(hash.high, |cell| cell.hash() == hash) {
            Some(cell) => change(cell, stats),
            // The key had no room, or was forgotten meanwhile, so it has no leases.
            None => {
                let mut cell = Cell::new(key);
                change(&mut cell, stats);
                // A lease that arrives now is kept.
                if !cell.lease.leases().is_empty() {
                    cells.insert_unique(hash.high, cell, |cell| cell.hash().high);
                }
            }
        }
    }

    /// Held permits of a key that may still be spent.
    pub(super) fn left(&self, key: HashedKey<'_>, now: Timestamp) -> u64 {
        let hash = key.hash();
        let stripe = self.stripe(hash).lock();
        stripe.cells.find(hash.high, |cell| cell.hash() == hash).map_or(0, |cell| cell.lease.left(now))
    }

    /// Drops ended leases, forgets keys, and returns the leases to give back: all of them, or those of idle keys.
    pub(super) fn sweep(&self, now: Timestamp, terms: &LeaseTerms, everything: bool) -> Vec<GivenUp> {
        let mut given_up = Vec::new();
        for stripe in &self.stripes {
            let mut stripe = stripe.lock();
            let Stripe { cells, stats } = &mut *stripe;
            let forget_after = if cells.len() > KEYS_MAX * 3 / 4 { FORGET_SOON } else { FORGET_AFTER };
            cells.retain(|cell| {
                stats.expired += cell.lease.drop_ended(now);
                if everything || cell.lease.is_idle(now, terms) {
                    given_up.append(&mut cell.give_up(now));
                }
                !cell.lease.is_over(now, forget_after)
            });
        }
        given_up
    }

    /// The counts so far, with the permits held now.
    pub(super) fn stats(&self, now: Timestamp) -> LeaseStats {
        let mut all = LeaseStats::default();
        for stripe in &self.stripes {
            let stripe = stripe.lock();
            all.add(&stripe.stats);
            all.keys += stripe.cells.len() as u64;
            all.held += stripe.cells.iter().map(|cell| cell.lease.left(now)).sum::<u64>();
        }
        all
    }

    fn stripe(&self, hash: Hash) -> &Lock<Stripe> {
        &self.stripes[hash.low as usize % STRIPES]
    }
}

impl Cell {
    fn new(key: HashedKey<'_>) -> Self {
        let key = OwnedKey::from(key);
        Self { key, lease: LocalLease::default(), remaining: 0, reset_at: Timestamp::default(), returns: 0 }
    }

    fn hash(&self) -> Hash {
        self.key.hashed().hash()
    }

    /// Takes all leases, to be given back.
    pub(super) fn give_up(&mut self, now: Timestamp) -> Vec<GivenUp> {
        let leases = self.lease.give_up(now).into_iter();
        leases.map(|lease| GivenUp { key: self.key.clone(), lease, returns: self.returns }).collect()
    }

    /// Records the status that the store has answered.
    pub(super) fn record(&mut self, decision: &Decision, lent: u64, now: Timestamp) {
        self.remaining = decision.remaining.saturating_sub(lent);
        self.reset_at = now.after(decision.reset);
    }

    fn decision(&self, outcome: Outcome, now: Timestamp, limit: &Limit) -> Decision {
        let remaining = self.remaining.saturating_add(self.lease.left(now)).min(limit.size());
        Decision { outcome, limit: limit.size(), remaining, reset: self.reset_at.since(now), at: now }
    }
}
