//! `/actuator/*`: health, info and metrics, for operators and probes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use schemars::JsonSchema;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tollgate::{Engine, ServerStatus};

use super::Answer;
use super::admin::{PolicySummary, RefusedAnswer};
use super::answer::{json_bytes, json_response};
use super::problem::Problem;
use super::routes::Operation;
use crate::live::LivePolicy;
use crate::metrics::{SharedMetrics, without_openmetrics};

/// Answers about the service itself.
pub(crate) struct Actuator {
    metrics: SharedMetrics,
    engine: Engine,
    /// Its address, without secrets.
    store: String,
    policy: Arc<LivePolicy>,
    started: Instant,
    stop: CancellationToken,
}

impl Actuator {
    pub(crate) fn new(
        metrics: SharedMetrics,
        engine: Engine,
        store: String,
        policy: Arc<LivePolicy>,
        stop: CancellationToken,
    ) -> Self {
        Self { metrics, engine, store, policy, started: Instant::now(), stop }
    }

    /// A health page as every client may see it: without details.
    pub(super) fn bare_health(&self, operation: Operation) -> Response<Full<Bytes>> {
        // A node that is told to stop is still alive: killing it would cut requests off.
        let is_in_service = operation == Operation::Liveness || !self.stop.is_cancelled();
        health_response(is_in_service, &Health::new(is_in_service))
    }

    /// A page that shows something.
    pub(super) async fn show(&self, operation: Operation, headers: &HeaderMap) -> Answer {
        match operation {
            Operation::Health => Ok(self.health()),
            Operation::Info => Ok(json_response(&self.info())),
            Operation::Prometheus => self.prometheus(headers).await,
            _ => Ok(self.bare_health(operation)),
        }
    }

    /// Health with details. The node answers by its contract, whether or not the store does; it is down only when it is about to stop.
    fn health(&self) -> Response<Full<Bytes>> {
        let is_in_service = !self.stop.is_cancelled();
        let store = self.store();
        let refused_change = self.policy.refused().map(RefusedAnswer::from);
        let warnings = store.warnings.clone();
        let health = Health { warnings, store: Some(store), refused_change, ..Health::new(is_in_service) };
        health_response(is_in_service, &health)
    }

    fn info(&self) -> Info<'_> {
        Info {
            app: AppInfo { name: "tollgate", version: env!("CARGO_PKG_VERSION") },
            store: self.store(),
            policy: PolicySummary::new(&self.policy, &self.policy.current()),
            uptime_seconds: self.started.elapsed().as_secs(),
        }
    }

    fn store(&self) -> StoreHealth<'_> {
        let up = StoreHealth { address: &self.store, status: "UP", ..StoreHealth::default() };
        let Engine::Shared(shared) = &self.engine else { return up };
        let engine = shared.redis();
        let error = shared.health().err().map(|why| why.to_string());
        let servers = engine.servers();
        StoreHealth {
            status: if error.is_some() { "DOWN" } else { "UP" },
            error,
            recent_failures: engine.recent_failures().iter().map(ToString::to_string).collect(),
            warnings: warnings(&servers),
            breakers: servers.into_iter().map(|it| (it.server.to_string(), it.breaker.as_str())).collect(),
            nodes: engine.nodes(),
            ..up
        }
    }

    async fn prometheus(&self, headers: &HeaderMap) -> Answer {
        let accepts = |kind: &str| {
            headers.get_all(ACCEPT).iter().any(|value| value.to_str().is_ok_and(|it| it.contains(kind)))
        };
        let is_openmetrics = accepts("application/openmetrics-text");
        let metrics = Arc::clone(&self.metrics);
        // The series of thousands of rules are megabytes: no request waits while they are written.
        let written = tokio::task::spawn_blocking(move || {
            let written = metrics.encode()?;
            Ok::<_, std::fmt::Error>(if is_openmetrics { written } else { without_openmetrics(&written) })
        });
        let Ok(Ok(written)) = written.await else {
            return Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be written"));
        };
        let kind = match is_openmetrics {
            true => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            false => "text/plain; version=0.0.4; charset=utf-8",
        };
        let mut response = json_bytes(Bytes::from(written));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        Ok(response)
    }
}

/// The health of a node.
#[derive(Serialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub(super) struct Health<'a> {
    /// `UP`, or `OUT_OF_SERVICE` while the node stops.
    status: &'static str,
    /// Settings of the store that put limits at risk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(default)]
    warnings: Vec<String>,
    /// The store, with details.
    #[serde(skip_serializing_if = "Option::is_none")]
    store: Option<StoreHealth<'a>>,
    /// The last change of the policy that was refused, if none has come into force since.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused_change: Option<RefusedAnswer>,
}

impl Health<'_> {
    fn new(is_in_service: bool) -> Self {
        Self { status: if is_in_service { "UP" } else { "OUT_OF_SERVICE" }, ..Self::default() }
    }
}

/// The store.
#[derive(Serialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
struct StoreHealth<'a> {
    /// The address, without secrets.
    address: &'a str,
    /// `UP` or `DOWN`.
    status: &'static str,
    /// Why the store is down.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Calls that failed lately.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(default)]
    recent_failures: Vec<String>,
    /// Settings that put limits at risk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(default)]
    warnings: Vec<String>,
    /// The state of each server's circuit breaker.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(default)]
    breakers: BTreeMap<String, &'static str>,
    /// How many Tollgate nodes share the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    nodes: Option<u32>,
}

/// What runs, on what store, with what policy.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Info<'a> {
    /// The program.
    app: AppInfo,
    /// The store.
    store: StoreHealth<'a>,
    /// The policy in force.
    policy: PolicySummary,
    /// Seconds since the start.
    uptime_seconds: u64,
}

/// The program.
#[derive(Serialize, JsonSchema)]
struct AppInfo {
    /// `tollgate`.
    name: &'static str,
    /// The version.
    version: &'static str,
}

fn health_response(is_in_service: bool, health: &Health<'_>) -> Response<Full<Bytes>> {
    let mut response = json_response(health);
    if !is_in_service {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

/// What is wrong with the settings of the store's servers, as each told when it was last connected to.
fn warnings(servers: &[ServerStatus]) -> Vec<String> {
    let evicts = |it: &ServerStatus| {
        let (server, policy) = (&it.server, it.evicts_by.as_ref()?);
        Some(format!(
            "{server} may evict keys when its memory is full, which resets limits silently: its maxmemory-policy is {policy}, \
             not noeviction"
        ))
    };
    servers.iter().filter_map(evicts).collect()
}
