//! Checks in Redis. The server has one core, the load the other: whichever is full is said.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use redis::aio::MultiplexedConnection;
use tollgate::{
    Ask, FixedWindow, LeakyBucket, LeakyMode, Limit, Rate, RateLimiter, RedisConfig, RedisEngine,
    RedisLimiter, SlidingCounter, SlidingLog, TokenBucket,
};
use tollgate_testkit::{Process, RedisServer, wait_until};

use crate::instructions::Checks;
use crate::keys::Random;
use crate::load::{Pace, run as run_load};
use crate::node::{BEFORE, Both, Nodes};
use crate::report::{Options, Report, median};
use crate::scripts;

pub(crate) const SERVER_CORE: &str = "0";
pub(crate) const LOAD_CORE: &str = "1";

/// Keys that are asked about at random: far more than checks in flight, so that hardly two are of one key.
const KEYS: u64 = 1_000_000;
/// Tasks that each ask, wait for the answer and ask again.
const TASKS: u64 = 1_024;

/// The number of rounds, and the length of each.
type Scenario = fn(&mut Report, usize, Duration) -> Result<()>;

/// Measures and judges.
pub(crate) fn run(options: &Options) -> Result<()> {
    pin(std::process::id(), LOAD_CORE)?;
    let mut report = Report::default();
    let rounds = if options.quick { 1 } else { 5 };
    let secs = Duration::from_secs(if options.quick { 1 } else { 3 });
    let scenarios: [(&str, Scenario); 8] = [
        ("hot key", hot_key),
        ("script", scripts::run),
        ("uniform keys", uniform),
        ("instructions", instructions),
        ("limitador", limitador),
        ("latency", latency),
        ("http", http),
        ("memory", memory),
    ];
    for (name, scenario) in scenarios {
        if name.contains(&options.only) {
            println!("\n{name}");
            scenario(&mut report, rounds, secs)?;
        }
    }
    report.finish(options)
}

pub(crate) fn pin(process: u32, core: &str) -> Result<()> {
    let done = Command::new("taskset").args(["-a", "-pc", core, &process.to_string()]).output()?;
    ensure!(done.status.success(), "taskset: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

/// A server on its core.
pub(crate) fn server() -> Result<RedisServer> {
    let server = RedisServer::build().tcp().start();
    pin(server.process_id(), SERVER_CORE)?;
    Ok(server)
}

pub(crate) fn url(server: &RedisServer) -> String {
    format!("redis://{}", server.tcp_address())
}

/// Everything in process on one thread, as it would be on a core of its own.
pub(crate) fn on_one_core<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

pub(crate) async fn engine(server: &RedisServer) -> Result<RedisEngine> {
    let mut config = RedisConfig::new(url(server).parse()?);
    config.deadline = Duration::from_secs(10);
    let (engine, driver) = RedisEngine::new(config);
    tokio::spawn(driver.run());
    engine.connected(Duration::from_secs(5)).await?;
    Ok(engine)
}

fn bucket(capacity: u64, per_second: u64) -> Result<Limit> {
    Ok(Limit::TokenBucket(TokenBucket::new(capacity, Rate::per_second(per_second))?))
}

/// What a flood has seen.
struct Flood {
    per_second: f64,
    admitted_per_second: f64,
    /// Script calls that the server has seen.
    calls_per_second: f64,
    /// Share of its core that the server was busy.
    server_busy: f64,
}

/// Tasks that ask as fast as they are answered.
async fn flood(
    server: &RedisServer,
    limiter: &RedisLimiter,
    duration: Duration,
    key: impl Fn(&mut Random) -> String + Clone + Send + 'static,
) -> Result<Flood> {
    let (asked, admitted) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let stop = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..TASKS)
        .map(|number| {
            let (asked, admitted, stop) = (Arc::clone(&asked), Arc::clone(&admitted), Arc::clone(&stop));
            let (limiter, key) = (limiter.clone(), key.clone());
            tokio::spawn(async move {
                let mut random = Random(number);
                while !stop.load(Ordering::Relaxed) {
                    let decision = limiter.try_acquire(&key(&mut random), 1).await?;
                    asked.fetch_add(1, Ordering::Relaxed);
                    admitted.fetch_add(u64::from(decision.is_admitted()), Ordering::Relaxed);
                    // Answers that are known at once would keep the others from their turn.
                    tokio::task::consume_budget().await;
                }
                Ok::<_, anyhow::Error>(())
            })
        })
        .collect();
    // The first moments fill caches and connections.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let before = (
        asked.load(Ordering::Relaxed),
        admitted.load(Ordering::Relaxed),
        script_calls(server)?,
        cpu(server)?,
    );
    let start = Instant::now();
    tokio::time::sleep(duration).await;
    let took = start.elapsed().as_secs_f64();
    let after = (
        asked.load(Ordering::Relaxed),
        admitted.load(Ordering::Relaxed),
        script_calls(server)?,
        cpu(server)?,
    );
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await??;
    }
    Ok(Flood {
        per_second: (after.0 - before.0) as f64 / took,
        admitted_per_second: (after.1 - before.1) as f64 / took,
        calls_per_second: (after.2 - before.2) as f64 / took,
        server_busy: (after.3 - before.3).as_secs_f64() / took,
    })
}

