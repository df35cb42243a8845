//! Several limits at once: all of them are taken from, or none.

use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::Decision;

use super::error::StoreError;
use super::node::Bearings;
use super::replay::replay_several;
use super::script::{Check, Doubt};
use super::{CHECKS_MAX, Inner, RedisEngine, RedisLimiter, script};

impl RedisEngine {
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
                .map(|number| {
                    let (limiter, _, cost) = checks[*number];
                    let (limit, distrust) = (&limiter.limit, limiter.distrust);
                    Check { limit, key: &keys[*number], cost, distrust }
                })
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
    async fn ask_several(
        &self,
        slot: u16,
        checks: &[Check<'_>],
        deadline: Instant,
    ) -> Result<(bool, Vec<Decision>), StoreError> {
        // An error is told of the first key, whichever of them it was.
        let key = checks.first().map_or("", |check| check.key);
        // Those of the server that has answered: each one that is tried has its own.
        let doubts = Mutex::new(Vec::new());
        let say = |to: Bearings| {
            let doubted: Vec<_> = checks.iter().map(|it| Doubt::of(it.limit, it.distrust, to)).collect();
            let command = script::ask_several(checks, &doubted, self.logs, to.now);
            *doubts.lock() = doubted;
            command
        };
        let reply = self.call(key, slot, deadline, say).await?;
        self.counters.asked.fetch_add(checks.len() as u64, Ordering::Relaxed);
        replay_several(checks, &doubts.into_inner(), reply.value).inspect_err(|why| self.count_failure(why))
    }
}
