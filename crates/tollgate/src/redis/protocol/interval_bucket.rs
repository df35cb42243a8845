//! The state of a token bucket with interval refill, as `interval_bucket.lua` keeps it.

use tollgate_core::algorithm::{Algorithm, IntervalState};
use tollgate_core::{IntervalBucket, State};

use super::fields::{Fields, NewFields};
use super::numbers::{Numbers, Reader};
use crate::redis::error::StoreError;

pub(super) fn parameters(it: &IntervalBucket, numbers: &mut Numbers) {
    numbers.add([it.size(), it.refill(), it.period()].map(|number| number as i64));
}

pub(super) fn plain(numbers: &mut Reader<'_>) -> Result<State, StoreError> {
    let [tokens, last] = numbers.take()?;
    Ok(State::Interval(IntervalState { tokens, last }))
}

pub(super) fn stored(it: &IntervalBucket, fields: &Fields<'_>) -> Result<State, String> {
    let (capacity, refill) = (it.size() as i64, it.refill() as i64);
    // The bounds keep foreign values in range.
    let tokens = fields.needed("tokens")?.min(capacity).max(-capacity - refill);
    Ok(State::Interval(IntervalState { tokens, last: fields.needed("last_refill")? }))
}

pub(super) fn fields(state: &State, fields: &mut NewFields) {
    if let State::Interval(state) = state {
        fields.set("tokens", state.tokens);
        fields.set("last_refill", state.last);
    }
}
