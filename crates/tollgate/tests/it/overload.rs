//! A store that can be reached but does not decide never makes a limit fail open: overloading it buys no free pass.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tollgate::{
    Ask, Basis, BreakerState, FailureMode, GuardConfig, Limiter, RedisConfig, SharedEngine, Version,
};
use tollgate_testkit::{Network, RedisServer};

use crate::guard::{guard_with, limiter, take, until};
use crate::run;

fn hasty(config: &mut RedisConfig) {
    config.deadline = Duration::from_millis(20);
    config.connect_timeout = Duration::from_millis(300);
}

/// A guard of the only node, and a limit of 100 that fails open, on a store that has decided.
async fn fails_open(server: &RedisServer, user: &str) -> (SharedEngine, Limiter) {
    let url = format!("redis://{user}{}", server.tcp_address());
    let guard = guard_with(&url, GuardConfig::default(), hasty);
    let open = limiter(&guard, FailureMode::Open);
    until("the store has counted this node", async || {
        take(&open, 0).await.1 == Basis::Exact && guard.redis().nodes() == Some(1)
    })
    .await;
    (guard, open)
}

/// Checks one after another until something is seen, and a hundred more. Returns how many were admitted without the store.
async fn flood(limiter: &Limiter, what: &str, is_seen: impl Fn() -> bool) -> u64 {
    let (start, mut admitted, mut after) = (Instant::now(), 0, 0);
    while after < 100 {
        let (is_admitted, basis, _) = take(limiter, 1).await;
        assert_ne!(basis, Basis::Open, "{what}");
        assert!(!(is_admitted && basis == Basis::Exact), "{what}: the store decides nothing");
        admitted += u64::from(is_admitted);
        // Answers without the store are there at once: the driver has its turn here.
        tokio::task::yield_now().await;
        after += u64::from(is_seen());
        assert!(start.elapsed() < Duration::from_secs(20), "waited until {what}");
    }
    admitted
}

#[test]
fn a_stopped_store_never_fails_open() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let (guard, open) = fails_open(&server, "").await;
        server.pause();
        // The silent connection is given up, and a new one is accepted by the system but not answered.
        let admitted = flood(&open, "a new connection is not answered either", || {
            guard.redis().health().is_err_and(|why| why.to_string().contains("within 300 ms"))
        })
        .await;
        assert_eq!(admitted, 100, "the only node has the whole limit as its share");
        server.resume();
        until("the store decides again", async || take(&open, 0).await.1 == Basis::Exact).await;
    });
}

#[test]
fn a_store_that_answers_with_an_error_never_fails_open() {
    for (setting, broken, mended) in [("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")] {
        run(async {
            let server = RedisServer::build().tcp().args(&["--maxmemory-policy", "noeviction"]).start();
            let (guard, open) = fails_open(&server, "").await;
            server.cli(&["CONFIG", "SET", setting, broken]);
            let is_open = || guard.redis().servers()[0].opened > 0;
            assert_eq!(flood(&open, "the breaker has opened", is_open).await, 100, "{setting}");
            server.cli(&["CONFIG", "SET", setting, mended]);
            until("the store decides again", async || take(&open, 0).await.1 == Basis::Exact).await;
        });
    }
}

#[test]
fn a_store_without_room_for_clients_never_fails_open() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let (guard, open) = fails_open(&server, "").await;
        // The one client that there is room for, and that sends the others away.
        let mut last = std::net::TcpStream::connect(server.tcp_address()).unwrap();
        last.write_all(b"CONFIG SET maxclients 1\r\nCLIENT KILL TYPE normal SKIPME yes\r\n").unwrap();
        last.read_exact(&mut [0; "+OK\r\n:1\r\n".len()]).unwrap();
        let admitted = flood(&open, "a new connection is refused for want of room", || {
            guard.redis().health().is_err_and(|why| why.to_string().contains("max number of clients"))
        })
        .await;
        assert_eq!(admitted, 100);
    });
}

