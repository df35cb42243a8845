//! `FIXED_WINDOW`: counts permits for each window of the clock. Cheap; admits up to twice the limit around an edge.

use core::num::NonZeroU64;

use super::{Algorithm, accepted_wait, admit_by, charged, div_ceil};
use crate::decision::{Ask, Outcome, Status};
use crate::limit::LimitError;
use crate::migrate::CarriedDebt;
use crate::rate::{HORIZON_MAX_US, Rate, UNITS_MAX};
use crate::time::{Micros, Timestamp};

/// At most `limit` permits in each window; windows are aligned to the epoch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FixedWindow {
    limit: NonZeroU64,
    window: NonZeroU64,
    count_denied: bool,
}

/// A window and the permits taken in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowState {
    /// The window's number since the epoch.
    pub window: i64,
    /// Permits taken. Permits above the limit are reserved in the following windows, one limit's worth each.
    pub count: i64,
}

impl FixedWindow {
    /// `rate.permits()` in each window of `rate.per()`.
    pub fn new(rate: Rate) -> Result<Self, LimitError> {
        let (limit, window) = check_window(rate)?;
        Ok(Self { limit, window, count_denied: false })
    }

    /// Lets denied requests count too, up to the limit.
    pub const fn counting_denied(self, count_denied: bool) -> Self {
        Self { count_denied, ..self }
    }

    /// Whether denied requests count.
    pub const fn counts_denied(&self) -> bool {
        self.count_denied
    }

    /// Marks the window of `since` as used up, unless it is over.
    pub(crate) fn distrust(&self, state: &mut WindowState, now: Timestamp, since: Timestamp) {
        let advanced = self.advance(*state, now);
        if advanced.window == self.number(since) {
            *state = WindowState { count: advanced.count.max(self.limit.get() as i64), ..advanced };
        }
    }

    /// Converts a state of another limit. The carried debt is the whole count if this limit cannot hold it, or forgets it too soon.
    pub(crate) fn migrate(
        &self,
        from: &Self,
        state: WindowState,
        debt: CarriedDebt,
        now: Timestamp,
    ) -> (WindowState, CarriedDebt) {
        let WindowState { window, count } = from.advance(state, now);
        let time = now.us().max(window * from.length());
        let owed = debt.permits_at(time);
        let in_window = count.min(from.limit.get() as i64);
        let used = in_window.max(owed);
        // A debt that lasts to the end of the next window includes reservations under an earlier limit.
        let next_end = (window + 2) * from.length();
        let promised = (count - in_window).max(if debt.rest == next_end { owed } else { 0 });
        let end = match (used, promised) {
            (0, _) => time,
            (_, 0) => (window + 1) * from.length(),
            (..) => next_end,
        };
        let end = if owed > 0 { end.max(debt.rest) } else { end };
        let limit = self.limit.get() as i64;
        let count = if promised > 0 { limit + promised.min(limit) } else { used.min(limit) };
        let carried = WindowState { window: time / self.length(), count };
        if used == 0 || used.max(promised) <= limit && end <= self.full_at(&carried).us() {
            return (carried, CarriedDebt::NONE);
        }
        (carried, CarriedDebt { permits: used.max(promised), rest: end })
    }

    /// The carried debt after a change of the state. Takes and refunds count there too while the debt lasts.
    pub(crate) fn debt_after(
        &self,
        debt: CarriedDebt,
        before: WindowState,
        after: WindowState,
        now: Timestamp,
    ) -> CarriedDebt {
        let taken = after.count - self.advance(before, now).count;
        // After a clock was set back, the debt lasts as long as the window.
        let cut = (after.window < before.window).then_some((after.window + 1) * self.length());
        debt.after_window(taken, cut, now.us().max(after.window * self.length()))
    }

    /// Time until the current window ends.
    pub(crate) fn until_change(&self, state: &WindowState, now: Timestamp) -> Micros {
        Micros::of((self.advance(*state, now).window + 1) * self.length() - now.us())
    }

    const fn length(&self) -> i64 {
        self.window.get() as i64
    }

