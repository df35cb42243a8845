//! Nodes that borrow: killed, stopped, cut off, and behind servers that forget.

use std::time::Duration;

use tollgate_testkit::{ChaosProxy, Fault, RedisServer, wait_until};

use crate::fleet::{Fleet, Plan, Seen};
use crate::judge::{Judge, millis};
use crate::record::Ground;
use crate::rig::Pace;

fn address(server: &RedisServer) -> String {
    format!("redis://{}", server.tcp_address())
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

/// Eight nodes on hot keys and many others. One is killed, two stand still for a while.
fn eight(pace: Pace, plan: Plan) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    let mut fleet = Fleet::start(&vec![address(&server); 8], plan);
    // At least ten times as long as it takes to fill a bucket.
    let part = (pace.baseline + pace.fault + pace.recovery).max(Duration::from_secs(10)) / 4;
    let begun = fleet.mark("load begins");
    fleet.wait(part);
    let killed = fleet.mark("kill -9 of one");
    fleet.processes[7].kill();
    fleet.wait(part);
    fleet.mark("SIGSTOP of two");
    fleet.processes[5].pause();
    fleet.processes[6].pause();
    fleet.wait(plan.life() * 2);
    fleet.mark("SIGCONT of one");
    fleet.processes[5].resume();
    fleet.wait(part / 2);
    fleet.mark("SIGCONT of the other");
    fleet.processes[6].resume();
    fleet.wait(part);
    let seen = fleet.finish();
    let mut judge = seen.judge(1);
    let overshoot = seen.lending.iter().flatten().map(|it| it.overshoot).max().unwrap_or(0);
    seen.excess(&mut judge, overshoot, if overshoot > 0 { " (as `config check` says)" } else { "" });
    let after = micros(plan.life() * 2);
    let used = seen.utilisation(begun, &[(killed, killed + after)]);
    judge.measure("of the permits on offer >= 95%", format!("{:.1}%", used * 100.0), used >= 0.95);
    note_calls(&mut judge, &seen);
    Some(judge)
}

fn note_calls(judge: &mut Judge, seen: &Seen) {
    let calls: u64 = seen.lending.iter().flatten().map(|it| it.calls).sum();
    let checks: usize =
        seen.by_node.iter().zip(&seen.lending).filter(|(_, it)| it.is_some()).map(|(it, _)| it.len()).sum();
    judge.note("calls for each check", format!("{:.3}", calls as f64 / checks.max(1) as f64));
}

pub(super) fn eight_lease(pace: Pace, seed: u64) -> Option<Judge> {
    eight(pace, Plan::mixed("lease", seed))
}

pub(super) fn eight_lease_fast(pace: Pace, seed: u64) -> Option<Judge> {
    // A lease lasts for a twentieth of the time to full: with a larger burst that is long enough to be worth it.
    eight(pace, Plan { burst: 5_000, ..Plan::mixed("lease_fast", seed) })
}

/// One of three holds leases when it is killed.
pub(super) fn killed(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    let plan = Plan::new("lease", seed);
    let mut fleet = Fleet::start(&vec![address(&server); 3], plan);
    fleet.mark("load begins");
    fleet.wait(pace.baseline);
    let fault = fleet.mark("kill -9 of one");
    fleet.processes[2].kill();
    fleet.wait(pace.fault);
    let seen = fleet.finish();
    let mut judge = seen.judge(1);
    seen.excess(&mut judge, 0, "");
    let after = micros(plan.life() * 2);
    let (dip, later) = (seen.throughput(fault, fault + after), seen.throughput(fault + after, seen.end));
    judge.note("admitted in the two lease times after it", format!("{:.0}% of the rate", dip * 100.0));
    judge.measure("and afterwards >= 95%", format!("{:.1}%", later * 100.0), later >= 0.95);
    Some(judge)
}

/// One of three stands still for twice as long as its leases last.
pub(super) fn stopped(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    let plan = Plan::new("lease", seed);
    let mut fleet = Fleet::start(&vec![address(&server); 3], plan);
    fleet.mark("load begins");
    fleet.wait(pace.baseline);
    let paused = fleet.mark("SIGSTOP of one");
    fleet.processes[2].pause();
    fleet.wait(plan.life() * 2);
    let resumed = fleet.mark("SIGCONT");
    fleet.processes[2].resume();
    fleet.wait(pace.fault);
    let seen = fleet.finish();
    let mut judge = seen.judge(0);
    seen.excess(&mut judge, 0, "");
    let lease_us = micros(plan.life());
    let late = seen.by_node[2]
        .iter()
        .filter(|it| it.ground == Ground::Leased && it.allowed)
        .filter(|it| (paused + lease_us..resumed).contains(&it.at_us))
        .count();
    judge.decision("spent after the end of its leases: 0", late, late == 0);
    let expired = seen.lending[2].as_ref().map_or(0, |it| it.expired);
    judge.decision("what it held has expired", expired, expired > 0);
    let later = seen.throughput(resumed + 2 * lease_us, seen.end);
    judge.measure("afterwards >= 95% of the rate", format!("{:.1}%", later * 100.0), later >= 0.95);
    Some(judge)
}

