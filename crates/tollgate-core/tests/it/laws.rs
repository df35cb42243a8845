//! Laws that hold for every limit, every trace and every clock, with the bound of each algorithm as it is stated.

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use tollgate_core::{
    Algorithm, Ask, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, Limit, Micros, Outcome, Rate,
    SlidingCounter, SlidingLog, State, Timestamp, TokenBucket,
};

/// Cases come from `PROPTEST_CASES` (256 if unset); what has failed once is kept beside this file and tried first.
pub(crate) fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        max_shrink_iters: 20_000,
        max_global_rejects: u32::MAX,
        max_local_rejects: u32::MAX,
        ..ProptestConfig::default()
    }
}

pub(crate) fn per_micros(permits: u64, us: u64) -> Rate {
    Rate::new(permits, Micros::new(us)).unwrap()
}

/// Rates from one permit in an age to many in a microsecond.
pub(crate) fn rates() -> impl Strategy<Value = Rate> {
    prop_oneof![
        (1..=12_u64, 1..=100_u64),
        (1..=1_000_u64, prop::sample::select(vec![1_000_u64, 1_000_000, 60_000_000, 3_600_000_000])),
        (1..=2_000_000_000_u64, 1..=10_u64),
        (1..=3_u64, prop::sample::select(vec![86_400_000_000_u64, 31_536_000_000_000])),
    ]
    .prop_map(|(permits, us)| per_micros(permits, us))
}

/// Bucket sizes: tiny, or in the thousands.
pub(crate) fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 1..=12_u64, 1 => 1..=5_000_u64]
}

/// Window limits small enough for traces to reach them.
fn window_rates() -> impl Strategy<Value = Rate> {
    (sizes(), prop_oneof![1..=100_u64, Just(1_000_000), Just(60_000_000)])
        .prop_map(|(n, us)| per_micros(n, us))
}

/// Half a year: slower limits would run a trace past the end of time.
pub(crate) fn recovers_in_time(limit: &Limit) -> bool {
    limit.horizon() <= Micros::new(1 << 44)
}

pub(crate) fn token_buckets() -> impl Strategy<Value = Limit> {
    (sizes(), rates()).prop_filter_map("exact", |(size, rate)| {
        TokenBucket::new(size, rate).ok().map(Limit::TokenBucket).filter(recovers_in_time)
    })
}

pub(crate) fn leaky_buckets(mode: LeakyMode) -> impl Strategy<Value = Limit> {
    (sizes(), rates()).prop_filter_map("exact", move |(size, rate)| {
        LeakyBucket::new(size, rate, mode).ok().map(Limit::LeakyBucket).filter(recovers_in_time)
    })
}

pub(crate) fn interval_buckets() -> impl Strategy<Value = Limit> {
    (sizes(), rates()).prop_filter_map("exact", |(size, rate)| {
        IntervalBucket::new(size, rate).ok().map(Limit::IntervalBucket).filter(recovers_in_time)
    })
}

fn fixed_windows() -> impl Strategy<Value = Limit> {
    (window_rates(), any::<bool>()).prop_map(|(rate, denied)| {
        Limit::FixedWindow(FixedWindow::new(rate).unwrap().counting_denied(denied))
    })
}

fn logs() -> impl Strategy<Value = Limit> {
    (window_rates(), any::<bool>())
        .prop_map(|(rate, denied)| Limit::SlidingLog(SlidingLog::new(rate).unwrap().counting_denied(denied)))
}

fn counters(strict: bool) -> impl Strategy<Value = Limit> {
    (sizes(), 1..=12_u32, prop_oneof![1..=20_u64, Just(1_000_000)], any::<bool>()).prop_map(
        move |(n, parts, part_us, denied)| {
            let rate = per_micros(n, u64::from(parts) * part_us);
            Limit::SlidingCounter(SlidingCounter::new(rate, parts, strict).unwrap().counting_denied(denied))
        },
    )
}

fn limits() -> impl Strategy<Value = Limit> {
    prop_oneof![
        token_buckets(),
        interval_buckets(),
        leaky_buckets(LeakyMode::Meter),
        leaky_buckets(LeakyMode::Queue),
        fixed_windows(),
        logs(),
        counters(false),
        counters(true),
    ]
}

