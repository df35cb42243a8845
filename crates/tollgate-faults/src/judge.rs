//! What was promised, and what was seen: claims about one run.

use std::collections::HashMap;
use std::fmt::Display;

use serde::Serialize;

use crate::record::{Ground, Record};
use crate::rig::{Run, SHARERS};
use crate::traffic::{BURST, LIMITS, RATE, TestLimit};

/// What a claim is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Kind {
    /// What was decided, and on what ground. Holds on every machine.
    Decision,
    /// How fast, or how much of the machine. Holds on one that is not busy with other work.
    Measure,
    /// For the record.
    Note,
}

/// Something that was promised, and what was seen.
#[derive(Clone, Debug, Serialize)]
pub struct Claim {
    /// What it is about.
    pub kind: Kind,
    /// What was promised.
    pub expected: String,
    /// What was seen.
    pub measured: String,
    /// Whether it was kept.
    pub holds: bool,
    /// Whether it is promised of every row: a table needs it only where it was not kept.
    pub common: bool,
}

/// Why the store gives no decision, and with it what becomes of a limit that fails open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// No connection can be opened, or no server is known for the key: it is let through.
    Unreachable,
    /// The store can be reached but does not decide: it is decided locally.
    Reachable,
    /// The store is full: as if reachable, but a write that frees as much as it takes is still decided by the store.
    Full,
    /// The store falls silent: it is decided locally until an attempt to connect has failed, then let through.
    Silent,
}

impl Cause {
    /// The basis that a limit's answers must have.
    pub(crate) fn basis_of(self, limit: u8) -> Ground {
        match LIMITS[usize::from(limit)].ground() {
            Ground::Open if matches!(self, Self::Reachable | Self::Full) => Ground::Local,
            configured => configured,
        }
    }

    /// What the table says of it.
    fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "configured mode 100%",
            Self::Reachable => "configured mode 100%, local in place of open",
            Self::Full => "by the store, or configured mode with local in place of open",
            Self::Silent => "configured mode 100%, local in place of open for 1.5 s",
        }
    }
}

/// All claims about a run.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The row of the matrix.
    pub row: String,
    /// What was done.
    pub fault: String,
    /// In the order of the table.
    pub claims: Vec<Claim>,
    /// What happened when, and the seed that draws the same load again.
    pub timeline: String,
    /// What the nodes had to say about it.
    pub warnings: Vec<String>,
    /// How many milliseconds late a timer was in the run before this one, if the row was repeated for it.
    pub repeated_after: Option<u64>,
}

impl Finding {
    /// Whether all claims hold.
    pub fn holds(&self) -> bool {
        self.claims.iter().all(|claim| claim.holds)
    }

    /// Whether all that was missed is how fast it was.
    pub(crate) fn misses_speed_only(&self) -> bool {
        let mut missed = self.claims.iter().filter(|claim| !claim.holds).peekable();
        missed.peek().is_some() && missed.all(|claim| claim.kind == Kind::Measure)
    }
}

/// The time that a decision may take beyond its deadline.
const DEADLINE_US: u64 = 10_000;
const SLACK_US: u64 = 5_000;
/// Over HTTP, on a loaded machine with two cores.
const HTTP_MAX_US: u64 = 250_000;
/// After the store answers again.
const RECOVERY_MAX_US: u64 = 1_500_000;
/// What was remembered or under way when the fault began is not yet decided by the guard.
const SETTLE_US: u64 = 250_000;
/// Within this a silent store is found to be unreachable: half a second of silence, an attempt to connect, and some time for a
/// busy machine.
const SILENT_US: u64 = 1_500_000;
/// How long a stall of the machine shows: a breaker that it has opened, its longest doubt and its probes.
const AFTER_STALL_US: u64 = 700_000;
/// So many decisions in a row by the store, and a node is well again.
const WELL_AFTER: usize = 20;
/// Memory comes and goes with allocators; a leak goes on.
const RSS_GROWTH_MAX: u64 = 16 << 20;

/// Lines of the nodes' logs that are kept.
const WARNINGS_MAX: usize = 20;

/// Writes the claims of one run.
pub(crate) struct Judge {
    pub(crate) run: Run,
    claims: Vec<Claim>,
}

impl Judge {
    /// Everything that is promised of every run: answers, ends, no panic, replies that belong to their calls.
    pub(crate) fn of(run: Run) -> Self {
        let mut judge = Self { run, claims: Vec::new() };
        let unanswered = judge.run.records.iter().filter(|it| it.node > 0 && it.status == 0).count();
        judge.common("all requests answered", format!("all but {unanswered}"), unanswered == 0);
        judge.ended(0);
        judge
    }

