//! The bytes of a connection: what has arrived and was not read yet, and what is still to be sent.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::reply::{Reply, Version};

/// Bytes that a connection keeps for its next commands: a pipeline of some fifty checks.
const IDLE_BYTES: usize = 4 * 1024;
/// Bytes that a command may have before its connection needs a part of the memory for large commands.
const SMALL_BYTES: usize = 16 * 1024;
/// Bytes up to which the buffer doubles, so that a long inline command in small pieces is not copied often.
const DOUBLED_BYTES_MAX: usize = 64 * 1024;
/// Bytes of replies after which they are sent, before further commands are answered.
const REPLY_BYTES: usize = 64 * 1024;

/// A connection to a client.
pub(super) struct Connection {
    stream: TcpStream,
    input: Input,
    output: Output,
}

impl Connection {
    /// `write_timeout` is how long a client may take to make room for replies.
    pub(super) fn new(stream: TcpStream, write_timeout: Duration, large_commands: Arc<Semaphore>) -> Self {
        let input = Input::new(large_commands);
        Self { stream, input, output: Output { bytes: Vec::new(), write_timeout } }
    }

    /// The bytes that have arrived, and a way to reply to them.
    pub(super) fn split(&mut self) -> (&[u8], Replies<'_>) {
        let Input { bytes, filled, .. } = &self.input;
        (&bytes[..*filled], Replies { stream: &mut self.stream, output: &mut self.output })
    }

    /// Drops bytes that were answered, and says whether others are left: the beginning of a command.
    pub(super) fn consume(&mut self, bytes: usize) -> bool {
        self.input.consume(bytes);
        self.input.filled > 0
    }

    /// Reads until `needed` bytes are there. Whether they are: not if the client has no more to send.
    pub(super) async fn read(&mut self, needed: usize) -> Result<bool, ReadError> {
        self.input.make_room(needed)?;
        while self.input.filled < needed {
            let read = self.read_some().await?;
            if read == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether the last read filled the buffer: the client sends faster than it is answered.
    pub(super) fn is_full(&self) -> bool {
        self.input.filled == self.input.bytes.len()
    }

    async fn read_some(&mut self) -> io::Result<usize> {
        let Self { stream, input, .. } = self;
        let mut room = ReadBuf::new(&mut input.bytes[input.filled..]);
        poll_fn(|cx| Pin::new(&mut *stream).poll_read(cx, &mut room)).await?;
        let read = room.filled().len();
        input.filled += read;
        Ok(read)
    }
}

/// Why no more bytes are read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// All memory for large commands is in use.
    #[error("the memory for large commands is in use (server.max_body_bytes); try again in a second")]
    NoMemory,
    /// The connection failed.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

struct Input {
    /// All of it can be written to; the first `filled` bytes have arrived.
    bytes: Vec<u8>,
    filled: usize,
    large_commands: Arc<Semaphore>,
    /// The part of the memory for large commands that this buffer has.
    large: Option<OwnedSemaphorePermit>,
}

impl Input {
    fn new(large_commands: Arc<Semaphore>) -> Self {
        Self { bytes: Vec::new(), filled: 0, large_commands, large: None }
    }

    /// Makes the buffer large enough for `needed` bytes, and small again when it is empty.
    fn make_room(&mut self, needed: usize) -> Result<(), ReadError> {
        if self.filled == 0 && self.bytes.len() > IDLE_BYTES {
            self.bytes = Vec::new();
            self.large = None;
        }
        let length = self.bytes.len();
        if needed <= length {
            return Ok(());
        }
        let wanted = needed.max((length * 2).clamp(IDLE_BYTES, DOUBLED_BYTES_MAX));
        if wanted > SMALL_BYTES {
            self.reserve_large(wanted.div_ceil(1024))?;
        }
        self.bytes.resize(wanted, 0);
        Ok(())
    }

    /// Takes a part of the memory for large commands, in addition to what this buffer has.
    fn reserve_large(&mut self, kib: usize) -> Result<(), ReadError> {
        let held = self.large.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        // A command has about 1 MiB at most: the cast loses nothing.
        let more = kib.saturating_sub(held) as u32;
        let more = Arc::clone(&self.large_commands).try_acquire_many_owned(more);
        let more = more.map_err(|_| ReadError::NoMemory)?;
        match &mut self.large {
            Some(large) => large.merge(more),
            None => self.large = Some(more),
        }
        Ok(())
    }

    fn consume(&mut self, bytes: usize) {
        self.bytes.copy_within(bytes..self.filled, 0);
        self.filled -= bytes;
    }
}

struct Output {
    bytes: Vec<u8>,
    write_timeout: Duration,
}

/// Replies to commands, in their order.
pub(super) struct Replies<'a> {
    stream: &'a mut TcpStream,
    output: &'a mut Output,
}

impl Replies<'_> {
    /// Adds a reply. Many or long ones are sent at once.
    pub(super) async fn add(&mut self, reply: &Reply, version: Version) -> io::Result<()> {
        reply.write(version, &mut self.output.bytes);
        if self.output.bytes.len() >= REPLY_BYTES { self.send().await } else { Ok(()) }
    }

    /// Sends all replies. A client that does not read them is waited for up to the timeout.
    pub(super) async fn send(&mut self) -> io::Result<()> {
        if self.output.bytes.is_empty() {
            return Ok(());
        }
        let Output { bytes, write_timeout } = self.output;
        let write_all = async {
            let mut sent = 0;
            while sent < bytes.len() {
                match poll_fn(|cx| Pin::new(&mut *self.stream).poll_write(cx, &bytes[sent..])).await? {
                    0 => return Err(io::Error::from(io::ErrorKind::WriteZero)),
                    written => sent += written,
                }
            }
            Ok(())
        };
        timeout(*write_timeout, write_all).await.map_err(|_| io::ErrorKind::TimedOut)??;
        bytes.clear();
        bytes.shrink_to(IDLE_BYTES);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_commands_of_all_connections_share_a_bounded_memory() {
        let memory = Arc::new(Semaphore::new(1024));
        let [mut one, mut two] = [(); 2].map(|()| Input::new(Arc::clone(&memory)));
        two.make_room(SMALL_BYTES).unwrap();
        assert_eq!(memory.available_permits(), 1024, "small commands need none of it");
        // The command turns out to be larger and larger.
        for kib in [100, 101, 600, 1000] {
            one.filled = one.bytes.len();
            one.make_room(kib * 1024).unwrap();
            assert_eq!(memory.available_permits(), 1024 - kib);
        }
        two.filled = two.bytes.len();
        assert!(matches!(two.make_room(25 * 1024), Err(ReadError::NoMemory)));
        two.make_room(SMALL_BYTES).unwrap();
        one.consume(one.filled);
        one.make_room(1).unwrap();
        assert_eq!((one.bytes.len(), memory.available_permits()), (IDLE_BYTES, 1024));
        two.make_room(100 * 1024).unwrap();
        drop(two);
        assert_eq!(memory.available_permits(), 1024, "a connection that ends gives it back");
    }
}
