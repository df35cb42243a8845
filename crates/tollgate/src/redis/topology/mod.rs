//! Which server decides on a key, and the call to it. One server, a primary that sentinels know, and the primaries of a
//! cluster differ only in how they are found.

mod discovery;
mod slot;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use redis::{Cmd, Pipeline, RedisResult, Value};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tollgate_core::BreakerState;

use crate::deadline::within;
use crate::redis::error::{Fault, Redirect, StoreError, connect_error, fault};
use crate::redis::protocol::Command;
use crate::redis::server::breaker::BreakerPermit;
use crate::redis::server::{ConnectOptions, Server, ServerContext, single};
use crate::redis::topology::slot::{SLOTS, slot_of};
use crate::redis::url::{Address, Shape};
use crate::tasks::Tasks;

/// Redirects that one call follows. A cluster that sends a call in circles is one that is changing hands.
const REDIRECTS_MAX: u32 = 3;
/// A deadline is taken some moments before it is looked at here.
const HASTE: Duration = Duration::from_millis(1);
/// How often one call makes its script known again. A server that forgets it each time is being flushed in a loop.
const RELOADS_MAX: u32 = 3;
/// How often a call is prepared anew because the server's clock was set meanwhile: once, and once more if it was set again.
const CORRECTIONS_MAX: u32 = 2;
/// Before a call is repeated that met keys on the move. It did not run.
const TRY_AGAIN_PAUSE: Duration = Duration::from_millis(2);
/// Nobody has this slot.
const NOBODY: u16 = u16::MAX;

/// The servers of a store.
pub(in crate::redis) struct Routes {
    pub(in crate::redis) shape: Shape,
    pub(in crate::redis) seeds: Vec<Address>,
    pub(in crate::redis) options: Arc<ConnectOptions>,
    /// Sentinels have users of their own.
    pub(in crate::redis) sentinel_options: ConnectOptions,
    pub(in crate::redis) table: RwLock<Table>,
    /// Told when the table is another one.
    pub(in crate::redis) changed: Notify,
    /// Told when the table may be wrong.
    pub(in crate::redis) doubt: Arc<Notify>,
    tasks: Tasks,
}

