//! What a caller gets back: the body, field for field, and the headers.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use serde::Serialize;
use tollgate::{Decision, Limit, Limiter, Micros, Verdict};

/// The body of a check.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CheckAnswer<'a> {
    allowed: bool,
    key: &'a str,
    algorithm: &'static str,
    remaining: u64,
    reset_after_seconds: u64,
    retry_after_seconds: u64,
    message: &'static str,
    limit: u64,
    basis: &'static str,
    delay_millis: u64,
    retry_after_millis: u64,
}

const X_RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RATELIMIT_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
pub(in crate::doors) const X_TOLLGATE_BASIS: HeaderName = HeaderName::from_static("x-tollgate-basis");
const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

impl<'a> CheckAnswer<'a> {
    pub(super) fn new(key: &'a str, limiter: &Limiter, verdict: &Verdict) -> Self {
        let decision = &verdict.decision;
        let allowed = decision.is_admitted();
        Self {
            allowed,
            key,
            algorithm: limiter.limit().algorithm().as_str(),
            remaining: decision.remaining,
            reset_after_seconds: decision.reset.as_secs_ceil(),
            retry_after_seconds: retry_after_secs(decision),
            message: if allowed { "Request allowed" } else { "Rate limit exceeded" },
            limit: decision.limit,
            basis: verdict.basis.as_str(),
            delay_millis: decision.outcome.delay().as_millis_ceil(),
            retry_after_millis: decision.outcome.retry().as_millis_ceil(),
        }
    }
}

/// Whole seconds until the permits fit; zero if they did.
fn retry_after_secs(decision: &Decision) -> u64 {
    decision.outcome.retry().as_secs_ceil()
}

/// 200 or 429, with everything a client can go by.
pub(super) fn check_response(key: &str, limiter: &Limiter, verdict: &Verdict) -> Response<Full<Bytes>> {
    let decision = &verdict.decision;
    let mut body = Vec::with_capacity(256 + key.len());
    // Texts and numbers: this does not fail.
    let _ = serde_json::to_writer(&mut body, &CheckAnswer::new(key, limiter, verdict));
    let mut response = json_response(body);
    let headers = response.headers_mut();
    status_headers(headers, &[Status::only(limiter, decision)]);
    headers.insert(X_TOLLGATE_BASIS, HeaderValue::from_static(verdict.basis.as_str()));
    if !decision.is_admitted() {
        headers.insert(RETRY_AFTER, HeaderValue::from(retry_after_secs(decision)));
        *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    }
    response
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RemainingAnswer<'a> {
    key: &'a str,
    algorithm: &'static str,
    limit: u64,
    remaining: u64,
    reset_after_seconds: u64,
}

/// Where a key stands. `verdict` is one that took nothing.
pub(super) fn remaining_response(key: &str, limiter: &Limiter, verdict: &Verdict) -> Response<Full<Bytes>> {
    let decision = &verdict.decision;
    let answer = RemainingAnswer {
        key,
        algorithm: limiter.limit().algorithm().as_str(),
        limit: decision.limit,
        remaining: decision.remaining,
        reset_after_seconds: decision.reset.as_secs_ceil(),
    };
    let mut response = json_response(serde_json::to_vec(&answer).unwrap_or_default());
    let headers = response.headers_mut();
    status_headers(headers, &[Status::only(limiter, decision)]);
    headers.insert(X_TOLLGATE_BASIS, HeaderValue::from_static(verdict.basis.as_str()));
    response
}

#[derive(Serialize)]
struct ResetAnswer<'a> {
    key: &'a str,
    algorithm: &'static str,
    message: &'static str,
}

pub(super) fn reset_response(key: &str, limiter: &Limiter) -> Response<Full<Bytes>> {
    let algorithm = limiter.limit().algorithm().as_str();
    json_response(
        serde_json::to_vec(&ResetAnswer { key, algorithm, message: "Rate limit reset" }).unwrap_or_default(),
    )
}

/// A JSON body that no cache may keep: the next answer is another one.
pub(in crate::doors) fn json_response(body: Vec<u8>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    let headers = response.headers_mut();
    headers.reserve(12);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Where one of a caller's limits stands.
pub(in crate::doors) struct Status<'a> {
    /// What it is called in the IETF draft's fields.
    pub(in crate::doors) name: &'a str,
    pub(in crate::doors) limit: &'a Limit,
    pub(in crate::doors) decision: &'a Decision,
    /// Whether it is the one that the older fields tell of, which have room for one.
    pub(in crate::doors) is_tightest: bool,
}

impl<'a> Status<'a> {
    /// The only limit there is.
    fn only(limiter: &'a Limiter, decision: &'a Decision) -> Self {
        let limit = limiter.limit();
        Self { name: limit.algorithm().as_lowercase(), limit, decision, is_tightest: true }
    }
}

/// The de-facto `X-RateLimit-*` fields and the IETF draft's `RateLimit` and `RateLimit-Policy`.
pub(in crate::doors) fn status_headers(headers: &mut HeaderMap, statuses: &[Status<'_>]) {
    let (mut status, mut policy) = (Vec::with_capacity(64), Vec::with_capacity(64));
    for Status { name, limit, decision, is_tightest } in statuses {
        if *is_tightest {
            let reset = decision.at.after(decision.reset).as_secs_ceil();
            headers.insert(X_RATELIMIT_LIMIT, HeaderValue::from(decision.limit));
            headers.insert(X_RATELIMIT_REMAINING, HeaderValue::from(decision.remaining));
            headers.insert(X_RATELIMIT_RESET, HeaderValue::from(reset));
        }
        let until = effective_window(decision).as_secs_ceil();
        write_item(&mut status, name, [("r", decision.remaining), ("t", until)]);
        write_item(&mut policy, name, [("q", decision.limit), ("w", limit.horizon().as_secs_ceil())]);
    }
    for (field, value) in [(RATELIMIT, status), (RATELIMIT_POLICY, policy)] {
        if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(value))
            && !value.is_empty()
        {
            headers.insert(field, value);
        }
    }
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
