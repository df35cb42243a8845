//! The circuit breaker, step by step, and what holds for every sequence of calls.

use proptest::prelude::*;
use tollgate_core::{
    Breaker, BreakerConfig, BreakerError, BreakerState, CallOutcome, Micros, Pass, Timestamp,
};

fn at(ms: u64) -> Timestamp {
    Timestamp::from_micros(1_000_000 + ms * 1_000)
}

/// One call after another, `+` succeeded and `-` failed, all at one instant. `.` was not let through.
fn calls(breaker: &mut Breaker, now: Timestamp, outcomes: &str) -> String {
    let call = |outcome| {
        let Some(pass) = breaker.permit(now) else { return '.' };
        let told = if outcome == '+' { CallOutcome::Succeeded } else { CallOutcome::Failed };
        breaker.record(pass, told, now, 0);
        outcome
    };
    outcomes.chars().map(call).collect()
}

#[test]
fn breaker_opens_after_half_of_ten_calls_and_closes_after_three_probes() {
    let mut breaker = Breaker::new(BreakerConfig::default());
    // Four failures in any ten calls are borne, however long it goes on.
    assert_eq!(calls(&mut breaker, at(0), &"----++++++".repeat(10)), "----++++++".repeat(10));
    assert_eq!(calls(&mut breaker, at(0), "-----+"), "-----.");
    assert_eq!(breaker.state(), BreakerState::Open);
    assert_eq!(calls(&mut breaker, at(499), "++"), "..");
    // One probe fails: open for another half second.
    assert_eq!(calls(&mut breaker, at(500), "+-+"), "+-.");
    assert_eq!(calls(&mut breaker, at(999), "+"), ".");
    assert_eq!(calls(&mut breaker, at(1_000), "++"), "++");
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
    assert_eq!(calls(&mut breaker, at(1_000), "+"), "+");
    assert_eq!(breaker.state(), BreakerState::Closed);
    // What was before is forgotten.
    assert_eq!(calls(&mut breaker, at(1_000), "----+"), "----+");
}

#[test]
fn calls_that_time_out_together_count_once() {
    let mut breaker = Breaker::new(BreakerConfig::default());
    // A hundred calls are under way, one each tenth of a millisecond, and none is answered within 10 ms.
    let under_way: Vec<_> =
        (0..100).filter_map(|it| breaker.permit(at(0).after(Micros::new(it * 100)))).collect();
    for (it, pass) in under_way.into_iter().enumerate() {
        let now = at(10).after(Micros::new(it as u64 * 100));
        assert_eq!(breaker.record(pass, CallOutcome::TimedOut, now, 0), None);
    }
    assert_eq!(breaker.state(), BreakerState::Closed);
}

#[test]
fn breaker_opens_for_slow_calls_only_after_several_deadlines() {
    let mut breaker = Breaker::new(BreakerConfig::default());
    let mut waiting = std::collections::VecDeque::new();
    // Calls begin every millisecond, and each gives up after 10 ms.
    let opened = (0..1_000).find(|ms| {
        if waiting.front().is_some_and(|(begun, _)| begun + 10 == *ms)
            && let Some((_, pass)) = waiting.pop_front()
        {
            breaker.record(pass, CallOutcome::TimedOut, at(*ms), 0);
        }
        waiting.extend(breaker.permit(at(*ms)).map(|pass| (*ms, pass)));
        breaker.state() == BreakerState::Open
    });
    assert_eq!(opened, Some(50), "five failures, a deadline apart");
}

#[test]
fn breaker_opens_for_a_server_that_was_never_up() {
    let mut breaker = Breaker::new(BreakerConfig::default());
    assert_eq!(calls(&mut breaker, at(0), "-------"), "-----..");
}

#[test]
fn probes_go_one_at_a_time_and_a_forgone_one_makes_room() {
    let mut breaker = Breaker::new(BreakerConfig::default());
    calls(&mut breaker, at(0), "-----");
    let probe = breaker.permit(at(500)).unwrap();
    assert_eq!(breaker.permit(at(500)), None);
    assert_eq!(breaker.permit(at(5_000)), None);
    assert_eq!(breaker.record(probe, CallOutcome::Forgone, at(5_000), 0), None);
    assert!(breaker.permit(at(5_000)).is_some());
}

#[test]
fn outcome_of_an_earlier_phase_changes_nothing() {
    let mut breaker = Breaker::new(BreakerConfig::default());
    let late: Vec<Pass> = (0..20).filter_map(|_| breaker.permit(at(0))).collect();
    calls(&mut breaker, at(10), "-----");
    let probe = breaker.permit(at(600)).unwrap();
    for pass in late {
        assert_eq!(breaker.record(pass, CallOutcome::Failed, at(600), 0), None);
        assert_eq!(breaker.record(pass, CallOutcome::Succeeded, at(600), 0), None);
    }
    assert_eq!(breaker.permit(at(600)), None, "the probe is still under way");
    breaker.record(probe, CallOutcome::Succeeded, at(600), 0);
    assert_eq!(calls(&mut breaker, at(600), "++"), "++");
    assert_eq!(breaker.state(), BreakerState::Closed);
}

