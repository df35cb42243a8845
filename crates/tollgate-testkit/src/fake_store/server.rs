//! The states of all keys, a clock, and what can happen to both. Decides with the arithmetic of the core.

use std::collections::BTreeMap;

use tollgate_core::algorithm::LeaseState;
use tollgate_core::{
    Algorithm, Ask, Consistency, Decision, Grant, LeaseTerms, Limit, Micros, Outcome, State, Timestamp,
};

use super::call::{Asked, Call, FakeLimit, Place, Reply, Returned};
use super::laws::{Law, is_batch_alike, is_exact};
use crate::simulation::Flaw;

/// How long the number of returns outlives the state, as a key in Redis does.
const KEPT: Micros = Micros::from_secs(1);

/// What the store remembers of a key.
#[derive(Clone, Debug, Default)]
struct Slot {
    state: Option<State>,
    /// The same without ever being deleted.
    twin: Option<State>,
    /// The limit under which both were written.
    limit: Option<Limit>,
    returns: u64,
    kept_until: Timestamp,
}

/// A write, so that a failover can undo it.
#[derive(Clone, Debug)]
struct Written {
    real_us: u64,
    place: usize,
    before: Slot,
    taken: u64,
}

/// Something that a call has done. Places are numbered as [`Server::place`] says.
#[derive(Clone, Debug)]
pub(crate) enum Noted {
    /// A request was admitted, to start after a delay.
    Admitted { place: usize, permits: u64, delay: Micros },
    /// Permits were lent.
    LeaseGrant { place: usize, grant: Grant },
    /// Permits were taken back.
    TakenBack { place: usize },
    /// Permits were taken without asking.
    Charged { place: usize, permits: u64 },
    /// The state was written under another limit before.
    CarriedOver { place: usize },
    /// A law was broken.
    Broken { law: Law, what: String },
}

/// The one store that all nodes share.
#[derive(Debug)]
pub(crate) struct Server {
    places: BTreeMap<(Box<str>, Box<str>), usize>,
    slots: Vec<Slot>,
    written: Vec<Written>,
    /// How far its clock is ahead of real time.
    ahead_us: i64,
    /// When this server took over from another.
    took_over: Option<Timestamp>,
    /// A state that was deleted before the clock was set back has forgotten what it had seen. And a return after a guarded failover
    /// makes a state full before its time: when it is deleted, the key is distrusted again, which only denies more.
    twin_may_differ: bool,
    flaw: Option<Flaw>,
    notes: Vec<Noted>,
}

impl Server {
    pub(crate) fn new(ahead_us: u64, flaw: Option<Flaw>) -> Self {
        Self {
            places: BTreeMap::new(),
            slots: Vec::new(),
            written: Vec::new(),
            ahead_us: ahead_us as i64,
            took_over: None,
            twin_may_differ: false,
            flaw,
            notes: Vec::new(),
        }
    }

    /// The number of a state.
    pub(crate) fn place(&mut self, scope: &str, key: &str) -> usize {
        if let Some(place) = self.places.get(&(scope.into(), key.into())) {
            return *place;
        }
        self.slots.push(Slot::default());
        self.places.insert((scope.into(), key.into()), self.slots.len() - 1);
        self.slots.len() - 1
    }

    /// What was done since this was last asked.
    pub(crate) fn take_notes(&mut self) -> Vec<Noted> {
        core::mem::take(&mut self.notes)
    }

    /// The store's time.
    pub(crate) fn now(&self, real_us: u64) -> Timestamp {
        Timestamp::from_micros((real_us as i64 + self.ahead_us) as u64)
    }

    /// Sets the clock.
    pub(crate) fn step(&mut self, by_us: i64) {
        self.ahead_us += by_us;
        self.twin_may_differ |= by_us < 0;
    }

