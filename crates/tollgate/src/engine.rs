//! The engine that doors call: memory or shared, chosen at run time. It always answers.

use std::convert::Infallible;

use tollgate_core::{Limit, Timestamp};

use crate::backend::{Backend, Store};
use crate::check::{Check, HashedKey, LimitId};
use crate::clock::Clock;
use crate::guard::{Guard, GuardConfig, GuardDriver, GuardStats};
use crate::leases::{Lease, LeaseStats};
use crate::limiter::Limiter;
use crate::memory::{MemoryEngine, TooManyLimits};
use crate::redis::{RedisEngine, StoreError};
use crate::settings::LimitSettings;
use crate::tasks::Tasks;
use crate::verdict::{Verdict, Verdicts};

/// The state of all keys, in this process or in a store. Clones share it.
#[derive(Clone, Debug)]
pub enum Engine {
    /// In this process.
    Memory(MemoryEngine),
    /// In Redis or Valkey, shared by many nodes.
    Shared(SharedEngine),
}

/// The state of all keys in a store that many nodes share. Leases decide what they can, the guard answers when the store does not.
#[derive(Clone)]
pub struct SharedEngine(Lease<Guard<RedisEngine>>);

impl std::fmt::Debug for SharedEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedEngine").field("redis", self.redis()).finish_non_exhaustive()
    }
}

impl SharedEngine {
    /// An engine on a store, and the driver that ends outages. `clock` is read for decisions without the store.
    pub fn new(redis: RedisEngine, config: GuardConfig, clock: Clock) -> (Self, GuardDriver<RedisEngine>) {
        let (guard, driver) = Guard::new(redis, config, clock);
        (Self(Lease::new(guard)), driver)
    }

    /// A limiter over the keys of `scope` that always answers.
    pub fn limiter(
        &self,
        scope: &str,
        limit: Limit,
        settings: impl Into<LimitSettings>,
    ) -> Result<Limiter, TooManyLimits> {
        Engine::Shared(self.clone()).limiter(scope, limit, settings)
    }

    /// The store.
    pub fn redis(&self) -> &RedisEngine {
        self.guard().store()
    }

    /// Whether the store decides, as far as is known, or why not. A store that fails every check is not healthy, however rarely it is asked.
    pub fn health(&self) -> Result<(), StoreError> {
        self.guard().health()
    }

    /// Counts of the guard.
    pub fn stats(&self) -> GuardStats {
        self.guard().stats()
    }

    /// Counts of borrowed permits, over all limits.
    pub fn lease_stats(&self) -> LeaseStats {
        self.0.stats()
    }

    /// Settles debts, as far as the store allows: before a program ends.
    pub async fn repay_debts(&self) {
        self.guard().repay_debts().await;
    }

    /// Gives back all leases, and borrows nothing any more: before a program ends.
    pub async fn give_leases_back(&self) {
        self.0.close().await;
    }

    fn guard(&self) -> &Guard<RedisEngine> {
        self.0.backend()
    }
}

impl Engine {
    /// A limiter over the keys of `scope`. The memory engine needs no settings.
    pub fn limiter(
        &self,
        scope: &str,
        limit: Limit,
        settings: impl Into<LimitSettings>,
    ) -> Result<Limiter, TooManyLimits> {
        Limiter::new(self, scope, limit, &settings.into())
    }

    /// Decides on all checks of a request together: permits are taken from every limit, or from none if an enforced one denies.
    pub async fn decide(&self, checks: &[Check<'_>]) -> Verdicts {
        let decided: Result<_, Infallible> = match self {
            Self::Memory(engine) => engine.decide(checks).await,
            Self::Shared(SharedEngine(lease)) => match lease.decide_locally(checks) {
                Ok(verdicts) => return verdicts,
                Err(rest) => lease.decide_in_store(checks, rest).await,
            },
        };
        let Ok(verdicts) = decided;
        verdicts
    }

    /// The verdict that [`Engine::decide`] would give on a check alone, without taking anything.
    pub async fn peek(&self, check: &Check<'_>) -> Verdict {
        let peeked: Result<_, Infallible> = match self {
            Self::Memory(engine) => engine.peek(check).await,
            Self::Shared(engine) => engine.0.peek(check).await,
        };
        let Ok(verdict) = peeked;
        verdict
    }

    /// Resets a key. The only operation that cannot be done without the store.
    pub async fn reset(&self, limit: LimitId, key: &str) -> Result<(), StoreError> {
        match self {
            Self::Memory(engine) => engine.reset(limit, HashedKey::new(key)).await,
            Self::Shared(engine) => engine.0.reset(limit, HashedKey::new(key)).await,
        }
    }

    /// Gives back `permits` of a grant that started at `at`, as far as they are still owed.
    pub async fn refund(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        match self {
            Self::Memory(engine) => engine.refund(limit, key, permits, at).await,
            Self::Shared(engine) => engine.0.refund(limit, key, permits, at).await,
        }
    }

    pub(crate) fn add_limit(
        &self,
        scope: &str,
        limit: Limit,
        settings: &LimitSettings,
    ) -> Result<LimitId, TooManyLimits> {
        match self {
            Self::Memory(engine) => engine.add_limit(scope, limit, settings),
            Self::Shared(engine) => engine.0.add_limit(scope, limit, settings),
        }
    }

    pub(crate) fn remove_limit(&self, id: LimitId) {
        match self {
            Self::Memory(engine) => engine.remove_limit(id),
            Self::Shared(engine) => engine.0.remove_limit(id),
        }
    }

    /// The time by this node's clock.
    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Self::Memory(engine) => engine.clock().now(),
            Self::Shared(engine) => engine.redis().clock().now(),
        }
    }

    /// The tasks that no caller waits for. The memory engine has none.
    pub(crate) fn tasks(&self) -> Option<&Tasks> {
        match self {
            Self::Memory(_) => None,
            Self::Shared(engine) => Some(engine.redis().tasks()),
        }
    }

    /// Whether limits of different subjects may be decided by different servers.
    pub(crate) fn is_cluster(&self) -> bool {
        match self {
            Self::Memory(_) => false,
            Self::Shared(engine) => engine.redis().is_cluster(),
        }
    }
}
