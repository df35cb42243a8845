//! One arithmetic, two homes: the same random trace through the memory engine and through the Redis engine, on a real server,
//! gives the same whole answers, to the microsecond. Time is handed in to both.

use std::time::Duration;

use crate::run;
use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use tollgate::{
    Ask, Backend, Calendar, CalendarQuota, Check, Clock, Decision, FixedWindow, IntervalBucket, LeakyBucket,
    LeakyMode, Limit, LimitId, LimitSettings, MemoryConfig, MemoryEngine, MemoryLimiter, Micros, Rate,
    RateLimiter, RedisConfig, RedisEngine, RedisLimiter, Retention, SlidingCounter, SlidingLog, Timestamp,
    TokenBucket,
};
use tollgate_testkit::{Random, RedisServer, ServerProgram, long_or};

/// A server with an engine on it, and a connection to look into it.
struct Home {
    clock: Clock,
    engine: RedisEngine,
    connection: MultiplexedConnection,
}

impl Home {
    async fn of(server: &RedisServer) -> Self {
        Self::remembering(server, Duration::from_millis(80)).await
    }

    /// With nothing remembered it is as if every limit were asked on a node of its own: none knows what another has changed since.
    async fn remembering(server: &RedisServer, denials: Duration) -> Self {
        let clock = Clock::manual(Timestamp::default());
        let mut config = RedisConfig::new(server.url().parse().unwrap());
        config.clock = Some(clock.clone());
        config.deadline = Duration::from_secs(10);
        config.remember_denials = denials;
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        engine.connected(Duration::from_secs(10)).await.unwrap();
        let client = redis::Client::open(server.url()).unwrap();
        let connection = client.get_multiplexed_async_connection().await.unwrap();
        Self { clock, engine, connection }
    }

    /// In an engine of its own: one knows a bounded number of limits.
    fn twins(&self, limit: Limit, key: String) -> Twins {
        self.twins_in(&self.memory(), limit, key)
    }

    fn memory(&self) -> MemoryEngine {
        MemoryEngine::new(MemoryConfig { max_keys: 64 }, self.clock.clone())
    }

    fn twins_in(&self, memory: &MemoryEngine, limit: Limit, key: String) -> Twins {
        let scope = &*limit.home();
        Twins {
            memory: memory.limiter(scope, limit).unwrap(),
            in_memory: memory.add_limit(scope, limit, &LimitSettings::default()).unwrap(),
            redis: self.engine.limiter(scope, limit),
            connection: self.connection.clone(),
            stored: format!("rate_limiter:{scope}:{key}"),
            key,
            life: Life::default(),
            is_retained: true,
        }
    }
}

/// A key of a limit in both homes.
struct Twins {
    memory: MemoryLimiter,
    /// The limit in the memory engine, for checks of several limits.
    in_memory: LimitId,
    redis: RedisLimiter,
    connection: MultiplexedConnection,
    key: String,
    stored: String,
    life: Life,
    /// Whether a log is kept for the longest window that it may come under.
    is_retained: bool,
}

/// What was consumed under earlier limits is forgotten after 35 years, paid or not.
const PAID_WITHIN_US: u64 = 1 << 50;
/// The most units that flow at once. Units beyond them pay no carried debt.
const FLOW_MAX: u128 = 1 << 52;

/// Units that flow into a bucket within a time.
fn flows_within(limit: &Limit, us: u64) -> u128 {
    let (period, refill) = match limit {
        Limit::TokenBucket(it) => (it.tick(), it.flow()),
        Limit::LeakyBucket(it) => (it.room().tick(), it.room().flow()),
        Limit::IntervalBucket(it) => (it.period(), it.refill()),
        _ => return 0,
    };
    u128::from(us / period) * u128::from(refill)
}

/// How long the key in Redis lives, in the time that is handed in.
#[derive(Clone, Copy, Default)]
struct Life {
    /// When the key would be gone.
    expires_us: Option<u64>,
    /// Whether memory forgets at the same time: where the store forgets what still matters, and says so.
    is_cut: bool,
    /// Whether Redis has forgotten what memory may still have.
    is_forgotten: bool,
    /// The last time that was handed in.
    seen_us: u64,
    /// What the server's own clock said before the last operation.
    server_us: u64,
}

#[derive(Clone, Debug)]
enum Op {
    Take(Ask),
    /// Asked at once by several tasks.
    TakeEach(Vec<Ask>),
    Peek(Ask),
    Refund {
        permits: u64,
        at: u64,
    },
    Charge {
        permits: u64,
    },
    Reset,
}

