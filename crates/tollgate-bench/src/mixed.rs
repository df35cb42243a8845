//! Nodes that do not agree: with different limits of one key, and of different versions.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tollgate::{Limit, Rate, RateLimiter, RedisConfig, RedisEngine, RedisLimiter, StoreError, TokenBucket};
use tollgate_testkit::Bound;

use crate::node::{BEFORE, Nodes};
use crate::redis::{on_one_core, server, url};
use crate::report::{Report, median};

/// Requests under way at the same time on each node.
const TASKS: usize = 16;
/// How often a node changes its limit.
const EVERY: Duration = Duration::from_millis(50);
const LARGE: Bound = Bound { burst: 20_000, permits: 20_000, period_us: 1_000_000 };
const SMALL: Bound = Bound { burst: 4_000, permits: 4_000, period_us: 1_000_000 };

/// What all nodes have seen together.
#[derive(Default)]
struct Seen {
    /// When permits were taken, by the server's clock.
    admissions: RefCell<Vec<(u64, u64)>>,
    answered: Cell<u64>,
    late: Cell<u64>,
    calls: Cell<u64>,
}

impl Seen {
    fn late_percent(&self) -> f64 {
        self.late.get() as f64 * 100.0 / self.answered.get().max(1) as f64
    }
}

/// A limit that half of the nodes change every 50 ms, and beside it one that all nodes keep.
pub(crate) fn toggled(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let (mut late, mut late_alike, mut excess) = (Vec::new(), Vec::new(), 0);
    for _ in 0..rounds {
        let alike = hot_key(duration, 4, Disturbed::Never)?;
        let seen = hot_key(duration, 4, Disturbed::Toggled)?;
        let beyond = LARGE.excess(&mut seen.admissions.borrow_mut()).permits;
        println!(
            "  {} checks, {} admitted, excess over the larger limit {beyond}; past the deadline {:.3} % (all nodes alike {:.3} %)",
            seen.answered.get(),
            seen.admissions.borrow().len(),
            seen.late_percent(),
            alike.late_percent()
        );
        late.push(seen.late_percent());
        late_alike.push(alike.late_percent());
        excess = excess.max(beyond);
    }
    report.figure(
        "limit toggled on half of the nodes, past the deadline with all alike, %",
        median(late_alike),
    );
    let late = median(late);
    report.bar("limit toggled on half of the nodes, past the deadline, %", late, late <= 0.5, "<= 0.5");
    report.bar("limit toggled on half of the nodes, excess", excess as f64, excess == 0, "0");
    Ok(())
}

/// Eight nodes with the same limit, and a charge now and then, which cannot be decided by a script alone.
pub(crate) fn charged(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let mut late = Vec::new();
    for _ in 0..rounds {
        let seen = hot_key(duration, 8, Disturbed::Charged)?;
        println!(
            "  {} checks by {} calls, past the deadline {:.3} %",
            seen.answered.get(),
            seen.calls.get(),
            seen.late_percent()
        );
        late.push(seen.late_percent());
    }
    let late = median(late);
    report.bar("key that is charged every 50 ms, past the deadline, %", late, late <= 0.5, "<= 0.5");
    Ok(())
}

/// What happens to a hot key beside the checks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disturbed {
    Never,
    /// Every other node changes its limit every 50 ms.
    Toggled,
    /// A node charges a permit every 50 ms.
    Charged,
}

fn hot_key(duration: Duration, nodes: usize, disturbed: Disturbed) -> Result<Rc<Seen>> {
    let server = server()?;
    on_one_core(tokio::task::LocalSet::new().run_until(async {
        let seen = Rc::new(Seen::default());
        let mut tasks = tokio::task::JoinSet::new();
        let end = Instant::now() + duration;
        let mut engines = Vec::new();
        for node in 0..nodes {
            let (engine, driver) = RedisEngine::new(RedisConfig::new(url(&server).parse()?));
            tokio::spawn(driver.run());
            engine.connected(Duration::from_secs(5)).await?;
            let limiters = [LARGE, SMALL].map(|bound| limiter(&engine, bound));
            let [large, small] = limiters;
            let limiters = Rc::new([large?, small?]);
            for _ in 0..TASKS {
                let changes = disturbed == Disturbed::Toggled && node % 2 == 1;
                tasks.spawn_local(ask(Rc::clone(&limiters), changes, Rc::clone(&seen), end));
            }
            if disturbed == Disturbed::Charged && node == 0 {
                tasks.spawn_local(charge(limiters, end));
            }
            engines.push(engine);
        }
        while let Some(task) = tasks.join_next().await {
            task??;
        }
        seen.calls.set(engines.iter().map(|engine| engine.stats().calls).sum());
        Ok(seen)
    }))
}

