//! HTTP: the REST API, health and metrics, and the admin pages.

mod actuator;
mod admin;
mod answer;
mod body;
mod caller;
mod checks;
mod forward_auth;
mod host;
mod input;
mod openapi;
mod pace;
mod problem;
mod routes;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tracing::{Instrument, Level, Span};

pub(crate) use self::actuator::Actuator;
pub(crate) use self::admin::{Admin, AdminDoor};
pub(crate) use self::body::BodyMemory;
use self::body::{Buffered, Payer};
use self::caller::Caller;
use self::forward_auth::Call;
pub(crate) use self::forward_auth::ForwardAuthLog;
pub(crate) use self::host::refuse as refuse_host;
pub(crate) use self::openapi::document as openapi_document;
use self::problem::Problem;
use self::routes::{Audience, Operation, Routed, route};
use crate::access::{Access, LOCAL_ADMIN, Refused};
use crate::config::ClientAddress;
use crate::limiter::Limiter;
use crate::loopback::{LoopbackCheck, is_forwarded};
use crate::serve::{Door, Received};

/// Bytes of a body with one check, and of every body of a caller who may not name keys.
const BODY_BYTES_MAX: usize = 16 * 1024;
/// Bytes of a body with many checks.
const BATCH_BYTES_MAX: usize = 1024 * 1024;
/// Bytes of a request's id in the log.
const REQUEST_ID_BYTES_MAX: usize = 64;

/// The API port: checks and health; on loopback without tokens also the pages of the admin port.
pub(crate) struct ApiDoor {
    pub(crate) limiter: Arc<Limiter>,
    pub(crate) access: Access,
    pub(crate) client_address: ClientAddress,
    /// For a loopback listener without tokens.
    pub(crate) loopback: Option<LoopbackCheck>,
    pub(crate) body_timeout: Duration,
    pub(crate) body_memory: Arc<BodyMemory>,
    /// The status of a check that is refused because the store does not decide: 503 or 429.
    pub(crate) closed_status: u16,
    pub(crate) forward_auth_log: ForwardAuthLog,
    pub(crate) admin: Arc<Admin>,
    /// Whether all pages of the admin port are here, too.
    pub(crate) has_admin_pages: bool,
    /// The OpenAPI document.
    pub(crate) openapi: Bytes,
}

type Answer = Result<Response<Full<Bytes>>, Problem>;

impl Door for ApiDoor {
    async fn answer(&self, request: Request<Received>, peer: IpAddr) -> Response<Full<Bytes>> {
        let span = request_span(&request);
        let answer = self.route(request, peer).instrument(span).await;
        answer.unwrap_or_else(|problem| problem.counted(&self.limiter.metrics).into_response())
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

impl ApiDoor {
    async fn route(&self, request: Request<Received>, peer: IpAddr) -> Answer {
        let path = request.uri().path().to_owned();
        if let Some(call) = Call::of(&path) {
            return Ok(self.forward_auth(call, &request, peer).await);
        }
        if let Some(loopback) = &self.loopback {
            loopback.check(&request)?;
        }
        if path.starts_with("/api/") {
            self.access.check_token(request.headers())?;
        }
        let routed = route(request.method(), &path)?;
        match routed.operation.audience() {
            Audience::Clients => self.answer_client(routed.operation, request, peer).await,
            Audience::Probes => Ok(self.admin.actuator.bare_health(routed.operation)),
            Audience::Readers | Audience::Admins => self.admin_page(routed, request).await,
        }
    }

    async fn answer_client(&self, operation: Operation, request: Request<Received>, peer: IpAddr) -> Answer {
        let caller = Caller::new(&request, peer, &self.access, &self.client_address);
        match operation {
            Operation::Check => self.check(caller, input::parse_query(request.uri().query())?).await,
            Operation::CheckPost => {
                let body = self.read(request, BODY_BYTES_MAX, caller).await?;
                self.check(caller, input::parse(&body)?).await
            }
            Operation::CheckBatch => {
                let body = self.read(request, BATCH_BYTES_MAX, caller).await?;
                self.check_batch(caller, &body).await
            }
            Operation::Remaining => self.remaining(caller, &request).await,
            Operation::Reset => self.reset(caller, &request).await,
            Operation::PolicyCheck => {
                let body = self.read_authorized(request, BODY_BYTES_MAX, caller).await?;
                self.check_request(caller, &body).await
            }
            Operation::PolicyCheckBatch => {
                let body = self.read_authorized(request, BATCH_BYTES_MAX, caller).await?;
                self.check_request_batch(caller, &body).await
            }
            Operation::Explain => {
                let body = self.read_authorized(request, BODY_BYTES_MAX, caller).await?;
                self.explain(caller, &body).await
            }
            _ => Ok(answer::json_bytes(self.openapi.clone())),
        }
    }

    /// A page of the admin port, for callers on this machine.
    async fn admin_page(&self, routed: Routed<'_>, request: Request<Received>) -> Answer {
        if !self.has_admin_pages {
            return Err(Problem::new(StatusCode::NOT_FOUND, "this page is on the admin port (admin.listen)"));
        }
        if is_forwarded(request.headers()) {
            return Err(Refused::Forwarded.into());
        }
        match routed.operation.audience() {
            Audience::Admins => self.admin.change(routed, request, LOCAL_ADMIN).await,
            _ => self.admin.actuator.show(routed.operation, request.headers()).await,
        }
    }

    /// The body of a caller who may say who somebody else is.
    async fn read_authorized(
        &self,
        request: Request<Received>,
        most: usize,
        caller: Caller,
    ) -> Result<Buffered<'_>, Problem> {
        caller.authorize()?;
        self.read(request, most, caller).await
    }

    async fn read(
        &self,
        request: Request<Received>,
        most: usize,
        caller: Caller,
    ) -> Result<Buffered<'_>, Problem> {
        let (body, within) = (request.into_body(), self.body_timeout);
        if caller.authorize().is_ok() {
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