    /// Does what a call asks for.
    pub(crate) fn execute(&mut self, real_us: u64, call: &Call) -> Reply {
        match call {
            Call::Decide(asked) => Reply::Decided(self.decide(real_us, asked)),
            Call::Peek(asked) => Reply::Decided(vec![self.look(real_us, asked)]),
            Call::Borrow(asked, wanted) => {
                let number = self.number(&asked.place);
                let lending = (wanted.permits, wanted.parts, self.lending(&asked.place.limit, wanted.terms));
                let (decision, grant) = self.take(real_us, number, asked, Some(lending));
                Reply::LeaseGrant(decision, grant)
            }
            Call::Return { place, lease, number, terms } => {
                Reply::Returned(self.give_back(real_us, place, (lease.left, lease.at), *number, *terms))
            }
            Call::Charge { place, permits } => {
                self.charge(real_us, place, *permits);
                Reply::Done
            }
            Call::Refund { place, permits, at } => {
                self.refund(real_us, place, *permits, *at);
                Reply::Done
            }
            Call::Reset(place) => {
                let number = self.number(place);
                self.slots[number] = Slot::default();
                Reply::Done
            }
        }
    }

    /// What a check alone would be answered, at some distance from now.
    pub(crate) fn peek(&self, now: Timestamp, place: usize, limit: &FakeLimit, ask: Ask) -> Outcome {
        limit.limit.peek(&self.view(place, limit, now), now, ask)
    }

    /// Whole permits left.
    pub(crate) fn remaining(&self, real_us: u64, place: usize, limit: &FakeLimit) -> u64 {
        let now = self.now(real_us);
        limit.limit.status(&self.view(place, limit, now), now).remaining
    }

    /// Another server takes over, which does not know of the writes of the last `lost_us`. Returns how many permits were taken by
    /// them, for each place.
    pub(crate) fn fail_over(&mut self, real_us: u64, lost_us: u64) -> Vec<u64> {
        let mut lost = vec![0; self.slots.len()];
        while let Some(last) = self.written.pop_if(|last| last.real_us + lost_us >= real_us) {
            lost[last.place] += last.taken;
            self.slots[last.place] = last.before;
        }
        self.took_over = Some(self.now(real_us));
        lost
    }

    fn number(&mut self, place: &Place) -> usize {
        self.place(&place.limit.scope, &place.key)
    }

    fn look(&mut self, real_us: u64, asked: &Asked) -> Decision {
        let (now, number) = (self.now(real_us), self.number(&asked.place));
        let limit = &asked.place.limit;
        let state = self.view(number, limit, now);
        decision(&limit.limit, limit.limit.peek(&state, now, asked.ask), &state, now)
    }

    /// Decides on all checks of a request together: permits are taken from every limit, or from none.
    fn decide(&mut self, real_us: u64, asked: &[Asked]) -> Vec<Decision> {
        if let [asked] = asked {
            let number = self.number(&asked.place);
            return vec![self.take(real_us, number, asked, None).0];
        }
        // Checks of the same state are one check for the sum, by the limit of the first.
        let mut distinct: Vec<(usize, Asked)> = Vec::new();
        let mut index = Vec::new();
        for check in asked {
            let number = self.number(&check.place);
            if let Some(known) = distinct.iter().position(|(it, _)| *it == number) {
                let merged = &mut distinct[known].1;
                merged.ask.cost = merged.ask.cost.saturating_add(check.ask.cost);
                merged.enforced |= check.enforced;
                index.push(known);
                continue;
            }
            index.push(distinct.len());
            let ask = check.ask.within(check.ask.wait.unwrap_or(Micros::ZERO));
            distinct.push((number, Asked { ask, ..check.clone() }));
        }
        let looked: Vec<_> = distinct.iter().map(|(_, check)| self.look(real_us, check)).collect();
        let denies =
            |((_, check), looked): (&(usize, Asked), &Decision)| check.enforced && !looked.is_admitted();
        let all = !distinct.iter().zip(&looked).any(denies);
        let is_impossible =
            |(_, check): &(usize, Asked)| check.enforced && check.ask.cost > check.place.limit.limit.size();
        let decisions: Vec<_> = if distinct.iter().any(is_impossible) {
            looked
        } else {
            // A limit that denies by itself keeps what a denial keeps.
            let decide = |((number, check), looked): (&(usize, Asked), &Decision)| match all
                || !looked.is_admitted()
            {
                true => self.take(real_us, *number, check, None).0,
                false => *looked,
            };
            distinct.iter().zip(&looked).map(decide).collect()
        };
        index.into_iter().map(|position| decisions[position]).collect()
    }

