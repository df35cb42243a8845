//! A limiter whose engine is chosen at run time: what every door calls, wherever the state lives. It always answers.

use smallvec::SmallVec;
use tollgate_core::{Ask, Limit, Timestamp};

use crate::clock::Clock;
use crate::engine::Check;
use crate::engine::memory::{MemoryEngine, MemoryLimiter, TooManyLimits};
use crate::engine::redis::StoreError;
use crate::guard::{Guard, GuardedLimiter, LimitSettings, Verdict};

/// The state of all keys, in this process or in a store.
#[derive(Clone, Debug)]
pub enum Engine {
    /// In this process.
    Memory(MemoryEngine),
    /// In Redis or Valkey, shared by many nodes.
    Redis(Guard),
}

impl Engine {
    /// A limiter over the keys of `scope`. What is settled for the sake of a store is of no concern to the memory engine.
    pub fn limiter(
        &self,
        scope: &str,
        limit: Limit,
        settings: impl Into<LimitSettings>,
    ) -> Result<Limiter, TooManyLimits> {
        match self {
            Self::Memory(engine) => engine.limiter(scope, limit).map(Limiter::Memory),
            Self::Redis(guard) => guard.limiter(scope, limit, settings).map(Limiter::Redis),
        }
    }

    /// The clock of this process.
    pub(crate) fn clock(&self) -> &Clock {
        match self {
            Self::Memory(engine) => engine.clock(),
            Self::Redis(guard) => guard.engine().own_clock(),
        }
    }
}

impl Engine {
    /// The time by this node's clock.
    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Self::Memory(engine) => engine.clock().now(),
            Self::Redis(guard) => guard.engine().own_clock().now(),
        }
    }

    /// Takes from several limits of this engine, or from none if one that is binding denies. The verdicts are in the order of the
    /// checks. None: another limit is known to deny, and this one was not asked.
    pub async fn acquire_all(&self, checks: &[Check<'_, Limiter>]) -> SmallVec<[Option<Verdict>; 4]> {
        // Alone, a limit may borrow, remember and go together with others who ask for it.
        if let [only] = checks {
            return SmallVec::from_iter([Some(only.limiter.acquire(only.key, only.ask).await)]);
        }
        match self {
            Self::Memory(engine) => {
                let checks = checks.iter().filter_map(|it| match it.limiter {
                    Limiter::Memory(limiter) => {
                        Some(Check { limiter, key: it.key, ask: it.ask, is_binding: it.is_binding })
                    }
                    Limiter::Redis(_) => None,
                });
                let checks: SmallVec<[_; 4]> = checks.collect();
                engine.acquire_all(&checks).into_iter().map(|it| Some(Verdict::exact(it))).collect()
            }
            Self::Redis(guard) => {
                let checks = checks.iter().filter_map(|it| match it.limiter {
                    Limiter::Redis(limiter) => {
                        Some(Check { limiter, key: it.key, ask: it.ask, is_binding: it.is_binding })
                    }
                    Limiter::Memory(_) => None,
                });
                let checks: SmallVec<[_; 4]> = checks.collect();
                guard.acquire_all(&checks).await
            }
        }
    }
}

/// A limit over the keys of an engine. Answers of the memory engine are there at once.
#[derive(Clone)]
pub enum Limiter {
    /// Keys of this process.
    Memory(MemoryLimiter),
    /// Keys of a store.
    Redis(GuardedLimiter),
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
    pub async fn acquire(&self, key: &str, ask: Ask) -> Verdict {
        match self {
            Self::Memory(limiter) => Verdict::exact(limiter.acquire(key, ask)),
            Self::Redis(limiter) => limiter.acquire(key, ask).await,
        }
    }

    /// The answer that [`Limiter::acquire`] would give, without taking anything.
    pub async fn peek(&self, key: &str, ask: Ask) -> Verdict {
        match self {
            Self::Memory(limiter) => Verdict::exact(limiter.peek(key, ask)),
            Self::Redis(limiter) => limiter.peek(key, ask).await,
        }
    }

    /// Makes a key as good as new. The one thing that is not done without the store, and says so.
    pub async fn reset(&self, key: &str) -> Result<(), StoreError> {
        match self {
            Self::Memory(limiter) => {
                limiter.reset(key);
                Ok(())
            }
            Self::Redis(limiter) => limiter.reset(key).await,
        }
    }
}
