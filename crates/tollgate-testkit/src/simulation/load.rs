//! Who comes when: the load on all nodes.

use super::world::{Event, World};

/// Requests of the last part of a raid.
const RAIDERS: u64 = 150;

impl World {
    /// Draws a request and when the next one comes.
    pub(super) fn request(&mut self) {
        if self.is_over() {
            return;
        }
        let mut gap_us = self.random.below(2 * self.scenario.pause_us + 1) / self.hurry;
        if self.random.one_in(60) {
            // The load moves on, comes faster, or pauses.
            self.hurry = [1, 1, 2, 10][self.random.below(4) as usize];
            let nodes = self.nodes.len() as u64;
            self.focus = if self.random.one_in(3) { None } else { Some(self.random.below(nodes) as usize) };
            if self.random.one_in(4) {
                gap_us += self.random.below(self.limit.horizon().get());
            }
            if self.scenario.adversarial && self.random.one_in(2) {
                gap_us += self.raid();
            }
        }
        self.after(gap_us, Event::Request);
        let anywhere = self.random.below(self.nodes.len() as u64) as usize;
        let node = self.focus.filter(|_| !self.random.one_in(5)).unwrap_or(anywhere);
        let key = self.random.below(self.scenario.keys as u64) as usize;
        let size = self.limit.size();
        let cost = match self.random.below(100) {
            0 => size + 1 + self.random.below(size),
            1..4 => 1 + self.random.below(size),
            _ => 1 + self.random.below(5.min(size)),
        };
        let waits = self.scenario.waits && self.random.one_in(6);
        let wait_us = if waits { 1 + self.random.below(self.limit.horizon().get()) } else { 0 };
        self.after(0, Event::Arrive { node, key, cost, wait_us });
    }

    /// The worst that nodes can do together: borrow from a full key, hold on to it for nearly as long as they may, and spend all of
    /// it at once while others take what has flowed meanwhile. Says how long it takes.
    fn raid(&mut self) -> u64 {
        let horizon_us = self.limit.horizon().get();
        let life_us = self.terms.map_or(horizon_us / 5, |terms| terms.life().get());
        let key = self.random.below(self.scenario.keys as u64) as usize;
        let latency_us = self.scenario.latency_us;
        let mut borrow_us = self.random.below(2 * horizon_us);
        let mut spend_us = borrow_us + life_us * (50 + self.random.below(50)) / 100;
        if self.random.one_in(2) {
            // Leases of the very end of an epoch are the last to count, and are spent when they cease to.
            let into_epoch_us =
                self.store.now(self.now_us + borrow_us + 3 * latency_us).as_micros() % life_us;
            borrow_us += life_us - into_epoch_us;
            spend_us = borrow_us + life_us - (4 * latency_us).min(life_us / 2);
        }
        for node in 0..self.nodes.len() {
            // Whoever is not asked for a while gives back what it holds.
            let times = if self.random.one_in(3) { 1 } else { 4 };
            for part in 0..times {
                let at_us = borrow_us + (spend_us - borrow_us) * part / 4 + self.random.below(100);
                self.after(at_us, Event::Arrive { node, key, cost: 1, wait_us: 0 });
            }
        }
        let most = self.limit.size() / 20 + 1;
        for _ in 0..RAIDERS {
            let node = self.random.below(self.nodes.len() as u64) as usize;
            let at_us = spend_us + self.random.below(latency_us * 8);
            let cost = 1 + self.random.below(most);
            self.after(at_us, Event::Arrive { node, key, cost, wait_us: 0 });
        }
        spend_us
    }
}
