//! Data that all nodes of a store follow: the pushed policy, and assigned tiers.
//!
//! The policy is a hash with number, epoch and text, which is empty once it was withdrawn, and with earlier policies: `history` lists the
//! numbers, `a NUMBER` is the label, time and author, `h NUMBER` is the text. The tiers are a hash with number, epoch, members
//! (how many have a tier), `t FAMILY MEMBER` for each tier that is assigned, and the latest changes by their number: `c NUMBER`, and
//! `e NUMBER` with the epoch. A store that holds a lower number than a node knows, or none, has lost data: a withdrawn policy leaves its
//! number behind. Reads are one command each; changes are compared with the version that was read (`control.lua`).

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::time::{Instant, timeout};

use crate::redis::error::StoreError;
use crate::redis::protocol::{self, Command, VersionedChange};
use crate::redis::server::ServerContext;
use crate::redis::{Inner, RedisEngine};

/// The deadline of one command. No request waits for it.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);
/// The most members with an assigned tier: 10 MB in every node, with names of 100 bytes.
pub const ASSIGNED_MAX: u64 = 100_000;
/// Tiers that one call writes back. The call takes well under a millisecond of the store.
const RESTORED_AT_ONCE: usize = 200;
/// How long unfinished tiers are kept after the last part: their node may have stopped.
const UNFINISHED_KEPT: Duration = Duration::from_secs(60);
/// Changes to the tiers that the store keeps: a node that knows of an older state reads all tiers.
const CHANGES_KEPT: u64 = 1_000;
/// Policies that were pushed and are kept.
const HISTORY_KEPT: usize = 20;
/// Attempts to make a change. An attempt fails only because another node has made a change.
const ATTEMPTS: usize = 16;
/// The deadline of all attempts together. Other changes of this node wait meanwhile.
const CHANGED_WITHIN: Duration = Duration::from_secs(2);
/// The keys of [`Control`].
const POLICY: usize = 0;
const TIERS: usize = 1;

/// The shared data of the nodes of a store. Clones share it.
#[derive(Clone)]
pub struct Control {
    inner: Arc<Inner>,
    keys: Arc<[String; 2]>,
}

/// The version of the policy or of the tiers. The default is the version of a store without either.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Version {
    /// Grows with every change.
    pub number: u64,
    /// Random for each change: two stores, or one before and after it has lost its data, may give the same number.
    pub epoch: String,
}

impl Version {
    /// Whether this version is newer than `known`.
    fn is_news(&self, known: &Self) -> bool {
        self.number > known.number || self.number == known.number && self.epoch != known.epoch
    }
}

/// The changes since a node last asked.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ControlUpdate {
    /// The version of the policy in the store. A lower number than the node knows: the store has lost it.
    pub policy_version: Version,
    /// The policy, if it is news; empty if it was withdrawn.
    pub policy: Option<String>,
    /// The version of the tiers in the store. A lower number than the node knows: the store has lost them.
    pub tiers_version: Version,
    /// Whether there are other tiers than the node knows.
    pub has_tiers: bool,
    /// Whether `tiers` are all assigned tiers. Otherwise they are changes.
    pub all_tiers: bool,
    /// Assigned tiers. An empty tier was taken away.
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

/// A policy that is pushed.
#[derive(Clone, Copy, Debug)]
pub struct Pushed<'a> {
    /// The policy; empty to withdraw the one that was pushed.
    pub text: &'a str,
    /// A short name for its content.
    pub label: &'a str,
    /// Who pushes it.
    pub author: &'a str,
    /// When, in seconds since the epoch.
    pub at_secs: u64,
}

/// A policy that was pushed, or a withdrawal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HistoryEntry {
    /// The number of the change.
    pub number: u64,
    /// The short name; empty for a withdrawal.
    pub label: String,
    /// Who has pushed it.
    pub author: String,
    /// When, in seconds since the epoch.
    pub at_secs: u64,
}