impl Twins {
    /// Forgets the key in Redis when its time to live has passed. Memory keeps its state, so a time to live that is too short shows
    /// as a difference. (Only a clock that is set back afterwards may tell the two apart: then memory forgets, too.)
    async fn expire(&mut self, now: u64) {
        let is_gone = self.life.expires_us.is_some_and(|expires| expires <= now);
        if self.life.is_forgotten && now < self.life.seen_us || is_gone && self.life.is_cut {
            self.memory.reset(&self.key);
        }
        if is_gone {
            let _: () = redis::cmd("DEL").arg(&self.stored).query_async(&mut self.connection).await.unwrap();
            self.life.expires_us = None;
            self.life.is_forgotten = true;
        }
        self.life.seen_us = now;
    }

    /// A time that is handed in, or now and then the one at which the key in Redis is gone.
    fn or_expired(&self, random: &mut Random, now: u64) -> u64 {
        match self.life.expires_us {
            Some(expires) if random.one_in(24) => now.max(expires),
            _ => now,
        }
    }

    async fn server_us(&mut self) -> u64 {
        let (secs, us): (u64, u64) = redis::cmd("TIME").query_async(&mut self.connection).await.unwrap();
        secs * 1_000_000 + us
    }

    fn in_memory(&self, op: &Op) -> Vec<Decision> {
        match op {
            Op::Take(ask) => vec![self.memory.acquire(&self.key, *ask)],
            Op::TakeEach(asks) => asks.iter().map(|ask| self.memory.acquire(&self.key, *ask)).collect(),
            Op::Peek(ask) => vec![self.memory.peek(&self.key, *ask)],
            Op::Refund { permits, at } => {
                self.memory.refund(&self.key, *permits, Timestamp::from_micros(*at));
                Vec::new()
            }
            Op::Charge { permits } => {
                self.memory.charge(&self.key, *permits);
                Vec::new()
            }
            Op::Reset => {
                self.memory.reset(&self.key);
                Vec::new()
            }
        }
    }

    async fn in_redis(&mut self, op: &Op, now: u64) -> Vec<Decision> {
        self.life.server_us = self.server_us().await;
        let (limiter, key) = (&self.redis, &self.key);
        let decisions = match op {
            Op::Take(ask) => vec![limiter.acquire(key, *ask).await.unwrap()],
            Op::TakeEach(asks) => {
                join_all(asks.iter().map(|ask| async { limiter.acquire(key, *ask).await.unwrap() })).await
            }
            Op::Peek(ask) => vec![limiter.peek(key, *ask).await.unwrap()],
            Op::Refund { permits, at } => {
                limiter.refund(key, *permits, Timestamp::from_micros(*at)).await.unwrap();
                Vec::new()
            }
            Op::Charge { permits } => {
                limiter.charge(key, *permits).await.unwrap();
                Vec::new()
            }
            Op::Reset => {
                limiter.reset(key).await.unwrap();
                (self.life.expires_us, self.life.is_forgotten) = (None, false);
                Vec::new()
            }
        };
        // The server's clock is not the one of the trace: what it would forget is forgotten by the trace's.
        let left = self.time_to_live().await;
        assert_ne!(left, Ttl::Us(0), "a key is never written without time to live");
        match left {
            Ttl::Us(left_us) => {
                // A second covers the server's own, coarser clock of expiries. Without it the key is gone as soon as it is full.
                let lasts_us = left_us - SLACK_US;
                self.life.expires_us = Some(now + lasts_us);
                let is_paid =
                    lasts_us < PAID_WITHIN_US && flows_within(self.redis.limit(), lasts_us) < FLOW_MAX;
                self.life.is_cut = !is_paid || !self.is_retained;
            }
            Ttl::Unchanged => assert!(self.life.expires_us.is_some(), "a key without time to live"),
            Ttl::NoKey => {}
        }
        self.life.is_forgotten &= left == Ttl::NoKey;
        decisions
    }

    /// The time to live that the last operation has set, which is taken away: the trace has a clock of its own.
    async fn time_to_live(&mut self) -> Ttl {
        let (left, after, ()): (i64, (u64, u64), ()) = redis::pipe()
            .cmd("PTTL")
            .arg(&self.stored)
            .cmd("TIME")
            .cmd("PERSIST")
            .arg(&self.stored)
            .query_async(&mut self.connection)
            .await
            .unwrap();
        let before_ms = self.life.server_us / 1_000;
        self.life.server_us = after.0 * 1_000_000 + after.1;
        match left {
            -2 => Ttl::NoKey,
            -1 => Ttl::Unchanged,
            // The server counts in milliseconds. What has passed on its clock since the key was written is mostly none.
            left => Ttl::Us((left as u64 + (self.life.server_us / 1_000 - before_ms)) * 1_000),
        }
    }
}

