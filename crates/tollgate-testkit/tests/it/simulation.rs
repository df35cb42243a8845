//! The simulation: the invariants hold, a seed can be replayed, and the judge sees flawed leases.

use tollgate_testkit::long_or;
use tollgate_testkit::simulation::{Flaw, play, play_flawed, tell};

#[test]
fn invariants_hold_under_all_faults() {
    for seed in 0..long_or(10_000, 300) {
        let report = play(seed);
        assert!(report.violations.is_empty(), "seed {seed}: {:?}", report.violations.first());
        assert!(report.requests >= 100, "seed {seed} has {} requests", report.requests);
    }
}

#[test]
fn same_seed_gives_the_same_run() {
    for seed in 0..30 {
        let (first, again) = (play(seed), tell(seed));
        assert_eq!(first.digest, again.digest, "seed {seed}");
        assert_eq!((first.events, first.lent), (again.events, again.lent), "seed {seed}");
        assert!(first.timeline.is_empty() && !again.timeline.is_empty());
    }
    assert_ne!(play(1).digest, play(2).digest);
}

/// Plays the first seeds with a flaw. In one of them, the judge must see it.
fn is_seen(flaw: Flaw, seeds: u64) {
    let is_seen = |seed| {
        let report = play_flawed(seed, flaw);
        report.violations.iter().any(|violation| violation.invariant == flaw.violates())
    };
    assert!((0..seeds).any(is_seen), "{flaw:?} is not seen in {seeds} seeds");
}

#[test]
fn judge_sees_leases_that_are_not_counted_as_out() {
    is_seen(Flaw::ObviousLease, 20);
}

#[test]
fn judge_sees_an_epoch_whose_end_is_not_charged() {
    is_seen(Flaw::UnchargedEpochs, 100);
}

#[test]
fn judge_sees_a_lease_that_is_timed_from_the_reply() {
    is_seen(Flaw::LifeFromReceipt, 20);
}

#[test]
fn judge_sees_a_return_that_counts_twice() {
    is_seen(Flaw::UnnumberedReturns, 20);
}

#[test]
fn judge_sees_a_lease_that_is_spent_after_its_end() {
    is_seen(Flaw::SpendAfterEnd, 20);
}
