//! The Redis engine: the state of all keys in Redis or Valkey, shared by many nodes.
//!
//! Every check is decided by one script call, on the server's own clock. Checks of a key that come while a call for it is in
//! flight go together in the next one, and denials are remembered for a moment; both leave every answer exact.

mod driver;
mod error;
mod lines;
mod node;
mod routes;
mod script;
mod slot;
mod url;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use redis::{ClientTlsConfig, Cmd, TlsCertificates};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::DropGuard;
use tollgate_core::{Ask, Decision, Limit, Outcome, Standing, Timestamp};

pub use self::driver::RedisDriver;
use self::driver::{Tasks, driver};
pub use self::error::StoreError;
use self::lines::{Batch, Entered, LineKey, Lines, Remembered, Remembering, Step};
use self::node::Entry;
use self::routes::{Reply, Routes};
use self::script::{Change, Question, Told};
pub use self::url::{StoreUrl, StoreUrlError};
use super::RateLimiter;
use crate::clock::Clock;

/// Every key in the store begins with this.
pub const KEY_PREFIX: &str = "rate_limiter";

/// Limits that one request may be checked against together: one script call stays within a kilobyte or two.
pub const CHECKS_MAX: usize = 16;

/// The longest that a denial is remembered: resets, refunds and raised limits on other nodes are seen within this.
pub const REMEMBER_MAX: Duration = Duration::from_millis(100);

/// Which store, and how it is used.
#[derive(Clone)]
pub struct RedisConfig {
    /// Where the store is.
    pub url: StoreUrl,
    /// For one check, with everything: waiting for others, for a connection, for the answer.
    pub deadline: Duration,
    /// For one connection to be opened.
    pub connect_timeout: Duration,
    /// Connections to each server. One carries more than 100,000 checks a second, and keeps one core busy with it.
    pub connections: usize,
    /// In place of what the URL says.
    pub username: Option<String>,
    /// In place of what the URL says.
    pub password: Option<String>,
    /// The user at the sentinels, if they ask for one.
    pub sentinel_username: Option<String>,
    /// The password at the sentinels, if they ask for one.
    pub sentinel_password: Option<String>,
    /// What TLS needs beyond the system's own certificates.
    pub tls: TlsConfig,
    /// How long denials are remembered, at most [`REMEMBER_MAX`]. The default leaves time for the call that sees a change.
    pub remember_denials: Duration,
    /// How sliding logs are kept.
    pub sliding_log: LogStorage,
    /// The time by which everything is decided, instead of the server's own: for tests and replays.
    pub clock: Option<Clock>,
}

/// How a sliding log is kept in the store. Decisions are the same; memory and speed are not. Logs of one storage are not seen
/// by the other: the keys of `Packed` are `rate_limiter:SCOPE_packed:KEY`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogStorage {
    /// A sorted set, which `redis-cli` shows entry by entry.
    #[default]
    SortedSet,
    /// A string of binary entries: a fraction of the memory, and faster.
    Packed,
}

impl LogStorage {
    /// What is added to a scope, so that no key means two things.
    const fn suffix(self, limit: &Limit) -> &'static str {
        match (limit, self) {
            (Limit::SlidingLog(_), Self::Packed) => "_packed",
            (Limit::SlidingLog(_), Self::SortedSet)
            | (
                Limit::TokenBucket(_)
                | Limit::IntervalBucket(_)
                | Limit::LeakyBucket(_)
                | Limit::FixedWindow(_)
                | Limit::SlidingCounter(_),
                _,
            ) => "",
        }
    }
}

/// Certificates, in PEM.
#[derive(Clone, Default)]
pub struct TlsConfig {
    /// Whom to trust instead of the system's certificates.
    pub ca: Option<Vec<u8>>,
    /// The client's own certificate and its key, for servers that want one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl RedisConfig {
    /// The defaults for a store.
    pub fn new(url: StoreUrl) -> Self {
        Self {
            url,
            deadline: Duration::from_millis(10),
            connect_timeout: Duration::from_secs(1),
            connections: 1,
            username: None,
            password: None,
            sentinel_username: None,
            sentinel_password: None,
            tls: TlsConfig::default(),
            remember_denials: Duration::from_millis(80),
            sliding_log: LogStorage::default(),
            clock: None,
        }
    }

