//! Policies: what it takes to find the rules of a request among many, and to ask several limits together.

use std::hint::black_box;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use tollgate::rules::{
    ALL_KEYS, Descriptors, Glob, KeyPart, KeySpec, Limits, Match, PathPattern, Policy, PolicyParts, Rule,
    RuleLimit, RuleLimits, Source, ValueCondition,
};
use tollgate::{
    Clock, Engine, FixedWindow, GuardConfig, Limit, LimitSettings, PolicyLimiter, PolicyVerdict, Rate,
    SharedEngine, SlidingCounter, TokenBucket,
};

use crate::four_leased;
use crate::keys::Random;
use crate::mixed;
use crate::node::{BEFORE, Nodes};
use crate::redis::{LOAD_CORE, cpu, engine, on_one_core, own_cpu, pin, server};
use crate::report::{Options, Report, median};

/// Measures and judges.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut report = Report::default();
    let (rounds, secs) = if options.quick { (1, 1) } else { (5, 3) };
    if "all four leased".contains(&options.only) {
        println!("\nall four leased");
        four_leased::run(&mut report, rounds, Duration::from_secs(secs))?;
    }
    // The rows above use both cores.
    pin(std::process::id(), LOAD_CORE)?;
    if "matching".contains(&options.only) {
        println!("\nmatching");
        matching(&mut report, rounds)?;
    }
    if "several limits".contains(&options.only) {
        println!("\nseveral limits");
        several(&mut report, rounds, Duration::from_secs(secs))?;
    }
    for (name, scenario) in SETS {
        if name.contains(&options.only) {
            println!("\n{name}");
            scenario(&mut report, rounds, Duration::from_secs(secs))?;
        }
    }
    report.finish(options)
}

/// The number of rounds, and the length of each.
type Scenario = fn(&mut Report, usize, Duration) -> Result<()>;

/// Requests with several limits, and nodes that do not agree.
const SETS: [(&str, Scenario); 8] = [
    ("hot subject", hot_subject),
    ("own and shared", own_and_shared),
    ("four of one subject", four_of_one_subject),
    ("flood on one of four", flood_on_one_of_four),
    ("flood on a shared key", flood_on_a_shared_key),
    ("toggled", mixed::toggled),
    ("charged", mixed::charged),
    ("side by side", mixed::side_by_side),
];

/// Requests under way at the same time.
const TASKS: u64 = 1_024;

/// What many tasks have seen together.
struct Flood {
    requests_per_second: f64,
    calls_per_second: f64,
    server_us: f64,
}

/// Tasks that ask as fast as they are answered: each request is of one of `users` users.
fn flood(policy: Policy, users: u64, duration: Duration, is_admitted: bool) -> Result<Flood> {
    let server = server()?;
    on_one_core(async {
        let engine = engine(&server).await?;
        let (guard, driver) = SharedEngine::new(engine.clone(), GuardConfig::default(), Clock::system());
        tokio::spawn(driver.run());
        let settings = vec![LimitSettings::default(); policy.limits().len()];
        let limiter = Arc::new(PolicyLimiter::new(&Engine::Shared(guard), policy, &settings)?);
        let asked = Arc::new(AtomicU64::new(0));
        let mut tasks: tokio::task::JoinSet<Result<()>> = tokio::task::JoinSet::new();
        for number in 0..TASKS {
            let (limiter, asked) = (Arc::clone(&limiter), Arc::clone(&asked));
            tasks.spawn(async move {
                let mut random = Random(number);
                loop {
                    let verdict = check(&limiter, random.next() % users).await;
                    ensure!(
                        !is_admitted || verdict.is_admitted(),
                        "a limit that is never reached was reached"
                    );
                    asked.fetch_add(1, Ordering::Relaxed);
                    // Answers that are known at once would keep the others from their turn.
                    tokio::task::yield_now().await;
                }
            });
        }
        // The first moments fill caches, connections and what is denied.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let read =
            || Ok::<_, anyhow::Error>((asked.load(Ordering::Relaxed), engine.stats().calls, cpu(&server)?));
        let (before, start) = (read()?, Instant::now());
        tokio::time::sleep(duration).await;
        let (after, took) = (read()?, start.elapsed().as_secs_f64());
        if let Some(Ok(Err(why))) = tasks.try_join_next() {
            return Err(why);
        }
        let requests = (after.0 - before.0) as f64;
        Ok(Flood {
            requests_per_second: requests / took,
            calls_per_second: (after.1 - before.1) as f64 / took,
            server_us: (after.2 - before.2).as_secs_f64() * 1e6 / requests,
        })
    })
}

