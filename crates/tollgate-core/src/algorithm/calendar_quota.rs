//! Counts permits for each day, week or month of a time zone, as plans are sold.

use core::num::NonZeroU64;

use super::{Algorithm, charged};
use crate::calendar::{Calendar, Period};
use crate::decision::{Ask, Outcome, Status};
use crate::limit::LimitError;
use crate::rate::UNITS_MAX;
use crate::time::{Micros, Timestamp};

/// At most `limit` permits in each period of a calendar.
///
/// A request never waits for the next period: a delay of days is a denial. Within a period the rules of the zone are not
/// read, because the state holds the end of its period. The count stays valid when the limit changes.
///
/// ```
/// use tollgate_core::{Algorithm, Ask, Calendar, CalendarQuota, Timestamp};
///
/// let from_the_15th = Calendar::parse("Asia/Seoul", "month", Some("15")).unwrap();
/// let quota = CalendarQuota::new(10_000, from_the_15th).unwrap();
/// let now = Timestamp::from_micros(1_794_819_600_000_000); // 2026-11-16, 18:00 in Seoul
/// let mut state = quota.fresh(now);
/// assert!(quota.decide(&mut state, now, Ask::of(9_000)).is_admitted());
/// assert_eq!(quota.status(&state, now).remaining, 1_000);
/// assert_eq!(quota.status(&state, now).reset.as_secs_ceil(), (28 * 24 + 6) * 3_600); // 2026-12-15, midnight
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CalendarQuota {
    limit: NonZeroU64,
    calendar: &'static Calendar,
}

/// A period and the permits taken in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CalendarState {
    /// The end of the period, in microseconds since the epoch; 0 before the first use.
    pub end: i64,
    /// Permits taken. Above the limit only after charges, or after the limit was lowered.
    pub count: i64,
}

impl CalendarQuota {
    /// `limit` permits in each period of `calendar`.
    pub fn new(limit: u64, calendar: Calendar) -> Result<Self, LimitError> {
        let limit = NonZeroU64::new(limit).ok_or(LimitError::Empty)?;
        if limit.get() > UNITS_MAX {
            return Err(LimitError::TooLarge { max: UNITS_MAX });
        }
        Ok(Self { limit, calendar: calendar.interned() })
    }

    /// How time is cut into periods.
    pub const fn calendar(&self) -> &'static Calendar {
        self.calendar
    }

    /// Marks the period of `since` as used up, unless it is over.
    pub(crate) fn distrust(&self, state: &mut CalendarState, now: Timestamp, since: Timestamp) {
        let advanced = self.advance(*state, now);
        if advanced.end == self.period(since).end.us() {
            *state = CalendarState { count: advanced.count.max(self.most()), ..advanced };
        }
    }

    const fn most(&self) -> i64 {
        self.limit.get() as i64
    }

    fn period(&self, instant: Timestamp) -> Period {
        self.calendar.period_at(instant)
    }

    /// The state, exhausted and moved to this period if the clock was set back by more than a horizon.
    ///
    /// The current period ends within one horizon. A period that the clock left by stepping back ends within two.
    #[inline]
    fn redate(&self, state: CalendarState, now: Timestamp) -> CalendarState {
        if state.end - now.us() <= 2 * self.horizon().us() {
            return state;
        }
        CalendarState { end: self.period(now).end.us(), count: state.count.max(self.most()) }
    }

    #[inline]
    fn advance(&self, state: CalendarState, now: Timestamp) -> CalendarState {
        let state = self.redate(state, now);
        if now.us() < state.end { state } else { self.turn(state, now) }
    }

    /// The state after its period has ended.
    #[cold]
    fn turn(&self, state: CalendarState, now: Timestamp) -> CalendarState {
        let end = self.period(now).end.us();
        // The last period of all is cut off at the end of time, and does not end.
        if end <= state.end { state } else { CalendarState { end, count: 0 } }
    }
}

impl Algorithm for CalendarQuota {
    type State = CalendarState;

    fn size(&self) -> u64 {
        self.limit.get()
    }

    /// No period is longer, so a state that ends later was written by another clock.
    fn horizon(&self) -> Micros {
        self.calendar.longest()
    }

    fn fresh(&self, _: Timestamp) -> CalendarState {
        CalendarState { end: 0, count: 0 }
    }

    #[inline]
    fn take(&self, state: &mut CalendarState, now: Timestamp, ask: Ask) -> Outcome {
        let (limit, cost) = (self.most(), ask.cost as i64);
        *state = self.redate(*state, now);
        let CalendarState { end, count } = self.advance(*state, now);
        if count + cost <= limit {
            *state = CalendarState { end, count: count + cost };
            return Outcome::NOW;
        }
        Outcome::Denied { retry: Micros::of((end - now.us()).max(1)) }
    }

    #[inline]
    fn status(&self, state: &CalendarState, now: Timestamp) -> Status {
        // An unused key needs no period.
        if *state == self.fresh(now) {
            return Status { remaining: self.size(), reset: Micros::ZERO };
        }
        let CalendarState { end, count } = self.advance(*state, now);
        let reset = if count == 0 { 0 } else { end - now.us() };
        Status { remaining: (self.most() - count).max(0) as u64, reset: Micros::of(reset) }
    }

    fn refund(&self, state: &mut CalendarState, now: Timestamp, cost: u64, at: Timestamp) {
        let CalendarState { end, count } = self.advance(*state, now);
        if count == 0 || cost == 0 {
            return;
        }
        if self.period(at).end.us() == end {
            *state = CalendarState { end, count: (count - cost.min(self.size()) as i64).max(0) };
        }
    }

    fn charge(&self, state: &mut CalendarState, now: Timestamp, cost: u64) {
        if cost == 0 {
            return;
        }
        let CalendarState { end, count } = self.advance(*state, now);
        *state = CalendarState { end, count: charged(count, cost, self.limit) };
    }

    fn full_at(&self, state: &CalendarState) -> Timestamp {
        if state.count > 0 {
            return Timestamp::at(state.end);
        }
        // Kept until its period has begun: a clock that is behind must not spend the refunded permits again.
        self.period(Timestamp::at(state.end - 1)).start
    }
}
