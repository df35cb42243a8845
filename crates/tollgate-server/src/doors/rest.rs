//! The plain REST API: check, remaining and reset of one key by one of the five algorithms.

pub(super) mod answer;
mod ask;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use serde_json::Value;
use serde_json::value::RawValue;
use tollgate::{AlgorithmName, Ask, Basis, Clock, Limiter, Verdict};

use self::answer::{CheckAnswer, check_response, json_response, remaining_response, reset_response};
use self::ask::{Asked, from_json, from_query};
use super::admin::Admin;
use super::body::{self, BodyMemory, Buffered};
use super::pace::Pace;
use super::problem::Problem;
use super::{json, openapi};
use crate::access::{Access, LOCAL_ADMIN, Refused};
use crate::address::client;
use crate::config::ClientAddress;
use crate::identity::IdentityConfig;
use crate::live::LivePolicy;
use crate::loopback::{LoopbackCheck, is_forwarded};
use crate::metrics::SharedMetrics;
use crate::serve::Door;

/// Bytes of a body with one check.
const BODY_BYTES_MAX: usize = 16 * 1024;
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

impl Door for Rest {
    async fn answer(&self, request: Request<Incoming>, peer: IpAddr) -> Response<Full<Bytes>> {
        let answer = self.route(request, peer).await;
        answer.unwrap_or_else(|problem| problem.counted(&self.metrics).into_response())
    }
}

