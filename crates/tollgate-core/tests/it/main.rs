//! The algorithms, judged from outside: vectors, laws, and the mistakes that other limiters ship.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod accuracy; // how far the sliding counter is from the exact log
mod breaker; // when a failing server is asked again
mod calendar; // days, weeks and months of time zones
mod identity; // how requests are identified
mod laws; // what holds for every limit, trace and clock
mod lease; // permits that are lent
mod local_lease; // what a node does with what it has borrowed
mod migrate; // what a key has used when its limit changes
mod paths; // spellings of paths, and limits that are left out
mod policy; // which limits a request is checked against
mod quota; // calendar quotas by day, week and month
mod retention; // what a log keeps for longer windows
mod vectors; // the published steps of each algorithm
mod worked; // the numbers of the specification and the known traps
