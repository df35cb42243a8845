//! `SLIDING_WINDOW`: the exact log. At most the limit in any trailing window; one entry per admission, whatever its cost.

use alloc::collections::{VecDeque, vec_deque};
use core::num::NonZeroU64;

use super::fixed_window::check_window;
use super::{Algorithm, accepted_wait, admit_by};
use crate::decision::{Ask, Outcome, Status};
use crate::limit::LimitError;
use crate::rate::{HORIZON_MAX_US, Rate};
use crate::time::{Micros, Timestamp};

/// At most `limit` permits in any `(x - window, x]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlidingLog {
    limit: NonZeroU64,
    window: NonZeroU64,
    count_denied: bool,
    /// Entries kept for other limits of the key.
    retention: Retention,
    /// Entries kept beyond that for limits that are no longer in force, and until when.
    lapsing: Option<(Retention, Timestamp)>,
}

/// Entries that a log keeps after they have stopped counting, because a longer window of the same key still counts them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Retention {
    /// For how long. If that is no longer than the window of the log, it keeps only entries that count.
    pub time: Micros,
    /// At most how many of the newest entries, beside the entries that count. Every entry has at least one permit, so a longer window
    /// whose limit is no larger than this decides as if all entries were kept.
    pub entries: u64,
}

impl Retention {
    /// The retention that keeps enough for both.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { time: self.time.max(other.time), entries: self.entries.max(other.entries) }
    }
}

/// The kept admissions, oldest first. Starts never decrease: first come, first served.
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
    /// How long after its decision it starts: `start - lead` of the newest entry is the latest time that this log has seen.
    /// Negative after a later refund.
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

    /// Adds an admission. Admissions with the same start share an entry: no later question can tell them apart.
    fn push(&mut self, entry: LogEntry) {
        self.total += entry.cost;
        match self.entries.back_mut() {
            Some(newest) if newest.start == entry.start => {
                newest.cost += entry.cost;
                newest.lead = entry.lead;
            }
            // An entry without permits only keeps the time of a refunded log, and the new entry keeps a later time.
            Some(newest) if newest.cost == 0 => *newest = entry,
            Some(_) | None => self.entries.push_back(entry),
        }
    }

    /// The costs of the entries from an index on, read from the nearer end.
    fn sum_from(&self, index: usize) -> i64 {
        let sum = |range: vec_deque::Iter<'_, LogEntry>| range.map(|entry| entry.cost).sum::<i64>();
        if index * 2 > self.entries.len() {
            sum(self.entries.range(index..))
        } else {
            self.total - sum(self.entries.range(..index))
        }
    }

    fn drop_expired(&mut self, oldest_kept: usize) {
        for entry in self.entries.drain(..oldest_kept) {
            self.total -= entry.cost;
        }
        // An old burst must not hold its memory for ever.
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
        if newest.cost == 0 && self.entries.len() > 1 {
            self.entries.pop_back();
        }
    }

    /// Takes up to `cost` permits off the oldest entries.
    fn reduce_oldest(&mut self, mut cost: i64) {
        while cost > 0
            && let Some(oldest) = self.entries.front_mut()
        {
            let less = cost.min(oldest.cost);
            oldest.cost -= less;
            self.total -= less;
            cost -= less;
            if oldest.cost > 0 || self.entries.len() == 1 {
                break;
            }
            self.entries.pop_front();
        }
    }

    /// Keeps `time` as the latest that this log has seen, so that a clock that steps back does not count without the dropped
    /// entries. A log without permits keeps an entry for that alone, which delays no request.
    fn keep_time(&mut self, time: i64) {
        let Some(newest) = self.entries.back_mut() else { return };
        if newest.cost == 0 {
            newest.start = time;
        }
        newest.lead = newest.start - time;
    }
}

