//! Errors as callers see them: `application/problem+json`, naming what is wrong and what is accepted.

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, Response, StatusCode};
use http_body_util::Full;
use schemars::JsonSchema;
use serde::Serialize;

use crate::access::Refused;
use crate::limiter::ExceedsLimit;
use crate::metrics::Metrics;

/// The type of a refusal because the store gives no decision.
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// The content type of problems.
pub(super) const PROBLEM_JSON: &str = "application/problem+json";

/// Why a request was not answered as asked. It cost no permit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Problem {
    kind: &'static str,
    status: StatusCode,
    parameter: Option<String>,
    code: Option<&'static str>,
    detail: String,
    allow: Option<&'static str>,
    refused: Option<Refused>,
}

/// A request that was not answered as asked (RFC 9457). It cost no permit.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Problem")]
pub(super) struct ProblemBody<'a> {
    /// The kind of problem: a URI.
    r#type: &'static str,
    /// The name of the status.
    title: &'a str,
    /// The status.
    status: u16,
    /// What is wrong, and what is accepted.
    detail: &'a str,
    /// The parameter or member that is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    parameter: Option<&'a str>,
    /// The problem, for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    code: Option<&'static str>,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self { kind: "about:blank", status, parameter: None, code: None, detail, allow: None, refused: None }
    }

    /// The store gave no decision, and without one nothing is admitted.
    pub(super) fn closed() -> Self {
        let detail = "the limit could not be checked: the store gave no answer; try again in a second";
        Self { kind: REDUCED_CAPACITY, ..Self::new(StatusCode::SERVICE_UNAVAILABLE, detail) }
    }

    /// Something that the store has not done.
    pub(super) fn not_done(what: &str) -> Self {
        let detail = format!("{what}: the store gave no answer; try again in a second");
        Self { detail, ..Self::closed() }
    }

    /// A change that the store has not taken in, and why. For those who run the service.
    pub(super) fn not_stored(detail: String) -> Self {
        Self { detail, ..Self::closed() }
    }

    /// A parameter that cannot be taken.
    pub(super) fn parameter(name: &str, why: impl std::fmt::Display) -> Self {
        let detail = format!("{name}: {why}");
        Self { parameter: Some(name.to_owned()), ..Self::new(StatusCode::BAD_REQUEST, detail) }
    }

    /// A request that is refused without a check.
    pub(super) fn refusal(status: StatusCode, code: &'static str, message: &str) -> Self {
        Self { code: Some(code), ..Self::new(status, message) }
    }

    /// A forward-auth call whose headers do not describe a request.
    pub(super) fn forward_auth(detail: String) -> Self {
        Self { detail, ..Self::from(Refused::ForwardAuth) }
    }

    /// A forward-auth call on this machine with a host that is not known.
    pub(super) fn foreign_host_of_proxy(why: Refused) -> Self {
        let problem = Self::from(why);
        let detail =
            format!("{}; a proxy that sends its client's Host must send a Via header, too", problem.detail);
        Self { detail, ..problem }
    }

    /// A path that does not take this method.
    pub(super) fn method(allow: &'static str) -> Self {
        let detail = format!("this path takes {allow}");
        Self { allow: Some(allow), ..Self::new(StatusCode::METHOD_NOT_ALLOWED, detail) }
    }

    /// A key that the caller may not name. It is never replaced by another one.
    pub(super) fn key_not_allowed() -> Self {
        let problem = Self::from(Refused::KeyNotAllowed);
        let detail =
            format!("key: {}; without `key` the check counts by the client's address", problem.detail);
        Self { parameter: Some("key".to_owned()), detail, ..problem }
    }

    /// Whether the caller is refused, not the request that it describes.
    pub(super) const fn is_refusal(&self) -> bool {
        self.refused.is_some()
    }

    /// What is wrong, and what is accepted.
    pub(super) fn detail(&self) -> &str {
        &self.detail
    }

    pub(super) const fn status(&self) -> StatusCode {
        self.status
    }

    /// Counts the problem if it is a refusal.
    pub(super) fn counted(self, metrics: &Metrics) -> Self {
        if let Some(why) = self.refused {
            metrics.refused(why);
        }
        self
    }

    /// The same problem of the whole batch, because of a parameter of one item.
    pub(super) fn in_item(self, index: usize) -> Self {
        let name = self.parameter.as_deref().unwrap_or_default();
        let (parameter, detail) =
            (format!("checks[{index}].{name}"), format!("checks[{index}].{}", self.detail));
        Self { detail, parameter: Some(parameter), ..self }
    }

    /// The body of the response; in a batch, the answer to one item.
    pub(super) fn to_json(&self) -> Vec<u8> {
        let body = ProblemBody {
            r#type: self.kind,
            title: self.status.canonical_reason().unwrap_or("Error"),
            status: self.status.as_u16(),
            detail: &self.detail,
            parameter: self.parameter.as_deref(),
            code: self.code,
        };
        // Texts and a number: this does not fail, and an empty body would still carry the status.
        serde_json::to_vec(&body).unwrap_or_default()
    }

    pub(super) fn into_response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::from(self.to_json()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(allow) = self.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.kind == REDUCED_CAPACITY {
            headers.insert("x-tollgate-basis", HeaderValue::from_static("closed"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<ExceedsLimit> for Problem {
    fn from(ExceedsLimit { most, rule }: ExceedsLimit) -> Self {
        let limit = rule.map_or("the limit".to_owned(), |rule| format!("the limit of the rule {rule}"));
        let why = format_args!("must be a whole number from 1 to {most}, {limit}");
        Self { code: Some("PERMITS_EXCEED_LIMIT"), ..Self::parameter("permits", why) }
    }
}

impl From<Refused> for Problem {
    fn from(why: Refused) -> Self {
        let (status, detail) = match why {
            Refused::WrongToken => {
                (StatusCode::UNAUTHORIZED, "the token (Authorization: Bearer ...) is not in api.token_file")
            }
            Refused::KeyNotAllowed => (
                StatusCode::UNAUTHORIZED,
                "needs a token of api.token_file (Authorization: Bearer ...) or a caller in api.trusted_callers",
            ),
            Refused::ForeignHost => (
                StatusCode::FORBIDDEN,
                "the Host header must be localhost, a loopback address, or a name in api.allowed_hosts",
            ),
            Refused::ForeignPage => (
                StatusCode::FORBIDDEN,
                "requests of web pages from other origins are refused (Origin, Sec-Fetch-Site)",
            ),
            Refused::Forwarded => (
                StatusCode::FORBIDDEN,
                "not for requests that a proxy has passed on (X-Forwarded-For, Forwarded, Via and the like); set admin.listen \
                 and admin.token_file to reach this page from elsewhere",
            ),
            Refused::NoAdminTokens => (
                StatusCode::FORBIDDEN,
                "beyond loopback /admin needs an admin token, and admin.token_file is not set",
            ),
            Refused::WrongAdminToken => {
                (StatusCode::UNAUTHORIZED, "needs a token of admin.token_file (Authorization: Bearer ...)")
            }
            Refused::NotAProxy => {
                (StatusCode::FORBIDDEN, "forward-auth is for proxies in client_address.trusted_proxies")
            }
            Refused::ForwardAuth => {
                (StatusCode::BAD_REQUEST, "the headers of the forward-auth call do not describe a request")
            }
            Refused::BodyMemory => (
                StatusCode::SERVICE_UNAVAILABLE,
                "the memory for bodies, or this client's share of it, is in use (server.max_body_bytes); try again in a second",
            ),
        };
        Self { refused: Some(why), ..Self::new(status, detail) }
    }
}
