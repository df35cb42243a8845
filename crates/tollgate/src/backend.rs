//! The traits of everything that decides on checks: the memory engine, the Redis engine, and the layers around it.
//!
//! ```text
//! MemoryEngine: Backend                      RedisEngine: Store
//! Guard<S: Store>: Store, never fails        Lease<B: Store>: Backend
//! ```

use std::error::Error;
use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_core::lease::Lease as HeldLease;
use tollgate_core::{Grant, LeaseTerms, Limit, Timestamp};

use crate::check::{Check, HashedKey, LimitId};
use crate::clock::Clock;
use crate::memory::TooManyLimits;
use crate::redis::StoreError;
use crate::settings::LimitSettings;
use crate::tasks::Tasks;
use crate::verdict::{Verdict, Verdicts};

/// Decides on checks. Clones share everything.
pub trait Backend: Clone + Send + Sync + 'static {
    /// Why there is no decision.
    type Error: Error + Clone + Send + Sync + 'static;

    /// Adds a limit over the keys of `scope`. Limits of the same scope share their states, so the scope should name the algorithm.
    fn add_limit(
        &self,
        scope: &str,
        limit: Limit,
        settings: &LimitSettings,
    ) -> Result<LimitId, TooManyLimits>;

    /// Removes a limit. Its states stay where they are. Checks under way are decided by the limit as it was.
    fn remove_limit(&self, id: LimitId);

    /// Decides on all checks of a request together: permits are taken from every limit, or from none if an enforced one denies. A check that
    /// is only counted takes permits where the request is admitted and its own limit admits it.
    fn decide(&self, checks: &[Check<'_>]) -> impl Future<Output = Result<Verdicts, Self::Error>> + Send;

    /// The verdict that [`Backend::decide`] would give on a check alone, without taking anything.
    fn peek(&self, check: &Check<'_>) -> impl Future<Output = Result<Verdict, Self::Error>> + Send;

    /// Resets a key. The only operation that cannot be done without the store.
    fn reset(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Gives back `permits` of a grant that started at `at`, as far as they are still owed.
    fn refund(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        at: Timestamp,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// A backend that many nodes share: nodes can borrow from it, and it can fail.
pub trait Store: Backend {
    /// Decides on one check, and borrows permits with the same call. `deadline` is for the call; the caller may stop waiting sooner. If
    /// the store does not decide, a caller that still waits calls [`Store::undecided`].
    fn borrow(
        &self,
        check: &Check<'_>,
        wanted: LeaseRequest,
        deadline: Duration,
    ) -> impl Future<Output = Result<(Verdict, Option<LeaseGrant>), StoreError>> + Send;

    /// The answer to a request that the store has not decided, because of `why`.
    fn undecided(&self, checks: &[Check<'_>], why: &StoreError) -> Result<Verdicts, Self::Error>;

    /// Gives back the rest of a lease, as the return after `number` others. If there were more returns, nothing is given back, and their
    /// number is the answer.
    fn give_back(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        lease: &HeldLease,
        number: u64,
        terms: LeaseTerms,
    ) -> impl Future<Output = Result<Option<u64>, StoreError>> + Send;

    /// Takes permits without a decision, into bounded debt: for costs that are known only afterwards.
    fn charge(
        &self,
        limit: LimitId,
        key: HashedKey<'_>,
        permits: u64,
        deadline: Duration,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// How long callers wait for a limit, and how long calls for it may take.
    fn deadlines(&self, limit: LimitId) -> Deadlines;

    /// The answer to a request that the store does not decide within `wait`. Calls for it may go on.
    fn late(&self, checks: &[Check<'_>], wait: Duration) -> Result<Verdicts, Self::Error>;

    /// How many nodes share the store, by its last answer.
    fn nodes(&self) -> Option<u32>;

    /// Whether every server of the store can be asked now, or why not.
    fn health(&self) -> Result<(), StoreError>;

    /// Whether the server of a key can be asked now.
    fn is_available(&self, limit: LimitId, key: HashedKey<'_>) -> bool;

    /// When the store last recorded that this node is alive, if it has one server only.
    fn last_heartbeat(&self) -> Option<Instant>;

    /// The clock by which leases end.
    fn clock(&self) -> &Clock;

    /// The tasks that go on when their caller has left.
    fn tasks(&self) -> &Tasks;
}

/// How long a check may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deadlines {
    /// The caller is answered within this time.
    pub wait: Duration,
    /// The call may take this long. Longer than `wait` where nodes borrow, because a late lease is still of use.
    pub call: Duration,
}

impl Deadlines {
    /// The same deadline for the caller and the call.
    pub const fn of(deadline: Duration) -> Self {
        Self { wait: deadline, call: deadline }
    }
}

/// Permits to be lent with a decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseRequest {
    /// How many.
    pub permits: u64,
    /// The permits left are cut into this many parts, of which one is lent.
    pub parts: u64,
    /// How they are lent.
    pub terms: LeaseTerms,
}

/// Lent permits, and when they were asked for, on the clock by which leases end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseGrant {
    /// The permits.
    pub grant: Grant,
    /// When they were asked for.
    pub sent: Timestamp,
}
