//! How far the sliding counter is from the exact log: on even traffic, on Poisson traffic, and at the hands of an
//! adversary. Run with `--nocapture` to see the figures.
//!
//! A decision is wrong if the counter's estimate of the offered traffic is on the other side of the limit than the true
//! number in the trailing window. (Two limiters that run beside each other cannot be compared request by request: at
//! saturation both admit the limit, but not the same requests. Their totals can, and are.)

use std::collections::VecDeque;

use tollgate_core::{Algorithm, Ask, Micros, Rate, SlidingCounter, SlidingLog, Timestamp};

const LIMIT: u64 = 100;
const WINDOW_US: u64 = 60_000_000;
/// Traffic offered, as a multiple of the limit: idle, around the limit, where it is hard, and far over it. Exactly at
/// the limit every even arrival is one permit from the edge, and a count rounded up is as wrong as it is right.
const LOADS: [f64; 9] = [0.5, 0.75, 0.9, 0.95, 1.05, 1.1, 1.5, 2.0, 3.0];
/// A limit that is never reached, to count without deciding.
const UNREACHED: u64 = 1_000_000;

/// SplitMix64: small, seeded, and the same everywhere.
struct Random(u64);

impl Random {
    /// Uniform in (0, 1].
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64 + f64::EPSILON
    }
}

fn rate() -> Rate {
    Rate::new(LIMIT, Micros::new(WINDOW_US)).unwrap()
}

/// The most admitted in any trailing window.
fn most_in_a_window(admitted: &[u64]) -> u64 {
    let mut window = VecDeque::new();
    let mut most = 0;
    for &at in admitted {
        window.push_back(at);
        while window.front().is_some_and(|first| at - first >= WINDOW_US) {
            window.pop_front();
        }
        most = most.max(window.len() as u64);
    }
    most
}

/// The share of arrivals at which the estimate is on the wrong side of the limit.
fn wrong_share(sub_buckets: u32, arrivals: impl Iterator<Item = u64>) -> f64 {
    let unreached = Rate::new(UNREACHED, Micros::new(WINDOW_US)).unwrap();
    let counter = SlidingCounter::new(unreached, sub_buckets, false).unwrap();
    let log = SlidingLog::new(unreached).unwrap();
    let start = Timestamp::from_micros(0);
    let (mut counts, mut entries) = (counter.fresh(start), log.fresh(start));
    let (mut asked, mut wrong) = (0_u64, 0_u64);
    for at in arrivals {
        let now = Timestamp::from_micros(at);
        let estimate = UNREACHED - counter.status(&counts, now).remaining;
        let truth = UNREACHED - log.status(&entries, now).remaining;
        asked += 1;
        wrong += u64::from((estimate < LIMIT) != (truth < LIMIT));
        counter.charge(&mut counts, now, 1);
        log.charge(&mut entries, now, 1);
    }
    wrong as f64 / asked as f64
}

/// The instants at which a limit admits.
fn admissions<A: Algorithm>(limit: &A, arrivals: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut state = limit.fresh(Timestamp::from_micros(0));
    arrivals
        .filter(|at| limit.decide(&mut state, Timestamp::from_micros(*at), Ask::of(1)).is_admitted())
        .collect()
}

/// Arrivals over two hundred windows.
fn traffic(load: f64, mut gap: impl FnMut(f64) -> f64) -> impl Iterator<Item = u64> {
    let mean = WINDOW_US as f64 / (LIMIT as f64 * load);
    let mut at = 0.0;
    std::iter::from_fn(move || {
        at += gap(mean);
        (at < (200 * WINDOW_US) as f64).then_some(at as u64)
    })
}

fn even(load: f64) -> impl Iterator<Item = u64> {
    traffic(load, |mean| mean)
}

fn poisson(load: f64) -> impl Iterator<Item = u64> {
    let mut random = Random(7);
    traffic(load, move |mean| -mean * random.unit().ln())
}

#[test]
fn the_counter_decides_wrongly_in_less_than_5_percent_of_even_and_of_poisson_traffic() {
    for sub_buckets in [1, 10] {
        let shares = |of: &dyn Fn(f64) -> f64| LOADS.map(of);
        for (name, shares) in [
            ("even", shares(&|load| wrong_share(sub_buckets, even(load)))),
            ("Poisson", shares(&|load| wrong_share(sub_buckets, poisson(load)))),
        ] {
            let mean = shares.iter().sum::<f64>() / shares.len() as f64;
            let by_load: Vec<_> =
                LOADS.iter().zip(shares).map(|(load, it)| format!("{load}: {:.2} %", it * 100.0)).collect();
            println!(
                "{sub_buckets:2} sub-buckets, {name:7}: wrong {:.2} %; by load {}",
                mean * 100.0,
                by_load.join(", ")
            );
            assert!(mean <= 0.05, "{name}: {mean}");
        }
    }
}

#[test]
fn the_counter_admits_within_5_percent_of_what_the_log_admits() {
    let log = SlidingLog::new(rate()).unwrap();
    for sub_buckets in [1, 10] {
        let counter = SlidingCounter::new(rate(), sub_buckets, false).unwrap();
        for load in LOADS {
            for (name, by_counter, by_log) in [
                ("even", admissions(&counter, even(load)), admissions(&log, even(load))),
                ("Poisson", admissions(&counter, poisson(load)), admissions(&log, poisson(load))),
            ] {
                let error = by_counter.len() as f64 / by_log.len() as f64 - 1.0;
                let most = most_in_a_window(&by_counter);
                println!(
                    "{sub_buckets:2} sub-buckets, {name:7} at {load}: {:+.2} % admitted, most in a window {most}",
                    error * 100.0
                );
                assert!(error.abs() <= 0.05, "{name} at {load}: {error}");
            }
        }
    }
}

#[test]
fn an_adversary_gets_far_over_the_weighted_counter_and_never_over_the_strict_one() {
    // A whole limit at the very end of a window, then a request every 10 ms.
    let attack = || {
        let burst = std::iter::repeat_n(WINDOW_US - 1, LIMIT as usize);
        burst.chain((WINDOW_US..4 * WINDOW_US).step_by(10_000))
    };
    for sub_buckets in [1, 10, 60] {
        let [weighted, strict] = [false, true].map(|strict| {
            most_in_a_window(&admissions(
                &SlidingCounter::new(rate(), sub_buckets, strict).unwrap(),
                attack(),
            ))
        });
        println!("adversary, {sub_buckets:2} sub-buckets: weighted {weighted} of {LIMIT}, strict {strict}");
        assert!(weighted > LIMIT, "the attack is worth trying");
        assert!(strict <= LIMIT);
    }
}

#[test]
fn the_strict_counter_is_never_over_on_any_traffic() {
    for load in LOADS {
        for sub_buckets in [1, 10, 60] {
            let counter = SlidingCounter::new(rate(), sub_buckets, true).unwrap();
            let most = most_in_a_window(&admissions(&counter, poisson(load)));
            assert!(most <= LIMIT, "{most} with {sub_buckets} sub-buckets");
        }
    }
}
