//! One message in and one message out: a unary call of gRPC.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use prost::Message;
use tokio::time::timeout;
use tonic::Status;

/// Bytes of a message: some hundred times what a proxy sends.
const MESSAGE_BYTES_MAX: usize = 64 * 1024;
/// What comes before a message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// Memory for the messages of all calls together. Only callers with access use it.
pub(super) struct MessageMemory {
    used: AtomicUsize,
    most: usize,
}

impl MessageMemory {
    pub(super) fn new(most: usize) -> Self {
        Self { used: AtomicUsize::new(0), most }
    }
}

/// Memory that one message takes, which is free for others when this is dropped.
struct Taken<'a> {
    memory: &'a MessageMemory,
    bytes: usize,
}

impl Taken<'_> {
    fn add(&mut self, bytes: usize) -> Result<(), Status> {
        self.bytes += bytes;
        if self.bytes > PREFIX_BYTES + MESSAGE_BYTES_MAX {
            self.bytes -= bytes;
            return Err(Status::resource_exhausted(format!(
                "the message may have at most {MESSAGE_BYTES_MAX} bytes"
            )));
        }
        let used = self.memory.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        match used > self.memory.most {
            true => Err(Status::resource_exhausted(
                "all memory for messages is in use (server.max_body_bytes): try again later",
            )),
            false => Ok(()),
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Reads the one message of a call, within this time.
pub(super) async fn read<M: Message + Default>(
    body: Incoming,
    memory: &MessageMemory,
    within: Duration,
) -> Result<M, Status> {
    let mut taken = Taken { memory, bytes: 0 };
    let bytes = timeout(within, read_bytes(body, &mut taken))
        .await
        .map_err(|_| Status::deadline_exceeded("the message came too slowly (server.body_timeout)"))??;
    decode(bytes)
}

async fn read_bytes(mut body: Incoming, taken: &mut Taken<'_>) -> Result<Bytes, Status> {
    let mut whole = Bytes::new();
    let mut parts = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Status::cancelled("the call ended before its message was complete"))?;
        let Ok(part) = frame.into_data() else { continue };
        taken.add(part.len())?;
        if whole.is_empty() && parts.is_empty() {
            whole = part;
        } else if !part.is_empty() {
            parts.extend_from_slice(&std::mem::take(&mut whole));
            parts.extend_from_slice(&part);
        }
    }
    Ok(if parts.is_empty() { whole } else { parts.freeze() })
}

fn decode<M: Message + Default>(mut bytes: Bytes) -> Result<M, Status> {
    let Some((&[is_compressed, a, b, c, d], message)) = bytes.split_first_chunk::<PREFIX_BYTES>() else {
        return Err(Status::invalid_argument("expected one message, got none"));
    };
    if is_compressed != 0 {
        return Err(Status::unimplemented(
            "compressed messages are not accepted: send it without grpc-encoding",
        ));
    }
    if u32::from_be_bytes([a, b, c, d]) as usize != message.len() {
        return Err(Status::invalid_argument("expected one message of the length that is sent before it"));
    }
    bytes.advance(PREFIX_BYTES);
    M::decode(bytes).map_err(|why| Status::invalid_argument(format!("the message cannot be read: {why}")))
}

/// The response to a call that was answered with a message.
pub(super) fn response(message: &impl Message) -> Response<Reply> {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    // Far fewer than 2^32: an answer has at most one status for each descriptor, and a few headers.
    bytes.put_u32(length as u32);
    // The capacity is that of the message: this does not fail.
    let _ = message.encode(&mut bytes);
    let mut response = Response::new(Reply::Message { bytes: Some(bytes.freeze()), is_ended: false });
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// The body of a response.
#[derive(Default)]
pub(crate) enum Reply {
    /// A message, and the status of a call that succeeded.
    Message { bytes: Option<Bytes>, is_ended: bool },
    /// The answer of a service of tonic.
    Stream(tonic::body::Body),
    /// Nothing: the status is in the head.
    #[default]
    Empty,
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.get_mut() {
            Self::Message { bytes, is_ended } => Poll::Ready(match bytes.take() {
                Some(bytes) => Some(Ok(Frame::data(bytes))),
                None if std::mem::replace(is_ended, true) => None,
                None => Some(Ok(Frame::trailers(succeeded()))),
            }),
            Self::Stream(body) => Pin::new(body).poll_frame(cx),
            Self::Empty => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Message { is_ended, .. } => *is_ended,
            Self::Stream(body) => body.is_end_stream(),
            Self::Empty => true,
        }
    }
}

/// The trailers of a call that succeeded.
fn succeeded() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    trailers
}

/// The answer of a service of tonic, which never fails.
pub(super) fn streamed(answer: Result<Response<tonic::body::Body>, Infallible>) -> Response<Reply> {
    let Ok(response) = answer;
    response.map(Reply::Stream)
}
