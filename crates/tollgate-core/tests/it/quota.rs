//! Calendar quotas: their bound, exact waits, clocks that run backwards, and months as people are billed for them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tollgate_core::algorithm::CalendarState;
use tollgate_core::{
    Algorithm, Ask, Calendar, CalendarQuota, Cycle, LimitError, Micros, Outcome, Status, Timestamp, WEEKDAYS,
};

use crate::laws::config;

const SECOND: u64 = 1_000_000;
const DAY: u64 = 86_400 * SECOND;

fn at(text: &str) -> Timestamp {
    let instant: jiff::Timestamp = text.parse().unwrap();
    Timestamp::from_micros(instant.as_microsecond() as u64)
}

fn back(instant: Timestamp, by: Micros) -> Timestamp {
    Timestamp::from_micros(instant.as_micros().saturating_sub(by.get()))
}

/// 10 per month in Seoul, from the 15th.
fn seoul() -> CalendarQuota {
    CalendarQuota::new(10, Calendar::parse("Asia/Seoul", "month", Some("15")).unwrap()).unwrap()
}

const RETRY_AT_THE_15TH: Outcome = Outcome::Denied { retry: Micros::from_secs(28 * 86_400 + 6 * 3_600) };

#[test]
fn a_month_ends_on_its_day_in_its_zone() {
    let (quota, now) = (seoul(), at("2026-11-16T09:00:00Z"));
    let mut state = quota.fresh(now);
    assert_eq!(quota.status(&state, now), Status { remaining: 10, reset: Micros::ZERO });
    assert_eq!(quota.decide(&mut state, now, Ask::of(7)), Outcome::NOW);
    assert_eq!(
        quota.status(&state, now),
        Status { remaining: 3, reset: Micros::from_secs(28 * 86_400 + 6 * 3_600) }
    );
    assert_eq!(quota.decide(&mut state, now, Ask::of(4)), RETRY_AT_THE_15TH);
    assert_eq!(quota.decide(&mut state, now, Ask::of(11)), Outcome::Impossible);
    assert_eq!(quota.decide(&mut state, now, Ask::of(3)), Outcome::NOW);
    let last = at("2026-12-14T14:59:59.999999Z");
    assert_eq!(quota.decide(&mut state, last, Ask::of(1)), Outcome::Denied { retry: Micros::new(1) });
    assert_eq!(quota.full_at(&state), at("2026-12-14T15:00:00Z"));
    assert_eq!(quota.decide(&mut state, at("2026-12-14T15:00:00Z"), Ask::of(10)), Outcome::NOW);
    assert_eq!(state, CalendarState { end: at("2027-01-14T15:00:00Z").as_micros() as i64, count: 10 });
}

#[test]
fn quota_never_reserves_in_the_next_month() {
    let (quota, now) = (seoul(), at("2026-12-14T14:00:00Z"));
    let hour = Micros::from_secs(3_600);
    let mut state = quota.fresh(now);
    assert_eq!(quota.decide(&mut state, now, Ask::of(8)), Outcome::NOW);
    let before = state;
    assert_eq!(quota.decide(&mut state, now, Ask::of(3).within(hour)), Outcome::Denied { retry: hour });
    assert_eq!(state, before);
}

#[test]
fn taken_permits_count_under_every_limit() {
    let now = at("2026-11-16T09:00:00Z");
    let of = |limit| {
        CalendarQuota::new(limit, Calendar::parse("Asia/Seoul", "month", Some("15")).unwrap()).unwrap()
    };
    let mut state = of(1_000).fresh(now);
    assert_eq!(of(1_000).decide(&mut state, now, Ask::of(900)), Outcome::NOW);
    assert_eq!(of(100).decide(&mut state, now, Ask::of(1)), RETRY_AT_THE_15TH);
    assert_eq!(of(1_000).status(&state, now).remaining, 100);
    assert_eq!(of(2_000).status(&state, now).remaining, 1_100);
    assert_eq!(of(100).status(&state, at("2026-12-14T15:00:00Z")).remaining, 100);
}

