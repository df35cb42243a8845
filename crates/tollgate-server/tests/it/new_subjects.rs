//! A bound on new subjects: beyond it, unknown subjects share one bucket, and no client escapes its limit.

use serde_json::{Value, json};
use tollgate::Micros;
use tollgate_testkit::RedisServer;

use crate::server::{Response, Server};

/// Three permits for each user, and five new users in a second.
fn policy(limit: &str) -> String {
    format!("rules: [{{ name: per-user, key: user, limit: {limit}, max_new_subjects: 5/s }}]\n")
}

fn node(store: &RedisServer) -> Server {
    let (url, policy) = (store.url(), policy("3/h"));
    Server::with(&format!("store: {url}\nredis: {{ deadline: 10s }}\npolicy:\n  {policy}"))
}

fn take(server: &Server, user: &str) -> Response {
    server.post("/api/v1/check", &json!({ "user": user }).to_string())
}

/// How many of so many requests of one user are admitted.
fn admitted(server: &Server, user: &str, requests: usize) -> usize {
    (0..requests).filter(|_| take(server, user).status == 200).count()
}

fn counted_by(response: &Response) -> Value {
    response.json()["limits"][0]["key"].clone()
}

/// Uses up the bound of this second with users of this name.
fn flood(server: &Server, name: &str) {
    for n in 0..5 {
        assert_eq!(counted_by(&take(server, &format!("{name}{n}"))), json!(format!("user:{name}{n}")));
    }
}

#[test]
fn subjects_beyond_the_bound_share_one_bucket_and_known_ones_keep_theirs() {
    let store = RedisServer::start();
    let server = node(&store);
    flood(&server, "known");
    let flooded: Vec<_> = (0..200).map(|n| take(&server, &format!("invented{n}"))).collect();
    assert!(flooded.iter().all(|response| counted_by(response) == "shared"));
    assert_eq!(
        flooded.iter().filter(|response| response.status == 200).count(),
        3,
        "the rule's own limit, for all together"
    );
    for n in 0..5 {
        assert_eq!(admitted(&server, &format!("known{n}"), 4), 2, "what is left of three");
    }
    let keys = store.cli(&["KEYS", "rate_limiter:*:per-user:*"]);
    assert_eq!(keys.lines().count(), 6, "200 invented users take the room of one: {keys}");
    let metrics = server.get("/actuator/prometheus").body;
    assert!(metrics.contains("tollgate_shared_subjects_total{application=\"distributed-rate-limiter\"} 200"));
    server.clock.advance(Micros::from_secs(1));
    assert_eq!(admitted(&server, "invented0", 4), 3, "a second later it may be known");
}

#[test]
fn a_client_that_is_sent_to_the_shared_bucket_and_back_gets_no_more_than_both_limits() {
    let store = RedisServer::start();
    let (one, two) = (node(&store), node(&store));
    assert_eq!(admitted(&one, "alice", 10), 3, "of her own");
    // The other node has never heard of her.
    flood(&two, "other");
    assert_eq!(admitted(&two, "alice", 10), 3, "of the shared bucket");
    for _ in 0..3 {
        for node in [&one, &two] {
            node.clock.advance(Micros::from_secs(1));
            assert_eq!(admitted(node, "alice", 10), 0, "both are used up, on every node");
        }
    }
    flood(&two, "more");
    assert_eq!(admitted(&two, "mallory", 10), 0, "the shared bucket is one for all");
}

#[test]
fn known_subjects_stay_known_when_the_policy_changes_and_explaining_makes_none_known() {
    let store = RedisServer::start();
    let server = node(&store);
    for n in 0..20 {
        let explained = server.post("/api/v1/explain", &json!({ "user": format!("asked{n}") }).to_string());
        assert_eq!(explained.json()["limits"][0]["key"], json!(format!("user:asked{n}")));
    }
    flood(&server, "known");
    assert_eq!(server.ask("PUT", "/admin/policy", "", &policy("4/h")).status, 200);
    assert_eq!(counted_by(&take(&server, "known0")), "user:known0");
    assert_eq!(counted_by(&take(&server, "late")), "shared");
    let explained = server.post("/api/v1/explain", r#"{"user":"late"}"#).json();
    assert_eq!(explained["limits"][0]["key"], "shared");
}

#[test]
fn the_bound_may_be_set_for_all_rules_and_wrong_ones_are_refused() {
    let all = "max_new_subjects: 1/s\nrules:\n  - { name: one, key: user, limit: 3/h }\n  - { name: two, key: user, limit: 3/h, max_new_subjects: 5/s }\n";
    let indented: String = all.lines().map(|line| format!("  {line}\n")).collect();
    let server = Server::with(&format!("policy:\n{indented}"));
    take(&server, "first");
    let limits = take(&server, "second").json()["limits"].clone();
    assert_eq!([&limits[0]["key"], &limits[1]["key"]], ["shared", "user:second"]);
    for wrong in ["1000/min", "0/s", "many", "-1/s"] {
        let text = format!("max_new_subjects: {wrong}\nrules: []\n");
        let refused = server.ask("PUT", "/admin/policy", "", &text);
        assert_eq!(refused.status, 422, "{wrong}");
        assert!(refused.json()["detail"].as_str().unwrap().contains("such as 1000/s"), "{refused:?}");
    }
}
