//! The published vectors: one line a limit, one step an arrow: `now,cost,wait -> admitted,delay,retry,remaining,reset`.

use tollgate_core::{
    Algorithm, Ask, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, Limit, Micros, Rate, SlidingCounter,
    SlidingLog, Timestamp, TokenBucket,
};

/// Plays the steps and compares whole answers. A wait of `-` is not stated.
fn play(limit: Limit, steps: &str) {
    let mut state = None;
    for step in steps.split('|').map(str::trim) {
        let (asked, expected) = step.split_once("->").expect("a step has an arrow");
        let mut asked = asked.trim().split(',').map(str::trim);
        let mut number = || asked.next().expect("now, cost, wait");
        let now = Timestamp::from_micros(number().parse().expect("now"));
        let cost = number().parse().expect("cost");
        let wait = number().parse().ok().map(Micros::new);

        let state = state.get_or_insert_with(|| limit.fresh(now));
        let outcome = limit.decide(state, now, Ask { cost, wait });
        let status = limit.status(state, now);
        let answer = format!(
            "{},{},{},{},{}",
            u8::from(outcome.is_admitted()),
            outcome.delay().get(),
            outcome.retry().get(),
            status.remaining,
            status.reset.get()
        );
        assert_eq!(answer, expected.trim(), "{limit:?}: {step}");
    }
}

fn per_micros(permits: u64, us: u64) -> Rate {
    Rate::new(permits, Micros::new(us)).unwrap()
}

#[test]
fn token_bucket() {
    play(
        Limit::TokenBucket(TokenBucket::new(100, Rate::per_second(10)).unwrap()),
        "0,40,0 -> 1,0,0,60,4000000 | 50000,60,0 -> 1,0,0,0,9950000 | 50001,1,0 -> 0,0,49999,0,9949999
        | 50001,1,100000 -> 1,49999,0,0,10049999 | 149999,1,0 -> 0,0,50001,0,9950001",
    );
    play(
        Limit::TokenBucket(TokenBucket::new(2, per_micros(3, 7)).unwrap()),
        "0,2,0 -> 1,0,0,0,5 | 2,1,0 -> 0,0,1,0,3 | 3,1,0 -> 1,0,0,0,4 | 4,2,9 -> 1,3,0,0,8",
    );
}

#[test]
fn interval_refill() {
    play(
        Limit::IntervalBucket(IntervalBucket::new(20, per_micros(20, 10_000_000)).unwrap()),
        "0,5,0 -> 1,0,0,15,10000000 | 9999999,15,0 -> 1,0,0,0,1 | 9999999,1,0 -> 0,0,1,0,1
        | 10000000,20,0 -> 1,0,0,0,10000000",
    );
}

#[test]
fn leaky_bucket_as_a_queue() {
    play(
        Limit::LeakyBucket(LeakyBucket::new(3, Rate::per_second(10), LeakyMode::Queue).unwrap()),
        "0,1,- -> 1,0,0,2,100000 | 0,1,- -> 1,100000,0,1,200000 | 0,1,- -> 1,200000,0,0,300000
        | 0,1,- -> 0,0,100000,0,300000",
    );
}

#[test]
fn fixed_window() {
    play(
        Limit::FixedWindow(FixedWindow::new(per_micros(5, 60)).unwrap()),
        "59,5,0 -> 1,0,0,0,1 | 59,1,0 -> 0,0,1,0,1 | 59,1,5 -> 1,1,0,0,1 | 60,4,0 -> 1,0,0,0,60
        | 60,1,0 -> 0,0,60,0,60",
    );
}

#[test]
fn sliding_log() {
    play(
        Limit::SlidingLog(SlidingLog::new(per_micros(3, 10)).unwrap()),
        "0,1,0 -> 1,0,0,2,10 | 4,2,0 -> 1,0,0,0,6 | 9,1,0 -> 0,0,1,0,1 | 10,1,0 -> 1,0,0,0,4
        | 11,2,5 -> 1,3,0,0,3 | 12,1,0 -> 0,0,8,0,2",
    );
}

#[test]
fn sliding_counter() {
    play(
        Limit::SlidingCounter(SlidingCounter::new(per_micros(10, 60), 1, false).unwrap()),
        "30,8,0 -> 1,0,0,2,30 | 75,4,0 -> 1,0,0,0,45 | 75,1,0 -> 0,0,8,0,45 | 90,1,0 -> 1,0,0,1,30",
    );
    play(
        Limit::SlidingCounter(SlidingCounter::new(per_micros(10, 60), 3, true).unwrap()),
        "30,8,0 -> 1,0,0,2,30 | 75,4,0 -> 0,0,25,2,45 | 99,4,0 -> 0,0,1,2,21 | 100,4,0 -> 1,0,0,6,20",
    );
}
