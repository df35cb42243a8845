//! The examples in which a proxy asks Tollgate: each limits, cannot be deceived by a client, and fails as its README says.

use std::net::SocketAddr;

use tollgate_e2e::http::{self, Response};
use tollgate_e2e::{Example, Program, Proxy, Tollgate, Upstream, free_address};

/// A proxy with the configuration of an example, between a client and an upstream. It asks a `tollgate` with the settings of the example.
struct Rig {
    listen: SocketAddr,
    tollgate: Tollgate,
    upstream: Upstream,
    _proxy: Program,
}

/// Requests a minute that each address has below `/api`, in all examples.
const LIMIT: u64 = 10;

/// Headers by which a client could try to be another client, or to ask for another path.
const FORGED: [(&str, &str); 14] = [
    ("x-real-ip", "203.0.113.1"),
    ("x-forwarded-for", "203.0.113.1"),
    ("forwarded", "for=203.0.113.1"),
    ("x-original-uri", "/free"),
    ("x-original-method", "OPTIONS"),
    ("x-original-host", "other.example"),
    ("x-forwarded-uri", "/free"),
    ("x-forwarded-method", "OPTIONS"),
    ("x-forwarded-host", "other.example"),
    ("x_real_ip", "203.0.113.1"),
    ("x_forwarded_uri", "/free"),
    ("x-envoy-original-path", "/free"),
    ("x-rewrite-url", "/free"),
    ("via", "1.1 client"),
];

impl Rig {
    fn start(name: &str, proxy: Proxy) -> Self {
        Self::with_settings(name, proxy, |settings| settings)
    }

    fn with_settings(name: &str, proxy: Proxy, change: impl FnOnce(String) -> String) -> Self {
        let (listen, address) = (free_address(), free_address());
        let upstream = Upstream::start();
        let example = Example::new(name)
            .port(8080, address.port())
            .port(9000, upstream.address.port())
            .port(8000, listen.port());
        let folder = example.fill();
        let settings = std::fs::read_to_string(folder.path().join("tollgate.yaml")).unwrap();
        let policy = folder.path().join("policy.yaml").display().to_string();
        let tollgate = Tollgate::start(&change(settings.replace("policy.yaml", &policy)));
        assert_eq!(tollgate.address, address);
        let proxy = example.start(proxy, listen);
        Self { listen, tollgate, upstream, _proxy: proxy }
    }

    fn get(&self, target: &str) -> Response {
        http::get(self.listen, target)
    }

    fn send(&self, target: &str, headers: &[(&str, &str)]) -> Response {
        http::send(self.listen, "GET", target, headers, "")
    }

    /// The permits that an address has left below `/api`.
    fn remaining(&self, ip: &str) -> u64 {
        let body = format!(r#"{{"ip":"{ip}","path":"/api/items"}}"#);
        let answer = http::send(self.tollgate.address, "POST", "/api/v1/explain", &[], &body);
        answer.json()["remaining"].as_u64().unwrap_or_else(|| panic!("{answer:?}"))
    }

    /// Takes all that is left of the limit. No header of an allowed response tells the client to wait.
    fn exhaust(&self) {
        for number in 0..self.remaining("127.0.0.1") {
            let passed = self.get(&format!("/api/items?number={number}"));
            assert_eq!(passed.status, 200, "request {number}: {passed:?}");
            assert_eq!(passed.json()["target"], format!("/api/items?number={number}"));
            assert_eq!(passed.header("retry-after"), None);
        }
    }

    /// Sends a request that claims to come from another address and to ask for another path. It counts for its true address and path.
    fn assert_not_deceived(&self, forged: &[(&str, &str)]) {
        let before = self.remaining("127.0.0.1");
        let passed = self.send("/api/items", forged);
        assert_eq!(passed.status, 200, "{passed:?}");
        assert_eq!(self.remaining("127.0.0.1"), before - 1, "{forged:?}");
        assert_eq!(self.remaining("203.0.113.1"), LIMIT, "{forged:?}");
    }
}

fn assert_denied(denied: &Response) {
    assert_eq!(denied.status, 429, "{denied:?}");
    let retry_after: u64 = denied.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&retry_after), "{denied:?}");
    let body = denied.json();
    assert_eq!((&body["code"], &body["status"]), (&"TOO_MANY_REQUESTS".into(), &429.into()), "{denied:?}");
    assert_eq!(body["retryAfterSeconds"], retry_after);
    assert_eq!((&body["limit"], &body["remaining"]), (&LIMIT.into(), &0.into()));
}

/// The whole life of an example. `when_down` is the status of a limited request while Tollgate is down.
///
/// It sends 20 requests: the outer wall of nginx admits 21 at once.
fn limits(name: &str, proxy: Proxy, when_down: u16) {
    let mut rig = Rig::start(name, proxy);
    rig.assert_not_deceived(&FORGED);
    rig.exhaust();
    assert_eq!(rig.upstream.requests(), LIMIT);
    assert_denied(&rig.get("/api/items"));
    assert_denied(&http::send(rig.listen, "POST", "/api/items", &[("content-type", "text/plain")], "a body"));
    assert_denied(&rig.send("/api/items", &FORGED));
    for name in ["x-real-ip", "x-forwarded-for", "x-original-uri", "x-forwarded-uri"] {
        let forged = FORGED.into_iter().find(|(known, _)| *known == name).unwrap();
        assert_denied(&rig.send("/api/items", &[forged]));
    }
    assert_eq!(rig.upstream.requests(), LIMIT, "a denied request does not reach the upstream");

    let free = rig.send("/free", &FORGED);
    assert_eq!(free.status, 200, "{free:?}");
    let seen = free.json();
    for name in ["x-real-ip", "x-forwarded-for"] {
        assert_eq!(seen["headers"][name], "127.0.0.1", "{seen}");
    }
    let page =
        [("origin", "http://elsewhere.example"), ("sec-fetch-site", "cross-site"), ("host", "shop.example")];
    assert_eq!(rig.send("/free", &page).status, 200, "clients are web pages, under any name");

    rig.tollgate.program.process().kill();
    assert_eq!(rig.get("/api/items").status, when_down, "Tollgate is down");
}