    const fn number(&self, instant: Timestamp) -> i64 {
        (instant.as_micros() / self.window.get()) as i64
    }

    /// The state, exhausted and moved to this window if the clock was set back by more than a window.
    #[inline]
    const fn redate(&self, state: WindowState, now: Timestamp) -> WindowState {
        let current = self.number(now);
        if state.window <= current + 1 {
            return state;
        }
        let limit = self.limit.get() as i64;
        WindowState { window: current, count: if state.count > limit { state.count } else { limit } }
    }

    #[inline]
    pub(crate) const fn advance(&self, state: WindowState, now: Timestamp) -> WindowState {
        let current = self.number(now);
        let limit = self.limit.get() as i64;
        let WindowState { window, count } = self.redate(state, now);
        let passed = current - window;
        if passed <= 0 {
            return WindowState { window, count };
        }
        let left = if passed >= div_ceil(count, self.limit) { 0 } else { count - passed * limit };
        WindowState { window: current, count: left }
    }
}

/// The limit and the window of a rate, if exact arithmetic holds them.
pub(super) fn check_window(rate: Rate) -> Result<(NonZeroU64, NonZeroU64), LimitError> {
    let limit = NonZeroU64::new(rate.permits()).ok_or(LimitError::Empty)?;
    let window = NonZeroU64::new(rate.per().get()).ok_or(LimitError::NoWindow)?;
    if limit.get() > UNITS_MAX {
        return Err(LimitError::TooLarge { max: UNITS_MAX });
    }
    if window.get() > HORIZON_MAX_US {
        return Err(LimitError::TooSlow);
    }
    Ok((limit, window))
}

impl Algorithm for FixedWindow {
    type State = WindowState;

    fn size(&self) -> u64 {
        self.limit.get()
    }

    fn horizon(&self) -> Micros {
        Micros::new(self.window.get())
    }

    fn fresh(&self, now: Timestamp) -> WindowState {
        WindowState { window: self.number(now), count: 0 }
    }

    #[inline]
    fn take(&self, state: &mut WindowState, now: Timestamp, ask: Ask) -> Outcome {
        let limit = self.limit.get() as i64;
        let cost = ask.cost as i64;
        *state = self.redate(*state, now);
        let WindowState { window, count } = self.advance(*state, now);
        if count + cost <= limit {
            *state = WindowState { window, count: count + cost };
            return Outcome::NOW;
        }
        // A cost is not split over windows: if it does not fit into the last reserved window, it goes to the next one.
        let position = if count % limit + cost > limit { div_ceil(count, self.limit) * limit } else { count };
        let start = (window + position / limit) * self.length();
        let outcome = admit_by(start, now, accepted_wait(ask, self.length()));
        if outcome.is_admitted() {
            *state = WindowState { window, count: position + cost };
        } else if self.count_denied {
            *state = WindowState { window, count: count.max(limit) };
        }
        outcome
    }

    #[inline]
    fn status(&self, state: &WindowState, now: Timestamp) -> Status {
        let WindowState { window, count } = self.advance(*state, now);
        let reset = if count == 0 { 0 } else { (window + 1) * self.length() - now.us() };
        Status { remaining: (self.limit.get() as i64 - count).max(0) as u64, reset: Micros::of(reset) }
    }

    fn refund(&self, state: &mut WindowState, now: Timestamp, cost: u64, at: Timestamp) {
        let WindowState { window, count } = self.advance(*state, now);
        if count == 0 || cost == 0 {
            return;
        }
        let limit = self.limit.get() as i64;
        let last = (count - 1) / limit;
        if self.number(at) == window + last {
            let count = (count - cost.min(self.size()) as i64).max(last * limit);
            *state = WindowState { window, count };
        }
    }

    fn charge(&self, state: &mut WindowState, now: Timestamp, cost: u64) {
        if cost == 0 {
            return;
        }
        let WindowState { window, count } = self.advance(*state, now);
        *state = WindowState { window, count: charged(count, cost, self.limit) };
    }

    fn full_at(&self, state: &WindowState) -> Timestamp {
        Timestamp::at((state.window + div_ceil(state.count, self.limit)) * self.length())
    }
}
