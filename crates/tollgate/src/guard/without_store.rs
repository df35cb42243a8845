//! Decides on requests without the store: each limit by its failure mode, permits from all limits or from none.

use std::sync::Arc;

use smallvec::SmallVec;
use tollgate_core::{Ask, Decision, Limit, Micros, Outcome};

use super::{Guarded, Shared};
use crate::backend::Store;
use crate::check::Check;
use crate::redis::StoreError;
use crate::settings::FailureMode;
use crate::verdict::{Basis, Verdict, Verdicts};

/// The retry time of a denial in mode `Closed`.
const CLOSED_RETRY: Micros = Micros::from_secs(1);

/// The answer to a check by the failure mode of its limit.
enum ByMode {
    /// This verdict, without the ceiling of the node.
    Known(Verdict),
    /// This node decides alone.
    Local,
}

impl<S: Store<Error = StoreError>> Shared<S> {
    /// Decides on a request of which the store has not decided anything.
    pub(super) fn decide_without_store(&self, checks: &[Check<'_>], why: &StoreError) -> Verdicts {
        let limits = self.limits.read();
        let guarded: Option<SmallVec<[&Arc<Guarded<S>>; 4]>> =
            checks.iter().map(|check| limits.get(&check.limit)).collect();
        let Some(guarded) = guarded else {
            // A limit of the request was removed while it was under way.
            return checks.iter().map(|_| Some(self.closed(0))).collect();
        };
        let by_mode: SmallVec<[ByMode; 4]> =
            checks.iter().zip(&guarded).map(|(check, it)| self.by_mode(check, it, why)).collect();
        let refuses = |(check, by_mode): (&Check<'_>, &ByMode)| {
            check.enforced && matches!(by_mode, ByMode::Known(verdict) if !verdict.is_admitted())
        };
        let mut refused = checks.iter().zip(&by_mode).any(refuses);
        // The node's ceiling counts requests, however many limits each has.
        let is_open = |(check, by_mode): (&Check<'_>, &ByMode)| {
            check.enforced && matches!(by_mode, ByMode::Known(Verdict { basis: Basis::Open, .. }))
        };
        let ceiling = match !refused && checks.iter().zip(&by_mode).any(is_open) {
            true => self.beyond_ceiling(),
            false => None,
        };
        refused |= ceiling.is_some();
        let mut verdicts: Verdicts = by_mode
            .iter()
            .map(|by_mode| match by_mode {
                ByMode::Local => None,
                ByMode::Known(verdict) => Some(match ceiling {
                    Some(Decision { outcome, reset, .. }) if verdict.basis == Basis::Open => {
                        let decision = Decision { outcome, reset, remaining: 0, ..verdict.decision };
                        Verdict { decision, ..*verdict }
                    }
                    _ => *verdict,
                }),
            })
            .collect();
        let local: SmallVec<[usize; 4]> =
            (0..checks.len()).filter(|number| verdicts[*number].is_none()).collect();
        let asked: SmallVec<[Check<'_>; 4]> = local
            .iter()
            .map(|number| {
                let (check, it) = (checks[*number], guarded[*number]);
                Check { limit: it.local, ask: self.weighed(&it.limit, check.ask), ..check }
            })
            .collect();
        let decisions: SmallVec<[Option<Decision>; 4]> = match refused {
            // Where another limit refuses, nothing is taken here either.
            true => asked.iter().map(|check| Some(self.local.peek_now(check))).collect(),
            false => self.local.decide_all(&asked),
        };
        let all = !refused
            && asked
                .iter()
                .zip(&decisions)
                .all(|(check, decision)| !check.enforced || decision.is_some_and(|it| it.is_admitted()));
        for (number, decision) in local.into_iter().zip(decisions) {
            let Some(decision) = decision else { continue };
            let (check, it) = (&checks[number], guarded[number]);
            verdicts[number] = Some(self.as_share(decision));
            if all && decision.is_admitted() {
                self.note_debt(it, check, why);
            }
        }
        verdicts
    }

    /// Records that the store has not lent. This admits nothing, owes nothing and takes nothing from the ceiling.
    pub(super) fn note_failure(&self, check: &Check<'_>, why: &StoreError) {
        if let Some(it) = self.limits.read().get(&check.limit) {
            self.outages.note(&it.scope, check.key.text(), why);
        }
    }

    /// The verdict that a check would get, without taking anything.
    pub(super) fn peek_without_store(&self, check: &Check<'_>, why: &StoreError) -> Verdict {
        let limits = self.limits.read();
        let Some(it) = limits.get(&check.limit) else { return self.closed(0) };
        match self.by_mode(check, it, why) {
            ByMode::Known(verdict) => verdict,
            ByMode::Local => {
                let ask = self.weighed(&it.limit, check.ask);
                self.as_share(self.local.peek_now(&Check { limit: it.local, ask, ..*check }))
            }
        }
    }

    fn by_mode(&self, check: &Check<'_>, it: &Guarded<S>, why: &StoreError) -> ByMode {
        self.outages.note(&it.scope, check.key.text(), why);
        self.note_use();
        let size = it.limit.size();
        // A cost above the size is impossible with or without the store.
        if check.ask.cost > size {
            let decision = Decision { outcome: Outcome::Impossible, ..self.untouched(size) };
            return ByMode::Known(Verdict::exact(decision));
        }
        match it.mode {
            FailureMode::Closed => ByMode::Known(self.closed(size)),
            FailureMode::Open if why.is_reachable() => ByMode::Local,
            FailureMode::Open => {
                ByMode::Known(Verdict { decision: self.untouched(size), basis: Basis::Open })
            }
            FailureMode::Local => ByMode::Local,
        }
    }

    fn closed(&self, size: u64) -> Verdict {
        let outcome = Outcome::Denied { retry: CLOSED_RETRY };
        Verdict { decision: Decision { outcome, remaining: 0, ..self.untouched(size) }, basis: Basis::Closed }
    }

    /// The denial of the node's ceiling, if one more request is beyond it.
    fn beyond_ceiling(&self) -> Option<Decision> {
        let decision = self.ceiling.as_ref()?.try_acquire("", 1);
        (!decision.is_admitted()).then_some(decision)
    }

    /// Notes permits that were admitted without the store, if they are to be settled.
    fn note_debt(&self, it: &Guarded<S>, check: &Check<'_>, why: &StoreError) {
        let Some(account) = &it.account else { return };
        match why.may_have_run() {
            false => self.debts.owe(account, check.key, check.ask.cost),
            true => self.debts.lose(check.ask.cost),
        }
    }

    /// The ask for this node alone. The cost counts once for each node.
    fn weighed(&self, limit: &Limit, ask: Ask) -> Ask {
        Ask { cost: self.share().weigh(ask.cost).min(limit.size()), ..ask }
    }

    /// The verdict of this node alone, scaled to its share.
    fn as_share(&self, decision: Decision) -> Verdict {
        let remaining = self.share().of(decision.remaining);
        Verdict { decision: Decision { remaining, ..decision }, basis: Basis::Local }
    }

    /// An admission by an unused key of a limit of this size.
    fn untouched(&self, size: u64) -> Decision {
        let at = self.clock.now();
        Decision { outcome: Outcome::NOW, limit: size, remaining: size, reset: Micros::ZERO, at }
    }
}