/// The medians of some rounds.
fn floods(
    report: &mut Report,
    name: &str,
    rounds: usize,
    policy: impl Fn() -> Result<Policy>,
    measure: impl Fn(Policy) -> Result<Flood>,
) -> Result<Flood> {
    let (mut requests, mut calls, mut server) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let seen = measure(policy()?)?;
        println!(
            "  {:.0} requests/s by {:.0} calls/s, {:.2} us of the server each",
            seen.requests_per_second, seen.calls_per_second, seen.server_us
        );
        requests.push(seen.requests_per_second);
        calls.push(seen.calls_per_second);
        server.push(seen.server_us);
    }
    let seen = Flood {
        requests_per_second: median(requests),
        calls_per_second: median(calls),
        server_us: median(server),
    };
    report.figure(&format!("{name}, requests/s"), seen.requests_per_second);
    report.figure(&format!("{name}, calls/s"), seen.calls_per_second);
    report.figure(&format!("{name}, us of the server"), seen.server_us);
    Ok(seen)
}

/// One user, four limits that are never reached.
fn hot_subject(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let seen =
        floods(report, "hot subject", rounds, || some_limits(4), |policy| flood(policy, 1, duration, true))?;
    let (requests, calls) = (seen.requests_per_second, seen.calls_per_second);
    report.bar("one subject with 4 limits, requests/s", requests, requests >= 300_000.0, ">= 300,000");
    report.bar("one subject with 4 limits, calls/s", calls, calls <= 4_000.0, "<= 4,000");
    Ok(())
}

/// A million users, each with a limit of their own and one that all share, beside an earlier commit.
fn own_and_shared(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let Some(nodes) = Nodes::built() else { return Ok(()) };
    let ratio = nodes.speed_up(report, "own-and-shared", rounds, duration)?;
    report.bar(&format!("own and shared, against {BEFORE}"), ratio, ratio >= 1.5, ">= 1.5");
    Ok(())
}

/// A million users, each with four limits, beside an earlier commit.
fn four_of_one_subject(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let Some(nodes) = Nodes::built() else { return Ok(()) };
    let ratio = nodes.speed_up(report, "four", rounds, duration)?;
    println!("         four of one subject, against {BEFORE}: {ratio:.2}");
    report.figure(&format!("four of one subject, against {BEFORE}"), ratio);
    Ok(())
}

/// One user with four limits, one of which is used up.
fn flood_on_one_of_four(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let policy = || {
        let mut parts = some_limits(4)?.parts().clone();
        parts.limits[3].limit = small()?;
        Ok(Policy::new(parts))
    };
    let seen =
        floods(report, "flood on one of four", rounds, policy, |policy| flood(policy, 1, duration, false))?;
    let calls = seen.calls_per_second;
    report.bar("flood that one of 4 limits denies, calls/s", calls, calls <= 50.0, "<= 50");
    Ok(())
}

/// Ten thousand users, and a limit that all share and that is used up.
fn flood_on_a_shared_key(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let policy = || Ok(with_shared(large()?, small()?));
    let seen = floods(report, "flood on a shared key", rounds, policy, |policy| {
        flood(policy, 10_000, duration, false)
    })?;
    let calls = seen.calls_per_second;
    report.bar("flood of 10,000 users on one exhausted key, calls/s", calls, calls <= 50.0, "<= 50");
    Ok(())
}

/// A limit that is never reached.
fn large() -> Result<Limit> {
    Ok(Limit::TokenBucket(TokenBucket::new(1_000_000_000, Rate::per_second(1_000_000_000))?))
}

/// A limit that is used up at once.
fn small() -> Result<Limit> {
    Ok(Limit::TokenBucket(TokenBucket::new(5, Rate::per_minute(5))?))
}

/// A limit for each address, and one for all together.
fn with_shared(own: Limit, shared: Limit) -> Policy {
    let of_all = KeySpec(vec![vec![KeyPart::Global]]);
    let rules = vec![
        rule("own".to_owned(), Match::default(), 0),
        Rule { key: of_all, ..rule("shared".to_owned(), Match::default(), 1) },
    ];
    let limits = [("own", own), ("shared", shared)].map(|(name, limit)| RuleLimit {
        scope: format!("token_bucket:{name}").into(),
        limit,
        candidate: None,
    });
    Policy::new(PolicyParts { rules, limits: limits.to_vec(), ipv6_prefix: 64, ..PolicyParts::default() })
}

pub(crate) fn rule(name: String, matching: Match, limit: usize) -> Rule {
    Rule {
        name: name.into(),
        matching,
        key: KeySpec(vec![vec![KeyPart::Ip]]),
        limits: RuleLimits::Own(Limits::All(vec![limit])),
        cost: 1,
        max_wait: None,
        stop: false,
        deny_empty_key: None,
        enforced: ALL_KEYS,
        code: None,
    }
}

