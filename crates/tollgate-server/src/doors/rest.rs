//! The plain REST API: check, remaining and reset of one key by one of the five algorithms.

pub(super) mod answer;
mod ask;

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use tollgate::{AlgorithmName, Ask, Basis, Clock, Limiter, Verdict};
use tracing::{Instrument, Level, Span};

use self::answer::{CheckAnswer, check_response, json_response, remaining_response, reset_response};
use self::ask::{Asked, from_json, from_query};
use super::admin::Admin;
use super::body::{BodyMemory, Buffered, Payer};
use super::pace::Pace;
use super::problem::Problem;
use super::{json, openapi};
use crate::access::{Access, LOCAL_ADMIN, Refused};
use crate::address::{Client, client};
use crate::config::ClientAddress;
use crate::identity::IdentityConfig;
use crate::live::LivePolicy;
use crate::loopback::{LoopbackCheck, is_forwarded};
use crate::metrics::SharedMetrics;
use crate::serve::{Door, Received};

/// Bytes of a body with one check, and of every body of a caller who may not name keys.
const BODY_BYTES_MAX: usize = 16 * 1024;
/// Bytes of a request's id in the log.
const REQUEST_ID_BYTES_MAX: usize = 64;
/// Bytes of a body with many checks.
const BATCH_BYTES_MAX: usize = 1024 * 1024;

/// The API and the health of the node; on loopback without tokens also the pages of the admin port.
pub(crate) struct Rest {
    /// By algorithm.
    pub(crate) limiters: Vec<Limiter>,
    pub(crate) policy: Arc<LivePolicy>,
    pub(crate) identity: Arc<IdentityConfig>,
    /// By which tokens are valid or not.
    pub(crate) clock: Clock,
    pub(crate) access: Access,
    pub(crate) client_address: ClientAddress,
    /// For a loopback listener without tokens.
    pub(crate) loopback: Option<LoopbackCheck>,
    pub(crate) body_timeout: Duration,
    pub(crate) body_memory: Arc<BodyMemory>,
    /// Of a check that is refused because the store does not decide: 503 or 429.
    pub(crate) closed_status: u16,
    pub(crate) metrics: SharedMetrics,
    pub(crate) admin: Arc<Admin>,
    /// Whether all pages of the admin port are here, too.
    pub(crate) has_admin_pages: bool,
}

type Answer = Result<Response<Full<Bytes>>, Problem>;

/// Who sent a request, found out once from its head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    pub(super) client: Client,
    may_name_keys: bool,
}

impl Caller {
    fn authorize(&self) -> Result<(), Problem> {
        match self.may_name_keys {
            true => Ok(()),
            false => Err(Refused::KeyNotAllowed.into()),
        }
    }

    /// The key that was named, if the caller may name one; without one, the caller's own address.
    fn key<'a>(&self, asked: &'a Asked<'_>) -> Result<Cow<'a, str>, Problem> {
        match &asked.key {
            Some(key) if self.may_name_keys => Ok(key.as_ref().into()),
            Some(_) => Err(Problem::key_not_allowed()),
            None => Ok(format!("ip:{}", self.client).into()),
        }
    }
}

impl Door for Rest {
    async fn answer(&self, request: Request<Received>, peer: IpAddr) -> Response<Full<Bytes>> {
        let span = request_span(&request);
        let answer = self.route(request, peer).instrument(span).await;
        answer.unwrap_or_else(|problem| problem.counted(&self.metrics).into_response())
    }
}

/// A span that adds the request's id to its log lines. Only for debug lines, so that other requests are not searched for an id.
fn request_span<B>(request: &Request<B>) -> Span {
    if !tracing::enabled!(Level::DEBUG) {
        return Span::none();
    }
    let id = request.headers().get("x-request-id").and_then(|id| id.to_str().ok());
    tracing::debug_span!("request", id = id.map(|id| &id[..id.len().min(REQUEST_ID_BYTES_MAX)]))
}

