//! Packages of other languages.

use std::process::Command;

use crate::installed;

/// The Python that has the packages of `python/requirements.txt`.
///
/// # Panics
/// If they are not installed.
pub fn python() -> Command {
    Command::new(installed("python/bin/python3"))
}

/// Node with the packages of `node/package.json`.
///
/// # Panics
/// If they are not installed.
pub fn node() -> Command {
    let mut command = Command::new("node");
    command.env("NODE_PATH", installed("node/node_modules"));
    command
}
