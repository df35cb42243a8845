//! Settings of a limit beyond its numbers, for limits in a store.

use std::num::NonZeroU32;
use std::time::Duration;

use tollgate_core::{Consistency, LeaseTerms, Limit, StaysStrict};

/// How checks are answered that the store does not decide.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FailureMode {
    /// They are admitted while the store cannot be reached. While the store is reachable but does not decide (too slow, out of
    /// memory, loading), they are decided as with `Local`, so that a client gains nothing by overloading the store.
    #[default]
    Open,
    /// They are denied.
    Closed,
    /// They are decided by this node alone, with its share of the limit.
    Local,
}

/// The settings of a limit for the guard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OnFailure {
    /// How checks are answered that the store does not decide.
    pub mode: FailureMode,
    /// Whether permits that this node admitted alone are taken from the store afterwards, into bounded debt.
    pub settle: bool,
    /// The deadline of each check, instead of the deadline of the store.
    pub deadline: Option<Duration>,
}

/// Settings of a limit in a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LimitSettings {
    /// Whether nodes borrow from it and decide by themselves.
    pub consistency: Consistency,
    /// The most permits that one node borrows of one key; all of them if not set.
    pub lease_ceiling: Option<u64>,
    /// Whether keys count as used up after a failover, until all permits that may have been lost with the old server have come
    /// back.
    pub failover_guard: bool,
    /// How checks are answered while the store does not decide.
    pub on_failure: OnFailure,
    /// For a rule of a policy: how many new subjects this node accepts in a second before further ones share one bucket.
    pub max_new_subjects: Option<NonZeroU32>,
}

impl LimitSettings {
    /// The terms on which nodes borrow, or why they do not.
    pub fn lease_terms(&self, limit: &Limit) -> Result<LeaseTerms, StaysStrict> {
        let terms = LeaseTerms::new(limit, self.consistency)?;
        Ok(self.lease_ceiling.map_or(terms, |permits| terms.with_ceiling(permits)))
    }
}

impl From<OnFailure> for LimitSettings {
    fn from(on_failure: OnFailure) -> Self {
        Self { on_failure, ..Self::default() }
    }
}