impl HistoryEntry {
    fn new(number: u64, about: &str) -> Option<Self> {
        let mut lines = about.splitn(3, '\n').map(str::to_owned);
        let (label, at_secs) = (lines.next()?, lines.next()?.parse().ok()?);
        Some(Self { number, label, at_secs, author: lines.next()? })
    }
}

/// The result of assigning a tier.
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
    /// The shared data of the nodes of this store.
    pub fn control(&self) -> Control {
        // One slot, so that both are on one server.
        let keys = ["policy", "tiers"].map(|name| format!("{}:{{control}}:{name}", self.0.key_prefix));
        Control { inner: Arc::clone(&self.0), keys: Arc::new(keys) }
    }
}

impl Control {
    /// The changes since these versions.
    pub async fn news(&self, policy: &Version, tiers: &Version) -> Result<ControlUpdate, StoreError> {
        let (policy_version, text) = self.changed_policy(policy).await?;
        let mut news = self.changed_tiers(tiers).await?;
        (news.policy_version, news.policy) = (policy_version, text);
        Ok(news)
    }

    /// The version of the policy, and its text if it is news.
    async fn changed_policy(&self, known: &Version) -> Result<(Version, Option<String>), StoreError> {
        let (version, _) = self.read(POLICY, &[]).await?;
        if !version.is_news(known) {
            return Ok((version, None));
        }
        // Read together with its version: other nodes may have changed it since, or the store may have lost it.
        let (version, text) = self.read(POLICY, &["text".to_owned()]).await?;
        let text = text.into_iter().flatten().next().unwrap_or_default();
        let text = version.is_news(known).then_some(text);
        Ok((version, text))
    }

    /// The version of the tiers, and which of them have changed.
    async fn changed_tiers(&self, known: &Version) -> Result<ControlUpdate, StoreError> {
        let (stored, _) = self.read(TIERS, &[]).await?;
        if !stored.is_news(known) {
            return Ok(ControlUpdate { tiers_version: stored, ..ControlUpdate::default() });
        }
        if known.number > 0 && (1..CHANGES_KEPT).contains(&stored.number.saturating_sub(known.number)) {
            let mut names = vec![epoch_field(known.number), epoch_field(stored.number)];
            names.extend((known.number + 1..=stored.number).map(change_field));
            let (_, mut values) = self.read(TIERS, &names).await?;
            let changes = values.split_off(2);
            let tiers: Option<Vec<_>> =
                changes.into_iter().map(|line| AssignedTier::from_line(&line?)).collect();
            // The changes apply only if both epochs are in the history of the store: the one that the node knows, and the one that was
            // read. Other nodes may have made further changes since; the node reads them the next time.
            let epochs = [Some(known.epoch.clone()), Some(stored.epoch.clone())];
            if let (Some(tiers), true) = (tiers, values == epochs) {
                return Ok(ControlUpdate {
                    tiers_version: stored,
                    has_tiers: true,
                    tiers,
                    ..ControlUpdate::default()
                });
            }
        }
        let all = texts(self.say(|| protocol::all_fields(&self.keys[TIERS])).await?)?;
        let mut news = ControlUpdate { has_tiers: true, all_tiers: true, ..ControlUpdate::default() };
        for (field, value) in all.iter().step_by(2).zip(all.iter().skip(1).step_by(2)) {
            let (Some(field), Some(value)) = (field, value) else { continue };
            match field.split_once(' ') {
                Some(("t", name)) => news.tiers.extend(AssignedTier::from_field(name, value)),
                None if field == "number" => news.tiers_version.number = parsed(value)?,
                None if field == "epoch" => news.tiers_version.epoch.clone_from(value),
                Some(_) | None => {}
            }
        }
        // The store may have lost its data since the version was read.
        if !news.tiers_version.is_news(known) {
            return Ok(ControlUpdate { tiers_version: news.tiers_version, ..ControlUpdate::default() });
        }
        Ok(news)
    }