#[test]
fn refunds_are_of_the_period_of_their_grant() {
    let (quota, now) = (seoul(), at("2026-12-14T14:00:00Z"));
    let mut state = quota.fresh(now);
    quota.decide(&mut state, now, Ask::of(10));
    let before = state;
    quota.refund(&mut state, now, 4, at("2026-11-14T14:59:59Z"));
    assert_eq!(state, before, "of the month before");
    quota.refund(&mut state, now, 4, now);
    assert_eq!(state.count, 6);
    quota.refund(&mut state, now, u64::MAX, now);
    assert_eq!(state, CalendarState { count: 0, ..before }, "the time that was seen is kept");
    assert_eq!(quota.full_at(&state), at("2026-11-14T15:00:00Z"));
    quota.decide(&mut state, now, Ask::of(10));
    quota.refund(&mut state, at("2026-12-14T15:00:00Z"), 3, now);
    assert_eq!(quota.status(&state, at("2026-12-14T15:00:00Z")).remaining, 10);
}

#[test]
fn a_clock_that_was_set_back_finds_the_period_exhausted_and_keeps_that() {
    let (quota, now) = (seoul(), at("2026-11-16T09:00:00Z"));
    let mut state = quota.fresh(now);
    quota.decide(&mut state, now, Ask::of(1));
    let set_back = at("2025-06-01T00:00:00Z");
    let Outcome::Denied { retry } = quota.decide(&mut state, set_back, Ask::of(1)) else { panic!() };
    assert_eq!(set_back.after(retry), at("2025-06-14T15:00:00Z"));
    assert_eq!(state, CalendarState { end: at("2025-06-14T15:00:00Z").as_micros() as i64, count: 10 });
    assert_eq!(quota.decide(&mut state, set_back.after(retry), Ask::of(10)), Outcome::NOW);
}

#[test]
fn invalid_limits_are_rejected() {
    let day = || Calendar::new("UTC", Cycle::Day).unwrap();
    assert_eq!(CalendarQuota::new(0, day()), Err(LimitError::Empty));
    assert_eq!(CalendarQuota::new((1 << 51) + 1, day()), Err(LimitError::TooLarge { max: 1 << 51 }));
    assert_eq!(CalendarQuota::new(5, day()), CalendarQuota::new(5, day()));
    assert_ne!(CalendarQuota::new(5, day()), CalendarQuota::new(6, day()));
}

fn quotas() -> impl Strategy<Value = CalendarQuota> {
    let zones =
        ["Asia/Seoul", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "America/Havana", "UTC"];
    let cycles = prop_oneof![
        3 => Just(Cycle::Day),
        1 => (0..7_usize).prop_map(|day| Cycle::Week { from: WEEKDAYS[day].1 }),
        1 => prop::sample::select(vec![1, 15, 28, 29, 30, 31]).prop_map(|from| Cycle::Month { from }),
    ];
    let limits = prop_oneof![4 => 1..=12_u64, 1 => 1..=5_000_u64, 1 => Just(1 << 51)];
    (limits, prop::sample::select(zones.to_vec()), cycles).prop_map(|(limit, zone, cycle)| {
        CalendarQuota::new(limit, Calendar::new(zone, cycle).unwrap()).unwrap()
    })
}

/// Around the changes of clocks of 2024 and 2025, at any time of these years, and at the beginning of time.
fn starts() -> impl Strategy<Value = Timestamp> {
    let changes = [
        "2024-04-25T22:00:00Z",
        "2024-10-31T20:00:00Z",
        "2025-03-09T05:00:00Z",
        "2025-11-02T04:00:00Z",
        "2025-04-05T15:00:00Z",
        "2024-02-29T00:00:00Z",
    ]
    .map(|text| at(text).as_micros());
    prop_oneof![
        (prop::sample::select(changes.to_vec()), 0..2 * DAY).prop_map(|(us, more)| us - DAY + more),
        1_704_000_000 * SECOND..1_767_000_000 * SECOND,
        0..=DAY,
    ]
    .prop_map(Timestamp::from_micros)
}

