//! Connections that are too many, addresses that share a prefix, and the memory for bodies.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use tollgate_testkit::{Process, wait_until};

use crate::server::{Response, Server, connect, exchange};

const CHECK: &str = "GET /api/v1/rate-limit/check?key=a HTTP/1.1\r\nhost: localhost\r\n\r\n";
const HEALTH: &str = "GET /actuator/health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

/// Sends a request and reads one response, on a connection that stays open.
fn ask(stream: &mut TcpStream, request: &str) -> Response {
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = Vec::new();
    while !text.ends_with(b"}") {
        let mut part = [0; 1024];
        let length = stream.read(&mut part).unwrap();
        assert_ne!(length, 0, "closed by the server");
        text.extend_from_slice(&part[..length]);
    }
    Response::parse(&String::from_utf8(text).unwrap())
}

/// Whether the server closes a connection without an answer to its first request.
fn is_refused(stream: &mut TcpStream, request: &str) -> bool {
    // The server may have closed it already.
    let _ = stream.write_all(request.as_bytes());
    is_closed(stream)
}

fn is_closed(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 1024]), Ok(0) | Err(_))
}

#[test]
fn a_full_table_of_idle_connections_still_answers_health() {
    let server = Server::with("server: { max_connections: 8 }\nadmin: { listen: '127.0.0.1:0' }\n");
    // The admin port has sixteen places.
    for (address, places) in [(server.address, 8), (server.admin, 16)] {
        let silent: Vec<_> = (0..places).map(|_| connect(address)).collect();
        assert_eq!(exchange(connect(address), HEALTH).status, 200);
        drop(silent);
        let mut begun: Vec<_> = (0..places).map(|_| connect(address)).collect();
        begun.iter_mut().for_each(|stream| stream.write_all(b"GET /act").unwrap());
        assert_eq!(exchange(connect(address), HEALTH).status, 200, "requests that do not go on");
    }
    let metrics = server.get("/actuator/prometheus").body;
    let none = "tollgate_connections_evicted_total{application=\"distributed-rate-limiter\"} 0";
    assert!(metrics.contains("tollgate_connections_evicted_total") && !metrics.contains(none), "{metrics}");
}

#[test]
fn the_longest_idle_connection_is_closed_first_and_one_that_is_answered_never() {
    let server = Server::on_redis("server: { max_connections: 3 }\n");
    let store = server.store.as_ref().unwrap();
    let mut busy = server.connect();
    assert_eq!(ask(&mut busy, CHECK).status, 200);
    store.pause();
    busy.write_all(CHECK.as_bytes()).unwrap();
    let open = HEALTH.replace("connection: close\r\n", "");
    let (mut first, mut second) = (server.connect(), server.connect());
    assert_eq!(ask(&mut first, &open).status, 200);
    assert_eq!(ask(&mut second, &open).status, 200);
    assert_eq!(exchange(server.connect(), HEALTH).status, 200);
    assert!(is_closed(&mut first));
    assert_eq!(ask(&mut second, &open).status, 200);
    store.resume();
    assert_eq!(ask(&mut busy, "").status, 200, "the store decides, and its answer is sent");
}

