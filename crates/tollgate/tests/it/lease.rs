//! Nodes that borrow from one limit, on a real server: never more than the limit, and all of it.

use std::time::{Duration, Instant};

use tollgate::{
    Ask, Basis, Clock, Consistency, FailureMode, FixedWindow, GuardConfig, Limit, LimitSettings, Limiter,
    Micros, OnFailure, Rate, RedisConfig, RedisEngine, SharedEngine, SlidingCounter, TokenBucket, Verdict,
};
use tollgate_testkit::RedisServer;

use crate::run;

/// A node of its own.
struct Node {
    engine: RedisEngine,
    guard: SharedEngine,
    limiter: Limiter,
}

impl Node {
    async fn start(server: &RedisServer, limit: Limit, consistency: Consistency) -> Self {
        let mut config = RedisConfig::new(server.url().parse().unwrap());
        config.deadline = Duration::from_secs(2);
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        let (guard, driver) = SharedEngine::new(engine.clone(), GuardConfig::default(), Clock::system());
        tokio::spawn(driver.run());
        engine.connected(Duration::from_secs(5)).await.unwrap();
        let on_failure = OnFailure {
            mode: FailureMode::Closed,
            deadline: Some(Duration::from_millis(200)),
            ..OnFailure::default()
        };
        let settings = LimitSettings { consistency, on_failure, ..LimitSettings::default() };
        let limiter = guard.limiter("lent", limit, settings).unwrap();
        Self { engine, guard, limiter }
    }

    async fn ask(&self) -> Verdict {
        self.limiter.acquire("user:1", Ask::of(1)).await
    }

    /// Asks as fast as it is answered until it is denied, or often enough.
    async fn ask_until_denied(&self, most: u64) -> u64 {
        let mut admitted = 0;
        while admitted < most && self.ask().await.is_admitted() {
            admitted += 1;
        }
        admitted
    }
}

async fn three(server: &RedisServer, limit: Limit, consistency: Consistency) -> Vec<Node> {
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(Node::start(server, limit, consistency).await);
    }
    let end = Instant::now() + Duration::from_secs(20);
    while nodes.iter().any(|node| node.engine.nodes() != Some(3)) {
        assert!(Instant::now() < end, "the nodes do not find each other");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    nodes
}

/// So many, and next to nothing comes back.
fn bucket(permits: u64) -> Limit {
    Limit::TokenBucket(TokenBucket::new(permits, Rate::new(1, Micros::from_secs(3_600)).unwrap()).unwrap())
}

#[test]
fn a_hundred_on_one_node_and_then_on_the_others_are_exactly_a_hundred() {
    run(async {
        for (consistency, on_the_first) in
            [(Consistency::Lease, 60), (Consistency::LeaseFast, 60), (Consistency::Lease, 200)]
        {
            let server = RedisServer::start();
            let nodes = three(&server, bucket(100), consistency).await;
            let mut admitted = nodes[0].ask_until_denied(on_the_first).await;
            assert_eq!(admitted, on_the_first.min(100));
            admitted += nodes[1].ask_until_denied(200).await;
            admitted += nodes[2].ask_until_denied(200).await;
            assert_eq!(admitted, 100, "{consistency:?}: {on_the_first} on the first");
        }
    });
}

