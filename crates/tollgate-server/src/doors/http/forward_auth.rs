//! Forward authentication: a reverse proxy asks whether a request of its client may go ahead.
//!
//! The proxy describes the request in headers, so only trusted proxies are answered. They pass on the `Host` and `Origin` of their clients,
//! so the `Origin` check of loopback listeners cannot apply. Two other rules keep web pages out. Every dialect needs a header that a
//! page of another origin cannot send. A caller on this machine needs a known `Host`, which a page under a rebound DNS name
//! does not have, or a `Via` header, which browsers do not let pages set.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderName, VIA};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use tollgate::{PolicyOutcome, PolicyVerdict, Verdict};

use super::answer::{json_response, status_of, verdict_headers};
use super::input::too_long;
use super::problem::{PROBLEM_JSON, Problem};
use super::{Answer, ApiDoor};
use crate::access::Refused;
use crate::address::{canonical, is_trusted, named_client};
use crate::answer::refused;
use crate::config::{AddressHeader, ClientAddress};
use crate::live::Loaded;
use crate::request::{Described, VALUE_BYTES_MAX, Values, host};

/// The status of the answer before nginx's dialect changes it.
const X_TOLLGATE_STATUS: HeaderName = HeaderName::from_static("x-tollgate-status");
/// The type of a denial.
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";

/// The names of proxies in paths, each with its dialect.
const PROXIES: [(&str, Dialect); 5] = [
    ("nginx", Dialect::Nginx),
    ("traefik", Dialect::Forwarded),
    ("caddy", Dialect::Forwarded),
    ("haproxy", Dialect::Forwarded),
    ("envoy", Dialect::Envoy),
];

/// How a proxy describes its client's request, and which statuses it understands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Dialect {
    /// `X-Original-*` and `X-Real-IP`. nginx turns every refusal other than 401 and 403 into 500.
    Nginx,
    /// `X-Forwarded-*`.
    Forwarded,
    /// The original method, headers and target, with a prefix before the target. Envoy writes the address to `X-Real-IP`.
    Envoy,
}

/// A call of a proxy: its dialect, and the rest of the path behind the proxy's name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Call<'p> {
    dialect: Dialect,
    rest: &'p str,
}

impl<'p> Call<'p> {
    /// Reads the path of a call; none for every other path.
    pub(super) fn of(path: &'p str) -> Option<Self> {
        let named = path.strip_prefix("/forward-auth/")?;
        let (name, rest) = named.split_at(named.find('/').unwrap_or(named.len()));
        let (_, dialect) = PROXIES.into_iter().find(|(known, _)| *known == name)?;
        (dialect == Dialect::Envoy || rest.is_empty()).then_some(Self { dialect, rest })
    }

    /// Reads the client's request. `reads` says which headers and parameters of the query can change the decision.
    fn describe<'r, B>(
        self,
        request: &'r Request<B>,
        proxies: &ClientAddress,
        peer: IpAddr,
        reads: &dyn Reads,
    ) -> Result<Described<'r>, Problem>
    where
        'p: 'r,
    {
        let headers = request.headers();
        let address_header = match self.dialect {
            Dialect::Nginx | Dialect::Envoy => AddressHeader::XRealIp,
            Dialect::Forwarded => AddressHeader::XForwardedFor,
        };
        let (method, original_host, target) = match self.dialect {
            Dialect::Nginx => {
                let host =
                    if headers.contains_key("x-original-host") { "x-original-host" } else { HOST.as_str() };
                (only(headers, "x-original-method")?, only(headers, host)?, only(headers, "x-original-uri")?)
            }
            Dialect::Forwarded => (
                only(headers, "x-forwarded-method")?,
                only(headers, "x-forwarded-host")?,
                only(headers, "x-forwarded-uri")?,
            ),
            Dialect::Envoy => (request.method().as_str(), only(headers, HOST.as_str())?, self.rest),
        };
        if Method::from_bytes(method.as_bytes()).is_err() {
            return Err(malformed("the original method", "must be a method such as GET"));
        }
        let (path, query) = match self.dialect {
            Dialect::Envoy => (target, request.uri().query()),
            Dialect::Nginx | Dialect::Forwarded => match target.split_once('?') {
                Some((path, query)) => (path, Some(query)),
                None => (target, None),
            },
        };
        if !path.starts_with('/') {
            return Err(malformed("the original path", "must begin with /"));
        }
        if path.len() > VALUE_BYTES_MAX {
            return Err(malformed("the original path", &too_long()));
        }
        let Some(ip) = named_client(proxies, address_header, peer, headers) else {
            return Err(malformed(address_header.name(), "must name the client by its address"));
        };
        Ok(Described {
            ip: Some(ip),
            method: Cow::Borrowed(method),
            host: host(original_host),
            path: Cow::Borrowed(path),
            headers: read_headers(headers, reads)?,
            query: read_query(query.unwrap_or_default(), reads)?,
            ..Described::default()
        })
    }
}