/// One thing that happens to a key. Times and costs are shares of the quota's own.
#[derive(Clone, Debug)]
struct Step {
    /// To the end of the stored period, or by sixteenths of the horizon; and some microseconds more or less.
    advance: Advance,
    us: i8,
    act: Act,
}

#[derive(Clone, Copy, Debug)]
enum Advance {
    ToTheEnd,
    By(i8),
}

#[derive(Clone, Debug)]
enum Act {
    /// Eighths of the limit, and some permits more; eighths of the horizon.
    Decide {
        eighths: u8,
        more: u8,
        wait: Option<u8>,
    },
    /// Of the grant this many before the last.
    Refund {
        back: u8,
    },
    Charge {
        eighths: u8,
        more: u8,
    },
}

fn steps(len: usize) -> impl Strategy<Value = Vec<Step>> {
    let advance = prop_oneof![
        4 => Just(Advance::By(0)),
        2 => (0..=4_i8).prop_map(Advance::By),
        2 => Just(Advance::ToTheEnd),
        1 => (0..=40_i8).prop_map(Advance::By),
        1 => (-16..=0_i8).prop_map(Advance::By),
    ];
    let act = prop_oneof![
        12 => (prop_oneof![4 => Just(0_u8), 1 => 0..=9_u8], 0..=2_u8, prop::option::weighted(0.3, 0..=10_u8))
            .prop_map(|(eighths, more, wait)| Act::Decide { eighths, more, wait }),
        2 => (0..=3_u8).prop_map(|back| Act::Refund { back }),
        1 => (0..=20_u8, 0..=2_u8).prop_map(|(eighths, more)| Act::Charge { eighths, more }),
    ];
    prop::collection::vec(
        (advance, -2..=2_i8, act).prop_map(|(advance, us, act)| Step { advance, us, act }),
        1..len,
    )
}

/// An admission that was not given back.
#[derive(Clone, Copy, Debug)]
struct Grant {
    start: Timestamp,
    cost: u64,
}

/// A quota, a key's state, and the clock that is handed in.
#[derive(Clone)]
struct Run {
    quota: CalendarQuota,
    state: CalendarState,
    now: Timestamp,
    /// The latest time at which the state was written.
    latest: Timestamp,
    grants: Vec<Grant>,
}

impl Run {
    fn new(quota: CalendarQuota, now: Timestamp) -> Self {
        Self { quota, state: quota.fresh(now), now, latest: Timestamp::default(), grants: Vec::new() }
    }

    fn played(quota: CalendarQuota, start: Timestamp, steps: &[Step]) -> Self {
        let mut run = Self::new(quota, start);
        for step in steps {
            run.step(step);
        }
        run
    }

    /// Moves the clock, never so far back that it counts as set back.
    fn advance(&mut self, advance: Advance, us: i8) {
        let horizon = self.quota.horizon().get() as i64;
        let to = match advance {
            Advance::ToTheEnd => self.state.end.max(self.now.as_micros() as i64),
            Advance::By(sixteenths) => self.now.as_micros() as i64 + horizon * i64::from(sixteenths) / 16,
        };
        let earliest = (self.latest.as_micros() as i64 - horizon).max(0);
        self.now = Timestamp::from_micros((to + i64::from(us)).max(earliest) as u64);
    }

    fn cost(&self, eighths: u8, more: u8) -> u64 {
        self.quota.size() / 8 * u64::from(eighths) + u64::from(more)
    }

