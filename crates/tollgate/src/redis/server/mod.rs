//! One server: its connections, its scripts and its clock. Lost connections are opened again.

pub(crate) mod breaker;
mod eviction;
mod expiry;
pub(crate) mod failover;
mod reach;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, IntoConnectionInfo, Pipeline, RedisConnectionInfo,
    RedisError, RedisResult, TlsCertificates, Value,
};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tollgate_core::{BreakerConfig, Timestamp};

use crate::redis::error::{StoreError, connect_error, is_refusal};
use crate::redis::key_prefix::KeyPrefix;
use crate::redis::protocol::{SCRIPTS, Script};
use crate::redis::server::breaker::{BreakerPermit, ServerBreaker};
use crate::redis::server::eviction::{evicts, maxmemory_policy};
use crate::redis::server::expiry::{blocks_on_expiry, warn_of_blocking_expiry};
use crate::redis::server::failover::{Failover, Failovers};
use crate::redis::server::reach::Reach;
use crate::redis::url::Address;

/// How to connect to servers.
pub(crate) struct ConnectOptions {
    pub(crate) tls: bool,
    pub(crate) certificates: TlsCertificates,
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: i64,
    /// The time limit for opening a connection, until it can decide.
    pub(crate) connect_timeout: Duration,
    /// Connections to each server.
    pub(crate) connections: usize,
    /// The prefix of every key.
    pub(crate) key_prefix: KeyPrefix,
    /// Whether servers must say that they are primaries.
    pub(crate) primaries_only: bool,
    /// The settings of the circuit breaker.
    pub(crate) breaker: BreakerConfig,
    /// A server that does not answer within this is too slow.
    pub(crate) patience: Duration,
    /// The known data histories. `None` for servers without states.
    pub(crate) failovers: Option<Arc<Failovers>>,
}

/// Commands that a connection queues before the next one waits: one write carries them.
const PIPELINE_COMMANDS: usize = 1_024;
/// The first and the longest pause between two attempts to connect.
const PAUSE_MIN: Duration = Duration::from_millis(50);
pub(crate) const PAUSE_MAX: Duration = Duration::from_millis(500);
/// The pause after a refusal that needs a person: less than one attempt a second, so that no account is locked for it.
pub(crate) const PAUSE_REFUSED: Duration = Duration::from_millis(1_100);
/// How long a server without slots is kept after it was asked for a moving key.
const ASKED_FOR: Duration = Duration::from_secs(60);
/// A connection that does not answer a PING within this time is dead. Longer than the pauses of a healthy server.
const SILENCE_MAX: Duration = Duration::from_millis(500);
/// After this much silence, the server is probed for reachability.
const DOUBTED_AFTER: Duration = Duration::from_millis(100);
/// How long an attempt to connect to a reachable server lasts before the next attempt, at first. The time doubles each time: a stopped
/// server answers the first attempt when it resumes, and each further attempt only fills its queue.
const RENEW_MIN: Duration = Duration::from_secs(10);
const RENEW_MAX: Duration = Duration::from_secs(320);
/// How often a connection is tested with a PING, so that a dead one is found before the next request.
const PING_EVERY: Duration = Duration::from_secs(1);
/// How often while the breaker is open because the server was too slow.
const PING_SLOW: Duration = Duration::from_millis(50);
/// A connection that is lost within this time was useless. After a second one, the next attempt is delayed as after a failure.
const USEFUL_MIN: Duration = Duration::from_secs(1);

impl ConnectOptions {
    /// A client for one server.
    pub(crate) fn client(&self, address: &Address) -> RedisResult<Client> {
        let place = match address {
            Address::Unix(path) => ConnectionAddr::Unix(path.clone()),
            Address::Tcp { host, port } if self.tls => {
                ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None }
            }
            Address::Tcp { host, port } => ConnectionAddr::Tcp(host.clone(), *port),
        };
        let mut redis = RedisConnectionInfo::default()
            .set_db(self.database)
            .set_lib_name("tollgate", env!("CARGO_PKG_VERSION"));
        if let Some(username) = &self.username {
            redis = redis.set_username(username);
        }
        if let Some(password) = &self.password {
            redis = redis.set_password(password);
        }
        let info = place
            .into_connection_info()?
            .set_redis_settings(redis)
            .set_tcp_settings(TcpSettings::default().set_nodelay(true));
        match self.tls {
            true => Client::build_with_tls(info, self.certificates.clone()),
            false => Client::open(info),
        }
    }

    /// Opens a connection.
    pub(crate) async fn connect(&self, address: &Address) -> RedisResult<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            // Callers wait for `connect_timeout` at most, and each call has its own deadline, counted from before it was sent.
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(PIPELINE_COMMANDS);
        self.client(address)?.get_multiplexed_async_connection_with_config(&config).await
    }
}

