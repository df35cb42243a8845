//! A limit whose states are in the store, with everything that calls for it need.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use tollgate_core::{Limit, Micros};

use crate::check::{HashedKey, LimitId};
use crate::hash::Hash;
use crate::redis::key_prefix::KeyPrefix;
use crate::redis::protocol;
use crate::redis::queue::QueueKey;
use crate::settings::LimitSettings;

pub(super) struct StoredLimit {
    pub(super) id: LimitId,
    pub(super) limit: Limit,
    /// The parameters as they are kept beside a state.
    pub(super) parameters: Box<str>,
    /// What scripts must know of the limit, as they take it, unless it depends on the time.
    pub(super) numbers: Option<Box<[u8]>>,
    /// How long a caller waits for a check.
    pub(super) deadline: Duration,
    /// How long a call for checks may take. Longer than the deadline where nodes borrow: a lease that comes late is still of use.
    pub(super) call_deadline: Duration,
    /// Whether what a failover may have lost counts as taken, and for how long permits are lent.
    pub(super) distrust: Option<Micros>,
    /// Whether permits of a bucket may be out on leases of this limit.
    pub(super) counts_out: bool,
    /// What the keys in the store begin with.
    prefix: Box<str>,
    /// Of the prefix: limits with the same one share their states.
    scope: Hash,
}

impl StoredLimit {
    pub(super) fn new(
        id: LimitId,
        (prefix, scope): (&KeyPrefix, &str),
        limit: Limit,
        settings: &LimitSettings,
        (deadline, lease_deadline): (Duration, Duration),
    ) -> Self {
        let terms = settings.lease_terms(&limit).ok();
        let life = terms.map_or(Micros::ZERO, |terms| terms.life());
        let deadline = settings.on_failure.deadline.unwrap_or(deadline);
        let prefix: Box<str> = format!("{prefix}:{scope}:").into();
        Self {
            id,
            limit,
            parameters: limit.parameters().to_string().into(),
            numbers: protocol::parameters(&limit),
            deadline,
            call_deadline: if terms.is_some() { deadline.max(lease_deadline) } else { deadline },
            counts_out: terms.is_some_and(|terms| terms.counts_out()) && protocol::lends(&limit),
            distrust: settings.failover_guard.then_some(life),
            scope: Hash::of_scope(&prefix),
            prefix,
        }
    }

    /// Whether its calls must say about what the server's clock shows: the periods of a calendar around that are sent along.
    pub(super) const fn needs_time(&self) -> bool {
        matches!(self.limit, Limit::CalendarQuota(_))
    }

    /// Identifies the state of a key, among those of all limits.
    pub(super) const fn state(&self, key: HashedKey<'_>) -> Hash {
        key.hash().within(self.scope)
    }

    /// The key in the store, as it is queued for.
    pub(super) fn queue_key(&self, key: HashedKey<'_>) -> QueueKey {
        thread_local! {
            static WHOLE: RefCell<String> = const { RefCell::new(String::new()) };
        }
        // Written together here, so that only the shared text is allocated.
        let whole: Arc<str> = WHOLE.with_borrow_mut(|whole| {
            whole.clear();
            whole.push_str(&self.prefix);
            whole.push_str(key.text());
            Arc::from(whole.as_str())
        });
        QueueKey { limit: self.id, hash: self.state(key), key: whole }
    }
}
