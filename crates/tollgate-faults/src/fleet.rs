//! Programs that borrow from one limit, each a process of its own, with a timeline of what was done to them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;
use tollgate_testkit::{Bound, Process, wait_at_most};

use crate::judge::Judge;
use crate::lessee::{Check, Lending};
use crate::program::program;
use crate::record::Ground;

/// What all of them do.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) consistency: &'static str,
    /// Permits at once, of each key.
    pub(crate) burst: u64,
    /// Permits a second.
    pub(crate) permits: u64,
    /// Checks a second, by all of them together.
    pub(crate) rate: u64,
    pub(crate) hot_keys: u64,
    pub(crate) warm_keys: u64,
    pub(crate) zipf: bool,
    pub(crate) failover_guard: bool,
    pub(crate) seed: u64,
}

impl Plan {
    /// One key that is asked for three times as often as it can be admitted, so that everything is spent at once, and one that is asked
    /// for less often, so that something is always held.
    pub(crate) fn new(consistency: &'static str, seed: u64) -> Self {
        Self {
            consistency,
            burst: 10_000,
            permits: 10_000,
            rate: 36_000,
            hot_keys: 1,
            warm_keys: 1,
            zipf: false,
            failover_guard: false,
            seed,
        }
    }

    /// Three smaller ones, and many others that are asked for as often all together.
    pub(crate) fn mixed(consistency: &'static str, seed: u64) -> Self {
        let hot = Self::new(consistency, seed);
        Self { burst: 1_000, permits: 1_000, rate: 18_000, hot_keys: 3, warm_keys: 0, zipf: true, ..hot }
    }

    /// How long a lease lasts.
    pub(crate) fn life(&self) -> Duration {
        let parts = if self.consistency == "lease" { 5 } else { 20 };
        Duration::from_micros(self.burst * 1_000_000 / self.permits / parts).min(Duration::from_secs(1))
    }

    fn bound(&self) -> Bound {
        Bound { burst: self.burst, permits: self.permits, period_us: 1_000_000 }
    }

    /// What flows in the time by which the store's clock and those of the nodes may differ.
    fn noise(&self) -> u64 {
        self.permits / 500 + 1
    }
}

pub(crate) struct Fleet {
    pub(crate) processes: Vec<Process>,
    outs: Vec<PathBuf>,
    plan: Plan,
    timeline: Vec<(u64, String)>,
    directory: TempDir,
}

/// Microseconds of the wall clock, which the store has too.
fn wall_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64)
}

impl Fleet {
    /// Starts one for each store address, and lets all begin when they know of each other.
    pub(crate) fn start(stores: &[String], plan: Plan) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let nodes = stores.len() as u64;
        let (mut processes, mut outs) = (Vec::new(), Vec::new());
        for (number, store) in stores.iter().enumerate() {
            let out = directory.path().join(format!("lessee{number}.records"));
            let mut command = program("lessee");
            command.args(["--store", store, "--consistency", plan.consistency]).arg("--out").arg(&out);
            for (name, value) in [
                ("--rate", plan.rate / nodes),
                ("--seed", plan.seed * 100 + number as u64),
                ("--nodes", nodes),
                ("--burst", plan.burst),
                ("--permits", plan.permits),
                ("--hot-keys", plan.hot_keys),
                ("--warm-keys", plan.warm_keys),
            ] {
                command.args([name, &value.to_string()]);
            }
            command.args(plan.zipf.then_some("--zipf"));
            command.args(plan.failover_guard.then_some("--failover-guard"));
            let log = directory.path().join(format!("lessee{number}.log"));
            processes.push(Process::start_with_log(&command, &log));
            outs.push(out);
        }
        let fleet = Self { processes, outs, plan, timeline: Vec::new(), directory };
        wait_at_most(Duration::from_secs(60), "all know of each other", || {
            (0..stores.len()).all(|number| fleet.log(number).contains("ready"))
        });
        fleet
    }

    fn log(&self, number: usize) -> String {
        let path = self.directory.path().join(format!("lessee{number}.log"));
        std::fs::read_to_string(path).unwrap_or_default()
    }

    /// Notes that something happens now.
    pub(crate) fn mark(&mut self, what: &str) -> u64 {
        let now = wall_us();
        self.timeline.push((now, what.to_owned()));
        now
    }

    pub(crate) fn wait(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Stops all that still run and gathers what was seen.
    pub(crate) fn finish(mut self) -> Seen {
        let end = self.mark("load ends");
        let mut exits = Vec::new();
        for process in &mut self.processes {
            if !process.has_ended() {
                process.terminate();
            }
        }
        for process in &mut self.processes {
            exits.push(process.wait_for_end(Duration::from_secs(15)));
        }
        let checks = |path: &PathBuf| Check::read(&std::fs::read(path).unwrap_or_default());
        let lending = |path: &PathBuf| {
            let bytes = std::fs::read(path.with_extension("lending")).ok()?;
            serde_json::from_slice::<Lending>(&bytes).ok()
        };
        let logs: String = (0..self.outs.len()).map(|number| self.log(number)).collect();
        Seen {
            by_node: self.outs.iter().map(checks).collect(),
            lending: self.outs.iter().map(lending).collect(),
            exits,
            panics: logs.matches("panicked").count(),
            timeline: self.timeline,
            plan: self.plan,
            end,
        }
    }
}

