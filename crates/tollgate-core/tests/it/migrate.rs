//! What holds when the limit of a key changes, whatever is asked in between: consumed stays consumed, changing back and forth
//! gives no permits away, and no key is locked out.

use proptest::prelude::*;
use tollgate_core::{
    Algorithm, Ask, Consistency, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, LeaseTerms, Limit,
    Micros, Outcome, Rate, Retention, SlidingCounter, SlidingLog, State, Timestamp, TokenBucket,
};

use crate::laws::{
    Grant, check_intervals, config, counts_denied, interval_buckets, leaky_buckets, per_micros, sizes,
    starts, token_buckets,
};

/// Limits that one key may come under: two to four of them.
type Limits = Vec<Limit>;

fn some(one: impl Strategy<Value = Limit>) -> impl Strategy<Value = Limits> {
    prop::collection::vec(one, 2..=4)
}

/// Of one rate or of a few similar ones, so that what one of them gives matters to the others.
fn buckets() -> impl Strategy<Value = Limits> {
    let rates = || {
        prop::sample::select(vec![
            (1, 1),
            (1, 7),
            (3, 7),
            (10, 1_000),
            (7, 1_000),
            (1, 1_000_000),
            (60, 1_000),
        ])
    };
    let similar = || {
        (sizes(), rates(), any::<bool>()).prop_map(|(size, (n, us), interval)| {
            let rate = per_micros(n, us);
            match interval {
                true => Limit::IntervalBucket(IntervalBucket::new(size, rate).unwrap()),
                false => Limit::TokenBucket(TokenBucket::new(size, rate).unwrap()),
            }
        })
    };
    prop_oneof![
        some(token_buckets()),
        some(interval_buckets()),
        some(prop_oneof![token_buckets(), interval_buckets()]),
        some(similar()),
    ]
}

fn leaky() -> impl Strategy<Value = Limits> {
    some(prop_oneof![leaky_buckets(LeakyMode::Meter), leaky_buckets(LeakyMode::Queue)])
}

/// Of one length, or of several.
fn windows(equal: bool) -> impl Strategy<Value = Limits> {
    let lengths = || prop_oneof![1..=100_u64, Just(1_000_000), Just(60_000_000)];
    (lengths(), prop::collection::vec((sizes(), lengths(), any::<bool>()), 2..=4)).prop_map(
        move |(length, limits)| {
            let limit = |(limit, other, denied)| {
                let rate = per_micros(limit, if equal { length } else { other });
                Limit::FixedWindow(FixedWindow::new(rate).unwrap().counting_denied(denied))
            };
            limits.into_iter().map(limit).collect()
        },
    )
}

/// Everything that is not older than this.
fn retention(us: u64) -> Retention {
    Retention { time: Micros::new(us), entries: u64::MAX }
}

/// Of one window or of several, all kept for as long as the longest.
fn logs(equal: bool) -> impl Strategy<Value = Limits> {
    (1..=100_u64, prop::collection::vec((sizes(), 1..=100_u64, any::<bool>()), 2..=4)).prop_map(
        move |(length, limits)| {
            let window = |other| if equal { length } else { other };
            let longest = limits.iter().map(|(_, other, _)| window(*other)).max().unwrap();
            let limit = |(limit, other, denied)| {
                let log = SlidingLog::new(per_micros(limit, window(other))).unwrap();
                Limit::SlidingLog(log.counting_denied(denied).retaining(retention(longest)))
            };
            limits.into_iter().map(limit).collect()
        },
    )
}