pub(crate) fn counts_denied(limit: &Limit) -> bool {
    match limit {
        Limit::TokenBucket(_)
        | Limit::IntervalBucket(_)
        | Limit::LeakyBucket(_)
        | Limit::CalendarQuota(_) => false,
        Limit::FixedWindow(it) => it.counts_denied(),
        Limit::SlidingLog(it) => it.counts_denied(),
        Limit::SlidingCounter(it) => it.counts_denied(),
    }
}

/// One thing that happens to a key. Times and costs are shares of the limit's own, so that every trace is interesting.
#[derive(Clone, Debug)]
struct Step {
    /// Sixteenths of the horizon, and some microseconds more or less. Negative: the clock steps back.
    advance: (i8, i8),
    act: Act,
}

impl Step {
    fn without_wait(mut self) -> Self {
        if let Act::Decide { wait, .. } = &mut self.act {
            *wait = None;
        }
        self
    }
}

#[derive(Clone, Debug)]
enum Act {
    /// Eighths of the size, and some permits more; eighths of the horizon.
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
        4 => (Just(0_i8), 0..=2_i8),
        4 => (0..=4_i8, -2..=2_i8),
        1 => (0..=40_i8, -2..=2_i8),
        1 => (-16..=0_i8, -2..=0_i8),
    ];
    let decide = || {
        (prop_oneof![6 => Just(0_u8), 1 => 0..=9_u8], 0..=2_u8, prop::option::weighted(0.3, 0..=10_u8))
            .prop_map(|(eighths, more, wait)| Act::Decide { eighths, more, wait })
    };
    let act = prop_oneof![
        12 => decide(),
        2 => (0..=3_u8).prop_map(|back| Act::Refund { back }),
        1 => (0..=20_u8, 0..=2_u8).prop_map(|(eighths, more)| Act::Charge { eighths, more }),
    ];
    prop::collection::vec((advance, act).prop_map(|(advance, act)| Step { advance, act }), 1..len)
}

/// Instants to begin at: the epoch, today, a while before the end of time.
pub(crate) fn starts() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0_u64),
        0..=1_000_u64,
        Just(1_763_000_000_000_000),
        1_763_000_000_000_000..=1_763_000_100_000_000_u64
    ]
}

/// An admission that was not given back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) start: u64,
    pub(crate) cost: u64,
}

/// A limit, a key's state, and the clock that is handed in.
struct Run {
    limit: Limit,
    state: State,
    now: Timestamp,
    /// The latest time at which the state was written: a clock behind it counts as this.
    latest: u64,
    /// Until the first write there is no state to keep a time.
    written: bool,
    grants: Vec<Grant>,
}

impl Run {
    fn new(limit: Limit, start: u64) -> Self {
        let now = Timestamp::from_micros(start);
        Self { limit, state: limit.fresh(now), now, latest: 0, written: false, grants: Vec::new() }
    }

    /// Moves the clock, never so far back that it counts as set back.
    fn advance(&mut self, (sixteenths, us): (i8, i8)) {
        let horizon = self.limit.horizon().get() as i128;
        let to = self.now.as_micros() as i128 + horizon * i128::from(sixteenths) / 16 + i128::from(us);
        let earliest = (self.latest as i128 - horizon).max(0);
        self.now = Timestamp::from_micros(to.max(earliest) as u64);
    }

    fn cost(&self, eighths: u8, more: u8) -> u64 {
        self.limit.size() * u64::from(eighths) / 8 + u64::from(more)
    }

    fn ask(&self, eighths: u8, more: u8, wait: Option<u8>) -> Ask {
        let wait = wait.map(|share| Micros::new(self.limit.horizon().get() * u64::from(share) / 8));
        Ask { cost: self.cost(eighths, more), wait }
    }

    /// The time that a state holds against a clock behind it.
    fn seen(&self, state: &State) -> u64 {
        let seen = match (&self.limit, state.plain()) {
            (Limit::TokenBucket(it), State::Bucket(state)) => state.at * it.tick() as i64,
            (Limit::LeakyBucket(it), State::Bucket(state)) => state.at * it.room().tick() as i64,
            (_, State::Interval(state)) => state.last,
            (_, State::Window(state)) => state.window * self.limit.horizon().get() as i64,
            (_, State::Log(state)) => state.entries().last().map_or(0, |newest| newest.start - newest.lead),
            (_, State::Counter(state)) => state.seen,
            (_, State::Bucket(_) | State::Lent(_) | State::Calendar(_) | State::Carried(_)) => unreachable!(),
        };
        seen as u64
    }

