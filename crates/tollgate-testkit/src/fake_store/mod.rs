//! A store in memory with the interface of the real one: for tests of guards and leases, and for the simulation.

mod call;
mod laws;
mod server;

use std::collections::BTreeMap;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::DropGuard;
use tollgate::lease::Lease as HeldLease;
use tollgate::{
    Backend, Check, Clock, Deadlines, Driver, HashedKey, LeaseGrant, LeaseRequest, LeaseTerms, Limit,
    LimitId, LimitSettings, Store, StoreError, Tasks, Timestamp, TooManyLimits, Verdict, Verdicts,
};

pub(crate) use self::call::{Asked, Call, FakeLimit, Link, Place, Reply, Returned};
pub(crate) use self::laws::Law;
pub(crate) use self::server::{Noted, Server};

/// One node's access to a store in memory, which decides as the real one does. Clones share everything.
///
/// Deadlines are kept in tokio's time, which may be paused.
#[derive(Clone)]
pub struct FakeStore(Arc<Inner>);

struct Inner {
    link: Arc<dyn Link>,
    clock: Clock,
    tasks: Tasks,
    deadlines: Deadlines,
    faults: Mutex<Faults>,
    limits: Mutex<Limits>,
    _stop: DropGuard,
}

#[derive(Default)]
struct Limits {
    added: u32,
    by_id: BTreeMap<LimitId, Arc<FakeLimit>>,
}

/// What is wrong with the store, seen from this node.
#[derive(Clone, Default)]
struct Faults {
    error: Option<StoreError>,
    is_silent: bool,
    latency: Duration,
    nodes: Option<u32>,
}

impl FakeStore {
    /// How long callers wait, unless their limit says otherwise, and how long calls of leased limits may take: as with the real store.
    const DEADLINES: Deadlines =
        Deadlines { wait: Duration::from_millis(10), call: Duration::from_millis(500) };

    /// A store of its own that answers at once, by the time of `clock`, and the driver of its background tasks.
    pub fn new(clock: Clock) -> (Self, Driver) {
        let server = Mutex::new(Server::new(0, None));
        let link = Direct { server: Arc::new(server), clock: clock.clone() };
        Self::over(Arc::new(link), clock, Self::DEADLINES)
    }

    /// Access to whatever is at the other end of a link.
    pub(crate) fn over(link: Arc<dyn Link>, clock: Clock, deadlines: Deadlines) -> (Self, Driver) {
        // One worker, on any machine: a simulation runs the same everywhere.
        let (tasks, driver, stop) = Tasks::with_workers(1);
        let inner = Inner {
            link,
            clock,
            tasks,
            deadlines,
            faults: Mutex::default(),
            limits: Mutex::default(),
            _stop: stop,
        };
        (Self(Arc::new(inner)), driver)
    }

    /// Fails every call at once with this error, or lets calls through again.
    pub fn fail_with(&self, error: Option<StoreError>) {
        self.faults().error = error;
    }

    /// Lets calls reach the store and loses the answers, or delivers them again.
    pub fn set_silent(&self, is_silent: bool) {
        self.faults().is_silent = is_silent;
    }

    /// Delays every answer.
    pub fn set_latency(&self, latency: Duration) {
        self.faults().latency = latency;
    }

    /// Says how many nodes share the store.
    pub fn set_nodes(&self, nodes: Option<u32>) {
        self.faults().nodes = nodes;
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        lock(&self.0.faults)
    }

    fn limit(&self, id: LimitId) -> Result<Arc<FakeLimit>, StoreError> {
        lock(&self.0.limits).by_id.get(&id).cloned().ok_or(StoreError::Removed)
    }

    fn place(&self, limit: LimitId, key: HashedKey<'_>) -> Result<Place, StoreError> {
        Ok(Place { limit: self.limit(limit)?, key: key.text().into() })
    }

    fn asked(&self, check: &Check<'_>) -> Result<Asked, StoreError> {
        let place = self.place(check.limit, check.key)?;
        Ok(Asked { place, ask: check.ask, enforced: check.enforced })
    }

    async fn call(&self, call: Call, deadline: Duration) -> Result<Reply, StoreError> {
        let Faults { error, is_silent, latency, .. } = self.faults().clone();
        if let Some(error) = error {
            return Err(error);
        }
        let carried = async {
            let reply = self.0.link.carry(call).await;
            if is_silent {
                pending::<()>().await;
            }
            if !latency.is_zero() {
                sleep(latency).await;
            }
            reply
        };
        timeout(deadline, carried).await.unwrap_or(Err(StoreError::Timeout(deadline)))
    }

    /// Makes a call whose answer is nothing but that it was done.
    async fn done(&self, call: Call, deadline: Duration) -> Result<(), StoreError> {
        match self.call(call, deadline).await? {
            Reply::Done => Ok(()),
            Reply::Decided(_) | Reply::LeaseGrant(..) | Reply::Returned(_) => Err(mismatch()),
        }
    }
}

impl Backend for FakeStore {
    type Error = StoreError;

    fn add_limit(
        &self,
        scope: &str,
        limit: Limit,
        settings: &LimitSettings,
    ) -> Result<LimitId, TooManyLimits> {
        let mut limits = lock(&self.0.limits);
        let id = LimitId::new(limits.added);
        limits.added += 1;
        limits.by_id.insert(id, Arc::new(FakeLimit { scope: scope.into(), limit, settings: *settings }));
        Ok(id)
    }

