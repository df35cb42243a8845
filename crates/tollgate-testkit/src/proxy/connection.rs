//! One connection through the proxy: two streams, and what happens to the bytes between them.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};
use tokio::net::TcpStream;
use tokio::sync::watch::Receiver;

use super::Fault;
use super::timer::{Alarms, Timer};
use crate::random::Random;

/// What is read at once.
const CHUNK_MAX: usize = 16 * 1024;

/// Bytes under way in one direction. With a delay of a second, that lets 16 MiB a second through.
const UNDER_WAY_MAX: usize = 16 * 1024 * 1024;

/// How a connection ends that does not end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Reset,
    Close,
}

/// Whom a direction leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Towards {
    Client,
    Server,
}

/// Carries bytes between a client and the server until one of them, or a fault, ends it.
pub(super) async fn carry(
    client: TcpStream,
    upstream: SocketAddr,
    faults: Receiver<Fault>,
    chance: [Chance; 2],
) {
    let server = match connect(&client, upstream, faults.clone()).await {
        Ok(server) => server,
        Err(end) => return finish(end, &[&client]),
    };
    for stream in [&client, &server] {
        // It cannot fail but for a stream that is gone, which is noticed soon enough.
        let _ = stream.set_nodelay(true);
    }
    let [there, back] = chance;
    let there = Direction::new(&client, &server, Towards::Server, faults.clone(), there);
    let back = Direction::new(&server, &client, Towards::Client, faults, back);
    if let Err(end) = tokio::try_join!(there.run(), back.run()) {
        finish(end, &[&client, &server]);
    }
}

/// What decides when a direction carries its bytes.
pub(super) struct Chance {
    random: Random,
    timer: Timer,
}

impl Chance {
    pub(super) fn new(random: &mut Random, alarms: &Alarms) -> Self {
        Self { random: Random::new(random.number()), timer: alarms.timer() }
    }
}

/// Makes the streams end in the right way when they are dropped.
fn finish(end: End, streams: &[&TcpStream]) {
    if end == End::Reset {
        for stream in streams {
            let _ = stream.set_zero_linger();
        }
    }
}

/// Opens the way to the server, unless the client is to hear nothing of it.
async fn connect(
    client: &TcpStream,
    upstream: SocketAddr,
    mut faults: Receiver<Fault>,
) -> Result<TcpStream, End> {
    let fault = *faults.borrow_and_update();
    if fault == Fault::HalfOpen {
        // For the server this connection does not exist, so it cannot be carried later.
        return Err(swallow(client, &mut faults).await.err().unwrap_or(End::Reset));
    }
    tokio::select! {
        biased;
        end = end_by_fault(faults) => Err(end),
        server = TcpStream::connect(upstream) => server.map_err(|_| End::Reset),
    }
}

async fn end_by_fault(mut faults: Receiver<Fault>) -> End {
    let ends = |fault: &Fault| [Fault::Reset, Fault::Refuse].contains(fault);
    match faults.wait_for(ends).await.as_deref() {
        Ok(Fault::Reset) => End::Reset,
        _ => End::Close,
    }
}

/// Takes and throws away what the client sends until the fault changes, and says whether there was anything.
async fn swallow(client: &TcpStream, faults: &mut Receiver<Fault>) -> Result<bool, End> {
    let mut has_swallowed = false;
    let mut buffer = [0; 4096];
    loop {
        tokio::select! {
            biased;
            changed = faults.changed() => return changed.map(|()| has_swallowed).map_err(|_| End::Close),
            _ = client.readable() => match client.try_read(&mut buffer) {
                // The client has given up, and need not be fooled any longer.
                Ok(0) => return Err(End::Close),
                Ok(_) => has_swallowed = true,
                Err(why) if why.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return Err(End::Close),
            },
        }
    }
}

/// One of the two directions.
struct Direction<'a> {
    from: &'a TcpStream,
    to: &'a TcpStream,
    towards: Towards,
    faults: Receiver<Fault>,
    chance: Chance,
    buffer: Box<[u8; CHUNK_MAX]>,
    under_way: VecDeque<Chunk>,
    under_way_bytes: usize,
    /// Whether there is nothing more to read.
    is_read: bool,
    /// When the next byte of a drip may be written.
    next_drip: Instant,
    has_swallowed: bool,
}

/// Bytes that were read together.
struct Chunk {
    due: Instant,
    /// Without bytes, it is the end of the stream.
    bytes: Vec<u8>,
    written: usize,
}

impl<'a> Direction<'a> {
    fn new(
        from: &'a TcpStream,
        to: &'a TcpStream,
        towards: Towards,
        faults: Receiver<Fault>,
        chance: Chance,
    ) -> Self {
        Self {
            from,
            to,
            towards,
            faults,
            chance,
            buffer: Box::new([0; CHUNK_MAX]),
            under_way: VecDeque::new(),
            under_way_bytes: 0,
            is_read: false,
            next_drip: Instant::now(),
            has_swallowed: false,
        }
    }

