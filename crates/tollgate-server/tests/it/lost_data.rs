//! A store that loses its data: the pushed policy and the assigned tiers stay in force, and all nodes agree again.

use serde_json::{Value, json};
use tollgate_testkit::{RedisServer, wait_until};

use crate::server::Server;

const POLICY_KEY: &str = "rate_limiter:{control}:policy";
const TIERS_KEY: &str = "rate_limiter:{control}:tiers";

/// A policy by its premium tier's limit.
fn policy(premium: u64) -> String {
    format!(
        "tiers: {{ free: 10/min, premium: {premium}/min }}\nrules: [{{ name: plan, key: user, tier: from_request }}]\n"
    )
}

/// A node whose own policy gives premium users 20 a minute.
fn node(store: &RedisServer) -> Server {
    let own: String = policy(20).lines().map(|line| format!("  {line}\n")).collect();
    Server::with(&format!("store: {}\nredis: {{ deadline: 10s }}\npolicy:\n{own}", store.url()))
}

fn push(node: &Server, premium: u64) -> Value {
    let pushed = node.ask("PUT", "/admin/policy", "", &policy(premium));
    assert_eq!(pushed.status, 200, "{pushed:?}");
    pushed.json()["version"].clone()
}

fn version(node: &Server) -> Value {
    node.get("/actuator/info").json()["policy"]["version"].clone()
}

