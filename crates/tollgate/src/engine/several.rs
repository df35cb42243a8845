//! Several limits at once, wherever their states are.

use smallvec::SmallVec;
use tollgate_core::{Ask, Decision, Micros};

/// One of several limits.
#[derive(Debug)]
pub struct Check<'a, L> {
    /// The limit.
    pub limiter: &'a L,
    /// Whose it is.
    pub key: &'a str,
    /// What is asked of it.
    pub ask: Ask,
    /// Whether its denial is one for all. If not, it is taken from where all others and itself admit.
    pub is_binding: bool,
}

impl<'a, L> Check<'a, L> {
    /// So many permits, now or not at all; a denial is one for all.
    pub const fn of(limiter: &'a L, key: &'a str, permits: u64) -> Self {
        Self { limiter, key, ask: Ask::of(permits), is_binding: true }
    }
}

impl<L> Clone for Check<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L> Copy for Check<'_, L> {}

/// What was decided on several limits, in the order of the checks. None: another limit is known to deny, and this one was not asked.
pub type Decisions = SmallVec<[Option<Decision>; 4]>;

/// Checks in which no state stands twice, and by number which of them each of those that were asked for is.
pub(super) struct Merged<'a, L> {
    pub(super) checks: SmallVec<[Check<'a, L>; 4]>,
    pub(super) of: SmallVec<[usize; 4]>,
}

/// A state that stands twice is asked for the sum: each by itself would find what both want. Nobody waits who has not said for how
/// long, not in a queue either: the other limits would be held up for it.
pub(super) fn merged<'a, L>(checks: &[Check<'a, L>], is_same: impl Fn(&L, &L) -> bool) -> Merged<'a, L> {
    let mut merged = Merged { checks: SmallVec::new(), of: SmallVec::new() };
    for check in checks {
        let ask = check.ask.within(check.ask.wait.unwrap_or(Micros::ZERO));
        let known = merged
            .checks
            .iter_mut()
            .enumerate()
            .find(|(_, known)| known.key == check.key && is_same(known.limiter, check.limiter));
        match known {
            Some((number, known)) => {
                known.ask.cost = known.ask.cost.saturating_add(check.ask.cost);
                known.is_binding |= check.is_binding;
                merged.of.push(number);
            }
            None => {
                merged.of.push(merged.checks.len());
                merged.checks.push(Check { ask, ..*check });
            }
        }
    }
    merged
}
