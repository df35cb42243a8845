//! The loop that holds connections: how many, how long, and until when.
//!
//! Written out because a framework's loop has no clock: a client that sends its head a byte a minute would be waited for.

mod http2;
mod received;
mod table;

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::rt::ReadBufCursor;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use self::http2::{Connection, Http2, Http2Door};
pub(crate) use self::received::Received;
use self::table::Table;
pub(crate) use self::table::{Phase, Seat};
use crate::address::{canonical, network};
use crate::config::Serving;
use crate::doors::http::refuse_host;
use crate::metrics::SharedMetrics;

/// A protocol behind a listener. Every request is answered: what goes wrong is an answer too.
pub(crate) trait Door: Send + Sync + 'static {
    /// Answers one request.
    fn answer(
        &self,
        request: Request<Received>,
        peer: IpAddr,
    ) -> impl Future<Output = Response<Full<Bytes>>> + Send;
}

/// A way to answer the requests of a connection.
pub(crate) trait Converse: Send + Sync + 'static {
    /// Answers requests until the client leaves, or until the service stops and no request is under way. The seat is told when a request
    /// begins and when it is answered.
    fn converse(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        seat: &Arc<Seat>,
        stopping: &Stopping,
    ) -> impl Future<Output = ()> + Send;
}

/// How long the loop waits when the system has no more sockets: until some connection has ended, most likely.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// How long a connection without a request stays when the service stops. Who sends one just then is still answered, and told
/// that it was the last.
const LINGER: Duration = Duration::from_millis(200);
/// Bytes of a request's head, and of what is read ahead.
const HEAD_BYTES_MAX: usize = 16 * 1024;

/// How a service ends, in two steps.
#[derive(Clone, Default)]
pub(crate) struct Stopping {
    /// It was told to stop: everybody is answered, and told that it was the last answer on this connection.
    pub(crate) told: CancellationToken,
    /// Nobody new is let in.
    pub(crate) closing: CancellationToken,
}

impl Stopping {
    /// Waits until connections without a request under way are to be closed.
    pub(crate) async fn no_more_requests(&self) {
        self.closing.cancelled().await;
        sleep(LINGER).await;
    }
}

/// Serves a door until told to stop, then lets the requests under way finish.
pub(crate) async fn serve(
    listener: TcpListener,
    door: Arc<impl Converse>,
    limits: Serving,
    metrics: SharedMetrics,
    stopping: Stopping,
) {
    let places = connections_max(limits.max_connections);
    let table = Table::new(places);
    let addresses = Arc::new(Addresses {
        open: Mutex::default(),
        most: connections_per_address_max(places, limits.max_connections_per_address),
        ipv6_prefix: limits.ipv6_prefix,
    });
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stopping.closing.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, peer)) = accepted else {
            tracing::warn!("no connection can be accepted now");
            tokio::time::sleep(ACCEPT_AGAIN).await;
            continue;
        };
        let Some(guest) = addresses.admit(peer) else {
            metrics.connections_refused.inc();
            continue;
        };
        // While this one waits for a place, further ones wait in the system's queue.
        let place = tokio::select! {
            () = stopping.closing.cancelled() => break,
            place = table.place() => place,
        };
        let seated = table.enter(place);
        let (door, metrics, stopping) = (Arc::clone(&door), Arc::clone(&metrics), stopping.clone());
        connections.spawn(async move {
            metrics.connections.inc();
            if hold(stream, peer, &*door, limits, &seated.seat, &stopping).await == Ended::GaveWay {
                metrics.connections_evicted.inc();
            }
            metrics.connections.dec();
            drop((seated, guest));
        });
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(limits.drain_timeout, connections.wait()).await.is_err() {
        tracing::warn!(connections = connections.len(), "stopped before all connections had ended");
    }
}

/// Files that are left for the store, for logs and for the system: of few files, half.
const FILES_RESERVED: u64 = 128;

/// As many connections as are wanted, if the system gives the process so many files: should clients take all of them, no
/// connection to the store could be opened again.
fn connections_max(wanted: usize) -> usize {
    let Some(files) = rustix::process::getrlimit(rustix::process::Resource::Nofile).current else {
        return wanted;
    };
    let most = usize::try_from(files - FILES_RESERVED.min(files / 2)).unwrap_or(usize::MAX);
    if most < wanted {
        tracing::info!(
            files,
            connections = most,
            "fewer connections than configured: the system allows few files"
        );
    }
    wanted.min(most)
}

/// The least connections that one address may have, however few places there are: a browser opens six.
const PER_ADDRESS_LEAST: usize = 8;

/// As many connections from one address as are wanted, but at most a quarter of the places: a single client must not be able to
/// take most of them.
fn connections_per_address_max(places: usize, wanted: usize) -> usize {
    wanted.min((places / 4).max(PER_ADDRESS_LEAST))
}

/// Raises the number of files that the process may open to the most that the system allows it. The usual number, 1,024, is low for the
/// sake of programs that call `select`.
pub(crate) fn raise_files_max() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // If it cannot be raised, there are places for fewer connections.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// How a connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ended {
    /// By the client, by a timeout, or because the service stops.
    Done,
    /// For another connection.
    GaveWay,
}

/// Holds one connection until it ends, is idle or slow for too long, gives way to another one, or the service stops.
async fn hold(
    stream: TcpStream,
    peer: SocketAddr,
    door: &impl Converse,
    limits: Serving,
    seat: &Arc<Seat>,
    stopping: &Stopping,
) -> Ended {
    // Answers are one small packet each; without this they would wait for a second one. Failing costs speed only.
    let _ = stream.set_nodelay(true);
    let mut conversation = pin!(door.converse(stream, peer, seat, stopping));
    let mut watch = Watch::new(seat, limits);
    let mut ticks = interval(watch.every());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = conversation.as_mut() => return Ended::Done,
            () = seat.is_to_give_way() => return Ended::GaveWay,
            _ = ticks.tick() => if watch.is_over() { return Ended::Done },
        }
    }
}

