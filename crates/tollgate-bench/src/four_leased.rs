//! One subject with four leased limits: how many requests a node decides without the store, and whether the limits are kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use tollgate::rules::{Match, Policy, PolicyParts, RuleLimit};
use tollgate::{Consistency, Engine, Limit, LimitSettings, PolicyLimiter};
use tollgate_testkit::{Bound, RedisServer};

use crate::lease::{Node, admissions, bucket, node, nodes, on_two_threads};
use crate::policy::{check, rule};
use crate::report::{Report, median};

const LIMITS: usize = 4;

/// Measures and judges. This process must not be pinned to one core.
pub(crate) fn run(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    never_reached(report, rounds, duration)?;
    reached(report, duration * 3)
}

/// A policy with these limits for each address, all of them leased.
fn limiter(node: &Node, limits: [Limit; LIMITS]) -> Result<Arc<PolicyLimiter>> {
    let rules = (0..LIMITS).map(|number| rule(format!("rule-{number}"), Match::default(), number)).collect();
    let limits = limits.into_iter().enumerate().map(|(number, limit)| RuleLimit {
        scope: format!("token_bucket:leased-{number}").into(),
        limit,
        candidate: None,
    });
    let parts = PolicyParts { rules, limits: limits.collect(), ipv6_prefix: 64, ..PolicyParts::default() };
    let settings = LimitSettings { consistency: Consistency::Lease, ..LimitSettings::default() };
    let engine = Engine::Shared(node.guard.clone());
    Ok(Arc::new(PolicyLimiter::new(&engine, Policy::new(parts), &[settings; LIMITS])?))
}

/// Permits in a second, and at once, of a limit that is never reached.
const PLENTY: u64 = 100_000_000;

/// Two threads that make as many requests as they can.
fn never_reached(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let (mut rates, mut shares) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let server = RedisServer::build().tcp().start();
        let (requests, calls) = on_two_threads(async {
            let node = node(&server).await?;
            let limiter = limiter(&node, [bucket(PLENTY, PLENTY)?; LIMITS])?;
            let stop = Arc::new(AtomicBool::new(false));
            let ask = || tokio::spawn(ask(Arc::clone(&limiter), Arc::clone(&stop)));
            let tasks = [ask(), ask()];
            tokio::time::sleep(duration).await;
            stop.store(true, Ordering::Relaxed);
            let mut requests = 0;
            for task in tasks {
                requests += task.await??;
            }
            Ok((requests as f64, node.engine.stats().calls as f64))
        })?;
        let rate = requests / duration.as_secs_f64();
        let share = calls / requests * 100.0;
        println!(
            "  never reached: {rate:>9.0} requests/s, {:>9.0} decisions/s, {share:.3} calls per 100 requests",
            rate * LIMITS as f64
        );
        rates.push(rate);
        shares.push(share);
    }
    let (rate, share) = (median(rates), median(shares));
    report.figure("all four leased, requests/s", rate);
    let decisions = rate * LIMITS as f64;
    report.bar("all four leased, decisions/s", decisions, decisions >= 2_500_000.0, ">= 2,500,000");
    report.bar("all four leased, calls per 100 requests", share, share <= 1.0, "<= 1");
    Ok(())
}

/// One of the two threads.
async fn ask(limiter: Arc<PolicyLimiter>, stop: Arc<AtomicBool>) -> Result<u64> {
    let mut requests = 0;
    while !stop.load(Ordering::Relaxed) {
        let verdict = check(&limiter, 0).await;
        ensure!(verdict.is_admitted(), "a limit that is never reached was reached");
        requests += 1;
        // Requests that need no call to the store would otherwise starve the other tasks.
        tokio::task::consume_budget().await;
    }
    Ok(requests)
}

/// Nodes that share the subject.
const NODES: u32 = 4;
/// Permits in a second, and at once, of the limit that is reached.
const PERMITS: u64 = 2_000;
/// Which of the limits is reached.
const REACHED: usize = 2;

/// Several nodes that ask for three times what one of the limits admits.
fn reached(report: &mut Report, duration: Duration) -> Result<()> {
    let server = RedisServer::build().tcp().start();
    let mut limits = [bucket(PLENTY, PLENTY)?; LIMITS];
    limits[REACHED] = bucket(PERMITS, PERMITS)?;
    let (mut admitted, requests, calls) = on_two_threads(async {
        let nodes = nodes(&server, NODES).await?;
        let calls = || nodes.iter().map(|node| node.engine.stats().calls).sum::<u64>();
        let before = calls();
        let mut tasks = Vec::new();
        for node in &nodes {
            let limiter = limiter(node, limits)?;
            let per_second = PERMITS as f64 * 3.0 / f64::from(NODES);
            tasks.push(tokio::spawn(admissions(per_second, duration, move || {
                admitted_at(Arc::clone(&limiter))
            })));
        }
        let (mut admitted, mut requests) = (Vec::new(), 0);
        for task in tasks {
            let (times, count) = task.await??;
            admitted.extend(times);
            requests += count;
        }
        Ok((admitted, requests, calls() - before))
    })?;
    ensure!(!admitted.is_empty(), "no request was admitted");
    let bound = Bound { burst: PERMITS, permits: PERMITS, period_us: 1_000_000 };
    let excess = bound.excess(&mut admitted).permits;
    let offered = PERMITS as f64 * (1.0 + duration.as_secs_f64());
    println!(
        "  reached: {NODES} nodes, {:.0} requests/s, {:.2} calls per request, {:.1} % of the limit used",
        requests as f64 / duration.as_secs_f64(),
        calls as f64 / requests as f64,
        admitted.len() as f64 / offered * 100.0
    );
    report.figure("all four leased, one reached, share of the limit used", admitted.len() as f64 / offered);
    report.bar("all four leased, one reached, excess, permits", excess as f64, excess == 0, "0");
    Ok(())
}

/// When a request was admitted, by the clock that the limit was decided on.
async fn admitted_at(limiter: Arc<PolicyLimiter>) -> Option<u64> {
    let verdict = check(&limiter, 0).await;
    let decision = verdict.verdicts.get(REACHED).copied().flatten()?.decision;
    verdict.is_admitted().then_some(decision.at.as_micros())
}
