//! Why a request is allowed or denied.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use tollgate::rules::{Descriptors, IdentityKind, Limits, Refusal, RuleLimits, Selection, Source, Unmet};
use tollgate::{Limit, Micros, Outcome, PolicyVerdict, Verdict};

use super::{LimitReason, RequestAnswer};
use crate::live::Loaded;
use crate::request::NotVerified;
use crate::schema::IdentitySchema;

/// The answer that a check would get now, and why.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Explanation<'a> {
    #[serde(flatten)]
    answer: RequestAnswer<'a>,
    /// Rules whose conditions hold, and what became of each.
    rules: Vec<RuleReason<'a>>,
    /// Rules that do not match, each with the first condition that does not hold; at most 100.
    not_matched: Vec<RuleReason<'a>>,
    /// Whether the policy excludes the request from all rules.
    excluded: bool,
    /// The endpoint that the request is one of.
    endpoint: Option<&'a str>,
    /// How the request is identified, after verification: `match: { identity: ... }` compares with these.
    #[schemars(with = "Vec<IdentitySchema>")]
    identity: Vec<&'static str>,
    /// The tier that the request has in each family.
    tiers: BTreeMap<&'a str, &'a str>,
    /// Whether the request names a tier that no family has.
    unknown_tier: bool,
    /// The version of the policy.
    policy: &'a str,
}

/// What became of a rule.
#[derive(Serialize, JsonSchema)]
struct RuleReason<'a> {
    /// The rule.
    rule: &'a str,
    /// Why it applies, or why not.
    why: String,
}

impl<'a> Explanation<'a> {
    pub(crate) fn new(
        policy: &'a Loaded,
        request: &'a Descriptors<'a>,
        verdict: &'a PolicyVerdict,
        not_verified: NotVerified,
    ) -> Self {
        let rules = policy.limiter.policy();
        let selection = &verdict.selection;
        let mut answer = RequestAnswer::new(policy, verdict, not_verified);
        for (limit, (_, check, decided)) in answer.limits_mut().iter_mut().zip(verdict.known()) {
            let of_rule = &rules.limits()[check.limit];
            let decision = &decided.decision;
            let frees = decision.at.after(decision.outcome.retry()).as_micros();
            limit.why = Some(LimitReason {
                scope: of_rule.scope.to_string(),
                arithmetic: arithmetic(&of_rule.limit, check.cost, decided),
                frees_at_micros: (!decided.is_admitted()).then_some(frees),
                full_at_micros: decision.at.after(decision.reset).as_micros(),
            });
        }
        let identities = IdentityKind::ALL.into_iter().filter(|kind| request.is_identified_by(*kind));
        Self {
            answer,
            rules: matched(policy, selection),
            not_matched: not_matched(policy, request, selection),
            excluded: selection.excluded,
            endpoint: rules.endpoint(request).map(|endpoint| &*endpoint.name),
            identity: identities.map(IdentityKind::as_str).collect(),
            tiers: rules.tiers(request).collect(),
            unknown_tier: selection.unknown_tier,
            policy: &policy.version,
        }
    }
}

/// Rules whose conditions hold.
fn matched<'a>(policy: &'a Loaded, selection: &Selection) -> Vec<RuleReason<'a>> {
    let rules = policy.limiter.policy();
    let reason = |number: &usize| {
        let rule = rules.rule(*number)?;
        let applies = selection.checks.iter().any(|check| check.rule == *number);
        let refused = matches!(selection.refusal, Some(Refusal::EmptyKey { rule, .. }) if rule == *number);
        let why = match &rule.limits {
            _ if refused => "the request has none of its keys, and is refused for that",
            _ if applies => "applies",
            _ if selection.skipped.contains(number) => "skipped: the request has none of its keys",
            RuleLimits::Own(Limits::Unlimited) => "has no limit, if the path is in plain form",
            RuleLimits::OfTier { .. } | RuleLimits::Own(Limits::All(_)) => {
                "left out: its tier has no limit, or it is only counted and too many limits apply"
            }
        };
        Some(RuleReason { rule: &rule.name, why: why.to_owned() })
    };
    selection.matched.iter().filter_map(reason).collect()
}

