//! A TCP proxy in front of one server, which carries bytes as badly as a test wants.

mod connection;
mod timer;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use connection::Chance;
use timer::Alarms;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::port::free_port;
use crate::random::Random;

/// How many connections may wait to be accepted. In a black hole they pile up there, and beyond this number connects
/// would hang, which is another fault.
const BACKLOG: u32 = 1024;

/// How long another program may hold the port when the proxy listens again.
const LISTEN_PATIENCE: Duration = Duration::from_secs(5);

/// How the proxy carries what it is given, in both directions unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// At once, and as it came.
    #[default]
    None,
    /// Later, as over a long line: what follows is read meanwhile, so throughput stays.
    Delay {
        /// How much later at least.
        each_way: Duration,
        /// At most this much later than that, at random. The order is kept.
        jitter: Duration,
    },
    /// At once, but some pieces, and whatever comes after them, wait.
    Stall {
        /// How many in a hundred wait.
        percent: u8,
        /// How long they wait.
        pause: Duration,
    },
    /// Towards the client one byte at a time, and towards the server at once.
    Drip {
        /// From one byte to the next.
        pause: Duration,
    },
    /// Not at all: every connection is reset, as are new ones as soon as they are accepted.
    Reset,
    /// Dropped without an error: the proxy reads and discards all data, and sends nothing. New
    /// connections are accepted, and do not reach the server. A connection that has lost bytes is reset when the fault
    /// ends: TCP never leaves bytes out, and answers would be taken for those of other questions.
    HalfOpen,
    /// Not at all: nothing is read, written, accepted or closed. All of it goes on when the fault ends.
    Blackhole,
    /// The proxy does not listen: connections are closed, and new ones refused.
    Refuse,
}

/// The proxy. It listens as long as it lives, and closes all connections when it is dropped.
#[derive(Debug)]
pub struct ChaosProxy {
    address: SocketAddr,
    counts: Arc<Counts>,
    /// None once it ends.
    orders: Option<UnboundedSender<Order>>,
    thread: Option<JoinHandle<()>>,
}

/// A change, and whom to tell when it has taken place.
struct Order {
    change: Change,
    done: mpsc::Sender<()>,
}

#[derive(Clone, Copy)]
enum Change {
    Fault(Fault),
    Upstream(SocketAddr),
}

#[derive(Debug, Default)]
struct Counts {
    open: AtomicUsize,
    accepted: AtomicU64,
}

impl ChaosProxy {
    /// Listens on a free port of 127.0.0.1 and carries everything to the server at once. A client whose connection the
    /// server refuses is accepted and reset. The seed decides what happens by chance.
    ///
    /// # Panics
    /// If there is no free port.
    pub fn start(upstream: SocketAddr, seed: u64) -> Self {
        let counts = Arc::new(Counts::default());
        let (orders, inbox) = unbounded_channel();
        let (tell, told) = mpsc::channel();
        let counts_there = Arc::clone(&counts);
        // A thread of its own: the proxy goes on while the test's thread waits, and may be made by a test that has a
        // runtime itself.
        let thread = std::thread::spawn(move || {
            // Dropped after the runtime, whose tasks have timers.
            let alarms = Alarms::start();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be made").block_on(async {
                let (listener, address) = listen_anywhere();
                let acceptor = Acceptor {
                    upstream,
                    address,
                    listener: Some(listener),
                    faults: watch::Sender::new(Fault::None),
                    connections: JoinSet::new(),
                    counts: counts_there,
                    random: Random::new(seed),
                    alarms: &alarms,
                };
                tell.send(address).expect("the proxy's maker waits");
                acceptor.run(inbox).await;
            });
        });
        let address = told.recv().expect("the proxy listens");
        Self { address, counts, orders: Some(orders), thread: Some(thread) }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Behaves like this from now on, for all connections. What was given a time to be carried at keeps that time. When
    /// this returns, the change has taken place.
    ///
    /// # Panics
    /// If it cannot listen again after [`Fault::Refuse`], because another program was quicker to take the port.
    pub fn set(&self, fault: Fault) {
        self.order(Change::Fault(fault));
    }

    /// Leads to another server from now on: a failover behind one address. Connections that are open are reset.
    pub fn lead_to(&self, upstream: SocketAddr) {
        self.order(Change::Upstream(upstream));
    }

    fn order(&self, change: Change) {
        let (done, is_done) = mpsc::channel();
        let sent = self.orders.as_ref().is_some_and(|orders| orders.send(Order { change, done }).is_ok());
        assert!(sent && is_done.recv().is_ok(), "the proxy on {} has failed", self.address);
    }

    /// How many connections are open now. Ends that are not read, as in a black hole, are not noticed.
    pub fn connections(&self) -> usize {
        self.counts.open.load(Ordering::Relaxed)
    }

    /// How many connections were accepted so far, those that were reset at once included.
    pub fn accepted(&self) -> u64 {
        self.counts.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for ChaosProxy {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // Had it panicked, the test has been told already.
            let _ = thread.join();
        }
    }
}

