//! Primaries that change, as sentinels have it.

use std::time::Duration;

use tollgate_testkit::SentinelTrio;

use super::Parts;
use crate::judge::{Cause, Judge};
use crate::rig::{Pace, Rig, Setup};
use crate::traffic::BURST;

/// A primary is killed, and the sentinels act when they have missed it for as long as they were told to.
fn without_primary(pace: Pace, seed: u64, missed_for: Duration) -> Option<Judge> {
    let mut trio = SentinelTrio::start();
    trio.set_down_after(missed_for);
    let mut rig = Rig::start(&trio.url(), Setup::new(seed));
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark("kill -9 of the primary");
    let before = trio.kill_primary();
    trio.wait_for_another_primary(before);
    let healed = rig.mark("another primary");
    rig.wait(pace.recovery);
    let mut judge = Judge::of(rig.finish());
    // Nodes may hear of the new primary before this program does.
    judge.outage(Cause::Unreachable, fault, fault + missed_for.as_micros() as u64);
    judge.excess(BURST, " (what no replica had heard of is lost)");
    judge.latency(begun, fault, healed);
    judge.recovered(healed);
    judge.note("without a primary", crate::judge::millis(healed - fault));
    judge.no_leak();
    Some(judge)
}

pub(super) fn killed(pace: Pace, seed: u64) -> Option<Judge> {
    without_primary(pace, seed, Duration::from_secs(1))
}

pub(super) fn late(pace: Pace, seed: u64) -> Option<Judge> {
    without_primary(pace, seed, Duration::from_secs(5))
}

pub(super) fn switched(pace: Pace, seed: u64) -> Option<Judge> {
    let trio = SentinelTrio::start();
    let old = trio.primary();
    let mut rig = Rig::start(&trio.url(), Setup::new(seed));
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark("SENTINEL FAILOVER");
    trio.failover();
    let healed = rig.mark("another primary");
    rig.wait(pace.recovery);
    let mut judge = Judge::of(rig.finish());
    let errors = trio.store(old).cli(&["INFO", "errorstats"]);
    let line = errors.lines().find_map(|line| line.strip_prefix("errorstat_READONLY:count="));
    let refused: u64 = line.and_then(|count| count.trim().parse().ok()).unwrap_or(0);
    let parts = Parts { begun, fault, mending: healed, healed };
    let in_flight = judge.between(parts.fault, parts.healed).count() as u64;
    judge.decision(
        "few calls to the one that is no primary any more",
        format!("{refused} READONLY, {in_flight} checks meanwhile"),
        refused * 20 <= in_flight,
    );
    let others =
        judge.between(fault, judge.run.end).filter(|it| it.ground != crate::record::Ground::Exact).count();
    judge.note("answered without the store", others);
    judge.excess(BURST, " (what the old one takes last is lost)");
    judge.latency(begun, fault, healed);
    judge.recovered(healed);
    judge.no_leak();
    Some(judge)
}
