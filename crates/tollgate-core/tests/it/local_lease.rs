//! What a node does with what it holds: when it asks, for how much, what it spends, and what it gives back.

use tollgate_core::lease::{LocalLease, Move};
use tollgate_core::{Consistency, Grant, LeaseTerms, Limit, Micros, Rate, Timestamp, TokenBucket};

/// 1,000 a second and as much at once: a lease lasts 200 ms.
fn terms() -> LeaseTerms {
    let limit = Limit::TokenBucket(TokenBucket::new(1_000, Rate::per_second(1_000)).unwrap());
    LeaseTerms::new(&limit, Consistency::Lease).unwrap()
}

const PARTS: Option<u64> = Some(2);

fn at(ms: u64) -> Timestamp {
    Timestamp::from_micros(1_700_000_000_000_000 + ms * 1_000)
}

fn grant(permits: u64, ms: u64) -> Option<Grant> {
    Some(Grant { permits, at: at(ms), life: terms().life() })
}

/// A key that is asked about once a millisecond until it is worth a lease: when, and for how much.
fn ask_until_worth_it(lease: &mut LocalLease, terms: &LeaseTerms) -> (u64, u64) {
    for ms in 0.. {
        match lease.decide(at(ms), 1, false, terms, PARTS, None) {
            Move::Ask { ahead: 0 } => {}
            Move::Ask { ahead } => return (ms, ahead),
            other => panic!("nothing is held: {other:?}"),
        }
    }
    unreachable!()
}

#[test]
fn key_with_rare_requests_is_not_worth_a_lease() {
    let mut lease = LocalLease::default();
    for second in 0..20 {
        assert_eq!(lease.decide(at(second * 1_000), 1, false, &terms(), PARTS, None), Move::Ask { ahead: 0 });
    }
}

#[test]
fn hot_key_is_worth_a_lease_and_only_one_call_asks() {
    let (mut lease, terms) = (LocalLease::default(), terms());
    let (ms, ahead) = ask_until_worth_it(&mut lease, &terms);
    assert!(ms < 20 && ahead >= 3, "{ahead} after {ms} ms");
    // The others are decided by the state meanwhile.
    assert_eq!(lease.decide(at(ms), 1, false, &terms, PARTS, None), Move::Ask { ahead: 0 });
    assert_eq!(lease.answered(at(ms + 1), at(ms), ahead, grant(100, ms), None, &terms), 0);
    assert_eq!(lease.left(at(ms + 1)), 100);
    assert_eq!(lease.decide(at(ms + 1), 40, false, &terms, PARTS, None), Move::Spend { fetch: 0 });
    assert_eq!(lease.left(at(ms + 1)), 60);
    assert!(
        matches!(lease.decide(at(ms + 1), 61, false, &terms, PARTS, None), Move::Ask { .. }),
        "not in part"
    );
    assert_eq!(lease.left(at(ms + 1)), 60);
}

#[test]
fn more_is_fetched_before_it_runs_out_and_never_beyond_the_ceiling() {
    let (mut lease, terms) = (LocalLease::default(), terms().with_ceiling(150));
    for ms in 0..250 {
        lease.decide(at(ms), 10, false, &terms, None, None);
    }
    let Move::Ask { ahead } = lease.decide(at(250), 10, false, &terms, PARTS, None) else {
        panic!("nothing is held")
    };
    assert_eq!(ahead, 150, "ten a millisecond would be 1,000 in half a lease time");
    lease.answered(at(250), at(250), ahead, grant(150, 250), None, &terms);
    let mut fetched = None;
    for ms in 250..270 {
        match lease.decide(at(ms), 10, false, &terms, PARTS, None) {
            Move::Spend { fetch: 0 } => {}
            Move::Spend { fetch } => {
                fetched = Some((fetch, lease.left(at(ms))));
                break;
            }
            other => panic!("{other:?} at {ms} ms"),
        }
    }
    let (fetch, left) = fetched.expect("more is fetched");
    assert!(left > 0 && fetch + left <= 150, "{fetch} with {left} left");
}

#[test]
fn a_lease_ends_on_time_counted_from_when_it_was_asked_for() {
    let (mut lease, terms) = (LocalLease::default(), terms());
    // Asked for at 0, heard of at 150 ms.
    lease.answered(at(150), at(0), 10, grant(10, 0), None, &terms);
    assert_eq!((lease.left(at(199)), lease.left(at(200))), (10, 0));
    assert_eq!(lease.drop_ended(at(200)), 10, "they have expired");
    // Heard of too late, it is none.
    assert_eq!(lease.answered(at(500), at(300), 10, grant(10, 300), None, &terms), 10);
    assert_eq!(lease.left(at(500)), 0);
}

#[test]
fn denial_is_cached_until_its_retry_and_no_longer_than_the_maximum() {
    let (mut lease, terms) = (LocalLease::default(), terms());
    let mut denied = |retry_ms: u64, ms: u64, cost: u64| {
        lease.answered(at(0), at(0), 0, None, Some((5, Micros::from_millis(retry_ms))), &terms);
        lease.decide(at(ms), cost, false, &terms, PARTS, None)
    };
    assert_eq!(denied(20, 19, 5), Move::Deny { retry: Micros::from_millis(1) });
    assert!(matches!(denied(20, 20, 5), Move::Ask { .. }));
    assert!(matches!(denied(20, 10, 4), Move::Ask { .. }), "less may be had");
    assert_eq!(denied(1_000, 79, 5), Move::Deny { retry: Micros::from_millis(921) });
    assert!(matches!(denied(1_000, 80, 5), Move::Ask { .. }), "others may have given back");
}

#[test]
fn state_with_too_few_permits_is_not_asked_for_a_moment() {
    let (mut lease, terms) = (LocalLease::default(), terms());
    let (ms, ahead) = ask_until_worth_it(&mut lease, &terms);
    lease.answered(at(ms), at(ms), ahead, grant(0, ms), Some((1, Micros::from_millis(1))), &terms);
    for later in 0..50 {
        let Move::Deny { retry } = lease.decide(at(ms + later), 1, false, &terms, PARTS, None) else {
            panic!("asked again after {later} ms");
        };
        assert_eq!(
            retry,
            Micros::from_millis(50 - later),
            "the promised retry is when the state is asked again"
        );
    }
    assert!(matches!(lease.decide(at(ms + 50), 1, false, &terms, PARTS, None), Move::Ask { ahead: 1.. }));
    // Who is ready to wait is not denied here.
    lease.answered(at(ms), at(ms), ahead, None, Some((1, Micros::from_millis(1))), &terms);
    assert!(matches!(lease.decide(at(ms), 1, true, &terms, PARTS, None), Move::Ask { .. }));
}

#[test]
fn idle_leases_are_given_back_once() {
    let (mut lease, terms) = (LocalLease::default(), terms());
    lease.decide(at(0), 1, false, &terms, PARTS, None);
    lease.answered(at(0), at(0), 10, grant(10, 0), None, &terms);
    assert!(!lease.is_idle(at(100), &terms));
    assert!(lease.is_idle(at(101), &terms));
    let given_up = lease.give_up(at(101));
    assert_eq!(given_up.iter().map(|lease| lease.left).sum::<u64>(), 10);
    assert_eq!((lease.left(at(101)), lease.give_up(at(101)).len()), (0, 0));
    // What has ended is not given back.
    lease.answered(at(101), at(101), 10, grant(10, 101), None, &terms);
    assert!(lease.give_up(at(301)).is_empty());
}
