//! Converts states when the limit of their key changes.
//!
//! Consumed permits stay consumed. The permits that a smaller limit cannot hold are kept beside the state as [`CarriedDebt`]. They take no
//! room there, and count again as soon as a larger limit asks. So changing a limit back and forth gives no permits away.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use smallvec::SmallVec;

use crate::algorithm::{Algorithm, FixedWindow, IntervalBucket, LeaseState, SlidingCounter, TokenBucket};
use crate::cancel::Forgone;
use crate::limit::{Limit, State};
use crate::rate::Rate;
use crate::time::{Micros, Timestamp};

/// A state with the data that is kept beside it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Carried {
    /// The state by which the limit decides. Never [`State::Carried`].
    pub state: State,
    /// The data beside it.
    pub beside: Beside,
}

/// Data that is kept beside a state.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Beside {
    /// Permits consumed under earlier limits that the state cannot hold.
    pub carried_debt: CarriedDebt,
    /// Permits that reservations have taken beyond their costs, the latest start last.
    pub forgone: Vec<Forgone>,
}

/// Consumed permits that a state has no room for.
///
/// A bucket pays them with its overflow, so that all consumed permits flow back at the rate of the bucket. A window and a counter keep
/// them until an instant, and add the permits taken until then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CarriedDebt {
    /// Whole permits.
    pub permits: i64,
    /// Of a bucket: units beyond them. Of a window or a counter: until when they count, in microseconds.
    pub rest: i64,
}

impl CarriedDebt {
    /// No debt.
    pub const NONE: Self = Self { permits: 0, rest: 0 };

    /// The debt after a bucket has paid some units, of which `unit` make a permit.
    pub(crate) const fn less(self, units: i64, unit: i64) -> Self {
        let (permits, rest) = (units / unit, units % unit);
        let broken = (rest > self.rest) as i64;
        let permits = self.permits - permits - broken;
        if permits < 0 { Self::NONE } else { Self { permits, rest: self.rest - rest + broken * unit } }
    }

    /// The permits that still count at an instant.
    pub(crate) const fn permits_at(self, instant: i64) -> i64 {
        if self.rest > instant { self.permits } else { 0 }
    }

    /// The debt of a window after a change that took some permits. It lasts until `cut` at most, and not beyond `time`.
    pub(crate) fn after_window(self, taken: i64, cut: Option<i64>, time: i64) -> Self {
        let until = self.rest.min(cut.unwrap_or(i64::MAX));
        if until <= time {
            return Self::NONE;
        }
        Self { permits: (self.permits + taken).max(0), rest: until }
    }
}

/// The permits consumed from a bucket when its limit changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Consumed {
    /// Whole permits, with the carried debt.
    pub(crate) permits: i64,
    /// Units beyond them, of which `unit` make a permit.
    pub(crate) rest: i64,
    pub(crate) unit: i64,
    /// How many of them are below an empty bucket, by reservations and charges, rounded up.
    pub(crate) owed: i64,
    /// The time of the bucket, in microseconds.
    pub(crate) at: i64,
    /// When its period began, if it has periods.
    pub(crate) last: Option<i64>,
}

impl Consumed {
    /// Adds up `used` units and a carried debt.
    pub(crate) const fn new(
        used: i64,
        debt: CarriedDebt,
        unit: i64,
        owed: i64,
        at: i64,
        last: Option<i64>,
    ) -> Self {
        let (permits, rest) = (used / unit + debt.permits, used % unit + debt.rest);
        let whole = (rest >= unit) as i64;
        Self { permits: permits + whole, rest: rest - whole * unit, unit, owed, at, last }
    }

    /// Permits and units beyond them in a bucket of which `unit` units make a permit, rounded up.
    pub(crate) const fn in_units(&self, unit: i64) -> (i64, i64) {
        let rest = rescale(self.rest, self.unit, unit);
        if rest == unit { (self.permits + 1, 0) } else { (self.permits, rest) }
    }
}

/// The largest factor: a product of two of them is exact in a double.
const FACTOR: u64 = 1 << 26;

/// Converts a part of a permit from units of which `from` make one to units of which `to` make one, rounded up. The missing part must not
/// grow, so the missing part is what is converted. Units that are finer than a factor are taken together.
const fn rescale(part: i64, from: i64, to: i64) -> i64 {
    if part == 0 || from == to {
        return part;
    }
    let (coarse, fine) = ((from as u64).div_ceil(FACTOR), (to as u64).div_ceil(FACTOR));
    let missing = (from - part) as u64 / coarse * (to as u64 / fine) / (from as u64).div_ceil(coarse);
    to - (missing * fine) as i64
}

