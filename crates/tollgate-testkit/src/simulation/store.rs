//! The one store: a state for each key, a clock of its own, and what can happen to both.

use tollgate_core::algorithm::LeaseState;
use tollgate_core::{Algorithm, Ask, Grant, LeaseTerms, Limit, Micros, Outcome, State, Timestamp};

use super::Flaw;

/// The beginning of simulated time on the store's clock.
const BEGIN_US: u64 = 1_700_000_000_000_000;
/// For so long the number of returns outlives the state: as a key in Redis does.
const KEPT: Micros = Micros::from_secs(1);

/// What the store remembers of a key.
#[derive(Clone, Debug, Default)]
struct Slot {
    state: Option<State>,
    /// The same without ever being deleted.
    twin: Option<State>,
    returns: u64,
    kept_until: Timestamp,
}

/// A write, so that it can be forgotten.
#[derive(Clone, Debug)]
struct Written {
    real_us: u64,
    key: usize,
    before: Slot,
    taken: u64,
}

/// What the store says to a call that asks or borrows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub outcome: Option<Outcome>,
    pub grant: Option<Grant>,
    /// Whether a twin that never deletes anything has answered the same.
    pub alike: bool,
    /// Whether a run of equal asks is answered as each of them alone.
    pub batch_alike: bool,
    /// Whether the promised wait is exact.
    pub retry_exact: bool,
}

/// What the store says to a return.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Returned {
    /// It was its turn; whether anything came of it, and how many returns there were then.
    Taken { changed: bool, returns: u64 },
    /// It was not its turn: how many there were.
    Refused { returns: u64 },
}

#[derive(Debug)]
pub(super) struct Store {
    limit: Limit,
    terms: Option<LeaseTerms>,
    slots: Vec<Slot>,
    written: Vec<Written>,
    /// How far its clock is from real time.
    ahead_us: i64,
    guard: Option<Timestamp>,
    /// After a clock was set back, a state that was deleted has forgotten what it had seen. And what is given back after a guarded
    /// failover makes a state full before its time: when it is deleted, the key is distrusted again, which only denies more.
    twin_may_differ: bool,
    flaw: Option<Flaw>,
}

impl Store {
    pub(super) fn new(
        limit: Limit,
        terms: Option<LeaseTerms>,
        keys: usize,
        phase_us: u64,
        flaw: Option<Flaw>,
    ) -> Self {
        Self {
            limit,
            terms,
            slots: vec![Slot::default(); keys],
            written: Vec::new(),
            ahead_us: (BEGIN_US + phase_us) as i64,
            guard: None,
            twin_may_differ: false,
            flaw,
        }
    }

    /// The store's time.
    pub(super) fn now(&self, real_us: u64) -> Timestamp {
        Timestamp::from_micros((real_us as i64 + self.ahead_us) as u64)
    }

    /// Sets the clock.
    pub(super) fn step(&mut self, by_us: i64) {
        self.ahead_us += by_us;
        self.twin_may_differ |= by_us < 0;
    }

    /// Decides, then lends, at one instant.
    pub(super) fn borrow(
        &mut self,
        real_us: u64,
        key: usize,
        ask: Option<Ask>,
        wanted: u64,
        parts: u64,
    ) -> Answer {
        let now = self.now(real_us);
        let seen = self.view(key, now);
        let (state, outcome, grant) = self.evaluate(seen.clone(), now, ask, wanted, parts);
        let (twin, twin_outcome, twin_grant) =
            self.evaluate(self.view_of(self.slots[key].twin.as_ref(), now), now, ask, wanted, parts);
        let retry_exact = match (ask, outcome) {
            (Some(ask), Some(Outcome::Denied { retry })) => self.is_exact(&seen, now, ask, retry),
            _ => true,
        };
        let taken = ask.filter(|_| outcome.is_some_and(Outcome::is_admitted)).map_or(0, |ask| ask.cost)
            + grant.map_or(0, |grant| grant.permits);
        self.write(real_us, key, &seen, state, twin, taken);
        Answer {
            outcome,
            grant,
            alike: self.twin_may_differ || (outcome, grant) == (twin_outcome, twin_grant),
            batch_alike: ask.is_none_or(|ask| self.is_batch_alike(&seen, now, ask.cost)),
            retry_exact,
        }
    }

    /// Takes back what was not spent, if `number` is how many returns there were.
    pub(super) fn give_back(
        &mut self,
        real_us: u64,
        key: usize,
        permits: u64,
        at: Timestamp,
        number: u64,
    ) -> Returned {
        let Some(terms) = self.terms else { return Returned::Refused { returns: 0 } };
        let now = self.now(real_us);
        let returns = self.returns(key, now);
        if returns != number && self.flaw != Some(Flaw::UnnumberedReturns) {
            return Returned::Refused { returns };
        }
        let seen = self.view(key, now);
        let mut state = seen.clone();
        terms.take_back(&self.limit, &mut state, now, permits, at);
        let changed = state != seen;
        if changed {
            let mut twin = self.view_of(self.slots[key].twin.as_ref(), now);
            terms.take_back(&self.limit, &mut twin, now, permits, at);
            self.write(real_us, key, &seen, state, twin, 0);
            self.slots[key].returns = returns + 1;
            self.twin_may_differ |= self.guard.is_some();
        }
        Returned::Taken { changed, returns: returns + u64::from(changed) }
    }