/// Which parts of a request can change the decision.
trait Reads {
    /// Whether a header is read. `name` is in lower case.
    fn header(&self, name: &str) -> bool;
    /// Whether a parameter of the query is read.
    fn query(&self, name: &str) -> bool;
}

/// The parts of requests that the policy and the identification of callers read.
struct ReadBy<'a> {
    door: &'a ApiDoor,
    policy: &'a Loaded,
}

impl Reads for ReadBy<'_> {
    fn header(&self, name: &str) -> bool {
        self.door.limiter.reads_header(self.policy, name)
    }

    fn query(&self, name: &str) -> bool {
        self.policy.reads_query(name)
    }
}

fn malformed(what: &str, why: &str) -> Problem {
    Problem::forward_auth(format!("{what}: {why}"))
}

/// The value of a header that the proxy must send once. Of two, the client may have sent one.
fn only<'h>(headers: &'h HeaderMap, name: &str) -> Result<&'h str, Problem> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => str::from_utf8(value.as_bytes()).map_err(|_| malformed(name, "must be UTF-8")),
        (Some(_), Some(_)) => Err(malformed(name, "stands more than once; the proxy must overwrite it")),
        (None, _) => Err(malformed(name, "is missing; the proxy must set it")),
    }
}

/// The headers that are read. Lines of one name are one list (RFC 9110 section 5.3).
fn read_headers<'h>(headers: &'h HeaderMap, reads: &dyn Reads) -> Result<Values<'h>, Problem> {
    let mut read = Values::new();
    for name in headers.keys().map(HeaderName::as_str).filter(|name| reads.header(name)) {
        let lines = headers.get_all(name).iter().map(|line| String::from_utf8_lossy(line.as_bytes()));
        let value = lines.reduce(|list, line| Cow::Owned(format!("{list}, {line}"))).unwrap_or_default();
        if value.len() > VALUE_BYTES_MAX {
            return Err(Problem::parameter(name, too_long()));
        }
        read.push((Cow::Borrowed(name), value));
    }
    Ok(read)
}

/// The parameters of a query that are read. A repeated one is refused: servers differ in which of the values they use.
fn read_query<'q>(query: &'q str, reads: &dyn Reads) -> Result<Values<'q>, Problem> {
    let mut read = Values::new();
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let name = decoded(name);
        if !reads.query(&name) {
            continue;
        }
        let value = decoded(value);
        if value.len() > VALUE_BYTES_MAX {
            return Err(Problem::parameter(&name, too_long()));
        }
        if read.iter().any(|(known, _)| *known == name) {
            return Err(Problem::parameter(&name, "stands more than once in the query"));
        }
        read.push((name, value));
    }
    Ok(read)
}

/// A name or a value of a query: `+` is a space, `%41` an A. Bytes that are not UTF-8 are replaced, not refused.
fn decoded(text: &str) -> Cow<'_, str> {
    if !text.contains('+') {
        return percent_decode_str(text).decode_utf8_lossy();
    }
    Cow::Owned(percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned())
}

impl ApiDoor {
    /// Answers a call of a proxy. A request of its client takes one permit, times the cost of each rule.
    pub(super) async fn forward_auth<B>(
        &self,
        call: Call<'_>,
        request: &Request<B>,
        peer: IpAddr,
    ) -> Response<Full<Bytes>> {
        let answer = self.decide_call(call, request, peer).await;
        let response =
            answer.unwrap_or_else(|problem| problem.counted(&self.limiter.metrics).into_response());
        match call.dialect {
            Dialect::Nginx => for_nginx(response),
            Dialect::Forwarded | Dialect::Envoy => response,
        }
    }

    async fn decide_call<B>(&self, call: Call<'_>, request: &Request<B>, peer: IpAddr) -> Answer {
        self.check_proxy(request, peer).inspect_err(|problem| self.forward_auth_log.warn(problem))?;
        let policy = self.limiter.policy();
        let reads = ReadBy { door: self, policy: &policy };
        let described = call.describe(request, &self.client_address, peer, &reads);
        let mut described = described.inspect_err(|problem| self.forward_auth_log.warn(problem))?;
        self.limiter.identify(&mut described, true);
        let mut selection = self.limiter.select(&policy, &described)?;
        // The proxy forwards an allowed request at once. So a request that would have to wait is denied.
        selection.checks.iter_mut().for_each(|check| check.wait = None);
        let verdict = self.limiter.decide(&policy, selection, &described.target()).await;
        self.refuse_closed(&verdict)?;
        respond(&policy, &verdict)
    }

