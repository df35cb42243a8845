//! Who may do what: tokens, host names, pages of browsers, clients of proxies, and the admin port.

use std::net::SocketAddr;
use std::process::Command;

use serde_json::json;
use tempfile::NamedTempFile;
use tollgate_testkit::{Process, wait_until};

use crate::server::{Response, Server, connect, exchange};

const CHECK: &str = "/api/v1/rate-limit/check";
const REMAINING: &str = "/api/v1/rate-limit/remaining";
const RESET: &str = "/api/v1/rate-limit/reset";
const TOKEN: &str = "a-token-long-enough";
const ADMIN_TOKEN: &str = "an-admin-token-long-enough";
const POLICY: &str = "rules: [{ name: two, key: user, limit: 5/min }]\n";

/// Every kind of page that the API's port has on loopback without tokens.
const PATHS: [(&str, &str); 9] = [
    ("GET", CHECK),
    ("POST", CHECK),
    ("GET", REMAINING),
    ("POST", "/api/v1/check"),
    ("GET", "/openapi.json"),
    ("GET", "/actuator/health"),
    ("GET", "/actuator/prometheus"),
    ("GET", "/admin/policy"),
    ("GET", "/nowhere"),
];

fn file(text: &str) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

/// A service with API tokens and a file that holds them.
fn with_tokens(listen: &str) -> (Server, NamedTempFile) {
    let tokens = file(&format!("{TOKEN}\n"));
    let yaml = format!("listen: {listen}\napi: {{ token_file: {} }}\n", tokens.path().display());
    (Server::with(&yaml), tokens)
}

/// A request with a host of its own; `headers` are whole lines.
fn ask(address: SocketAddr, request: (&str, &str), host: &str, headers: &str, body: &str) -> Response {
    let ((method, target), length) = (request, body.len());
    let head = format!("{method} {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}");
    exchange(connect(address), &format!("{head}content-length: {length}\r\n\r\n{body}"))
}

fn local(address: SocketAddr, request: (&str, &str), headers: &str, body: &str) -> Response {
    ask(address, request, "localhost", headers, body)
}

fn bearer(token: &str) -> String {
    format!("authorization: Bearer {token}\r\n")
}

fn refused(server: &Server, reason: &str) -> u64 {
    let metrics = local(server.admin, ("GET", "/actuator/prometheus"), "", "").body;
    let start = format!(
        "tollgate_requests_refused_total{{application=\"distributed-rate-limiter\",reason=\"{reason}\"}} "
    );
    metrics.lines().find_map(|line| line.strip_prefix(&start)).unwrap().parse().unwrap()
}

fn detail(response: &Response) -> String {
    response.json()["detail"].as_str().unwrap().to_owned()
}

#[test]
fn plain_local_requests_need_no_settings() {
    let server = Server::start();
    let port = server.address.port();
    for host in ["localhost", "127.0.0.1", "[::1]"] {
        let host = format!("{host}:{port}");
        let answer = ask(server.address, ("GET", &format!("{CHECK}?key=user:1")), &host, "", "");
        assert_eq!((answer.status, &answer.json()["key"]), (200, &json!("user:1")), "{host}");
        assert_eq!(ask(server.address, ("GET", "/admin/policy"), &host, "", "").status, 200, "{host}");
    }
    let old = exchange(connect(server.address), &format!("GET {CHECK}?key=a HTTP/1.0\r\n\r\n"));
    assert_eq!(old.status, 200, "HTTP/1.0 names no host");
}

