//! What is done to the nodes and to the store, and when: drawn before the first event.

use std::collections::BTreeMap;
use std::ops::Range;

use super::scenario::{Scenario, Trouble};
use crate::Random;

/// Requests of the last part of a raid.
const RAIDERS: u64 = 100;
/// Requests that spend a lease when it ends.
const SPENDERS: u64 = 40;

/// One check of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub limit: usize,
    pub key: usize,
    pub cost: u64,
    pub wait_us: u64,
    pub enforced: bool,
}

/// What happens.
#[derive(Clone, Debug)]
pub(super) enum Happening {
    /// A request comes to a node. Its caller may leave.
    Request { node: usize, wishes: Vec<Wish>, leaves_after_us: Option<u64> },
    /// A node does not run for a while.
    Pause { node: usize, for_us: u64 },
    /// A node is killed.
    Crash { node: usize },
    /// A node is told to end.
    End { node: usize },
    /// A node starts again.
    Start { node: usize },
    /// The store's clock is set.
    Step { by_us: i64 },
    /// Another server takes over, without the latest writes.
    Failover { lost_us: u64 },
    /// A node cannot reach the store for a while.
    Unreachable { node: usize, for_us: u64 },
    /// A node is told of the other limits.
    Change { node: usize },
}

/// Requests for one key.
#[derive(Clone, Debug)]
struct Raid {
    limit: usize,
    key: usize,
    nodes: Range<usize>,
    /// The largest cost.
    most: u64,
    spread_us: u64,
}

impl Raid {
    fn request(&self, node: usize, cost: u64) -> Happening {
        let wish = Wish { limit: self.limit, key: self.key, cost, wait_us: 0, enforced: true };
        Happening::Request { node, wishes: vec![wish], leaves_after_us: None }
    }
}

/// Everything that will happen, by time.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    happenings: BTreeMap<(u64, usize), Happening>,
}

impl Agenda {
    /// `phase_us` is the store's time at the beginning, for raids on the ends of epochs.
    pub(super) fn draw(random: &mut Random, scenario: &Scenario, phase_us: u64) -> Self {
        let mut agenda = Self::default();
        agenda.draw_load(random, scenario, phase_us);
        agenda.draw_trouble(random, scenario);
        agenda
    }

    /// All of it, in order.
    pub(super) fn into_iter(self) -> impl Iterator<Item = (u64, Happening)> {
        self.happenings.into_iter().map(|((at_us, _), happening)| (at_us, happening))
    }

    fn add(&mut self, at_us: u64, happening: Happening) {
        self.happenings.insert((at_us, self.happenings.len()), happening);
    }

    fn draw_load(&mut self, random: &mut Random, scenario: &Scenario, phase_us: u64) {
        let nodes = scenario.nodes as u64;
        let (mut at_us, mut hurry, mut focus, mut hot) = (0, 1, None, 0);
        while at_us < scenario.duration_us {
            at_us += random.below(2 * scenario.pause_us + 1) / hurry;
            if random.one_in(60) {
                // The load moves on, comes faster, or pauses.
                hurry = [1, 1, 2, 10][random.below(4) as usize];
                focus = if random.one_in(3) { None } else { Some(random.below(nodes) as usize) };
                hot = random.below(scenario.places() as u64) as usize;
                if random.one_in(4) {
                    at_us += random.below(scenario.limits[0].now.limit().horizon().get());
                }
                if scenario.adversarial && random.one_in(2) {
                    at_us += self.draw_raid(random, scenario, at_us, phase_us);
                }
            }
            let node = focus.filter(|_| !random.one_in(5)).unwrap_or(random.below(nodes) as usize);
            let mut wishes = vec![draw_wish(random, scenario, hot)];
            while wishes.len() < 3 && random.one_in(4) {
                wishes.push(draw_wish(random, scenario, hot));
            }
            let leaves = scenario.leaves && random.one_in(8);
            let leaves_after_us = leaves.then(|| random.below(4_000 + 2 * scenario.latency_us));
            self.add(at_us, Happening::Request { node, wishes, leaves_after_us });
        }
    }

