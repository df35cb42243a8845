//! Tollgate with real proxies and real client programs. `cargo xtask e2e` installs and runs them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod balancers; // three nodes behind a balancer, one of them killed
mod clients; // client programs in other languages
mod envoy; // Envoy with examples/envoy: limits over gRPC
mod forward_auth; // the examples in which a proxy asks Tollgate
mod openapi; // requests that Schemathesis generates from the OpenAPI document
mod proxies; // each proxy starts, forwards and stops
mod sample_clients; // the clients in `examples/clients`
mod server; // the fixture that starts the server
