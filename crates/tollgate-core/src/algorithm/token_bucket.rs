//! `TOKEN_BUCKET`: tokens flow back evenly. Admits bursts up to the capacity, and the rate in the long run.

use core::num::NonZeroU64;

use super::{Algorithm, accepted_wait, admit_by, div_ceil};
use crate::decision::{Ask, Outcome, Status};
use crate::limit::LimitError;
use crate::migrate::{CarriedDebt, Consumed};
use crate::rate::{HORIZON_MAX_US, Rate, Scale, UNITS_MAX};
use crate::time::{Micros, Timestamp};

/// At most `capacity` permits at once, refilled evenly at a rate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TokenBucket {
    capacity: NonZeroU64,
    scale: Scale,
    /// `capacity` in units.
    full: i64,
    /// Ticks from empty to full.
    fill_ticks: i64,
}

/// The level of a bucket and the tick it was computed for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BucketState {
    /// In units ([`TokenBucket::unit`] to the permit). Negative while reservations or debts are due.
    pub level: i64,
    /// In ticks ([`TokenBucket::tick`]) since the epoch.
    pub at: i64,
}

/// The most units that flow at once. Larger numbers would not be exact in a double when they pay a carried debt.
pub(super) const FLOW_MAX: i64 = 1 << 52;

impl TokenBucket {
    /// A bucket that holds `capacity` permits and gets them back at `refill`.
    pub fn new(capacity: u64, refill: Rate) -> Result<Self, LimitError> {
        let capacity = NonZeroU64::new(capacity).ok_or(LimitError::Empty)?;
        let scale = Scale::choose(capacity.get(), refill)?;
        let full = (capacity.get() * scale.unit.get()) as i64;
        Ok(Self { capacity, scale, full, fill_ticks: div_ceil(full, scale.flow) })
    }

    /// Its tick, units in a permit, units in a tick and capacity.
    pub fn parts(&self) -> [u64; 4] {
        [self.tick(), self.unit(), self.flow(), self.size()]
    }

    /// Builds a bucket from its tick, units in a permit, units in a tick and capacity.
    pub(crate) fn from_parts(parts: [u64; 4]) -> Option<Self> {
        let [tick, unit, flow, capacity] = parts.map(NonZeroU64::new);
        let (scale, capacity) = (Scale { tick: tick?, unit: unit?, flow: flow? }, capacity?);
        let full = capacity.checked_mul(scale.unit).filter(|units| units.get() <= UNITS_MAX)?.get() as i64;
        let fill_ticks = div_ceil(full, scale.flow);
        let fits = scale.flow.get() <= UNITS_MAX
            && (fill_ticks as u64).checked_mul(scale.tick.get()).is_some_and(|us| us <= HORIZON_MAX_US);
        fits.then_some(Self { capacity, scale, full, fill_ticks })
    }

    /// Microseconds in a tick, the step in which this bucket sees time.
    pub const fn tick(&self) -> u64 {
        self.scale.tick.get()
    }

    /// Units in a permit.
    pub const fn unit(&self) -> u64 {
        self.scale.unit.get()
    }

    /// Units that flow back in a tick.
    pub const fn flow(&self) -> u64 {
        self.scale.flow.get()
    }

    /// `capacity` in units.
    pub(crate) const fn full(&self) -> i64 {
        self.full
    }

    pub(crate) const fn ticks(&self, instant: Timestamp) -> i64 {
        match self.tick() {
            // The usual tick needs no division.
            1 => instant.us(),
            _ => (instant.as_micros() / self.scale.tick.get()) as i64,
        }
    }

    /// The instant at which a tick begins, in microseconds.
    pub(crate) const fn us(&self, ticks: i64) -> i64 {
        ticks * self.tick() as i64
    }

    /// The first tick, counted from `state.at`, by which `units` more have flowed.
    pub(super) const fn ticks_for(&self, units: i64) -> i64 {
        div_ceil(units, self.scale.flow)
    }