/// Of one window, cut alike or each in its own way; or of several windows.
fn counters(strict: bool, equal: bool, alike: bool) -> impl Strategy<Value = Limits> {
    let cuts = || prop::sample::select(vec![1_u32, 2, 3, 4, 6, 12]);
    let lengths = || prop::sample::select(vec![12_u64, 24, 120, 12_000_000]);
    (lengths(), cuts(), prop::collection::vec((sizes(), lengths(), cuts()), 2..=4)).prop_map(
        move |(length, cut, limits)| {
            let limit = |(limit, own_length, own_cut)| {
                let rate = per_micros(limit, if equal { length } else { own_length });
                let cut = if alike { cut } else { own_cut };
                Limit::SlidingCounter(SlidingCounter::new(rate, cut, strict).unwrap())
            };
            limits.into_iter().map(limit).collect()
        },
    )
}

fn all() -> impl Strategy<Value = Limits> {
    prop_oneof![
        buckets(),
        leaky(),
        windows(true),
        windows(false),
        logs(true),
        logs(false),
        counters(true, true, true),
        counters(false, true, true),
        counters(false, false, false),
    ]
}

/// One thing that happens to a key, under one of its limits.
#[derive(Clone, Debug)]
struct Step {
    /// Which limit asks.
    under: u8,
    /// Sixteenths of its horizon, and some microseconds more or less. Negative: the clock steps back.
    advance: (i8, i8),
    act: Act,
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
    },
}

fn steps(waits: bool) -> impl Strategy<Value = Vec<Step>> {
    let advance = prop_oneof![
        5 => (Just(0_i8), 0..=2_i8),
        4 => (0..=4_i8, -2..=2_i8),
        1 => (0..=40_i8, -2..=2_i8),
        1 => (-16..=0_i8, -2..=0_i8),
    ];
    let wait = prop::option::weighted(0.3, 0..=10_u8);
    let decide = (prop_oneof![3 => Just(0_u8), 2 => 0..=8_u8], 0..=2_u8, wait)
        .prop_map(move |(eighths, more, wait)| Act::Decide { eighths, more, wait: wait.filter(|_| waits) });
    let charge = (0..=if waits { 20_u8 } else { 0 }).prop_map(|eighths| Act::Charge { eighths });
    let act = prop_oneof![
        14 => decide,
        2 => (0..=3_u8).prop_map(|back| Act::Refund { back }),
        1 => charge,
    ];
    let under = prop_oneof![2 => Just(0_u8), 3 => 0..=3_u8];
    prop::collection::vec(
        (under, advance, act).prop_map(|(under, advance, act)| Step { under, advance, act }),
        1..60,
    )
}

/// A key, the limit it was last written under, and the clock that is handed in.
struct Run {
    limits: Limits,
    /// Absent until it is first written.
    key: Option<(Limit, State)>,
    now: Timestamp,
    latest: u64,
    grants: Vec<Grant>,
    /// Grants that were made before the limit changed. What flowed under the former limit is not known any more, so a bucket would
    /// take too much back for them.
    settled: usize,
}

impl Run {
    fn new(limits: Limits, start: u64) -> Self {
        Self {
            limits,
            key: None,
            now: Timestamp::from_micros(start),
            latest: 0,
            grants: Vec::new(),
            settled: 0,
        }
    }

    fn limit(&self, under: u8) -> Limit {
        self.limits[usize::from(under) % self.limits.len()]
    }

    /// The state as a limit finds it.
    fn state(&self, limit: &Limit) -> State {
        match &self.key {
            Some((from, state)) => limit.migrate(from, state.clone(), self.now),
            None => limit.fresh(self.now),
        }
    }

    /// Never so far back that it counts as set back under any of the limits.
    fn advance(&mut self, limit: &Limit, (sixteenths, us): (i8, i8)) {
        let to = self.now.as_micros() as i128
            + limit.horizon().get() as i128 * i128::from(sixteenths) / 16
            + i128::from(us);
        let shortest = self.limits.iter().map(|limit| limit.horizon().get()).min().unwrap();
        let earliest = (self.latest as i128 - shortest as i128 / 2).max(0);
        self.now = Timestamp::from_micros(to.max(earliest) as u64);
    }

