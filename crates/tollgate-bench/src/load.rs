//! A load of HTTP requests from one core: as fast as the answers come, or at a rate that does not wait for them.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::keys::Random;

/// Requests, already written out, of which each connection sends any.
pub(crate) type Requests = Vec<Vec<u8>>;

/// What a load has seen.
pub(crate) struct Seen {
    pub(crate) requests: u64,
    /// Answers other than 200 and 429.
    pub(crate) failures: u64,
    pub(crate) took: Duration,
    /// In microseconds.
    pub(crate) latency: Histogram<u64>,
}

impl Seen {
    pub(crate) fn per_second(&self) -> f64 {
        self.requests as f64 / self.took.as_secs_f64()
    }

    pub(crate) fn p99_ms(&self) -> f64 {
        self.latency.value_at_quantile(0.99) as f64 / 1_000.0
    }
}

/// How a connection goes on to its next request.
#[derive(Clone, Copy)]
pub(crate) enum Pace {
    /// When the last one was answered.
    Closed,
    /// At its time, whether or not the last one was answered in time: a slow answer delays, and shows in, the next ones.
    Open {
        /// Between two requests of a connection.
        every: Duration,
    },
}

/// Runs a load on this thread.
pub(crate) fn run(
    server: SocketAddr,
    requests: &Requests,
    connections: u64,
    duration: Duration,
    pace: Pace,
) -> Result<Seen> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    let start = Instant::now();
    let requests = std::rc::Rc::new(requests.clone());
    let tasks: Vec<_> = (0..connections)
        .map(|number| {
            let requests = std::rc::Rc::clone(&requests);
            local.spawn_local(async move {
                connection(server, &requests, number, connections, start, duration, pace).await
            })
        })
        .collect();
    let mut seen = Seen { requests: 0, failures: 0, took: Duration::ZERO, latency: Histogram::new(3)? };
    local.block_on(&runtime, async {
        for task in tasks {
            let (latency, failures) = task.await??;
            seen.requests += latency.len();
            seen.failures += failures;
            seen.latency.add(latency)?;
        }
        Ok::<_, anyhow::Error>(())
    })?;
    seen.took = start.elapsed();
    ensure!(seen.failures == 0, "{} of {} answers were neither 200 nor 429", seen.failures, seen.requests);
    Ok(seen)
}

async fn connection(
    server: SocketAddr,
    requests: &Requests,
    number: u64,
    connections: u64,
    start: Instant,
    duration: Duration,
    pace: Pace,
) -> Result<(Histogram<u64>, u64)> {
    let mut stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    let mut random = Random(number + 1);
    let mut latency = Histogram::new(3)?;
    let mut failures = 0;
    let mut buffer = Vec::with_capacity(4_096);
    let mut due = start;
    if let Pace::Open { every } = pace {
        due += every.mul_f64(number as f64 / connections as f64);
    }
    while due.duration_since(start) < duration && start.elapsed() < duration * 2 {
        match pace {
            Pace::Closed => due = Instant::now(),
            Pace::Open { .. } => tokio::time::sleep_until(due.into()).await,
        }
        let request = &requests[(random.next() % requests.len() as u64) as usize];
        stream.write_all(request).await?;
        let status = read_response(&mut stream, &mut buffer).await?;
        failures += u64::from(!matches!(status, 200 | 429));
        latency.record(due.elapsed().as_micros() as u64)?;
        match pace {
            Pace::Closed => due = Instant::now(),
            Pace::Open { every } => due += every,
        }
    }
    Ok((latency, failures))
}

/// Reads one response with a `content-length`, and says its status.
async fn read_response(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<u16> {
    buffer.clear();
    loop {
        if stream.read_buf(buffer).await? == 0 {
            bail!("the server hung up");
        }
        let Some(head) = buffer.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let text = std::str::from_utf8(&buffer[..head])?;
        let status = text.get(9..12).context("no status")?.parse()?;
        let length = text.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("content-length").then(|| value.parse::<usize>().ok())?
        });
        let whole = head + 4 + length.context("no content-length")?;
        while buffer.len() < whole {
            if stream.read_buf(buffer).await? == 0 {
                bail!("the server hung up");
            }
        }
        return Ok(status);
    }
}
