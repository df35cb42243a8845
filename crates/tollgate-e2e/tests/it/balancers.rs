//! Three nodes behind a balancer: a node that is killed fails only the requests that it was answering.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tollgate_e2e::{Example, Proxy, Tollgate, free_address};
use tollgate_testkit::RedisServer;

/// Callers, each with one request at a time: the most requests that can be in flight.
const CALLERS: usize = 8;
/// A balancer learns from the system that connections have ended. On a busy machine this takes some time.
const NOTICE: Duration = Duration::from_millis(200);

/// Sends one check. None if it is not answered.
fn check(address: SocketAddr, caller: usize) -> Option<u16> {
    let body = format!(r#"{{"key":"caller:{caller}"}}"#);
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    let request = format!(
        "POST /api/v1/rate-limit/check HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split(' ').nth(1)?.parse().ok()
}

/// What became of the requests of one caller.
#[derive(Default)]
struct Calls {
    answered: u64,
    /// When each failed request was sent.
    failed: Vec<Instant>,
}

fn call_until(stop: &AtomicBool, address: SocketAddr, caller: usize) -> Calls {
    let mut calls = Calls::default();
    while !stop.load(Ordering::SeqCst) {
        let sent = Instant::now();
        match check(address, caller) {
            Some(200 | 429) => calls.answered += 1,
            Some(_) | None => calls.failed.push(sent),
        }
    }
    calls
}

fn killed_node_fails_only_requests_in_flight(name: &str, proxy: Proxy) {
    let store = RedisServer::build().tcp().start();
    let (listen, nodes) = (free_address(), [free_address(), free_address(), free_address()]);
    let example = Example::new(name)
        .port(8000, listen.port())
        .port(8080, nodes[0].port())
        .port(8082, nodes[1].port())
        .port(8083, nodes[2].port())
        .port(6379, store.tcp_address().port());
    let settings = std::fs::read_to_string(example.fill().path().join("tollgate.yaml")).unwrap();
    let mut nodes = nodes
        .map(|address| Tollgate::start(&format!("listen: {address}\nlog: {{ level: error }}\n{settings}")));
    let _balancer = example.start(proxy, listen);

    let stop = &AtomicBool::new(false);
    let (calls, killed) = std::thread::scope(|scope| {
        let callers: Vec<_> =
            (0..CALLERS).map(|caller| scope.spawn(move || call_until(stop, listen, caller))).collect();
        std::thread::sleep(Duration::from_secs(2));
        nodes[1].program.process().kill();
        let killed = Instant::now();
        std::thread::sleep(Duration::from_secs(4));
        stop.store(true, Ordering::SeqCst);
        (callers.into_iter().map(|caller| caller.join().unwrap()).collect::<Vec<_>>(), killed)
    });
    let answered: u64 = calls.iter().map(|calls| calls.answered).sum();
    let failed: Vec<_> = calls.into_iter().flat_map(|calls| calls.failed).collect();
    println!("{name}: {answered} answered, {} failed", failed.len());
    assert!(answered > 100, "{answered} requests were answered: too few to tell");
    assert!(failed.len() <= CALLERS, "{} requests failed, at most {CALLERS} were in flight", failed.len());
    assert!(
        failed.iter().all(|sent| *sent <= killed + NOTICE),
        "a request failed that was sent after the kill"
    );
}

#[test]
fn killed_node_behind_haproxy_fails_only_requests_in_flight() {
    killed_node_fails_only_requests_in_flight("haproxy-balancer", Proxy::HaProxy);
}

#[test]
fn killed_node_behind_nginx_fails_only_requests_in_flight() {
    killed_node_fails_only_requests_in_flight("nginx-balancer", Proxy::Nginx);
}
