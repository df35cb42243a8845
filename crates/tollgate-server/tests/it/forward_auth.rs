//! Forward-auth: reverse proxies ask whether a request of their client may go ahead.

use serde_json::json;
use tempfile::NamedTempFile;

use crate::server::{NOW_SECS, Response, Server, connect, exchange};

const DIALECTS: [&str; 5] = ["nginx", "traefik", "caddy", "haproxy", "envoy"];
/// The proxies are on this machine.
const TRUSTED: &str = "client_address: { trusted_proxies: [127.0.0.1/32] }\n";
const TWO_A_MINUTE: &str =
    "policy: { rules: [{ name: two, key: ip, limit: 2/min, algorithm: FIXED_WINDOW }] }\n";

fn with(yaml: &str) -> Server {
    Server::with(&format!("{TRUSTED}{yaml}"))
}

/// A request of a proxy's client.
#[derive(Clone, Copy)]
struct Original<'a> {
    method: &'a str,
    host: &'a str,
    target: &'a str,
    ip: &'a str,
    /// Further header lines of the client.
    headers: &'a str,
}

const ORIGINAL: Original<'static> =
    Original { method: "GET", host: "shop.example", target: "/items", ip: "198.51.100.1", headers: "" };

/// The call that a proxy makes for a request, as real proxies were seen to make it.
fn call(server: &Server, proxy: &str, original: Original<'_>) -> Response {
    let Original { method, host, target, ip, headers } = original;
    match proxy {
        "nginx" => {
            let described = format!(
                "x-original-uri: {target}\r\nx-original-method: {method}\r\nx-original-host: {host}\r\nx-real-ip: {ip}\r\n{headers}"
            );
            server.ask("GET", "/forward-auth/nginx", &described, "")
        }
        "envoy" => {
            let call = format!(
                "{method} /forward-auth/envoy{target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\nvia: 1.1 envoy\r\nx-real-ip: {ip}\r\n{headers}\r\n"
            );
            exchange(server.connect(), &call)
        }
        _ => {
            let described = format!(
                "x-forwarded-uri: {target}\r\nx-forwarded-method: {method}\r\nx-forwarded-host: {host}\r\nx-forwarded-for: {ip}\r\n{headers}"
            );
            server.ask("GET", &format!("/forward-auth/{proxy}"), &described, "")
        }
    }
}

/// The status that the proxy gets, and the status that it means.
fn statuses(response: &Response) -> (u16, u16) {
    let meant = response.header("x-tollgate-status").map(|status| status.parse().unwrap());
    (response.status, meant.unwrap_or(response.status))
}

/// Whether the request would be let through.
fn passes(response: &Response) -> bool {
    (200..300).contains(&response.status)
}

/// The permits left of the limit of an address, without taking one.
fn remaining(server: &Server, ip: &str) -> u64 {
    let body = json!({ "ip": ip, "path": "/items" }).to_string();
    server.post("/api/v1/explain", &body).json()["remaining"].as_u64().unwrap()
}

#[test]
fn every_dialect_passes_up_to_the_limit_and_then_denies() {
    for proxy in DIALECTS {
        let server = with(TWO_A_MINUTE);
        for left in [1, 0] {
            let allowed = call(&server, proxy, ORIGINAL);
            assert_eq!((allowed.status, allowed.body.as_str()), (200, ""), "{proxy}: {allowed:?}");
            assert_eq!(allowed.number("x-ratelimit-limit"), 2);
            assert_eq!(allowed.number("x-ratelimit-remaining"), left);
            assert_eq!(allowed.header("ratelimit"), Some(&*format!("\"fixed_window:two\";r={left};t=30")));
            assert_eq!(allowed.header("ratelimit-policy"), Some("\"fixed_window:two\";q=2;w=60"));
            assert_eq!(allowed.header("cache-control"), Some("no-store"));
            assert_eq!((allowed.header("retry-after"), allowed.header("content-type")), (None, None));
        }
        let denied = call(&server, proxy, ORIGINAL);
        let expected = if proxy == "nginx" { 403 } else { 429 };
        assert_eq!(statuses(&denied), (expected, 429), "{proxy}: {denied:?}");
        assert_eq!(denied.number("retry-after"), 30);
        assert_eq!(denied.number("x-ratelimit-remaining"), 0);
        assert_eq!(denied.number("x-ratelimit-reset"), NOW_SECS + 30);
        assert_eq!(denied.header("x-tollgate-basis"), Some("exact"));
        assert_eq!(denied.header("content-type"), Some("application/problem+json"));
        assert_eq!(
            denied.json(),
            json!({
                "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "title": "Too Many Requests", "status": 429, "code": "TOO_MANY_REQUESTS",
                "message": "Rate limit exceeded. Please retry after 30 seconds.",
                "limit": 2, "remaining": 0, "resetAt": "2025-11-15T20:11:00Z", "retryAfterSeconds": 30
            })
        );
        let other = call(&server, proxy, Original { ip: "198.51.100.2", ..ORIGINAL });
        assert_eq!(other.status, 200, "{proxy}: another client has its own limit");
    }
}

