//! The nodes themselves: told to stop, killed, out of files.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use tollgate_testkit::{Process, RedisServer};

use super::{Parts, judge_unnoticed};
use crate::judge::{Judge, millis};
use crate::rig::{NODES, Node, Pace, Rig, Run, Setup, get};

/// Something happens to the first node, under load; the others and the embedding program must not notice.
fn ended(
    pace: Pace,
    seed: u64,
    how: &str,
    end: impl FnOnce(&mut Process) -> Option<i32>,
    judge: impl FnOnce(Run) -> Judge,
) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    let mut rig = Rig::start(&format!("redis://{}", server.tcp_address()), Setup::new(seed));
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark(how);
    let start = Instant::now();
    let exit = end(&mut rig.nodes[0].process);
    let took = start.elapsed();
    rig.mark("the node has ended");
    rig.wait(pace.fault);
    let healed = rig.mark("some time later");
    let mut judge = judge(rig.finish());
    let told = format!("exit {exit:?} after {}", millis(took.as_micros() as u64));
    judge.measure("ends within 2 s", told, took < Duration::from_secs(2));
    Some(judge_unnoticed(judge, &Parts { begun, fault, mending: healed, healed }, 0, ""))
}

pub(super) fn terminated(pace: Pace, seed: u64) -> Option<Judge> {
    let end = |node: &mut Process| {
        node.terminate();
        node.wait_for_end(Duration::from_secs(15))
    };
    ended(pace, seed, "SIGTERM", end, Judge::of)
}

pub(super) fn terminated_twice(pace: Pace, seed: u64) -> Option<Judge> {
    let end = |node: &mut Process| {
        node.terminate();
        std::thread::sleep(Duration::from_millis(20));
        node.terminate();
        node.wait_for_end(Duration::from_secs(15))
    };
    ended(pace, seed, "SIGTERM twice", end, |run| Judge::of_hurried(run, 0))
}

pub(super) fn killed_while_stopping(pace: Pace, seed: u64) -> Option<Judge> {
    let end = |node: &mut Process| {
        node.terminate();
        node.kill();
        node.wait_for_end(Duration::from_secs(15))
    };
    ended(pace, seed, "SIGTERM, then kill -9", end, |run| Judge::of_hurried(run, 1))
}

pub(super) fn out_of_files(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    let setup = Setup { files_max: Some(64), ..Setup::new(seed) };
    let mut rig = Rig::start(&format!("redis://{}", server.tcp_address()), setup);
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark("200 idle connections to each node");
    // Until a node's queue is full as well, if that is before.
    let connect = |node: &Node| TcpStream::connect_timeout(&node.address, Duration::from_millis(100)).ok();
    let idle: Vec<TcpStream> =
        rig.nodes.iter().flat_map(|node| (0..200).map_while(move |_| connect(node))).collect();
    // The store's connections are lost just now: there must be files left for new ones.
    server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    rig.wait(pace.fault);
    let held = idle.len();
    drop(idle);
    let healed = rig.mark("released");
    let start = Instant::now();
    let answers = |node: &Node| get(node.address, "/actuator/health");
    let answered = rig.nodes.iter().filter_map(answers).filter(|it| it.starts_with("HTTP/1.1 200")).count();
    let took = start.elapsed();
    rig.wait(pace.recovery);
    let mut judge = Judge::of(rig.finish());
    judge.decision(
        "new clients answered after the release",
        format!("{answered} of {NODES} within {}, {held} had been held", millis(took.as_micros() as u64)),
        answered == NODES && held > 0,
    );
    judge.recovered(fault + 200_000);
    Some(judge_unnoticed(judge, &Parts { begun, fault, mending: healed, healed }, 0, ""))
}
