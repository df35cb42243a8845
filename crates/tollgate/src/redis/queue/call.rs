//! The calls of one key: the caller that found the key free makes the first one, and the driver makes the calls of waiting requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use tokio::time::Instant;
use tollgate_core::Outcome;

use crate::backend::LeaseGrant;
use crate::redis::Inner;
use crate::redis::error::StoreError;
use crate::redis::evaluate::Evaluated;
use crate::redis::evaluate::exchange::{Exchanged, Work};
use crate::redis::evaluate::sets::SetsEvaluated;
use crate::redis::limit::StoredLimit;
use crate::redis::protocol::{self, Change, Question, wanted};
use crate::redis::queue::set::{CheckSet, Group, Member, SetAnswer, SetBatch, SetCall};
use crate::redis::queue::{Batch, Done, QueueKey, Remembered, Step, Waiter};

/// The results of the steps of a call, in order. Most calls have one step.
type Answers = SmallVec<[Done; 1]>;

/// Makes the calls of one key, one after another, until no request waits. However it ends, the key is free afterwards.
pub(crate) struct Call {
    inner: Arc<Inner>,
    limit: Arc<StoredLimit>,
    queue_key: QueueKey,
    is_over: bool,
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.is_over {
            // After a panic, or when the engine stops, the channels of the waiters are closed.
            self.inner.coalescer.abandon(&self.queue_key);
        }
    }
}

impl Call {
    pub(crate) fn new(inner: &Arc<Inner>, limit: &Arc<StoredLimit>, queue_key: QueueKey) -> Self {
        Self { inner: Arc::clone(inner), limit: Arc::clone(limit), queue_key, is_over: false }
    }

    /// Makes the first call, for the caller that found the key free. The driver makes the calls of requests that arrive meanwhile.
    pub(crate) async fn lead(self, step: Step, deadline: Instant) -> Result<Done, StoreError> {
        let (answers, told) = self.make(&[step], deadline).await;
        self.end(told);
        answers.map(|answers| answers.into_iter().next().unwrap_or(Done::Changed))
    }

    /// Ends the call of a caller. The driver makes the calls of requests that arrived meanwhile.
    fn end(mut self, told: Option<Box<Remembered>>) {
        match self.next(told) {
            Batch::Nobody => {}
            batch @ (Batch::Steps(_) | Batch::Sets(_)) => {
                let tasks = self.inner.tasks.clone();
                tasks.hand_over(self.follow(batch));
            }
        }
    }

    /// Makes the calls of waiting requests.
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

    /// Answers the sets of a batch that a cached denial of another key denies. Returns the other sets.
    fn unknown(&self, mut sets: SetBatch) -> SetBatch {
        let (inner, now) = (&self.inner, Instant::now());
        let is_unknown = |group: &mut Group| {
            let Some(answer) = inner.coalescer.known_answer(&group.set, now) else { return true };
            inner.counters.remembered.fetch_add(group.waiters.len() as u64, Ordering::Relaxed);
            for waiter in group.waiters.drain(..) {
                // A caller that has left has taken nothing.
                let _ = waiter.answer.send(Ok(answer.clone()));
            }
            false
        };
        sets.groups.retain_mut(is_unknown);
        sets
    }

