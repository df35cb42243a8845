//! One arithmetic, two homes: the same random trace through the Rust algorithm and through its Lua twin in a real Redis
//! gives the same whole answers, to the microsecond.

use redis::Connection;
use tollgate::algorithm::{Algorithm, BucketState};
use tollgate::{Ask, Micros, Outcome, Rate, Timestamp, TokenBucket};
use tollgate_testkit::{Random, RedisServer, long_or};

const TOKEN_BUCKET: &str = include_str!("../../src/engine/redis/token_bucket.lua");

/// Admitted, delay, retry, remaining, reset.
type Answer = (i64, u64, u64, u64, u64);

/// A limit in both homes, and one key of it.
struct Twins {
    bucket: TokenBucket,
    state: Option<BucketState>,
    redis: Connection,
    script: redis::Script,
    key: String,
    /// When the key in Redis would be gone, in the time that is handed in.
    expires_us: Option<u64>,
}

enum Op {
    Decide(Ask),
    Peek(Ask),
    Refund { cost: u64, at: u64 },
    Charge { cost: u64 },
    Reset,
}

impl Twins {
    fn new(bucket: TokenBucket, server: &RedisServer, key: String) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let redis = client.get_connection().unwrap();
        Self { bucket, state: None, redis, script: redis::Script::new(TOKEN_BUCKET), key, expires_us: None }
    }

    /// Forgets the key in both homes when its time to live has passed. (Both must: a state that is still there tells a
    /// clock that was set back afterwards from one that was not.)
    fn expire(&mut self, now: Timestamp) {
        if self.expires_us.is_some_and(|expires| expires <= now.as_micros()) {
            let _: () = redis::cmd("DEL").arg(&self.key).query(&mut self.redis).unwrap();
            self.state = None;
            self.expires_us = None;
        }
    }

    fn in_rust(&mut self, now: Timestamp, op: &Op) -> Answer {
        let mut state = self.state.unwrap_or_else(|| self.bucket.fresh(now));
        let outcome = match *op {
            Op::Decide(ask) => self.bucket.decide(&mut state, now, ask),
            Op::Peek(ask) => self.bucket.peek(&state, now, ask),
            Op::Refund { cost, at } => {
                self.bucket.refund(&mut state, now, cost, Timestamp::from_micros(at));
                Outcome::NOW
            }
            Op::Charge { cost } => {
                self.bucket.charge(&mut state, now, cost);
                Outcome::NOW
            }
            Op::Reset => {
                self.state = None;
                return (1, 0, 0, 0, 0);
            }
        };
        if self.state.is_some() || state != self.bucket.fresh(now) {
            self.state = Some(state);
        }
        let standing = self.bucket.standing(&state, now);
        let admitted = match outcome {
            Outcome::Admitted { .. } => 1,
            Outcome::Denied { .. } => 0,
            Outcome::Impossible => -1,
        };
        (admitted, outcome.delay().get(), outcome.retry().get(), standing.remaining, standing.reset.get())
    }

    fn in_lua(&mut self, now: Timestamp, op: &Op) -> Answer {
        let us = now.as_micros();
        let (name, cost, extra) = match *op {
            Op::Decide(ask) => ("decide", ask.cost, ask.wait.map_or(0, Micros::get)),
            Op::Peek(ask) => ("peek", ask.cost, ask.wait.map_or(0, Micros::get)),
            Op::Refund { cost, at } => ("refund", cost, at),
            Op::Charge { cost } => ("charge", cost, 0),
            Op::Reset => {
                let _: () = redis::cmd("DEL").arg(&self.key).query(&mut self.redis).unwrap();
                self.expires_us = None;
                return (1, 0, 0, 0, 0);
            }
        };
        let bucket = &self.bucket;
        let mut call = self.script.key(&self.key);
        call.arg(us).arg(name).arg(cost).arg(extra);
        call.arg(bucket.tick()).arg(bucket.unit()).arg(bucket.flow()).arg(bucket.capacity());
        let (admitted, delay, retry, remaining, reset, ttl): (i64, u64, u64, u64, u64, u64) =
            call.invoke(&mut self.redis).unwrap();
        if ttl > 0 {
            let left: i64 = redis::cmd("PTTL").arg(&self.key).query(&mut self.redis).unwrap();
            assert!(left > 0 && left <= ttl as i64, "PTTL {left} of {ttl}");
            // The server's clock is not the one of the trace.
            let _: () = redis::cmd("PERSIST").arg(&self.key).query(&mut self.redis).unwrap();
            self.expires_us = Some(us + ttl * 1_000);
        }
        (admitted, delay, retry, remaining, reset)
    }
}

