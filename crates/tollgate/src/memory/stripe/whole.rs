//! Changes a state together with the data beside it.

use tollgate_core::{PlainState, State};

use super::super::numbers::CARRIED;
use super::super::slot_codec::SlotCodec;
use super::{Asker, Found, Slot, Stripe, word};

impl Stripe {
    /// Runs `change` on the state of a key with the data beside it, converted from another limit if needed, or on a fresh one.
    /// A caller that `takes` gets a wait under its own limit, so the state is stored under that limit, even after a denial.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn update_whole<A: SlotCodec, R>(
        &mut self,
        asker: Asker<'_>,
        algorithm: &A,
        takes: bool,
        change: impl FnOnce(&mut State) -> R,
    ) -> R {
        let found = self.find(asker.hash).and_then(|at| {
            let slot = self.slots.get(at);
            Some((at, slot, self.carried_over(slot, asker)?))
        });
        let Some((at, slot, Found { mut state, is_changed })) = found else {
            return self.begin(asker, algorithm, |own| change_own::<A, R>(own, change));
        };
        let before = state.clone();
        let result = change(&mut state);
        if state == before && !(takes && is_changed) {
            return result;
        }
        let limits = asker.limits.read();
        self.parts.remove(self.part(slot, &limits));
        self.release(slot, &limits);
        let word = if matches!(state, State::Carried(_)) {
            word(CARRIED, self.heap.insert_carried(asker.id, state))
        } else {
            let own = A::State::of(&state).cloned().unwrap_or_else(|| algorithm.fresh(asker.now));
            word(asker.id, algorithm.store(own, &mut self.heap))
        };
        self.slots.set(at, Slot { hash: asker.hash, word });
        self.parts.add(limits.part(asker.id));
        result
    }
}

/// Runs `change` on a fresh state. It has room for every request, so no data comes beside it.
fn change_own<A: SlotCodec, R>(own: &mut A::State, change: impl FnOnce(&mut State) -> R) -> R {
    let mut state = own.clone().into();
    let result = change(&mut state);
    if let Some(changed) = A::State::of(state.plain()) {
        own.clone_from(changed);
    }
    result
}

/// Runs `change` on a state, as a state of its algorithm.
pub(super) fn as_own<A: SlotCodec, R>(
    state: &mut State,
    algorithm: &A,
    asker: Asker<'_>,
    change: impl FnOnce(&mut A::State) -> R,
) -> R {
    let mut own = A::State::of(state).cloned().unwrap_or_else(|| algorithm.fresh(asker.now));
    let result = change(&mut own);
    *state = own.into();
    result
}
