//! Decides on several limits of one request: permits are taken from all of them, or from none, within one deadline.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tollgate_core::policy::{CHECKS_MAX, WORK_MAX};
use tollgate_core::{Decision, Micros, Outcome, Timestamp};

use crate::backend::Deadlines;
use crate::check::{Check, Distinct};
use crate::deadline::within;
use crate::redis::Inner;
use crate::redis::error::StoreError;
use crate::redis::limit::StoredLimit;
use crate::redis::protocol::Question;
use crate::redis::queue::call::SetLead;
use crate::redis::queue::set::{CheckSet, Member, SetAnswer};
use crate::redis::queue::{Done, SetEntered, Step};
use crate::tasks::Leading;

/// Decisions in the order of the checks. `None`: another limit is known to deny, and this one was not asked.
pub(super) type Decisions = SmallVec<[Option<Decision>; 4]>;

impl Inner {
    /// Decides on the checks of a request.
    pub(super) async fn decide_together(
        self: &Arc<Self>,
        checks: &[Check<'_>],
    ) -> Result<Decisions, StoreError> {
        let limits = checks.iter().map(|it| self.stored(it.limit));
        let limits = limits.collect::<Result<SmallVec<[Arc<StoredLimit>; 4]>, _>>()?;
        let work: usize = limits.iter().map(|it| it.limit.work()).sum();
        if checks.len() > CHECKS_MAX || work > WORK_MAX {
            return Err(self.failed(StoreError::Overloaded));
        }
        let Distinct { checks, index } =
            Distinct::new(checks, |number| limits[number].state(checks[number].key));
        // The first check of a state names the limit that decides on it.
        let mut members: SmallVec<[Member; 4]> = SmallVec::new();
        for (limit, position) in limits.into_iter().zip(&index) {
            if *position == members.len() {
                let Check { key, ask, enforced, .. } = checks[*position];
                members.push(Member { queue_key: limit.queue_key(key), limit, ask, enforced });
            }
        }
        let now = Instant::now();
        let shortest = |of: fn(&StoredLimit) -> Duration| members.iter().map(|it| of(&it.limit)).min();
        let wait = now + shortest(|it| it.deadlines.wait).unwrap_or(self.deadline);
        // The call may take longer if all limits are leased.
        let call = now + shortest(|it| it.deadlines.call).unwrap_or(self.deadline);
        let left = Arc::new(AtomicBool::new(false));
        // Dropped before the call goes on with the driver, which reads that the caller has left.
        let leaving = |left: &Arc<AtomicBool>| Leaving(Arc::clone(left));
        let decisions = if self.are_in_one_place(&members) {
            let set = Arc::new(CheckSet { members });
            let mut call = pin!(self.decide_set(&set, wait, call, &left));
            let _leaving = leaving(&left);
            call.as_mut().await?.decisions
        } else {
            let (inner, has_left) = (Arc::clone(self), Arc::clone(&left));
            let request = Request { inner, members, deadline: wait, left: has_left };
            let mut call = pin!(Leading::new(request.acquire(), self.tasks.clone()));
            let _leaving = leaving(&left);
            call.as_mut().await?
        };
        Ok(index.into_iter().map(|position| decisions[position]).collect())
    }
}

/// Records that a caller has left.
struct Leaving(Arc<AtomicBool>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The answer to a waiting set. If the caller leaves, the permits are given back.
struct Awaited<'a> {
    answer: oneshot::Receiver<Result<SetAnswer, StoreError>>,
    inner: &'a Arc<Inner>,
    set: &'a CheckSet,
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.answer.close();
        if let Ok(Ok(answer)) = self.answer.try_recv() {
            self.set.give_back(self.inner, &answer);
        }
    }
}

impl Inner {
    /// Whether one call can decide on all members: the store is asked for all of them, in one slot.
    fn are_in_one_place(&self, members: &[Member]) -> bool {
        let Some(first) = members.first() else { return false };
        let slot = self.routes.slot(&first.queue_key.key);
        members.iter().all(|it| it.is_asked() && self.routes.slot(&it.queue_key.key) == slot)
    }

    /// Decides on a set whose keys are in one slot, together with equal sets. The caller waits until `wait`. A call that it starts may take
    /// until `deadline`, and goes on without the caller.
    async fn decide_set(
        self: &Arc<Self>,
        set: &Arc<CheckSet>,
        wait: Instant,
        deadline: Instant,
        left: &Arc<AtomicBool>,
    ) -> Result<SetAnswer, StoreError> {
        let patience = set.members[0].limit.deadlines.wait;
        match self.coalescer.enter_set(set, left, Instant::now()) {
            SetEntered::Denied(answer) => {
                self.counters.remembered.fetch_add(1, Ordering::Relaxed);
                Ok(answer)
            }
            SetEntered::Lead(held) => {
                let lead = SetLead::new(self, set, &held);
                let (inner, set, has_left) = (Arc::clone(self), Arc::clone(set), Arc::clone(left));
                let call = async move {
                    let mut answer = lead.lead(&inner, deadline).await?;
                    if has_left.load(Ordering::Acquire) {
                        set.give_back(&inner, &answer);
                        answer.all = false;
                    }
                    Ok(answer)
                };
                let mut call = pin!(Leading::new(call, self.tasks.clone()));
                if deadline <= wait {
                    return call.await;
                }
                within(wait, call.as_mut()).await.unwrap_or_else(|_| {
                    left.store(true, Ordering::Release);
                    Err(self.late(patience))
                })
            }
            SetEntered::Wait(answer) => {
                let mut awaited = Awaited { answer, inner: self, set };
                self.waited(wait, patience, &mut awaited.answer).await
            }
            SetEntered::Full => Err(self.failed(StoreError::Overloaded)),
        }
    }
}