    /// Pushes a policy to all nodes, or withdraws the one that was pushed. Returns its version, which is newer than `known`.
    /// With `only_after_known` nothing is pushed if the store has another version than `known`: then there is no version.
    pub async fn push_policy(
        &self,
        known: &Version,
        pushed: &Pushed<'_>,
        only_after_known: bool,
    ) -> Result<Option<Version>, StoreError> {
        in_time(self.try_push_policy(known, pushed, only_after_known)).await
    }

    async fn try_push_policy(
        &self,
        known: &Version,
        pushed: &Pushed<'_>,
        only_after_known: bool,
    ) -> Result<Option<Version>, StoreError> {
        for _ in 0..ATTEMPTS {
            let (stored, history) = self.read(POLICY, &["history".to_owned()]).await?;
            if only_after_known && stored != *known {
                return Ok(None);
            }
            let version = self.version_after(&stored, known).await?;
            let mut change = policy_change(&version, pushed.text);
            let mut numbers = numbers(history.into_iter().flatten().next().as_deref());
            numbers.push(version.number);
            let forgotten = numbers.len().saturating_sub(HISTORY_KEPT);
            change.remove.extend(numbers.drain(..forgotten).flat_map(history_fields));
            let [about, text] = history_fields(version.number);
            change.set.push((about, format!("{}\n{}\n{}", pushed.label, pushed.at_secs, pushed.author)));
            change.set.push((text, pushed.text.to_owned()));
            let numbers: Vec<_> = numbers.iter().map(u64::to_string).collect();
            change.set.push(("history".to_owned(), numbers.join(" ")));
            if self.change(POLICY, &stored, &change).await? {
                return Ok(Some(version));
            }
        }
        Err(contended())
    }

    /// The last pushed policies, the newest first.
    pub async fn history(&self) -> Result<Vec<HistoryEntry>, StoreError> {
        let (_, history) = self.read(POLICY, &["history".to_owned()]).await?;
        let numbers = numbers(history.into_iter().flatten().next().as_deref());
        let fields: Vec<_> = numbers.iter().map(|number| history_fields(*number)[0].clone()).collect();
        let (_, abouts) = self.read(POLICY, &fields).await?;
        let entry = |(number, about): (&u64, Option<String>)| HistoryEntry::new(*number, &about?);
        Ok(numbers.iter().zip(abouts).rev().filter_map(entry).collect())
    }

    /// The text of a policy that was pushed; empty for a withdrawal, none if it is not kept.
    pub async fn pushed_text(&self, number: u64) -> Result<Option<String>, StoreError> {
        let (_, text) = self.read(POLICY, &[history_fields(number)[1].clone()]).await?;
        Ok(text.into_iter().flatten().next())
    }

    /// Writes back a policy, or its withdrawal, that the store has lost: unless it has that one or a newer one by now. Returns whether
    /// the store has one of these.
    pub async fn keep_policy(&self, version: &Version, text: &str) -> Result<bool, StoreError> {
        let (stored, _) = self.read(POLICY, &[]).await?;
        if stored.number >= version.number {
            return Ok(true);
        }
        self.change(POLICY, &stored, &policy_change(version, text)).await
    }

    /// Assigns a tier, or takes it away.
    pub async fn assign_tier(&self, known: &Version, tier: &AssignedTier) -> Result<Assigned, StoreError> {
        in_time(self.try_assign_tier(known, tier)).await
    }

