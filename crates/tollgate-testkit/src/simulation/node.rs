//! A node: the production code with its background tasks, which can be paused, killed and told to end.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tollgate::{Backend, Guard, GuardConfig, Lease, LeaseStats, LimitId, MemoryConfig, Share};

use super::Flaw;
use super::Invariant;
use super::clock::NodeClock;
use super::network::NodeLink;
use super::scenario::Version;
use super::world::World;
use crate::fake_store::{FakeLimit, FakeStore, lock};

/// A node that was told to end does so by then, whatever the network does.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// A node, from its start to its crash or its end.
pub(super) struct Node {
    pub(super) lease: Lease<Guard<FakeStore>>,
    /// Unlike the number of the node, this names one start of it.
    pub(super) holder: usize,
    pub(super) clock: NodeClock,
    /// The limits as they are now.
    pub(super) limits: Vec<(LimitId, Arc<FakeLimit>)>,
    pub(super) gate: Arc<Gate>,
    pub(super) in_flight: Arc<AtomicUsize>,
    tasks: Vec<AbortHandle>,
    /// Whether limits were removed, and with them what is known of their leases.
    has_changed: bool,
}

impl Node {
    pub(super) fn start(world: &Arc<World>, node: usize, holder: usize, is_changed: bool) -> Self {
        let scenario = &world.scenario;
        let clock = world.clocks[node];
        let stale_us = match scenario.flaw {
            // No whole part of a life: the time at which a lease was asked for is just as old, and would make up for it.
            Some(Flaw::SpendAfterEnd) => scenario.life_us() * 4 / 5,
            _ => 0,
        };
        let shown = clock.clock(world.start, stale_us);
        let link = Arc::new(NodeLink { world: Arc::clone(world), node, holder, clock });
        let (store, driver) = FakeStore::over(Arc::new(link), shown.clone(), scenario.deadlines);
        let config = GuardConfig {
            share: Share::HALF,
            local: MemoryConfig { max_keys: 64 },
            forget_after: Duration::from_secs(1),
            ..GuardConfig::default()
        };
        let (guard, guard_driver) = Guard::new(store, config, shown);
        let lease = Lease::new(guard);
        let gate = Arc::new(Gate::default());
        let tasks = vec![
            tokio::spawn(Pausable::new(&gate, driver.run())).abort_handle(),
            tokio::spawn(Pausable::new(&gate, guard_driver.run())).abort_handle(),
        ];
        let versions = scenario.limits.iter().map(|plan| match &plan.next {
            Some(next) if is_changed => next,
            _ => &plan.now,
        });
        let limits = versions.map(|version| add(&lease, version)).collect();
        let in_flight = Arc::default();
        Self { lease, holder, clock, limits, gate, in_flight, tasks, has_changed: false }
    }

    /// Runs a request as long as the node runs.
    pub(super) fn spawn(&mut self, request: impl Future<Output = ()> + Send + 'static) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        let in_flight = Arc::clone(&self.in_flight);
        let counted = async move {
            request.await;
            in_flight.fetch_sub(1, Ordering::Relaxed);
        };
        self.tasks.retain(|task| !task.is_finished());
        self.tasks.push(tokio::spawn(Pausable::new(&self.gate, counted)).abort_handle());
    }

    /// Goes on with the other limits.
    pub(super) fn change(&mut self, world: &World) {
        world.inside().judge.report.add_stats(&self.lease.stats());
        self.has_changed = true;
        let versions = world.scenario.limits.iter().filter_map(|plan| plan.next.as_ref());
        let limits: Vec<_> = versions.map(|version| add(&self.lease, version)).collect();
        for (id, _) in std::mem::replace(&mut self.limits, limits) {
            self.lease.remove_limit(id);
        }
    }

    /// Everything that it knew is gone.
    pub(super) fn crash(self, world: &World) {
        self.check_conservation(world, false);
        self.account(world);
        self.kill();
    }

    /// Ends as a program does that was told to: it finishes its requests, settles what it owes and gives everything back.
    pub(super) async fn end(self, world: Arc<World>) {
        let deadline = world.scenario.deadlines.wait + Duration::from_millis(5);
        let drained = async {
            while self.in_flight.load(Ordering::Relaxed) > 0 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let is_drained = timeout(deadline, drained).await.is_ok();
        self.lease.backend().repay_debts().await;
        if timeout(ENDS_WITHIN, self.lease.close()).await.is_err() {
            world.violated(Invariant::Ended, format!("node {} does not end", self.holder));
        }
        let stats = self.lease.stats();
        if is_drained && stats.held > 0 {
            world.violated(Invariant::Ended, format!("node {} still holds {}", self.holder, stats.held));
        }
        self.check_conservation(&world, is_drained);
        self.account(&world);
        self.kill();
    }

    /// Every permit that it ever got is accounted for. `is_quiet`: none is on its way back or held after its end.
    pub(super) fn check_conservation(&self, world: &World, is_quiet: bool) {
        let stats = self.lease.stats();
        let LeaseStats { granted, spent, returned, expired, lost, held, .. } = stats;
        let known = spent + returned + expired + lost + held;
        if known > granted || (is_quiet && known < granted) {
            world.violated(Invariant::Conservation, format!("node {}: {stats:?}", self.holder));
        }
    }

    fn account(&self, world: &World) {
        let stats = self.lease.stats();
        world.inside().judge.report.add_stats(&stats);
    }

    fn kill(self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

fn add(lease: &Lease<Guard<FakeStore>>, version: &Version) -> (LimitId, Arc<FakeLimit>) {
    let FakeLimit { scope, limit, settings } = &*version.added;
    let id = lease.add_limit(scope, *limit, settings).expect("a scenario has a few limits");
    (id, Arc::clone(&version.added))
}

/// Stops all tasks of a node.
#[derive(Default)]
pub(super) struct Gate(Mutex<Paused>);

#[derive(Default)]
struct Paused {
    is_paused: bool,
    resumed_us: u64,
    waiting: Vec<Waker>,
}

impl Gate {
    pub(super) fn pause(&self) {
        lock(&self.0).is_paused = true;
    }

    pub(super) fn resume(&self, now_us: u64) {
        let mut paused = lock(&self.0);
        (paused.is_paused, paused.resumed_us) = (false, now_us);
        let waiting = std::mem::take(&mut paused.waiting);
        drop(paused);
        waiting.into_iter().for_each(Waker::wake);
    }

    pub(super) fn is_paused(&self) -> bool {
        lock(&self.0).is_paused
    }

    /// When the node was last told to go on.
    pub(super) fn resumed_us(&self) -> u64 {
        lock(&self.0).resumed_us
    }
}

/// A task that does not run while its node is paused.
struct Pausable<F> {
    gate: Arc<Gate>,
    task: Pin<Box<F>>,
}

impl<F: Future> Pausable<F> {
    fn new(gate: &Arc<Gate>, task: F) -> Self {
        Self { gate: Arc::clone(gate), task: Box::pin(task) }
    }
}

impl<F: Future> Future for Pausable<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let mut paused = lock(&self.gate.0);
        if paused.is_paused {
            paused.waiting.push(context.waker().clone());
            return Poll::Pending;
        }
        drop(paused);
        self.task.as_mut().poll(context)
    }
}