/// A request whose limits are in several slots, or some of whose limits are not asked.
struct Request {
    inner: Arc<Inner>,
    members: SmallVec<[Member; 4]>,
    deadline: Instant,
    /// Whether the caller has left.
    left: Arc<AtomicBool>,
}

impl Request {
    async fn acquire(self) -> Result<Decisions, StoreError> {
        if let Some((number, decision)) = self.inner.coalescer.known_denial(&self.members, Instant::now()) {
            self.inner.counters.remembered.fetch_add(1, Ordering::Relaxed);
            let mut decisions = Decisions::from_elem(None, self.members.len());
            decisions[number] = Some(decision);
            return Ok(decisions);
        }
        // An impossible check denies the request without a take. A check with cost 0 is only peeked at.
        let mut denied = self.members.iter().any(|it| it.enforced && it.is_impossible());
        let mut decisions = Decisions::from_elem(None, self.members.len());
        let mut taken: Vec<usize> = Vec::new();
        for numbers in self.places() {
            if denied || self.has_left() {
                break;
            }
            let members = numbers.iter().map(|number| self.members[*number].clone()).collect();
            let set = Arc::new(CheckSet { members });
            let answer = match self.inner.decide_set(&set, self.deadline, self.deadline, &self.left).await {
                Ok(answer) => answer,
                Err(why) => {
                    self.give_back(&taken, &decisions).await;
                    return Err(why);
                }
            };
            denied |= !answer.all;
            for (number, decision) in numbers.into_iter().zip(answer.decisions) {
                decisions[number] = decision;
                if answer.all && decision.is_some_and(|it| it.is_admitted()) {
                    taken.push(number);
                }
            }
        }
        if denied || self.has_left() {
            self.give_back(&taken, &decisions).await;
        }
        // The request is decided. Members that were not asked only get a status, and a failing store does not change the decision.
        let at = decisions.iter().flatten().map(|decision| decision.at).max().unwrap_or_default();
        let told = self.members.iter().zip(decisions).map(|(it, decision)| self.told(it, decision, at));
        Ok(join_all(told).await.into_iter().map(Some).collect())
    }

    /// Members by slot, in the order of their first members.
    fn places(&self) -> Vec<SmallVec<[usize; 4]>> {
        let mut places: Vec<(u16, SmallVec<[usize; 4]>)> = Vec::new();
        for (number, it) in self.members.iter().enumerate().filter(|(_, it)| it.is_asked()) {
            let slot = self.inner.routes.slot(&it.queue_key.key);
            match places.iter_mut().find(|(known, _)| *known == slot) {
                Some((_, numbers)) => numbers.push(number),
                None => places.push((slot, SmallVec::from_elem(number, 1))),
            }
        }
        places.into_iter().map(|(_, numbers)| numbers).collect()
    }

    fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// Gives back the permits taken. The driver does it, however late the store answers; the caller waits until its deadline. Permits that
    /// cannot be given back are missing until the key has refilled, so the key may admit too little, never too much.
    async fn give_back(&self, taken: &[usize], decisions: &Decisions) {
        let grants: Vec<_> = taken
            .iter()
            .filter_map(|number| {
                let decision = decisions[*number]?;
                Some((self.members[*number].clone(), decision.at.after(decision.outcome.delay())))
            })
            .collect();
        if grants.is_empty() {
            return;
        }
        let (done, given_back) = oneshot::channel();
        let inner = Arc::clone(&self.inner);
        self.inner.tasks.hand_over(async move {
            let refunds = grants
                .iter()
                .map(|(it, start)| inner.refund(&it.limit, it.queue_key.clone(), it.ask.cost, *start));
            join_all(refunds).await;
            // The caller may have stopped waiting.
            let _ = done.send(());
        });
        let _ = timeout_at(self.deadline, given_back).await;
    }

    /// The decision on a limit, or its status if it was not asked and there is time left.
    async fn told(&self, member: &Member, decision: Option<Decision>, at: Timestamp) -> Decision {
        if let Some(decision) = decision {
            return decision;
        }
        let time_left = self.deadline.saturating_duration_since(Instant::now());
        if time_left.is_zero() || self.has_left() {
            return untold(member, at);
        }
        let step = Step::Ask(Question::Peek(member.ask));
        match self.inner.step(&member.limit, member.queue_key.clone(), step, Deadlines::of(time_left)).await {
            Ok(Done::Answered(decision, _)) => decision,
            Ok(Done::Changed | Done::OutOfTurn(_)) | Err(_) => untold(member, at),
        }
    }
}

/// The decision on a limit without a status from the store.
fn untold(member: &Member, at: Timestamp) -> Decision {
    let limit = member.limit().size();
    let outcome = if member.is_impossible() { Outcome::Impossible } else { Outcome::NOW };
    Decision { outcome, limit, remaining: 0, reset: Micros::ZERO, at }
}
