//! Several limits at once: all of them are taken from, or none. One deadline covers all of it.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tollgate_core::policy::{CHECKS_MAX, WORK_MAX};
use tollgate_core::{Decision, Micros, Outcome, Timestamp};

use super::call::{Leading, SetLead};
use super::error::StoreError;
use super::late::within;
use super::lines::SetEntered;
use super::set::{CheckSet, Member, SetAnswer};
use super::{Inner, RedisEngine, RedisLimiter};
use crate::engine::several::{Check, Decisions, Merged, merged};

impl RedisEngine {
    /// Takes from several limits, at most [`CHECKS_MAX`] and [`WORK_MAX`] of their work, or from none if one that is binding denies. The decisions are in the order
    /// of the checks. Where all limits are in one place (one server, or one slot of a cluster) that is one step; else one for each
    /// slot, and what was taken before a denial is given back. So is what was taken for a caller that has left.
    pub async fn acquire_all(&self, checks: &[Check<'_, RedisLimiter>]) -> Result<Decisions, StoreError> {
        let work: usize = checks.iter().map(|it| it.limiter.limit().work()).sum();
        if checks.len() > CHECKS_MAX || work > WORK_MAX {
            self.0.count_failure(&StoreError::Overloaded);
            return Err(StoreError::Overloaded);
        }
        let Merged { checks, of } = merged(checks, |one, other| one.own.prefix == other.own.prefix);
        let shortest = checks.iter().map(|it| it.limiter.deadline()).min();
        let deadline = Instant::now() + shortest.unwrap_or(self.0.deadline);
        let members: SmallVec<[Member; 4]> = checks
            .iter()
            .map(|it| {
                let line = it.limiter.line(it.limiter.key(it.key));
                Member { limiter: it.limiter.clone(), line, ask: it.ask, is_binding: it.is_binding }
            })
            .collect();
        let left = Arc::new(AtomicBool::new(false));
        // Dropped before the call goes on with the driver, which then knows that the caller has left.
        let leaving = |left: &Arc<AtomicBool>| Leaving(Arc::clone(left));
        let decisions = if self.0.are_in_one_place(&members) {
            let set = Arc::new(CheckSet { members });
            let mut call = pin!(self.0.decide(&set, deadline, &left));
            let _leaving = leaving(&left);
            call.as_mut().await?.decisions
        } else {
            let request = Request { inner: Arc::clone(&self.0), members, deadline, left: Arc::clone(&left) };
            let mut call = pin!(Leading::new(request.acquire(), self.0.tasks.clone()));
            let _leaving = leaving(&left);
            call.as_mut().await?
        };
        Ok(of.into_iter().map(|number| decisions[number]).collect())
    }
}

/// Notes that a caller has left.
struct Leaving(Arc<AtomicBool>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The answer to a set that waits. If nobody takes it, what was taken is given back.
struct Awaited<'a> {
    answer: oneshot::Receiver<Result<SetAnswer, StoreError>>,
    set: &'a CheckSet,
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.answer.close();
        if let Ok(Ok(answer)) = self.answer.try_recv() {
            self.set.give_back(&answer);
        }
    }
}

impl Inner {
    /// Whether one call can decide on all members: all have to be asked, in one slot.
    fn are_in_one_place(&self, members: &[Member]) -> bool {
        let Some(first) = members.first() else { return false };
        let slot = self.routes.slot(&first.line.key);
        members.iter().all(|it| it.is_asked() && self.routes.slot(&it.line.key) == slot)
    }