/// One of three cannot reach the store any more.
pub(super) fn cut_off(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    let proxy = ChaosProxy::start(server.tcp_address(), seed);
    let plan = Plan::new("lease", seed);
    let stores = [address(&server), address(&server), format!("redis://{}", proxy.address())];
    let mut fleet = Fleet::start(&stores, plan);
    fleet.mark("load begins");
    fleet.wait(pace.baseline);
    let fault = fleet.mark("one cannot reach the store");
    proxy.set(Fault::Blackhole);
    fleet.wait(pace.fault);
    let healed = fleet.mark("it can again");
    proxy.set(Fault::None);
    fleet.wait(pace.recovery);
    let seen = fleet.finish();
    let mut judge = seen.judge(0);
    seen.excess(&mut judge, 0, "");
    let lease_us = micros(plan.life());
    let alone = || seen.by_node[2].iter().filter(|it| (fault..healed).contains(&it.at_us));
    let spent = alone().filter(|it| it.allowed && it.ground == Ground::Leased).count();
    judge.note("admitted by what it held when it was cut off", spent);
    let late = alone().filter(|it| it.allowed && it.at_us > fault + lease_us).count();
    judge.decision("admitted after the end of its leases: 0", late, late == 0);
    let closed = alone().filter(|it| it.at_us > fault + 2 * lease_us);
    let (all, by_mode) =
        closed.fold((0, 0), |(all, by_mode), it| (all + 1, by_mode + u64::from(it.ground == Ground::Closed)));
    judge.decision("then by failure mode 100%", format!("{by_mode} of {all}"), by_mode == all && all > 0);
    let fleet_rate = seen.throughput(fault + 2 * lease_us, healed);
    judge.measure(
        "the others admit >= 95% of the rate",
        format!("{:.1}%", fleet_rate * 100.0),
        fleet_rate >= 0.95,
    );
    let back = seen.by_node[2].iter().find(|it| it.at_us > healed && it.allowed);
    let back = back.map(|it| it.at_us - healed);
    judge.measure(
        "it admits again within 1.5 s",
        back.map_or("never".to_owned(), millis),
        back.is_some_and(|us| us <= 1_500_000),
    );
    Some(judge)
}

/// All of them are told to stop, under load.
pub(super) fn given_back(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    // Not exhausted: there is something to give back.
    let plan = Plan { rate: 6_000, warm_keys: 0, ..Plan::new("lease", seed) };
    let mut fleet = Fleet::start(&vec![address(&server); 3], plan);
    fleet.mark("load begins");
    fleet.wait(pace.baseline);
    let seen = fleet.finish();
    let mut judge = seen.judge(0);
    seen.excess(&mut judge, 0, "");
    let lending: Vec<_> = seen.lending.iter().flatten().collect();
    let held: u64 = lending.iter().map(|it| it.held).sum();
    let (returned, lost) =
        lending.iter().fold((0, 0), |(returned, lost), it| (returned + it.returned, lost + it.lost));
    judge.decision(
        "held after the end: 0",
        format!("{held}; {returned} given back, {lost} lost"),
        held == 0 && returned > 0 && lending.len() == 3,
    );
    let out: u64 = (0..plan.hot_keys).map(|key| out_in_store(&server, key)).sum();
    let expired_or_lost: u64 = lending.iter().map(|it| it.expired + it.lost).sum();
    judge.decision(
        "out, as the store has it: what was lost or has just expired, at most",
        format!("{out} (spent in the last epochs included)"),
        out <= seen.admitted_lately(micros(plan.life() * 2)) + expired_or_lost,
    );
    Some(judge)
}

/// Permits that the store counts as out.
fn out_in_store(server: &RedisServer, key: u64) -> u64 {
    let leases = server.cli(&["HGET", &format!("rate_limiter:lent:user:{key}"), "leases"]);
    let numbers: Vec<u64> = leases.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    numbers.get(2..4).map_or(0, |out| out.iter().sum())
}

/// A primary and its replica behind an address of their own.
struct Pair {
    primary: RedisServer,
    replica: RedisServer,
}

impl Pair {
    fn start(primary_arguments: &[&str]) -> Self {
        let primary = RedisServer::build().tcp().args(primary_arguments).start();
        let replica = RedisServer::build().tcp().start();
        let port = primary.tcp_address().port().to_string();
        replica.cli(&["REPLICAOF", "127.0.0.1", &port]);
        wait_until("the replica follows", || {
            replica.cli(&["INFO", "replication"]).contains("master_link_status:up")
        });
        // A replica whose link is up gets nothing until it has reported once.
        primary.cli(&["FLUSHALL"]);
        wait_until("the replica has confirmed", || primary.cli(&["WAIT", "1", "100"]).trim() == "1");
        Self { primary, replica }
    }
}