/// Script calls since the server began.
fn script_calls(server: &RedisServer) -> Result<u64> {
    let stats = server.cli(&["INFO", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls=")).unwrap_or("0");
    Ok(line.split(',').next().unwrap_or("0").parse()?)
}

/// Processor time that a server has taken so far.
pub(crate) fn cpu(server: &RedisServer) -> Result<Duration> {
    cpu_of(&format!("/proc/{}/schedstat", server.process_id()))
}

/// Processor time that this thread has taken so far, its own and the system's on its behalf.
pub(crate) fn own_cpu() -> Result<Duration> {
    cpu_of("/proc/thread-self/schedstat")
}

fn cpu_of(schedstat: &str) -> Result<Duration> {
    let text = std::fs::read_to_string(schedstat)?;
    Ok(Duration::from_nanos(text.split_whitespace().next().context("no schedstat")?.parse()?))
}

/// One key, many tasks: with a limit that is never reached, and with one that is always.
fn hot_key(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let (mut free, mut exhausted) = (Vec::new(), Vec::new());
    let (mut free_calls, mut exhausted_calls) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let server = server()?;
        on_one_core(async {
            let engine = engine(&server).await?;
            let limiter = engine.limiter("token_bucket", bucket(1_000_000_000, 1_000_000_000)?);
            let seen = flood(&server, &limiter, duration, |_| "hot".to_owned()).await?;
            ensure!(
                seen.admitted_per_second >= seen.per_second * 0.999,
                "a limit that is never reached was reached"
            );
            println!(
                "  never reached: {:>9.0} decisions/s, {:>6.0} script calls/s, server busy {:.0} %",
                seen.per_second,
                seen.calls_per_second,
                seen.server_busy * 100.0
            );
            free.push(seen.per_second);
            free_calls.push(seen.calls_per_second);
            let limiter = engine.limiter("token_bucket", bucket(10, 10)?);
            let seen = flood(&server, &limiter, duration, |_| "exhausted".to_owned()).await?;
            println!(
                "  10/s:          {:>9.0} decisions/s, {:>6.1} script calls/s, {:.1} admitted/s",
                seen.per_second, seen.calls_per_second, seen.admitted_per_second
            );
            exhausted.push(seen.admitted_per_second);
            exhausted_calls.push(seen.calls_per_second);
            Ok(())
        })?;
    }
    let (rate, calls) = (median(free), median(free_calls));
    report.bar("hot key, decisions/s", rate, rate >= 500_000.0, ">= 500,000");
    report.bar("hot key, script calls/s", calls, calls <= 20_000.0, "<= 20,000");
    let calls = median(exhausted_calls);
    report.bar("exhausted key, script calls/s", calls, calls <= 100.0, "<= 100");
    let admitted = median(exhausted);
    report.bar(
        "exhausted key, admitted/s",
        admitted,
        (9.0..=11.0).contains(&admitted),
        "10, as the limit says",
    );
    Ok(())
}

/// Requests a second that redis-benchmark reaches with a command, 16 in each pipeline.
fn redis_benchmark(server: &RedisServer, requests: u64, command: &[&str]) -> Result<f64> {
    let port = server.tcp_address().port().to_string();
    let output = Command::new("taskset")
        .args(["-c", LOAD_CORE, "redis-benchmark", "-h", "127.0.0.1", "-p", &port, "-P", "16", "-q", "--csv"])
        .args(["-r", &KEYS.to_string(), "-n", &requests.to_string()])
        .args(command)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().context("redis-benchmark said nothing")?;
    let rate = line.split(',').nth(1).with_context(|| format!("redis-benchmark said {line}"))?;
    Ok(rate.trim_matches('"').parse()?)
}

/// What redis-benchmark sends for one token of a bucket of 100, 10/s. It cannot send zero bytes, so it sends as many others,
/// and the numbers are written into the script: one more table to make than in the real one.
fn own_command(server: &RedisServer) -> Result<Vec<String>> {
    let (script, argument) = on_one_core(async {
        let limiter = engine(server).await?.limiter("token_bucket", bucket(100, 10)?);
        Ok(limiter.wire(Ask::of(1)))
    })?;
    let bytes: String = argument.iter().map(|byte| format!("\\{byte:03}")).collect();
    let written_in = format!("local ARGV = {{ '{bytes}' }}\n{script}");
    let sha = server.cli(&["SCRIPT", "LOAD", &written_in]).trim().to_owned();
    let key = "rate_limiter:token_bucket:user:__rand_int__";
    let words = ["EVALSHA", &sha, "1", key, &"x".repeat(argument.len())];
    Ok(words.map(str::to_owned).into())
}

/// Keys that are never asked about together: one call for each check.
fn uniform(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let server = server()?;
    let own = own_command(&server)?;
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let mut ratios = Vec::new();
    for _ in 0..rounds {
        server.cli(&["FLUSHALL"]);
        let theirs = redis_benchmark(&server, 200_000 * duration.as_secs(), &own)?;
        server.cli(&["FLUSHALL"]);
        let seen = on_one_core(async {
            let engine = engine(&server).await?;
            let limiter = engine.limiter("token_bucket", bucket(100, 10)?);
            flood(&server, &limiter, duration, |random| format!("user:{:012}", random.next() % KEYS)).await
        })?;
        println!(
            "  tollgate {:>8.0}/s (server busy {:.0} %), redis-benchmark {theirs:>8.0}/s, ratio {:.2}",
            seen.per_second,
            seen.server_busy * 100.0,
            seen.per_second / theirs
        );
        ratios.push(seen.per_second / theirs);
    }
    let ratio = median(ratios);
    report.bar("uniform keys, against redis-benchmark -P 16", ratio, ratio >= 0.95, ">= 0.95");
    Ok(())
}

/// Instructions that the library takes for a check, beside those of an earlier commit.
fn instructions(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let Some(nodes) = Nodes::built() else { return Ok(()) };
    let rows = [
        ("uniform strict keys", "uniform", 5_000, 0.75),
        ("hot key", "hot", 50_000, 1.03),
        ("exhausted key", "exhausted", 100_000, 1.03),
        ("leased key", "leased", 200_000, 1.03),
        ("memory engine", "memory", 500_000, 1.03),
    ];
    for (name, mode, few, bar) in rows {
        let checks = Checks { few, many: few * (1 + 2 * duration.as_secs()) };
        let Both { now, before } = nodes.instructions(mode, checks, rounds.min(3))?;
        let name = format!("instructions a check, {name}");
        println!("  {name}: {now:.0}, {BEFORE} {before:.0}, {:.3}x", now / before);
        report.figure(&name, now);
        report.figure(&format!("{name}, {BEFORE}"), before);
        let ratio = now / before;
        report.bar(&format!("{name}, against {BEFORE}"), ratio, ratio <= bar, &format!("<= {bar}"));
    }
    Ok(())
}

/// limitador's Redis storage beside Tollgate: uniform keys, and one hot key.
fn limitador(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    let Some(peer) = std::env::var_os("LIMITADOR_PEER") else {
        println!("  left out: `cargo xtask bench redis` builds it");
        return Ok(());
    };
    let server = server()?;
    for (name, keys) in [("uniform keys", KEYS), ("hot key", 1)] {
        let mut ratios = Vec::new();
        for _ in 0..rounds {
            server.cli(&["FLUSHALL"]);
            let ours = on_one_core(async {
                let engine = engine(&server).await?;
                let limiter = engine.limiter("token_bucket", bucket(1_000_000_000, 1_000_000_000)?);
                flood(&server, &limiter, duration, move |random| format!("user:{:012}", random.next() % keys))
                    .await
            })?;
            server.cli(&["FLUSHALL"]);
            let mut command = Command::new("taskset");
            command.args(["-c", LOAD_CORE]).arg(&peer).arg(url(&server));
            command.args([keys, TASKS, duration.as_millis() as u64].map(|number| number.to_string()));
            let output = command.output()?;
            let theirs: f64 =
                String::from_utf8(output.stdout)?.trim().parse().context("limitador-peer failed")?;
            println!(
                "  {name}: tollgate {:>9.0}/s, limitador {theirs:>8.0}/s, ratio {:.1}",
                ours.per_second,
                ours.per_second / theirs
            );
            ratios.push(ours.per_second / theirs);
        }
        let ratio = median(ratios);
        report.bar(&format!("limitador, {name}, ratio"), ratio, ratio >= 1.0, ">= 1");
    }
    Ok(())
}

/// The service in front of Redis, both on one core: checks that do not wait for each other.
fn http(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    const PER_SECOND: u64 = 10_000;
    const CONNECTIONS: u64 = 64;
    let requests = (0..100_000)
        .map(|key| {
            format!("GET /api/v1/rate-limit/check?key=user:{key:06} HTTP/1.1\r\nHost: localhost\r\n\r\n")
                .into_bytes()
        })
        .collect();
    let mut p99 = Vec::new();
    for _ in 0..rounds {
        let server = server()?;
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut command = Command::new("taskset");
        command.args(["-c", SERVER_CORE]).arg(std::env::current_exe()?.with_file_name("tollgate"));
        command.args(["--listen", &address.to_string(), "--store", &url(&server)]);
        command.env("TOLLGATE_REDIS__DEADLINE", "1s");
        let _service = Process::start(&command);
        wait_until("the service listens", || std::net::TcpStream::connect(address).is_ok());
        let every = Duration::from_secs(1).mul_f64(CONNECTIONS as f64 / PER_SECOND as f64);
        let seen = run_load(address, &requests, CONNECTIONS, duration, Pace::Open { every })?;
        println!(
            "  {:.0} checks/s: p50 {:.2} ms, p99 {:.2} ms",
            seen.per_second(),
            seen.latency.value_at_quantile(0.5) as f64 / 1_000.0,
            seen.p99_ms()
        );
        p99.push(seen.p99_ms());
    }
    let p99 = median(p99);
    report.bar("http at 10,000 checks/s, p99 in ms", p99, p99 < 10.0, "< 10");
    Ok(())
}

/// What a key takes in Redis, beside what the specification expected.
fn memory(report: &mut Report, _: usize, _: Duration) -> Result<()> {
    const KEYS: u64 = 20_000;
    let minute = Rate::per_minute(100);
    let limits = [
        // Buckets that take a minute to be full again, like the windows: the keys must not expire while they are counted.
        (Limit::TokenBucket(TokenBucket::new(100, minute)?), 1, "66 expected"),
        (Limit::LeakyBucket(LeakyBucket::new(100, minute, LeakyMode::Meter)?), 1, "-"),
        (Limit::FixedWindow(FixedWindow::new(minute)?), 1, "50 expected"),
        (Limit::SlidingCounter(SlidingCounter::new(minute, 1, false)?), 1, "100 expected"),
        (Limit::SlidingCounter(SlidingCounter::new(minute, 10, true)?), 1, "-"),
        (Limit::SlidingLog(SlidingLog::new(minute)?), 1, "-"),
        (Limit::SlidingLog(SlidingLog::new(minute)?), 100, "-"),
    ];
    println!("  {:<24}{:>8}{:>14}{:>20}  ", "algorithm", "checks", "MEMORY USAGE", "of the whole server");
    for (limit, checks, expected) in limits {
        let server = server()?;
        let (usage, whole) = on_one_core(async {
            let engine = engine(&server).await?;
            let name = limit.algorithm().as_lowercase();
            let limiter = engine.limiter(name, limit);
            let before = used_memory(&server)?;
            let keys = if checks == 1 { KEYS } else { KEYS / 20 };
            for key in 0..keys {
                for _ in 0..checks {
                    let permits = if checks == 1 { 99 } else { 1 };
                    limiter.try_acquire(&format!("user:{key:05}"), permits).await?;
                }
            }
            let whole = (used_memory(&server)? - before) as f64 / keys as f64;
            let usage: f64 = server
                .cli(&["MEMORY", "USAGE", &format!("rate_limiter:{name}:user:00042")])
                .trim()
                .parse()?;
            Ok((usage, whole))
        })?;
        let sub_buckets = if let Limit::SlidingCounter(it) = limit { it.sub_buckets() } else { 1 };
        let name = match sub_buckets {
            1 => limit.algorithm().to_string(),
            more => format!("{} x{more}", limit.algorithm()),
        };
        println!("  {name:<24}{checks:>8}{usage:>12.0} B{whole:>18.0} B  {expected}");
        report.figure(&format!("memory, {name}, {checks} checks, bytes"), usage);
    }
    Ok(())
}

fn used_memory(server: &RedisServer) -> Result<u64> {
    let info = server.cli(&["INFO", "memory"]);
    let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).context("no used_memory")?;
    Ok(line.trim().parse()?)
}

