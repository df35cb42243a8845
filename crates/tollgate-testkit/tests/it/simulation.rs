//! The simulation: what must hold does, the same seed is the same, and whoever does it wrong is seen.

use tollgate_testkit::long_or;
use tollgate_testkit::simulation::{Flaw, Invariant, play, play_flawed, tell};

#[test]
fn whatever_goes_wrong_the_invariants_hold() {
    for seed in 0..long_or(10_000, 300) {
        let report = play(seed);
        assert!(report.violations.is_empty(), "seed {seed}: {:?}", report.violations.first());
        assert!(report.events > 0, "seed {seed} does nothing");
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

/// By which invariant a flaw is seen, in any of the first seeds.
fn is_seen(flaw: Flaw, invariants: &[Invariant], seeds: u64) {
    let seen = (0..seeds)
        .flat_map(|seed| play_flawed(seed, flaw).violations)
        .any(|violation| invariants.contains(&violation.invariant));
    assert!(seen, "{flaw:?} is not seen in {seeds} seeds");
}

#[test]
fn the_obvious_lease_is_seen() {
    is_seen(Flaw::ObviousLease, &[Invariant::LeaseFast], 50);
}

#[test]
fn an_epoch_whose_end_is_not_charged_is_seen() {
    is_seen(Flaw::UnchargedEpochs, &[Invariant::Lease], 100);
}

#[test]
fn a_life_that_begins_with_the_reply_is_seen() {
    is_seen(Flaw::LifeFromReceipt, &[Invariant::LeaseEnds], 20);
}

#[test]
fn a_return_that_counts_twice_is_seen() {
    is_seen(Flaw::UnnumberedReturns, &[Invariant::ReturnOnce], 20);
}

#[test]
fn a_lease_that_goes_on_after_its_end_is_seen() {
    is_seen(Flaw::SpendAfterEnd, &[Invariant::LeaseEnds], 20);
}