#[test]
fn a_new_connection_is_a_reason_to_probe_at_once() {
    let mut breaker = Breaker::new(BreakerConfig::default());
    assert_eq!(breaker.reachable(), None);
    calls(&mut breaker, at(0), "-----");
    assert_eq!(breaker.reachable(), Some(BreakerState::HalfOpen));
    assert_eq!(calls(&mut breaker, at(1), "+++"), "+++");
    assert_eq!(breaker.state(), BreakerState::Closed);
}

#[test]
fn jitter_adds_at_most_a_quarter_to_the_wait() {
    for (jitter, ms) in [(0, 499), (128, 562), (255, 624)] {
        let mut breaker = Breaker::new(BreakerConfig::default());
        for _ in 0..5 {
            let pass = breaker.permit(at(0)).unwrap();
            breaker.record(pass, CallOutcome::Failed, at(0), jitter);
        }
        assert_eq!(breaker.permit(at(ms)), None, "{jitter}");
        assert!(breaker.permit(at(ms + 1)).is_some(), "{jitter}");
    }
}

#[test]
fn breakers_that_could_never_open_or_close_are_refused() {
    let new = |percent, window, probes| BreakerConfig::new(percent, window, Micros::new(1), probes);
    assert_eq!(new(0, 10, 3), Err(BreakerError::FailureRate));
    assert_eq!(new(101, 10, 3), Err(BreakerError::FailureRate));
    assert_eq!(new(50, 0, 3), Err(BreakerError::Window));
    assert_eq!(new(50, 65, 3), Err(BreakerError::Window));
    assert_eq!(new(50, 10, 0), Err(BreakerError::Probes));
    assert_eq!(BreakerConfig::new(50, 10, Micros::from_millis(500), 3), Ok(BreakerConfig::default()));
    let mut whole = Breaker::new(new(100, 64, 1).unwrap());
    assert_eq!(calls(&mut whole, at(0), &"-".repeat(65)), format!("{}.", "-".repeat(64)));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Wait(u64),
    Ask,
    Record(usize, CallOutcome, u8),
    Reachable,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let outcome = prop_oneof![
        1 => Just(CallOutcome::Succeeded),
        3 => Just(CallOutcome::Failed),
        1 => Just(CallOutcome::Forgone),
    ];
    let step = prop_oneof![
        1 => (0..700_u64).prop_map(Step::Wait),
        4 => Just(Step::Ask),
        4 => (any::<usize>(), outcome, any::<u8>()).prop_map(|(which, what, jitter)| Step::Record(which, what, jitter)),
        1 => Just(Step::Reachable),
    ];
    prop::collection::vec(step, 0..200)
}

proptest! {
    /// Whatever happens: half-open, at most one call is under way; open, none begins before its time; and a server that
    /// answers again is back in use after its wait and its probes.
    #[test]
    fn breaker_probes_one_at_a_time_and_never_stays_open(
        percent in 1..=100_u32, window in 1..=64_u32, probes in 1..=5_u32, steps in steps(),
    ) {
        let wait = Micros::from_millis(500);
        let mut breaker = Breaker::new(BreakerConfig::new(percent, window, wait, probes).unwrap());
        let mut now = at(0);
        let mut under_way: Vec<(Pass, bool)> = Vec::new();
        let mut opened = None;
        for step in steps {
            match step {
                Step::Wait(ms) => now = now.after(Micros::from_millis(ms)),
                Step::Ask => {
                    let before = breaker.state();
                    if let Some(pass) = breaker.permit(now) {
                        let is_probe = breaker.state() == BreakerState::HalfOpen;
                        let probes = under_way.iter().filter(|(_, is_probe)| *is_probe).count();
                        prop_assert!(!is_probe || probes == 0, "a second probe");
                        if before == BreakerState::Open {
                            prop_assert!(opened.is_some_and(|opened| now.since(opened) >= wait));
                        }
                        under_way.push((pass, is_probe));
                    }
                }
                Step::Record(which, what, jitter) => {
                    if under_way.is_empty() { continue }
                    let (pass, _) = under_way.swap_remove(which % under_way.len());
                    if breaker.record(pass, what, now, jitter) == Some(BreakerState::Open) {
                        opened = Some(now);
                    }
                    // A probe of an earlier era is none any more.
                    if breaker.state() != BreakerState::HalfOpen {
                        under_way.iter_mut().for_each(|(_, is_probe)| *is_probe = false);
                    }
                }
                Step::Reachable => drop(breaker.reachable()),
            }
        }
        for (pass, _) in under_way {
            breaker.record(pass, CallOutcome::Forgone, now, 0);
        }
        now = now.after(Micros::from_secs(1));
        for _ in 0..probes {
            let pass = breaker.permit(now);
            prop_assert!(pass.is_some());
            breaker.record(pass.unwrap(), CallOutcome::Succeeded, now, 0);
        }
        prop_assert_eq!(breaker.state(), BreakerState::Closed);
    }
}
