//! Routes a call to the server that owns the key. A single server, a primary behind Sentinel, and the primaries of a cluster
//! differ only in how they are found.

mod discovery;
mod slot;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tollgate_core::BreakerState;

use crate::deadline::within;
use crate::redis::error::{Fault, Redirect, StoreError, connect_error, fault};
use crate::redis::protocol::{Command, Script};
use crate::redis::server::breaker::BreakerPermit;
use crate::redis::server::{Borrowed, ConnectOptions, Server, ServerContext, single};
use crate::redis::topology::slot::{SLOTS, slot_of};
use crate::redis::url::{Address, Shape};
use crate::tasks::Tasks;

/// Redirects that one call follows. A cluster that redirects more often is being resharded.
const REDIRECTS_MAX: u32 = 3;
/// Time that may pass between setting a deadline and comparing it here.
const HASTE: Duration = Duration::from_millis(1);
/// How often one call loads its script again. A server that forgets it each time is being flushed in a loop.
const RELOADS_MAX: u32 = 3;
/// How often a call is prepared again because the server's clock was set: once, and once more if it was set again.
const CORRECTIONS_MAX: u32 = 2;
/// The pause before a call is repeated that met keys on the move. It did not run.
const TRY_AGAIN_PAUSE: Duration = Duration::from_millis(2);
/// Marks a slot without an owner.
const NOBODY: u16 = u16::MAX;

/// The servers of a store.
pub(crate) struct Routes {
    pub(crate) shape: Shape,
    pub(crate) seeds: Vec<Address>,
    pub(crate) options: Arc<ConnectOptions>,
    /// Sentinels have credentials of their own.
    pub(crate) sentinel_options: ConnectOptions,
    pub(crate) table: RwLock<Table>,
    /// Notified when the table has changed.
    pub(crate) changed: Notify,
    /// Notified when the table may be wrong.
    pub(crate) doubt: Arc<Notify>,
    tasks: Tasks,
}

pub(crate) struct Table {
    pub(crate) servers: Vec<Arc<Server>>,
    /// The server of each slot. A store that is not a cluster has one slot.
    slots: Vec<u16>,
    /// Why no server is known, once the first search has failed.
    pub(crate) why: Option<StoreError>,
}

/// One server of a store.
#[derive(Clone, Debug)]
pub struct ServerStatus {
    /// Its address.
    pub server: Arc<str>,
    /// Whether calls go to it.
    pub breaker: BreakerState,
    /// How often its breaker has opened.
    pub opened: u64,
    /// Its `maxmemory-policy`, if it may evict states under it: any but `noeviction`.
    pub evicts_by: Option<String>,
}

/// The answer of a server, and when it was sent and received.
pub(crate) struct Reply {
    pub(crate) value: Value,
    pub(crate) sent: Instant,
    pub(crate) received: Instant,
}

impl Routes {
    pub(crate) fn new(
        shape: Shape,
        seeds: Vec<Address>,
        options: ConnectOptions,
        sentinel_options: ConnectOptions,
        tasks: Tasks,
    ) -> Arc<Self> {
        let slots = if shape == Shape::Cluster { SLOTS } else { 1 };
        let routes = Arc::new(Self {
            options: Arc::new(options),
            sentinel_options,
            table: RwLock::new(Table { servers: Vec::new(), slots: vec![NOBODY; slots], why: None }),
            changed: Notify::new(),
            doubt: Arc::new(Notify::new()),
            tasks,
            shape,
            seeds,
        });
        match &routes.shape {
            Shape::Standalone => {
                if let Some(address) = routes.seeds.first() {
                    routes.adopt(address);
                    routes.table.write().slots[0] = 0;
                }
            }
            Shape::Sentinel { master } => {
                routes.look_for_servers();
                for sentinel in &routes.seeds {
                    let (this, sentinel, master) = (Arc::clone(&routes), sentinel.clone(), master.clone());
                    routes.tasks.keep_running(move || {
                        Arc::clone(&this).watch_switches(sentinel.clone(), master.clone())
                    });
                }
            }
            Shape::Cluster => routes.look_for_servers(),
        }
        routes
    }

