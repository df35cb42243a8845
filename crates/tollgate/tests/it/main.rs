//! The engines: by themselves, against each other, and on real servers.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod calendar_clock; // calendar quotas on stores whose clock is days away
mod cancelled; // reservations that are cancelled before they start
mod check_sets; // several limits of one request, in different slots of a cluster
mod differential; // memory and Redis decide alike, step by step
mod exact; // many nodes on one key admit exactly the limit
mod exact_leased_sets; // the same for limits that nodes borrow from
mod exact_sets; // the same for requests with several limits
mod failover; // primaries that change under load
mod fake; // guards and leases on a store in memory, in virtual time
mod floods; // new keys by the thousand, in memory
mod guard; // answers without the store
mod lease; // nodes that borrow
mod leased_sets; // several limits of one request, some of which are borrowed from
mod lending; // loans are the same in Rust and in the store
mod logs; // the work of one call on a sliding log is bounded
mod memory; // the memory engine: floods, expiry, threads
mod overload; // stores that can be reached but do not decide
mod panics; // callers that panic
mod partial; // outages of some servers of a cluster
mod sets; // several limits of one request, on one server
mod store; // stores that are missing, refusing, forgetful

mod limits; // what the others share
mod worker;

/// Runs a test on this thread.
fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}
