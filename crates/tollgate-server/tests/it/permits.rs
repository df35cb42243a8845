//! More limits than can be checked together, and more permits than a limit can ever admit.

use serde_json::{Value, json};
use tollgate_server::config;

use crate::cli::run;
use crate::server::{Response, Server};

fn check(server: &Server, request: &Value) -> Response {
    server.post("/api/v1/check", &request.to_string())
}

/// The value of a metric without labels of its own.
fn metric(server: &Server, name: &str) -> u64 {
    let metrics = server.get("/actuator/prometheus").body;
    let line = format!("{name}{{application=\"distributed-rate-limiter\"}} ");
    let value = metrics.lines().find_map(|it| it.strip_prefix(&line));
    value.unwrap_or_else(|| panic!("no {name} in {metrics}")).parse().unwrap()
}

/// A policy with rules in shadow before and behind two enforced ones, one of which has a candidate.
fn with_shadows(count: usize) -> String {
    let shadow = |number: usize| {
        format!("  - {{ name: dark-{number}, key: ip, limit: {}/h, mode: shadow }}\n", number + 1)
    };
    let dark: Vec<_> = (0..count).map(shadow).collect();
    let (before, behind) = dark.split_at(count / 2);
    format!(
        "rules:\n{}  - {{ name: real, key: ip, limit: 3/min, candidate: 2/min }}\n  - {{ name: wide, key: ip, limit: 9/min }}\n{}",
        before.concat(),
        behind.concat()
    )
}

fn indented(yaml: &str) -> String {
    yaml.lines().map(|line| format!("  {line}\n")).collect()
}

#[test]
fn shadow_rules_never_refuse_real_traffic() {
    let yaml = format!("policy:\n{}", indented(&with_shadows(64)));
    for server in [Server::with(&yaml), Server::on_redis(&yaml)] {
        let request = json!({ "ip": "192.0.2.1" });
        for _ in 0..3 {
            let answer = check(&server, &request);
            assert_eq!(answer.status, 200, "{answer:?}");
            let limits = answer.json()["limits"].as_array().unwrap().clone();
            let enforced: Vec<_> =
                limits.iter().filter(|it| it["basis"] != "shadow").map(|it| &it["rule"]).collect();
            assert_eq!((limits.len(), enforced), (32, vec![&json!("real"), &json!("wide")]));
        }
        let denied = check(&server, &request);
        assert_eq!(
            (denied.status, &denied.json()["rule"]),
            (429, &json!("real")),
            "the real limits still hold"
        );
        // 64 in shadow, a candidate and two enforced ones, of which 32 fit: 35 are left out.
        assert_eq!(metric(&server, "tollgate_policy_checks_left_out_total"), 4 * 35);
    }
}

#[test]
fn more_enforced_limits_than_can_be_checked_together_are_refused() {
    let rules: String =
        (1..=33).map(|n| format!("    - {{ name: r{n}, key: ip, limit: {n}/h }}\n")).collect();
    let server = Server::with(&format!("policy:\n  rules:\n{rules}"));
    let refused = check(&server, &json!({ "ip": "192.0.2.1" }));
    assert_eq!((refused.status, &refused.json()["code"]), (422, &json!("TOO_MANY_LIMITS")));
}

#[test]
fn policy_check_warns_of_more_limits_than_can_be_checked_together() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    let warnings = |text: &str| -> Vec<String> {
        std::fs::write(&file, text).unwrap();
        let (code, out, error) = run(&["policy", "check", file.to_str().unwrap()]);
        assert_eq!(code, Some(0), "{error}");
        out.lines().filter(|line| line.starts_with("warning: ")).map(str::to_owned).collect()
    };
    assert_eq!(
        warnings(&with_shadows(64)),
        [
            "warning: more limits apply to requests such as / than are checked at once (32, or fewer logs and counters): 35 checks in shadow or of candidates are left out"
        ]
    );
    assert!(warnings(&with_shadows(29)).is_empty(), "32 fit");
    let apart: String = (1..=40)
        .map(|n| {
            format!("- {{ name: r{n}, match: {{ path: '/{n}/**' }}, key: ip, limit: 5/s, mode: shadow }}\n")
        })
        .collect();
    assert!(warnings(&format!("rules:\n{apart}")).is_empty(), "no request matches two of them");
    let together: String = (1..=33)
        .map(|n| {
            format!("- {{ name: r{n}, match: {{ path: ['/api/{{v}}/**', '/{n}'] }}, key: ip, limit: 5/s }}\n")
        })
        .collect();
    assert_eq!(
        warnings(&format!("rules:\n{together}")),
        [
            "warning: requests such as /api/x are refused: more limits apply to them together than are checked at once (32, or fewer logs and counters)"
        ]
    );
}

