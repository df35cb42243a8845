//! The limiter: what every door calls. It selects the limits of a request, decides on them, and counts and logs each decision once.

mod overrides;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tollgate::rules::{Refusal, Selection};
use tollgate::{
    AlgorithmName, Ask, Clock, PolicyOutcome, PolicyPart, PolicyVerdict, StoreError, TooManyChecks, Verdict,
    decide_together,
};

pub(crate) use self::overrides::{OverrideTerms, OverrideWindow, Overrides};
use crate::identity::IdentityConfig;
use crate::live::{LivePolicy, Loaded};
use crate::metrics::SharedMetrics;
use crate::named_limits::{BucketTerms, NamedLimits, NotALimit};
use crate::request::{Described, Target};

/// Decides on requests by the built-in rules of the plain API and by the policy in force.
pub(crate) struct Limiter {
    pub(crate) builtin: Arc<Loaded>,
    /// Limits that callers name themselves.
    pub(crate) named: NamedLimits,
    /// Limits that proxies name with their requests.
    pub(crate) overrides: Overrides,
    pub(crate) live: Arc<LivePolicy>,
    pub(crate) identity: Arc<IdentityConfig>,
    /// Tells which tokens have expired.
    pub(crate) clock: Clock,
    pub(crate) metrics: SharedMetrics,
}

/// A part of a request, with the rules that have selected its limits.
pub(crate) struct Part {
    pub(crate) policy: Arc<Loaded>,
    pub(crate) selection: Selection,
}

impl Part {
    /// Takes the selection out, and leaves an empty one.
    pub(crate) fn take(&mut self) -> Self {
        Self { policy: Arc::clone(&self.policy), selection: std::mem::take(&mut self.selection) }
    }
}

/// A request for more permits than a limit can ever admit: a mistake of the caller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ExceedsLimit {
    /// The most permits that the limit can admit at once.
    pub(crate) most: u64,
    /// The rule; none for a limit of the plain API.
    pub(crate) rule: Option<Box<str>>,
}

impl Limiter {
    /// The policy in force. A request uses one policy from its selection to its answer.
    pub(crate) fn policy(&self) -> Arc<Loaded> {
        self.live.current()
    }

    /// Whether a header can change what is decided. `name` is in lower case.
    pub(crate) fn reads_header(&self, policy: &Loaded, name: &str) -> bool {
        policy.reads_header(name) || self.identity.reads_header(name)
    }

    /// Adds who is asking, as far as the headers of a request prove it.
    pub(crate) fn identify(&self, request: &mut Described<'_>, caller_is_proxy: bool) {
        let now_secs = self.clock.now().as_micros() / 1_000_000;
        request.identify(&self.identity, caller_is_proxy, now_secs);
        if let Some(why) = request.not_verified.token {
            self.metrics.unverified(why);
        }
    }

    /// The limits that apply to a request.
    pub(crate) fn select(&self, policy: &Loaded, request: &Described<'_>) -> Result<Selection, ExceedsLimit> {
        let selection = self.select_any(policy, request);
        let rules = policy.limiter.policy();
        if let Some(Refusal::ExceedsLimit { rule, limit }) = selection.refusal
            && let Some(rule) = rules.rule(rule)
        {
            let most = rules.limits()[limit].limit.size() / rule.cost.max(1);
            return Err(ExceedsLimit { most, rule: Some(rule.name.clone()) });
        }
        Ok(selection)
    }

    /// The limits that apply to a request, even if it asks for more permits than they can ever admit.
    pub(crate) fn select_any(&self, policy: &Loaded, request: &Described<'_>) -> Selection {
        let mut descriptors = request.descriptors();
        let assigned = self.live.assigned_to(policy, &descriptors);
        descriptors.assigned_tiers = &assigned;
        policy.limiter.policy().select(&descriptors, request.permits)
    }

    /// The built-in limit of an algorithm, for a key that the caller names.
    pub(crate) fn select_builtin(
        &self,
        algorithm: AlgorithmName,
        key: String,
        ask: Ask,
    ) -> Result<Selection, ExceedsLimit> {
        let number = algorithm as usize;
        let most = self.builtin.limiter.policy().limits()[number].limit.size();
        if ask.cost > most {
            return Err(ExceedsLimit { most, rule: None });
        }
        Ok(Selection::of_rule(number, number, key, ask))
    }

