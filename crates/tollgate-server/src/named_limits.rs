//! Limits that callers name with each request, as `CL.THROTTLE` does.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use tollgate::{Engine, Limit, LimitError, LimitSettings, Limiter, Micros, Rate, TokenBucket, TooManyLimits};

/// Limits that are ready to be asked. Services name a handful; adding one costs some hundred microseconds, because the engine copies its
/// table of limits, and takes some hundred bytes. The least recently used limit makes room for a new one.
const LIMITS_MAX: usize = 1_024;

/// A token bucket as a caller describes it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct BucketTerms {
    /// The most permits at once.
    pub(crate) capacity: u64,
    /// Permits that flow back in each period.
    pub(crate) refill: u64,
    /// The period.
    pub(crate) period_secs: u64,
}

/// Why a limit cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum NotALimit {
    /// Its numbers are out of bounds.
    #[error(transparent)]
    Numbers(#[from] LimitError),
    /// The engine holds too many different limits.
    #[error(transparent)]
    TooMany(#[from] TooManyLimits),
}

/// Token buckets by their terms. All have the states of the plain API's token bucket, so a key has one state whichever way it is named.
pub(crate) struct NamedLimits {
    engine: Engine,
    settings: LimitSettings,
    known: RwLock<HashMap<BucketTerms, Known>>,
    /// Counts uses, so that the least recently used limit is known.
    uses: AtomicU64,
}

struct Known {
    limiter: Limiter,
    last_use: AtomicU64,
}

impl NamedLimits {
    /// `settings` say how the limits are kept in a store.
    pub(crate) fn new(engine: &Engine, settings: LimitSettings) -> Self {
        Self { engine: engine.clone(), settings, known: RwLock::default(), uses: AtomicU64::new(0) }
    }

    /// The limiter for a limit.
    pub(crate) fn limiter(&self, terms: BucketTerms) -> Result<Limiter, NotALimit> {
        let last_use = self.uses.fetch_add(1, Ordering::Relaxed);
        if let Some(known) = self.known.read().get(&terms) {
            known.last_use.store(last_use, Ordering::Relaxed);
            return Ok(known.limiter.clone());
        }
        let limit = Limit::TokenBucket(terms.bucket()?);
        let scope = limit.algorithm().as_lowercase();
        let limiter = self.engine.limiter(scope, limit, self.settings)?;
        let evicted = self.insert(terms, Known { limiter: limiter.clone(), last_use: last_use.into() });
        // Removing a limit copies the engine's table: not while the lock is held.
        drop(evicted);
        Ok(limiter)
    }

    fn insert(&self, terms: BucketTerms, new: Known) -> [Option<Known>; 2] {
        let mut known = self.known.write();
        let is_full = known.len() >= LIMITS_MAX && !known.contains_key(&terms);
        let oldest =
            known.iter().filter(|_| is_full).min_by_key(|(_, it)| it.last_use.load(Ordering::Relaxed));
        let oldest = oldest.map(|(terms, _)| *terms);
        [oldest.and_then(|terms| known.remove(&terms)), known.insert(terms, new)]
    }
}

impl BucketTerms {
    fn bucket(self) -> Result<TokenBucket, LimitError> {
        let micros = self.period_secs.saturating_mul(1_000_000);
        let rate = Rate::new(self.refill, Micros::new(micros)).map_err(|_| LimitError::Empty)?;
        TokenBucket::new(self.capacity, rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate::{Ask, Clock, MemoryConfig, MemoryEngine, Timestamp};

    fn named() -> NamedLimits {
        let clock = Clock::manual(Timestamp::from_micros(1_000_000));
        NamedLimits::new(
            &Engine::Memory(MemoryEngine::new(MemoryConfig::default(), clock)),
            LimitSettings::default(),
        )
    }

    fn terms(capacity: u64) -> BucketTerms {
        BucketTerms { capacity, refill: 1, period_secs: 60 }
    }

    #[tokio::test]
    async fn the_least_recently_used_limit_makes_room_and_its_states_stay() {
        let named = named();
        let first = named.limiter(terms(1)).unwrap();
        assert!(first.acquire("a", Ask::of(1)).await.is_admitted());
        let id = first.id();
        drop(first);
        for capacity in 2..=LIMITS_MAX as u64 {
            named.limiter(terms(capacity)).unwrap();
        }
        assert_eq!(named.limiter(terms(1)).unwrap().id(), id, "all of them fit");
        named.limiter(terms(LIMITS_MAX as u64 + 1)).unwrap();
        assert_eq!(named.known.read().len(), LIMITS_MAX);
        assert!(!named.known.read().contains_key(&terms(2)), "the least recently used one");
        assert_eq!(named.limiter(terms(1)).unwrap().id(), id);
        for capacity in 2..=2 * LIMITS_MAX as u64 {
            named.limiter(terms(capacity)).unwrap();
        }
        let again = named.limiter(terms(1)).unwrap();
        assert_ne!(again.id(), id, "it was added anew");
        assert!(!again.acquire("a", Ask::of(1)).await.is_admitted(), "and the key is still at its limit");
    }

    #[test]
    fn numbers_out_of_bounds_are_refused() {
        let named = named();
        for terms in [
            BucketTerms { capacity: 0, refill: 1, period_secs: 1 },
            BucketTerms { capacity: 1, refill: 0, period_secs: 1 },
            BucketTerms { capacity: 1, refill: 1, period_secs: 0 },
            BucketTerms { capacity: u64::MAX, refill: 1, period_secs: u64::MAX },
            BucketTerms { capacity: 1 << 50, refill: 7, period_secs: 60 },
        ] {
            assert!(matches!(named.limiter(terms), Err(NotALimit::Numbers(_))), "{terms:?}");
        }
    }
}
