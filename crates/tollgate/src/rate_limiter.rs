//! What limiters of every engine have in common.

use std::future::Future;

use tollgate_core::{Ask, Decision, Status};

/// A limit over the keys of some engine: what every door calls, wherever the state lives.
///
/// Engines that need no waiting offer the same names as plain functions; this trait wraps them.
pub trait RateLimiter: Send + Sync {
    /// What can go wrong between here and the state.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Decides on one request.
    fn acquire(&self, key: &str, ask: Ask) -> impl Future<Output = Result<Decision, Self::Error>> + Send;

    /// Where a key stands. Takes nothing and creates nothing.
    fn status(&self, key: &str) -> impl Future<Output = Result<Status, Self::Error>> + Send;

    /// Makes a key as good as new. Resetting an unknown key is no error.
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
