//! Envoy with the configuration in `examples/envoy`: it asks Tollgate over gRPC before it forwards a request.

use std::fs;
use std::net::SocketAddr;

use tollgate_e2e::{Example, Program, Proxy, Tollgate, Upstream, free_address, http};

struct Setup {
    tollgate: Tollgate,
    upstream: Upstream,
    listen: SocketAddr,
    _envoy: Program,
}

/// Starts the example with another policy.
fn start_with(policy: &str) -> Setup {
    let grpc = free_address();
    let policy: String = policy.lines().map(|line| format!("  {line}\n")).collect();
    let tollgate = Tollgate::start(&format!("grpc: {{ listen: \"{grpc}\" }}\npolicy:\n{policy}"));
    let (upstream, listen) = (Upstream::start(), free_address());
    let envoy = Example::new("envoy")
        .port(10000, listen.port())
        .port(8081, grpc.port())
        .port(9000, upstream.address.port())
        .start(Proxy::Envoy, listen);
    Setup { tollgate, upstream, listen, _envoy: envoy }
}

/// Starts the example with its own policy.
fn start() -> Setup {
    let policy = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/envoy/policy.yaml");
    start_with(&fs::read_to_string(policy).expect("the example has a policy"))
}

impl Setup {
    fn get(&self, target: &str) -> http::Response {
        http::get(self.listen, target)
    }
}

#[test]
fn the_limit_th_request_passes_and_the_next_gets_429_with_the_time_to_wait() {
    let setup = start();
    for left in ["4", "3", "2", "1", "0"] {
        let response = setup.get("/login");
        assert_eq!(response.status, 200, "{response:?}");
        assert_eq!(response.header("x-ratelimit-remaining"), Some(left), "{response:?}");
    }
    let forwarded = setup.upstream.requests();
    let denied = setup.get("/login");
    assert_eq!(denied.status, 429, "{denied:?}");
    assert_eq!(setup.upstream.requests(), forwarded, "the request was not forwarded");
    let values = |name: &str| -> Vec<&str> {
        let headers = denied.headers.iter().filter(|(known, _)| known == name);
        headers.map(|(_, value)| value.as_str()).collect()
    };
    assert_eq!(values("x-ratelimit-limit"), ["5, 5;w=60"], "{denied:?}");
    assert_eq!(values("x-ratelimit-remaining"), ["0"], "{denied:?}");
    let [reset] = values("x-ratelimit-reset")[..] else { panic!("not one x-ratelimit-reset: {denied:?}") };
    assert!((1..=60).contains(&reset.parse::<u64>().unwrap()), "{denied:?}");
    let [retry] = values("retry-after")[..] else { panic!("not one Retry-After: {denied:?}") };
    assert!((1..=60).contains(&retry.parse::<u64>().unwrap()), "{denied:?}");
    assert_eq!(setup.get("/").status, 200, "other paths have another limit");
}

#[test]
fn without_tollgate_requests_go_through_as_the_example_says() {
    let mut setup = start();
    for _ in 0..5 {
        setup.get("/login");
    }
    assert_eq!(setup.get("/login").status, 429);
    setup.tollgate.program.process().kill();
    for _ in 0..3 {
        assert_eq!(setup.get("/login").status, 200, "failure_mode_deny is false");
    }
}