/// Rules as a large service has them: one for all requests, and for each resource a path with a parameter, a path with a wildcard behind
/// it, an exact one with a method, and one by attribute.
fn many_rules(count: usize) -> Result<Policy> {
    let limit = Limit::TokenBucket(TokenBucket::new(100, Rate::per_minute(100))?);
    let mut rules = Vec::new();
    for number in 0..count {
        let path = |text: String| -> Result<Match> {
            Ok(Match { paths: vec![PathPattern::new(&text)?], ..Match::default() })
        };
        let matching = match number % 5 {
            _ if number == 0 => Match::default(),
            0 => Match {
                values: vec![ValueCondition {
                    source: Source::Attribute,
                    name: "tenant".into(),
                    any_of: vec![Glob::new(&format!("tenant-{number}"))],
                    none_of: Vec::new(),
                }],
                ..Match::default()
            },
            1 => path(format!("/api/v1/resource-{number}/{{id}}"))?,
            2 => path(format!("/api/v1/resource-{number}/**"))?,
            3 => path(format!("/api/v1/users/{{user}}/resource-{number}"))?,
            _ => Match { methods: vec!["POST".into()], ..path(format!("/api/v1/resource-{number}"))? },
        };
        rules.push(rule(format!("rule-{number}"), matching, number));
    }
    let limits = (0..count).map(|number| RuleLimit {
        scope: format!("token_bucket:rule-{number}").into(),
        limit,
        candidate: None,
    });
    Ok(Policy::new(PolicyParts {
        rules,
        limits: limits.collect(),
        ipv6_prefix: 64,
        ..PolicyParts::default()
    }))
}

/// Requests that match one rule each, beside the one for all requests.
fn requests(count: usize) -> Vec<(String, String)> {
    let mut random = Random(7);
    let request = |number: usize| match number % 5 {
        0 => ("/api/v1/else".to_owned(), format!("tenant-{number}")),
        1 | 2 => (format!("/api/v1/resource-{number}/42"), String::new()),
        3 => (format!("/api/v1/users/alice/resource-{number}"), String::new()),
        _ => (format!("/api/v1/resource-{number}"), String::new()),
    };
    (0..4_096).map(|_| request(1 + (random.next() as usize) % (count - 1))).collect()
}

fn matching(report: &mut Report, rounds: usize) -> Result<()> {
    const SELECTIONS: u32 = 200_000;
    let sizes = [10, 100, 1_000];
    let mut figures: [Vec<f64>; 3] = Default::default();
    let prepared = sizes.map(|count| Ok::<_, anyhow::Error>((many_rules(count)?, requests(count))));
    for _ in 0..rounds {
        for (prepared, figures) in prepared.iter().zip(&mut figures) {
            let Ok((policy, requests)) = prepared else { anyhow::bail!("a rule is wrong") };
            let start = Instant::now();
            for number in 0..SELECTIONS {
                let (path, tenant) = &requests[number as usize % requests.len()];
                let attributes = [("tenant", tenant.as_str())];
                let request = Descriptors {
                    path,
                    method: "POST",
                    ip: Some(IpAddr::from([10, 0, 0, 1])),
                    attributes: &attributes,
                    ..Descriptors::default()
                };
                let selection = black_box(policy.select(black_box(&request), 1));
                ensure!(selection.checks.len() == 2, "{path}: {selection:?}");
            }
            figures.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(SELECTIONS));
        }
    }
    let [ten, hundred, thousand] = figures.map(median);
    println!("  a selection among 10 rules: {ten:.0} ns, 100: {hundred:.0} ns, 1,000: {thousand:.0} ns");
    report.figure("selection among 10 rules, ns", ten);
    report.figure("selection among 1,000 rules, ns", thousand);
    let ratio = thousand / ten;
    report.bar("matching among 1,000 rules, against 10", ratio, ratio <= 3.0, "<= 3");
    Ok(())
}

/// A policy with `count` limits for each request, of three algorithms.
fn some_limits(count: usize) -> Result<Policy> {
    // One subject may be asked about a million times a second, for some seconds.
    let rate = Rate::per_minute(100_000_000);
    let kinds = [
        Limit::TokenBucket(TokenBucket::new(100_000_000, rate)?),
        Limit::SlidingCounter(SlidingCounter::new(rate, 1, false)?),
        Limit::FixedWindow(FixedWindow::new(rate)?),
    ];
    let rules = (0..count).map(|number| rule(format!("rule-{number}"), Match::default(), number)).collect();
    let limits = (0..count).map(|number| {
        let limit = kinds[number % kinds.len()];
        let scope = format!("{}:of-{count}-{number}", limit.algorithm().as_lowercase());
        RuleLimit { scope: scope.into(), limit, candidate: None }
    });
    Ok(Policy::new(PolicyParts {
        rules,
        limits: limits.collect(),
        ipv6_prefix: 64,
        ..PolicyParts::default()
    }))
}

