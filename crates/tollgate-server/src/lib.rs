//! The service `tollgate`: configuration, doors, and the loop that holds their connections.

mod access;
mod address;
mod answer;
pub mod app;
pub mod cli;
pub mod config;
mod doors;
mod escape;
mod headers;
mod identity;
mod import;
mod limiter;
mod live;
mod loopback;
mod metrics;
mod named_limits;
mod request;
mod schema;
mod serve;
mod telemetry;
