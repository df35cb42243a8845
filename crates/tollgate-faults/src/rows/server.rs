//! One server that dies, stands still, refuses or forgets.

use tollgate_testkit::RedisServer;

use crate::Finding;
use crate::judge::Judge;
use crate::rig::{Pace, Rig, Setup};
use crate::traffic::BURST;

/// When the parts of a run began.
struct Parts {
    begun: u64,
    fault: u64,
    healed: u64,
}

/// A run in which the store is gone for everybody, from one instant to another.
fn outage(
    server: &mut RedisServer,
    pace: Pace,
    setup: Setup,
    store: &str,
    names: [&str; 2],
    mut break_it: impl FnMut(&mut RedisServer),
    mut mend_it: impl FnMut(&mut RedisServer),
) -> (Judge, Parts) {
    let mut rig = Rig::start(store, setup);
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark(names[0]);
    break_it(server);
    rig.wait(pace.fault);
    mend_it(server);
    let healed = rig.mark(names[1]);
    rig.wait(pace.recovery);
    let mut judge = Judge::of(rig.finish());
    judge.outage(fault, healed);
    judge.recovered(healed);
    judge.latency(begun, fault, healed);
    judge.no_leak();
    (judge, Parts { begun, fault, healed })
}

pub(super) fn killed(pace: Pace, seed: u64) -> Option<Finding> {
    let mut server = RedisServer::build().tcp().start();
    let store = format!("redis://{}", server.tcp_address());
    let (mut judge, _) = outage(
        &mut server,
        pace,
        Setup::new(seed),
        &store,
        ["kill -9", "answers again, empty"],
        RedisServer::kill,
        RedisServer::restart,
    );
    judge.excess(BURST, ", the burst: its memory is lost");
    Some(judge.finish("1", "kill -9 of the store, restarted empty"))
}

pub(super) fn paused(pace: Pace, seed: u64) -> Option<Finding> {
    let mut server = RedisServer::build().tcp().start();
    let store = format!("redis://{}", server.tcp_address());
    let (mut judge, _) = outage(
        &mut server,
        pace,
        Setup::new(seed),
        &store,
        ["SIGSTOP", "SIGCONT"],
        |server| server.pause(),
        |server| server.resume(),
    );
    judge.excess(0, "");
    Some(judge.finish("2", "SIGSTOP of the store, then SIGCONT"))
}
