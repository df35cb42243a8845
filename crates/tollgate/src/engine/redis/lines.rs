//! A line for each key that is being asked about: one call at a time, and whoever comes meanwhile goes together in the next.
//! A denial is remembered for as long as it can be no other.

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::{Equivalent, HashMap};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tollgate_core::{Ask, Decision, Limit, Timestamp};

use super::error::StoreError;
use super::script::{Change, Memory, Question};
use crate::clock::Clock;
use crate::engine::sync::Lock;

/// Parts of the table, each with its own lock, so that threads seldom meet.
const SHARDS: usize = 64;
/// Questions in one call. The script takes equal ones in one step, and about a microsecond for each other one: no call holds
/// the server up for much longer than a millisecond.
const BATCH_MAX: usize = 1_024;
/// Callers that wait for one key. They hold about 100 bytes each, and the last one is some sixteen calls away from its answer.
const WAITING_MAX: usize = 16_384;
/// Keys with a call in flight or a denial to remember, in one shard: some 40 MB in all shards, if every one has 256 bytes.
const LINES_MAX: usize = 2_048;

/// What is done on one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Ask(Question),
    Change(Change),
    Reset,
}

type Answer = Result<Option<Decision>, StoreError>;

/// Somebody whose step has not been done yet.
pub(super) struct Waiter {
    pub(super) step: Step,
    pub(super) answer: oneshot::Sender<Answer>,
}

/// Waiters whose steps go in one call: questions, or one change.
pub(super) type Batch = Vec<Waiter>;

/// What follows a call.
#[derive(Default)]
pub(super) struct Next {
    /// Who is denied, by what the call has told.
    pub(super) denied: Vec<(Waiter, Decision)>,
    /// Who goes in the next call. Nobody: the line is free.
    pub(super) batch: Batch,
}

/// A key of a limiter.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct LineKey {
    pub(super) limiter: u32,
    pub(super) key: Arc<str>,
}

#[derive(Hash)]
struct LookUp<'a> {
    limiter: u32,
    key: &'a str,
}

impl Equivalent<LineKey> for LookUp<'_> {
    fn equivalent(&self, other: &LineKey) -> bool {
        self.limiter == other.limiter && *self.key == *other.key
    }
}

/// What became of a step.
pub(super) enum Entered {
    /// Nobody is asking about this key: the caller does, and then calls [`Lines::next`].
    Lead,
    /// It will be done with others.
    Wait(oneshot::Receiver<Answer>),
    /// It is known already.
    Denied(Decision),
    /// There are too many already.
    Full,
}

/// What a call has told of a key, and between which instants.
pub(super) struct Remembered {
    pub(super) memory: Memory,
    pub(super) at: Timestamp,
    pub(super) sent: Instant,
    pub(super) received: Instant,
}

/// How long denials are remembered, and by which clock the server's time goes on.
pub(super) struct Remembering {
    pub(super) longest: Duration,
    /// The time that is handed in, where it is.
    pub(super) clock: Option<Clock>,
}

pub(super) struct Lines {
    shards: Box<[Lock<Shard>]>,
    hasher: RandomState,
    remembering: Remembering,
}

#[derive(Default)]
struct Shard {
    lines: HashMap<LineKey, Line, RandomState>,
    /// When memories end, oldest first: all live equally long.
    ends: VecDeque<(Instant, LineKey)>,
}

#[derive(Default)]
struct Line {
    /// A call is in flight. While it is, everybody waits.
    busy: bool,
    waiting: VecDeque<Waiter>,
    remembered: Option<Remembered>,
    /// When that is forgotten.
    end: Option<Instant>,
}

impl Lines {
    pub(super) fn new(remembering: Remembering) -> Self {
        let shards = (0..SHARDS).map(|_| Lock::new(Shard::default())).collect();
        Self { shards, hasher: RandomState::new(), remembering }
    }

    /// A number for a key: which shard, which connection.
    pub(super) fn hash(&self, key: &str) -> u64 {
        self.hasher.hash_one(key)
    }

    fn shard(&self, key: &str) -> &Lock<Shard> {
        &self.shards[(self.hash(key) >> 32) as usize % SHARDS]
    }

