//! `TOKEN_BUCKET`: a bucket of tokens that flow back evenly. Bursts up to its capacity, the rate in the long run.

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

/// A level and the tick it was true at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BucketState {
    /// In units ([`TokenBucket::unit`] to the permit). Negative while reservations or debts are due.
    pub level: i64,
    /// In ticks ([`TokenBucket::tick`]) since the epoch.
    pub at: i64,
}

/// Units that are seen to flow at once, at most: what lies over is paid in numbers that are exact in a double.
pub(super) const FLOW_MAX: i64 = 1 << 52;

impl TokenBucket {
    /// A bucket that holds `capacity` permits and gets them back at `refill`.
    pub fn new(capacity: u64, refill: Rate) -> Result<Self, LimitError> {
        let capacity = NonZeroU64::new(capacity).ok_or(LimitError::Empty)?;
        let scale = Scale::choose(capacity.get(), refill)?;
        let full = (capacity.get() * scale.unit.get()) as i64;
        Ok(Self { capacity, scale, full, fill_ticks: div_ceil(full, scale.flow) })
    }

    /// The bucket whose tick, units in a permit, units in a tick and capacity these are.
    pub(crate) fn from_parts(parts: [u64; 4]) -> Option<Self> {
        let [tick, unit, flow, capacity] = parts.map(NonZeroU64::new);
        let (scale, capacity) = (Scale { tick: tick?, unit: unit?, flow: flow? }, capacity?);
        let full = capacity.checked_mul(scale.unit).filter(|units| units.get() <= UNITS_MAX)?.get() as i64;
        let fill_ticks = div_ceil(full, scale.flow);
        let fits = scale.flow.get() <= UNITS_MAX
            && (fill_ticks as u64).checked_mul(scale.tick.get()).is_some_and(|us| us <= HORIZON_MAX_US);
        fits.then_some(Self { capacity, scale, full, fill_ticks })
    }

    /// The most permits that can be taken at once.
    pub const fn capacity(&self) -> u64 {
        self.capacity.get()
    }

    /// From empty to full.
    pub const fn time_to_full(&self) -> Micros {
        Micros::of(self.fill_ticks * self.tick() as i64)
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
            // The usual tick, without the division.
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

    /// Empty, and dated now, if the clock was set back by more than a horizon; otherwise as it was.
    #[inline]
    pub(super) const fn redate(&self, state: BucketState, now: Timestamp) -> BucketState {
        let tick = self.ticks(now);
        if state.at - tick <= self.fill_ticks {
            return state;
        }
        BucketState { level: if state.level < 0 { state.level } else { 0 }, at: tick }
    }

    /// The state as it is at `now`: refilled, or held if the clock stepped back.
    #[inline]
    pub(crate) const fn advance(&self, state: BucketState, now: Timestamp) -> BucketState {
        self.refill(self.redate(state, now), now)
    }

    /// Empty at `since`, with what flows in `life` owed, if it was not written later. One that is dated `since` is distrusted again
    /// and again, which changes nothing: that is also the date of a state that was never written.
    pub(crate) fn distrust(&self, state: &mut BucketState, since: Timestamp, life: Micros) {
        let at = self.ticks(since);
        if state.at <= at {
            let owed = Micros::new(life.get().min(self.time_to_full().get())).get().div_ceil(self.tick());
            let advanced = self.advance(*state, since);
            let level =
                advanced.level.min(-((owed * self.flow()) as i64)).max(-self.full - self.flow() as i64);
            *state = BucketState { level, at };
        }
    }

    /// What was taken of a bucket, as it is at `now`.
    pub(crate) fn consumed(&self, state: BucketState, carried_debt: CarriedDebt, now: Timestamp) -> Consumed {
        let advanced = self.advance(state, now);
        let carried_debt = self.carried_debt_after(carried_debt, state, advanced.at);
        self.consumed_below(self.full, advanced, carried_debt)
    }

    /// What was taken of a bucket that is settled, and full at `cap`.
    pub(super) fn consumed_below(
        &self,
        cap: i64,
        advanced: BucketState,
        carried_debt: CarriedDebt,
    ) -> Consumed {
        let debt = div_ceil((-advanced.level).max(0), self.scale.unit);
        let used = (cap - advanced.level).max(0);
        Consumed::new(used, carried_debt, self.unit() as i64, debt, self.us(advanced.at), None)
    }

    /// A bucket of which so much was taken before, with `out` permits lent, and what it has no room for. It is empty at worst, but for
    /// promises and debts of up to a bucketful: whoever waits, waits no longer than this bucket could let wait.
    pub(crate) fn resume(&self, consumed: &Consumed, out: u64) -> (BucketState, CarriedDebt) {
        let (permits, rest) = consumed.in_units(self.unit() as i64);
        let size = self.capacity() as i64;
        let home = size - out.min(self.capacity()) as i64;
        let room = home + consumed.debt.min(size);
        let (taken, carried_debt) = match permits >= room {
            true => (room * self.unit() as i64, CarriedDebt { permits: permits - room, rest }),
            false => (permits * self.unit() as i64 + rest, CarriedDebt::NONE),
        };
        // Later rather than earlier, where ticks are longer: what flows in one must not flow twice. Into a full bucket nothing flows.
        let is_full = permits == 0 && rest == 0 && out == 0;
        let at = match is_full {
            true => self.ticks(Timestamp::at(consumed.at)),
            false => div_ceil(consumed.at, self.scale.tick),
        };
        (BucketState { level: home * self.unit() as i64 - taken, at }, carried_debt)
    }

    /// What lies over once so much has flowed as from `before` to the tick `at`: what goes beyond the brim pays for it.
    pub(crate) fn carried_debt_after(
        &self,
        carried_debt: CarriedDebt,
        before: BucketState,
        at: i64,
    ) -> CarriedDebt {
        let ticks = (at - before.at).clamp(0, FLOW_MAX / self.flow() as i64);
        let overflow = (ticks * self.flow() as i64 - (self.full - before.level)).max(0);
        carried_debt.less(overflow, self.unit() as i64)
    }

    /// How long a full bucket takes to pay for what lies over: 35 years at most, then it is forgotten.
    pub(crate) fn time_to_pay(&self, carried_debt: CarriedDebt) -> Micros {
        let units = carried_debt.permits as u128 * u128::from(self.unit()) + carried_debt.rest as u128;
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
        // Saturation only says "long enough": levels are below 2^53.
        let flowed = (tick - state.at).saturating_mul(self.flow() as i64);
        let missing = self.full - state.level;
        BucketState { level: if flowed >= missing { self.full } else { state.level + flowed }, at: tick }
    }
}

impl Algorithm for TokenBucket {
    type State = BucketState;