    fn look_for_servers(self: &Arc<Self>) {
        let this = Arc::clone(self);
        self.tasks.keep_running(move || Arc::clone(&this).keep_looking());
    }

    /// The slot of a key in this store.
    pub(crate) fn slot(&self, key: &str) -> u16 {
        if self.shape == Shape::Cluster { slot_of(key) } else { 0 }
    }

    /// Whether every known server can be asked, or why not.
    pub(crate) fn health(&self) -> Result<(), StoreError> {
        let table = self.table.read();
        match (table.servers.as_slice(), &table.why) {
            ([], Some(why)) => Err(why.clone()),
            ([], None) => Err(self.not_yet()),
            (servers, _) => servers.iter().try_for_each(|server| server.health()),
        }
    }

    /// Whether the server of a slot is known and can be asked.
    pub(crate) fn is_available(&self, slot: u16) -> bool {
        self.known_server(slot).is_some_and(|server| server.health().is_ok())
    }

    /// The known servers, and the states of their breakers.
    pub(crate) fn servers(&self) -> Vec<ServerStatus> {
        let table = self.table.read();
        let status = |server: &Arc<Server>| ServerStatus {
            server: Arc::clone(&server.name),
            breaker: server.breaker.state(),
            opened: server.breaker.opened(),
            evicts_by: server.evicts_by(),
        };
        table.servers.iter().map(status).collect()
    }

    /// Makes failovers known to limits that rely on it.
    pub(crate) fn watch_failovers(&self) {
        if let Some(failovers) = &self.options.failovers {
            failovers.want();
        }
    }

    pub(crate) fn not_yet(&self) -> StoreError {
        let server = self.seeds.first().map_or_else(String::new, Address::to_string);
        StoreError::Unreachable { server: server.into(), why: "the store is still being found".into() }
    }

    /// Calls the server of `slot`. Follows redirects and repeats calls that did not run; a call that may have run is never repeated.
    pub(crate) async fn call(
        &self,
        key: &str,
        slot: u16,
        (hash, needs_time): (u64, bool),
        deadline: Instant,
        command: impl Fn(ServerContext) -> Command,
    ) -> Result<Reply, StoreError> {
        let begun = Instant::now();
        // A caller that waits less long than the store may take has only given up: that says nothing about the server.
        let is_patient = deadline.saturating_duration_since(begun) + HASTE >= self.options.patience;
        let server = match self.known_server(slot) {
            Some(server) => server,
            // Rare waits are boxed here and below: a call is as large as its largest wait.
            None => Box::pin(self.server(slot, deadline)).await?,
        };
        let mut attempt =
            Attempt { key, begun, deadline, server, asking: false, redirects: 0, reloads: 0, corrections: 0 };
        let mut held: Option<BreakerPermit> = None;
        loop {
            let at = Arc::clone(&attempt.server);
            let permit = match held.take() {
                Some(permit) => permit,
                // If no call goes through, or there is no connection, the slot may have another owner.
                None => at.permit(hash, begun).inspect_err(|_| self.doubt.notify_one())?,
            };
            let fail = |permit: BreakerPermit, why: StoreError| {
                if is_patient {
                    permit.failed(&why);
                }
                Err(why)
            };
            let borrowed = match at.try_borrow(hash) {
                Some(borrowed) => Ok(borrowed),
                None => Box::pin(at.borrow(hash, deadline)).await,
            };
            let mut borrowed = match borrowed {
                Ok(borrowed) => borrowed,
                Err(why) => {
                    self.doubt.notify_one();
                    return fail(permit, why);
                }
            };
            let Command { said, script, .. } = command(at.context(needs_time));
            let connection = &mut borrowed.connection;
            let sent = Instant::now();
            let answer = match attempt.asking {
                true => within(deadline, Box::pin(send_asking(connection, &said))).await,
                false => {
                    let answer = pin!(connection.send_packed_command(&said));
                    within(deadline, answer).await.map(single)
                }
            };
            match answer {
                Ok(Ok(value)) => {
                    let received = Instant::now();
                    permit.succeeded_at(received);
                    return Ok(Reply { value, sent, received });
                }
                Ok(Err(error)) => {
                    let failed = Failed { error, script, borrowed: &mut borrowed, sent, permit };
                    held = Box::pin(self.recover(&mut attempt, failed)).await?;
                }
                Err(_) => {
                    at.unanswered(&borrowed);
                    return fail(permit, attempt.late());
                }
            }
        }
    }

