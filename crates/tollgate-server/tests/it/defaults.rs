//! What compact limits mean, and what becomes of requests that no rule applies to or that lack a key.

use serde_json::{Value, json};
use tollgate::Micros;

use crate::cli::run;
use crate::server::{Response, Server};

fn with(policy: &str) -> Server {
    let indented: String = policy.lines().map(|line| format!("  {line}\n")).collect();
    Server::with(&format!("policy:\n{indented}"))
}

fn check(server: &Server, request: &Value) -> Response {
    server.post("/api/v1/check", &request.to_string())
}

fn allowed_of(server: &Server, count: usize, request: &Value) -> usize {
    (0..count).filter(|_| check(server, request).status == 200).count()
}

#[test]
fn a_compact_limit_is_a_sliding_counter_unless_it_has_burst_refill_or_algorithm() {
    let server = with(
        "rules:
  - { name: plain, key: user, limit: 100/min }
  - { name: fields, key: user, limit: { limit: 100/min } }
  - { name: strict, key: user, limit: { limit: 100/min, strict: true } }
  - { name: burst, key: user, limit: 50/s burst 100 }
  - { name: field, key: user, limit: { limit: 50/s, burst: 100 } }
  - { name: refill, key: user, limit: { limit: 50/s, refill: greedy } }
  - { name: named, key: user, limit: 100/min, algorithm: FIXED_WINDOW }
  - { name: both, key: user, limit: 50/s burst 100, algorithm: LEAKY_BUCKET }
default: 200/min
",
    );
    let answer = check(&server, &json!({ "user": "alice" })).json();
    let algorithms: Vec<_> =
        answer["limits"].as_array().unwrap().iter().map(|it| it["algorithm"].as_str().unwrap()).collect();
    let (counter, bucket) = ("SLIDING_WINDOW_COUNTER", "TOKEN_BUCKET");
    assert_eq!(
        algorithms,
        [counter, counter, counter, bucket, bucket, bucket, "FIXED_WINDOW", "LEAKY_BUCKET"],
        "{answer}"
    );
    let plain = server.get("/api/v1/rate-limit/check?key=a").json();
    assert_eq!(plain["algorithm"], bucket, "the plain API keeps its defaults");
}

#[test]
fn a_steady_flood_gets_about_the_limit_from_the_first_minute_on() {
    let flooded = |limit: &str| -> Vec<usize> {
        let server = with(&format!("rules: [{{ name: r, key: user, limit: {limit} }}]"));
        // From the first second of a minute of the clock on.
        server.clock.advance(Micros::from_secs(29));
        let minute = || {
            (0..60)
                .map(|_| {
                    server.clock.advance(Micros::from_secs(1));
                    allowed_of(&server, 5, &json!({ "user": "alice" }))
                })
                .sum()
        };
        (0..3).map(|_| minute()).collect()
    };
    let minutes = flooded("100/min");
    assert!(minutes.iter().all(|minute| (90..=110).contains(minute)), "{minutes:?}");
    let bucket = flooded("100/min burst 100");
    assert!(bucket[0] >= 195, "a full bucket lets nearly twice the limit through at first: {bucket:?}");
}

#[test]
fn bursts_around_an_edge_reach_199_of_100_a_minute_and_100_if_strict() {
    for (limit, most) in [("100/min", 199), ("{ limit: 100/min, strict: true }", 100)] {
        let server = with(&format!("rules: [{{ name: r, key: user, limit: {limit} }}]"));
        let request = json!({ "user": "alice" });
        // The last microsecond of a minute, and the last but one of the next: less than a minute apart.
        server.clock.advance(Micros::new(30_000_000 - 1));
        let first = allowed_of(&server, 101, &request);
        server.clock.advance(Micros::new(60_000_000 - 1));
        assert_eq!((first, first + allowed_of(&server, 101, &request)), (100, most), "{limit}");
    }
}

#[test]
fn policy_check_prints_what_every_limit_lets_through() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    let policy = "tiers: { free: 60/h burst 10, pro: [{ limit: 1000/min, algorithm: TOKEN_BUCKET }, 20/s], big: unlimited }
default_tier: free
endpoints: { export: { path: /export } }
rules:
  - { name: api, key: ip, limit: 100/min, candidate: 5/s }
  - { name: login, key: ip, limit: { limit: 100/min, strict: true } }
  - { name: window, key: ip, limit: 100/min, algorithm: FIXED_WINDOW }
  - { name: log, key: ip, limit: 100/min, algorithm: SLIDING_WINDOW }
  - { name: interval, key: ip, limit: { limit: 20/10s, refill: interval } }
  - { name: meter, key: ip, limit: 50/s burst 200, algorithm: LEAKY_BUCKET }
  - { name: queue, key: ip, limit: { limit: 50/s, burst: 200, algorithm: LEAKY_BUCKET, queue: true } }
  - { name: daily, key: ip, limit: { quota: 1000/day } }
  - { name: monthly, key: ip, limit: { quota: 1000/month } }
  - { name: plan, key: user, tier: from_request, factor: { export: 1/10 } }