    /// `permits` (at most the capacity) in units.
    pub(crate) const fn units(&self, permits: u64) -> i64 {
        (permits * self.unit()) as i64
    }

    /// The state, emptied and dated now if the clock was set back by more than a horizon.
    #[inline]
    pub(super) const fn redate(&self, state: BucketState, now: Timestamp) -> BucketState {
        let tick = self.ticks(now);
        if state.at - tick <= self.fill_ticks {
            return state;
        }
        BucketState { level: if state.level < 0 { state.level } else { 0 }, at: tick }
    }

    /// The state at `now`: refilled, or unchanged if the clock stepped back.
    #[inline]
    pub(crate) const fn advance(&self, state: BucketState, now: Timestamp) -> BucketState {
        self.refill(self.redate(state, now), now)
    }

    /// Empties the bucket at `since`, with the flow of `life` owed, unless it was written later. Doing so again changes nothing: the state
    /// is dated `since`, as is a state that was never written.
    pub(crate) fn distrust(&self, state: &mut BucketState, since: Timestamp, life: Micros) {
        let at = self.ticks(since);
        if state.at <= at {
            let owed = life.min(self.horizon()).get().div_ceil(self.tick()) * self.flow();
            let level = self.advance(*state, since).level.min(-(owed as i64));
            *state = BucketState { level: level.max(-self.full - self.flow() as i64), at };
        }
    }

    /// The permits consumed from the bucket by `now`.
    pub(crate) fn consumed(&self, state: BucketState, debt: CarriedDebt, now: Timestamp) -> Consumed {
        let advanced = self.advance(state, now);
        self.consumed_below(self.full, advanced, self.debt_after(debt, state, advanced.at))
    }

    /// The permits consumed from an advanced bucket that is full at `cap`.
    pub(super) fn consumed_below(&self, cap: i64, advanced: BucketState, debt: CarriedDebt) -> Consumed {
        let owed = div_ceil((-advanced.level).max(0), self.scale.unit);
        let used = (cap - advanced.level).max(0);
        Consumed::new(used, debt, self.unit() as i64, owed, self.us(advanced.at), None)
    }

    /// Rebuilds the state under this limit with `out` permits lent; the excess becomes carried debt. Reservations and debts go at most
    /// one capacity below empty, so that no caller waits longer than this bucket allows.
    pub(crate) fn resume(&self, consumed: &Consumed, out: u64) -> (BucketState, CarriedDebt) {
        let (permits, rest) = consumed.in_units(self.unit() as i64);
        let size = self.size() as i64;
        let home = size - out.min(self.size()) as i64;
        let room = home + consumed.owed.min(size);
        let (taken, debt) = match permits >= room {
            true => (room * self.unit() as i64, CarriedDebt { permits: permits - room, rest }),
            false => (permits * self.unit() as i64 + rest, CarriedDebt::NONE),
        };
        // Longer ticks round up, so that no refill counts twice. A full bucket has no refill.
        let is_full = permits == 0 && rest == 0 && out == 0;
        let at = match is_full {
            true => self.ticks(Timestamp::at(consumed.at)),
            false => div_ceil(consumed.at, self.scale.tick),
        };
        (BucketState { level: home * self.unit() as i64 - taken, at }, debt)
    }

    /// The carried debt when the bucket has refilled from `before` to the tick `at`. The overflow pays for it.
    pub(crate) fn debt_after(&self, debt: CarriedDebt, before: BucketState, at: i64) -> CarriedDebt {
        let ticks = (at - before.at).clamp(0, FLOW_MAX / self.flow() as i64);
        let overflow = (ticks * self.flow() as i64 - (self.full - before.level)).max(0);
        debt.less(overflow, self.unit() as i64)
    }

    /// How long a full bucket takes to pay a carried debt: 35 years at most, then the debt is forgotten.
    pub(crate) fn time_to_pay(&self, debt: CarriedDebt) -> Micros {
        let units = debt.permits as u128 * u128::from(self.unit()) + debt.rest as u128;
        let us = units.div_ceil(u128::from(self.flow())) * u128::from(self.tick());
        Micros::new(us.min(u128::from(HORIZON_MAX_US)) as u64)
    }