impl Rest {
    async fn route(&self, request: Request<Received>, peer: IpAddr) -> Answer {
        if let Some(loopback) = &self.loopback {
            loopback.check(&request)?;
        }
        if request.uri().path().starts_with("/api/") {
            self.access.check_token(request.headers())?;
        }
        match (request.uri().path(), request.method()) {
            ("/api/v1/rate-limit/check", &Method::GET) => {
                self.check(self.caller(&request, peer), from_query(&request)?).await
            }
            ("/api/v1/rate-limit/check", &Method::POST) => self.check_post(request, peer).await,
            ("/api/v1/rate-limit/check", _) => Err(Problem::method("GET, POST")),
            ("/api/v1/rate-limit/check/batch", &Method::POST) => self.check_batch(request, peer).await,
            ("/api/v1/rate-limit/check/batch", _) => Err(Problem::method("POST")),
            ("/api/v1/rate-limit/remaining", &Method::GET) => self.remaining(&request, peer).await,
            ("/api/v1/rate-limit/remaining", _) => Err(Problem::method("GET")),
            ("/api/v1/rate-limit/reset", &Method::DELETE) => self.reset(&request, peer).await,
            ("/api/v1/rate-limit/reset", _) => Err(Problem::method("DELETE")),
            ("/api/v1/check", &Method::POST) => {
                let (caller, body) = self.described(request, peer, BODY_BYTES_MAX).await?;
                self.check_policy(caller, &body).await
            }
            ("/api/v1/check/batch", &Method::POST) => {
                let (caller, body) = self.described(request, peer, BATCH_BYTES_MAX).await?;
                self.check_policy_batch(caller, &json::batch(&body)?).await
            }
            ("/api/v1/explain", &Method::POST) => {
                let (caller, body) = self.described(request, peer, BODY_BYTES_MAX).await?;
                let explained = self.explain_policy(caller, &body).await?;
                Ok(json_response(explained.to_string().into_bytes()))
            }
            ("/api/v1/check" | "/api/v1/check/batch" | "/api/v1/explain", _) => Err(Problem::method("POST")),
            ("/openapi.json", &Method::GET) => {
                Ok(json_response(openapi::document().to_string().into_bytes()))
            }
            ("/openapi.json", _) => Err(Problem::method("GET")),
            (path, method) => match self.admin.actuator.bare_health(method, path) {
                Some(health) => Ok(health),
                None if Admin::knows(path) => self.admin_page(request).await,
                None => Err(Problem::new(
                    StatusCode::NOT_FOUND,
                    "no such path; /openapi.json lists what there is",
                )),
            },
        }
    }

    /// A page of the admin port, for callers on this machine.
    async fn admin_page(&self, request: Request<Received>) -> Answer {
        if !self.has_admin_pages {
            return Err(Problem::new(StatusCode::NOT_FOUND, "this page is on the admin port (admin.listen)"));
        }
        if is_forwarded(request.headers()) {
            return Err(Refused::Forwarded.into());
        }
        match Admin::is_admin(request.uri().path()) {
            true => self.admin.change(request, LOCAL_ADMIN).await,
            false => Ok(self.admin.show(&request).await),
        }
    }

    async fn check(&self, caller: Caller, asked: Asked<'_>) -> Answer {
        let key = caller.key(&asked)?;
        let limiter = self.limiter(&asked)?;
        let verdict = self.decide(limiter, &key, asked.ask()).await;
        if verdict.basis == Basis::Closed && self.closed_status == 503 {
            return Err(Problem::closed());
        }
        Ok(check_response(&key, limiter, &verdict))
    }

    async fn check_post(&self, request: Request<Received>, peer: IpAddr) -> Answer {
        let caller = self.caller(&request, peer);
        let body = self.read(request, BODY_BYTES_MAX, caller).await?;
        self.check(caller, from_json(&json::parse(&body)?)?).await
    }

    /// The body that describes a request, by a caller who may say who somebody else is.
    async fn described(
        &self,
        request: Request<Received>,
        peer: IpAddr,
        most: usize,
    ) -> Result<(Caller, Buffered<'_>), Problem> {
        let caller = self.caller(&request, peer);
        caller.authorize()?;
        Ok((caller, self.read(request, most, caller).await?))
    }