/// Rules with a condition that does not hold, or that are not reached.
fn not_matched<'a>(
    policy: &'a Loaded,
    request: &Descriptors<'_>,
    selection: &Selection,
) -> Vec<RuleReason<'a>> {
    let rules = policy.limiter.policy();
    let unmatched = rules.unmatched(request);
    let others = rules.parts().rules.iter().enumerate();
    let others = others.filter(|(number, _)| !selection.matched.contains(number)).take(UNMATCHED_MAX);
    let reason = others.map(|(_, rule)| {
        let unmet = unmatched.iter().find(|(it, _)| std::ptr::eq(*it, rule)).map(|(_, unmet)| *unmet);
        let why = unmet.map_or_else(
            || "not reached: a rule before it has `stop: true`, or the policy `apply: first`".to_owned(),
            why_not,
        );
        RuleReason { rule: &rule.name, why }
    });
    reason.collect()
}

/// Rules in an explanation that a request does not match. A policy may have thousands.
const UNMATCHED_MAX: usize = 100;

/// Why a rule does not match, by its field.
fn why_not(unmet: Unmet<'_>) -> String {
    match unmet {
        Unmet::Path => "match.path is another one".to_owned(),
        Unmet::Method => "match.method is another one".to_owned(),
        Unmet::Host => "match.host is another one".to_owned(),
        Unmet::Network => "match.cidr does not contain the client's address".to_owned(),
        Unmet::Identity => "match.identity: the request is not identified in that way".to_owned(),
        Unmet::Value(Source::Header, name) => format!("match.header.{name} does not hold"),
        Unmet::Value(Source::Query, name) => format!("match.query.{name} does not hold"),
        Unmet::Value(Source::Attribute, name) => format!("match.attribute.{name} does not hold"),
        Unmet::Tier => "match.tier is another one".to_owned(),
    }
}

/// A time in seconds, rounded up to milliseconds.
fn seconds(time: Micros) -> String {
    let millis = time.as_millis_ceil();
    format!("{}.{:03} s", millis / 1_000, millis % 1_000)
}

/// The arithmetic of a limit in words.
fn arithmetic(limit: &Limit, cost: u64, verdict: &Verdict) -> String {
    let decision = &verdict.decision;
    let (left, size) = (decision.remaining, decision.limit);
    let (span, reset) = (limit.horizon().as_secs_ceil(), seconds(decision.reset));
    let how = match limit {
        Limit::TokenBucket(it) => {
            let rate = it.flow() as f64 * 1e6 / (it.unit() as f64 * it.tick() as f64);
            format!("{left} of {size} tokens; {rate:.3} flow back each second, full in {reset}")
        }
        Limit::IntervalBucket(it) => format!(
            "{left} of {size} tokens; {} come back at the end of each {} ms",
            it.refill(),
            it.period() / 1_000
        ),
        Limit::LeakyBucket(_) => format!("room for {left} of {size}; empty in {reset}"),
        Limit::FixedWindow(_) => format!("{left} of {size} left in this window of {span} s"),
        Limit::CalendarQuota(it) => {
            format!("{left} of {size} left in this {}", it.calendar().slug().replace('_', " "))
        }
        Limit::SlidingLog(_) => format!("{left} of {size} left in the last {span} s, by every admission"),
        Limit::SlidingCounter(it) => format!(
            "{left} of {size} left in the last {span} s (sliding counter, {} part(s); the oldest counts {})",
            it.sub_buckets(),
            if it.is_strict() { "in full" } else { "by its share" }
        ),
    };
    let then = match decision.outcome {
        Outcome::Admitted { delay } if delay.get() == 0 => format!("asks for {cost}: fits now"),
        Outcome::Admitted { delay } => {
            format!("asks for {cost}: fits in {}, which it waits for", seconds(delay))
        }
        Outcome::Denied { retry } => format!("asks for {cost}: fits in {}", seconds(retry)),
        Outcome::Impossible => format!("asks for {cost}: more than fits at all"),
    };
    format!("{how}; {then}")
}
