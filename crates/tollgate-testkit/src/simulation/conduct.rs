//! What nodes do, and what is done to them.

use tollgate_core::lease::Move;
use tollgate_core::{Ask, Micros, Outcome};

use super::Invariant;
use super::node::GivenUp;
use super::scenario::Trouble;
use super::store::Returned;
use super::wire::{Call, Reply};
use super::world::{Event, World};

/// A return that was not its turn is sent again so often.
const RETURN_ATTEMPTS: u32 = 3;

impl World {
    /// A request comes to a node.
    pub(super) fn arrive(&mut self, node: usize, key: usize, cost: u64, wait_us: u64) {
        if !self.nodes[node].is_up {
            return;
        }
        let ask = if wait_us > 0 { Ask::of(cost).within(Micros::new(wait_us)) } else { Ask::of(cost) };
        if cost > self.limit.size() {
            if self.store.peek(self.store.now(self.now_us), key, ask) != Outcome::Impossible {
                self.violated(Invariant::LimitChange, format!("{cost} is more than the size, and may wait"));
            }
            return;
        }
        if self.scenario.trouble == Trouble::Debts && self.random.one_in(25) {
            let for_us = self.random.below(self.limit.horizon().get() / 2);
            self.nodes[node].unreachable_until_us = self.now_us + for_us;
        }
        let Some(terms) = self.terms else {
            self.ask(node, key, 0, Some(ask), 0);
            return;
        };
        let nodes = self.nodes.len() as u64;
        let parts = if self.scenario.adversarial { Some(1) } else { terms.parts(nodes).or(Some(2 * nodes)) };
        let (step, paid) = self.nodes[node].decide(self.now_us, key, (cost, wait_us > 0), &terms, parts);
        self.check_node(node);
        let entry = self.nodes[node].entries.get(&key).map_or(0, |entry| entry.id);
        match step {
            Move::Spend { fetch } => {
                self.tell(|_| format!("node {node} key {key} spends {cost} of {paid:?}"));
                for (lease, permits) in paid {
                    self.judge.spent(lease, permits, self.now_us);
                }
                self.judge.admitted(key, self.now_us, cost);
                let fetch = self.wish(fetch, 8);
                if fetch > 0 {
                    self.ask(node, key, entry, None, fetch);
                }
            }
            Move::Deny { retry } => {
                self.tell(|_| format!("node {node} key {key} denies {cost} for {} us", retry.get()));
                self.judge.report.local_denials += 1;
                self.check_denial(node, key, ask);
            }
            Move::Ask { ahead } => {
                let ahead = self.wish(ahead, 2);
                self.ask(node, key, entry, Some(ask), ahead);
            }
        }
    }

    /// How many permits are asked for: any number, where somebody wants to break the limit by that.
    fn wish(&mut self, wish: u64, often: u64) -> u64 {
        if !self.scenario.adversarial || (wish == 0 && !self.random.one_in(often)) {
            return wish;
        }
        1 + self.random.below(2 * self.limit.size())
    }

    /// Asks the store, if it can be reached. Otherwise the request is let through, and owed.
    fn ask(&mut self, node: usize, key: usize, entry: u64, ask: Option<Ask>, wanted: u64) {
        if self.now_us < self.nodes[node].unreachable_until_us {
            self.give_up_asking(node, key, entry, wanted);
            if let Some(ask) = ask {
                self.owed += ask.cost;
                *self.nodes[node].debts.entry(key).or_default() += ask.cost;
            }
            return;
        }
        let nodes = self.nodes.len() as u64;
        let parts = if self.scenario.adversarial { 1 } else { 2 * nodes };
        self.send(node, key, entry, Call::Borrow { ask, wanted, parts });
    }

    fn give_up_asking(&mut self, node: usize, key: usize, entry: u64, wanted: u64) {
        let now = self.nodes[node].clock(self.now_us);
        let Some(terms) = self.terms.filter(|_| wanted > 0) else { return };
        if let Some(entry) = self.nodes[node].entry(key, entry) {
            entry.holding.failed(now, &terms);
        }
    }