    fn entry(&self) -> Entry {
        let identity = self.tls.identity.as_ref();
        Entry {
            tls: self.url.tls,
            certificates: TlsCertificates {
                client_tls: identity.map(|(cert, key)| ClientTlsConfig {
                    client_cert: cert.clone(),
                    client_key: key.clone(),
                }),
                root_cert: self.tls.ca.clone(),
            },
            username: self.username.clone().or_else(|| self.url.username.clone()),
            password: self.password.clone().or_else(|| self.url.password.clone()),
            database: self.url.database,
            connect_timeout: self.connect_timeout,
            connections: self.connections,
            primaries_only: matches!(self.url.shape, url::Shape::Sentinel { .. }),
        }
    }

    fn sentinel_entry(&self) -> Entry {
        Entry {
            username: self.sentinel_username.clone(),
            password: self.sentinel_password.clone(),
            database: 0,
            ..self.entry()
        }
    }
}

/// What the engine has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RedisStats {
    /// Calls to the store.
    pub calls: u64,
    /// Checks that these calls have answered.
    pub asked: u64,
    /// Checks that were answered by a remembered denial.
    pub remembered: u64,
    /// Calls that gave no decision, by [`StoreError::CLASSES`].
    pub failed: [u64; StoreError::CLASSES.len()],
}

#[derive(Default)]
struct Counters {
    calls: AtomicU64,
    asked: AtomicU64,
    remembered: AtomicU64,
    failed: [AtomicU64; StoreError::CLASSES.len()],
}

/// The state of all keys in a store. Clones share its connections.
#[derive(Clone)]
pub struct RedisEngine(Arc<Inner>);

impl std::fmt::Debug for RedisEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisEngine").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

struct Inner {
    routes: Arc<Routes>,
    lines: Lines,
    tasks: Tasks,
    deadline: Duration,
    logs: LogStorage,
    clock: Option<Clock>,
    counters: Counters,
    /// By [`StoreError::CLASSES`]: when it was last said, and what.
    last_failures: [Mutex<Option<(Instant, StoreError)>>; StoreError::CLASSES.len()],
    limiters: AtomicU32,
    _stop: DropGuard,
}

/// Between two log lines of one reason.
const SAY_EVERY: Duration = Duration::from_secs(10);

impl RedisEngine {
    /// An engine, and the driver that must run for it to answer. Connecting is the driver's work: an unreachable store is no
    /// error here.
    pub fn new(config: RedisConfig) -> (Self, RedisDriver) {
        // The first of several engines of a process settles it, and any will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (tasks, driver, stop) = driver();
        let (entry, sentinel_entry) = (config.entry(), config.sentinel_entry());
        let StoreUrl { shape, seeds, .. } = config.url;
        let remembering =
            Remembering { longest: config.remember_denials.min(REMEMBER_MAX), clock: config.clock.clone() };
        let inner = Inner {
            routes: Routes::new(shape, seeds, entry, sentinel_entry, tasks.clone()),
            lines: Lines::new(remembering),
            tasks,
            deadline: config.deadline,
            logs: config.sliding_log,
            clock: config.clock,
            counters: Counters::default(),
            last_failures: Default::default(),
            limiters: AtomicU32::new(0),
            _stop: stop,
        };
        (Self(Arc::new(inner)), driver)
    }

    /// A limiter over the keys of `scope`: `rate_limiter:SCOPE:KEY` in the store, `rate_limiter:SCOPE_packed:KEY` for a
    /// packed log.
    pub fn limiter(&self, scope: &str, limit: Limit) -> RedisLimiter {
        let id = self.0.limiters.fetch_add(1, Ordering::Relaxed);
        RedisLimiter {
            inner: Arc::clone(&self.0),
            limit,
            id,
            prefix: format!("{KEY_PREFIX}:{scope}{}:", self.0.logs.suffix(&limit)).into(),
        }
    }

