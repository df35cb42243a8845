//! Virtual time, the store, the network, and the nodes: plays a seed from its beginning to its end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tollgate::lease::Lease;
use tollgate::{Ask, Backend, Basis, Check, Outcome};

use super::agenda::{Agenda, Happening, Wish};
use super::asker::Asker;
use super::clock::NodeClock;
use super::judge::Judge;
use super::network::Network;
use super::node::Node;
use super::report::Report;
use super::scenario::{Scenario, Trouble};
use super::{Flaw, Invariant};
use crate::Random;
use crate::fake_store::{Asked, Call, Law, Noted, Place, Reply, Server, lock};

/// The beginning of simulated time on the store's clock.
const BEGIN_US: u64 = 1_700_000_000_000_000;
/// What all tasks of a seed share.
pub(super) struct World {
    pub(super) scenario: Scenario,
    pub(super) start: Instant,
    /// By node.
    pub(super) clocks: Vec<NodeClock>,
    /// Told when a message was sent.
    pub(super) wake: Notify,
    inside: Mutex<Inside>,
}

pub(super) struct Inside {
    pub(super) server: Server,
    pub(super) network: Network,
    pub(super) judge: Judge,
    /// By node.
    pub(super) unreachable_until_us: Vec<u64>,
    /// How often a state has become better than it had promised, by place.
    pub(super) better: Vec<u64>,
    /// Whether the network is well, whatever the scenario says.
    pub(super) is_calm: bool,
    tells: bool,
}

/// Plays a seed in a runtime of its own, whose time is virtual.
pub(super) fn play(seed: u64, flaw: Option<Flaw>, tells: bool) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without I/O can be built").block_on(async {
        let mut random = Random::new(seed);
        let scenario = Scenario::draw(seed, &mut random, flaw);
        let phase_us = BEGIN_US + random.below(10_000_000);
        let agenda = Agenda::draw(&mut random, &scenario, phase_us);
        let world = World::new(scenario, &mut random, phase_us, tells);
        world.play(agenda).await
    })
}

impl World {
    fn new(scenario: Scenario, random: &mut Random, phase_us: u64, tells: bool) -> Arc<Self> {
        let mut server = Server::new(phase_us, scenario.flaw);
        for limit in &scenario.limits {
            for key in 0..scenario.keys {
                server.place(&limit.now.added.scope, &key.to_string());
            }
        }
        let clocks = (0..scenario.nodes).map(|_| NodeClock {
            offset_us: 1_000_000_000 + random.below(1 << 50),
            drift_ppm: random.below(381) as i64 - 190,
        });
        let inside = Inside {
            server,
            network: Network::default(),
            judge: Judge::new(&scenario),
            unreachable_until_us: vec![0; scenario.nodes],
            better: vec![0; scenario.places()],
            is_calm: false,
            tells,
        };
        Arc::new(Self {
            start: Instant::now(),
            clocks: clocks.collect(),
            wake: Notify::new(),
            inside: Mutex::new(inside),
            scenario,
        })
    }

    /// Real time since the beginning.
    pub(super) fn now_us(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }

