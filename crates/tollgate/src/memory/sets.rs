//! Decides on several limits of one request: permits are taken from all of them, or from none.

use std::sync::Arc;

use smallvec::SmallVec;
use tollgate_core::{Algorithm, Ask, Decision, with_algorithm};

use super::stripe::{Asker, Stripe, stripe_of};
use super::{MemoryEngine, MemoryLimiter};
use crate::check::{Check, Distinct};
use crate::hash::Hash;

type Limiters<'a> = SmallVec<[&'a MemoryLimiter; 4]>;

impl MemoryEngine {
    /// Decides on all checks of a request together, at one instant. The decisions are in the order of the checks. `None`: the limit of
    /// another check was removed, so nothing was decided or taken.
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
        // All requests lock in the same order, or two of them could deadlock.
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
        // An impossible check denies the request without a take.
        if asked().any(|((it, limiter), _)| it.enforced && it.ask.cost > limiter.limit.size()) {
            return looked;
        }
        let decide = |(((it, limiter), hash), looked): (((&Check<'_>, &&MemoryLimiter), Hash), &Decision)| {
            // A limit that denies by itself may count the denial.
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
    /// As `peek`, in a locked stripe.
    pub(super) fn look(&self, stripe: &Stripe, asker: Asker<'_>, ask: Ask) -> Decision {
        let now = asker.now;
        let (outcome, status) = with_algorithm!(&self.limit, |it| {
            stripe.look(asker, it, |state| (it.peek(state, now, ask), it.status(state, now)))
        });
        self.decision(outcome, status, now)
    }

    /// As `acquire`, in a locked stripe.
    fn take_in(&self, stripe: &mut Stripe, asker: Asker<'_>, ask: Ask) -> Decision {
        with_algorithm!(&self.limit, |it| self.decide_in(it, stripe, asker, ask))
    }
}
