//! Many nodes on one store: the real program, killed, added and removed; the store killed and restarted.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use tollgate_testkit::{Process, RedisServer, wait_until};

use crate::server::{Response, connect, exchange};

/// A node as a process of its own.
struct Node {
    process: Process,
    address: std::net::SocketAddr,
}

impl Node {
    fn start(store: &str) -> Self {
        Self::start_with(store, &[])
    }

    fn start_with(store: &str, settings: &[(&str, &str)]) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
        command.args(["--listen", &address.to_string(), "--store", store]);
        // What is taken stays taken, and a busy machine is no fault.
        command.env("TOLLGATE_API__DEFAULTS__TOKEN_BUCKET__REFILL_RATE", "1/1h");
        command.env("TOLLGATE_REDIS__DEADLINE", "5s");
        command.env("TOLLGATE_API__ON_STORE_FAILURE", "closed");
        command.envs(settings.iter().copied());
        let process = Process::start(&command);
        wait_until("the node listens", || std::net::TcpStream::connect(address).is_ok());
        Self { process, address }
    }

    /// One whose log is kept.
    fn start_with_log(store: &str, log: &std::path::Path) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
        command.args(["--listen", "127.0.0.1:0", "--store", store]);
        Process::start_with_log(&command, log)
    }

    fn get(&self, target: &str) -> Response {
        exchange(
            connect(self.address),
            &format!("GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"),
        )
    }

    fn take(&self, permits: u64) -> Value {
        self.get(&format!("/api/v1/rate-limit/check?key=user:1&permits={permits}")).json()
    }

    fn remaining(&self) -> Value {
        self.get("/api/v1/rate-limit/remaining?key=user:1").json()["remaining"].clone()
    }
}

#[test]
fn consumed_permits_stay_consumed_whoever_dies() {
    let mut store = RedisServer::build().tcp().append_only().start();
    let url = format!("redis://{}", store.tcp_address());
    let (mut one, mut two) = (Node::start(&url), Node::start(&url));
    assert_eq!(one.take(30)["remaining"], 70);
    assert_eq!(two.take(30)["remaining"], 40);
    // All nodes die; new ones, and one more, come with the same settings.
    one.process.kill();
    two.process.kill();
    let nodes = [Node::start(&url), Node::start(&url), Node::start(&url)];
    for node in &nodes {
        assert_eq!(node.remaining(), 40);
    }
    assert_eq!(nodes[2].take(10)["remaining"], 30);
    // One is removed; the others do not notice.
    let [one, two, three] = nodes;
    drop(three);
    assert_eq!(one.remaining(), 30);
    // The store dies, and comes back with its append-only file.
    store.kill();
    let closed = one.get("/api/v1/rate-limit/check?key=user:1");
    assert_eq!((closed.status, closed.header("x-tollgate-basis")), (503, Some("closed")));
    store.restart();
    wait_until("both nodes have found the store again", || one.remaining() == 30 && two.remaining() == 30);
    assert_eq!(two.take(31)["allowed"], false);
    assert_eq!(two.take(30)["remaining"], 0);
}

#[test]
fn a_hundred_on_one_node_and_then_on_the_others_are_exactly_a_hundred() {
    for consistency in ["strict", "lease", "lease_fast"] {
        let store = RedisServer::build().tcp().start();
        let url = format!("redis://{}", store.tcp_address());
        let settings = [("TOLLGATE_API__CONSISTENCY", consistency)];
        let nodes = [(); 3].map(|()| Node::start_with(&url, &settings));
        wait_until("the nodes know of each other", || {
            nodes.iter().all(|node| node.get("/actuator/info").json()["store"]["nodes"] == 3)
        });
        let mut admitted = 0;
        for (node, most) in nodes.iter().zip([70, 200, 200]) {
            admitted += (0..most).take_while(|_| node.take(1)["allowed"] == true).count();
        }
        assert_eq!(admitted, 100, "{consistency}");
    }
}

#[test]
fn a_node_that_borrows_says_so_and_gives_back_when_it_is_told_to_stop() {
    let store = RedisServer::build().tcp().start();
    let url = format!("redis://{}", store.tcp_address());
    let settings =
        [("TOLLGATE_API__CONSISTENCY", "lease"), ("TOLLGATE_API__DEFAULTS__TOKEN_BUCKET__CAPACITY", "10000")];
    let mut node = Node::start_with(&url, &settings);
    let mut admitted = 0;
    wait_until("it decides by what it has borrowed", || {
        let answer = node.get("/api/v1/rate-limit/check?key=user:1");
        assert_eq!(answer.status, 200);
        admitted += 1;
        answer.header("x-tollgate-basis") == Some("leased")
    });
    let metrics = node.get("/actuator/prometheus").body;
    for name in ["tollgate_lease_permits_total{", "tollgate_lease_held_permits", "basis=\"leased\""] {
        assert!(metrics.contains(name), "{name} in {metrics}");
    }
    node.process.terminate();
    assert_eq!(node.process.wait_for_end(Duration::from_secs(10)), Some(0));
    let other = Node::start_with(&url, &settings);
    assert_eq!(other.remaining(), 10_000 - admitted, "what was not spent is back");
}

#[test]
fn a_store_that_is_not_there_is_said_and_waited_for_or_required() {
    let mut store = RedisServer::build().tcp().start();
    let url = format!("redis://:s3cret@{}", store.tcp_address());
    store.kill();
    let node = Node::start(&url);
    let closed = node.get("/api/v1/rate-limit/check?key=user:1");
    assert_eq!(closed.status, 503, "{closed:?}");
    assert_eq!(closed.header("content-type"), Some("application/problem+json"));
    let problem = closed.json();
    assert!(problem["type"].as_str().unwrap().ends_with("#temporary-reduced-capacity"), "{problem}");
    assert!(!closed.body.contains("127.0.0.1"), "callers are told no addresses: {}", closed.body);
    let info = node.get("/actuator/info");
    assert_eq!(info.json()["store"]["status"], "DOWN");
    assert!(!info.body.contains("s3cret"));
    let health = node.get("/actuator/health");
    assert_eq!(health.status, 200, "the node answers by its contract");
    assert_eq!(health.json()["status"], "UP");
    assert_eq!(node.get("/actuator/info").json()["store"]["status"], "DOWN");

    let start = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .args(["--listen", "127.0.0.1:0", "--require-store", "--store", &url])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains("the store is required") && error.contains(&store.tcp_address().to_string()),
        "{error}"
    );
    assert!(!error.contains("s3cret") && output.stdout.is_empty(), "{error}");
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_store_that_may_evict_limits_is_warned_of() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let store = RedisServer::build().args(&["--maxmemory-policy", "allkeys-lru"]).start();
    let _node = Node::start_with_log(&store.url(), &log);
    wait_until("the log warns", || {
        std::fs::read_to_string(&log)
            .is_ok_and(|log| log.contains("allkeys-lru") && log.contains("noeviction"))
    });
}

#[test]
fn a_refusal_is_one_clear_line_without_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let store = RedisServer::build().tcp().users(&["user default on >right ~* +@all"]).start();
    let _node = Node::start_with_log(&format!("redis://:s3cret@{}", store.tcp_address()), &log);
    let read = || std::fs::read_to_string(&log).unwrap_or_default();
    wait_until("the log says why", || read().contains("does not accept the user name or the password"));
    assert!(!read().contains("s3cret"), "{}", read());
}