impl Rest {
    async fn route(&self, request: Request<Incoming>, peer: IpAddr) -> Answer {
        if let Some(loopback) = &self.loopback {
            loopback.check(&request)?;
        }
        if request.uri().path().starts_with("/api/") {
            self.access.check_token(request.headers())?;
        }
        match (request.uri().path(), request.method()) {
            ("/api/v1/rate-limit/check", &Method::GET) => {
                self.check(&request, peer, from_query(&request)?).await
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
                let (head, body) = self.described(request, peer, BODY_BYTES_MAX).await?;
                self.check_policy(peer, &head.headers, &json::parse(&body)?).await
            }
            ("/api/v1/check/batch", &Method::POST) => {
                let (head, body) = self.described(request, peer, BATCH_BYTES_MAX).await?;
                self.check_policy_batch(peer, &head.headers, &json::batch(&body)?).await
            }
            ("/api/v1/explain", &Method::POST) => {
                let (head, body) = self.described(request, peer, BODY_BYTES_MAX).await?;
                let explained = self.explain_policy(peer, &head.headers, &json::parse(&body)?).await?;
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
    async fn admin_page(&self, request: Request<Incoming>) -> Answer {
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

    async fn check<B: Sync>(&self, request: &Request<B>, peer: IpAddr, asked: Asked<'_>) -> Answer {
        let key = self.key_of(request, peer, &asked)?;
        let limiter = self.limiter(&asked)?;
        let verdict = self.decide(limiter, &key, asked.ask()).await;
        if verdict.basis == Basis::Closed && self.closed_status == 503 {
            return Err(Problem::closed());
        }
        Ok(check_response(&key, limiter, &verdict))
    }

    async fn check_post(&self, request: Request<Incoming>, peer: IpAddr) -> Answer {
        let (head, body) = request.into_parts();
        let body = self.read(body, BODY_BYTES_MAX).await?;
        let body = json::parse(&body)?;
        self.check(&Request::from_parts(head, ()), peer, from_json(&body)?).await
    }

    /// The body that describes a request, by a caller who may say who somebody else is.
    async fn described(
        &self,
        request: Request<Incoming>,
        peer: IpAddr,
        most: usize,
    ) -> Result<(Parts, Buffered<'_>), Problem> {
        self.authorize(&request, peer)?;
        let (head, body) = request.into_parts();
        let body = self.read(body, most).await?;
        Ok((head, body))
    }

    /// Independent checks, decided in order. A mistake in any of them is found before the first one is decided.
    async fn check_batch(&self, request: Request<Incoming>, peer: IpAddr) -> Answer {
        let (head, body) = request.into_parts();
        let body = self.read(body, BATCH_BYTES_MAX).await?;
        let request = Request::from_parts(head, ());
        let pace = Pace::new();
        let pace = &pace;
        let answers = pace.keep(async {
            let items = json_items(pace, &json::batch(&body)?).await?;
            let mut asked = Vec::with_capacity(items.len());
            for (index, item) in items.iter().enumerate() {
                let in_item = |problem: Problem| problem.in_item(index);
                let ask = from_json(item).map_err(in_item)?;
                self.limiter(&ask).map_err(in_item)?;
                asked.push(ask);
            }
            let key_of =
                |(index, ask)| self.key_of(&request, peer, ask).map_err(|problem| problem.in_item(index));
            let keys: Vec<_> = asked.iter().enumerate().map(key_of).collect::<Result<_, _>>()?;
            let mut checks = Vec::with_capacity(asked.len());
            for (key, ask) in keys.iter().zip(&asked) {
                let limiter = self.limiter(ask)?;
                checks.push(async move {
                    let verdict = self.decide(limiter, key, ask.ask()).await;
                    let answer = CheckAnswer::new(key, limiter, &verdict);
                    // Texts and numbers: this does not fail.
                    serde_json::to_string(&answer).unwrap_or_default()
                });
            }
            // All at once: a store is asked about different keys together, and about the same one in this order.
            Ok::<_, Problem>(pace.all(checks.into_iter()).await)
        });
        Ok(json_response(format!("[{}]", answers.await?.join(",")).into_bytes()))
    }

    async fn remaining(&self, request: &Request<Incoming>, peer: IpAddr) -> Answer {
        let (key, limiter) = self.named(request, peer)?;
        let verdict = limiter.peek(&key, Ask::of(0)).await;
        if verdict.basis == Basis::Closed {
            return Err(Problem::closed());
        }
        Ok(remaining_response(&key, limiter, &verdict))
    }

    async fn reset(&self, request: &Request<Incoming>, peer: IpAddr) -> Answer {
        let (key, limiter) = self.named(request, peer)?;
        limiter.reset(&key).await.map_err(|_| Problem::not_done("the limit was not reset"))?;
        tracing::info!(%key, algorithm = %limiter.limit().algorithm(), "limit reset");
        Ok(reset_response(&key, limiter))
    }

    /// The key and the limiter that are named by a caller who may name them.
    fn named(&self, request: &Request<Incoming>, peer: IpAddr) -> Result<(String, &Limiter), Problem> {
        self.authorize(request, peer)?;
        let asked = from_query(request)?;
        asked.only(&["algorithm", "key"])?;
        Ok((self.key_of(request, peer, &asked)?.into_owned(), self.limiter(&asked)?))
    }

    fn authorize<B>(&self, request: &Request<B>, peer: IpAddr) -> Result<(), Problem> {
        match self.may_name_keys(request, peer) {
            true => Ok(()),
            false => Err(Refused::KeyNotAllowed.into()),
        }
    }

    fn may_name_keys<B>(&self, request: &Request<B>, peer: IpAddr) -> bool {
        self.access.may_name_keys(peer, request.headers(), &self.client_address)
    }

    /// The key that was named, if the caller may name one; without one, the caller's own address.
    fn key_of<'a, B>(
        &self,
        request: &Request<B>,
        peer: IpAddr,
        asked: &'a Asked<'_>,
    ) -> Result<std::borrow::Cow<'a, str>, Problem> {
        match &asked.key {
            Some(key) if self.may_name_keys(request, peer) => Ok(key.as_ref().into()),
            Some(_) => Err(Problem::key_not_allowed()),
            None => Ok(format!("ip:{}", client(&self.client_address, peer, request.headers())).into()),
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

    async fn read(&self, body: Incoming, most: usize) -> Result<Buffered<'_>, Problem> {
        body::read(body, most, self.body_timeout, &self.body_memory).await
    }
}

/// Reads the checks of a batch.
pub(super) async fn json_items(pace: &Pace, items: &[&RawValue]) -> Result<Vec<Value>, Problem> {
    let mut values = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        pace.turn().await;
        values.push(json::parse(item.get().as_bytes()).map_err(|problem| problem.in_item(index))?);
    }
    Ok(values)
}
