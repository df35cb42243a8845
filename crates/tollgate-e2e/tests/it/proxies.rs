//! Each proxy starts, forwards a request to the upstream, and stops.

use std::net::TcpStream;
use std::path::Path;

use tollgate_e2e::{Example, Proxy, Upstream, free_address, http};

/// Runs a proxy without rate limits, with the configuration in `tests/plain`.
fn forwards(name: &str, proxy: Proxy) {
    let upstream = Upstream::start();
    let listen = free_address();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plain").join(name);
    let program = Example::at(&folder)
        .port("8000", listen.port())
        .port("9000", upstream.address.port())
        .start(proxy, listen);

    let response = http::send(listen, "POST", "/orders?id=7", &[("x-test", "one")], "hello");
    assert_eq!(response.status, 200, "{response:?}");
    let seen = response.json();
    assert_eq!((&seen["method"], &seen["target"]), (&"POST".into(), &"/orders?id=7".into()));
    assert_eq!((&seen["headers"]["x-test"], &seen["body"]), (&"one".into(), &"hello".into()));
    assert_eq!(upstream.requests(), 1);

    drop(program);
    assert!(TcpStream::connect(listen).is_err(), "{name} still listens after it was dropped");
}

#[test]
fn envoy_forwards_a_request() {
    forwards("envoy", Proxy::Envoy);
}

#[test]
fn nginx_forwards_a_request() {
    forwards("nginx", Proxy::Nginx);
}

#[test]
fn haproxy_forwards_a_request() {
    forwards("haproxy", Proxy::HaProxy);
}

#[test]
fn traefik_forwards_a_request() {
    forwards("traefik", Proxy::Traefik);
}

#[test]
fn caddy_forwards_a_request() {
    forwards("caddy", Proxy::Caddy);
}
