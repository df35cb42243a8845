//! The state of a fixed window, as `fixed_window.lua` keeps it.

use tollgate_core::algorithm::{Algorithm, WindowState};
use tollgate_core::{FixedWindow, State};

use super::fields::{Fields, NewFields};
use super::numbers::{Numbers, Reader};
use crate::redis::error::StoreError;

pub(super) fn parameters(it: &FixedWindow, numbers: &mut Numbers) {
    numbers.add([it.size() as i64, it.horizon().get() as i64, i64::from(it.counts_denied())]);
}

pub(super) fn plain(numbers: &mut Reader<'_>) -> Result<State, StoreError> {
    let [window, count] = numbers.take()?;
    Ok(State::Window(WindowState { window, count }))
}

pub(super) fn stored(it: &FixedWindow, fields: &Fields<'_>) -> Result<State, String> {
    let window = fields.needed("window")?.div_euclid(it.horizon().get() as i64);
    // The bounds keep foreign values in range.
    let count = fields.needed("count")?.min(3 * it.size() as i64).max(0);
    Ok(State::Window(WindowState { window, count }))
}

pub(super) fn fields(it: &FixedWindow, state: &State, fields: &mut NewFields) {
    if let State::Window(state) = state {
        fields.set("window", state.window * it.horizon().get() as i64);
        fields.set("count", state.count);
    }
}