/// What one of two policies has seen.
struct Seen {
    latency: Histogram<u64>,
    server_us: f64,
    /// Of this thread, which makes the requests.
    node_us: f64,
    per_second: f64,
}

impl Seen {
    fn p50_us(&self) -> f64 {
        self.latency.value_at_quantile(0.5) as f64 / 1_000.0
    }
}

/// One request after another, now with one limit and now with four, so that whatever holds the machine up holds up both.
fn several(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let (mut late, mut server_ratios, mut node_ratios) = (Vec::new(), Vec::new(), Vec::new());
    let (mut rates, mut times) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let server = server()?;
        let seen = on_one_core(async {
            let engine = engine(&server).await?;
            let (guard, driver) = SharedEngine::new(engine, GuardConfig::default(), Clock::system());
            tokio::spawn(driver.run());
            let engine = Engine::Shared(guard);
            let limiters = [1, 4].map(|count| {
                Ok::<_, anyhow::Error>(Arc::new(PolicyLimiter::new(
                    &engine,
                    some_limits(count)?,
                    &[LimitSettings::default(); 4],
                )?))
            });
            let [one, four] = limiters;
            let limiters = [one?, four?];
            let mut latencies = [Histogram::<u64>::new(3)?, Histogram::new(3)?];
            let mut random = Random(1);
            let start = Instant::now();
            while start.elapsed() < duration {
                for (limiter, latency) in limiters.iter().zip(&mut latencies) {
                    let sent = Instant::now();
                    ask(limiter, random.next()).await?;
                    latency.record(sent.elapsed().as_nanos() as u64)?;
                }
            }
            let mut seen = Vec::new();
            for (limiter, latency) in limiters.iter().zip(latencies) {
                // All at once: what the server can do, and what it takes.
                let read = || Ok::<_, anyhow::Error>((cpu(&server)?, own_cpu()?));
                let (before, start, mut asked) = (read()?, Instant::now(), 0_u64);
                while start.elapsed() < duration {
                    let asks = (0..256).map(|_| ask(limiter, random.next()));
                    let asks: Vec<_> = asks.collect();
                    asked += asks.len() as u64;
                    futures_util::future::try_join_all(asks).await?;
                }
                let took = start.elapsed().as_secs_f64();
                let after = read()?;
                let us = |cpu: Duration| cpu.as_secs_f64() * 1e6 / asked as f64;
                let (server_us, node_us) = (us(after.0 - before.0), us(after.1 - before.1));
                seen.push(Seen { latency, server_us, node_us, per_second: asked as f64 / took });
            }
            Ok(seen)
        })?;
        let [one, four] = &seen[..] else { anyhow::bail!("two policies were asked") };
        for (name, seen) in [("1 limit: ", one), ("4 limits:", four)] {
            println!(
                "  {name} p50 {:.1} us, {:.0} requests/s, {:.1} us of the server and {:.1} us of the node each",
                seen.p50_us(),
                seen.per_second,
                seen.server_us,
                seen.node_us
            );
        }
        late.push(four.p50_us() / one.p50_us());
        server_ratios.push(four.server_us / one.server_us);
        node_ratios.push(four.node_us / one.node_us);
        rates.push(four.per_second);
        times.push(four.server_us);
    }
    report.figure("4 limits, requests/s", median(rates));
    report.figure("4 limits, us of the server", median(times));
    for (name, ratios, most) in [
        ("p50 of a request", late, 1.3),
        ("processor time of the server", server_ratios, 3.0),
        ("processor time of the node", node_ratios, 2.0),
    ] {
        let ratio = median(ratios);
        let name = format!("{name} with 4 limits, against 1");
        report.bar(&name, ratio, ratio <= most, &format!("<= {most:.1}"));
    }
    Ok(())
}

async fn ask(limiter: &PolicyLimiter, number: u64) -> Result<()> {
    let verdict = check(limiter, number % 1_000_000).await;
    ensure!(verdict.is_admitted(), "a limit that is never reached was reached");
    Ok(())
}

/// A request of a user, by address.
pub(crate) async fn check(limiter: &PolicyLimiter, user: u64) -> PolicyVerdict {
    let ip = IpAddr::from((user as u32 | 0x0a00_0000).to_be_bytes());
    let request = Descriptors { ip: Some(ip), ..Descriptors::default() };
    limiter.check(&request, 1).await
}
