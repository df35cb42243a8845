//! Leases: whatever is granted, spent, given back or left to expire, anywhere and at any time, the bucket's own bound holds.

use proptest::prelude::*;
use tollgate_core::algorithm::{LeaseBucket, LeaseState};
use tollgate_core::{
    Algorithm, Ask, Consistency, FixedWindow, Grant, IntervalBucket, LeakyBucket, LeakyMode, LeaseTerms,
    Limit, Micros, Outcome, Rate, SlidingCounter, Timestamp, TokenBucket,
};

const BEGIN_US: u64 = 1_700_000_000_000_000;

/// What happens next, after some time.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A node asks for permits ahead of use. The field is the time that its call takes.
    Lease { wanted: u64, under_way_us: u64 },
    /// A node takes permits from a lease that it holds, if it still may.
    Spend { lease: usize, permits: u64 },
    /// A node gives back what it has not spent of a lease.
    GiveBack { lease: usize },
    /// A caller asks without a lease, and may accept a wait.
    Take { permits: u64, wait_us: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Held {
    grant: Grant,
    left: u64,
    /// From when it was asked for: the node knows no other instant.
    ends: Timestamp,
}

/// Permits that pass at an instant.
type Passed = (Timestamp, u64);

/// Whether somewhere more passed than the burst and what flowed meanwhile: the O(n) checker over all intervals.
fn excess(bucket: &TokenBucket, rate: Rate, passed: &[Passed]) -> i128 {
    let per = i128::from(rate.per().get());
    let (mut best, mut worst, mut total) = (None, i128::MIN, 0_i128);
    for (at, permits) in passed {
        let flowed = i128::from(rate.permits()) * i128::from(at.as_micros());
        let headroom = flowed - total * per;
        let beginning = *best.insert(best.map_or(headroom, |best: i128| best.max(headroom)));
        total += i128::from(*permits);
        worst = worst.max(total * per - flowed + beginning - i128::from(bucket.size()) * per);
    }
    worst
}

fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
    let event = prop_oneof![
        3 => (1..20_u64, 0..300_u64).prop_map(|(wanted, under_way_us)| Event::Lease { wanted, under_way_us }),
        4 => (any::<usize>(), 1..8_u64).prop_map(|(lease, permits)| Event::Spend { lease, permits }),
        1 => any::<usize>().prop_map(|lease| Event::GiveBack { lease }),
        2 => (1..8_u64, prop_oneof![Just(0), 0..2_000_u64]).prop_map(|(permits, wait_us)| Event::Take { permits, wait_us }),
    ];
    prop::collection::vec((prop_oneof![3 => 0..200_u64, 1 => 0..3_000_u64], event), 1..120)
}

fn buckets() -> impl Strategy<Value = (TokenBucket, Rate, Micros)> {
    let rates = (1..=12_u64, prop::sample::select(vec![7_u64, 100, 1_000]));
    (1..=20_u64, rates, 1..=1_500_u64).prop_filter_map("exact", |(size, (permits, us), life)| {
        let rate = Rate::new(permits, Micros::new(us)).ok()?;
        Some((TokenBucket::new(size, rate).ok()?, rate, Micros::new(life)))
    })
}