/// At a steady rate: checks, and bare PINGs beside them on a connection of their own.
fn latency(report: &mut Report, rounds: usize, duration: Duration) -> Result<()> {
    const PER_SECOND: u64 = 10_000;
    let server = server()?;
    let mut beyond = Vec::new();
    for _ in 0..rounds {
        let (check, ping) = on_one_core(async {
            let engine = engine(&server).await?;
            let limiter = engine.limiter("token_bucket", bucket(100, 10)?);
            let connection = redis::Client::open(url(&server))?.get_multiplexed_async_connection().await?;
            // At the same time: whatever holds the machine up holds up both.
            let pings = steady(PER_SECOND / 10, duration, |_| ping(connection.clone()));
            let checks = steady(PER_SECOND, duration, |number| {
                let limiter = limiter.clone();
                async move {
                    limiter.try_acquire(&format!("user:{:06}", Random(number).next() % 100_000), 1).await?;
                    Ok(())
                }
            });
            let (check, ping) = tokio::try_join!(checks, pings)?;
            Ok((check, ping))
        })?;
        let p99 = |seen: &Histogram<u64>| seen.value_at_quantile(0.99) as f64 / 1_000.0;
        println!(
            "  check p50 {:.3} ms, p99 {:.3} ms; PING p50 {:.3} ms, p99 {:.3} ms",
            check.value_at_quantile(0.5) as f64 / 1_000.0,
            p99(&check),
            ping.value_at_quantile(0.5) as f64 / 1_000.0,
            p99(&ping)
        );
        beyond.push(p99(&check) - p99(&ping));
    }
    let beyond = median(beyond);
    report.bar("p99 of a check beyond a PING's, ms", beyond, beyond <= 1.0, "<= 1");
    Ok(())
}