    /// The instant that a limit takes for now.
    fn time(&self, limit: &Limit, state: &State) -> u64 {
        let seen = match (limit, state.plain()) {
            (Limit::TokenBucket(it), State::Bucket(state)) => state.at * it.tick() as i64,
            (Limit::LeakyBucket(it), State::Bucket(state)) => state.at * it.room().tick() as i64,
            (_, State::Interval(state)) => state.last,
            (_, State::Window(state)) => state.window * limit.horizon().get() as i64,
            (_, State::Log(state)) => state.entries().last().map_or(0, |newest| newest.start - newest.lead),
            (_, State::Counter(state)) => state.seen,
            (_, other) => unreachable!("{other:?}"),
        } as u64;
        let now = self.now.as_micros();
        // One that is dated too far ahead is dated anew.
        if seen > now + limit.horizon().get() { now } else { now.max(seen) }
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let limit = self.limit(step.under);
        self.advance(&limit, step.advance);
        let found = self.state(&limit);
        let mut state = found.clone();
        let mut asked = false;
        if self.key.as_ref().is_none_or(|(under, _)| *under != limit) {
            self.settled = self.grants.len();
        }
        match step.act {
            Act::Decide { eighths, more, wait } => {
                let cost = limit.size() * u64::from(eighths) / 8 + u64::from(more);
                let wait = wait.map(|share| Micros::new(limit.horizon().get() * u64::from(share) / 8));
                let outcome = limit.decide(&mut state, self.now, Ask { cost, wait });
                asked = cost > 0 && cost <= limit.size();
                if let Outcome::Admitted { delay } = outcome
                    && cost > 0
                {
                    let held = self.time(&limit, &found);
                    let start = if delay == Micros::ZERO { held } else { self.now.after(delay).as_micros() };
                    self.grants.push(Grant { start, cost });
                }
            }
            Act::Refund { back } => {
                let index = self.grants.len().checked_sub(1 + usize::from(back));
                if let Some(index) = index.filter(|index| *index >= self.settled) {
                    let grant = self.grants.remove(index);
                    limit.refund(&mut state, self.now, grant.cost, Timestamp::from_micros(grant.start));
                }
            }
            Act::Charge { eighths } => {
                limit.charge(&mut state, self.now, limit.size() * u64::from(eighths) / 8);
            }
        }
        // Even a denial keeps that the limit has changed: what was promised is reckoned from here.
        if asked || state != found {
            self.key = Some((limit, state));
            self.latest = self.latest.max(self.now.as_micros());
        }
        Ok(())
    }

    fn played(limits: Limits, start: u64, steps: &[Step]) -> Result<Self, TestCaseError> {
        let mut run = Self::new(limits, start);
        for step in steps {
            run.step(step)?;
        }
        Ok(run)
    }
}

/// Permits that may flow in `us` microseconds under any of the limits, and those that may come at once.
fn flow_max(limits: &Limits, us: u64) -> u128 {
    let ceil = |permits: u128, per: u128, us: u64| (permits * u128::from(us)).div_ceil(per);
    let greedy = |it: &TokenBucket| {
        let per = u128::from(it.unit()) * u128::from(it.tick());
        match it.tick() {
            1 => u128::from(it.flow()) * u128::from(us) / per,
            tick => ceil(it.flow().into(), per, us + tick),
        }
    };
    let steady = limits.iter().map(|limit| match limit {
        Limit::TokenBucket(it) => greedy(it),
        Limit::LeakyBucket(it) => greedy(it.room()),
        Limit::IntervalBucket(it) => ceil(it.refill().into(), it.period().into(), us),
        _ => unreachable!(),
    });
    let at_once = limits.iter().map(|limit| match limit {
        Limit::IntervalBucket(it) => u128::from(it.refill()),
        _ => 0,
    });
    steady.max().unwrap() + at_once.max().unwrap()
}

fn size_max(limits: &Limits) -> u64 {
    limits.iter().map(Limit::size).max().unwrap()
}