    /// Prepares another attempt after an error, with the permit if it is still needed, or fails.
    async fn recover(
        &self,
        attempt: &mut Attempt<'_>,
        failed: Failed<'_>,
    ) -> Result<Option<BreakerPermit>, StoreError> {
        let Failed { error, script, borrowed, sent, permit } = failed;
        let at = Arc::clone(&attempt.server);
        let unavailable =
            |why: &str| StoreError::Unavailable { server: Arc::clone(&at.name), why: why.into() };
        let is_redirected = attempt.redirects > 0;
        attempt.asking = false;
        let why = match (fault(&error, &at.name, attempt.key), script) {
            (Fault::NoScript, Some(script)) if attempt.reloads < RELOADS_MAX => {
                attempt.reloads += 1;
                // The script is loaded where it was missing, which may be where a redirect has led.
                attempt.asking = is_redirected;
                match timeout_at(attempt.deadline, at.reload(script, borrowed, sent)).await {
                    Ok(Ok(())) => return Ok(Some(permit)),
                    Ok(Err(error)) => reload_failure(&error, &at, borrowed, attempt.key),
                    // The script was missing, and has not run.
                    Err(_) => return Err(attempt.late()),
                }
            }
            (Fault::NoScript, _) => unavailable("a script is gone as soon as it is loaded"),
            (Fault::Moved(redirect), _) if attempt.redirects < REDIRECTS_MAX => {
                attempt.redirects += 1;
                attempt.server = self.moved(&redirect, &at);
                permit.succeeded();
                return Ok(None);
            }
            (Fault::Ask(redirect), _) if attempt.redirects < REDIRECTS_MAX => {
                attempt.redirects += 1;
                attempt.asking = true;
                attempt.server = self.adopt(&redirect.address(&at));
                attempt.server.ask();
                permit.succeeded();
                return Ok(None);
            }
            (Fault::Moved(_) | Fault::Ask(_), _) => {
                self.doubt.notify_one();
                unavailable("the cluster sends this key in circles")
            }
            (Fault::OtherTime(us), _) if attempt.corrections < CORRECTIONS_MAX => {
                attempt.corrections += 1;
                attempt.asking = is_redirected;
                at.set_clock(us);
                permit.succeeded();
                return Ok(None);
            }
            (Fault::OtherTime(_), _) => unavailable("its clock jumps back and forth"),
            (Fault::TryAgain, _) => {
                attempt.asking = is_redirected;
                permit.succeeded();
                let pause = timeout_at(attempt.deadline, sleep(TRY_AGAIN_PAUSE)).await;
                return pause.map(|()| None).map_err(|_| attempt.late());
            }
            (Fault::Broken(why), _) => {
                at.lost(borrowed);
                why
            }
            (Fault::Demoted(why), _) => {
                // The same name may belong to another server by now.
                at.lost(borrowed);
                self.doubt.notify_one();
                why
            }
            // A key with a foreign value says nothing about its server.
            (Fault::Answered(why @ StoreError::Foreign { .. }), _) => {
                permit.succeeded();
                return Err(why);
            }
            (Fault::Answered(why), _) => {
                if matches!(why, StoreError::Unavailable { .. } | StoreError::Unreachable { .. }) {
                    self.doubt.notify_one();
                }
                why
            }
        };
        permit.failed(&why);
        Err(why)
    }

