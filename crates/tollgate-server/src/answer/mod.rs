//! Answers to checks, field for field: the same names and values whichever door asks.

mod explain;

use schemars::JsonSchema;
use serde::Serialize;
use tollgate::rules::{Refusal, Role, RuleCheck};
use tollgate::{Decision, Limit, PolicyOutcome, PolicyVerdict, Verdict};

pub(crate) use self::explain::Explanation;
use crate::live::Loaded;
use crate::request::NotVerified;
use crate::schema::{AlgorithmSchema, BasisSchema};

const ALLOWED: &str = "Request allowed";
const DENIED: &str = "Rate limit exceeded";

/// The answer to a check of one key.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(deny_unknown_fields)]
pub(crate) struct KeyAnswer<'a> {
    /// Whether the request may go ahead.
    allowed: bool,
    /// Whose limit it is.
    key: &'a str,
    /// The algorithm that decided.
    #[schemars(with = "AlgorithmSchema")]
    algorithm: &'static str,
    /// Whole permits left, rounded down.
    remaining: u64,
    /// Seconds until the bucket is full, or the window ends, rounded up.
    reset_after_seconds: u64,
    /// Seconds until the asked permits fit, rounded up; 0 if they did.
    retry_after_seconds: u64,
    /// The answer in words.
    message: &'static str,
    /// The limit.
    limit: u64,
    /// How the decision was made.
    #[schemars(with = "BasisSchema")]
    basis: &'static str,
    /// How long the caller must hold the request back.
    delay_millis: u64,
    /// Milliseconds until the asked permits fit, rounded up; 0 if they did.
    retry_after_millis: u64,
}

impl<'a> KeyAnswer<'a> {
    /// The answer that a verdict by a built-in rule gives.
    pub(crate) fn new(rules: &'a Loaded, verdict: &'a PolicyVerdict) -> Option<Self> {
        let (key, limit, verdict) = only_limit(rules, verdict)?;
        let decision = &verdict.decision;
        let allowed = decision.is_admitted();
        Some(Self {
            allowed,
            key,
            algorithm: limit.algorithm().as_str(),
            remaining: decision.remaining,
            reset_after_seconds: decision.reset.as_secs_ceil(),
            retry_after_seconds: retry_after_secs(decision),
            message: if allowed { ALLOWED } else { DENIED },
            limit: decision.limit,
            basis: verdict.basis.as_str(),
            delay_millis: decision.outcome.delay().as_millis_ceil(),
            retry_after_millis: decision.outcome.retry().as_millis_ceil(),
        })
    }
}

/// What is left of the limit of one key.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(deny_unknown_fields)]
pub(crate) struct RemainingAnswer<'a> {
    /// Whose limit it is.
    key: &'a str,
    /// The algorithm of the limit.
    #[schemars(with = "AlgorithmSchema")]
    algorithm: &'static str,
    /// The limit.
    limit: u64,
    /// Whole permits left, rounded down.
    remaining: u64,
    /// Seconds until the bucket is full, or the window ends, rounded up.
    reset_after_seconds: u64,
}

impl<'a> RemainingAnswer<'a> {
    /// The status that a peek at a built-in rule gives.
    pub(crate) fn new(rules: &'a Loaded, verdict: &'a PolicyVerdict) -> Option<Self> {
        let (key, limit, Verdict { decision, .. }) = only_limit(rules, verdict)?;
        Some(Self {
            key,
            algorithm: limit.algorithm().as_str(),
            limit: decision.limit,
            remaining: decision.remaining,
            reset_after_seconds: decision.reset.as_secs_ceil(),
        })
    }
}

/// A limit that was reset.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct ResetAnswer<'a> {
    /// Whose limit it is.
    pub(crate) key: &'a str,
    /// The algorithm of the limit.
    #[schemars(with = "AlgorithmSchema")]
    pub(crate) algorithm: &'static str,
    /// The answer in words.
    pub(crate) message: &'static str,
}