    /// Runs until the end of the stream was carried over.
    async fn run(mut self) -> Result<(), End> {
        loop {
            let fault = *self.faults.borrow_and_update();
            match fault {
                Fault::None | Fault::Delay { .. } | Fault::Stall { .. } | Fault::Drip { .. } => {
                    if self.has_swallowed {
                        return Err(End::Reset);
                    }
                    if self.step(fault).await? {
                        return Ok(());
                    }
                }
                Fault::Reset => return Err(End::Reset),
                Fault::Refuse => return Err(End::Close),
                Fault::HalfOpen if self.towards == Towards::Server && !self.is_read => {
                    self.has_swallowed |= swallow(self.from, &mut self.faults).await?;
                }
                Fault::HalfOpen | Fault::Blackhole => {
                    self.faults.changed().await.map_err(|_| End::Close)?;
                }
            }
        }
    }

    /// Waits for the next thing that can be done and does it. True if it was the last.
    async fn step(&mut self, fault: Fault) -> Result<bool, End> {
        let due = self.under_way.front().map(|chunk| match self.drip(fault) {
            Some(_) => chunk.due.max(self.next_drip),
            None => chunk.due,
        });
        let later = due.filter(|due| *due > Instant::now());
        let is_due = due.is_some() && later.is_none();
        // Who does not take what is due slows down the one who sends, as without a proxy.
        let reads = !self.is_read && !is_due && self.under_way_bytes < UNDER_WAY_MAX;
        tokio::select! {
            biased;
            changed = self.faults.changed() => changed.map(|()| false).map_err(|_| End::Close),
            _ = self.to.writable(), if is_due => self.write(fault),
            () = self.chance.timer.until(later.unwrap_or(self.next_drip)), if later.is_some() => Ok(false),
            _ = self.from.readable(), if reads => self.read(fault).map(|()| false),
        }
    }

    fn read(&mut self, fault: Fault) -> Result<(), End> {
        let length = match self.from.try_read(&mut self.buffer[..]) {
            Ok(length) => length,
            Err(why) if why.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(_) => return Err(End::Reset),
        };
        self.is_read = length == 0;
        let hold = self.hold(fault);
        let mut written = 0;
        if length > 0 && hold.is_zero() && self.under_way.is_empty() && self.drip(fault).is_none() {
            written = try_write(self.to, &self.buffer[..length])?;
            if written == length {
                return Ok(());
            }
        }
        let due = Instant::now() + hold;
        let due = self.under_way.back().map_or(due, |last| due.max(last.due));
        let bytes = self.buffer[written..length].to_vec();
        self.under_way_bytes += bytes.len();
        self.under_way.push_back(Chunk { due, bytes, written: 0 });
        Ok(())
    }

    /// Writes of the first chunk what can be written. True if that was the end of the stream.
    fn write(&mut self, fault: Fault) -> Result<bool, End> {
        let drip = self.drip(fault);
        let Some(chunk) = self.under_way.front_mut() else { return Ok(false) };
        if chunk.bytes.is_empty() {
            // The other side may be gone already, which is as good.
            let _ = shutdown(self.to, Shutdown::Write);
            return Ok(true);
        }
        let left = &chunk.bytes[chunk.written..];
        let written = try_write(self.to, if drip.is_some() { &left[..1] } else { left })?;
        chunk.written += written;
        if chunk.written == chunk.bytes.len() {
            self.under_way_bytes -= chunk.bytes.len();
            self.under_way.pop_front();
        }
        if let (Some(pause), 1) = (drip, written) {
            self.next_drip = Instant::now() + pause;
        }
        Ok(false)
    }

    /// How long a chunk is held back.
    fn hold(&mut self, fault: Fault) -> Duration {
        match fault {
            Fault::Delay { each_way, jitter } => {
                let jitter_ns = u64::try_from(jitter.as_nanos()).unwrap_or(u64::MAX - 1);
                each_way + Duration::from_nanos(self.chance.random.below(jitter_ns + 1))
            }
            Fault::Stall { percent, pause } if self.chance.random.below(100) < u64::from(percent) => pause,
            Fault::None
            | Fault::Stall { .. }
            | Fault::Drip { .. }
            | Fault::Reset
            | Fault::HalfOpen
            | Fault::Blackhole
            | Fault::Refuse => Duration::ZERO,
        }
    }

    /// From one byte to the next, where this direction drips.
    fn drip(&self, fault: Fault) -> Option<Duration> {
        match (fault, self.towards) {
            (Fault::Drip { pause }, Towards::Client) => Some(pause),
            _ => None,
        }
    }
}

/// Writes as much as the stream takes now.
fn try_write(to: &TcpStream, bytes: &[u8]) -> Result<usize, End> {
    match to.try_write(bytes) {
        Ok(written) => Ok(written),
        Err(why) if why.kind() == ErrorKind::WouldBlock => Ok(0),
        Err(_) => Err(End::Reset),
    }
}