/// What is known of the time to live of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ttl {
    NoKey,
    /// The operation has not set it.
    Unchanged,
    Us(u64),
}

/// By how much a time to live is longer than until the key is full again.
const SLACK_US: u64 = 1_000_000;

fn random_rate(random: &mut Random) -> Rate {
    let (permits, us) = match random.below(4) {
        0 => (1 + random.below(12), 1 + random.below(100)),
        1 => {
            (1 + random.below(1_000), [1_000, 1_000_000, 60_000_000, 3_600_000_000][random.below(4) as usize])
        }
        2 => (1 + random.below(1_000_000), 1 + random.below(10)),
        _ => (1 + random.below(12), 86_400_000_000),
    };
    Rate::new(permits, Micros::new(us)).unwrap()
}

const ALGORITHMS: [&str; 7] = [
    "token bucket",
    "interval bucket",
    "leaky bucket",
    "fixed window",
    "sliding log",
    "sliding counter",
    "calendar quota",
];

fn random_limit(algorithm: &str, random: &mut Random) -> Limit {
    loop {
        let rate = random_rate(random);
        let size = if random.one_in(4) { 1 + random.below(1_000_000) } else { 1 + random.below(12) };
        let made = match algorithm {
            "token bucket" => TokenBucket::new(size, rate).map(Limit::TokenBucket),
            "interval bucket" => IntervalBucket::new(size, rate).map(Limit::IntervalBucket),
            "leaky bucket" => {
                let mode = [LeakyMode::Meter, LeakyMode::Queue][random.below(2) as usize];
                LeakyBucket::new(size, rate, mode).map(Limit::LeakyBucket)
            }
            "fixed window" => {
                FixedWindow::new(rate).map(|it| Limit::FixedWindow(it.counting_denied(random.one_in(4))))
            }
            "sliding log" => {
                SlidingLog::new(rate).map(|it| Limit::SlidingLog(it.counting_denied(random.one_in(4))))
            }
            "calendar quota" => {
                let (unit, anchor) = [("day", None), ("week", Some("friday")), ("month", Some("31"))]
                    [random.below(3) as usize];
                let zone = ["Asia/Seoul", "America/New_York", "Africa/Cairo"][random.below(3) as usize];
                let calendar = Calendar::parse(zone, unit, anchor).unwrap();
                CalendarQuota::new(size, calendar).map(Limit::CalendarQuota)
            }
            _ => {
                let sub_buckets = [1, 1, 2, 3, 10][random.below(5) as usize];
                SlidingCounter::new(rate, sub_buckets, random.one_in(3))
                    .map(|it| Limit::SlidingCounter(it.counting_denied(random.one_in(4))))
            }
        };
        if let Ok(limit) = made {
            return limit;
        }
    }
}

fn random_ask(random: &mut Random, limit: &Limit) -> Ask {
    let cost = match random.below(8) {
        0 => 0,
        1 => limit.size() + random.below(3),
        2 => random.below(limit.size()) + 1,
        _ => 1 + random.below(limit.size().min(3)),
    };
    let horizon = limit.horizon().get();
    Ask { cost, wait: random.one_in(3).then(|| Micros::new(random.below(horizon + horizon / 4 + 1))) }
}

fn random_op(random: &mut Random, limit: &Limit, grants: &[(u64, u64)], now: u64) -> Op {
    match random.below(18) {
        0 => Op::Reset,
        1 => {
            let permits = random_ask(random, limit).cost;
            Op::Charge { permits: if random.one_in(4) { (1 << 51) - 1 } else { permits } }
        }
        2 | 3 if !grants.is_empty() => {
            let (permits, at) = grants[grants.len() - 1 - random.below(grants.len().min(3) as u64) as usize];
            Op::Refund { permits, at }
        }
        // A reservation that is cancelled before it starts.
        16 | 17 if grants.last().is_some_and(|(_, at)| *at > now) => {
            let (permits, at) = grants[grants.len() - 1];
            Op::Refund { permits, at }
        }
        4 | 5 => Op::Peek(random_ask(random, limit)),
        6 | 7 => {
            // Mostly equal ones, which the script takes in one step.
            let mut ask = random_ask(random, limit);
            let asks = (0..2 + random.below(10)).map(|_| {
                if random.one_in(4) {
                    ask = random_ask(random, limit);
                }
                ask
            });
            Op::TakeEach(asks.collect())
        }
        _ => Op::Take(random_ask(random, limit)),
    }
}