    /// Plays one step; a decision is returned with the state it met.
    fn step(&mut self, step: &Step) -> Option<(State, Ask, Outcome)> {
        self.advance(step.advance);
        if !self.written {
            self.state = self.limit.fresh(self.now);
        }
        let before = self.state.clone();
        let mut decided = None;
        match step.act {
            Act::Decide { eighths, more, wait } => {
                let ask = self.ask(eighths, more, wait);
                let outcome = self.limit.decide(&mut self.state, self.now, ask);
                if let Outcome::Admitted { delay } = outcome
                    && ask.cost > 0
                {
                    let held = self.now.as_micros().max(self.seen(&before));
                    let start = if delay == Micros::ZERO { held } else { self.now.after(delay).as_micros() };
                    self.grants.push(Grant { start, cost: ask.cost });
                }
                decided = Some((before.clone(), ask, outcome));
            }
            Act::Refund { back } => {
                if let Some(index) = self.grants.len().checked_sub(1 + usize::from(back)) {
                    let grant = self.grants.remove(index);
                    self.limit.refund(
                        &mut self.state,
                        self.now,
                        grant.cost,
                        Timestamp::from_micros(grant.start),
                    );
                }
            }
            Act::Charge { eighths, more } => {
                let cost = self.cost(eighths, more);
                self.limit.charge(&mut self.state, self.now, cost);
            }
        }
        if self.state != before {
            self.written = true;
            self.latest = self.latest.max(self.now.as_micros());
        }
        decided
    }
}

/// Fails where more was admitted in an interval than `most(from, to)` allows.
pub(crate) fn check_intervals(
    mut grants: Vec<Grant>,
    most: impl Fn(u64, u64) -> u128,
) -> Result<(), TestCaseError> {
    grants.sort_by_key(|grant| grant.start);
    for (first, from) in grants.iter().enumerate() {
        let mut sum = 0_u128;
        for to in &grants[first..] {
            sum += u128::from(to.cost);
            let allowed = most(from.start, to.start);
            prop_assert!(
                sum <= allowed,
                "{sum} admitted from {} to {}, at most {allowed}",
                from.start,
                to.start
            );
        }
    }
    Ok(())
}

/// Fails where `limit` is exceeded in a trailing window.
fn check_trailing(grants: Vec<Grant>, limit: u64, window: Micros) -> Result<(), TestCaseError> {
    check_intervals(grants, |from, to| if to - from < window.get() { limit.into() } else { u128::MAX })
}