    pub(super) fn inside(&self) -> MutexGuard<'_, Inside> {
        lock(&self.inside)
    }

    pub(super) fn violated(&self, invariant: Invariant, what: String) {
        self.inside().violated(invariant, self.now_us(), what);
    }

    async fn play(self: Arc<Self>, agenda: Agenda) -> Report {
        self.inside().tell(0, || format!("{:?}", self.scenario));
        let network = tokio::spawn(Arc::clone(&self).run_network());
        let mut holders = self.scenario.nodes;
        let mut nodes: Vec<_> =
            (0..holders).map(|node| Some(Node::start(&self, node, node, false))).collect();
        let mut ending = Vec::new();
        let mut has_changed = false;
        for (at_us, happening) in agenda.into_iter() {
            sleep_until(self.start + Duration::from_micros(at_us)).await;
            self.inside().judge.report.events += 1;
            if !matches!(happening, Happening::Request { .. }) {
                self.inside().tell(at_us, || format!("{happening:?}"));
            }
            match happening {
                Happening::Request { node, wishes, leaves_after_us } => {
                    if let Some(node) = &mut nodes[node] {
                        self.request(node, wishes, leaves_after_us);
                    }
                }
                Happening::Pause { node, for_us } => {
                    if let Some(node) = nodes[node].as_ref().filter(|node| !node.gate.is_paused()) {
                        node.gate.pause();
                        let (world, gate) = (Arc::clone(&self), Arc::clone(&node.gate));
                        tokio::spawn(async move {
                            sleep(Duration::from_micros(for_us)).await;
                            gate.resume(world.now_us());
                        });
                    }
                }
                Happening::Crash { node } => {
                    if let Some(node) = nodes[node].take() {
                        node.crash(&self);
                    }
                }
                Happening::End { node } => {
                    if let Some(node) = nodes[node].take_if(|node| !node.gate.is_paused()) {
                        ending.push(tokio::spawn(node.end(Arc::clone(&self))));
                    }
                }
                Happening::Start { node } => {
                    if nodes[node].is_none() {
                        nodes[node] = Some(Node::start(&self, node, holders, has_changed));
                        holders += 1;
                    }
                }
                Happening::Change { node } => {
                    has_changed = true;
                    self.inside().has_improved();
                    if let Some(node) = &mut nodes[node] {
                        node.change(&self);
                    }
                }
                Happening::Unreachable { node, for_us } => {
                    self.inside().unreachable_until_us[node] = at_us + for_us;
                }
                Happening::Step { by_us } => self.inside().step(by_us, self.now_us()),
                Happening::Failover { lost_us } => {
                    let is_guarded = self.scenario.trouble == Trouble::Guarded;
                    self.inside().fail_over(lost_us, is_guarded, self.now_us());
                }
            }
        }
        self.inside().calm_down();
        sleep(self.quiet()).await;
        for node in nodes.into_iter().flatten() {
            self.check_quiet(&node);
            self.check_recovery(&node).await;
            ending.push(tokio::spawn(node.end(Arc::clone(&self))));
        }
        for end in ending {
            end.await.expect("a node ends without a panic");
        }
        network.abort();
        self.conclude()
    }

    /// How long it takes until nothing is under way any more.
    fn quiet(&self) -> Duration {
        let life = Duration::from_micros(self.scenario.life_us());
        2 * life + 5 * self.scenario.deadlines.call + Duration::from_secs(2)
    }

    /// A node without requests holds no leases and has no debts.
    fn check_quiet(&self, node: &Node) {
        node.check_conservation(self, true);
        let (stats, debt) = (node.lease.stats(), node.lease.backend().stats().debt);
        if stats.held > 0 {
            self.violated(Invariant::Ended, format!("node {} is idle and holds {}", node.holder, stats.held));
        }
        // By a panic, for example.
        let unanswered = node.in_flight.load(Ordering::Relaxed);
        if unanswered > 0 {
            self.violated(Invariant::Answered, format!("node {} has not answered {unanswered}", node.holder));
        }
        if debt > 0 {
            self.violated(Invariant::Debts, format!("node {} is idle and owes {debt}", node.holder));
        }
    }

    /// A node whose store is well decides by it again.
    async fn check_recovery(&self, node: &Node) {
        for (limit, added) in &node.limits {
            let check = Check::new(*limit, "0", 1);
            let Ok(verdicts) = node.lease.decide(&[check]).await;
            let basis = verdicts.first().copied().flatten().map(|verdict| verdict.basis);
            if !matches!(basis, Some(Basis::Exact | Basis::Leased)) {
                let what = format!(
                    "node {}, limit {}: {basis:?} although the store is well",
                    node.holder, added.scope
                );
                self.violated(Invariant::Recovery, what);
            }
        }
    }

    /// Lets messages arrive when they are due.
    async fn run_network(self: Arc<Self>) {
        loop {
            let next_us = self.inside().network.next_us();
            let due = next_us.map(|at_us| self.start + Duration::from_micros(at_us));
            match due {
                Some(due) => {
                    drop(timeout(due.saturating_duration_since(Instant::now()), self.wake.notified()).await)
                }
                None => self.wake.notified().await,
            }
            self.inside().arrive(&self.scenario, self.now_us());
        }
    }

    /// A request comes to a node.
    fn request(self: &Arc<Self>, node: &mut Node, wishes: Vec<Wish>, leaves_after_us: Option<u64>) {
        self.inside().judge.report.requests += 1;
        let asker = Asker {
            world: Arc::clone(self),
            holder: node.holder,
            clock: node.clock,
            gate: Arc::clone(&node.gate),
            limits: node.limits.clone(),
            wishes,
        };
        let lease = node.lease.clone();
        node.spawn(async move {
            let begun_us = asker.world.now_us();
            let keys: Vec<_> = asker.wishes.iter().map(|wish| wish.key.to_string()).collect();
            let checks: Vec<_> =
                asker.wishes.iter().zip(&keys).map(|(wish, key)| asker.check(wish, key)).collect();
            let decide = lease.decide(&checks);
            let verdicts = match leaves_after_us {
                None => decide.await,
                Some(after_us) => match timeout(Duration::from_micros(after_us), decide).await {
                    Ok(verdicts) => verdicts,
                    Err(_) => return asker.has_left(),
                },
            };
            let Ok(verdicts) = verdicts;
            asker.is_answered(begun_us, &verdicts);
        });
    }

    fn conclude(&self) -> Report {
        let now_us = self.now_us();
        let mut inside = self.inside();
        inside.lone_client(&self.scenario, now_us);
        let Inside { judge, server, .. } = &mut *inside;
        judge.judge(now_us, |real_us| server.now(real_us));
        judge.report.clone()
    }
}

