//! Reservations that are cancelled before they start: the key decides as if they had never been made.
//!
//! A reservation can take more than its cost. What flows into a bucket before the start overflows its brim, and a window that has no
//! room for the request is skipped with all that it has left. That is kept beside the state until the start, and given back with the
//! last reservation of that start.

use alloc::vec::Vec;

use crate::algorithm::{Algorithm, BucketState};
use crate::algorithm::{FixedWindow, IntervalBucket, IntervalState, LeakyMode, TokenBucket, WindowState};
use crate::limit::{Limit, State};
use crate::time::Timestamp;

/// What reservations of one start have taken beyond their costs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forgone {
    /// The start, in microseconds since the epoch.
    pub start: i64,
    /// Units of an evenly refilled bucket; permits of the others.
    pub units: i64,
}

/// Starts for which something is forgone at the same time. A reservation that overflows a bucket empties most of it, and reaches at
/// most one time to full ahead: there is room for three of them.
const FORGONE_MAX: usize = 4;

impl Limit {
    /// Whether a reservation can take more than its cost.
    pub const fn forgoes(&self) -> bool {
        match self {
            Self::TokenBucket(_) | Self::IntervalBucket(_) | Self::FixedWindow(_) => true,
            Self::LeakyBucket(it) => matches!(it.mode(), LeakyMode::Meter),
            Self::SlidingLog(_) | Self::SlidingCounter(_) | Self::CalendarQuota(_) => false,
        }
    }

    /// Remembers what a reservation of `cost` permits has taken beyond them.
    pub(crate) fn note_forgone(
        &self,
        state: &mut State,
        before: &State,
        now: Timestamp,
        cost: u64,
        start: Timestamp,
    ) {
        let units = match (self, before, state.plain()) {
            (Self::TokenBucket(it), State::Bucket(before), State::Bucket(after)) => {
                it.forgone(*before, *after, now, cost)
            }
            (Self::LeakyBucket(it), State::Bucket(before), State::Bucket(after)) => {
                it.room().forgone(*before, *after, now, cost)
            }
            (Self::IntervalBucket(it), State::Interval(before), State::Interval(after)) => {
                it.advance(*before, now).0.tokens - cost as i64 - after.tokens
            }
            (Self::FixedWindow(it), State::Window(before), State::Window(after)) => {
                after.count - cost as i64 - it.advance(*before, now).count
            }
            _ => 0,
        };
        if units <= 0 {
            return;
        }
        let (plain, mut beside) = core::mem::replace(state, self.fresh(now)).into_plain();
        if beside.forgone.len() >= FORGONE_MAX {
            beside.forgone.remove(0);
        }
        beside.forgone.push(Forgone { start: start.us(), units });
        *state = plain.with(beside);
    }

    /// What is forgone for the newest reservations, if they start at `start`.
    pub(crate) fn forgone_for(state: &State, start: Timestamp) -> Option<Forgone> {
        let State::Carried(carried) = state else { return None };
        carried.beside.forgone.last().copied().filter(|forgone| forgone.start == start.us())
    }

    /// Gives back what is forgone for a start, if nothing is reserved there any longer.
    pub(crate) fn restore(&self, state: &mut State, forgone: Forgone) -> bool {
        match (self, state) {
            (Self::TokenBucket(it), State::Bucket(state)) => it.restore(state, forgone),
            (Self::LeakyBucket(it), State::Bucket(state)) => it.room().restore(state, forgone),
            (Self::IntervalBucket(it), State::Interval(state)) => it.restore(state, forgone),
            (Self::FixedWindow(it), State::Window(state)) => it.restore(state, forgone),
            _ => false,
        }
    }

    /// Forgets what is forgone for a start: it was given back.
    pub(crate) fn forget_forgone(state: &mut State, start: Timestamp) {
        let (plain, mut beside) = state.clone().into_plain();
        beside.forgone.retain(|forgone| forgone.start != start.us());
        *state = plain.with(beside);
    }

    /// Whether denials count what a skipped window has left.
    pub const fn counts_denied_in_window(&self) -> bool {
        matches!(self, Self::FixedWindow(it) if it.counts_denied())
    }

    /// Forgets all that is forgone: it was taken by a denial that counts.
    pub(crate) fn forgo_for_good(state: &mut State) {
        if matches!(state, State::Carried(_)) {
            let (plain, beside) = state.clone().into_plain();
            *state = plain.with(beside.carried_debt.into());
        }
    }

    /// What is still forgone in a state: nothing if nobody waits, nothing for starts that have passed, and nothing for those that a
    /// clock which was set back has left far ahead.
    pub(crate) fn still_forgone(&self, mut forgone: Vec<Forgone>, state: &State) -> Vec<Forgone> {
        let waits = match (self, state) {
            (Self::TokenBucket(it), State::Bucket(state)) => it.waits(*state),
            (Self::LeakyBucket(it), State::Bucket(state)) => it.room().waits(*state),
            (Self::IntervalBucket(it), State::Interval(state)) => it.waits(*state),
            (Self::FixedWindow(it), State::Window(state)) => it.waits(*state),
            _ => None,
        };
        let Some((time, latest)) = waits else { return Vec::new() };
        forgone.retain(|it| time < it.start && it.start <= latest);
        forgone
    }
}

impl TokenBucket {
    fn forgone(&self, before: BucketState, after: BucketState, now: Timestamp, cost: u64) -> i64 {
        self.advance(before, now).level - self.units(cost) - after.level
    }

    /// The time of a bucket that somebody waits for, and the latest start.
    fn waits(&self, state: BucketState) -> Option<(i64, i64)> {
        let time = self.us(state.at);
        (state.level < 0).then_some((time, time + self.time_to_full().us()))
    }

    /// At the start the bucket is full, unless something is still reserved there.
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
    /// The start of the running period of a bucket that somebody waits for, and the latest start.
    fn waits(&self, state: IntervalState) -> Option<(i64, i64)> {
        let latest = state.last + self.time_to_full().us() + self.period() as i64;
        (state.tokens < 0).then_some((state.last, latest))
    }

    /// At the start the bucket is full, unless something is still reserved there.
    fn restore(&self, state: &mut IntervalState, forgone: Forgone) -> bool {
        let periods = (forgone.start - state.last) / self.period() as i64;
        let comes = periods.saturating_mul(self.refill() as i64);
        let is_free = state.tokens.saturating_add(comes) >= self.capacity() as i64;
        if is_free {
            state.tokens = (self.capacity() as i64).min(state.tokens + forgone.units);
        }
        is_free
    }
}

impl FixedWindow {
    /// The start of a window that is promised away, and of the next one.
    fn waits(&self, state: WindowState) -> Option<(i64, i64)> {
        let length = self.window().us();
        (state.count > self.limit() as i64).then_some((state.window * length, (state.window + 1) * length))
    }

    /// What was left of the running window when it was skipped, unless something is still promised to the next one.
    fn restore(&self, state: &mut WindowState, forgone: Forgone) -> bool {
        let is_free =
            state.count <= self.limit() as i64 && forgone.start == (state.window + 1) * self.window().us();
        if is_free {
            state.count = (state.count - forgone.units).max(0);
        }
        is_free
    }
}