    /// Decides on a set whose keys are in one slot: with others who ask for the same.
    async fn decide(
        self: &Arc<Self>,
        set: &Arc<CheckSet>,
        deadline: Instant,
        left: &Arc<AtomicBool>,
    ) -> Result<SetAnswer, StoreError> {
        match self.lines.enter_set(set, left, Instant::now()) {
            SetEntered::Denied(answer) => {
                self.counters.remembered.fetch_add(1, Ordering::Relaxed);
                Ok(answer)
            }
            SetEntered::Lead(held) => {
                let lead = SetLead::new(set, &held);
                let (inner, set, left) = (Arc::clone(self), Arc::clone(set), Arc::clone(left));
                let call = async move {
                    let mut answer = lead.lead(&inner, deadline).await?;
                    if left.load(Ordering::Acquire) {
                        set.give_back(&answer);
                        answer.all = false;
                    }
                    Ok(answer)
                };
                Leading::new(call, self.tasks.clone()).await
            }
            SetEntered::Wait(answer) => {
                let mut awaited = Awaited { answer, set };
                match within(deadline, &mut awaited.answer).await {
                    Ok(Ok(answer)) => answer,
                    Ok(Err(_)) if self.tasks.is_stopped() => Err(StoreError::Stopped),
                    Ok(Err(_)) => Err(StoreError::Panicked),
                    Err(_) => {
                        let late = StoreError::Timeout(set.members[0].limiter.deadline());
                        self.count_failure(&late);
                        Err(late)
                    }
                }
            }
            SetEntered::Full => {
                self.count_failure(&StoreError::Overloaded);
                Err(StoreError::Overloaded)
            }
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
        if let Some((number, decision)) = self.inner.lines.known_denial(&self.members, Instant::now()) {
            self.inner.counters.remembered.fetch_add(1, Ordering::Relaxed);
            let mut decisions = Decisions::from_elem(None, self.members.len());
            decisions[number] = Some(decision);
            return Ok(decisions);
        }
        // What can never be admitted decides it without a take; what asks for nothing is looked at only.
        let mut denied = self.members.iter().any(|it| it.is_binding && it.is_impossible());
        let mut decisions = Decisions::from_elem(None, self.members.len());
        let mut taken: Vec<usize> = Vec::new();
        for numbers in self.places() {
            if denied || self.has_left() {
                break;
            }
            let members = numbers.iter().map(|number| self.members[*number].clone()).collect();
            let set = Arc::new(CheckSet { members });
            let answer = match self.inner.decide(&set, self.deadline, &self.left).await {
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
        // What was not asked is only told of: it is decided already, and a store that is gone by now changes nothing about that.
        let at = decisions.iter().flatten().map(|decision| decision.at).max().unwrap_or_default();
        let told = self.members.iter().zip(decisions).map(|(it, decision)| self.told(it, decision, at));
        Ok(join_all(told).await.into_iter().map(Some).collect())
    }

    /// Members by slot, slots in the order in which they are first met.
    fn places(&self) -> Vec<SmallVec<[usize; 4]>> {
        let mut places: Vec<(u16, SmallVec<[usize; 4]>)> = Vec::new();
        for (number, it) in self.members.iter().enumerate().filter(|(_, it)| it.is_asked()) {
            let slot = self.inner.routes.slot(&it.line.key);
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

    /// Gives back what was taken. The driver does it, however late the store answers; the caller waits for it until its deadline.
    /// What cannot be given back is lost to the key until it has refilled: never over, for an instant perhaps under.
    async fn give_back(&self, taken: &[usize], decisions: &Decisions) {
        let grants: Vec<_> = taken
            .iter()
            .filter_map(|number| {
                let Member { limiter, line, ask, .. } = &self.members[*number];
                let decision = decisions[*number]?;
                let start = decision.at.after(decision.outcome.delay());
                Some((limiter.clone(), Arc::clone(&line.key), ask.cost, start))
            })
            .collect();
        if grants.is_empty() {
            return;
        }
        let (done, given_back) = oneshot::channel();
        self.inner.tasks.hand_over(async move {
            let refunds = grants
                .iter()
                .map(|(limiter, key, cost, start)| limiter.refund_key(Arc::clone(key), *cost, *start));
            join_all(refunds).await;
            // The caller may have stopped waiting.
            let _ = done.send(());
        });
        let _ = timeout_at(self.deadline, given_back).await;
    }

    /// The decision on a limit, or where it stands if it was not asked and there is time left to find out.
    async fn told(&self, member: &Member, decision: Option<Decision>, at: Timestamp) -> Decision {
        if let Some(decision) = decision {
            return decision;
        }
        let time_left = self.deadline.saturating_duration_since(Instant::now());
        if time_left.is_zero() || self.has_left() {
            return untold(member, at);
        }
        let limiter = member.limiter.clone().with_deadline(time_left);
        limiter
            .peek_key(Arc::clone(&member.line.key), member.ask)
            .await
            .unwrap_or_else(|_| untold(member, at))
    }
}

/// Where a limit stands that the store does not tell of.
fn untold(member: &Member, at: Timestamp) -> Decision {
    let limit = member.limit().size();
    let outcome = if member.is_impossible() { Outcome::Impossible } else { Outcome::NOW };
    Decision { outcome, limit, remaining: 0, reset: Micros::ZERO, at }
}