#[test]
fn wrong_token_is_401_and_never_another_key() {
    for (server, _tokens) in [with_tokens("0.0.0.0:0"), with_tokens("127.0.0.1:0")] {
        let wrong = bearer("a-wrong-token-long");
        let named = format!("{CHECK}?key=user:1");
        let batch = format!("{CHECK}/batch");
        let requests = [
            (("GET", named.as_str()), ""),
            (("GET", CHECK), ""),
            (("POST", CHECK), r#"{"key":"user:1"}"#),
            (("POST", CHECK), "{}"),
            (("POST", batch.as_str()), r#"{"checks":[{}]}"#),
            (("POST", "/api/v1/check"), "{}"),
            (("DELETE", RESET), ""),
        ];
        for (request, body) in requests {
            let answer = local(server.address, request, &wrong, body);
            assert_eq!(answer.status, 401, "{request:?}");
            assert!(detail(&answer).contains("api.token_file"), "{answer:?}");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        }
        assert_eq!(refused(&server, "wrong_token"), requests.len() as u64);
        for key in ["user:1", "ip:127.0.0.1"] {
            let left = local(server.address, ("GET", &format!("{REMAINING}?key={key}")), &bearer(TOKEN), "");
            assert_eq!(left.json()["remaining"], 100, "nothing was taken from {key}");
        }
    }
    let open = Server::start();
    let answer = local(open.address, ("GET", CHECK), &bearer(TOKEN), "");
    assert_eq!(answer.status, 401, "no token is right where none is configured");
}

#[test]
fn naming_a_key_without_a_token_is_401_and_never_another_key() {
    for (server, _tokens) in [with_tokens("0.0.0.0:0"), with_tokens("127.0.0.1:0")] {
        let batch = format!("{CHECK}/batch");
        let requests = [
            (("GET", format!("{CHECK}?key=user:1")), "", "key"),
            (("POST", CHECK.to_owned()), r#"{"key":"user:1"}"#, "key"),
            (("POST", batch), r#"{"checks":[{},{"key":"user:1"}]}"#, "checks[1].key"),
            (("GET", format!("{REMAINING}?key=user:1")), "", ""),
            (("GET", REMAINING.to_owned()), "", ""),
            (("DELETE", format!("{RESET}?key=user:1")), "", ""),
            (("POST", "/api/v1/check".to_owned()), "{}", ""),
            (("POST", "/api/v1/check/batch".to_owned()), r#"{"checks":[]}"#, ""),
            (("POST", "/api/v1/explain".to_owned()), "{}", ""),
        ];
        for ((method, target), body, parameter) in &requests {
            let answer = local(server.address, (method, target), "", body);
            assert_eq!(answer.status, 401, "{target}");
            let names_settings =
                ["api.token_file", "api.trusted_callers"].map(|it| detail(&answer).contains(it));
            assert_eq!(names_settings, [true, true], "{answer:?}");
            assert_eq!(answer.json()["parameter"].as_str().unwrap_or_default(), *parameter);
        }
        assert_eq!(refused(&server, "key_not_allowed"), requests.len() as u64);
        let large = format!(r#"{{"checks":[{}]}}"#, " ".repeat(17_000));
        let answer = local(server.address, ("POST", &format!("{CHECK}/batch")), "", &large);
        assert_eq!(answer.status, 413, "large bodies need a token, too");
        assert!(detail(&answer).contains("api.token_file"), "{answer:?}");
        let answer = local(server.address, ("POST", &format!("{CHECK}/batch")), &bearer(TOKEN), &large);
        assert_eq!((answer.status, answer.body.as_str()), (200, "[]"));
        let own = local(server.address, ("GET", CHECK), "", "").json();
        assert_eq!(
            (&own["key"], &own["remaining"]),
            (&json!("ip:127.0.0.1"), &json!(99)),
            "the first permit"
        );
        let named = local(server.address, ("GET", &format!("{CHECK}?key=user:1")), &bearer(TOKEN), "");
        assert_eq!((&named.json()["key"], &named.json()["remaining"]), (&json!("user:1"), &json!(99)));
    }
}

#[test]
fn the_word_bearer_has_no_case() {
    let (server, _tokens) = with_tokens("0.0.0.0:0");
    for scheme in ["Bearer", "bearer", "BEARER"] {
        let header = format!("authorization: {scheme} {TOKEN}\r\n");
        let answer = local(server.address, ("GET", &format!("{CHECK}?key=user:1")), &header, "");
        assert_eq!((answer.status, &answer.json()["key"]), (200, &json!("user:1")), "{scheme}");
    }
}

#[test]
fn loopback_with_tokens_has_only_the_api_and_bare_health() {
    let (server, _tokens) = with_tokens("127.0.0.1:0");
    for path in ["/actuator/info", "/actuator/prometheus", "/admin/policy"] {
        for headers in [String::new(), bearer(TOKEN)] {
            let answer = local(server.address, ("GET", path), &headers, "");
            assert_eq!(answer.status, 404, "{path}");
            assert!(detail(&answer).contains("admin.listen"), "{answer:?}");
        }
        assert_eq!(local(server.admin, ("GET", path), "", "").status, 200, "{path}");
    }
    assert_eq!(local(server.address, ("PUT", "/admin/policy"), &bearer(TOKEN), POLICY).status, 404);
}

#[test]
fn a_forwarded_request_counts_as_from_beyond_loopback() {
    let server = Server::start();
    let headers = [
        "X-Forwarded-For: 192.0.2.1",
        "Forwarded: for=192.0.2.1",
        "X-Real-IP: 192.0.2.1",
        "Via: 1.1 proxy",
        "X-Forwarded-Host: api.example",
        "X-Forwarded-Proto: https",
        "X-Client-IP: 192.0.2.1",
        "True-Client-IP: 192.0.2.1",
        "CF-Connecting-IP: 192.0.2.1",
    ];
    for header in headers {
        let header = format!("{header}\r\n");
        let status =
            |method, target: &str, body| local(server.address, (method, target), &header, body).status;
        assert_eq!(status("GET", &format!("{CHECK}?key=user:1"), ""), 401, "{header}");
        assert_eq!(status("GET", &format!("{REMAINING}?key=user:1"), ""), 401, "{header}");
        assert_eq!(status("POST", "/api/v1/check", "{}"), 401, "{header}");
        assert_eq!(status("GET", CHECK, ""), 200, "{header}");
        assert_eq!(status("GET", "/actuator/health", ""), 200, "{header}");
        assert_eq!(status("GET", "/admin/policy", ""), 403, "{header}");
        assert_eq!(status("PUT", "/admin/policy", POLICY), 403, "{header}");
        assert_eq!(status("GET", "/actuator/prometheus", ""), 403, "{header}");
    }
    assert_eq!(
        local(server.address, ("GET", "/admin/policy"), "", "").json()["rules"],
        0,
        "nothing was pushed"
    );
    assert_eq!(refused(&server, "forwarded"), 3 * headers.len() as u64);
    let proxied =
        Server::with("client_address: { header: X-Forwarded-For, trusted_proxies: [127.0.0.0/8] }\n");
    let by_proxy =
        |target: &str| local(proxied.address, ("GET", target), "x-forwarded-for: 192.0.2.1\r\n", "");
    assert_eq!(by_proxy(&format!("{CHECK}?key=user:1")).status, 401);
    assert_eq!(by_proxy("/admin/policy").status, 403);
    assert_eq!(by_proxy(CHECK).json()["key"], "ip:192.0.2.1");
}

#[test]
fn loopback_without_tokens_refuses_foreign_hosts_on_every_path() {
    let server = Server::start();
    for host in
        ["evil.example", "evil.example:8080", "localhost.evil.example", "192.0.2.1", "127.0.0.1@evil.example"]
    {
        for request in PATHS {
            let answer = ask(server.address, request, host, "", "");
            assert_eq!(answer.status, 403, "{host} {request:?}");
            assert!(detail(&answer).contains("api.allowed_hosts"), "{answer:?}");
        }
    }
    let absolute = local(server.address, ("GET", "http://evil.example/actuator/health"), "", "");
    assert_eq!(absolute.status, 403, "the target names a host, too");
    assert_eq!(refused(&server, "foreign_host"), 5 * PATHS.len() as u64 + 1);
    let named = Server::with("api: { allowed_hosts: [gate.internal] }\n");
    assert_eq!(ask(named.address, ("GET", CHECK), "gate.internal:8080", "", "").status, 200);
    assert_eq!(ask(named.address, ("GET", CHECK), "localhost", "", "").status, 200);
    assert_eq!(ask(named.address, ("GET", CHECK), "evil.example", "", "").status, 403);
}

#[test]
fn loopback_without_tokens_refuses_pages_of_other_origins_on_every_path() {
    let server = Server::start();
    let pages = [
        "origin: http://evil.example\r\n",
        "origin: null\r\n",
        "origin: http://localhost:3000\r\n",
        "sec-fetch-site: cross-site\r\n",
        "origin: http://localhost\r\nsec-fetch-site: cross-site\r\n",
    ];
    for page in pages {
        for request in PATHS {
            assert_eq!(local(server.address, request, page, "").status, 403, "{page} {request:?}");
        }
    }
    assert_eq!(refused(&server, "foreign_page"), (pages.len() * PATHS.len()) as u64);
    for own in ["origin: http://localhost\r\n", "sec-fetch-site: same-origin\r\n", "sec-fetch-site: none\r\n"]
    {
        assert_eq!(local(server.address, ("GET", CHECK), own, "").status, 200, "{own}");
    }
}

#[test]
fn beyond_loopback_any_host_is_answered() {
    let server = Server::with("listen: 0.0.0.0:0\nadmin: { listen: '127.0.0.1:0' }\n");
    assert_eq!(ask(server.address, ("GET", CHECK), "gate.example", "", "").status, 200);
    assert_eq!(ask(server.admin, ("GET", "/actuator/info"), "gate.example", "", "").status, 403, "loopback");
}

#[test]
fn health_is_bare_on_the_api_port_and_has_details_on_the_admin_port() {
    let open = Server::start();
    let (closed, _tokens) = with_tokens("127.0.0.1:0");
    let far = Server::with("listen: 0.0.0.0:0\nadmin: { listen: '0.0.0.0:0' }\n");
    for server in [&open, &closed, &far] {
        for path in ["/actuator/health", "/actuator/health/liveness", "/actuator/health/readiness"] {
            let health = local(server.address, ("GET", path), "", "");
            assert_eq!((health.status, health.body.as_str()), (200, r#"{"status":"UP"}"#), "{path}");
            assert_eq!(local(server.address, ("HEAD", path), "", "").status, 200);
            assert_eq!(local(server.address, ("POST", path), "", "").status, 405);
        }
    }
    for server in [&closed, &far] {
        let health = local(server.admin, ("GET", "/actuator/health"), "", "").json();
        assert_eq!((&health["status"], &health["store"]["address"]), (&json!("UP"), &json!("memory")));
        for probe in ["liveness", "readiness"] {
            let path = format!("/actuator/health/{probe}");
            assert_eq!(local(server.admin, ("GET", &path), "", "").body, r#"{"status":"UP"}"#);
        }
    }
}

#[test]
fn a_node_that_stops_is_not_ready_but_alive() {
    let server = Server::with("server: { drain_delay: 2s }");
    server.tell_to_stop();
    let status = |path: &str| server.get(path).status;
    assert_eq!((status("/actuator/health"), status("/actuator/health/readiness")), (503, 503));
    assert_eq!(status("/actuator/health/liveness"), 200);
}

#[test]
fn an_admin_port_beyond_loopback_without_admin_tokens_shows_pages_and_changes_nothing() {
    let server = Server::with("admin: { listen: '0.0.0.0:0' }\nlisten: 0.0.0.0:0\n");
    for path in ["/actuator/health", "/actuator/info", "/actuator/prometheus"] {
        assert_eq!(ask(server.admin, ("GET", path), "node-1.example:8090", "", "").status, 200, "{path}");
    }
    for request in
        [("GET", "/admin/policy"), ("PUT", "/admin/policy"), ("DELETE", "/admin/policy"), ("GET", "/admin")]
    {
        let answer = local(server.admin, request, &bearer(TOKEN), POLICY);
        assert_eq!(answer.status, 403, "{request:?}");
        assert!(detail(&answer).contains("admin.token_file"), "{answer:?}");
    }
    assert_eq!(refused(&server, "no_admin_tokens"), 4);
}

#[test]
fn a_loopback_admin_port_without_tokens_is_for_local_callers_only() {
    let server = Server::with("listen: 0.0.0.0:0\nadmin: { listen: '127.0.0.1:0' }\n");
    assert_eq!(local(server.admin, ("PUT", "/admin/policy"), "", POLICY).status, 200);
    let forwarded = "x-forwarded-for: 192.0.2.1\r\n";
    assert_eq!(local(server.admin, ("DELETE", "/admin/policy"), forwarded, "").status, 403);
    assert_eq!(ask(server.admin, ("DELETE", "/admin/policy"), "evil.example", "", "").status, 403);
    let page = "origin: http://localhost\r\n";
    assert_eq!(
        local(server.admin, ("DELETE", "/admin/policy"), page, "").status,
        403,
        "no page changes anything"
    );
    assert_eq!(local(server.admin, ("GET", "/admin/policy"), "", "").json()["rules"], 1);
}

#[test]
fn admin_changes_need_an_admin_token_and_api_tokens_are_none() {
    let (tokens, admin_tokens) =
        (file(&format!("{TOKEN}\n")), file(&format!("# operators\nalice:{ADMIN_TOKEN}\n")));
    for listen in ["0.0.0.0:0", "127.0.0.1:0"] {
        let server = Server::with(&format!(
            "listen: {listen}\nadmin: {{ listen: '{listen}', token_file: {} }}\napi: {{ token_file: {} }}\n",
            admin_tokens.path().display(),
            tokens.path().display()
        ));
        for headers in [String::new(), bearer(TOKEN), bearer("a-wrong-token-long"), bearer("")] {
            for request in
                [("GET", "/admin/policy"), ("PUT", "/admin/policy"), ("PUT", "/admin/tiers/users/a")]
            {
                let answer = local(server.admin, request, &headers, POLICY);
                assert_eq!(answer.status, 401, "{headers}");
                assert!(detail(&answer).contains("admin.token_file"), "{answer:?}");
            }
        }
        assert_eq!(refused(&server, "wrong_admin_token"), 12);
        let lower = format!("authorization: bearer {ADMIN_TOKEN}\r\n");
        assert_eq!(local(server.admin, ("PUT", "/admin/policy"), &lower, POLICY).status, 200);
        assert_eq!(
            local(server.admin, ("GET", "/admin/policy"), &bearer(ADMIN_TOKEN), "").json()["rules"],
            1
        );
        assert_eq!(local(server.address, ("GET", "/admin/policy"), &bearer(ADMIN_TOKEN), "").status, 404);
    }
}

#[test]
fn admin_changes_are_logged_with_the_name_of_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let (tokens, settings, log) =
        (folder.path().join("tokens"), folder.path().join("tollgate.yaml"), folder.path().join("log"));
    std::fs::write(&tokens, format!("bob:{TOKEN}\nalice:{ADMIN_TOKEN}\n")).unwrap();
    let yaml = format!("admin: {{ listen: '127.0.0.1:0', token_file: {} }}\n", tokens.display());
    std::fs::write(&settings, yaml).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["--listen", "127.0.0.1:0", "--config"]).arg(&settings).env_remove("TOLLGATE_CONFIG");
    let _process = Process::start_with_log(&command, &log);
    let text = || std::fs::read_to_string(&log).unwrap();
    let admin = || {
        let text = text();
        let (_, rest) = text.split_once("admin:  http://")?;
        rest.split_once(' ').and_then(|(address, _)| address.parse::<SocketAddr>().ok())
    };
    wait_until("the service listens", || admin().is_some());
    let status = local(admin().unwrap(), ("PUT", "/admin/policy"), &bearer(ADMIN_TOKEN), POLICY).status;
    assert_eq!(status, 200);
    assert_eq!(local(admin().unwrap(), ("DELETE", "/admin/policy?a=b"), &bearer("wrong"), "").status, 401);
    let expected =
        r#""message":"admin request","admin":"alice","method":"PUT","path":"/admin/policy","status":200"#;
    wait_until("the change is logged", || text().contains(expected));
    assert_eq!(text().matches("admin request").count(), 1, "{}", text());
    assert!(!text().contains(ADMIN_TOKEN) && !text().contains(TOKEN));
}

/// An address of this machine by which others reach it; loopback, if it has none.
fn own_address() -> std::net::IpAddr {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    // Nothing is sent: this only asks which address would be used.
    let found = socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr());
    found.map_or(std::net::Ipv4Addr::LOCALHOST.into(), |address| address.ip())
}

#[test]
fn trusted_callers_without_a_token_are_not_clients_of_unknown_proxies() {
    let own = own_address();
    let start = |more: &str| {
        Server::with(&format!(
            "listen: 0.0.0.0:0\nadmin: {{ listen: '127.0.0.1:0' }}\napi: {{ trusted_callers: [{own}/32], allowed_hosts: [gate.internal] }}\n{more}"
        ))
    };
    let reset = |server: &Server, host: &str, headers: &str| {
        let address = SocketAddr::new(own, server.address.port());
        ask(address, ("DELETE", &format!("{RESET}?key=victim")), host, headers, "").status
    };
    let alone = start("");
    assert_eq!(reset(&alone, "api.example", ""), 200, "a caller in a trusted network");
    for header in ["x-forwarded-for: 198.51.100.7", "forwarded: for=198.51.100.7", "via: 1.1 proxy"] {
        let header = format!("{header}\r\n");
        assert_eq!(reset(&alone, "api.example", &header), 401, "{header}: the peer is no trusted proxy");
    }
    let proxied = |header: &str| {
        start(&format!("client_address: {{ header: {header}, trusted_proxies: [{own}/32] }}\n"))
    };
    let (by_list, by_pairs) = (proxied("X-Forwarded-For"), proxied("Forwarded"));
    for value in ["198.51.100.7", "unknown", "_hidden", "", "198.51.100.7, unknown"] {
        let header = format!("x-forwarded-for: {value}\r\n");
        assert_eq!(reset(&by_list, "api.example", &header), 401, "{header}");
    }
    for value in ["for=198.51.100.7", "for=_hidden", "for=unknown", "", "by=192.0.2.1"] {
        let header = format!("forwarded: {value}\r\n");
        assert_eq!(reset(&by_pairs, "api.example", &header), 401, "{header}");
    }
    let twice = format!("forwarded: for=198.51.100.7;for={own}\r\n");
    assert_eq!(reset(&by_pairs, "api.example", &twice), 401, "two clients in one hop");
    assert_eq!(
        reset(&by_list, "api.example", &format!("x-forwarded-for: {own}\r\n")),
        200,
        "a trusted client"
    );
    assert_eq!(reset(&by_list, "api.example", ""), 200, "the proxy itself");
}

#[test]
fn a_web_page_in_a_trusted_network_needs_a_token_or_an_allowed_host() {
    let server = Server::with(
        "listen: 0.0.0.0:0\nadmin: { listen: '127.0.0.1:0' }\napi: { trusted_callers: [127.0.0.0/8], allowed_hosts: [gate.internal] }\n",
    );
    let reset = |host: &str, headers: &str| {
        ask(server.address, ("DELETE", &format!("{RESET}?key=victim")), host, headers, "").status
    };
    for headers in [
        "origin: http://evil.example:8080\r\nsec-fetch-site: same-origin\r\n",
        "origin: http://evil.example:8080\r\n",
        "sec-fetch-site: same-origin\r\n",
        "sec-fetch-mode: cors\r\n",
    ] {
        assert_eq!(reset("evil.example:8080", headers), 401, "{headers}: a rebound name");
    }
    assert_eq!(reset("gate.internal:8080", "origin: http://gate.internal:8080\r\n"), 200);
    assert_eq!(reset("gate.internal:8080", "origin: http://evil.example\r\n"), 401);
    assert_eq!(reset("any.example", ""), 200, "backends call under any name");
}
