//! Several limits of one request: permits are taken from all of them, or from none.

use std::sync::Arc;

use smallvec::SmallVec;
use tollgate_core::{Ask, Decision, Limit};

use super::slot_codec::SlotCodec;
use super::stripe::{Asker, Stripe, stripe_of};
use super::{Look, MemoryEngine, MemoryLimiter};
use crate::check::{Check, Distinct};
use crate::hash::Hash;

type Limiters<'a> = SmallVec<[&'a MemoryLimiter; 4]>;

impl MemoryEngine {
    /// Decides on all checks of a request together, at one instant; the decisions are in the order of the checks. `None`: a limit of the
    /// request was removed, so that nothing was decided or taken, and this check is not the reason.
    pub fn decide_all(&self, checks: &[Check<'_>]) -> SmallVec<[Option<Decision>; 4]> {
        let added = self.added.limiters.read();
        let found: Option<Limiters<'_>> =
            checks.iter().map(|it| added.get(&it.limit).map(Arc::as_ref)).collect();
        let Some(limiters) = found else {
            let is_removed = |it: &Check<'_>| !added.contains_key(&it.limit);
            return checks.iter().map(|it| is_removed(it).then(|| self.removed())).collect();
        };
        if let ([check], [limiter]) = (checks, &limiters[..]) {
            return SmallVec::from_iter([Some(limiter.acquire_hashed(check.key.hash(), check.ask))]);
        }
        let state = |number: usize| checks[number].key.hash().within(limiters[number].scope);
        let Distinct { checks, index } = Distinct::new(checks, state);
        // The first check of a state names the limit that decides on it.
        let mut first: Limiters<'_> = SmallVec::new();
        for (limiter, position) in limiters.iter().zip(&index) {
            if *position == first.len() {
                first.push(limiter);
            }
        }
        let decisions = self.take_all_or_none(&checks, &first);
        index.into_iter().map(|position| Some(decisions[position])).collect()
    }

    fn take_all_or_none(&self, checks: &[Check<'_>], limiters: &Limiters<'_>) -> SmallVec<[Decision; 4]> {
        let now = self.table.clock.now();
        let hashes: SmallVec<[Hash; 4]> =
            checks.iter().zip(limiters).map(|(it, limiter)| it.key.hash().within(limiter.scope)).collect();
        let stripes = self.table.stripes.len();
        // In one order for all, or two requests could wait for each other.
        let mut places: SmallVec<[usize; 4]> = hashes.iter().map(|hash| stripe_of(*hash, stripes)).collect();
        places.sort_unstable();
        places.dedup();
        let mut locked: SmallVec<[_; 4]> =
            places.iter().map(|place| self.table.stripes[*place].0.lock()).collect();
        let place_of = |hash: Hash| places.binary_search(&stripe_of(hash, stripes)).unwrap_or(0);

        let asked = || checks.iter().zip(limiters).zip(hashes.iter().copied());
        let looked: SmallVec<[Decision; 4]> = asked()
            .map(|((it, limiter), hash)| {
                limiter.look(&locked[place_of(hash)], limiter.asker_at(hash, now), it.ask)
            })
            .collect();
        let all = checks.iter().zip(&looked).all(|(it, decision)| !it.enforced || decision.is_admitted());
        // What can never be admitted decides it without a take.
        if asked().any(|((it, limiter), _)| it.enforced && it.ask.cost > limiter.limit.size()) {
            return looked;
        }
        let decide = |(((it, limiter), hash), looked): (((&Check<'_>, &&MemoryLimiter), Hash), &Decision)| {
            // A limit that denies by itself may keep what a denial keeps.
            if all || !looked.is_admitted() {
                limiter.take_in(&mut locked[place_of(hash)], limiter.asker_at(hash, now), it.ask)
            } else {
                *looked
            }
        };
        asked().zip(&looked).map(decide).collect()
    }
}

impl MemoryLimiter {
    /// As `peek`, in a stripe that is held.
    pub(super) fn look(&self, stripe: &Stripe, asker: Asker<'_>, ask: Ask) -> Decision {
        let look = Look { ask, asker };
        let (outcome, status) = match &self.limit {
            Limit::TokenBucket(it) => look.at(it, stripe),
            Limit::IntervalBucket(it) => look.at(it, stripe),
            Limit::LeakyBucket(it) => look.at(it, stripe),
            Limit::FixedWindow(it) => look.at(it, stripe),
            Limit::SlidingLog(it) => look.at(it, stripe),
            Limit::SlidingCounter(it) => look.at(it, stripe),
            Limit::CalendarQuota(it) => look.at(it, stripe),
        };
        self.decision(outcome, status, asker.now)
    }

    /// As `acquire`, in a stripe that is held.
    fn take_in(&self, stripe: &mut Stripe, asker: Asker<'_>, ask: Ask) -> Decision {
        match &self.limit {
            Limit::TokenBucket(it) => self.decide_in(it, stripe, asker, ask),
            Limit::IntervalBucket(it) => self.decide_in(it, stripe, asker, ask),
            Limit::LeakyBucket(it) => self.decide_in(it, stripe, asker, ask),
            Limit::FixedWindow(it) => self.decide_in(it, stripe, asker, ask),
            Limit::SlidingLog(it) => self.decide_in(it, stripe, asker, ask),
            Limit::SlidingCounter(it) => self.decide_in(it, stripe, asker, ask),
            Limit::CalendarQuota(it) => self.decide_in(it, stripe, asker, ask),
        }
    }

    fn decide_in<A: SlotCodec>(
        &self,
        algorithm: &A,
        stripe: &mut Stripe,
        asker: Asker<'_>,
        ask: Ask,
    ) -> Decision {
        let now = asker.now;
        if self.changes_beside(ask) {
            return self.decide_whole(algorithm, stripe, asker, ask);
        }
        let (outcome, snapshot) = stripe.update(
            asker,
            algorithm,
            || self.takes(ask),
            |state| {
                let outcome = algorithm.decide(state, now, ask);
                (outcome, algorithm.snapshot(state, now))
            },
        );
        self.decision(outcome, algorithm.status_of(snapshot, now), now)
    }
}
