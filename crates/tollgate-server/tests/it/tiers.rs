//! The worked tiers of the specification, with its numbers.

use serde_json::{Value, json};
use tollgate::Micros;

use crate::server::{Response, Server};

fn on_both(policy: &str) -> [Server; 2] {
    let indented: String = policy.lines().map(|line| format!("  {line}\n")).collect();
    let yaml = format!("policy:\n{indented}");
    [Server::with(&yaml), Server::on_redis(&yaml)]
}

fn check(server: &Server, request: &Value) -> Response {
    server.post("/api/v1/check", &request.to_string())
}

/// Takes all that a user has now, and asserts how much that is.
fn take_all(server: &Server, user: &str, permits: u64) -> Response {
    let ask = |permits: u64| check(server, &json!({ "user": user, "tier": user, "permits": permits }));
    assert_eq!(ask(permits).status, 200, "{user}");
    let denied = ask(1);
    assert_eq!((denied.status, &denied.json()["rule"]), (429, &json!("plan")), "{user}");
    denied
}

/// Section 12 of seed 001: FREE 60 an hour with bursts of 10, PRO 10,000 with 500, ENTERPRISE 1,000,000 with 10,000.
#[test]
fn hourly_tiers_admit_their_burst_at_once_and_their_limit_each_hour() {
    let policy = "tiers: { free: 60/h burst 10, pro: 10000/h burst 500, enterprise: 1000000/h burst 10000 }
default_tier: free
rules: [{ name: plan, key: user, tier: from_request }]
";
    for server in on_both(policy) {
        for (tier, limit, burst, retry_secs) in
            [("free", 60, 10, 60), ("pro", 10_000, 500, 1), ("enterprise", 1_000_000, 10_000, 1)]
        {
            let first = take_all(&server, tier, burst);
            assert_eq!(
                (first.json()["limit"].as_u64(), first.number("retry-after")),
                (Some(burst), retry_secs)
            );
            // The burst comes back as often as makes the limit in an hour.
            let times = limit / burst;
            let mut admitted = 0;
            for _ in 0..times {
                server.clock.advance(Micros::new(3_600_000_000 / times));
                take_all(&server, tier, burst);
                admitted += burst;
            }
            admitted += limit % burst;
            assert_eq!(admitted, limit, "{tier}: an hour after the burst");
        }
        let idle = json!({ "user": "idle", "tier": "free", "permits": 11 });
        server.clock.advance(Micros::from_secs(86_400));
        assert_eq!(check(&server, &idle).status, 400, "idle time is not saved beyond the burst");
    }
}

/// Section 7-4 of seed 001: a minute of 100 by address, of 10 and 100 by user and 1,000 and 10,000 by API key, and no limit at all for
/// ENTERPRISE users and UNLIMITED keys.
#[test]
fn enterprise_and_unlimited_tiers_have_no_limit_of_their_own() {
    let policy = "families:
  users: { tiers: { free: 10/min, premium: 100/min, enterprise: unlimited }, default: free }
  api_keys: { of: api_key, tiers: { basic: 1000/min, standard: 10000/min, unlimited: unlimited }, default: basic }
rules:
  - { name: per-ip, key: ip, limit: 100/min }
  - { name: per-key, key: api_key, tier: from_request, family: api_keys }
  - { name: per-user, key: user, tier: from_request, family: users }
default: 5/min
";
    for server in on_both(policy) {
        let admitted = |asks: usize, permits: u64, request: &Value| {
            let mut request = request.clone();
            request["permits"] = json!(permits);
            (0..asks).filter(|_| check(&server, &request).status == 200).count() as u64 * permits
        };
        for (tier, limit) in [("free", 10), ("premium", 100)] {
            assert_eq!(admitted(110, 1, &json!({ "user": tier, "tier": tier })), limit, "{tier}");
        }
        for (tier, limit) in [("basic", 1_000), ("standard", 10_000)] {
            assert_eq!(admitted(11, limit / 10, &json!({ "apiKey": tier, "tier": tier })), limit, "{tier}");
        }
        for free in
            [json!({ "user": "big", "tier": "enterprise" }), json!({ "apiKey": "ours", "tier": "unlimited" })]
        {
            assert_eq!(admitted(200, 1_000_000, &free), 200_000_000, "{free}");
            let answer = check(&server, &free).json();
            assert_eq!((&answer["limits"], &answer["unmatched"]), (&json!([]), &Value::Null), "{free}");
        }
        // Each limit is independent: the address of an enterprise user still has its own.
        let enterprise = json!({ "user": "big", "tier": "enterprise", "ip": "192.0.2.1" });
        assert_eq!(admitted(110, 1, &enterprise), 100);
        assert_eq!(check(&server, &enterprise).json()["code"], "IP_LIMIT");
    }
}
