//! A limit over the keys of an engine.

use std::sync::Arc;

use tollgate_core::{Ask, Decision, Limit, Micros, Outcome};

use crate::check::{Check, LimitId};
use crate::engine::Engine;
use crate::memory::TooManyLimits;
use crate::redis::StoreError;
use crate::settings::LimitSettings;
use crate::verdict::{Basis, Verdict};

/// A limit over the keys of an engine. It always answers, and the memory engine answers at once. Cheap to clone.
#[derive(Clone)]
pub struct Limiter {
    limit: Limit,
    added: Arc<Added>,
}

/// A limit that is removed with the last limiter for it.
struct Added {
    engine: Engine,
    id: LimitId,
}

impl Drop for Added {
    fn drop(&mut self) {
        self.engine.remove_limit(self.id);
    }
}

impl Limiter {
    pub(crate) fn new(
        engine: &Engine,
        scope: &str,
        limit: Limit,
        settings: &LimitSettings,
    ) -> Result<Self, TooManyLimits> {
        let id = engine.add_limit(scope, limit, settings)?;
        Ok(Self { limit, added: Arc::new(Added { engine: engine.clone(), id }) })
    }

    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The id by which checks name the limit.
    pub fn id(&self) -> LimitId {
        self.added.id
    }

    /// Takes permits, perhaps after a delay that the caller accepts.
    pub async fn acquire(&self, key: &str, ask: Ask) -> Verdict {
        let check = Check::new(self.added.id, key, 0).with_ask(ask);
        let verdict = self.added.engine.decide(&[check]).await.first().copied().flatten();
        // A check alone is always decided.
        verdict.unwrap_or_else(|| self.undecided())
    }

    fn undecided(&self) -> Verdict {
        let (limit, at) = (self.limit.size(), self.added.engine.now());
        let outcome = Outcome::Denied { retry: Micros::from_secs(1) };
        let decision = Decision { outcome, limit, remaining: 0, reset: Micros::ZERO, at };
        Verdict { decision, basis: Basis::Closed }
    }

    /// The verdict that [`Limiter::acquire`] would give, without taking anything.
    pub async fn peek(&self, key: &str, ask: Ask) -> Verdict {
        self.added.engine.peek(&Check::new(self.added.id, key, 0).with_ask(ask)).await
    }

    /// Resets a key. The only operation that cannot be done without the store.
    pub async fn reset(&self, key: &str) -> Result<(), StoreError> {
        self.added.engine.reset(self.added.id, key).await
    }
}
