//! The REST API, field for field.

use serde_json::{Value, json};

use tollgate::Micros;

use crate::server::{NOW_SECS, Response, Server, connect, exchange};

const CHECK: &str = "/api/v1/rate-limit/check";
const REMAINING: &str = "/api/v1/rate-limit/remaining";
const RESET: &str = "/api/v1/rate-limit/reset";
const ALGORITHMS: [&str; 5] =
    ["TOKEN_BUCKET", "LEAKY_BUCKET", "FIXED_WINDOW", "SLIDING_WINDOW", "SLIDING_WINDOW_COUNTER"];

/// These tests run twice, with the state in memory and in a store: the module's name says which.
fn with(yaml: &str) -> Server {
    if module_path!().ends_with("redis") { Server::on_redis(yaml) } else { Server::with(yaml) }
}

fn start() -> Server {
    with("")
}

/// A problem that names a parameter.
fn assert_problem(response: &Response, status: u16, parameter: &str) {
    assert_eq!(response.status, status, "{response:?}");
    assert_eq!(response.header("content-type"), Some("application/problem+json"));
    let problem = response.json();
    assert_eq!(problem["status"], status);
    if !parameter.is_empty() {
        assert_eq!(problem["parameter"], parameter, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(parameter));
    }
}

#[test]
fn the_first_check_answers_as_the_specification_shows() {
    let server = start();
    let response = server.get(&format!("{CHECK}?algorithm=TOKEN_BUCKET&key=user:123&permits=5"));
    assert_eq!(response.status, 200);
    assert_eq!(
        response.body,
        r#"{"allowed":true,"key":"user:123","algorithm":"TOKEN_BUCKET","remaining":95,"resetAfterSeconds":1,"retryAfterSeconds":0,"message":"Request allowed","limit":100,"basis":"exact","delayMillis":0,"retryAfterMillis":0}"#
    );
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_eq!(response.header("cache-control"), Some("no-store"));
    assert_eq!(response.number("x-ratelimit-limit"), 100);
    assert_eq!(response.number("x-ratelimit-remaining"), 95);
    assert_eq!(response.header("x-tollgate-basis"), Some("exact"));
    assert_eq!(response.header("retry-after"), None);
    assert_eq!(response.number("x-ratelimit-reset"), NOW_SECS + 1, "half a second from now, rounded up");
}

#[test]
fn a_denial_answers_429_and_says_exactly_when_to_come_back() {
    // Half a minute into the window: 20 permits flow back in 2 s, the window ends in 30, the log's entry leaves in 60, and
    // of 60 in the window before, 40 are left when a third of the next one has passed: 30 + 20 s.
    let retries = [2, 2, 30, 60, 50];
    let resets = [6, 6, 30, 60, 30];
    let server = start();
    for ((algorithm, retry), reset) in ALGORITHMS.into_iter().zip(retries).zip(resets) {
        let target = format!("{CHECK}?algorithm={algorithm}&key=user:1&permits=60");
        assert_eq!(server.get(&target).status, 200, "{algorithm}");
        let denied = server.get(&target);
        assert_eq!(denied.status, 429, "{algorithm}");
        assert_eq!(
            denied.body,
            format!(
                r#"{{"allowed":false,"key":"user:1","algorithm":"{algorithm}","remaining":40,"resetAfterSeconds":{reset},"retryAfterSeconds":{retry},"message":"Rate limit exceeded","limit":100,"basis":"exact","delayMillis":0,"retryAfterMillis":{retry}000}}"#
            )
        );
        assert_eq!(denied.number("retry-after"), retry);
        assert_eq!(denied.number("x-ratelimit-remaining"), 40);
        assert_eq!(denied.number("x-ratelimit-reset"), NOW_SECS + reset);
    }
    for (algorithm, retry) in ALGORITHMS.into_iter().zip(retries) {
        let target = format!("{CHECK}?algorithm={algorithm}&key=user:1&permits=60");
        let now = server.clock.now();
        server.clock.advance(Micros::new(retry * 1_000_000 - 1));
        assert_eq!(server.get(&target).status, 429, "{algorithm}: a microsecond before");
        server.clock.advance(Micros::new(1));
        assert_eq!(server.get(&target).status, 200, "{algorithm}: at the promised second");
        server.clock.set(now);
    }
}

