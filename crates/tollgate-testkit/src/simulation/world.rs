//! Real time, and everything that happens in it: one event after another.

use std::collections::BTreeMap;

use tollgate_core::{Ask, LeaseTerms, Limit, Outcome, Timestamp};

use super::judge::Judge;
use super::node::Node;
use super::report::Report;
use super::scenario::{Scenario, Trouble};
use super::store::{Returned, Store};
use super::wire::{Call, Reply, arrivals};
use super::{Flaw, Invariant};
use crate::Random;

/// What happens.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// Somebody comes to some node.
    Request,
    /// Somebody comes to a node.
    Arrive { node: usize, key: usize, cost: u64, wait_us: u64 },
    /// A call reaches the store.
    Execute { call: u64, key: usize, what: Call },
    /// A reply reaches its node.
    Deliver { call: u64, node: usize, reply: Reply },
    /// A node waits no longer.
    Deadline { call: u64, node: usize },
    /// A node looks at its table.
    Sweep { node: usize },
    /// Something goes wrong.
    Trouble,
    /// A node starts again.
    Start { node: usize },
}

/// A call that a node waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub node: usize,
    pub starts: u64,
    pub key: usize,
    /// Of the entry that it was sent for.
    pub entry: u64,
    pub sent: Timestamp,
    pub what: Call,
}

#[derive(Debug)]
pub(super) struct World {
    pub scenario: Scenario,
    pub random: Random,
    pub store: Store,
    pub nodes: Vec<Node>,
    pub judge: Judge,
    pub now_us: u64,
    pub limit: Limit,
    pub terms: Option<LeaseTerms>,
    pub pending: BTreeMap<u64, Pending>,
    /// How often a key has become better than it had promised, by key.
    pub better: Vec<u64>,
    /// What was admitted alone, and what was charged for it.
    pub owed: u64,
    pub charged: u64,
    events: BTreeMap<(u64, u64), Event>,
    sequence: u64,
    calls: u64,
    /// Which node most requests come to, and how much faster than usual.
    pub focus: Option<usize>,
    pub hurry: u64,
    /// By which a return has changed the state.
    returned: Vec<usize>,
    tells: bool,
}

impl World {
    pub(super) fn new(seed: u64, flaw: Option<Flaw>, tells: bool) -> Self {
        let mut random = Random::new(seed);
        let scenario = Scenario::draw(&mut random, flaw);
        let phase_us = random.below(10_000_000);
        let nodes = (0..scenario.nodes).map(|_| {
            let offset_us = 1_000_000_000 + random.below(1 << 50);
            Node::new(scenario.cap, offset_us, random.below(381) as i64 - 190, flaw)
        });
        let nodes = nodes.collect();
        Self {
            store: Store::new(scenario.limit, scenario.terms, scenario.keys, phase_us, flaw),
            nodes,
            judge: Judge::new(seed, &scenario),
            now_us: 0,
            limit: scenario.limit,
            terms: scenario.terms,
            pending: BTreeMap::new(),
            better: vec![0; scenario.keys],
            owed: 0,
            charged: 0,
            events: BTreeMap::new(),
            sequence: 0,
            calls: 0,
            focus: None,
            hurry: 1,
            returned: Vec::new(),
            tells,
            scenario,
            random,
        }
    }

    pub(super) fn play(mut self) -> Report {
        self.tell(|world| format!("{:?}", world.scenario));
        self.after(0, Event::Request);
        for node in 0..self.nodes.len() {
            let first_us = self.random.below(self.scenario.sweep_us);
            self.after(first_us, Event::Sweep { node });
        }
        self.plan_trouble();
        while let Some(((at_us, _), event)) = self.events.pop_first() {
            self.now_us = at_us;
            if let Some(until_us) = self.paused_until(event) {
                self.after(until_us - at_us, event);
                continue;
            }
            self.judge.report.events += 1;
            self.happen(event);
        }
        self.lone_client();
        self.settle_accounts();
        let store = self.store;
        self.judge.judge(self.now_us, |real_us| store.now(real_us));
        self.judge.report
    }

    /// Something will happen, so much later.
    pub(super) fn after(&mut self, us: u64, event: Event) {
        self.sequence += 1;
        self.events.insert((self.now_us + us, self.sequence), event);
    }

    /// Adds a line to the timeline, if somebody reads it.
    pub(super) fn tell(&mut self, line: impl FnOnce(&Self) -> String) {
        if self.tells {
            let line = format!("{:>10} us  {}", self.now_us, line(self));
            self.judge.report.timeline.push(line);
        }
    }

    pub(super) fn violated(&mut self, invariant: Invariant, what: String) {
        self.tell(|_| format!("VIOLATED {}: {what}", invariant.as_str()));
        self.judge.violated(invariant, self.now_us, what);
    }

    pub(super) fn is_over(&self) -> bool {
        self.now_us >= self.scenario.duration_us
    }