    /// The same of a run in which a node was ended at once, and with it what it had under way. It may not have ended well.
    pub(crate) fn of_hurried(run: Run, ended_badly: usize) -> Self {
        let mut judge = Self { run, claims: Vec::new() };
        judge.ended(ended_badly);
        judge
    }

    fn ended(&mut self, badly: usize) {
        let checks = self.run.records.len();
        let may_refuse = |it: &Record| LIMITS[usize::from(it.limit)].ground() == Ground::Closed;
        let errors = self.run.records.iter().filter(|it| it.status >= 500);
        let wrong = errors.filter(|it| !(it.status == 503 && may_refuse(it))).count();
        self.common("5xx only where closed", format!("{wrong} others of {checks}"), wrong == 0 && checks > 0);
        let panics = self.run.logs.matches("panicked").count();
        let exits = self.run.exits.iter().filter(|exit| **exit != Some(0)).count();
        let told = format!("{panics} panics, {exits} other exits");
        self.common("no panic, exit 0", told, panics == 0 && exits == badly);
        let failed = self.run.summary.as_ref().map(|summary| summary.failed.clone()).unwrap_or_default();
        let foreign = failed.get("protocol").copied().unwrap_or(u64::MAX);
        self.common("replies of other calls 0", foreign, foreign == 0);
        let errors: Vec<_> = failed
            .iter()
            .filter(|(_, count)| **count > 0)
            .map(|(class, count)| format!("{class} {count}"))
            .collect();
        self.note("calls of the embedding program without a decision", errors.join(", "));
    }

    /// For what needs no rig.
    pub(crate) fn bare(seed: u64) -> Self {
        Self { run: Run::empty(seed), claims: Vec::new() }
    }

    pub(crate) fn decision(&mut self, expected: impl Display, measured: impl Display, holds: bool) {
        self.claim(Kind::Decision, expected, measured, holds);
    }

    /// A decision that is promised of every row.
    pub(crate) fn common(&mut self, expected: impl Display, measured: impl Display, holds: bool) {
        self.decision(expected, measured, holds);
        if let Some(claim) = self.claims.last_mut() {
            claim.common = true;
        }
    }

    pub(crate) fn measure(&mut self, expected: impl Display, measured: impl Display, holds: bool) {
        self.claim(Kind::Measure, expected, measured, holds);
    }

    pub(crate) fn note(&mut self, what: impl Display, measured: impl Display) {
        self.claim(Kind::Note, what, measured, true);
    }

    fn claim(&mut self, kind: Kind, expected: impl Display, measured: impl Display, holds: bool) {
        let (expected, measured) = (expected.to_string(), measured.to_string());
        self.claims.push(Claim { kind, expected, measured, holds, common: false });
    }

    /// Decisions between two instants.
    pub(crate) fn between(&self, from: u64, to: u64) -> impl Iterator<Item = &Record> {
        self.run.records.iter().filter(move |record| (from..to).contains(&record.at_us))
    }

    /// Judges an outage: every answer must have the basis that the cause asks for.
    pub(crate) fn outage(&mut self, cause: Cause, from: u64, to: u64) {
        let first = self.between(from, to).find(|it| it.ground != Ground::Exact).map(|it| it.at_us - from);
        let detected = first.map_or("never".to_owned(), millis);
        self.measure("first answer without it < 50 ms", detected, first.is_some_and(|us| us < 50_000));
        let (mut right, mut wrong, mut denials, mut decided) = (0, 0, 0, 0);
        for record in self.between(from + SETTLE_US, to) {
            let expected = cause.basis_of(record.limit);
            match record.ground {
                // A denial writes nothing: a server that cannot write can still deny.
                Ground::Exact if !record.allowed => denials += 1,
                Ground::Exact if cause == Cause::Full => decided += 1,
                // A process that was held up for longer than its deadline found the answer when it went on.
                Ground::Exact if record.took_us > DEADLINE_US => {}
                // Not yet known to be unreachable.
                Ground::Local
                    if cause == Cause::Silent
                        && expected == Ground::Open
                        && record.at_us < from + SILENT_US =>
                {
                    right += 1;
                }
                other if other == expected => right += 1,
                _ => wrong += 1,
            }
        }
        let told = format!("{right}, others {wrong}");
        self.decision(cause.name(), told, wrong == 0 && right > 0);
        if denials > 0 {
            self.note("denied by the store, which writes nothing", denials);
        }
        if decided > 0 {
            self.note("admitted by the full store, which replaced an expired log", decided);
        }
    }

