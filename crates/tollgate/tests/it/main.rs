//! The engines: by themselves, against each other, and on real servers.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod differential; // memory and Redis decide alike, step by step
mod exact; // many nodes on one key admit exactly the limit
mod failover; // primaries that change under load
mod floods; // new keys by the thousand, in memory
mod guard; // answers without the store
mod lease; // nodes that borrow
mod lending; // loans are the same in Rust and in the store
mod memory; // the memory engine: floods, expiry, threads
mod store; // stores that are missing, refusing, forgetful

mod limits; // what the others share
mod worker;

/// Runs a test on this thread.
fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}
