//! Answers to calls: a status for each descriptor, and the headers for the client.

use prost_types::Duration;
use tollgate::rules::{Refusal, Role, RuleCheck};
use tollgate::{Cycle, Decision, Limit, Micros, PolicyOutcome, PolicyVerdict, Verdict};

use super::asked::{Asked, Hits};
use super::proto::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit};
use super::proto::{HeaderValue, RateLimitResponse, RateLimitUnit};
use crate::headers::rate_limit_headers;
use crate::live::Loaded;

/// The answer to a call. `verdicts` are those of the descriptors; none for a limit of no permits.
pub(super) fn response(asked: &[Asked], verdicts: &[Option<PolicyVerdict>]) -> RateLimitResponse {
    let statuses: Vec<_> =
        asked.iter().zip(verdicts).map(|(asked, verdict)| status(asked, verdict)).collect();
    let is_over = statuses.iter().any(|status| status.code() == Code::OverLimit);
    let overall_code = if is_over { Code::OverLimit } else { Code::Ok };
    RateLimitResponse {
        overall_code: overall_code.into(),
        statuses,
        response_headers_to_add: headers(asked, verdicts),
    }
}

fn headers(asked: &[Asked], verdicts: &[Option<PolicyVerdict>]) -> Vec<HeaderValue> {
    let mut shown = Vec::with_capacity(asked.len());
    for (asked, verdict) in asked.iter().zip(verdicts) {
        let is_given_back = matches!(asked.hits, Hits::GiveBack(_));
        if let (Some(part), Some(verdict), false) = (&asked.part, verdict, is_given_back) {
            shown.push((&*part.policy, verdict));
        }
    }
    let mut headers = Vec::with_capacity(6);
    rate_limit_headers(&shown, |name, value| {
        if let Some(value) = value.into_text() {
            headers.push(HeaderValue { key: name.as_str().to_owned(), value });
        }
    });
    headers
}

/// The status of one descriptor.
fn status(asked: &Asked, verdict: &Option<PolicyVerdict>) -> DescriptorStatus {
    let (Some(part), Some(verdict)) = (&asked.part, verdict) else { return status_of_nothing(asked) };
    let is_over = !verdict.is_admitted() && !matches!(asked.hits, Hits::GiveBack(_));
    let code = if is_over { Code::OverLimit } else { Code::Ok };
    let Some((check, decision)) = shown(verdict) else {
        // A rule without a limit has everything left; without a rule there is nothing to tell.
        let is_unlimited = !verdict.selection.unmatched && verdict.selection.checks.is_empty() && !is_over;
        let limit_remaining = if is_unlimited { u32::MAX } else { 0 };
        return DescriptorStatus { code: code.into(), limit_remaining, ..DescriptorStatus::default() };
    };
    DescriptorStatus {
        code: code.into(),
        current_limit: Some(current_limit(&part.policy, check, decision)),
        limit_remaining: saturate(decision.remaining),
        duration_until_reset: Some(seconds(decision.reset)),
    }
}

/// The status of a limit of no permits.
fn status_of_nothing(asked: &Asked) -> DescriptorStatus {
    let unit = asked.named.map_or(Unit::Unknown, |named| match named.unit() {
        RateLimitUnit::Unknown => Unit::Unknown,
        RateLimitUnit::Second => Unit::Second,
        RateLimitUnit::Minute => Unit::Minute,
        RateLimitUnit::Hour => Unit::Hour,
        RateLimitUnit::Day => Unit::Day,
        RateLimitUnit::Month => Unit::Month,
        RateLimitUnit::Year => Unit::Year,
    });
    DescriptorStatus {
        code: Code::OverLimit.into(),
        current_limit: Some(RateLimit { unit: unit.into(), ..RateLimit::default() }),
        ..DescriptorStatus::default()
    }
}

/// The check that a client should know of: the one that denies, the one that can never admit the request, or else the one with the least left.
fn shown(verdict: &PolicyVerdict) -> Option<(&RuleCheck, &Decision)> {
    let number = match verdict.outcome() {
        PolicyOutcome::Refused(Refusal::ExceedsLimit { rule, limit }) => {
            verdict.selection.checks.iter().position(|check| check.rule == rule && check.limit == limit)
        }
        PolicyOutcome::Admitted { .. } | PolicyOutcome::Denied { .. } | PolicyOutcome::Refused(_) => {
            verdict.tightest().or_else(|| least_counted(verdict))
        }
    }?;
    let Verdict { decision, .. } = verdict.verdicts.get(number)?.as_ref()?;
    Some((&verdict.selection.checks[number], decision))
}

/// Of the checks that are only counted, the one with the least left: where nothing is enforced, they show what would be.
fn least_counted(verdict: &PolicyVerdict) -> Option<usize> {
    let counted = verdict.known().filter(|(_, check, _)| check.role == Role::Shadow && !check.is_candidate);
    counted.min_by_key(|(_, _, it)| it.decision.remaining).map(|(number, _, _)| number)
}

fn current_limit(policy: &Loaded, check: &RuleCheck, decision: &Decision) -> RateLimit {
    let rules = policy.limiter.policy();
    RateLimit {
        requests_per_unit: saturate(decision.limit),
        unit: unit(&rules.limits()[check.limit].limit).into(),
        name: rules.rule(check.rule).map(|rule| rule.name.to_string()).unwrap_or_default(),
    }
}

/// The unit that is as long as the window of a limit; UNKNOWN if none is, which Envoy leaves out of its headers.
fn unit(limit: &Limit) -> Unit {
    const DAY_SECS: u64 = 86_400;
    if let Limit::CalendarQuota(quota) = limit {
        return match quota.calendar().cycle() {
            Cycle::Day => Unit::Day,
            Cycle::Week { .. } => Unit::Week,
            Cycle::Month { .. } => Unit::Month,
        };
    }
    let units = [
        (1, Unit::Second),
        (60, Unit::Minute),
        (3_600, Unit::Hour),
        (DAY_SECS, Unit::Day),
        (7 * DAY_SECS, Unit::Week),
        (30 * DAY_SECS, Unit::Month),
        (365 * DAY_SECS, Unit::Year),
    ];
    let found = units.into_iter().find(|(secs, _)| Micros::from_secs(*secs) == limit.horizon());
    found.map_or(Unit::Unknown, |(_, unit)| unit)
}

fn saturate(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Whole seconds, rounded up: Envoy shows the seconds only.
fn seconds(time: Micros) -> Duration {
    Duration { seconds: i64::try_from(time.as_secs_ceil()).unwrap_or(i64::MAX), nanos: 0 }
}
