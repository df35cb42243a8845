//! Leases: permits that a node borrows from the shared state ahead of demand and spends without asking.
//!
//! Seen from the state, which lends ([`LeaseTerms`]), and from the node, which holds ([`LocalLease`]). The state charges what it lends
//! at once, so nothing that a node does with its leases, or fails to do, can pass more than the limit.

mod demand;
mod local;

pub use local::{Denied, Lease, LocalLease, Move, Spent};

use crate::algorithm::{Algorithm, LeakyMode, LeaseState};
use crate::decision::Ask;
use crate::limit::{Limit, State};
use crate::time::{Micros, Timestamp};

/// How exact the shared state is kept, against how often it is asked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Consistency {
    /// Every check is decided by the shared state.
    #[default]
    Strict,
    /// Nodes borrow and decide by themselves. Never more than the limit, in any interval.
    Lease,
    /// The same, for buckets with less bookkeeping: a burst can be larger by what [`LeaseTerms::overshoot`] says, the rate never.
    LeaseFast,
}

impl Consistency {
    /// All of them, as help texts list them.
    pub const ALL: [Self; 3] = [Self::Strict, Self::Lease, Self::LeaseFast];

    /// The word for it in settings.
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
    /// What they are known by: whoever gives some back says so.
    pub at: Timestamp,
    /// For how long they may be spent, from when they were asked for.
    pub life: Micros,
}

/// Why a limit is not lent from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StaysStrict {
    /// Nobody has asked for leases.
    #[error("it was not asked to lend")]
    Chosen,
    /// Every admission has its own time in a log, and in a queue its own turn.
    #[error("a log and a queue know the time of every request, which a lease does not")]
    Algorithm,
    /// What a node that dies takes along would be gone until the next day, week or month.
    #[error("what a node takes along when it dies would be gone for the rest of the period")]
    Quota,
    /// What a few nodes hold would be too large a part of the limit.
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

/// A limit is lent from while it has as many permits for each other node: then those that all others hold are about a fiftieth of it.
const PERMITS_PER_NODE: u64 = 100;
/// Two other nodes may come at any time.
const PERMITS_MIN: u64 = 2 * PERMITS_PER_NODE;
/// A lease that is asked for again every few milliseconds saves nothing over asking for each request.
const LIFE_MIN: Micros = Micros::from_millis(10);
/// What a node that dies takes along is back after this long, whatever the limit.
const LIFE_MAX: Micros = Micros::from_secs(1);

/// How the permits of a limit are lent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseTerms {
    lending: Lending,
    /// The most that one node holds of one key.
    ceiling: u64,
    size: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lending {
    /// Counted as out for as long as they live.
    Counted { life: Micros },
    /// Ordinary debits, spent later than they were made.
    Plain { life: Micros },
    /// Ordinary debits that must be spent before the state changes by itself: then it is the same when they are spent.
    UntilChange { at_most: Micros },
}

impl LeaseTerms {
    /// The terms on which a limit is lent from, or why it is not.
    pub fn new(limit: &Limit, consistency: Consistency) -> Result<Self, StaysStrict> {
        let terms = Self::of_any_size(limit, consistency)?;
        if terms.size < PERMITS_MIN {
            return Err(StaysStrict::TooSmall { size: terms.size });
        }
        if terms.life() < LIFE_MIN {
            return Err(StaysStrict::TooShort { life: terms.life() });
        }
        Ok(terms)
    }

    /// The same, whether or not it is worth it.
    pub fn of_any_size(limit: &Limit, consistency: Consistency) -> Result<Self, StaysStrict> {
        let size = limit.size();
        // A fifth of the time to full costs no throughput; a twentieth is the part by which a burst may be too large.
        let part = |parts: u64| Micros::new(limit.horizon().get() / parts).min(LIFE_MAX);
        let bucket = match consistency {
            Consistency::Strict => return Err(StaysStrict::Chosen),
            Consistency::Lease => Lending::Counted { life: part(5) },
            Consistency::LeaseFast => Lending::Plain { life: part(20) },
        };
        let until_change =
            |length: u64| Lending::UntilChange { at_most: Micros::new(length / 5).min(LIFE_MAX) };
        let lending = match limit {
            Limit::TokenBucket(_) => bucket,
            Limit::LeakyBucket(it) if it.mode() == LeakyMode::Meter => bucket,
            Limit::FixedWindow(it) => until_change(it.window().get()),
            Limit::SlidingCounter(it) => until_change(it.window().get() / u64::from(it.sub_buckets())),
            Limit::IntervalBucket(it) => until_change(it.period()),
            Limit::SlidingLog(_) | Limit::LeakyBucket(_) => return Err(StaysStrict::Algorithm),
            Limit::CalendarQuota(_) => return Err(StaysStrict::Quota),
        };
        Ok(Self { lending, ceiling: size, size })
    }

