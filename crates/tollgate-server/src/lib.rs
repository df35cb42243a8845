//! The service `tollgate`: configuration, doors, and the loop that holds their connections.

mod access;
mod address;
pub mod app;
mod assigned;
pub mod cli;
pub mod config;
mod denials;
mod doors;
mod escape;
mod identity;
mod import;
mod live;
mod loopback;
mod metrics;
mod reload;
mod serve;
mod telemetry;
