//! Bodies of requests, with their limits in bytes and in time, each and all together.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::ops::Deref;
use std::time::Duration;

use http::StatusCode;
use http_body_util::BodyExt;
use hyper::body::Body;
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;

use super::problem::Problem;
use crate::access::Refused;
use crate::serve::Received;

/// Memory for the bodies of all requests together.
///
/// A client holds memory from the first byte of its body to the last, and can take `server.body_timeout` for that. So memory is shared
/// out by what is known of a caller before its body is read. Callers that may name keys can use all of it. Other callers may send
/// small bodies only, have half of the memory together, and a sixteenth for each network address: they cannot keep a trusted caller's
/// body out, and one of them cannot keep the others out.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    most: i64,
    used: Gauge,
    by_clients: Mutex<ByClients>,
}

/// Memory that callers use who may not name keys.
#[derive(Debug, Default)]
struct ByClients {
    used: i64,
    /// As many entries as bodies, so bounded by the number of connections.
    by_network: HashMap<IpAddr, i64>,
}

/// Whose memory a body takes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Payer {
    /// That of callers who may name keys.
    Trusted,
    /// That of any other client, by its network.
    Client(IpAddr),
}

impl BodyMemory {
    /// `used` shows how much is in use.
    pub(crate) fn new(most: usize, used: Gauge) -> Self {
        Self { most: i64::try_from(most).unwrap_or(i64::MAX), used, by_clients: Mutex::default() }
    }

    fn take(&self, payer: Payer, bytes: i64) -> Result<(), Refused> {
        if let Payer::Client(network) = payer {
            let mut clients = self.by_clients.lock();
            let own = clients.by_network.get(&network).map_or(0, |used| *used);
            if clients.used + bytes > self.most / 2 || own + bytes > self.most / 16 {
                return Err(Refused::BodyMemory);
            }
            clients.used += bytes;
            clients.by_network.insert(network, own + bytes);
        }
        let before = self.used.inc_by(bytes);
        if before.saturating_add(bytes) > self.most {
            self.give_back(payer, bytes);
            return Err(Refused::BodyMemory);
        }
        Ok(())
    }

    fn give_back(&self, payer: Payer, bytes: i64) {
        self.used.dec_by(bytes);
        if let Payer::Client(network) = payer {
            let mut clients = self.by_clients.lock();
            clients.used -= bytes;
            if let Entry::Occupied(mut used) = clients.by_network.entry(network) {
                *used.get_mut() -= bytes;
                if *used.get() <= 0 {
                    used.remove();
                }
            }
        }
    }

    /// Reads a whole body, if it is small enough, comes soon enough, and there is memory for it.
    pub(super) async fn read(
        &self,
        body: Received,
        most: usize,
        within: Duration,
        payer: Payer,
    ) -> Result<Buffered<'_>, Problem> {
        let length = body.size_hint();
        if length.lower() > most as u64 {
            return Err(too_large(most));
        }
        let announced = length.upper().and_then(|length| usize::try_from(length).ok());
        let buffered = Buffered::new(self, payer, announced.unwrap_or(most).min(most));
        let too_slow = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the body came too slowly");
        tokio::time::timeout(within, buffered.filled(body)).await.map_err(too_slow)?
    }
}

/// A body in memory, which is free for others when this is dropped.
#[derive(Debug)]
pub(super) struct Buffered<'a> {
    bytes: Vec<u8>,
    /// The most bytes that it can get.
    most: usize,
    taken: i64,
    memory: &'a BodyMemory,
    payer: Payer,
}

impl<'a> Buffered<'a> {
    fn new(memory: &'a BodyMemory, payer: Payer, most: usize) -> Self {
        Self { bytes: Vec::new(), most, taken: 0, memory, payer }
    }

    async fn filled(mut self, mut body: Received) -> Result<Self, Problem> {
        while let Some(frame) = body.frame().await {
            let cut_off = |_| Problem::new(StatusCode::BAD_REQUEST, "the body ended before it was complete");
            // Trailers are not read.
            if let Ok(part) = frame.map_err(cut_off)?.into_data() {
                self.push(&part)?;
            }
        }
        Ok(self)
    }

    /// Copies a part behind the others. Kept as they come, parts of one byte would take many times their size.
    fn push(&mut self, part: &[u8]) -> Result<(), Problem> {
        let length = self.bytes.len() + part.len();
        if length > self.most {
            return Err(too_large(self.most));
        }
        let capacity = length.next_power_of_two().min(self.most);
        let wanted = i64::try_from(capacity).unwrap_or(i64::MAX);
        if wanted > self.taken {
            // What has arrived counts, not what was announced: an announcement costs a client nothing.
            self.memory.take(self.payer, wanted - self.taken)?;
            self.taken = wanted;
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(part);
        Ok(())
    }

    /// The text of the body.
    pub(super) fn into_text(mut self) -> Option<String> {
        String::from_utf8(std::mem::take(&mut self.bytes)).ok()
    }
}

impl Deref for Buffered<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buffered<'_> {
    fn drop(&mut self) {
        self.memory.give_back(self.payer, self.taken);
    }
}

fn too_large(most: usize) -> Problem {
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body may have at most {most} bytes"))
}