#[test]
fn refused_connections_or_credentials_use_the_failure_mode() {
    run(async {
        let mut server = RedisServer::build().tcp().users(&["user default on >s3cret ~* &* +@all"]).start();
        let (_guard, open) = fails_open(&server, ":s3cret@").await;
        server.cli(&["-a", "s3cret", "ACL", "SETUSER", "default", "resetpass", ">an0ther"]);
        server.cli(&["-a", "an0ther", "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        until("the password is refused", async || take(&open, 100).await == (true, Basis::Open, 100)).await;
        assert_eq!(take(&open, 100).await, (true, Basis::Open, 100));
        server.kill();
        until("connections are refused", async || take(&open, 100).await.1 == Basis::Open).await;
        assert_eq!(take(&open, 100).await, (true, Basis::Open, 100));
    });
}

#[test]
fn cut_link_uses_the_failure_mode_once_no_connection_can_be_opened() {
    if !Network::is_available() {
        return;
    }
    run(async {
        let network = Network::new();
        let place = network.place();
        let server = RedisServer::build().place(&place).start();
        let (_guard, open) = fails_open(&server, "").await;
        place.cut();
        let start = Instant::now();
        let second = tokio::time::sleep(Duration::from_secs(1));
        until("it fails open", async || {
            let basis = take(&open, 0).await.1;
            assert_ne!(basis, Basis::Exact);
            basis == Basis::Open
        })
        .await;
        let took = start.elapsed();
        // A timer of this process shows how much of it is the machine's delay.
        second.await;
        assert!(took <= start.elapsed() + Duration::from_secs(1), "{took:?}");
    });
}

#[test]
fn calls_that_time_out_in_one_stall_do_not_open_the_breaker() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let (guard, open) = fails_open(&server, "").await;
        server.pause();
        let keys: Vec<_> = (0..200).map(|key| format!("user:{key}")).collect();
        let verdicts = join_all(keys.iter().map(|key| open.acquire(key, Ask::of(1)))).await;
        assert!(verdicts.iter().all(|verdict| verdict.basis == Basis::Local));
        server.resume();
        let status = &guard.redis().servers()[0];
        assert_eq!((status.breaker, status.opened), (BreakerState::Closed, 0));
    });
}

#[test]
fn every_check_is_answered_within_its_deadline() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let deadline = Duration::from_millis(20);
        let (_guard, open) = fails_open(&server, "").await;
        server.pause();
        for _ in 0..50 {
            let start = Instant::now();
            let timer = async {
                tokio::time::sleep(deadline).await;
                start.elapsed()
            };
            let check = async {
                take(&open, 1).await;
                start.elapsed()
            };
            // Both wait in this process at the same time: what delays one delays the other.
            let (timer, check) = tokio::join!(timer, check);
            assert!(check <= timer + deadline / 2, "answered after {check:?}, the timer after {timer:?}");
        }
    });
}

/// The accept queue of a stopped server is soon full, and no client can connect any more.
#[test]
fn a_store_that_stays_stopped_never_fails_open() {
    run(async {
        let server = RedisServer::build().tcp().args(&["--tcp-backlog", "1"]).start();
        let (_guard, open) = fails_open(&server, "").await;
        server.pause();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(6) {
            let (_, basis, _) = take(&open, 1).await;
            assert_ne!(basis, Basis::Open, "after {:?}", start.elapsed());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        server.resume();
        until("the store decides again", async || take(&open, 0).await.1 == Basis::Exact).await;
    });
}

#[test]
fn store_that_fails_every_check_is_unhealthy_however_rarely_it_is_asked() {
    run(async {
        let server = RedisServer::build().tcp().args(&["--maxmemory-policy", "noeviction"]).start();
        let (guard, open) = fails_open(&server, "").await;
        assert!(guard.health().is_ok());
        server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
        assert_eq!(take(&open, 1).await.1, Basis::Local);
        // Policies are polled meanwhile, which a full server still answers.
        let control = guard.redis().control();
        for _ in 0..12 {
            assert!(control.news(&Version::default(), &Version::default()).await.is_ok());
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(guard.health().is_err_and(|why| why.to_string().contains("OOM")));
        }
        server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
        until("the store is well", async || guard.health().is_ok()).await;
    });
}
