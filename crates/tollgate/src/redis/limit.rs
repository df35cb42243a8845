//! A limit in the store, with the data that its calls need.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use tollgate_core::{Limit, Micros};

use crate::backend::Deadlines;
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
    /// The parameters as scripts take them, unless they depend on the time.
    pub(super) numbers: Option<Box<[u8]>>,
    /// The deadlines of checks.
    pub(super) deadlines: Deadlines,
    /// The life of leases, if permits that a failover may have lost count as taken.
    pub(super) distrust: Option<Micros>,
    /// Whether permits of a bucket may be out on leases of this limit.
    pub(super) counts_out: bool,
    /// The prefix of its keys in the store.
    prefix: Box<str>,
    /// The hash of the prefix. Limits with the same prefix share their states.
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
        let wait = settings.on_failure.deadline.unwrap_or(deadline);
        let prefix: Box<str> = format!("{prefix}:{scope}:").into();
        Self {
            id,
            limit,
            parameters: limit.parameters().to_string().into(),
            numbers: protocol::parameters(&limit),
            deadlines: Deadlines {
                wait,
                call: if terms.is_some() { wait.max(lease_deadline) } else { wait },
            },
            counts_out: terms.is_some_and(|terms| terms.counts_out()) && limit.lender().is_some(),
            distrust: settings.failover_guard.then_some(life),
            scope: Hash::of_scope(&prefix),
            prefix,
        }
    }

    /// Whether the limit is a log, which the store searches.
    pub(super) const fn is_log(&self) -> bool {
        matches!(self.limit, Limit::SlidingLog(_))
    }

    /// Whether its calls need the approximate time of the server: they send the periods of a calendar around it.
    pub(super) const fn needs_time(&self) -> bool {
        matches!(self.limit, Limit::CalendarQuota(_))
    }

    /// Identifies the state of a key among the states of all limits.
    pub(super) const fn state(&self, key: HashedKey<'_>) -> Hash {
        key.hash().within(self.scope)
    }

    /// The queue key of a key.
    pub(super) fn queue_key(&self, key: HashedKey<'_>) -> QueueKey {
        thread_local! {
            static WHOLE: RefCell<String> = const { RefCell::new(String::new()) };
        }
        // Composed in a reused buffer, so that only the shared text is allocated.
        let whole: Arc<str> = WHOLE.with_borrow_mut(|whole| {
            whole.clear();
            whole.push_str(&self.prefix);
            whole.push_str(key.text());
            Arc::from(whole.as_str())
        });
        QueueKey { limit: self.id, hash: self.state(key), key: whole }
    }
}
