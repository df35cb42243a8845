//! Lending in the store and in Rust: the same random trace of loans, takes, returns and steps of the clock through both gives the same
//! decisions and the same grants, to the microsecond. Time is handed in to both.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tollgate::algorithm::Algorithm;
use tollgate::lease::Lease;
use tollgate::{
    Ask, Clock, Consistency, Decision, FixedWindow, Grant, IntervalBucket, LeakyBucket, LeakyMode,
    LeaseRequest, LeaseTerms, Limit, Micros, Outcome, Rate, RateLimiter, RedisConfig, RedisEngine,
    RedisLimiter, SlidingCounter, State, Timestamp, TokenBucket,
};
use tollgate_testkit::{Random, RedisServer, ServerProgram, long_or};

use crate::run;

/// The state in Rust, as the store would keep it.
struct Reference {
    limit: Limit,
    terms: LeaseTerms,
    /// With the limit that it was written under.
    state: Option<(Limit, State)>,
    returns: u64,
    now: Timestamp,
}

impl Reference {
    /// A step that `takes` stores the state under the new limit.
    fn with<T>(
        &mut self,
        takes: bool,
        change: impl FnOnce(&Limit, &LeaseTerms, &mut State, Timestamp) -> T,
    ) -> T {
        let found = match &self.state {
            Some((under, state)) => self.limit.migrate(under, state.clone(), self.now),
            None => self.limit.fresh(self.now),
        };
        let mut state = found.clone();
        let answer = change(&self.limit, &self.terms, &mut state, self.now);
        // Nothing is kept of a key that was only looked at.
        if takes && self.state.is_some() || state != found {
            self.state = Some((self.limit, state));
        }
        answer
    }

    fn decide(&mut self, ask: Ask) -> Decision {
        self.with(ask.cost > 0 && ask.cost <= self.limit.size(), |limit, _, state, now| {
            let outcome = limit.decide(state, now, ask);
            decision(limit, state, now, outcome)
        })
    }

    fn peek(&mut self, ask: Ask) -> Decision {
        self.with(false, |limit, _, state, now| {
            let outcome = limit.peek(state, now, ask);
            decision(limit, state, now, outcome)
        })
    }

    fn lend(&mut self, wanted: u64, parts: u64) -> Grant {
        self.with(wanted > 0, |limit, terms, state, now| terms.lend(limit, state, now, wanted, parts))
    }

    /// Says what the store would: which return it would have to be, if it is none.
    fn give_back(&mut self, lease: &Lease, number: u64) -> Option<u64> {
        if number != self.returns {
            return Some(self.returns);
        }
        let before = self.state.clone();
        self.with(false, |limit, terms, state, now| {
            terms.take_back(limit, state, now, lease.left, lease.at);
        });
        self.returns += u64::from(self.state != before);
        None
    }
}

fn decision(limit: &Limit, state: &State, now: Timestamp, outcome: Outcome) -> Decision {
    let status = limit.status(state, now);
    Decision { outcome, limit: limit.size(), remaining: status.remaining, reset: status.reset, at: now }
}

struct Home {
    clock: Clock,
    engine: RedisEngine,
    connection: MultiplexedConnection,
}

impl Home {
    async fn of(server: &RedisServer, remember_denials: Duration) -> Self {
        let clock = Clock::manual(Timestamp::default());
        let mut config = RedisConfig::new(server.url().parse().unwrap());
        config.clock = Some(clock.clone());
        config.remember_denials = remember_denials;
        config.deadline = Duration::from_secs(10);
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        engine.connected(Duration::from_secs(10)).await.unwrap();
        let client = redis::Client::open(server.url()).unwrap();
        let connection = client.get_multiplexed_async_connection().await.unwrap();
        Self { clock, engine, connection }
    }
}

