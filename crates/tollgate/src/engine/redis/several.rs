//! Several limits at once: all of them are taken from, or none. One deadline covers all of it.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tollgate_core::policy::CHECKS_MAX;
use tollgate_core::{Ask, Decision, Micros, Outcome, Timestamp};

use super::call::Leading;
use super::error::StoreError;
use super::node::Bearings;
use super::replay::replay_several;
use super::script::{Doubt, OneOfSeveral as Said};
use super::{Inner, RedisEngine, RedisLimiter, script};
use crate::engine::several::{Check, Merged, merged};

impl RedisEngine {
    /// Takes from several limits, at most [`CHECKS_MAX`], or from none if one that is binding denies. The decisions are in the order
    /// of the checks. Where all limits are in one place (one server, or one slot of a cluster) that is one step; else one for each
    /// slot, and what was taken before a denial is given back. So is what was taken for a caller that has left.
    pub async fn acquire_all(&self, checks: &[Check<'_, RedisLimiter>]) -> Result<Vec<Decision>, StoreError> {
        if checks.len() > CHECKS_MAX {
            self.0.count_failure(&StoreError::Overloaded);
            return Err(StoreError::Overloaded);
        }
        let Merged { checks, of } = merged(checks, |one, other| one.prefix == other.prefix);
        let shortest = checks.iter().map(|it| it.limiter.deadline).min();
        let part = |it: &Check<'_, RedisLimiter>| Part {
            limiter: it.limiter.clone(),
            name: it.key.into(),
            key: it.limiter.key(it.key),
            ask: it.ask,
            is_binding: it.is_binding,
        };
        let left = Arc::new(AtomicBool::new(false));
        let set = CheckSet {
            inner: Arc::clone(&self.0),
            parts: checks.iter().map(part).collect(),
            deadline: Instant::now() + shortest.unwrap_or(self.0.deadline),
            left: Arc::clone(&left),
        };
        let mut call = pin!(Leading::new(set.acquire(), self.0.tasks.clone()));
        // Dropped before the call goes on with the driver, which then knows that the caller has left.
        let _leaving = Leaving(left);
        let decisions = call.as_mut().await?;
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

/// Checks that are decided together.
struct CheckSet {
    inner: Arc<Inner>,
    parts: Vec<Part>,
    deadline: Instant,
    /// Whether the caller has left.
    left: Arc<AtomicBool>,
}

struct Part {
    limiter: RedisLimiter,
    /// The key as the caller names it.
    name: Arc<str>,
    /// The key in the store.
    key: Arc<str>,
    ask: Ask,
    is_binding: bool,
}

impl Part {
    fn is_impossible(&self) -> bool {
        self.ask.cost > self.limiter.limit.size()
    }
}

impl CheckSet {
    async fn acquire(self) -> Result<Vec<Decision>, StoreError> {
        // What can never be admitted decides it without a take; what asks for nothing is looked at only.
        let mut denied = self.parts.iter().any(|it| it.is_binding && it.is_impossible());
        let mut decisions: Vec<Option<Decision>> = vec![None; self.parts.len()];
        let mut taken: Vec<usize> = Vec::new();
        for (slot, numbers) in self.places() {
            if denied || self.has_left() {
                break;
            }
            let (all, answers) = match self.take(slot, &numbers).await {
                Ok(answers) => answers,
                Err(why) => {
                    self.give_back(&taken, &decisions).await;
                    return Err(why);
                }
            };
            for (number, decision) in numbers.iter().zip(&answers) {
                decisions[*number] = Some(*decision);
            }
            denied |= !all;
            if all {
                let admitted = numbers.into_iter().zip(&answers).filter(|(_, it)| it.is_admitted());
                taken.extend(admitted.map(|(number, _)| number));
            }
        }
        if denied || self.has_left() {
            self.give_back(&taken, &decisions).await;
        }
        // What was not asked is only told of: it is decided already, and a store that is gone by now changes nothing about that.
        let at = decisions.iter().flatten().map(|decision| decision.at).max().unwrap_or_default();
        let told = self.parts.iter().zip(decisions).map(|(it, decision)| self.told(it, decision, at));
        Ok(join_all(told).await)
    }

    /// Checks by slot, slots in the order in which they are first met.
    fn places(&self) -> Vec<(u16, Vec<usize>)> {
        let mut places: Vec<(u16, Vec<usize>)> = Vec::new();
        for (number, it) in self.parts.iter().enumerate() {
            if it.ask.cost == 0 || it.is_impossible() {
                continue;
            }
            let slot = self.inner.routes.slot(&it.key);
            match places.iter_mut().find(|(known, _)| *known == slot) {
                Some((_, numbers)) => numbers.push(number),
                None => places.push((slot, vec![number])),
            }
        }
        places
    }

    fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// Takes from the limits of one slot, or from none of them.
    async fn take(&self, slot: u16, numbers: &[usize]) -> Result<(bool, Vec<Decision>), StoreError> {
        let said = |number: &usize| {
            let Part { limiter, key, ask, is_binding, .. } = &self.parts[*number];
            let (limit, distrust) = (&limiter.limit, limiter.distrust);
            Said { limit, key, ask: *ask, is_binding: *is_binding, distrust }
        };
        let said: Vec<_> = numbers.iter().map(said).collect();
        self.inner.ask_several(slot, &said, self.deadline).await
    }

    /// Gives back what was taken. The driver does it, however late the store answers; the caller waits for it until its deadline.
    /// What cannot be given back is lost to the key until it has refilled: never over, for an instant perhaps under.
    async fn give_back(&self, taken: &[usize], decisions: &[Option<Decision>]) {
        let grants: Vec<_> = taken
            .iter()
            .filter_map(|number| {
                let Part { limiter, name, ask, .. } = &self.parts[*number];
                let decision = decisions[*number]?;
                let start = decision.at.after(decision.outcome.delay());
                Some((limiter.clone(), Arc::clone(name), ask.cost, start))
            })
            .collect();
        if grants.is_empty() {
            return;
        }
        let (done, given_back) = oneshot::channel();
        self.inner.tasks.hand_over(async move {
            join_all(grants.iter().map(|(limiter, name, cost, start)| limiter.refund(name, *cost, *start)))
                .await;
            // The caller may have stopped waiting.
            let _ = done.send(());
        });
        let _ = timeout_at(self.deadline, given_back).await;
    }

    /// The decision on a limit, or where it stands if it was not asked and there is time left to find out.
    async fn told(&self, part: &Part, decision: Option<Decision>, at: Timestamp) -> Decision {
        if let Some(decision) = decision {
            return decision;
        }
        let time_left = self.deadline.saturating_duration_since(Instant::now());
        if time_left.is_zero() || self.has_left() {
            return untold(part, at);
        }
        let limiter = part.limiter.clone().with_deadline(time_left);
        limiter.peek(&part.name, part.ask).await.unwrap_or_else(|_| untold(part, at))
    }
}

/// Where a limit stands that the store does not tell of.
fn untold(part: &Part, at: Timestamp) -> Decision {
    let limit = part.limiter.limit.size();
    let outcome = if part.is_impossible() { Outcome::Impossible } else { Outcome::NOW };
    Decision { outcome, limit, remaining: 0, reset: Micros::ZERO, at }
}

impl Inner {
    async fn ask_several(
        &self,
        slot: u16,
        checks: &[Said<'_>],
        deadline: Instant,
    ) -> Result<(bool, Vec<Decision>), StoreError> {
        // An error is told of the first key, whichever of them it was.
        let key = checks.first().map_or("", |check| check.key);
        // Those of the server that has answered: each one that is tried has its own.
        let doubts = Mutex::new(Vec::new());
        let say = |to: Bearings| {
            let doubted: Vec<_> = checks.iter().map(|it| Doubt::of(it.limit, it.distrust, to)).collect();
            let command = script::ask_several(checks, &doubted, self.logs, to);
            *doubts.lock() = doubted;
            command
        };
        let reply = self.call(key, slot, deadline, say).await?;
        self.counters.asked.fetch_add(checks.len() as u64, Ordering::Relaxed);
        replay_several(checks, &doubts.into_inner(), reply.value).inspect_err(|why| self.count_failure(why))
    }
}
