//! What came of a seed.

use tollgate::{Consistency, LeaseStats};

use super::Invariant;
use super::scenario::Trouble;

/// Something that must never be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// What did not hold.
    pub invariant: Invariant,
    /// When it was seen, in real time since the beginning.
    pub at_us: u64,
    /// What was seen.
    pub what: String,
}

/// What came of a seed.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed, which replays all of it.
    pub seed: u64,
    /// What went wrong around it.
    pub trouble: Trouble,
    /// How exact the state was kept.
    pub consistency: Consistency,
    /// Events that happened.
    pub events: u64,
    /// Requests that came to nodes.
    pub requests: u64,
    /// Checks that were admitted by the store or by a lease.
    pub admissions: u64,
    /// Checks that were denied without asking.
    pub local_denials: u64,
    /// Permits that the store lent.
    pub lent: u64,
    /// Permits that nodes got.
    pub granted: u64,
    /// Permits of leases that were spent.
    pub spent: u64,
    /// Permits of leases that nodes gave back.
    pub given_back: u64,
    /// Permits of leases that ended on a node.
    pub expired: u64,
    /// Permits that were lost with a node, or on their way back.
    pub lost: u64,
    /// Permits that no node ever got.
    pub lost_on_the_way: u64,
    /// Permits that were admitted without the store and charged afterwards.
    pub charged: u64,
    /// Permits beyond the limit, in the worst interval of the worst key.
    pub worst_excess: u64,
    /// What did not hold.
    pub violations: Vec<Violation>,
    /// The same for the same events.
    pub digest: u64,
    /// What happened, if that was wanted.
    pub timeline: Vec<String>,
}

impl Report {
    pub(super) fn new(seed: u64, trouble: Trouble, consistency: Consistency) -> Self {
        Self {
            seed,
            trouble,
            consistency,
            events: 0,
            requests: 0,
            admissions: 0,
            local_denials: 0,
            lent: 0,
            granted: 0,
            spent: 0,
            given_back: 0,
            expired: 0,
            lost: 0,
            lost_on_the_way: 0,
            charged: 0,
            worst_excess: 0,
            violations: Vec::new(),
            digest: 0,
            timeline: Vec::new(),
        }
    }

    /// Mixes what happened into the digest. The order does not count: what happens at the same instant to different keys has none.
    pub(super) fn note<const N: usize>(&mut self, numbers: [u64; N]) {
        let mut mixed = 0xcbf2_9ce4_8422_2325_u64;
        for number in numbers {
            mixed = (mixed ^ number).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
        self.digest = self.digest.wrapping_add(mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }

    /// Adds what became of the permits that a node got.
    pub(super) fn add_stats(&mut self, stats: &LeaseStats) {
        self.granted += stats.granted;
        self.spent += stats.spent;
        self.given_back += stats.returned;
        self.expired += stats.expired;
        self.lost += stats.granted - (stats.spent + stats.returned + stats.expired).min(stats.granted);
    }
}