/// A limit that can lend, small enough that the trace is often at its ends.
fn random_limit(random: &mut Random) -> (Limit, LeaseTerms) {
    loop {
        let permits = 200 + random.below(2_000);
        let us = [1_000, 100_003, 1_000_000, 60_000_000][random.below(4) as usize] * (1 + random.below(20));
        let Ok(rate) = Rate::new(1 + random.below(permits), Micros::new(us)) else { continue };
        let Ok(whole) = Rate::new(permits, Micros::new(us)) else { continue };
        let limit = match random.below(6) {
            0 | 1 => TokenBucket::new(permits, rate).map(Limit::TokenBucket),
            2 => LeakyBucket::new(permits, rate, LeakyMode::Meter).map(Limit::LeakyBucket),
            3 => IntervalBucket::new(permits, rate).map(Limit::IntervalBucket),
            4 => FixedWindow::new(whole).map(|it| Limit::FixedWindow(it.counting_denied(random.one_in(4)))),
            _ => SlidingCounter::new(whole, [1, 2, 10][random.below(3) as usize], random.one_in(3))
                .map(|it| Limit::SlidingCounter(it.counting_denied(random.one_in(4)))),
        };
        let consistency = if random.one_in(3) { Consistency::LeaseFast } else { Consistency::Lease };
        let Ok(limit) = limit else { continue };
        if let Ok(terms) = LeaseTerms::new(&limit, consistency) {
            return (limit, terms);
        }
    }
}

fn random_time(random: &mut Random, now: u64, horizon: u64, life: u64) -> u64 {
    match random.below(24) {
        0 => now.saturating_sub(random.below(life * 3 + 1)),
        1 => now.saturating_sub(random.below(horizon + 1)),
        2 if random.one_in(4) => now.saturating_sub(horizon * 2 + random.below(horizon * 10 + 1)),
        3 | 4 => now + random.below(horizon * 2 + 1),
        5..12 => now + random.below(life + 2),
        _ => now + random.below(life / 8 + 2),
    }
}

fn random_ask(random: &mut Random, limit: &Limit) -> Ask {
    let cost = match random.below(8) {
        0 => 0,
        1 => limit.size() + random.below(3),
        2 => random.below(limit.size()) + 1,
        _ => 1 + random.below(50),
    };
    let horizon = limit.horizon().get();
    Ask { cost, wait: random.one_in(4).then(|| Micros::new(random.below(horizon + horizon / 4 + 1))) }
}

async fn compare(server: &RedisServer, steps: u64) {
    compare_among(server, 1, steps).await;
}