    /// [`TokenBucket::advance`], for a state that is not dated too far ahead.
    #[inline]
    const fn refill(&self, state: BucketState, now: Timestamp) -> BucketState {
        let tick = self.ticks(now);
        if tick <= state.at {
            return state;
        }
        // A saturated product means "long enough": levels are below 2^53.
        let flowed = (tick - state.at).saturating_mul(self.flow() as i64);
        let missing = self.full - state.level;
        BucketState { level: if flowed >= missing { self.full } else { state.level + flowed }, at: tick }
    }
}

impl Algorithm for TokenBucket {
    type State = BucketState;

    #[inline]
    fn size(&self) -> u64 {
        self.capacity.get()
    }

    fn horizon(&self) -> Micros {
        Micros::of(self.us(self.fill_ticks))
    }

    #[inline]
    fn fresh(&self, now: Timestamp) -> BucketState {
        BucketState { level: self.full, at: self.ticks(now) }
    }

    // Always inlined: it has few callers, and each of them is hot.
    #[inline(always)]
    fn take(&self, state: &mut BucketState, now: Timestamp, ask: Ask) -> Outcome {
        if state.at - self.ticks(now) > self.fill_ticks {
            *state = self.redate(*state, now);
        }
        let BucketState { level, at } = self.refill(*state, now);
        let cost = self.units(ask.cost);
        if cost <= level {
            *state = BucketState { level: level - cost, at };
            return Outcome::NOW;
        }
        let ticks = self.ticks_for(cost - level);
        let wait = accepted_wait(ask, self.horizon().us());
        if wait == 0 {
            return Outcome::Denied { retry: Micros::of(self.us(at + ticks) - now.us()) };
        }
        let outcome = admit_by(self.us(at + ticks), now, wait);
        if outcome.is_admitted() {
            // The debit is due at the start of the request. Until then the refill stops at the capacity.
            let brim = self.full - ticks.saturating_mul(self.flow() as i64);
            *state = BucketState { level: level.min(brim) - cost, at };
        }
        outcome
    }

    #[inline]
    fn status(&self, state: &BucketState, now: Timestamp) -> Status {
        let state = self.advance(*state, now);
        let remaining = if state.level <= 0 { 0 } else { state.level as u64 / self.scale.unit };
        let reset = if state.level == self.full { Micros::ZERO } else { self.full_at(&state).since(now) };
        Status { remaining, reset }
    }

    fn refund(&self, state: &mut BucketState, now: Timestamp, cost: u64, at: Timestamp) {
        let now_state = self.advance(*state, now);
        let cost = self.units(cost.min(self.size()));
        let start = self.ticks(at);
        let credit = if start > now_state.at {
            // Not started: only the newest reservation can leave, or later ones would start too early.
            let newest = now_state.level < 0 && start == now_state.at + self.ticks_for(-now_state.level);
            if newest { cost } else { 0 }
        } else if now_state.level < 0 {
            // Other reservations still wait for these permits.
            0
        } else {
            // Permits that have flowed back since the start are not given back a second time.
            cost - (now_state.at - start).saturating_mul(self.flow() as i64).min(cost)
        };
        if credit > 0 && now_state.level < self.full {
            *state = BucketState { level: self.full.min(now_state.level + credit), at: now_state.at };
        }
    }

    fn charge(&self, state: &mut BucketState, now: Timestamp, cost: u64) {
        if cost == 0 {
            return;
        }
        let BucketState { level, at } = self.advance(*state, now);
        // Twice the capacity brings any level to the floor.
        let cost = self.units(cost.min(2 * self.size()));
        *state = BucketState { level: (level - cost).max(level.min(-self.full)), at };
    }

    #[inline]
    fn full_at(&self, state: &BucketState) -> Timestamp {
        Timestamp::at(self.us(state.at + self.ticks_for(self.full - state.level)))
    }
}