/// Whether what counts under one counts under the other.
fn counts_alike(one: &Limit, other: &Limit) -> bool {
    !matches!(one, Limit::SlidingLog(_)) || one.horizon() == other.horizon()
}

fn counts_and_cuts_alike(one: &Limit, other: &Limit) -> bool {
    match (one, other) {
        (Limit::SlidingCounter(one), Limit::SlidingCounter(other)) => {
            one.horizon() == other.horizon() && one.sub_buckets() == other.sub_buckets()
        }
        _ => false,
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn consumed_permits_stay_consumed(limits in all(), start in starts(), steps in steps(true), to in 0..=3_u8) {
        let mut run = Run::new(limits, start);
        for step in &steps {
            run.step(step)?;
            let (Some((from, state)), limit) = (run.key.clone(), run.limit(to)) else { continue };
            let used = from.size() - from.status(&state, run.now).remaining;
            let carried = limit.migrate(&from, state.clone(), run.now);
            let remaining = limit.status(&carried, run.now).remaining;
            if counts_alike(&limit, &from) {
                prop_assert!(remaining <= limit.size() - used.min(limit.size()), "{used} used, {remaining} left: {carried:?}");
            }
            // And back: nothing is won, and nothing is lost but a fraction of a permit. (What had come back beside something that
            // still lies over pays for that first.)
            let back = from.status(&from.migrate(&limit, carried, run.now), run.now).remaining;
            let before = from.size() - used;
            prop_assert!(back <= before, "{back} after {before}");
            let exact = match &from {
                _ if matches!(state, State::Carried(_)) => false,
                Limit::SlidingCounter(_) => counts_and_cuts_alike(&from, &limit),
                Limit::FixedWindow(_) => run.limits.iter().all(|limit| limit.horizon() == from.horizon()),
                _ => true,
            };
            if exact {
                prop_assert!(back + 1 >= before, "{back} after {before}");
            }
        }
    }

    #[test]
    fn changing_back_and_forth_earns_nothing_from_buckets(
        limits in prop_oneof![buckets(), some(leaky_buckets(LeakyMode::Meter))], start in starts(), steps in steps(false),
    ) {
        let run = Run::played(limits, start, &steps)?;
        let size = u128::from(size_max(&run.limits));
        check_intervals(run.grants, |from, to| size + flow_max(&run.limits, to - from))?;
    }

    /// A faster limit pays sooner for reservations under a slower one, and the reservations stay: their permits come on top at the start.
    #[test]
    fn reservations_of_a_slower_limit_come_on_top_of_a_faster_one_and_nothing_else(
        limits in prop_oneof![buckets(), leaky()], start in starts(), steps in steps(true),
    ) {
        let run = Run::played(limits, start, &steps)?;
        let size = u128::from(size_max(&run.limits));
        check_intervals(run.grants, |from, to| 2 * size + flow_max(&run.limits, to - from))?;
    }

    /// What is lent may be spent at any time of its life, under whichever limit.
    #[test]
    fn changing_back_and_forth_earns_nothing_from_lenders(
        limits in some(token_buckets()), start in starts(), acts in prop::collection::vec((0..=3_usize, 0..=8_u64, 0..=5_u8, 0..=8_u64), 1..80),
    ) {
        let mut run = Run::new(limits, start);
        let mut leases: Vec<(u64, Timestamp, Timestamp)> = Vec::new();
        for (to, advance, act, eighths) in acts {
            let limit = run.limits[to % run.limits.len()];
            let life = limit.horizon().get() / 5;
            run.now = run.now.after(Micros::new(life * advance * advance / 64));
            leases.retain(|(permits, _, ends)| *permits > 0 && *ends > run.now);
            let terms = LeaseTerms::of_any_size(&limit, Consistency::Lease).unwrap().with_life(Micros::new(life.max(1)));
            let mut state = run.state(&limit);
            let share = |permits: u64| (permits * eighths).div_ceil(8);
            match (act, leases.len()) {
                (0 | 1, _) => {
                    let grant = terms.lend(&limit, &mut state, run.now, share(limit.size()), 1);
                    leases.push((grant.permits, grant.at, run.now.after(grant.life)));
                }
                (2, 1..) => {
                    let (permits, at, _) = leases.remove(eighths as usize % leases.len());
                    terms.take_back(&limit, &mut state, run.now, permits, at);
                }
                (3 | 4, 1..) => {
                    let index = eighths as usize % leases.len();
                    let cost = share(leases[index].0);
                    leases[index].0 -= cost;
                    run.grants.push(Grant { start: run.now.as_micros(), cost });
                    continue;
                }
                (..) => {
                    let ask = Ask::of(share(limit.size()));
                    if limit.decide(&mut state, run.now, ask).is_admitted() {
                        run.grants.push(Grant { start: run.now.as_micros(), cost: ask.cost });
                    }
                }
            }
            run.key = Some((limit, state));
        }
        let size = u128::from(size_max(&run.limits));
        check_intervals(run.grants, |from, to| size + flow_max(&run.limits, to - from))?;
    }

    #[test]
    fn changing_back_and_forth_earns_nothing_from_windows(
        limits in windows(true), start in starts(), steps in steps(true),
    ) {
        let run = Run::played(limits, start, &steps)?;
        let mut sums = std::collections::BTreeMap::new();
        for grant in run.grants {
            let sum = sums.entry(grant.start / run.limits[0].horizon().get()).or_insert(0);
            *sum += grant.cost;
            prop_assert!(*sum <= size_max(&run.limits), "{sum} in a window");
        }
    }

    #[test]
    fn changing_back_and_forth_earns_nothing_from_logs(
        limits in prop_oneof![logs(true), logs(false)], start in starts(), steps in steps(true),
    ) {
        let run = Run::played(limits, start, &steps)?;
        let shortest = run.limits.iter().map(|limit| limit.horizon().get()).min().unwrap();
        check_intervals(run.grants, |from, to| {
            if to - from < shortest { size_max(&run.limits).into() } else { u128::MAX }
        })?;
    }

    #[test]
    fn changing_back_and_forth_earns_nothing_from_strict_counters(
        limits in prop_oneof![counters(true, true, true), counters(true, true, false)], start in starts(), steps in steps(true),
    ) {
        let run = Run::played(limits, start, &steps)?;
        let window = run.limits[0].horizon().get();
        check_intervals(run.grants, |from, to| {
            if to - from < window { size_max(&run.limits).into() } else { u128::MAX }
        })?;
    }

    #[test]
    fn changed_limit_locks_no_key_out(
        limits in all(), start in starts(), steps in steps(false), to in 0..=3_u8, eighths in 0..=8_u8,
    ) {
        let mut run = Run::played(limits, start, &steps)?;
        let limit = run.limit(to);
        run.now = Timestamp::from_micros(run.now.as_micros().max(run.latest));
        let mut state = run.state(&limit);
        let ask = Ask::of((limit.size() * u64::from(eighths) / 8).max(1));
        let Outcome::Denied { retry } = limit.decide(&mut state, run.now, ask) else { return Ok(()) };
        // A state of a coarser tick may be dated up to the end of it; a counter forgets a sub-bucket at a time.
        let tick = run.limits.iter().map(|limit| match limit {
            Limit::TokenBucket(it) => it.tick(),
            Limit::LeakyBucket(it) => it.room().tick(),
            Limit::SlidingCounter(it) => it.horizon().get() / u64::from(it.sub_buckets()),
            _ => 0,
        });
        // The end of a longer window can be that of promises for the next one, for all that a window knows.
        let horizons = match &limit {
            Limit::FixedWindow(_) if run.limits.iter().any(|other| other.horizon() != limit.horizon()) => 2,
            _ => 1,
        };
        let patience = horizons * limit.horizon().get() + tick.max().unwrap();
        prop_assert!(retry.get() <= patience, "{retry:?} of {patience}");
        if !counts_denied(&limit) {
            prop_assert!(limit.decide(&mut state, run.now.after(retry), ask).is_admitted());
        }
    }

    #[test]
    fn a_promised_wait_holds_under_a_changed_limit(
        limits in all(), start in starts(), steps in steps(true), to in 0..=3_u8, eighths in 0..=8_u8, wait in prop::option::of(0..=8_u8),
    ) {
        let run = Run::played(limits, start, &steps)?;
        let limit = run.limit(to);
        let mut state = run.state(&limit);
        let wait = wait.map(|share| Micros::new(limit.horizon().get() * u64::from(share) / 8));
        let ask = Ask { cost: (limit.size() * u64::from(eighths) / 8).max(1), wait };
        let Outcome::Denied { retry } = limit.decide(&mut state, run.now, ask) else { return Ok(()) };
        if !counts_denied(&limit) {
            prop_assert!(!limit.peek(&state, run.now.after(Micros::new(retry.get() - 1)), ask).is_admitted());
            prop_assert!(limit.peek(&state, run.now.after(retry), ask).is_admitted());
        }
    }

    #[test]
    fn carried_state_that_is_over_decides_like_a_missing_one(
        limits in all(), start in starts(), steps in steps(true), to in 0..=3_u8,
    ) {
        let mut run = Run::played(limits, start, &steps)?;
        let Some((from, state)) = run.key.clone() else { return Ok(()) };
        let full_at = from.full_at(&state).max(run.now);
        // After 35 years it is forgotten.
        prop_assume!(full_at.since(run.now) < Micros::new(1 << 49));
        run.now = Timestamp::from_micros(full_at.as_micros().max(run.latest));
        prop_assert_eq!(from.status(&state, run.now).remaining, from.size());
        let limit = run.limit(to);
        let carried = run.state(&limit);
        prop_assert_eq!(limit.status(&carried, run.now).remaining, limit.size(), "{:?}", carried);
    }

    #[test]
    fn no_panic_at_the_ends_of_the_number_range(
        ones in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), 0..=60_u32, 0..=60_u32, 1..=10_u32), 2..=4),
        acts in prop::collection::vec((0..=3_usize, any::<u64>(), any::<u64>(), prop::option::of(any::<u64>()), 0..=3_u8, 0..=60_u32), 1..20),
    ) {
        let made: Vec<[Option<Limit>; 5]> = ones.iter().map(|(size, permits, us, less, shorter, parts)| {
            let (size, permits, us) = (size >> less, permits >> less, us >> shorter);
            let Ok(rate) = Rate::new(permits, Micros::new(us)) else { return [None; 5] };
            [
                TokenBucket::new(size, rate).ok().map(Limit::TokenBucket),
                IntervalBucket::new(size, rate).ok().map(Limit::IntervalBucket),
                LeakyBucket::new(size, rate, LeakyMode::Meter).ok().map(Limit::LeakyBucket),
                FixedWindow::new(rate).ok().map(Limit::FixedWindow),
                SlidingCounter::new(rate, *parts, false).ok().map(Limit::SlidingCounter),
            ]
        }).collect();
        for kinds in [&[0_usize, 1][..], &[2], &[3], &[4]] {
            let limits: Limits = made.iter().flat_map(|made| kinds.iter().filter_map(|kind| made[*kind])).collect();
            let Some(first) = limits.first() else { continue };
            let (mut under, mut state) = (*first, first.fresh(Timestamp::default()));
            for (to, at, cost, wait, act, less) in &acts {
                let (limit, now) = (limits[to % limits.len()], Timestamp::from_micros(at >> 11));
                state = limit.migrate(&under, state, now);
                under = limit;
                let cost = cost >> less;
                match act {
                    0 => limit.refund(&mut state, now, cost, Timestamp::from_micros(wait.unwrap_or(cost))),
                    1 => limit.charge(&mut state, now, cost),
                    _ => { limit.decide(&mut state, now, Ask { cost, wait: wait.map(Micros::new) }); }
                }
                prop_assert!(limit.status(&state, now).remaining <= limit.size());
                limit.full_at(&state);
            }
        }
    }

    #[test]
    fn parameters_make_the_limit_whose_states_they_explain(limits in all()) {
        for limit in limits.into_iter().filter(|limit| !matches!(limit, Limit::SlidingLog(_))) {
            let made = limit.with_parameters(&limit.parameters().to_string()).unwrap();
            prop_assert_eq!(made.parameters(), limit.parameters());
            prop_assert_eq!(made.algorithm(), limit.algorithm());
        }
    }
}

