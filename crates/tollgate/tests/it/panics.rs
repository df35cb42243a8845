//! A caller that panics leaves no key locked.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use tollgate::{
    Backend, Basis, Consistency, GuardConfig, Limit, LimitSettings, Rate, RateLimiter, TokenBucket,
};
use tollgate_testkit::RedisServer;

use crate::fake::{Node, run_paused, until};
use crate::run;
use crate::store::{engine, slow_bucket};

/// Panics while `call` is under way.
async fn panic_during<T>(call: impl Future<Output = T>) {
    let panicking = async { tokio::join!(call, async { panic!("a defect of the caller") }) };
    assert!(AssertUnwindSafe(panicking).catch_unwind().await.is_err());
}

#[test]
fn a_panic_of_the_caller_frees_the_key() {
    run(async {
        let server = RedisServer::start();
        let limiter = slow_bucket(&engine(&server.url()));
        limiter.try_acquire("user:1", 1).await.unwrap();
        panic_during(limiter.try_acquire("user:1", 1)).await;
        // The call was sent, and is finished by the driver.
        assert_eq!(limiter.try_acquire("user:1", 1).await.unwrap().remaining, 97);
    });
}

#[test]
fn a_panic_of_the_caller_keeps_a_key_from_no_lease() {
    run_paused(async {
        let node = Node::new(GuardConfig::default());
        node.store.set_latency(Duration::from_millis(1));
        let limit = Limit::TokenBucket(TokenBucket::new(100_000, Rate::per_second(100_000)).unwrap());
        let settings = LimitSettings { consistency: Consistency::Lease, ..LimitSettings::default() };
        let leased = node.lease.add_limit("leased", limit, &settings).unwrap();
        for _ in 0..10 {
            node.take(leased, 1).await;
            panic_during(node.take(leased, 1)).await;
        }
        until("permits are leased", async || node.take(leased, 1).await.basis == Basis::Leased).await;
    });
}
