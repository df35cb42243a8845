//! The Redis protocol: `CL.THROTTLE` as redis-cell has it, and checks by the policy, for every Redis client.

mod checks;
mod commands;
mod connection;
mod conversation;
mod descriptors;
mod frame;
mod reply;
mod throttle;
mod to_reply;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::HeaderMap;
use tokio::sync::Semaphore;

use self::conversation::Session;
use crate::access::Access;
use crate::config::{ClientAddress, Serving};
use crate::limiter::Limiter;

/// The listener for Redis clients.
pub(crate) struct RespDoor {
    limiter: Arc<Limiter>,
    access: Access,
    /// Memory for commands that are larger than the buffer of a connection, in KiB.
    large_commands: Arc<Semaphore>,
    /// How long a client may take to make room for replies.
    write_timeout: Duration,
    /// Connections so far, by which they are numbered.
    connections: AtomicU64,
}

impl RespDoor {
    pub(crate) fn new(limiter: Arc<Limiter>, access: Access, limits: &Serving) -> Self {
        let large_commands =
            Arc::new(Semaphore::new((limits.max_body_bytes / 1024).min(Semaphore::MAX_PERMITS)));
        let (write_timeout, connections) = (limits.idle_timeout, AtomicU64::new(0));
        Self { limiter, access, large_commands, write_timeout, connections }
    }

    /// A session for a new connection. Requests over this door have no headers, so no proxy can have forwarded them.
    fn session(&self, peer: SocketAddr) -> Session {
        let id = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
        let needs_no_token =
            self.access.may_name_keys(peer.ip(), &HeaderMap::new(), &ClientAddress::default());
        Session::new(id, peer, needs_no_token)
    }
}
