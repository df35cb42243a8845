//! The program that plays the nodes and the worker: this one, called by itself.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Which program plays the nodes. Tests name the one that was built for them.
pub fn set_program(path: impl Into<PathBuf>) {
    // The first one stays: all are the same.
    let _ = PROGRAM.set(path.into());
}

/// A command of the program: `tollgate` or `worker`.
pub(crate) fn program(command: &str) -> Command {
    let own = || std::env::current_exe().expect("a running program has a path");
    let mut program = Command::new(PROGRAM.get_or_init(own));
    program.arg(command);
    program
}