    /// Decides on one check, then lends if that is wanted, at one instant.
    fn take(
        &mut self,
        real_us: u64,
        number: usize,
        asked: &Asked,
        lending: Option<(u64, u64, LeaseTerms)>,
    ) -> (Decision, Option<Grant>) {
        let (now, limit, ask) = (self.now(real_us), &*asked.place.limit, asked.ask);
        self.note_carried(number, limit, now);
        let seen = self.view(number, limit, now);
        let evaluate = |mut state: State| {
            let outcome = limit.limit.decide(&mut state, now, ask);
            let lent = lending.filter(|(wanted, ..)| *wanted > 0);
            let grant =
                lent.map(|(wanted, parts, terms)| terms.lend(&limit.limit, &mut state, now, wanted, parts));
            (state, outcome, grant)
        };
        let (state, outcome, grant) = evaluate(seen.clone());
        let twin_seen = self.view_of(self.slots[number].twin.as_ref(), number, limit, now);
        let (twin, twin_outcome, twin_grant) = evaluate(twin_seen);
        if !self.twin_may_differ && (outcome, grant) != (twin_outcome, twin_grant) {
            self.broken(Law::Deletion, format!("{ask:?}: {outcome:?}, a twin says {twin_outcome:?}"));
        }
        if ask.cost > 0 && !is_batch_alike(&limit.limit, &seen, now, ask.cost) {
            self.broken(Law::Batch, format!("{ask:?}"));
        }
        if let Outcome::Denied { retry } = outcome
            && !is_exact(&limit.limit, &seen, now, ask, retry)
        {
            self.broken(Law::Retry, format!("{ask:?} {outcome:?}"));
        }
        let answer = decision(&limit.limit, outcome, &state, now);
        let permits = if outcome.is_admitted() { ask.cost } else { 0 };
        let lent = grant.map_or(0, |grant| grant.permits);
        self.write(real_us, (number, limit), &seen, state, twin, permits + lent);
        if permits > 0 {
            self.notes.push(Noted::Admitted { place: number, permits, delay: outcome.delay() });
        }
        if let Some(grant) = grant.filter(|grant| grant.permits > 0) {
            self.notes.push(Noted::LeaseGrant { place: number, grant });
        }
        (answer, grant)
    }

    /// Takes back what was not spent, if `number` is how many returns there were.
    fn give_back(
        &mut self,
        real_us: u64,
        place: &Place,
        (permits, at): (u64, Timestamp),
        number: u64,
        terms: LeaseTerms,
    ) -> Returned {
        let (now, slot, limit) = (self.now(real_us), self.number(place), &*place.limit);
        let terms = self.lending(limit, terms);
        let returns = self.returns(slot, now);
        if returns != number && self.flaw != Some(Flaw::UnnumberedReturns) {
            return Returned::Refused { returns };
        }
        self.note_carried(slot, limit, now);
        let seen = self.view(slot, limit, now);
        let mut state = seen.clone();
        terms.take_back(&limit.limit, &mut state, now, permits, at);
        if state != seen {
            let mut twin = self.view_of(self.slots[slot].twin.as_ref(), slot, limit, now);
            terms.take_back(&limit.limit, &mut twin, now, permits, at);
            self.write(real_us, (slot, limit), &seen, state, twin, 0);
            self.slots[slot].returns = returns + 1;
            self.twin_may_differ |= self.took_over.is_some();
            self.notes.push(Noted::TakenBack { place: slot });
        }
        Returned::Taken
    }

    /// Takes what a node has admitted alone.
    fn charge(&mut self, real_us: u64, place: &Place, permits: u64) {
        let (now, slot, limit) = (self.now(real_us), self.number(place), &*place.limit);
        self.note_carried(slot, limit, now);
        let seen = self.view(slot, limit, now);
        let (mut state, mut twin) =
            (seen.clone(), self.view_of(self.slots[slot].twin.as_ref(), slot, limit, now));
        limit.limit.charge(&mut state, now, permits);
        limit.limit.charge(&mut twin, now, permits);
        self.write(real_us, (slot, limit), &seen, state, twin, permits);
        self.notes.push(Noted::Charged { place: slot, permits });
    }