fn at(ms: u64) -> Timestamp {
    Timestamp::from_micros(1_763_000_040_000_000 + ms * 1_000)
}

/// What is left under a limit, and how long one more permit takes.
fn left(limit: &Limit, state: &State, now: Timestamp) -> (u64, Micros) {
    (limit.status(state, now).remaining, limit.peek(state, now, Ask::of(1)).retry())
}

#[test]
fn consumed_permits_stay_consumed_when_the_limit_is_lowered_and_raised_again() {
    let bucket = |size| Limit::TokenBucket(TokenBucket::new(size, Rate::per_minute(size)).unwrap());
    let (large, small) = (bucket(1_000), bucket(100));
    let mut state = large.fresh(at(0));
    assert!(large.decide(&mut state, at(0), Ask::of(1_000)).is_admitted());
    let state = small.migrate(&large, state, at(0));
    assert_eq!(left(&small, &state, at(0)), (0, Micros::from_millis(600)));
    // The smaller one is full again after a minute, and has paid ten of the nine hundred after six seconds more.
    assert_eq!(left(&small, &state, at(60_000)), (100, Micros::ZERO));
    let back = large.migrate(&small, state.clone(), at(66_000));
    assert_eq!(left(&large, &back, at(66_000)), (110, Micros::ZERO));
    // Whatever was taken meanwhile is not paid.
    let mut state = state;
    assert!(small.decide(&mut state, at(60_000), Ask::of(100)).is_admitted());
    let back = large.migrate(&small, state, at(66_000));
    assert_eq!(left(&large, &back, at(66_000)), (10, Micros::ZERO));
    assert_eq!(large.full_at(&back), at(66_000 + 59_400), "at the larger rate");
}

