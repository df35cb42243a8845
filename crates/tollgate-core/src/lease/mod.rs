//! Leases: permits that a node borrows from the shared state ahead of demand and spends without asking.
//!
//! The state lends by [`LeaseTerms`]; a node holds its leases in a [`LocalLease`]. The state charges lent permits at once, so no node can
//! admit more than the limit, whatever it does with its leases.

mod demand;
mod local;

pub use local::{Denied, Lease, LocalLease, Move, Spent};

use crate::algorithm::{Algorithm, LeakyMode};
use crate::decision::Ask;
use crate::limit::{Limit, State};
use crate::time::{Micros, Timestamp};

/// How often the shared state is asked, and how exact the limit is then.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Consistency {
    /// Every check is decided by the shared state.
    #[default]
    Strict,
    /// Nodes borrow permits and decide by themselves. Never more than the limit, in any interval.
    Lease,
    /// As `Lease`, with less bookkeeping for buckets: a burst can be larger by [`LeaseTerms::overshoot`], the rate never.
    LeaseFast,
}

impl Consistency {
    /// All of them, in the order of help texts.
    pub const ALL: [Self; 3] = [Self::Strict, Self::Lease, Self::LeaseFast];

    /// Its name in settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Lease => "lease",
            Self::LeaseFast => "lease_fast",
        }
    }
}

/// Permits that may be spent without asking again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// How many.
    pub permits: u64,
    /// Identifies the grant when permits are given back.
    pub at: Timestamp,
    /// For how long they may be spent, counted from the request for them.
    pub life: Micros,
}

/// Why a limit lends no permits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StaysStrict {
    /// The settings ask for no leases.
    #[error("it was not asked to lend")]
    Chosen,
    /// A log keeps the time of every admission, and a queue its turn.
    #[error("a log and a queue know the time of every request, which a lease does not")]
    Algorithm,
    /// Permits that a crashed node held would be lost until the next day, week or month.
    #[error("permits that a crashed node held would be lost for the rest of the period")]
    Quota,
    /// A few nodes would hold too large a part of the limit.
    #[error("{size} permits are too few to lend from: at least {PERMITS_MIN}")]
    TooSmall {
        /// The limit's size.
        size: u64,
    },
    /// A lease would hardly outlive the call that brings it.
    #[error("a lease would last {} ms, which is too short: at least {}", .life.get() / 1_000, LIFE_MIN.get() / 1_000)]
    TooShort {
        /// How long a lease would live.
        life: Micros,
    },
}

/// Permits that a limit needs for each other node to lend to it: then all other nodes together hold about a fiftieth of it.
const PERMITS_PER_NODE: u64 = 100;
/// Two other nodes may start at any time.
const PERMITS_MIN: u64 = 2 * PERMITS_PER_NODE;
/// Asking for a lease every few milliseconds saves nothing over asking for each request.
const LIFE_MIN: Micros = Micros::from_millis(10);
/// Permits that a crashed node held are back after this time, whatever the limit.
const LIFE_MAX: Micros = Micros::from_secs(1);

/// How the permits of a limit are lent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseTerms {
    lending: Lending,
    life: Micros,
    /// The most permits that one node holds of one key.
    ceiling: u64,
    size: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lending {
    /// Permits count as out while their lease lives.
    Counted,
    /// Permits are ordinary debits, spent later.
    Plain,
    /// Permits are ordinary debits that must be spent before the state changes by itself.
    UntilChange,
}

impl LeaseTerms {
    /// The terms on which a limit is lent from, or why it is not.
    pub fn new(limit: &Limit, consistency: Consistency) -> Result<Self, StaysStrict> {
        let terms = Self::of_any_size(limit, consistency)?;
        if terms.size < PERMITS_MIN {
            return Err(StaysStrict::TooSmall { size: terms.size });
        }
        if terms.life < LIFE_MIN {
            return Err(StaysStrict::TooShort { life: terms.life });
        }
        Ok(terms)
    }