/// Plays a trace and returns the admissions. Before each event the store's clock is set back by some microseconds.
fn play(
    bucket: &LeaseBucket,
    life: Micros,
    events: &[(u64, Event)],
    back_us: impl Fn(usize) -> u64,
) -> Vec<Passed> {
    let mut now = Timestamp::from_micros(BEGIN_US);
    let mut state = bucket.fresh(now);
    let (mut held, mut passed): (Vec<Held>, Vec<Passed>) = (Vec::new(), Vec::new());
    let mut shift = 0;
    for (number, (pause, event)) in events.iter().enumerate() {
        now = now.after(Micros::new(*pause));
        // The store's clock may be set back; that of the nodes, by which leases end, goes on.
        shift += back_us(number);
        let store = Timestamp::from_micros(now.as_micros() - shift);
        match *event {
            Event::Lease { wanted, under_way_us } => {
                let grant = bucket.lend(&mut state, store, wanted, 1, life);
                let asked = Timestamp::from_micros(now.as_micros() - under_way_us);
                held.push(Held { grant, left: grant.permits, ends: asked.after(grant.life) });
            }
            Event::Spend { lease, permits } => {
                let count = held.len();
                if let Some(lease) = held.get_mut(lease % count.max(1)) {
                    let spent = if now < lease.ends { permits.min(lease.left) } else { 0 };
                    lease.left -= spent;
                    passed.push((now, spent));
                }
            }
            Event::GiveBack { lease } => {
                let count = held.len();
                // A node knows when its leases end, and gives nothing back after that.
                if let Some(lease) = held.get_mut(lease % count.max(1)).filter(|lease| now < lease.ends) {
                    bucket.take_back(&mut state, store, lease.left, lease.grant.at);
                    lease.left = 0;
                }
            }
            Event::Take { permits, wait_us } => {
                let ask = Ask::of(permits).within(Micros::new(wait_us));
                if let Outcome::Admitted { delay } = bucket.decide(&mut state, store, ask) {
                    passed.push((now.after(delay), permits));
                }
            }
        }
        // What is left here and what may still be spent elsewhere fit into the bucket together.
        let out: u64 = held.iter().filter(|lease| now < lease.ends).map(|lease| lease.left).sum();
        let left = bucket.status(&state, store).remaining;
        assert!(left + out <= bucket.0.size(), "{left} left and {out} out");
    }
    // Those who wait pass later than those who come after them.
    passed.sort_by_key(|(at, _)| *at);
    passed
}

/// What an event asks of the store.
fn ask(lease: &LeaseBucket, life: Micros, state: &mut LeaseState, now: Timestamp, event: Event) {
    match event {
        Event::Lease { wanted, .. } => {
            lease.lend(state, now, wanted, 1, life);
        }
        Event::Take { permits, wait_us } => {
            lease.decide(state, now, Ask::of(permits).within(Micros::new(wait_us)));
        }
        Event::Spend { .. } | Event::GiveBack { .. } => {}
    }
}

proptest! {
    #![proptest_config(crate::laws::config())]

    #[test]
    fn leases_never_exceed_the_limit((bucket, rate, life) in buckets(), events in events()) {
        let lease = LeaseBucket(bucket);
        let passed = play(&lease, life, &events, |_| 0);
        prop_assert!(excess(&bucket, rate, &passed) <= 0, "{passed:?}");
    }

    #[test]
    fn a_clock_that_is_set_back_adds_nothing((bucket, rate, life) in buckets(), events in events(), at in 0..120_usize, by in 1..10_000_u64) {
        let lease = LeaseBucket(bucket);
        let passed = play(&lease, life, &events, |number| if number == at { by } else { 0 });
        prop_assert!(excess(&bucket, rate, &passed) <= 0, "{passed:?}");
    }

    #[test]
    fn lease_bucket_without_leases_decides_like_the_bucket((bucket, ..) in buckets(), asks in prop::collection::vec((0..2_000_u64, 0..25_u64, prop::option::of(0..3_000_u64)), 1..50)) {
        let lease = LeaseBucket(bucket);
        let mut now = Timestamp::from_micros(BEGIN_US);
        let (mut plain, mut lending) = (bucket.fresh(now), lease.fresh(now));
        for (pause, cost, wait) in asks {
            now = now.after(Micros::new(pause));
            let ask = Ask { cost, wait: wait.map(Micros::new) };
            let expected = bucket.decide(&mut plain, now, ask);
            prop_assert_eq!(lease.decide(&mut lending, now, ask), expected);
            prop_assert_eq!(lease.status(&lending, now), bucket.status(&plain, now));
        }
    }

    #[test]
    fn a_promised_wait_is_exact((bucket, _, life) in buckets(), events in events(), cost in 1..20_u64) {
        let lease = LeaseBucket(bucket);
        let mut now = Timestamp::from_micros(BEGIN_US);
        let mut state = lease.fresh(now);
        for (pause, event) in events {
            now = now.after(Micros::new(pause));
            ask(&lease, life, &mut state, now, event);
            if let Outcome::Denied { retry } = lease.peek(&state, now, Ask::of(cost)) {
                let at = now.after(retry);
                let before = Timestamp::from_micros(at.as_micros() - 1);
                prop_assert!(lease.peek(&state, at, Ask::of(cost)).is_admitted(), "at its time");
                prop_assert!(!lease.peek(&state, before, Ask::of(cost)).is_admitted(), "before its time");
            }
        }
    }

    #[test]
    fn a_state_that_has_run_out_and_a_fresh_one_decide_alike((bucket, _, life) in buckets(), events in events(), wanted in 1..25_u64) {
        let lease = LeaseBucket(bucket);
        let mut now = Timestamp::from_micros(BEGIN_US);
        let mut state = lease.fresh(now);
        for (pause, event) in events {
            now = now.after(Micros::new(pause));
            ask(&lease, life, &mut state, now, event);
        }
        let then = now.max(lease.full_at(&state));
        let mut fresh = lease.fresh(then);
        prop_assert_eq!(lease.lend(&mut state, then, wanted, 1, life), lease.lend(&mut fresh, then, wanted, 1, life));
        prop_assert_eq!(lease.status(&state, then), lease.status(&fresh, then));
    }
}

