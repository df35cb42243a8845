//! Requests that could be read in two ways are refused; series of rules that are gone are gone.

use crate::server::{Server, exchange};

const CHECK: &str = "/api/v1/rate-limit/check";

#[test]
fn a_query_that_is_not_utf8_is_400() {
    let server = Server::start();
    for (query, parameter) in [
        ("key=%FF", "key"),
        ("key=a%C3", "key"),
        ("key=%ed%a0%80", "key"),
        ("key=a&algorithm=%FF", "algorithm"),
    ] {
        let answer = server.get(&format!("{CHECK}?{query}"));
        assert_eq!(
            (answer.status, &answer.json()["parameter"]),
            (400, &parameter.into()),
            "{query}: {answer:?}"
        );
    }
    assert_eq!(server.get(&format!("{CHECK}?%FF=a")).status, 400);
    for (query, key) in [("key=Gr%C3%BC%C3%9Fe", "Grüße"), ("key=a+b%2Bc", "a b+c"), ("&&key=a=b", "a=b")] {
        let answer = server.get(&format!("{CHECK}?{query}"));
        assert_eq!((answer.status, &answer.json()["key"]), (200, &key.into()), "{query}: {answer:?}");
    }
}

#[test]
fn repeated_json_members_are_400_everywhere() {
    let server = Server::with(
        "policy: { tiers: { free: 5/s, pro: 9/s }, rules: [{ name: a, key: user, tier: from_request }] }\n",
    );
    for (method, target, body) in [
        ("POST", CHECK, r#"{"key":"a","key":"b"}"#),
        ("POST", CHECK, r#"{"key":"a","\u006bey":"a"}"#),
        ("POST", "/api/v1/rate-limit/check/batch", r#"{"checks":[],"checks":[{"key":"b"}]}"#),
        ("POST", "/api/v1/check", r#"{"user":"a","user":"b"}"#),
        ("POST", "/api/v1/check", r#"{"headers":{"x-a":"1","x-a":"2"}}"#),
        ("POST", "/api/v1/check", r#"{"headers":{"x-a":"1","X-A":"2"}}"#),
        ("POST", "/api/v1/explain", r#"{"ip":"192.0.2.1","ip":"192.0.2.2"}"#),
        ("PUT", "/admin/tiers/users/alice", r#"{"tier":"free","tier":"pro"}"#),
    ] {
        let answer = server.ask(method, target, "", body);
        assert_eq!(answer.status, 400, "{method} {target} {body}: {answer:?}");
        assert!(answer.json()["detail"].as_str().unwrap().contains("more than once"), "{answer:?}");
    }
    for (target, body) in [
        ("/api/v1/rate-limit/check/batch", r#"{"checks":[{"key":"a","key":"b"}]}"#),
        ("/api/v1/check/batch", r#"{"checks":[{"query":{"a":"1","a":"1"}}]}"#),
    ] {
        let answers = server.post(target, body).json();
        assert_eq!(answers[0]["status"], 400, "{target} {body}: {answers}");
        assert!(answers[0]["detail"].as_str().unwrap().contains("more than once"), "{answers}");
    }
    let once = server.ask("PUT", "/admin/tiers/users/alice", "", r#"{"tier":"pro"}"#);
    assert_eq!(once.status, 200, "{once:?}");
}

#[test]
fn a_request_needs_exactly_one_host() {
    let server = Server::start();
    let outside = Server::with("listen: 0.0.0.0:0\nadmin: { listen: 127.0.0.1:0 }\n");
    let ask = |address, version: &str, hosts: &str| {
        let request = format!("GET /actuator/health HTTP/{version}\r\nconnection: close\r\n{hosts}\r\n");
        exchange(crate::server::connect(address), &request).status
    };
    for address in [server.address, outside.admin] {
        assert_eq!(ask(address, "1.1", "host: localhost\r\n"), 200);
        assert_eq!(ask(address, "1.0", ""), 200, "HTTP/1.0 has no Host");
        for hosts in ["", "host: localhost\r\nhost: localhost\r\n", "host: localhost\r\nHost: other\r\n"] {
            assert_eq!(ask(address, "1.1", hosts), 400, "{hosts:?}");
        }
        assert_eq!(ask(address, "1.0", "host: a\r\nhost: b\r\n"), 400);
    }
}

#[test]
fn with_more_than_32_hops_the_rightmost_ones_are_read() {
    let server = Server::with(
        "client_address: { header: X-Forwarded-For, trusted_proxies: [127.0.0.0/8, 10.0.0.0/8] }\n",
    );
    let key = |header: &str| {
        let answer = server.ask("GET", CHECK, &format!("x-forwarded-for: {header}\r\n"), "");
        answer.json()["key"].clone()
    };
    let invented = "6.6.6.6, ".repeat(500);
    assert_eq!(key(&format!("{invented}198.51.100.7")), "ip:198.51.100.7");
    assert_eq!(key(&format!("{invented}198.51.100.7, 10.0.0.2")), "ip:198.51.100.7");
}

#[test]
fn metric_series_of_withdrawn_policies_go_away() {
    let server = Server::with("policy: { rules: [{ name: own, key: user, limit: 5/s }] }\n");
    let series = |rule: &str| {
        let metrics = server.get("/actuator/prometheus").body;
        let label = format!("rule=\"{rule}\"");
        metrics.lines().filter(|line| line.contains(&label)).count()
    };
    let check = || assert_eq!(server.post("/api/v1/check", r#"{"user":"alice"}"#).status, 200);
    check();
    assert!(series("own") > 0 && series("pushed") == 0);
    let pushed = "rules: [{ name: pushed, key: user, limit: 5/s }, { name: own, key: user, limit: 6/s }]\n";
    assert_eq!(server.ask("PUT", "/admin/policy", "", pushed).status, 200);
    check();
    assert!(series("pushed") > 0);
    let counted = |metrics: &str| {
        let line =
            metrics.lines().find(|line| line.contains("rule=\"own\",role=\"enforced\",allowed=\"true\""));
        line.unwrap().rsplit_once(' ').unwrap().1.to_owned()
    };
    assert_eq!(counted(&server.get("/actuator/prometheus").body), "2", "a rule that stays goes on counting");
    assert_eq!(server.ask("DELETE", "/admin/policy", "", "").status, 200);
    check();
    assert!(series("own") > 0);
    assert_eq!(series("pushed"), 0, "its policy is withdrawn");
}