/// The key, the limit and the verdict of a check by a built-in rule, which has one limit.
fn only_limit<'a>(
    rules: &'a Loaded,
    verdict: &'a PolicyVerdict,
) -> Option<(&'a str, &'a Limit, &'a Verdict)> {
    let (_, check, decided) = verdict.known().next()?;
    Some((verdict.selection.key(check), &rules.limiter.policy().limits()[check.limit].limit, decided))
}

/// The answer to a check by the policy.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RequestAnswer<'a> {
    /// Whether the request may go ahead.
    allowed: bool,
    /// The rule that denies, or else the rule with the fewest permits left.
    rule: Option<&'a str>,
    /// Why the request is denied, for programs.
    code: Option<String>,
    /// The answer in words.
    message: &'static str,
    /// The limit of that rule.
    limit: Option<u64>,
    /// Whole permits left of it, rounded down.
    remaining: Option<u64>,
    /// Seconds until it is full, or its window ends, rounded up.
    reset_after_seconds: u64,
    /// Seconds until the asked permits fit, rounded up; 0 if they did.
    retry_after_seconds: u64,
    /// Milliseconds until the asked permits fit, rounded up; 0 if they did.
    retry_after_millis: u64,
    /// How long the caller must hold the request back.
    delay_millis: u64,
    /// How the decision was made.
    #[schemars(with = "BasisSchema")]
    basis: &'static str,
    /// Every limit that was checked.
    limits: Vec<LimitAnswer<'a>>,
    /// Present and true if only the limit that denies was checked: the others may need a longer wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "bool")]
    retry_after_is_lower_bound: Option<bool>,
    /// Rules that match and were not checked, because the request has none of their keys.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    skipped_rules: Vec<&'a str>,
    /// Present and true if no rule applied, and no default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "bool")]
    unmatched: Option<bool>,
    /// Why the token of the request is not accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    unverified_token: Option<&'static str>,
    /// Present and true if the request has an API key that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "bool")]
    unverified_api_key: Option<bool>,
}

impl<'a> RequestAnswer<'a> {
    pub(crate) fn new(policy: &'a Loaded, verdict: &'a PolicyVerdict, not_verified: NotVerified) -> Self {
        let rules = policy.limiter.policy();
        let name = |number: usize| rules.rule(number).map(|rule| &*rule.name);
        let selection = &verdict.selection;
        let tightest = verdict.tightest();
        let decision = tightest.and_then(|number| verdict.verdicts[number]).map(|it| it.decision);
        let outcome = decision.map(|it| it.outcome);
        let (rule, code, message) = match verdict.outcome() {
            PolicyOutcome::Admitted { .. } => (tightest.map(|it| selection.checks[it].rule), None, ALLOWED),
            PolicyOutcome::Denied { by } => {
                let RuleCheck { rule, key, .. } = selection.checks[by];
                (Some(rule), rules.rule(rule).map(|rule| rule.code(key)), DENIED)
            }
            PolicyOutcome::Refused(refusal) => {
                let (rule, code, message) = refused(refusal);
                (rule, Some(code.to_owned()), message)
            }
        };
        let delay = match verdict.outcome() {
            PolicyOutcome::Admitted { delay } => delay.as_millis_ceil(),
            PolicyOutcome::Denied { .. } | PolicyOutcome::Refused(_) => 0,
        };
        Self {
            allowed: verdict.is_admitted(),
            rule: rule.and_then(name),
            code,
            message,
            limit: decision.map(|it| it.limit),
            remaining: decision.map(|it| it.remaining),
            reset_after_seconds: decision.map_or(0, |it| it.reset.as_secs_ceil()),
            retry_after_seconds: outcome.map_or(0, |it| it.retry().as_secs_ceil()),
            retry_after_millis: outcome.map_or(0, |it| it.retry().as_millis_ceil()),
            delay_millis: delay,
            basis: verdict.basis().as_str(),
            limits: verdict.known().map(|known| LimitAnswer::new(policy, verdict, known)).collect(),
            retry_after_is_lower_bound: verdict.retry_is_lower_bound().then_some(true),
            skipped_rules: selection.skipped.iter().filter_map(|number| name(*number)).collect(),
            unmatched: selection.unmatched.then_some(true),
            unverified_token: not_verified.token.map(|why| why.as_str()),
            unverified_api_key: not_verified.api_key.then_some(true),
        }
    }