/// The obvious way: a lease is an ordinary debit, and the bucket refills as if it had been spent. All nodes lease, wait until the
/// bucket is full again, and spend everything.
#[test]
fn leases_that_are_not_counted_as_out_would_exceed_the_limit() {
    let rate = Rate::per_second(10);
    let bucket = TokenBucket::new(10, rate).unwrap();
    let start = Timestamp::from_micros(BEGIN_US);
    let mut state = bucket.fresh(start);
    assert!(
        bucket.decide(&mut state, start, Ask::of(10)).is_admitted(),
        "leased, to be spent within a second"
    );
    let later = start.after(Micros::new(999_999));
    assert!(bucket.decide(&mut state, later, Ask::of(9)).is_admitted(), "refilled meanwhile");
    let obvious = excess(&bucket, rate, &[(later, 10), (later, 9)]);
    assert_eq!(obvious, 9_000_000, "nine permits too many");

    let (lease, life) = (LeaseBucket(bucket), Micros::from_secs(1));
    let mut state = lease.fresh(start);
    assert_eq!(lease.lend(&mut state, start, 10, 1, life).permits, 10);
    assert_eq!(lease.lend(&mut state, later, 9, 1, life).permits, 0, "the room is taken");
}

/// A lease of ordinary debits is given back, but the store hangs and hears of it when as much has flowed: both together would be a
/// second bucketful.
#[test]
fn permits_that_flowed_back_for_a_lease_are_not_returned_again() {
    let limit = Limit::TokenBucket(TokenBucket::new(100, Rate::per_second(100)).unwrap());
    let terms = LeaseTerms::of_any_size(&limit, Consistency::LeaseFast).unwrap();
    let start = Timestamp::from_micros(BEGIN_US);
    let mut state = limit.fresh(start);
    let grant = terms.lend(&limit, &mut state, start, 100, 1);
    let mut in_time = state.clone();
    terms.take_back(&limit, &mut in_time, start.after(Micros::from_millis(10)), 100, grant.at);
    assert_eq!(limit.status(&in_time, start.after(Micros::from_millis(10))).remaining, 100, "all of it");

    let later = start.after(Micros::from_secs(1));
    assert!(limit.decide(&mut state, later, Ask::of(100)).is_admitted(), "flowed back");
    terms.take_back(&limit, &mut state, later, 100, grant.at);
    assert_eq!(limit.status(&state, later).remaining, 0, "not a second time");
}

