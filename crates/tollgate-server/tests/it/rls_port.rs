//! The gRPC port: who may call, health, reflection, connections, outages, and several nodes.

use std::io::{Read, Write};
use std::time::Duration;

use serde_json::json;
use tollgate_testkit::{RedisServer, wait_until};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

use crate::rls_client::proto::rate_limit_response::Code;
use crate::rls_client::{Client, SHOULD_RATE_LIMIT, descriptor, request};
use crate::server::{Server, connect};

const POLICY: &str = r#"
policy:
  rules:
    - { name: per-address, match: { attribute: { domain: web } }, key: "attribute:remote_address", limit: 3/min, algorithm: FIXED_WINDOW }
"#;
const GRPC: &str = "grpc: { listen: \"127.0.0.1:0\" }\n";

fn start(more: &str) -> (Server, Client) {
    let server = Server::with(&format!("{GRPC}{POLICY}{more}"));
    let client = Client::new(server.grpc.unwrap());
    (server, client)
}

fn call(client: &Client) -> Result<Code, tonic::Code> {
    let answer = client.call(request("web", [descriptor(&[("remote_address", "192.0.2.1")])]));
    answer.map(|response| response.overall_code()).map_err(|why| why.code())
}

#[test]
fn the_port_is_closed_unless_it_is_configured() {
    assert_eq!(Server::start().grpc, None);
}

#[test]
fn with_tokens_a_call_needs_one_also_on_loopback() {
    let tokens = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(tokens.path(), "correct-horse-battery-staple\n").unwrap();
    let (server, client) = start(&format!("api: {{ token_file: {} }}\n", tokens.path().display()));
    assert_eq!(call(&client), Err(tonic::Code::Unauthenticated));
    let with = |value: &str| Client::new(server.grpc.unwrap()).with_authorization(value);
    for wrong in ["Bearer wrong-horse-battery-staple", "Basic eDp5", "Bearer"] {
        assert_eq!(call(&with(wrong)), Err(tonic::Code::Unauthenticated), "{wrong}");
    }
    for _ in 0..3 {
        assert_eq!(call(&with("Bearer correct-horse-battery-staple")), Ok(Code::Ok));
    }
}

#[test]
fn beyond_loopback_a_call_needs_a_token_or_a_trusted_network() {
    let beyond = |more: &str| {
        let server = Server::with(&format!("grpc: {{ listen: \"0.0.0.0:0\" }}\n{POLICY}{more}"));
        let port = server.grpc.unwrap().port();
        (Client::new(([127, 0, 0, 1], port).into()), server)
    };
    let (client, _server) = beyond("");
    assert_eq!(call(&client), Err(tonic::Code::Unauthenticated));
    let (client, _server) = beyond("api: { trusted_callers: [127.0.0.0/8] }\n");
    assert_eq!(call(&client), Ok(Code::Ok));
    let (client, _server) = beyond("api: { trusted_callers: [192.0.2.0/24] }\n");
    assert_eq!(call(&client), Err(tonic::Code::Unauthenticated));
}

fn health(client: &Client, service: &str) -> Result<ServingStatus, tonic::Code> {
    let question = HealthCheckRequest { service: service.to_owned() };
    let answer = client.runtime.block_on(HealthClient::new(client.channel.clone()).check(question));
    answer.map(|answer| answer.into_inner().status()).map_err(|why| why.code())
}

#[test]
fn health_is_serving_until_the_service_stops() {
    let (server, client) = start("server: { drain_delay: 2s }\n");
    let services = ["", "envoy.service.ratelimit.v3.RateLimitService"];
    for service in services {
        assert_eq!(health(&client, service), Ok(ServingStatus::Serving), "{service:?}");
    }
    assert_eq!(health(&client, "elsewhere"), Err(tonic::Code::NotFound));
    server.tell_to_stop();
    for service in services {
        wait_until("the health changes", || health(&client, service) == Ok(ServingStatus::NotServing));
    }
    assert_eq!(call(&client), Ok(Code::Ok), "calls are still answered");
}

#[test]
fn a_client_that_watches_the_health_does_not_delay_the_stop() {
    let (server, client) = start("server: { drain_timeout: 1m }\n");
    let question = HealthCheckRequest::default();
    let watch = client.runtime.block_on(HealthClient::new(client.channel.clone()).watch(question)).unwrap();
    let started = std::time::Instant::now();
    server.tell_to_stop();
    server.wait();
    assert!(started.elapsed() < Duration::from_secs(20));
    drop(watch);
}

#[test]
fn reflection_lists_the_services() {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    let (_server, client) = start("");
    let question =
        |question| ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let ask = |asked: MessageRequest| {
        let questions = futures_util::stream::iter([question(asked)]);
        client.runtime.block_on(async {
            let mut reflection = ServerReflectionClient::new(client.channel.clone());
            let answers = reflection.server_reflection_info(questions).await.unwrap();
            answers.into_inner().message().await.unwrap().unwrap().message_response.unwrap()
        })
    };
    let MessageResponse::ListServicesResponse(list) = ask(MessageRequest::ListServices(String::new())) else {
        panic!("not a list of services")
    };
    let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
    assert!(names.contains(&"envoy.service.ratelimit.v3.RateLimitService"), "{names:?}");
    assert!(names.contains(&"grpc.health.v1.Health"), "{names:?}");
    let symbol = "envoy.service.ratelimit.v3.RateLimitService".to_owned();
    let found = ask(MessageRequest::FileContainingSymbol(symbol));
    assert!(matches!(found, MessageResponse::FileDescriptorResponse(_)), "{found:?}");
}