fn random_time(random: &mut Random, now: u64, horizon: u64) -> u64 {
    match random.below(16) {
        0 => now.saturating_sub(random.below(horizon + 1)),
        1 if random.one_in(4) => now.saturating_sub(horizon * 2 + random.below(horizon * 10 + 1)),
        2 | 3 => now + random.below(horizon * 2 + 1),
        4..8 => now + random.below(horizon / 8 + 2),
        _ => now + random.below(2),
    }
}

/// In the year 2112: what is added to it must stay below 2^53.
const TIME_MAX: u64 = 1 << 52;

fn seed() -> u64 {
    std::env::var("TESTS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

async fn compare(server: &RedisServer, algorithm: &str, steps: u64) {
    let home = Home::of(server).await;
    let seed = seed();
    let mut random = Random::new(seed);
    let mut done = 0;
    while done < steps {
        let limit = random_limit(algorithm, &mut random);
        let mut twins = home.twins(limit, format!("user:{done}"));
        let mut now = [0, 1_763_000_000_000_000][random.below(2) as usize] + random.below(1_000_000);
        let mut grants = Vec::new();
        for step in 0..300 {
            now = random_time(&mut random, now, limit.horizon().get());
            now = twins.or_expired(&mut random, now);
            if now > TIME_MAX {
                break;
            }
            home.clock.set(Timestamp::from_micros(now));
            let op = random_op(&mut random, &limit, &grants, now);
            twins.expire(now).await;
            let memory = twins.in_memory(&op);
            let redis = twins.in_redis(&op, now).await;
            if std::env::var_os("TESTS_TRACE").is_some() {
                println!("{now} {op:?} -> {memory:?}");
            }
            assert_eq!(memory, redis, "seed {seed}, step {step} of {limit:?} at {now}: {op:?}");
            let asks = match &op {
                Op::Take(ask) => vec![*ask],
                Op::TakeEach(asks) => asks.clone(),
                _ => Vec::new(),
            };
            if matches!(op, Op::Refund { permits, at } if grants.last() == Some(&(permits, at))) {
                grants.pop();
            }
            for (ask, decision) in asks.iter().zip(&memory).filter(|(_, decision)| decision.is_admitted()) {
                grants.push((ask.cost, now + decision.outcome.delay().get()));
            }
            done += asks.len().max(1) as u64;
        }
    }
    let stats = home.engine.stats();
    println!("{algorithm}: {done} steps, no difference (seed {seed}); {stats:?}");
}

/// Two to four limits that a key may come under, alike or not at all.
fn random_limits(algorithm: &str, random: &mut Random) -> Vec<Limit> {
    let alike = random.one_in(2);
    let (rate, parts, strict) = loop {
        let rate = random_rate(random);
        if rate.permits() <= 1_000 && rate.per().get().is_multiple_of(6) {
            break (rate, [1, 1, 2, 3][random.below(4) as usize], random.one_in(2));
        }
    };
    let mut limits = Vec::new();
    while limits.len() < 2 + random.below(3) as usize {
        let size = if random.one_in(4) { 1 + random.below(1_000_000) } else { 1 + random.below(30) };
        let other = Rate::new(size, rate.per()).unwrap();
        let made = match algorithm {
            // Both refills have one name, and share keys.
            "token bucket" if !alike || random.one_in(3) => {
                let kind = ["token bucket", "interval bucket"][random.below(2) as usize];
                Ok(random_limit(kind, random))
            }
            _ if !alike && algorithm != "calendar quota" => Ok(random_limit(algorithm, random)),
            "token bucket" => match random.one_in(4) {
                true => IntervalBucket::new(size, rate).map(Limit::IntervalBucket),
                false => TokenBucket::new(size, rate).map(Limit::TokenBucket),
            },
            "leaky bucket" => {
                let mode = [LeakyMode::Meter, LeakyMode::Queue][random.below(2) as usize];
                LeakyBucket::new(size, rate, mode).map(Limit::LeakyBucket)
            }
            "fixed window" => FixedWindow::new(other).map(Limit::FixedWindow),
            "calendar quota" => CalendarQuota::new(size, Calendar::parse("Asia/Seoul", "day", None).unwrap())
                .map(Limit::CalendarQuota),
            "sliding log" => SlidingLog::new(other).map(Limit::SlidingLog),
            _ => SlidingCounter::new(other, parts, strict).map(Limit::SlidingCounter),
        };
        limits.extend(made);
    }
    // Logs are kept for the longest window, or not, and some of it only until an instant.
    let longest = limits.iter().map(Limit::horizon).max().unwrap();
    if algorithm.ends_with("sliding log") {
        let mut retention = || Retention {
            time: if random.one_in(4) { Micros::ZERO } else { longest },
            entries: if random.one_in(2) { random.below(8) } else { 1_000_000 },
        };
        let (kept, earlier) = (retention(), retention());
        let lapses = Timestamp::from_micros(1_763_000_000_000_000 + random.below(4 * longest.get() + 1));
        for limit in &mut limits {
            if let Limit::SlidingLog(log) = limit {
                *log = log.retaining(kept).retaining_until(earlier, lapses);
            }
        }
    }
    limits
}

/// One key under limits that change back and forth.
async fn compare_changing(server: &RedisServer, algorithm: &str, steps: u64) {
    let home = Home::remembering(server, Duration::ZERO).await;
    let seed = seed();
    let mut random = Random::new(seed);
    let (mut done, mut changes, mut lay_over) = (0, 0, 0);
    while done < steps {
        let limits = random_limits(algorithm, &mut random);
        let memory = MemoryEngine::new(MemoryConfig { max_keys: 64 }, home.clock.clone());
        let mut all: Vec<_> =
            limits.iter().map(|limit| home.twins_in(&memory, *limit, format!("changing:{done}"))).collect();
        let longest = limits.iter().map(Limit::horizon).max().unwrap();
        for twins in &mut all {
            twins.is_retained = limits.iter().all(|limit| match limit {
                Limit::SlidingLog(log) => log.retention().time >= longest,
                _ => true,
            });
        }
        let mut now = [0, 1_763_000_000_000_000][random.below(2) as usize] + random.below(1_000_000);
        let (mut grants, mut which) = (Vec::new(), 0);
        for step in 0..200 {
            if random.one_in(3) {
                which = random.below(limits.len() as u64) as usize;
                changes += 1;
            }
            let (limit, twins) = (&limits[which], &mut all[which]);
            now = random_time(&mut random, now, limit.horizon().get());
            now = twins.or_expired(&mut random, now);
            if now > TIME_MAX {
                break;
            }
            home.clock.set(Timestamp::from_micros(now));
            let op = random_op(&mut random, limit, &grants, now);
            twins.expire(now).await;
            let memory = twins.in_memory(&op);
            let redis = twins.in_redis(&op, now).await;
            if std::env::var_os("TESTS_TRACE").is_some() {
                let shown = server.cli(&["HGETALL", &twins.stored]).replace('\n', " ");
                println!("{now} {which} {op:?} -> {memory:?} | {shown}");
            }
            assert_eq!(memory, redis, "seed {seed}, step {step} of {which} of {limits:#?} at {now}: {op:?}");
            lay_over += u64::from(
                !matches!(limit, Limit::SlidingLog(_)) && step % 16 == 0 && {
                    let kept: Option<String> = redis::cmd("HGET")
                        .arg(&twins.stored)
                        .arg("limit")
                        .query_async(&mut twins.connection)
                        .await
                        .unwrap();
                    kept.is_some_and(|kept| kept.contains(" over "))
                },
            );
            let asks = match &op {
                Op::Take(ask) => vec![*ask],
                Op::TakeEach(asks) => asks.clone(),
                _ => Vec::new(),
            };
            if matches!(op, Op::Refund { permits, at } if grants.last() == Some(&(permits, at))) {
                grants.pop();
            }
            for (ask, decision) in asks.iter().zip(&memory).filter(|(_, decision)| decision.is_admitted()) {
                grants.push((ask.cost, now + decision.outcome.delay().get()));
            }
            done += asks.len().max(1) as u64;
            let life = all[which].life;
            all.iter_mut().for_each(|twins| twins.life = life);
        }
    }
    println!(
        "{algorithm}: {done} steps, {changes} changes, {lay_over} lay over, no difference (seed {seed})"
    );
}

fn compare_changing_on(program: ServerProgram, algorithm: &str, steps: u64) {
    run(async { compare_changing(&RedisServer::build().program(program).start(), algorithm, steps).await });
}

fn compare_on(program: ServerProgram, algorithm: &str, steps: u64) {
    run(async { compare(&RedisServer::build().program(program).start(), algorithm, steps).await });
}

/// The same for each algorithm and server, so that they run side by side and fail apart.
macro_rules! differential {
    ($($name:ident: $algorithm:literal;)*) => {
        mod redis_7 {
            $(#[test]
            fn $name() {
                super::compare_on(super::ServerProgram::Redis, $algorithm, super::long_or(100_000, 4_000));
            })*
        }
        mod valkey_9 {
            $(#[test]
            fn $name() {
                super::compare_on(super::ServerProgram::Valkey, $algorithm, super::long_or(100_000, 4_000));
            })*
        }
        mod redis_6 {
            $(#[test]
            fn $name() {
                super::compare_on(super::ServerProgram::Redis62, $algorithm, super::long_or(100_000, 1_000));
            })*
        }
    };
}

/// The same under limits that change.
macro_rules! changing {
    ($($name:ident: $algorithm:literal;)*) => {
        mod changing_redis_7 {
            $(#[test]
            fn $name() {
                super::compare_changing_on(super::ServerProgram::Redis, $algorithm, super::long_or(100_000, 6_000));
            })*
        }
        mod changing_valkey_9 {
            $(#[test]
            fn $name() {
                super::compare_changing_on(super::ServerProgram::Valkey, $algorithm, super::long_or(100_000, 3_000));
            })*
        }
        mod changing_redis_6 {
            $(#[test]
            fn $name() {
                super::compare_changing_on(super::ServerProgram::Redis62, $algorithm, super::long_or(100_000, 1_000));
            })*
        }
    };
}

changing! {
    token_buckets_carry_over_alike_in_memory_and_in_the_store: "token bucket";
    leaky_buckets_carry_over_alike_in_memory_and_in_the_store: "leaky bucket";
    fixed_windows_carry_over_alike_in_memory_and_in_the_store: "fixed window";
    sliding_logs_carry_over_alike_in_memory_and_in_the_store: "sliding log";
    sliding_counters_carry_over_alike_in_memory_and_in_the_store: "sliding counter";
    calendar_quotas_carry_over_alike_in_memory_and_in_the_store: "calendar quota";
}

differential! {
    the_token_bucket_is_the_same_in_memory_and_in_the_store: "token bucket";
    the_interval_bucket_is_the_same_in_memory_and_in_the_store: "interval bucket";
    the_leaky_bucket_is_the_same_in_memory_and_in_the_store: "leaky bucket";
    the_fixed_window_is_the_same_in_memory_and_in_the_store: "fixed window";
    the_sliding_log_is_the_same_in_memory_and_in_the_store: "sliding log";
    the_sliding_counter_is_the_same_in_memory_and_in_the_store: "sliding counter";
    the_calendar_quota_is_the_same_in_memory_and_in_the_store: "calendar quota";
}

#[test]
fn a_log_that_grows_and_shrinks_is_the_same_in_memory_and_in_the_store() {
    run(async {
        let server = RedisServer::start();
        let home = Home::of(&server).await;
        let mut random = Random::new(seed());
        let mut sizes = Vec::new();
        for round in 0..long_or(50, 3) {
            let limit = 100 + random.below(900);
            let rate = Rate::new(limit, Micros::new(limit * 10)).unwrap();
            let mut twins =
                home.twins(Limit::SlidingLog(SlidingLog::new(rate).unwrap()), format!("ring:{round}"));
            let (mut now, mut grants) = (1_763_000_000_000_000, Vec::new());
            for step in 0..3_000 {
                // As fast as the limit allows, faster, and now and then a long pause.
                now += if random.one_in(500) { limit * random.below(12) } else { random.below(20) };
                home.clock.set(Timestamp::from_micros(now));
                let op = match random.below(40) {
                    0 => random_op(&mut random, twins.memory.limit(), &grants, now),
                    1 if !grants.is_empty() => {
                        let (permits, at) = grants[random.below(grants.len() as u64) as usize];
                        Op::Refund { permits, at }
                    }
                    2 => Op::Take(random_ask(&mut random, twins.memory.limit())),
                    _ => Op::Take(Ask::of(1)),
                };
                twins.expire(now).await;
                let memory = twins.in_memory(&op);
                let redis = twins.in_redis(&op, now).await;
                assert_eq!(memory, redis, "round {round}, step {step} at {now}: {op:?}");
                if let (Op::Take(ask), Some(decision)) = (&op, memory.first())
                    && decision.is_admitted()
                {
                    grants.push((ask.cost, now + decision.outcome.delay().get()));
                }
                let members: u64 =
                    redis::cmd("ZCARD").arg(&twins.stored).query_async(&mut twins.connection).await.unwrap();
                sizes.push(members);
            }
        }
        assert!(sizes.iter().any(|size| *size > 4), "it has grown");
        assert!(sizes.windows(2).any(|two| two[1] > 0 && two[1] < two[0]), "it has shrunk");
    });
}

#[test]
fn a_log_never_runs_out_of_sums() {
    run(async {
        let server = RedisServer::start();
        let home = Home::of(&server).await;
        let mut random = Random::new(seed());
        let rate = Rate::new(1 << 51, Micros::new(100)).unwrap();
        let mut twins = home.twins(Limit::SlidingLog(SlidingLog::new(rate).unwrap()), "sums".to_owned());
        let mut now = 1_763_000_000_000_000;
        for step in 0..long_or(20_000, 2_000) {
            now += random.below(40);
            home.clock.set(Timestamp::from_micros(now));
            let permits = 1 + random.below(1 << 50);
            let op = match random.below(8) {
                0 => Op::Charge { permits },
                1 => Op::Refund { permits, at: now - random.below(40) },
                2 => Op::Peek(Ask::of(permits).within(Micros::new(random.below(100)))),
                3 => Op::Take(Ask::of(permits).within(Micros::new(random.below(100)))),
                _ => Op::Take(Ask::of(permits)),
            };
            let memory = twins.in_memory(&op);
            let redis = twins.in_redis(&op, now).await;
            assert_eq!(memory, redis, "step {step} at {now}: {op:?}");
        }
    });
}

#[test]
fn several_limits_are_taken_together_or_not_at_all() {
    run(async {
        let server = RedisServer::start();
        let home = Home::remembering(&server, Duration::ZERO).await;
        let mut random = Random::new(seed());
        for round in 0..long_or(1_000, 60) {
            let many = 2 + random.below(4);
            let memory = home.memory();
            // Each has another limit that it may change to.
            let mut others = Vec::new();
            let mut all: Vec<_> = (0..many)
                .map(|number| {
                    let algorithm = ALGORITHMS[random.below(7) as usize];
                    let key = format!("several:{round}:{number}");
                    let [one, other] = [(); 2].map(|()| {
                        let limit = random_limit(algorithm, &mut random);
                        home.twins_in(&memory, limit, key.clone())
                    });
                    others.push(other);
                    one
                })
                .collect();
            let horizon = all.iter().map(|twins| twins.redis.limit().horizon().get()).min().unwrap();
            let mut now = 1_763_000_000_000_000;
            for _ in 0..20 {
                now = random_time(&mut random, now, horizon);
                home.clock.set(Timestamp::from_micros(now));
                for (one, other) in all.iter_mut().zip(&mut others) {
                    if random.one_in(6) {
                        std::mem::swap(one, other);
                    }
                }
                let costs: Vec<u64> = all
                    .iter()
                    .map(|twins| match (random.below(16), twins.memory.limit().size()) {
                        (0, _) => 0,
                        (1, size) => size + 1,
                        (_, size) => 1 + random.below(size.min(3)),
                    })
                    .collect();
                let asks: Vec<_> = all
                    .iter()
                    .zip(&costs)
                    .map(|(twins, cost)| {
                        let wait = Micros::new(random.below(twins.redis.limit().horizon().get()));
                        let ask = Ask::of(*cost);
                        (if random.below(4) == 0 { ask.within(wait) } else { ask }, random.below(8) > 0)
                    })
                    .collect();
                let both = all.iter().zip(&asks);
                let checks: Vec<_> = both
                    .map(|(twins, (ask, enforced))| Check {
                        enforced: *enforced,
                        ..Check::new(twins.redis.id(), &twins.key, 0).with_ask(*ask)
                    })
                    .collect();
                let redis = home.engine.decide(&checks).await.unwrap();
                let redis: Vec<_> = redis.into_iter().flatten().map(|it| it.decision).collect();
                let checks: Vec<_> = checks
                    .iter()
                    .zip(&all)
                    .map(|(it, twins)| Check { limit: twins.in_memory, ..*it })
                    .collect();
                let in_memory: Vec<_> = memory.decide_all(&checks).into_iter().flatten().collect();
                assert_eq!(in_memory, redis, "round {round} at {now}: {asks:?}");
            }
            for twins in &mut all {
                twins.in_redis(&Op::Reset, now).await;
            }
        }
    });
}

/// A thousand a minute, used up; then a hundred a minute; then a thousand again.
#[test]
fn consumed_permits_stay_consumed_in_the_store() {
    run(async {
        let server = RedisServer::start();
        let home = Home::remembering(&server, Duration::ZERO).await;
        let bucket = |size| Limit::TokenBucket(TokenBucket::new(size, Rate::per_minute(size)).unwrap());
        let [large, small] = [1_000, 100].map(|size| home.engine.limiter("token_bucket", bucket(size)));
        let stored = |field: &str| server.cli(&["HGET", "rate_limiter:token_bucket:user:1", field]);
        let at = |ms: u64| home.clock.set(Timestamp::from_micros(1_763_000_000_000_000 + ms * 1_000));
        at(0);
        assert!(large.try_acquire("user:1", 1_000).await.unwrap().is_admitted());
        assert_eq!(stored("limit").trim(), "1/60000/1/1000");
        let looked = small.peek("user:1", Ask::of(1)).await.unwrap();
        assert_eq!((looked.remaining, looked.outcome.retry()), (0, Micros::from_millis(600)));
        assert_eq!(stored("limit").trim(), "1/60000/1/1000", "who only looks changes nothing");
        let denied = small.try_acquire("user:1", 1).await.unwrap();
        assert_eq!((denied.remaining, denied.outcome.retry()), (0, Micros::from_millis(600)));
        assert_eq!(stored("limit").trim(), "1/600000/1/100 over 900 0");
        at(600);
        assert!(small.try_acquire("user:1", 1).await.unwrap().is_admitted(), "as was promised");
        at(6_600);
        let back = large.try_acquire("user:1", 1).await.unwrap();
        assert_eq!((back.is_admitted(), back.remaining), (true, 9), "ten have flowed");
        assert_eq!(stored("limit").trim(), "1/60000/1/1000");
    });
}

/// States of an earlier version say nothing of a limit: they are the caller's own.
#[test]
fn state_without_its_limit_belongs_to_the_limit_that_asks() {
    run(async {
        let server = RedisServer::start();
        let home = Home::of(&server).await;
        home.clock.set(Timestamp::from_micros(1_763_000_000_000_000));
        let key = "rate_limiter:token_bucket:user:1";
        server.cli(&["HSET", key, "tokens", "40", "last_refill", "1763000000000000", "later", "kept"]);
        let limit = Limit::TokenBucket(TokenBucket::new(100, Rate::per_minute(100)).unwrap());
        let limiter = home.engine.limiter("token_bucket", limit);
        assert_eq!(limiter.try_acquire("user:1", 1).await.unwrap().remaining, 39);
        assert_eq!(
            server.cli(&["HGET", key, "limit"]).trim(),
            "1/600000/1/100",
            "and it is said from now on"
        );
        assert_eq!(server.cli(&["HGET", key, "later"]).trim(), "kept");
        server.cli(&["HSET", key, "limit", "nonsense"]);
        assert!(limiter.try_acquire("user:1", 1).await.is_err());
    });
}

#[test]
fn stored_keys_look_as_documented() {
    run(async {
        let server = RedisServer::start();
        let mut config = RedisConfig::new(server.url().parse().unwrap());
        config.deadline = Duration::from_secs(10);
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        let limit = Limit::TokenBucket(TokenBucket::new(100, Rate::per_second(10)).unwrap());
        let limiter = engine.limiter("token_bucket", limit);
        let decision = limiter.try_acquire("user:12345", 40).await.unwrap();
        assert_eq!((decision.is_admitted(), decision.remaining), (true, 60));
        let client = redis::Client::open(server.url()).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let key = "rate_limiter:token_bucket:user:12345";
        let tokens: String =
            redis::cmd("HGET").arg(key).arg("tokens").query_async(&mut connection).await.unwrap();
        assert_eq!(tokens, "60", "whole tokens");
        let ttl: i64 = redis::cmd("PTTL").arg(key).query_async(&mut connection).await.unwrap();
        assert!((4_000..=5_000).contains(&ttl), "time to full and a second: {ttl}");
        limiter.reset("user:12345").await.unwrap();
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query_async(&mut connection).await.unwrap();
        assert_eq!(keys, ["rate_limiter:nodes"], "beside who is there");
    });
}