/// Two leases, each borrowed just before the other is given back: a node that goes on like this holds no more beyond a full bucket
/// than what flows in one life.
#[test]
fn leases_that_are_swapped_for_new_ones_do_not_pile_up() {
    let limit = Limit::TokenBucket(TokenBucket::new(1_000, Rate::per_second(1_000)).unwrap());
    let terms = LeaseTerms::of_any_size(&limit, Consistency::LeaseFast).unwrap();
    let mut now = Timestamp::from_micros(BEGIN_US);
    let mut state = limit.fresh(now);
    let mut held = terms.lend(&limit, &mut state, now, 400, 1);
    for _ in 0..50 {
        now = now.after(Micros::from_millis(9));
        let next = terms.lend(&limit, &mut state, now, 400, 1);
        terms.take_back(&limit, &mut state, now, held.permits, held.at);
        held = next;
        let beyond = (limit.status(&state, now).remaining + held.permits).saturating_sub(1_000);
        assert!(beyond <= terms.overshoot(&limit, 100), "{beyond} permits");
    }
}

/// What is left and what is out were within the larger limit, not within the smaller one.
#[test]
fn return_under_a_smaller_limit_stops_at_the_capacity() {
    let rate = Rate::per_second(10);
    let (large, small) = (TokenBucket::new(100, rate).unwrap(), TokenBucket::new(10, rate).unwrap());
    let (now, life) = (Timestamp::from_micros(BEGIN_US), Micros::from_secs(1));
    let mut state = LeaseBucket(large).fresh(now);
    let grant = LeaseBucket(large).lend(&mut state, now, 50, 1, life);
    let lease = LeaseBucket(small);
    // Ten are left and ten are out, as a store reads them under the smaller limit.
    let mut state = LeaseState::new(&small, small.fresh(now), life, grant.at, [50, 0]);
    lease.take_back(&mut state, now, 50, grant.at);
    assert_eq!(lease.status(&state, now).remaining, 10);
    assert_eq!(lease.full_at(&state), now);
}

/// A failover may have lost any key, also one that is not there any more: nothing comes before it would if all had been taken.
#[test]
fn missing_key_is_distrusted_after_a_failover() {
    let (rate, since) = (Rate::per_second(10), Timestamp::from_micros(BEGIN_US));
    let limits = [
        Limit::TokenBucket(TokenBucket::new(10, rate).unwrap()),
        Limit::IntervalBucket(IntervalBucket::new(10, rate).unwrap()),
        Limit::LeakyBucket(LeakyBucket::new(10, rate, LeakyMode::Meter).unwrap()),
        Limit::FixedWindow(FixedWindow::new(rate).unwrap()),
        Limit::SlidingCounter(SlidingCounter::new(rate, 10, false).unwrap()),
        Limit::SlidingCounter(SlidingCounter::new(rate, 2, true).unwrap()),
    ];
    for limit in limits {
        for ms in [0, 50, 99] {
            let now = since.after(Micros::from_millis(ms));
            let mut state = limit.fresh(since);
            limit.distrust(&mut state, now, since, Micros::ZERO);
            assert_eq!(limit.status(&state, now).remaining, 0, "{limit:?} after {ms} ms");
        }
    }
}

/// A guard that stays on must not take the time that has passed since for a clock that was set back.
#[test]
fn a_counter_forgets_nothing_long_after_a_failover() {
    let since = Timestamp::from_micros(BEGIN_US);
    let limit = Limit::SlidingCounter(SlidingCounter::new(Rate::per_second(10), 10, false).unwrap());
    let now = since.after(Micros::from_secs(5));
    let mut state = limit.fresh(now);
    assert!(limit.decide(&mut state, now, Ask::of(7)).is_admitted());
    limit.distrust(&mut state, now, since, Micros::ZERO);
    assert_eq!(limit.status(&state, now).remaining, 3);
}
