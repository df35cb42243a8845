//! The algorithms, one file each: `(state, now, ask) -> (outcome, next state)` in integer arithmetic.
//!
//! Common rules, whatever the algorithm:
//! - A state that was never used, a state that has come back to full and no state at all decide alike.
//! - A denial leaves the state as it is (unless `count_denied` asks otherwise). A cost of 0 asks for nothing: it is
//!   admitted and leaves the state as it is. A cost above the limit's size is refused before the state is read.
//! - A clock that steps back grants nothing: the time of the state stands until the clock has caught up. If the
//!   state is more than one horizon ahead, the clock was really set back, and the state is re-dated as exhausted.
//!   That is kept even by a denial: re-dating anew each time would lock the key out until the clock has caught up.
//! - A promised wait is exact: refused one microsecond before, admitted at it.
//! - `wait` is cut to one horizon (time to full, or the window): nobody reserves further ahead.

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
    /// What one key remembers.
    type State: Clone + PartialEq + core::fmt::Debug;

    /// The state of a key that was never used, as seen at `now`.
    fn fresh(&self, now: Timestamp) -> Self::State;

    /// Takes the permits asked for, or says when they could be had.
    fn decide(&self, state: &mut Self::State, now: Timestamp, ask: Ask) -> Outcome;

    /// Permits left and time to reset, without taking anything.
    fn status(&self, state: &Self::State, now: Timestamp) -> Status;

    /// Gives back `cost` permits of a grant that was to start at `at`, as far as they are still owed.
    fn refund(&self, state: &mut Self::State, now: Timestamp, cost: u64, at: Timestamp);

    /// Takes `cost` permits without asking, into bounded debt.
    fn charge(&self, state: &mut Self::State, now: Timestamp, cost: u64);

    /// The instant from which the state is as good as none: what a time to live is derived from.
    fn full_at(&self, state: &Self::State) -> Timestamp;

    /// The answer that [`Algorithm::decide`] would give, without taking anything.
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
