//! One queue for each key with a call under way. Requests that arrive meanwhile wait, and go together in the next call. A denial is cached
//! while it is provably still valid.

pub(crate) mod call;
pub(crate) mod set;

use std::collections::VecDeque;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use hashbrown::HashMap;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tollgate_core::{Ask, Decision, Limit, Timestamp};

use crate::backend::LeaseGrant;
use crate::check::LimitId;
use crate::clock::Clock;
use crate::hash::Hash;
use crate::redis::error::StoreError;
use crate::redis::evaluate::Memory;
use crate::redis::protocol::{Change, Question};
use crate::redis::queue::set::{CheckSet, Member, SetAnswer, SetBatch, SetWaiter};
use crate::sync::Lock;

/// Stripes of the table, each with its own lock, so that threads rarely wait.
const STRIPES: usize = 64;
/// The most questions in one call. The script handles equal questions in one step, and others in about a microsecond each, so
/// that no call blocks the server for much longer than a millisecond.
const BATCH_MAX: usize = 1_024;
/// The most callers that wait for one key: those of 65 ms at a million checks a second, so that a short stall rejects none. They take
/// about 100 bytes each, and the last one is some 64 calls away from its answer.
const WAITING_MAX: usize = 65_536;
/// The most keys of a stripe with a call under way or a cached denial: some 40 MB in all stripes, if every key has 256 bytes.
const QUEUES_MAX: usize = 2_048;

/// A step on one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    Ask(Question),
    Change(Change),
    Reset,
}

impl Step {
    fn waits(&self) -> bool {
        match self {
            Self::Ask(question) => question.ask().wait.is_some(),
            Self::Change(_) | Self::Reset => false,
        }
    }

    const fn borrows(&self) -> bool {
        matches!(self, Self::Ask(Question::Borrow(..)))
    }

    pub(crate) const fn change(&self) -> Option<Change> {
        match self {
            Self::Change(change) => Some(*change),
            Self::Ask(_) | Self::Reset => None,
        }
    }

    /// Whether it can go in one call with another: questions go together, and so do refunds, except those of a log.
    const fn goes_with(&self, other: &Self, limit: &Limit) -> bool {
        match (self, other) {
            (Self::Ask(_), Self::Ask(_)) => true,
            (Self::Change(Change::Refund { .. }), Self::Change(Change::Refund { .. })) => {
                !matches!(limit, Limit::SlidingLog(_))
            }
            _ => false,
        }
    }
}

/// How many searches for an earliest start one call may need: one for each ask that waits or that differs from the one before.
/// A search takes less than a hundred microseconds in a log, and about half a microsecond for each sub-bucket of a counter. Buckets
/// and windows need none.
fn searches_max(limit: &Limit) -> usize {
    match limit {
        Limit::TokenBucket(_)
        | Limit::IntervalBucket(_)
        | Limit::LeakyBucket(_)
        | Limit::FixedWindow(_)
        | Limit::CalendarQuota(_) => BATCH_MAX,
        Limit::SlidingLog(_) => 8,
        Limit::SlidingCounter(it) => (2_048 / it.sub_buckets() as usize).clamp(1, 32),
    }
}

/// The result of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Done {
    /// It was answered, and this was lent with the answer.
    Answered(Decision, Option<Box<LeaseGrant>>),
    /// The change was made.
    Changed,
    /// A return was out of turn and not made. There were this many returns.
    OutOfTurn(u64),
}

type Answer = Result<Done, StoreError>;

/// A caller that waits for its step.
pub(crate) struct Waiter {
    pub(crate) step: Step,
    pub(crate) answer: oneshot::Sender<Answer>,
}

/// The requests of one call.
#[derive(Default)]
pub(crate) enum Batch {
    /// No request waits.
    #[default]
    Nobody,
    /// Questions on one key, refunds, or one other change.
    Steps(Vec<Waiter>),
    /// Sets that have the key in common.
    Sets(SetBatch),
}

