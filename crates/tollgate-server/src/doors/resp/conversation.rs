//! One connection: commands are answered in their order, all that have arrived in one batch.

use std::future::{poll_fn, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use tokio::net::TcpStream;

use super::RespDoor;
use super::commands::{Answer, Command};
use super::connection::{Connection, ReadError, Replies};
use super::frame::{Caps, Parsed, parse};
use super::reply::{Reply, Version};
use crate::serve::{Converse, Phase, Seat, Stopping};

/// Checks of one pipeline that are decided next to each other. They keep a store busy, and take some 256 KiB at most.
const IN_FLIGHT_MAX: usize = 128;

/// What the service knows of a client.
pub(super) struct Session {
    /// The number of the connection.
    pub(super) id: u64,
    pub(super) peer: SocketAddr,
    pub(super) since: Instant,
    pub(super) version: Version,
    /// What the client calls itself.
    pub(super) name: String,
    /// Whether the client's address lets it use all commands.
    needs_no_token: bool,
    /// Whether the client has shown a token.
    has_token: bool,
}

impl Session {
    pub(super) fn new(id: u64, peer: SocketAddr, needs_no_token: bool) -> Self {
        let (version, name) = (Version::default(), String::new());
        Self { id, peer, since: Instant::now(), version, name, needs_no_token, has_token: false }
    }

    /// Whether the client may name keys.
    pub(super) const fn is_authorized(&self) -> bool {
        self.needs_no_token || self.has_token
    }

    /// Notes that the client has shown a token.
    pub(super) const fn authorize(&mut self) {
        self.has_token = true;
    }

    /// The session of a client that begins anew.
    pub(super) fn reset(&mut self) {
        *self = Self { since: self.since, ..Self::new(self.id, self.peer, self.needs_no_token) };
    }

    const fn caps(&self) -> Caps {
        if self.is_authorized() { Caps::FULL } else { Caps::BEFORE_AUTH }
    }
}

/// A reply that is not known yet.
pub(super) type Pending<'a> = Pin<Box<dyn Future<Output = Reply> + Send + 'a>>;

/// What is done after a batch.
enum Next {
    /// More bytes are read: the next command has at least this many.
    Read(usize),
    Close,
}

impl Converse for RespDoor {
    async fn converse(&self, stream: TcpStream, peer: SocketAddr, seat: &Arc<Seat>, stopping: &Stopping) {
        let connection = Connection::new(stream, self.write_timeout, Arc::clone(&self.large_commands));
        // An error is the client's: it left, or did not read its replies.
        let _ = self.answer_until_end(connection, self.session(peer), seat, stopping).await;
    }
}

impl RespDoor {
    /// Reads and answers commands until the client leaves or breaks the protocol.
    async fn answer_until_end(
        &self,
        mut connection: Connection,
        mut session: Session,
        seat: &Seat,
        stopping: &Stopping,
    ) -> io::Result<()> {
        let mut needed = 1;
        let mut no_more_requests = pin!(stopping.no_more_requests());
        loop {
            let read = tokio::select! {
                biased;
                read = connection.read(needed) => read,
                () = no_more_requests.as_mut() => return Ok(()),
            };
            match read {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(ReadError::Failed(why)) => return Err(why),
                Err(why @ ReadError::NoMemory) => {
                    let (_, mut replies) = connection.split();
                    replies.add(&Reply::error(why), session.version).await?;
                    return replies.send().await;
                }
            }
            let is_flood = connection.is_full();
            let (input, replies) = connection.split();
            let (answered, next) = self.answer_all(&mut session, input, replies, seat).await?;
            match next {
                Next::Close => return Ok(()),
                Next::Read(bytes) => needed = bytes,
            }
            // From its first byte on, the rest of a command has to come in time. Single bytes do not extend that time.
            match (connection.consume(answered), seat.now().1) {
                (true, Phase::Head) => {}
                (true, _) => seat.enter(Phase::Head),
                (false, _) => seat.enter(Phase::Idle),
            }
            if is_flood {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Answers all whole commands that have arrived. How many bytes they had, and what comes next.
    async fn answer_all<'a>(
        &'a self,
        session: &mut Session,
        input: &'a [u8],
        replies: Replies<'_>,
        seat: &Seat,
    ) -> io::Result<(usize, Next)> {
        let mut batch = Batch { replies, in_flight: FuturesOrdered::new() };
        let (mut answered, mut arguments) = (0, Vec::with_capacity(8));
        let next = loop {
            match parse(&input[answered..], session.caps(), &mut arguments) {
                Ok(Parsed::Whole(bytes)) => answered += bytes,
                Ok(Parsed::NeedsBytes(bytes)) => break Next::Read(bytes),
                Err(why) => {
                    batch.reply(&Reply::error(why), session.version).await?;
                    break Next::Close;
                }
            }
            let Some(name) = arguments.first() else { continue };
            if seat.now().1 != Phase::Answering {
                seat.enter(Phase::Answering);
            }
            match Command::find(name) {
                Some(Command::Check(check)) if session.is_authorized() => {
                    batch.start(self.check(check, &mut arguments), session.version).await?;
                }
                command => {
                    batch.finish_checks(session.version).await?;
                    let Answer { reply, is_last } = self.run(command, session, &mut arguments).await;
                    if let Some(reply) = reply {
                        batch.reply(&reply, session.version).await?;
                    }
                    if is_last {
                        break Next::Close;
                    }
                }
            }
        };
        batch.finish_checks(session.version).await?;
        batch.replies.send().await?;
        Ok((answered, next))
    }
}

/// The commands of a pipeline that have arrived. Checks that follow each other are in flight together; every other command waits for the
/// checks before it.
struct Batch<'a, 'c> {
    replies: Replies<'c>,
    in_flight: FuturesOrdered<Pending<'a>>,
}

impl<'a> Batch<'a, '_> {
    /// Starts a check. In memory it is decided at once.
    async fn start(&mut self, mut check: Pending<'a>, version: Version) -> io::Result<()> {
        match poll_fn(|cx| Poll::Ready(check.as_mut().poll(cx))).await {
            Poll::Ready(reply) if self.in_flight.is_empty() => {
                return self.replies.add(&reply, version).await;
            }
            Poll::Ready(reply) => self.in_flight.push_back(Box::pin(ready(reply))),
            Poll::Pending => self.in_flight.push_back(check),
        }
        match self.in_flight.len() < IN_FLIGHT_MAX {
            true => Ok(()),
            false => self.finish_checks(version).await,
        }
    }

    /// Adds the replies of all checks that were started.
    async fn finish_checks(&mut self, version: Version) -> io::Result<()> {
        while let Some(reply) = self.in_flight.next().await {
            self.replies.add(&reply, version).await?;
        }
        Ok(())
    }

    /// Adds a reply behind those of the checks.
    async fn reply(&mut self, reply: &Reply, version: Version) -> io::Result<()> {
        self.finish_checks(version).await?;
        self.replies.add(reply, version).await
    }
}
