//! The load: which limits, which keys, and how they are drawn.

use tollgate::{FailureMode, LeakyBucket, LeakyMode, Limit, OnFailure, Rate, SlidingLog, TokenBucket};
use tollgate_testkit::{Bound, Random};

use crate::record::Ground;

/// Keys that are asked about far more often than they are admitted.
pub(crate) const HOT_KEYS: u64 = 5;
/// All others.
const COLD_KEYS: u64 = 10_000;

/// Permits at once, and permits a second, of every limit.
pub(crate) const BURST: u64 = 50;
pub(crate) const RATE: u64 = 10;

/// One limit for each failure mode.
pub(crate) const LIMITS: [TestLimit; 3] = [
    TestLimit { algorithm: "TOKEN_BUCKET", mode: FailureMode::Local },
    TestLimit { algorithm: "LEAKY_BUCKET", mode: FailureMode::Closed },
    TestLimit { algorithm: "SLIDING_WINDOW", mode: FailureMode::Open },
];

pub(crate) struct TestLimit {
    pub(crate) algorithm: &'static str,
    pub(crate) mode: FailureMode,
}

impl TestLimit {
    /// The limit, as the library takes it.
    pub(crate) fn limit(&self) -> Limit {
        let made = match self.algorithm {
            "TOKEN_BUCKET" => TokenBucket::new(BURST, Rate::per_second(RATE)).map(Limit::TokenBucket),
            "LEAKY_BUCKET" => {
                LeakyBucket::new(BURST, Rate::per_second(RATE), LeakyMode::Meter).map(Limit::LeakyBucket)
            }
            _ => SlidingLog::new("50/5s".parse().expect("a rate")).map(Limit::SlidingLog),
        };
        made.expect("a limit that can be exact")
    }

    pub(crate) fn on_failure(&self) -> OnFailure {
        OnFailure { mode: self.mode, ..OnFailure::default() }
    }

    /// The ground on which checks are answered while the store is gone.
    pub(crate) fn ground(&self) -> Ground {
        match self.mode {
            FailureMode::Open => Ground::Open,
            FailureMode::Closed => Ground::Closed,
            FailureMode::Local => Ground::Local,
        }
    }

    /// All three keep the same bound: 50 in any five seconds are at most 50 and 10 a second.
    pub(crate) const fn bound() -> Bound {
        Bound { burst: BURST, permits: RATE, period_us: 1_000_000 }
    }

    /// The permits that one of `nodes` nodes may admit alone. The first permit of a node counts once for each node.
    pub(crate) const fn share(nodes: u64) -> Bound {
        Bound { burst: BURST.div_ceil(nodes), permits: RATE, period_us: 1_000_000 * nodes }
    }
}

/// The same limits, as the service takes them.
pub(crate) const CONFIG: &str = "
log: { level: info, format: json }
api:
  defaults:
    token_bucket: { capacity: 50, refill_rate: 10/s, on_store_failure: local }
    leaky_bucket: { size: 50, outflow: 10/s, on_store_failure: closed }
    sliding_window: { limit: 50/5s, on_store_failure: open }
";

/// Draws one check after another.
pub(crate) struct Traffic(Random);

impl Traffic {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    /// A limit and a key: half of all checks are on hot keys, the others on keys of which some are much more common.
    pub(crate) fn next(&mut self) -> (u8, u32) {
        let limit = self.0.below(LIMITS.len() as u64) as u8;
        let key = if self.0.one_in(2) {
            self.0.below(HOT_KEYS)
        } else {
            // The product of two even draws leans to the small ones.
            HOT_KEYS + self.0.below(COLD_KEYS) * self.0.below(COLD_KEYS) / COLD_KEYS
        };
        (limit, key as u32)
    }
}

/// A key as it is named in a check.
pub(crate) fn key_name(key: u32) -> String {
    format!("user:{key}")
}