#[test]
fn rules_read_the_method_host_path_query_and_headers_of_the_client() {
    let policy = "
policy:
  rules:
    - { name: exact, match: { method: POST, host: shop.example, path: /a/b, query: { mode: slow }, header: { X-Plan: free } },
        key: query:user, limit: 1/min }
";
    let matching = Original {
        method: "POST",
        host: "SHOP.example:8443",
        target: "/a/b?mode=slow&user=j%C3%BCrgen+x",
        headers: "x-plan: free\r\n",
        ..ORIGINAL
    };
    let others = [
        Original { method: "GET", ..matching },
        Original { host: "other.example", ..matching },
        Original { target: "/a/c?mode=slow&user=x", ..matching },
        Original { target: "/a/b?mode=fast&user=x", ..matching },
        Original { headers: "x-plan: paid\r\n", ..matching },
    ];
    for proxy in DIALECTS {
        let server = with(policy);
        assert_eq!(call(&server, proxy, matching).number("x-ratelimit-remaining"), 0, "{proxy}");
        assert!(!passes(&call(&server, proxy, matching)), "{proxy}");
        let same = Original { target: "/a/b?%6Dode=sl%6Fw&user=j%c3%bcrgen%20x", ..matching };
        assert!(!passes(&call(&server, proxy, same)), "{proxy}: the same parameters, written otherwise");
        let another = Original { target: "/a/b?mode=slow&user=y", ..matching };
        assert!(passes(&call(&server, proxy, another)), "{proxy}: another key");
        for other in others {
            let answer = call(&server, proxy, other);
            assert_eq!(
                (answer.status, answer.header("x-ratelimit-limit")),
                (200, None),
                "{proxy}: {answer:?}"
            );
        }
    }
}

#[test]
fn every_method_is_answered() {
    let server =
        with("policy: { rules: [{ name: deletes, match: { method: DELETE }, key: ip, limit: 1/min }] }\n");
    for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"] {
        let answer = call(&server, "envoy", Original { method, ..ORIGINAL });
        assert_eq!(answer.header("x-ratelimit-limit").is_some(), method == "DELETE", "{method}: {answer:?}");
        let described = "x-forwarded-uri: /\r\nx-forwarded-method: GET\r\nx-forwarded-host: a\r\nx-forwarded-for: 192.0.2.1\r\n";
        assert_eq!(server.ask(method, "/forward-auth/traefik", described, "").status, 200, "{method}");
    }
}

#[test]
fn request_of_a_client_costs_what_the_rule_says() {
    let server = with("policy: { rules: [{ name: costly, key: ip, limit: 10/min, cost: 4 }] }\n");
    let left = [6, 2].map(|left| (call(&server, "traefik", ORIGINAL).number("x-ratelimit-remaining"), left));
    assert!(left.iter().all(|(found, expected)| found == expected), "{left:?}");
    assert_eq!(call(&server, "traefik", ORIGINAL).status, 429);
}

#[test]
fn request_that_would_have_to_wait_is_denied_and_reserves_nothing() {
    for proxy in DIALECTS {
        let server =
            with("policy: { rules: [{ name: paced, key: ip, limit: 1/s burst 1, max_wait: 10s }] }\n");
        assert!(passes(&call(&server, proxy, ORIGINAL)), "{proxy}");
        for _ in 0..3 {
            let denied = call(&server, proxy, ORIGINAL);
            assert_eq!((statuses(&denied).1, denied.number("retry-after")), (429, 1), "{proxy}: {denied:?}");
        }
    }
}

