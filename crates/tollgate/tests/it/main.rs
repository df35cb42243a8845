//! The engines, judged from outside.

mod differential; // the memory of an algorithm in Rust against its twin in a real Redis
mod memory; // the memory engine: limits, floods, expiry, threads