    /// The worst that nodes can do together: borrow from a full key, hold on to it for nearly as long as they may, and spend all of
    /// it at once while others take what has flowed meanwhile. Returns how long it takes.
    fn draw_raid(&mut self, random: &mut Random, scenario: &Scenario, now_us: u64, phase_us: u64) -> u64 {
        let limit = random.below(scenario.limits.len() as u64) as usize;
        let key = random.below(scenario.keys as u64) as usize;
        let plan = &scenario.limits[limit].now;
        let (horizon_us, size) = (plan.limit().horizon().get(), plan.limit().size());
        let life_us = if plan.terms.is_some() { plan.life_us() } else { horizon_us / 5 };
        let latency_us = scenario.latency_us;
        let mut borrow_us = now_us + random.below(2 * horizon_us);
        let mut spend_us = borrow_us + life_us * (50 + random.below(50)) / 100;
        let mut raid =
            Raid { limit, key, nodes: 0..scenario.nodes, most: size / 20 + 1, spread_us: latency_us * 8 };
        if random.one_in(2) {
            // A lease of the very end of an epoch is the last to count. It is spent when it ceases to, without a word to the store, and then
            // the others come.
            let into_epoch_us = (phase_us + borrow_us) % life_us;
            let epoch_us = borrow_us + 2 * life_us - into_epoch_us;
            let one_way_us = latency_us + random.below(latency_us);
            borrow_us = epoch_us.saturating_sub(one_way_us) / 1_000 * 1_000;
            spend_us = (borrow_us + life_us - life_us / 5_000 - 1) / 1_000 * 1_000;
            let node = random.below(scenario.nodes as u64) as usize;
            let others = Raid { spread_us: latency_us * 2, ..raid.clone() };
            self.draw_requests(random, &others, epoch_us + life_us + 1_000);
            raid.nodes = node..node + 1;
            // Nearly all of a full key: for more than is held the store would be asked too soon.
            let cost = (size * 9 / (10 * SPENDERS)).max(1);
            (0..SPENDERS).for_each(|_| self.add(spend_us, raid.request(node, cost)));
        } else {
            self.draw_requests(random, &raid, spend_us);
        }
        for node in raid.nodes.clone() {
            // A node is asked for enough to borrow, and often enough to keep what it holds.
            let times = if random.one_in(3) { 1 } else { 4 };
            for part in 0..times {
                let at_us = borrow_us + (spend_us - borrow_us) * part / 4;
                let cost = if part == 0 { 3 + 1_000_000 / life_us.max(1) } else { 1 };
                self.add(at_us, raid.request(node, cost.min(size)));
            }
        }
        spend_us - now_us
    }

    /// Many requests at about the same time.
    fn draw_requests(&mut self, random: &mut Random, raid: &Raid, from_us: u64) {
        for _ in 0..RAIDERS {
            let node = raid.nodes.start + random.below(raid.nodes.len() as u64) as usize;
            let at_us = from_us + random.below(raid.spread_us);
            self.add(at_us, raid.request(node, 1 + random.below(raid.most)));
        }
    }

    fn draw_trouble(&mut self, random: &mut Random, scenario: &Scenario) {
        let plan = &scenario.limits[0].now;
        let (horizon_us, life_us) = (plan.limit().horizon().get(), plan.life_us());
        let times = match scenario.trouble {
            Trouble::None | Trouble::Network | Trouble::Change => 0,
            Trouble::Nodes | Trouble::Debts => 3 + random.below(12),
            Trouble::StepsBack | Trouble::Steps => 1 + random.below(4),
            Trouble::Failover | Trouble::Guarded => 1,
        };
        if scenario.trouble == Trouble::Change {
            // Nodes hear of it one after the other.
            let spread_us = if random.one_in(2) { 1 } else { 100_000 };
            for node in 0..scenario.nodes {
                self.add(scenario.duration_us / 2 + random.below(spread_us), Happening::Change { node });
            }
        }
        for _ in 0..times {
            let at_us = random.below(scenario.duration_us);
            let node = random.below(scenario.nodes as u64) as usize;
            match scenario.trouble {
                Trouble::None | Trouble::Network | Trouble::Change => {}
                Trouble::Nodes => {
                    let for_us = random.below(2 * life_us.max(horizon_us / 10));
                    match random.below(4) {
                        0 | 1 => self.add(at_us, Happening::Pause { node, for_us }),
                        2 => {
                            self.add(at_us, Happening::Crash { node });
                            self.add(at_us + for_us, Happening::Start { node });
                        }
                        _ => {
                            self.add(at_us, Happening::End { node });
                            self.add(at_us + for_us, Happening::Start { node });
                        }
                    }
                }
                Trouble::Debts => {
                    let for_us = random.below(horizon_us);
                    self.add(at_us, Happening::Unreachable { node, for_us });
                }
                Trouble::StepsBack | Trouble::Steps => {
                    let most_us = [life_us + 1, horizon_us, 4 * horizon_us][random.below(3) as usize];
                    let by_us = 1 + random.below(most_us) as i64;
                    let forward = scenario.trouble == Trouble::Steps && random.one_in(2);
                    self.add(at_us, Happening::Step { by_us: if forward { by_us } else { -by_us } });
                }
                Trouble::Failover | Trouble::Guarded => {
                    let most_us = [life_us + 1, horizon_us, 2 * horizon_us][random.below(3) as usize];
                    self.add(at_us, Happening::Failover { lost_us: random.below(most_us) });
                }
            }
        }
    }
}

fn draw_wish(random: &mut Random, scenario: &Scenario, hot: usize) -> Wish {
    let anywhere = random.below(scenario.places() as u64) as usize;
    let place = if random.one_in(3) { anywhere } else { hot };
    let size = scenario.limit_of(place).now.limit().size();
    let cost = match random.below(100) {
        0 => size + 1 + random.below(size),
        1..4 => 1 + random.below(size),
        _ => 1 + random.below(5.min(size)),
    };
    let waits = scenario.waits && random.one_in(6);
    let horizon_us = scenario.limit_of(place).now.limit().horizon().get();
    let wait_us = if waits { 1 + random.below(horizon_us) } else { 0 };
    let enforced = !random.one_in(10);
    Wish { limit: place / scenario.keys, key: place % scenario.keys, cost, wait_us, enforced }
}