    async fn try_assign_tier(&self, known: &Version, tier: &AssignedTier) -> Result<Assigned, StoreError> {
        let name = tier.field();
        for _ in 0..ATTEMPTS {
            let (stored, values) = self.read(TIERS, &[name.clone(), "members".to_owned()]).await?;
            if stored.number < known.number {
                return Ok(Assigned::Lost);
            }
            let [was, members] = <[Option<String>; 2]>::try_from(values).unwrap_or_default();
            let others = members.as_deref().map_or(Ok(0), parsed)?.saturating_sub(u64::from(was.is_some()));
            let version = self.version_after(&stored, known).await?;
            let forgotten = version.number.saturating_sub(CHANGES_KEPT);
            let mut change = VersionedChange {
                set: version.fields(),
                remove: vec![change_field(forgotten), epoch_field(forgotten)],
                ..VersionedChange::default()
            };
            change.set.push((change_field(version.number), tier.line()));
            let members = if tier.tier.is_empty() {
                change.remove.push(name.clone());
                others
            } else {
                change.set.push((name.clone(), tier.tier.clone()));
                others + 1
            };
            if members > ASSIGNED_MAX && was.is_none() {
                return Ok(Assigned::TooMany);
            }
            change.set.push(("members".to_owned(), members.to_string()));
            change.set.push((epoch_field(version.number), version.epoch));
            if self.change(TIERS, &stored, &change).await? {
                return Ok(Assigned::Done);
            }
        }
        Err(contended())
    }

    /// Writes back all tiers, if the store has lost them: unless it has this version or a newer one by now. Returns whether the store has
    /// one of these. They are gathered elsewhere and take their place in one step, so that of several nodes one is successful.
    pub async fn keep_tiers(&self, version: &Version, tiers: &[AssignedTier]) -> Result<bool, StoreError> {
        let place = format!("{}:{}", self.keys[TIERS], random_epoch());
        let restored = self.restore_tiers(version, tiers, &place).await;
        // If it has not replaced the tiers, it is useless and may be large. If this fails, it expires after a while.
        let _ = self.say(|| protocol::forget(&place)).await;
        restored
    }

    /// Writes all tiers to `place`, part by part, and puts it in the place of the tiers.
    async fn restore_tiers(
        &self,
        version: &Version,
        tiers: &[AssignedTier],
        place: &str,
    ) -> Result<bool, StoreError> {
        // The parts are numbered: if some of them are lost on the way, the next one fails.
        let mut written = Version::default();
        for part in tiers.chunks(RESTORED_AT_ONCE) {
            let (stored, _) = self.read(TIERS, &[]).await?;
            if stored.number >= version.number {
                return Ok(true);
            }
            let next = Version { number: written.number + 1, epoch: version.epoch.clone() };
            let mut set = next.fields();
            set.extend(part.iter().map(|tier| (tier.field(), tier.tier.clone())));
            let change =
                VersionedChange { set, lives_for: Some(UNFINISHED_KEPT), ..VersionedChange::default() };
            if self.say(|| protocol::change_versioned(place, &written, &change)).await? != Value::Int(1) {
                return Ok(false);
            }
            written = next;
        }
        let (stored, _) = self.read(TIERS, &[]).await?;
        if stored.number >= version.number {
            return Ok(true);
        }
        let mut set = version.fields();
        set.push(("members".to_owned(), tiers.len().to_string()));
        set.push((epoch_field(version.number), version.epoch.clone()));
        let replacement = Some((place, &written));
        self.change(TIERS, &stored, &VersionedChange { set, replacement, ..VersionedChange::default() }).await
    }

    /// The version of a change that is made now by a node that knows `known`. The first one has the time in milliseconds as its number,
    /// so that it counts as newer than all that a store has lost.
    async fn version_after(&self, stored: &Version, known: &Version) -> Result<Version, StoreError> {
        let number = match stored.number.max(known.number) {
            0 => {
                let time = texts(self.say(protocol::time).await?)?;
                let [secs, micros] =
                    [0, 1].map(|at| parsed(time.get(at).and_then(Option::as_deref).unwrap_or_default()));
                secs? * 1_000 + micros? / 1_000
            }
            number => number + 1,
        };
        Ok(Version { number, epoch: random_epoch() })
    }

    /// The version of the policy or of the tiers, and other fields, as they are at one instant.
    async fn read(
        &self,
        which: usize,
        others: &[String],
    ) -> Result<(Version, Vec<Option<String>>), StoreError> {
        let names = [&["number".to_owned(), "epoch".to_owned()], others].concat();
        let values = texts(self.say(|| protocol::fields(&self.keys[which], &names)).await?)?;
        let mut values = values.into_iter();
        let number = values.next().flatten().as_deref().map_or(Ok(0), parsed)?;
        let epoch = values.next().flatten().unwrap_or_default();
        Ok((Version { number, epoch }, values.collect()))
    }