    /// Takes what a node has admitted alone.
    pub(super) fn charge(&mut self, real_us: u64, key: usize, permits: u64) {
        let now = self.now(real_us);
        let seen = self.view(key, now);
        let (mut state, mut twin) = (seen.clone(), self.view_of(self.slots[key].twin.as_ref(), now));
        self.limit.charge(&mut state, now, permits);
        self.limit.charge(&mut twin, now, permits);
        self.write(real_us, key, &seen, state, twin, permits);
    }

    /// What would be answered, at some distance from now.
    pub(super) fn peek(&self, now: Timestamp, key: usize, ask: Ask) -> Outcome {
        self.limit.peek(&self.view(key, now), now, ask)
    }

    /// Whole permits left.
    pub(super) fn remaining(&self, real_us: u64, key: usize) -> u64 {
        let now = self.now(real_us);
        self.limit.standing(&self.view(key, now), now).remaining
    }

    /// Another server takes over, which does not know of the writes of the last `lost_us`. Says how many permits were taken by
    /// them, for each key.
    pub(super) fn fail_over(&mut self, real_us: u64, lost_us: u64, is_guarded: bool) -> Vec<u64> {
        let mut lost = vec![0; self.slots.len()];
        while let Some(last) = self.written.pop_if(|last| last.real_us + lost_us >= real_us) {
            lost[last.key] += last.taken;
            self.slots[last.key] = last.before;
        }
        if is_guarded {
            self.guard = Some(self.now(real_us));
        }
        lost
    }

    /// Goes on with another limit: states are carried over.
    pub(super) fn change(&mut self, limit: Limit, terms: Option<LeaseTerms>, real_us: u64) {
        let now = self.now(real_us);
        for slot in &mut self.slots {
            slot.state = slot.state.take().map(|state| limit.carry_over(&self.limit, state, now));
            slot.twin = slot.twin.take().map(|state| limit.carry_over(&self.limit, state, now));
        }
        (self.limit, self.terms) = (limit, terms);
    }

    fn evaluate(
        &self,
        mut state: State,
        now: Timestamp,
        ask: Option<Ask>,
        wanted: u64,
        parts: u64,
    ) -> (State, Option<Outcome>, Option<Grant>) {
        let outcome = ask.map(|ask| self.limit.decide(&mut state, now, ask));
        let grant = self
            .terms
            .filter(|_| wanted > 0)
            .map(|terms| terms.lend(&self.limit, &mut state, now, wanted, parts));
        (state, outcome, grant)
    }

    fn write(&mut self, real_us: u64, key: usize, seen: &State, state: State, twin: State, taken: u64) {
        if state == *seen && taken == 0 {
            return;
        }
        let now = self.now(real_us);
        let returns = self.returns(key, now);
        self.written.push(Written { real_us, key, before: self.slots[key].clone(), taken });
        let kept_until = self.limit.full_at(&state).max(now).after(KEPT);
        self.slots[key] = Slot { state: Some(state), twin: Some(twin), returns, kept_until };
    }

    fn returns(&self, key: usize, now: Timestamp) -> u64 {
        let slot = &self.slots[key];
        if now < slot.kept_until { slot.returns } else { 0 }
    }

    /// The state as it is evaluated at `now`: deleted when it is full, distrusted after a failover.
    fn view(&self, key: usize, now: Timestamp) -> State {
        let state = self.slots[key].state.as_ref();
        self.view_of(state.filter(|state| now < self.limit.full_at(state)), now)
    }

    fn view_of(&self, state: Option<&State>, now: Timestamp) -> State {
        let mut state = state.cloned().unwrap_or_else(|| self.limit.fresh(self.guard.unwrap_or(now)));
        if let Some(since) = self.guard {
            let life = self.terms.map_or(Micros::ZERO, |terms| terms.life());
            self.limit.distrust(&mut state, now, since, life);
        }
        if let (Some(Flaw::UnchargedEpochs), State::Lent(lent)) = (self.flaw, &mut state) {
            skip_epochs(lent, now);
        }
        state
    }

    /// Denied a microsecond before, admitted at it. That a clock was set back is noted by the denial itself.
    fn is_exact(&self, seen: &State, now: Timestamp, ask: Ask, retry: Micros) -> bool {
        let mut seen = seen.clone();
        self.limit.decide(&mut seen, now, ask);
        let then = now.after(retry);
        let before = Timestamp::from_micros(then.as_micros() - 1);
        self.limit.peek(&seen, then, ask).is_admitted() && !self.limit.peek(&seen, before, ask).is_admitted()
    }

    /// As a script decides a run of equal asks: as many as fit into what is left.
    fn is_batch_alike(&self, seen: &State, now: Timestamp, cost: u64) -> bool {
        let fit = self.limit.standing(seen, now).remaining / cost.max(1);
        let mut state = seen.clone();
        let admitted =
            (0..3).filter(|_| self.limit.decide(&mut state, now, Ask::of(cost)).is_admitted()).count();
        admitted as u64 == fit.min(3)
    }
}

/// The flawed way over the end of epochs: what flowed until then finds the room free already.
fn skip_epochs(lent: &mut LeaseState, now: Timestamp) {
    let epoch = now.as_micros() as i64 / lent.life;
    while lent.epoch < epoch && lent.out + lent.out_before > 0 {
        (lent.out_before, lent.out, lent.epoch) = (lent.out, 0, lent.epoch + 1);
    }
}