    /// Whether the store can be asked now, or why not.
    pub fn health(&self) -> Result<(), StoreError> {
        self.0.routes.health()
    }

    /// What went wrong in the last ten seconds or so, if anything did: one failure of each kind.
    pub fn recent_failures(&self) -> Vec<StoreError> {
        let recent = |last: &Mutex<Option<(Instant, StoreError)>>| {
            last.lock().as_ref().filter(|(said, _)| said.elapsed() < SAY_EVERY).map(|(_, why)| why.clone())
        };
        self.0.last_failures.iter().filter_map(recent).collect()
    }

    /// Waits until the store can be asked.
    pub async fn connected(&self, within: Duration) -> Result<(), StoreError> {
        let deadline = Instant::now() + within;
        loop {
            let health = self.health();
            if health.is_ok()
                || Instant::now() >= deadline
                || matches!(health, Err(StoreError::Refused { .. }))
            {
                return health;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// What it has done so far.
    pub fn stats(&self) -> RedisStats {
        let counters = &self.0.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RedisStats {
            calls: read(&counters.calls),
            asked: read(&counters.asked),
            remembered: read(&counters.remembered),
            failed: counters.failed.each_ref().map(read),
        }
    }

    /// Takes from several limits, or from none of them if any denies: limiter, key, permits. At most [`CHECKS_MAX`]; a key that
    /// stands twice with one limiter is asked for the sum. The decisions are in the order of the checks. Where all limits are
    /// in one place (one server, or one slot of a cluster) that is one step; else one for each slot, and what was taken before
    /// a denial is given back.
    pub async fn acquire_all(
        &self,
        checks: &[(&RedisLimiter, &str, u64)],
    ) -> Result<Vec<Decision>, StoreError> {
        if checks.len() > CHECKS_MAX {
            self.0.count_failure(&StoreError::Overloaded);
            return Err(StoreError::Overloaded);
        }
        let mut sums: Vec<(&RedisLimiter, &str, u64)> = Vec::with_capacity(checks.len());
        let mut sum_of = Vec::with_capacity(checks.len());
        for (limiter, key, permits) in checks {
            let known = sums.iter().position(|(other, name, _)| other.id == limiter.id && name == key);
            let number = known.unwrap_or(sums.len());
            match sums.get_mut(number) {
                Some((_, _, sum)) => *sum = sum.saturating_add(*permits),
                None => sums.push((limiter, key, *permits)),
            }
            sum_of.push(number);
        }
        let decisions = self.acquire_each_or_none(&sums).await?;
        Ok(sum_of.into_iter().map(|number| decisions[number]).collect())
    }

    async fn acquire_each_or_none(
        &self,
        checks: &[(&RedisLimiter, &str, u64)],
    ) -> Result<Vec<Decision>, StoreError> {
        let deadline = Instant::now() + self.0.deadline;
        let keys: Vec<_> = checks.iter().map(|(limiter, key, _)| limiter.key(key)).collect();
        // What can never be admitted decides it without a take; what asks for nothing is looked at only.
        let mut denied = checks.iter().any(|(limiter, _, permits)| *permits > limiter.limit.size());
        let mut decisions: Vec<Option<Decision>> = vec![None; checks.len()];
        let mut taken: Vec<usize> = Vec::new();
        // Checks by slot, slots in the order in which they are first met.
        let mut places: Vec<(u16, Vec<usize>)> = Vec::new();
        for (number, key) in keys.iter().enumerate().filter(|(number, _)| checks[*number].2 > 0) {
            let slot = self.0.routes.slot(key);
            match places.iter_mut().find(|(known, _)| *known == slot) {
                Some((_, numbers)) => numbers.push(number),
                None => places.push((slot, vec![number])),
            }
        }
        for (slot, numbers) in places {
            if denied {
                break;
            }
            let part: Vec<_> = numbers
                .iter()
                .map(|number| (&checks[*number].0.limit, &*keys[*number], checks[*number].2))
                .collect();
            let (all, answers) = match self.0.ask_several(slot, &part, deadline).await {
                Ok(answers) => answers,
                Err(why) => {
                    self.give_back(checks, &taken, &decisions).await;
                    return Err(why);
                }
            };
            for (number, decision) in numbers.iter().zip(answers) {
                decisions[*number] = Some(decision);
            }
            if all {
                taken.extend(numbers);
            } else {
                denied = true;
                self.give_back(checks, &taken, &decisions).await;
            }
        }
        let mut all = Vec::with_capacity(checks.len());
        for ((limiter, key, permits), decision) in checks.iter().zip(decisions) {
            all.push(match decision {
                Some(decision) => decision,
                None => limiter.peek(key, script::now_or_not(*permits)).await?,
            });
        }
        Ok(all)
    }

    /// What cannot be given back is lost to the key until it has refilled: never over, for an instant perhaps under.
    async fn give_back(
        &self,
        checks: &[(&RedisLimiter, &str, u64)],
        taken: &[usize],
        decisions: &[Option<Decision>],
    ) {
        for number in taken {
            let (limiter, key, permits) = checks[*number];
            if let Some(decision) = decisions[*number] {
                let _ = limiter.refund(key, permits, decision.at.after(decision.outcome.delay())).await;
            }
        }
    }
}

impl Inner {
    /// Counts a call that gave no decision, and says so: once for each reason in a while, however many there are.
    fn count_failure(&self, error: &StoreError) {
        let Some(class) = StoreError::CLASSES.iter().position(|class| *class == error.class()) else {
            return;
        };
        self.counters.failed[class].fetch_add(1, Ordering::Relaxed);
        let mut last = self.last_failures[class].lock();
        if last.as_ref().is_none_or(|(said, _)| said.elapsed() >= SAY_EVERY) {
            tracing::warn!(reason = error.class(), "not decided: {error}");
            *last = Some((Instant::now(), error.clone()));
        }
    }

    async fn call(
        &self,
        key: &str,
        slot: u16,
        deadline: Instant,
        command: impl Fn(Option<Timestamp>) -> Cmd,
    ) -> Result<Reply, StoreError> {
        self.counters.calls.fetch_add(1, Ordering::Relaxed);
        let handed_in = self.clock.as_ref().map(Clock::now);
        let called = self
            .routes
            .call(key, slot, self.lines.hash(key), deadline, |estimated| command(handed_in.or(estimated)));
        called.await.inspect_err(|why| self.count_failure(why))
    }

    async fn ask_several(
        &self,
        slot: u16,
        checks: &[(&Limit, &str, u64)],
        deadline: Instant,
    ) -> Result<(bool, Vec<Decision>), StoreError> {
        // An error is told of the first key, whichever of them it was.
        let key = checks.first().map_or("", |(_, key, _)| *key);
        let reply = self.call(key, slot, deadline, |now| script::ask_several(checks, self.logs, now)).await?;
        self.counters.asked.fetch_add(checks.len() as u64, Ordering::Relaxed);
        script::replay_several(checks, reply.value).inspect_err(|why| self.count_failure(why))
    }
}

/// A limit over keys in the store. Cheap to clone.
#[derive(Clone)]
pub struct RedisLimiter {
    inner: Arc<Inner>,
    limit: Limit,
    /// Limiters do not share what they remember, even where they share keys.
    id: u32,
    prefix: Arc<str>,
}

impl RedisLimiter {
    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Takes `permits`, now or not at all.
    pub async fn try_acquire(&self, key: &str, permits: u64) -> Result<Decision, StoreError> {
        self.acquire(key, Ask::of(permits)).await
    }

    /// Takes permits, perhaps after a delay that the caller accepts.
    pub async fn acquire(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        self.ask(key, Question::Take(ask)).await
    }

    /// The answer that [`RedisLimiter::acquire`] would give, without taking anything.
    pub async fn peek(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        self.ask(key, Question::Peek(ask)).await
    }

    /// Where a key stands.
    pub async fn standing(&self, key: &str) -> Result<Standing, StoreError> {
        Ok(self.peek(key, Ask::of(0)).await?.standing())
    }

    /// Whole permits left. Takes nothing and creates nothing.
    pub async fn remaining(&self, key: &str) -> Result<u64, StoreError> {
        Ok(self.standing(key).await?.remaining)
    }

    /// Makes a key as good as new.
    pub async fn reset(&self, key: &str) -> Result<(), StoreError> {
        self.step(key, Step::Reset).await.map(drop)
    }

    /// Gives back `permits` of a grant that was to start at `at` (its decision's time and delay), as far as they are
    /// still owed.
    pub async fn refund(&self, key: &str, permits: u64, at: Timestamp) -> Result<(), StoreError> {
        self.step(key, Step::Change(Change::Refund { permits, at })).await.map(drop)
    }

    /// Takes `permits` without asking, into bounded debt: for costs that are known only afterwards.
    pub async fn charge(&self, key: &str, permits: u64) -> Result<(), StoreError> {
        self.step(key, Step::Change(Change::Charge { permits })).await.map(drop)
    }

    fn key(&self, key: &str) -> Arc<str> {
        let mut whole = String::with_capacity(self.prefix.len() + key.len());
        whole.push_str(&self.prefix);
        whole.push_str(key);
        whole.into()
    }

    async fn ask(&self, key: &str, question: Question) -> Result<Decision, StoreError> {
        match self.step(key, Step::Ask(question)).await? {
            Some(decision) => Ok(decision),
            None => Err(StoreError::protocol("a question without an answer")),
        }
    }

    async fn step(&self, key: &str, step: Step) -> Result<Option<Decision>, StoreError> {
        let key = self.key(key);
        let now = Instant::now();
        let deadline = now + self.inner.deadline;
        match self.inner.lines.enter(self.id, &key, &self.limit, step, now) {
            Entered::Denied(decision) => {
                self.inner.counters.remembered.fetch_add(1, Ordering::Relaxed);
                Ok(Some(decision))
            }
            Entered::Lead => {
                let line = LineKey { limiter: self.id, key };
                let call = Call { inner: Arc::clone(&self.inner), limit: self.limit, line };
                Leading { call: Some(Box::pin(call.lead(step, deadline))), tasks: self.inner.tasks.clone() }
                    .await
            }
            Entered::Wait(answer) => match timeout_at(deadline, answer).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => Err(StoreError::Stopped),
                Err(_) => {
                    let late = StoreError::Timeout(self.inner.deadline);
                    self.inner.count_failure(&late);
                    Err(late)
                }
            },
            Entered::Full => {
                self.inner.count_failure(&StoreError::Overloaded);
                Err(StoreError::Overloaded)
            }
        }
    }
}

impl RateLimiter for RedisLimiter {
    type Error = StoreError;

    async fn acquire(&self, key: &str, ask: Ask) -> Result<Decision, StoreError> {
        RedisLimiter::acquire(self, key, ask).await
    }

    async fn standing(&self, key: &str) -> Result<Standing, StoreError> {
        RedisLimiter::standing(self, key).await
    }

    async fn reset(&self, key: &str) -> Result<(), StoreError> {
        RedisLimiter::reset(self, key).await
    }
}

/// A line whose turn it is: calls, one after another, until nobody waits.
struct Call {
    inner: Arc<Inner>,
    limit: Limit,
    line: LineKey,
}

impl Call {
    /// The first call, by the caller who found the line free. Who has come meanwhile is left to the driver.
    async fn lead(self, step: Step, deadline: Instant) -> Result<Option<Decision>, StoreError> {
        let (answers, told) = self.make(&[step], deadline).await;
        let batch = self.next(told);
        if !batch.is_empty() {
            let tasks = self.inner.tasks.clone();
            tasks.hand_over(self.follow(batch));
        }
        answers.map(|answers| answers.first().copied())
    }

    /// The calls for those who have waited.
    async fn follow(self, mut batch: Batch) {
        loop {
            let steps: Vec<_> = batch.iter().map(|waiter| waiter.step).collect();
            let (answers, told) = self.make(&steps, Instant::now() + self.inner.deadline).await;
            match answers {
                Ok(answers) => {
                    let mut answers = answers.into_iter();
                    for waiter in batch {
                        // Who has left meanwhile has paid: it was decided.
                        let _ = waiter.answer.send(Ok(answers.next()));
                    }
                }
                Err(why) => {
                    for waiter in batch {
                        let _ = waiter.answer.send(Err(why.clone()));
                    }
                }
            }
            batch = self.next(told);
            if batch.is_empty() {
                return;
            }
        }
    }

    /// After a call: answers those whose denial is known now, and says who goes in the next call.
    fn next(&self, told: Option<Remembered>) -> Batch {
        let next = self.inner.lines.next(&self.line, &self.limit, told, Instant::now());
        self.inner.counters.remembered.fetch_add(next.denied.len() as u64, Ordering::Relaxed);
        for (waiter, decision) in next.denied {
            // Who has left meanwhile has taken nothing.
            let _ = waiter.answer.send(Ok(Some(decision)));
        }
        next.batch
    }

    /// One call: its answers, and what is to be remembered of it.
    async fn make(
        &self,
        steps: &[Step],
        deadline: Instant,
    ) -> (Result<Vec<Decision>, StoreError>, Option<Remembered>) {
        let key = &*self.line.key;
        let slot = self.inner.routes.slot(key);
        let (limit, logs) = (&self.limit, self.inner.logs);
        let change = match steps {
            [Step::Reset] => self.inner.call(key, slot, deadline, |_| del(key)).await,
            [Step::Change(it)] => {
                self.inner.call(key, slot, deadline, |now| script::change(limit, logs, key, *it, now)).await
            }
            _ => return self.ask(steps, slot, deadline).await,
        };
        (change.map(|_| Vec::new()), None)
    }

    async fn ask(
        &self,
        steps: &[Step],
        slot: u16,
        deadline: Instant,
    ) -> (Result<Vec<Decision>, StoreError>, Option<Remembered>) {
        let (key, limit, logs) = (&*self.line.key, &self.limit, self.inner.logs);
        let questions: Vec<_> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Ask(question) => Some(*question),
                Step::Change(_) | Step::Reset => None,
            })
            .collect();
        let called =
            self.inner.call(key, slot, deadline, |now| script::ask(limit, logs, key, &questions, now)).await;
        let Reply { value, sent, received } = match called {
            Ok(reply) => reply,
            Err(why) => return (Err(why), None),
        };
        self.inner.counters.asked.fetch_add(questions.len() as u64, Ordering::Relaxed);
        match script::replay(limit, &questions, value) {
            Ok(Told { decisions, memory, now }) => {
                let last_take = questions.iter().rposition(|question| matches!(question, Question::Take(_)));
                let denied = last_take
                    .is_some_and(|number| matches!(decisions[number].outcome, Outcome::Denied { .. }));
                let told = denied.then_some(Remembered { memory, at: now, sent, received });
                (Ok(decisions), told)
            }
            Err(why) => {
                self.inner.count_failure(&why);
                (Err(why), None)
            }
        }
    }
}

fn del(key: &str) -> Cmd {
    let mut command = Cmd::new();
    command.arg("DEL").arg(key);
    command
}

/// A call that goes on with the driver if its caller leaves: others may be waiting for it.
struct Leading<F: Future<Output = T> + Send + 'static, T: Send + 'static> {
    call: Option<Pin<Box<F>>>,
    tasks: Tasks,
}

impl<F: Future<Output = T> + Send + 'static, T: Send + 'static> Future for Leading<F, T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let this = self.get_mut();
        let Some(call) = this.call.as_mut() else { return Poll::Pending };
        let answer = call.as_mut().poll(context);
        if answer.is_ready() {
            this.call = None;
        }
        answer
    }
}

impl<F: Future<Output = T> + Send + 'static, T: Send + 'static> Drop for Leading<F, T> {
    fn drop(&mut self) {
        // A call that panicked must not be polled again.
        if let Some(call) = self.call.take().filter(|_| !std::thread::panicking()) {
            self.tasks.hand_over(async {
                call.await;
            });
        }
    }
}