/// The requests to answer and to send after a call.
#[derive(Default)]
pub(crate) struct Next {
    /// Requests that the result of the call denies.
    pub(crate) denied: Vec<(Waiter, Decision)>,
    pub(crate) denied_sets: Vec<(SetWaiter, SetAnswer)>,
    /// The requests of the next call. [`Batch::Nobody`]: the queue is free.
    pub(crate) batch: Batch,
}

/// A key of a limit. Limits do not share cached denials, even if they share states.
#[derive(Clone, Debug)]
pub(crate) struct QueueKey {
    pub(crate) limit: LimitId,
    /// Identifies the state.
    pub(crate) hash: Hash,
    /// The key in the store.
    pub(crate) key: Arc<str>,
}

impl PartialEq for QueueKey {
    fn eq(&self, other: &Self) -> bool {
        self.limit == other.limit && self.hash == other.hash
    }
}

impl Eq for QueueKey {}

impl std::hash::Hash for QueueKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash.high);
    }
}

/// Uses the hash of the key.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn write(&mut self, bytes: &[u8]) {
        // Only whole numbers are written. Collisions of anything else are resolved by comparison.
        self.0 = bytes.iter().fold(self.0, |hash, byte| hash.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The result of queueing a step.
pub(crate) enum Entered {
    /// No call for this key is under way. The caller makes it, and then calls [`Coalescer::next`].
    Lead,
    /// It will be done together with others.
    Wait(oneshot::Receiver<Answer>),
    /// It is known already.
    Denied(Decision),
    /// There are too many already.
    Full,
}

/// The result of queueing a set.
pub(crate) enum SetEntered {
    /// No call for these of its keys is under way. The caller makes it, and then calls [`Coalescer::next`] for each of them.
    Lead(SmallVec<[usize; 4]>),
    /// It will be decided together with others.
    Wait(oneshot::Receiver<Result<SetAnswer, StoreError>>),
    /// It is known already.
    Denied(SetAnswer),
    /// There are too many already.
    Full,
}

/// The denial of a key by a call, with the times of the call.
pub(crate) struct Remembered {
    pub(crate) memory: Memory,
    /// The set of the call, and its answer.
    pub(crate) verdict: Option<(Arc<CheckSet>, SetAnswer)>,
    pub(crate) at: Timestamp,
    pub(crate) sent: Instant,
    pub(crate) received: Instant,
}

/// How long denials are cached, and the clock that continues the time of the server.
pub(crate) struct Remembering {
    pub(crate) longest: Duration,
    /// The configured clock, if there is one.
    pub(crate) clock: Option<Clock>,
}

pub(crate) struct Coalescer {
    stripes: Box<[Lock<Stripe>]>,
    remembering: Remembering,
}

#[derive(Default)]
struct Stripe {
    queues: HashMap<QueueKey, KeyQueue, BuildHasherDefault<Hashed>>,
    /// When cached denials end, oldest first. All of them live equally long.
    ends: VecDeque<(Instant, QueueKey)>,
    /// Refunds, charges and resets of keys of this stripe that have begun or ended.
    changes: u64,
}

#[derive(Default)]
struct KeyQueue {
    /// Whether a call is under way. Until it ends, other requests wait.
    busy: bool,
    waiting: VecDeque<Waiter>,
    sets: VecDeque<SetWaiter>,
    /// Whether the last call was for sets. Then steps come next.
    sets_went: bool,
    /// Boxed, because most keys have no cached denial.
    remembered: Option<Box<Remembered>>,
    /// When the cached denial ends.
    end: Option<Instant>,
}

impl Coalescer {
    pub(crate) fn new(remembering: Remembering) -> Self {
        let stripes = (0..STRIPES).map(|_| Lock::new(Stripe::default())).collect();
        Self { stripes, remembering }
    }

    fn stripe(&self, key: &QueueKey) -> &Lock<Stripe> {
        &self.stripes[(key.hash.low >> 32) as usize % STRIPES]
    }

    /// Queues a step.
    pub(crate) fn enter(&self, key: &QueueKey, limit: &Limit, step: &Step, now: Instant) -> Entered {
        let mut stripe = self.stripe(key).lock();
        stripe.changes += u64::from(!matches!(step, Step::Ask(_)));
        if matches!(step, Step::Reset) {
            stripe.forget_denials(key.hash);
        }
        let Some(queue) = stripe.queues.get_mut(key) else {
            if !stripe.make_room(now) {
                return Entered::Full;
            }
            let queue = KeyQueue { busy: true, ..KeyQueue::default() };
            stripe.queues.insert(key.clone(), queue);
            return Entered::Lead;
        };
        if queue.busy {
            if queue.is_full() {
                return Entered::Full;
            }
            let (answer, receiver) = oneshot::channel();
            queue.waiting.push_back(Waiter { step: step.clone(), answer });
            return Entered::Wait(receiver);
        }
        if let (Step::Ask(Question::Take(ask)), Some(remembered)) = (step, &queue.remembered)
            && let Some(denied) = self.remembering.denies(remembered, limit, *ask, now)
        {
            return Entered::Denied(denied);
        }
        queue.busy = true;
        queue.remembered = None;
        Entered::Lead
    }

    /// Queues a set. It waits in the first queue of its keys that is busy.
    pub(crate) fn enter_set(&self, set: &Arc<CheckSet>, left: &Arc<AtomicBool>, now: Instant) -> SetEntered {
        let mut busy = None;
        for (number, member) in set.members.iter().enumerate() {
            let stripe = self.stripe(&member.queue_key).lock();
            let Some(queue) = stripe.queues.get(&member.queue_key) else { continue };
            if queue.busy {
                busy = busy.or(Some(number));
            } else if let Some(remembered) = &queue.remembered
                && let Some(denied) = self.remembering.denies_set(remembered, set, number, now)
            {
                return SetEntered::Denied(denied);
            }
        }
        if let Some(member) = busy.map(|number| &set.members[number]) {
            let mut stripe = self.stripe(&member.queue_key).lock();
            // It may have become free since.
            if let Some(queue) = stripe.queues.get_mut(&member.queue_key).filter(|queue| queue.busy) {
                if queue.is_full() {
                    return SetEntered::Full;
                }
                let (answer, receiver) = oneshot::channel();
                let (set, left) = (Arc::clone(set), Arc::clone(left));
                queue.sets.push_back(SetWaiter { set, answer, left });
                return SetEntered::Wait(receiver);
            }
        }
        let numbers = set.members.iter().enumerate();
        let held: SmallVec<[usize; 4]> =
            numbers.filter(|(_, member)| self.hold(member, now)).map(|(number, _)| number).collect();
        // Another caller may hold the queues by now. Then this set goes alone, which is as exact.
        SetEntered::Lead(held)
    }

    /// The answer to a set, if one of its keys is known to deny it.
    pub(crate) fn known_answer(&self, set: &CheckSet, now: Instant) -> Option<SetAnswer> {
        set.members.iter().enumerate().find_map(|(number, member)| {
            let stripe = self.stripe(&member.queue_key).lock();
            let queue = stripe.queues.get(&member.queue_key).filter(|queue| !queue.busy)?;
            self.remembering.denies_set(queue.remembered.as_ref()?, set, number, now)
        })
    }

    /// The number of changes to keys in this stripe. A denial from before a change is not cached.
    pub(crate) fn changes(&self, member: &Member) -> u64 {
        self.stripe(&member.queue_key).lock().changes
    }

    /// Caches the denial of a key whose queue the call did not hold, unless the key may have changed since `changes` was read.
    pub(crate) fn remember(&self, member: &Member, told: Box<Remembered>, changes: u64, now: Instant) {
        let mut stripe = self.stripe(&member.queue_key).lock();
        let stripe = &mut *stripe;
        let (key, end) = (member.queue_key.clone(), now + self.remembering.longest);
        if stripe.changes != changes {
            return;
        }
        if !stripe.queues.contains_key(&key) && !stripe.make_room(now) {
            return;
        }
        let queue = stripe.queues.entry(key.clone()).or_default();
        if queue.busy {
            return;
        }
        (queue.remembered, queue.end) = (Some(told), Some(end));
        stripe.ends.push_back((end, key));
        stripe.forget(now);
    }

    /// Records that a change has ended, also if it failed.
    pub(crate) fn changed(&self, key: &QueueKey) {
        self.stripe(key).lock().changes += 1;
    }

    /// The first member, by number, that is known to deny. They may be in different slots.
    pub(crate) fn known_denial(&self, members: &[Member], now: Instant) -> Option<(usize, Decision)> {
        members.iter().enumerate().filter(|(_, it)| it.enforced && it.is_asked()).find_map(|(number, it)| {
            let stripe = self.stripe(&it.queue_key).lock();
            let queue = stripe.queues.get(&it.queue_key).filter(|queue| !queue.busy)?;
            let denied = self.remembering.denies(queue.remembered.as_ref()?, it.limit(), it.ask, now)?;
            Some((number, denied))
        })
    }

    /// Makes a key's queue busy, if it is not and there is room for another.
    fn hold(&self, member: &Member, now: Instant) -> bool {
        let mut stripe = self.stripe(&member.queue_key).lock();
        if let Some(queue) = stripe.queues.get_mut(&member.queue_key) {
            queue.remembered = None;
            return !std::mem::replace(&mut queue.busy, true);
        }
        let has_room = stripe.make_room(now);
        if has_room {
            stripe.queues.insert(member.queue_key.clone(), KeyQueue { busy: true, ..KeyQueue::default() });
        }
        has_room
    }

    /// Caches the denial of a call, and returns the requests of the next call. If there are none, the queue is free. Requests
    /// at the head of the queue that the denial covers need no call.
    pub(crate) fn next(
        &self,
        key: &QueueKey,
        limit: &Limit,
        told: Option<Box<Remembered>>,
        now: Instant,
    ) -> Next {
        let mut stripe = self.stripe(key).lock();
        let stripe = &mut *stripe;
        let Some(queue) = stripe.queues.get_mut(key) else { return Next::default() };
        let (mut denied, mut denied_sets) = (Vec::new(), Vec::new());
        if let Some(told) = &told {
            // Equal asks are answered alike.
            let mut last: Option<(Ask, Decision)> = None;
            while denied.len() < BATCH_MAX
                && let Some(Waiter { step: Step::Ask(Question::Take(ask)), .. }) = queue.waiting.front()
                && let Some(decision) = match last {
                    Some((same, decision)) if same == *ask => Some(decision),
                    _ => self.remembering.denies(told, limit, *ask, now),
                }
                && let Some(waiter) = queue.waiting.pop_front()
            {
                if let Step::Ask(Question::Take(ask)) = waiter.step {
                    last = Some((ask, decision));
                }
                denied.push((waiter, decision));
            }
            while denied_sets.len() < BATCH_MAX
                && let Some(set) = queue.sets.front().map(|waiter| &waiter.set)
                && let Some(number) = set.number_in(key)
                && let Some(answer) = self.remembering.denies_set(told, set, number, now)
                && let Some(waiter) = queue.sets.pop_front()
            {
                denied_sets.push((waiter, answer));
            }
        }
        let batch = queue.next_batch(key, limit);
        if !matches!(batch, Batch::Nobody) {
            return Next { denied, denied_sets, batch };
        }
        queue.busy = false;
        match told {
            Some(told) => {
                let end = now + self.remembering.longest;
                (queue.remembered, queue.end) = (Some(told), Some(end));
                stripe.ends.push_back((end, key.clone()));
            }
            None => {
                stripe.queues.remove(key);
            }
        }
        stripe.forget(now);
        Next { denied, denied_sets, batch }
    }
}

impl Coalescer {
    /// Frees a key whose call has ended without an answer. The channels of its waiters are closed.
    pub(crate) fn abandon(&self, key: &QueueKey) {
        // Dropped after the lock is released, because this may wake tasks of waiters.
        let abandoned = self.stripe(key).lock().queues.remove(key);
        drop(abandoned);
    }
}

impl KeyQueue {
    fn is_full(&self) -> bool {
        self.waiting.len() + self.sets.len() >= WAITING_MAX
    }

    /// The waiting requests that go together: steps and sets in turn. Requests whose callers have left are dropped.
    fn next_batch(&mut self, key: &QueueKey, limit: &Limit) -> Batch {
        for sets in [!self.sets_went, self.sets_went] {
            self.sets_went = sets;
            if sets {
                let batch = self.next_sets(key);
                if !batch.is_empty() {
                    return Batch::Sets(batch);
                }
            } else {
                let batch = self.next_steps(limit);
                if !batch.is_empty() {
                    return Batch::Steps(batch);
                }
            }
        }
        Batch::Nobody
    }

    fn next_sets(&mut self, key: &QueueKey) -> SetBatch {
        let mut batch = SetBatch::default();
        while let Some(waiter) = self.sets.pop_front() {
            if waiter.has_left() {
                continue;
            }
            if let Err(waiter) = batch.add(waiter, key) {
                self.sets.push_front(waiter);
                break;
            }
        }
        batch
    }

    fn next_steps(&mut self, limit: &Limit) -> Vec<Waiter> {
        let mut batch = Vec::new();
        let mut searches = searches_max(limit);
        while batch.len() < BATCH_MAX
            && let Some(waiter) = self.waiting.pop_front()
        {
            if waiter.answer.is_closed() {
                continue;
            }
            let is_search =
                batch.last().is_none_or(|last: &Waiter| last.step != waiter.step) || waiter.step.waits();
            let is_second = waiter.step.borrows() && batch.iter().any(|other| other.step.borrows());
            let is_apart = batch.last().is_some_and(|last| !waiter.step.goes_with(&last.step, limit));
            if is_apart || (is_search && searches == 0) || is_second {
                self.waiting.push_front(waiter);
                break;
            }
            searches -= usize::from(is_search);
            batch.push(waiter);
        }
        batch
    }
}

impl Stripe {
    /// Drops the cached denials of a state that is reset. Several limits may have one, each under its own key.
    fn forget_denials(&mut self, state: Hash) {
        for (_, queue) in self.queues.iter_mut().filter(|(key, _)| key.hash == state) {
            queue.remembered = None;
        }
    }

    /// Whether there is room for another queue. A request is worth more than a cached denial.
    fn make_room(&mut self, now: Instant) -> bool {
        if self.queues.len() >= QUEUES_MAX {
            self.forget(now);
            self.forget_oldest();
        }
        self.queues.len() < QUEUES_MAX
    }

    /// Drops the cached denial that ends first.
    fn forget_oldest(&mut self) {
        while let Some((end, key)) = self.ends.pop_front() {
            if self.queues.get(&key).is_some_and(|queue| !queue.busy && queue.end == Some(end)) {
                self.queues.remove(&key);
                return;
            }
        }
    }

    /// Drops cached denials that have ended.
    fn forget(&mut self, now: Instant) {
        while let Some((end, key)) = self.ends.front() {
            if *end > now && self.ends.len() < QUEUES_MAX {
                return;
            }
            // The key may have a newer denial.
            if self.queues.get(key).is_some_and(|queue| !queue.busy && queue.end == Some(*end)) {
                self.queues.remove(key);
            }
            self.ends.pop_front();
        }
    }
}

impl Remembering {
    /// The answer to a set, if the cached denial of one of its keys denies it. An equal set gets the whole answer, another set only the
    /// denial.
    fn denies_set(
        &self,
        remembered: &Remembered,
        set: &CheckSet,
        number: usize,
        now: Instant,
    ) -> Option<SetAnswer> {
        let member = &set.members[number];
        if !member.enforced {
            return None;
        }
        let denied = self.denies(remembered, member.limit(), member.ask, now)?;
        let mut answer = match &remembered.verdict {
            Some((asked, answer)) if asked.is_equal(set) => answer.clone(),
            Some(_) | None => set.denied_by(number, denied),
        };
        answer.decisions[number] = Some(denied);
        Some(answer)
    }

    /// The denial of an ask, if the denial is provably still valid.
    fn denies(&self, remembered: &Remembered, limit: &Limit, ask: Ask, now: Instant) -> Option<Decision> {
        let at = remembered.at.as_micros();
        let (early, late) = match &self.clock {
            Some(clock) => {
                let now = clock.now().as_micros();
                let still = now >= at && u128::from(now - at) < self.longest.as_micros();
                still.then_some((now, now))?
            }
            // The store decided between sending and receiving.
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

/// Callers in every order: `cargo test -p tollgate --features shuttle --lib queue`.
#[cfg(all(test, feature = "shuttle"))]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use shuttle::rand::{Rng, thread_rng};
    use shuttle::sync::Mutex;
    use shuttle::thread;
    use tollgate_core::algorithm::Algorithm;
    use tollgate_core::{Rate, State, TokenBucket};

    use super::*;

    const PERMITS: u64 = 3;

    /// A store that decides, and what became of its decisions.
    struct Store {
        limit: Limit,
        state: Mutex<State>,
        in_flight: AtomicU64,
        admitted: AtomicU64,
        told: AtomicU64,
        /// Admissions of callers who had left, or whose answer came too late.
        lost: AtomicU64,
    }

    const NOW: Timestamp = Timestamp::from_micros(1_000_000);

    impl Store {
        fn new() -> Arc<Self> {
            let limit = Limit::TokenBucket(TokenBucket::new(PERMITS, Rate::per_minute(1)).unwrap());
            Arc::new(Self {
                state: Mutex::new(limit.fresh(NOW)),
                limit,
                in_flight: AtomicU64::new(0),
                admitted: AtomicU64::new(0),
                told: AtomicU64::new(0),
                lost: AtomicU64::new(0),
            })
        }

        /// Makes one call. Returns the answers, and the denial to cache. Now and then the answers come too late for all callers.
        fn call(&self, steps: &[Step], now: Instant) -> (Option<Vec<Decision>>, Option<Box<Remembered>>) {
            assert_eq!(self.in_flight.fetch_add(1, Ordering::SeqCst), 0, "one call in flight");
            thread::yield_now();
            let mut state = self.state.lock().unwrap();
            let mut decisions = Vec::new();
            for step in steps {
                let Step::Ask(Question::Take(ask)) = step else { panic!("only takes are asked") };
                let outcome = self.limit.decide(&mut state, NOW, *ask);
                self.admitted.fetch_add(u64::from(outcome.is_admitted()), Ordering::SeqCst);
                let status = self.limit.status(&state, NOW);
                let (remaining, reset) = (status.remaining, status.reset);
                decisions.push(Decision { outcome, limit: PERMITS, remaining, reset, at: NOW });
            }
            let memory = Memory::State(state.clone());
            drop(state);
            thread::yield_now();
            self.in_flight.fetch_sub(1, Ordering::SeqCst);
            if thread_rng().gen_ratio(1, 4) {
                let lost = decisions.iter().filter(|decision| decision.is_admitted()).count();
                self.lost.fetch_add(lost as u64, Ordering::SeqCst);
                return (None, None);
            }
            let denied = decisions.last().is_some_and(|decision| !decision.is_admitted());
            let told = denied
                .then(|| Box::new(Remembered { memory, verdict: None, at: NOW, sent: now, received: now }));
            (Some(decisions), told)
        }

        fn send(&self, decision: &Decision) {
            self.told.fetch_add(u64::from(decision.is_admitted()), Ordering::SeqCst);
            let left = PERMITS - self.admitted.load(Ordering::SeqCst);
            assert!(decision.is_admitted() || left == 0, "denied with {left} left");
        }
    }

    /// A caller who leads does its own call, and then those of the ones behind it.
    fn caller(lines: &Coalescer, store: &Store, key: &QueueKey, now: Instant) {
        let step = Step::Ask(Question::Take(Ask::of(1)));
        match lines.enter(key, &store.limit, &step, now) {
            Entered::Denied(decision) => store.send(&decision),
            Entered::Full => panic!("a queue of four is not full"),
            Entered::Wait(answer) if thread_rng().gen_ratio(1, 3) => drop(answer),
            Entered::Wait(mut answer) => loop {
                match answer.try_recv() {
                    Ok(Ok(Done::Answered(decision, None))) => return store.send(&decision),
                    Ok(Ok(other)) => panic!("no answer to a question: {other:?}"),
                    // Too late.
                    Ok(Err(_)) => return,
                    Err(oneshot::error::TryRecvError::Empty) => thread::yield_now(),
                    Err(oneshot::error::TryRecvError::Closed) => panic!("a waiter was forgotten"),
                }
            },
            Entered::Lead => {
                let (answers, mut told) = store.call(&[step], now);
                answers.iter().flatten().for_each(|decision| store.send(decision));
                loop {
                    let Next { denied, batch, .. } = lines.next(key, &store.limit, told.take(), now);
                    for (waiter, decision) in denied {
                        let _ = waiter.answer.send(Ok(Done::Answered(decision, None)));
                    }
                    let Batch::Steps(batch) = batch else { return };
                    let steps: Vec<_> = batch.iter().map(|waiter| waiter.step.clone()).collect();
                    let (answers, next) = store.call(&steps, now);
                    told = next;
                    for (number, waiter) in batch.into_iter().enumerate() {
                        let answer = match &answers {
                            Some(answers) => Ok(Done::Answered(answers[number], None)),
                            None => Err(StoreError::Timeout(Duration::ZERO)),
                        };
                        if let Err(Ok(Done::Answered(decision, _))) = waiter.answer.send(answer) {
                            store.lost.fetch_add(u64::from(decision.is_admitted()), Ordering::SeqCst);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_waiter_is_answered_once_and_permits_are_never_lost_unseen() {
        shuttle::check_random(
            || {
                let lines =
                    Arc::new(Coalescer::new(Remembering { longest: Duration::from_millis(80), clock: None }));
                let store = Store::new();
                let key = QueueKey { limit: LimitId(0), hash: Hash::of("user:1"), key: "user:1".into() };
                let now = Instant::now();
                let threads: Vec<_> = (0..5)
                    .map(|_| {
                        let (lines, store, key) = (Arc::clone(&lines), Arc::clone(&store), key.clone());
                        thread::spawn(move || (0..2).for_each(|_| caller(&lines, &store, &key, now)))
                    })
                    .collect();
                for thread in threads {
                    thread.join().unwrap();
                }
                let read = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
                assert!(read(&store.admitted) <= PERMITS);
                assert_eq!(
                    read(&store.told) + read(&store.lost),
                    read(&store.admitted),
                    "what is paid is known"
                );
                let stripe = lines.stripe(&key).lock();
                assert!(
                    stripe.queues.values().all(|queue| !queue.busy && queue.waiting.is_empty()),
                    "no waiter is left"
                );
            },
            20_000,
        );
    }
}