#[test]
fn a_key_used_up_over_rest_is_denied_over_grpc_and_the_reverse_on_two_nodes() {
    let store = RedisServer::start();
    let yaml = format!("store: {}\nredis: {{ deadline: 10s }}\n{GRPC}{POLICY}", store.url());
    let (one, two) = (Server::with(&yaml), Server::with(&yaml));
    let body = |address: &str| {
        json!({"attributes": {"domain": "web", "remote_address": address}, "permits": 3}).to_string()
    };
    assert_eq!(one.post("/api/v1/check", &body("192.0.2.1")).status, 200);
    let client = Client::new(two.grpc.unwrap());
    assert_eq!(client.ask_one("web", &[("remote_address", "192.0.2.1")]).code(), Code::OverLimit);
    for _ in 0..3 {
        assert_eq!(client.ask_one("web", &[("remote_address", "192.0.2.2")]).code(), Code::Ok);
    }
    let one_more = json!({"attributes": {"domain": "web", "remote_address": "192.0.2.2"}}).to_string();
    assert_eq!(one.post("/api/v1/check", &one_more).status, 429);
    assert_eq!(two.post("/api/v1/check", &one_more).status, 429);
}

#[test]
fn without_the_store_a_closed_limit_is_over_limit_and_an_open_one_ok() {
    let mut store = RedisServer::start();
    let rules = r#"
policy:
  rules:
    - { name: closed, key: "attribute:closed", limit: 3/min, on_store_failure: closed }
    - { name: open, key: "attribute:open", limit: 3/min, on_store_failure: open }
"#;
    let server = Server::with(&format!("store: {}\nredis: {{ deadline: 1s }}\n{GRPC}{rules}", store.url()));
    let client = Client::new(server.grpc.unwrap());
    assert_eq!(client.ask_one("web", &[("closed", "a")]).code(), Code::Ok);
    store.kill();
    wait_until("the store is gone", || client.ask_one("web", &[("closed", "a")]).code() == Code::OverLimit);
    wait_until("the store is known to be gone", || {
        (0..5).all(|_| client.ask_one("web", &[("open", "a")]).code() == Code::Ok)
    });
    let back = crate::rls_client::giving_back(1, descriptor(&[("closed", "a")]));
    let why = client.call(request("web", [back])).unwrap_err();
    assert_eq!(why.code(), tonic::Code::Unavailable, "nothing was given back");
}

#[test]
fn a_silent_client_and_an_idle_one_are_disconnected() {
    let (server, client) = start("server: { header_timeout: 100ms, idle_timeout: 300ms }\n");
    let mut silent = connect(server.grpc.unwrap());
    assert_eq!(silent.read(&mut [0; 1]).unwrap(), 0, "closed without a byte");
    // After its preface and settings the client sends no request.
    let mut idle = connect(server.grpc.unwrap());
    idle.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
    let mut bytes = Vec::new();
    idle.read_to_end(&mut bytes).unwrap();
    assert_eq!(call(&client), Ok(Code::Ok));
    let mut no_http = connect(server.grpc.unwrap());
    no_http.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    if let Err(why) = no_http.read_to_end(&mut bytes) {
        assert_eq!(why.kind(), std::io::ErrorKind::ConnectionReset, "closed with bytes unread");
    }
}

#[test]
fn a_message_that_does_not_end_is_given_up() {
    let (server, client) = start("server: { body_timeout: 200ms }\n");
    let address = server.grpc.unwrap();
    let status = client.runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let executor = hyper_util::rt::TokioExecutor::new();
        let io = hyper_util::rt::TokioIo::new(stream);
        let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
        tokio::spawn(connection);
        let endless =
            futures_util::stream::pending::<Result<hyper::body::Frame<bytes::Bytes>, std::io::Error>>();
        let request = http::Request::post(format!("http://{address}{SHOULD_RATE_LIMIT}"))
            .header("content-type", "application/grpc")
            .body(http_body_util::StreamBody::new(endless))
            .unwrap();
        let response = sender.send_request(request).await.unwrap();
        response.headers()["grpc-status"].to_str().unwrap().to_owned()
    });
    assert_eq!(status, "4", "DEADLINE_EXCEEDED");
    assert_eq!(call(&client), Ok(Code::Ok));
}

#[test]
fn connections_without_requests_make_room_for_others() {
    let (server, client) = start("server: { max_connections: 4 }\n");
    let held: Vec<_> = (0..20)
        .map(|_| {
            let mut idle = connect(server.grpc.unwrap());
            idle.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
            idle
        })
        .collect();
    assert_eq!(call(&client), Ok(Code::Ok));
    drop(held);
}

#[test]
fn an_unknown_method_is_unimplemented() {
    let (_server, client) = start("");
    let path =
        http::uri::PathAndQuery::from_static("/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit");
    let status = client.runtime.block_on(async {
        let mut grpc = tonic::client::Grpc::new(client.channel.clone());
        grpc.ready().await.unwrap();
        grpc.unary(tonic::Request::new(Vec::new()), path, crate::rls_client::Raw).await.unwrap_err()
    });
    assert_eq!(status.code(), tonic::Code::Unimplemented);
}
