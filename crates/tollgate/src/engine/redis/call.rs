//! The calls of one line: the first by the caller who found it free, those of the others by the driver.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::{Limit, Micros, Outcome};

use super::Inner;
use super::driver::Tasks;
use super::error::StoreError;
use super::lines::{Batch, Done, Lent, LineKey, Remembered, Step};
use super::node::Bearings;
use super::replay::{Told, out_of_turn, replay};
use super::routes::Reply;
use super::script::{self, Change, Doubt, Question};

/// A line whose turn it is: calls, one after another, until nobody waits.
pub(super) struct Call {
    pub(super) turn: Turn,
    pub(super) limit: Limit,
    /// For each call.
    pub(super) deadline: Duration,
    /// Whether what a failover may have lost counts as taken, and for how long permits are lent.
    pub(super) distrust: Option<Micros>,
}

/// The right to make calls for a key. However it ends, the key is free afterwards.
pub(super) struct Turn {
    inner: Arc<Inner>,
    line: LineKey,
    is_over: bool,
}

impl Turn {
    pub(super) fn new(inner: &Arc<Inner>, line: LineKey) -> Self {
        Self { inner: Arc::clone(inner), line, is_over: false }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.is_over {
            // A panic, or an engine that stops: the waiters find their answers gone.
            self.inner.lines.abandon(&self.line);
        }
    }
}

impl Call {
    /// The first call, by the caller who found the line free. Who has come meanwhile is left to the driver.
    pub(super) async fn lead(mut self, step: Step, deadline: Instant) -> Result<Done, StoreError> {
        let (answers, told) = self.make(&[step], deadline).await;
        let batch = self.next(told);
        if !batch.is_empty() {
            let tasks = self.turn.inner.tasks.clone();
            tasks.hand_over(self.follow(batch));
        }
        answers.map(|answers| answers.into_iter().next().unwrap_or(Done::Changed))
    }

    /// The calls for those who have waited.
    async fn follow(mut self, mut batch: Batch) {
        loop {
            let steps: Vec<_> = batch.iter().map(|waiter| waiter.step.clone()).collect();
            let (answers, told) = self.make(&steps, Instant::now() + self.deadline).await;
            match answers {
                Ok(answers) => {
                    let mut answers = answers.into_iter();
                    for waiter in batch {
                        // Who has left meanwhile has paid: it was decided.
                        let _ = waiter.answer.send(Ok(answers.next().unwrap_or(Done::Changed)));
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
    fn next(&mut self, told: Option<Remembered>) -> Batch {
        let inner = &self.turn.inner;
        let next = inner.lines.next(&self.turn.line, &self.limit, told, Instant::now());
        self.turn.is_over = next.batch.is_empty();
        inner.counters.remembered.fetch_add(next.denied.len() as u64, Ordering::Relaxed);
        for (waiter, decision) in next.denied {
            // Who has left meanwhile has taken nothing.
            let _ = waiter.answer.send(Ok(Done::Answered(decision, None)));
        }
        next.batch
    }

    /// One call: its answers, and what is to be remembered of it.
    async fn make(
        &self,
        steps: &[Step],
        deadline: Instant,
    ) -> (Result<Vec<Done>, StoreError>, Option<Remembered>) {
        let key = &*self.turn.line.key;
        let slot = self.turn.inner.routes.slot(key);
        let (limit, logs) = (&self.limit, self.turn.inner.logs);
        let change = match steps {
            [Step::Reset] => self.turn.inner.call(key, slot, deadline, |_| script::forget(key)).await,
            [Step::Change(it)] => {
                let say = |to| script::change(limit, logs, key, *it, Doubt::of(limit, self.distrust, to), to);
                self.turn.inner.call(key, slot, deadline, say).await
            }
            _ => return self.ask(steps, slot, deadline).await,
        };
        let done = change.and_then(|reply| match steps {
            [Step::Change(Change::Return { .. })] => out_of_turn(reply.value),
            _ => Ok(None),
        });
        (done.map(|number| vec![number.map_or(Done::Changed, Done::OutOfTurn)]), None)
    }

    async fn ask(
        &self,
        steps: &[Step],
        slot: u16,
        deadline: Instant,
    ) -> (Result<Vec<Done>, StoreError>, Option<Remembered>) {
        let (key, limit, logs) = (&*self.turn.line.key, &self.limit, self.turn.inner.logs);
        let questions: Vec<_> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Ask(question) => Some(question.clone()),
                Step::Change(_) | Step::Reset => None,
            })
            .collect();
        // Leases end so long after this, on a clock that goes on while the machine is suspended.
        let asked = self.turn.inner.own_clock.exact_now();
        // That of the server that has answered: each one that is tried has its own.
        let doubt = Mutex::new(None);
        let say = |to: Bearings| {
            let doubted = Doubt::of(limit, self.distrust, to);
            *doubt.lock() = doubted;
            script::ask(limit, logs, key, &questions, doubted, to)
        };
        let called = self.turn.inner.call(key, slot, deadline, say).await;
        let Reply { value, sent, received } = match called {
            Ok(reply) => reply,
            Err(why) => return (Err(why), None),
        };
        self.turn.inner.counters.asked.fetch_add(questions.len() as u64, Ordering::Relaxed);
        match replay(limit, &questions, doubt.into_inner(), value) {
            Ok(Told { decisions, grant, memory, now }) => {
                let last_take = questions.iter().rposition(|question| question.takes());
                let denied = last_take
                    .is_some_and(|number| matches!(decisions[number].outcome, Outcome::Denied { .. }));
                let told = denied.then_some(Remembered { memory, at: now, sent, received });
                let answers = questions.iter().zip(decisions).map(|(question, decision)| {
                    let lent = grant.filter(|_| matches!(question, Question::Borrow(..)));
                    Done::Answered(decision, lent.map(|grant| Box::new(Lent { grant, sent: asked })))
                });
                (Ok(answers.collect()), told)
            }
            Err(why) => {
                self.turn.inner.count_failure(&why);
                (Err(why), None)
            }
        }
    }
}

/// A call that goes on with the driver if its caller leaves: others may be waiting for it.
pub(crate) struct Leading<F: Future<Output = T> + Send + 'static, T: Send + 'static> {
    call: Option<Pin<Box<F>>>,
    tasks: Tasks,
    /// Set while the call is polled: still set afterwards if it has panicked.
    is_polled: bool,
}

impl<F: Future<Output = T> + Send + 'static, T: Send + 'static> Leading<F, T> {
    pub(super) fn new(call: F, tasks: Tasks) -> Self {
        Self { call: Some(Box::pin(call)), tasks, is_polled: false }
    }
}

impl<F: Future<Output = T> + Send + 'static, T: Send + 'static> Future for Leading<F, T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let this = self.get_mut();
        let Some(call) = this.call.as_mut() else { return Poll::Pending };
        this.is_polled = true;
        let answer = call.as_mut().poll(context);
        this.is_polled = false;
        if answer.is_ready() {
            this.call = None;
        }
        answer
    }
}

impl<F: Future<Output = T> + Send + 'static, T: Send + 'static> Drop for Leading<F, T> {
    fn drop(&mut self) {
        // A call that panicked must not be polled again. Dropping it frees its key.
        if let Some(call) = self.call.take().filter(|_| !self.is_polled) {
            self.tasks.hand_over(async {
                call.await;
            });
        }
    }
}
