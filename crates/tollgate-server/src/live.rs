//! The policy that is in force, and how another one takes its place.

use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::ArcSwap;
use tollgate::{Engine, PolicyLimiter, PolicyVerdict, TooManyLimits};

use crate::config::CheckedPolicy;
use crate::metrics::{RuleAnswers, SharedMetrics};

/// The policy in force. Requests see it whole: the old one or the new one.
pub(crate) struct LivePolicy {
    engine: Engine,
    metrics: SharedMetrics,
    current: ArcSwap<Loaded>,
}

/// A policy in force, with all that belongs to it.
pub(crate) struct Loaded {
    /// What tells it from others.
    pub(crate) version: String,
    /// Since when it is in force.
    pub(crate) since: SystemTime,
    /// Where it came from: a file, the configuration.
    pub(crate) origin: String,
    pub(crate) limiter: PolicyLimiter,
    /// By rule, the default rule last.
    answers: Vec<RuleAnswers>,
}

impl LivePolicy {
    pub(crate) fn new(
        engine: &Engine,
        metrics: SharedMetrics,
        checked: &CheckedPolicy,
        origin: String,
    ) -> Result<Self, TooManyLimits> {
        let loaded = Loaded::new(engine, &metrics, checked, origin)?;
        Ok(Self { engine: engine.clone(), metrics, current: ArcSwap::from_pointee(loaded) })
    }

    /// The policy in force. Kept across waits, so as a share of its own.
    pub(crate) fn current(&self) -> Arc<Loaded> {
        self.current.load_full()
    }

    /// Puts another policy in force. Requests under way end by the old one.
    pub(crate) fn replace(&self, checked: &CheckedPolicy, origin: String) -> Result<(), TooManyLimits> {
        let loaded = Loaded::new(&self.engine, &self.metrics, checked, origin)?;
        self.current.store(Arc::new(loaded));
        Ok(())
    }
}

impl Loaded {
    fn new(
        engine: &Engine,
        metrics: &SharedMetrics,
        checked: &CheckedPolicy,
        origin: String,
    ) -> Result<Self, TooManyLimits> {
        let limiter = PolicyLimiter::new(engine, checked.policy.clone(), &checked.settings)?;
        let parts = checked.policy.parts();
        let rules = parts.rules.iter().chain(&parts.default);
        let answers = rules.map(|rule| metrics.of_rule(&rule.name)).collect();
        metrics.policy_in_force(&checked.version);
        Ok(Self { version: checked.version.clone(), since: SystemTime::now(), origin, limiter, answers })
    }

    /// Counts what was decided.
    pub(crate) fn count(&self, verdict: &PolicyVerdict) {
        for (check, decided) in verdict.selection.checks.iter().zip(&verdict.verdicts) {
            if let Some(answers) = self.answers.get(check.rule) {
                answers.count(check.role, check.is_candidate, decided.is_admitted());
            }
        }
    }
}
