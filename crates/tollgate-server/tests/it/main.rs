//! The service, judged from outside: through real sockets, and through the real program.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod api; // the REST API, field for field
mod cli; // the program: its commands, exits and words
mod config; // files, variables, flags, and every mistake at once
mod serving; // slow, idle, greedy and leaving clients

mod server; // what the others share
