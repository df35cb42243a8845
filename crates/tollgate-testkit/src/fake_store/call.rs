//! Calls from a node to the fake store, and the link that carries them.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tollgate::lease::Lease;
use tollgate::{Ask, Decision, Grant, LeaseRequest, LeaseTerms, Limit, LimitSettings, StoreError, Timestamp};

/// A limit as a node has added it.
#[derive(Debug)]
pub(crate) struct FakeLimit {
    pub(crate) scope: Box<str>,
    pub(crate) limit: Limit,
    pub(crate) settings: LimitSettings,
}

/// A limit and a key: the name of one state.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) limit: Arc<FakeLimit>,
    pub(crate) key: Box<str>,
}

/// One check of a call.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) place: Place,
    pub(crate) ask: Ask,
    pub(crate) enforced: bool,
}

/// What a node asks of the store.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    /// Decides on all checks together.
    Decide(Vec<Asked>),
    /// Says what would be decided.
    Peek(Asked),
    /// Decides on a check, and lends.
    Borrow(Asked, LeaseRequest),
    /// Takes back the rest of a lease, as the return that follows `number` others.
    Return { place: Place, lease: Lease, number: u64, terms: LeaseTerms },
    /// Takes permits without asking.
    Charge { place: Place, permits: u64 },
    /// Gives permits back of a grant that started at `at`.
    Refund { place: Place, permits: u64, at: Timestamp },
    /// Makes a key as if it had never been used.
    Reset(Place),
}

/// What the store answers.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    /// To [`Call::Decide`], in the order of the checks, and to [`Call::Peek`].
    Decided(Vec<Decision>),
    /// To [`Call::Borrow`].
    LeaseGrant(Decision, Option<Grant>),
    /// To [`Call::Return`].
    Returned(Returned),
    /// To all others.
    Done,
}

/// What became of a return.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Returned {
    /// It was its turn.
    Taken,
    /// It was out of turn. The field is the number of earlier returns.
    Refused { returns: u64 },
}

/// The network between a node and the store.
pub(crate) trait Link: Send + Sync {
    /// Carries a call to the store and the reply back. Never ends if either is lost.
    fn carry(&self, call: Call) -> Pin<Box<dyn Future<Output = Result<Reply, StoreError>> + Send>>;

    /// Whether the store can be reached, or why not.
    fn reach(&self) -> Result<(), StoreError>;

    /// How many nodes share the store.
    fn nodes(&self) -> Option<u32>;

    /// When a lease was asked for that was sent for at `sent` and is received now.
    fn asked_at(&self, sent: Timestamp, _now: Timestamp) -> Timestamp {
        sent
    }
}
