//! Callers: the requests that they send to nodes, and what the judge learns from the answers.

use std::sync::Arc;

use tollgate::{Ask, Basis, Check, LimitId, Micros, Verdict, Verdicts};

use super::Invariant;
use super::agenda::Wish;
use super::clock::NodeClock;
use super::node::Gate;
use super::world::{Inside, World};
use crate::fake_store::FakeLimit;

/// Tokio's timers are a millisecond late, and a caller may be answered by the task of another.
const TIMER_SLACK_US: u64 = 3_000;

/// The client that sends a request, and what the judge must know of it.
pub(super) struct Asker {
    pub(super) world: Arc<World>,
    pub(super) holder: usize,
    pub(super) clock: NodeClock,
    pub(super) gate: Arc<Gate>,
    pub(super) limits: Vec<(LimitId, Arc<FakeLimit>)>,
    pub(super) wishes: Vec<Wish>,
}

impl Asker {
    pub(super) fn check<'a>(&self, wish: &Wish, key: &'a str) -> Check<'a> {
        let check = Check::new(self.limits[wish.limit].0, key, wish.cost).with_ask(ask(wish));
        if wish.enforced { check } else { check.counted_only() }
    }

    fn place(&self, wish: &Wish) -> usize {
        self.world.scenario.place(wish.limit, wish.key)
    }

    /// The caller has left: what it asked for may be decided all the same.
    pub(super) fn has_left(&self) {
        let mut inside = self.world.inside();
        for wish in &self.wishes {
            inside.judge.owes(self.place(wish), wish.cost);
        }
    }

    pub(super) fn is_answered(&self, begun_us: u64, verdicts: &Verdicts) {
        let now_us = self.world.now_us();
        let wait_us = self.world.scenario.deadlines.wait.as_micros() as u64;
        if now_us > begun_us.max(self.gate.resumed_us()) + wait_us + TIMER_SLACK_US {
            let what = format!("node {} has answered after {} us", self.holder, now_us - begun_us);
            self.world.violated(Invariant::Answered, what);
        }
        if verdicts.len() != self.wishes.len() {
            let what = format!("{} verdicts on {} checks", verdicts.len(), self.wishes.len());
            self.world.violated(Invariant::Answered, what);
        }
        let all =
            self.wishes.iter().zip(verdicts).all(|(wish, verdict)| {
                !wish.enforced || verdict.is_some_and(|verdict| verdict.is_admitted())
            });
        let mut inside = self.world.inside();
        inside.tell(now_us, || format!("node {} answers {:?}: {verdicts:?}", self.holder, self.wishes));
        for (wish, verdict) in self.wishes.iter().zip(verdicts) {
            let Some(verdict) = verdict else { continue };
            self.is_decided(&mut inside, wish, verdict, all, begun_us);
        }
    }

    fn is_decided(&self, inside: &mut Inside, wish: &Wish, verdict: &Verdict, all: bool, begun_us: u64) {
        let (place, is_admitted) = (self.place(wish), verdict.is_admitted());
        let limit = &self.limits[wish.limit].1;
        if wish.cost > limit.limit.size() && is_admitted {
            let what = format!("{} of {} are admitted", wish.cost, limit.limit.size());
            inside.violated(Invariant::LimitChange, begun_us, what);
        }
        match verdict.basis {
            // The store has noted it when it decided.
            Basis::Exact => {}
            Basis::Leased if is_admitted && all => {
                inside.judge.spent(self.holder, place, wish.cost, begun_us, self.clock.at(begun_us));
            }
            Basis::Leased if is_admitted => {}
            // What was known then is known now only if nothing has happened since.
            Basis::Leased if self.world.now_us() > begun_us => {}
            Basis::Leased => self.is_denied_here(inside, wish, limit, begun_us),
            Basis::Local if is_admitted && all => inside.judge.owes(place, wish.cost),
            Basis::Local | Basis::Open | Basis::Closed => {}
        }
    }

    /// What a node denies by itself the store would deny as well, by all that it had said.
    fn is_denied_here(&self, inside: &mut Inside, wish: &Wish, limit: &FakeLimit, now_us: u64) {
        let place = self.place(wish);
        inside.judge.report.local_denials += 1;
        let Some(denial) = inside.judge.denial(self.holder, place, now_us) else { return };
        let Some(denial) = denial else {
            let what = format!("node {} denies {wish:?}, of which the store has said nothing", self.holder);
            return inside.violated(Invariant::LocalDenial, now_us, what);
        };
        if denial.generation != inside.better[place] {
            return;
        }
        // The node's clock may be slow, so it has waited longer by that factor.
        let slow_us = (now_us - denial.executed_us) / 5_000 + 2;
        let then = inside.server.now(now_us - slow_us);
        if inside.server.peek(then, place, limit, ask(wish)).is_admitted() {
            inside.violated(Invariant::LocalDenial, now_us, format!("node {} denies {wish:?}", self.holder));
        }
    }
}

fn ask(wish: &Wish) -> Ask {
    let ask = Ask::of(wish.cost);
    if wish.wait_us > 0 { ask.within(Micros::new(wish.wait_us)) } else { ask }
}
