//! `SLIDING_WINDOW`: the exact log. At most the limit in any trailing window; one entry per admission, however large.

use alloc::collections::VecDeque;
use core::num::NonZeroU64;

use super::fixed_window::check_window;
use super::{Algorithm, accepted_wait, admit_by};
use crate::decision::{Ask, Outcome, Standing};
use crate::limit::LimitError;
use crate::rate::Rate;
use crate::time::{Micros, Timestamp};

/// At most `limit` permits in any `(x - window, x]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlidingLog {
    limit: NonZeroU64,
    window: NonZeroU64,
    count_denied: bool,
}

/// The admissions of the last window, oldest first. Starts never decrease: first come, first served.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LogState {
    entries: VecDeque<LogEntry>,
    /// The costs of all entries, so that the usual decision reads only the ends.
    total: i64,
}

/// One admission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogEntry {
    /// When the admitted request was to start. It counts while `now < start + window`.
    pub start: i64,
    /// Its permits.
    pub cost: i64,
    /// How far ahead of its decision it starts: `start - lead` is the latest time this log has seen.
    pub lead: i64,
}

impl LogState {
    /// The entries, oldest first.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = &LogEntry> {
        self.entries.iter()
    }

    /// Permits of all entries.
    pub const fn total(&self) -> u64 {
        self.total as u64
    }

    fn push(&mut self, entry: LogEntry) {
        // What is left of a refunded entry only keeps the time, and the new one keeps a later one.
        if self.entries.back().is_some_and(|newest| newest.cost == 0) {
            self.entries.pop_back();
        }
        self.total += entry.cost;
        self.entries.push_back(entry);
    }

    fn drop_expired(&mut self, oldest_kept: usize) {
        for entry in self.entries.drain(..oldest_kept) {
            self.total -= entry.cost;
        }
        // A burst long gone must not hold its memory for ever.
        if self.entries.capacity() > 64 && self.entries.len() * 4 < self.entries.capacity() {
            self.entries.shrink_to(self.entries.len() * 2);
        }
    }

    /// Takes up to `cost` permits off the newest entry.
    fn reduce_newest(&mut self, cost: i64) {
        let Some(newest) = self.entries.back_mut() else { return };
        let less = cost.min(newest.cost);
        newest.cost -= less;
        self.total -= less;
        self.keep_time();
    }

    /// Takes up to `cost` permits off the entries from `oldest` on. Those before it no longer count, but would again
    /// if the clock stepped back, so they stay until the next admission.
    fn reduce_from(&mut self, oldest: usize, mut cost: i64) {
        while cost > 0
            && let Some(entry) = self.entries.get_mut(oldest)
        {
            let less = cost.min(entry.cost);
            entry.cost -= less;
            self.total -= less;
            cost -= less;
            if entry.cost > 0 || oldest + 1 == self.entries.len() {
                break;
            }
            self.entries.remove(oldest);
        }
        self.keep_time();
    }

    /// A newest entry without permits stays for the time it has seen, without holding up whoever comes next: a clock
    /// that steps back must not find a log that has forgotten it.
    fn keep_time(&mut self) {
        let before = self.entries.iter().nth_back(1).map_or(i64::MIN, |entry| entry.start);
        if let Some(newest) = self.entries.back_mut()
            && newest.cost == 0
        {
            let seen = newest.start - newest.lead;
            newest.start = seen.max(before);
            newest.lead = newest.start - seen;
        }
    }
}

/// What a log says at an instant.
struct View {
    /// The instant that counts as now: never before what the log has seen.
    time: i64,
    /// Entries before this index no longer count.
    oldest: usize,
    /// Permits that count.
    used: i64,
    /// The earliest start that keeps the order of arrival.
    earliest: i64,
}

impl SlidingLog {
    /// `rate.permits()` in any trailing window of `rate.per()`.
    pub fn new(rate: Rate) -> Result<Self, LimitError> {
        let (limit, window) = check_window(rate)?;
        Ok(Self { limit, window, count_denied: false })
    }

    /// Lets denied requests count too, up to the limit.
    pub const fn counting_denied(self, count_denied: bool) -> Self {
        Self { count_denied, ..self }
    }

    /// Permits in a window.
    pub const fn limit(&self) -> u64 {
        self.limit.get()
    }

    /// The length of the trailing window.
    pub const fn window(&self) -> Micros {
        Micros::new(self.window.get())
    }

    /// Whether denied requests count.
    pub const fn counts_denied(&self) -> bool {
        self.count_denied
    }

    const fn length(&self) -> i64 {
        self.window.get() as i64
    }

