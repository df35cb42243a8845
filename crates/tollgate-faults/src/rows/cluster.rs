//! Primaries and slots of a cluster that come and go.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tollgate_testkit::{Cluster, wait_at_most};

use super::Parts;
use crate::judge::{Cause, Judge, millis};
use crate::record::{Ground, Record};
use crate::rig::{Pace, Rig, Setup};
use crate::traffic::{HOT_KEYS, LIMITS, key_name};

/// As the fixture sets it.
const NODE_TIMEOUT: Duration = Duration::from_millis(1_500);

/// The slot of each limit and hot key.
fn hot_slots(cluster: &Cluster) -> Vec<(u8, u32, u16)> {
    let mut slots = Vec::new();
    for (limit, it) in LIMITS.iter().enumerate() {
        for key in 0..HOT_KEYS as u32 {
            let name = format!("rate_limiter:{}:{}", it.algorithm.to_lowercase(), key_name(key));
            slots.push((limit as u8, key, cluster.slot_of(&name)));
        }
    }
    slots
}

/// Whether a check was on one of these keys.
fn on(keys: &[(u8, u32)], record: &Record) -> bool {
    keys.contains(&(record.limit, record.key))
}

fn without_a_primary(pace: Pace, seed: u64, full_coverage: bool) -> Option<Judge> {
    let mut cluster = Cluster::start();
    if full_coverage {
        for node in cluster.nodes() {
            cluster.node(node).cli(&["CONFIG", "SET", "cluster-require-full-coverage", "yes"]);
        }
    }
    let slots = hot_slots(&cluster);
    let lost_slot = slots[0].2;
    let owners: Vec<SocketAddr> = slots.iter().map(|(_, _, slot)| cluster.primary_of(*slot)).collect();
    let of = |same: bool| -> Vec<(u8, u32)> {
        let keys = slots.iter().zip(&owners).filter(|(_, owner)| (**owner == owners[0]) == same);
        keys.map(|((limit, key, _), _)| (*limit, *key)).collect()
    };
    let (lost, kept) = (of(true), of(false));
    let mut rig = Rig::start(&cluster.url(), Setup::new(seed));
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark("kill -9 of a primary");
    cluster.kill_primary_of(lost_slot);
    cluster.primary_of(lost_slot);
    let healed = rig.mark("its replica serves");
    rig.wait(pace.recovery);
    let mut judge = Judge::of(rig.finish());
    let (mut right, mut wrong, mut last_without) = (0, 0, fault);
    for it in judge.between(fault + 250_000, judge.run.end).filter(|it| on(&lost, it)) {
        // No replica takes over sooner. From then on the new primary may be reachable, but not decide yet.
        let may_be_another = it.at_us >= fault + NODE_TIMEOUT.as_micros() as u64;
        match it.ground {
            Ground::Exact if !may_be_another => wrong += 1,
            Ground::Exact => {}
            other
                if other == Cause::Unreachable.basis_of(it.limit)
                    || (may_be_another && other == Cause::Reachable.basis_of(it.limit)) =>
            {
                right += 1;
                last_without = it.at_us;
            }
            _ => wrong += 1,
        }
    }
    judge.decision("its keys by failure mode", format!("{right}, others {wrong}"), wrong == 0 && right > 0);
    let (mut all, mut without) = (0_u64, 0);
    for it in judge.between(fault, healed).filter(|it| on(&kept, it)) {
        (all, without) = (all + 1, without + u64::from(it.ground != Ground::Exact));
    }
    let told = format!("{without} of {all} without the store");
    if full_coverage {
        judge.note("keys of the other primaries", told);
    } else {
        judge.measure("keys of the others unharmed >= 99.5%", told, without * 200 <= all && all > 0);
    }
    let outage = last_without - fault;
    let bar = NODE_TIMEOUT + Duration::from_secs(2);
    judge.note(
        format!("keys without a primary (election: {})", millis(healed - fault)),
        format!("{} (node timeout and 2 s: {} ms)", millis(outage), bar.as_millis()),
    );
    judge.excess(crate::traffic::BURST, " (what no replica had heard of is lost)");
    judge.latency(begun, fault, healed);
    judge.recovered(healed);
    judge.no_leak();
    Some(judge)
}

pub(super) fn killed(pace: Pace, seed: u64) -> Option<Judge> {
    without_a_primary(pace, seed, false)
}

pub(super) fn killed_with_full_coverage(pace: Pace, seed: u64) -> Option<Judge> {
    without_a_primary(pace, seed, true)
}

pub(super) fn moved(pace: Pace, seed: u64) -> Option<Judge> {
    let cluster = Cluster::start();
    let slots = hot_slots(&cluster);
    let mut primaries: Vec<SocketAddr> = slots.iter().map(|(_, _, slot)| cluster.primary_of(*slot)).collect();
    primaries.sort();
    primaries.dedup();
    let mut rig = Rig::start(&cluster.url(), Setup::new(seed));
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark("slots move");
    let (start, mut moves) = (Instant::now(), 0);
    while start.elapsed() < pace.fault {
        let (_, _, slot) = slots[moves % slots.len()];
        let from = cluster.primary_of(slot);
        let others: Vec<_> = primaries.iter().filter(|to| **to != from).collect();
        cluster.move_slot(slot, *others[moves / slots.len() % others.len()]);
        moves += 1;
    }
    let healed = rig.mark("no more");
    rig.wait(pace.recovery);
    let mut judge = Judge::of(rig.finish());
    judge.note("slots moved", moves);
    Some(super::judge_unnoticed(judge, &Parts { begun, fault, mending: healed, healed }, 0, ""))
}

pub(super) fn majority_lost(pace: Pace, seed: u64) -> Option<Judge> {
    let mut cluster = Cluster::start();
    let mut primaries: Vec<SocketAddr> =
        [0, 8_000, 16_000].map(|slot| cluster.primary_of(slot)).into_iter().collect();
    primaries.truncate(2);
    let mut rig = Rig::start(&cluster.url(), Setup::new(seed));
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let killed = rig.mark("kill -9 of two primaries");
    for primary in &primaries {
        cluster.node_mut(*primary).kill();
    }
    // The third serves its slots until it knows that it is alone.
    rig.wait(NODE_TIMEOUT * 2);
    let fault = rig.mark("the third is alone");
    rig.wait(pace.fault);
    for primary in &primaries {
        cluster.node_mut(*primary).restart();
    }
    wait_at_most(Duration::from_secs(30), "the cluster is whole", || {
        cluster
            .nodes()
            .iter()
            .all(|node| cluster.node(*node).cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok"))
    });
    let healed = rig.mark("cluster_state:ok");
    rig.wait(pace.recovery);
    let mut judge = Judge::of(rig.finish());
    // Some nodes of the cluster are well before the last one says so.
    judge.outage(Cause::Unreachable, fault, fault + pace.fault.as_micros() as u64);
    judge.excess(crate::traffic::BURST, " (primaries restart empty)");
    judge.latency(begun, killed, healed);
    judge.recovered(healed);
    judge.no_leak();
    Some(judge)
}