impl Inside {
    /// Adds a line to the timeline, if it is recorded.
    pub(super) fn tell(&mut self, at_us: u64, line: impl FnOnce() -> String) {
        if self.tells {
            self.judge.report.timeline.push(format!("{at_us:>10} us  {}", line()));
        }
    }

    pub(super) fn violated(&mut self, invariant: Invariant, at_us: u64, what: String) {
        self.tell(at_us, || format!("VIOLATED {}: {what}", invariant.as_str()));
        self.judge.violated(invariant, at_us, what);
    }

    /// Tells the judge what a call has done. `returned` is the lease that it gives back, and whether it has done so before. Returns the
    /// loan that the call brought, and whether something was taken back.
    pub(super) fn note(
        &mut self,
        scenario: &Scenario,
        at_us: u64,
        holder: usize,
        returned: Option<(&Lease, bool)>,
    ) -> (Option<usize>, bool) {
        let (mut loan, mut has_returned) = (None, false);
        self.judge.report.events += 1;
        for noted in self.server.take_notes() {
            let mut room = None;
            match noted {
                Noted::Admitted { place, permits, delay } => {
                    self.judge.admitted(place, at_us + delay.get(), permits);
                }
                Noted::LeaseGrant { place, grant } => {
                    loan = Some(self.judge.lent(holder, place, &grant, at_us));
                    room = Some(place);
                }
                Noted::TakenBack { place } => {
                    has_returned = true;
                    self.better[place] += 1;
                    if let Some((lease, again)) = returned {
                        self.judge.taken_back(holder, place, lease, at_us, again);
                    }
                    room = Some(place);
                }
                Noted::Charged { place, permits } => self.judge.charged(place, permits, at_us),
                Noted::CarriedOver { place } => self.better[place] += 1,
                Noted::Broken { law, what } => {
                    let invariant = match law {
                        Law::Deletion => Invariant::Deletion,
                        Law::Batch => Invariant::Batch,
                        Law::Retry => Invariant::Retry,
                    };
                    self.violated(invariant, at_us, what);
                }
            }
            if let Some(place) = room {
                let remaining = self.server.remaining(at_us, place, &scenario.limit_of(place).now.added);
                self.judge.check_room(place, remaining, at_us);
            }
        }
        (loan, has_returned)
    }

    /// Nothing goes wrong any more.
    fn calm_down(&mut self) {
        self.unreachable_until_us.fill(0);
        self.is_calm = true;
    }

    fn has_improved(&mut self) {
        self.better.iter_mut().for_each(|it| *it += 1);
    }

    fn step(&mut self, by_us: i64, now_us: u64) {
        if by_us > 0 {
            self.judge.allow_step(by_us as u64, now_us);
        }
        self.server.step(by_us);
        self.has_improved();
    }

    fn fail_over(&mut self, lost_us: u64, is_guarded: bool, now_us: u64) {
        let lost = self.server.fail_over(now_us, lost_us);
        if !is_guarded {
            self.judge.allow_loss(&lost);
        }
        self.has_improved();
    }

    /// After all other clients have left, a denied client is admitted after its promised wait.
    fn lone_client(&mut self, scenario: &Scenario, now_us: u64) {
        for place in 0..scenario.places() {
            let plan = scenario.limit_of(place);
            let limit = &plan.next.as_ref().unwrap_or(&plan.now).added;
            let key = (place % scenario.keys).to_string().into();
            let place = Place { limit: Arc::clone(limit), key };
            let cost = limit.limit.size().div_ceil(2) + 1;
            let asked = Asked { place, ask: Ask::of(cost.min(limit.limit.size())), enforced: true };
            let call = Call::Decide(vec![asked]);
            let mut outcome = |at_us| match self.server.execute(at_us, &call) {
                Reply::Decided(decisions) => decisions.first().map(|decision| decision.outcome),
                Reply::LeaseGrant(..) | Reply::Returned(_) | Reply::Done => None,
            };
            outcome(now_us);
            let Some(Outcome::Denied { retry }) = outcome(now_us) else { continue };
            let second = outcome(now_us + retry.get());
            if !second.is_some_and(Outcome::is_admitted) {
                self.violated(Invariant::Retry, now_us, format!("{cost} after {retry:?}: {second:?}"));
            }
        }
        self.server.take_notes();
    }
}