    /// Sends a background command to the server of a key. It bypasses the breaker, and a failure does not count. A successful write counts
    /// for the server, so that its breaker closes even without requests. (A server without memory, or a replica, still answers reads.) A
    /// redirected command reaches the right server the next time.
    pub(crate) async fn send(
        &self,
        key: &str,
        deadline: Instant,
        command: impl Fn(ServerContext) -> Command,
    ) -> Result<Value, StoreError> {
        let began = Instant::now();
        let late = |_| StoreError::Timeout(deadline - began);
        let server = self.server(self.slot(key), deadline).await?;
        let mut borrowed = server.borrow(0, deadline).await?;
        let Command { said, script, writes } = command(server.context(false));
        let mut is_reloaded = false;
        loop {
            let sent = Instant::now();
            let answer = timeout_at(deadline, borrowed.connection.send_packed_command(&said)).await;
            let error = match single(answer.map_err(late)?) {
                Ok(value) => {
                    if writes {
                        server.breaker.record_background_success();
                    }
                    return Ok(value);
                }
                Err(error) => error,
            };
            let why = match (fault(&error, &server.name, key), script) {
                (Fault::NoScript, Some(script)) if !is_reloaded => {
                    is_reloaded = true;
                    let reloaded = timeout_at(deadline, server.reload(script, &mut borrowed, sent)).await;
                    match reloaded.map_err(late)? {
                        Ok(()) => continue,
                        Err(error) => connect_error(&error, &server.name),
                    }
                }
                (Fault::Moved(redirect), _) => {
                    self.moved(&redirect, &server);
                    self.not_yet()
                }
                (Fault::Broken(why) | Fault::Demoted(why) | Fault::Answered(why), _) => why,
                (Fault::NoScript | Fault::Ask(_) | Fault::TryAgain | Fault::OtherTime(_), _) => {
                    connect_error(&error, &server.name)
                }
            };
            return Err(why);
        }
    }

    /// The server of a slot, if one is known.
    fn known_server(&self, slot: u16) -> Option<Arc<Server>> {
        let table = self.table.read();
        let number = *table.slots.get(usize::from(slot))?;
        table.servers.get(usize::from(number)).map(Arc::clone)
    }

    /// Waits for the server of a slot.
    async fn server(&self, slot: u16, deadline: Instant) -> Result<Arc<Server>, StoreError> {
        loop {
            let changed = self.changed.notified();
            if let Some(server) = self.known_server(slot) {
                return Ok(server);
            }
            if let Some(why) = self.table.read().why.clone() {
                self.doubt.notify_one();
                return Err(why);
            }
            if timeout_at(deadline, changed).await.is_err() {
                return Err(self.not_yet());
            }
        }
    }

    /// Adds the server at an address, if it is not known.
    fn adopt(&self, address: &Address) -> Arc<Server> {
        let mut table = self.table.write();
        if let Some(server) = table.servers.iter().find(|server| server.address == *address) {
            return Arc::clone(server);
        }
        let server =
            Arc::new(Server::new(address.clone(), Arc::clone(&self.options), Arc::clone(&self.doubt)));
        for pooled in 0..server.pool_size() {
            let server = Arc::clone(&server);
            self.tasks.keep_running(move || Arc::clone(&server).keep_open(pooled));
        }
        table.servers.push(Arc::clone(&server));
        server
    }

    /// Records the new owner of a slot.
    fn moved(&self, redirect: &Redirect, by: &Server) -> Arc<Server> {
        let server = self.adopt(&redirect.address(by));
        let mut table = self.table.write();
        let number = table.servers.iter().position(|known| Arc::ptr_eq(known, &server));
        if let (Some(number), Some(owner)) = (number, table.slots.get_mut(usize::from(redirect.slot))) {
            *owner = number as u16;
        }
        // Neighbouring slots have probably moved as well.
        self.doubt.notify_one();
        server
    }

