//! Bodies of requests, with their limits in bytes and in time, each and all together.

use std::ops::Deref;
use std::time::Duration;

use http::StatusCode;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use prometheus_client::metrics::gauge::Gauge;

use super::problem::Problem;
use crate::access::Refused;

/// Memory for the bodies of all requests together.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    most: i64,
    used: Gauge,
}

impl BodyMemory {
    /// `used` shows how much is in use.
    pub(crate) fn new(most: usize, used: Gauge) -> Self {
        Self { most: i64::try_from(most).unwrap_or(i64::MAX), used }
    }

    fn take(&self, bytes: i64) -> Result<(), Refused> {
        let before = self.used.inc_by(bytes);
        if before.saturating_add(bytes) > self.most {
            self.used.dec_by(bytes);
            return Err(Refused::BodyMemory);
        }
        Ok(())
    }
}

/// A body in memory, which is free for others when this is dropped.
#[derive(Debug)]
pub(super) struct Buffered<'a> {
    bytes: Vec<u8>,
    taken: i64,
    memory: &'a BodyMemory,
}

impl<'a> Buffered<'a> {
    fn new(memory: &'a BodyMemory) -> Self {
        Self { bytes: Vec::new(), taken: 0, memory }
    }

    /// Copies a part behind the others. Kept as they come, parts of one byte would take many times their size.
    fn push(&mut self, part: &[u8], most: usize) -> Result<(), Problem> {
        let length = self.bytes.len() + part.len();
        if length > most {
            return Err(too_large(most));
        }
        let capacity = length.next_power_of_two().min(most);
        let wanted = i64::try_from(capacity).unwrap_or(i64::MAX);
        if wanted > self.taken {
            // What has arrived counts, not what was announced: an announcement costs a client nothing.
            self.memory.take(wanted - self.taken)?;
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
        self.memory.used.dec_by(self.taken);
    }
}

fn too_large(most: usize) -> Problem {
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body may have at most {most} bytes"))
}

/// The whole body, if it is small enough, comes soon enough, and there is memory for it.
pub(super) async fn read(
    body: Incoming,
    most: usize,
    within: Duration,
    memory: &BodyMemory,
) -> Result<Buffered<'_>, Problem> {
    if body.size_hint().lower() > most as u64 {
        return Err(too_large(most));
    }
    let too_slow = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the body came too slowly");
    tokio::time::timeout(within, buffer(body, most, memory)).await.map_err(too_slow)?
}

async fn buffer(mut body: Incoming, most: usize, memory: &BodyMemory) -> Result<Buffered<'_>, Problem> {
    let mut buffered = Buffered::new(memory);
    while let Some(frame) = body.frame().await {
        let cut_off = |_| Problem::new(StatusCode::BAD_REQUEST, "the body ended before it was complete");
        // Trailers are not read.
        if let Ok(part) = frame.map_err(cut_off)?.into_data() {
            buffered.push(&part, most)?;
        }
    }
    Ok(buffered)
}
