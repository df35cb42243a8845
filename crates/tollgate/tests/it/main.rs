//! The engines: by themselves, against each other, and on real servers.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod differential; // memory and Redis decide alike, step by step
mod exact; // many nodes on one key admit exactly the limit
mod memory; // the memory engine: floods, expiry, threads

mod limits; // what the others share
mod worker;
