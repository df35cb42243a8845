//! The calls of one queue_key: the first by the caller who found it free, those of the others by the driver.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use tokio::time::Instant;
use tollgate_core::{Outcome, Timestamp};

use crate::backend::LeaseGrant;
use crate::redis::Inner;
use crate::redis::error::StoreError;
use crate::redis::evaluate::exchange::{Changes, Exchanged, Questions};
use crate::redis::evaluate::sets::SetsEvaluated;
use crate::redis::evaluate::{Evaluated, Memory};
use crate::redis::limit::StoredLimit;
use crate::redis::protocol::{self, Change, Question, wanted};
use crate::redis::queue::set::{CheckSet, Group, Member, SetAnswer, SetBatch, SetCall};
use crate::redis::queue::{Batch, Done, QueueKey, Remembered, Step, Waiter};

/// What became of the steps of a call, in their order: most calls have one.
type Answers = SmallVec<[Done; 1]>;

/// A queue_key whose turn it is: calls, one after another, until nobody waits.
pub(in crate::redis) struct Call {
    turn: Turn,
    limit: Arc<StoredLimit>,
}

/// The right to make calls for a key. However it ends, the key is free afterwards.
struct Turn {
    inner: Arc<Inner>,
    queue_key: QueueKey,
    is_over: bool,
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.is_over {
            // A panic, or an engine that stops: the waiters find their answers gone.
            self.inner.coalescer.abandon(&self.queue_key);
        }
    }
}

impl Call {
    pub(in crate::redis) fn new(inner: &Arc<Inner>, limit: &Arc<StoredLimit>, queue_key: QueueKey) -> Self {
        let turn = Turn { inner: Arc::clone(inner), queue_key, is_over: false };
        Self { turn, limit: Arc::clone(limit) }
    }

    /// Makes the first call, for the caller that found the key free. The driver makes the calls of requests that arrive meanwhile.
    pub(in crate::redis) async fn lead(self, step: Step, deadline: Instant) -> Result<Done, StoreError> {
        let (answers, told) = self.make(&[step], deadline).await;
        self.end(told);
        answers.map(|answers| answers.into_iter().next().unwrap_or(Done::Changed))
    }

    /// After a caller's own call: who has come meanwhile is left to the driver.
    fn end(mut self, told: Option<Box<Remembered>>) {
        match self.next(told) {
            Batch::Nobody => {}
            batch @ (Batch::Steps(_) | Batch::Sets(_)) => {
                let tasks = self.turn.inner.tasks.clone();
                tasks.hand_over(self.follow(batch));
            }
        }
    }

    /// The calls for those who have waited.
    async fn follow(mut self, mut batch: Batch) {
        loop {
            let told = match batch {
                Batch::Nobody => return,
                Batch::Steps(waiters) => self.answer(waiters).await,
                Batch::Sets(sets) => match self.unknown(sets) {
                    sets if sets.is_empty() => None,
                    sets => self.answer_sets(sets).await,
                },
            };
            batch = self.next(told);
        }
    }

    /// Answers those of a batch whose denial by another key is known by now.
    fn unknown(&self, mut sets: SetBatch) -> SetBatch {
        let (inner, now) = (&self.turn.inner, Instant::now());
        let is_unknown = |group: &mut Group| {
            let Some(answer) = inner.coalescer.known_answer(&group.set, now) else { return true };
            inner.counters.remembered.fetch_add(group.waiters.len() as u64, Ordering::Relaxed);
            for waiter in group.waiters.drain(..) {
                // Who has left meanwhile has taken nothing.
                let _ = waiter.answer.send(Ok(answer.clone()));
            }
            false
        };
        sets.groups.retain_mut(is_unknown);
        sets
    }

    async fn answer(&self, waiters: Vec<Waiter>) -> Option<Box<Remembered>> {
        let steps: Vec<_> = waiters.iter().map(|waiter| waiter.step.clone()).collect();
        let (answers, told) = self.make(&steps, Instant::now() + self.limit.call_deadline).await;
        match answers {
            Ok(answers) => {
                let mut answers = answers.into_iter();
                for waiter in waiters {
                    // Who has left meanwhile has paid: it was decided.
                    let _ = waiter.answer.send(Ok(answers.next().unwrap_or(Done::Changed)));
                }
            }
            Err(why) => {
                for waiter in waiters {
                    let _ = waiter.answer.send(Err(why.clone()));
                }
            }
        }
        told
    }