    /// The same, with a ceiling on what one node holds of one key.
    #[must_use]
    pub const fn with_ceiling(self, permits: u64) -> Self {
        Self { ceiling: if permits < self.size { permits } else { self.size }, ..self }
    }

    /// The same for leases of another length, however long.
    #[must_use]
    pub const fn with_life(self, life: Micros) -> Self {
        let lending = match self.lending {
            Lending::Counted { .. } => Lending::Counted { life },
            Lending::Plain { .. } => Lending::Plain { life },
            Lending::UntilChange { .. } => Lending::UntilChange { at_most: life },
        };
        Self { lending, ..self }
    }

    /// How long a lease is meant to last. One that ends with a window may live longer or shorter.
    pub const fn life(&self) -> Micros {
        match self.lending {
            Lending::Counted { life } | Lending::Plain { life } | Lending::UntilChange { at_most: life } => {
                life
            }
        }
    }

    /// Whether what is out is counted in the state.
    pub const fn counts_out(&self) -> bool {
        matches!(self.lending, Lending::Counted { .. })
    }

    /// The most that one node holds of one key.
    pub const fn ceiling(&self) -> u64 {
        self.ceiling
    }

    /// The most nodes among which this limit is lent. With more of them it stays strict.
    pub const fn nodes_max(&self) -> u64 {
        self.size / PERMITS_PER_NODE + 1
    }

    /// Into how many parts what is left is cut for so many nodes, of which one is lent. None: too many nodes to lend to.
    pub const fn parts(&self, nodes: u64) -> Option<u64> {
        if nodes > self.nodes_max() { None } else { Some(if nodes == 0 { 2 } else { 2 * nodes }) }
    }

    /// By how many permits a burst can be too large, with so many nodes.
    pub fn overshoot(&self, limit: &Limit, nodes: u64) -> u64 {
        let (Lending::Plain { life }, Some(lender)) = (self.lending, limit.lender()) else { return 0 };
        let ticks = u128::from(life.get().div_ceil(lender.0.tick()));
        let flows = (ticks * u128::from(lender.0.flow())).div_ceil(u128::from(lender.0.unit()));
        u64::try_from(flows).unwrap_or(u64::MAX).min(nodes.saturating_mul(self.ceiling))
    }

    /// Lends as many of the `wanted` permits as are left, but no more than one part of that in `parts`.
    pub fn lend(&self, limit: &Limit, state: &mut State, now: Timestamp, wanted: u64, parts: u64) -> Grant {
        if let (Lending::Counted { life }, Some(lender)) = (self.lending, limit.lender()) {
            return limit.with_beside(state, now, |state| {
                let mut lent = match state {
                    State::Lent(lent) => *lent,
                    State::Bucket(bucket) => LeaseState { bucket: *bucket, ..lender.fresh(now) },
                    State::Interval(_)
                    | State::Window(_)
                    | State::Log(_)
                    | State::Counter(_)
                    | State::Calendar(_)
                    | State::Carried(_) => lender.fresh(now),
                };
                let grant = lender.lend(&mut lent, now, wanted, parts, life);
                *state = State::Lent(lent);
                grant
            });
        }
        let left = limit.status(state, now).remaining;
        let permits = wanted.min(left.div_ceil(parts.max(1)));
        if wanted > 0 {
            // Nothing left is a denial, which must be noted where a clock was set back.
            limit.decide(state, now, Ask::of(permits.max(1)));
        }
        Grant { permits, at: now, life: self.life_of(limit, state, now) }
    }

    /// Takes back what was not spent of a grant that was known by `at`. What has flowed in its place since does not come back a second
    /// time: whoever borrows anew and gives back what is old would hold more and more beyond a full bucket.
    pub fn take_back(&self, limit: &Limit, state: &mut State, now: Timestamp, permits: u64, at: Timestamp) {
        match (self.lending, limit.lender()) {
            (Lending::Counted { .. }, Some(lender)) => limit.with_beside(state, now, |state| {
                // Otherwise nothing is out.
                if let State::Lent(lent) = state {
                    lender.take_back(lent, now, permits, at);
                }
            }),
            (Lending::Counted { .. }, None) => {}
            (Lending::Plain { .. } | Lending::UntilChange { .. }, _) => {
                limit.refund(state, now, permits, at);
            }
        }
    }

    /// For how long what was just taken may be spent.
    fn life_of(&self, limit: &Limit, state: &State, now: Timestamp) -> Micros {
        match (self.lending, limit, state.plain()) {
            (Lending::Counted { life } | Lending::Plain { life }, ..) => life,
            (_, Limit::FixedWindow(it), State::Window(state)) => it.until_change(state, now),
            (_, Limit::SlidingCounter(it), State::Counter(state)) => it.until_change(state, now),
            (_, Limit::IntervalBucket(it), State::Interval(state)) => it.until_change(state, now),
            _ => Micros::ZERO,
        }
    }
}
