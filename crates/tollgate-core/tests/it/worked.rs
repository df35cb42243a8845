//! The specification's worked numbers, and the mistakes that shipped limiters make, each as a sentence.

use tollgate_core::{
    Algorithm, Ask, FixedWindow, LeakyBucket, LeakyMode, Limit, Micros, Outcome, Rate, SlidingCounter,
    SlidingLog, State, Timestamp, TokenBucket,
};

const SECOND: u64 = 1_000_000;

/// A key of a limit, and a clock in seconds.
struct Key {
    limit: Limit,
    state: Option<State>,
}

impl Key {
    fn new(limit: Limit) -> Self {
        Self { limit, state: None }
    }

    fn ask(&mut self, at_us: u64, ask: Ask) -> Outcome {
        let now = Timestamp::from_micros(at_us);
        let state = self.state.get_or_insert_with(|| self.limit.fresh(now));
        self.limit.decide(state, now, ask)
    }

    /// How many of `count` requests of one permit are admitted at an instant.
    fn take(&mut self, at_us: u64, count: u64) -> u64 {
        (0..count).filter(|_| self.ask(at_us, Ask::of(1)).is_admitted()).count() as u64
    }

    fn remaining(&self, at_us: u64) -> u64 {
        let now = Timestamp::from_micros(at_us);
        self.state.as_ref().map_or(self.limit.size(), |state| self.limit.status(state, now).remaining)
    }
}

fn bucket(capacity: u64, refill: Rate) -> Limit {
    Limit::TokenBucket(TokenBucket::new(capacity, refill).unwrap())
}

fn rate(permits: u64, secs: u64) -> Rate {
    Rate::new(permits, Micros::from_secs(secs)).unwrap()
}

