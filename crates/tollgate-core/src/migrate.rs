//! What becomes of a state when the limit of its key changes.
//!
//! What was consumed stays consumed. A smaller limit holds only a part of it; what does not fit is remembered beside the state
//! ([`CarriedDebt`]), takes no room there, and counts again as soon as a larger limit asks. So nobody gets permits by changing back and forth.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use crate::algorithm::{Algorithm, FixedWindow, IntervalBucket, LeaseState, SlidingCounter, TokenBucket};
use crate::cancel::Forgone;
use crate::limit::{Limit, State};
use crate::rate::Rate;
use crate::time::{Micros, Timestamp};

/// A state, and what is kept beside it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Carried {
    /// The state by which the limit decides. Never itself a carried one.
    pub state: State,
    /// The rest.
    pub beside: Beside,
}

/// What is kept beside a state.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Beside {
    /// What was consumed under earlier limits beyond what the state can hold.
    pub carried_debt: CarriedDebt,
    /// What reservations have taken beyond their costs, the latest start last.
    pub forgone: Vec<Forgone>,
}

/// Permits that were consumed and that a state has no room for.
///
/// A bucket pays them with what would overflow its brim, so that everything consumed flows back at the bucket's own rate. A window and
/// a counter keep them until an instant, and add to them whatever is taken until then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CarriedDebt {
    /// Whole permits.
    pub permits: i64,
    /// Of a bucket: units beyond them. Of a window or a counter: until when they count, in microseconds.
    pub rest: i64,
}

impl CarriedDebt {
    /// Nothing.
    pub const NONE: Self = Self { permits: 0, rest: 0 };

    /// What is left when a bucket has paid so many units, of which `unit` make a permit.
    pub(crate) const fn less(self, units: i64, unit: i64) -> Self {
        let (permits, rest) = (units / unit, units % unit);
        let broken = (rest > self.rest) as i64;
        let permits = self.permits - permits - broken;
        if permits < 0 { Self::NONE } else { Self { permits, rest: self.rest - rest + broken * unit } }
    }

    /// As far as it still counts at an instant.
    pub(crate) const fn permits_at(self, instant: i64) -> i64 {
        if self.rest > instant { self.permits } else { 0 }
    }
}

/// What a bucket had given when its limit changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Consumed {
    /// Whole permits, with those that lie over.
    pub(crate) permits: i64,
    /// Units beyond them, of which `unit` make a permit.
    pub(crate) rest: i64,
    pub(crate) unit: i64,
    /// Those of them that were promised or owed beyond an empty bucket, rounded up.
    pub(crate) debt: i64,
    /// The time of the bucket, in microseconds.
    pub(crate) at: i64,
    /// When its period began, if it has periods.
    pub(crate) last: Option<i64>,
}

impl Consumed {
    /// `used` units, and what lies over.
    pub(crate) const fn new(
        used: i64,
        carried_debt: CarriedDebt,
        unit: i64,
        debt: i64,
        at: i64,
        last: Option<i64>,
    ) -> Self {
        let (permits, rest) = (used / unit + carried_debt.permits, used % unit + carried_debt.rest);
        let whole = (rest >= unit) as i64;
        Self { permits: permits + whole, rest: rest - whole * unit, unit, debt, at, last }
    }

    /// The same in a bucket of which `unit` units make a permit: permits and units beyond them, rounded up.
    pub(crate) const fn in_units(&self, unit: i64) -> (i64, i64) {
        let rest = rescale(self.rest, self.unit, unit);
        if rest == unit { (self.permits + 1, 0) } else { (self.permits, rest) }
    }
}

/// Bits of a factor: a product of two is exact in a double.
const FACTOR: u64 = 1 << 26;

/// A part of a permit, in units of which `to` make one instead of `from`, rounded up. What is missing to the whole is what must not
/// grow, so that is what is converted; units that are finer than a factor are taken together.
const fn rescale(part: i64, from: i64, to: i64) -> i64 {
    if part == 0 || from == to {
        return part;
    }
    let (coarse, fine) = ((from as u64).div_ceil(FACTOR), (to as u64).div_ceil(FACTOR));
    let missing = (from - part) as u64 / coarse * (to as u64 / fine) / (from as u64).div_ceil(coarse);
    to - (missing * fine) as i64
}