fn random_bucket(random: &mut Random) -> TokenBucket {
    loop {
        let (permits, us) = match random.below(4) {
            0 => (1 + random.below(12), 1 + random.below(100)),
            1 => (
                1 + random.below(1_000),
                [1_000, 1_000_000, 60_000_000, 3_600_000_000][random.below(4) as usize],
            ),
            2 => (1 + random.below(2_000_000_000), 1 + random.below(10)),
            _ => (1 + random.below(1_000_003), 86_400_000_000),
        };
        let capacity = if random.one_in(4) { 1 + random.below(1_000_000) } else { 1 + random.below(12) };
        let rate = Rate::new(permits, Micros::new(us)).unwrap();
        if let Ok(bucket) = TokenBucket::new(capacity, rate) {
            return bucket;
        }
    }
}

fn random_op(random: &mut Random, bucket: &TokenBucket, grants: &[(u64, u64)]) -> Op {
    let horizon = bucket.time_to_full().get();
    let cost = match random.below(8) {
        0 => 0,
        1 => bucket.capacity() + random.below(3),
        2 => random.below(bucket.capacity()) + 1,
        _ => 1 + random.below(bucket.capacity().min(3)),
    };
    let wait = random.one_in(3).then(|| Micros::new(random.below(horizon + horizon / 4 + 1)));
    match random.below(16) {
        0 => Op::Reset,
        1 => Op::Charge { cost: if random.one_in(4) { (1 << 51) - 1 } else { cost } },
        2 | 3 if !grants.is_empty() => {
            let (cost, at) = grants[grants.len() - 1 - random.below(grants.len().min(3) as u64) as usize];
            Op::Refund { cost, at }
        }
        4 | 5 => Op::Peek(Ask { cost, wait }),
        _ => Op::Decide(Ask { cost, wait }),
    }
}

#[test]
fn the_token_bucket_is_the_same_in_rust_and_in_redis() {
    let server = RedisServer::start();
    let seed = std::env::var("TESTS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = Random::new(seed);
    let steps = long_or(100_000, 6_000);
    let mut done = 0;
    while done < steps {
        let bucket = random_bucket(&mut random);
        let mut twins = Twins::new(bucket, &server, format!("rate_limiter:token_bucket:user:{done}"));
        let horizon = bucket.time_to_full().get();
        let mut now = [0, 1_763_000_000_000_000][random.below(2) as usize] + random.below(1_000_000);
        let mut grants = Vec::new();
        for step in 0..300 {
            now = match random.below(16) {
                0 => now.saturating_sub(random.below(horizon + 1)),
                1 if random.one_in(4) => now.saturating_sub(horizon * 2 + random.below(horizon * 10 + 1)),
                2 | 3 => now + random.below(horizon * 2 + 1),
                4..8 => now + random.below(horizon / 8 + 2),
                _ => now + random.below(2),
            };
            let op = random_op(&mut random, &bucket, &grants);
            let at = Timestamp::from_micros(now);
            twins.expire(at);
            let (rust, lua) = (twins.in_rust(at, &op), twins.in_lua(at, &op));
            assert_eq!(rust, lua, "seed {seed}, step {step} of {bucket:?} at {now}");
            if let (Op::Decide(ask), (1, delay, ..)) = (&op, rust) {
                grants.push((ask.cost, now + delay));
            }
            done += 1;
        }
    }
    println!("{done} steps, no difference (seed {seed})");
}

#[test]
fn the_script_can_take_the_time_of_the_server() {
    let server = RedisServer::start();
    let bucket = TokenBucket::new(100, Rate::per_second(10)).unwrap();
    let mut twins = Twins::new(bucket, &server, "rate_limiter:token_bucket:user:1".to_owned());
    let mut call = twins.script.key(&twins.key);
    call.arg("")
        .arg("decide")
        .arg(40)
        .arg(0)
        .arg(bucket.tick())
        .arg(bucket.unit())
        .arg(bucket.flow())
        .arg(100);
    let (admitted, _, _, remaining): (i64, u64, u64, u64) = {
        let answer: Vec<u64> = call.invoke(&mut twins.redis).unwrap();
        (answer[0] as i64, answer[1], answer[2], answer[3])
    };
    assert_eq!((admitted, remaining), (1, 60));
    let tokens: String = redis::cmd("HGET").arg(&twins.key).arg("tokens").query(&mut twins.redis).unwrap();
    assert_eq!(tokens, "60", "redis-cli shows whole tokens");
    let ttl: i64 = redis::cmd("PTTL").arg(&twins.key).query(&mut twins.redis).unwrap();
    assert!((4_000..=5_000).contains(&ttl), "time to full and a second: {ttl}");
}
