//! What is set for one limit beyond its numbers, where a store keeps its states.

use std::num::NonZeroU32;
use std::time::Duration;

use tollgate_core::{Consistency, LeaseTerms, Limit, StaysStrict};

/// What happens to checks that the store does not decide.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FailureMode {
    /// They are let through while the store cannot be reached. While it can, but does not decide (too slow, out of memory,
    /// loading), they are decided as with `Local`: a client that overloads the store gets no free pass.
    #[default]
    Open,
    /// They are refused.
    Closed,
    /// They are decided by this node alone, with its share of the limit.
    Local,
}

/// What a limit asks of the guard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OnFailure {
    /// What happens to checks that the store does not decide.
    pub mode: FailureMode,
    /// Whether what was admitted by this node alone is taken from the store's state afterwards, into bounded debt.
    pub settle: bool,
    /// For each check, in place of the store's own deadline.
    pub deadline: Option<Duration>,
}

/// What is settled for a limit beyond its numbers, where a store keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LimitSettings {
    /// Whether nodes borrow from it and decide by themselves.
    pub consistency: Consistency,
    /// The most permits that one node borrows of one key; all of them if not set.
    pub lease_ceiling: Option<u64>,
    /// Whether keys count as used up when a server takes over from another, until everything that may have been lost with the
    /// other one has come back.
    pub failover_guard: bool,
    /// What happens while the store does not decide.
    pub on_failure: OnFailure,
    /// Of a rule of a policy: how many subjects in a second may be new to this node before further ones share one bucket.
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