/// All that was seen of a run.
pub(crate) struct Seen {
    pub(crate) by_node: Vec<Vec<Check>>,
    /// None of those that were killed.
    pub(crate) lending: Vec<Option<Lending>>,
    pub(crate) exits: Vec<Option<i32>>,
    panics: usize,
    timeline: Vec<(u64, String)>,
    pub(crate) plan: Plan,
    pub(crate) end: u64,
}

impl Seen {
    /// A judge who knows the timeline, and what is promised of every run.
    pub(crate) fn judge(&self, ended_badly: usize) -> Judge {
        let mut judge = Judge::bare(self.plan.seed);
        judge.run.timeline = self.timeline.clone();
        let badly = self.exits.iter().filter(|exit| **exit != Some(0)).count();
        judge.common(
            "no panic, exit 0",
            format!("{} panics, {badly} other exits", self.panics),
            self.panics == 0 && badly == ended_badly,
        );
        let checks: usize = self.by_node.iter().map(Vec::len).sum();
        let leased = self.all().filter(|check| check.ground == Ground::Leased).count();
        let share = leased * 100 / checks.max(1);
        judge.note("checks", format!("{checks}, {share}% decided by leases"));
        let sum = |what: fn(&Lending) -> u64| self.lending.iter().flatten().map(what).sum::<u64>();
        judge.note(
            "borrowed",
            format!(
                "{}: {} spent, {} given back, {} expired, {} lost",
                sum(|it| it.granted),
                sum(|it| it.spent),
                sum(|it| it.returned),
                sum(|it| it.expired),
                sum(|it| it.lost)
            ),
        );
        let unbalanced = self
            .lending
            .iter()
            .flatten()
            .filter(|it| it.granted != it.spent + it.returned + it.expired + it.lost + it.held)
            .count();
        judge.common(
            "what was borrowed was spent, given back, has expired or was lost",
            format!("{unbalanced} nodes differ"),
            unbalanced == 0,
        );
        judge
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Check> {
        self.by_node.iter().flatten()
    }

    /// Those that were let through by the limit: by the store or by what was borrowed from it.
    pub(crate) fn admitted(&self) -> impl Iterator<Item = &Check> {
        self.all().filter(|it| it.allowed && matches!(it.ground, Ground::Exact | Ground::Leased))
    }

    /// In any interval, no key was admitted more than its limit and `more`.
    pub(crate) fn excess(&self, judge: &mut Judge, more: u64, why: &str) {
        let mut by_key: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
        for check in self.admitted() {
            by_key.entry(check.key).or_default().push((check.at_us, 1));
        }
        let (keys, bound) = (by_key.len(), self.plan.bound());
        let excess = by_key.into_values().map(|mut it| bound.excess(&mut it).permits).max().unwrap_or(0);
        let noise = self.plan.noise();
        judge.decision(
            format!("excess <= {more}{why}"),
            format!("{excess} on {keys} keys (noise {noise})"),
            excess <= more + noise && keys > 0,
        );
    }

    /// The share of offered requests on the hot keys that was admitted, outside of these times.
    pub(crate) fn utilisation(&self, begun: u64, but: &[(u64, u64)]) -> f64 {
        let counts = |at: u64| {
            (begun..self.end).contains(&at) && !but.iter().any(|(from, to)| (*from..*to).contains(&at))
        };
        let left_out: u64 = but.iter().map(|(from, to)| to - from).sum();
        let hot = |it: &&Check| u64::from(it.key) < self.plan.hot_keys && counts(it.at_us);
        let admitted = self.admitted().filter(hot).count() as f64;
        let seconds = (self.end - begun).saturating_sub(left_out) as f64 / 1e6;
        let offered = self.plan.burst as f64 + self.plan.permits as f64 * seconds;
        admitted / (self.plan.hot_keys as f64 * offered)
    }

    /// Checks of hot keys that were admitted in the last moments.
    pub(crate) fn admitted_lately(&self, time_us: u64) -> u64 {
        self.admitted().filter(|it| it.at_us + time_us > self.end).count() as u64
    }

    /// What was admitted of the hot keys between two instants, against what flows meanwhile.
    pub(crate) fn throughput(&self, from: u64, to: u64) -> f64 {
        let hot = |it: &&Check| u64::from(it.key) < self.plan.hot_keys && (from..to).contains(&it.at_us);
        let flows = self.plan.hot_keys as f64 * self.plan.permits as f64 * (to - from) as f64 / 1e6;
        self.admitted().filter(hot).count() as f64 / flows
    }
}