#[test]
fn permits_that_can_never_fit_are_400_and_take_nothing() {
    let policy = "rules:
  - { name: wide, key: user, limit: 100/min }
  - { name: heavy, match: { path: /heavy }, key: user, limit: { limit: 9/min, count_denied: true }, cost: 2 }
  - { name: dark, key: user, limit: 1/min, mode: shadow }
";
    let yaml = format!("policy:\n{}", indented(policy));
    for server in [Server::with(&yaml), Server::on_redis(&yaml)] {
        let ask = |path: &str, permits: u64| {
            check(&server, &json!({ "user": "alice", "path": path, "permits": permits }))
        };
        let refused = ask("/heavy", 5);
        assert_eq!(refused.status, 400, "{refused:?}");
        assert_eq!(refused.header("content-type"), Some("application/problem+json"));
        assert_eq!(refused.header("retry-after"), None);
        let problem = refused.json();
        assert_eq!(
            (&problem["code"], &problem["parameter"], &problem["detail"]),
            (
                &json!("PERMITS_EXCEED_LIMIT"),
                &json!("permits"),
                &json!("permits: must be a whole number from 1 to 4, the limit of the rule heavy")
            )
        );
        let batch = json!({ "checks": [{ "user": "alice" }, { "user": "alice", "permits": 101 }] });
        let answers = server.post("/api/v1/check/batch", &batch.to_string()).json();
        assert_eq!(
            (&answers[1]["status"], &answers[1]["parameter"], &answers[1]["code"]),
            (&json!(400), &json!("permits"), &json!("PERMITS_EXCEED_LIMIT"))
        );
        let explained =
            server.post("/api/v1/explain", &json!({ "user": "alice", "permits": 101 }).to_string()).json();
        assert_eq!(
            (&explained["allowed"], &explained["code"]),
            (&json!(false), &json!("PERMITS_EXCEED_LIMIT"))
        );
        // Nothing was taken but by the other check of the batch, also of a limit that counts denials. Limits in shadow refuse nothing.
        assert_eq!(ask("/heavy", 4).json()["limits"][0]["remaining"], 95);
        assert_eq!(ask("/", 95).status, 200);
        let plain = server.get("/api/v1/rate-limit/check?key=a&permits=101");
        assert_eq!(
            (plain.status, &plain.json()["code"]),
            (400, &json!("PERMITS_EXCEED_LIMIT")),
            "as the plain API"
        );
    }
}

#[test]
fn a_cost_above_a_limit_is_refused_at_load_for_every_tier() {
    let mistakes = |yaml: &str| {
        let checked = config::read_policy("p", yaml, &config::PolicyContext::default());
        checked.map_or_else(|errors| errors.to_string(), |_| String::new())
    };
    let own = |fields: &str| mistakes(&format!("rules: [{{ name: a, key: ip, {fields} }}]"));
    assert!(
        own("limit: 5/s, cost: 6")
            .contains("rule \"a\": cost: 6 is more than a limit of the rule can ever admit: 5")
    );
    assert!(own("limit: [9/s, 5/min], cost: 6").contains("rule \"a\": cost: "));
    assert!(own("limit: 9/s burst 5, cost: 6").contains("rule \"a\": cost: "));
    assert!(own("limit: { quota: 5/day }, cost: 6").contains("rule \"a\": cost: "));
    assert!(own("limit: 9/s, candidate: 5/s, cost: 6").contains("rule \"a\": cost: "));
    assert_eq!(own("limit: 5/s, cost: 5"), "");
    let tiers = "tiers: { free: 5/s, middle: [9/s, 4/min], pro: 100/s, all: unlimited }
endpoints: { export: { path: /export } }
rules: [{ name: plan, key: user, tier: from_request, cost: 6, factor: { export: 1/20 } }]
";
    // A part of less than one permit is a mistake of its own; these are large enough.
    let tiers = mistakes(&tiers.replace("1/20", "1/2"));
    for (tier, size) in [
        ("the tier free", 5),
        ("the tier middle", 4),
        ("the tier free at export", 2),
        ("the tier middle at export", 2),
    ] {
        let why = format!("rule \"plan\": cost: 6 is more than {tier} can ever admit: {size}");
        assert!(tiers.contains(&why), "{why}\n{tiers}");
    }
    assert!(!tiers.contains("pro") && !tiers.contains("all "), "{tiers}");
}