#[test]
fn empty_key_keeps_the_status_of_its_rule() {
    for (status, to_nginx) in [(401, 401), (403, 403), (400, 403)] {
        let server = with(&format!(
            "policy: {{ rules: [{{ name: users, key: user, limit: 5/min, deny_empty_key: {status} }}] }}\n"
        ));
        for proxy in DIALECTS {
            let refused = call(&server, proxy, ORIGINAL);
            let expected = if proxy == "nginx" { to_nginx } else { status };
            assert_eq!(statuses(&refused), (expected, status), "{proxy}: {refused:?}");
            assert_eq!(refused.json()["code"], "EMPTY_KEY");
        }
    }
}

#[test]
fn closed_limit_is_503_and_for_nginx_403() {
    let closed = "store: redis://127.0.0.1:1\npolicy: { on_store_failure: closed, rules: [{ name: two, key: ip, limit: 2/min }] }\n";
    let server = with(closed);
    for proxy in DIALECTS {
        let answer = call(&server, proxy, ORIGINAL);
        let expected = if proxy == "nginx" { 403 } else { 503 };
        assert_eq!(statuses(&answer), (expected, 503), "{proxy}: {answer:?}");
        assert_eq!((answer.number("retry-after"), answer.header("x-tollgate-basis")), (1, Some("closed")));
        assert!(answer.json()["type"].as_str().unwrap().ends_with("#temporary-reduced-capacity"));
    }
    let server = with(&format!("api: {{ closed_status: 429 }}\n{closed}"));
    let answer = call(&server, "envoy", ORIGINAL);
    assert_eq!((answer.status, &answer.json()["code"]), (429, &json!("TOO_MANY_REQUESTS")), "{answer:?}");
}

#[test]
fn open_limit_passes_while_the_store_is_gone() {
    let server = with(&format!("store: redis://127.0.0.1:1\n{TWO_A_MINUTE}"));
    for proxy in DIALECTS {
        let answer = call(&server, proxy, ORIGINAL);
        assert_eq!((answer.status, answer.header("x-tollgate-basis")), (200, Some("open")), "{proxy}");
    }
}

#[test]
fn callers_are_identified_by_the_headers_of_the_client() {
    let known = NamedTempFile::new().unwrap();
    // The SHA-256 digest of the API key `test`.
    std::fs::write(known.path(), "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n")
        .unwrap();
    let yaml = format!(
        "identity: {{ api_key: {{ known_file: {} }}, trusted_header: {{ user: X-User }} }}\n\
         policy: {{ rules: [{{ name: keys, match: {{ identity: api_key }}, key: api_key, limit: 5/min }}, \
         {{ name: users, match: {{ identity: user }}, key: user, limit: 7/min }}, \
         {{ name: others, match: {{ identity: anonymous }}, key: ip, limit: 3/min }}] }}\n",
        known.path().display()
    );
    for proxy in DIALECTS {
        let server = with(&yaml);
        let limit =
            |headers| call(&server, proxy, Original { headers, ..ORIGINAL }).number("x-ratelimit-limit");
        assert_eq!(limit("x-api-key: test\r\n"), 5, "{proxy}");
        assert_eq!(limit("x-api-key: invented\r\n"), 3, "{proxy}: an unknown key counts by address");
        assert_eq!(limit("x-api-key: test\r\nx-api-key: test\r\n"), 3, "{proxy}: two keys are none");
        assert_eq!(limit("x-user: alice\r\n"), 7, "{proxy}: a trusted proxy overwrites trusted headers");
        assert_eq!(
            limit("authorization: Bearer of-the-client\r\n"),
            3,
            "{proxy}: it is not a token of the API"
        );
    }
}