    /// The limits, to which an explanation adds its reasons.
    pub(crate) fn limits_mut(&mut self) -> &mut [LimitAnswer<'a>] {
        &mut self.limits
    }
}

/// The rule, the code and the message of a refusal without a decision.
pub(crate) fn refused(refusal: Refusal) -> (Option<usize>, &'static str, &'static str) {
    match refusal {
        Refusal::EmptyKey { rule, .. } => {
            (Some(rule), "EMPTY_KEY", "The rule needs a key that the request does not have")
        }
        Refusal::TooManyChecks => (None, "TOO_MANY_LIMITS", "More limits apply than can be checked together"),
        Refusal::ExceedsLimit { rule, .. } => {
            (Some(rule), "PERMITS_EXCEED_LIMIT", "More permits than the limit can ever admit")
        }
    }
}

/// The status of one limit.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(deny_unknown_fields)]
pub(crate) struct LimitAnswer<'a> {
    /// The rule that the limit belongs to.
    rule: Option<&'a str>,
    /// Whose limit it is.
    key: &'a str,
    /// The algorithm of the limit.
    #[schemars(with = "AlgorithmSchema")]
    algorithm: &'static str,
    /// Whether this limit alone would allow the request.
    allowed: bool,
    /// How many permits the request takes from it.
    cost: u64,
    /// The limit.
    limit: u64,
    /// Whole permits left, rounded down.
    remaining: u64,
    /// Seconds until it is full, or its window ends, rounded up.
    reset_after_seconds: u64,
    /// Seconds until the permits fit, rounded up; 0 if they did.
    retry_after_seconds: u64,
    /// Milliseconds until the permits fit, rounded up; 0 if they did.
    retry_after_millis: u64,
    /// How long the caller must hold the request back.
    delay_millis: u64,
    /// How the decision was made.
    #[schemars(with = "BasisSchema")]
    basis: &'static str,
    /// Present and true for a limit that is tried out beside another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "bool")]
    candidate: Option<bool>,
    #[serde(flatten)]
    pub(crate) why: Option<LimitReason>,
}

/// Why a limit decides as it does.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LimitReason {
    /// What the state of the limit is kept under.
    pub(crate) scope: String,
    /// The arithmetic in words.
    pub(crate) arithmetic: String,
    /// When the permits fit, in epoch microseconds; null if they fit now.
    pub(crate) frees_at_micros: Option<u64>,
    /// When the limit is full again, in epoch microseconds.
    pub(crate) full_at_micros: u64,
}

impl<'a> LimitAnswer<'a> {
    fn new(
        policy: &'a Loaded,
        verdict: &'a PolicyVerdict,
        (_, check, decided): (usize, &'a RuleCheck, &Verdict),
    ) -> Self {
        let rules = policy.limiter.policy();
        let decision = &decided.decision;
        Self {
            rule: rules.rule(check.rule).map(|rule| &*rule.name),
            key: verdict.selection.key(check),
            algorithm: rules.limits()[check.limit].limit.algorithm().as_str(),
            allowed: decided.is_admitted(),
            cost: check.cost,
            limit: decision.limit,
            remaining: decision.remaining,
            reset_after_seconds: decision.reset.as_secs_ceil(),
            retry_after_seconds: retry_after_secs(decision),
            retry_after_millis: decision.outcome.retry().as_millis_ceil(),
            delay_millis: decision.outcome.delay().as_millis_ceil(),
            basis: if check.role == Role::Shadow { "shadow" } else { decided.basis.as_str() },
            candidate: check.is_candidate.then_some(true),
            why: None,
        }
    }
}

/// Whole seconds until the permits fit; zero if they did.
fn retry_after_secs(decision: &Decision) -> u64 {
    decision.outcome.retry().as_secs_ceil()
}