    fn view(&self, state: &LogState, now: Timestamp) -> View {
        let now = now.us();
        let Some(newest) = state.entries.back() else {
            return View { time: now, oldest: 0, used: 0, earliest: now };
        };
        let time = now.max(newest.start - newest.lead);
        let oldest = state.entries.partition_point(|entry| entry.start <= time - self.length());
        let expired: i64 = state.entries.range(..oldest).map(|entry| entry.cost).sum();
        View { time, oldest, used: state.total - expired, earliest: time.max(newest.start) }
    }

    /// The log as it counts if the clock was set back by more than a window: all of it at `now`.
    fn redated(&self, state: &LogState, now: Timestamp) -> Option<LogState> {
        let newest = state.entries.back()?;
        if newest.start - newest.lead - now.us() <= self.length() {
            return None;
        }
        let mut log = LogState::default();
        log.push(LogEntry { start: now.us(), cost: self.view(state, now).used, lead: 0 });
        Some(log)
    }

    /// The earliest start at which `cost` more permits fit.
    fn start(&self, state: &LogState, view: &View, cost: i64) -> i64 {
        let mut over = view.used + cost - self.limit.get() as i64;
        let mut start = view.earliest;
        for entry in state.entries.range(view.oldest..) {
            if over <= 0 {
                break;
            }
            over -= entry.cost;
            start = view.earliest.max(entry.start + self.length());
        }
        start
    }

    fn standing_in(&self, state: &LogState, view: &View, now: Timestamp) -> Standing {
        let remaining =
            if view.earliest > view.time { 0 } else { (self.limit.get() as i64 - view.used).max(0) };
        let reset =
            state.entries.get(view.oldest).map_or(0, |oldest| oldest.start + self.length() - now.us());
        Standing { remaining: remaining as u64, reset: Micros::of(reset) }
    }
}

impl Algorithm for SlidingLog {
    type State = LogState;

    fn fresh(&self, _now: Timestamp) -> LogState {
        LogState::default()
    }

    fn decide(&self, state: &mut LogState, now: Timestamp, ask: Ask) -> Outcome {
        if ask.cost > self.limit() {
            return Outcome::Impossible;
        }
        if ask.cost == 0 {
            return Outcome::NOW;
        }
        let cost = ask.cost as i64;
        if let Some(redated) = self.redated(state, now) {
            *state = redated;
        }
        let view = self.view(state, now);
        let start = self.start(state, &view, cost);
        let outcome = if start == view.time {
            Outcome::NOW
        } else {
            admit_by(start, now, accepted_wait(ask, self.length()))
        };
        let charged = match outcome {
            Outcome::Admitted { .. } => cost,
            Outcome::Denied { .. } if self.count_denied => {
                cost.min(self.standing_in(state, &view, now).remaining as i64)
            }
            Outcome::Denied { .. } | Outcome::Impossible => 0,
        };
        if charged > 0 {
            let start = if outcome.is_admitted() { start } else { view.earliest };
            state.drop_expired(view.oldest);
            state.push(LogEntry { start, cost: charged, lead: start - view.time });
        }
        outcome
    }

    fn standing(&self, state: &LogState, now: Timestamp) -> Standing {
        let redated = self.redated(state, now);
        let log = redated.as_ref().unwrap_or(state);
        self.standing_in(log, &self.view(log, now), now)
    }

    fn refund(&self, state: &mut LogState, now: Timestamp, cost: u64, at: Timestamp) {
        if cost == 0 {
            return;
        }
        let cost = cost.min(self.limit()) as i64;
        if let Some(redated) = self.redated(state, now) {
            *state = redated;
        }
        let view = self.view(state, now);
        if at.us() <= view.time - self.length() {
            return;
        }
        match state.entries.back() {
            Some(newest) if newest.start == at.us() => state.reduce_newest(cost),
            // The younger entries stay, so no more comes free than the true history would free.
            _ => state.reduce_from(view.oldest, cost),
        }
    }

    fn charge(&self, state: &mut LogState, now: Timestamp, cost: u64) {
        if let Some(redated) = self.redated(state, now) {
            *state = redated;
        }
        let view = self.view(state, now);
        let most = 2 * self.limit.get() as i64;
        let cost = (cost.min(most as u64) as i64).min(most - view.used);
        if cost > 0 {
            state.drop_expired(view.oldest);
            state.push(LogEntry { start: view.earliest, cost, lead: view.earliest - view.time });
        }
    }

    fn full_at(&self, state: &LogState) -> Timestamp {
        state
            .entries
            .back()
            .map_or(Timestamp::default(), |newest| Timestamp::at(newest.start + self.length()))
    }
}