impl<D: Door> Converse for D {
    async fn converse(&self, stream: TcpStream, peer: SocketAddr, seat: &Arc<Seat>, stopping: &Stopping) {
        let service = service_fn(|request: Request<Incoming>| {
            seat.enter(Phase::Answering);
            let request = request.map(|body| Received::new(body, Arc::clone(seat)));
            async move {
                let mut response = match refuse_host(&request) {
                    Some(refusal) => refusal,
                    None => self.answer(request, peer.ip()).await,
                };
                if stopping.told.is_cancelled() {
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                seat.enter(Phase::Idle);
                Ok::<_, Infallible>(response)
            }
        });
        let io = Watched { io: TokioIo::new(stream), progress: Arc::clone(seat) };
        let connection = http1::Builder::new()
            .header_read_timeout(None)
            .max_buf_size(HEAD_BYTES_MAX)
            .serve_connection(io, service);
        let mut connection = pin!(connection);
        tokio::select! {
            biased;
            // An error is the client's: it left, or spoke no HTTP, and hyper has told it so.
            _ = connection.as_mut() => return,
            () = stopping.no_more_requests() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }
}

/// Looks at a connection's progress from time to time.
struct Watch<'a> {
    progress: &'a Seat,
    limits: Serving,
    seen: u32,
    since: Instant,
}

impl<'a> Watch<'a> {
    fn new(progress: &'a Seat, limits: Serving) -> Self {
        Self { progress, limits, seen: progress.now().0, since: Instant::now() }
    }

    /// Often enough that a timeout is late by a quarter of itself at most.
    fn every(&self) -> Duration {
        let shortest = self.limits.header_timeout.min(self.limits.idle_timeout);
        (shortest / 4).clamp(Duration::from_millis(1), Duration::from_secs(1))
    }

    fn is_over(&mut self) -> bool {
        let (now, phase) = self.progress.now();
        if now != self.seen {
            (self.seen, self.since) = (now, Instant::now());
        }
        match phase {
            Phase::Idle => self.since.elapsed() >= self.limits.idle_timeout,
            Phase::Head => self.since.elapsed() >= self.limits.header_timeout,
            Phase::Answering | Phase::Body => false,
        }
    }
}

/// A connection that notes when a request begins.
struct Watched {
    io: TokioIo<TcpStream>,
    progress: Arc<Seat>,
}

impl hyper::rt::Read for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        if read.is_ready() && self.progress.now().1 == Phase::Idle {
            self.progress.enter(Phase::Head);
        }
        read
    }
}

impl hyper::rt::Write for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    // Answers are small: copied behind their head and sent as one piece they cost less than as a list of two.
    fn is_write_vectored(&self) -> bool {
        false
    }
}

/// Connections by address, of IPv6 by prefix: one client can have very many addresses there. As many entries as connections, so
/// bounded by them.
struct Addresses {
    open: Mutex<HashMap<IpAddr, usize>>,
    most: usize,
    ipv6_prefix: u8,
}

impl Addresses {
    /// A place for one more connection. Loopback is the operator's own, and is not counted.
    fn admit(self: &Arc<Self>, peer: SocketAddr) -> Option<Guest> {
        let ip = canonical(peer.ip());
        if ip.is_loopback() {
            return Some(Guest { addresses: None, ip });
        }
        let ip = network(ip, self.ipv6_prefix);
        let mut open = self.open.lock();
        let count = open.entry(ip).or_insert(0);
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Guest { addresses: Some(Arc::clone(self)), ip })
    }
}

/// A connection's place among those of its address, given back when dropped.
struct Guest {
    addresses: Option<Arc<Addresses>>,
    ip: IpAddr,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let Some(addresses) = &self.addresses else { return };
        let mut open = addresses.open.lock();
        if let Some(count) = open.get_mut(&self.ip) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.ip);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_gets_at_most_a_quarter_of_the_places() {
        for (places, wanted, most) in [(10_000, 1_000, 1_000), (896, 1_000, 224), (896, 2, 2), (16, 1_000, 8)]
        {
            assert_eq!(connections_per_address_max(places, wanted), most);
        }
    }

    #[test]
    fn an_address_has_so_many_places_and_gives_them_back() {
        let addresses = Arc::new(Addresses { open: Mutex::default(), most: 2, ipv6_prefix: 64 });
        let far = "192.0.2.1:1000".parse().expect("an address");
        let (one, two) = (addresses.admit(far), addresses.admit(far));
        assert!(one.is_some() && two.is_some() && addresses.admit(far).is_none());
        drop(one);
        assert!(addresses.admit(far).is_some());
        drop(two);
        assert!(addresses.open.lock().is_empty());
        let neighbours =
            ["[2001:db8::1]:1", "[2001:db8::2]:1", "[2001:db8::3:0:0:9]:1", "[2001:db8:0:1::1]:1"];
        let guests = neighbours.map(|peer| addresses.admit(peer.parse().expect("an address")));
        assert_eq!(guests.map(|guest| guest.is_some()), [true, true, false, true], "one /64 is one address");
        let near = "127.0.0.1:1000".parse().expect("an address");
        let guests: Vec<_> = (0..10).map(|_| addresses.admit(near)).collect();
        assert!(guests.iter().all(Option::is_some));
    }
}
