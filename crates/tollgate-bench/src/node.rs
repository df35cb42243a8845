//! The program of `peers/node`, built against the working tree and against an earlier commit, both measured in the same run.
//!
//! The program inherits the core that this process is pinned to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::instructions::{Checks, count, stopped_with_this_process};
use crate::redis::{server, url};
use crate::report::{Report, median};

/// The earlier commit, as the rows name it.
pub(crate) const BEFORE: &str = "f129c2f";

/// The program in two versions.
pub(crate) struct Nodes {
    now: PathBuf,
    before: PathBuf,
}

/// Figures of both versions.
pub(crate) struct Both<T> {
    pub(crate) now: T,
    pub(crate) before: T,
}

/// The output of the program.
#[derive(Deserialize)]
struct Output {
    checks: u64,
    seconds: f64,
    /// Script calls to the store.
    calls: u64,
    cpu_seconds: f64,
}

impl Output {
    fn per_second(&self) -> f64 {
        self.checks as f64 / self.seconds
    }
}

impl Nodes {
    /// The programs that `cargo xtask bench` has built. Prints a line where there are none.
    pub(crate) fn built() -> Option<Self> {
        let path = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
        let nodes = path("NODE_NOW").zip(path("NODE_BEFORE")).map(|(now, before)| Self { now, before });
        if nodes.is_none() {
            println!("  left out: `cargo xtask bench` builds the node program");
        }
        nodes
    }

    /// Measures both versions, in every other round the earlier one first.
    fn both<T>(&self, round: usize, measure: impl Fn(&Path) -> Result<T>) -> Result<Both<T>> {
        if round.is_multiple_of(2) {
            let now = measure(&self.now)?;
            Ok(Both { now, before: measure(&self.before)? })
        } else {
            let before = measure(&self.before)?;
            Ok(Both { now: measure(&self.now)?, before })
        }
    }

    /// Counts the instructions of one check in a mode: the medians of some rounds.
    pub(crate) fn instructions(&self, mode: &str, checks: Checks, rounds: usize) -> Result<Both<f64>> {
        let (mut now, mut before) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let seen = self.both(round, |program| {
                checks.instructions(|number| {
                    // A server of its own for each run: a node of an earlier run would count as one that still lives.
                    let server = server()?;
                    count(program, &[mode, &url(&server), "checks", &number.to_string()])
                })
            })?;
            now.push(seen.now);
            before.push(seen.before);
        }
        Ok(Both { now: median(now), before: median(before) })
    }

    /// Makes checks in a mode for some time, round by round, and returns the median ratio of the rates, now to before.
    pub(crate) fn speed_up(
        &self,
        report: &mut Report,
        mode: &str,
        rounds: usize,
        duration: Duration,
    ) -> Result<f64> {
        let (mut now, mut before, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds {
            let seen = self.both(round, |program| run(program, mode, duration))?;
            for (name, seen) in [("now", &seen.now), (BEFORE, &seen.before)] {
                println!(
                    "  {name:<8}{:>8.0} requests/s, {:.2} calls and {:.2} us of the node each",
                    seen.per_second(),
                    seen.calls as f64 / seen.checks as f64,
                    seen.cpu_seconds * 1e6 / seen.checks as f64
                );
            }
            now.push(seen.now.per_second());
            before.push(seen.before.per_second());
            ratios.push(seen.now.per_second() / seen.before.per_second());
        }
        report.figure(&format!("{mode}, requests/s"), median(now));
        report.figure(&format!("{mode}, requests/s, {BEFORE}"), median(before));
        Ok(median(ratios))
    }
}

/// The times of admissions by algorithm: of this version, and of the earlier one.
pub(crate) type Admissions = BTreeMap<String, [Vec<u64>; 2]>;

impl Nodes {
    /// Runs both versions at the same time on one server.
    pub(crate) fn side_by_side(&self, url: &str, duration: Duration) -> Result<Admissions> {
        let start = |program: &Path| {
            let mut command = stopped_with_this_process(program);
            command.args(["beside", url, "millis", &duration.as_millis().to_string()]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("cannot run the node")
        };
        let running = [start(&self.now)?, start(&self.before)?];
        let mut both = Admissions::new();
        for (version, process) in running.into_iter().enumerate() {
            let output = process.wait_with_output()?;
            let errors = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "a node ended with {}:\n{errors}", output.status);
            let seen: BTreeMap<String, Vec<u64>> =
                serde_json::from_slice(&output.stdout).context("a node printed no admissions")?;
            for (algorithm, times) in seen {
                both.entry(algorithm).or_default()[version] = times;
            }
        }
        Ok(both)
    }
}

/// Makes checks for some time on a server of its own.
fn run(program: &Path, mode: &str, duration: Duration) -> Result<Output> {
    let server = server()?;
    let mut command = stopped_with_this_process(program);
    let output = command.args([mode, &url(&server), "millis", &duration.as_millis().to_string()]).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}:\n{errors}", output.status);
    serde_json::from_slice(&output.stdout).with_context(|| format!("{command:?} printed no figures"))
}