    /// No request was admitted without a decision: the node alone decided on requests that the store did not decide in time.
    pub(crate) fn none_open(&mut self, from: u64, to: u64) {
        let open = self.between(from, to).filter(|it| it.ground == Ground::Open).count();
        let local = self.between(from, to).filter(|it| it.ground == Ground::Local).count();
        self.decision("none let through (`open`)", format!("{open}; {local} decided locally"), open == 0);
    }

    /// Nothing was to be noticed: everything was decided by the store, while the machine itself was not held up for longer than
    /// half a deadline, which any store's answers miss.
    pub(crate) fn unnoticed(&mut self, from: u64, to: u64) {
        let ticks = self.run.summary.iter().flat_map(|summary| &summary.ticks_us);
        let held_up: Vec<_> = ticks.filter(|(_, late)| *late > DEADLINE_US / 2).copied().collect();
        let is_calm =
            |at: u64| held_up.iter().all(|(due, late)| !(*due..due + late + AFTER_STALL_US).contains(&at));
        let (mut all, mut calm, mut exact) = (0_u64, 0_u64, 0_u64);
        for it in self.between(from, to) {
            all += 1;
            if is_calm(it.at_us - it.took_us) {
                (calm, exact) = (calm + 1, exact + u64::from(it.ground == Ground::Exact));
            }
        }
        let others = calm - exact;
        self.measure(
            "by the store >= 99.5%",
            format!("{exact}, others {others} ({}% of the time calm)", calm * 100 / all.max(1)),
            others * 200 <= calm && calm * 5 >= all && all > 0,
        );
    }

    /// All nodes were decided for by the store again soon after it answered.
    pub(crate) fn recovered(&mut self, answers_at: u64) {
        let (mut slowest, mut recovered) = (Some(0), true);
        for node in 0..SHARERS as u8 {
            let (mut run, mut seen) = (0, false);
            let mut decisions = self.between(answers_at, self.run.end).filter(|it| it.node == node);
            let well = decisions.find_map(|it| {
                seen |= it.ground == Ground::Exact;
                run = if it.ground == Ground::Exact { run + 1 } else { 0 };
                (run == WELL_AFTER).then_some(it.at_us - answers_at)
            });
            recovered &= seen;
            slowest = slowest.zip(well).map(|(slowest, well)| slowest.max(well));
        }
        let measured = slowest.map_or("never".to_owned(), millis);
        self.common("recovers by itself", if recovered { "yes" } else { "no" }, recovered);
        self.measure("all well again <= 1.5 s", measured, slowest.is_some_and(|us| us <= RECOVERY_MAX_US));
    }

    /// In any interval, no key was admitted more by the store than its limit and `more`; and no node admitted more alone than
    /// its share.
    pub(crate) fn excess(&mut self, more: u64, why: &str) {
        let (mut exact, mut alone, mut all) = (HashMap::new(), HashMap::new(), HashMap::new());
        let (mut slowest, mut first_alone, mut last_alone) = (0, u64::MAX, 0);
        for it in self.run.records.iter().filter(|it| it.allowed) {
            let group: &mut Vec<(u64, u64)> = match it.ground {
                Ground::Exact | Ground::Leased => exact.entry((it.limit, it.key)).or_default(),
                Ground::Local => {
                    (first_alone, last_alone) = (first_alone.min(it.at_us), last_alone.max(it.at_us));
                    alone.entry((it.limit, it.key, it.node)).or_default()
                }
                Ground::Open | Ground::Closed | Ground::None => continue,
            };
            slowest = slowest.max(it.took_us);
            group.push((it.at_us, 1));
            if LIMITS[usize::from(it.limit)].ground() == Ground::Local {
                let group: &mut Vec<(u64, u64)> = all.entry(it.key).or_default();
                group.push((it.at_us, 1));
            }
        }
        // It was decided at some instant of the call, and is noted at its end.
        let tolerance = (RATE * slowest).div_ceil(1_000_000) + 1;
        let most = |groups: Vec<Vec<(u64, u64)>>, bound: tollgate_testkit::Bound| {
            groups.into_iter().map(|mut it| bound.excess(&mut it).permits).max().unwrap_or(0)
        };
        let (keys, by_store) = (exact.len(), most(exact.into_values().collect(), TestLimit::bound()));
        let admitted_alone: usize = alone.values().map(Vec::len).sum();
        let by_one = most(alone.into_values().collect(), TestLimit::share(SHARERS));
        let by_all = most(all.into_values().collect(), TestLimit::bound());
        let told = format!("{by_store} on {keys} keys (noise {tolerance})");
        self.decision(format!("excess <= {more}{why}"), told, by_store <= more + tolerance && keys > 0);
        let told = format!("{by_one} over, {admitted_alone} admitted");
        self.common("alone: within a node's share", told, by_one <= tolerance);
        // The shares of all nodes are a limit of their own, for as long as anything is decided alone.
        let alone_us = last_alone.saturating_sub(first_alone);
        let both = more + BURST + (RATE * alone_us).div_ceil(1_000_000);
        self.decision(format!("both together <= {both}"), by_all, by_all <= both + tolerance);
    }

