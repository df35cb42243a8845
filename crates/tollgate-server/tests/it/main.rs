//! The service, judged from outside: through real sockets, and through the real program.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod access; // who may do what: tokens, hosts, pages of browsers, proxies, the admin port
#[path = "api.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod api_on_memory; // the REST API, field for field
#[path = "api.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod api_on_redis; // the same, with the state in a store
mod cli; // the program: its commands, exits and words
mod config; // files, variables, flags, and every mistake at once
mod connections; // a full table, addresses that share a prefix, memory for bodies
mod defaults; // what compact limits, the default and a missing key mean
mod envoy; // files of envoyproxy/ratelimit: their answers, and which are refused
mod evicting; // stores that drop keys when they are full
mod forward_auth; // calls of reverse proxies
mod hostile; // requests and policies made to keep the service busy
mod identity; // who is asking: what a client can invent, and what is verified
mod inputs; // requests that could be read in two ways
mod log_lines; // what is in log lines, and what is not
mod logs; // sliding logs: how large they may be, and what they keep
mod lost_data; // a store that comes back empty
mod new_subjects; // more new subjects than a rule may have
mod nodes; // many nodes on one store
mod operator; // what an operator reads in the log
mod outage_log; // what an operator reads about an outage
mod outages; // a store that is gone
mod paths; // spellings of paths
mod permits; // too many limits, too many permits
#[path = "policy.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod policy_on_memory; // the policy: rules, keys, tiers, all limits together
#[path = "policy.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod policy_on_redis; // the same, with the state in a store
mod reload; // policies that change while the service runs
mod resp_connections; // Redis clients: access, limits of commands and connections, hostile ones
#[path = "resp.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod resp_on_memory; // the Redis protocol: commands and replies
#[path = "resp.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod resp_on_redis; // the same, with the state in a store
mod resp_programs; // redis-cli and redis-benchmark
mod resp_throttle; // CL.THROTTLE beside the arithmetic of redis-cell
#[path = "rls.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod rls_on_memory; // Envoy's Rate Limit Service, field for field
#[path = "rls.rs"]
#[allow(clippy::duplicate_mod, reason = "the same tests, whatever holds the state")]
mod rls_on_redis; // the same, with the state in a store
mod rls_port; // the gRPC port: access, health, reflection, bad calls, connections, several nodes
mod secrets; // settings that are secrets
mod serving; // slow, idle, greedy and leaving clients
mod tiers; // the worked tiers of the specification

mod resp_client; // a Redis client
mod rls_client; // what the tests of gRPC share
mod server; // what the others share
