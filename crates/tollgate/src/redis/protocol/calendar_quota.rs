//! The state of a calendar quota, as `calendar_quota.lua` keeps it.

use tollgate_core::algorithm::{Algorithm, CalendarState};
use tollgate_core::{Calendar, CalendarQuota, Period, State, Timestamp};

use super::fields::{Fields, NewFields};
use super::numbers::{Numbers, Reader};
use crate::redis::error::StoreError;

/// The largest count that any limit can have written. Larger counts are cut.
pub(super) const COUNT_MAX: i64 = 3 << 51;

/// Adds the parameters, for a server whose clock shows about this time.
pub(super) fn parameters(it: &CalendarQuota, about: Timestamp, numbers: &mut Numbers) {
    numbers.add([it.size() as i64, it.horizon().get() as i64]);
    numbers.add(periods_around(it.calendar(), about).map(|instant| instant.as_micros() as i64));
}

/// The starts of the periods around an instant. The server reads its own clock, which may be in a neighbouring period.
fn periods_around(calendar: &Calendar, about: Timestamp) -> [Timestamp; 6] {
    let before = |instant: Timestamp| {
        let just_before = Timestamp::from_micros(instant.as_micros().saturating_sub(1));
        calendar.period_at(just_before).start
    };
    let Period { start, end } = calendar.period_at(about);
    let (last, next) = (before(start), calendar.period_at(end).end);
    [before(last), last, start, end, next, calendar.period_at(next).end]
}

pub(super) fn plain(numbers: &mut Reader<'_>) -> Result<State, StoreError> {
    let [end, count] = numbers.take()?;
    Ok(State::Calendar(CalendarState { end, count }))
}

pub(super) fn stored(fields: &Fields<'_>) -> Result<State, String> {
    let (end, count) = (fields.needed("end")?, fields.needed("count")?);
    Ok(State::Calendar(CalendarState { end, count: count.clamp(0, COUNT_MAX) }))
}

pub(super) fn fields(state: &State, fields: &mut NewFields) {
    if let State::Calendar(state) = state {
        fields.set("end", state.end);
        fields.set("count", state.count);
    }
}
