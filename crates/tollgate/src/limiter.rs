//! A limiter whose engine is chosen at run time: what every door calls, wherever the state lives.

use tollgate_core::{Ask, Decision, Limit, Timestamp};

use crate::engine::memory::{MemoryEngine, MemoryLimiter, TooManyLimits};
use crate::engine::redis::{RedisEngine, RedisLimiter, StoreError};

/// The state of all keys, in this process or in a store.
#[derive(Clone, Debug)]
pub enum Engine {
    /// In this process.
    Memory(MemoryEngine),
    /// In Redis or Valkey, shared by many nodes.
    Redis(RedisEngine),
}

impl Engine {
    /// A limiter over the keys of `scope`.
    pub fn limiter(&self, scope: &str, limit: Limit) -> Result<Limiter, TooManyLimits> {
        match self {
            Self::Memory(engine) => engine.limiter(scope, limit).map(Limiter::Memory),
            Self::Redis(engine) => Ok(Limiter::Redis(engine.limiter(scope, limit))),
        }
    }
}

/// A limit over the keys of an engine. Answers of the memory engine are there at once and never fail.
#[derive(Clone)]
pub enum Limiter {
    /// Keys of this process.
    Memory(MemoryLimiter),
    /// Keys of a store.
    Redis(RedisLimiter),
}

impl Limiter {
    /// The limit.
    pub fn limit(&self) -> &Limit {
        match self {
            Self::Memory(limiter) => limiter.limit(),
            Self::Redis(limiter) => limiter.limit(),
        }
    }

    /// Takes permits, perhaps after a delay that the caller accepts.
    pub async fn acquire(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        match self {
            Self::Memory(limiter) => Ok(limiter.acquire(key, ask)),
            Self::Redis(limiter) => limiter.acquire(key, ask).await,
        }
    }

    /// The answer that [`Limiter::acquire`] would give, without taking anything.
    pub async fn peek(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        match self {
            Self::Memory(limiter) => Ok(limiter.peek(key, ask)),
            Self::Redis(limiter) => limiter.peek(key, ask).await,
        }
    }

    /// Makes a key as good as new.
    pub async fn reset(&self, key: &str) -> Result<(), StoreError> {
        match self {
            Self::Memory(limiter) => {
                limiter.reset(key);
                Ok(())
            }
            Self::Redis(limiter) => limiter.reset(key).await,
        }
    }

    /// Gives back `permits` of a grant that was to start at `at`, as far as they are still owed.
    pub async fn refund(&self, key: &str, permits: u64, at: Timestamp) -> Result<(), StoreError> {
        match self {
            Self::Memory(limiter) => {
                limiter.refund(key, permits, at);
                Ok(())
            }
            Self::Redis(limiter) => limiter.refund(key, permits, at).await,
        }
    }

    /// Takes `permits` without asking, into bounded debt.
    pub async fn charge(&self, key: &str, permits: u64) -> Result<(), StoreError> {
        match self {
            Self::Memory(limiter) => {
                limiter.charge(key, permits);
                Ok(())
            }
            Self::Redis(limiter) => limiter.charge(key, permits).await,
        }
    }
}