fn run(limit: Limit, start: u64, steps: &[Step]) -> Run {
    let mut run = Run::new(limit, start);
    for step in steps {
        run.step(step);
    }
    run
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_token_bucket_admits_at_most_burst_plus_rate_in_any_interval(
        limit in prop_oneof![token_buckets(), leaky_buckets(LeakyMode::Meter)], start in starts(), steps in steps(60),
    ) {
        let bucket = match &limit {
            Limit::TokenBucket(it) => it,
            Limit::LeakyBucket(it) => it.room(),
            _ => unreachable!(),
        };
        let (unit, flow, tick) = (u128::from(bucket.unit()), u128::from(bucket.flow()), bucket.tick());
        let run = run(limit, start, &steps);
        check_intervals(run.grants, |from, to| {
            let ticks = u128::from(to / tick - from / tick);
            (u128::from(bucket.size()) * unit + flow * ticks) / unit
        })?;
    }

    #[test]
    fn interval_refill_admits_at_most_burst_plus_the_refills_in_any_interval(
        limit in interval_buckets(), start in starts(), steps in steps(60),
    ) {
        let Limit::IntervalBucket(bucket) = limit else { unreachable!() };
        let run = run(limit, start, &steps);
        check_intervals(run.grants, |from, to| {
            u128::from(bucket.size()) + u128::from((to - from).div_ceil(bucket.period())) * u128::from(bucket.refill())
        })?;
    }

    #[test]
    fn a_queue_spaces_its_starts(
        limit in leaky_buckets(LeakyMode::Queue), start in starts(), steps in steps(60),
    ) {
        let Limit::LeakyBucket(bucket) = limit else { unreachable!() };
        let room = bucket.room();
        let run = run(limit, start, &steps);
        for pair in run.grants.windows(2) {
            let ticks = (pair[1].start / room.tick()).saturating_sub(pair[0].start / room.tick());
            let units = u128::from(pair[0].cost) * u128::from(room.unit());
            prop_assert!((u128::from(ticks) + 1) * u128::from(room.flow()) >= units, "{pair:?}");
        }
    }

    #[test]
    fn a_fixed_window_admits_at_most_the_limit_in_each_window(
        limit in fixed_windows(), start in starts(), steps in steps(60),
    ) {
        let window = limit.horizon().get();
        let run = run(limit, start, &steps);
        let mut sums = std::collections::BTreeMap::new();
        for grant in run.grants {
            let sum = sums.entry(grant.start / window).or_insert(0);
            *sum += grant.cost;
            prop_assert!(*sum <= limit.size());
        }
    }

    #[test]
    fn the_log_and_the_strict_counter_admit_at_most_the_limit_in_any_trailing_window(
        limit in prop_oneof![logs(), counters(true)], start in starts(), steps in steps(60),
    ) {
        let run = run(limit, start, &steps);
        check_trailing(run.grants, limit.size(), limit.horizon())?;
    }

    #[test]
    fn the_weighted_counter_keeps_to_its_stated_estimate(
        limit in counters(false), start in starts(), steps in steps(60),
    ) {
        let Limit::SlidingCounter(counter) = limit else { unreachable!() };
        let parts = u64::from(counter.sub_buckets());
        let part = counter.horizon().get() / parts;
        let ticks = |us: u64| us / counter.tick();
        let mut run = Run::new(limit, start);
        for step in &steps {
            if !matches!(step.act, Act::Decide { wait: None, .. }) {
                continue;
            }
            let grants = run.grants.clone();
            let Some((before, ask, outcome)) = run.step(step) else { continue };
            if ask.cost == 0 || ask.cost > limit.size() || counts_denied(&limit) {
                continue;
            }
            let time = run.now.as_micros().max(run.seen(&before));
            let in_part = |index: Option<u64>| grants.iter().filter(|g| Some(g.start / part) == index).map(|g| g.cost).sum::<u64>();
            let index = time / part;
            let inside: u64 = (0..parts).map(|back| in_part(index.checked_sub(back))).sum();
            let weighted = in_part(index.checked_sub(parts)) * (ticks(part) - ticks(time % part));
            let estimate = inside + weighted.div_ceil(ticks(part));
            prop_assert_eq!(outcome.is_admitted(), estimate + ask.cost <= limit.size(), "estimate {}", estimate);
        }
    }

    #[test]
    fn a_promised_wait_is_exact_and_a_denial_changes_nothing(limit in limits(), start in starts(), steps in steps(40)) {
        let mut run = Run::new(limit, start);
        for step in &steps {
            let Some((before, ask, outcome)) = run.step(step) else { continue };
            match outcome {
                Outcome::Admitted { delay } => {
                    let queue = matches!(limit, Limit::LeakyBucket(it) if it.mode() == LeakyMode::Queue);
                    // A clock that steps back by up to a horizon makes a turn look that much further away.
                    let unstated = if queue { Micros::new(2 * limit.horizon().get()) } else { Micros::ZERO };
                    prop_assert!(delay <= ask.wait.unwrap_or(unstated));
                }
                Outcome::Denied { retry } => {
                    prop_assert!(retry >= Micros::new(1));
                    if !counts_denied(&limit) {
                        prop_assert_eq!(&run.state, &before);
                    }
                    let just_before = run.now.after(Micros::new(retry.get() - 1));
                    prop_assert!(!limit.peek(&before, just_before, ask).is_admitted(), "early by 1 us: {:?}", retry);
                    prop_assert!(limit.peek(&before, run.now.after(retry), ask).is_admitted(), "late: {:?}", retry);
                }
                Outcome::Impossible => {
                    prop_assert!(ask.cost > limit.size());
                    prop_assert_eq!(&run.state, &before);
                }
            }
        }
    }

    #[test]
    fn remaining_permits_can_be_taken(limit in limits(), start in starts(), steps in steps(40)) {
        let mut run = Run::new(limit, start);
        for step in &steps {
            run.step(step);
            let status = limit.status(&run.state, run.now);
            prop_assert!(status.remaining <= limit.size());
            prop_assert!(limit.peek(&run.state, run.now, Ask::of(status.remaining)).is_admitted());
            if status.remaining < limit.size() {
                prop_assert!(!limit.peek(&run.state, run.now, Ask::of(status.remaining + 1)).is_admitted());
            }
        }
    }

    #[test]
    fn time_running_backwards_grants_nothing(
        limit in limits(), start in starts(), steps in steps(40), back in 0..=u64::MAX, sixteenths in 0..=64_u64,
    ) {
        // A reservation in a log or a counter blocks later callers. Re-dating ends that, which is right.
        let steps: Vec<_> = steps.into_iter().map(Step::without_wait).collect();
        let run = run(limit, start, &steps);
        let now = run.now.as_micros().max(run.latest);
        let horizon = limit.horizon().get();
        for back in [back, horizon.saturating_mul(sixteenths) / 16, 1] {
            let earlier = Timestamp::from_micros(now.saturating_sub(back));
            let then = limit.status(&run.state, earlier).remaining;
            prop_assert!(then <= limit.status(&run.state, Timestamp::from_micros(now)).remaining);
        }
    }

    #[test]
    fn clock_set_back_locks_no_key_out_for_long(
        limit in limits(), steps in steps(40), horizons in 2..=1_000_u64, eighths in 0..=8_u8,
    ) {
        prop_assume!(!counts_denied(&limit));
        let mut run = run(limit, 1_763_000_000_000_000, &steps);
        let back = limit.horizon().get().saturating_mul(horizons);
        let set_back = run.now.as_micros().max(run.latest).saturating_sub(back);
        prop_assume!(set_back > 0);
        let ask = Ask::of(run.cost(eighths, 1).min(limit.size()));
        let mut now = Timestamp::from_micros(set_back);
        // Up to one horizon for the clock, one to recover, one for debts and promises.
        let patience = now.after(Micros::new(limit.horizon().get().saturating_mul(3).saturating_add(2_000_000)));
        loop {
            match limit.decide(&mut run.state, now, ask) {
                Outcome::Admitted { .. } => break,
                Outcome::Denied { retry } => now = now.after(retry),
                Outcome::Impossible => unreachable!(),
            }
            prop_assert!(now <= patience, "still denied three horizons later");
        }
    }

    #[test]
    fn one_request_of_n_and_n_of_one_are_alike(
        limit in limits(), start in starts(), steps in steps(40), n in 2..=40_u64, later in steps(10),
    ) {
        prop_assume!(!matches!(limit, Limit::LeakyBucket(it) if it.mode() == LeakyMode::Queue));
        let whole = run(limit, start, &steps);
        let n = n.min(limit.size());
        let mut one_by_one = Run { limit, state: whole.state.clone(), grants: Vec::new(), ..whole };
        let mut whole = Run { grants: Vec::new(), ..whole };
        if limit.decide(&mut whole.state, whole.now, Ask::of(n)) != Outcome::NOW {
            return Ok(());
        }
        for _ in 0..n {
            prop_assert_eq!(limit.decide(&mut one_by_one.state, one_by_one.now, Ask::of(1)), Outcome::NOW);
        }
        check_alike(&mut whole, &mut one_by_one, &later)?;
    }

    #[test]
    fn an_expired_key_and_a_new_one_decide_alike(
        limit in limits(), start in starts(), steps in steps(40), after in 0..=100_u64, later in steps(10),
    ) {
        let mut expired = run(limit, start, &steps);
        let now = limit.full_at(&expired.state).as_micros().max(expired.now.as_micros()).max(expired.latest) + after;
        expired.now = Timestamp::from_micros(now);
        expired.grants.clear();
        let mut fresh = Run::new(limit, now);
        fresh.latest = expired.latest;
        check_alike(&mut expired, &mut fresh, &later)?;
    }

    #[test]
    fn a_cancelled_reservation_leaves_no_trace(
        limit in limits(), start in starts(), steps in steps(40), used in 0..=8_u64,
        reservations in prop::collection::vec((0..=8_u8, 0..=2_u8, 0..=8_u64), 1..=3), later in steps(20),
    ) {
        let mut untouched = run(limit, start, &steps);
        untouched.grants.clear();
        untouched.written = true;
        let some = limit.status(&untouched.state, untouched.now).remaining * used / 8;
        limit.decide(&mut untouched.state, untouched.now, Ask::of(some));
        let mut cancelled =
            Run { limit, state: untouched.state.clone(), grants: Vec::new(), ..untouched };
        for (eighths, more, _) in &reservations {
            let cost = cancelled.cost(*eighths, *more).clamp(1, limit.size());
            let ask = Ask::of(cost).within(limit.horizon());
            if let Outcome::Admitted { delay } = limit.peek(&cancelled.state, cancelled.now, ask)
                && delay > Micros::ZERO
            {
                limit.decide(&mut cancelled.state, cancelled.now, ask);
                cancelled.grants.push(Grant { start: cancelled.now.after(delay).as_micros(), cost });
            }
        }
        // The latest first: a reservation behind another keeps its place.
        for (Grant { start, cost }, (.., eighths)) in cancelled.grants.drain(..).rev().zip(&reservations) {
            // Starts that have passed meanwhile are no longer cancelled.
            let now = cancelled.now.as_micros();
            let Some(left) = start.checked_sub(now + 1) else { return Ok(()) };
            cancelled.now = Timestamp::from_micros(now + left * eighths / 64);
            limit.refund(&mut cancelled.state, cancelled.now, cost, Timestamp::from_micros(start));
        }
        untouched.now = cancelled.now;
        let statuses = [&cancelled, &untouched].map(|run| limit.status(&run.state, run.now));
        prop_assert_eq!(statuses[0], statuses[1]);
        check_alike(&mut cancelled, &mut untouched, &later)?;
    }

    #[test]
    fn no_panic_at_the_ends_of_the_number_range(
        permits in any::<u64>(), us in any::<u64>(), size in any::<u64>(), parts in any::<u32>(), strict in any::<bool>(),
        acts in prop::collection::vec((ends(), ends(), prop::option::of(ends()), 0..=3_u8), 1..20),
    ) {
        for (size, permits, us, parts) in [(size, permits, us, parts), (size >> 40, permits >> 40, us >> 20, parts >> 24)] {
            let Ok(rate) = Rate::new(permits, Micros::new(us)) else { continue };
            let limits = [
                TokenBucket::new(size, rate).map(Limit::TokenBucket),
                IntervalBucket::new(size, rate).map(Limit::IntervalBucket),
                LeakyBucket::new(size, rate, LeakyMode::Queue).map(Limit::LeakyBucket),
                FixedWindow::new(rate).map(Limit::FixedWindow),
                SlidingLog::new(rate).map(Limit::SlidingLog),
                SlidingCounter::new(rate, parts, strict).map(Limit::SlidingCounter),
            ];
            for limit in limits.into_iter().flatten() {
                let mut state = limit.fresh(Timestamp::from_micros(acts[0].0));
                for (at, cost, wait, act) in &acts {
                    let now = Timestamp::from_micros(*at);
                    match act {
                        0 => limit.refund(&mut state, now, *cost, Timestamp::from_micros(wait.unwrap_or(*cost))),
                        1 => limit.charge(&mut state, now, *cost),
                        _ => { limit.decide(&mut state, now, Ask { cost: *cost, wait: wait.map(Micros::new) }); }
                    }
                    let status = limit.status(&state, now);
                    prop_assert!(status.remaining <= limit.size());
                    limit.full_at(&state);
                }
            }
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

/// Both keys give the same answers from here on.
fn check_alike(left: &mut Run, right: &mut Run, steps: &[Step]) -> Result<(), TestCaseError> {
    for step in steps {
        // Refunds name grants, and the two have different ones.
        if matches!(step.act, Act::Refund { .. }) || step.advance < (0, 0) || step.advance.1 < 0 {
            continue;
        }
        let answers = [&mut *left, &mut *right].map(|run| {
            let outcome = run.step(step).map(|(_, _, outcome)| outcome);
            (outcome, run.limit.status(&run.state, run.now))
        });
        prop_assert_eq!(answers[0], answers[1]);
    }
    Ok(())
}
