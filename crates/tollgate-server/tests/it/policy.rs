//! The policy over HTTP: rules, keys, tiers, and all limits of a request together.

use serde_json::{Map, Value, json};
use tollgate::Micros;

use crate::server::{NOW_SECS, Response, Server};

/// These tests run twice, with the state in memory and in a store: the module's name says which.
fn with(policy: &str) -> Server {
    let yaml = format!("policy:\n{}", indented(policy));
    if module_path!().ends_with("redis") { Server::on_redis(&yaml) } else { Server::with(&yaml) }
}

fn indented(yaml: &str) -> String {
    yaml.lines().map(|line| format!("  {line}\n")).collect()
}

/// What a policy looks like that uses everything.
pub(crate) const POLICY: &str = r"
tiers:
  free:       [ { limit: 100/min, algorithm: TOKEN_BUCKET }, { limit: 20/10s, refill: interval } ]
  pro:        [ { limit: 1000/min, algorithm: TOKEN_BUCKET }, { limit: 100/5s, algorithm: TOKEN_BUCKET } ]
  enterprise: [ { limit: 100000/min, algorithm: TOKEN_BUCKET } ]
rules:
  - name: per-ip
    key: [ip]
    limit: 100/min
    algorithm: SLIDING_WINDOW_COUNTER
  - name: login
    match: { path: /api/login, method: POST }
    key: [ip]
    limit: { limit: 5/min, strict: true }
    on_store_failure: closed
  - name: payment
    match: { path: /api/payment/** }
    key: [user]
    deny_empty_key: 403
    limit: 5/min
    on_store_failure: closed
  - name: search
    match: { path: /api/search/** }
    key: [api_key, ip]        # the first one that the request has
    limit: 200/min
  - name: heavy-search
    match: { path: /api/search/full/** }
    key: [api_key, ip]
    limit: 50/s burst 100
    cost: 2
  - name: report
    match: { path: /api/report }
    key: [user]
    limit: 100/s burst 100
    max_wait: 500ms           # ready to wait: a delay instead of a denial
  - name: plan
    key: [user]
    tier: from_request        # free / pro / enterprise
    factor: { ai-generate: 1/10, bulk-export: 1/20 }   # a further limit of its own for each named endpoint
endpoints:                    # names for endpoints: for factors, metrics and reports
  ai-generate: { path: /api/ai/generate }
  bulk-export: { path: /api/export/** }
";

fn check(server: &Server, request: &Value) -> Response {
    server.post("/api/v1/check", &request.to_string())
}

/// So many requests in a row, each from an address of its own. Says how many are allowed.
fn allowed_of(server: &Server, count: usize, request: &Value) -> usize {
    let allowed = (0..count).filter(|number| {
        let mut request = request.clone();
        request["ip"] = json!(format!("10.1.{}.{}", number / 250, number % 250));
        let response = check(server, &request);
        assert!([200, 429].contains(&response.status), "{response:?}");
        response.status == 200
    });
    allowed.count()
}

fn status_of(server: &Server, request: &Value, rule: &str) -> Value {
    let explained = server.post("/api/v1/explain", &request.to_string()).json();
    let limits = explained["limits"].as_array().unwrap_or_else(|| panic!("{explained}"));
    let found = limits.iter().find(|limit| limit["rule"] == rule);
    found.unwrap_or_else(|| panic!("no {rule} in {explained}")).clone()
}

#[test]
fn an_address_has_a_hundred_a_minute() {
    let server = with(POLICY);
    let request = json!({ "ip": "192.0.2.1", "path": "/anything" });
    for left in (0..100).rev() {
        let response = check(&server, &request);
        assert_eq!(
            (response.status, response.json()["remaining"].as_u64()),
            (200, Some(left)),
            "{response:?}"
        );
    }
    let denied = check(&server, &request);
    assert_eq!(denied.status, 429);
    // Half a minute into the window: 99 of 100 must be what is left of them.
    assert_eq!(
        denied.json(),
        json!({
            "allowed": false, "rule": "per-ip", "code": "IP_LIMIT", "message": "Rate limit exceeded",
            "limit": 100, "remaining": 0, "resetAfterSeconds": 30, "retryAfterSeconds": 31, "retryAfterMillis": 30600, "delayMillis": 0,
            "basis": "exact",
            "limits": [{
                "rule": "per-ip", "key": "ip:192.0.2.1", "algorithm": "SLIDING_WINDOW_COUNTER", "allowed": false,
                "cost": 1, "limit": 100, "remaining": 0, "resetAfterSeconds": 30, "retryAfterSeconds": 31,
                "retryAfterMillis": 30600, "delayMillis": 0, "basis": "exact"
            }],
            "skippedRules": ["plan"]
        })
    );
    assert_eq!(denied.number("retry-after"), 31);
    assert_eq!(denied.number("x-ratelimit-limit"), 100);
    assert_eq!(denied.number("x-ratelimit-reset"), NOW_SECS + 30);
    assert_eq!(denied.header("ratelimit-policy"), Some(r#""sliding_window_counter:per-ip";q=100;w=60"#));
    let other = json!({ "ip": "192.0.2.2", "path": "/anything" });
    assert_eq!(check(&server, &other).status, 200, "another address has its own");
}

#[test]
fn a_thousand_denied_logins_take_nothing_from_the_other_limits() {
    let server = with(POLICY);
    let login = json!({ "ip": "192.0.2.1", "user": "alice", "path": "/api/login", "method": "POST" });
    for _ in 0..5 {
        assert_eq!(check(&server, &login).status, 200);
    }
    let statuses = |server: &Server| {
        let plan = status_of(server, &login, "plan");
        (status_of(server, &login, "per-ip")["remaining"].clone(), plan["remaining"].clone())
    };
    let before = statuses(&server);
    assert_eq!(before, (json!(95), json!(95)));
    for _ in 0..1_000 {
        let denied = check(&server, &login);
        assert_eq!((denied.status, denied.json()["rule"].as_str()), (429, Some("login")));
        assert_eq!(denied.json()["code"], "IP_LIMIT");
        // Until the tenth of a minute in which they were is wholly out of the minute.
        assert_eq!(denied.number("retry-after"), 66);
    }
    assert_eq!(statuses(&server), before);
    let other = json!({ "ip": "192.0.2.1", "user": "alice", "path": "/api/login", "method": "GET" });
    assert_eq!(check(&server, &other).status, 200, "another method is another matter");
}

#[test]
fn spellings_of_a_path_are_one() {
    let server = with(POLICY);
    for path in
        ["/api/login", "/api/login/", "//api//login", "/api/./login", "/x/../api/login", "/api/%6Cogin?a=b"]
    {
        let login = json!({ "ip": "192.0.2.1", "path": path, "method": "post" });
        let response = check(&server, &login);
        let is_login =
            response.json()["limits"].as_array().unwrap().iter().any(|limit| limit["rule"] == "login");
        assert!(is_login, "{path}: {response:?}");
    }
}

#[test]
fn a_payment_needs_a_user() {
    let server = with(POLICY);
    let anonymous = check(&server, &json!({ "ip": "192.0.2.1", "path": "/api/payment/card" }));
    assert_eq!((anonymous.status, &anonymous.json()["code"]), (403, &json!("EMPTY_KEY")));
    assert_eq!(anonymous.json()["rule"], "payment");
    let untouched = status_of(&server, &json!({ "ip": "192.0.2.1", "path": "/" }), "per-ip");
    assert_eq!(untouched["remaining"], 100, "a refusal takes nothing");
    let payment = json!({ "user": "alice", "path": "/api/payment/card" });
    assert_eq!(allowed_of(&server, 10, &payment), 5);
    let denied = check(&server, &payment);
    assert_eq!((&denied.json()["rule"], &denied.json()["code"]), (&json!("payment"), &json!("USER_LIMIT")));
}

#[test]
fn a_search_is_counted_by_api_key_or_else_by_address() {
    let server = with(POLICY);
    let with_key = json!({ "apiKey": "secret-1", "path": "/api/search/books" });
    assert_eq!(allowed_of(&server, 210, &with_key), 200);
    let denied = check(&server, &with_key);
    assert_eq!((&denied.json()["rule"], &denied.json()["code"]), (&json!("search"), &json!("APIKEY_LIMIT")));
    assert!(!denied.body.contains("secret-1"), "a key is never shown: {denied:?}");
    let by_address = check(&server, &json!({ "ip": "192.0.2.7", "path": "/api/search" }));
    assert_eq!(by_address.status, 200);
    let search = &by_address.json()["limits"][1];
    assert_eq!((&search["rule"], &search["key"]), (&json!("search"), &json!("ip:192.0.2.7")));
}

#[test]
fn a_heavy_search_costs_two_of_a_burst_of_a_hundred() {
    let server = with(POLICY);
    let heavy = json!({ "apiKey": "secret-2", "path": "/api/search/full/text" });
    assert_eq!(allowed_of(&server, 60, &heavy), 50);
    assert_eq!(
        status_of(&server, &heavy, "search")["remaining"],
        150,
        "the other limit has lost one for each"
    );
    server.clock.advance(Micros::from_secs(1));
    assert_eq!(allowed_of(&server, 60, &heavy), 25, "50 a second");
}

#[test]
fn a_report_is_delayed_rather_than_denied() {
    let server = with(POLICY);
    let report = json!({ "user": "bob", "tier": "enterprise", "path": "/api/report" });
    assert_eq!(allowed_of(&server, 100, &report), 100);
    let mut request = report.clone();
    for waiting in 1..=50 {
        request["ip"] = json!(format!("10.2.0.{waiting}"));
        let response = check(&server, &request).json();
        assert_eq!(
            (&response["allowed"], response["delayMillis"].as_u64()),
            (&json!(true), Some(waiting * 10))
        );
    }
    request["ip"] = json!("10.2.0.99");
    let denied = check(&server, &request);
    assert_eq!(
        (denied.status, &denied.json()["rule"]),
        (429, &json!("report")),
        "no request waits for more than 500 ms"
    );
}

#[test]
fn a_plan_has_the_limits_of_its_tier() {
    let server = with(POLICY);
    let free = json!({ "user": "free-user", "tier": "free", "path": "/api/items" });
    assert_eq!(allowed_of(&server, 30, &free), 20, "20 in 10 s");
    server.clock.advance(Micros::from_millis(9_999));
    assert_eq!(allowed_of(&server, 1, &free), 0, "all at the end of the interval");
    server.clock.advance(Micros::from_millis(1));
    assert_eq!(allowed_of(&server, 30, &free), 20);
    let denied = check(&server, &free);
    assert_eq!((&denied.json()["rule"], &denied.json()["code"]), (&json!("plan"), &json!("USER_LIMIT")));
    let pro = json!({ "user": "pro-user", "tier": "pro", "path": "/api/items" });
    assert_eq!(allowed_of(&server, 110, &pro), 100, "100 in 5 s");
    let enterprise = json!({ "user": "big-user", "tier": "enterprise", "path": "/api/items" });
    assert_eq!(allowed_of(&server, 300, &enterprise), 300);
    let unknown = json!({ "user": "odd-user", "tier": "platinum", "path": "/api/items" });
    assert_eq!(allowed_of(&server, 30, &unknown), 20, "an unknown tier is the smallest one");
    let metrics = server.get("/actuator/prometheus").body;
    assert!(
        metrics.contains("tollgate_unknown_tiers_total{application=\"distributed-rate-limiter\"} 30"),
        "{metrics}"
    );
}

#[test]
fn an_endpoint_has_a_part_of_the_tier_for_itself() {
    let server = with(POLICY);
    let generate = json!({ "user": "pro-user", "tier": "pro", "path": "/api/ai/generate" });
    assert_eq!(allowed_of(&server, 15, &generate), 10, "a tenth of 100 in 5 s");
    let export = json!({ "user": "pro-user", "tier": "pro", "path": "/api/export/all" });
    assert_eq!(allowed_of(&server, 10, &export), 5, "a twentieth of them");
    assert_eq!(status_of(&server, &export, "plan")["remaining"], 1_000 - 15, "and both count for the plan");
    let explained = server.post("/api/v1/explain", &export.to_string()).json();
    assert_eq!(explained["endpoint"], "bulk-export");
    assert_eq!(explained["tiers"], json!({ "users": "pro" }));
    let other = json!({ "user": "pro-user", "tier": "pro", "path": "/api/items" });
    assert_eq!(allowed_of(&server, 5, &other), 5);
}

#[test]
fn the_default_limits_what_no_rule_applies_to_by_address() {
    let server = with(
        "default: 200/min\nrules:\n  - { name: login, match: { path: /api/login }, key: ip, limit: 5/min }\nexclude: [/api/health, { path: /api/metrics, method: GET }]",
    );
    let request = json!({ "ip": "192.0.2.1", "path": "/else" });
    for _ in 0..200 {
        assert_eq!(check(&server, &request).status, 200);
    }
    let denied = check(&server, &request);
    assert_eq!((denied.status, &denied.json()["rule"]), (429, &json!("default")));
    for path in ["/api/health", "/api/metrics"] {
        let excluded = check(&server, &json!({ "ip": "192.0.2.1", "path": path, "method": "GET" }));
        assert_eq!((excluded.status, &excluded.json()["limits"]), (200, &json!([])), "{path}");
    }
}

#[test]
fn batches_are_decided_in_order() {
    let server = with("rules: [{ name: two, key: user, limit: 2/min }]");
    let one = json!({ "user": "alice" });
    let batch = json!({ "checks": [one, one, one, { "user": "bob" }] });
    let answers = server.post("/api/v1/check/batch", &batch.to_string()).json();
    let allowed: Vec<_> = answers.as_array().unwrap().iter().map(|it| it["allowed"].clone()).collect();
    assert_eq!(allowed, [true, true, false, true]);
}

#[test]
fn a_bad_item_of_a_policy_batch_gets_its_problem_and_the_others_are_decided() {
    let server = with("rules: [{ name: ten, key: user, limit: 10/min }]");
    let good = json!({ "user": "alice" });
    let bad = [
        ("permits", json!({ "user": "alice", "permits": 11 })),
        ("apiKey", json!({ "apiKey": "a b" })),
        ("ip", json!({ "ip": "1.2.3.4:80" })),
        ("path", json!({ "path": "*" })),
        ("path", json!({ "path": format!("/{}", "a".repeat(5_000)) })),
        ("user", json!({ "user": "a".repeat(5_000) })),
        ("usr", json!({ "usr": "bob" })),
        ("headers.x-a", json!({ "headers": { "x-a": 5 } })),
    ];
    for (number, (parameter, bad)) in bad.iter().enumerate() {
        let batch = json!({ "checks": [bad, good] });
        let response = server.post("/api/v1/check/batch", &batch.to_string());
        assert_eq!(response.status, 200, "{parameter}: {response:?}");
        let (answers, alone) = (response.json(), check(&server, bad));
        assert_eq!((alone.status, &answers[0]["parameter"]), (400, &json!(parameter)));
        assert_eq!(answers[0], alone.json(), "{parameter}: as the item alone");
        assert_eq!(answers[1]["remaining"], 9 - number, "{parameter}: the other is decided");
    }
    assert_eq!(server.post("/api/v1/check/batch", r#"{"checks":[{"user":"alice"},"x"]}"#).status, 400);
}

#[test]
fn headers_that_no_rule_reads_and_queries_may_be_long_and_many() {
    let server = with("rules: [{ name: plan, match: { header: { x-plan: pro } }, key: user, limit: 5/min }]");
    let headers = |count: usize, more: &[(&str, &str)]| -> Value {
        let headers = (0..count).map(|number| (format!("h{number}"), json!("")));
        headers
            .chain(more.iter().map(|(name, value)| ((*name).to_owned(), json!(value))))
            .collect::<Map<_, _>>()
            .into()
    };
    let long = "a".repeat(5_000);
    for described in [
        json!({ "headers": { "cookie": long } }),
        json!({ "path": format!("/api/login?{long}") }),
        json!({ "headers": headers(129, &[]) }),
        json!({ "headers": headers(1_000, &[("cookie", &long)]) }),
    ] {
        let answer = check(&server, &described);
        assert_eq!((answer.status, &answer.json()["unmatched"]), (200, &json!(true)), "{answer:?}");
    }
    for more in [("X-Plan", "pro"), ("x-plan", "pro")] {
        let answer = check(&server, &json!({ "user": "alice", "headers": headers(300, &[more]) }));
        assert_eq!(answer.json()["rule"], "plan", "a header that is read is never left out");
    }
    let refused = check(&server, &json!({ "headers": { "x-plan": long } }));
    assert_eq!((refused.status, &refused.json()["parameter"]), (400, &json!("headers.x-plan")));
    let twice = r#"{"headers":{"x-plan":"pro","X-Plan":"free"}}"#;
    assert_eq!(server.post("/api/v1/check", twice).status, 400);
    assert_eq!(check(&server, &json!({ "query": headers(129, &[]) })).status, 400);
}

#[test]
fn an_explanation_takes_nothing_and_says_how_it_comes_to_that() {
    let server = with("rules: [{ name: two, key: user, limit: 2/min, algorithm: TOKEN_BUCKET }]");
    let request = json!({ "user": "alice", "permits": 2 });
    for _ in 0..3 {
        let explained = server.post("/api/v1/explain", &request.to_string()).json();
        assert_eq!((&explained["allowed"], &explained["limits"][0]["remaining"]), (&json!(true), &json!(2)));
    }
    assert_eq!(check(&server, &request).status, 200);
    let explained = server.post("/api/v1/explain", &json!({ "user": "alice" }).to_string()).json();
    let limit = &explained["limits"][0];
    assert_eq!(limit["freesAtMicros"], (NOW_SECS + 30) * 1_000_000);
    assert_eq!(
        limit["arithmetic"],
        "0 of 2 tokens; 0.033 flow back each second, full in 60.000 s; asks for 1: fits in 30.000 s"
    );
    assert_eq!(explained["rules"], json!([{ "rule": "two", "why": "applies" }]));
}

#[test]
fn what_is_malformed_is_named() {
    let server = with("");
    for (body, parameter) in [
        (r#"{"ip":"10.0.0"}"#, "ip"),
        (r#"{"path":"api"}"#, "path"),
        (r#"{"permits":0}"#, "permits"),
        (r#"{"permits":-1}"#, "permits"),
        (r#"{"user":7}"#, "user"),
        (r#"{"headers":{"a":1}}"#, "headers.a"),
        (r#"{"headers":[]}"#, "headers"),
        (r#"{"usr":"a"}"#, "usr"),
    ] {
        let response = server.post("/api/v1/check", body);
        assert_eq!(
            (response.status, response.json()["parameter"].as_str()),
            (400, Some(parameter)),
            "{body}"
        );
    }
    assert_eq!(server.get("/api/v1/check").status, 405);
}

/// A token as an issuer signs it.
pub(crate) fn token(secret: &str, claims: &Value) -> String {
    use base64::Engine;
    let encode = |bytes: &[u8]| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes);
    let signed =
        format!("{}.{}", encode(br#"{"alg":"HS256","typ":"JWT"}"#), encode(claims.to_string().as_bytes()));
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, secret.as_bytes());
    format!("{signed}.{}", encode(ring::hmac::sign(&key, signed.as_bytes()).as_ref()))
}

#[test]
fn a_user_is_who_a_verified_token_says() {
    let secret = "a secret of thirty-two characters";
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), secret).unwrap();
    let policy = "tiers: { free: 10/min, pro: 100/min }\nrules:\n  - { name: plan, key: identity, tier: from_request }\n";
    let yaml = format!(
        "policy:\n{}identity:\n  jwt: {{ algorithms: [HS256], secret_file: {}, issuer: id, audience: api, tier_claim: plan }}\n  api_key: {{}}\n",
        indented(policy),
        file.path().display()
    );
    let server =
        if module_path!().ends_with("redis") { Server::on_redis(&yaml) } else { Server::with(&yaml) };
    let ask = |headers: Value| {
        let request = json!({ "ip": "192.0.2.1", "headers": headers });
        let answer = check(&server, &request).json();
        let limit = answer["limits"][0].clone();
        (limit["key"].as_str().unwrap().to_owned(), limit["limit"].clone(), answer["unverifiedToken"].clone())
    };
    let claims = json!({ "iss": "id", "aud": "api", "sub": "alice", "plan": "pro", "exp": NOW_SECS + 60 });
    let bearer = |secret: &str, claims: &Value| json!({ "Authorization": format!("Bearer {}", token(secret, claims)) });
    assert_eq!(ask(bearer(secret, &claims)), ("user:alice".to_owned(), json!(100), Value::Null));
    // A caller without a valid token counts by address, in the smallest tier.
    let anonymous = |why: &str| ("ip:192.0.2.1".to_owned(), json!(10), json!(why));
    assert_eq!(ask(bearer("another secret of as many characters", &claims)), anonymous("signature"));
    let expired = json!({ "iss": "id", "aud": "api", "sub": "alice", "plan": "pro", "exp": NOW_SECS - 60 });
    assert_eq!(ask(bearer(secret, &expired)), anonymous("expired"));
    let (key, limit, _) = ask(json!({ "X-API-Key": "abc" }));
    assert_eq!((key.as_str(), limit), ("ip:192.0.2.1", json!(10)), "a key that is not known");
    let metrics = server.get("/actuator/prometheus").body;
    let counted =
        "tollgate_tokens_unverified_total{application=\"distributed-rate-limiter\",reason=\"expired\"} 1";
    assert!(metrics.contains(counted), "{metrics}");
}

#[test]
fn families_of_tiers_have_the_numbers_of_the_specification() {
    let server = with(
        "families:
  users: { tiers: { free: 10/min, premium: 100/min }, members: { paying: premium } }
  api_keys: { of: api_key, tiers: { basic: 1000/min, standard: 10000/min, unlimited: unlimited }, default: basic, members: { big-key: standard, ours: unlimited } }
  hourly: { tiers: { small: 60/h burst 10, middle: 10000/h burst 500, large: 1000000/h burst 10000 } }
rules:
  - { name: of-user, key: user, tier: from_request, family: users }
  - { name: of-key, key: api_key, tier: from_request, family: api_keys }
  - { name: by-hour, match: { path: /hourly }, key: user, tier: from_request, family: hourly }
",
    );
    let limits = |request: Value| -> Vec<u64> {
        let answer = check(&server, &request).json();
        answer["limits"].as_array().unwrap().iter().map(|limit| limit["limit"].as_u64().unwrap()).collect()
    };
    assert_eq!(limits(json!({ "user": "a" })), [10]);
    assert_eq!(limits(json!({ "user": "paying" })), [100]);
    assert_eq!(limits(json!({ "apiKey": "any" })), [1_000]);
    assert_eq!(limits(json!({ "apiKey": "big-key" })), [10_000]);
    assert!(limits(json!({ "apiKey": "ours" })).is_empty(), "unlimited");
    for (tier, burst) in [("small", 10), ("middle", 500), ("large", 10_000)] {
        assert_eq!(limits(json!({ "user": tier, "tier": tier, "path": "/hourly" })), [10, burst], "{tier}");
    }
    let hourly = json!({ "user": "hour", "path": "/hourly" });
    assert_eq!(allowed_of(&server, 12, &hourly), 10);
    server.clock.advance(Micros::from_secs(60));
    assert_eq!(allowed_of(&server, 3, &hourly), 1, "60 an hour are one a minute");
}

#[test]
fn shadows_and_candidates_are_counted_and_never_enforced() {
    let server = with(
        "rules:
  - { name: real, key: user, limit: 4/min, candidate: 2/min }
  - { name: dark, key: user, limit: 1/min, mode: shadow }
",
    );
    let ask = || check(&server, &json!({ "user": "alice" })).json();
    let seen: Vec<_> = (0..5)
        .map(|_| {
            let answer = ask();
            let limits = answer["limits"].as_array().unwrap().iter();
            let bases: Vec<_> = limits.map(|it| (it["basis"].clone(), it["allowed"].clone())).collect();
            (answer["allowed"].clone(), bases)
        })
        .collect();
    let row = |allowed: bool, real: bool, candidate: bool, dark: bool| {
        let bases = vec![
            (json!("exact"), json!(real)),
            (json!("shadow"), json!(candidate)),
            (json!("shadow"), json!(dark)),
        ];
        (json!(allowed), bases)
    };
    assert_eq!(seen[0], row(true, true, true, true));
    assert_eq!(seen[1], row(true, true, true, false));
    assert_eq!(seen[2], row(true, true, false, false));
    assert_eq!(seen[3], row(true, true, false, false));
    assert!(!seen[4].0.as_bool().unwrap());
    let metrics = server.get("/actuator/prometheus").body;
    for (rule, role, allowed, count) in
        [("real", "enforced", "true", 4), ("real", "candidate", "false", 3), ("dark", "shadow", "false", 4)]
    {
        let line = format!(
            "tollgate_rule_checks_total{{application=\"distributed-rate-limiter\",rule=\"{rule}\",role=\"{role}\",allowed=\"{allowed}\"}} {count}"
        );
        assert!(metrics.contains(&line), "{line}\n{metrics}");
    }
}

#[test]
fn a_quota_follows_the_calendar_of_its_zone() {
    let server = with(
        "rules:
  - { name: daily, key: user, limit: { quota: 3/day, zone: Asia/Seoul } }
  - { name: billed, match: { path: /billed }, key: user, limit: { quota: 5/month, zone: Asia/Seoul, anchor: 15 } }
",
    );
    // It is the 16th, ten past five in the morning, in Seoul.
    let daily = json!({ "user": "alice" });
    assert_eq!(allowed_of(&server, 5, &daily), 3);
    let denied = check(&server, &daily).json();
    let until_midnight = 18 * 3_600 + 49 * 60 + 30;
    assert_eq!((&denied["rule"], &denied["retryAfterSeconds"]), (&json!("daily"), &json!(until_midnight)));
    server.clock.advance(Micros::from_secs(until_midnight));
    assert_eq!(allowed_of(&server, 5, &daily), 3);
    let billed = json!({ "user": "bob", "path": "/billed" });
    assert_eq!(allowed_of(&server, 5, &billed), 3);
    server.clock.advance(Micros::from_secs(86_400));
    assert_eq!(allowed_of(&server, 5, &billed), 2, "five in the month that began on the 15th");
    let denied = check(&server, &billed).json();
    // To the midnight before the 15th of December.
    assert_eq!((&denied["rule"], &denied["retryAfterSeconds"]), (&json!("billed"), &json!(27 * 86_400)));
}

#[test]
fn some_are_let_through_without_a_limit() {
    let server = with(
        "rules:
  - { name: office, match: { cidr: 10.0.0.0/8 }, unlimited: true, stop: true }
  - { name: per-ip, key: ip, limit: 5/min }
",
    );
    let allowed = |ip: &str| (0..20).filter(|_| check(&server, &json!({ "ip": ip })).status == 200).count();
    assert_eq!((allowed("10.0.0.1"), allowed("192.0.2.1")), (20, 5));
}