#[test]
fn nginx_limits_and_is_open_while_tollgate_is_down() {
    limits("nginx", Proxy::Nginx, 200);
}

#[test]
fn haproxy_limits_and_is_open_while_tollgate_is_down() {
    limits("haproxy", Proxy::HaProxy, 200);
}

#[test]
fn traefik_limits_and_is_closed_while_tollgate_is_down() {
    limits("traefik", Proxy::Traefik, 500);
}

#[test]
fn caddy_limits_and_is_closed_while_tollgate_is_down() {
    limits("caddy", Proxy::Caddy, 502);
}

#[test]
fn envoy_limits_and_is_closed_while_tollgate_is_down() {
    limits("envoy-ext-authz", Proxy::Envoy, 503);
}

#[test]
fn ratelimit_headers_reach_the_clients_of_nginx_haproxy_and_envoy() {
    for (name, proxy) in
        [("nginx", Proxy::Nginx), ("haproxy", Proxy::HaProxy), ("envoy-ext-authz", Proxy::Envoy)]
    {
        let allowed = Rig::start(name, proxy).get("/api/items");
        let ratelimit = allowed.header("ratelimit").unwrap_or_else(|| panic!("{name}: {allowed:?}"));
        assert!(ratelimit.contains(";r=9;"), "{name}: {ratelimit}");
        assert!(allowed.header("ratelimit-policy").unwrap().contains(";q=10;w=60"), "{name}");
    }
}

#[test]
fn client_of_nginx_cannot_choose_its_address_or_its_path() {
    let rig = Rig::start("nginx", Proxy::Nginx);
    let hop_by_hop = ("connection", "x-real-ip, x-original-uri, x-original-method, x-original-host");
    for forged in [
        ("x-real-ip", "203.0.113.1"),
        ("x-original-uri", "/free"),
        ("x-original-method", "OPTIONS"),
        hop_by_hop,
    ] {
        rig.assert_not_deceived(&[forged]);
        rig.assert_not_deceived(&[forged, forged]);
    }
}

#[test]
fn outer_wall_of_nginx_answers_429_with_retry_after() {
    let rig = Rig::start("nginx", Proxy::Nginx);
    let pay = || rig.get("/api/payment/1");
    assert_eq!([pay().status, pay().status], [200, 200]);
    let by_tollgate = pay();
    assert_eq!((by_tollgate.status, &by_tollgate.json()["limit"]), (429, &2.into()), "{by_tollgate:?}");
    // The burst of 2 behind the first request is used up.
    let by_nginx = pay();
    assert_eq!((by_nginx.status, by_nginx.header("retry-after")), (429, Some("60")), "{by_nginx:?}");
    assert_eq!(by_nginx.json()["code"], "TOO_MANY_REQUESTS");
    assert_eq!(rig.get("/free").header("retry-after"), None, "on 429 only");
}

#[test]
fn long_headers_are_not_a_free_pass_through_nginx() {
    let rig = Rig::start("nginx", Proxy::Nginx);
    rig.exhaust();
    for bytes in [1_000, 3_900, 5_000, 9_000, 20_000] {
        let long = "a".repeat(bytes);
        let target = format!("/api/items?q={long}");
        for answer in [
            rig.get(&target),
            rig.send("/api/items", &[("authorization", &long), ("x-api-key", &long)]),
            rig.send(&target, &[("authorization", &long), ("x-api-key", &long), ("cookie", &long)]),
        ] {
            assert_ne!(answer.status, 200, "{bytes} bytes: {answer:?}");
        }
    }
    assert_eq!(rig.upstream.requests(), LIMIT);
}

#[test]
fn proxy_that_is_not_trusted_is_refused_and_the_log_says_why_once_a_second() {
    for (name, proxy) in [("nginx", Proxy::Nginx), ("haproxy", Proxy::HaProxy), ("traefik", Proxy::Traefik)] {
        let rig =
            Rig::with_settings(name, proxy, |settings| settings.replace("127.0.0.1/32", "192.0.2.1/32"));
        for _ in 0..20 {
            assert_eq!(rig.get("/free").status, 403, "{name}");
        }
        assert_eq!(rig.upstream.requests(), 0);
        let log = rig.tollgate.program.log();
        let lines: Vec<_> =
            log.lines().filter(|line| line.contains("a forward-auth call is refused")).collect();
        assert!((1..=10).contains(&lines.len()), "{name}: {log}");
        assert!(
            lines[0].contains("WARN") && lines[0].contains("client_address.trusted_proxies"),
            "{}",
            lines[0]
        );
    }
}
