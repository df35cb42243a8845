//! What a log keeps for longer windows of its key.

use proptest::prelude::*;
use tollgate_core::algorithm::LogState;
use tollgate_core::policy::{Policy, PolicyParts, RuleLimit};
use tollgate_core::{Algorithm, Ask, Limit, Micros, Rate, Retention, SlidingLog, Timestamp};

fn log(limit: u64, window_us: u64) -> SlidingLog {
    SlidingLog::new(Rate::new(limit, Micros::new(window_us)).unwrap()).unwrap()
}

fn at(us: u64) -> Timestamp {
    Timestamp::from_micros(1_763_000_000_000_000 + us)
}

/// The logs of one scope, as a policy has them at an instant, after a policy with others.
fn in_policy(logs: &[SlidingLog], earlier: &[SlidingLog], now: Timestamp) -> Vec<SlidingLog> {
    let limits = |logs: &[SlidingLog]| -> Vec<RuleLimit> {
        let limit = |log: &SlidingLog| RuleLimit {
            scope: "sliding_window:rule".into(),
            limit: Limit::SlidingLog(*log),
            candidate: None,
        };
        logs.iter().map(limit).collect()
    };
    let mut policy = Policy::new(PolicyParts { limits: limits(logs), ..PolicyParts::default() });
    policy.retain_logs(&limits(earlier), now);
    let own = |it: &RuleLimit| if let Limit::SlidingLog(log) = it.limit { Some(log) } else { None };
    policy.limits().iter().filter_map(own).collect()
}

#[test]
fn a_short_window_keeps_no_more_entries_than_the_longest_limit_needs() {
    let [second, _day] = in_policy(&[log(10, 1_000_000), log(100, 86_400_000_000)], &[], at(0))[..] else {
        panic!("two logs")
    };
    let mut state = LogState::default();
    for number in 0..5_000 {
        assert!(second.decide(&mut state, at(number * 100_000), Ask::of(1)).is_admitted());
    }
    assert!(state.entries().len() <= 100 + 11, "{} entries", state.entries().len());
}

#[test]
fn retention_lapses_when_the_longer_window_is_withdrawn() {
    let (second, day) = (log(10, 1_000_000), log(1_000, 86_400_000_000));
    let before = in_policy(&[second, day], &[], at(0));
    let [after] = in_policy(&[second], &before, at(0))[..] else { panic!("one log") };
    let mut state = LogState::default();
    for number in 0..50 {
        assert!(after.decide(&mut state, at(number * 200_000), Ask::of(1)).is_admitted());
    }
    assert_eq!(state.entries().len(), 50, "for a day it can still come back");
    assert_eq!(before[1].status(&state, at(10_000_000)).remaining, 950);
    let a_day_later = 86_400_000_000;
    assert!(after.decide(&mut state, at(a_day_later), Ask::of(1)).is_admitted());
    assert_eq!(state.entries().len(), 1, "then only the second matters");
    // Reloads in between do not make it any longer.
    let [again] = in_policy(&[second], &[after], at(a_day_later - 1))[..] else { panic!("one log") };
    assert_eq!(again.lapsing().map(|(_, until)| until), Some(at(a_day_later)));
    let [last] = in_policy(&[second], &[again], at(a_day_later))[..] else { panic!("one log") };
    assert_eq!(last, second);
}

proptest! {
    /// Entries beyond the limit of the longer window decide nothing: what is left of it denies as long, to the microsecond.
    #[test]
    fn a_capped_log_decides_as_one_that_keeps_everything(
        short in (1..20_u64, 1..50_u64),
        long in (1..20_u64, 50..500_u64),
        steps in prop::collection::vec((0..40_u64, 1..4_u64, any::<bool>(), any::<bool>()), 1..200),
    ) {
        let logs = [log(short.0, short.1), log(long.0, long.1)];
        let everything = Retention { time: Micros::new(long.1), entries: u64::MAX };
        let full = logs.map(|log| log.retaining(everything));
        let capped = in_policy(&logs, &[], at(0));
        let (mut one, mut other, mut now) = (LogState::default(), LogState::default(), 0);
        for (pause, cost, is_long, waits) in steps {
            now += pause;
            let which = usize::from(is_long);
            let ask = Ask { cost, wait: waits.then(|| Micros::new(30)) };
            let kept = full[which].decide(&mut one, at(now), ask);
            prop_assert_eq!(kept, capped[which].decide(&mut other, at(now), ask));
        }
        prop_assert!(other.entries().len() <= one.entries().len());
    }
}