    /// What a node denies by itself the store would deny as well, by all that it had said.
    fn check_denial(&mut self, node: usize, key: usize, ask: Ask) {
        let now = self.nodes[node].clock(self.now_us);
        let Some(entry) = self.nodes[node].entries.get(&key) else { return };
        let Some((generation, from_us)) = entry.denial.filter(|_| !entry.holding.is_paced(now)) else {
            return;
        };
        if generation != self.better[key] {
            return;
        }
        // The node's clock may be slow: it has waited so much longer.
        let slow_us = (self.now_us - from_us) / 5_000 + 2;
        let then = self.store.now(self.now_us - slow_us);
        if self.store.peek(then, key, ask).is_admitted() {
            self.violated(Invariant::LocalDenial, format!("node {node} key {key} denies {ask:?}"));
        }
    }

    fn check_node(&mut self, node: usize) {
        if !self.nodes[node].is_balanced() {
            let account = self.nodes[node].account;
            let held = self.nodes[node].held();
            self.violated(Invariant::Conservation, format!("node {node}: {account:?} and {held} held"));
        }
        if !self.nodes[node].is_within_cap() {
            self.violated(Invariant::Cap, format!("node {node}: {} entries", self.nodes[node].entries.len()));
        }
    }

    /// A reply reaches its node, which may not wait for it any more.
    pub(super) fn deliver(&mut self, call: u64, node: usize, reply: Reply) {
        let Some(pending) = self.pending.remove(&call) else { return };
        if pending.starts != self.nodes[node].starts {
            return;
        }
        let key = pending.key;
        self.tell(|_| format!("node {node} key {key} hears of {call}"));
        match (pending.what, reply) {
            (
                Call::Borrow { ask, wanted, .. },
                Reply::Borrow { outcome, grant, lease, at_us, generation },
            ) => {
                let cost = ask.map_or(0, |ask| ask.cost);
                if let Some(Outcome::Admitted { delay }) = outcome {
                    self.judge.admitted(key, at_us + delay.get(), cost);
                }
                let Some(terms) = self.terms else { return };
                let denied = outcome.and_then(|outcome| match outcome {
                    Outcome::Denied { retry } => Some((cost, retry)),
                    Outcome::Admitted { .. } | Outcome::Impossible => None,
                });
                let place = (key, pending.entry);
                let from = (generation, at_us);
                let has_come = self.nodes[node].answered(
                    self.now_us,
                    place,
                    pending.sent,
                    wanted,
                    grant.zip(lease),
                    denied,
                    from,
                    &terms,
                );
                if let Some(lease) = lease.filter(|_| has_come) {
                    self.judge.received(lease, self.now_us);
                }
                self.check_node(node);
            }
            (Call::Return { lease, permits, at, ends, attempts, .. }, Reply::Return(returned)) => {
                let (Returned::Taken { returns, .. } | Returned::Refused { returns }) = returned;
                self.nodes[node].returns.insert(key, returns);
                let lives = self.nodes[node].clock(self.now_us) < ends;
                let is_refused = matches!(returned, Returned::Refused { .. }) && !self.scenario.doubles;
                if is_refused && lives && attempts < RETURN_ATTEMPTS {
                    let attempts = attempts + 1;
                    let again = Call::Return { lease, permits, at, ends, number: returns, attempts };
                    self.send(node, key, 0, again);
                }
            }
            _ => {}
        }
    }

    /// A node waits no longer for a call: nobody knows what came of it.
    pub(super) fn late(&mut self, call: u64) {
        let Some(pending) = self.pending.remove(&call) else { return };
        if let (Call::Borrow { wanted, .. }, true) =
            (pending.what, pending.starts == self.nodes[pending.node].starts)
        {
            self.tell(|_| format!("node {} waits no longer for {call}", pending.node));
            self.give_up_asking(pending.node, pending.key, pending.entry, wanted);
        }
    }

    /// A node looks after what it holds and what it owes.
    pub(super) fn sweep(&mut self, node: usize) {
        if !self.is_over() {
            self.after(self.scenario.sweep_us, Event::Sweep { node });
        }
        if !self.nodes[node].is_up {
            return;
        }
        if let Some(terms) = self.terms {
            let given_up = self.nodes[node].sweep(self.now_us, &terms);
            self.check_node(node);
            self.give_back(node, given_up);
        }
        if self.now_us >= self.nodes[node].unreachable_until_us {
            for (key, permits) in core::mem::take(&mut self.nodes[node].debts) {
                self.send(node, key, 0, Call::Charge { permits });
            }
        }
    }

