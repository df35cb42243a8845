//! gRPC: Envoy's Rate Limit Service v3, with the health and reflection services that gRPC clients expect.

mod asked;
mod message;
mod proto;
mod status;

use std::convert::Infallible;
use std::sync::Arc;

use anyhow::{Context, Result};
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tokio_util::sync::CancellationToken;
use tollgate::PolicyVerdict;
use tonic::Status;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};
use tonic_reflection::server::v1::{ServerReflection, ServerReflectionServer};
use tower_service::Service;

use self::asked::{Asked, Hits};
use self::message::{MessageMemory, Reply};
use self::proto::{RateLimitRequest, RateLimitResponse};
use crate::access::{Access, Refused};
use crate::limiter::{Limiter, Part};
use crate::request::Target;
use crate::serve::{Connection, Http2Door};

/// The name of the service, in health checks too.
const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Bytes of a message to the health and reflection services: names of services and of types.
const QUESTION_BYTES_MAX: usize = 4 * 1024;

/// The gRPC port.
pub(crate) struct RlsDoor<R> {
    limiter: Arc<Limiter>,
    access: Access,
    memory: MessageMemory,
    health: HealthServer<HealthService>,
    reflection: ServerReflectionServer<R>,
}

/// Makes the gRPC port, and what tells it that the service stops. `memory_bytes` is for the messages of all calls together.
pub(crate) fn door(
    limiter: Arc<Limiter>,
    access: Access,
    memory_bytes: usize,
) -> Result<(RlsDoor<impl ServerReflection>, HealthReporter)> {
    let reporter = HealthReporter::new();
    let health = HealthServer::new(HealthService::from_health_reporter(reporter.clone()));
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .context("the descriptions of the gRPC services cannot be read")?;
    let door = RlsDoor {
        limiter,
        access,
        memory: MessageMemory::new(memory_bytes),
        health: health.max_decoding_message_size(QUESTION_BYTES_MAX),
        reflection: reflection.max_decoding_message_size(QUESTION_BYTES_MAX),
    };
    Ok((door, reporter))
}

/// Reports the health: serving until the service is told to stop.
pub(crate) async fn report_health(reporter: HealthReporter, stop: CancellationToken) {
    reporter.set_service_status(SERVICE, ServingStatus::Serving).await;
    stop.cancelled().await;
    for service in ["", SERVICE] {
        reporter.set_service_status(service, ServingStatus::NotServing).await;
    }
}

impl<R: ServerReflection> Http2Door for RlsDoor<R> {
    type ResponseBody = Reply;

    async fn answer(&self, request: Request<Incoming>, connection: &Connection) -> Response<Reply> {
        let answer: Result<_, Infallible> = match request.uri().path() {
            SHOULD_RATE_LIMIT => {
                let answered = self.should_rate_limit(request, connection).await;
                return answered.map_or_else(Status::into_http, |answer| message::response(&answer));
            }
            path if path.starts_with("/grpc.health.v1.Health/") => self.health.clone().call(request).await,
            path if path.starts_with("/grpc.reflection.v1.ServerReflection/") => {
                self.reflection.clone().call(request).await
            }
            _ => {
                let accepted = format!("no such method: expected {SHOULD_RATE_LIMIT}, health or reflection");
                return Status::unimplemented(accepted).into_http();
            }
        };
        message::streamed(answer)
    }
}

impl<R: ServerReflection> RlsDoor<R> {
    async fn should_rate_limit(
        &self,
        request: Request<Incoming>,
        connection: &Connection,
    ) -> Result<RateLimitResponse, Status> {
        self.authorize(request.headers(), connection)?;
        let (body, within) = (request.into_body(), connection.body_timeout);
        let request: RateLimitRequest = message::read(body, &self.memory, within).await?;
        let _deciding = connection.decide();
        let mut asked = self.read(&request)?;
        let verdicts = self.decide(&mut asked).await?;
        Ok(status::response(&asked, &verdicts))
    }

    /// Refuses callers that may not name keys. Envoy adds forwarding headers to its own calls, so they say nothing of the caller.
    fn authorize(&self, headers: &HeaderMap, connection: &Connection) -> Result<(), Status> {
        self.access.admit_peer(connection.peer, headers).map_err(|why| {
            self.limiter.metrics.refused(why);
            Status::unauthenticated(match why {
                Refused::WrongToken => "the token in `authorization` is not in api.token_file",
                _ => "send a token of api.token_file in `authorization` (Bearer TOKEN), or call from api.trusted_callers",
            })
        })
    }

    /// Decides on all descriptors of a call: permits are taken, and given back, for all of them or for none.
    async fn decide(&self, asked: &mut [Asked]) -> Result<Vec<Option<PolicyVerdict>>, Status> {
        let mut verdicts = vec![None; asked.len()];
        for (asked, verdict) in asked.iter().zip(&mut verdicts) {
            if let (Hits::Look, Some(part)) = (asked.hits, &asked.part) {
                *verdict = Some(self.peek(part).await);
            }
        }
        let is_over = |(asked, verdict): (&Asked, &Option<PolicyVerdict>)| match (&asked.part, verdict) {
            (None, _) => true,
            (Some(_), Some(verdict)) => !verdict.is_admitted(),
            (Some(part), None) => matches!(asked.hits, Hits::Take(_)) && part.selection.refusal.is_some(),
        };
        if !asked.iter().zip(&verdicts).any(is_over) {
            self.take(asked, &mut verdicts).await?;
        }
        // What was not decided is shown as it is.
        for (asked, verdict) in asked.iter().zip(&mut verdicts) {
            if let (Some(part), None) = (&asked.part, &verdict) {
                *verdict = Some(self.peek(part).await);
            }
        }
        Ok(verdicts)
    }

    /// Takes permits, if all limits have them, and then gives permits back.
    async fn take(&self, asked: &mut [Asked], verdicts: &mut [Option<PolicyVerdict>]) -> Result<(), Status> {
        let takes = |asked: &Asked| matches!(asked.hits, Hits::Take(_));
        let mut parts = Vec::with_capacity(asked.len());
        for asked in asked.iter_mut().filter(|asked| takes(asked)) {
            // The verdict has the selection.
            parts.extend(asked.part.as_mut().map(Part::take));
        }
        let decided = self.limiter.decide_together(parts, &Target::default()).await;
        let decided = decided.map_err(|why| Status::failed_precondition(why.to_string()))?;
        let is_admitted = decided.iter().all(PolicyVerdict::is_admitted);
        let places = asked.iter().zip(verdicts).filter(|(asked, _)| takes(asked));
        for ((_, verdict), decided) in places.zip(decided) {
            *verdict = Some(decided);
        }
        if !is_admitted {
            return Ok(());
        }
        for asked in asked {
            if let (Hits::GiveBack(_), Some(Part { policy, selection })) = (asked.hits, &asked.part) {
                self.limiter.refund(policy, selection.clone()).await.map_err(|_| {
                    Status::unavailable("permits were not given back: the store gave no answer")
                })?;
            }
        }
        Ok(())
    }

    async fn peek(&self, part: &Part) -> PolicyVerdict {
        self.limiter.peek(&part.policy, part.selection.clone()).await
    }
}