/// The replica hears nothing for a while; then the primary dies, and the replica takes its place.
fn lost_writes(pace: Pace, seed: u64, failover_guard: bool) -> Option<Judge> {
    let mut pair = Pair::start(&[]);
    let proxy = ChaosProxy::start(pair.primary.tcp_address(), seed);
    let plan = Plan { failover_guard, ..Plan::new("lease", seed) };
    let mut fleet = Fleet::start(&vec![format!("redis://{}", proxy.address()); 3], plan);
    fleet.mark("load begins");
    // A server that has just started is not believed either.
    fleet.wait(pace.baseline);
    let cut = fleet.mark("the replica hears nothing any more");
    pair.replica.cli(&["REPLICAOF", "NO", "ONE"]);
    fleet.wait(Duration::from_millis(700));
    let killed = fleet.mark("kill -9 of the primary, the replica takes its place");
    pair.primary.kill();
    proxy.lead_to(pair.replica.tcp_address());
    fleet.wait(pace.recovery);
    let seen = fleet.finish();
    let mut judge = seen.judge(0);
    let lost = seen.admitted().filter(|it| it.key == 0 && (cut..killed).contains(&it.at_us)).count() as u64;
    judge.note("admitted on a hot key while the replica heard nothing", lost);
    let life = plan.permits * plan.life().as_millis() as u64 / 1_000;
    match failover_guard {
        true => seen.excess(&mut judge, 0, ""),
        // What is out when the cut begins may be lost, too.
        false => {
            let most = (lost + life).min(plan.burst) + life;
            seen.excess(&mut judge, most, " (what was lost, and what was lent)");
        }
    }
    let first = seen.admitted().map(|it| it.at_us).filter(|at| *at > killed + 50_000).min();
    judge.note("admitted again after", first.map_or("never".to_owned(), |at| millis(at - killed)));
    Some(judge)
}

pub(super) fn writes_lost(pace: Pace, seed: u64) -> Option<Judge> {
    lost_writes(pace, seed, false)
}

pub(super) fn writes_lost_guarded(pace: Pace, seed: u64) -> Option<Judge> {
    lost_writes(pace, seed, true)
}

/// For a while one node is with the old primary and the others with the new one.
fn split(pace: Pace, seed: u64, arguments: &[&str]) -> Option<(Judge, Seen, u64, u64)> {
    let pair = Pair::start(arguments);
    let proxies = [1, 2].map(|number| ChaosProxy::start(pair.primary.tcp_address(), seed + number));
    let plan = Plan::new("lease", seed);
    let [old, new] = proxies.each_ref().map(|proxy| format!("redis://{}", proxy.address()));
    let mut fleet = Fleet::start(&[old, new.clone(), new], plan);
    fleet.mark("load begins");
    fleet.wait(pace.baseline);
    let split = fleet.mark("the replica takes over, and one node does not hear of it");
    pair.replica.cli(&["REPLICAOF", "NO", "ONE"]);
    proxies[1].lead_to(pair.replica.tcp_address());
    fleet.wait(pace.fault);
    let healed = fleet.mark("all are with the new one");
    proxies[0].lead_to(pair.replica.tcp_address());
    fleet.wait(pace.recovery);
    let seen = fleet.finish();
    let judge = seen.judge(0);
    Some((judge, seen, split, healed))
}

pub(super) fn split_brain(pace: Pace, seed: u64) -> Option<Judge> {
    let (mut judge, seen, split, healed) = split(pace, seed, &[])?;
    let permits = seen.plan.permits;
    let most = permits + permits * (healed - split).div_ceil(1_000_000);
    seen.excess(&mut judge, most, " (a limit of its own for as long as it lasts)");
    Some(judge)
}

pub(super) fn split_brain_with_lag(pace: Pace, seed: u64) -> Option<Judge> {
    let arguments = ["--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"];
    let (mut judge, seen, split, healed) = split(pace, seed, &arguments)?;
    let permits = seen.plan.permits;
    // It notices within a second after the lag.
    seen.excess(&mut judge, permits + 3 * permits, " (until the old primary refuses)");
    let refused = seen.by_node[0].iter().filter(|it| (split + 3_000_000..healed).contains(&it.at_us));
    let (all, closed) =
        refused.fold((0, 0), |(all, closed), it| (all + 1, closed + u64::from(it.ground == Ground::Closed)));
    judge.decision("then by failure mode 100%", format!("{closed} of {all}"), closed == all);
    Some(judge)
}
