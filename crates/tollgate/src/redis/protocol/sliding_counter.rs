//! The state of a sliding counter, as `sliding_counter.lua` keeps it.

use tollgate_core::algorithm::{Algorithm, CounterState, Waiting};
use tollgate_core::{SlidingCounter, State};

use super::calendar_quota::COUNT_MAX;
use super::fields::{Fields, NewFields, number};
use super::numbers::{Numbers, Reader};
use super::state::pairs;
use crate::redis::error::StoreError;

/// The length of a sub-bucket in microseconds.
fn length(it: &SlidingCounter) -> i64 {
    (it.horizon().get() / it.sub_buckets() as u64) as i64
}

pub(super) fn parameters(it: &SlidingCounter, numbers: &mut Numbers) {
    let tick = if it.is_strict() { 0 } else { it.tick() as i64 };
    numbers.add([it.size() as i64, i64::from(it.sub_buckets()), length(it), tick]);
    numbers.add([i64::from(it.counts_denied())]);
}

pub(super) fn plain(it: &SlidingCounter, numbers: &mut Reader<'_>) -> Result<State, StoreError> {
    let time = numbers.next()?;
    let buckets = i64::from(it.sub_buckets());
    let mut counts = (0..=buckets).map(|_| numbers.next()).collect::<Result<smallvec::SmallVec<_>, _>>()?;
    while counts.last() == Some(&0) {
        counts.pop();
    }
    let first = time.div_euclid(length(it)) - buckets;
    Ok(State::Counter(CounterState { seen: time, tail: time, first, counts, waiting: Vec::new() }))
}

/// The parameters of a state without the field `limit`, as old versions wrote it. It tells only the length of its sub-buckets.
pub(super) fn limit_of_old_state(it: &SlidingCounter, fields: &Fields<'_>) -> Result<String, String> {
    let parts = i64::from(it.sub_buckets());
    Ok(format!("{}/{}/{parts}", it.size(), fields.needed("sub")?.saturating_mul(parts)))
}

pub(super) fn stored(it: &SlidingCounter, fields: &Fields<'_>) -> Result<State, String> {
    let (seen, tail) = (fields.needed("seen")?, fields.needed("tail")?);
    let buckets = i64::from(it.sub_buckets());
    let first = seen.div_euclid(length(it)) - buckets;
    let waiting = pairs(fields.get("waiting"))?;
    let waiting = waiting.into_iter().map(|(start, permits)| Waiting { start, permits }).collect();
    let mut state = CounterState { seen, tail, first, counts: Default::default(), waiting };
    for (name, value) in fields.iter() {
        let Some(at) = name.parse::<i64>().ok().map(|index| index - first).filter(|at| *at >= 0) else {
            continue;
        };
        if at > 3 * buckets + 2 {
            return Err(format!("the sub-bucket {name} is far ahead"));
        }
        let at = at as usize;
        if at >= state.counts.len() {
            state.counts.resize(at + 1, 0);
        }
        state.counts[at] = number(name, value)?.clamp(0, COUNT_MAX);
    }
    Ok(State::Counter(state))
}

pub(super) fn fields(it: &SlidingCounter, state: &State, fields: &mut NewFields) {
    let State::Counter(state) = state else { return };
    fields.set("seen", state.seen);
    fields.set("tail", state.tail);
    fields.set("sub", length(it));
    for (at, count) in state.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        fields.set((state.first + at as i64).to_string(), count);
    }
    if is_waited_for(state) {
        let waiting = state.waiting.iter().map(|it| format!(" {} {}", it.start, it.permits));
        fields.set("waiting", waiting.collect::<String>());
    }
}

/// Whether a reservation is waiting.
pub(super) fn is_waited_for(state: &CounterState) -> bool {
    state.tail > state.seen && !state.waiting.is_empty()
}

pub(super) fn is_optional(name: &str) -> bool {
    name == "waiting" || name.bytes().all(|byte| byte.is_ascii_digit())
}