#[test]
fn hundred_consumed_permits_count_under_a_limit_of_a_thousand() {
    let bucket = |size| Limit::TokenBucket(TokenBucket::new(size, Rate::per_minute(size)).unwrap());
    let (large, small) = (bucket(1_000), bucket(100));
    let mut state = small.fresh(at(0));
    assert!(small.decide(&mut state, at(0), Ask::of(100)).is_admitted());
    let state = large.migrate(&small, state, at(0));
    assert_eq!(left(&large, &state, at(0)), (900, Micros::ZERO));
    assert!(!matches!(state, State::Carried(_)), "all of it fits");
}

#[test]
fn greedy_and_interval_refill_share_consumed_permits() {
    let greedy = Limit::TokenBucket(TokenBucket::new(10, Rate::per_second(1)).unwrap());
    let interval = Limit::IntervalBucket(IntervalBucket::new(10, Rate::per_minute(10)).unwrap());
    let mut state = greedy.fresh(at(0));
    assert!(greedy.decide(&mut state, at(0), Ask::of(8)).is_admitted());
    let state = interval.migrate(&greedy, state, at(1_500));
    assert_eq!(left(&interval, &state, at(1_500)).0, 3, "three and a half, rounded down");
    let state = greedy.migrate(&interval, state, at(1_500));
    assert_eq!(left(&greedy, &state, at(1_500)).0, 3);
}

