//! `TOKEN_BUCKET` with interval refill: all permits of a period come back at once, at its end.
//!
//! A full bucket has no running period. The first take starts one.

use core::num::NonZeroU64;

use super::token_bucket::FLOW_MAX;
use super::{Algorithm, accepted_wait, admit_by, div_ceil};
use crate::decision::{Ask, Outcome, Status};
use crate::limit::LimitError;
use crate::migrate::{CarriedDebt, Consumed};
use crate::rate::{HORIZON_MAX_US, Rate, UNITS_MAX};
use crate::time::{Micros, Timestamp};

/// At most `capacity` permits at once; the rate's permits come back at the end of each of its periods.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct IntervalBucket {
    capacity: NonZeroU64,
    refill: NonZeroU64,
    period: NonZeroU64,
    /// Microseconds from empty to full.
    horizon: i64,
}

/// The tokens of a bucket and the period they belong to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IntervalState {
    /// Whole permits. Negative while reservations or debts are due.
    pub tokens: i64,
    /// When the running period began, in microseconds.
    pub last: i64,
}

impl IntervalBucket {
    /// A bucket that holds `capacity` permits and gets `refill.permits()` back at the end of each `refill.per()`.
    pub fn new(capacity: u64, refill: Rate) -> Result<Self, LimitError> {
        let capacity = NonZeroU64::new(capacity).ok_or(LimitError::Empty)?;
        if capacity.get().max(refill.permits()) > UNITS_MAX {
            return Err(LimitError::TooLarge { max: UNITS_MAX });
        }
        let periods = capacity.get().div_ceil(refill.permits());
        let horizon = periods
            .checked_mul(refill.per().get())
            .filter(|us| *us <= HORIZON_MAX_US)
            .ok_or(LimitError::TooSlow)?;
        let nonzero = |n| NonZeroU64::new(n).ok_or(LimitError::Empty);
        Ok(Self {
            capacity,
            refill: nonzero(refill.permits())?,
            period: nonzero(refill.per().get())?,
            horizon: horizon as i64,
        })
    }

    /// Permits that come back at the end of each period.
    pub const fn refill(&self) -> u64 {
        self.refill.get()
    }

    /// The period, in microseconds.
    pub const fn period(&self) -> u64 {
        self.period.get()
    }

    /// Empties the bucket at `since`, unless its period began later. It stays empty for one period from there.
    pub(crate) fn distrust(&self, state: &mut IntervalState, since: Timestamp) {
        if state.last <= since.us() {
            let (advanced, _) = self.advance(*state, since);
            *state = IntervalState { tokens: advanced.tokens.min(0), last: since.us() };
        }
    }

    /// The permits consumed from the bucket by `now`.
    pub(crate) fn consumed(&self, state: IntervalState, debt: CarriedDebt, now: Timestamp) -> Consumed {
        let (advanced, time) = self.advance(state, now);
        let debt = self.debt_after(debt, state, advanced.last);
        let owed = (-advanced.tokens).max(0);
        Consumed::new(self.full() - advanced.tokens, debt, 1, owed, time, Some(advanced.last))
    }

    /// Rebuilds the state under this limit; the excess becomes carried debt. A running period goes on, so that no time is lost, but
    /// does not end before the next microsecond.
    pub(crate) fn resume(&self, consumed: &Consumed) -> (IntervalState, CarriedDebt) {
        let (permits, _) = consumed.in_units(1);
        let room = self.full() + consumed.owed.min(self.full());
        let earliest = consumed.at - self.period.get() as i64 + 1;
        let last = consumed.last.map_or(consumed.at, |last| last.max(earliest));
        let debt = CarriedDebt { permits: (permits - room).max(0), rest: 0 };
        (IntervalState { tokens: self.full() - permits.min(room), last }, debt)
    }

    /// The carried debt when a period begins at `last`. Permits that came back to a full bucket pay for it.
    pub(crate) fn debt_after(&self, debt: CarriedDebt, before: IntervalState, last: i64) -> CarriedDebt {
        let periods = (last - before.last).max(0) / self.period.get() as i64;
        let came = periods.min(FLOW_MAX / self.refill.get() as i64) * self.refill.get() as i64;
        debt.less((came - (self.full() - before.tokens)).max(0), 1)
    }

    /// How long a full bucket takes to pay a carried debt: 35 years at most, then the debt is forgotten.
    pub(crate) fn time_to_pay(&self, debt: CarriedDebt) -> Micros {
        let periods = self.periods_for(debt.permits) as u64;
        Micros::new(periods.saturating_mul(self.period.get()).min(HORIZON_MAX_US))
    }

