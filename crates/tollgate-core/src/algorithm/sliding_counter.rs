//! `SLIDING_WINDOW_COUNTER`: counts of sub-buckets instead of a log. The oldest sub-bucket is weighted by the share that is
//! still inside the window, or counted in full (`strict`), which never admits more than the limit.

use alloc::vec::Vec;
use core::num::{NonZeroU32, NonZeroU64};

use smallvec::SmallVec;

use super::fixed_window::check_window;
use super::{Algorithm, accepted_wait, admit_by};
use crate::decision::{Ask, Outcome, Status};
use crate::limit::LimitError;
use crate::migrate::CarriedDebt;
use crate::rate::{Rate, TICKS_US, UNITS_MAX};
use crate::time::{Micros, Timestamp};

/// Sub-buckets of a window. Sixty cut a minute into seconds; many more cost memory for little accuracy. A script reads all of them:
/// with 1,000 of them, one call would block the server for 2 ms.
pub const SUB_BUCKETS_MAX: u32 = 250;

/// At most `limit` permits in any trailing window: by estimate, or exactly if `strict`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlidingCounter {
    limit: NonZeroU64,
    window: NonZeroU64,
    sub_buckets: NonZeroU32,
    strict: bool,
    count_denied: bool,
    /// The step in which the weight of the oldest sub-bucket falls, so that products stay exact.
    tick: NonZeroU64,
}

/// The counts of the sub-buckets that matter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CounterState {
    /// The latest time that this counter has seen.
    pub seen: i64,
    /// The latest start of a reservation.
    pub tail: i64,
    /// The number, since the epoch, of the sub-bucket that `counts` begins with.
    pub first: i64,
    /// Permits by sub-bucket. Three hold a window without sub-buckets: the last one, this one, the reserved one.
    pub counts: SmallVec<[i64; 3]>,
    /// Reservations that have not started, the latest last. If the latest does not start at `tail`, only `tail` is known.
    pub waiting: Vec<Waiting>,
}

/// Reservations of one start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waiting {
    /// In microseconds since the epoch.
    pub start: i64,
    /// Permits that have not been given back.
    pub permits: i64,
}

/// Starts that a counter keeps. If callers cancel in turn, this many cancellations leave no trace. Earlier starts share an entry at the
/// later start.
const WAITING_MAX: usize = 8;
/// Permits of a start that nothing else is known of: more than can be given back.
const UNKNOWN: i64 = 1 << 52;

impl CounterState {
    fn count(&self, index: i64) -> i64 {
        usize::try_from(index - self.first).ok().and_then(|at| self.counts.get(at)).copied().unwrap_or(0)
    }

    fn sum(&self, from: i64, to: i64) -> i64 {
        (from.max(self.first)..=to.min(self.first + self.counts.len() as i64 - 1))
            .map(|index| self.count(index))
            .sum()
    }

    fn total(&self) -> i64 {
        self.counts.iter().sum()
    }

    /// Drops the sub-buckets before `oldest`, and empty ones at the end.
    fn trim(&mut self, oldest: i64) {
        let gone = usize::try_from(oldest - self.first).unwrap_or(0).min(self.counts.len());
        self.counts.drain(..gone);
        self.first = self.first.max(oldest);
        while self.counts.last() == Some(&0) {
            self.counts.pop();
        }
    }

    /// Adds to a sub-bucket that is not older than `first`.
    fn add(&mut self, index: i64, permits: i64) {
        let at = (index - self.first) as usize;
        if at >= self.counts.len() {
            self.counts.resize(at + 1, 0);
        }
        self.counts[at] += permits;
    }

    /// Records a start that was reserved at `time`.
    fn promise(&mut self, time: i64, start: i64, permits: i64) {
        let is_known = self.waiting.last().is_some_and(|latest| latest.start == self.tail);
        match self.tail > time {
            true if is_known => self.waiting.retain(|it| it.start > time),
            true => self.waiting = Vec::from([Waiting { start: self.tail, permits: UNKNOWN }]),
            false => self.waiting.clear(),
        }
        (self.seen, self.tail) = (time, start);
        if start == time {
            return;
        }
        match self.waiting.last_mut() {
            Some(latest) if latest.start == start => latest.permits = UNKNOWN.min(latest.permits + permits),
            Some(_) | None => self.waiting.push(Waiting { start, permits }),
        }
        if self.waiting.len() > WAITING_MAX {
            let first = self.waiting.remove(0);
            self.waiting[0].permits = UNKNOWN.min(self.waiting[0].permits + first.permits);
        }
    }

