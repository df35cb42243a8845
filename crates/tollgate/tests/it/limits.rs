//! Limits by name, for tests that want one of each algorithm.

use tollgate::{
    FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, Limit, Micros, Rate, SlidingCounter, SlidingLog,
    TokenBucket,
};

/// One of each algorithm, with bursts that last and rates that show within a second.
pub(crate) const LIMITS: [&str; 7] = [
    "token_bucket",
    "interval_bucket",
    "leaky_bucket",
    "fixed_window",
    "sliding_log",
    "sliding_counter",
    "strict_counter",
];

pub(crate) fn named_limit(name: &str) -> Limit {
    let rate = Rate::per_second(500);
    let window = Rate::new(400, Micros::from_millis(400)).unwrap();
    match name {
        "token_bucket" => Limit::TokenBucket(TokenBucket::new(2_000, rate).unwrap()),
        "interval_bucket" => {
            let rate = Rate::new(100, Micros::from_millis(200)).unwrap();
            Limit::IntervalBucket(IntervalBucket::new(2_000, rate).unwrap())
        }
        "leaky_bucket" => Limit::LeakyBucket(LeakyBucket::new(2_000, rate, LeakyMode::Meter).unwrap()),
        "fixed_window" => Limit::FixedWindow(FixedWindow::new(window).unwrap()),
        "sliding_log" => Limit::SlidingLog(SlidingLog::new(window).unwrap()),
        "sliding_counter" => Limit::SlidingCounter(SlidingCounter::new(window, 1, false).unwrap()),
        "strict_counter" => Limit::SlidingCounter(SlidingCounter::new(window, 10, true).unwrap()),
        other => panic!("no limit is named {other}"),
    }
}