    fn give_back(&mut self, node: usize, given_up: Vec<(usize, GivenUp)>) {
        for (key, GivenUp { lease, held }) in given_up {
            let number = self.nodes[node].returns.get(&key).copied().unwrap_or(0);
            let (permits, at, ends) = (held.left, held.at, held.ends);
            self.send(node, key, 0, Call::Return { lease, permits, at, ends, number, attempts: 1 });
        }
    }

    /// When things go wrong.
    pub(super) fn plan_trouble(&mut self) {
        let times = match self.scenario.trouble {
            Trouble::None | Trouble::Network | Trouble::Debts => 0,
            Trouble::Nodes => 4 + self.random.below(20),
            Trouble::StepsBack | Trouble::Steps => 1 + self.random.below(4),
            Trouble::Failover | Trouble::Guarded => 1,
            Trouble::Change => 1,
        };
        for _ in 0..times {
            let at_us = match self.scenario.trouble {
                Trouble::Change => self.scenario.duration_us / 2,
                _ => self.random.below(self.scenario.duration_us),
            };
            self.after(at_us, Event::Trouble);
        }
    }

    /// Something goes wrong.
    pub(super) fn trouble(&mut self) {
        let horizon_us = self.limit.horizon().get();
        let life_us = self.terms.map_or(0, |terms| terms.life().get());
        match self.scenario.trouble {
            Trouble::None | Trouble::Network | Trouble::Debts => {}
            Trouble::Nodes => self.trouble_node(life_us.max(horizon_us / 10)),
            Trouble::StepsBack | Trouble::Steps => {
                let most_us = [life_us + 1, horizon_us, 4 * horizon_us][self.random.below(3) as usize];
                let by_us = 1 + self.random.below(most_us);
                let forward = self.scenario.trouble == Trouble::Steps && self.random.one_in(2);
                if forward {
                    self.judge.allow_step(by_us, self.now_us);
                }
                let by_us = if forward { by_us as i64 } else { -(by_us as i64) };
                self.tell(|_| format!("the store's clock steps by {by_us} us"));
                self.store.step(by_us);
            }
            Trouble::Failover | Trouble::Guarded => {
                let is_guarded = self.scenario.trouble == Trouble::Guarded;
                let most_us = [life_us + 1, horizon_us, 2 * horizon_us][self.random.below(3) as usize];
                let lost_us = self.random.below(most_us);
                let lost = self.store.fail_over(self.now_us, lost_us, is_guarded);
                self.tell(|_| format!("failover loses {lost_us} us: {lost:?} permits"));
                if !is_guarded {
                    self.judge.allow_loss(&lost, life_us);
                }
            }
            Trouble::Change => {
                if let Some((limit, _, terms)) = self.scenario.next {
                    self.tell(|_| format!("another limit: {limit:?} {terms:?}"));
                    (self.limit, self.terms) = (limit, terms);
                    self.store.change(limit, terms, self.now_us);
                }
            }
        }
        if self.scenario.trouble != Trouble::Nodes {
            self.better.iter_mut().for_each(|it| *it += 1);
        }
    }

    fn trouble_node(&mut self, long_us: u64) {
        let node = self.random.below(self.nodes.len() as u64) as usize;
        let for_us = self.random.below(2 * long_us);
        match self.random.below(4) {
            0 | 1 => {
                self.tell(|_| format!("node {node} pauses for {for_us} us"));
                self.nodes[node].paused_until_us = self.now_us + for_us;
            }
            2 => {
                self.tell(|_| format!("node {node} crashes"));
                self.nodes[node].crash();
                self.nodes[node].paused_until_us = 0;
                self.check_node(node);
                self.after(for_us, Event::Start { node });
            }
            _ if self.nodes[node].paused_until_us <= self.now_us => {
                self.tell(|_| format!("node {node} ends"));
                let given_up = self.nodes[node].end(self.now_us);
                self.give_back(node, given_up);
                if self.nodes[node].held() > 0 {
                    self.violated(Invariant::Ended, format!("node {node} still holds something"));
                }
                self.check_node(node);
                self.nodes[node].crash();
                self.after(for_us, Event::Start { node });
            }
            _ => {}
        }
    }
}