    /// Cancels permits of a start, so that later requests no longer wait behind it. Sub-buckets are `length` long.
    fn cancel(&mut self, time: i64, start: i64, permits: i64, length: i64) {
        let is_known = self.waiting.last().is_some_and(|latest| latest.start == self.tail);
        let place = self.waiting.iter().position(|it| it.start == start);
        if let (true, true, Some(place)) = (is_known, start > time, place) {
            self.waiting[place].permits -= permits;
            if self.waiting[place].permits <= 0 {
                self.waiting.remove(place);
            }
            let tail = self.waiting.last().map_or(time, |latest| latest.start);
            // Charges behind it stay, and later requests stay behind them.
            let newest = self.first + self.counts.len() as i64 - 1;
            if newest * length <= tail {
                self.tail = tail;
            }
        }
        if self.counts.is_empty() || self.tail <= time {
            self.tail = time;
            self.waiting.clear();
        }
        self.seen = time;
    }
}

impl SlidingCounter {
    /// `rate.permits()` in any trailing window of `rate.per()`, the window cut into `sub_buckets`.
    pub fn new(rate: Rate, sub_buckets: u32, strict: bool) -> Result<Self, LimitError> {
        let (limit, window) = check_window(rate)?;
        let sub_buckets = NonZeroU32::new(sub_buckets)
            .filter(|count| count.get() <= SUB_BUCKETS_MAX)
            .ok_or(LimitError::SubBuckets { max: SUB_BUCKETS_MAX })?;
        let uneven = LimitError::Uneven { window_us: window.get(), sub_buckets: sub_buckets.get() };
        if !window.get().is_multiple_of(u64::from(sub_buckets.get())) {
            return Err(uneven);
        }
        let length = window.get() / u64::from(sub_buckets.get());
        let mut ticks = TICKS_US.into_iter().filter(|tick| length.is_multiple_of(*tick));
        let fits =
            |tick: &u64| limit.get().checked_mul(length / tick).is_some_and(|units| units <= UNITS_MAX);
        let tick = if strict { Some(1) } else { ticks.clone().find(fits) };
        let tick = tick.and_then(NonZeroU64::new).ok_or_else(|| {
            let coarsest = ticks.next_back().unwrap_or(1);
            LimitError::TooLarge { max: UNITS_MAX / (length / coarsest) }
        })?;
        Ok(Self { limit, window, sub_buckets, strict, count_denied: false, tick })
    }

    /// Lets denied requests count too, up to the limit.
    pub const fn counting_denied(self, count_denied: bool) -> Self {
        Self { count_denied, ..self }
    }

    /// The number of sub-buckets that the window is cut into.
    pub const fn sub_buckets(&self) -> u32 {
        self.sub_buckets.get()
    }

    /// Whether the oldest sub-bucket counts in full.
    pub const fn is_strict(&self) -> bool {
        self.strict
    }

    /// Whether denied requests count.
    pub const fn counts_denied(&self) -> bool {
        self.count_denied
    }

    /// The step in which weights fall, in microseconds.
    pub const fn tick(&self) -> u64 {
        self.tick.get()
    }

    /// Fills the sub-bucket of `since` up to the limit.
    pub(crate) fn distrust(&self, state: &mut CounterState, now: Timestamp, since: Timestamp) {
        let index = since.us() / self.length();
        let (mut advanced, _) = self.advance(state, now);
        let missing = self.limit.get() as i64 - advanced.count(index);
        if missing > 0 && index >= advanced.first {
            advanced.add(index, missing);
            *state = advanced;
        }
    }

    /// Whether it has the same sub-buckets: then counts stay as they are, however large they are.
    pub(crate) fn cuts_like(&self, other: &Self) -> bool {
        (self.window, self.sub_buckets) == (other.window, other.sub_buckets)
    }

