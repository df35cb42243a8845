//! Decides on requests by a policy: descriptors in, verdict out.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use smallvec::SmallVec;
use tollgate_core::policy::{
    CHECKS_MAX, Descriptors, Limits, Policy, Refusal, Role, Rule, RuleCheck, RuleLimits, Selection, WORK_MAX,
};
use tollgate_core::{Ask, Decision, Micros, Outcome, Timestamp};

use crate::check::{Check, HashedKey};
use crate::engine::Engine;
use crate::limiter::Limiter;
use crate::memory::TooManyLimits;
use crate::newcomers::{Newcomers, Place, SHARED_SUBJECT};
use crate::redis::StoreError;
use crate::settings::LimitSettings;
use crate::verdict::{Basis, Verdict, Verdicts};

/// Requests whose counted-only limits wait for a decision: some 1 MB. Counted-only limits of further requests are left out and reported.
const LATER_MAX: usize = 4_096;

/// A policy, and the limiters of its limits.
pub struct PolicyLimiter {
    engine: Engine,
    policy: Policy,
    /// By limit.
    limiters: Vec<Limiter>,
    /// By limit.
    settings: Vec<LimitSettings>,
    /// By rule, the default rule last.
    bounds: Vec<Option<Bound>>,
    /// Requests whose counted-only limits are decided after the answer.
    later: Arc<AtomicUsize>,
    on_counted: Option<OnCounted>,
}

/// Called with each counted-only check that was decided after its request was answered.
type OnCounted = Arc<dyn Fn(&RuleCheck, &Verdict) + Send + Sync>;

/// A bound on the new subjects of a rule.
struct Bound {
    per_second: NonZeroU32,
    newcomers: Arc<Newcomers>,
}

impl std::fmt::Debug for PolicyLimiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PolicyLimiter").field("policy", &self.policy).finish_non_exhaustive()
    }
}

/// The outcome of a request, with the verdicts of its checks.
#[derive(Clone, Debug)]
pub struct PolicyVerdict {
    /// The checks of the request.
    pub selection: Selection,
    /// The verdicts, by check; empty if no check was made. `None`: the check was not decided, because another limit is known to deny the
    /// request, or because it is only counted and decided after the answer.
    pub verdicts: Verdicts,
    outcome: PolicyOutcome,
}

/// Whether a request may go ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyOutcome {
    /// Yes, after `delay`.
    Admitted {
        /// How long the caller delays the request.
        delay: Micros,
    },
    /// No: a limit has too little left.
    Denied {
        /// The check with the longest wait, by number.
        by: usize,
    },
    /// No, whatever permits are left.
    Refused(Refusal),
}

impl PolicyLimiter {
    /// A limiter for a policy. `settings` say how each of its limits is kept in a store.
    pub fn new(engine: &Engine, policy: Policy, settings: &[LimitSettings]) -> Result<Self, TooManyLimits> {
        Self::made(engine, policy, settings, None)
    }

    /// A limiter for the policy that follows this one. Unchanged limits keep their leases and cached denials; states of other limits are
    /// converted.
    pub fn followed_by(&self, policy: Policy, settings: &[LimitSettings]) -> Result<Self, TooManyLimits> {
        Self::made(&self.engine, policy, settings, Some(self))
    }

    fn made(
        engine: &Engine,
        mut policy: Policy,
        settings: &[LimitSettings],
        before: Option<&Self>,
    ) -> Result<Self, TooManyLimits> {
        // A log keeps entries for longer windows: of other tiers, and for a while of the previous policy.
        policy.retain_logs(before.map_or(&[], |before| before.policy.limits()), engine.now());
        let mut known = HashMap::new();
        if let Some(before) = before {
            let old = before.policy.limits().iter().zip(&before.settings).zip(&before.limiters);
            known.extend(old.map(|((it, settings), limiter)| ((&*it.scope, it.limit), (settings, limiter))));
        }
        let settings: Vec<_> = (0..policy.limits().len())
            .map(|number| settings.get(number).copied().unwrap_or_default())
            .collect();
        let limiters: Result<_, _> = policy
            .limits()
            .iter()
            .zip(&settings)
            .map(|(it, settings)| match known.get(&(&*it.scope, it.limit)) {
                Some((same, limiter)) if of_store(same) == of_store(settings) => Ok((*limiter).clone()),
                Some(_) | None => engine.limiter(&it.scope, it.limit, *settings),
            })
            .collect();
        let limiters = limiters?;
        let bounds = rules(&policy).map(|rule| Bound::of(rule, &settings, before)).collect();
        let later = before.map(|before| Arc::clone(&before.later)).unwrap_or_default();
        Ok(Self { engine: engine.clone(), limiters, settings, bounds, policy, later, on_counted: None })
    }