impl Limit {
    /// A state that was written under another limit, as it is under this one from `now` on. One of another algorithm is not carried
    /// over: the key starts afresh.
    pub fn migrate(&self, from: &Self, state: State, now: Timestamp) -> State {
        if self.home() != from.home() {
            return self.fresh(now);
        }
        if self.understands(from) {
            return state;
        }
        // What is forgone is counted in the former limit's units, and is lost.
        let (state, Beside { carried_debt, .. }) = state.into_plain();
        let carried = match (self, from, state) {
            (Self::FixedWindow(it), Self::FixedWindow(from), State::Window(state)) => {
                let (state, carried_debt) = it.migrate(from, state, carried_debt, now);
                Some((State::Window(state), carried_debt))
            }
            (Self::SlidingCounter(it), Self::SlidingCounter(from), State::Counter(state)) => {
                if carried_debt == CarriedDebt::NONE && it.cuts_like(from) {
                    return State::Counter(state);
                }
                let (state, carried_debt) = it.migrate(from, &state, carried_debt, now);
                Some((State::Counter(state), carried_debt))
            }
            (_, _, state) => self.migrate_bucket(from, state, carried_debt, now),
        };
        let Some((state, carried_debt)) = carried else { return self.fresh(now) };
        // From the time of the former limit, which may have had longer ticks, to now.
        let advanced = self.advanced(&state, now);
        let carried_debt = self.carried_debt_after(carried_debt, &state, &advanced, now);
        advanced.with(carried_debt.into())
    }

    /// Whether states of another limit mean the same under this one.
    pub fn understands(&self, other: &Self) -> bool {
        self.parameters() == other.parameters() && self.home() == other.home()
    }

    /// A plain state as it is at `now`.
    fn advanced(&self, state: &State, now: Timestamp) -> State {
        match (self, state) {
            (Self::TokenBucket(it), State::Bucket(state)) => State::Bucket(it.advance(*state, now)),
            (Self::LeakyBucket(it), State::Bucket(state)) => State::Bucket(it.room().advance(*state, now)),
            (Self::IntervalBucket(it), State::Interval(state)) => State::Interval(it.advance(*state, now).0),
            (Self::FixedWindow(it), State::Window(state)) => State::Window(it.advance(*state, now)),
            (Self::SlidingCounter(it), State::Counter(state)) => State::Counter(it.advance(state, now).0),
            (Self::CalendarQuota(_), State::Calendar(state)) => State::Calendar(*state),
            (_, State::Lent(lent)) => {
                self.lender().map_or(State::Lent(*lent), |it| State::Lent(it.advance(*lent, now)))
            }
            (_, other) => other.clone(),
        }
    }

    fn migrate_bucket(
        &self,
        from: &Self,
        state: State,
        carried_debt: CarriedDebt,
        now: Timestamp,
    ) -> Option<(State, CarriedDebt)> {
        if let (State::Lent(lent), Some(it), Some(from)) = (&state, self.lender(), from.lender()) {
            let (lent, carried_debt) = it.migrate(&from, *lent, carried_debt, now);
            return Some((State::Lent(lent), carried_debt));
        }
        // A limit that lends nothing takes what was lent for what it was in the first place: a debit.
        let consumed = match (from, state) {
            (Self::IntervalBucket(from), State::Interval(state)) => from.consumed(state, carried_debt, now),
            (from, State::Bucket(state) | State::Lent(LeaseState { bucket: state, .. })) => {
                from.bucket()?.consumed(state, carried_debt, now)
            }
            _ => return None,
        };
        if let Self::IntervalBucket(it) = self {
            let (state, carried_debt) = it.resume(&consumed);
            return Some((State::Interval(state), carried_debt));
        }
        let (state, carried_debt) = self.bucket()?.resume(&consumed, 0);
        Some((State::Bucket(state), carried_debt))
    }