    fn paused_until(&self, event: Event) -> Option<u64> {
        let node = match event {
            Event::Arrive { node, .. }
            | Event::Deliver { node, .. }
            | Event::Deadline { node, .. }
            | Event::Sweep { node } => node,
            Event::Request | Event::Execute { .. } | Event::Trouble | Event::Start { .. } => return None,
        };
        let until_us = self.nodes[node].paused_until_us;
        (until_us > self.now_us).then_some(until_us)
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Request => self.request(),
            Event::Arrive { node, key, cost, wait_us } => self.arrive(node, key, cost, wait_us),
            Event::Execute { call, key, what } => self.execute(call, key, what),
            Event::Deliver { call, node, reply } => self.deliver(call, node, reply),
            Event::Deadline { call, .. } => self.late(call),
            Event::Sweep { node } => self.sweep(node),
            Event::Trouble => self.trouble(),
            Event::Start { node } => {
                self.tell(|_| format!("node {node} starts"));
                self.nodes[node].is_up = true;
            }
        }
    }

    /// Sends a call and waits for it.
    pub(super) fn send(&mut self, node: usize, key: usize, entry: u64, what: Call) {
        self.calls += 1;
        let call = self.calls;
        let (sent, starts) = (self.nodes[node].clock(self.now_us), self.nodes[node].starts);
        self.pending.insert(call, Pending { node, starts, key, entry, sent, what });
        // What is owed is charged by a call of its own that nobody repeats.
        let may_double = !matches!(what, Call::Charge { .. });
        for late_us in
            arrivals(&mut self.random, &self.scenario, may_double, matches!(what, Call::Return { .. }))
        {
            self.after(late_us, Event::Execute { call, key, what });
        }
        self.after(self.scenario.deadline_us, Event::Deadline { call, node });
        self.tell(|_| format!("node {node} key {key} sends {call}: {what:?}"));
    }

    /// A call reaches the store, perhaps not for the first time.
    fn execute(&mut self, call: u64, key: usize, what: Call) {
        let reply = match what {
            Call::Borrow { ask, wanted, parts } => self.lend(key, ask, wanted, parts),
            Call::Return { lease, permits, at, number, .. } => {
                let returned = self.store.give_back(self.now_us, key, permits, at, number);
                if let Returned::Taken { changed: true, .. } = returned {
                    self.was_returned(key, lease, permits);
                }
                Reply::Return(returned)
            }
            Call::Charge { permits } => {
                self.store.charge(self.now_us, key, permits);
                self.charged += permits;
                if self.charged > self.owed {
                    self.violated(Invariant::Debts, format!("{} charged, {} owed", self.charged, self.owed));
                }
                Reply::Charged
            }
        };
        self.tell(|world| format!("key {key} executes {call}: {reply:?}, {} left", world.remaining(key)));
        let Some(pending) = self.pending.get(&call) else { return };
        let node = pending.node;
        for late_us in arrivals(&mut self.random, &self.scenario, true, false) {
            self.after(late_us, Event::Deliver { call, node, reply });
        }
    }

    fn remaining(&self, key: usize) -> u64 {
        self.store.remaining(self.now_us, key)
    }

    fn lend(&mut self, key: usize, ask: Option<Ask>, wanted: u64, parts: u64) -> Reply {
        let answer = self.store.borrow(self.now_us, key, ask, wanted, parts);
        if !answer.alike {
            self.violated(Invariant::Deletion, format!("key {key}: a twin answers otherwise: {answer:?}"));
        }
        if !answer.batch_alike {
            self.violated(Invariant::Batch, format!("key {key}: {ask:?}"));
        }
        if !answer.retry_exact {
            self.violated(Invariant::Retry, format!("key {key}: {ask:?} {:?}", answer.outcome));
        }
        let granted = answer.grant.filter(|grant| grant.permits > 0);
        let lease = granted.map(|it| self.judge.has_lent(key, it.permits, self.now_us + it.life.get()));
        self.check_room(key);
        self.judge.report.note([2, key as u64, self.now_us, granted.map_or(0, |it| it.permits)]);
        Reply::Borrow {
            outcome: answer.outcome,
            grant: answer.grant,
            lease,
            at_us: self.now_us,
            generation: self.better[key],
        }
    }

    fn check_room(&mut self, key: usize) {
        let before = self.judge.report.violations.len();
        self.judge.check_room(key, self.store.remaining(self.now_us, key), self.now_us);
        if let Some(new) = self.judge.report.violations.get(before).cloned() {
            self.tell(|_| format!("VIOLATED {}: {}", new.invariant.as_str(), new.what));
        }
    }

    fn was_returned(&mut self, key: usize, lease: usize, permits: u64) {
        self.better[key] += 1;
        self.judge.taken_back(lease, permits);
        self.judge.report.note([3, key as u64, self.now_us, permits]);
        // What a failover has forgotten may be done once more.
        let forgets = matches!(self.scenario.trouble, Trouble::Failover | Trouble::Guarded);
        if self.returned.contains(&lease) && !forgets {
            self.violated(Invariant::ReturnOnce, format!("lease {lease} was taken back twice"));
        }
        self.returned.push(lease);
        self.check_room(key);
    }

    /// When everybody else has gone, who is denied waits as long as was said.
    fn lone_client(&mut self) {
        for key in 0..self.scenario.keys {
            let cost = 1 + self.random.below(self.limit.size());
            let first = self.store.borrow(self.now_us, key, Some(Ask::of(cost)), 0, 1).outcome;
            let Some(Outcome::Denied { retry }) = first else { continue };
            let then_us = self.now_us + retry.get();
            let second = self.store.borrow(then_us, key, Some(Ask::of(cost)), 0, 1).outcome;
            if !second.is_some_and(Outcome::is_admitted) {
                self.violated(Invariant::Retry, format!("key {key}: {cost} after {retry:?}: {second:?}"));
            }
        }
    }

    fn settle_accounts(&mut self) {
        let mut granted = 0;
        for node in &self.nodes {
            let report = &mut self.judge.report;
            granted += node.account.granted;
            report.spent += node.account.spent;
            report.given_back += node.account.given_back;
            report.expired += node.account.expired + node.held();
            report.lost += node.account.lost;
        }
        self.judge.settle_lent(granted, self.now_us);
    }
}
