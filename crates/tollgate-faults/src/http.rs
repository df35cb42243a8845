//! Clients of the service: each keeps a connection to a node and asks at a steady pace, however long answers take.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::record::{Ground, Record, now_us};
use crate::traffic::{LIMITS, Traffic, key_name};

/// Clients of each node.
const CLIENTS: u64 = 8;
/// Between two checks of a client.
const PACE: Duration = Duration::from_millis(40);
/// A client gives up after this: far beyond anything that is promised.
const PATIENCE: Duration = Duration::from_secs(5);

/// Clients of all nodes, in threads of their own.
pub(crate) struct Load {
    runtime: Option<tokio::runtime::Runtime>,
    records: Arc<Mutex<Vec<Record>>>,
    stop: CancellationToken,
}

impl Load {
    pub(crate) fn start(nodes: &[SocketAddr], seed: u64) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime starts");
        let (records, stop) = (Arc::new(Mutex::new(Vec::new())), CancellationToken::new());
        for (index, node) in nodes.iter().enumerate() {
            for client in 0..CLIENTS {
                let traffic =
                    Traffic::new(seed ^ (index as u64 * CLIENTS + client).wrapping_mul(0x9e37_79b9));
                let client = Client {
                    node: index as u8 + 1,
                    address: *node,
                    traffic,
                    first: Instant::now() + PACE * client as u32 / CLIENTS as u32,
                    records: Arc::clone(&records),
                };
                let stop = stop.clone();
                runtime.spawn(async move {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = client.run() => {}
                    }
                });
            }
        }
        Self { runtime: Some(runtime), records, stop }
    }

    /// Ends it. Checks under way are not counted.
    pub(crate) fn finish(mut self) -> Vec<Record> {
        self.stop.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
        std::mem::take(&mut self.records.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

struct Client {
    node: u8,
    address: SocketAddr,
    traffic: Traffic,
    first: Instant,
    records: Arc<Mutex<Vec<Record>>>,
}

impl Client {
    async fn run(mut self) {
        let mut connection = None;
        let mut due = self.first;
        loop {
            sleep_until(due).await;
            due += PACE;
            if connection.is_none() {
                // A client without access has asked nothing.
                connection = TcpStream::connect(self.address).await.ok();
            }
            let Some(mut stream) = connection.take() else { continue };
            let _ = stream.set_nodelay(true);
            let (limit, key) = self.traffic.next();
            let start_us = now_us();
            let answer = timeout(PATIENCE, exchange(&mut stream, limit, key)).await;
            let at_us = now_us();
            let (status, ground) = match answer {
                Ok(Ok(Answer { status, ground, last })) => {
                    if !last {
                        connection = Some(stream);
                    }
                    (status, ground)
                }
                Ok(Err(_)) | Err(_) => (0, Ground::None),
            };
            let took_us = at_us - start_us;
            let allowed = status == 200;
            let record = Record { at_us, took_us, node: self.node, limit, key, allowed, ground, status };
            self.records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        }
    }
}

struct Answer {
    status: u16,
    ground: Ground,
    /// No further request is answered on this connection.
    last: bool,
}

async fn exchange(stream: &mut TcpStream, limit: u8, key: u32) -> std::io::Result<Answer> {
    let algorithm = LIMITS[usize::from(limit)].algorithm;
    let key = key_name(key);
    let request = format!(
        "GET /api/v1/rate-limit/check?key={key}&algorithm={algorithm} HTTP/1.1\r\nhost: localhost\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::with_capacity(1024);
    loop {
        let cut_off = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(cut_off());
        }
        let text = String::from_utf8_lossy(&bytes);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let header = |name: &str| {
            head.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim_start_matches(": "))
        };
        let length: usize = header("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
        if body.len() < length {
            continue;
        }
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).ok_or_else(cut_off)?;
        let ground = match header("x-tollgate-basis") {
            Some("exact") => Ground::Exact,
            Some("leased") => Ground::Leased,
            Some("local") => Ground::Local,
            Some("open") => Ground::Open,
            Some("closed") => Ground::Closed,
            Some(_) | None => Ground::None,
        };
        return Ok(Answer { status, ground, last: header("connection") == Some("close") });
    }
}
