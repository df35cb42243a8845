//! The trait of the limiters of every engine.

use std::future::Future;

use tollgate_core::{Ask, Decision, Status};

/// A limit over the keys of an engine.
///
/// The memory limiter has the same methods without `async`.
pub trait RateLimiter: Send + Sync {
    /// Why there is no decision.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Decides on one request.
    fn acquire(&self, key: &str, ask: Ask) -> impl Future<Output = Result<Decision, Self::Error>> + Send;

    /// The status of a key. Takes nothing and creates no state.
    fn status(&self, key: &str) -> impl Future<Output = Result<Status, Self::Error>> + Send;

    /// Resets a key. Resetting an unknown key is not an error.
    fn reset(&self, key: &str) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Takes `permits`, now or not at all.
    fn try_acquire(
        &self,
        key: &str,
        permits: u64,
    ) -> impl Future<Output = Result<Decision, Self::Error>> + Send {
        self.acquire(key, Ask::of(permits))
    }

    /// Whole permits left.
    fn remaining(&self, key: &str) -> impl Future<Output = Result<u64, Self::Error>> + Send {
        async { Ok(self.status(key).await?.remaining) }
    }
}
