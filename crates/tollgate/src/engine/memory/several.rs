//! Several limits at once: all of them are taken from, or none.

use smallvec::SmallVec;
use tollgate_core::{Ask, Decision, Limit};

use super::cell::Cell;
use super::shard::{Asker, Hash, Shard};
use super::{Look, MemoryEngine, MemoryLimiter};
use crate::engine::several::{Check, Merged, merged};

impl MemoryEngine {
    /// Takes from several limits of this engine, or from none if one that is binding denies. The decisions are in the order of the
    /// checks, all of one instant.
    pub fn acquire_all(&self, checks: &[Check<'_, MemoryLimiter>]) -> SmallVec<[Decision; 4]> {
        let Merged { checks, of } = merged(checks, |one, other| one.scope == other.scope);
        let decisions = self.acquire_each_or_none(&checks);
        of.into_iter().map(|number| decisions[number]).collect()
    }

    fn acquire_each_or_none(&self, checks: &[Check<'_, MemoryLimiter>]) -> SmallVec<[Decision; 4]> {
        let now = self.0.clock.now();
        let hashes: SmallVec<[Hash; 4]> = checks.iter().map(|it| it.limiter.hash(it.key)).collect();
        let shards = self.0.shards.len();
        // In one order for all, or two requests could wait for each other.
        let mut places: SmallVec<[usize; 4]> = hashes.iter().map(|hash| hash.shard(shards)).collect();
        places.sort_unstable();
        places.dedup();
        let mut locked: SmallVec<[_; 4]> =
            places.iter().map(|place| self.0.shards[*place].0.lock()).collect();
        let place_of = |hash: &Hash| places.binary_search(&hash.shard(shards)).unwrap_or(0);

        let looks = checks.iter().zip(&hashes);
        let looked: SmallVec<[Decision; 4]> = looks
            .map(|(it, hash)| {
                it.limiter.look(&locked[place_of(hash)], it.limiter.asker_at(*hash, now), it.ask)
            })
            .collect();
        let all = checks.iter().zip(&looked).all(|(it, decision)| !it.is_binding || decision.is_admitted());
        // What can never be admitted decides it without a take.
        let is_impossible =
            |it: &Check<'_, MemoryLimiter>| it.is_binding && it.ask.cost > it.limiter.limit.size();
        if checks.iter().any(is_impossible) {
            return looked;
        }
        let decide = |((it, hash), looked): ((&Check<'_, MemoryLimiter>, &Hash), &Decision)| {
            // A limit that denies by itself may keep what a denial keeps.
            if all || !looked.is_admitted() {
                it.limiter.take_in(&mut locked[place_of(hash)], it.limiter.asker_at(*hash, now), it.ask)
            } else {
                *looked
            }
        };
        checks.iter().zip(&hashes).zip(&looked).map(decide).collect()
    }
}

impl MemoryLimiter {
    /// As `peek`, in a shard that is held.
    pub(super) fn look(&self, shard: &Shard, asker: Asker<'_>, ask: Ask) -> Decision {
        let look = Look { ask, asker };
        let (outcome, standing) = match &self.limit {
            Limit::TokenBucket(it) => look.at(it, shard),
            Limit::IntervalBucket(it) => look.at(it, shard),
            Limit::LeakyBucket(it) => look.at(it, shard),
            Limit::FixedWindow(it) => look.at(it, shard),
            Limit::SlidingLog(it) => look.at(it, shard),
            Limit::SlidingCounter(it) => look.at(it, shard),
            Limit::CalendarQuota(it) => look.at(it, shard),
        };
        self.decision(outcome, standing, asker.now)
    }

    /// As `acquire`, in a shard that is held.
    fn take_in(&self, shard: &mut Shard, asker: Asker<'_>, ask: Ask) -> Decision {
        match &self.limit {
            Limit::TokenBucket(it) => self.decide_in(it, shard, asker, ask),
            Limit::IntervalBucket(it) => self.decide_in(it, shard, asker, ask),
            Limit::LeakyBucket(it) => self.decide_in(it, shard, asker, ask),
            Limit::FixedWindow(it) => self.decide_in(it, shard, asker, ask),
            Limit::SlidingLog(it) => self.decide_in(it, shard, asker, ask),
            Limit::SlidingCounter(it) => self.decide_in(it, shard, asker, ask),
            Limit::CalendarQuota(it) => self.decide_in(it, shard, asker, ask),
        }
    }

    fn decide_in<A: Cell>(&self, algorithm: &A, shard: &mut Shard, asker: Asker<'_>, ask: Ask) -> Decision {
        let now = asker.now;
        if self.changes_beside(ask) {
            return self.decide_whole(algorithm, shard, asker, ask);
        }
        let (outcome, snapshot) = shard.update(asker, algorithm, self.takes(ask), |state| {
            let outcome = algorithm.decide(state, now, ask);
            (outcome, algorithm.snapshot(state, now))
        });
        self.decision(outcome, algorithm.standing_of(snapshot, now), now)
    }
}