    /// Converts a state of another limit. Counts of the same sub-buckets stay, and the carried debt is added. With other sub-buckets, all
    /// permits count as taken last, up to the limit; the excess becomes carried debt, for as long as the former limit would count it.
    pub(crate) fn migrate(
        &self,
        from: &Self,
        state: &CounterState,
        debt: CarriedDebt,
        now: Timestamp,
    ) -> (CounterState, CarriedDebt) {
        let (advanced, time) = from.advance(state, now);
        let (counted, owed) = (advanced.total(), debt.permits_at(time));
        let (used, limit) = (counted.max(owed), self.limit.get() as i64);
        // No request starts before a reservation, but none waits longer than this limit allows.
        let tail = if counted > 0 { advanced.tail.clamp(time, time + self.span()) } else { time };
        let end = from.full_at(&advanced).us().max(if owed > 0 { debt.rest } else { 0 });
        let mut carried = match self.cuts_like(from) {
            true => CounterState { seen: time, tail, ..advanced },
            false => CounterState { tail, ..self.fresh(Timestamp::at(time)) },
        };
        let missing = used.min(limit) - carried.total();
        if missing > 0 {
            carried.add(tail / self.length(), missing);
        }
        if used == 0 || used <= carried.total() && end <= self.full_at(&carried).us() {
            return (carried, CarriedDebt::NONE);
        }
        (carried, CarriedDebt { permits: used, rest: end })
    }

    /// The carried debt after a change of the state. Takes and refunds count there too while the debt lasts.
    pub(crate) fn debt_after(
        &self,
        debt: CarriedDebt,
        before: &CounterState,
        after: &CounterState,
        now: Timestamp,
    ) -> CarriedDebt {
        let taken = after.total() - self.advance(before, now).0.total();
        // After a clock was set back, the debt lasts as long as the window.
        let cut = (after.seen < before.seen).then_some(after.seen + self.span());
        debt.after_window(taken, cut, now.us().max(after.seen))
    }

    /// Time until the current sub-bucket ends.
    pub(crate) fn until_change(&self, state: &CounterState, now: Timestamp) -> Micros {
        let (_, time) = self.advance(state, now);
        Micros::of((time / self.length() + 1) * self.length() - now.us())
    }

    /// The length of the window, in microseconds.
    const fn span(&self) -> i64 {
        self.window.get() as i64
    }

    const fn buckets(&self) -> i64 {
        self.sub_buckets.get() as i64
    }

    /// The length of a sub-bucket, in microseconds.
    const fn length(&self) -> i64 {
        (self.window.get() / self.sub_buckets.get() as u64) as i64
    }

    /// The length of a sub-bucket, in ticks.
    const fn length_ticks(&self) -> i64 {
        self.length() / self.tick.get() as i64
    }

    /// The state with all counts in the current sub-bucket, if the clock was set back by more than a window. It holds at most three
    /// limits' worth, so that a clock that is set back repeatedly does not pile up reservations.
    fn redated(&self, state: &CounterState, now: Timestamp) -> Option<CounterState> {
        if state.seen - now.us() <= self.span() {
            return None;
        }
        let mut redated = self.fresh(now);
        redated.add(now.us() / self.length(), state.total().min(3 * self.limit.get() as i64));
        Some(redated)
    }

    /// The state at `now`, and the instant that counts as now.
    pub(crate) fn advance(&self, state: &CounterState, now: Timestamp) -> (CounterState, i64) {
        let mut state = self.redated(state, now).unwrap_or_else(|| state.clone());
        let time = now.us().max(state.seen);
        state.trim(time / self.length() - self.buckets());
        (state, time)
    }

    /// Permits that count at `instant`, rounded up.
    fn used(&self, state: &CounterState, instant: i64) -> i64 {
        let index = instant / self.length();
        let oldest = state.count(index - self.buckets());
        let inside = state.sum(index - self.buckets() + 1, index);
        if self.strict || oldest == 0 {
            return inside + oldest;
        }
        let left = self.length_ticks() - (instant % self.length()) / self.tick.get() as i64;
        // A count under a larger limit may be too large for an exact product. Any result above the limit denies alike.
        let limit = self.limit.get() as i64;
        if oldest > limit * self.length_ticks() / left {
            return inside + limit + 1;
        }
        inside + ((oldest * left) as u64).div_ceil(self.length_ticks() as u64) as i64
    }

