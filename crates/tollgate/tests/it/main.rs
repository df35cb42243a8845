//! The engines, judged from outside.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod differential; // the memory of an algorithm in Rust against its twin in a real Redis
mod memory; // the memory engine: limits, floods, expiry, threads