/// A log as seen at an instant.
struct View {
    /// The instant that counts as now: never before the latest time that the log has seen.
    time: i64,
    /// Entries before this index are dropped.
    kept: usize,
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
        Ok(Self { limit, window, count_denied: false, retention: Retention::default(), lapsing: None })
    }

    /// Keeps entries that no longer count, for keys that may come under a longer window. A refund reduces the oldest kept entry, so it
    /// frees nothing while entries that no longer count can pay it.
    pub fn retaining(self, retention: Retention) -> Self {
        Self { retention: self.beyond_window(retention), ..self }
    }

    /// Keeps more entries until an instant: for a longer window that was just withdrawn and may come back.
    pub fn retaining_until(self, retention: Retention, until: Timestamp) -> Self {
        let retention = self.beyond_window(retention.max(self.retention));
        Self { lapsing: (retention != self.retention).then_some((retention, until)), ..self }
    }

    fn beyond_window(&self, retention: Retention) -> Retention {
        let time = retention.time.min(Micros::new(HORIZON_MAX_US));
        if time <= self.horizon() || retention.entries == 0 {
            Retention::default()
        } else {
            Retention { time, ..retention }
        }
    }

    /// Lets denied requests count too, up to the limit.
    pub const fn counting_denied(self, count_denied: bool) -> Self {
        Self { count_denied, ..self }
    }

    /// Entries kept for other limits of the key.
    pub const fn retention(&self) -> Retention {
        self.retention
    }

    /// Entries kept for limits that are no longer in force, and until when.
    pub const fn lapsing(&self) -> Option<(Retention, Timestamp)> {
        self.lapsing
    }

    fn retention_at(&self, now: Timestamp) -> Retention {
        match self.lapsing {
            Some((retention, until)) if now < until => retention,
            Some(_) | None => self.retention,
        }
    }

    /// Whether denied requests count.
    pub const fn counts_denied(&self) -> bool {
        self.count_denied
    }

    const fn length(&self) -> i64 {
        self.window.get() as i64
    }

    fn view(&self, state: &LogState, at: Timestamp) -> View {
        let now = at.us();
        let Some(newest) = state.entries.back() else {
            return View { time: now, kept: 0, oldest: 0, used: 0, earliest: now };
        };
        let time = now.max(newest.start - newest.lead);
        let since = |instant: i64| state.entries.partition_point(|entry| entry.start <= instant);
        let oldest = since(time - self.length());
        let retention = self.retention_at(at);
        let kept = if retention.time <= self.horizon() {
            oldest
        } else {
            let entries = usize::try_from(retention.entries).unwrap_or(usize::MAX);
            since(time - retention.time.us()).max(oldest.saturating_sub(entries))
        };
        View { time, kept, oldest, used: state.sum_from(oldest), earliest: time.max(newest.start) }
    }

    /// The log with all its permits dated `now`, if the clock was set back by more than a window.
    fn redated(&self, state: &LogState, now: Timestamp) -> Option<LogState> {
        let newest = state.entries.back()?;
        if newest.start - newest.lead - now.us() <= self.length() {
            return None;
        }
        let mut log = LogState::default();
        let kept = state.sum_from(self.view(state, now).kept);
        log.push(LogEntry { start: now.us(), cost: kept, lead: 0 });
        Some(log)
    }

    /// Re-dates the log if the clock was set back, and looks at it.
    fn settle(&self, state: &mut LogState, now: Timestamp) -> View {
        if let Some(redated) = self.redated(state, now) {
            *state = redated;
        }
        self.view(state, now)
    }

    /// The earliest start at which `cost` more permits fit.
    fn start(&self, state: &LogState, view: &View, cost: i64) -> i64 {
        let mut excess = view.used + cost - self.limit.get() as i64;
        let mut start = view.earliest;
        for entry in state.entries.range(view.oldest..) {
            if excess <= 0 {
                break;
            }
            excess -= entry.cost;
            start = view.earliest.max(entry.start + self.length());
        }
        start
    }

    /// The outcome of an ask for one permit or more, and the earliest start at which it fits.
    fn outcome_in(&self, state: &LogState, view: &View, now: Timestamp, ask: Ask) -> (Outcome, i64) {
        let start = self.start(state, view, ask.cost as i64);
        if start == view.time {
            (Outcome::NOW, start)
        } else {
            (admit_by(start, now, accepted_wait(ask, self.length())), start)
        }
    }

    fn status_in(&self, state: &LogState, view: &View, now: Timestamp) -> Status {
        let remaining =
            if view.earliest > view.time { 0 } else { (self.limit.get() as i64 - view.used).max(0) };
        let reset = match state.entries.get(view.oldest) {
            Some(oldest) if oldest.cost > 0 => oldest.start + self.length() - now.us(),
            Some(_) | None => 0,
        };
        Status { remaining: remaining as u64, reset: Micros::of(reset) }
    }
}