    /// The terms on which a limit of any size and speed is lent from.
    pub fn of_any_size(limit: &Limit, consistency: Consistency) -> Result<Self, StaysStrict> {
        let (size, horizon) = (limit.size(), limit.horizon().get());
        // A fifth of the time to full costs no throughput. A twentieth bounds the part by which a burst may be too large.
        let (bucket, parts) = match consistency {
            Consistency::Strict => return Err(StaysStrict::Chosen),
            Consistency::Lease => (Lending::Counted, 5),
            Consistency::LeaseFast => (Lending::Plain, 20),
        };
        let (lending, life) = match limit {
            Limit::TokenBucket(_) => (bucket, horizon / parts),
            Limit::LeakyBucket(it) if it.mode() == LeakyMode::Meter => (bucket, horizon / parts),
            Limit::FixedWindow(_) => (Lending::UntilChange, horizon / 5),
            Limit::SlidingCounter(it) => (Lending::UntilChange, horizon / u64::from(it.sub_buckets()) / 5),
            Limit::IntervalBucket(it) => (Lending::UntilChange, it.period() / 5),
            Limit::SlidingLog(_) | Limit::LeakyBucket(_) => return Err(StaysStrict::Algorithm),
            Limit::CalendarQuota(_) => return Err(StaysStrict::Quota),
        };
        Ok(Self { lending, life: Micros::new(life).min(LIFE_MAX), ceiling: size, size })
    }

    /// The same terms with a ceiling on the permits that one node holds of one key.
    #[must_use]
    pub fn with_ceiling(self, permits: u64) -> Self {
        Self { ceiling: permits.min(self.size), ..self }
    }

    /// The same terms with another life of leases, however long.
    #[must_use]
    pub const fn with_life(self, life: Micros) -> Self {
        Self { life, ..self }
    }

    /// How long a lease is meant to last. A lease that ends with a window may live longer or shorter.
    pub const fn life(&self) -> Micros {
        self.life
    }

    /// Whether the state counts lent permits as out.
    pub const fn counts_out(&self) -> bool {
        matches!(self.lending, Lending::Counted)
    }

    /// The most permits that one node holds of one key.
    pub const fn ceiling(&self) -> u64 {
        self.ceiling
    }

    /// The most nodes that this limit lends to. With more nodes it stays strict.
    pub const fn nodes_max(&self) -> u64 {
        self.size / PERMITS_PER_NODE + 1
    }

    /// The number of parts that the permits left are cut into, of which one is lent. `None`: too many nodes to lend to.
    pub const fn parts(&self, nodes: u64) -> Option<u64> {
        if nodes > self.nodes_max() { None } else { Some(if nodes == 0 { 2 } else { 2 * nodes }) }
    }

    /// By how many permits a burst can be too large with this number of nodes.
    pub fn overshoot(&self, limit: &Limit, nodes: u64) -> u64 {
        let (Lending::Plain, Some(lender)) = (self.lending, limit.lender()) else { return 0 };
        let ticks = u128::from(self.life.get().div_ceil(lender.0.tick()));
        let flows = (ticks * u128::from(lender.0.flow())).div_ceil(u128::from(lender.0.unit()));
        u64::try_from(flows).unwrap_or(u64::MAX).min(nodes.saturating_mul(self.ceiling))
    }

    /// Lends as many of the `wanted` permits as are left, but at most one of `parts` parts of them.
    pub fn lend(&self, limit: &Limit, state: &mut State, now: Timestamp, wanted: u64, parts: u64) -> Grant {
        if let (Lending::Counted, Some(lender)) = (self.lending, limit.lender()) {
            return limit.with_beside(state, now, |state| {
                let mut lent = lender.fresh(now);
                if let State::Lent(known) = state {
                    lent = *known;
                } else if let State::Bucket(bucket) = state {
                    lent.bucket = *bucket;
                }
                let grant = lender.lend(&mut lent, now, wanted, parts, self.life);
                *state = State::Lent(lent);
                grant
            });
        }
        let left = limit.status(state, now).remaining;
        let permits = wanted.min(left.div_ceil(parts.max(1)));
        if wanted > 0 {
            // With no permits left this is a denial, which re-dates the state if the clock was set back.
            limit.decide(state, now, Ask::of(permits.max(1)));
        }
        Grant { permits, at: now, life: self.life_of(limit, state, now) }
    }

    /// Takes back unspent permits of the grant identified by `at`. Permits that have flowed back since are not given back a second time.
    /// Otherwise a node could collect permits by returning old leases.
    pub fn take_back(&self, limit: &Limit, state: &mut State, now: Timestamp, permits: u64, at: Timestamp) {
        limit.take_back(state, now, permits, at, self.counts_out());
    }

    /// For how long the permits just taken may be spent.
    fn life_of(&self, limit: &Limit, state: &State, now: Timestamp) -> Micros {
        match (self.lending, limit, state.plain()) {
            (Lending::Counted | Lending::Plain, ..) => self.life,
            (_, Limit::FixedWindow(it), State::Window(state)) => it.until_change(state, now),
            (_, Limit::SlidingCounter(it), State::Counter(state)) => it.until_change(state, now),
            (_, Limit::IntervalBucket(it), State::Interval(state)) => it.until_change(state, now),
            _ => Micros::ZERO,
        }
    }
}
