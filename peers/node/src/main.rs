//! `node MODE STORE checks N` and `node MODE STORE millis N`: makes checks on one thread and prints their number and cost as JSON.
//!
//! This source is also compiled against an earlier commit, with the feature `before`: a few types had other names there.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tollgate::rules::{
    ALL_KEYS, Descriptors, KeyPart, KeySpec, Limits, Match, Policy, PolicyParts, Rule, RuleLimit, RuleLimits,
};
use tollgate::{
    Ask, Clock, Consistency, FixedWindow, GuardConfig, LeakyBucket, LeakyMode, Limit, LimitSettings,
    MemoryConfig, MemoryEngine, MemoryLimiter, Micros, PolicyLimiter, Rate, RedisConfig, RedisEngine,
    RedisLimiter, SlidingCounter, SlidingLog, TokenBucket,
};

#[cfg(feature = "before")]
use tollgate::{Engine::Redis as Shared, Guard as SharedEngine, GuardedLimiter};
#[cfg(not(feature = "before"))]
use tollgate::{Engine::Shared, Limiter as GuardedLimiter, RateLimiter, SharedEngine};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [mode, store, unit, amount] =
        <[String; 4]>::try_from(arguments).map_err(|_| "usage: node MODE STORE checks|millis N")?;
    let mode: Mode = mode.parse()?;
    let amount: u64 = amount.parse()?;
    let end = match unit.as_str() {
        "checks" => End::Checks(amount),
        "millis" => End::After(Duration::from_millis(amount)),
        other => return Err(format!("unknown unit {other}: checks or millis").into()),
    };
    if let (Mode::Beside, End::After(duration)) = (mode, end) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(beside(&store, duration));
    }
    let seen = match mode {
        Mode::Beside => return Err("admissions beside others are made for some time".into()),
        Mode::Memory => memory(end)?,
        Mode::Uniform | Mode::Hot | Mode::Exhausted | Mode::Leased | Mode::OwnAndShared | Mode::Four => {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?
                .block_on(load(mode, &store, end))?
        }
    };
    if mode != Mode::Exhausted && seen.admitted != seen.checks {
        return Err(format!("{} of {} checks were denied", seen.checks - seen.admitted, seen.checks).into());
    }
    println!(
        r#"{{"checks": {}, "admitted": {}, "seconds": {}, "calls": {}, "cpu_seconds": {}}}"#,
        seen.checks,
        seen.admitted,
        seen.wall.as_secs_f64(),
        seen.calls,
        seen.cpu.as_secs_f64()
    );
    Ok(())
}

/// Which limits are checked, and on how many keys.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// A million keys of a strict limit in the store.
    Uniform,
    /// One key in the store that is never exhausted.
    Hot,
    /// One key in the store that is exhausted.
    Exhausted,
    /// One key that is never exhausted, decided by leases.
    Leased,
    /// Ten thousand keys in this process.
    Memory,
    /// A million users, each with a limit of their own and one that all share.
    OwnAndShared,
    /// A million users, each with four limits.
    Four,
    /// One key of each algorithm, asked for as often as possible beside other nodes. Prints when each check was admitted.
    Beside,
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "uniform" => Ok(Self::Uniform),
            "hot" => Ok(Self::Hot),
            "exhausted" => Ok(Self::Exhausted),
            "leased" => Ok(Self::Leased),
            "memory" => Ok(Self::Memory),
            "own-and-shared" => Ok(Self::OwnAndShared),
            "four" => Ok(Self::Four),
            "beside" => Ok(Self::Beside),
            other => Err(format!("unknown mode {other}")),
        }
    }
}

impl Mode {
    /// Tasks that each make a check, wait for the answer and make the next one.
    const fn tasks(self) -> u64 {
        match self {
            Self::Memory => 1,
            // A cached denial expires after some time, and then all tasks wait for the store. Under valgrind that comes after few checks:
            // with many tasks the instructions of a check would depend on the speed of the machine.
            Self::Exhausted => 16,
            Self::Uniform | Self::Leased | Self::Beside => 64,
            Self::Hot | Self::OwnAndShared | Self::Four => 1_024,
        }
    }
}

/// When the load ends.
#[derive(Clone, Copy)]
enum End {
    /// After this many checks.
    Checks(u64),
    /// After this long.
    After(Duration),
}

