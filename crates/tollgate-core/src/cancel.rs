//! Reservations that are cancelled before they start: the key decides as if they had never been made.
//!
//! A reservation can take more than its cost. A bucket overflows while it refills for a later start, and a window without room for the
//! request is skipped with all permits that it has left. These permits are forgone. They are kept beside the state until the start, and
//! given back with the last reservation of that start.

use alloc::vec::Vec;

use crate::algorithm::{
    Algorithm, BucketState, FixedWindow, IntervalBucket, IntervalState, TokenBucket, WindowState,
};
use crate::limit::{Limit, State};
use crate::migrate::Beside;
use crate::time::Timestamp;

/// Permits that reservations of one start have taken beyond their costs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forgone {
    /// The start, in microseconds since the epoch.
    pub start: i64,
    /// Units of an evenly refilled bucket; permits of the others.
    pub units: i64,
}

/// Starts with forgone permits at the same time. A reservation that overflows a bucket empties most of it and reaches at most one time to
/// full ahead, so three of them fit.
const FORGONE_MAX: usize = 4;

impl Limit {
    /// Whether a reservation can take more than its cost.
    pub const fn forgoes(&self) -> bool {
        self.lender().is_some() || matches!(self, Self::IntervalBucket(_) | Self::FixedWindow(_))
    }

    /// Records the permits that a reservation of `cost` permits has taken beyond its cost.
    pub(crate) fn note_forgone(
        &self,
        state: &mut State,
        before: &State,
        now: Timestamp,
        cost: u64,
        start: Timestamp,
    ) {
        let units = match (self, before, state.plain()) {
            (Self::IntervalBucket(it), State::Interval(before), State::Interval(after)) => {
                it.advance(*before, now).0.tokens - cost as i64 - after.tokens
            }
            (Self::FixedWindow(it), State::Window(before), State::Window(after)) => {
                after.count - cost as i64 - it.advance(*before, now).count
            }
            (_, State::Bucket(before), State::Bucket(after)) => {
                self.bucket().map_or(0, |it| it.advance(*before, now).level - it.units(cost) - after.level)
            }
            _ => 0,
        };
        if units > 0 {
            change_beside(state, |beside| {
                if beside.forgone.len() >= FORGONE_MAX {
                    beside.forgone.remove(0);
                }
                beside.forgone.push(Forgone { start: start.us(), units });
            });
        }
    }

    /// The permits forgone for the newest reservations, if they start at `start`.
    pub(crate) fn forgone_for(state: &State, start: Timestamp) -> Option<Forgone> {
        let State::Carried(carried) = state else { return None };
        carried.beside.forgone.last().copied().filter(|forgone| forgone.start == start.us())
    }

    /// Gives back the permits forgone for a start, if no reservation of that start is left.
    pub(crate) fn restore(&self, state: &mut State, forgone: Forgone) -> bool {
        match (self, state) {
            (Self::IntervalBucket(it), State::Interval(state)) => it.restore(state, forgone),
            (Self::FixedWindow(it), State::Window(state)) => it.restore(state, forgone),
            (_, State::Bucket(state)) => self.bucket().is_some_and(|it| it.restore(state, forgone)),
            _ => false,
        }
    }

    /// Drops the record of a start whose forgone permits were given back.
    pub(crate) fn forget_forgone(state: &mut State, start: Timestamp) {
        change_beside(state, |beside| beside.forgone.retain(|forgone| forgone.start != start.us()));
    }

    /// Whether denials count the permits left in a skipped window.
    pub const fn counts_denied_in_window(&self) -> bool {
        matches!(self, Self::FixedWindow(it) if it.counts_denied())
    }

    /// Drops all records of forgone permits, because a counted denial has taken them.
    pub(crate) fn forgo_for_good(state: &mut State) {
        if matches!(state, State::Carried(_)) {
            change_beside(state, |beside| beside.forgone.clear());
        }
    }

    /// The records that are still valid: none if no reservation is waiting, and none for starts in the past or beyond the latest start.
    pub(crate) fn still_forgone(&self, mut forgone: Vec<Forgone>, state: &State) -> Vec<Forgone> {
        let waits = match (self, state) {
            (Self::IntervalBucket(it), State::Interval(state)) => it.waits(*state),
            (Self::FixedWindow(it), State::Window(state)) => it.waits(*state),
            (_, State::Bucket(state)) => self.bucket().and_then(|it| it.waits(*state)),
            _ => None,
        };
        let Some((time, latest)) = waits else { return Vec::new() };
        forgone.retain(|it| time < it.start && it.start <= latest);
        forgone
    }
}

/// Changes the data that is kept beside a state.
fn change_beside(state: &mut State, change: impl FnOnce(&mut Beside)) {
    let (plain, mut beside) = state.clone().into_plain();
    change(&mut beside);
    *state = plain.with(beside);
}

impl TokenBucket {
    /// The time of a bucket with a waiting reservation, and the latest start.
    fn waits(&self, state: BucketState) -> Option<(i64, i64)> {
        let time = self.us(state.at);
        (state.level < 0).then_some((time, time + self.horizon().us()))
    }

    /// Gives back forgone permits if the bucket is full at the start, so that no reservation of that start is left.
    fn restore(&self, state: &mut BucketState, forgone: Forgone) -> bool {
        let flows = (self.ticks(Timestamp::at(forgone.start)) - state.at).saturating_mul(self.flow() as i64);
        let is_free = state.level.saturating_add(flows) >= self.full();
        if is_free {
            state.level = self.full().min(state.level + forgone.units);
        }
        is_free
    }
}

impl IntervalBucket {
    /// The start of the running period of a bucket with a waiting reservation, and the latest start.
    fn waits(&self, state: IntervalState) -> Option<(i64, i64)> {
        let latest = state.last + self.horizon().us() + self.period() as i64;
        (state.tokens < 0).then_some((state.last, latest))
    }

    /// Gives back forgone permits if the bucket is full at the start, so that no reservation of that start is left.
    fn restore(&self, state: &mut IntervalState, forgone: Forgone) -> bool {
        let periods = (forgone.start - state.last) / self.period() as i64;
        let comes = periods.saturating_mul(self.refill() as i64);
        let is_free = state.tokens.saturating_add(comes) >= self.size() as i64;
        if is_free {
            state.tokens = (self.size() as i64).min(state.tokens + forgone.units);
        }
        is_free
    }
}

impl FixedWindow {
    /// The start of a window with a reservation in the next one, and the start of that one.
    fn waits(&self, state: WindowState) -> Option<(i64, i64)> {
        let length = self.horizon().us();
        (state.count > self.size() as i64).then_some((state.window * length, (state.window + 1) * length))
    }

    /// Gives back the permits of the skipped window, unless the next one still has a reservation.
    fn restore(&self, state: &mut WindowState, forgone: Forgone) -> bool {
        let is_free =
            state.count <= self.size() as i64 && forgone.start == (state.window + 1) * self.horizon().us();
        if is_free {
            state.count = (state.count - forgone.units).max(0);
        }
        is_free
    }
}