impl Limit {
    /// Converts a state of another limit to this one, from `now` on. A key whose algorithm changes starts afresh.
    pub fn migrate(&self, from: &Self, state: State, now: Timestamp) -> State {
        if self.home() != from.home() {
            return self.fresh(now);
        }
        if self.understands(from) {
            return state;
        }
        // Forgone permits are counted in units of the former limit, and are lost.
        let (state, Beside { carried_debt: debt, .. }) = state.into_plain();
        let carried = match (self, from, state) {
            (Self::FixedWindow(it), Self::FixedWindow(from), State::Window(state)) => {
                let (state, debt) = it.migrate(from, state, debt, now);
                Some((State::Window(state), debt))
            }
            (Self::SlidingCounter(it), Self::SlidingCounter(from), State::Counter(state)) => {
                if debt == CarriedDebt::NONE && it.cuts_like(from) {
                    return State::Counter(state);
                }
                let (state, debt) = it.migrate(from, &state, debt, now);
                Some((State::Counter(state), debt))
            }
            (_, _, state) => self.migrate_bucket(from, state, debt, now),
        };
        let Some((state, debt)) = carried else { return self.fresh(now) };
        // From the time of the former limit, which may have had longer ticks, to now.
        let advanced = self.advanced(&state, now);
        let carried_debt = self.debt_after(debt, &state, &advanced, now);
        advanced.with(Beside { carried_debt, ..Beside::default() })
    }

    /// Whether states of another limit mean the same under this one.
    pub fn understands(&self, other: &Self) -> bool {
        self.parameters() == other.parameters() && self.home() == other.home()
    }

    /// A plain state at `now`.
    fn advanced(&self, state: &State, now: Timestamp) -> State {
        match (self, self.bucket(), self.lender(), state) {
            (_, Some(it), _, State::Bucket(state)) => State::Bucket(it.advance(*state, now)),
            (_, _, Some(it), State::Lent(lent)) => State::Lent(it.advance(*lent, now)),
            (Self::IntervalBucket(it), .., State::Interval(state)) => {
                State::Interval(it.advance(*state, now).0)
            }
            (Self::FixedWindow(it), .., State::Window(state)) => State::Window(it.advance(*state, now)),
            (Self::SlidingCounter(it), .., State::Counter(state)) => State::Counter(it.advance(state, now).0),
            (.., other) => other.clone(),
        }
    }

    fn migrate_bucket(
        &self,
        from: &Self,
        state: State,
        debt: CarriedDebt,
        now: Timestamp,
    ) -> Option<(State, CarriedDebt)> {
        if let (State::Lent(lent), Some(it), Some(from)) = (&state, self.lender(), from.lender()) {
            let (lent, debt) = it.migrate(&from, *lent, debt, now);
            return Some((State::Lent(lent), debt));
        }
        // A limit that lends nothing counts lent permits as taken.
        let consumed = match (from, state) {
            (Self::IntervalBucket(from), State::Interval(state)) => from.consumed(state, debt, now),
            (from, State::Bucket(state) | State::Lent(LeaseState { bucket: state, .. })) => {
                from.bucket()?.consumed(state, debt, now)
            }
            _ => return None,
        };
        if let Self::IntervalBucket(it) = self {
            let (state, debt) = it.resume(&consumed);
            return Some((State::Interval(state), debt));
        }
        let (state, debt) = self.bucket()?.resume(&consumed, 0);
        Some((State::Bucket(state), debt))
    }

    /// Runs `change` on the plain state, and updates the data beside it.
    pub fn with_beside<R>(
        &self,
        state: &mut State,
        now: Timestamp,
        change: impl FnOnce(&mut State) -> R,
    ) -> R {
        // More permits may be out than a smaller limit holds. They become carried debt when their lease ends.
        if !matches!(state, State::Carried(_) | State::Lent(_)) {
            return change(state);
        }
        let (before, beside) = state.clone().into_plain();
        let result = change(state.plain_mut());
        if before != *state.plain() {
            let carried_debt = self.debt_after(beside.carried_debt, &before, state.plain(), now);
            let forgone = self.still_forgone(beside.forgone, state.plain());
            *state = state.plain().clone().with(Beside { carried_debt, forgone });
        }
        result
    }

    /// The carried debt after a change at `now`. If the state is unchanged, as after a denial, so is the debt.
    fn debt_after(&self, debt: CarriedDebt, before: &State, after: &State, now: Timestamp) -> CarriedDebt {
        if before == after {
            return debt;
        }
        match (self, before, after) {
            (Self::FixedWindow(it), State::Window(before), State::Window(after)) => {
                it.debt_after(debt, *before, *after, now)
            }
            (Self::SlidingCounter(it), State::Counter(before), State::Counter(after)) => {
                it.debt_after(debt, before, after, now)
            }
            (Self::IntervalBucket(it), State::Interval(before), State::Interval(after)) => {
                it.debt_after(debt, *before, after.last)
            }
            (_, State::Lent(before), _) => {
                self.lender().map_or(debt, |it| it.debt_after(debt, *before, &it.advance(*before, now)))
            }
            (_, State::Bucket(before), State::Bucket(at) | State::Lent(LeaseState { bucket: at, .. })) => {
                self.bucket().map_or(debt, |it| it.debt_after(debt, *before, at.at))
            }
            _ => debt,
        }
    }