";
    std::fs::write(&file, policy).unwrap();
    let (code, out, error) = run(&["policy", "check", file.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{error}");
    let lines: Vec<_> = out.lines().skip(1).collect();
    let expected = [
        "what each limit lets through, in permits:",
        "  api: SLIDING_WINDOW_COUNTER: 100 at once, 1.667 per second sustained, at most 199 in any 60s (100 with `strict: true`)",
        "  api, candidate: SLIDING_WINDOW_COUNTER: 5 at once, 5 per second sustained, at most 9 in any 1s (5 with `strict: true`)",
        "  login: SLIDING_WINDOW_COUNTER: 100 at once, 1.515 per second sustained, at most 100 in any 60s",
        "  window: FIXED_WINDOW: 100 at once, 1.667 per second sustained, at most 200 in any 60s",
        "  log: SLIDING_WINDOW: 100 at once, 1.667 per second sustained, at most 100 in any 60s",
        "  interval: TOKEN_BUCKET: 20 at once, 2 per second sustained, at most 40 in any 10s",
        "  meter: LEAKY_BUCKET: 200 at once, 50 per second sustained, at most 250 in any 1s",
        "  queue: LEAKY_BUCKET: 1 at once, 50 per second sustained, at most 51 in any 1s",
        "  daily: calendar quota per day of UTC: 1000 at once, 0.01157 per second sustained, at most 2000 in any 23h",
        "  monthly: calendar quota per month of UTC: 1000 at once, 0.0003803 per second sustained, at most 2000 in any 28d",
        "  plan of free: TOKEN_BUCKET: 10 at once, 0.01667 per second sustained, at most 70 in any 3600s",
        "  plan of pro: TOKEN_BUCKET: 1000 at once, 16.67 per second sustained, at most 2000 in any 60s",
        "  plan of pro, limit 2: SLIDING_WINDOW_COUNTER: 20 at once, 20 per second sustained, at most 39 in any 1s (20 with `strict: true`)",
        "  plan of free at export: TOKEN_BUCKET: 1 at once, 0.001667 per second sustained, at most 7 in any 3600s",
        "  plan of pro at export: TOKEN_BUCKET: 100 at once, 1.667 per second sustained, at most 200 in any 60s",
        "  plan of pro at export, limit 2: SLIDING_WINDOW_COUNTER: 2 at once, 2 per second sustained, at most 3 in any 1s (2 with `strict: true`)",
        "plan: requests without a user are not limited by this rule; add ip to its key (`key: [user, ip]`) or set `deny_empty_key: 403`",
        "no `default`: requests that no rule applies to are admitted, and counted as unmatched",
    ];
    assert_eq!(lines, expected, "{out}");
    std::fs::write(&file, format!("{policy}default: 200/min\n")).unwrap();
    let (_, out, _) = run(&["policy", "check", file.to_str().unwrap()]);
    assert!(
        !out.contains("no `default`") && out.contains("  default: SLIDING_WINDOW_COUNTER: 200 at once"),
        "{out}"
    );
}

#[test]
fn the_printed_sustained_rate_of_a_strict_counter_is_what_a_flood_gets() {
    let server = with("rules: [{ name: r, key: user, limit: { limit: 100/min, strict: true } }]");
    // Ten times as long as the printed 66 s in which it lets 100 through.
    let admitted: usize = (0..660)
        .map(|_| {
            server.clock.advance(Micros::from_secs(1));
            allowed_of(&server, 1, &json!({ "user": "alice", "permits": 10 })) * 10
        })
        .sum();
    assert!((990..=1_100).contains(&admitted), "{admitted} of 1,000");
}

#[test]
fn without_a_default_unmatched_requests_are_admitted_and_counted() {
    let server = with("rules: [{ name: login, match: { path: /api/login }, key: ip, limit: 5/min }]");
    for _ in 0..205 {
        let answer = check(&server, &json!({ "ip": "192.0.2.1", "path": "/else" }));
        let body = answer.json();
        assert_eq!((answer.status, &body["limits"], &body["unmatched"]), (200, &json!([]), &json!(true)));
    }
    let limited = check(&server, &json!({ "ip": "192.0.2.1", "path": "/api/login" })).json();
    assert_eq!(limited["unmatched"], Value::Null);
    let counted = "tollgate_policy_unmatched_total{application=\"distributed-rate-limiter\"} 205\n";
    let metrics = server.get("/actuator/prometheus").body;
    assert!(metrics.contains(counted), "{metrics}");
    let unlimited = with("default: unlimited\nrules: []");
    let answer = check(&unlimited, &json!({ "ip": "192.0.2.1" })).json();
    assert_eq!((&answer["allowed"], &answer["unmatched"]), (&json!(true), &Value::Null), "that was written");
}

#[test]
fn the_default_of_the_example_policy_is_reachable() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/policy.yaml");
    let server = Server::with(&format!("policy: {example}\n"));
    let page = json!({ "ip": "192.0.2.1", "path": "/about" });
    assert_eq!(allowed_of(&server, 200, &page), 200);
    let denied = check(&server, &page);
    assert_eq!((denied.status, &denied.json()["rule"]), (429, &json!("default")));
    // The login is strict, and the tiers are the buckets of the specification.
    let login =
        json!({ "ip": "192.0.2.2", "path": "/api/login", "method": "POST", "user": "alice", "tier": "pro" });
    let explained = server.post("/api/v1/explain", &login.to_string()).json();
    let limit = |rule: &str| {
        let limits = explained["limits"].as_array().unwrap();
        limits.iter().find(|it| it["rule"] == rule).unwrap().clone()
    };
    let arithmetic = limit("login")["arithmetic"].as_str().unwrap().to_owned();
    assert!(arithmetic.contains("the oldest counts in full"), "{arithmetic}");
    assert_eq!(
        (&limit("plan")["algorithm"], &limit("plan")["limit"]),
        (&json!("TOKEN_BUCKET"), &json!(1000))
    );
}