#[test]
fn window_that_comes_back_finds_its_counts() {
    let window = |limit| Limit::FixedWindow(FixedWindow::new(Rate::per_minute(limit)).unwrap());
    let (large, small) = (window(1_000), window(100));
    let mut state = large.fresh(at(0));
    assert!(large.decide(&mut state, at(0), Ask::of(950)).is_admitted());
    let state = small.migrate(&large, state, at(1_000));
    assert_eq!(left(&small, &state, at(1_000)), (0, Micros::from_secs(59)));
    let state = large.migrate(&small, state, at(2_000));
    assert_eq!(left(&large, &state, at(2_000)).0, 50);
    let next = small.migrate(&large, state, at(60_000));
    assert_eq!(left(&small, &next, at(60_000)).0, 100, "the next window is another");
}

#[test]
fn counts_of_a_counter_are_history() {
    let counter =
        |limit| Limit::SlidingCounter(SlidingCounter::new(Rate::per_minute(limit), 1, false).unwrap());
    let (large, small) = (counter(1_000), counter(100));
    let mut state = large.fresh(at(0));
    assert!(large.decide(&mut state, at(0), Ask::of(950)).is_admitted());
    let state = small.migrate(&large, state, at(0));
    // Half a minute into the next window half of them count, which is still too many; nine tenths of it must pass for 95 to be left.
    assert_eq!(left(&small, &state, at(90_000)).0, 0);
    assert_eq!(left(&small, &state, at(114_000)).0, 5);
    let state = large.migrate(&small, state, at(90_000));
    assert_eq!(left(&large, &state, at(90_000)).0, 525);
}

