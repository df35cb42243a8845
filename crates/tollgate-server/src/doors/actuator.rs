//! `/actuator/*`: health, info and metrics, for whoever runs the service.

use std::net::IpAddr;
use std::time::Instant;

use bytes::Bytes;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tollgate::Engine;

use super::problem::Problem;
use crate::metrics::{SharedMetrics, without_openmetrics};
use crate::serve::Door;

/// Answers about the service itself.
pub(crate) struct Actuator {
    metrics: SharedMetrics,
    engine: Engine,
    /// Its address, without secrets.
    store: String,
    started: Instant,
}

impl Actuator {
    pub(crate) fn new(metrics: SharedMetrics, engine: Engine, store: String) -> Self {
        Self { metrics, engine, store, started: Instant::now() }
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

    fn health(&self, _: &HeaderMap) -> Response<Full<Bytes>> {
        // The node answers by its contract, whether or not the store does.
        text("application/json", r#"{"status":"UP"}"#.to_owned())
    }

    fn info(&self, _: &HeaderMap) -> Response<Full<Bytes>> {
        let info = json!({
            "app": { "name": "tollgate", "version": env!("CARGO_PKG_VERSION") },
            "store": self.store(),
            "uptimeSeconds": self.started.elapsed().as_secs(),
        });
        text("application/json", info.to_string())
    }

    fn store(&self) -> Value {
        let health = match &self.engine {
            Engine::Memory(_) => Ok(()),
            Engine::Redis(engine) => engine.health(),
        };
        let failures: Vec<String> = match &self.engine {
            Engine::Memory(_) => Vec::new(),
            Engine::Redis(engine) => engine.recent_failures().iter().map(ToString::to_string).collect(),
        };
        match health {
            Ok(()) if failures.is_empty() => json!({ "address": self.store, "status": "UP" }),
            Ok(()) => json!({ "address": self.store, "status": "UP", "recentFailures": failures }),
            Err(why) => json!({ "address": self.store, "status": "DOWN", "error": why.to_string() }),
        }
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

fn text(kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// On a listener of its own.
impl Door for Actuator {
    async fn answer(&self, request: Request<Incoming>, _: IpAddr) -> Response<Full<Bytes>> {
        self.route(request.method(), request.uri().path(), request.headers())
    }
}