/// Under one limit, or under several that change back and forth.
async fn compare_among(server: &RedisServer, many: usize, steps: u64) {
    // Among several limits one does not know what another has changed since.
    let home = Home::of(server, Duration::from_millis(if many == 1 { 80 } else { 0 })).await;
    let seed = std::env::var("TESTS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = Random::new(seed);
    let (mut done, mut lent, mut returned) = (0, 0, 0);
    while done < steps {
        let (limit, terms) = random_limit(&mut random);
        let scope = limit.algorithm().as_lowercase();
        let mut limits = vec![(limit, terms)];
        while limits.len() < many {
            let other = random_limit(&mut random);
            limits.extend((other.0.algorithm() == limit.algorithm()).then_some(other));
        }
        let stores: Vec<_> = limits.iter().map(|(limit, _)| home.engine.limiter(scope, *limit)).collect();
        let store = stores[0].clone();
        let mut trace = Trace {
            connection: home.connection.clone(),
            stored: format!("rate_limiter:{scope}:user:{done}"),
            key: format!("user:{done}"),
            store,
            expires_us: None,
            leases: Vec::new(),
            reference: Reference { limit, terms, state: None, returns: 0, now: Timestamp::default() },
        };
        let mut now = 1_763_000_000_000_000 + random.below(1_000_000);
        for step in 0..200 {
            if random.one_in(4) && many > 1 {
                let which = random.below(many as u64) as usize;
                (trace.reference.limit, trace.reference.terms) = limits[which];
                trace.store = stores[which].clone();
            }
            let (limit, terms) = (trace.reference.limit, trace.reference.terms);
            now = random_time(&mut random, now, limit.horizon().get(), terms.life().get());
            home.clock.set(Timestamp::from_micros(now));
            trace.reference.now = Timestamp::from_micros(now);
            trace.expire(now).await;
            let context = format!("seed {seed}, key {}, step {step} of {limit:?} at {now}", trace.key);
            let (more_lent, more_returned) = trace.step(&mut random, &context).await;
            trace.note_expiry(now).await;
            (lent, returned) = (lent + more_lent, returned + more_returned);
            done += 1;
        }
    }
    println!("{done} steps, {lent} permits lent, {returned} given back, no difference (seed {seed})");
    assert!(lent > done && returned > 0, "the trace lends and gives back");
}

/// A key in both homes.
struct Trace {
    store: RedisLimiter,
    reference: Reference,
    connection: MultiplexedConnection,
    key: String,
    stored: String,
    expires_us: Option<u64>,
    leases: Vec<Lease>,
}

impl Trace {
    async fn step(&mut self, random: &mut Random, context: &str) -> (u64, u64) {
        let (limit, terms) = (self.reference.limit, self.reference.terms);
        match random.below(12) {
            0..4 => {
                let ask = random_ask(random, &limit);
                let wanted = random.below(limit.size());
                let parts = 1 + random.below(8);
                let (decision, lent) = self
                    .store
                    .borrow(&self.key, ask, LeaseRequest { permits: wanted, parts, terms })
                    .await
                    .unwrap();
                assert_eq!(decision, self.reference.decide(ask), "{context}: {ask:?}, then {wanted}/{parts}");
                // A denial that is remembered lends nothing.
                let Some(lent) = lent else { return (0, 0) };
                let grant = self.reference.lend(wanted, parts);
                assert_eq!(lent.grant, grant, "{context}: lend {wanted}/{parts}");
                self.leases.push(Lease {
                    left: grant.permits,
                    at: grant.at,
                    ends: lent.sent.after(grant.life),
                });
                (grant.permits, 0)
            }
            4 | 5 if !self.leases.is_empty() => {
                let index = random.below(self.leases.len() as u64) as usize;
                let mut lease = self.leases.swap_remove(index);
                lease.left -= random.below(lease.left + 1);
                // Sometimes as if it did not know of the last one, or for the second time.
                let number = self.reference.returns - u64::from(random.one_in(4)).min(self.reference.returns);
                let told = self.store.give_back(&self.key, &lease, number, terms).await.unwrap();
                assert_eq!(
                    told,
                    self.reference.give_back(&lease, number),
                    "{context}: back {lease:?} {number}"
                );
                (0, lease.left)
            }
            6 => {
                let ask = random_ask(random, &limit);
                let peeked = self.store.peek(&self.key, ask).await.unwrap();
                assert_eq!(peeked, self.reference.peek(ask), "{context}: peek {ask:?}");
                (0, 0)
            }
            7 => {
                let permits = random.below(limit.size());
                self.store.charge(&self.key, permits).await.unwrap();
                self.reference.with(permits > 0, |limit, _, state, now| limit.charge(state, now, permits));
                (0, 0)
            }
            8 => {
                let permits = random.below(limit.size());
                let at = Timestamp::from_micros(self.reference.now.as_micros() - random.below(1_000));
                self.store.refund(&self.key, permits, at).await.unwrap();
                self.reference.with(false, |limit, _, state, now| limit.refund(state, now, permits, at));
                (0, 0)
            }
            _ => {
                let ask = random_ask(random, &limit);
                let decision = self.store.acquire(&self.key, ask).await.unwrap();
                assert_eq!(decision, self.reference.decide(ask), "{context}: {ask:?}");
                (0, 0)
            }
        }
    }

    async fn expire(&mut self, now: u64) {
        if self.expires_us.is_some_and(|expires| expires <= now) {
            let _: () = redis::cmd("DEL").arg(&self.stored).query_async(&mut self.connection).await.unwrap();
            (self.reference.state, self.reference.returns, self.expires_us) = (None, 0, None);
        }
    }

    /// The server's clock is not the one of the trace: what it would forget is forgotten by the trace's.
    async fn note_expiry(&mut self, now: u64) {
        let (left, ()): (i64, ()) = redis::pipe()
            .cmd("PTTL")
            .arg(&self.stored)
            .cmd("PERSIST")
            .arg(&self.stored)
            .query_async(&mut self.connection)
            .await
            .unwrap();
        if left > 0 {
            self.expires_us = Some(now + left as u64 * 1_000);
        }
    }
}

#[test]
fn lending_is_the_same_in_rust_and_in_redis_7() {
    run(async { compare(&RedisServer::start(), long_or(200_000, 10_000)).await });
}

#[test]
fn lending_under_changing_limits_is_the_same_in_rust_and_in_the_store() {
    run(async { compare_among(&RedisServer::start(), 3, long_or(200_000, 10_000)).await });
}

#[test]
fn lending_is_the_same_in_rust_and_in_valkey_9() {
    run(async {
        compare(&RedisServer::build().program(ServerProgram::Valkey).start(), long_or(200_000, 10_000)).await;
    });
}

#[test]
fn lending_is_the_same_in_rust_and_in_redis_6() {
    run(async {
        compare(&RedisServer::build().program(ServerProgram::Redis62).start(), long_or(200_000, 2_000)).await;
    });
}
