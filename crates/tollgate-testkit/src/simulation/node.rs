//! A node: its clock, a bounded table of what it holds, and an account of every permit that it ever got.

use std::collections::BTreeMap;

use tollgate_core::lease::{Holding, Lease, Move};
use tollgate_core::{Grant, LeaseTerms, Micros, Timestamp};

use super::Flaw;

/// What a node holds of one key.
#[derive(Clone, Debug, Default)]
pub(super) struct Entry {
    /// Told apart from an earlier entry of the same key, which had to make room.
    pub id: u64,
    pub holding: Holding,
    /// Where the last denial came from: how often the key had become better than it promised, and when.
    pub denial: Option<(u64, u64)>,
    /// The judge's names of the leases that are held, in their order.
    names: Vec<Named>,
}

#[derive(Clone, Copy, Debug)]
struct Named {
    lease: usize,
    left: u64,
    ends: Timestamp,
}

/// A lease, or what is left of it, with the judge's name.
#[derive(Clone, Copy, Debug)]
pub(super) struct GivenUp {
    pub lease: usize,
    pub held: Lease,
}

/// Where the permits went that a node has got.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Account {
    pub granted: u64,
    pub spent: u64,
    pub given_back: u64,
    pub expired: u64,
    pub lost: u64,
}

#[derive(Debug)]
pub(super) struct Node {
    pub entries: BTreeMap<usize, Entry>,
    pub account: Account,
    /// How many returns there were of a key, for all that this node knows.
    pub returns: BTreeMap<usize, u64>,
    /// What was admitted alone and not charged yet.
    pub debts: BTreeMap<usize, u64>,
    pub unreachable_until_us: u64,
    pub paused_until_us: u64,
    pub is_up: bool,
    /// How often it has started: what was asked before is not its business.
    pub starts: u64,
    cap: usize,
    offset_us: u64,
    drift_ppm: i64,
    /// The clock as it was last looked at.
    looked_at: Timestamp,
    next_id: u64,
    flaw: Option<Flaw>,
}

impl Node {
    pub(super) fn new(cap: usize, offset_us: u64, drift_ppm: i64, flaw: Option<Flaw>) -> Self {
        Self {
            entries: BTreeMap::new(),
            account: Account::default(),
            returns: BTreeMap::new(),
            debts: BTreeMap::new(),
            unreachable_until_us: 0,
            paused_until_us: 0,
            is_up: true,
            starts: 0,
            cap,
            offset_us,
            drift_ppm,
            looked_at: Timestamp::default(),
            next_id: 0,
            flaw,
        }
    }

    /// The node's own time.
    pub(super) fn clock(&self, real_us: u64) -> Timestamp {
        let run = i128::from(real_us) * i128::from(1_000_000 + self.drift_ppm) / 1_000_000;
        Timestamp::from_micros(self.offset_us + run as u64)
    }

    /// Decides on a request, and says of which leases it was paid.
    pub(super) fn decide(
        &mut self,
        real_us: u64,
        key: usize,
        (cost, waits): (u64, bool),
        terms: &LeaseTerms,
        parts: Option<u64>,
    ) -> (Move, Vec<(usize, u64)>) {
        let now = match self.flaw {
            Some(Flaw::SpendAfterEnd) => self.looked_at.max(self.clock(0)),
            _ => self.clock(real_us),
        };
        self.make_room_for(key);
        let entry = self.entries.entry(key).or_insert_with(|| {
            self.next_id += 1;
            Entry { id: self.next_id, ..Entry::default() }
        });
        let step = entry.holding.decide(now, cost, waits, terms, parts);
        let mut paid = Vec::new();
        for (named, lease) in entry.names.iter_mut().zip(entry.holding.leases()) {
            if named.left > lease.left {
                paid.push((named.lease, named.left - lease.left));
                named.left = lease.left;
            }
        }
        if let Move::Spend { .. } = step {
            self.account.spent += cost;
        }
        (step, paid)
    }

    /// The entry that a call was sent for, if it is still there.
    pub(super) fn entry(&mut self, key: usize, id: u64) -> Option<&mut Entry> {
        self.entries.get_mut(&key).filter(|entry| entry.id == id)
    }

