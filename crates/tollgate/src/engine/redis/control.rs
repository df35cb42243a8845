//! What all nodes of a store go by: a policy that was pushed to one of them, and tiers that were assigned.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::error::StoreError;
use super::script::{self, Order};
use super::{Inner, KEY_PREFIX, RedisEngine};

/// Nobody's request waits for it.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);
/// Members with a tier that was assigned: 10 MB in every node, with names of 100 bytes.
pub const ASSIGNED_MAX: u64 = 100_000;

/// What nodes of a store tell each other. Clones share it.
#[derive(Clone)]
pub struct Control {
    inner: Arc<Inner>,
    keys: Arc<[String; 2]>,
}

/// What has changed since a node last asked.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct News {
    /// How often a policy was pushed or withdrawn.
    pub policy_number: u64,
    /// The policy, if the number is another; empty if it was withdrawn.
    pub policy: Option<String>,
    /// How many tiers were assigned.
    pub tiers_number: u64,
    /// Whether `tiers` are all that are assigned, in place of what was known; else they are changes.
    pub all_tiers: bool,
    /// Tiers that were assigned; an empty one is assigned no more.
    pub tiers: Vec<AssignedTier>,
}

/// A tier that was assigned.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AssignedTier {
    /// The family.
    pub family: String,
    /// Whose it is.
    pub member: String,
    /// The tier; empty for none.
    pub tier: String,
}

impl RedisEngine {
    /// What nodes of this store tell each other.
    pub fn control(&self) -> Control {
        // One slot for both, so that one call sees them together.
        let keys = ["policy", "tiers"].map(|name| format!("{KEY_PREFIX}:{{control}}:{name}"));
        Control { inner: Arc::clone(&self.0), keys: Arc::new(keys) }
    }
}

impl Control {
    /// What has changed since the node knew these numbers. None if the store does not answer.
    pub async fn news(&self, policy_number: u64, tiers_number: u64) -> Option<News> {
        let order = Order::Poll { policy_number, tiers_number };
        let say = |_| script::control(&self.keys, &order);
        let told = self.inner.routes.tell(&self.keys[0], Instant::now() + ANSWERED_WITHIN, say).await?;
        News::read(told, policy_number)
    }

    /// Pushes a policy to all nodes, or withdraws the one that was pushed. Returns how often that was done.
    pub async fn push_policy(&self, text: Option<&str>) -> Result<u64, StoreError> {
        self.order(&Order::Push(text)).await
    }

    /// Assigns a tier, or takes it away. Returns how often that was done, or None if too many have one.
    pub async fn assign_tier(&self, tier: &AssignedTier) -> Result<Option<u64>, StoreError> {
        let number = self.order(&Order::Assign(tier)).await?;
        Ok(Some(number).filter(|number| *number > 0))
    }

    async fn order(&self, order: &Order<'_>) -> Result<u64, StoreError> {
        // Past the breaker, which is there for the sake of requests: this is said rarely, and somebody waits for it to be done.
        let say = |_| script::control(&self.keys, order);
        let told = self.inner.routes.tell(&self.keys[0], Instant::now() + ANSWERED_WITHIN, say).await;
        let Value::Int(number) = told.ok_or(StoreError::Timeout(ANSWERED_WITHIN))? else {
            return Err(StoreError::protocol("no number"));
        };
        Ok(u64::try_from(number).unwrap_or(0))
    }
}

impl News {
    fn read(told: Value, known_policy: u64) -> Option<Self> {
        let Value::Array(items) = told else { return None };
        let mut items = items.into_iter();
        let number = |items: &mut std::vec::IntoIter<Value>| match items.next() {
            Some(Value::Int(number)) => u64::try_from(number).ok(),
            _ => None,
        };
        let text = |value: Value| {
            let Value::BulkString(bytes) = value else { return None };
            String::from_utf8(bytes).ok()
        };
        let policy_number = number(&mut items)?;
        let policy = items.next().and_then(text)?;
        let tiers_number = number(&mut items)?;
        let all_tiers = number(&mut items)? == 1;
        let tier = |line: String| {
            let mut parts = line.splitn(3, '\n').map(str::to_owned);
            Some(AssignedTier { family: parts.next()?, member: parts.next()?, tier: parts.next()? })
        };
        let tiers = items.filter_map(text).filter_map(tier).collect();
        let policy = (policy_number != known_policy).then_some(policy);
        Some(Self { policy_number, policy, tiers_number, all_tiers, tiers })
    }
}