/// One server.
pub(crate) struct Server {
    pub(crate) address: Address,
    pub(crate) name: Arc<str>,
    options: Arc<ConnectOptions>,
    pool: Box<[PooledConnection]>,
    /// Since when it writes its own history, if that is known.
    failover: Mutex<Option<Failover>>,
    /// The `maxmemory-policy` of the server, if it may evict states.
    evicts_by: Mutex<Option<String>>,
    /// Whether the warning about blocking expiry was logged.
    warned_of_expiry: AtomicBool,
    /// Tests whether it is reachable while it does not answer.
    reach: tokio::sync::Mutex<Reach>,
    /// The last time read from the server, in microseconds, and when.
    clock: Mutex<Option<(u64, Instant)>>,
    is_clock_estimated: AtomicBool,
    /// When each script was last loaded because it was missing. Each script has its own lock.
    loaded: Box<[tokio::sync::Mutex<Option<Instant>>]>,
    /// When it was last asked for a moving key. Such a server may have no slots yet.
    asked: Mutex<Option<Instant>>,
    /// The circuit breaker.
    pub(crate) breaker: Arc<ServerBreaker>,
    /// Notified when a connection is lost or cannot be opened: the server may no longer be the right one.
    pub(crate) doubt: Arc<Notify>,
    pub(crate) retired: CancellationToken,
}

/// One connection of the pool: open, being opened, or closed with the reason.
struct PooledConnection {
    state: RwLock<PooledState>,
    changed: Notify,
    lost: Notify,
    /// Notified when a call was not answered in time.
    doubted: Notify,
    opened: AtomicU64,
}

enum PooledState {
    /// The connection is being opened. Callers wait.
    Opening,
    Open {
        connection: MultiplexedConnection,
        number: u64,
    },
    /// The last attempt has failed. Callers get the reason at once.
    Closed(StoreError),
}

impl PooledConnection {
    /// Sets the reason why there is no connection, unless there is one already.
    fn close_if_opening(&self, why: StoreError) {
        let mut state = self.state.write();
        if matches!(*state, PooledState::Opening) {
            *state = PooledState::Closed(why);
        }
        drop(state);
        self.changed.notify_waiters();
    }
}

/// The data of a server that commands need.
#[derive(Clone, Copy)]
pub(crate) struct ServerContext {
    /// The time, where a script may not read it.
    pub(crate) now: Option<Timestamp>,
    /// The approximate time of its clock, if it was asked for. A script that reads the clock may find another time.
    pub(crate) about: Timestamp,
    /// Since when it writes its own history, if that is known.
    pub(crate) failover: Option<Failover>,
}

/// A connection borrowed for one call.
pub(crate) struct Borrowed {
    pub(crate) connection: MultiplexedConnection,
    index: usize,
    number: u64,
}

impl Server {
    pub(crate) fn new(address: Address, options: Arc<ConnectOptions>, doubt: Arc<Notify>) -> Self {
        let pooled = |_| PooledConnection {
            state: RwLock::new(PooledState::Opening),
            changed: Notify::new(),
            lost: Notify::new(),
            doubted: Notify::new(),
            opened: AtomicU64::new(0),
        };
        let name: Arc<str> = address.to_string().into();
        let breaker = ServerBreaker::new(Arc::clone(&name), options.breaker);
        Self {
            name,
            address,
            pool: (0..options.connections.max(1)).map(pooled).collect(),
            options,
            clock: Mutex::new(None),
            evicts_by: Mutex::new(None),
            warned_of_expiry: AtomicBool::new(false),
            reach: tokio::sync::Mutex::default(),
            failover: Mutex::new(None),
            is_clock_estimated: AtomicBool::new(false),
            loaded: SCRIPTS.all().map(|_| tokio::sync::Mutex::default()).collect(),
            asked: Mutex::new(None),
            breaker,
            doubt,
            retired: CancellationToken::new(),
        }
    }

    /// The number of connections in its pool.
    pub(crate) fn pool_size(&self) -> usize {
        self.pool.len()
    }