/// What runs in the proxy's thread.
struct Acceptor<'a> {
    upstream: SocketAddr,
    address: SocketAddr,
    /// None while connections are refused.
    listener: Option<TcpListener>,
    faults: watch::Sender<Fault>,
    connections: JoinSet<()>,
    counts: Arc<Counts>,
    random: Random,
    alarms: &'a Alarms,
}

impl Acceptor<'_> {
    async fn run(mut self, mut inbox: UnboundedReceiver<Order>) {
        loop {
            tokio::select! {
                biased;
                order = inbox.recv() => match order {
                    Some(Order { change, done }) => {
                        match change {
                            Change::Fault(fault) => self.apply(fault).await,
                            Change::Upstream(upstream) => {
                                let fault = *self.faults.borrow();
                                self.upstream = upstream;
                                self.apply(Fault::Reset).await;
                                self.apply(fault).await;
                            }
                        }
                        // The caller may have been killed meanwhile.
                        let _ = done.send(());
                    }
                    None => return,
                },
                Some(end) = self.connections.join_next() => end.expect("a connection's task does not panic"),
                accepted = accept(self.listener.as_ref()), if *self.faults.borrow() != Fault::Blackhole => {
                    match accepted {
                        Ok(client) => self.admit(client),
                        // Too many files are open, or the client is gone already: not a reason to give up.
                        Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                    }
                }
            }
        }
    }

    /// All tasks run in one thread and look at the fault before they read or write, so none acts on the old one after
    /// this.
    async fn apply(&mut self, fault: Fault) {
        self.faults.send_replace(fault);
        match fault {
            Fault::Reset | Fault::Refuse => {
                if fault == Fault::Refuse {
                    self.listener = None;
                }
                while self.connections.join_next().await.is_some() {}
            }
            Fault::None
            | Fault::Delay { .. }
            | Fault::Stall { .. }
            | Fault::Drip { .. }
            | Fault::HalfOpen
            | Fault::Blackhole => {}
        }
        if fault != Fault::Refuse && self.listener.is_none() {
            self.listener = Some(listen_again(self.address).await);
        }
    }

    fn admit(&mut self, client: TcpStream) {
        self.counts.accepted.fetch_add(1, Ordering::Relaxed);
        let open = Open::new(&self.counts);
        let (upstream, faults) = (self.upstream, self.faults.subscribe());
        let chance = [(); 2].map(|()| Chance::new(&mut self.random, self.alarms));
        self.connections.spawn(async move {
            connection::carry(client, upstream, faults, chance).await;
            drop(open);
        });
    }
}

/// A connection that counts as open.
struct Open(Arc<Counts>);

impl Open {
    fn new(counts: &Arc<Counts>) -> Self {
        counts.open.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(counts))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn accept(listener: Option<&TcpListener>) -> io::Result<TcpStream> {
    match listener {
        Some(listener) => listener.accept().await.map(|(client, _)| client),
        None => std::future::pending().await,
    }
}

fn listen_anywhere() -> (TcpListener, SocketAddr) {
    loop {
        let address = (Ipv4Addr::LOCALHOST, free_port()).into();
        // Another program may be quicker to take the port; there is another port then.
        if let Ok(listener) = listen(address) {
            return (listener, address);
        }
    }
}

async fn listen_again(address: SocketAddr) -> TcpListener {
    let start = Instant::now();
    loop {
        match listen(address) {
            Ok(listener) => return listener,
            Err(why) => {
                assert!(start.elapsed() < LISTEN_PATIENCE, "cannot listen on {address} again: {why}");
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    // The remains of earlier connections must not keep the proxy from listening again.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