fn limiter(engine: &RedisEngine, Bound { burst, permits, .. }: Bound) -> Result<RedisLimiter> {
    let limit = TokenBucket::new(burst, Rate::per_second(permits))?;
    Ok(engine.limiter("token_bucket", Limit::TokenBucket(limit)))
}

async fn ask(limiters: Rc<[RedisLimiter; 2]>, changes: bool, seen: Rc<Seen>, end: Instant) -> Result<()> {
    let begun = Instant::now();
    while Instant::now() < end {
        let turn = begun.elapsed().as_millis() / EVERY.as_millis();
        let limiter = &limiters[usize::from(changes && turn % 2 == 1)];
        match limiter.try_acquire("hot", 1).await {
            Ok(decision) if decision.is_admitted() => {
                seen.admissions.borrow_mut().push((decision.at.as_micros(), 1));
            }
            Ok(_) => {}
            Err(StoreError::Timeout(_)) => seen.late.set(seen.late.get() + 1),
            Err(why) => return Err(why.into()),
        }
        seen.answered.set(seen.answered.get() + 1);
        tokio::task::yield_now().await;
    }
    Ok(())
}

async fn charge(limiters: Rc<[RedisLimiter; 2]>, end: Instant) -> Result<()> {
    while Instant::now() < end {
        match limiters[0].charge("hot", 1).await {
            Ok(()) | Err(StoreError::Timeout(_)) => {}
            Err(why) => return Err(why.into()),
        }
        tokio::time::sleep(EVERY).await;
    }
    Ok(())
}

/// Nodes of this version and of an earlier commit on the same keys, under one limit of each algorithm.
pub(crate) fn side_by_side(report: &mut Report, _: usize, duration: Duration) -> Result<()> {
    let Some(nodes) = Nodes::built() else { return Ok(()) };
    let server = server()?;
    let mut admissions = nodes.side_by_side(&url(&server), duration)?;
    ensure!(!admissions.is_empty(), "no algorithm was asked for");
    for (name, [now, before]) in &mut admissions {
        let counts = (now.len(), before.len());
        let mut all: Vec<u64> = now.drain(..).chain(before.drain(..)).collect();
        all.sort_unstable();
        let beyond = BESIDE.beyond(name, &all);
        println!("  {name}: {} admitted now, {} by {BEFORE}, excess {beyond}", counts.0, counts.1);
        ensure!(counts.0 > 0 && counts.1 > 0, "{name}: one of the versions was never admitted");
        report.bar(&format!("beside {BEFORE}, {name}, excess"), beyond as f64, beyond == 0, "0");
    }
    Ok(())
}

/// The limit of the nodes in `peers/node`: 500 at once or in a window of 250 ms.
struct Beside {
    permits: u64,
    window_us: u64,
}

const BESIDE: Beside = Beside { permits: 500, window_us: 250_000 };

impl Beside {
    /// Permits beyond what the algorithm lets through, if these are the times of all admissions.
    fn beyond(&self, algorithm: &str, sorted: &[u64]) -> u64 {
        let Self { permits, window_us } = *self;
        match algorithm {
            "token_bucket" | "leaky_bucket" => {
                let bound = Bound { burst: permits, permits, period_us: window_us };
                bound.excess(&mut sorted.iter().map(|at| (*at, 1)).collect::<Vec<_>>()).permits
            }
            "fixed_window" => {
                let windows = sorted.chunk_by(|one, other| one / window_us == other / window_us);
                windows.map(|window| (window.len() as u64).saturating_sub(permits)).max().unwrap_or(0)
            }
            // Never more than the limit in any trailing window.
            _ => {
                let more = |first: usize| {
                    let end = sorted[first..].partition_point(|at| *at < sorted[first] + window_us);
                    (end as u64).saturating_sub(permits)
                };
                (0..sorted.len()).map(more).max().unwrap_or(0)
            }
        }
    }
}