    /// A call was answered that asked for `ahead` permits. Says whether what was lent has come to somebody.
    #[expect(clippy::too_many_arguments, reason = "what an answer consists of")]
    pub(super) fn answered(
        &mut self,
        real_us: u64,
        (key, id): (usize, u64),
        sent: Timestamp,
        ahead: u64,
        lent: Option<(Grant, usize)>,
        denied: Option<(u64, Micros)>,
        from: (u64, u64),
        terms: &LeaseTerms,
    ) -> bool {
        let now = self.clock(real_us);
        let sent = if self.flaw == Some(Flaw::LifeFromReceipt) { now } else { sent };
        let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.id == id) else { return false };
        let grant = lent.map(|(grant, _)| grant);
        let expired = entry.holding.answered(now, sent, ahead, grant, denied, terms);
        entry.denial = denied.map(|_| from);
        let Some((grant, name)) = lent.filter(|(grant, _)| grant.permits > 0 && ahead > 0) else {
            return false;
        };
        self.account.granted += grant.permits;
        self.account.expired += expired;
        entry.names.retain(|named| now < named.ends && named.left > 0);
        let leases = entry.holding.leases();
        // Unless it had ended before it came.
        if leases.len() > entry.names.len() {
            let place = entry.names.iter().zip(leases).take_while(|(name, it)| name.ends == it.ends).count();
            if let Some(lease) = leases.get(place) {
                entry.names.insert(place, Named { lease: name, left: lease.left, ends: lease.ends });
            }
        }
        true
    }

    /// Drops what has ended, and says what is to be given back of keys that nobody asks for.
    pub(super) fn sweep(&mut self, real_us: u64, terms: &LeaseTerms) -> Vec<(usize, GivenUp)> {
        let now = self.clock(real_us);
        self.looked_at = now;
        let mut given_up = Vec::new();
        for (key, entry) in &mut self.entries {
            self.account.expired += entry.holding.drop_ended(now);
            entry.names.retain(|named| now < named.ends && named.left > 0);
            if !entry.holding.is_idle(now, terms) {
                continue;
            }
            let leases = entry.holding.give_up(now);
            given_up.extend(entry.name(&leases).into_iter().map(|it| (*key, it)));
            self.account.given_back += leases.iter().map(|lease| lease.left).sum::<u64>();
        }
        self.entries.retain(|_, entry| !entry.holding.is_over(now, terms.life()));
        given_up
    }

    /// Gives up everything: the node is told to end.
    pub(super) fn end(&mut self, real_us: u64) -> Vec<(usize, GivenUp)> {
        let now = self.clock(real_us);
        let mut given_up = Vec::new();
        for (key, entry) in &mut self.entries {
            let held = entry.held();
            entry.names.retain(|named| now < named.ends && named.left > 0);
            let leases = entry.holding.give_up(now);
            let given: u64 = leases.iter().map(|lease| lease.left).sum();
            self.account.given_back += given;
            self.account.expired += held - given;
            given_up.extend(entry.name(&leases).into_iter().map(|it| (*key, it)));
        }
        given_up
    }

    /// Everything that it knew is gone.
    pub(super) fn crash(&mut self) {
        self.account.lost += self.held();
        self.entries.clear();
        self.returns.clear();
        self.debts.clear();
        self.starts += 1;
        self.is_up = false;
    }

    /// Permits of leases that are in the table, ended or not.
    pub(super) fn held(&self) -> u64 {
        self.entries.values().map(Entry::held).sum()
    }

    /// Whether every permit that it ever got is accounted for, and named as it is held.
    pub(super) fn is_balanced(&self) -> bool {
        let Account { granted, spent, given_back, expired, lost } = self.account;
        let is_named =
            |entry: &Entry| entry.names.iter().map(|named| named.left).sum::<u64>() == entry.held();
        granted == spent + self.held() + given_back + expired + lost && self.entries.values().all(is_named)
    }

    pub(super) fn is_within_cap(&self) -> bool {
        self.entries.len() <= self.cap
    }

    /// Whoever was asked for longest ago makes room. What it holds is destroyed.
    fn make_room_for(&mut self, key: usize) {
        if self.entries.contains_key(&key) || self.entries.len() < self.cap {
            return;
        }
        let oldest =
            self.entries.iter().min_by_key(|(_, entry)| entry.holding.used_at()).map(|(key, _)| *key);
        if let Some(entry) = oldest.and_then(|key| self.entries.remove(&key)) {
            self.account.lost += entry.held();
        }
    }
}

impl Entry {
    fn held(&self) -> u64 {
        self.holding.leases().iter().map(|lease| lease.left).sum()
    }

    /// The names of all leases, which were given up in their order.
    fn name(&mut self, leases: &[Lease]) -> Vec<GivenUp> {
        let named = core::mem::take(&mut self.names).into_iter().filter(|named| named.left > 0);
        named.zip(leases).map(|(named, held)| GivenUp { lease: named.lease, held: *held }).collect()
    }
}