    fn step(&mut self, step: &Step) -> Option<(CalendarState, Ask, Outcome)> {
        self.advance(step.advance, step.us);
        let before = self.state;
        let mut decided = None;
        match step.act {
            Act::Decide { eighths, more, wait } => {
                let wait = wait.map(|share| Micros::new(self.quota.horizon().get() / 8 * u64::from(share)));
                let ask = Ask { cost: self.cost(eighths, more), wait };
                let outcome = self.quota.decide(&mut self.state, self.now, ask);
                if let Outcome::Admitted { delay } = outcome
                    && ask.cost > 0
                {
                    self.grants.push(Grant { start: self.start(delay), cost: ask.cost });
                }
                decided = Some((before, ask, outcome));
            }
            Act::Refund { back } => {
                if let Some(index) = self.grants.len().checked_sub(1 + usize::from(back)) {
                    let grant = self.grants.remove(index);
                    self.quota.refund(&mut self.state, self.now, grant.cost, grant.start);
                }
            }
            Act::Charge { eighths, more } => {
                let cost = self.cost(eighths, more);
                self.quota.charge(&mut self.state, self.now, cost);
            }
        }
        if self.state != before {
            self.latest = self.latest.max(self.now);
        }
        decided
    }

    /// When a grant is to start. A clock behind the state's period counts as its first instant.
    fn start(&self, delay: Micros) -> Timestamp {
        if delay > Micros::ZERO {
            return self.now.after(delay);
        }
        let inside = Timestamp::from_micros(self.state.end as u64 - 1);
        self.now.max(self.quota.calendar().period_at(inside).start)
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn quota_admits_at_most_the_limit_in_each_period(quota in quotas(), start in starts(), steps in steps(60)) {
        let run = Run::played(quota, start, &steps);
        let mut sums = BTreeMap::new();
        for grant in run.grants {
            let sum = sums.entry(quota.calendar().period_at(grant.start).start).or_insert(0);
            *sum += grant.cost;
            prop_assert!(*sum <= quota.size(), "{} of {} at {:?}", sum, quota.size(), grant.start);
        }
    }

    #[test]
    fn a_promised_wait_is_exact_and_a_denial_changes_nothing(quota in quotas(), start in starts(), steps in steps(40)) {
        let mut run = Run::new(quota, start);
        for step in &steps {
            let Some((before, ask, outcome)) = run.step(step) else { continue };
            match outcome {
                Outcome::Admitted { delay } => prop_assert_eq!(delay, Micros::ZERO),
                Outcome::Denied { retry } => {
                    prop_assert_eq!(run.state, before);
                    prop_assert!(retry >= Micros::new(1));
                    let just_before = run.now.after(Micros::new(retry.get() - 1));
                    prop_assert!(!quota.peek(&before, just_before, ask).is_admitted(), "early by 1 us: {:?}", retry);
                    prop_assert!(quota.peek(&before, run.now.after(retry), ask).is_admitted(), "late: {:?}", retry);
                }
                Outcome::Impossible => {
                    prop_assert!(ask.cost > quota.size());
                    prop_assert_eq!(run.state, before);
                }
            }
        }
    }

    #[test]
    fn remaining_permits_can_be_taken_and_come_back_at_the_reset(
        quota in quotas(), start in starts(), steps in steps(40),
    ) {
        let mut run = Run::new(quota, start);
        for step in &steps {
            run.step(step);
            let Status { remaining, reset } = quota.status(&run.state, run.now);
            prop_assert!(quota.peek(&run.state, run.now, Ask::of(remaining)).is_admitted());
            prop_assert!(run.state.count <= 2 * quota.size() as i64);
            if remaining < quota.size() {
                prop_assert!(!quota.peek(&run.state, run.now, Ask::of(remaining + 1)).is_admitted());
                prop_assert!(reset > Micros::ZERO);
                let then = quota.status(&run.state, run.now.after(reset)).remaining;
                prop_assert_eq!(then, quota.size());
            }
        }
    }

    #[test]
    fn time_running_backwards_grants_nothing(
        quota in quotas(), start in starts(), steps in steps(40), by in 0..=u64::MAX, sixteenths in 0..=64_u64,
    ) {
        let run = Run::played(quota, start, &steps);
        let now = run.now.max(run.latest);
        for by in [by, quota.horizon().get() * sixteenths / 16, 1] {
            let then = quota.status(&run.state, back(now, Micros::new(by))).remaining;
            prop_assert!(then <= quota.status(&run.state, now).remaining || run.state == quota.fresh(now));
        }
    }

    #[test]
    fn clock_set_back_locks_no_key_out_for_long(
        quota in quotas(), steps in steps(40), horizons in 2..=20_u64, eighths in 0..=8_u8,
    ) {
        let mut run = Run::played(quota, at("2200-01-01T00:00:00Z"), &steps);
        let set_back = back(run.now.max(run.latest), Micros::new(quota.horizon().get() * horizons));
        let ask = Ask::of(run.cost(eighths, 1).min(quota.size()));
        let mut now = set_back;
        loop {
            match quota.decide(&mut run.state, now, ask) {
                Outcome::Admitted { .. } => break,
                Outcome::Denied { retry } => now = now.after(retry),
                Outcome::Impossible => unreachable!(),
            }
            prop_assert!(now <= set_back.after(Micros::new(3 * quota.horizon().get())), "still denied");
        }
    }

    #[test]
    fn one_request_of_n_and_n_of_one_are_alike(
        quota in quotas(), start in starts(), steps in steps(40), n in 2..=40_u64,
    ) {
        let run = Run::played(quota, start, &steps);
        let n = n.min(quota.size());
        let (mut whole, mut one_by_one) = (run.state, run.state);
        if quota.decide(&mut whole, run.now, Ask::of(n)) != Outcome::NOW {
            return Ok(());
        }
        for _ in 0..n {
            prop_assert_eq!(quota.decide(&mut one_by_one, run.now, Ask::of(1)), Outcome::NOW);
        }
        prop_assert_eq!(whole, one_by_one);
    }

    #[test]
    fn an_expired_key_and_a_new_one_decide_alike(
        quota in quotas(), start in starts(), steps in steps(40), after in 0..=100_u64, later in steps(10),
    ) {
        let mut expired = Run::played(quota, start, &steps);
        let now = quota.full_at(&expired.state).max(expired.now).max(expired.latest).after(Micros::new(after));
        let mut fresh = Run::new(quota, now);
        (expired.now, expired.latest, fresh.latest) = (now, now, now);
        expired.grants.clear();
        for step in &later {
            if matches!(step.advance, Advance::By(sixteenths) if sixteenths < 0) || step.us < 0 {
                continue;
            }
            let step = Step { advance: match step.advance { Advance::ToTheEnd => Advance::By(16), by => by }, ..step.clone() };
            let answers = [&mut expired, &mut fresh].map(|run| {
                let outcome = run.step(&step).map(|(_, _, outcome)| outcome);
                (outcome, quota.status(&run.state, run.now))
            });
            prop_assert_eq!(answers[0], answers[1]);
        }
    }

    #[test]
    fn no_panic_at_the_ends_of_the_number_range(
        quota in quotas(),
        acts in prop::collection::vec((ends(), ends(), prop::option::of(ends()), 0..=3_u8), 1..20),
    ) {
        let mut state = quota.fresh(Timestamp::from_micros(acts[0].0));
        for (at, cost, wait, act) in acts {
            let now = Timestamp::from_micros(at);
            match act {
                0 => quota.refund(&mut state, now, cost, Timestamp::from_micros(wait.unwrap_or(cost))),
                1 => quota.charge(&mut state, now, cost),
                _ => {
                    let most = quota.status(&state, now).remaining;
                    let outcome = quota.decide(&mut state, now, Ask { cost, wait: wait.map(Micros::new) });
                    prop_assert!(outcome != Outcome::NOW || cost <= most);
                }
            }
            prop_assert!(quota.status(&state, now).remaining <= quota.size());
            prop_assert!((0..=Timestamp::MAX.as_micros() as i64).contains(&state.end));
            quota.full_at(&state);
        }
    }
}

/// Numbers near zero, near 2^53 and near 2^64, and some between.
fn ends() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..=3_u64,
        (1_u64 << 53) - 3..=(1_u64 << 53) + 3,
        u64::MAX - 3..=u64::MAX,
        any::<u64>(),
        1..=1_000_000_000_u64
    ]
}