    /// Decides on a key by a token bucket that the caller names. Zero permits only show where the key stands.
    pub(crate) async fn throttle(
        &self,
        terms: BucketTerms,
        key: &str,
        permits: u64,
    ) -> Result<Verdict, NotALimit> {
        let limiter = self.named.limiter(terms)?;
        if permits == 0 {
            return Ok(limiter.peek(key, Ask::of(0)).await);
        }
        let start = Instant::now();
        let verdict = limiter.acquire(key, Ask::of(permits)).await;
        self.metrics.decided_alone(limiter.limit().algorithm(), &verdict, start.elapsed());
        let (allowed, basis) = (verdict.is_admitted(), verdict.basis.as_str());
        tracing::debug!(
            key,
            allowed,
            limit = terms.capacity,
            remaining = verdict.decision.remaining,
            basis,
            "key checked"
        );
        Ok(verdict)
    }

    /// Decides on a request: takes permits from all selected limits, or from none.
    pub(crate) async fn decide(
        &self,
        policy: &Loaded,
        selection: Selection,
        target: &Target<'_>,
    ) -> PolicyVerdict {
        let start = Instant::now();
        let verdict = policy.limiter.decide(selection).await;
        self.record(policy, &verdict, start.elapsed(), target);
        if let PolicyOutcome::Refused(Refusal::TooManyChecks) = verdict.outcome() {
            tracing::warn!(path = target.path(), "refused: more limits apply than can be checked together");
        }
        verdict
    }

    /// Decides on the parts of a request together: takes permits from the limits of all parts, or from none. No part may have a refusal.
    pub(crate) async fn decide_together(
        &self,
        mut parts: Vec<Part>,
        target: &Target<'_>,
    ) -> Result<Vec<PolicyVerdict>, TooManyChecks> {
        // Most requests have one part, which needs no lists of parts.
        if parts.len() == 1
            && let Some(Part { policy, selection }) = parts.pop()
        {
            return Ok(vec![self.decide(&policy, selection, target).await]);
        }
        let start = Instant::now();
        let (policies, selections): (Vec<_>, Vec<_>) =
            parts.into_iter().map(|part| (part.policy, part.selection)).unzip();
        let mut asked = Vec::with_capacity(policies.len());
        for (policy, selection) in policies.iter().zip(selections) {
            asked.push(PolicyPart { limiter: &policy.limiter, selection });
        }
        let verdicts = decide_together(asked).await?;
        for (policy, verdict) in policies.iter().zip(&verdicts) {
            self.record(policy, verdict, start.elapsed(), target);
        }
        Ok(verdicts)
    }

    /// Counts and logs a decision.
    fn record(&self, policy: &Loaded, verdict: &PolicyVerdict, took: Duration, target: &Target<'_>) {
        policy.count(verdict);
        self.metrics.decided(policy.limiter.policy(), verdict, took);
        policy.log(verdict, target);
    }

    /// The verdict that [`Limiter::decide`] would give now, without taking permits.
    pub(crate) async fn peek(&self, policy: &Loaded, selection: Selection) -> PolicyVerdict {
        policy.limiter.peek(selection).await
    }

    /// The verdict that a request would get now, without taking permits. A request for too many permits has one as well.
    pub(crate) async fn explain(&self, policy: &Loaded, request: &Described<'_>) -> PolicyVerdict {
        self.peek(policy, self.select_any(policy, request)).await
    }

    /// Gives the permits of a selection back to all of its limits, as far as they are still owed.
    pub(crate) async fn refund(&self, policy: &Loaded, selection: Selection) -> Result<(), StoreError> {
        policy.limiter.refund(selection).await
    }

    /// Resets every selected limit.
    pub(crate) async fn reset(&self, policy: &Loaded, selection: &Selection) -> Result<(), StoreError> {
        policy.limiter.reset(selection).await?;
        for check in &selection.checks {
            let key = selection.key(check);
            let rule = policy.limiter.policy().rule(check.rule).map(|rule| &*rule.name);
            tracing::info!(rule, %key, "limit reset");
        }
        Ok(())
    }
}