    async fn answer_sets(&self, batch: SetBatch) -> Option<Box<Remembered>> {
        let (inner, queue_key) = (&self.turn.inner, &self.turn.queue_key);
        let call = SetCall::of(&batch, queue_key);
        let others = call.others(queue_key);
        let changes: Vec<_> = others.iter().map(|(member, _)| inner.coalescer.changes(member)).collect();
        let asked = inner.ask_sets(&call, Instant::now() + self.limit.call_deadline).await;
        match asked {
            Ok(asked) => {
                let told = asked.remembered(&call, |member| member.is_of(queue_key));
                let now = Instant::now();
                for ((member, group), changes) in others.into_iter().zip(changes) {
                    if let Some(denied) = asked.remembered_of(&call, group, |it| std::ptr::eq(it, member)) {
                        inner.coalescer.remember(member, denied, changes, now);
                    }
                }
                let mut answers = asked.answers.into_iter();
                for waiter in batch.groups.into_iter().flat_map(|group| group.waiters) {
                    let answer = answers.next().ok_or_else(|| unanswered(asked.undecided.as_ref()));
                    if let Err(Ok(undelivered)) = waiter.answer.send(answer) {
                        waiter.set.give_back(inner, &undelivered);
                    }
                }
                told
            }
            Err(why) => {
                for waiter in batch.groups.into_iter().flat_map(|group| group.waiters) {
                    let _ = waiter.answer.send(Err(why.clone()));
                }
                None
            }
        }
    }

    /// After a call: answers those whose denial is known now, and says who goes in the next call.
    fn next(&mut self, told: Option<Box<Remembered>>) -> Batch {
        let inner = &self.turn.inner;
        let next = inner.coalescer.next(&self.turn.queue_key, &self.limit.limit, told, Instant::now());
        self.turn.is_over = matches!(next.batch, Batch::Nobody);
        let known = next.denied.len() + next.denied_sets.len();
        inner.counters.remembered.fetch_add(known as u64, Ordering::Relaxed);
        // Who has left meanwhile has taken nothing.
        for (waiter, decision) in next.denied {
            let _ = waiter.answer.send(Ok(Done::Answered(decision, None)));
        }
        for (waiter, answer) in next.denied_sets {
            let _ = waiter.answer.send(Ok(answer));
        }
        next.batch
    }

    /// One call: its answers, and what is to be remembered of it.
    async fn make(
        &self,
        steps: &[Step],
        deadline: Instant,
    ) -> (Result<Answers, StoreError>, Option<Box<Remembered>>) {
        let Turn { inner, queue_key, .. } = &self.turn;
        let changed = match steps {
            [Step::Reset] => {
                let slot = inner.routes.slot(&queue_key.key);
                let forget = |_| protocol::forget(&queue_key.key);
                let called =
                    inner.call(&queue_key.key, slot, (queue_key.hash.low, false), deadline, forget).await;
                called.map(|_| None)
            }
            [Step::Change(_), ..] => {
                let changes: SmallVec<[Change; 1]> = steps.iter().filter_map(Step::change).collect();
                let exchanged = inner.exchange(&self.limit, queue_key, &Changes(&changes), deadline).await;
                exchanged.map(|exchanged| exchanged.result)
            }
            _ => return self.ask(steps, deadline).await,
        };
        inner.coalescer.changed(queue_key);
        let done = |number: Option<u64>| number.map_or(Done::Changed, Done::OutOfTurn);
        (changed.map(|number| SmallVec::from_elem(done(number), steps.len())), None)
    }

    async fn ask(
        &self,
        steps: &[Step],
        deadline: Instant,
    ) -> (Result<Answers, StoreError>, Option<Box<Remembered>>) {
        let inner = &self.turn.inner;
        let questions: SmallVec<[Question; 1]> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Ask(question) => Some(question.clone()),
                Step::Change(_) | Step::Reset => None,
            })
            .collect();
        // Leases end so long after this, on a clock that goes on while the machine is suspended.
        let asked = wanted(&questions).map(|_| inner.own_clock.exact_now());
        let exchanged =
            inner.exchange(&self.limit, &self.turn.queue_key, &Questions(&questions), deadline).await;
        let Exchanged { result, sent, received } = match exchanged {
            Ok(exchanged) => exchanged,
            Err(why) => return (Err(why), None),
        };
        inner.counters.asked.fetch_add(questions.len() as u64, Ordering::Relaxed);
        let Evaluated { decisions, grant, memory, now } = result;
        let last_take = questions.iter().rposition(|question| question.takes());
        let denied =
            last_take.is_some_and(|number| matches!(decisions[number].outcome, Outcome::Denied { .. }));
        let told = denied.then(|| Box::new(Remembered { memory, verdict: None, at: now, sent, received }));
        let answers = questions.iter().zip(decisions).map(|(question, decision)| {
            let lent = grant.zip(asked).filter(|_| matches!(question, Question::Borrow(..)));
            Done::Answered(decision, lent.map(|(grant, sent)| Box::new(LeaseGrant { grant, sent })))
        });
        (Ok(answers.collect()), told)
    }
}

