//! Errors as callers see them: `application/problem+json`, naming what is wrong and what is accepted.

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, Response, StatusCode};
use http_body_util::Full;
use serde::Serialize;

/// Why a request was not answered as asked. It cost no permit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Problem {
    kind: &'static str,
    status: StatusCode,
    parameter: Option<String>,
    detail: String,
    allow: Option<&'static str>,
}

#[derive(Serialize)]
struct Body<'a> {
    r#type: &'static str,
    title: &'a str,
    status: u16,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameter: Option<&'a str>,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { kind: "about:blank", status, parameter: None, detail: detail.into(), allow: None }
    }

    /// The store gave no decision, and without one nothing is admitted.
    pub(super) fn closed() -> Self {
        let detail = "the limit could not be checked: the store gave no answer; try again in a second";
        Self {
            kind: "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, detail)
        }
    }

    /// Something that the store has not done.
    pub(super) fn not_done(what: &str) -> Self {
        let detail = format!("{what}: the store gave no answer; try again in a second");
        Self { detail, ..Self::closed() }
    }

    /// A parameter that cannot be taken.
    pub(super) fn parameter(name: &str, why: impl std::fmt::Display) -> Self {
        let detail = format!("{name}: {why}");
        Self { parameter: Some(name.to_owned()), ..Self::new(StatusCode::BAD_REQUEST, detail) }
    }

    /// A path that does not take this method.
    pub(super) fn method(allow: &'static str) -> Self {
        let detail = format!("this path takes {allow}");
        Self { allow: Some(allow), ..Self::new(StatusCode::METHOD_NOT_ALLOWED, detail) }
    }

    /// The same problem of one item of a batch.
    pub(super) fn in_item(self, index: usize) -> Self {
        let prefix = format!("checks[{index}]");
        let (parameter, detail) = match &self.parameter {
            Some(name) => (format!("{prefix}.{name}"), format!("{prefix}.{}", self.detail)),
            None => (prefix.clone(), format!("{prefix}: {}", self.detail)),
        };
        Self { detail, parameter: Some(parameter), ..self }
    }

    pub(super) fn into_response(self) -> Response<Full<Bytes>> {
        let body = Body {
            r#type: self.kind,
            title: self.status.canonical_reason().unwrap_or("Error"),
            status: self.status.as_u16(),
            detail: &self.detail,
            parameter: self.parameter.as_deref(),
        };
        // Texts and a number: this does not fail, and an empty body would still carry the status.
        let body = serde_json::to_vec(&body).unwrap_or_default();
        let mut response = Response::new(Full::from(body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(allow) = self.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            headers.insert("x-tollgate-basis", HeaderValue::from_static("closed"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
