//! Several limits at once: all of them are taken from, or none.

use std::sync::atomic::Ordering;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::policy::CHECKS_MAX;
use tollgate_core::{Decision, Micros, Outcome, Timestamp};

use super::error::StoreError;
use super::node::Bearings;
use super::replay::replay_several;
use super::script::{Doubt, OneOfSeveral as Said};
use super::{Inner, RedisEngine, RedisLimiter, script};
use crate::engine::several::{Check, Merged, merged};

impl RedisEngine {
    /// Takes from several limits, at most [`CHECKS_MAX`], or from none if one that is binding denies. The decisions are in the order
    /// of the checks. Where all limits are in one place (one server, or one slot of a cluster) that is one step; else one for each
    /// slot, and what was taken before a denial is given back.
    pub async fn acquire_all(&self, checks: &[Check<'_, RedisLimiter>]) -> Result<Vec<Decision>, StoreError> {
        if checks.len() > CHECKS_MAX {
            self.0.count_failure(&StoreError::Overloaded);
            return Err(StoreError::Overloaded);
        }
        let Merged { checks, of } = merged(checks, |one, other| one.prefix == other.prefix);
        let decisions = self.acquire_each_or_none(&checks).await?;
        Ok(of.into_iter().map(|number| decisions[number]).collect())
    }

    async fn acquire_each_or_none(
        &self,
        checks: &[Check<'_, RedisLimiter>],
    ) -> Result<Vec<Decision>, StoreError> {
        let shortest = checks.iter().map(|it| it.limiter.deadline).min();
        let deadline = Instant::now() + shortest.unwrap_or(self.0.deadline);
        let keys: Vec<_> = checks.iter().map(|it| it.limiter.key(it.key)).collect();
        // What can never be admitted decides it without a take; what asks for nothing is looked at only.
        let is_impossible = |it: &Check<'_, RedisLimiter>| it.ask.cost > it.limiter.limit.size();
        let mut denied = checks.iter().any(|it| it.is_binding && is_impossible(it));
        let mut decisions: Vec<Option<Decision>> = vec![None; checks.len()];
        let mut taken: Vec<usize> = Vec::new();
        // Checks by slot, slots in the order in which they are first met.
        let mut places: Vec<(u16, Vec<usize>)> = Vec::new();
        let is_asked = |number: usize| checks[number].ask.cost > 0 && !is_impossible(&checks[number]);
        for number in (0..checks.len()).filter(|number| is_asked(*number)) {
            let slot = self.0.routes.slot(&keys[number]);
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
                .map(|number| {
                    let Check { limiter, ask, is_binding, .. } = checks[*number];
                    let (limit, distrust) = (&limiter.limit, limiter.distrust);
                    Said { limit, key: &keys[*number], ask, is_binding, distrust }
                })
                .collect();
            let (all, answers) = match self.0.ask_several(slot, &part, deadline).await {
                Ok(answers) => answers,
                Err(why) => {
                    self.give_back(checks, &taken, &decisions).await;
                    return Err(why);
                }
            };
            for (number, decision) in numbers.iter().zip(&answers) {
                decisions[*number] = Some(*decision);
            }
            if all {
                taken.extend(
                    numbers.into_iter().zip(&answers).filter(|(_, it)| it.is_admitted()).map(|it| it.0),
                );
            } else {
                denied = true;
                self.give_back(checks, &taken, &decisions).await;
            }
        }
        // What was not asked is only told of: it is decided already, and a store that is gone by now changes nothing about that.
        let at = decisions.iter().flatten().map(|decision| decision.at).max().unwrap_or_default();
        let told = checks.iter().zip(decisions).map(|(it, decision)| async move {
            match decision {
                Some(decision) => decision,
                None => it.limiter.peek(it.key, it.ask).await.unwrap_or_else(|_| untold(it, at)),
            }
        });
        Ok(join_all(told).await)
    }

    /// What cannot be given back is lost to the key until it has refilled: never over, for an instant perhaps under.
    async fn give_back(
        &self,
        checks: &[Check<'_, RedisLimiter>],
        taken: &[usize],
        decisions: &[Option<Decision>],
    ) {
        let refunds = taken.iter().filter_map(|number| {
            let Check { limiter, key, ask, .. } = checks[*number];
            let decision = decisions[*number]?;
            Some(limiter.refund(key, ask.cost, decision.at.after(decision.outcome.delay())))
        });
        join_all(refunds).await;
    }
}

/// Where a limit stands that the store does not tell of.
fn untold(check: &Check<'_, RedisLimiter>, at: Timestamp) -> Decision {
    let limit = check.limiter.limit.size();
    let outcome = if check.ask.cost > limit { Outcome::Impossible } else { Outcome::NOW };
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