    #[inline]
    fn fresh(&self, now: Timestamp) -> BucketState {
        BucketState { level: self.full, at: self.ticks(now) }
    }

    // Always: called from few places, each of them the hot one.
    #[inline(always)]
    fn decide(&self, state: &mut BucketState, now: Timestamp, ask: Ask) -> Outcome {
        if ask.cost > self.capacity() {
            return Outcome::Impossible;
        }
        if ask.cost == 0 {
            return Outcome::NOW;
        }
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
        let wait = accepted_wait(ask, self.time_to_full().us());
        if wait == 0 {
            return Outcome::Denied { retry: Micros::of(self.us(at + ticks) - now.us()) };
        }
        let outcome = admit_by(self.us(at + ticks), now, wait);
        if outcome.is_admitted() {
            // The debit falls due at the start of the request, and what flows until then stops at the brim too.
            let brim = self.full - ticks.saturating_mul(self.flow() as i64);
            *state = BucketState { level: level.min(brim) - cost, at };
        }
        outcome
    }

    #[inline]
    fn status(&self, state: &BucketState, now: Timestamp) -> Status {
        let state = self.advance(*state, now);
        let remaining = if state.level <= 0 { 0 } else { state.level as u64 / self.scale.unit };
        let reset = if state.level == self.full {
            0
        } else {
            self.us(state.at + self.ticks_for(self.full - state.level)) - now.us()
        };
        Status { remaining, reset: Micros::of(reset) }
    }

    fn refund(&self, state: &mut BucketState, now: Timestamp, cost: u64, at: Timestamp) {
        let now_state = self.advance(*state, now);
        let cost = self.units(cost.min(self.capacity()));
        let start = self.ticks(at);
        let credit = if start > now_state.at {
            // Not started: only the newest reservation can leave without letting the later ones in early.
            let newest = now_state.level < 0 && start == now_state.at + self.ticks_for(-now_state.level);
            if newest { cost } else { 0 }
        } else if now_state.level < 0 {
            // Others still wait for what would come back.
            0
        } else {
            // What has flowed back since the start is not owed a second time.
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
        // Two bucketfuls bring any level to the floor, so a larger cost says no more.
        let cost = self.units(cost.min(2 * self.capacity()));
        *state = BucketState { level: (level - cost).max(level.min(-self.full)), at };
    }

    #[inline]
    fn full_at(&self, state: &BucketState) -> Timestamp {
        Timestamp::at(self.us(state.at + self.ticks_for(self.full - state.level)))
    }
}