#[test]
fn remaining_takes_nothing_and_reset_gives_everything_back() {
    let server = start();
    for algorithm in ALGORITHMS {
        let query = format!("?algorithm={algorithm}&key=user:9");
        let untouched = server.get(&format!("{REMAINING}{query}"));
        assert_eq!(
            untouched.json(),
            json!({"key": "user:9", "algorithm": algorithm, "limit": 100, "remaining": 100, "resetAfterSeconds": 0})
        );
        server.get(&format!("{CHECK}{query}&permits=100"));
        let used_up = server.get(&format!("{REMAINING}{query}"));
        assert_eq!(used_up.status, 200, "also at zero");
        assert_eq!(
            (used_up.json()["remaining"].as_u64(), used_up.number("x-ratelimit-remaining")),
            (Some(0), 0)
        );
        for _ in 0..2 {
            let reset = server.ask("DELETE", &format!("{RESET}{query}"), "", "");
            assert_eq!(reset.status, 200, "also for a key that is not known");
            assert_eq!(
                reset.json(),
                json!({"key": "user:9", "algorithm": algorithm, "message": "Rate limit reset"})
            );
        }
        assert_eq!(server.get(&format!("{REMAINING}{query}")).json()["remaining"], 100);
    }
}

#[test]
fn bad_parameters_are_named_and_cost_nothing() {
    let server = start();
    let cases = [
        ("algorithm=LEAKY", "algorithm"),
        ("algorithm=token_bucket", "algorithm"),
        ("algorithm=", "algorithm"),
        ("key=", "key"),
        ("key=a%0Ab", "key"),
        ("key=%7Btag%7D", "key"),
        ("permits=0", "permits"),
        ("permits=-1", "permits"),
        ("permits=1.5", "permits"),
        ("permits=many", "permits"),
        ("permits=", "permits"),
        ("permits=101", "permits"),
        ("permits=18446744073709551616", "permits"),
        ("permits=1&permits=2", "permits"),
        ("maxWaitMillis=soon", "maxWaitMillis"),
        ("permit=5", "permit"),
    ];
    for (query, parameter) in cases {
        let key = if parameter == "key" { "" } else { "&key=user:1" };
        assert_problem(&server.get(&format!("{CHECK}?{query}{key}")), 400, parameter);
    }
    assert_problem(&server.get(&format!("{CHECK}?key={}", "k".repeat(257))), 400, "key");
    assert_problem(&server.get(&format!("{REMAINING}?key=a&permits=3")), 400, "permits");
    assert_eq!(server.get(&format!("{REMAINING}?key=user:1")).json()["remaining"], 100);
}