    /// Runs `change` on a state, or on the one that it carries, and keeps account of what is beside it.
    pub fn with_beside<R>(
        &self,
        state: &mut State,
        now: Timestamp,
        change: impl FnOnce(&mut State) -> R,
    ) -> R {
        // Beside what is carried: more may be out than a smaller limit holds, which lies over when its time has passed.
        if !matches!(state, State::Carried(_) | State::Lent(_)) {
            return change(state);
        }
        let (before, beside) = state.clone().into_plain();
        let result = change(state.plain_mut());
        if before != *state.plain() {
            let carried_debt = self.carried_debt_after(beside.carried_debt, &before, state.plain(), now);
            let forgone = self.still_forgone(beside.forgone, state.plain());
            *state = state.plain().clone().with(Beside { carried_debt, forgone });
        }
        result
    }

    /// What lies over when a change at `now` has made one state of another. A state that was only looked at, or that has denied, is the
    /// same as before, and so is what lies over.
    fn carried_debt_after(
        &self,
        carried_debt: CarriedDebt,
        before: &State,
        after: &State,
        now: Timestamp,
    ) -> CarriedDebt {
        if before == after {
            return carried_debt;
        }
        match (self, before, after) {
            (Self::FixedWindow(it), State::Window(before), State::Window(after)) => {
                it.carried_debt_after(carried_debt, *before, *after, now)
            }
            (Self::SlidingCounter(it), State::Counter(before), State::Counter(after)) => {
                it.carried_debt_after(carried_debt, before, after, now)
            }
            (Self::IntervalBucket(it), State::Interval(before), State::Interval(after)) => {
                it.carried_debt_after(carried_debt, *before, after.last)
            }
            (_, State::Lent(before), _) => match self.lender() {
                Some(it) => it.carried_debt_after(carried_debt, *before, &it.advance(*before, now)),
                None => carried_debt,
            },
            (
                _,
                State::Bucket(before),
                State::Bucket(after) | State::Lent(LeaseState { bucket: after, .. }),
            ) => match self.bucket() {
                Some(it) => it.carried_debt_after(carried_debt, *before, after.at),
                None => carried_debt,
            },
            _ => carried_debt,
        }
    }

    /// When a state is as good as none, if so much lies over.
    pub(crate) fn full_with_debt(&self, state: &State, carried_debt: CarriedDebt) -> Timestamp {
        let full_at = self.full_at(state);
        match self {
            Self::TokenBucket(it) => full_at.after(it.time_to_pay(carried_debt)),
            Self::LeakyBucket(it) => full_at.after(it.room().time_to_pay(carried_debt)),
            Self::IntervalBucket(it) => full_at.after(it.time_to_pay(carried_debt)),
            Self::FixedWindow(_) | Self::SlidingCounter(_) | Self::SlidingLog(_) | Self::CalendarQuota(_) => {
                full_at.max(Timestamp::at(carried_debt.rest))
            }
        }
    }

    /// The bucket that refills evenly, if it is one.
    const fn bucket(&self) -> Option<&TokenBucket> {
        match self {
            Self::TokenBucket(it) => Some(it),
            Self::LeakyBucket(it) => Some(it.room()),
            Self::IntervalBucket(_)
            | Self::FixedWindow(_)
            | Self::SlidingLog(_)
            | Self::SlidingCounter(_)
            | Self::CalendarQuota(_) => None,
        }
    }
}

impl State {
    /// The state by which a limit decides, and what is beside it.
    pub fn into_plain(self) -> (Self, Beside) {
        match self {
            Self::Carried(carried) => (carried.state, carried.beside),
            plain @ (Self::Bucket(_)
            | Self::Lent(_)
            | Self::Interval(_)
            | Self::Window(_)
            | Self::Log(_)
            | Self::Counter(_)
            | Self::Calendar(_)) => (plain, Beside::default()),
        }
    }