#[test]
fn connections_that_wait_for_a_body_give_way_to_a_health_check() {
    let server = Server::with("server: { max_connections: 8 }\nadmin: { listen: '127.0.0.1:0' }\n");
    let head = |path: &str, method: &str| {
        format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 30\r\n\r\n")
    };
    let check = head("/api/v1/rate-limit/check", "POST");
    let policy = head("/admin/policy", "PUT");
    for (address, places, head) in [(server.address, 8, &check), (server.admin, 16, &policy)] {
        let mut slow: Vec<_> = (0..places).map(|_| connect(address)).collect();
        for stream in &mut slow {
            stream.write_all(head.as_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
        // Single bytes do not keep a place.
        for _ in 0..10 {
            slow.iter_mut().for_each(|stream| stream.write_all(b" ").unwrap());
            std::thread::sleep(Duration::from_millis(20));
        }
        let start = Instant::now();
        assert_eq!(exchange(connect(address), HEALTH).status, 200);
        assert!(start.elapsed() < Duration::from_secs(2), "health waited {:?}", start.elapsed());
        assert!(is_closed(&mut slow[0]), "the one that has waited for longest");
        if address == server.address {
            let rest = format!("{{\"key\":\"b\"}}{}", " ".repeat(9));
            assert_eq!(ask(slow.last_mut().unwrap(), &rest).status, 200, "the others stay");
        }
    }
}

#[test]
fn the_number_of_files_is_raised_to_what_the_system_allows() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut command = Command::new("prlimit");
    command.args(["--nofile=256:900", env!("CARGO_BIN_EXE_tollgate"), "--listen", &address.to_string()]);
    let process = Process::start(&command);
    wait_until("the node listens", || TcpStream::connect(address).is_ok());
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", process.id())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    assert_eq!(files.split_whitespace().collect::<Vec<_>>(), ["900", "900", "files"]);
}

#[test]
fn slow_bodies_of_anonymous_clients_keep_nobody_else_out() {
    let token = "correct-horse-battery-staple";
    let tokens = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(tokens.path(), token).unwrap();
    let bearer = format!("authorization: Bearer {token}\r\n");
    let start = |server: &str| {
        Server::with(&format!("api: {{ token_file: {} }}\nserver: {{ {server} }}\n", tokens.path().display()))
    };
    let stalled = |server: &Server, length: usize, sent: usize| {
        let mut stream = server.connect();
        let head = "POST /api/v1/rate-limit/check/batch HTTP/1.1\r\nhost: localhost\r\n";
        // A body that is too large is refused before it is sent.
        let _ = write!(stream, "{head}content-length: {length}\r\n\r\n{}", " ".repeat(sent));
        stream
    };
    let batch = format!("{{\"checks\":[{{\"path\":\"/x\"}}]{}}}", " ".repeat(500_000));
    let others_are_answered = |server: &Server| {
        assert_eq!(server.ask("POST", "/api/v1/check", &bearer, "{\"path\":\"/x\"}").status, 200);
        assert_eq!(server.ask("POST", "/api/v1/check/batch", &bearer, &batch).status, 200);
        let stream = connect_from("127.0.0.2".parse().unwrap(), server.address);
        let head = "POST /api/v1/rate-limit/check HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
        assert_eq!(exchange(stream, &format!("{head}content-length: 2\r\n\r\n{{}}")).status, 200);
    };
    let server = start("max_connections: 1000");
    let large: Vec<_> = (0..64).map(|_| stalled(&server, 1_000_000, 525_000)).collect();
    others_are_answered(&server);
    drop(large);
    let server = start("max_body_bytes: 1048576");
    let small: Vec<_> = (0..64).map(|_| stalled(&server, 16_000, 15_000)).collect();
    let refused = || {
        let metrics = exchange(connect(server.admin), &HEALTH.replace("health", "prometheus")).body;
        metrics.contains("reason=\"body_memory\"} 60")
    };
    wait_until("one address has its share, four bodies", refused);
    others_are_answered(&server);
    drop(small);
}

#[test]
fn bodies_beyond_the_memory_for_them_are_answered_503() {
    let server = Server::with("server: { max_body_bytes: 1048576 }\n");
    let in_use = || {
        let metrics = server.get("/actuator/prometheus").body;
        let start = "tollgate_body_bytes{application=\"distributed-rate-limiter\"} ";
        metrics.lines().find_map(|line| line.strip_prefix(start)).unwrap().parse::<u64>().unwrap()
    };
    let mut large = server.connect();
    let (length, sent) = (1_000_000, 600_000);
    let head = "POST /api/v1/rate-limit/check/batch HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    let spaces = " ".repeat(sent);
    write!(large, "{head}content-length: {length}\r\n\r\n{spaces}").unwrap();
    wait_until("the first part is in memory", || in_use() == 1_000_000);
    let mut rest_of_memory = server.connect();
    write!(rest_of_memory, "{head}content-length: 48576\r\n\r\n{}", " ".repeat(48_000)).unwrap();
    wait_until("all memory is in use", || in_use() == 1_048_576);
    let refused = server.post("/api/v1/rate-limit/check", "{}");
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")), "{refused:?}");
    assert_eq!(refused.header("x-tollgate-basis"), None, "the store has nothing to do with it");
    assert!(refused.body.contains("server.max_body_bytes"), "{refused:?}");
    assert_eq!(server.ask("PUT", "/admin/policy", "", "rules: []\n").status, 503);
    assert_eq!(
        server.get("/api/v1/rate-limit/check?key=a").status,
        200,
        "a request without a body needs none"
    );
    let metrics = server.get("/actuator/prometheus").body;
    let counted =
        "tollgate_requests_refused_total{application=\"distributed-rate-limiter\",reason=\"body_memory\"} 2";
    assert!(metrics.contains(counted), "{metrics}");
    drop(rest_of_memory);
    let batch = r#"{"checks":[]}"#;
    let rest = format!("{}{batch}", " ".repeat(length - sent - batch.len()));
    assert_eq!(exchange(large, &rest).body, "[]");
    wait_until("the memory is free again", || in_use() == 0);
    assert_eq!(server.post("/api/v1/rate-limit/check", "{}").status, 200);
}

#[test]
fn a_body_that_is_announced_and_not_sent_takes_no_memory() {
    let server = Server::with("server: { max_body_bytes: 1048576 }\n");
    let head =
        "POST /api/v1/rate-limit/check/batch HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n";
    let mut announced: Vec<_> = (0..8).map(|_| server.connect()).collect();
    announced.iter_mut().for_each(|stream| stream.write_all(head.as_bytes()).unwrap());
    assert_eq!(server.post("/api/v1/rate-limit/check", "{}").status, 200);
}

/// Set in the network of its own in which a test runs again.
const IN_OWN_NETWORK: &str = "TOLLGATE_TEST_IN_OWN_NETWORK";

/// Runs a test of this module in a network of its own, where it can have any addresses.
fn in_own_network(name: &str, test: fn()) {
    if std::env::var_os(IN_OWN_NETWORK).is_some() {
        return test();
    }
    let unshare = |program: &std::ffi::OsStr| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net"]).arg(program);
        command
    };
    if !unshare("true".as_ref()).status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: no network of its own can be made here");
        return;
    }
    let mut again = unshare(std::env::current_exe().unwrap().as_os_str());
    let name = format!("connections::{name}");
    let output = again.args(["--exact", &name]).env(IN_OWN_NETWORK, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn ip(arguments: &[&str]) {
    assert!(Command::new("ip").args(arguments).status().unwrap().success());
}

#[test]
fn one_address_gets_at_most_a_quarter_of_the_places() {
    in_own_network("one_address_gets_at_most_a_quarter_of_the_places", || {
        ip(&["link", "set", "lo", "up"]);
        ip(&["addr", "add", "192.0.2.2/32", "dev", "lo"]);
        let server = Server::with(
            "listen: '0.0.0.0:0'\nadmin: { listen: '127.0.0.1:0' }\nserver: { max_connections: 40 }\n",
        );
        let address = SocketAddr::from(([192, 0, 2, 2], server.address.port()));
        let mut connections: Vec<_> = (0..11).map(|_| connect(address)).collect();
        let request = "GET /api/v1/rate-limit/check HTTP/1.1\r\nhost: localhost\r\n\r\n";
        for stream in &mut connections[..10] {
            assert_eq!(ask(stream, request).status, 200);
        }
        assert!(is_refused(&mut connections[10], request), "the eleventh of one address, with 40 places");
    });
}

#[test]
fn ipv6_addresses_of_one_prefix_share_their_connections() {
    in_own_network("ipv6_addresses_of_one_prefix_share_their_connections", count_by_prefix);
}

fn count_by_prefix() {
    ip(&["link", "set", "lo", "up"]);
    let addresses = ["2001:db8::1", "2001:db8::2", "2001:db8::ffff:1", "2001:db8:0:1::1"];
    addresses.iter().for_each(|it| ip(&["-6", "addr", "add", &format!("{it}/128"), "dev", "lo", "nodad"]));
    let server = Server::with(
        "listen: '[::]:0'\nadmin: { listen: '127.0.0.1:0' }\nserver: { max_connections_per_address: 2 }\n",
    );
    let mut connections = addresses.map(|from| {
        let from = from.parse().unwrap();
        connect_from(from, SocketAddr::from((from, server.address.port())))
    });
    let request = "GET /api/v1/rate-limit/check HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let [one, two, three, other] = &mut connections;
    for stream in [one, two, other] {
        assert!(ask(stream, request).body.contains("/64"));
    }
    assert!(is_refused(three, request), "the third connection of one /64");
}

fn connect_from(from: IpAddr, to: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stream = runtime.block_on(async {
        let socket = match from {
            IpAddr::V4(_) => tokio::net::TcpSocket::new_v4().unwrap(),
            IpAddr::V6(_) => tokio::net::TcpSocket::new_v6().unwrap(),
        };
        socket.bind(SocketAddr::from((from, 0))).unwrap();
        socket.connect(to).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}
