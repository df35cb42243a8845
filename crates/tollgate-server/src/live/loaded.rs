//! A set of rules in force, with its limiter and its counters.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::SystemTime;

use tollgate::rules::{
    ALL_KEYS, KeyPart, KeySpec, Limits, Match, Policy, PolicyParts, Rule, RuleCheck, RuleLimit, RuleLimits,
    Source,
};
use tollgate::{
    Engine, Limit, LimitSettings, PolicyLimiter, PolicyOutcome, PolicyVerdict, TooManyLimits, Verdict,
};
use tracing::Level;

use super::denials::Denials;
use super::rules_of;
use crate::config::{CheckedPolicy, notes};
use crate::metrics::{RuleAnswers, SharedMetrics};
use crate::request::Target;

/// A policy in force, with all that belongs to it.
pub(crate) struct Loaded {
    /// What tells it from others.
    pub(crate) version: String,
    /// Since when it is in force.
    pub(crate) since: SystemTime,
    /// Where it came from: a file, the configuration, the admin API.
    pub(crate) origin: String,
    /// The text of it.
    pub(crate) text: Arc<str>,
    /// What may be more than was meant.
    pub(super) warnings: Vec<String>,
    /// What there is to know beyond what was written.
    pub(super) remarks: Vec<String>,
    pub(crate) limiter: PolicyLimiter,
    /// Headers that some part of the policy reads, by their names in lower case.
    read_headers: HashSet<Box<str>>,
    /// Parameters of the query that some part of the policy reads.
    read_query: HashSet<Box<str>>,
    /// By rule, the default rule last.
    answers: Arc<[RuleAnswers]>,
    denials: Denials,
}

/// A rule that is not of a policy, with its one limit.
pub(crate) struct FixedRule {
    /// Unlike the names of a policy's rules, it has a colon.
    pub(crate) name: Box<str>,
    /// The name under which its states are kept.
    pub(crate) scope: Box<str>,
    pub(crate) limit: Limit,
    pub(crate) settings: LimitSettings,
}

/// The headers or other values that conditions and keys of a policy name.
fn read_names(parts: &PolicyParts, source: Source) -> HashSet<Box<str>> {
    let rules = || parts.rules.iter().chain(&parts.default);
    let matches = parts.exclusions.iter().chain(parts.endpoints.iter().map(|endpoint| &endpoint.matching));
    let conditions = matches.chain(rules().map(|rule| &rule.matching)).flat_map(|matching| &matching.values);
    let in_conditions = conditions.filter(|it| it.source == source).map(|it| &it.name);
    let in_keys = rules().flat_map(|rule| rule.key.0.iter().flatten()).filter_map(|part| match part {
        KeyPart::Value(of, name) if *of == source => Some(name),
        KeyPart::SecretHeader(name) if source == Source::Header => Some(name),
        _ => None,
    });
    in_conditions.chain(in_keys).cloned().collect()
}

/// Counts what one limit has decided.
fn count(answers: &[RuleAnswers], check: &RuleCheck, verdict: &Verdict) {
    if let Some(answers) = answers.get(check.rule) {
        answers.count(check.role, check.is_candidate, verdict.is_admitted());
    }
}

impl Loaded {
    /// The rules of the plain API: one for each algorithm. No pushed policy changes them.
    ///
    /// Their scopes are the bare names of the algorithms, so that a store has the keys that the API promises.
    pub(crate) fn builtin(
        engine: &Engine,
        metrics: &SharedMetrics,
        limits: &[(Limit, LimitSettings)],
    ) -> Result<Self, TooManyLimits> {
        let rule = |(limit, settings): &(Limit, LimitSettings)| FixedRule {
            name: format!("plain:{}", limit.algorithm().as_lowercase()).into(),
            scope: limit.algorithm().as_lowercase().into(),
            limit: *limit,
            settings: *settings,
        };
        let rules: Vec<_> = limits.iter().map(rule).collect();
        Self::fixed(metrics, &rules, |policy, settings| PolicyLimiter::new(engine, policy, settings))
    }

    /// Rules that no policy changes, each with one limit of the same number. `limiter` makes the limiter for them.
    pub(crate) fn fixed(
        metrics: &SharedMetrics,
        rules: &[FixedRule],
        limiter: impl FnOnce(Policy, &[LimitSettings]) -> Result<PolicyLimiter, TooManyLimits>,
    ) -> Result<Self, TooManyLimits> {
        let rule = |(number, rule): (usize, &FixedRule)| Rule {
            name: rule.name.clone(),
            matching: Match::default(),
            key: KeySpec(Vec::new()),
            limits: RuleLimits::Own(Limits::All(vec![number])),
            cost: 1,
            max_wait: None,
            stop: false,
            deny_empty_key: None,
            enforced: ALL_KEYS,
            code: None,
        };
        let of_rule =
            |rule: &FixedRule| RuleLimit { scope: rule.scope.clone(), limit: rule.limit, candidate: None };
        let parts = PolicyParts {
            rules: rules.iter().enumerate().map(rule).collect(),
            limits: rules.iter().map(of_rule).collect(),
            ..PolicyParts::default()
        };
        let settings: Vec<_> = rules.iter().map(|rule| rule.settings).collect();
        let answers = parts.rules.iter().map(|rule| metrics.rule_answers(&rule.name)).collect();
        Ok(Self::of(limiter(Policy::new(parts), &settings)?, answers))
    }

