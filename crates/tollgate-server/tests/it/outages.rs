//! A store that is gone, as callers and operators see it.

use std::io::Write;

use serde_json::{Value, json};
use tollgate_testkit::wait_until;

use crate::policy_on_redis::POLICY;
use crate::server::{Response, Server};

/// Three limits, each with its own choice.
const MODES: &str = "
api:
  on_store_failure: closed
  defaults:
    token_bucket: { on_store_failure: open }
    fixed_window: { on_store_failure: local }
";

/// A service whose store is gone, and that knows it.
fn without_store(yaml: &str) -> Server {
    let mut server = Server::on_redis(yaml);
    wait_until("the service has counted itself", || info(&server)["store"]["nodes"] == 1);
    server.store.as_mut().unwrap().kill();
    wait_until("the breaker is open", || {
        check(&server, "SLIDING_WINDOW", 1);
        let breakers = info(&server)["store"]["breakers"].clone();
        breakers.as_object().unwrap().values().all(|state| state == "open")
    });
    server
}

fn info(server: &Server) -> Value {
    server.get("/actuator/info").json()
}

fn check(server: &Server, algorithm: &str, permits: u64) -> Response {
    server.get(&format!("/api/v1/rate-limit/check?key=user:1&algorithm={algorithm}&permits={permits}"))
}

#[test]
fn every_answer_says_its_ground_and_no_mode_but_closed_is_an_error() {
    let server = without_store(MODES);
    let open = check(&server, "TOKEN_BUCKET", 100);
    assert_eq!((open.status, open.header("x-tollgate-basis")), (200, Some("open")));
    let expected = json!({
        "allowed": true, "key": "user:1", "algorithm": "TOKEN_BUCKET", "remaining": 100, "resetAfterSeconds": 0,
        "retryAfterSeconds": 0, "message": "Request allowed", "limit": 100, "basis": "open", "delayMillis": 0, "retryAfterMillis": 0
    });
    assert_eq!(open.json(), expected);
    assert_eq!(open.header("retry-after"), None);

    let local = check(&server, "FIXED_WINDOW", 60);
    assert_eq!((local.status, local.header("x-tollgate-basis")), (200, Some("local")));
    assert_eq!((&local.json()["basis"], &local.json()["remaining"]), (&json!("local"), &json!(40)));
    let denied = check(&server, "FIXED_WINDOW", 60);
    assert_eq!((denied.status, denied.header("x-tollgate-basis")), (429, Some("local")));
    assert_eq!(denied.number("retry-after"), 30, "until the window ends");

    let closed = check(&server, "LEAKY_BUCKET", 1);
    assert_eq!((closed.status, closed.header("x-tollgate-basis")), (503, Some("closed")));
    assert_eq!(closed.number("retry-after"), 1);
    assert!(closed.json()["type"].as_str().unwrap().ends_with("#temporary-reduced-capacity"));

    let batch = server.post(
        "/api/v1/rate-limit/check/batch",
        r#"{"checks":[{"key":"a"},{"key":"a","algorithm":"FIXED_WINDOW"},{"key":"a","algorithm":"SLIDING_WINDOW"}]}"#,
    );
    let answers: Vec<_> = batch.json().as_array().unwrap().clone();
    let grounds: Vec<_> = answers.iter().map(|it| (it["allowed"].clone(), it["basis"].clone())).collect();
    let expected = [(true, "open"), (true, "local"), (false, "closed")].map(|(a, b)| (json!(a), json!(b)));
    assert_eq!((batch.status, grounds), (200, expected.to_vec()));

    let status = |algorithm| {
        let response = server.get(&format!("/api/v1/rate-limit/remaining?key=user:1&algorithm={algorithm}"));
        (
            response.status,
            response.header("x-tollgate-basis").unwrap().to_owned(),
            response.json()["remaining"].clone(),
        )
    };
    assert_eq!(status("TOKEN_BUCKET"), (200, "open".into(), json!(100)));
    assert_eq!(status("FIXED_WINDOW"), (200, "local".into(), json!(40)));
    assert_eq!(status("LEAKY_BUCKET").0, 503);
    let reset = server.ask("DELETE", "/api/v1/rate-limit/reset?key=user:1", "", "");
    assert_eq!(reset.status, 503, "what was not done is not said to be done");
    assert!(reset.body.contains("was not reset"), "{}", reset.body);
}