    /// A plain state with this beside it.
    pub fn with(self, beside: Beside) -> Self {
        if beside == Beside::default() {
            self
        } else {
            Self::Carried(Box::new(Carried { state: self, beside }))
        }
    }
}

impl From<CarriedDebt> for Beside {
    fn from(carried_debt: CarriedDebt) -> Self {
        Self { carried_debt, forgone: Vec::new() }
    }
}

/// The numbers by which a limit understands its states. Limits that share them share states as they are; a state that is kept with
/// them can be carried over by whoever finds it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Parameters {
    numbers: [u64; 4],
    many: usize,
}

impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, number) in self.numbers.iter().take(self.many).enumerate() {
            let slash = if index == 0 { "" } else { "/" };
            write!(f, "{slash}{number}")?;
        }
        Ok(())
    }
}

impl Parameters {
    const fn of<const N: usize>(of: [u64; N]) -> Self {
        let mut numbers = [0; 4];
        let mut index = 0;
        while index < N {
            numbers[index] = of[index];
            index += 1;
        }
        Self { numbers, many: N }
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parameters = Self { numbers: [0; 4], many: 0 };
        for number in text.split('/') {
            *parameters.numbers.get_mut(parameters.many)? = number.parse().ok()?;
            parameters.many += 1;
        }
        Some(parameters)
    }
}

impl Limit {
    /// Evenly refilled buckets: tick, units in a permit, units that flow in a tick, size. Interval refill: size, permits, period.
    /// Windows: limit, length. Counters: limit, window, sub-buckets. Logs and quotas have
    /// none: what they keep means the same under every limit.
    pub const fn parameters(&self) -> Parameters {
        match self {
            Self::TokenBucket(it) => Parameters::of([it.tick(), it.unit(), it.flow(), it.capacity()]),
            Self::LeakyBucket(it) => {
                let it = it.room();
                Parameters::of([it.tick(), it.unit(), it.flow(), it.capacity()])
            }
            Self::IntervalBucket(it) => Parameters::of([it.capacity(), it.refill(), it.period()]),
            Self::FixedWindow(it) => Parameters::of([it.limit(), it.window().get()]),
            Self::SlidingCounter(it) => {
                Parameters::of([it.limit(), it.window().get(), it.sub_buckets() as u64])
            }
            Self::SlidingLog(_) | Self::CalendarQuota(_) => Parameters::of([]),
        }
    }

    /// A limit of the same algorithm that had these parameters, as [`Parameters`] write them: all that is needed to carry its states
    /// over. None if there is no such limit.
    pub fn with_parameters(&self, text: &str) -> Option<Self> {
        let Parameters { numbers, many } = Parameters::parse(text)?;
        match (self, many, numbers) {
            (Self::TokenBucket(_) | Self::IntervalBucket(_), 4, numbers) => {
                TokenBucket::from_parts(numbers).map(Self::TokenBucket)
            }
            (Self::TokenBucket(_) | Self::IntervalBucket(_), 3, [capacity, refill, period, _]) => {
                let refill = Rate::new(refill, Micros::new(period)).ok()?;
                IntervalBucket::new(capacity, refill).ok().map(Self::IntervalBucket)
            }
            (Self::LeakyBucket(it), 4, numbers) => {
                TokenBucket::from_parts(numbers).map(|room| Self::LeakyBucket(it.with_room(room)))
            }
            (Self::FixedWindow(_), 2, [limit, length, ..]) => {
                let rate = Rate::new(limit, Micros::new(length)).ok()?;
                FixedWindow::new(rate).ok().map(Self::FixedWindow)
            }
            (Self::SlidingCounter(_), 3, [limit, window, sub_buckets, _]) => {
                let rate = Rate::new(limit, Micros::new(window)).ok()?;
                // In full: how the oldest sub-bucket is weighted does not matter for what is carried over.
                let sub_buckets = u32::try_from(sub_buckets).ok()?;
                SlidingCounter::new(rate, sub_buckets, true).ok().map(Self::SlidingCounter)
            }
            _ => None,
        }
    }
}