#[test]
fn missing_and_malformed_headers_are_named_and_never_pass() {
    let described = [
        ("nginx", "x-original-uri", "/items"),
        ("nginx", "x-original-method", "GET"),
        ("nginx", "x-real-ip", "198.51.100.1"),
        ("traefik", "x-forwarded-uri", "/items"),
        ("traefik", "x-forwarded-method", "GET"),
        ("traefik", "x-forwarded-host", "shop.example"),
        ("traefik", "x-forwarded-for", "198.51.100.1"),
    ];
    let server = with(TWO_A_MINUTE);
    let ask = |proxy: &str, without: &str, further: &str| {
        let kept = described.iter().filter(|(of, name, _)| *of == proxy && *name != without);
        let lines: String = kept.map(|(_, name, value)| format!("{name}: {value}\r\n")).collect();
        server.ask("GET", &format!("/forward-auth/{proxy}"), &format!("{lines}{further}"), "")
    };
    let refused = |answer: &Response, names: &str| {
        assert_eq!(statuses(answer).1, 400, "{names}: {answer:?}");
        assert!(!passes(answer) && answer.header("x-ratelimit-limit").is_none(), "{names}");
        assert!(answer.json()["detail"].as_str().unwrap().contains(names), "{names}: {answer:?}");
    };
    for (proxy, name, value) in described {
        refused(&ask(proxy, name, ""), name);
        if !["x-real-ip", "x-forwarded-for"].contains(&name) {
            refused(&ask(proxy, "", &format!("{name}: {value}\r\n")), name);
        }
    }
    for (proxy, name, value, names) in [
        ("nginx", "x-original-uri", "items", "original path"),
        ("nginx", "x-original-uri", "*", "original path"),
        ("nginx", "x-original-uri", "", "original path"),
        ("nginx", "x-original-uri", "http://shop.example/items", "original path"),
        ("nginx", "x-original-method", "GE T", "original method"),
        ("nginx", "x-original-method", "", "original method"),
        ("nginx", "x-real-ip", "unknown", "x-real-ip"),
        ("nginx", "x-real-ip", "", "x-real-ip"),
        ("traefik", "x-forwarded-for", "198.51.100.1, _hidden", "x-forwarded-for"),
        ("traefik", "x-forwarded-for", "198.51.100.1.5", "x-forwarded-for"),
    ] {
        refused(&ask(proxy, name, &format!("{name}: {value}\r\n")), names);
    }
    let long = format!("x-forwarded-uri: /{}\r\n", "a".repeat(5_000));
    refused(&ask("traefik", "x-forwarded-uri", &long), "4096 bytes");
    refused(&server.ask("GET", "/forward-auth/envoy/items", "", ""), "x-real-ip");
    refused(&server.ask("GET", "/forward-auth/envoy", "x-real-ip: 198.51.100.1\r\n", ""), "original path");
    for path in [
        "/forward-auth/apache",
        "/forward-auth/",
        "/forward-auth",
        "/forward-auth/traefik/x",
        "/forward-auth/envoyx",
    ] {
        assert_eq!(server.get(path).status, 404, "{path}");
    }
    assert_eq!(remaining(&server, "198.51.100.1"), 2, "nothing was taken");
}

#[test]
fn repeated_parameter_that_a_rule_reads_is_refused() {
    let server = with(
        "policy: { rules: [{ name: slow, match: { query: { mode: slow } }, key: ip, limit: 2/min }] }\n",
    );
    for proxy in DIALECTS {
        let ask = |target| call(&server, proxy, Original { target, ..ORIGINAL });
        let refused = ask("/items?mode=fast&%6dode=slow");
        assert_eq!((passes(&refused), statuses(&refused).1), (false, 400), "{proxy}: {refused:?}");
        assert_eq!(refused.json()["parameter"], "mode");
        assert!(passes(&ask("/items?tag=a&tag=b")), "{proxy}: no rule reads it");
        assert!(passes(&ask("/items?%FF=%FE&&=&a")), "{proxy}: not UTF-8");
    }
}

#[test]
fn client_cannot_choose_its_address() {
    let server = with(TWO_A_MINUTE);
    for forged in ["6.6.6.6, 198.51.100.1", "6.6.6.6, 198.51.100.1, 127.0.0.1", "\"6.6.6.6, 198.51.100.1"] {
        let server = with(TWO_A_MINUTE);
        assert!(passes(&call(&server, "traefik", Original { ip: forged, ..ORIGINAL })));
        assert_eq!((remaining(&server, "198.51.100.1"), remaining(&server, "6.6.6.6")), (1, 2), "{forged}");
    }
    let further = "x-forwarded-for: 6.6.6.6\r\nforwarded: for=6.6.6.6\r\n";
    assert!(passes(&call(&server, "nginx", Original { headers: further, ..ORIGINAL })));
    assert_eq!((remaining(&server, "198.51.100.1"), remaining(&server, "6.6.6.6")), (1, 2));
}