#[test]
fn a_longer_window_finds_the_entries_that_a_shorter_one_has_retained() {
    let log = |limit, secs| {
        let rate = Rate::new(limit, Micros::from_secs(secs)).unwrap();
        Limit::SlidingLog(SlidingLog::new(rate).unwrap().retaining(retention(60_000_000)))
    };
    let (minute, second) = (log(100, 60), log(10, 1));
    let mut state = minute.fresh(at(0));
    assert!(minute.decide(&mut state, at(0), Ask::of(95)).is_admitted());
    let mut state = second.migrate(&minute, state, at(2_000));
    assert!(second.decide(&mut state, at(2_000), Ask::of(2)).is_admitted(), "nothing counts any more");
    let state = minute.migrate(&second, state, at(3_000));
    assert_eq!(left(&minute, &state, at(3_000)).0, 3);
}

#[test]
fn another_algorithm_starts_afresh() {
    let bucket = Limit::TokenBucket(TokenBucket::new(10, Rate::per_second(1)).unwrap());
    let window = Limit::FixedWindow(FixedWindow::new(Rate::per_minute(10)).unwrap());
    let mut state = bucket.fresh(at(0));
    assert!(bucket.decide(&mut state, at(0), Ask::of(8)).is_admitted());
    assert_eq!(left(&window, &window.migrate(&bucket, state, at(0)), at(0)).0, 10);
}

#[test]
fn leases_stay_out_under_another_limit() {
    let bucket = |size| Limit::TokenBucket(TokenBucket::new(size, Rate::per_second(100)).unwrap());
    let (large, small) = (bucket(1_000), bucket(300));
    let terms = LeaseTerms::new(&large, Consistency::Lease).unwrap();
    let mut state = large.fresh(at(0));
    assert!(large.decide(&mut state, at(0), Ask::of(100)).is_admitted());
    assert_eq!(terms.lend(&large, &mut state, at(0), 250, 1).permits, 250);
    // Of the three hundred, 250 are out and 50 of the hundred are used; the other 50 lie over.
    let carried = small.migrate(&large, state, at(0));
    assert_eq!(left(&small, &carried, at(0)).0, 0);
    let back = large.migrate(&small, carried, at(0));
    assert_eq!(left(&large, &back, at(0)).0, 650, "nothing is counted twice");
}
