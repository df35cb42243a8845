//! Clocks that jump.

use tollgate_testkit::{RedisServer, SteppedClock};

use super::{judge_unnoticed, play};
use crate::judge::{Judge, millis};
use crate::rig::{Pace, Setup};
use crate::traffic::{BURST, HOT_KEYS, RATE};

const SECOND_US: i64 = 1_000_000;

fn of_store(pace: Pace, seed: u64, step_us: i64) -> Option<Judge> {
    let clock = SteppedClock::new();
    let server = RedisServer::build().tcp().clock(&clock).start();
    let store = format!("redis://{}", server.tcp_address());
    let mut clock = clock;
    let (mut judge, parts) = play(
        &store,
        Setup::new(seed),
        pace,
        &mut clock,
        ("the clock jumps", |clock, _| clock.step(step_us)),
        ("some time later", |_, _| ()),
    );
    let (mut longest, mut last) = (0, [parts.fault; HOT_KEYS as usize * 3]);
    for it in
        judge.between(parts.fault, judge.run.end).filter(|it| it.allowed && u64::from(it.key) < HOT_KEYS)
    {
        let key = usize::from(it.limit) * HOT_KEYS as usize + it.key as usize;
        longest = longest.max(it.at_us - last[key]);
        last[key] = it.at_us;
    }
    judge.note("longest time without an admission on a hot key", millis(longest));
    let ahead = u64::try_from(step_us).unwrap_or(0) * RATE / SECOND_US as u64;
    let why = if ahead > 0 { " (what flows back meanwhile)" } else { "" };
    drop(server);
    Some(judge_unnoticed(judge, &parts, ahead.min(BURST), why))
}

pub(super) fn back_a_second(pace: Pace, seed: u64) -> Option<Judge> {
    of_store(pace, seed, -SECOND_US)
}

pub(super) fn back_an_hour(pace: Pace, seed: u64) -> Option<Judge> {
    of_store(pace, seed, -3_600 * SECOND_US)
}

pub(super) fn ahead_a_second(pace: Pace, seed: u64) -> Option<Judge> {
    of_store(pace, seed, SECOND_US)
}

pub(super) fn ahead_an_hour(pace: Pace, seed: u64) -> Option<Judge> {
    of_store(pace, seed, 3_600 * SECOND_US)
}

pub(super) fn of_nodes(pace: Pace, seed: u64) -> Option<Judge> {
    let mut clock = SteppedClock::new();
    let server = RedisServer::build().tcp().start();
    let store = format!("redis://{}", server.tcp_address());
    let setup = Setup { environment: clock.environment(), ..Setup::new(seed) };
    let half = Pace { fault: pace.fault / 2, ..pace };
    let (judge, parts) = play(
        &store,
        setup,
        half,
        &mut clock,
        ("the nodes' clocks jump ahead by an hour, then back by two", |clock, rig| {
            clock.step(3_600 * SECOND_US);
            rig.wait(half.fault);
            clock.step(-3_600 * SECOND_US);
        }),
        ("some time later", |_, _| ()),
    );
    Some(judge_unnoticed(judge, &parts, 0, ""))
}