/// Counters at an instant; subtracted from later ones, what happened in between.
#[derive(Clone, Copy)]
struct Seen {
    checks: u64,
    admitted: u64,
    /// Script calls to the store.
    calls: u64,
    wall: Duration,
    /// Processor time of this thread.
    cpu: Duration,
}

impl Seen {
    fn since(self, earlier: Self) -> Self {
        Self {
            checks: self.checks - earlier.checks,
            admitted: self.admitted - earlier.admitted,
            calls: self.calls - earlier.calls,
            wall: self.wall - earlier.wall,
            cpu: self.cpu - earlier.cpu,
        }
    }
}

/// Processor time that this thread has taken so far.
fn cpu() -> Result<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(Duration::from_nanos(text.split_whitespace().next().ok_or("schedstat is empty")?.parse()?))
}

/// Different keys or users.
const KEYS: u64 = 1_000_000;
/// Time for connections, caches and denials before a measurement of some duration begins.
const WARM_UP: Duration = Duration::from_millis(500);
/// A run of some number of checks that takes longer than this has failed.
const LONGEST: Duration = Duration::from_secs(300);

/// A limiter of the store, by mode.
enum Limiter {
    Uniform(RedisLimiter),
    One(RedisLimiter),
    Leased(GuardedLimiter),
    Policy(Box<PolicyLimiter>),
}

impl Limiter {
    fn new(mode: Mode, engine: RedisEngine) -> Result<Self> {
        let never_reached = bucket(1_000_000_000, 1_000_000_000)?;
        let strict = |limit| engine.limiter("token_bucket", limit);
        Ok(match mode {
            Mode::Uniform => Self::Uniform(strict(bucket(100, 10)?)),
            Mode::Hot => Self::One(strict(never_reached)),
            Mode::Exhausted => Self::One(strict(bucket(10, 10)?)),
            Mode::Leased => {
                let settings = LimitSettings { consistency: Consistency::Lease, ..LimitSettings::default() };
                // The lease benchmark has the same limit.
                let limit = bucket(10_000_000, 10_000_000)?;
                Self::Leased(guard(engine).limiter("bench", limit, settings)?)
            }
            Mode::OwnAndShared => Self::policy(engine, own_and_shared(never_reached))?,
            Mode::Four => Self::policy(engine, four()?)?,
            Mode::Memory | Mode::Beside => return Err("this mode has limiters of its own".into()),
        })
    }

    fn policy(engine: RedisEngine, policy: Policy) -> Result<Self> {
        let settings = vec![LimitSettings::default(); policy.limits().len()];
        let limiter = PolicyLimiter::new(&Shared(guard(engine)), policy, &settings)?;
        Ok(Self::Policy(Box::new(limiter)))
    }

    /// Whether a check of a random key was admitted.
    async fn check(&self, random: &mut Random, key: &mut Key) -> Result<bool> {
        Ok(match self {
            Self::Uniform(limiter) => {
                limiter.try_acquire(key.write(random.next() % KEYS), 1).await?.is_admitted()
            }
            Self::One(limiter) => limiter.try_acquire("hot", 1).await?.is_admitted(),
            Self::Leased(limiter) => limiter.acquire("hot", Ask::of(1)).await.is_admitted(),
            Self::Policy(limiter) => {
                let user = (random.next() % KEYS) as u32 | 0x0a00_0000;
                let ip = Some(IpAddr::from(user.to_be_bytes()));
                limiter.check(&Descriptors { ip, ..Descriptors::default() }, 1).await.is_admitted()
            }
        })
    }
}

fn bucket(capacity: u64, per_second: u64) -> Result<Limit> {
    Ok(Limit::TokenBucket(TokenBucket::new(capacity, Rate::per_second(per_second))?))
}

fn guard(engine: RedisEngine) -> SharedEngine {
    let (guard, driver) = SharedEngine::new(engine, GuardConfig::default(), Clock::system());
    tokio::spawn(driver.run());
    guard
}