    /// Replaces the table. Servers without slots are retired.
    pub(crate) fn replace(&self, found: Vec<(Address, std::ops::RangeInclusive<u16>)>) {
        let mut slots = vec![NOBODY; self.table.read().slots.len()];
        for (address, range) in &found {
            let server = self.adopt(address);
            let table = self.table.read();
            if let Some(number) = table.servers.iter().position(|known| Arc::ptr_eq(known, &server)) {
                for slot in range.clone() {
                    if let Some(owner) = slots.get_mut(usize::from(slot)) {
                        *owner = number as u16;
                    }
                }
            }
        }
        let mut table = self.table.write();
        let table = &mut *table;
        let kept: Vec<_> = table
            .servers
            .iter()
            .map(|server| server.is_asked() || found.iter().any(|(address, _)| *address == server.address))
            .collect();
        let mut numbers = Vec::with_capacity(kept.len());
        let mut next = 0;
        for kept in &kept {
            numbers.push(if *kept { next } else { NOBODY });
            next += u16::from(*kept);
        }
        for (server, _) in table.servers.iter().zip(&kept).filter(|(_, kept)| !**kept) {
            tracing::info!(server = %server.name, "no longer a primary of the store");
            server.retired.cancel();
        }
        let mut kept = kept.into_iter();
        table.servers.retain(|_| kept.next().unwrap_or(false));
        for slot in &mut slots {
            *slot = numbers.get(usize::from(*slot)).copied().unwrap_or(NOBODY);
        }
        table.slots = slots;
        // A slot without an owner is another failure than a store that is still being found.
        table.why = Some(StoreError::Unreachable {
            server: "the cluster".into(),
            why: "no server owns this slot".into(),
        });
        self.changed.notify_waiters();
    }
}

impl Redirect {
    fn address(&self, by: &Server) -> Address {
        Address::Tcp { host: host_or(&self.host, &by.address), port: self.port }
    }
}

/// The named host, or the host of the server that named none.
pub(crate) fn host_or(named: &str, by: &Address) -> String {
    match by {
        Address::Tcp { host, .. } if named.is_empty() || named == "?" => host.clone(),
        Address::Tcp { .. } | Address::Unix(_) => named.to_owned(),
    }
}

/// A call under way, with counts of its attempts.
struct Attempt<'a> {
    key: &'a str,
    begun: Instant,
    deadline: Instant,
    server: Arc<Server>,
    /// Whether the slot is on the move to this server.
    asking: bool,
    redirects: u32,
    reloads: u32,
    corrections: u32,
}

impl Attempt<'_> {
    fn late(&self) -> StoreError {
        StoreError::Timeout(self.deadline.saturating_duration_since(self.begun))
    }
}

/// A call that was answered with an error.
struct Failed<'a> {
    error: RedisError,
    script: Option<&'static Script>,
    borrowed: &'a mut Borrowed,
    sent: Instant,
    permit: BreakerPermit,
}

/// Why a script could not be loaded again.
fn reload_failure(error: &RedisError, server: &Server, borrowed: &Borrowed, key: &str) -> StoreError {
    match fault(error, &server.name, key) {
        Fault::Broken(why) | Fault::Demoted(why) => {
            server.lost(borrowed);
            why
        }
        Fault::Answered(why) => why,
        Fault::NoScript | Fault::Moved(_) | Fault::Ask(_) | Fault::TryAgain | Fault::OtherTime(_) => {
            StoreError::protocol(error)
        }
    }
}

/// Sends a command for a slot that is on the move to this server.
async fn send_asking(
    connection: &mut redis::aio::MultiplexedConnection,
    command: &Cmd,
) -> RedisResult<Value> {
    let mut both = Pipeline::new();
    both.cmd("ASKING");
    both.add_command(command.clone());
    let mut answers = connection.send_packed_commands(&both, 0, 2).await?;
    single(Ok(answers.pop().unwrap_or(Value::Nil)))
}