    /// Independent checks, decided in order. The answer to one that cannot be decided is its problem, and the others are decided. A key
    /// that the caller may not name is a mistake of the caller, not of one of its clients: nothing is decided then.
    async fn check_batch(&self, request: Request<Received>, peer: IpAddr) -> Answer {
        let caller = self.caller(&request, peer);
        let body = self.read(request, BATCH_BYTES_MAX, caller).await?;
        let pace = Pace::new();
        let pace = &pace;
        let answers = pace.keep(async {
            let items = json::batch(&body)?;
            let mut checks = Vec::with_capacity(items.len());
            for (index, item) in items.iter().enumerate() {
                pace.turn().await;
                // Each is read and let go before the next one: values in memory are many times as large as their text.
                let asked = json::parse(item.get().as_bytes())
                    .and_then(|item| from_json(&item).map(Asked::into_owned));
                if let Ok(Asked { key: Some(_), .. }) = &asked
                    && !caller.may_name_keys
                {
                    return Err(Problem::key_not_allowed().in_item(index));
                }
                checks.push(asked.and_then(|asked| self.limiter(&asked).map(|limiter| (limiter, asked))));
            }
            let own_key = format!("ip:{}", caller.client);
            let own_key = own_key.as_str();
            let checks = checks.iter().map(|check| async move {
                match check {
                    Ok((limiter, asked)) => {
                        let key = asked.key.as_deref().unwrap_or(own_key);
                        let verdict = self.decide(limiter, key, asked.ask()).await;
                        // Texts and numbers: this does not fail.
                        serde_json::to_vec(&CheckAnswer::new(key, limiter, &verdict)).unwrap_or_default()
                    }
                    Err(problem) => problem.to_json(),
                }
            });
            // All at once: a store is asked about different keys together, and about the same one in this order.
            Ok(pace.all(checks).await)
        });
        Ok(json_response(json::list(&answers.await?)))
    }

    async fn remaining(&self, request: &Request<Received>, peer: IpAddr) -> Answer {
        let (key, limiter) = self.named(request, peer)?;
        let verdict = limiter.peek(&key, Ask::of(0)).await;
        if verdict.basis == Basis::Closed {
            return Err(Problem::closed());
        }
        Ok(remaining_response(&key, limiter, &verdict))
    }

    async fn reset(&self, request: &Request<Received>, peer: IpAddr) -> Answer {
        let (key, limiter) = self.named(request, peer)?;
        limiter.reset(&key).await.map_err(|_| Problem::not_done("the limit was not reset"))?;
        tracing::info!(%key, algorithm = %limiter.limit().algorithm(), "limit reset");
        Ok(reset_response(&key, limiter))
    }

    /// The key and the limiter that are named by a caller who may name them.
    fn named(&self, request: &Request<Received>, peer: IpAddr) -> Result<(String, &Limiter), Problem> {
        let caller = self.caller(request, peer);
        caller.authorize()?;
        let asked = from_query(request)?;
        asked.only(&["algorithm", "key"])?;
        Ok((caller.key(&asked)?.into_owned(), self.limiter(&asked)?))
    }

    fn caller<B>(&self, request: &Request<B>, peer: IpAddr) -> Caller {
        let (headers, proxies) = (request.headers(), &self.client_address);
        Caller {
            client: client(proxies, peer, headers),
            may_name_keys: self.access.may_name_keys(peer, headers, proxies),
        }
    }

    /// The limiter of the algorithm that was asked for, if it can ever admit what was asked.
    fn limiter(&self, asked: &Asked<'_>) -> Result<&Limiter, Problem> {
        let limiter = &self.limiters[asked.algorithm.unwrap_or(AlgorithmName::TokenBucket) as usize];
        let most = limiter.limit().size();
        if asked.ask().cost > most {
            return Err(Problem::exceeds_limit(most, "the limit"));
        }
        Ok(limiter)
    }

    async fn decide(&self, limiter: &Limiter, key: &str, ask: Ask) -> Verdict {
        let algorithm = limiter.limit().algorithm();
        let start = Instant::now();
        let verdict = limiter.acquire(key, ask).await;
        self.metrics.checked(algorithm, &verdict, start.elapsed());
        let (allowed, remaining) = (verdict.is_admitted(), verdict.decision.remaining);
        tracing::debug!(key, %algorithm, allowed, remaining, basis = verdict.basis.as_str(), "checked");
        verdict
    }

    async fn read(
        &self,
        request: Request<Received>,
        most: usize,
        caller: Caller,
    ) -> Result<Buffered<'_>, Problem> {
        let (body, within) = (request.into_body(), self.body_timeout);
        if caller.may_name_keys {
            return self.body_memory.read(body, most, within, Payer::Trusted).await;
        }
        let payer = Payer::Client(caller.client.network());
        let read = self.body_memory.read(body, most.min(BODY_BYTES_MAX), within, payer).await;
        read.map_err(|problem| match problem.status() {
            StatusCode::PAYLOAD_TOO_LARGE if most > BODY_BYTES_MAX => Problem::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!(
                    "the body may have at most {BODY_BYTES_MAX} bytes; up to {most} with a token of api.token_file or from a caller \
                     in api.trusted_callers"
                ),
            ),
            _ => problem,
        })
    }
}
