//! Tollgate as a library: engines that hold the state of many keys and decide on them.
//!
//! ```
//! use tollgate::{Clock, Limit, MemoryConfig, MemoryEngine, Micros, Rate, TokenBucket};
//!
//! let engine = MemoryEngine::new(MemoryConfig::default(), Clock::system());
//! let limit = Limit::TokenBucket(TokenBucket::new(100, Rate::per_second(10))?);
//! let limiter = engine.limiter("api", limit)?;
//!
//! let decision = limiter.try_acquire("user:123", 5);
//! assert!(decision.is_admitted());
//! assert_eq!(limiter.remaining("user:123"), 95);
//! limiter.reset("user:123");
//! assert_eq!(limiter.remaining("user:123"), 100);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With a store, which may fail, an engine still answers every check, and every answer names its basis:
//!
//! ```no_run
//! use tollgate::{Ask, Clock, FailureMode, GuardConfig, Limit, OnFailure, Rate, RedisConfig, RedisEngine, SharedEngine, TokenBucket};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let (redis, driver) = RedisEngine::new(RedisConfig::new("redis://127.0.0.1".parse()?));
//! tokio::spawn(driver.run());
//! let (engine, driver) = SharedEngine::new(redis, GuardConfig::default(), Clock::system());
//! tokio::spawn(driver.run());
//!
//! let limit = Limit::TokenBucket(TokenBucket::new(5, Rate::per_minute(5))?);
//! let login = engine.limiter("login", limit, OnFailure { mode: FailureMode::Closed, ..OnFailure::default() })?;
//! let verdict = login.acquire("user:123", Ask::of(1)).await;
//! println!("admitted: {}, on the basis: {}", verdict.is_admitted(), verdict.basis.as_str());
//! # Ok(())
//! # }
//! ```
//!
//! A request with several limits is a slice of [`Check`]s, decided together by [`Engine::decide`].

// A sixth algorithm must not compile until every match knows it.
#![warn(clippy::wildcard_enum_match_arm)]

mod backend;
mod by_limit;
mod check;
mod clock;
mod deadline;
mod engine;
mod guard;
mod hash;
mod key;
mod leases;
mod limiter;
mod memory;
mod newcomers;
mod policy;
mod rate_limiter;
mod redis;
mod settings;
mod sync;
mod tasks;
mod verdict;

pub use self::redis::{
    ASSIGNED_MAX, Assigned, AssignedTier, Control, ControlUpdate, HistoryEntry, KeyPrefix, KeyPrefixError,
    Pushed, REMEMBER_MAX, RedisConfig, RedisEngine, RedisLimiter, RedisStats, ServerStatus, StoreError,
    StoreUrl, StoreUrlError, TlsConfig, Version,
};
pub use backend::{Backend, Deadlines, LeaseGrant, LeaseRequest, Store};
pub use check::{Check, HashedKey, LimitId};
pub use clock::Clock;
pub use engine::{Engine, SharedEngine};
pub use guard::{Guard, GuardConfig, GuardDriver, GuardStats, Share, ShareError};
pub use key::{KEY_BYTES_MAX, Key, KeyError};
pub use leases::{Lease, LeaseStats};
pub use limiter::Limiter;
pub use memory::{MemoryConfig, MemoryEngine, MemoryLimiter, MemoryStats, TooManyLimits};
pub use newcomers::SHARED_SUBJECT;
pub use policy::{PolicyLimiter, PolicyOutcome, PolicyPart, PolicyVerdict, TooManyChecks, decide_together};
pub use rate_limiter::RateLimiter;
pub use settings::{FailureMode, LimitSettings, OnFailure};
pub use tasks::{Driver, Tasks};
/// Rules, matching, keys and tiers: from a request to the limits that it is checked against.
pub use tollgate_core::policy as rules;
pub use tollgate_core::{
    AlgorithmName, Ask, BreakerConfig, BreakerError, BreakerState, Calendar, CalendarError, CalendarQuota,
    Carried, CarriedDebt, Consistency, Cycle, Decision, FixedWindow, Grant, IntervalBucket, LeakyBucket,
    LeakyMode, LeaseTerms, Limit, LimitError, Micros, Outcome, Parameters, Period, Rate, RateError,
    Retention, SlidingCounter, SlidingLog, State, Status, StaysStrict, Timestamp, TokenBucket,
    UnknownAlgorithm, Weekday, algorithm, lease, parse_duration,
};
pub use verdict::{Basis, Verdict, Verdicts};
