//! The rows of the matrix, each a fault and what is promised of it.

mod server; // one server that dies, stands still, refuses or forgets

use crate::Finding;
pub use crate::rig::Pace;

/// A fault, and how it is brought about and judged. `None`: it cannot be brought about on this machine.
pub struct Row {
    /// Its number in the matrix, with a letter where it has several parts.
    pub id: &'static str,
    /// What is done.
    pub fault: &'static str,
    /// Does it, with a seed for the load.
    pub run: fn(Pace, u64) -> Option<Finding>,
}

/// All rows, in the order of the table.
pub const ALL: &[Row] = &[
    Row { id: "1", fault: "kill -9 of the store, restarted empty", run: server::killed },
    Row { id: "2", fault: "SIGSTOP of the store, then SIGCONT", run: server::paused },
];