    /// Time until the running period ends.
    pub(crate) const fn until_change(&self, state: &IntervalState, now: Timestamp) -> Micros {
        let (state, _) = self.advance(*state, now);
        Micros::of(self.after_periods(state.last, 1) - now.us())
    }

    const fn full(&self) -> i64 {
        self.capacity.get() as i64
    }

    /// Periods until `tokens` more have come.
    const fn periods_for(&self, tokens: i64) -> i64 {
        div_ceil(tokens, self.refill)
    }

    /// The state, emptied and dated now if the clock was set back by more than a horizon.
    const fn redate(&self, state: IntervalState, now: Timestamp) -> IntervalState {
        if state.last - now.us() <= self.horizon {
            return state;
        }
        IntervalState { tokens: if state.tokens < 0 { state.tokens } else { 0 }, last: now.us() }
    }

    /// The state at `now`, and the instant that counts as now.
    pub(crate) const fn advance(&self, state: IntervalState, now: Timestamp) -> (IntervalState, i64) {
        let IntervalState { tokens, last } = self.redate(state, now);
        let time = if last > now.us() { last } else { now.us() };
        let periods = ((time - last) as u64 / self.period.get()) as i64;
        if periods >= self.periods_for(self.full() - tokens) {
            return (IntervalState { tokens: self.full(), last: time }, time);
        }
        let refilled = tokens + periods * self.refill.get() as i64;
        (IntervalState { tokens: refilled, last: self.after_periods(last, periods) }, time)
    }

    const fn after_periods(&self, last: i64, periods: i64) -> i64 {
        last + periods * self.period.get() as i64
    }
}

impl Algorithm for IntervalBucket {
    type State = IntervalState;

    fn size(&self) -> u64 {
        self.capacity.get()
    }

    fn horizon(&self) -> Micros {
        Micros::of(self.horizon)
    }

    fn fresh(&self, now: Timestamp) -> IntervalState {
        IntervalState { tokens: self.full(), last: now.us() }
    }

    fn take(&self, state: &mut IntervalState, now: Timestamp, ask: Ask) -> Outcome {
        let cost = ask.cost as i64;
        *state = self.redate(*state, now);
        let (IntervalState { tokens, last }, _) = self.advance(*state, now);
        if cost <= tokens {
            *state = IntervalState { tokens: tokens - cost, last };
            return Outcome::NOW;
        }
        let periods = self.periods_for(cost - tokens);
        let outcome = admit_by(self.after_periods(last, periods), now, accepted_wait(ask, self.horizon));
        if outcome.is_admitted() {
            let brim = self.full() - periods.saturating_mul(self.refill.get() as i64);
            *state = IntervalState { tokens: tokens.min(brim) - cost, last };
        }
        outcome
    }

    fn status(&self, state: &IntervalState, now: Timestamp) -> Status {
        let (state, _) = self.advance(*state, now);
        let is_full = state.tokens == self.full();
        let reset = if is_full { Micros::ZERO } else { self.full_at(&state).since(now) };
        Status { remaining: state.tokens.max(0) as u64, reset }
    }

    fn refund(&self, state: &mut IntervalState, now: Timestamp, cost: u64, at: Timestamp) {
        let (IntervalState { tokens, last }, time) = self.advance(*state, now);
        let cost = cost.min(self.size()) as i64;
        let start = at.us();
        let credit = if start > time {
            let newest = tokens < 0 && start == self.after_periods(last, self.periods_for(-tokens));
            if newest { cost } else { 0 }
        } else if tokens < 0 {
            0
        } else {
            // Refills that came after the start have already given these permits back.
            let refills = if start >= last { 0 } else { div_ceil(last - start, self.period) };
            cost - refills.saturating_mul(self.refill.get() as i64).min(cost)
        };
        if credit > 0 && tokens < self.full() {
            *state = IntervalState { tokens: self.full().min(tokens + credit), last };
        }
    }

    fn charge(&self, state: &mut IntervalState, now: Timestamp, cost: u64) {
        if cost == 0 {
            return;
        }
        let (IntervalState { tokens, last }, _) = self.advance(*state, now);
        let cost = cost.min(2 * self.size()) as i64;
        *state = IntervalState { tokens: (tokens - cost).max(tokens.min(-self.full())), last };
    }

    fn full_at(&self, state: &IntervalState) -> Timestamp {
        Timestamp::at(self.after_periods(state.last, self.periods_for(self.full() - state.tokens)))
    }
}
