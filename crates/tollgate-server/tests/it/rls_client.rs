//! A client of Envoy's Rate Limit Service, and the messages that it sends.

use std::net::SocketAddr;

use bytes::{Buf, BufMut};
use tokio::runtime::Runtime;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use self::proto::rate_limit_descriptor::{Entry, RateLimitOverride};
use self::proto::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit};
use self::proto::{RateLimitDescriptor, RateLimitRequest, RateLimitResponse, RateLimitUnit};

#[path = "../../src/doors/rls/proto.rs"]
#[allow(dead_code, unused_imports, reason = "the tests do not use all messages")]
pub(crate) mod proto;

pub(crate) const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A client on one connection.
pub(crate) struct Client {
    pub(crate) runtime: Runtime,
    pub(crate) channel: Channel,
    token: Option<String>,
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        let channel = runtime.block_on(async { endpoint.connect_lazy() });
        Self { runtime, channel, token: None }
    }

    /// The same client, with an `authorization`.
    pub(crate) fn with_authorization(self, value: &str) -> Self {
        Self { token: Some(value.to_owned()), ..self }
    }

    /// Asks, and expects an answer.
    pub(crate) fn ask(&self, request: RateLimitRequest) -> RateLimitResponse {
        self.call(request).unwrap()
    }

    /// Asks with one descriptor, and expects an answer.
    pub(crate) fn ask_one(&self, domain: &str, entries: &[(&str, &str)]) -> DescriptorStatus {
        let response = self.ask(request(domain, [descriptor(entries)]));
        assert_eq!(response.statuses.len(), 1);
        assert_eq!(response.overall_code, response.statuses[0].code);
        response.statuses[0].clone()
    }

    pub(crate) fn call(&self, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        self.runtime.block_on(self.call_with(ProstCodec::default(), request))
    }

    /// Sends bytes in place of a message.
    pub(crate) fn call_raw(&self, bytes: Vec<u8>) -> Result<(), Status> {
        self.runtime.block_on(self.call_with(Raw, bytes)).map(|_: RateLimitResponse| ())
    }

    pub(crate) async fn call_with<C: Codec<Encode: Sync, Decode = RateLimitResponse>>(
        &self,
        codec: C,
        message: C::Encode,
    ) -> Result<RateLimitResponse, Status> {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.map_err(|why| Status::unavailable(why.to_string()))?;
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.parse().unwrap());
        }
        let path = http::uri::PathAndQuery::from_static(SHOULD_RATE_LIMIT);
        Ok(grpc.unary(request, path, codec).await?.into_inner())
    }
}

pub(crate) fn request(
    domain: &str,
    descriptors: impl IntoIterator<Item = RateLimitDescriptor>,
) -> RateLimitRequest {
    let descriptors = descriptors.into_iter().collect();
    RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 }
}

pub(crate) fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

/// The same descriptor, with permits of its own.
pub(crate) fn taking(hits: u64, descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..descriptor }
}

/// The same descriptor, which gives permits back.
pub(crate) fn giving_back(hits: u64, descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { is_negative_hits: true, ..taking(hits, descriptor) }
}

/// The same descriptor, with a limit of its own.
pub(crate) fn limited(
    requests_per_unit: u32,
    unit: RateLimitUnit,
    descriptor: RateLimitDescriptor,
) -> RateLimitDescriptor {
    let limit = Some(RateLimitOverride { requests_per_unit, unit: unit.into() });
    RateLimitDescriptor { limit, ..descriptor }
}

pub(crate) fn current_limit(requests_per_unit: u32, unit: Unit, name: &str) -> Option<RateLimit> {
    Some(RateLimit { requests_per_unit, unit: unit.into(), name: name.to_owned() })
}

/// The codes of all statuses.
pub(crate) fn codes(response: &RateLimitResponse) -> Vec<Code> {
    response.statuses.iter().map(DescriptorStatus::code).collect()
}

/// The value of a header that the answer adds.
pub(crate) fn header<'a>(response: &'a RateLimitResponse, name: &str) -> Option<&'a str> {
    let mut headers = response.response_headers_to_add.iter();
    headers.find(|header| header.key == name).map(|header| header.value.as_str())
}

/// Sends bytes as they are.
pub(crate) struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = RateLimitResponse;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, bytes: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&bytes);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = RateLimitResponse;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<RateLimitResponse>, Status> {
        buffer.advance(buffer.remaining());
        Ok(Some(RateLimitResponse::default()))
    }
}