#[test]
fn bodies_are_read_like_queries() {
    let server = start();
    let answer = server.post(CHECK, r#"{"key":"user:1","algorithm":"FIXED_WINDOW","permits":40}"#);
    assert_eq!((answer.status, answer.json()["remaining"].clone()), (200, json!(60)));
    for (body, parameter) in [
        ("{", ""),
        ("[]", ""),
        ("\"key\"", ""),
        (r#"{"key":7}"#, "key"),
        (r#"{"permits":"5"}"#, "permits"),
        (r#"{"permits":1.5}"#, "permits"),
        (r#"{"permits":-1}"#, "permits"),
        (r#"{"permits":0}"#, "permits"),
        (r#"{"permits":101}"#, "permits"),
        (r#"{"algorithm":null}"#, "algorithm"),
        (r#"{"keys":"a"}"#, "keys"),
    ] {
        assert_problem(&server.post(CHECK, body), 400, parameter);
    }
    assert_problem(&server.post(CHECK, &format!("{{\"key\":\"{}\"}}", "k".repeat(17_000))), 413, "");
    let chunked = format!(
        "POST {CHECK} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n5000\r\n{}",
        "x".repeat(0x5000)
    );
    assert_eq!(exchange(server.connect(), &chunked).status, 413);
}

#[test]
fn a_bad_item_of_a_plain_batch_gets_its_problem_and_the_others_are_decided() {
    let server = start();
    let batch = format!("{CHECK}/batch");
    let good = r#"{"key":"a","permits":10}"#;
    let bad = [
        r#"{"key":"a","permits":101}"#,
        r#"{"key":"a","permits":0}"#,
        r#"{"key":""}"#,
        r#"{"key":7}"#,
        r#"{"key":"a","key":"a"}"#,
        r#"{"algorithm":"NONE"}"#,
        r#"{"unknown":1}"#,
        r#"{"key":{"a":{}}}"#,
        r#"{"key":"\ud800"}"#,
    ];
    for (number, bad) in bad.iter().enumerate() {
        let response = server.post(&batch, &format!(r#"{{"checks":[{bad},{good}]}}"#));
        assert_eq!(response.status, 200, "{bad}: {response:?}");
        let alone = server.post(CHECK, bad);
        let answers = response.json();
        assert_eq!((alone.status, &answers[0]["status"]), (400, &json!(400)), "{bad}");
        assert_eq!(answers[0], alone.json(), "{bad}: as the item alone");
        assert_eq!(answers[1]["remaining"], 90 - 10 * number, "{bad}: the other is decided");
        assert_eq!(answers.as_array().map(Vec::len), Some(2));
    }
}

#[test]
fn a_batch_is_decided_in_order() {
    let server = start();
    let batch = format!("{CHECK}/batch");
    let valid = r#"{"checks":[{"key":"a","algorithm":"FIXED_WINDOW","permits":60},{"key":"a","algorithm":"FIXED_WINDOW","permits":60},{"key":"b"}]}"#;
    let response = server.post(&batch, valid);
    assert_eq!(response.status, 200);
    assert!(
        response.body.starts_with(r#"[{"allowed":true,"key":"a","algorithm":"FIXED_WINDOW","remaining":40,"#)
    );
    let answers = response.json();
    let allowed: Vec<_> =
        answers.as_array().unwrap().iter().map(|answer| answer["allowed"].clone()).collect();
    assert_eq!(allowed, [true, false, true]);
    for body in [
        "{}",
        "[]",
        r#"{"checks":{}}"#,
        r#"{"checks":[],"more":1}"#,
        r#"{"checks":[{},2]}"#,
        r#"{"checks":[{"a":]}"#,
    ] {
        assert_eq!(server.post(&batch, body).status, 400, "{body}");
    }
    let many = format!(r#"{{"checks":[{}]}}"#, vec!["{}"; 1_001].join(","));
    assert_problem(&server.post(&batch, &many), 400, "checks");
    assert_eq!(server.post(&batch, r#"{"checks":[]}"#).body, "[]");
}

#[test]
fn a_caller_that_waits_gets_a_delay_instead_of_a_denial() {
    let server = start();
    for algorithm in ALGORITHMS {
        let target = format!("{CHECK}?algorithm={algorithm}&key=user:1");
        assert_eq!(server.get(&format!("{target}&permits=100")).status, 200);
        let patient = server.get(&format!("{target}&maxWaitMillis=60000"));
        assert_eq!(patient.status, 200, "{algorithm}");
        let delay = patient.json()["delayMillis"].as_u64().unwrap();
        assert!((1..=60_000).contains(&delay), "{algorithm}: {delay}");
        assert_eq!(patient.json()["retryAfterSeconds"], 0);
    }
}

#[test]
fn a_leaky_bucket_is_a_meter_here() {
    let server = start();
    for _ in 0..100 {
        let answer = server.get(&format!("{CHECK}?algorithm=LEAKY_BUCKET&key=user:1")).json();
        assert_eq!((&answer["allowed"], &answer["delayMillis"]), (&json!(true), &json!(0)));
    }
}

#[test]
fn paths_and_methods_that_are_not_there_say_so() {
    let server = start();
    for (method, target, allow) in [
        ("PUT", CHECK, "GET, POST"),
        ("DELETE", CHECK, "GET, POST"),
        ("GET", "/api/v1/rate-limit/check/batch", "POST"),
        ("POST", REMAINING, "GET"),
        ("GET", RESET, "DELETE"),
        ("POST", "/actuator/health", "GET, HEAD"),
    ] {
        let response = server.ask(method, target, "", "");
        assert_problem(&response, 405, "");
        assert_eq!(response.header("allow"), Some(allow));
    }
    assert_problem(&server.get("/"), 404, "");
    assert_problem(&server.get("/actuator/env"), 404, "");
}

#[test]
fn without_a_key_the_address_of_the_caller_counts() {
    let server = start();
    let answer = server.ask("GET", CHECK, "x-forwarded-for: 6.6.6.6\r\n", "").json();
    assert_eq!(answer["key"], "ip:127.0.0.1", "headers of whoever is not trusted are ignored");
    let behind_proxy = "client_address:\n  header: X-Forwarded-For\n  trusted_proxies: [127.0.0.0/8]\n";
    let server = with(behind_proxy);
    let forwarded = |value: &str| {
        server.ask("GET", CHECK, &format!("x-forwarded-for: {value}\r\n"), "").json()["key"].clone()
    };
    assert_eq!(forwarded("6.6.6.6, 192.0.2.1"), "ip:192.0.2.1");
    assert_eq!(forwarded("2001:db8:1:2:3::4"), "ip:2001:db8:1:2::/64");
}

#[test]
fn beyond_loopback_naming_a_key_requires_a_token() {
    let tokens = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(tokens.path(), "a-token-long-enough\n").unwrap();
    let yaml = format!(
        "listen: 0.0.0.0:0\nadmin: {{ listen: 127.0.0.1:0 }}\napi: {{ token_file: {} }}\n",
        tokens.path().display()
    );
    let server = with(&yaml);
    assert_problem(&server.get(&format!("{CHECK}?key=user:1")), 401, "key");
    assert_eq!(server.get(CHECK).json()["key"], "ip:127.0.0.1", "the own address needs no token");
    assert_problem(&server.get(&format!("{REMAINING}?key=user:1")), 401, "");
    let refused = server.ask("DELETE", &format!("{RESET}?key=user:1"), "authorization: Bearer wrong\r\n", "");
    assert_problem(&refused, 401, "");
    assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
    let known = "authorization: Bearer a-token-long-enough\r\n";
    assert_eq!(server.ask("GET", &format!("{CHECK}?key=user:1"), known, "").json()["key"], "user:1");
    assert_eq!(server.ask("DELETE", &format!("{RESET}?key=user:1"), known, "").status, 200);

    assert_eq!(server.get("/actuator/health").body, r#"{"status":"UP"}"#);
    assert_problem(&server.get("/actuator/info"), 404, "");
    let health = exchange(
        connect(server.admin),
        "GET /actuator/health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    );
    assert_eq!((&health.json()["status"], &health.json()["store"]["status"]), (&json!("UP"), &json!("UP")));
}

#[test]
fn the_actuator_tells_how_the_service_is() {
    let server = start();
    for _ in 0..3 {
        server.get(&format!("{CHECK}?key=user:1&permits=50"));
    }
    assert_eq!(server.get("/actuator/health").body, r#"{"status":"UP"}"#);
    let info = server.get("/actuator/info").json();
    assert_eq!((&info["app"]["name"], &info["store"]["status"]), (&json!("tollgate"), &json!("UP")));
    let plain = server.get("/actuator/prometheus");
    assert!(plain.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    for line in [
        r#"rate_limiter_requests_total{application="distributed-rate-limiter",algorithm="TOKEN_BUCKET",allowed="true",basis="exact"} 2"#,
        r#"rate_limiter_requests_total{application="distributed-rate-limiter",algorithm="TOKEN_BUCKET",allowed="false",basis="exact"} 1"#,
        r#"rate_limiter_check_seconds_count{application="distributed-rate-limiter",algorithm="TOKEN_BUCKET",allowed="true",basis="exact"} 2"#,
        match server.store {
            None => r#"tollgate_keys{application="distributed-rate-limiter"} 1"#,
            Some(_) => {
                r#"tollgate_store_failures_total{application="distributed-rate-limiter",reason="timeout"} 0"#
            }
        },
        "# TYPE rate_limiter_requests_total counter",
        "# TYPE rate_limiter_check_seconds histogram",
        "# TYPE tollgate_build_info gauge",
    ] {
        assert!(plain.body.lines().any(|known| known == line), "{line} in {}", plain.body);
    }
    assert!(!plain.body.contains("user:1"), "no key is a label");
    let open = server.ask(
        "GET",
        "/actuator/prometheus",
        "accept: application/openmetrics-text;version=1.0.0\r\n",
        "",
    );
    assert!(open.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    assert!(open.body.ends_with("# EOF\n"));
}

#[test]
fn the_ratelimit_fields_are_structured_fields() {
    let server = start();
    for (permits, denied) in [(30, false), (90, true)] {
        let response = server.get(&format!("{CHECK}?key=user:1&algorithm=SLIDING_WINDOW&permits={permits}"));
        let status = response.header("ratelimit").unwrap();
        let policy = response.header("ratelimit-policy").unwrap();
        assert_eq!(policy, "\"sliding_window\";q=100;w=60");
        assert_eq!(status, "\"sliding_window\";r=70;t=60", "denied: {denied}");
        for field in [status, policy] {
            sfv::Parser::new(field).parse::<sfv::List>().unwrap();
        }
        if denied {
            assert_eq!(response.header("retry-after"), Some("60"), "not earlier than t");
        }
    }
}

#[test]
fn answers_are_as_the_openapi_document_says() {
    let server = start();
    let document = server.get("/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    let validate = |schema: &str, value: &Value| {
        let mut whole = document["components"].clone();
        let text =
            serde_json::to_string(&whole["schemas"]).unwrap().replace("#/components/schemas/", "#/$defs/");
        whole = json!({ "$ref": format!("#/$defs/{schema}"), "$defs": serde_json::from_str::<Value>(&text).unwrap() });
        let errors: Vec<_> = jsonschema::validator_for(&whole)
            .unwrap()
            .iter_errors(value)
            .map(|why| why.to_string())
            .collect();
        assert!(errors.is_empty(), "{schema}: {errors:?} in {value}");
    };
    for algorithm in ALGORITHMS {
        let query = format!("algorithm={algorithm}&key=user:1");
        validate("KeyAnswer", &server.get(&format!("{CHECK}?{query}&permits=99")).json());
        validate("KeyAnswer", &server.get(&format!("{CHECK}?{query}&permits=99")).json());
        validate("RemainingAnswer", &server.get(&format!("{REMAINING}?{query}")).json());
        validate("ResetAnswer", &server.ask("DELETE", &format!("{RESET}?{query}"), "", "").json());
    }
    validate("Problem", &server.get("/nowhere").json());
    let batch = server.post(&format!("{CHECK}/batch"), r#"{"checks":[{},{"permits":0}]}"#);
    validate("KeyAnswer", &batch.json()[0]);
    validate("Problem", &batch.json()[1]);
    validate(
        "KeyCheck",
        &json!({"key": "user:1", "algorithm": "FIXED_WINDOW", "permits": 3, "maxWaitMillis": 0}),
    );
}

#[test]
fn limits_can_be_set() {
    let yaml = "
api:
  defaults:
    token_bucket: { capacity: 5, refill_rate: 5/min, refill: interval }
    sliding_window_counter: { limit: 7/10s, strict: true }
";
    let server = with(yaml);
    assert_eq!(server.get(&format!("{REMAINING}?key=a")).json()["limit"], 5);
    assert_eq!(server.get(&format!("{REMAINING}?key=a&algorithm=SLIDING_WINDOW_COUNTER")).json()["limit"], 7);
    assert_problem(&server.get(&format!("{CHECK}?key=a&permits=6")), 400, "permits");
}
