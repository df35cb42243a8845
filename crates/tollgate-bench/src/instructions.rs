//! Instructions that a check takes, as callgrind counts them. Unlike time, they do not depend on the load of the machine.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Runs with few and with many checks. Both start up in the same way, so the difference is the cost of checks alone.
#[derive(Clone, Copy)]
pub(crate) struct Checks {
    pub(crate) few: u64,
    pub(crate) many: u64,
}

impl Checks {
    /// The instructions of one check. `count` runs a program that makes a number of checks and counts its instructions.
    pub(crate) fn instructions(self, count: impl Fn(u64) -> Result<u64>) -> Result<f64> {
        let (few, many) = (count(self.few)?, count(self.many)?);
        Ok((many as f64 - few as f64) / (self.many - self.few) as f64)
    }
}

/// Runs a program to its end under callgrind and counts all of its instructions.
pub(crate) fn count(program: &Path, arguments: &[&str]) -> Result<u64> {
    let mut command = stopped_with_this_process("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program).args(arguments);
    let output = command.output().context("cannot run valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}:\n{text}", output.status);
    collected(&text)
}

/// The instructions that callgrind has counted, from what it says at the end.
pub(crate) fn collected(text: &str) -> Result<u64> {
    let number = text.lines().find_map(|line| Some(line.split_once("Collected :")?.1));
    Ok(number.with_context(|| format!("callgrind counted nothing:\n{text}"))?.trim().parse()?)
}

/// A program that the system kills if this process ends first.
pub(crate) fn stopped_with_this_process(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}