    /// Refuses callers that are not trusted proxies, and web pages in a browser on this machine.
    fn check_proxy<B>(&self, request: &Request<B>, peer: IpAddr) -> Result<(), Problem> {
        let peer = canonical(peer);
        if !is_trusted(&self.client_address, peer) {
            return Err(Refused::NotAProxy.into());
        }
        if peer.is_loopback() && !request.headers().contains_key(VIA) {
            self.access.check_host(request).map_err(Problem::foreign_host_of_proxy)?;
        }
        Ok(())
    }
}

/// The answer to a decided call.
fn respond(policy: &Loaded, verdict: &PolicyVerdict) -> Answer {
    let status = status_of(verdict);
    let mut response = match verdict.outcome() {
        PolicyOutcome::Admitted { .. } => empty_response(),
        PolicyOutcome::Denied { by } => {
            let mut response = json_response(&Denial::new(verdict.verdicts[by].as_ref(), status));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
            response
        }
        PolicyOutcome::Refused(refusal) => {
            let (_, code, message) = refused(refusal);
            return Err(Problem::refusal(status, code, message));
        }
    };
    *response.status_mut() = status;
    verdict_headers(response.headers_mut(), policy, verdict);
    Ok(response)
}

fn empty_response() -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The answer in statuses that nginx passes on. A header keeps the true one, by which nginx can tell a denial from a failure.
fn for_nginx(mut response: Response<Full<Bytes>>) -> Response<Full<Bytes>> {
    let status = response.status();
    response.headers_mut().insert(X_TOLLGATE_STATUS, HeaderValue::from(status.as_u16()));
    if !status.is_success() && status != StatusCode::UNAUTHORIZED {
        *response.status_mut() = StatusCode::FORBIDDEN;
    }
    response
}

/// A request of a proxy's client that was denied. It cost no permit.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Denial {
    /// The kind of problem: a URI.
    r#type: &'static str,
    /// The name of the status.
    title: &'static str,
    /// The status.
    status: u16,
    /// The denial, for programs.
    code: &'static str,
    /// The denial in words.
    message: String,
    /// The limit.
    limit: u64,
    /// Whole permits left of it, rounded down.
    remaining: u64,
    /// When it is full, or its window ends.
    reset_at: String,
    /// Seconds until the permits fit, rounded up; 0 if they never do.
    retry_after_seconds: u64,
}

impl Denial {
    /// The denial by a limit, whose verdict is known for every denial.
    fn new(verdict: Option<&Verdict>, status: StatusCode) -> Self {
        let decision = verdict.map(|verdict| &verdict.decision);
        let retry_after_seconds = decision.map_or(0, |it| it.outcome.retry().as_secs_ceil());
        let message = match retry_after_seconds {
            0 => "Rate limit exceeded.".to_owned(),
            1 => "Rate limit exceeded. Please retry after 1 second.".to_owned(),
            seconds => format!("Rate limit exceeded. Please retry after {seconds} seconds."),
        };
        let reset_secs = decision.map_or(0, |it| it.at.after(it.reset).as_secs_ceil());
        let reset_at = jiff::Timestamp::from_second(i64::try_from(reset_secs).unwrap_or(i64::MAX));
        Self {
            r#type: QUOTA_EXCEEDED,
            title: status.canonical_reason().unwrap_or("Error"),
            status: status.as_u16(),
            code: "TOO_MANY_REQUESTS",
            message,
            limit: decision.map_or(0, |it| it.limit),
            remaining: decision.map_or(0, |it| it.remaining),
            // Times beyond the year 9999 have no such text.
            reset_at: reset_at.unwrap_or(jiff::Timestamp::MAX).to_string(),
            retry_after_seconds,
        }
    }
}

/// Logs refused calls, at most once a second: each request of each client makes a call.
pub(crate) struct ForwardAuthLog {
    zero: Instant,
    /// Milliseconds after `zero` before which no line is written.
    next_ms: AtomicU64,
}

/// The time between two lines.
const LOG_EVERY: Duration = Duration::from_secs(1);

impl ForwardAuthLog {
    pub(crate) fn new() -> Self {
        Self { zero: Instant::now(), next_ms: AtomicU64::new(0) }
    }

    fn warn(&self, problem: &Problem) {
        if problem.is_refusal() && self.is_due(self.zero.elapsed()) {
            tracing::warn!(
                problem = problem.detail(),
                "a forward-auth call is refused: docs/proxies.md says what the proxy must send"
            );
        }
    }

    /// Whether a line may be written now. Of several threads, one is told so.
    fn is_due(&self, now: Duration) -> bool {
        let now_ms = now.as_millis() as u64;
        let next_ms = self.next_ms.load(Ordering::Relaxed);
        let later_ms = now_ms + LOG_EVERY.as_millis() as u64;
        now_ms >= next_ms
            && self.next_ms.compare_exchange(next_ms, later_ms, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests;
