//! The service, judged from outside: through real sockets, and through the real program.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

#[path = "api.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod api_on_memory; // the REST API, field for field
#[path = "api.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod api_on_redis; // the same, with the state in a store
mod cli; // the program: its commands, exits and words
mod config; // files, variables, flags, and every mistake at once
mod evicting; // stores that drop keys when they are full
mod lost_data; // a store that comes back empty
mod new_subjects; // more new subjects than a rule may have
mod nodes; // many nodes on one store
mod outages; // a store that is gone
#[path = "policy.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod policy_on_memory; // the policy: rules, keys, tiers, all limits together
#[path = "policy.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod policy_on_redis; // the same, with the state in a store
mod reload; // policies that change while the service runs
mod serving; // slow, idle, greedy and leaving clients

mod server; // what the others share