async fn ping(mut connection: MultiplexedConnection) -> Result<()> {
    let _: String = redis::cmd("PING").query_async(&mut connection).await?;
    Ok(())
}

/// Starts work at a rate, whether or not what was started before is finished. Latency counts from when it was due.
async fn steady<F: Future<Output = Result<()>> + Send + 'static>(
    per_second: u64,
    duration: Duration,
    work: impl Fn(u64) -> F,
) -> Result<Histogram<u64>> {
    let start = Instant::now();
    let every = Duration::from_secs(1).div_f64(per_second as f64);
    let mut seen = Histogram::new(3)?;
    let mut running = tokio::task::JoinSet::new();
    let mut number = 0;
    while start.elapsed() < duration {
        // Timers are coarser than the rate, so the load keeps its core awake.
        tokio::task::yield_now().await;
        while start + every.mul_f64(number as f64) <= Instant::now() {
            let (due, task) = (start + every.mul_f64(number as f64), work(number));
            running.spawn(async move {
                task.await?;
                Ok::<_, anyhow::Error>(due.elapsed().as_micros() as u64)
            });
            number += 1;
        }
        while let Some(done) = running.try_join_next() {
            seen.record(done??)?;
        }
    }
    while let Some(done) = running.join_next().await {
        seen.record(done??)?;
    }
    Ok(seen)
}