#[test]
fn an_outage_is_in_health_info_and_metrics() {
    let mut server = without_store(MODES);
    check(&server, "TOKEN_BUCKET", 1);
    check(&server, "FIXED_WINDOW", 1);
    let health = server.get("/actuator/health");
    assert_eq!((health.status, &health.json()["status"]), (200, &json!("UP")), "it answers by its contract");
    assert_eq!(server.get("/actuator/info").json()["store"]["status"], "DOWN");
    let metrics = || server.get("/actuator/prometheus").body;
    let label = r#"application="distributed-rate-limiter""#;
    let address = server.store.as_ref().unwrap().socket().display().to_string();
    for line in [
        format!(
            r#"rate_limiter_requests_total{{{label},algorithm="TOKEN_BUCKET",allowed="true",basis="open"}} 1"#
        ),
        format!(
            r#"rate_limiter_requests_total{{{label},algorithm="FIXED_WINDOW",allowed="true",basis="local"}} 1"#
        ),
        format!(r#"tollgate_breaker_state{{{label},server="{address}"}} 2"#),
        format!("tollgate_nodes{{{label}}} 1"),
        format!("tollgate_local_keys{{{label}}} 1"),
        format!("tollgate_debt_permits{{{label}}} 0"),
    ] {
        assert!(metrics().contains(&line), "{line} in {}", metrics());
    }
    assert!(
        !metrics().contains(&format!(r#"tollgate_breaker_opened_total{{{label},server="{address}"}} 0"#))
    );
    server.store.as_mut().unwrap().restart();
    wait_until("the store decides again", || {
        check(&server, "TOKEN_BUCKET", 1).header("x-tollgate-basis") == Some("exact")
    });
    wait_until("the service says nothing of it", || {
        check(&server, "TOKEN_BUCKET", 1);
        server.get("/actuator/info").json()["store"]["status"] == "UP"
    });
}

#[test]
fn a_refusal_without_the_store_can_look_like_any_other() {
    let server = without_store("api: { on_store_failure: closed, closed_status: 429 }");
    let closed = check(&server, "TOKEN_BUCKET", 1);
    assert_eq!((closed.status, closed.header("x-tollgate-basis")), (429, Some("closed")));
    assert_eq!((&closed.json()["allowed"], &closed.json()["basis"]), (&json!(false), &json!("closed")));
    assert_eq!(closed.number("retry-after"), 1);
}

#[test]
fn a_node_that_fails_open_stops_at_its_ceiling() {
    let server = without_store("guard: { open_ceiling: { burst: 3, rate: 1/1h } }");
    let statuses: Vec<_> = (0..4).map(|_| check(&server, "TOKEN_BUCKET", 1).status).collect();
    assert!(statuses.ends_with(&[429]), "{statuses:?}");
    let denied = check(&server, "TOKEN_BUCKET", 1);
    assert_eq!((denied.status, denied.header("x-tollgate-basis")), (429, Some("open")));
}

#[test]
fn a_service_that_stops_says_so_and_answers_whoever_still_asks() {
    let server = Server::with("server: { drain_delay: 2s }");
    let mut kept = server.connect();
    server.tell_to_stop();
    let health = server.get("/actuator/health");
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("OUT_OF_SERVICE")));
    // New connections and old ones are answered, and told to go elsewhere.
    kept.write_all(b"GET /api/v1/rate-limit/check?key=a HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut kept, &mut text).unwrap();
    let last = Response::parse(&text);
    assert_eq!((last.status, last.header("connection")), (200, Some("close")));
    server.wait();
}

#[test]
fn each_rule_of_a_policy_has_its_own_choice() {
    let indented: String = POLICY.lines().map(|line| format!("  {line}\n")).collect();
    let server = without_store(&format!("policy:\n{indented}"));
    let judged = |request: &Value| {
        let response = server.post("/api/v1/check", &request.to_string());
        (response.status, response.header("x-tollgate-basis").unwrap_or_default().to_owned())
    };
    let login = json!({ "ip": "192.0.2.1", "path": "/api/login", "method": "POST" });
    let payment = json!({ "ip": "192.0.2.1", "user": "alice", "path": "/api/payment/card" });
    for closed in [login, payment] {
        assert_eq!(judged(&closed), (503, "closed".to_owned()), "{closed}");
    }
    let search = json!({ "ip": "192.0.2.1", "path": "/api/search/books" });
    assert_eq!(judged(&search), (200, "open".to_owned()));
    assert_eq!(judged(&json!({ "ip": "192.0.2.1" })), (200, "open".to_owned()), "one limit alone, too");
    let anonymous = json!({ "ip": "192.0.2.1", "path": "/api/payment/card" });
    assert_eq!(judged(&anonymous).0, 403, "what needs no store needs none");
}

#[test]
fn the_failure_mode_of_the_api_is_the_default_of_policies_in_files_in_the_configuration_and_pushed() {
    let policy = "rules:
  - { name: silent, match: { path: /silent }, key: ip, limit: 100/min }
  - { name: open, match: { path: /open }, key: ip, limit: 100/min, on_store_failure: open }
default: 100/min
";
    let judged = |server: &Server, path: &str| {
        let response = server.post("/api/v1/check", &json!({ "ip": "192.0.2.1", "path": path }).to_string());
        (response.status, response.header("x-tollgate-basis").unwrap_or_default().to_owned())
    };
    let api = "api: { on_store_failure: closed }\n";
    let indented: String = policy.lines().map(|line| format!("  {line}\n")).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), policy).unwrap();
    let in_file = format!("{api}policy: {}\n", file.path().display());
    for (yaml, is_pushed) in
        [(format!("{api}policy:\n{indented}"), false), (in_file, false), (api.to_owned(), true)]
    {
        let mut server = Server::on_redis(&yaml);
        if is_pushed {
            assert_eq!(server.ask("PUT", "/admin/policy", "", policy).status, 200);
        }
        assert_eq!(judged(&server, "/silent"), (200, "exact".to_owned()));
        server.store.as_mut().unwrap().kill();
        wait_until("the store is known to be gone", || judged(&server, "/open") == (200, "open".to_owned()));
        for path in ["/silent", "/elsewhere"] {
            assert_eq!(judged(&server, path), (503, "closed".to_owned()), "{path} {yaml}");
        }
    }
    let own = policy.replace("default:", "on_store_failure: open\ndefault:");
    let indented: String = own.lines().map(|line| format!("  {line}\n")).collect();
    let server = without_store(&format!("{api}policy:\n{indented}"));
    assert_eq!(judged(&server, "/silent"), (200, "open".to_owned()), "the policy's own choice comes first");
}
