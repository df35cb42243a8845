//! Responses to checks: the status and the headers around an answer.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use serde::Serialize;
use tollgate::rules::Refusal;
use tollgate::{PolicyOutcome, PolicyVerdict};

use crate::headers::rate_limit_headers;
use crate::live::Loaded;

const X_TOLLGATE_BASIS: HeaderName = HeaderName::from_static("x-tollgate-basis");

/// The status of an answer.
pub(super) fn status_of(verdict: &PolicyVerdict) -> StatusCode {
    match verdict.outcome() {
        PolicyOutcome::Admitted { .. } => StatusCode::OK,
        PolicyOutcome::Denied { .. } => StatusCode::TOO_MANY_REQUESTS,
        PolicyOutcome::Refused(Refusal::EmptyKey { status, .. }) => {
            StatusCode::from_u16(status).unwrap_or(StatusCode::FORBIDDEN)
        }
        PolicyOutcome::Refused(Refusal::TooManyChecks) => StatusCode::UNPROCESSABLE_ENTITY,
        PolicyOutcome::Refused(Refusal::ExceedsLimit { .. }) => StatusCode::BAD_REQUEST,
    }
}

/// An answer to a check, with the headers that a client can go by.
pub(super) fn verdict_response(
    rules: &Loaded,
    verdict: &PolicyVerdict,
    body: &impl Serialize,
) -> Response<Full<Bytes>> {
    let mut response = json_response(body);
    *response.status_mut() = status_of(verdict);
    verdict_headers(response.headers_mut(), rules, verdict);
    response
}

/// Adds the headers of a verdict: `X-RateLimit-*`, `RateLimit`, `RateLimit-Policy`, `X-Tollgate-Basis`, and on a denial `Retry-After`.
pub(super) fn verdict_headers(headers: &mut HeaderMap, rules: &Loaded, verdict: &PolicyVerdict) {
    rate_limit_headers(&[(rules, verdict)], |name, value| {
        if let Some(value) = value.into_http() {
            headers.insert(name, value);
        }
    });
    headers.insert(X_TOLLGATE_BASIS, HeaderValue::from_static(verdict.basis().as_str()));
}

/// A JSON body that no cache may keep: the next answer can differ.
pub(super) fn json_response(body: &impl Serialize) -> Response<Full<Bytes>> {
    let mut bytes = Vec::with_capacity(256);
    // Texts and numbers: this does not fail.
    let _ = serde_json::to_writer(&mut bytes, body);
    json_bytes(Bytes::from(bytes))
}

/// The same for a body that is JSON already.
pub(super) fn json_bytes(body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    let headers = response.headers_mut();
    headers.reserve(12);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// A list of values that are JSON already.
pub(super) fn json_list(values: &[Vec<u8>]) -> Response<Full<Bytes>> {
    let mut list = Vec::with_capacity(2 + values.iter().map(|value| value.len() + 1).sum::<usize>());
    list.push(b'[');
    list.extend_from_slice(&values.join(&b','));
    list.push(b']');
    json_bytes(Bytes::from(list))
}