/// Makes checks in the store until the end.
async fn load(mode: Mode, store: &str, end: End) -> Result<Seen> {
    let engine = connect(store).await?;
    let limiter = Arc::new(Limiter::new(mode, engine.clone())?);
    let counters = Arc::new(Counters::new(match end {
        End::Checks(number) => number,
        End::After(_) => u64::MAX,
    }));
    let begun = Instant::now();
    let read = || {
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Seen {
            checks: counters.checked.load(Ordering::Relaxed),
            admitted: counters.admitted.load(Ordering::Relaxed),
            calls: engine.stats().calls,
            wall: begun.elapsed(),
            cpu: cpu()?,
        })
    };
    let mut before = read()?;
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..mode.tasks() {
        tasks.spawn(ask(Arc::clone(&limiter), number, Arc::clone(&counters)));
    }
    match end {
        End::Checks(_) => {
            let all = async {
                while let Some(task) = tasks.join_next().await {
                    task??;
                }
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
            };
            tokio::time::timeout(LONGEST, all).await.map_err(|_| "the checks took too long")??;
        }
        End::After(duration) => {
            tokio::time::sleep(WARM_UP).await;
            before = read()?;
            tokio::time::sleep(duration).await;
        }
    }
    let seen = read()?.since(before);
    match tasks.try_join_next() {
        Some(failed) => Err(failed?.err().unwrap_or_else(|| "a task ended early".into())),
        None => Ok(seen),
    }
}

/// Asks for one permit after another of one limit of each algorithm, and prints the server's times of all admissions.
async fn beside(store: &str, duration: Duration) -> Result<()> {
    const PERMITS: u64 = 500;
    const WINDOW_MS: u64 = 250;
    let engine = connect(store).await?;
    let rate = Rate::new(PERMITS, Micros::from_millis(WINDOW_MS))?;
    let limits = [
        Limit::TokenBucket(TokenBucket::new(PERMITS, rate)?),
        Limit::LeakyBucket(LeakyBucket::new(PERMITS, rate, LeakyMode::Meter)?),
        Limit::FixedWindow(FixedWindow::new(rate)?),
        Limit::SlidingLog(SlidingLog::new(rate)?),
        Limit::SlidingCounter(SlidingCounter::new(rate, 10, true)?),
    ];
    let mut tasks = tokio::task::JoinSet::new();
    let end = Instant::now() + duration;
    for limit in limits {
        for _ in 0..Mode::Beside.tasks() / 4 {
            let name = limit.algorithm().as_lowercase();
            let limiter = engine.limiter(name, limit);
            tasks.spawn(async move {
                let mut admissions = Vec::new();
                while Instant::now() < end {
                    let decision = limiter.try_acquire("beside", 1).await?;
                    if decision.is_admitted() {
                        admissions.push(decision.at.as_micros());
                    }
                    tokio::task::yield_now().await;
                }
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>((name, admissions))
            });
        }
    }
    let mut all: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    while let Some(task) = tasks.join_next().await {
        let (name, admissions) = task??;
        all.entry(name).or_default().extend(admissions);
    }
    let lists = all.iter().map(|(name, times)| format!("{name:?}: {times:?}"));
    println!("{{{}}}", lists.collect::<Vec<_>>().join(", "));
    Ok(())
}