    /// No decision took longer than its deadline and what it takes without the fault.
    pub(crate) fn latency(&mut self, baseline_from: u64, from: u64, to: u64) {
        let worker = |from, to| -> Vec<u64> {
            let mut took: Vec<_> =
                self.between(from, to).filter(|it| it.node == 0).map(|it| it.took_us).collect();
            took.sort_unstable();
            took
        };
        let (before, during) = (worker(baseline_from, from), worker(from, to));
        // What the machine itself delays shows before the fault, and at the same time in a program's own clock.
        let mut late: Vec<_> = self.run.summary.iter().flat_map(|summary| &summary.ticks_us).collect();
        late.retain(|(due, _)| (from..to).contains(due));
        let mut late: Vec<_> = late.into_iter().map(|(_, late)| *late).collect();
        late.sort_unstable();
        let usual = per_mille(&before, 999).max(per_mille(&late, 999));
        let slow = per_mille(&during, 999);
        let bar = DEADLINE_US + SLACK_US + usual;
        self.measure(
            format!("p99.9 in process <= 15 ms + {}", millis(usual)),
            format!("{} (slowest {})", millis(slow), millis(during.last().copied().unwrap_or(0))),
            slow <= bar && !during.is_empty(),
        );
        let http = self.between(from, to).filter(|it| it.node > 0).map(|it| it.took_us).max().unwrap_or(0);
        self.measure("HTTP <= 250 ms", millis(http), http <= HTTP_MAX_US);
        let cpu = self.run.after.last().map(|(_, usage)| usage.cpu);
        let time = self.run.end.saturating_sub(self.run.timeline.first().map_or(0, |(at, _)| *at));
        let share = cpu.map_or(0, |cpu| cpu.as_micros() as u64 * 100 / time.max(1));
        self.note("CPU of the embedding program", format!("{share}% of a core"));
    }

    /// Nothing was left behind: tasks, connections, memory.
    pub(crate) fn no_leak(&mut self) {
        let tasks = self.run.summary.as_ref().map_or([0, usize::MAX], |summary| summary.tasks);
        let after = |id: &u32| self.run.after.iter().find(|(other, _)| other == id).map(|(_, usage)| *usage);
        let pairs: Vec<_> =
            self.run.before.iter().filter_map(|(id, before)| Some((*before, after(id)?))).collect();
        let files = pairs.iter().map(|(b, a)| a.open_files as i64 - b.open_files as i64).max().unwrap_or(0);
        let memory = pairs.iter().map(|(b, a)| a.rss_bytes.saturating_sub(b.rss_bytes)).max().unwrap_or(0);
        // A task for each check under way, of which some are always.
        let holds = tasks[1] <= tasks[0] + 10 && files <= 4 && memory <= RSS_GROWTH_MAX;
        self.measure(
            "no leak",
            format!("tasks {} -> {}, files {files:+}, +{} KiB", tasks[0], tasks[1], memory >> 10),
            holds,
        );
    }

    /// The claims.
    pub(crate) fn finish(self, row: &str, fault: &str) -> Finding {
        let zero = self.run.timeline.first().map_or(0, |(at, _)| *at);
        let times: Vec<_> = self
            .run
            .timeline
            .iter()
            .map(|(at, what)| format!("{:.3} s {what}", (at - zero) as f64 / 1e6))
            .collect();
        let timeline = format!("seed {}: {}", self.run.seed, times.join("; "));
        let mut warnings: Vec<_> = self
            .run
            .logs
            .lines()
            .filter(|line| line.contains("WARN") || line.contains("ERROR"))
            .map(str::to_owned)
            .collect();
        warnings.truncate(WARNINGS_MAX);
        Finding {
            row: row.to_owned(),
            fault: fault.to_owned(),
            claims: self.claims,
            timeline,
            warnings,
            repeated_after: None,
        }
    }
}

fn per_mille(sorted: &[u64], rank: usize) -> u64 {
    sorted.get((sorted.len() * rank / 1_000).min(sorted.len().saturating_sub(1))).copied().unwrap_or(0)
}

/// Microseconds, as people read them.
pub(crate) fn millis(us: u64) -> String {
    if us < 10_000 { format!("{:.1} ms", us as f64 / 1e3) } else { format!("{} ms", us / 1_000) }
}