#[test]
fn unused_leases_of_one_node_go_to_other_nodes() {
    run(async {
        for consistency in [Consistency::Lease, Consistency::LeaseFast] {
            let server = RedisServer::start();
            let nodes = three(&server, bucket(3_000), consistency).await;
            let mut admitted = nodes[0].ask_until_denied(1_500).await;
            assert_eq!(admitted, 1_500);
            let end = Instant::now() + Duration::from_secs(20);
            // What a node that was held up could not give back in time is lost.
            let gone = || {
                nodes.iter().map(|node| node.guard.lease_stats()).map(|it| it.expired + it.lost).sum::<u64>()
            };
            while admitted + gone() < 3_000 {
                assert!(Instant::now() < end, "{consistency:?}: {admitted} of 3,000, {} gone", gone());
                admitted += nodes[1].ask_until_denied(3_000).await + nodes[2].ask_until_denied(3_000).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // Every request is denied now, on every node.
            for node in &nodes {
                admitted += node.ask_until_denied(10).await;
            }
            assert_eq!(admitted + gone(), 3_000, "{consistency:?}");
            let leased: u64 = nodes.iter().map(|node| node.guard.lease_stats().spent).sum();
            assert!(leased > 500, "{consistency:?}: {leased} by leases");
        }
    });
}

#[test]
fn windows_are_never_overrun() {
    let rate = Rate::new(2_000, Micros::from_millis(1_000)).unwrap();
    let limits = [
        Limit::FixedWindow(FixedWindow::new(rate).unwrap()),
        Limit::SlidingCounter(SlidingCounter::new(rate, 1, false).unwrap()),
        Limit::SlidingCounter(SlidingCounter::new(rate, 5, true).unwrap()),
    ];
    run(async {
        for limit in limits {
            let server = RedisServer::start();
            let nodes = three(&server, limit, Consistency::Lease).await;
            let end = Instant::now() + Duration::from_millis(3_200);
            let hammer = nodes.iter().map(|node| async move {
                let (mut seen, mut leased) = (Vec::new(), 0);
                while Instant::now() < end {
                    let verdict = node.ask().await;
                    if verdict.is_admitted() {
                        seen.push(verdict.decision.at.as_micros());
                        leased += u64::from(verdict.basis == Basis::Leased);
                    }
                    tokio::task::yield_now().await;
                }
                (seen, leased)
            });
            let seen = futures_util::future::join_all(hammer).await;
            let leased: u64 = seen.iter().map(|(_, leased)| leased).sum();
            let mut times: Vec<u64> = seen.into_iter().flat_map(|(times, _)| times).collect();
            times.sort_unstable();
            let windows = times.chunk_by(|a, b| a / 1_000_000 == b / 1_000_000);
            let most = windows.map(<[u64]>::len).max().unwrap();
            println!("{limit:?}: {} admitted, {leased} by leases, at most {most} in a window", times.len());
            // The store's clock and this one may show different windows around an edge.
            assert!(most <= 2_000 + 4, "{limit:?}: {most} in a window of 2,000");
            assert!(times.len() >= 4_000 && leased > 100, "{limit:?}: {} admitted", times.len());
        }
    });
}

#[test]
fn a_lease_is_spent_while_the_store_is_gone_and_then_the_failure_mode_counts() {
    run(async {
        let server = RedisServer::start();
        let limit = Limit::TokenBucket(TokenBucket::new(1_000_000, Rate::per_second(100_000)).unwrap());
        let node = Node::start(&server, limit, Consistency::Lease).await;
        let end = Instant::now() + Duration::from_secs(20);
        while node.guard.lease_stats().held < 500 {
            assert!(Instant::now() < end, "nothing is borrowed");
            node.ask().await;
            tokio::task::yield_now().await;
        }
        server.pause();
        let verdict = node.ask().await;
        assert_eq!((verdict.is_admitted(), verdict.basis), (true, Basis::Leased), "the lease is still good");
        let mut by_lease = 0;
        let verdict = loop {
            let verdict = node.ask().await;
            assert!(Instant::now() < end, "a lease does not last for ever");
            match verdict.basis {
                Basis::Leased => by_lease += u64::from(verdict.is_admitted()),
                _ => break verdict,
            }
        };
        assert_eq!((verdict.is_admitted(), verdict.basis), (false, Basis::Closed));
        println!("{by_lease} admitted without the store");
        server.resume();
        while node.ask().await.basis == Basis::Closed {
            assert!(Instant::now() < end, "it does not come back");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn leases_are_given_back_on_close() {
    run(async {
        let server = RedisServer::start();
        let nodes = three(&server, bucket(10_000), Consistency::Lease).await;
        for node in &nodes {
            assert_eq!(node.ask_until_denied(1_000).await, 1_000);
        }
        assert!(nodes.iter().any(|node| node.guard.lease_stats().held > 0), "something is held");
        for node in &nodes {
            node.guard.give_leases_back().await;
            let stats = node.guard.lease_stats();
            assert_eq!((stats.held, stats.lost), (0, 0), "{stats:?}");
            assert_eq!(stats.granted, stats.spent + stats.returned + stats.expired, "{stats:?}");
        }
        let expired: u64 = nodes.iter().map(|node| node.guard.lease_stats().expired).sum();
        let stands = nodes[0].limiter.peek("user:1", Ask::of(0)).await.decision.remaining;
        assert_eq!(stands + expired, 7_000, "{expired} expired");
        // A second time there is nothing to give back, and what is asked for now the store decides.
        nodes[0].guard.give_leases_back().await;
        assert_eq!(nodes[0].ask().await.basis, Basis::Exact);
    });
}

#[test]
fn a_reset_takes_effect_here_at_once() {
    run(async {
        let server = RedisServer::start();
        let node = Node::start(&server, bucket(1_000), Consistency::Lease).await;
        while node.ask().await.is_admitted() {}
        node.limiter.reset("user:1").await.unwrap();
        let verdict = node.ask().await;
        assert_eq!((verdict.is_admitted(), verdict.decision.remaining), (true, 999));
    });
}
