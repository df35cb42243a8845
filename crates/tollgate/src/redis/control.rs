//! What all nodes of a store go by: a policy that was pushed to one of them, and tiers that were assigned.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::error::StoreError;
use super::node::Bearings;
use super::protocol::{self, Order};
use super::{Inner, RedisEngine};

/// Nobody's request waits for it.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);
/// Members with a tier that was assigned: 10 MB in every node, with names of 100 bytes.
pub const ASSIGNED_MAX: u64 = 100_000;
/// Tiers that one call writes back: the store is busy with it for well under a millisecond.
const RESTORED_AT_ONCE: usize = 200;

/// What nodes of a store tell each other. Clones share it.
#[derive(Clone)]
pub struct Control {
    inner: Arc<Inner>,
    keys: Arc<[String; 2]>,
}

/// Which change to the policy or to the tiers was the last. The default is the version of a store that knows of none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Version {
    /// Grows with every change.
    pub number: u64,
    /// Random for each change: two stores, or one before and after it has lost its data, may give the same number.
    pub epoch: String,
}

impl Version {
    /// Whether a node that knows `known` should go by this version.
    fn is_news(&self, known: &Self) -> bool {
        self.number > known.number || self.number == known.number && self.epoch != known.epoch
    }

    /// Whether a store with this number has this version or a newer one.
    fn is_kept_at(&self, number: i64) -> bool {
        u64::try_from(number).is_ok_and(|number| number >= self.number)
    }
}

/// What has changed since a node last asked.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct News {
    /// The version of the policy in the store. A lower number than the node knows: the store has lost it.
    pub policy_version: Version,
    /// The policy, if it is news; empty if it was withdrawn.
    pub policy: Option<String>,
    /// The version of the tiers in the store. A lower number than the node knows: the store has lost them.
    pub tiers_version: Version,
    /// Whether there are other tiers than the node knows.
    pub has_tiers: bool,
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

/// What became of a tier that was to be assigned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Assigned {
    /// It is assigned.
    Done,
    /// [`ASSIGNED_MAX`] members have one.
    TooMany,
    /// Nothing was done: the store has lost tiers that the node knows, which must be written back first.
    Lost,
}

impl RedisEngine {
    /// What nodes of this store tell each other.
    pub fn control(&self) -> Control {
        // One slot for both, so that one call sees them together.
        let keys = ["policy", "tiers"].map(|name| format!("{}:{{control}}:{name}", self.0.key_prefix));
        Control { inner: Arc::clone(&self.0), keys: Arc::new(keys) }
    }
}

impl Control {
    /// What has changed since the node knew these versions.
    pub async fn news(&self, policy: &Version, tiers: &Version) -> Result<News, StoreError> {
        let told = self.tell(&Order::Poll { policy, tiers }).await?;
        News::read(told, policy, tiers).ok_or_else(|| StoreError::protocol("no news"))
    }

    /// Pushes a policy to all nodes, or withdraws the one that was pushed. Returns its version, which is newer than `known`.
    pub async fn push_policy(&self, known: &Version, text: Option<&str>) -> Result<Version, StoreError> {
        let epoch = epoch();
        let order = Order::Push { known: known.number, epoch: &epoch, text: text.unwrap_or_default() };
        let number = u64::try_from(self.order(&order).await?).unwrap_or(0);
        Ok(Version { number, epoch })
    }

    /// Writes back a policy, or its withdrawal, that the store has lost: unless it has that one or a newer one by now. Returns whether
    /// the store has one of these.
    pub async fn keep_policy(&self, version: &Version, text: &str) -> Result<bool, StoreError> {
        Ok(version.is_kept_at(self.order(&Order::Keep { version, text }).await?))
    }

    /// Assigns a tier, or takes it away.
    pub async fn assign_tier(&self, known: &Version, tier: &AssignedTier) -> Result<Assigned, StoreError> {
        let epoch = epoch();
        match self.order(&Order::Assign { known: known.number, epoch: &epoch, tier }).await? {
            1.. => Ok(Assigned::Done),
            0 => Ok(Assigned::TooMany),
            _ => Ok(Assigned::Lost),
        }
    }

    /// Writes back all tiers, if the store has lost them: unless it has this version or a newer one by now. Returns whether the store has
    /// one of these. They are gathered elsewhere and take their place in one step, so that of several nodes one is successful.
    pub async fn keep_tiers(&self, version: &Version, tiers: &[AssignedTier]) -> Result<bool, StoreError> {
        let place = format!("{}:{}", self.keys[1], epoch());
        let mut parts = tiers.chunks(RESTORED_AT_ONCE).peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            let members = parts.peek().is_none().then_some(tiers.len());
            let order = Order::Restore { version, place: &place, members, tiers: part };
            if version.is_kept_at(self.order(&order).await?) {
                return Ok(true);
            }
            if members.is_some() {
                return Ok(false);
            }
        }
    }

    async fn order(&self, order: &Order<'_>) -> Result<i64, StoreError> {
        let told = self.tell(order).await?;
        let Value::Int(number) = told else { return Err(StoreError::protocol("no number")) };
        Ok(number)
    }

    /// Past the breaker, which is there for the sake of requests: this is said rarely, and somebody waits for it to be done.
    async fn tell(&self, order: &Order<'_>) -> Result<Value, StoreError> {
        let say = |to: Bearings| protocol::control(&self.keys, order, to.now);
        self.inner.routes.tell(&self.keys[0], Instant::now() + ANSWERED_WITHIN, say).await
    }
}

/// A random epoch.
fn epoch() -> String {
    let mut bytes = [0; 8];
    // Without randomness, nodes that differ would not notice.
    getrandom::fill(&mut bytes).expect("the operating system gives random numbers");
    format!("{:016x}", u64::from_be_bytes(bytes))
}

impl News {
    fn read(told: Value, known_policy: &Version, known_tiers: &Version) -> Option<Self> {
        let Value::Array(items) = told else { return None };
        let mut items = items.into_iter();
        let policy_version = Version::read(&mut items)?;
        let policy = items.next().and_then(text)?;
        let tiers_version = Version::read(&mut items)?;
        let all_tiers = number(&mut items)? == 1;
        let tier = |line: String| {
            let mut parts = line.splitn(3, '\n').map(str::to_owned);
            Some(AssignedTier { family: parts.next()?, member: parts.next()?, tier: parts.next()? })
        };
        let tiers = items.filter_map(text).filter_map(tier).collect();
        let policy = policy_version.is_news(known_policy).then_some(policy);
        let has_tiers = tiers_version.is_news(known_tiers);
        Some(Self { policy_version, policy, tiers_version, has_tiers, all_tiers, tiers })
    }
}

impl Version {
    fn read(items: &mut std::vec::IntoIter<Value>) -> Option<Self> {
        Some(Self { number: number(items)?, epoch: items.next().and_then(text)? })
    }
}

fn number(items: &mut std::vec::IntoIter<Value>) -> Option<u64> {
    match items.next() {
        Some(Value::Int(number)) => u64::try_from(number).ok(),
        _ => None,
    }
}

fn text(value: Value) -> Option<String> {
    let Value::BulkString(bytes) = value else { return None };
    String::from_utf8(bytes).ok()
}