    /// The same limiter, which calls `on_counted` with each counted-only check that was decided after its request was answered.
    #[must_use]
    pub fn reporting(self, on_counted: impl Fn(&RuleCheck, &Verdict) + Send + Sync + 'static) -> Self {
        Self { on_counted: Some(Arc::new(on_counted)), ..self }
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Decides on a request: permits are taken from all of its limits, or from none.
    pub async fn check(&self, request: &Descriptors<'_>, permits: u64) -> PolicyVerdict {
        self.decide(self.policy.select(request, permits)).await
    }

    /// Decides on the checks that a policy has selected for a request.
    pub async fn decide(&self, mut selection: Selection) -> PolicyVerdict {
        self.bound_subjects(&mut selection, Newcomers::place);
        if selection.refusal.is_some() || selection.checks.is_empty() {
            return PolicyVerdict::new(selection, Verdicts::new());
        }
        let checks = self.checks(&selection);
        let verdicts = match self.held_up_by(&selection) {
            None => self.engine.decide(&checks).await,
            Some(at_once) => {
                let asked: SmallVec<[Check<'_>; 4]> = at_once.iter().map(|number| checks[*number]).collect();
                let mut verdicts = Verdicts::from_elem(None, checks.len());
                for (number, verdict) in at_once.into_iter().zip(self.engine.decide(&asked).await) {
                    verdicts[number] = verdict;
                }
                verdicts
            }
        };
        drop(checks);
        let mut verdict = PolicyVerdict::new(selection, verdicts);
        if !verdict.is_whole() && verdict.is_admitted() {
            self.count_later(&mut verdict);
        }
        verdict
    }

    /// Gives the permits of a selection back to all of its limits, as far as they are still owed. Permits that were taken earlier than
    /// now may be owed no more; the state of each limit decides that by its own time.
    pub async fn refund(&self, mut selection: Selection) -> Result<(), StoreError> {
        self.bound_subjects(&mut selection, Newcomers::look);
        for check in self.checks(&selection) {
            let at = self.engine.peek(&check.with_ask(Ask::of(0))).await.decision.at;
            self.engine.refund(check.limit, check.key, check.ask.cost, at).await?;
        }
        Ok(())
    }

    /// The checks of a selection, each key hashed once.
    fn checks<'a>(&self, selection: &'a Selection) -> SmallVec<[Check<'a>; 4]> {
        let keys: SmallVec<[HashedKey<'a>; 2]> =
            selection.subjects.iter().map(|subject| HashedKey::new(subject)).collect();
        let check = |it: &RuleCheck| Check {
            limit: self.limiters[it.limit].id(),
            key: keys[it.subject],
            ask: ask(it),
            enforced: it.role == Role::Enforced,
        };
        selection.checks.iter().map(check).collect()
    }

    /// The checks to decide at once, by number, if other checks would delay them: on a cluster, limits of another subject may need a call
    /// of their own, which is not worth it for a check that is only counted.
    fn held_up_by(&self, selection: &Selection) -> Option<SmallVec<[usize; 4]>> {
        let checks = &selection.checks;
        if !self.engine.is_cluster() || checks.iter().all(|it| it.role == Role::Enforced) {
            return None;
        }
        let enforced = || checks.iter().filter(|it| it.role == Role::Enforced);
        let goes_along =
            |it: &RuleCheck| it.role == Role::Enforced || enforced().any(|other| other.subject == it.subject);
        let at_once: SmallVec<[usize; 4]> =
            (0..checks.len()).filter(|number| goes_along(&checks[*number])).collect();
        (!at_once.is_empty() && at_once.len() < checks.len()).then_some(at_once)
    }

    /// Decides on the counted-only checks of an admitted request that have not been decided, in the background.
    fn count_later(&self, verdict: &mut PolicyVerdict) {
        let Some(tasks) = self.engine.tasks() else { return };
        let Selection { checks, subjects, uncounted, .. } = &mut verdict.selection;
        let undecided = checks.iter().zip(&verdict.verdicts).filter(|(_, verdict)| verdict.is_none());
        let left: Vec<(Limiter, String, RuleCheck)> = undecided
            .map(|(it, _)| (self.limiters[it.limit].clone(), subjects[it.subject].clone(), *it))
            .collect();
        let Some(waiting) = Waiting::among(&self.later) else {
            *uncounted += left.len();
            return;
        };
        let on_counted = self.on_counted.clone();
        tasks.hand_over(async move {
            let _waiting = waiting;
            for (limiter, subject, check) in left {
                let verdict = limiter.acquire(&subject, ask(&check)).await;
                if let Some(on_counted) = &on_counted {
                    on_counted(&check, &verdict);
                }
            }
        });
    }

    /// The verdict that [`PolicyLimiter::decide`] would give, without taking anything.
    pub async fn peek(&self, mut selection: Selection) -> PolicyVerdict {
        self.bound_subjects(&mut selection, Newcomers::look);
        let mut verdicts = Verdicts::new();
        // The limits that a request exceeds explain its refusal.
        let is_explained = match selection.refusal {
            None | Some(Refusal::ExceedsLimit { .. }) => true,
            Some(Refusal::EmptyKey { .. } | Refusal::TooManyChecks) => false,
        };
        if is_explained {
            for check in self.checks(&selection) {
                verdicts.push(Some(self.engine.peek(&check).await));
            }
        }
        PolicyVerdict::new(selection, verdicts)
    }

    /// Resets the selected limits for their subjects.
    pub async fn reset(&self, selection: &Selection) -> Result<(), StoreError> {
        for check in self.checks(selection) {
            self.engine.reset(check.limit, check.key.text()).await?;
        }
        Ok(())
    }
}

/// A part of a request: limits that a policy has selected, and the limiter of that policy.
#[derive(Debug)]
pub struct PolicyPart<'a> {
    /// The limiter of the policy.
    pub limiter: &'a PolicyLimiter,
    /// The limits.
    pub selection: Selection,
}

/// More limits apply to the parts of a request than can be decided together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("more limits apply than can be checked together: at most {CHECKS_MAX}")]
pub struct TooManyChecks;

/// Decides on the parts of a request together: permits are taken from the limits of all parts, or from none. There is one verdict for
/// each part. The request may go ahead if all of them admit it.
///
/// All limiters must have the same engine. No part may have a refusal.
pub async fn decide_together(mut parts: Vec<PolicyPart<'_>>) -> Result<Vec<PolicyVerdict>, TooManyChecks> {
    for PolicyPart { limiter, selection } in &mut parts {
        limiter.bound_subjects(selection, Newcomers::place);
    }
    leave_out(&mut parts)?;
    let Some(engine) = parts.first().map(|part| part.limiter.engine.clone()) else { return Ok(Vec::new()) };
    let mut asked = Vec::new();
    let mut at_once = Vec::with_capacity(parts.len());
    for PolicyPart { limiter, selection } in &parts {
        let checks = limiter.checks(selection);
        let numbers = limiter.held_up_by(selection).unwrap_or_else(|| (0..checks.len()).collect());
        asked.extend(numbers.iter().map(|number| checks[*number]));
        at_once.push(numbers);
    }
    let decided = if asked.is_empty() { Verdicts::new() } else { engine.decide(&asked).await };
    drop(asked);
    let mut decided = decided.into_iter();
    let mut verdicts = Vec::with_capacity(parts.len());
    let mut limiters = Vec::with_capacity(parts.len());
    for (PolicyPart { limiter, selection }, numbers) in parts.into_iter().zip(at_once) {
        let mut own = Verdicts::from_elem(None, selection.checks.len());
        for (number, verdict) in numbers.into_iter().zip(decided.by_ref()) {
            own[number] = verdict;
        }
        verdicts.push(PolicyVerdict::new(selection, own));
        limiters.push(limiter);
    }
    if verdicts.iter().all(PolicyVerdict::is_admitted) {
        for (limiter, verdict) in limiters.into_iter().zip(&mut verdicts) {
            if !verdict.is_whole() {
                limiter.count_later(verdict);
            }
        }
    }
    Ok(verdicts)
}

/// Leaves out counted-only checks, the last ones first, until all checks can be decided together.
fn leave_out(parts: &mut [PolicyPart<'_>]) -> Result<(), TooManyChecks> {
    loop {
        let checks: usize = parts.iter().map(|part| part.selection.checks.len()).sum();
        let work: usize = parts.iter().map(PolicyPart::work).sum();
        if checks <= CHECKS_MAX && work <= WORK_MAX {
            return Ok(());
        }
        let is_counted = |check: &RuleCheck| check.role == Role::Shadow;
        let last = parts.iter_mut().rev().find_map(|PolicyPart { selection, .. }| {
            let number = selection.checks.iter().rposition(is_counted)?;
            Some((selection, number))
        });
        let (selection, number) = last.ok_or(TooManyChecks)?;
        selection.checks.remove(number);
        selection.uncounted += 1;
    }
}

impl PolicyPart<'_> {
    fn work(&self) -> usize {
        let limits = self.limiter.policy.limits();
        self.selection.checks.iter().map(|check| limits[check.limit].limit.work()).sum()
    }
}

/// A request whose counted-only limits are being decided.
struct Waiting(Arc<AtomicUsize>);

impl Waiting {
    /// Counts one more waiting request, unless there are too many.
    fn among(later: &Arc<AtomicUsize>) -> Option<Self> {
        let is_room = later.fetch_add(1, Ordering::Relaxed) < LATER_MAX;
        let waiting = Self(Arc::clone(later));
        is_room.then_some(waiting)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PolicyLimiter {
    /// Sends checks of new subjects beyond the bound of this second to the shared bucket of their rule.
    fn bound_subjects(
        &self,
        selection: &mut Selection,
        place: impl Fn(&Newcomers, &str, NonZeroU32, Timestamp) -> Place,
    ) {
        let has_bound = |check: &RuleCheck| self.bounds.get(check.rule).is_some_and(Option::is_some);
        if !selection.checks.iter().any(has_bound) {
            return;
        }
        let now = self.engine.now();
        let Selection { checks, subjects, .. } = selection;
        let mut shared = None;
        // All limits of a rule count the same subject.
        let mut last: Option<(usize, Place)> = None;
        for check in checks.iter_mut() {
            let Some(Some(Bound { per_second, newcomers })) = self.bounds.get(check.rule) else { continue };
            let decided = last.filter(|(rule, _)| *rule == check.rule).map(|(_, place)| place);
            let place =
                decided.unwrap_or_else(|| place(newcomers, &subjects[check.subject], *per_second, now));
            last = Some((check.rule, place));
            if place == Place::Shared {
                check.subject = *shared.get_or_insert_with(|| {
                    subjects.push(SHARED_SUBJECT.to_owned());
                    subjects.len() - 1
                });
            }
        }
    }
}

/// The rules of a policy by number. The default rule is the last one.
fn rules(policy: &Policy) -> impl Iterator<Item = &Rule> {
    policy.parts().rules.iter().chain(&policy.parts().default)
}

impl Bound {
    /// The bound of a rule, if it has one. Known subjects of the rule stay known.
    fn of(rule: &Rule, settings: &[LimitSettings], before: Option<&PolicyLimiter>) -> Option<Self> {
        let per_second = limits_of(rule).filter_map(|limit| settings.get(limit)?.max_new_subjects).max()?;
        let old = before.and_then(|before| {
            let number = rules(&before.policy).position(|old| old.name == rule.name)?;
            before.bounds.get(number)?.as_ref()
        });
        let newcomers = old.map(|old| Arc::clone(&old.newcomers)).unwrap_or_default();
        Some(Self { per_second, newcomers })
    }
}

/// All limits that a rule may check, by number.
fn limits_of(rule: &Rule) -> impl Iterator<Item = usize> {
    let all: Vec<&Limits> = match &rule.limits {
        RuleLimits::Own(limits) => vec![limits],
        RuleLimits::OfTier { tiers, factors, .. } => {
            tiers.iter().chain(factors.iter().flat_map(|(_, tiers)| tiers)).collect()
        }
    };
    all.into_iter().flat_map(|limits| match limits {
        Limits::All(limits) => limits.clone(),
        Limits::Unlimited => Vec::new(),
    })
}

/// The settings that a limiter depends on: all except the bound on new subjects.
fn of_store(settings: &LimitSettings) -> LimitSettings {
    LimitSettings { max_new_subjects: None, ..*settings }
}

fn ask(check: &RuleCheck) -> Ask {
    Ask { cost: check.cost, wait: check.wait }
}

impl PolicyVerdict {
    fn new(selection: Selection, verdicts: Verdicts) -> Self {
        let undecided = PolicyOutcome::Admitted { delay: Micros::ZERO };
        let mut verdict = Self { selection, verdicts, outcome: undecided };
        verdict.outcome = verdict.find_outcome();
        verdict
    }

    /// The checks whose verdicts are known, with their numbers.
    pub fn known(&self) -> impl Iterator<Item = (usize, &RuleCheck, &Verdict)> {
        let checks = self.selection.checks.iter().zip(&self.verdicts).enumerate();
        checks.filter_map(|(number, (check, verdict))| Some((number, check, verdict.as_ref()?)))
    }

    /// Whether a denied request may have to wait longer than its verdict says, because not all of its limits were decided.
    pub fn retry_is_lower_bound(&self) -> bool {
        let checks = self.selection.checks.iter().zip(&self.verdicts);
        let is_undecided = |(check, verdict): (&RuleCheck, &Option<Verdict>)| {
            check.role == Role::Enforced && verdict.is_none()
        };
        matches!(self.outcome, PolicyOutcome::Denied { .. }) && checks.into_iter().any(is_undecided)
    }

    fn is_whole(&self) -> bool {
        self.verdicts.iter().all(Option::is_some)
    }

    /// The enforced checks, with their verdicts and numbers.
    fn enforced(&self) -> impl Iterator<Item = (usize, &Verdict)> {
        self.known()
            .filter(|(_, check, _)| check.role == Role::Enforced)
            .map(|(number, _, verdict)| (number, verdict))
    }

    /// Whether the request may go ahead.
    pub fn outcome(&self) -> PolicyOutcome {
        self.outcome
    }

    fn find_outcome(&self) -> PolicyOutcome {
        if let Some(refusal) = self.selection.refusal {
            return PolicyOutcome::Refused(refusal);
        }
        let denied = self.enforced().filter(|(_, verdict)| !verdict.is_admitted());
        // The longest wait, and of equal ones the first.
        match denied.min_by_key(|(_, verdict)| u64::MAX - wait_of(&verdict.decision)) {
            Some((by, _)) => PolicyOutcome::Denied { by },
            None => {
                let delays = self.enforced().map(|(_, verdict)| verdict.decision.outcome.delay());
                PolicyOutcome::Admitted { delay: delays.max().unwrap_or(Micros::ZERO) }
            }
        }
    }

    /// Whether the request may go ahead, now or after its delay.
    pub fn is_admitted(&self) -> bool {
        matches!(self.outcome(), PolicyOutcome::Admitted { .. })
    }

    /// The check to report to the caller: the one that denies, or else the one with the fewest permits left.
    pub fn tightest(&self) -> Option<usize> {
        match self.outcome() {
            PolicyOutcome::Denied { by } => Some(by),
            PolicyOutcome::Admitted { .. } => self
                .enforced()
                .min_by_key(|(_, verdict)| verdict.decision.remaining)
                .map(|(number, _)| number),
            PolicyOutcome::Refused(_) => None,
        }
    }

    /// The basis of the limit that denies, or else the weakest basis of all.
    pub fn basis(&self) -> Basis {
        match self.outcome() {
            PolicyOutcome::Denied { by } => self.verdicts[by].map_or(Basis::Exact, |verdict| verdict.basis),
            PolicyOutcome::Admitted { .. } | PolicyOutcome::Refused(_) => self
                .enforced()
                .map(|(_, verdict)| verdict.basis)
                .max_by_key(|basis| *basis as u8)
                .unwrap_or(Basis::Exact),
        }
    }
}

/// The wait of a denied caller; for ever, if the limit can never admit the cost.
fn wait_of(decision: &Decision) -> u64 {
    match decision.outcome {
        Outcome::Impossible => u64::MAX,
        outcome @ (Outcome::Denied { .. } | Outcome::Admitted { .. }) => outcome.retry().get(),
    }
}