#[test]
fn a_request_without_an_address_never_counts_for_the_callers_own() {
    let server = with(
        "default: 200/min
rules:
  - { name: per-ip, match: { path: /api }, key: ip, limit: 3/min }
  - { name: insists, match: { path: /strict }, key: ip, limit: 3/min, deny_empty_key: 403 }
",
    );
    for number in 0..205 {
        let answer = check(&server, &json!({ "user": format!("user-{number}"), "path": "/" }));
        let body = answer.json();
        assert_eq!(
            (answer.status, &body["limits"], &body["skippedRules"]),
            (200, &json!([]), &json!(["default"]))
        );
    }
    for request in [json!({ "path": "/api" }), json!({ "path": "/api", "ip": null })] {
        assert_eq!(allowed_of(&server, 5, &request), 5);
        assert_eq!(check(&server, &request).json()["skippedRules"], json!(["per-ip", "default"]));
    }
    let refused = check(&server, &json!({ "path": "/strict" }));
    assert_eq!((refused.status, &refused.json()["code"]), (403, &json!("EMPTY_KEY")));
    let from_loopback = json!({ "path": "/api", "ip": "127.0.0.1" });
    assert_eq!(allowed_of(&server, 4, &from_loopback), 3, "the address of the calls has all of its own");
}

#[test]
fn skipped_rules_are_named_in_answers_and_counted() {
    let server = with(
        "rules:
  - { name: per-user, key: user, limit: 9/min }
  - { name: per-tenant, key: 'header:x-tenant', limit: 9/min }
  - { name: other-path, match: { path: /other }, key: api_key, limit: 9/min }
  - { name: dark, key: api_key, limit: 9/min, mode: shadow }
  - { name: per-ip, key: [user, ip], limit: 9/min }
",
    );
    let anonymous = json!({ "ip": "192.0.2.1" });
    let answer = check(&server, &anonymous).json();
    assert_eq!(answer["skippedRules"], json!(["per-user", "per-tenant", "dark"]));
    let named = json!({ "ip": "192.0.2.1", "user": "alice", "headers": { "X-Tenant": "t" } });
    assert_eq!(check(&server, &named).json()["skippedRules"], json!(["dark"]));
    let whole = json!({ "ip": "192.0.2.1", "user": "alice", "headers": { "X-Tenant": "t" }, "apiKey": "k" });
    assert_eq!(check(&server, &whole).json()["skippedRules"], Value::Null);
    let batch = json!({ "checks": [anonymous] });
    let answers = server.post("/api/v1/check/batch", &batch.to_string()).json();
    assert_eq!(answers[0]["skippedRules"], json!(["per-user", "per-tenant", "dark"]));
    let metrics = server.get("/actuator/prometheus").body;
    for (rule, count) in [("per-user", 2), ("per-tenant", 2), ("dark", 3), ("other-path", 0), ("per-ip", 0)] {
        let line = format!(
            "tollgate_rule_skipped_total{{application=\"distributed-rate-limiter\",rule=\"{rule}\"}} {count}\n"
        );
        assert!(metrics.contains(&line), "{line}\n{metrics}");
    }
    let explained = server.post("/api/v1/explain", &anonymous.to_string()).json();
    assert_eq!(
        explained["rules"][0],
        json!({ "rule": "per-user", "why": "skipped: the request has none of its keys" })
    );
}
