//! Commands that read and change the data shared by all nodes.

use std::time::Duration;

use redis::Cmd;

use super::command::{Command, evalsha};
use super::scripts::SCRIPTS;
use crate::redis::shared::control::Version;

/// The command that reads the server's time.
pub(crate) fn time() -> Command {
    reading("TIME", &[])
}

/// The command that reads some fields of a hash, all at the same instant.
pub(crate) fn fields(key: &str, names: &[String]) -> Command {
    let mut command = reading("HMGET", &[key]);
    command.said.arg(names);
    command
}

/// The command that reads all fields of a hash.
pub(crate) fn all_fields(key: &str) -> Command {
    reading("HGETALL", &[key])
}

fn reading(name: &str, keys: &[&str]) -> Command {
    let mut said = Cmd::new();
    said.arg(name).arg(keys);
    Command { said, script: None, writes: false }
}

/// A change to a hash that has a version.
#[derive(Default)]
pub(crate) struct VersionedChange<'a> {
    /// A hash with a version of its own, which gets the changes and then replaces the first.
    pub(crate) replacement: Option<(&'a str, &'a Version)>,
    /// The time to live of the hash, if it has one.
    pub(crate) lives_for: Option<Duration>,
    /// Fields to set. At least one: the version.
    pub(crate) set: Vec<(String, String)>,
    /// Fields to remove.
    pub(crate) remove: Vec<String>,
}

/// The call that makes a change if the hash, and its replacement, still have the versions that were read.
pub(crate) fn change_versioned(key: &str, read: &Version, change: &VersionedChange<'_>) -> Command {
    let hashes: Vec<_> = std::iter::once((key, read)).chain(change.replacement).collect();
    let keys: Vec<&str> = hashes.iter().map(|(key, _)| *key).collect();
    let mut command = evalsha(&SCRIPTS.control, keys.into_iter());
    let lives_for = change.lives_for.map(|it| it.as_millis().to_string()).unwrap_or_default();
    command.said.arg(lives_for).arg(2 * change.set.len());
    for (name, value) in &change.set {
        command.said.arg(name).arg(value);
    }
    command.said.arg(&change.remove);
    for (_, version) in hashes {
        command.said.arg(version.number).arg(&version.epoch);
    }
    command
}
