//! The fixtures themselves: what other tests rely on.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod clock; // a time of day that steps
mod cluster; // elections and slots on the move
mod excess; // what counts as too much, in any interval
mod network; // places, and what can be cut between them
mod process; // how a program is held, ended and looked at
mod proxy; // how badly bytes can be carried
mod redis; // one server: where it listens, what it survives, how it ends
mod sentinel; // elections among three stores
mod simulation; // leases under everything that can go wrong, from seeds
mod tls; // who is let in
