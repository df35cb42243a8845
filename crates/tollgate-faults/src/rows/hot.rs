//! One key, far more often than it can be admitted.

use std::time::{Duration, Instant};

use tollgate::{
    Ask, Basis, Clock, GuardConfig, Limit, OnFailure, Rate, RedisConfig, RedisEngine, SharedEngine,
    StoreError, TokenBucket, Verdict,
};
use tollgate_testkit::{Bound, RedisServer};

use crate::judge::Judge;
use crate::rig::Pace;

/// How often checks come, many at a time.
const TICK: Duration = Duration::from_millis(1);
/// How many are under way while it is measured how many can be decided.
const MEASURED_TOGETHER: usize = 2_000;
/// Percentage of the measured rate that is offered. The rest is left for other work of the machine.
const OFFERED_PERCENT: u64 = 60;

/// How checks come.
#[derive(Clone, Copy)]
enum Offer {
    /// The next check when one is answered.
    AsFastAsAnswered,
    /// So many at each tick, however long answers take.
    AtEachTick(usize),
}

/// What became of all checks on one limit.
struct Seen {
    checks: u64,
    exact: u64,
    calls: u64,
    remembered: u64,
    /// Checks and calls without a decision, with the name of each cause that occurred.
    failed: Vec<String>,
    took: Duration,
    admitted: Vec<(u64, u64)>,
    /// Of each check, until it was answered.
    took_us: Vec<u64>,
}

impl Seen {
    /// Notes a check that was answered.
    fn note(&mut self, answered: Option<Result<(Duration, Verdict), tokio::task::JoinError>>) {
        let Some(Ok((took, verdict))) = answered else { return };
        self.took_us.push(took.as_micros() as u64);
        self.checks += 1;
        if verdict.basis == Basis::Exact {
            self.exact += 1;
            if verdict.is_admitted() {
                self.admitted.push((verdict.decision.at.as_micros(), 1));
            }
        }
    }
}

pub(super) fn asked(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::start();
    let mut judge = Judge::bare(seed);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().ok()?;
    for (name, burst, rate) in
        [("exhausted: 1,000/s", 1_000, 1_000), ("plenty: 1,000,000/s", 1_000_000, 1_000_000)]
    {
        let limit = TokenBucket::new(burst, Rate::per_second(rate)).expect("a limit that can be exact");
        let limit = Limit::TokenBucket(limit);
        let measured = runtime.block_on(ask(&server.url(), limit, pace.fault / 4, Offer::AsFastAsAnswered));
        let offered = (measured.checks as f64 / measured.took.as_secs_f64()) as u64 * OFFERED_PERCENT / 100;
        let together = Offer::AtEachTick((offered / 1_000).max(1) as usize);
        let seen = runtime.block_on(ask(&server.url(), limit, pace.fault / 2, together));
        let per_second = |count: u64| (count as f64 / seen.took.as_secs_f64()) as u64;
        let rate_seen = per_second(seen.checks);
        judge.measure(
            format!("{name}: 90% of the {offered} checks/s offered are decided"),
            rate_seen,
            rate_seen * 10 >= offered * 9,
        );
        let others = seen.checks - seen.exact;
        judge.measure(
            format!("{name}: by the store >= 99.5%"),
            format!("{}, others {others}", seen.exact),
            others * 200 <= seen.checks,
        );
        judge.note(format!("{name}: without a decision, by cause"), seen.failed.join(", "));
        judge.measure(
            format!("{name}: calls <= 2% of the checks"),
            format!(
                "{} calls/s, {} denials/s remembered",
                per_second(seen.calls),
                per_second(seen.remembered)
            ),
            seen.calls * 50 <= seen.checks,
        );
        let bound = Bound { burst, permits: rate, period_us: 1_000_000 };
        let mut admitted = seen.admitted;
        let excess = bound.excess(&mut admitted);
        judge.decision(
            format!("{name}: excess 0, by the store's clock"),
            format!("{} ({} admitted)", excess.permits, admitted.len()),
            excess.permits == 0 && !admitted.is_empty(),
        );
        let mut took = seen.took_us;
        took.sort_unstable();
        let slow = took.get(took.len() * 999 / 1_000).copied().unwrap_or(0);
        judge.note(format!("{name}: p99.9 of a check"), crate::judge::millis(slow));
    }
    Some(judge)
}

async fn ask(store: &str, limit: Limit, time: Duration, offer: Offer) -> Seen {
    let (engine, driver) = RedisEngine::new(RedisConfig::new(store.parse().expect("a store")));
    tokio::spawn(driver.run());
    let (guard, driver) = SharedEngine::new(engine, GuardConfig::default(), Clock::system());
    tokio::spawn(driver.run());
    let scope = format!("hot_{}", limit.size());
    let limiter = guard.limiter(&scope, limit, OnFailure::default()).expect("the first limit");
    let _ = guard.redis().connected(Duration::from_secs(5)).await;
    let before = guard.redis().stats();
    let start = Instant::now();
    let mut seen = Seen {
        checks: 0,
        exact: 0,
        calls: 0,
        remembered: 0,
        failed: Vec::new(),
        took: Duration::ZERO,
        admitted: Vec::new(),
        took_us: Vec::new(),
    };
    // A task for each check, as a server has one for each request.
    let check = || {
        let limiter = limiter.clone();
        async move {
            let begun = Instant::now();
            let verdict = limiter.acquire("hot", Ask::of(1)).await;
            (begun.elapsed(), verdict)
        }
    };
    let mut ticks = tokio::time::interval(TICK);
    let mut checks = tokio::task::JoinSet::new();
    while start.elapsed() < time {
        let next = match offer {
            Offer::AsFastAsAnswered => MEASURED_TOGETHER - checks.len(),
            Offer::AtEachTick(together) => {
                ticks.tick().await;
                together
            }
        };
        (0..next).for_each(|_| {
            checks.spawn(check());
        });
        if matches!(offer, Offer::AsFastAsAnswered) {
            seen.note(checks.join_next().await);
        }
        while let Some(answered) = checks.try_join_next() {
            seen.note(Some(answered));
        }
    }
    while !checks.is_empty() {
        seen.note(checks.join_next().await);
    }
    let after = guard.redis().stats();
    (seen.took, seen.calls) = (start.elapsed(), after.calls - before.calls);
    seen.remembered = after.remembered - before.remembered;
    let failed = after.failed.iter().zip(before.failed).map(|(after, before)| after - before);
    let causes = StoreError::CLASSES.iter().zip(failed).filter(|(_, count)| *count > 0);
    seen.failed = causes.map(|(cause, count)| format!("{count} {cause}")).collect();
    seen
}