pub(in crate::redis) struct Table {
    pub(in crate::redis) servers: Vec<Arc<Server>>,
    /// The server of each slot. A store that is no cluster has one slot.
    slots: Vec<u16>,
    /// Why nobody is known, once that was found out.
    pub(in crate::redis) why: Option<StoreError>,
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

/// What a server answered, and between which instants it did.
pub(in crate::redis) struct Reply {
    pub(in crate::redis) value: Value,
    pub(in crate::redis) sent: Instant,
    pub(in crate::redis) received: Instant,
}

impl Routes {
    pub(in crate::redis) fn new(
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
    pub(in crate::redis) fn slot(&self, key: &str) -> u16 {
        if self.shape == Shape::Cluster { slot_of(key) } else { 0 }
    }

    /// Whether any decision can be had from every server that is known, or why not.
    pub(in crate::redis) fn health(&self) -> Result<(), StoreError> {
        let table = self.table.read();
        match (table.servers.as_slice(), &table.why) {
            ([], Some(why)) => Err(why.clone()),
            ([], None) => Err(self.not_yet()),
            (servers, _) => servers.iter().try_for_each(|server| server.health()),
        }
    }

    /// Whether the server of a slot is known and can be asked.
    pub(in crate::redis) fn is_available(&self, slot: u16) -> bool {
        let table = self.table.read();
        let number = table.slots.get(usize::from(slot)).copied().unwrap_or(NOBODY);
        table.servers.get(usize::from(number)).is_some_and(|server| server.health().is_ok())
    }

    /// The servers that are known, and what their breakers do.
    pub(in crate::redis) fn servers(&self) -> Vec<ServerStatus> {
        let table = self.table.read();
        let status = |server: &Arc<Server>| ServerStatus {
            server: Arc::clone(&server.name),
            breaker: server.breaker.state(),
            opened: server.breaker.opened(),
            evicts_by: server.evicts_by(),
        };
        table.servers.iter().map(status).collect()
    }

    /// A limit relies on it that failovers are seen.
    pub(in crate::redis) fn watch_failovers(&self) {
        if let Some(failovers) = &self.options.failovers {
            failovers.want();
        }
    }

    pub(in crate::redis) fn not_yet(&self) -> StoreError {
        let server = self.seeds.first().map_or_else(String::new, Address::to_string);
        StoreError::Unreachable { server: server.into(), why: "the store is still being found".into() }
    }

    /// Calls the server of `slot`. Follows redirects and repeats what did not run; nothing that may have run is repeated.
    pub(in crate::redis) async fn call(
        &self,
        key: &str,
        slot: u16,
        (hash, needs_time): (u64, bool),
        deadline: Instant,
        command: impl Fn(ServerContext) -> Command,
    ) -> Result<Reply, StoreError> {
        let begun = Instant::now();
        let late = || StoreError::Timeout(deadline.saturating_duration_since(begun));
        // Who waits less long than the store may take has only given up: that says nothing of the server.
        let is_patient = deadline.saturating_duration_since(begun) + HASTE >= self.options.patience;
        let mut server = match self.known_server(slot) {
            Some(server) => server,
            // What is seldom waited for is boxed here and below: a call is as large as its largest wait.
            None => Box::pin(self.server(slot, deadline)).await?,
        };
        let (mut asking, mut redirects, mut reloads, mut corrections) = (false, 0, 0, 0);
        let mut held: Option<BreakerPermit> = None;
        loop {
            let at = Arc::clone(&server);
            let permit = match held.take() {
                Some(permit) => permit,
                // Where no call goes through, or there is no connection, there may be another owner by now.
                None => at.permit(hash, begun).inspect_err(|_| self.doubt.notify_one())?,
            };
            let borrowed = match at.try_borrow(hash) {
                Some(borrowed) => Ok(borrowed),
                None => Box::pin(at.borrow(hash, deadline)).await,
            };
            let mut borrowed = match borrowed {
                Ok(borrowed) => borrowed,
                Err(why) => {
                    self.doubt.notify_one();
                    if is_patient {
                        permit.failed(&why);
                    }
                    return Err(why);
                }
            };
            let Command { said, script, .. } = command(at.context(needs_time));
            let connection = &mut borrowed.connection;
            let sent = Instant::now();
            let answer = match asking {
                true => within(deadline, Box::pin(send_asking(connection, &said))).await,
                false => {
                    let answer = pin!(connection.send_packed_command(&said));
                    within(deadline, answer).await.map(single)
                }
            };
            let error = match answer {
                Ok(Ok(value)) => {
                    let received = Instant::now();
                    permit.succeeded_at(received);
                    return Ok(Reply { value, sent, received });
                }
                Ok(Err(error)) => error,
                Err(_) => {
                    at.unanswered(&borrowed);
                    let why = late();
                    if is_patient {
                        permit.failed(&why);
                    }
                    return Err(why);
                }
            };
            asking = false;
            let why = match (fault(&error, &at.name, key), script) {
                (Fault::NoScript, Some(script)) if reloads < RELOADS_MAX => {
                    reloads += 1;
                    // The script is asked for where it was missing, which may be where a redirect has led.
                    asking = redirects > 0;
                    let load = Box::pin(at.reload(script, &mut borrowed, sent));
                    match timeout_at(deadline, load).await {
                        Ok(Ok(())) => {
                            held = Some(permit);
                            continue;
                        }
                        Ok(Err(error)) => match fault(&error, &at.name, key) {
                            Fault::Broken(why) | Fault::Demoted(why) => {
                                at.lost(&borrowed);
                                why
                            }
                            Fault::Answered(why) => why,
                            Fault::NoScript
                            | Fault::Moved(_)
                            | Fault::Ask(_)
                            | Fault::TryAgain
                            | Fault::OtherTime(_) => StoreError::protocol(&error),
                        },
                        // The script was missing, and has not run.
                        Err(_) => return Err(late()),
                    }
                }
                (Fault::NoScript, _) => {
                    let why = "a script is gone as soon as it is loaded".into();
                    StoreError::Unavailable { server: Arc::clone(&at.name), why }
                }
                (Fault::Moved(redirect), _) if redirects < REDIRECTS_MAX => {
                    redirects += 1;
                    server = self.moved(&redirect, &at);
                    permit.succeeded();
                    continue;
                }
                (Fault::Ask(redirect), _) if redirects < REDIRECTS_MAX => {
                    redirects += 1;
                    asking = true;
                    server = self.adopt(&redirect.address(&at));
                    server.ask();
                    permit.succeeded();
                    continue;
                }
                (Fault::Moved(_) | Fault::Ask(_), _) => {
                    self.doubt.notify_one();
                    let why = "the cluster sends this key in circles".into();
                    StoreError::Unavailable { server: Arc::clone(&at.name), why }
                }
                (Fault::OtherTime(us), _) if corrections < CORRECTIONS_MAX => {
                    corrections += 1;
                    asking = redirects > 0;
                    at.set_clock(us);
                    permit.succeeded();
                    continue;
                }
                (Fault::OtherTime(_), _) => {
                    let why = "its clock jumps back and forth".into();
                    StoreError::Unavailable { server: Arc::clone(&at.name), why }
                }
                (Fault::TryAgain, _) => {
                    asking = redirects > 0;
                    permit.succeeded();
                    Box::pin(timeout_at(deadline, sleep(TRY_AGAIN_PAUSE))).await.map_err(|_| late())?;
                    continue;
                }
                (Fault::Broken(why), _) => {
                    at.lost(&borrowed);
                    why
                }
                (Fault::Demoted(why), _) => {
                    // Behind the same name there may be another server by now.
                    at.lost(&borrowed);
                    self.doubt.notify_one();
                    why
                }
                // A key that is not ours says nothing of its server.
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
            return Err(why);
        }
    }

    /// Says something to the server of a key that nobody waits for. It goes past the breaker and does not count against the
    /// server; that something was written counts for it, so that a breaker closes even where nobody asks. (A server without memory, or one
    /// that has become a replica, still answers those who only read.) What is redirected is said to the right one next time.
    pub(in crate::redis) async fn send(
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

    /// The server of a slot, as soon as one is known.
    async fn server(&self, slot: u16, deadline: Instant) -> Result<Arc<Server>, StoreError> {
        loop {
            let changed = self.changed.notified();
            {
                let table = self.table.read();
                let number = table.slots.get(usize::from(slot)).copied().unwrap_or(NOBODY);
                match (table.servers.get(usize::from(number)), &table.why) {
                    (Some(server), _) => return Ok(Arc::clone(server)),
                    (None, Some(why)) => {
                        self.doubt.notify_one();
                        return Err(why.clone());
                    }
                    (None, None) => {}
                }
            }
            if timeout_at(deadline, changed).await.is_err() {
                return Err(self.not_yet());
            }
        }
    }

    /// The server at an address, which is known from now on.
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

    /// A slot has a new owner.
    fn moved(&self, redirect: &Redirect, by: &Server) -> Arc<Server> {
        let server = self.adopt(&redirect.address(by));
        let mut table = self.table.write();
        let number = table.servers.iter().position(|known| Arc::ptr_eq(known, &server));
        if let (Some(number), Some(owner)) = (number, table.slots.get_mut(usize::from(redirect.slot))) {
            *owner = number as u16;
        }
        // Its neighbours have probably moved as well.
        self.doubt.notify_one();
        server
    }

    /// The table as it was found. Nodes without slots are let go.
    pub(in crate::redis) fn replace(&self, found: Vec<(Address, std::ops::RangeInclusive<u16>)>) {
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
        // A slot without owner is told apart from a store that is still being found.
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

/// The host that was named, or that of the one who named none.
pub(in crate::redis) fn host_or(named: &str, by: &Address) -> String {
    match by {
        Address::Tcp { host, .. } if named.is_empty() || named == "?" => host.clone(),
        Address::Tcp { .. } | Address::Unix(_) => named.to_owned(),
    }
}

/// A command for a slot that is on the move to the server that is asked.
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
