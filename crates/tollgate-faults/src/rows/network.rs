//! Links that are slow, silent or gone.

use std::time::{Duration, Instant};

use tollgate_testkit::{ChaosProxy, Fault, Network, RedisServer};

use super::{Parts, judge_outage, play};
use crate::judge::{Cause, Judge, millis};
use crate::record::Ground;
use crate::rig::{Pace, Rig, Setup};

/// A run with a proxy between all nodes and the store.
fn through_proxy(pace: Pace, seed: u64, fault: Fault) -> (Judge, Parts) {
    let server = RedisServer::build().tcp().start();
    let mut proxy = ChaosProxy::start(server.tcp_address(), seed);
    let store = format!("redis://{}", proxy.address());
    let name = format!("{fault:?}");
    play(
        &store,
        Setup::new(seed),
        pace,
        &mut proxy,
        (&name, |proxy, _| proxy.set(fault)),
        ("as before", |proxy, _| proxy.set(Fault::None)),
    )
}

/// A link on which calls take longer than their deadline: an outage.
fn unusable(pace: Pace, seed: u64, cause: Cause, fault: Fault) -> Option<Judge> {
    let (judge, parts) = through_proxy(pace, seed, fault);
    Some(judge_outage(judge, cause, &parts, 0, ""))
}

/// A link on which some calls come in time: what does is exact, and what does not is answered in time all the same.
fn usable(pace: Pace, seed: u64, fault: Fault) -> Option<Judge> {
    let (mut judge, parts) = through_proxy(pace, seed, fault);
    let (mut exact, mut without, mut wrong) = (0, 0, 0);
    for it in judge.between(parts.fault, parts.healed) {
        match it.ground {
            Ground::Exact => exact += 1,
            other if other == Cause::Reachable.basis_of(it.limit) => without += 1,
            _ => wrong += 1,
        }
    }
    judge.decision(
        "by the store, or configured mode with local in place of open",
        format!("{exact} and {without}, others {wrong}"),
        wrong == 0 && exact > 0,
    );
    let mut took: Vec<_> =
        judge.between(parts.fault, parts.healed).filter(|it| it.node == 0).map(|it| it.took_us).collect();
    took.sort_unstable();
    let at = |part: f64| took.get((took.len() as f64 * part) as usize).copied().unwrap_or(0);
    judge.note("p50, p99, p99.9 in process", [0.5, 0.99, 0.999].map(|part| millis(at(part))).join(", "));
    judge.excess(0, "");
    judge.latency(parts.begun, parts.fault, parts.healed);
    judge.recovered(parts.healed);
    judge.no_leak();
    Some(judge)
}

/// Half of it on the way there, half on the way back.
fn later_by(ms: u64) -> Fault {
    Fault::Delay { each_way: Duration::from_micros(ms * 500), jitter: Duration::ZERO }
}

pub(super) fn slower_by_5_ms(pace: Pace, seed: u64) -> Option<Judge> {
    usable(pace, seed, later_by(5))
}

pub(super) fn slower_by_20_ms(pace: Pace, seed: u64) -> Option<Judge> {
    unusable(pace, seed, Cause::Reachable, later_by(20))
}

pub(super) fn slower_by_100_ms(pace: Pace, seed: u64) -> Option<Judge> {
    unusable(pace, seed, Cause::Reachable, later_by(100))
}

pub(super) fn slower_by_1000_ms(pace: Pace, seed: u64) -> Option<Judge> {
    unusable(pace, seed, Cause::Reachable, later_by(1_000))
}

pub(super) fn jittery(pace: Pace, seed: u64) -> Option<Judge> {
    let fault = Fault::Delay { each_way: Duration::from_millis(1), jitter: Duration::from_millis(5) };
    usable(pace, seed, fault)
}

pub(super) fn stalling(pace: Pace, seed: u64) -> Option<Judge> {
    usable(pace, seed, Fault::Stall { percent: 1, pause: Duration::from_millis(200) })
}

pub(super) fn dripping(pace: Pace, seed: u64) -> Option<Judge> {
    unusable(pace, seed, Cause::Reachable, Fault::Drip { pause: Duration::from_millis(5) })
}

pub(super) fn resetting(pace: Pace, seed: u64) -> Option<Judge> {
    unusable(pace, seed, Cause::Unreachable, Fault::Reset)
}

pub(super) fn swallowing(pace: Pace, seed: u64) -> Option<Judge> {
    unusable(pace, seed, Cause::Reachable, Fault::HalfOpen)
}

pub(super) fn cut(pace: Pace, seed: u64) -> Option<Judge> {
    if !Network::is_available() {
        return None;
    }
    let network = Network::new();
    let mut place = network.place();
    let server = RedisServer::build().place(&place).start();
    let store = format!("redis://{}", server.tcp_address());
    // A minute in the published table: connections that the system itself would try to save for fifteen.
    let pace = Pace { fault: pace.fault * 10, ..pace };
    let (judge, parts) = play(
        &store,
        Setup::new(seed),
        pace,
        &mut place,
        ("the link is cut", |place, _| place.cut()),
        ("the link is whole", |place, _| place.heal()),
    );
    drop(server);
    Some(judge_outage(judge, Cause::Silent, &parts, 0, ""))
}

pub(super) fn powered_off(pace: Pace, seed: u64) -> Option<Judge> {
    if !Network::is_available() {
        return None;
    }
    let network = Network::new();
    let place = network.place();
    let server = RedisServer::build().place(&place).start();
    let address = server.tcp_address();
    let mut rig = Rig::start(&format!("redis://{address}"), Setup::new(seed));
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark("gone without a word");
    place.destroy();
    let start = Instant::now();
    let mut given_up = None;
    while start.elapsed() < pace.fault.max(Duration::from_secs(16)) && given_up.is_none() {
        rig.wait(Duration::from_millis(20));
        if established_to(address) == 0 {
            given_up = Some(start.elapsed());
        }
    }
    let seen = rig.mark("the old connections are given up");
    rig.wait(pace.recovery);
    let mut judge = Judge::of(rig.finish());
    judge.outage(Cause::Silent, fault, judge.run.end);
    judge.excess(0, "");
    judge.latency(begun, fault, seen);
    judge.measure(
        "dead connections given up < 15 s",
        given_up.map_or("never".to_owned(), |time| millis(time.as_micros() as u64)),
        given_up.is_some_and(|time| time < Duration::from_secs(15)),
    );
    judge.no_leak();
    Some(judge)
}

/// Connections of this machine to an address that both sides have agreed on, as the system lists them.
fn established_to(address: std::net::SocketAddr) -> usize {
    let std::net::IpAddr::V4(ip) = address.ip() else { return 0 };
    let wanted = format!("{:08X}:{:04X}", u32::from_le_bytes(ip.octets()), address.port());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    table
        .lines()
        .filter(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            words.get(2) == Some(&wanted.as_str()) && words.get(3) == Some(&"01")
        })
        .count()
}
