//! The algorithms, one file each: `(state, now, ask) -> (outcome, next state)` in integer arithmetic.
//!
//! Rules that all algorithms share:
//! - An unused state, a state that is full again and a missing state decide alike.
//! - A denial leaves the state unchanged, unless `count_denied` is set. A cost of 0 is admitted and leaves the state
//!   unchanged. A cost above the size of the limit is refused before the state is read.
//! - A clock that steps back grants nothing: the time of the state holds until the clock has caught up. If the state is
//!   more than one horizon ahead, the clock was set back, and the state is re-dated as exhausted. A denial keeps the
//!   re-dated state too. Otherwise the key would be locked out until the clock has caught up.
//! - A promised wait is exact: denied one microsecond before, admitted at it.
//! - `wait` is cut to one horizon (time to full, or the window). No request reserves further ahead.

mod calendar_quota;
mod fixed_window;
mod interval_bucket;
mod leaky_bucket;
mod lease_bucket;
mod sliding_counter;
mod sliding_log;
mod token_bucket;

pub use calendar_quota::{CalendarQuota, CalendarState};
pub use fixed_window::{FixedWindow, WindowState};
pub use interval_bucket::{IntervalBucket, IntervalState};
pub use leaky_bucket::{LeakyBucket, LeakyMode};
pub use lease_bucket::{LeaseBucket, LeaseState};
pub use sliding_counter::{CounterState, SUB_BUCKETS_MAX, SlidingCounter, Waiting};
pub use sliding_log::{LogEntry, LogState, Retention, SlidingLog};
pub use token_bucket::{BucketState, TokenBucket};

use crate::decision::{Ask, Outcome, Status};
use crate::time::{Micros, Timestamp};

/// One algorithm with its parameters: decides on the state of one key, and changes it.
pub trait Algorithm {
    /// The state of one key.
    type State: Clone + PartialEq + core::fmt::Debug;

    /// The most permits that an unused key could take at once.
    fn size(&self) -> u64;

    /// The time in which [`Algorithm::size`] permits come back: time to full, or the window.
    fn horizon(&self) -> Micros;

    /// The state of an unused key, as seen at `now`.
    fn fresh(&self, now: Timestamp) -> Self::State;

    /// Decides on an ask whose cost is at least 1 and at most [`Algorithm::size`].
    fn take(&self, state: &mut Self::State, now: Timestamp, ask: Ask) -> Outcome;

    /// Permits left and time to reset. Takes nothing.
    fn status(&self, state: &Self::State, now: Timestamp) -> Status;

    /// Gives back `cost` permits of a grant that was to start at `at`, as far as they are still owed.
    fn refund(&self, state: &mut Self::State, now: Timestamp, cost: u64, at: Timestamp);

    /// Takes `cost` permits without a decision, into bounded debt.
    fn charge(&self, state: &mut Self::State, now: Timestamp, cost: u64);

    /// The instant from which the state decides like a missing one. The time to live is derived from it.
    fn full_at(&self, state: &Self::State) -> Timestamp;

    /// Takes the permits asked for, or says when they would be available.
    #[inline]
    fn decide(&self, state: &mut Self::State, now: Timestamp, ask: Ask) -> Outcome {
        if ask.cost > self.size() {
            return Outcome::Impossible;
        }
        if ask.cost == 0 {
            return Outcome::NOW;
        }
        self.take(state, now, ask)
    }

    /// The outcome that [`Algorithm::decide`] would give, without taking anything.
    fn peek(&self, state: &Self::State, now: Timestamp, ask: Ask) -> Outcome {
        self.decide(&mut state.clone(), now, ask)
    }
}

/// The wait that an ask accepts, cut to `horizon`.
const fn accepted_wait(ask: Ask, horizon: i64) -> i64 {
    match ask.wait {
        Some(wait) if wait.us() < horizon => wait.us(),
        Some(_) => horizon,
        None => 0,
    }
}

/// An admission at `start`, or a denial until `start` is within `wait`.
const fn admit_by(start: i64, now: Timestamp, wait: i64) -> Outcome {
    let delay = start - now.us();
    if delay <= wait {
        Outcome::Admitted { delay: Micros::of(delay) }
    } else {
        Outcome::Denied { retry: Micros::of(delay - wait) }
    }
}

/// `a / b` rounded up, for quantities that are never negative.
const fn div_ceil(a: i64, b: core::num::NonZeroU64) -> i64 {
    debug_assert!(a >= 0);
    (a as u64).div_ceil(b.get()) as i64
}

/// A count after `cost` more permits. A charge reaches at most twice the limit and never lowers the count.
const fn charged(count: i64, cost: u64, limit: core::num::NonZeroU64) -> i64 {
    let most = 2 * limit.get();
    let cost = if cost < most { cost } else { most } as i64;
    let after = if count + cost < most as i64 { count + cost } else { most as i64 };
    if count > after { count } else { after }
}
