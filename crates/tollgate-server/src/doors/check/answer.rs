//! What a caller is told of a verdict: the body, the headers, and the reasons.

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{HeaderValue, Response, StatusCode};
use http_body_util::Full;
use serde_json::{Map, Value, json};
use tollgate::rules::{
    Descriptors, IdentityKind, Limits, Refusal, Role, RuleCheck, RuleLimits, Source, Unmet,
};
use tollgate::{Limit, Micros, Outcome, PolicyOutcome, PolicyVerdict, Verdict};

use super::NotVerified;
use crate::doors::rest::answer::{Status, X_TOLLGATE_BASIS, json_response, status_headers};
use crate::live::Loaded;

/// 200, 429, or the status that a rule refuses with.
pub(in crate::doors) fn verdict_response(
    policy: &Loaded,
    verdict: &PolicyVerdict,
    not_verified: NotVerified,
) -> Response<Full<Bytes>> {
    let mut response = json_response(body(policy, verdict, not_verified).to_string().into_bytes());
    *response.status_mut() = match verdict.outcome() {
        PolicyOutcome::Admitted { .. } => StatusCode::OK,
        PolicyOutcome::Denied { .. } => StatusCode::TOO_MANY_REQUESTS,
        PolicyOutcome::Refused(Refusal::EmptyKey { status, .. }) => {
            StatusCode::from_u16(status).unwrap_or(StatusCode::FORBIDDEN)
        }
        PolicyOutcome::Refused(Refusal::TooManyChecks) => StatusCode::UNPROCESSABLE_ENTITY,
        PolicyOutcome::Refused(Refusal::ExceedsLimit { .. }) => StatusCode::BAD_REQUEST,
    };
    let headers = response.headers_mut();
    let limits = policy.limiter.policy().limits();
    let tightest = verdict.tightest();
    let statuses: Vec<_> = verdict
        .known()
        .filter(|(_, check, _)| check.role == Role::Enforced)
        .map(|(number, check, verdict)| Status {
            name: &limits[check.limit].scope,
            limit: &limits[check.limit].limit,
            decision: &verdict.decision,
            is_tightest: tightest == Some(number),
        })
        .collect();
    status_headers(headers, &statuses);
    headers.insert(X_TOLLGATE_BASIS, HeaderValue::from_static(verdict.basis().as_str()));
    if let PolicyOutcome::Denied { by } = verdict.outcome()
        && let Some(Verdict { decision, .. }) = verdict.verdicts[by]
        && let outcome @ Outcome::Denied { .. } = decision.outcome
    {
        headers.insert(RETRY_AFTER, HeaderValue::from(outcome.retry().as_secs_ceil()));
    }
    response
}

/// The verdict, field for field.
pub(super) fn body(policy: &Loaded, verdict: &PolicyVerdict, not_verified: NotVerified) -> Value {
    let mut body = Map::new();
    let outcome = verdict.outcome();
    body.insert("allowed".into(), json!(verdict.is_admitted()));
    let tightest = verdict.tightest();
    let rules = policy.limiter.policy();
    let (rule, code, message) = match outcome {
        PolicyOutcome::Admitted { .. } => {
            (tightest.map(|it| verdict.selection.checks[it].rule), None, "Request allowed")
        }
        PolicyOutcome::Denied { by } => {
            let RuleCheck { rule, key, .. } = verdict.selection.checks[by];
            (Some(rule), rules.rule(rule).map(|rule| rule.code(key)), "Rate limit exceeded")
        }
        PolicyOutcome::Refused(Refusal::EmptyKey { rule, .. }) => {
            (Some(rule), Some("EMPTY_KEY".to_owned()), "The rule needs a key that the request does not have")
        }
        PolicyOutcome::Refused(Refusal::TooManyChecks) => {
            (None, Some("TOO_MANY_LIMITS".to_owned()), "More limits apply than can be checked together")
        }
        PolicyOutcome::Refused(Refusal::ExceedsLimit { rule, .. }) => {
            let code = "PERMITS_EXCEED_LIMIT".to_owned();
            (Some(rule), Some(code), "More permits than the limit can ever admit")
        }
    };
    body.insert("rule".into(), json!(rule.and_then(|rule| rules.rule(rule)).map(|rule| &rule.name)));
    body.insert("code".into(), json!(code));
    body.insert("message".into(), json!(message));
    let decision = tightest.and_then(|number| verdict.verdicts[number]).map(|it| it.decision);
    body.insert("limit".into(), json!(decision.map(|it| it.limit)));
    body.insert("remaining".into(), json!(decision.map(|it| it.remaining)));
    body.insert("resetAfterSeconds".into(), json!(decision.map_or(0, |it| it.reset.as_secs_ceil())));
    body.insert(
        "retryAfterSeconds".into(),
        json!(decision.map_or(0, |it| it.outcome.retry().as_secs_ceil())),
    );
    body.insert(
        "retryAfterMillis".into(),
        json!(decision.map_or(0, |it| it.outcome.retry().as_millis_ceil())),
    );
    let delay = if let PolicyOutcome::Admitted { delay } = outcome { delay.as_millis_ceil() } else { 0 };
    body.insert("delayMillis".into(), json!(delay));
    body.insert("basis".into(), json!(verdict.basis().as_str()));
    let limits = verdict.known().map(|(_, check, it)| Value::Object(limit(policy, verdict, check, it)));
    body.insert("limits".into(), limits.collect());
    if verdict.retry_is_lower_bound() {
        body.insert("retryAfterIsLowerBound".into(), json!(true));
    }
    let selection = &verdict.selection;
    if !selection.skipped.is_empty() {
        let names = selection.skipped.iter().filter_map(|number| Some(&rules.rule(*number)?.name));
        body.insert("skippedRules".into(), names.map(|name| json!(name)).collect());
    }
    if selection.unmatched {
        body.insert("unmatched".into(), json!(true));
    }
    if let Some(why) = not_verified.token {
        body.insert("unverifiedToken".into(), json!(why.as_str()));
    }
    if not_verified.api_key {
        body.insert("unverifiedApiKey".into(), json!(true));
    }
    Value::Object(body)
}