fn assign(node: &Server, user: &str) {
    let assigned = node.ask("PUT", &format!("/admin/tiers/users/{user}"), "", r#"{"tier":"premium"}"#);
    assert_eq!(assigned.status, 200, "{assigned:?}");
}

/// The limit that a user has.
fn limit(node: &Server, user: &str) -> Value {
    let explained = node.post("/api/v1/explain", &json!({ "user": user }).to_string()).json();
    explained["limits"][0]["limit"].clone()
}

fn field(store: &RedisServer, key: &str, field: &str) -> String {
    store.cli(&["HGET", key, field]).trim().to_owned()
}

/// Waits until the store holds what was written before, and asserts all the while that `holds`.
fn wait_for(store: &RedisServer, key: &str, number: &str, holds: impl Fn()) {
    wait_until("the store has it again", || {
        holds();
        field(store, key, "number") == number
    });
    holds();
}

#[test]
fn a_store_that_loses_its_data_does_not_withdraw_the_pushed_policy_or_the_assigned_tiers() {
    let store = RedisServer::start();
    let (one, two) = (node(&store), node(&store));
    let pushed = push(&one, 50);
    assign(&two, "alice");
    wait_until("both know both", || [&one, &two].iter().all(|node| limit(node, "alice") == 50));
    let (policy_number, tiers_number) =
        (field(&store, POLICY_KEY, "number"), field(&store, TIERS_KEY, "number"));
    for _ in 0..2 {
        store.cli(&["FLUSHALL"]);
        let hold = || {
            for node in [&one, &two] {
                assert_eq!((version(node), limit(node, "alice")), (pushed.clone(), json!(50)));
            }
        };
        wait_for(&store, POLICY_KEY, &policy_number, hold);
        wait_for(&store, TIERS_KEY, &tiers_number, hold);
    }
    assert_eq!(field(&store, TIERS_KEY, "members"), "1");
    // A node that comes later goes by the same.
    let three = node(&store);
    assert_eq!((version(&three), limit(&three, "alice")), (pushed, json!(50)));
    // What is written back can be changed and withdrawn like what was pushed.
    let other = push(&three, 70);
    wait_until("all have the new one", || [&one, &two, &three].iter().all(|node| version(node) == other));
}

#[test]
fn after_a_flush_and_another_push_all_nodes_go_by_the_same_policy() {
    let store = RedisServer::start();
    let nodes = [node(&store), node(&store)];
    for premium in [30, 40, 50] {
        let pushed = push(&nodes[0], premium);
        wait_until("both have it", || nodes.iter().all(|node| version(node) == pushed));
        store.cli(&["FLUSHALL"]);
        // By a node that has never heard of the lost policy, or has: it may have been written back by now.
        let newcomer = node(&store);
        let by = if premium == 40 { &nodes[1] } else { &newcomer };
        let pushed = push(by, premium + 1);
        wait_until("all have the new one", || {
            nodes.iter().chain([&newcomer]).all(|node| version(node) == pushed)
        });
    }
}

#[test]
fn a_withdrawal_leaves_its_number_in_the_store_and_is_not_undone_by_a_loss() {
    let store = RedisServer::start();
    let (one, two) = (node(&store), node(&store));
    let own = version(&one);
    let pushed = push(&one, 50);
    wait_until("the other has it", || version(&two) == pushed);
    assert_eq!(two.ask("DELETE", "/admin/policy", "", "").status, 200);
    wait_until("it is withdrawn", || version(&one) == own);
    let number = field(&store, POLICY_KEY, "number");
    assert_eq!((number.is_empty(), field(&store, POLICY_KEY, "text").as_str()), (false, ""));
    store.cli(&["FLUSHALL"]);
    wait_for(&store, POLICY_KEY, &number, || {
        assert_eq!([version(&one), version(&two)], [own.clone(), own.clone()]);
    });
    assert_eq!(field(&store, POLICY_KEY, "text"), "");
}

#[test]
fn a_store_that_falls_back_to_an_older_policy_gets_the_newest_known_one_back() {
    let store = RedisServer::start();
    let nodes = [node(&store), node(&store)];
    push(&nodes[0], 30);
    let saved = ["number", "epoch", "text"].map(|name| (name, field(&store, POLICY_KEY, name)));
    let pushed = push(&nodes[1], 50);
    wait_until("both have the newer one", || nodes.iter().all(|node| version(node) == pushed));
    let number = field(&store, POLICY_KEY, "number");
    // As after a failover to a replica that had not heard of the second push.
    for (name, value) in saved {
        store.cli(&["HSET", POLICY_KEY, name, &value]);
    }
    wait_for(&store, POLICY_KEY, &number, || {
        nodes.iter().for_each(|node| assert_eq!(version(node), pushed));
    });
}

#[test]
fn a_push_by_a_node_of_an_earlier_version_is_followed() {
    let store = RedisServer::start();
    let one = node(&store);
    let (older, newer) = (push(&one, 30), push(&one, 50));
    // It counts on, and knows nothing of epochs.
    let text = policy(30);
    store.cli(&[
        "EVAL",
        "redis.call('HSET', KEYS[1], 'number', redis.call('HGET', KEYS[1], 'number') + 1, 'text', ARGV[1])",
        "1",
        POLICY_KEY,
        &text,
    ]);
    wait_until("it is in force", || version(&one) == older);
    store.cli(&[
        "EVAL",
        "redis.call('HSET', KEYS[1], 'number', redis.call('HGET', KEYS[1], 'number') + 1, 'text', '')",
        "1",
        POLICY_KEY,
    ]);
    wait_until("it is withdrawn", || ![&older, &newer].contains(&&version(&one)));
}

#[test]
fn a_tier_assigned_after_a_loss_does_not_replace_the_tiers_that_were_lost() {
    let store = RedisServer::start();
    let (one, two) = (node(&store), node(&store));
    // More than one call writes back.
    let users: Vec<_> = (0..450).map(|n| format!("user-{n}")).collect();
    users.iter().for_each(|user| assign(&one, user));
    wait_until("the other knows all", || limit(&two, "user-449") == 20);
    store.cli(&["FLUSHALL"]);
    assign(&two, "alice");
    wait_until("the first knows the new one", || limit(&one, "alice") == 20);
    assert_eq!(field(&store, TIERS_KEY, "members"), "451");
    let three = node(&store);
    for node in [&one, &two, &three] {
        assert!(users.iter().all(|user| limit(node, user) == 20));
    }
    assert_eq!(store.cli(&["KEYS", "*{control}*"]).lines().count(), 1, "no part is left behind");
}

#[test]
fn the_documented_privileges_suffice_to_write_the_policy_and_the_tiers_back() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/redis.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let line = docs.lines().find(|line| line.starts_with("ACL SETUSER tollgate")).unwrap();
    let store = RedisServer::build().tcp().start();
    let words: Vec<_> = line.split(' ').collect();
    assert_eq!(store.cli(&words).trim(), "OK");
    let own: String = policy(20).lines().map(|line| format!("  {line}\n")).collect();
    let url = format!("redis://tollgate:PASSWORD@{}", store.tcp_address());
    let node = Server::with(&format!("store: {url}\nredis: {{ deadline: 10s }}\npolicy:\n{own}"));
    push(&node, 50);
    assign(&node, "alice");
    let numbers = || [POLICY_KEY, TIERS_KEY].map(|key| field(&store, key, "number"));
    let before = numbers();
    store.cli(&["FLUSHALL"]);
    wait_until("the store has both again", || numbers() == before);
}
