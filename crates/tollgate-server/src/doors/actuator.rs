//! `/actuator/*`: health, info and metrics, for whoever runs the service.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollgate::{Engine, ServerStatus};

use super::admin::described;
use super::problem::Problem;
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

    /// The answer to a health path as everybody may see it: without details. None for other paths.
    pub(super) fn bare_health(&self, method: &Method, path: &str) -> Option<Response<Full<Bytes>>> {
        let is_in_service = match path {
            "/actuator/health" | "/actuator/health/readiness" => !self.stop.is_cancelled(),
            // A node that is told to stop is still alive: killing it would cut requests off.
            "/actuator/health/liveness" => true,
            _ => return None,
        };
        Some(match *method {
            Method::GET | Method::HEAD => health_response(is_in_service, &status(is_in_service)),
            _ => Problem::method("GET, HEAD").into_response(),
        })
    }

    /// The answer to a path below `/actuator/`.
    pub(super) async fn route(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Response<Full<Bytes>> {
        let is_read = matches!(*method, Method::GET | Method::HEAD);
        match path {
            "/actuator/health" if is_read => self.health(),
            "/actuator/info" if is_read => self.info(),
            "/actuator/prometheus" if is_read => self.prometheus(headers).await,
            "/actuator/health" | "/actuator/info" | "/actuator/prometheus" => {
                Problem::method("GET, HEAD").into_response()
            }
            _ => {
                if let Some(health) = self.bare_health(method, path) {
                    return health;
                }
                let detail = "no such path; there are /actuator/health, /actuator/health/liveness, /actuator/health/readiness, \
                     /actuator/info and /actuator/prometheus";
                Problem::new(StatusCode::NOT_FOUND, detail).into_response()
            }
        }
    }

    /// Health with details. The node answers by its contract, whether or not the store does; it is down only when it is about to stop.
    fn health(&self) -> Response<Full<Bytes>> {
        let is_in_service = !self.stop.is_cancelled();
        let mut health = status(is_in_service);
        let store = self.store();
        if !store["warnings"].is_null() {
            health["warnings"] = store["warnings"].clone();
        }
        health["store"] = store;
        health_response(is_in_service, &health)
    }

    fn info(&self) -> Response<Full<Bytes>> {
        let info = json!({
            "app": { "name": "tollgate", "version": env!("CARGO_PKG_VERSION") },
            "store": self.store(),
            "policy": described(&self.policy, &self.policy.current()),
            "uptimeSeconds": self.started.elapsed().as_secs(),
        });
        text("application/json", info.to_string())
    }

    fn store(&self) -> Value {
        let mut store = json!({ "address": self.store, "status": "UP" });
        let Engine::Shared(shared) = &self.engine else { return store };
        let engine = shared.redis();
        if let Err(why) = shared.health() {
            store["status"] = json!("DOWN");
            store["error"] = json!(why.to_string());
        }
        let failures: Vec<_> = engine.recent_failures().iter().map(ToString::to_string).collect();
        if !failures.is_empty() {
            store["recentFailures"] = json!(failures);
        }
        let warnings = warnings(&engine.servers());
        if !warnings.is_empty() {
            store["warnings"] = json!(warnings);
        }
        let breakers = engine.servers().into_iter();
        let breakers = breakers.map(|it| (it.server.to_string(), json!(it.breaker.as_str()))).collect();
        store["breakers"] = Value::Object(breakers);
        store["nodes"] = json!(engine.nodes());
        store
    }

    async fn prometheus(&self, headers: &HeaderMap) -> Response<Full<Bytes>> {
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
            return Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be written")
                .into_response();
        };
        let kind = match is_openmetrics {
            true => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            false => "text/plain; version=0.0.4; charset=utf-8",
        };
        text(kind, written)
    }
}

fn status(is_in_service: bool) -> Value {
    json!({ "status": if is_in_service { "UP" } else { "OUT_OF_SERVICE" } })
}

fn health_response(is_in_service: bool, health: &Value) -> Response<Full<Bytes>> {
    let mut response = text("application/json", health.to_string());
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

fn text(kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