/// The status of one limit.
fn limit(policy: &Loaded, verdict: &PolicyVerdict, check: &RuleCheck, it: &Verdict) -> Map<String, Value> {
    let rules = policy.limiter.policy();
    let limit = &rules.limits()[check.limit];
    let subject = &verdict.selection.subjects[check.subject];
    let mut body = Map::new();
    body.insert("rule".into(), json!(rules.rule(check.rule).map(|rule| &rule.name)));
    // Whose it is, without the braces that a store wants.
    body.insert("key".into(), json!(subject.trim_start_matches('{').trim_end_matches('}')));
    body.insert("algorithm".into(), json!(limit.limit.algorithm().as_str()));
    body.insert("allowed".into(), json!(it.is_admitted()));
    body.insert("cost".into(), json!(check.cost));
    body.insert("limit".into(), json!(it.decision.limit));
    body.insert("remaining".into(), json!(it.decision.remaining));
    body.insert("resetAfterSeconds".into(), json!(it.decision.reset.as_secs_ceil()));
    body.insert("retryAfterSeconds".into(), json!(it.decision.outcome.retry().as_secs_ceil()));
    body.insert("retryAfterMillis".into(), json!(it.decision.outcome.retry().as_millis_ceil()));
    body.insert("delayMillis".into(), json!(it.decision.outcome.delay().as_millis_ceil()));
    body.insert("basis".into(), json!(if check.role == Role::Shadow { "shadow" } else { it.basis.as_str() }));
    if check.is_candidate {
        body.insert("candidate".into(), json!(true));
    }
    body
}

/// The verdict that would be given now, and why.
pub(in crate::doors) fn explanation(
    policy: &Loaded,
    request: &Descriptors<'_>,
    verdict: &PolicyVerdict,
    not_verified: NotVerified,
) -> Value {
    let rules = policy.limiter.policy();
    let mut explained = body(policy, verdict, not_verified);
    let selection = &verdict.selection;
    let name = |number: usize| rules.rule(number).map(|rule| &rule.name);
    let matched = selection.matched.iter().map(|number| {
        let applies = selection.checks.iter().any(|check| check.rule == *number);
        let refused = matches!(selection.refusal, Some(Refusal::EmptyKey { rule, .. }) if rule == *number);
        let limits = rules.rule(*number).map(|rule| &rule.limits);
        let why = match limits {
            _ if refused => "the request has none of its keys, and is refused for that",
            _ if applies => "applies",
            _ if selection.skipped.contains(number) => "skipped: the request has none of its keys",
            Some(RuleLimits::Own(Limits::Unlimited)) => {
                "lets everything through, if the path is in plain form"
            }
            Some(RuleLimits::OfTier { .. } | RuleLimits::Own(Limits::All(_))) | None => {
                "left out: its tier has no limit, or it is only counted and too many limits apply"
            }
        };
        json!({ "rule": name(*number), "why": why })
    });
    explained["rules"] = matched.collect();
    let all_rules = rules.parts().rules.iter().enumerate();
    let unmatched = rules.unmatched(request);
    let others = all_rules.filter(|(number, _)| !selection.matched.contains(number)).take(UNMATCHED_MAX);
    let others = others.map(|(_, rule)| {
        let unmet = unmatched.iter().find(|(it, _)| std::ptr::eq(*it, rule)).map(|(_, unmet)| *unmet);
        let why = unmet.map_or_else(
            || "not reached: a rule before it has `stop: true`, or the policy `apply: first`".to_owned(),
            why_not,
        );
        json!({ "rule": rule.name, "why": why })
    });
    explained["notMatched"] = others.collect();
    explained["excluded"] = json!(selection.excluded);
    explained["endpoint"] = json!(rules.endpoint(request).map(|endpoint| &endpoint.name));
    let identities = IdentityKind::ALL.into_iter().filter(|kind| request.is_identified_by(*kind));
    explained["identity"] = identities.map(IdentityKind::as_str).collect();
    explained["tiers"] =
        rules.tiers(request).map(|(family, tier)| (family.to_owned(), json!(tier))).collect();
    explained["unknownTier"] = json!(selection.unknown_tier);
    explained["policy"] = json!(policy.version);
    if let Some(limits) = explained["limits"].as_array_mut() {
        for (body, (_, check, it)) in limits.iter_mut().zip(verdict.known()) {
            let limit = &rules.limits()[check.limit];
            body["scope"] = json!(limit.scope);
            body["arithmetic"] = json!(arithmetic(&limit.limit, check.cost, it));
            let frees = it.decision.at.after(it.decision.outcome.retry());
            body["freesAtMicros"] = json!((!it.is_admitted()).then(|| frees.as_micros()));
            body["fullAtMicros"] = json!(it.decision.at.after(it.decision.reset).as_micros());
        }
    }
    explained
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

/// How it comes to that, in a sentence.
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