    /// Changes the policy or the tiers, unless others have done so since they were read.
    async fn change(
        &self,
        which: usize,
        read: &Version,
        change: &VersionedChange<'_>,
    ) -> Result<bool, StoreError> {
        let say = || protocol::change_versioned(&self.keys[which], read, change);
        Ok(self.say(say).await? == Value::Int(1))
    }

    /// Sends a command without the breaker, which protects requests: these commands are rare, and an operator waits for them.
    async fn say(&self, command: impl Fn() -> Command) -> Result<Value, StoreError> {
        let deadline = Instant::now() + ANSWERED_WITHIN;
        self.inner.routes.send(&self.keys[POLICY], deadline, |_: ServerContext| command()).await
    }
}

async fn in_time<T>(change: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    timeout(CHANGED_WITHIN, change).await.unwrap_or(Err(StoreError::Timeout(CHANGED_WITHIN)))
}

/// The error after every attempt has lost against changes of other nodes. Nothing was done.
fn contended() -> StoreError {
    let why = "other nodes change the same data at the same time; try again".into();
    StoreError::Unavailable { server: "the store".into(), why }
}

fn policy_change(version: &Version, text: &str) -> VersionedChange<'static> {
    let mut set = version.fields();
    set.push(("text".to_owned(), text.to_owned()));
    VersionedChange { set, ..VersionedChange::default() }
}

/// Numbers of a list in a field.
fn numbers(text: Option<&str>) -> Vec<u64> {
    text.unwrap_or_default().split(' ').filter_map(|number| number.parse().ok()).collect()
}

/// The fields of a policy that was pushed: label, time and author, in a line each; and its text.
fn history_fields(number: u64) -> [String; 2] {
    [format!("a {number}"), format!("h {number}")]
}

/// The field of a change to the tiers: family, member and tier, in a line each.
fn change_field(number: u64) -> String {
    format!("c {number}")
}

/// The field with the epoch of a change to the tiers.
fn epoch_field(number: u64) -> String {
    format!("e {number}")
}

impl Version {
    fn fields(&self) -> Vec<(String, String)> {
        vec![("number".to_owned(), self.number.to_string()), ("epoch".to_owned(), self.epoch.clone())]
    }
}

impl AssignedTier {
    /// The field that holds it.
    fn field(&self) -> String {
        format!("t {} {}", self.family, self.member)
    }

    /// The tier of a field, whose name begins behind the `t`.
    fn from_field(name: &str, tier: &str) -> Option<Self> {
        let (family, member) = name.split_once(' ')?;
        Some(Self { family: family.to_owned(), member: member.to_owned(), tier: tier.to_owned() })
    }

    fn line(&self) -> String {
        format!("{}\n{}\n{}", self.family, self.member, self.tier)
    }

    fn from_line(line: &str) -> Option<Self> {
        let mut parts = line.splitn(3, '\n').map(str::to_owned);
        Some(Self { family: parts.next()?, member: parts.next()?, tier: parts.next()? })
    }
}

/// The texts of an answer. `None` for missing values and values that are not texts.
fn texts(answer: Value) -> Result<Vec<Option<String>>, StoreError> {
    let text =
        |value| if let Value::BulkString(bytes) = value { String::from_utf8(bytes).ok() } else { None };
    let Value::Array(values) = answer else { return Err(StoreError::protocol("no list")) };
    Ok(values.into_iter().map(text).collect())
}

fn parsed(number: &str) -> Result<u64, StoreError> {
    number.parse().map_err(|_| StoreError::protocol("no number"))
}

/// A random epoch.
fn random_epoch() -> String {
    let mut bytes = [0; 8];
    // Without random numbers, different versions could have the same epoch.
    getrandom::fill(&mut bytes).expect("the operating system gives random numbers");
    format!("{:016x}", u64::from_be_bytes(bytes))
}
