//! What counts as too much, in any interval.

use tollgate_testkit::{Bound, Excess, Random};

/// Ten at once and one every millisecond.
const BOUND: Bound = Bound { burst: 10, permits: 1, period_us: 1_000 };

#[test]
fn worked_numbers() {
    let cases: [(&[(u64, u64)], Excess); 7] = [
        (&[], excess(0, 0, 0, 0)),
        // Nothing but the burst, in one instant.
        (&[(5, 10)], excess(0, 5, 5, 10)),
        (&[(5, 6), (5, 6)], excess(2, 5, 5, 12)),
        // Every millisecond gives one back, to the microsecond.
        (&[(0, 10), (1_000, 1)], excess(0, 0, 0, 10)),
        (&[(0, 10), (999, 1)], excess(1, 0, 999, 11)),
        // The order in which processes report does not matter.
        (&[(1_500, 4), (0, 10)], excess(3, 0, 1_500, 14)),
        // What was left unused long ago does not count.
        (&[(0, 1), (1_000_000, 9), (1_000_100, 4)], excess(3, 1_000_000, 1_000_100, 13)),
    ];
    for (admissions, expected) in cases {
        assert_eq!(BOUND.excess(&mut admissions.to_vec()), expected, "{admissions:?}");
    }
}

#[test]
fn numbers_of_real_clocks_do_not_overflow() {
    let now_us = 1 << 53;
    let bound = Bound { burst: 1_000_000, permits: 1_000_000_000, period_us: 86_400_000_000 };
    let excess = bound.excess(&mut [(now_us, 1_000_000), (now_us + 1, 1)]);
    assert_eq!((excess.permits, excess.admitted), (1, 1_000_001));
}

#[test]
fn one_pass_finds_what_all_pairs_find() {
    for seed in 0..2_000 {
        let mut random = Random::new(seed);
        let bound =
            Bound { burst: random.below(20), permits: 1 + random.below(9), period_us: 1 + random.below(50) };
        let span_us = 1 + random.below(400);
        let mut admissions: Vec<_> =
            (0..random.below(40)).map(|_| (random.below(span_us), random.below(6))).collect();
        let excess = bound.excess(&mut admissions);
        assert_eq!(excess.permits, by_all_pairs(bound, &admissions), "seed {seed}");
        // The interval shows it.
        let within = |at_us: u64| (excess.from_us..=excess.to_us).contains(&at_us);
        let shown: u64 =
            admissions.iter().filter(|(at_us, _)| within(*at_us)).map(|(_, permits)| permits).sum();
        if excess.permits > 0 {
            assert_eq!(excess.admitted, shown, "seed {seed}");
            let allowed = bound.burst * bound.period_us + bound.permits * (excess.to_us - excess.from_us);
            assert_eq!(
                (shown * bound.period_us - allowed).div_ceil(bound.period_us),
                excess.permits,
                "seed {seed}"
            );
        }
    }
}

fn by_all_pairs(bound: Bound, admissions: &[(u64, u64)]) -> u64 {
    let mut most = 0;
    for (from_us, _) in admissions {
        for (to_us, _) in admissions.iter().filter(|(to_us, _)| to_us >= from_us) {
            let inside = admissions.iter().filter(|(at_us, _)| (from_us..=to_us).contains(&at_us));
            let admitted: u64 = inside.map(|(_, permits)| permits).sum();
            let allowed = bound.burst * bound.period_us + bound.permits * (to_us - from_us);
            let beyond = (admitted * bound.period_us).saturating_sub(allowed);
            most = most.max(beyond.div_ceil(bound.period_us));
        }
    }
    most
}

fn excess(permits: u64, from_us: u64, to_us: u64, admitted: u64) -> Excess {
    Excess { permits, from_us, to_us, admitted }
}
