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
//! With a store, which may fail, a [`Guard`] answers whatever happens, and says on what ground:
//!
//! ```no_run
//! use tollgate::{Ask, Clock, FailureMode, Guard, GuardConfig, Limit, OnFailure, Rate, RedisConfig, RedisEngine, TokenBucket};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let (engine, driver) = RedisEngine::new(RedisConfig::new("redis://127.0.0.1".parse()?));
//! tokio::spawn(driver.run());
//! let (guard, driver) = Guard::new(engine, GuardConfig::default(), Clock::system());
//! tokio::spawn(driver.run());
//!
//! let limit = Limit::TokenBucket(TokenBucket::new(5, Rate::per_minute(5))?);
//! let login = guard.limiter("login", limit, OnFailure { mode: FailureMode::Closed, ..OnFailure::default() })?;
//! let verdict = login.acquire("user:123", Ask::of(1)).await;
//! println!("admitted: {}, on the ground: {}", verdict.is_admitted(), verdict.basis.as_str());
//! # Ok(())
//! # }
//! ```

// A sixth algorithm must not compile until every match knows it.
#![warn(clippy::wildcard_enum_match_arm)]

mod clock;
mod engine;
mod guard;
mod key;
mod limiter;
mod newcomers;
mod policy;

pub use clock::Clock;
pub use engine::lease::{DecidedBy, LeaseLimiter, LeaseStats, WeakLeaseLimiter};
pub use engine::memory::{MemoryConfig, MemoryEngine, MemoryLimiter, MemoryStats, TooManyLimits};
pub use engine::redis::{
    ASSIGNED_MAX, Assigned, AssignedTier, Control, KEY_PREFIX, Lent, LogStorage, News, REMEMBER_MAX,
    RedisConfig, RedisDriver, RedisEngine, RedisLimiter, RedisStats, ServerStatus, StoreError, StoreUrl,
    StoreUrlError, TlsConfig, Version, Wanted,
};
pub use engine::{Check, Decisions, RateLimiter};
pub use guard::{
    Basis, FailureMode, Guard, GuardConfig, GuardDriver, GuardStats, GuardedLimiter, LimitSettings,
    OnFailure, Share, ShareError, Verdict,
};
pub use key::{KEY_BYTES_MAX, Key, KeyError};
pub use limiter::{Engine, Limiter};
pub use newcomers::SHARED_SUBJECT;
pub use policy::{PolicyLimiter, PolicyOutcome, PolicyVerdict};
/// Rules, matching, keys and tiers: from a request to the limits that it is checked against.
pub use tollgate_core::policy as rules;
pub use tollgate_core::{
    AlgorithmName, Ask, BreakerConfig, BreakerError, BreakerState, Calendar, CalendarError, CalendarQuota,
    Carried, Consistency, Cycle, Decision, FixedWindow, Grant, IntervalBucket, LeakyBucket, LeakyMode,
    LeaseTerms, Limit, LimitError, Micros, Outcome, Over, Parameters, Period, Rate, RateError, Retention,
    SlidingCounter, SlidingLog, Standing, State, StaysStrict, Timestamp, TokenBucket, UnknownAlgorithm,
    Weekday, algorithm, lease, parse_duration,
};