    /// Records that it is asked for a moving key.
    pub(crate) fn ask(&self) {
        *self.asked.lock() = Some(Instant::now());
    }

    /// Whether keys are moving here.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.lock().is_some_and(|asked| asked.elapsed() < ASKED_FOR)
    }

    fn pool_index(&self, hash: u64) -> usize {
        (hash % self.pool.len() as u64) as usize
    }

    /// Lets a call on keys of this hash through the breaker, or returns why not. A connection that has failed since the breaker
    /// opened is newer evidence of reachability.
    pub(crate) fn permit(&self, hash: u64, now: Instant) -> Result<BreakerPermit, StoreError> {
        self.breaker.permit(now).map_err(|mut refusal| {
            if let (StoreError::BreakerOpen { reachable, .. }, PooledState::Closed(why)) =
                (&mut refusal, &*self.pool[self.pool_index(hash)].state.read())
            {
                *reachable = why.is_reachable();
            }
            refusal
        })
    }

    /// A connection for keys of this hash, if there is one.
    pub(crate) fn try_borrow(&self, hash: u64) -> Option<Borrowed> {
        let index = self.pool_index(hash);
        match &*self.pool[index].state.read() {
            PooledState::Open { connection, number } => {
                Some(Borrowed { connection: connection.clone(), index, number: *number })
            }
            PooledState::Opening | PooledState::Closed(_) => None,
        }
    }

    /// Waits for a connection for keys of this hash.
    pub(crate) async fn borrow(&self, hash: u64, deadline: Instant) -> Result<Borrowed, StoreError> {
        let index = self.pool_index(hash);
        let pooled = &self.pool[index];
        loop {
            let changed = pooled.changed.notified();
            match &*pooled.state.read() {
                PooledState::Open { connection, number } => {
                    return Ok(Borrowed { connection: connection.clone(), index, number: *number });
                }
                PooledState::Closed(why) => return Err(why.clone()),
                PooledState::Opening => {}
            }
            let opened = async {
                tokio::select! {
                    () = changed => true,
                    () = self.retired.cancelled() => false,
                }
            };
            if !matches!(timeout_at(deadline, opened).await, Ok(true)) {
                return Err(self.opening());
            }
        }
    }

    /// The reason while a connection is being opened. The server counts as reachable until an attempt has failed.
    fn opening(&self) -> StoreError {
        StoreError::Unavailable { server: Arc::clone(&self.name), why: "a connection is being opened".into() }
    }

    /// Records that a call on this connection was not answered in time.
    pub(crate) fn unanswered(&self, borrowed: &Borrowed) {
        self.pool[borrowed.index].doubted.notify_one();
    }

    /// Drops a broken connection.
    pub(crate) fn lost(&self, borrowed: &Borrowed) {
        let pooled = &self.pool[borrowed.index];
        if self.forget(pooled, borrowed.number, PooledState::Opening) {
            pooled.lost.notify_one();
        }
    }

    /// Drops a connection, unless it was opened again since.
    fn forget(&self, pooled: &PooledConnection, lost: u64, instead: PooledState) -> bool {
        let mut state = pooled.state.write();
        let current = matches!(&*state, PooledState::Open { number, .. } if *number == lost);
        if current {
            *state = instead;
            self.doubt.notify_one();
        }
        current
    }

    /// Waits for an answer of the server. On a timeout, the error says whether the server is reachable.
    async fn answered<T>(&self, within: Duration, answer: impl Future<Output = T>) -> Result<T, StoreError> {
        let reached = async {
            sleep(DOUBTED_AFTER).await;
            self.reach.lock().await.ask(&self.address).await
        };
        let (mut answer, mut reached) = (pin!(timeout(within, answer)), pin!(reached));
        let mut is_reached = None;
        let answered = loop {
            tokio::select! {
                answered = answer.as_mut() => break answered,
                told = reached.as_mut(), if is_reached.is_none() => is_reached = Some(told),
            }
        };
        if let Ok(answered) = answered {
            if is_reached.is_some() {
                self.reach.lock().await.forget();
            }
            return Ok(answered);
        }
        // In a process that was delayed, both timers end at the same time, before the probe has run.
        let is_reached = match is_reached {
            Some(told) => told,
            None => reached.await,
        };
        let (server, silence) =
            (Arc::clone(&self.name), format!("no answer within {} ms", within.as_millis()));
        match is_reached {
            true => {
                let tls = if self.options.tls { " (does it speak TLS at this port?)" } else { "" };
                Err(StoreError::Unavailable { server, why: format!("{silence}{tls}").into() })
            }
            false => {
                let why = format!("{silence}, and the server cannot be reached").into();
                Err(StoreError::Unreachable { server, why })
            }
        }
    }

    /// The message of a server that has too many clients, read without sending anything. A client that sends a command is often cut
    /// off before it can read the message.
    async fn refusal_of_strangers(&self) -> Option<String> {
        let Address::Tcp { host, port } = &self.address else { return None };
        let listen = async {
            let stream = TcpStream::connect((host.as_str(), *port)).await.ok()?;
            let mut said = [0; 64];
            stream.readable().await.ok()?;
            let length = stream.try_read(&mut said).ok()?;
            let said = String::from_utf8_lossy(&said[..length]).trim().to_owned();
            said.contains("max number of clients").then_some(said)
        };
        timeout(DOUBTED_AFTER, listen).await.ok().flatten()
    }

    /// Whether any connection is open and calls go through, or why not.
    pub(crate) fn health(&self) -> Result<(), StoreError> {
        self.breaker.health()?;
        let mut why = None;
        for pooled in &self.pool {
            match &*pooled.state.read() {
                PooledState::Open { .. } => return Ok(()),
                PooledState::Closed(closed) => why = Some(closed.clone()),
                PooledState::Opening => {}
            }
        }
        Err(why.unwrap_or_else(|| self.opening()))
    }

    /// The data that a command needs, with the time of its clock only if needed.
    pub(crate) fn context(&self, needs_time: bool) -> ServerContext {
        let is_estimated = self.is_clock_estimated.load(Ordering::Relaxed);
        let estimated = if needs_time || is_estimated { self.estimated_now() } else { None };
        ServerContext {
            now: estimated.filter(|_| is_estimated),
            // If the clock was never read, the script answers with the right time.
            about: estimated.unwrap_or_default(),
            failover: *self.failover.lock(),
        }
    }

    /// The estimated time of the server, never ahead of it unless its clock was set back.
    fn estimated_now(&self) -> Option<Timestamp> {
        let (us, read) = (*self.clock.lock())?;
        Some(Timestamp::from_micros(us + read.elapsed().as_micros() as u64))
    }

    /// Records the time of the server's clock.
    pub(crate) fn set_clock(&self, us: u64) {
        *self.clock.lock() = Some((us, Instant::now()));
    }

    /// Keeps one connection open until the server is retired.
    pub(crate) async fn keep_open(self: Arc<Self>, index: usize) {
        let retired = self.retired.clone();
        tokio::select! {
            () = retired.cancelled() => {}
            () = self.reopen(&self.pool[index]) => {}
        }
    }

    async fn reopen(&self, pooled: &PooledConnection) {
        let mut pause = PAUSE_MIN;
        let mut short_lived = false;
        let mut said: Option<String> = None;
        let mut renew = RENEW_MIN;
        loop {
            let began = Instant::now();
            match self.open(pooled, &mut said, renew).await {
                Ok(connection) => {
                    renew = RENEW_MIN;
                    if said.take().is_some() {
                        tracing::info!(server = %self.name, "connected again");
                    }
                    let opened = Instant::now();
                    let number = pooled.opened.fetch_add(1, Ordering::Relaxed) + 1;
                    *pooled.state.write() = PooledState::Open { connection: connection.clone(), number };
                    pooled.changed.notify_waiters();
                    self.breaker.reachable();
                    self.until_lost(pooled, connection, number).await;
                    if opened.elapsed() >= USEFUL_MIN {
                        (pause, short_lived) = (PAUSE_MIN, false);
                        continue;
                    }
                    // Once may be an accident. The next attempt tells more.
                    if !std::mem::replace(&mut short_lived, true) {
                        continue;
                    }
                    let why = "it was lost as soon as it was opened".into();
                    pooled.close_if_opening(StoreError::Unavailable { server: Arc::clone(&self.name), why });
                    sleep(jittered(pause)).await;
                    pause = PAUSE_MAX.min(pause * 2);
                }
                Err(why) => {
                    let refused = matches!(why, StoreError::Refused { .. });
                    self.not_opened(pooled, why, &mut said);
                    if began.elapsed() >= renew {
                        renew = RENEW_MAX.min(renew * 2);
                    }
                    if began.elapsed() >= self.options.connect_timeout {
                        // The attempt was pause enough: a silent server may answer a moment later.
                        pause = PAUSE_MIN;
                    }
                    sleep(jittered(if refused { PAUSE_REFUSED } else { pause })).await;
                    pause = PAUSE_MAX.min(pause * 2);
                }
            }
        }
    }

    /// Records that an attempt to connect has failed or lasts too long. Each reason is logged once.
    fn not_opened(&self, pooled: &PooledConnection, why: StoreError, said: &mut Option<String>) {
        let text = why.to_string();
        if said.as_ref() != Some(&text) {
            tracing::warn!(server = %self.name, "{text}");
        }
        *said = Some(text);
        *pooled.state.write() = PooledState::Closed(why);
        pooled.changed.notify_waiters();
        self.doubt.notify_one();
    }

    async fn until_lost(
        &self,
        pooled: &PooledConnection,
        mut connection: MultiplexedConnection,
        number: u64,
    ) {
        loop {
            tokio::select! {
                () = pooled.lost.notified() => return,
                () = pooled.doubted.notified() => {}
                () = sleep(if self.breaker.is_slow() { PING_SLOW } else { PING_EVERY }) => {}
            }
            let asked = Instant::now();
            let lives = async {
                if self.is_clock_estimated.load(Ordering::Relaxed) {
                    return self.read_clock(&mut connection).await;
                }
                redis::cmd("PING").exec_async(&mut connection).await
            };
            let dead = match self.answered(SILENCE_MAX, lives).await {
                Ok(Ok(())) => {
                    if asked.elapsed() <= self.options.patience {
                        self.breaker.prompt();
                    }
                    None
                }
                // A server that answers with an error is alive.
                Ok(Err(error)) => {
                    (error.is_io_error() || error.is_connection_dropped()).then_some(PooledState::Opening)
                }
                Err(silent) => Some(PooledState::Closed(silent)),
            };
            if let Some(instead) = dead {
                self.forget(pooled, number, instead);
                return;
            }
        }
    }

    /// Opens a connection and prepares it: the scripts, the clock, the role of the server. If the server is reachable but does not answer,
    /// the attempt goes on, because the server will answer on this connection first. Meanwhile callers get the reason.
    async fn open(
        &self,
        pooled: &PooledConnection,
        said: &mut Option<String>,
        renew: Duration,
    ) -> Result<MultiplexedConnection, StoreError> {
        let began = Instant::now();
        let mut opening = pin!(self.open_once());
        loop {
            match self.answered(self.options.connect_timeout, opening.as_mut()).await {
                Ok(opened) => return opened,
                Err(silent) if silent.is_reachable() && began.elapsed() < renew => {
                    self.not_opened(pooled, silent, said);
                }
                Err(silent) => return Err(silent),
            }
        }
    }

    async fn open_once(&self) -> Result<MultiplexedConnection, StoreError> {
        let opening = async {
            let mut connection = self.options.connect(&self.address).await?;
            // A short command first: a server that refuses the client would close a busy connection without a reason.
            redis::cmd("PING").exec_async(&mut connection).await?;
            if self.options.primaries_only {
                self.expect_primary(&mut connection).await?;
            }
            load(&mut connection, SCRIPTS.all()).await?;
            self.read_clock(&mut connection).await?;
            self.probe_clock(&mut connection).await?;
            self.look_at_history(&mut connection).await;
            if blocks_on_expiry(&mut connection).await && !self.warned_of_expiry.swap(true, Ordering::Relaxed)
            {
                warn_of_blocking_expiry(&self.name);
            }
            self.warn_of_eviction(&mut connection).await;
            RedisResult::Ok(connection)
        };
        let error = match opening.await {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        if error.is_connection_dropped()
            && let Some(why) = self.refusal_of_strangers().await
        {
            return Err(StoreError::Unavailable { server: Arc::clone(&self.name), why: why.into() });
        }
        Err(connect_error(&error, &self.name))
    }

    async fn expect_primary(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        match redis::cmd("ROLE").query_async(connection).await {
            Ok(Value::Array(role)) if matches!(role.first(), Some(Value::BulkString(name)) if name == b"master") => {
                Ok(())
            }
            Ok(_) => Err((redis::ErrorKind::Client, "it is no primary (yet)").into()),
            // Without the privilege to ask, the first write tells.
            Err(error) if error.to_string().contains("NOPERM") => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Loads a script that the server has forgotten, once for all calls that were sent before.
    pub(crate) async fn reload(
        &self,
        script: &'static Script,
        borrowed: &mut Borrowed,
        sent: Instant,
    ) -> RedisResult<()> {
        let number = SCRIPTS.all().position(|known| known.sha == script.sha).unwrap_or_default();
        let mut loaded = self.loaded[number].lock().await;
        if loaded.is_none_or(|loaded| loaded < sent) {
            load(&mut borrowed.connection, [script]).await?;
            *loaded = Some(Instant::now());
        }
        Ok(())
    }

    /// Tests whether scripts may read the time before they write. Servers before version 5 do not allow it.
    async fn probe_clock(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        let mut probe = Pipeline::new();
        probe.cmd("SCRIPT").arg("LOAD").arg(&SCRIPTS.probe.source);
        probe.cmd("EVALSHA").arg(&SCRIPTS.probe.sha).arg(0).arg(format!("{}:probe", self.options.key_prefix));
        let answer = connection.send_packed_commands(&probe, 1, 1).await?.pop().unwrap_or(Value::Nil);
        let error = match single(Ok(answer)) {
            // Without this privilege the server cannot decide.
            Err(error) if is_refusal(&error) => return Err(error),
            Err(error) => error.to_string(),
            Ok(_) => String::new(),
        };
        if error.contains("non deterministic") && !self.is_clock_estimated.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                server = %self.name,
                "scripts may not read the time here: it is estimated from the server's TIME, never ahead of it"
            );
        }
        Ok(())
    }

    async fn read_clock(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        let (secs, us): (u64, u64) = redis::cmd("TIME").query_async(connection).await?;
        self.set_clock(secs * 1_000_000 + us);
        Ok(())
    }

    /// Reads when the server became primary or restarted, because a limit with `failover_guard` may be added at any time.
    async fn look_at_history(&self, connection: &mut MultiplexedConnection) {
        let Some(failovers) = &self.options.failovers else { return };
        match failovers.look(connection).await {
            Ok(failover) => *self.failover.lock() = failover,
            Err(why) => failovers.unseen(format!("{}: {why}", self.name)),
        }
    }

    /// Warns of a server that may evict states when its memory is full, once for each eviction policy. If the user may not read the
    /// policy, that is logged.
    async fn warn_of_eviction(&self, connection: &mut MultiplexedConnection) {
        let policy = match maxmemory_policy(connection).await {
            Ok(policy) => policy.filter(|policy| evicts(policy)),
            Err(why) => {
                tracing::info!(server = %self.name, "cannot tell whether the server evicts keys: {why}");
                return;
            }
        };
        let before = std::mem::replace(&mut *self.evicts_by.lock(), policy.clone());
        if let Some(policy) = policy.filter(|policy| before.as_ref() != Some(policy)) {
            tracing::warn!(
                server = %self.name,
                policy,
                "the server may evict keys when its memory is full, which resets limits silently; \
                 set maxmemory-policy to noeviction"
            );
        }
    }

    /// The `maxmemory-policy` of the server, if it may evict states under it.
    pub(crate) fn evicts_by(&self) -> Option<String> {
        self.evicts_by.lock().clone()
    }
}