    fn remove_limit(&self, id: LimitId) {
        lock(&self.0.limits).by_id.remove(&id);
    }

    async fn decide(&self, checks: &[Check<'_>]) -> Result<Verdicts, StoreError> {
        let asked = checks.iter().map(|check| self.asked(check)).collect::<Result<Vec<_>, _>>()?;
        let shortest = checks.iter().map(|check| self.deadlines(check.limit).wait).min();
        let deadline = shortest.unwrap_or(self.0.deadlines.wait);
        match self.call(Call::Decide(asked), deadline).await? {
            Reply::Decided(decisions) => {
                Ok(decisions.into_iter().map(|decision| Some(Verdict::exact(decision))).collect())
            }
            Reply::LeaseGrant(..) | Reply::Returned(_) | Reply::Done => Err(mismatch()),
        }
    }

    async fn peek(&self, check: &Check<'_>) -> Result<Verdict, StoreError> {
        let call = Call::Peek(self.asked(check)?);
        match self.call(call, self.deadlines(check.limit).wait).await? {
            Reply::Decided(decisions) => decisions.first().copied().map(Verdict::exact).ok_or_else(mismatch),
            Reply::LeaseGrant(..) | Reply::Returned(_) | Reply::Done => Err(mismatch()),
        }
    }

    async fn reset(&self, limit: LimitId, key: HashedKey<'_>) -> Result<(), StoreError> {
        self.done(Call::Reset(self.place(limit, key)?), self.deadlines(limit).wait).await
    }

    async fn refund(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let call = Call::Refund { place: self.place(limit, key)?, permits, at };
        self.done(call, self.deadlines(limit).wait).await
    }
}

impl Store for FakeStore {
    async fn borrow(
        &self,
        check: &Check<'_>,
        wanted: LeaseRequest,
        deadline: Duration,
    ) -> Result<(Verdict, Option<LeaseGrant>), StoreError> {
        let sent = self.0.clock.now();
        match self.call(Call::Borrow(self.asked(check)?, wanted), deadline).await? {
            Reply::LeaseGrant(decision, grant) => {
                let sent = self.0.link.asked_at(sent, self.0.clock.now());
                Ok((Verdict::exact(decision), grant.map(|grant| LeaseGrant { grant, sent })))
            }
            Reply::Decided(_) | Reply::Returned(_) | Reply::Done => Err(mismatch()),
        }
    }

    async fn give_back(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        lease: &HeldLease,
        number: u64,
        terms: LeaseTerms,
    ) -> Result<Option<u64>, StoreError> {
        let call = Call::Return { place: self.place(limit, key)?, lease: *lease, number, terms };
        match self.call(call, self.deadlines(limit).call).await? {
            Reply::Returned(Returned::Taken) => Ok(None),
            Reply::Returned(Returned::Refused { returns }) => Ok(Some(returns)),
            Reply::Decided(_) | Reply::LeaseGrant(..) | Reply::Done => Err(mismatch()),
        }
    }

    async fn charge(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        deadline: Duration,
    ) -> Result<(), StoreError> {
        self.done(Call::Charge { place: self.place(limit, key)?, permits }, deadline).await
    }

    fn deadlines(&self, limit: LimitId) -> Deadlines {
        let Deadlines { wait, call } = self.0.deadlines;
        let Ok(limit) = self.limit(limit) else { return Deadlines { wait, call: wait } };
        let wait = limit.settings.on_failure.deadline.unwrap_or(wait);
        let is_leased = limit.settings.lease_terms(&limit.limit).is_ok();
        Deadlines { wait, call: if is_leased { wait.max(call) } else { wait } }
    }

    fn undecided(&self, _: &[Check<'_>], why: &StoreError) -> Result<Verdicts, StoreError> {
        Err(why.clone())
    }

    fn late(&self, _: &[Check<'_>], wait: Duration) -> Result<Verdicts, StoreError> {
        Err(StoreError::Timeout(wait))
    }

    fn nodes(&self) -> Option<u32> {
        self.faults().nodes.or_else(|| self.0.link.nodes())
    }

    fn health(&self) -> Result<(), StoreError> {
        self.faults().error.clone().map_or_else(|| self.0.link.reach(), Err)
    }

    fn is_available(&self, _: LimitId, _: HashedKey<'_>) -> bool {
        self.health().is_ok()
    }

    fn last_heartbeat(&self) -> Option<Instant> {
        self.health().ok().map(|()| Instant::now())
    }

    fn clock(&self) -> &Clock {
        &self.0.clock
    }

    fn tasks(&self) -> &Tasks {
        &self.0.tasks
    }
}

/// Executes every call at once.
struct Direct {
    server: Arc<Mutex<Server>>,
    clock: Clock,
}

impl Link for Direct {
    fn carry(&self, call: Call) -> Pin<Box<dyn Future<Output = Result<Reply, StoreError>> + Send>> {
        let (server, now_us) = (Arc::clone(&self.server), self.clock.now().as_micros());
        Box::pin(async move {
            let mut server = lock(&server);
            let reply = server.execute(now_us, &call);
            server.take_notes();
            Ok(reply)
        })
    }

    fn reach(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn nodes(&self) -> Option<u32> {
        None
    }
}

fn mismatch() -> StoreError {
    StoreError::Protocol("a reply to another call".into())
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