/// The call of a set by the caller who found its lines free.
pub(in crate::redis) struct SetLead {
    set: Arc<CheckSet>,
    /// For each of its lines that was free.
    calls: SmallVec<[Call; 4]>,
}

impl SetLead {
    /// `held` are the members whose lines were free, by number.
    pub(in crate::redis) fn new(inner: &Arc<Inner>, set: &Arc<CheckSet>, held: &[usize]) -> Self {
        let calls = held.iter().map(|number| {
            let member = &set.members[*number];
            Call::new(inner, &member.limit, member.queue_key.clone())
        });
        Self { calls: calls.collect(), set: Arc::clone(set) }
    }

    /// The call. Who has come meanwhile is left to the driver.
    pub(in crate::redis) async fn lead(
        self,
        inner: &Inner,
        deadline: Instant,
    ) -> Result<SetAnswer, StoreError> {
        let call = SetCall::one(&self.set);
        let asked = inner.ask_sets(&call, deadline).await;
        for turn in self.calls {
            let queue_key = &turn.turn.queue_key;
            let told =
                asked.as_ref().ok().and_then(|it| it.remembered(&call, |member| member.is_of(queue_key)));
            turn.end(told);
        }
        let SetsAsked { mut answers, undecided, .. } = asked?;
        answers.pop().ok_or_else(|| unanswered(undecided.as_ref()))
    }
}

/// Why a set has no answer.
fn unanswered(undecided: Option<&StoreError>) -> StoreError {
    undecided.cloned().unwrap_or_else(|| StoreError::protocol("a set without an answer"))
}

/// What a call on sets has told, and between which instants.
pub(in crate::redis) struct SetsAsked {
    /// In the order of the call.
    pub(in crate::redis) answers: Vec<SetAnswer>,
    /// Why there are fewer answers than sets, if there are.
    undecided: Option<StoreError>,
    memories: Vec<Memory>,
    now: Timestamp,
    sent: Instant,
    received: Instant,
}

impl SetsAsked {
    /// What is to be remembered of a key, if it denied the last set.
    fn remembered(&self, call: &SetCall<'_>, is_key: impl Fn(&Member) -> bool) -> Option<Box<Remembered>> {
        self.remembered_of(call, call.groups.len().checked_sub(1)?, is_key)
    }

    /// What is to be remembered of a key, if it denied the last set of a group.
    fn remembered_of(
        &self,
        call: &SetCall<'_>,
        group: usize,
        is_key: impl Fn(&Member) -> bool,
    ) -> Option<Box<Remembered>> {
        let last: usize = call.groups.get(..=group)?.iter().map(|group| group.count).sum();
        let (group, answer) = (&call.groups[group], self.answers.get(last.checked_sub(1)?)?);
        let number = group.set.members.iter().position(is_key)?;
        let is_denied = matches!(answer.decisions[number]?.outcome, Outcome::Denied { .. });
        (is_denied && group.set.members[number].enforced).then(|| {
            Box::new(Remembered {
                memory: self.memories[group.states[number]].clone(),
                verdict: Some((Arc::clone(group.set), answer.clone())),
                at: self.now,
                sent: self.sent,
                received: self.received,
            })
        })
    }
}

impl Inner {
    /// One call on sets whose keys are in one slot.
    async fn ask_sets(&self, call: &SetCall<'_>, deadline: Instant) -> Result<SetsAsked, StoreError> {
        let Exchanged { result, sent, received } = self.ask_set_states(call, deadline).await?;
        let asked: usize = call.groups.iter().map(|group| group.count * group.states.len()).sum();
        self.counters.asked.fetch_add(asked as u64, Ordering::Relaxed);
        let SetsEvaluated { answers, undecided, memories, now } = result;
        Ok(SetsAsked { answers, undecided, memories, now, sent, received })
    }
}