    /// Rules without a text of their own.
    fn of(limiter: PolicyLimiter, answers: Arc<[RuleAnswers]>) -> Self {
        Self {
            version: String::new(),
            since: SystemTime::now(),
            origin: String::new(),
            text: "".into(),
            warnings: Vec::new(),
            remarks: Vec::new(),
            read_headers: read_names(limiter.policy().parts(), Source::Header),
            read_query: read_names(limiter.policy().parts(), Source::Query),
            limiter,
            denials: Denials::new(answers.len()),
            answers,
        }
    }

    pub(super) fn new(
        limiter: PolicyLimiter,
        metrics: &SharedMetrics,
        checked: &CheckedPolicy,
        origin: String,
    ) -> Self {
        let answers: Arc<[RuleAnswers]> = rules_of(checked).map(|rule| metrics.of_rule(&rule.name)).collect();
        let counted = Arc::clone(&answers);
        let limiter = limiter.reporting(move |check, verdict| count(&counted, check, verdict));
        metrics.policy_in_force(&checked.version);
        Self {
            version: checked.version.clone(),
            origin,
            text: Arc::clone(&checked.text),
            warnings: checked.warnings.clone(),
            remarks: checked.remarks.clone(),
            ..Self::of(limiter, answers)
        }
    }

    /// The first warnings, marked as such, and remarks.
    pub(crate) fn notes(&self, most: usize) -> Vec<String> {
        notes(&self.warnings, &self.remarks, most)
    }

    /// Whether some part of the policy reads a header. `name` is in lower case.
    pub(crate) fn reads_header(&self, name: &str) -> bool {
        self.read_headers.contains(name)
    }

    /// Whether some part of the policy reads a parameter of the query.
    pub(crate) fn reads_query(&self, name: &str) -> bool {
        self.read_query.contains(name)
    }

    /// Logs a decision at debug. Logs at info that a rule starts to deny.
    pub(crate) fn log(&self, verdict: &PolicyVerdict, target: &Target<'_>) {
        let is_denied = matches!(verdict.outcome(), PolicyOutcome::Denied { .. });
        if tracing::enabled!(Level::DEBUG) {
            self.log_decision(verdict, target);
        }
        let Some(check) = verdict.tightest().filter(|_| is_denied) else { return };
        let RuleCheck { rule: number, limit, .. } = verdict.selection.checks[check];
        if self.denials.record(number) {
            let policy = self.limiter.policy();
            let (rule, limit) = (policy.rule(number).map(|rule| &*rule.name), &policy.limits()[limit].limit);
            let (algorithm, limit) = (limit.algorithm().as_str(), limit.size());
            tracing::info!(
                rule,
                algorithm,
                limit,
                "the rule starts denying requests; the log level debug shows each of them"
            );
        }
    }

    fn log_decision(&self, verdict: &PolicyVerdict, target: &Target<'_>) {
        let (path, method) = (target.path(), target.method());
        let tightest = verdict.tightest();
        let check = tightest.map(|number| &verdict.selection.checks[number]);
        let rule = check.and_then(|check| self.limiter.policy().rule(check.rule)).map(|rule| &*rule.name);
        let key = check.map(|check| verdict.selection.key(check));
        let decision = tightest.and_then(|number| verdict.verdicts[number]).map(|it| it.decision);
        let (limit, remaining) = (decision.map(|it| it.limit), decision.map(|it| it.remaining));
        let basis = verdict.basis().as_str();
        if verdict.is_admitted() {
            tracing::debug!(rule, key, path, method, limit, remaining, basis, "request allowed");
        } else {
            let retry_after_ms = decision.map(|it| it.outcome.retry().as_millis_ceil());
            tracing::debug!(rule, key, path, method, limit, retry_after_ms, basis, "request denied");
        }
    }

    /// Counts what was decided.
    pub(crate) fn count(&self, verdict: &PolicyVerdict) {
        for (_, check, decided) in verdict.known() {
            count(&self.answers, check, decided);
        }
        for rule in &verdict.selection.skipped {
            if let Some(answers) = self.answers.get(*rule) {
                answers.count_skipped();
            }
        }
    }
}