    /// The instant from which a state with a carried debt decides like a missing one.
    pub(crate) fn full_with_debt(&self, state: &State, debt: CarriedDebt) -> Timestamp {
        let full_at = self.full_at(state);
        match (self, self.bucket()) {
            (_, Some(it)) => full_at.after(it.time_to_pay(debt)),
            (Self::IntervalBucket(it), _) => full_at.after(it.time_to_pay(debt)),
            (_, None) => full_at.max(Timestamp::at(debt.rest)),
        }
    }
}

impl State {
    /// The state by which a limit decides, and the data beside it.
    pub fn into_plain(self) -> (Self, Beside) {
        if let Self::Carried(carried) = self {
            (carried.state, carried.beside)
        } else {
            (self, Beside::default())
        }
    }

    /// A plain state with data beside it.
    pub fn with(self, beside: Beside) -> Self {
        if beside == Beside::default() {
            self
        } else {
            Self::Carried(Box::new(Carried { state: self, beside }))
        }
    }
}

/// The numbers that give the states of a limit their meaning. Limits with the same numbers share states as they are. A state that is
/// stored with them can be converted by any node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Parameters(SmallVec<[u64; PARAMETERS_MAX]>);

/// The most numbers of a limit.
const PARAMETERS_MAX: usize = 4;

impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, number) in self.0.iter().enumerate() {
            let slash = if index == 0 { "" } else { "/" };
            write!(f, "{slash}{number}")?;
        }
        Ok(())
    }
}

impl Limit {
    /// Evenly refilled buckets: tick, units in a permit, units that flow in a tick, size. Interval refill: size, permits, period.
    /// Windows: limit, length. Counters: limit, window, sub-buckets. Logs and quotas have none: their states mean the same under every
    /// limit.
    pub fn parameters(&self) -> Parameters {
        let window = || [self.size(), self.horizon().get()];
        Parameters(match self {
            Self::TokenBucket(it) => it.parts().into(),
            Self::LeakyBucket(it) => it.room().parts().into(),
            Self::IntervalBucket(it) => SmallVec::from_iter([it.size(), it.refill(), it.period()]),
            Self::FixedWindow(_) => SmallVec::from_iter(window()),
            Self::SlidingCounter(it) => window().into_iter().chain([u64::from(it.sub_buckets())]).collect(),
            Self::SlidingLog(_) | Self::CalendarQuota(_) => SmallVec::new(),
        })
    }

    /// A limit of the same algorithm with other [`Parameters`], as they are written: enough to convert its states. `None` if there is no
    /// such limit.
    pub fn with_parameters(&self, text: &str) -> Option<Self> {
        let numbers = text.split('/').take(PARAMETERS_MAX + 1).map(|number| number.parse().ok());
        let numbers = numbers.collect::<Option<SmallVec<[u64; PARAMETERS_MAX]>>>()?;
        let rate = |permits, us| Rate::new(permits, Micros::new(us)).ok();
        match (self, &numbers[..]) {
            (Self::TokenBucket(_) | Self::IntervalBucket(_), &[tick, unit, flow, capacity]) => {
                TokenBucket::from_parts([tick, unit, flow, capacity]).map(Self::TokenBucket)
            }
            (Self::TokenBucket(_) | Self::IntervalBucket(_), &[capacity, refill, period]) => {
                IntervalBucket::new(capacity, rate(refill, period)?).ok().map(Self::IntervalBucket)
            }
            (Self::LeakyBucket(it), &[tick, unit, flow, size]) => {
                let room = TokenBucket::from_parts([tick, unit, flow, size])?;
                Some(Self::LeakyBucket(it.with_room(room)))
            }
            (Self::FixedWindow(_), &[limit, length]) => {
                FixedWindow::new(rate(limit, length)?).ok().map(Self::FixedWindow)
            }
            (Self::SlidingCounter(_), &[limit, window, sub_buckets]) => {
                // Strict: the weight of the oldest sub-bucket does not matter for a conversion.
                let sub_buckets = u32::try_from(sub_buckets).ok()?;
                SlidingCounter::new(rate(limit, window)?, sub_buckets, true).ok().map(Self::SlidingCounter)
            }
            _ => None,
        }
    }
}