#[test]
fn only_trusted_proxies_are_answered() {
    for settings in ["", "client_address: { trusted_proxies: [10.0.0.0/8] }\n"] {
        for listen in ["127.0.0.1:0", "0.0.0.0:0"] {
            let tokens = NamedTempFile::new().unwrap();
            std::fs::write(tokens.path(), "a-token-long-enough\n").unwrap();
            let api = format!("listen: {listen}\napi: {{ token_file: {} }}\n", tokens.path().display());
            for api in [api.as_str(), ""] {
                let server = Server::with(&format!("{settings}{api}{TWO_A_MINUTE}"));
                for proxy in DIALECTS {
                    let headers = "authorization: Bearer a-token-long-enough\r\n";
                    let refused = call(&server, proxy, Original { headers, ..ORIGINAL });
                    assert_eq!(statuses(&refused), (403, 403), "{proxy}: {refused:?}");
                    assert_eq!(refused.header("x-ratelimit-limit"), None);
                    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
                    assert!(detail.contains("client_address.trusted_proxies"), "{detail}");
                }
            }
        }
    }
    let server = Server::with(TWO_A_MINUTE);
    call(&server, "traefik", ORIGINAL);
    let metrics = server.get("/actuator/prometheus").body;
    assert!(metrics.contains("reason=\"not_a_proxy\"} 1"), "{metrics}");
    assert_eq!(remaining(&server, "198.51.100.1"), 2, "nothing was taken");
}

#[test]
fn web_page_on_this_machine_takes_and_learns_nothing() {
    let server = with(TWO_A_MINUTE);
    let described = "x-forwarded-uri: /items\r\nx-forwarded-method: GET\r\nx-forwarded-host: a\r\nx-forwarded-for: 198.51.100.1\r\nx-original-uri: /items\r\nx-original-method: GET\r\nx-real-ip: 198.51.100.1\r\n";
    let ask = |path: &str, host: &str, headers: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}\r\n");
        exchange(connect(server.address), &request)
    };
    let paths =
        DIALECTS.map(|proxy| format!("/forward-auth/{proxy}{}", if proxy == "envoy" { "/x" } else { "" }));
    for path in &paths {
        // A page under a rebound DNS name can send any header but a few, and read the answer.
        let rebound = ask(path, "evil.example:8080", described);
        assert_eq!(rebound.status, 403, "{path}: {rebound:?}");
        assert!(rebound.json()["detail"].as_str().unwrap().contains("Via"), "{rebound:?}");
        // A page of another origin can send no such header without being allowed to.
        for origin in ["origin: http://evil.example\r\n", "sec-fetch-site: cross-site\r\n", ""] {
            assert_eq!(statuses(&ask(path, "127.0.0.1", origin)).1, 400, "{path} {origin}");
        }
        let preflight = format!(
            "OPTIONS {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\norigin: http://evil.example\r\naccess-control-request-method: GET\r\naccess-control-request-headers: x-forwarded-uri\r\n\r\n"
        );
        let preflight = exchange(server.connect(), &preflight);
        assert_eq!(statuses(&preflight).1, 400, "{path}");
        assert_eq!(preflight.header("access-control-allow-origin"), None);
    }
    assert_eq!(remaining(&server, "198.51.100.1"), 2, "nothing was taken");
    // Clients of proxies are web pages, too.
    let page = "origin: http://evil.example\r\nsec-fetch-site: cross-site\r\n";
    assert!(passes(&call(&server, "traefik", Original { headers: page, ..ORIGINAL })));
    // The path is no way around the checks of the other pages.
    for path in ["/forward-auth/envoy/../../admin/policy", "/forward-auth/../admin/policy", "/forward-auth/x"]
    {
        let answer = ask(path, "evil.example", "via: 1.1 x\r\n");
        assert!([400, 403].contains(&answer.status), "{path}: {answer:?}");
    }
}

#[test]
fn proxy_that_sends_the_host_of_its_client_needs_a_via_header() {
    let server = with(TWO_A_MINUTE);
    let caddy = |via: &str| {
        let described = "x-forwarded-uri: /items\r\nx-forwarded-method: GET\r\nx-forwarded-host: a\r\nx-forwarded-for: 198.51.100.1\r\n";
        let request = format!(
            "GET /forward-auth/caddy HTTP/1.1\r\nhost: shop.example\r\nconnection: close\r\n{described}{via}\r\n"
        );
        exchange(server.connect(), &request).status
    };
    assert_eq!((caddy(""), caddy("via: 1.1 Caddy\r\n")), (403, 200));
}
