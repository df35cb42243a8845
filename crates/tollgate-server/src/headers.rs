//! Headers that tell a client how much of its limits is left, for every door that can send headers.

use bytes::Bytes;
use http::HeaderValue;
use http::header::{HeaderName, RETRY_AFTER};
use tollgate::rules::Role;
use tollgate::{Decision, Micros, Outcome, PolicyOutcome, PolicyVerdict, Verdict};

use crate::live::Loaded;

const X_RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RATELIMIT_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The value of a header. It has visible ASCII characters and spaces only.
pub(crate) enum FieldValue {
    Number(u64),
    Text(Vec<u8>),
}

impl FieldValue {
    pub(crate) fn into_http(self) -> Option<HeaderValue> {
        match self {
            Self::Number(number) => Some(HeaderValue::from(number)),
            Self::Text(text) => HeaderValue::from_maybe_shared(Bytes::from(text)).ok(),
        }
    }

    pub(crate) fn into_text(self) -> Option<String> {
        match self {
            Self::Number(number) => Some(itoa::Buffer::new().format(number).to_owned()),
            Self::Text(text) => String::from_utf8(text).ok(),
        }
    }
}

/// Hands the headers of a request's verdicts to `add`: the common `X-RateLimit-*`, which have room for one limit, the IETF draft's `RateLimit` and
/// `RateLimit-Policy`, and on a denial `Retry-After`.
pub(crate) fn rate_limit_headers(
    verdicts: &[(&Loaded, &PolicyVerdict)],
    mut add: impl FnMut(HeaderName, FieldValue),
) {
    let tightest = tightest(verdicts);
    if let Some(decision) = tightest {
        let reset = decision.at.after(decision.reset).as_secs_ceil();
        add(X_RATELIMIT_LIMIT, FieldValue::Number(decision.limit));
        add(X_RATELIMIT_REMAINING, FieldValue::Number(decision.remaining));
        add(X_RATELIMIT_RESET, FieldValue::Number(reset));
    }
    let (mut status, mut policy) = (Vec::with_capacity(64), Vec::with_capacity(64));
    for (rules, verdict) in verdicts {
        for (_, check, Verdict { decision, .. }) in verdict.known() {
            if check.role != Role::Enforced {
                continue;
            }
            let it = &rules.limiter.policy().limits()[check.limit];
            let until = effective_window(decision).as_secs_ceil();
            let window = it.limit.horizon().as_secs_ceil();
            write_item(&mut status, &it.scope, [("r", decision.remaining), ("t", until)]);
            write_item(&mut policy, &it.scope, [("q", decision.limit), ("w", window)]);
        }
    }
    for (field, value) in [(RATELIMIT, status), (RATELIMIT_POLICY, policy)] {
        if !value.is_empty() {
            add(field, FieldValue::Text(value));
        }
    }
    if let Some(Decision { outcome: Outcome::Denied { retry }, .. }) = tightest {
        add(RETRY_AFTER, FieldValue::Number(retry.as_secs_ceil()));
    }
}

/// The decision that a client should know of: the denial with the longest wait, or else the decision with the least left. None if the request
/// is refused whatever is left.
fn tightest(verdicts: &[(&Loaded, &PolicyVerdict)]) -> Option<Decision> {
    if verdicts.iter().any(|(_, verdict)| matches!(verdict.outcome(), PolicyOutcome::Refused(_))) {
        return None;
    }
    let decisions =
        verdicts.iter().filter_map(|(_, verdict)| Some(verdict.verdicts[verdict.tightest()?]?.decision));
    decisions.min_by_key(|decision| match decision.outcome {
        Outcome::Impossible => (0, 0),
        Outcome::Denied { retry } => (1, u64::MAX - retry.get()),
        Outcome::Admitted { .. } => (2, decision.remaining),
    })
}

/// For a denied request, the time until its permits fit; for others, the time until more permits are free.
fn effective_window(decision: &Decision) -> Micros {
    if decision.is_admitted() { decision.reset } else { decision.outcome.retry() }
}

/// Adds to a list of structured fields: a string with two integers, each of at most fifteen digits.
fn write_item(list: &mut Vec<u8>, name: &str, parameters: [(&str, u64); 2]) {
    if !list.is_empty() {
        list.extend_from_slice(b", ");
    }
    list.push(b'"');
    list.extend_from_slice(name.as_bytes());
    list.push(b'"');
    for (parameter, number) in parameters {
        list.push(b';');
        list.extend_from_slice(parameter.as_bytes());
        list.push(b'=');
        list.extend_from_slice(itoa::Buffer::new().format(number.min(999_999_999_999_999)).as_bytes());
    }
}