    /// Gives back what is still owed.
    fn refund(&mut self, real_us: u64, place: &Place, permits: u64, at: Timestamp) {
        let (now, slot, limit) = (self.now(real_us), self.number(place), &*place.limit);
        self.note_carried(slot, limit, now);
        let seen = self.view(slot, limit, now);
        let (mut state, mut twin) =
            (seen.clone(), self.view_of(self.slots[slot].twin.as_ref(), slot, limit, now));
        limit.limit.refund(&mut state, now, permits, at);
        limit.limit.refund(&mut twin, now, permits, at);
        self.write(real_us, (slot, limit), &seen, state, twin, 0);
    }

    /// How the store lends.
    fn lending(&self, limit: &FakeLimit, terms: LeaseTerms) -> LeaseTerms {
        let plain = LeaseTerms::of_any_size(&limit.limit, Consistency::LeaseFast);
        match (self.flaw, plain) {
            (Some(Flaw::ObviousLease), Ok(plain)) => plain.with_life(terms.life()),
            _ => terms,
        }
    }

    fn broken(&mut self, law: Law, what: String) {
        self.notes.push(Noted::Broken { law, what });
    }

    fn note_carried(&mut self, place: usize, limit: &FakeLimit, now: Timestamp) {
        let slot = &self.slots[place];
        if slot.limit.is_some_and(|written| written != limit.limit) && now < slot.kept_until {
            self.notes.push(Noted::CarriedOver { place });
        }
    }

    fn write(
        &mut self,
        real_us: u64,
        (place, limit): (usize, &FakeLimit),
        seen: &State,
        state: State,
        twin: State,
        taken: u64,
    ) {
        // A denial keeps what was carried over, too: it has said how long to wait from now.
        let is_carried = self.slots[place].limit.is_some_and(|written| written != limit.limit);
        if state == *seen && taken == 0 && !is_carried {
            return;
        }
        let now = self.now(real_us);
        let returns = self.returns(place, now);
        let kept_until = limit.limit.full_at(&state).max(now).after(KEPT);
        let (state, twin) = (Some(state), Some(twin));
        let slot = Slot { state, twin, limit: Some(limit.limit), returns, kept_until };
        let before = core::mem::replace(&mut self.slots[place], slot);
        self.written.push(Written { real_us, place, before, taken });
    }

    fn returns(&self, place: usize, now: Timestamp) -> u64 {
        let slot = &self.slots[place];
        if now < slot.kept_until { slot.returns } else { 0 }
    }

    /// The state as it is evaluated at `now`: deleted when it is full, carried over from another limit, distrusted after a failover.
    fn view(&self, place: usize, limit: &FakeLimit, now: Timestamp) -> State {
        let slot = &self.slots[place];
        let written = slot.limit.as_ref().unwrap_or(&limit.limit);
        self.view_of(slot.state.as_ref().filter(|state| now < written.full_at(state)), place, limit, now)
    }

    fn view_of(&self, state: Option<&State>, place: usize, limit: &FakeLimit, now: Timestamp) -> State {
        let guarded_since = self.took_over.filter(|_| limit.settings.failover_guard);
        let FakeLimit { limit, settings, .. } = limit;
        let mut state = match (state.cloned(), self.slots[place].limit) {
            (Some(state), Some(written)) if written != *limit => limit.migrate(&written, state, now),
            (Some(state), _) => state,
            (None, _) => limit.fresh(guarded_since.unwrap_or(now)),
        };
        if let Some(since) = guarded_since {
            let life = settings.lease_terms(limit).map_or(Micros::ZERO, |terms| terms.life());
            limit.distrust(&mut state, now, since, life);
        }
        if let (Some(Flaw::UnchargedEpochs), State::Lent(lent)) = (self.flaw, &mut state) {
            skip_epochs(lent, now);
        }
        state
    }
}

fn decision(limit: &Limit, outcome: Outcome, state: &State, now: Timestamp) -> Decision {
    let status = limit.status(state, now);
    Decision { outcome, limit: limit.size(), remaining: status.remaining, reset: status.reset, at: now }
}

/// The flawed way over the end of epochs: what flowed until then finds the room free already.
fn skip_epochs(lent: &mut LeaseState, now: Timestamp) {
    let epoch = now.as_micros() as i64 / lent.life;
    while lent.epoch < epoch && lent.out + lent.out_before > 0 {
        (lent.out_before, lent.out, lent.epoch) = (lent.out, 0, lent.epoch + 1);
    }
}
