//! Stores that drop keys when their memory is full: said at start and in the health.

use std::process::Command;

use serde_json::{Value, json};
use tollgate_testkit::{Process, RedisServer, wait_until};

use crate::server::{Server, connect, exchange};

/// What the admin listener says of a node on this store.
fn health(store: &RedisServer, settings: &str) -> Value {
    let yaml = format!(
        "listen: 0.0.0.0:0\nadmin: {{ listen: 127.0.0.1:0 }}\nstore: {}\nredis: {{ require: true{settings} }}\n",
        store.url()
    );
    let server = Server::with(&yaml);
    let request = "GET /actuator/health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n";
    exchange(connect(server.admin), request).json()
}

#[test]
fn every_maxmemory_policy_but_noeviction_is_warned_of_in_health() {
    for policy in ["volatile-ttl", "volatile-lru", "volatile-random", "allkeys-lfu"] {
        let store = RedisServer::build().args(&["--maxmemory-policy", policy]).start();
        let health = health(&store, "");
        assert_eq!(
            (&health["status"], health["warnings"].as_array().unwrap().len()),
            (&json!("UP"), 1),
            "{health}"
        );
        let warning = health["warnings"][0].as_str().unwrap();
        assert!(warning.contains(policy) && warning.contains("noeviction"), "{warning}");
    }
    assert_eq!(health(&RedisServer::start(), "")["warnings"], Value::Null);
}

#[test]
fn a_user_needs_no_more_than_info_to_be_warned_and_nothing_to_be_served() {
    let acl = "resetkeys ~rate_limiter:* resetchannels -@all +evalsha +script|load +time +ping +hmget +hset +hgetall +hdel \
               +pexpire +zadd +zcard +zcount +zrange +zrangebyscore +zrem +zremrangebyscore +del";
    let users = [format!("user without on >s3cret {acl}"), format!("user with on >s3cret {acl} +info")];
    let store = RedisServer::build()
        .args(&["--maxmemory-policy", "volatile-ttl"])
        .users(&users.each_ref().map(String::as_str))
        .start();
    let of = |user: &str| health(&store, &format!(", username: {user}, password: s3cret"));
    assert_eq!(
        (of("without")["status"].clone(), of("without")["warnings"].clone()),
        (json!("UP"), Value::Null)
    );
    assert_eq!(of("with")["warnings"].as_array().map(Vec::len), Some(1));
}

#[test]
fn an_evicting_store_is_warned_of_at_start() {
    let store = RedisServer::build().args(&["--maxmemory-policy", "volatile-lru"]).start();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["--listen", "127.0.0.1:0", "--store", &store.url()]);
    let _node = Process::start_with_log(&command, &log);
    wait_until("the log warns", || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        text.lines()
            .any(|line| line.contains("WARN") && line.contains("volatile-lru") && line.contains("noeviction"))
    });
}
