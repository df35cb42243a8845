//! One limit applied to one key: the value that crosses every layer unchanged.

use std::sync::Arc;

use smallvec::SmallVec;
use tollgate_core::{Ask, Micros};

use crate::hash::Hash;

/// Identifies a limit that was added to a backend. An id is never used again for another limit of the same backend.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LimitId(pub(crate) u32);

impl LimitId {
    /// The id with this number, for a backend that numbers its limits itself.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }
}

/// The key of a check: its text, and the hash of the text, which is computed once.
#[derive(Clone, Copy, Debug)]
pub struct HashedKey<'a> {
    text: &'a str,
    hash: Hash,
}

impl<'a> HashedKey<'a> {
    /// Hashes a key.
    #[inline]
    pub fn new(text: &'a str) -> Self {
        Self { text, hash: Hash::of(text) }
    }

    /// The text.
    pub const fn text(self) -> &'a str {
        self.text
    }

    #[inline]
    pub(crate) const fn hash(self) -> Hash {
        self.hash
    }
}

/// A key that outlives its request.
#[derive(Clone, Debug)]
pub(crate) struct OwnedKey {
    text: Arc<str>,
    hash: Hash,
}

impl OwnedKey {
    /// The key, to be used in a check.
    pub(crate) fn hashed(&self) -> HashedKey<'_> {
        HashedKey { text: &self.text, hash: self.hash }
    }
}

impl From<HashedKey<'_>> for OwnedKey {
    fn from(key: HashedKey<'_>) -> Self {
        Self { text: key.text.into(), hash: key.hash }
    }
}

/// One limit applied to one key.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    /// The limit. Each layer looks its settings up by this id.
    pub limit: LimitId,
    /// The key that the limit applies to.
    pub key: HashedKey<'a>,
    /// How many permits are asked for, and how long the caller would wait for them.
    pub ask: Ask,
    /// Whether a denial by this limit denies the request. If not, the check is only counted: permits are taken if the request is admitted
    /// and this limit has them.
    pub enforced: bool,
}

impl<'a> Check<'a> {
    /// Asks an enforced limit for permits, now or not at all.
    #[inline]
    pub fn new(limit: LimitId, key: &'a str, permits: u64) -> Self {
        Self { limit, key: HashedKey::new(key), ask: Ask::of(permits), enforced: true }
    }

    /// The same check, with another ask.
    #[must_use]
    pub const fn with_ask(self, ask: Ask) -> Self {
        Self { ask, ..self }
    }

    /// The same check, only counted.
    #[must_use]
    pub const fn counted_only(self) -> Self {
        Self { enforced: false, ..self }
    }
}

/// The checks of a request in which no state occurs twice.
pub(crate) struct Distinct<'a> {
    pub(crate) checks: SmallVec<[Check<'a>; 4]>,
    /// The position of each original check among the distinct ones.
    pub(crate) index: SmallVec<[usize; 4]>,
}

impl<'a> Distinct<'a> {
    /// Merges checks of the same state: each alone would find the permits that both want, so one check asks for the sum. `state` identifies
    /// the state of the check at a position.
    ///
    /// Several limits never wait unless the caller has said for how long, not in a queue either: the other limits would be held up.
    pub(crate) fn new(checks: &[Check<'a>], state: impl Fn(usize) -> Hash) -> Self {
        let mut distinct = Self { checks: SmallVec::new(), index: SmallVec::new() };
        let mut states: SmallVec<[Hash; 4]> = SmallVec::new();
        for (number, check) in checks.iter().enumerate() {
            let state = state(number);
            if let Some(position) = states.iter().position(|known| *known == state) {
                let known = &mut distinct.checks[position];
                known.ask.cost = known.ask.cost.saturating_add(check.ask.cost);
                known.enforced |= check.enforced;
                distinct.index.push(position);
                continue;
            }
            let ask = check.ask.within(check.ask.wait.unwrap_or(Micros::ZERO));
            distinct.index.push(states.len());
            distinct.checks.push(check.with_ask(ask));
            states.push(state);
        }
        distinct
    }
}