fn minute_limits() -> [(&'static str, Limit); 6] {
    let hundred = rate(100, 60);
    [
        ("token bucket", bucket(100, hundred)),
        ("leaky bucket", Limit::LeakyBucket(LeakyBucket::new(100, hundred, LeakyMode::Meter).unwrap())),
        ("fixed window", Limit::FixedWindow(FixedWindow::new(hundred).unwrap())),
        ("sliding log", Limit::SlidingLog(SlidingLog::new(hundred).unwrap())),
        ("sliding counter", Limit::SlidingCounter(SlidingCounter::new(hundred, 1, false).unwrap())),
        ("strict counter", Limit::SlidingCounter(SlidingCounter::new(hundred, 10, true).unwrap())),
    ]
}

#[test]
fn eighty_before_and_sixty_now_at_45_seconds_count_as_80_and_admit() {
    let mut key = Key::new(Limit::SlidingCounter(SlidingCounter::new(rate(100, 60), 1, false).unwrap()));
    assert_eq!(key.take(30 * SECOND, 80), 80);
    assert!(key.ask(105 * SECOND, Ask::of(60)).is_admitted());
    // 80 x 0.25 + 60 = 80 of 100.
    assert_eq!(key.remaining(105 * SECOND), 20);
    assert!(key.ask(105 * SECOND, Ask::of(1)).is_admitted());
}

#[test]
fn eighty_before_and_twenty_now_at_15_seconds_count_as_80() {
    let mut key = Key::new(Limit::SlidingCounter(SlidingCounter::new(rate(100, 60), 1, false).unwrap()));
    assert_eq!(key.take(0, 80), 80);
    assert!(key.ask(75 * SECOND, Ask::of(20)).is_admitted());
    // 80 x 45/60 + 20 = 80 of 100.
    assert_eq!(key.remaining(75 * SECOND), 20);
}

#[test]
fn second_7_is_in_window_5_and_second_12_in_window_10() {
    let limit = FixedWindow::new(rate(1, 5)).unwrap();
    for (second, window) in [(7, 5), (12, 10)] {
        let now = Timestamp::from_micros(second * SECOND);
        let mut state = limit.fresh(now);
        limit.decide(&mut state, now, Ask::of(1));
        assert_eq!(state.window * 5, window);
        assert_eq!(limit.status(&state, now).reset, Micros::from_secs(window as u64 + 5 - second));
    }
}

#[test]
fn a_fixed_window_passes_200_around_its_edge_and_the_others_do_not() {
    for (name, limit) in minute_limits() {
        let mut key = Key::new(limit);
        let passed = key.take(59 * SECOND, 100) + key.take(61 * SECOND, 100);
        match name {
            "fixed window" => assert_eq!(passed, 200),
            _ => assert!((100..=103).contains(&passed), "{name}: {passed}"),
        }
    }
}

#[test]
fn a_burst_of_1_per_60_seconds_admits_1_of_1000() {
    let limits = [
        bucket(1, rate(1, 60)),
        Limit::LeakyBucket(LeakyBucket::new(1, rate(1, 60), LeakyMode::Meter).unwrap()),
        Limit::FixedWindow(FixedWindow::new(rate(1, 60)).unwrap()),
        Limit::SlidingLog(SlidingLog::new(rate(1, 60)).unwrap()),
        Limit::SlidingCounter(SlidingCounter::new(rate(1, 60), 1, false).unwrap()),
    ];
    for limit in limits {
        assert_eq!(Key::new(limit).take(3 * SECOND, 1000), 1, "{limit:?}");
    }
}

#[test]
fn a_burst_of_100_after_idling_admits_100_and_not_197() {
    let mut key = Key::new(bucket(100, Rate::per_second(1)));
    assert_eq!(key.take(0, 1), 1);
    assert_eq!(key.take(98_900_000, 300), 100);
}

#[test]
fn a_cost_above_the_limit_is_impossible_and_not_a_wait() {
    for (name, limit) in minute_limits() {
        let mut key = Key::new(limit);
        assert_eq!(key.ask(0, Ask::of(101).within(Micros::from_secs(3_600))), Outcome::Impossible, "{name}");
        assert_eq!(key.ask(0, Ask::of(u64::MAX)), Outcome::Impossible, "{name}");
        assert_eq!(key.remaining(0), 100, "{name}");
    }
}

#[test]
fn two_callers_with_clocks_5_seconds_apart_share_one_bucket() {
    let mut key = Key::new(bucket(5, Rate::per_second(1)));
    let admitted: u64 = (0..200).map(|n| key.take(1_000 * SECOND + (n % 2) * 5 * SECOND, 1)).sum();
    // The first one, and the full bucket that the later clock finds: the earlier clock never refills it again.
    assert_eq!(admitted, 6);
}

#[test]
fn a_second_boundary_gives_nothing_extra() {
    let mut key = Key::new(bucket(10, Rate::per_second(10)));
    assert_eq!(key.take(1_999_500, 20) + key.take(2_000_500, 20), 10);
}

#[test]
fn a_denied_cost_deepens_no_debt() {
    for (name, limit) in minute_limits() {
        let mut key = Key::new(limit);
        assert!(key.ask(0, Ask::of(99)).is_admitted());
        for _ in 0..10 {
            assert!(!key.ask(0, Ask::of(2)).is_admitted(), "{name}");
        }
        assert_eq!(key.remaining(0), 1, "{name}");
        assert!(key.ask(0, Ask::of(1)).is_admitted(), "{name}");
    }
}

#[test]
fn client_with_many_denials_still_gets_its_share() {
    // One request a second against 10 per 60 s: 100 in 600 s, not 10.
    let mut key = Key::new(Limit::SlidingLog(SlidingLog::new(rate(10, 60)).unwrap()));
    assert_eq!((0..600).map(|second| key.take(second * SECOND, 1)).sum::<u64>(), 100);
    let mut key = Key::new(Limit::SlidingLog(SlidingLog::new(rate(10, 60)).unwrap().counting_denied(true)));
    let punished = (0..600).map(|second| key.take(second * SECOND, 1)).sum::<u64>();
    assert_eq!(punished, 100, "a denied cost counts only as far as there is room, and here there is none");
}

#[test]
fn denied_costs_count_up_to_the_limit_with_count_denied() {
    for limit in [
        Limit::FixedWindow(FixedWindow::new(rate(10, 60)).unwrap().counting_denied(true)),
        Limit::SlidingLog(SlidingLog::new(rate(10, 60)).unwrap().counting_denied(true)),
        Limit::SlidingCounter(SlidingCounter::new(rate(10, 60), 1, false).unwrap().counting_denied(true)),
    ] {
        let mut key = Key::new(limit);
        assert!(key.ask(0, Ask::of(8)).is_admitted());
        assert!(!key.ask(0, Ask::of(5)).is_admitted());
        assert_eq!(key.remaining(0), 0, "{limit:?}");
    }
}

#[test]
fn requests_of_the_same_microsecond_all_count_in_the_log() {
    let mut key = Key::new(Limit::SlidingLog(SlidingLog::new(rate(100, 60)).unwrap()));
    assert_eq!(key.take(7, 1000), 100);
    assert_eq!(key.take(60 * SECOND + 6, 1000), 0);
    assert_eq!(key.take(60 * SECOND + 7, 1000), 100);
}

#[test]
fn high_rates_still_limit() {
    for permits in [6_000, 2_000, 1_000_000_000] {
        let mut key = Key::new(bucket(10, Rate::per_second(permits)));
        assert_eq!(key.take(0, 1000), 10, "{permits}/s");
    }
}

#[test]
fn cancelled_reservation_gives_no_extra_permits() {
    let bucket = TokenBucket::new(10, Rate::per_second(10)).unwrap();
    let at = |us| Timestamp::from_micros(us);
    let mut state = bucket.fresh(at(0));
    bucket.decide(&mut state, at(0), Ask::of(10));
    let Outcome::Admitted { delay } =
        bucket.decide(&mut state, at(0), Ask::of(10).within(Micros::from_secs(1)))
    else {
        panic!("one bucketful can be reserved")
    };
    // Half of it has flowed back when the reservation, which has started by then, is given back.
    let start = at(0).after(delay);
    bucket.refund(&mut state, at(1_500_000), 10, start);
    assert_eq!(bucket.status(&state, at(1_500_000)).remaining, 10);
    bucket.refund(&mut state, at(1_500_000), 10, start);
    assert_eq!(bucket.status(&state, at(1_500_000)).remaining, 10, "and never more than full");
}

#[test]
fn a_queue_lets_requests_go_at_a_constant_outflow() {
    let mut key =
        Key::new(Limit::LeakyBucket(LeakyBucket::new(200, Rate::per_second(50), LeakyMode::Queue).unwrap()));
    let delays: Vec<_> = (0..200).map(|_| key.ask(0, Ask::of(1)).delay().get()).collect();
    assert!(delays.windows(2).all(|pair| pair[1] - pair[0] == 20_000));
    assert_eq!(key.ask(0, Ask::of(1)), Outcome::Denied { retry: Micros::from_millis(20) });
}

#[test]
fn half_a_second_of_patience_is_worth_a_reservation() {
    // A caller that waits up to 500 ms at 100 a second: fifty reservations beyond the burst, the last one 500 ms ahead.
    let mut key = Key::new(bucket(100, Rate::per_second(100)));
    assert_eq!(key.take(0, 100), 100);
    let patient = Ask::of(1).within(Micros::from_millis(500));
    let delays: Vec<_> =
        (0..60).map(|_| key.ask(0, patient)).take_while(|it| it.is_admitted()).map(|it| it.delay()).collect();
    assert_eq!((delays.len(), delays.last().copied()), (50, Some(Micros::from_millis(500))));
}
