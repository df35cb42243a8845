//! The simulation: what must hold does, the same seed is the same, and whoever does it wrong is seen.

use tollgate_testkit::long_or;
use tollgate_testkit::simulation::{Flaw, play, play_flawed, tell};

#[test]
fn whatever_goes_wrong_the_invariants_hold() {
    for seed in 0..long_or(10_000, 300) {
        let report = play(seed);
        assert!(report.violations.is_empty(), "seed {seed}: {:?}", report.violations.first());
        assert!(report.requests >= 100, "seed {seed} has {} requests", report.requests);
    }
}

#[test]
fn the_same_seed_is_the_same_again() {
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
fn the_obvious_lease_is_seen() {
    is_seen(Flaw::ObviousLease, 20);
}

#[test]
fn an_epoch_whose_end_is_not_charged_is_seen() {
    is_seen(Flaw::UnchargedEpochs, 100);
}

#[test]
fn a_life_that_begins_with_the_reply_is_seen() {
    is_seen(Flaw::LifeFromReceipt, 20);
}

#[test]
fn a_return_that_counts_twice_is_seen() {
    is_seen(Flaw::UnnumberedReturns, 20);
}

#[test]
fn a_lease_that_goes_on_after_its_end_is_seen() {
    is_seen(Flaw::SpendAfterEnd, 20);
}