    /// Brings a step to its line.
    pub(super) fn enter(
        &self,
        limiter: u32,
        key: &Arc<str>,
        limit: &Limit,
        step: Step,
        now: Instant,
    ) -> Entered {
        let mut shard = self.shard(key).lock();
        let Some(line) = shard.lines.get_mut(&LookUp { limiter, key }) else {
            if shard.lines.len() >= LINES_MAX {
                return Entered::Full;
            }
            let line = Line { busy: true, ..Line::default() };
            shard.lines.insert(LineKey { limiter, key: Arc::clone(key) }, line);
            return Entered::Lead;
        };
        if line.busy {
            if line.waiting.len() >= WAITING_MAX {
                return Entered::Full;
            }
            let (answer, receiver) = oneshot::channel();
            line.waiting.push_back(Waiter { step, answer });
            return Entered::Wait(receiver);
        }
        if let (Step::Ask(Question::Take(ask)), Some(remembered)) = (step, &line.remembered)
            && let Some(denied) = self.remembering.denies(remembered, limit, ask, now)
        {
            return Entered::Denied(denied);
        }
        line.busy = true;
        line.remembered = None;
        Entered::Lead
    }

    /// After a call: remembers what it told, and gives out the steps of the next one. If there is none, the line is free.
    /// Those at the head of the line whose denial is known now need no call.
    pub(super) fn next(&self, key: &LineKey, limit: &Limit, told: Option<Remembered>, now: Instant) -> Next {
        let mut shard = self.shard(&key.key).lock();
        let shard = &mut *shard;
        let Some(line) = shard.lines.get_mut(key) else { return Next::default() };
        let mut denied = Vec::new();
        if let Some(told) = &told {
            while let Some(Waiter { step: Step::Ask(Question::Take(ask)), .. }) = line.waiting.front()
                && let Some(decision) = self.remembering.denies(told, limit, *ask, now)
                && let Some(waiter) = line.waiting.pop_front()
            {
                denied.push((waiter, decision));
            }
        }
        let batch = line.next_batch();
        if !batch.is_empty() {
            return Next { denied, batch };
        }
        line.busy = false;
        match told {
            Some(told) => {
                let end = now + self.remembering.longest;
                (line.remembered, line.end) = (Some(told), Some(end));
                shard.ends.push_back((end, key.clone()));
            }
            None => {
                shard.lines.remove(key);
            }
        }
        shard.forget(now);
        Next { denied, batch }
    }
}

impl Line {
    /// Those who wait, as far as their steps go together. Who has left meanwhile is not asked for.
    fn next_batch(&mut self) -> Batch {
        let mut batch = Batch::new();
        while batch.len() < BATCH_MAX
            && let Some(waiter) = self.waiting.pop_front()
        {
            if waiter.answer.is_closed() {
                continue;
            }
            let alone = !matches!(waiter.step, Step::Ask(_));
            if alone && !batch.is_empty() {
                self.waiting.push_front(waiter);
                break;
            }
            batch.push(waiter);
            if alone {
                break;
            }
        }
        batch
    }
}

impl Shard {
    /// Drops memories that have ended.
    fn forget(&mut self, now: Instant) {
        while let Some((end, key)) = self.ends.front() {
            if *end > now && self.ends.len() < LINES_MAX {
                return;
            }
            // The key may have been asked about since, and may be remembered anew.
            if self.lines.get(key).is_some_and(|line| !line.busy && line.end == Some(*end)) {
                self.lines.remove(key);
            }
            self.ends.pop_front();
        }
    }
}

impl Remembering {
    /// The answer to an ask, if it can be no other than a denial.
    fn denies(&self, remembered: &Remembered, limit: &Limit, ask: Ask, now: Instant) -> Option<Decision> {
        let at = remembered.at.as_micros();
        let (early, late) = match &self.clock {
            Some(clock) => {
                let now = clock.now().as_micros();
                let still = now >= at && u128::from(now - at) < self.longest.as_micros();
                still.then_some((now, now))?
            }
            // It was decided after it was sent and before the answer came.
            None => {
                let since_sent = now.saturating_duration_since(remembered.sent);
                let since_received = now.saturating_duration_since(remembered.received);
                (since_sent < self.longest).then_some((
                    at + since_received.as_micros() as u64,
                    at + since_sent.as_micros() as u64 + 1,
                ))?
            }
        };
        remembered.memory.denies(limit, ask, Timestamp::from_micros(early), Timestamp::from_micros(late))
    }
}
