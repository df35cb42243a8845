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

    /// The answer to a path below `/actuator/`.
    pub(super) fn route(&self, method: &Method, path: &str, headers: &HeaderMap) -> Response<Full<Bytes>> {
        let respond: fn(&Self, &HeaderMap) -> Response<Full<Bytes>> = match path {
            "/actuator/health" => Self::health,
            "/actuator/info" => Self::info,
            "/actuator/prometheus" => Self::prometheus,
            _ => {
                let detail =
                    "no such path; there are /actuator/health, /actuator/info and /actuator/prometheus";
                return Problem::new(StatusCode::NOT_FOUND, detail).into_response();
            }
        };
        match *method {
            Method::GET | Method::HEAD => respond(self, headers),
            _ => Problem::method("GET, HEAD").into_response(),
        }
    }

    /// The node answers by its contract, whether or not the store does; it is down only when it is about to stop.
    fn health(&self, _: &HeaderMap) -> Response<Full<Bytes>> {
        let stopping = self.stop.is_cancelled();
        let mut health = json!({ "status": if stopping { "OUT_OF_SERVICE" } else { "UP" } });
        let store = self.store();
        if !store["warnings"].is_null() {
            health["warnings"] = store["warnings"].clone();
        }
        if store["status"] != "UP" {
            health["store"] = store;
        }
        let mut response = text("application/json", health.to_string());
        if stopping {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        response
    }

    fn info(&self, _: &HeaderMap) -> Response<Full<Bytes>> {
        let info = json!({
            "app": { "name": "tollgate", "version": env!("CARGO_PKG_VERSION") },
            "store": self.store(),
            "policy": described(&self.policy.current()),
            "uptimeSeconds": self.started.elapsed().as_secs(),
        });
        text("application/json", info.to_string())
    }

    fn store(&self) -> Value {
        let mut store = json!({ "address": self.store, "status": "UP" });
        let Engine::Redis(guard) = &self.engine else { return store };
        let engine = guard.engine();
        if let Err(why) = engine.health() {
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

    fn prometheus(&self, headers: &HeaderMap) -> Response<Full<Bytes>> {
        let Ok(metrics) = self.metrics.encode() else {
            return Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be written")
                .into_response();
        };
        let accepts = |kind: &str| {
            headers.get_all(ACCEPT).iter().any(|value| value.to_str().is_ok_and(|it| it.contains(kind)))
        };
        if accepts("application/openmetrics-text") {
            text("application/openmetrics-text; version=1.0.0; charset=utf-8", metrics)
        } else {
            text("text/plain; version=0.0.4; charset=utf-8", without_openmetrics(&metrics))
        }
    }
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