/// An engine whose store answers.
async fn connect(store: &str) -> Result<RedisEngine> {
    let mut config = RedisConfig::new(store.parse()?);
    // Under valgrind everything takes fifty times as long.
    config.deadline = Duration::from_secs(10);
    let (engine, driver) = RedisEngine::new(config);
    tokio::spawn(driver.run());
    let limiter = engine.limiter("token_bucket", bucket(100, 100)?);
    let begun = Instant::now();
    while let Err(why) = limiter.try_acquire("first", 1).await {
        if begun.elapsed() > Duration::from_secs(30) {
            return Err(why.into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(engine)
}

/// What all tasks count together.
struct Counters {
    most: u64,
    begun: AtomicU64,
    checked: AtomicU64,
    admitted: AtomicU64,
}

impl Counters {
    const fn new(most: u64) -> Self {
        Self { most, begun: AtomicU64::new(0), checked: AtomicU64::new(0), admitted: AtomicU64::new(0) }
    }
}

/// Makes one check after another until all tasks together have begun enough of them.
async fn ask(limiter: Arc<Limiter>, number: u64, counters: Arc<Counters>) -> Result<()> {
    let (mut random, mut key) = (Random(number), Key::new());
    while counters.begun.fetch_add(1, Ordering::Relaxed) < counters.most {
        let is_admitted = limiter.check(&mut random, &mut key).await?;
        counters.checked.fetch_add(1, Ordering::Relaxed);
        counters.admitted.fetch_add(u64::from(is_admitted), Ordering::Relaxed);
        // Checks that need no call to the store would otherwise starve the other tasks.
        tokio::task::consume_budget().await;
    }
    Ok(())
}

/// Makes checks in this process until the end.
fn memory(end: End) -> Result<Seen> {
    const MEMORY_KEYS: u64 = 10_000;
    /// Checks between two looks at the clock.
    const CHUNK: u64 = 1_000;
    let keys: Vec<String> = (0..MEMORY_KEYS).map(|number| Key::new().write(number).to_owned()).collect();
    let engine = MemoryEngine::new(MemoryConfig { max_keys: keys.len() }, Clock::system());
    // The refill is so slow that no key becomes full, and is dropped, while it is measured.
    let limit = Limit::TokenBucket(TokenBucket::new(10_000_000, Rate::per_minute(1))?);
    let limiter = engine.limiter("bench", limit)?;
    let mut seen = Seen { checks: 0, admitted: 0, calls: 0, wall: Duration::ZERO, cpu: Duration::ZERO };
    let mut random = Random(1);
    let (begun, cpu_before) = (Instant::now(), cpu()?);
    while match end {
        End::Checks(number) => seen.checks < number,
        End::After(duration) => begun.elapsed() < duration,
    } {
        seen.admitted += take(&limiter, &keys, &mut random, CHUNK);
        seen.checks += CHUNK;
    }
    Ok(Seen { wall: begun.elapsed(), cpu: cpu()? - cpu_before, ..seen })
}

/// Makes checks of random keys and counts those that were admitted.
fn take(limiter: &MemoryLimiter, keys: &[String], random: &mut Random, checks: u64) -> u64 {
    let mut admitted = 0;
    for _ in 0..checks {
        let key = &keys[(random.next() % keys.len() as u64) as usize];
        admitted += u64::from(black_box(limiter.try_acquire(key, 1)).is_admitted());
    }
    admitted
}

/// The text of a key, written without the formatting of the standard library, which would take a large part of a check's instructions.
struct Key([u8; 17]);

impl Key {
    const fn new() -> Self {
        Self(*b"user:000000000000")
    }

    fn write(&mut self, mut number: u64) -> &str {
        for digit in self.0[5..].iter_mut().rev() {
            *digit = b'0' + (number % 10) as u8;
            number /= 10;
        }
        str::from_utf8(&self.0).unwrap_or_default()
    }
}

/// SplitMix64: small, seeded, the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A limit for each address, and one for all together.
fn own_and_shared(limit: Limit) -> Policy {
    let own = rule("own".to_owned(), 0);
    let shared = Rule { key: KeySpec(vec![vec![KeyPart::Global]]), ..rule("shared".to_owned(), 1) };
    policy(vec![own, shared], ["own", "shared"].map(|name| (name.to_owned(), limit)).to_vec())
}

/// Four limits of three algorithms for each address.
fn four() -> Result<Policy> {
    let rate = Rate::per_minute(1_000_000);
    let bucket = Limit::TokenBucket(TokenBucket::new(1_000_000, rate)?);
    let counter = Limit::SlidingCounter(SlidingCounter::new(rate, 1, false)?);
    let window = Limit::FixedWindow(FixedWindow::new(rate)?);
    let limits = [bucket, counter, window, bucket];
    let named = limits.into_iter().enumerate().map(|(number, limit)| (format!("of-4-{number}"), limit));
    Ok(policy((0..4).map(|number| rule(format!("rule-{number}"), number)).collect(), named.collect()))
}

fn policy(rules: Vec<Rule>, limits: Vec<(String, Limit)>) -> Policy {
    let limits = limits.into_iter().map(|(name, limit)| RuleLimit {
        scope: format!("{}:{name}", limit.algorithm().as_lowercase()).into(),
        limit,
        candidate: None,
    });
    Policy::new(PolicyParts { rules, limits: limits.collect(), ipv6_prefix: 64, ..PolicyParts::default() })
}

/// A rule for all requests, by address.
fn rule(name: String, limit: usize) -> Rule {
    Rule {
        name: name.into(),
        matching: Match::default(),
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
