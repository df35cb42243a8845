//! Clients that are slow, idle, greedy or late, and a service that is told to stop.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use crate::server::{Response, Server};

const CHECK: &str = "GET /api/v1/rate-limit/check?key=a HTTP/1.1\r\nhost: localhost\r\n\r\n";

/// Short timeouts, so that the tests need not wait for the usual ones.
const HASTY: &str =
    "server: { header_timeout: 200ms, body_timeout: 200ms, idle_timeout: 400ms, drain_timeout: 5s }\n";

/// Reads one response and leaves the connection open.
fn read_response(stream: &mut impl Read) -> Response {
    let mut text = String::new();
    let mut byte = [0];
    while !text.ends_with("\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        text.push(byte[0].into());
    }
    let length = Response::parse(&text).number("content-length") as usize;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    text.push_str(&String::from_utf8(body).unwrap());
    Response::parse(&text)
}

/// Whether the server closes the connection before the client gives up.
fn is_closed(stream: &mut impl Read) -> bool {
    matches!(stream.read(&mut [0; 1024]), Ok(0) | Err(_))
}

#[test]
fn a_connection_serves_many_requests_and_pipelined_ones() {
    let server = Server::start();
    let mut stream = server.connect();
    for left in [99, 98, 97] {
        stream.write_all(CHECK.as_bytes()).unwrap();
        assert!(read_response(&mut stream).json()["remaining"].as_u64().unwrap() >= left);
    }
    stream.write_all(CHECK.repeat(3).as_bytes()).unwrap();
    for _ in 0..3 {
        assert_eq!(read_response(&mut stream).status, 200);
    }
}

#[test]
fn idle_connections_are_closed_after_a_while_and_not_before() {
    let server = Server::with(HASTY);
    let mut stream = server.connect();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(150));
        stream.write_all(CHECK.as_bytes()).unwrap();
        assert_eq!(read_response(&mut stream).status, 200);
    }
    assert!(is_closed(&mut stream));
}

#[test]
fn a_head_that_drips_is_not_waited_for() {
    let server = Server::with(HASTY);
    let mut stream = server.connect();
    let start = Instant::now();
    let dripped = CHECK.bytes().cycle().take(100).all(|byte| {
        std::thread::sleep(Duration::from_millis(20));
        stream.write_all(&[byte]).is_ok() && start.elapsed() < Duration::from_secs(5)
    });
    assert!(!dripped || is_closed(&mut stream), "the server has waited for a hundred bytes, one every 20 ms");
}

#[test]
fn a_body_that_does_not_come_is_not_waited_for() {
    let server = Server::with(HASTY);
    let mut stream = server.connect();
    stream
        .write_all(
            b"POST /api/v1/rate-limit/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{",
        )
        .unwrap();
    assert_eq!(read_response(&mut stream).status, 408);
}

#[test]
fn connections_beyond_the_limit_wait_while_all_others_are_answered() {
    let server = Server::on_redis("server: { max_connections: 2 }\n");
    let store = server.store.as_ref().unwrap();
    let mut busy = [server.connect(), server.connect()];
    for stream in &mut busy {
        stream.write_all(CHECK.as_bytes()).unwrap();
        assert_eq!(read_response(stream).status, 200);
    }
    store.pause();
    for stream in &mut busy {
        stream.write_all(CHECK.as_bytes()).unwrap();
    }
    let mut third = server.connect();
    third.write_all(b"GET /actuator/health HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    third.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
    assert!(third.read(&mut [0]).is_err(), "served without a place");
    third.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    store.resume();
    for stream in &mut busy {
        assert_eq!(read_response(stream).status, 200, "a request that is being answered is never cut off");
    }
    assert_eq!(read_response(&mut third).status, 200);
}

#[test]
fn what_is_no_http_does_not_hurt() {
    let server = Server::start();
    for garbage in
        [&b"\x16\x03\x01\x02\x00"[..], b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &[b'a'; 40_000]]
    {
        let mut stream = server.connect();
        // The server may hang up before all of it is sent.
        let _ = stream.write_all(garbage);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
            "{}",
            String::from_utf8_lossy(&answer)
        );
    }
    assert_eq!(server.get("/actuator/health").status, 200);
}

#[test]
fn a_service_that_is_told_to_stop_finishes_what_is_under_way() {
    let server = Server::start();
    let mut idle = server.connect();
    idle.write_all(CHECK.as_bytes()).unwrap();
    read_response(&mut idle);
    let mut busy = server.connect();
    busy.write_all(
        b"POST /api/v1/rate-limit/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 11\r\n\r\n{\"key\"",
    )
    .unwrap();
    // Until the service has read the head: it answers nothing before the body is whole.
    std::thread::sleep(Duration::from_millis(100));
    server.tell_to_stop();
    assert!(is_closed(&mut idle), "an idle connection is closed at once");
    busy.write_all(b":\"a\"}").unwrap();
    assert_eq!(read_response(&mut busy).status, 200, "a request under way is answered");
    server.wait();
}