/// Loads scripts into a server.
async fn load(
    connection: &mut MultiplexedConnection,
    scripts: impl IntoIterator<Item = &'static Script>,
) -> RedisResult<()> {
    let scripts: Vec<_> = scripts.into_iter().collect();
    let mut load = Pipeline::new();
    for script in &scripts {
        load.cmd("SCRIPT").arg("LOAD").arg(&script.source);
    }
    let answers = connection.send_packed_commands(&load, 0, load.len()).await?;
    for (script, answer) in scripts.iter().zip(answers) {
        let name = single(Ok(answer))?;
        if !matches!(&name, Value::BulkString(sha) if *sha == script.sha.as_bytes()) {
            let why = (redis::ErrorKind::Client, "SCRIPT LOAD was answered strangely", format!("{name:?}"));
            return Err(why.into());
        }
    }
    Ok(())
}

/// Turns an error answer into an error.
pub(crate) fn single(answer: RedisResult<Value>) -> RedisResult<Value> {
    match answer {
        Ok(Value::ServerError(error)) => Err(RedisError::from(error)),
        other => other,
    }
}

/// A pause with up to a quarter more, so that nodes do not come at the same time.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let mut byte = [0];
    // Without randomness the pause is the plain one.
    let _ = getrandom::fill(&mut byte);
    pause + pause / 4 * u32::from(byte[0]) / 256
}
