//! The pure decisions of Tollgate: no clock, no I/O, no tasks.
//!
//! Each [`algorithm`] is a function from the state of a key, the time and a cost to an outcome and the next state.
//! Time is handed in, quantities are integers, rounding is against the caller. The crate does not use the standard
//! library, so a clock, I/O, a task or a log line cannot be written here.
//!
//! ```
//! use tollgate_core::{Algorithm, Ask, Rate, Timestamp, TokenBucket};
//!
//! let bucket = TokenBucket::new(100, Rate::per_second(10)).unwrap();
//! let now = Timestamp::from_micros(1_000_000);
//! let mut state = bucket.fresh(now);
//! assert!(bucket.decide(&mut state, now, Ask::of(40)).is_admitted());
//! assert_eq!(bucket.status(&state, now).remaining, 60);
//! ```
#![no_std]
// A sixth algorithm must not compile until every match knows it.
#![warn(clippy::wildcard_enum_match_arm)]
extern crate alloc;

#[macro_use]
mod limit;

pub mod algorithm;
mod breaker;
mod calendar;
mod cancel;
mod decision;
pub mod lease;
mod migrate;
pub mod policy;
mod rate;
mod time;

pub use algorithm::{
    Algorithm, CalendarQuota, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, Retention, SlidingCounter,
    SlidingLog, TokenBucket,
};
pub use breaker::{Breaker, BreakerConfig, BreakerError, BreakerState, CallOutcome, Pass};
pub use calendar::{Calendar, CalendarError, Cycle, Period, WEEKDAYS, Weekday};
pub use cancel::Forgone;
pub use decision::{Ask, Decision, Outcome, Status};
pub use lease::{Consistency, Grant, LeaseTerms, StaysStrict};
pub use limit::{AlgorithmName, Limit, LimitError, PlainState, State, UnknownAlgorithm};
pub use migrate::{Beside, Carried, CarriedDebt, Parameters};
pub use rate::{Rate, RateError, parse_duration};
pub use time::{Micros, Timestamp};
