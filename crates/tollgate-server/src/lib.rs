//! The service `tollgate`: configuration, doors, and the loop that holds their connections.

mod access;
mod address;
pub mod app;
pub mod cli;
pub mod config;
mod doors;
#[cfg_attr(not(test), expect(dead_code, reason = "no door asks who is asking yet"))]
mod identity;
mod metrics;
mod serve;
mod telemetry;