impl Algorithm for SlidingLog {
    type State = LogState;

    fn size(&self) -> u64 {
        self.limit.get()
    }

    fn horizon(&self) -> Micros {
        Micros::new(self.window.get())
    }

    fn fresh(&self, _: Timestamp) -> LogState {
        LogState::default()
    }

    fn take(&self, state: &mut LogState, now: Timestamp, ask: Ask) -> Outcome {
        let cost = ask.cost as i64;
        let view = self.settle(state, now);
        let (outcome, start) = self.outcome_in(state, &view, now, ask);
        let charged = match outcome {
            Outcome::Admitted { .. } => cost,
            Outcome::Denied { .. } if self.count_denied => {
                cost.min(self.status_in(state, &view, now).remaining as i64)
            }
            Outcome::Denied { .. } | Outcome::Impossible => 0,
        };
        if charged > 0 {
            let start = if outcome.is_admitted() { start } else { view.earliest };
            state.drop_expired(view.kept);
            state.push(LogEntry { start, cost: charged, lead: start - view.time });
        }
        outcome
    }

    /// Peeks without copying the log.
    fn peek(&self, state: &LogState, now: Timestamp, ask: Ask) -> Outcome {
        if ask.cost > self.size() {
            return Outcome::Impossible;
        }
        if ask.cost == 0 {
            return Outcome::NOW;
        }
        let redated = self.redated(state, now);
        let log = redated.as_ref().unwrap_or(state);
        self.outcome_in(log, &self.view(log, now), now, ask).0
    }

    fn status(&self, state: &LogState, now: Timestamp) -> Status {
        let redated = self.redated(state, now);
        let log = redated.as_ref().unwrap_or(state);
        self.status_in(log, &self.view(log, now), now)
    }

    fn refund(&self, state: &mut LogState, now: Timestamp, cost: u64, at: Timestamp) {
        if cost == 0 {
            return;
        }
        let cost = cost.min(self.size()) as i64;
        let view = self.settle(state, now);
        if at.us() <= view.time - self.length() || view.used == 0 {
            return;
        }
        state.drop_expired(view.kept);
        match state.entries.back() {
            Some(newest) if newest.start == at.us() => state.reduce_newest(cost),
            // The younger entries stay, so a refund frees no more than the true history would.
            Some(_) | None => state.reduce_oldest(cost),
        }
        state.keep_time(view.time);
    }

    fn charge(&self, state: &mut LogState, now: Timestamp, cost: u64) {
        let view = self.settle(state, now);
        let most = 2 * self.limit.get() as i64;
        let cost = (cost.min(most as u64) as i64).min(most - view.used);
        if cost > 0 {
            state.drop_expired(view.kept);
            state.push(LogEntry { start: view.earliest, cost, lead: view.earliest - view.time });
        }
    }

    fn full_at(&self, state: &LogState) -> Timestamp {
        let lapsing = self.lapsing.map_or(Micros::ZERO, |(retention, _)| retention.time);
        let kept_for = self.horizon().max(self.retention.time).max(lapsing);
        let newest = state.entries.back();
        newest.map_or(Timestamp::default(), |newest| Timestamp::at(newest.start).after(kept_for))
    }
}
