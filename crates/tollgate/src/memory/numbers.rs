//! Numbers for limits: the number in a slot tells the limit and the scope of its state.

use std::collections::HashMap;
use std::num::NonZeroU16;
use std::sync::{Arc, Weak};

use tollgate_core::Limit;

use super::slot_codec;
use crate::hash::Hash;

/// Identifies the limit and the scope of a state. Zero marks an empty slot.
pub(super) type LimitNumber = NonZeroU16;

/// Marks a slot whose state is in the heap, with the number of its limit and the data beside it.
pub(super) const CARRIED: LimitNumber = match NonZeroU16::new(u16::MAX) {
    Some(last) => last,
    None => NonZeroU16::MIN,
};

// A slot has as many bits beside its state as a number.
const _: () = assert!(u128::BITS - slot_codec::STATE_BITS == u16::BITS);

/// The most limits that a slot can tell apart.
pub(super) const LIMITS_MAX: u16 = CARRIED.get() - 1;

/// Limiters and states refer to more different limits than an engine can number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("more than {LIMITS_MAX} different limits in one memory engine")]
pub struct TooManyLimits;

/// The limits that limiters hold or states refer to, by number.
#[derive(Default)]
pub(super) struct Limits {
    known: Vec<Option<Known>>,
    numbers: HashMap<(Hash, Limit), LimitNumber>,
    scopes: HashMap<Hash, Scope>,
    /// Numbers of parts that no scope has any more.
    free_parts: Vec<u16>,
    /// Numbers of limits that were forgotten.
    free: Vec<LimitNumber>,
}

struct Known {
    limit: Limit,
    scope: Hash,
    part: u16,
    /// Alive while a limiter has the number.
    held: Weak<()>,
}

/// A scope, whose keys share one part of the table.
struct Scope {
    part: u16,
    limits: u32,
}

impl Limits {
    pub(super) fn get(&self, id: LimitNumber) -> Option<&Limit> {
        self.of(id).map(|known| &known.limit)
    }

    /// The number of the part of the table that states of a limit count towards.
    pub(super) fn part(&self, id: LimitNumber) -> u16 {
        self.of(id).map_or(0, |known| known.part)
    }

    fn of(&self, id: LimitNumber) -> Option<&Known> {
        self.known.get(usize::from(id.get()) - 1)?.as_ref()
    }

    /// The number of a limit of a scope, and a handle that keeps the number. `None` if all numbers are assigned.
    pub(super) fn number(&mut self, scope: Hash, limit: Limit) -> Option<(LimitNumber, Arc<()>)> {
        if let Some(id) = self.numbers.get(&(scope, limit)).copied() {
            return self.hold(id);
        }
        let id = match self.free.pop() {
            Some(id) => id,
            None if self.known.len() < usize::from(LIMITS_MAX) => {
                self.known.push(None);
                u16::try_from(self.known.len()).ok().and_then(LimitNumber::new)?
            }
            None => return None,
        };
        let part = self.enter_scope(scope);
        self.numbers.insert((scope, limit), id);
        self.known[usize::from(id.get()) - 1] = Some(Known { limit, scope, part, held: Weak::new() });
        self.hold(id)
    }

    /// The number that a limit has in any scope. Keys of both scopes then count towards the same part.
    pub(super) fn number_of_another_scope(&mut self, limit: Limit) -> Option<(LimitNumber, Arc<()>)> {
        let index = self.known.iter().position(|it| it.as_ref().is_some_and(|known| known.limit == limit))?;
        self.hold(u16::try_from(index + 1).ok().and_then(LimitNumber::new)?)
    }

    fn hold(&mut self, id: LimitNumber) -> Option<(LimitNumber, Arc<()>)> {
        let known = self.known.get_mut(usize::from(id.get()) - 1)?.as_mut()?;
        let held = known.held.upgrade().unwrap_or_default();
        known.held = Arc::downgrade(&held);
        Some((id, held))
    }

    /// The part of a scope, which has one limit more.
    fn enter_scope(&mut self, scope: Hash) -> u16 {
        if let Some(known) = self.scopes.get_mut(&scope) {
            known.limits += 1;
            return known.part;
        }
        let part = self.free_parts.pop().unwrap_or(self.scopes.len() as u16);
        self.scopes.insert(scope, Scope { part, limits: 1 });
        part
    }

    fn leave_scope(&mut self, scope: Hash) {
        let Some(known) = self.scopes.get_mut(&scope) else { return };
        known.limits -= 1;
        if known.limits == 0 {
            self.free_parts.push(known.part);
            self.scopes.remove(&scope);
        }
    }

    /// Marks the numbers that limiters hold.
    pub(super) fn note_held(&self, noted: &mut [bool]) {
        for (known, noted) in self.known.iter().zip(noted.iter_mut().skip(1)) {
            *noted = known.as_ref().is_some_and(|known| known.held.strong_count() > 0);
        }
    }

    /// Frees the numbers that no limiter holds, except for the `noted` ones.
    pub(super) fn forget(&mut self, noted: &[bool]) {
        for index in 0..self.known.len() {
            let is_noted = noted.get(index + 1).copied().unwrap_or(true);
            let is_held = |known: &Known| known.held.strong_count() > 0;
            if is_noted || self.known[index].as_ref().is_none_or(is_held) {
                continue;
            }
            if let Some(known) = self.known[index].take() {
                self.numbers.remove(&(known.scope, known.limit));
                self.leave_scope(known.scope);
                self.free.extend(u16::try_from(index + 1).ok().and_then(LimitNumber::new));
            }
        }
    }
}
