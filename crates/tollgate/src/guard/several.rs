//! Several limits at once: all of them are taken from, or none, whatever becomes of the store.

use smallvec::SmallVec;
use tollgate_core::{Ask, Decision};

use super::{Basis, FailureMode, Guard, GuardedLimiter, Verdict};
use crate::engine::Check;
use crate::engine::memory::MemoryLimiter;
use crate::engine::redis::{RedisLimiter, StoreError};

/// In the order of the checks.
type Verdicts = SmallVec<[Verdict; 4]>;
/// The same. None: another limit is known to deny, and this one was not asked.
type KnownVerdicts = SmallVec<[Option<Verdict>; 4]>;

impl Guard {
    /// Takes from several limits of this guard, or from none if one that is binding denies. The store decides on all of them: nothing is
    /// borrowed here.
    pub async fn acquire_all(&self, checks: &[Check<'_, GuardedLimiter>]) -> KnownVerdicts {
        let asked: SmallVec<[Check<'_, RedisLimiter>; 4]> = checks
            .iter()
            .map(|it| Check {
                limiter: &it.limiter.limiter,
                key: it.key,
                ask: it.ask,
                is_binding: it.is_binding,
            })
            .collect();
        match self.engine().acquire_all(&asked).await {
            Ok(decisions) => {
                self.0.shared.note_decision();
                decisions.into_iter().map(|decision| decision.map(Verdict::exact)).collect()
            }
            Err(why) => self.without_store(checks, &why).into_iter().map(Some).collect(),
        }
    }

    /// Each limit by its own choice; those that are decided here all together.
    fn without_store(&self, checks: &[Check<'_, GuardedLimiter>], why: &StoreError) -> Verdicts {
        let mut verdicts: Verdicts =
            checks.iter().map(|it| it.limiter.refused_or_passed(it.key, it.ask, why)).collect();
        let refuses = |(it, verdict): (&Check<'_, GuardedLimiter>, &Verdict)| {
            it.is_binding && verdict.basis != Basis::Local && !verdict.is_admitted()
        };
        let mut refused = checks.iter().zip(&verdicts).any(refuses);
        // The node's ceiling counts requests, however many limits each has.
        let open =
            checks.iter().zip(&verdicts).find(|(it, verdict)| it.is_binding && verdict.basis == Basis::Open);
        if let Some(passed) = open.filter(|_| !refused).map(|(it, _)| it.limiter.open()) {
            refused = !passed.is_admitted();
            for verdict in verdicts.iter_mut().filter(|verdict| refused && verdict.basis == Basis::Open) {
                let Decision { outcome, reset, .. } = passed.decision;
                verdict.decision = Decision { outcome, reset, remaining: 0, ..verdict.decision };
            }
        }
        let local: SmallVec<[usize; 4]> =
            (0..checks.len()).filter(|number| verdicts[*number].basis == Basis::Local).collect();
        let asked: SmallVec<[Check<'_, MemoryLimiter>; 4]> = local
            .iter()
            .map(|number| {
                let Check { limiter, key, ask, is_binding } = checks[*number];
                Check { limiter: &limiter.local, key, ask: limiter.weighed(ask), is_binding }
            })
            .collect();
        let decisions: SmallVec<[_; 4]> = match refused {
            // Where another limit refuses, nothing is taken here either.
            true => asked.iter().map(|it| it.limiter.peek(it.key, it.ask)).collect(),
            false => self.0.shared.local.acquire_all(&asked),
        };
        let all = !refused
            && asked.iter().zip(&decisions).all(|(it, decision)| !it.is_binding || decision.is_admitted());
        for (number, decision) in local.into_iter().zip(decisions) {
            let Check { limiter, key, ask, .. } = checks[number];
            verdicts[number] = limiter.as_share(decision);
            if all && decision.is_admitted() {
                limiter.note_debt(key, ask.cost, why);
            }
        }
        verdicts
    }
}

impl GuardedLimiter {
    /// What becomes of a check by the limit's choice, the ceiling left aside; with the basis `Local` it is still to be decided.
    fn refused_or_passed(&self, key: &str, ask: Ask, why: &StoreError) -> Verdict {
        match self.mode_after(key, ask, why) {
            None => Verdict::exact(self.impossible()),
            Some(FailureMode::Closed) => self.closed(),
            Some(FailureMode::Open) => Verdict { decision: self.untouched(), basis: Basis::Open },
            Some(FailureMode::Local) => Verdict { decision: self.untouched(), basis: Basis::Local },
        }
    }
}