    /// The earliest instant from `earliest` on at which `cost` more permits fit.
    fn start(&self, state: &CounterState, earliest: i64, cost: i64) -> i64 {
        let length = self.length();
        let first = earliest / length;
        let mut inside = state.sum(first - self.buckets() + 1, first);
        // By the last sub-bucket of these, everything that counts now has left the window.
        for index in first..=first + self.buckets() + 1 {
            let room = self.limit.get() as i64 - cost - inside;
            inside += state.count(index + 1) - state.count(index + 1 - self.buckets());
            if room < 0 {
                continue;
            }
            let oldest = state.count(index - self.buckets());
            let ticks = match oldest {
                _ if oldest <= room => 0,
                _ if self.strict => continue,
                _ => self.length_ticks() - room * self.length_ticks() / oldest,
            };
            let instant = earliest.max(index * length + ticks * self.tick.get() as i64);
            if instant / length == index {
                return instant;
            }
        }
        (first + self.buckets() + 1) * length
    }

    fn status_at(&self, state: &CounterState, time: i64, now: Timestamp) -> Status {
        let free = self.limit.get() as i64 - self.used(state, time);
        let remaining = if state.tail > time { 0 } else { free.max(0) };
        let window_end = (time / self.span() + 1) * self.span();
        let reset = if state.counts.is_empty() { 0 } else { window_end - now.us() };
        Status { remaining: remaining as u64, reset: Micros::of(reset) }
    }
}

impl Algorithm for SlidingCounter {
    type State = CounterState;

    fn size(&self) -> u64 {
        self.limit.get()
    }

    fn horizon(&self) -> Micros {
        Micros::new(self.window.get())
    }

    fn fresh(&self, now: Timestamp) -> CounterState {
        let first = now.us() / self.length() - self.buckets();
        CounterState { seen: now.us(), tail: now.us(), first, counts: SmallVec::new(), waiting: Vec::new() }
    }

    #[inline]
    fn take(&self, state: &mut CounterState, now: Timestamp, ask: Ask) -> Outcome {
        let cost = ask.cost as i64;
        if let Some(redated) = self.redated(state, now) {
            *state = redated;
        }
        let (mut next, time) = self.advance(state, now);
        let earliest = time.max(next.tail);
        let start = self.start(&next, earliest, cost);
        let outcome =
            if start == time { Outcome::NOW } else { admit_by(start, now, accepted_wait(ask, self.span())) };
        let (start, charged) = match outcome {
            Outcome::Admitted { .. } => (start, cost),
            Outcome::Denied { .. } if self.count_denied => {
                (earliest, cost.min(self.status_at(&next, time, now).remaining as i64))
            }
            Outcome::Denied { .. } | Outcome::Impossible => return outcome,
        };
        if charged > 0 {
            next.add(start / self.length(), charged);
            next.promise(time, start, charged);
            *state = next;
        }
        outcome
    }

    fn status(&self, state: &CounterState, now: Timestamp) -> Status {
        let (state, time) = self.advance(state, now);
        self.status_at(&state, time, now)
    }

    fn refund(&self, state: &mut CounterState, now: Timestamp, cost: u64, at: Timestamp) {
        let (mut next, time) = self.advance(state, now);
        let index = at.us() / self.length();
        let counted = next.count(index);
        let credit = counted.min(cost.min(self.size()) as i64);
        if credit > 0 {
            next.add(index, -credit);
            next.trim(next.first);
            next.cancel(time, at.us(), credit, self.length());
            *state = next;
        }
    }

    fn charge(&self, state: &mut CounterState, now: Timestamp, cost: u64) {
        let (mut next, time) = self.advance(state, now);
        let earliest = time.max(next.tail);
        let most = 2 * self.limit.get() as i64;
        let index = earliest / self.length();
        let cost = cost.min(most as u64) as i64;
        let cost = cost.min(most - next.sum(index - self.buckets(), index));
        if cost > 0 {
            next.add(index, cost);
            next.promise(time, earliest, cost);
            *state = next;
        }
    }

    fn full_at(&self, state: &CounterState) -> Timestamp {
        let newest = state.counts.iter().rposition(|count| *count > 0);
        let gone = newest.map_or(0, |at| (state.first + at as i64 + self.buckets() + 1) * self.length());
        Timestamp::at(gone.max(state.tail))
    }
}
