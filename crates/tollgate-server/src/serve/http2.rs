//! HTTP/2 connections, each with several requests under way.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::{Converse, HEAD_BYTES_MAX, LINGER, Phase, Seat, Stopping};
use crate::config::Serving;

/// Requests of a connection that are under way at the same time. A proxy opens further connections when it needs more.
const STREAMS_MAX: u32 = 100;
/// Bytes that a client may send before they are read, for each request and for the whole connection.
const WINDOW_BYTES: u32 = 64 * 1024;
/// Bytes of responses that wait to be sent, for each request.
const SEND_BYTES_MAX: usize = 64 * 1024;

/// A protocol on HTTP/2. Every request is answered: what goes wrong is an answer too.
pub(crate) trait Http2Door: Send + Sync + 'static {
    type ResponseBody: Body<Data = Bytes, Error: std::error::Error + Send + Sync> + Send + 'static;

    /// Answers one request.
    fn answer(
        &self,
        request: Request<Incoming>,
        connection: &Connection,
    ) -> impl Future<Output = Response<Self::ResponseBody>> + Send;
}

/// Serves a door on HTTP/2.
pub(crate) struct Http2<D> {
    pub(crate) door: Arc<D>,
    pub(crate) limits: Serving,
}

/// A connection, as its requests see it.
pub(crate) struct Connection {
    /// The address of the other end.
    pub(crate) peer: IpAddr,
    /// For the message of one request.
    pub(crate) body_timeout: Duration,
    seat: Arc<Seat>,
    /// Requests that are being decided.
    deciding: Mutex<usize>,
}

impl Connection {
    /// Notes that a request is complete and is being decided, until the result is dropped. The connection is not closed for another one
    /// meanwhile.
    pub(crate) fn decide(&self) -> Deciding<'_> {
        let mut deciding = self.deciding.lock();
        *deciding += 1;
        if *deciding == 1 {
            self.seat.enter(Phase::Answering);
        }
        Deciding(self)
    }
}

/// A request that is being decided.
pub(crate) struct Deciding<'a>(&'a Connection);

impl Drop for Deciding<'_> {
    fn drop(&mut self) {
        let mut deciding = self.0.deciding.lock();
        *deciding -= 1;
        if *deciding == 0 {
            self.0.seat.enter(Phase::Idle);
        }
    }
}

impl<D: Http2Door> Converse for Http2<D> {
    async fn converse(&self, stream: TcpStream, peer: SocketAddr, seat: &Arc<Seat>, stopping: &Stopping) {
        let Serving { header_timeout, body_timeout, idle_timeout, .. } = self.limits;
        // A client begins with a preface, without waiting for the server. `readable` would not do: it may return without a byte to read.
        if !matches!(timeout(header_timeout, stream.peek(&mut [0])).await, Ok(Ok(1))) {
            return;
        }
        let (peer, deciding) = (peer.ip(), Mutex::new(0));
        let connection = Arc::new(Connection { peer, body_timeout, seat: Arc::clone(seat), deciding });
        let door = Arc::clone(&self.door);
        let service = service_fn(move |request: Request<Incoming>| {
            let (door, connection) = (Arc::clone(&door), Arc::clone(&connection));
            async move { Ok::<_, Infallible>(door.answer(request, &connection).await) }
        });
        let connection = http2::Builder::new(TokioExecutor::new())
            .max_concurrent_streams(STREAMS_MAX)
            .max_header_list_size(HEAD_BYTES_MAX as u32)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .max_send_buf_size(SEND_BYTES_MAX)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = pin!(connection);
        tokio::select! {
            biased;
            // An error is the client's: it left, or spoke no HTTP/2, and hyper has told it so.
            _ = connection.as_mut() => return,
            () = stopping.no_more_requests() => {}
            // Before the timeout closes the connection, so that the client sends no request to a connection that is about to close.
            () = idle(seat, idle_timeout / 2) => {}
        }
        connection.as_mut().graceful_shutdown();
        // A stream without an end, such as one that watches the health, does not keep the connection open.
        tokio::select! {
            biased;
            _ = connection => {}
            () = idle(seat, LINGER) => {}
        }
    }
}

/// Waits until no request was decided for this long, or for up to twice as long.
async fn idle(seat: &Seat, time: Duration) {
    loop {
        let (seen, phase) = seat.now();
        sleep(time).await;
        if phase == Phase::Idle && seat.now().0 == seen {
            return;
        }
    }
}
