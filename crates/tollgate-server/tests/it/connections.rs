//! Connections that are too many, addresses that share a prefix, and the memory for bodies.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use tollgate_testkit::wait_until;

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
fn the_longest_idle_connection_is_closed_first_and_a_busy_one_never() {
    let server = Server::with("server: { max_connections: 3 }\n");
    let mut busy = server.connect();
    let head =
        "POST /api/v1/rate-limit/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 11\r\n\r\n{\"key\":";
    busy.write_all(head.as_bytes()).unwrap();
    let mut first = server.connect();
    assert_eq!(ask(&mut first, CHECK).status, 200);
    let mut second = server.connect();
    assert_eq!(ask(&mut second, CHECK).status, 200);
    assert_eq!(exchange(server.connect(), HEALTH).status, 200);
    assert!(is_closed(&mut first));
    assert_eq!(ask(&mut second, CHECK).status, 200);
    assert_eq!(ask(&mut busy, "\"b\"}").status, 200);
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
    wait_until("the first part is in memory", || in_use() == 1_048_576);
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

/// Set in the network of its own in which the test below runs again.
const IN_OWN_NETWORK: &str = "TOLLGATE_TEST_IN_OWN_NETWORK";

/// Runs in a network of its own, where it can have any addresses.
#[test]
fn ipv6_addresses_of_one_prefix_share_their_connections() {
    if std::env::var_os(IN_OWN_NETWORK).is_some() {
        return count_by_prefix();
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
    let name = "connections::ipv6_addresses_of_one_prefix_share_their_connections";
    let mut again = unshare(std::env::current_exe().unwrap().as_os_str());
    let output = again.args(["--exact", name]).env(IN_OWN_NETWORK, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn count_by_prefix() {
    let ip = |arguments: &[&str]| assert!(Command::new("ip").args(arguments).status().unwrap().success());
    ip(&["link", "set", "lo", "up"]);
    let addresses = ["2001:db8::1", "2001:db8::2", "2001:db8::ffff:1", "2001:db8:0:1::1"];
    addresses.iter().for_each(|it| ip(&["-6", "addr", "add", &format!("{it}/128"), "dev", "lo", "nodad"]));
    let server = Server::with(
        "listen: '[::]:0'\nadmin: { listen: '127.0.0.1:0' }\nserver: { max_connections_per_address: 2 }\n",
    );
    let mut connections = addresses.map(|from| connect_from(from.parse().unwrap(), server.address.port()));
    let request = "GET /api/v1/rate-limit/check HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let [one, two, three, other] = &mut connections;
    for stream in [one, two, other] {
        assert!(ask(stream, request).body.contains("/64"));
    }
    assert!(is_closed(three), "the third connection of one /64");
}

fn connect_from(from: Ipv6Addr, port: u16) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v6().unwrap();
        socket.bind(SocketAddr::from((from, 0))).unwrap();
        let to = SocketAddr::from((from, port));
        socket.connect(to).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}