    async fn answer(&self, waiters: Vec<Waiter>) -> Option<Box<Remembered>> {
        let steps: Vec<_> = waiters.iter().map(|waiter| waiter.step.clone()).collect();
        let (answers, told) = self.make(&steps, Instant::now() + self.limit.deadlines.call).await;
        match answers {
            Ok(answers) => {
                let mut answers = answers.into_iter();
                for waiter in waiters {
                    // The permits of a caller that has left stay taken.
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
        let Self { inner, queue_key, .. } = self;
        let call = SetCall::of(&batch, queue_key);
        let others = call.others(queue_key);
        let changes: Vec<_> = others.iter().map(|(member, _)| inner.coalescer.changes(member)).collect();
        let asked = inner.ask_sets(&call, Instant::now() + self.limit.deadlines.call).await;
        match asked {
            Ok(asked) => {
                let told = asked.remembered(&call, |member| member.is_of(queue_key));
                let now = Instant::now();
                for ((member, group), changes) in others.into_iter().zip(changes) {
                    if let Some(denied) = asked.remembered_of(&call, group, |it| std::ptr::eq(it, member)) {
                        inner.coalescer.remember(member, denied, changes, now);
                    }
                }
                let SetsEvaluated { answers, undecided, .. } = asked.result;
                let mut answers = answers.into_iter();
                for waiter in batch.groups.into_iter().flat_map(|group| group.waiters) {
                    let answer = answers.next().ok_or_else(|| unanswered(undecided.as_ref()));
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

    /// Answers waiting requests from the denial of a call, and returns the requests of the next call.
    fn next(&mut self, told: Option<Box<Remembered>>) -> Batch {
        let inner = &self.inner;
        let next = inner.coalescer.next(&self.queue_key, &self.limit.limit, told, Instant::now());
        self.is_over = matches!(next.batch, Batch::Nobody);
        let known = next.denied.len() + next.denied_sets.len();
        inner.counters.remembered.fetch_add(known as u64, Ordering::Relaxed);
        // A caller that has left has taken nothing.
        for (waiter, decision) in next.denied {
            let _ = waiter.answer.send(Ok(Done::Answered(decision, None)));
        }
        for (waiter, answer) in next.denied_sets {
            let _ = waiter.answer.send(Ok(answer));
        }
        next.batch
    }

    /// Makes one call. Returns its answers, and the denial to cache.
    async fn make(
        &self,
        steps: &[Step],
        deadline: Instant,
    ) -> (Result<Answers, StoreError>, Option<Box<Remembered>>) {
        let Self { inner, queue_key, .. } = self;
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
                let work = Work::Change(&changes);
                let exchanged = inner.exchange(&self.limit, queue_key, work, deadline).await;
                exchanged.map(|exchanged| exchanged.result.out_of_turn)
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
        let inner = &self.inner;
        let questions: SmallVec<[Question; 1]> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Ask(question) => Some(question.clone()),
                Step::Change(_) | Step::Reset => None,
            })
            .collect();
        // Leases are timed from here, on a clock that goes on while the machine is suspended.
        let asked = wanted(&questions).map(|_| inner.own_clock.exact_now());
        let work = Work::Ask(&questions);
        let exchanged = inner.exchange(&self.limit, &self.queue_key, work, deadline).await;
        let Exchanged { result, sent, received } = match exchanged {
            Ok(exchanged) => exchanged,
            Err(why) => return (Err(why), None),
        };
        inner.counters.asked.fetch_add(questions.len() as u64, Ordering::Relaxed);
        let Evaluated { decisions, grant, memory, now, .. } = result;
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

/// The call of a set by the caller that found its keys free.
pub(crate) struct SetLead {
    set: Arc<CheckSet>,
    /// One for each key that was free.
    calls: SmallVec<[Call; 4]>,
}

impl SetLead {
    /// `held` are the members whose keys were free, by number.
    pub(crate) fn new(inner: &Arc<Inner>, set: &Arc<CheckSet>, held: &[usize]) -> Self {
        let calls = held.iter().map(|number| {
            let member = &set.members[*number];
            Call::new(inner, &member.limit, member.queue_key.clone())
        });
        Self { calls: calls.collect(), set: Arc::clone(set) }
    }

    /// Makes the call. The driver makes the calls of requests that arrived meanwhile.
    pub(crate) async fn lead(self, inner: &Inner, deadline: Instant) -> Result<SetAnswer, StoreError> {
        let call = SetCall::one(&self.set);
        let asked = inner.ask_sets(&call, deadline).await;
        for own in self.calls {
            let is_own = |member: &Member| member.is_of(&own.queue_key);
            let told = asked.as_ref().ok().and_then(|it| it.remembered(&call, is_own));
            own.end(told);
        }
        let SetsEvaluated { mut answers, undecided, .. } = asked?.result;
        answers.pop().ok_or_else(|| unanswered(undecided.as_ref()))
    }
}

/// Why a set has no answer.
fn unanswered(undecided: Option<&StoreError>) -> StoreError {
    undecided.cloned().unwrap_or_else(|| StoreError::protocol("a set without an answer"))
}

impl Exchanged<SetsEvaluated> {
    /// The denial to cache for a key, if it denied the last set.
    fn remembered(&self, call: &SetCall<'_>, is_key: impl Fn(&Member) -> bool) -> Option<Box<Remembered>> {
        self.remembered_of(call, call.groups.len().checked_sub(1)?, is_key)
    }

    /// The denial to cache for a key, if it denied the last set of a group.
    fn remembered_of(
        &self,
        call: &SetCall<'_>,
        group: usize,
        is_key: impl Fn(&Member) -> bool,
    ) -> Option<Box<Remembered>> {
        let last: usize = call.groups.get(..=group)?.iter().map(|group| group.count).sum();
        let (group, answer) = (&call.groups[group], self.result.answers.get(last.checked_sub(1)?)?);
        let number = group.set.members.iter().position(is_key)?;
        let is_denied = matches!(answer.decisions[number]?.outcome, Outcome::Denied { .. });
        (is_denied && group.set.members[number].enforced).then(|| {
            Box::new(Remembered {
                memory: self.result.memories[group.states[number]].clone(),
                verdict: Some((Arc::clone(group.set), answer.clone())),
                at: self.result.now,
                sent: self.sent,
                received: self.received,
            })
        })
    }
}

impl Inner {
    /// One call on sets whose keys are in one slot.
    async fn ask_sets(
        &self,
        call: &SetCall<'_>,
        deadline: Instant,
    ) -> Result<Exchanged<SetsEvaluated>, StoreError> {
        let exchanged = self.ask_set_states(call, deadline).await?;
        let asked: usize = call.groups.iter().map(|group| group.count * group.states.len()).sum();
        self.counters.asked.fetch_add(asked as u64, Ordering::Relaxed);
        Ok(exchanged)
    }
}
