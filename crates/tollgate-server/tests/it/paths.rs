//! Paths that servers read in different ways, and conditions on values that are absent.

use serde_json::{Value, json};

use crate::server::Server;

/// The rules of the limits that a request was checked against.
fn rules(server: &Server, request: &Value) -> Vec<String> {
    let answer = server.post("/api/v1/check", &request.to_string()).json();
    let limits = answer["limits"].as_array().unwrap_or_else(|| panic!("{answer}"));
    limits.iter().map(|limit| limit["rule"].as_str().unwrap().to_owned()).collect()
}

fn at(path: &str) -> Value {
    json!({ "ip": "192.0.2.1", "path": path })
}

#[test]
fn no_spelling_of_a_path_escapes_its_rule() {
    let spellings = [
        "/api/login%2f",
        "/api/login%2F",
        "/api%2flogin",
        "/api\\login",
        "/api/login%5c",
        "/api/login%20",
        "/api/login%09",
        "/api/login%00",
        "/api/login ",
        "/api/login;v=1",
        "/api/login%3bv=1",
        "/api/%6cogin",
        "/api/%256cogin",
        "/api/x/..%2flogin",
        "/api/x/..;/login",
        "/api//login/.",
        "/x#/../api/login",
        "/x%23/../api/login",
        "/api/login%23x",
        "/api/login%3fx",
        "/api/login%253Fx/y",
        "/api/login%00x",
    ];
    let server = Server::with(
        "policy:\n  rules:\n    - { name: login, match: { path: /api/login }, key: ip, limit: 22/min }\n",
    );
    for path in spellings {
        assert_eq!(rules(&server, &at(path)), ["login"], "{path}");
    }
    let denied = server.post("/api/v1/check", &at("/api/login%2f").to_string());
    assert_eq!(denied.status, 429, "all spellings share one limit");
}

const FREEDOM: &str = "policy:
  exclude: [/api/health, /static/**]
  default: 1000/min
  rules:
    - { name: open, match: { path: /open/** }, unlimited: true, stop: true }
    - { name: login, match: { path: /api/login/** }, key: ip, limit: 1000/min }
";

#[test]
fn exclusions_and_unlimited_rules_match_only_paths_in_plain_form() {
    let server = Server::with(FREEDOM);
    for path in ["/api/health", "/api/health/", "/api/health?a=%2f..;", "/static/.well-known/a.b", "/open/a"]
    {
        assert!(rules(&server, &at(path)).is_empty(), "{path}");
    }
    for (path, expected) in [
        ("/api/login/..;/health", &["login", "default"][..]),
        ("/api/login/../health", &["login", "default"]),
        ("/api/health%20", &["default"]),
        ("/api/%68ealth", &["default"]),
        ("/api\\health", &["default"]),
        ("//api/health", &["default"]),
        ("/static/a%20b", &["default"]),
        ("/open/a;b", &["default"]),
        ("/open/..%2fapi/login", &["login", "default"]),
        ("/open/..;/api/login", &["login", "default"]),
    ] {
        assert_eq!(rules(&server, &at(path)), expected, "{path}");
    }
}

#[test]
fn a_generous_rule_with_stop_does_not_hide_a_strict_one_for_another_reading_of_the_path() {
    let server = Server::with(
        "policy:
  rules:
    - { name: public, match: { path: /public/** }, key: ip, limit: 1000/min, stop: true }
    - { name: login, match: { path: /api/login }, key: ip, limit: 5/min }
",
    );
    assert_eq!(rules(&server, &at("/public/a%20b")), ["public"]);
    assert_eq!(rules(&server, &at("/public/..%2fapi/login")), ["public", "login"]);
    assert_eq!(rules(&server, &at("/public/..;/api/login")), ["public", "login"]);
}

#[test]
fn paths_differ_by_case_unless_the_policy_ignores_it() {
    let policy = |setting: &str| {
        format!(
            "policy:\n  {setting}\n  exclude: [/Health]\n  rules:\n    - {{ name: login, match: {{ path: /api/Login }}, key: ip, limit: 9/min }}\n"
        )
    };
    for setting in ["", "case_sensitive: true"] {
        let server = Server::with(&policy(setting));
        assert_eq!(rules(&server, &at("/api/Login")), ["login"]);
        assert!(rules(&server, &at("/API/login")).is_empty());
    }
    let server = Server::with(&policy("case_sensitive: false"));
    for path in ["/api/Login", "/api/login", "/API/LOGIN%2F"] {
        assert_eq!(rules(&server, &at(path)), ["login"], "{path}");
    }
    let excluded = server.post("/api/v1/explain", &at("/hEALTH").to_string()).json();
    assert_eq!(excluded["excluded"], true);
}

#[test]
fn a_negated_condition_holds_when_the_value_is_absent() {
    let server = Server::with(
        "policy:
  rules:
    - { name: not-ours, match: { header: { x-client: '!ours' } }, key: ip, limit: 9/min }
    - { name: some-other, match: { query: { v: ['*', '!1'] } }, key: ip, limit: 9/min }
",
    );
    let with = |headers: Value, query: Value| {
        rules(&server, &json!({ "ip": "192.0.2.1", "headers": headers, "query": query }))
    };
    assert_eq!(with(json!({}), json!({})), ["not-ours"], "leaving the header out escapes nothing");
    assert_eq!(with(json!({ "X-Client": "" }), json!({})), ["not-ours"]);
    assert_eq!(with(json!({ "X-Client": "theirs" }), json!({ "v": "2" })), ["not-ours", "some-other"]);
    assert!(with(json!({ "X-Client": "ours" }), json!({ "v": "1" })).is_empty());
}
