//! What this node holds of all keys of a limit. Bounded: a key that finds no room is decided by the store.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use hashbrown::HashTable;
use tollgate_core::lease::{Holding, Lease, Move};
use tollgate_core::{Decision, LeaseTerms, Limit, Micros, Outcome, Timestamp};

use super::Stats;
use crate::engine::sync::Lock;

/// Parts of the table, each with its own lock, so that threads seldom meet.
const SHARDS: usize = 64;
/// Keys in a shard: some 20 MB in all shards, if every one has 300 bytes.
const KEYS_MAX: usize = 1_024;
/// A key that nobody has asked about for so long, and of which nothing is held, is forgotten.
const FORGET_AFTER: Micros = Micros::from_secs(2);
/// The same where keys become many: what is forgotten is only how often they are asked about.
const FORGET_SOON: Micros = Micros::from_millis(100);

pub(super) struct Table {
    shards: Box<[Lock<Shard>]>,
    hasher: RandomState,
}

#[derive(Default)]
struct Shard {
    cells: HashTable<Cell>,
    stats: Stats,
}

/// What is held of one key, and what the store has last said of it.
pub(super) struct Cell {
    key: Arc<str>,
    pub(super) holding: Holding,
    /// Permits that were left in the store.
    remaining: u64,
    /// When it will be as good as new.
    reset_at: Timestamp,
    /// How often something was given back to the store.
    pub(super) returns: u64,
}

/// What becomes of a request.
pub(super) enum Local {
    /// It is decided.
    Decided(Decision),
    /// It is decided, and so many permits are to be fetched.
    DecidedFetch(Decision, Arc<str>, u64),
    /// The store decides, and is asked for so many permits more.
    Ask(u64),
}

/// Something that is to be given back.
pub(super) struct GivenUp {
    pub(super) key: Arc<str>,
    pub(super) lease: Lease,
    pub(super) returns: u64,
}

impl Table {
    pub(super) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Lock::new(Shard::default())).collect();
        Self { shards, hasher: RandomState::new() }
    }

    /// Decides on a request by what is held, as far as that goes.
    #[inline]
    pub(super) fn decide(
        &self,
        key: &str,
        (cost, waits): (u64, bool),
        now: Timestamp,
        limit: &Limit,
        terms: &LeaseTerms,
        parts: Option<u64>,
    ) -> Local {
        let hash = self.hasher.hash_one(key);
        let mut shard = self.shard(hash).lock();
        let Shard { cells, stats } = &mut *shard;
        let Some(cell) = cells.find_mut(hash, |cell| *cell.key == *key) else {
            if cells.len() < KEYS_MAX {
                let mut cell = Cell::new(key.into());
                let moved = cell.holding.decide(now, cost, waits, terms, parts);
                cells.insert_unique(hash, cell, |cell| self.hasher.hash_one(&*cell.key));
                if let Move::Ask { ahead } = moved {
                    return Local::Ask(ahead);
                }
            }
            return Local::Ask(0);
        };
        match cell.holding.decide(now, cost, waits, terms, parts) {
            Move::Spend { fetch } => {
                stats.spent += cost;
                let decision = cell.decision(Outcome::NOW, now, limit);
                match fetch {
                    0 => Local::Decided(decision),
                    fetch => Local::DecidedFetch(decision, Arc::clone(&cell.key), fetch),
                }
            }
            Move::Deny { retry } => Local::Decided(cell.decision(Outcome::Denied { retry }, now, limit)),
            Move::Ask { ahead } => Local::Ask(ahead),
        }
    }

    /// Changes the cell of a key, if it has one.
    pub(super) fn change(&self, key: &str, change: impl FnOnce(&mut Cell, &mut Stats)) {
        let hash = self.hasher.hash_one(key);
        let mut shard = self.shard(hash).lock();
        let Shard { cells, stats } = &mut *shard;
        match cells.find_mut(hash, |cell| *cell.key == *key) {
            Some(cell) => change(cell, stats),
            // It had no room, or was forgotten meanwhile: nothing of it is held.
            None => change(&mut Cell::new(key.into()), stats),
        }
    }

    /// Permits that are held of a key and may still be spent.
    pub(super) fn left(&self, key: &str, now: Timestamp) -> u64 {
        let hash = self.hasher.hash_one(key);
        let shard = self.shard(hash).lock();
        shard.cells.find(hash, |cell| *cell.key == *key).map_or(0, |cell| cell.holding.left(now))
    }

    /// Drops what has ended, forgets keys, and says what is to be given back: everything, or what nobody asks for any more.
    pub(super) fn sweep(&self, now: Timestamp, terms: &LeaseTerms, everything: bool) -> Vec<GivenUp> {
        let mut given_up = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock();
            let Shard { cells, stats } = &mut *shard;
            let forget_after = if cells.len() > KEYS_MAX * 3 / 4 { FORGET_SOON } else { FORGET_AFTER };
            cells.retain(|cell| {
                stats.expired += cell.holding.drop_ended(now);
                if everything || cell.holding.is_idle(now, terms) {
                    given_up.append(&mut cell.give_up(now));
                }
                !cell.holding.is_over(now, forget_after)
            });
        }
        given_up
    }

    /// What was done so far, and what is held now.
    pub(super) fn stats(&self, now: Timestamp) -> Stats {
        let mut all = Stats::default();
        for shard in &self.shards {
            let shard = shard.lock();
            all.add(&shard.stats);
            all.keys += shard.cells.len() as u64;
            all.held += shard.cells.iter().map(|cell| cell.holding.left(now)).sum::<u64>();
        }
        all
    }

    fn shard(&self, hash: u64) -> &Lock<Shard> {
        // The lower bits choose the place in the shard.
        &self.shards[(hash >> 48) as usize % SHARDS]
    }
}

impl Cell {
    fn new(key: Arc<str>) -> Self {
        Self { key, holding: Holding::default(), remaining: 0, reset_at: Timestamp::default(), returns: 0 }
    }

    /// Everything that is held, to be given back.
    pub(super) fn give_up(&mut self, now: Timestamp) -> Vec<GivenUp> {
        let leases = self.holding.give_up(now).into_iter();
        leases.map(|lease| GivenUp { key: Arc::clone(&self.key), lease, returns: self.returns }).collect()
    }

    /// Notes what the store has said.
    pub(super) fn hear(&mut self, decision: &Decision, lent: u64, now: Timestamp) {
        self.remaining = decision.remaining.saturating_sub(lent);
        self.reset_at = now.after(decision.reset);
    }

    fn decision(&self, outcome: Outcome, now: Timestamp, limit: &Limit) -> Decision {
        let remaining = self.remaining.saturating_add(self.holding.left(now)).min(limit.size());
        Decision { outcome, limit: limit.size(), remaining, reset: self.reset_at.since(now), at: now }
    }
}
