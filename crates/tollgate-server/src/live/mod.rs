//! The policy in force: how it is loaded, pushed, reloaded and withdrawn, and the tiers that were assigned.

mod assigned;
mod denials;
mod known;
mod loaded;
mod reload;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tollgate::rules::{Descriptors, Rule};
use tollgate::{
    ASSIGNED_MAX, Assigned, AssignedTier, Control, ControlUpdate, Engine, HistoryEntry, PolicyLimiter,
    Pushed, StoreError, TooManyLimits, Version,
};

use self::assigned::AssignedTiers;
use self::known::Known;
pub(crate) use self::loaded::{FixedRule, Loaded};
pub(crate) use self::reload::{hangups, keep_up};
use crate::config::{CheckedPolicy, ConfigErrors, PolicyConfig, PolicyOrigin, load_policy, read_policy};
use crate::metrics::SharedMetrics;

/// The policy in force. Requests see it whole: the old one or the new one.
pub(crate) struct LivePolicy {
    metrics: SharedMetrics,
    current: ArcSwap<Loaded>,
    /// The policy that this node was started with, and its file.
    own: Mutex<PolicyConfig>,
    /// Changes are made one after another. A policy is parsed with the lock held, so that only one takes memory at a time.
    changing: tokio::sync::Mutex<Known>,
    assigned: AssignedTiers,
    control: Option<Control>,
    /// The last change that was refused, if none has come into force since.
    refused: Mutex<Option<RefusedChange>>,
}

/// A change of the policy that was refused.
#[derive(Clone)]
pub(crate) struct RefusedChange {
    /// When it was refused.
    pub(crate) at: SystemTime,
    /// The mistakes, each with its place.
    pub(crate) why: String,
}

/// Why a policy did not come into force. The earlier one stays in force.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotChanged {
    /// It has mistakes.
    #[error("{0}")]
    Mistakes(#[from] ConfigErrors),
    /// It has more limits than the engine can tell apart.
    #[error("{0}")]
    TooManyLimits(#[from] TooManyLimits),
    /// The store did not accept it.
    #[error("the store did not accept it: {0}")]
    Store(#[from] StoreError),
    /// A policy that was pushed is in force.
    #[error("a policy that was pushed is in force; withdraw it first (DELETE /admin/policy)")]
    Pushed,
    /// `If-Match` names another version than the one in force.
    #[error("the policy in force is version {0}, not the one of If-Match: read it again (GET /admin/policy)")]
    OtherVersion(String),
    /// There is no file to read: the policy is a part of the configuration.
    #[error(
        "the policy is written in the configuration, which is read at start only: restart, or name a file with `policy: FILE`"
    )]
    Inline,
    /// There is no file to read, and no policy.
    #[error("no policy is configured: name a file with `policy: FILE`, or push a policy (PUT /admin/policy)")]
    NoPolicy,
}

/// Who asks for the policy's file to be read again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AskedBy {
    /// A request to `/admin`, which gets the outcome as its answer.
    Admin,
    /// A signal, or a file that has changed.
    Node,
}

impl LivePolicy {
    pub(crate) fn new(
        engine: &Engine,
        metrics: SharedMetrics,
        own: PolicyConfig,
    ) -> Result<Self, TooManyLimits> {
        let checked = &own.checked;
        let limiter = PolicyLimiter::new(engine, checked.policy.clone(), &checked.settings)?;
        let loaded = Loaded::new(limiter, &metrics, checked, own.origin.to_string());
        let control = match engine {
            Engine::Memory(_) => None,
            Engine::Shared(shared) => Some(shared.redis().control()),
        };
        Ok(Self {
            metrics,
            current: ArcSwap::from_pointee(loaded),
            own: Mutex::new(own),
            changing: tokio::sync::Mutex::default(),
            assigned: AssignedTiers::default(),
            control,
            refused: Mutex::default(),
        })
    }

    /// The policy in force, for the whole time of a request.
    pub(crate) fn current(&self) -> Arc<Loaded> {
        self.current.load_full()
    }

    /// The last change that was refused, if none has come into force since.
    pub(crate) fn refused(&self) -> Option<RefusedChange> {
        self.refused.lock().clone()
    }

    /// All tiers that were assigned.
    pub(crate) fn all_assigned(&self) -> Vec<AssignedTier> {
        self.assigned.all()
    }

    /// The file that the policy is read from again when it changes.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        self.own.lock().origin.file().map(Path::to_owned)
    }

    /// Checks a policy without putting it in force, and sums it up.
    pub(crate) async fn check<T: Send + 'static>(
        self: &Arc<Self>,
        text: String,
        sum_up: fn(&CheckedPolicy) -> T,
    ) -> Result<T, ConfigErrors> {
        let _turn = self.changing.lock().await;
        self.off_workers(move |live| live.read("policy", &text).map(|checked| sum_up(&checked))).await
    }

    /// Reads the policy's file again. A file with mistakes changes nothing.
    pub(crate) async fn reload(self: &Arc<Self>, by: AskedBy) -> Result<Arc<Loaded>, NotChanged> {
        let known = self.changing.lock().await;
        let is_pushed = known.is_pushed;
        self.off_workers(move |live| {
            let before = live.current();
            let outcome = live.read_again(is_pushed);
            match &outcome {
                Ok(loaded) if Arc::ptr_eq(loaded, &before) => {}
                Err(why @ NotChanged::Pushed) if by == AskedBy::Node => {
                    tracing::info!("the policy's file was read and is not in force: {why}");
                }
                Err(why @ (NotChanged::Inline | NotChanged::NoPolicy)) => {
                    tracing::warn!("the policy was not read again: {why}");
                }
                Ok(_) | Err(_) => live.record(&outcome),
            }
            outcome
        })
        .await
    }

    /// Runs work that takes milliseconds or more, such as parsing a large policy, on a thread that answers no requests.
    async fn off_workers<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        let live = Arc::clone(self);
        match tokio::task::spawn_blocking(move || work(&live)).await {
            Ok(done) => done,
            Err(why) => match why.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is shutting down, and this task with it.
                Err(_) => std::future::pending().await,
            },
        }
    }

    fn read(&self, name: &str, text: &str) -> Result<CheckedPolicy, ConfigErrors> {
        let context = self.own.lock().context.clone();
        read_policy(name, text, &context)
    }

    fn read_again(&self, is_pushed: bool) -> Result<Arc<Loaded>, NotChanged> {
        let mut own = self.own.lock();
        match own.origin.clone() {
            PolicyOrigin::File(path) => own.checked = load_policy(&path, &own.context)?,
            PolicyOrigin::Configuration if !is_pushed => return Err(NotChanged::Inline),
            PolicyOrigin::None if !is_pushed => return Err(NotChanged::NoPolicy),
            PolicyOrigin::Configuration | PolicyOrigin::None => {}
        }
        if is_pushed {
            return Err(NotChanged::Pushed);
        }
        let (current, origin) = (self.current(), own.origin.to_string());
        if current.version == own.checked.version && current.origin == origin {
            return Ok(current);
        }
        self.replace(&own.checked, origin)
    }

    /// Puts a policy in force on all nodes that share the store, or on this node if there is no store. None withdraws the pushed policy:
    /// each node uses its own again.
    ///
    /// With `replaced`, only if that version is in force.
    pub(crate) async fn push(
        self: &Arc<Self>,
        text: Option<String>,
        author: &str,
        replaced: Option<&str>,
    ) -> Result<Arc<Loaded>, NotChanged> {
        let mut known = self.changing.lock().await;
        if let Some(replaced) = replaced {
            self.poll_store(&mut known).await;
            let current = self.current();
            if replaced != current.version {
                return Err(NotChanged::OtherVersion(current.version.clone()));
            }
        }
        let (text, checked) = self
            .off_workers(move |live| {
                let checked = text.as_deref().map(|text| live.read("policy", text)).transpose()?;
                if let Some(checked) = &checked {
                    // Mistakes are found before the policy reaches other nodes.
                    live.current().limiter.followed_by(checked.policy.clone(), &checked.settings)?;
                }
                Ok::<_, NotChanged>((text, checked))
            })
            .await?;
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let pushed = Pushed {
            text: text.as_deref().unwrap_or_default(),
            label: checked.as_ref().map_or("", |checked| &checked.version),
            author,
            at_secs: since_epoch.as_secs(),
        };
        known.policy = match &self.control {
            Some(control) => match control.push_policy(&known.policy, &pushed, replaced.is_some()).await? {
                Some(version) => version,
                None => {
                    self.poll_store(&mut known).await;
                    return Err(NotChanged::OtherVersion(self.current().version.clone()));
                }
            },
            None => {
                known.keep(&pushed);
                Version::default()
            }
        };
        known.pushed = text.unwrap_or_default().into();
        self.put_pushed(&mut known, Ok(checked)).await
    }

    /// The policies that were pushed last, the newest first.
    pub(crate) async fn history(&self) -> Result<Vec<HistoryEntry>, StoreError> {
        match &self.control {
            Some(control) => control.history().await,
            None => Ok(self.changing.lock().await.history.iter().rev().map(|(it, _)| it.clone()).collect()),
        }
    }

    /// The text of a policy that was pushed; empty for a withdrawal, none if it is not kept.
    pub(crate) async fn pushed_text(&self, number: u64) -> Result<Option<String>, StoreError> {
        match &self.control {
            Some(control) => control.pushed_text(number).await,
            None => {
                let known = self.changing.lock().await;
                let entry = known.history.iter().find(|(it, _)| it.number == number);
                Ok(entry.map(|(_, text)| text.to_string()))
            }
        }
    }

    /// Puts a policy in force that was pushed, or this node's own if that was withdrawn.
    async fn put_pushed(
        self: &Arc<Self>,
        known: &mut Known,
        checked: Result<Option<CheckedPolicy>, NotChanged>,
    ) -> Result<Arc<Loaded>, NotChanged> {
        let is_pushed = match &checked {
            Ok(checked) => checked.is_some(),
            Err(_) => known.is_pushed,
        };
        let outcome = self
            .off_workers(move |live| {
                let outcome = checked.and_then(|checked| match checked {
                    Some(checked) => live.replace(&checked, "admin API".to_owned()),
                    None => live.back_to_own(),
                });
                live.record(&outcome);
                outcome
            })
            .await;
        known.is_pushed = is_pushed && (outcome.is_ok() || known.is_pushed);
        outcome
    }

    fn back_to_own(&self) -> Result<Arc<Loaded>, NotChanged> {
        let mut own = self.own.lock();
        if let PolicyOrigin::File(path) = own.origin.clone() {
            match load_policy(&path, &own.context) {
                Ok(checked) => own.checked = checked,
                // The pushed policy is withdrawn all the same: this node's last valid policy comes into force.
                Err(why) => tracing::error!(
                    "the policy's file has mistakes, and its last valid version comes into force: {why}"
                ),
            }
        }
        self.replace(&own.checked, own.origin.to_string())
    }

    /// Applies changes that other nodes made, and writes back data that the store has lost. False if the store did not answer.
    pub(crate) async fn poll(self: &Arc<Self>) -> bool {
        let mut known = self.changing.lock().await;
        self.poll_store(&mut known).await
    }

    async fn poll_store(self: &Arc<Self>, known: &mut Known) -> bool {
        let Some(control) = &self.control else { return true };
        // An outage is logged by the checks that the store does not decide.
        let Ok(news) = control.news(&known.policy, &known.tiers).await else { return false };
        let lost = known.lost(&news);
        self.apply_tiers(known, &news);
        self.apply_policy(known, news).await;
        let mut kept = Ok(true);
        if let Some((version, text)) = &lost.policy {
            kept = control.keep_policy(version, text).await;
        }
        if let (Some(version), Ok(_)) = (&lost.tiers, &kept) {
            kept = self.keep_tiers(control, known, version).await;
        }
        known.not_kept(kept.err());
        true
    }

    async fn apply_policy(self: &Arc<Self>, known: &mut Known, news: ControlUpdate) {
        let Some(text) = news.policy else { return };
        known.policy = news.policy_version;
        known.pushed = text.as_str().into();
        if text.is_empty() && !known.is_pushed {
            return;
        }
        let checked = match text.is_empty() {
            true => Ok(None),
            false => {
                let read = self.off_workers(move |live| live.read("policy in the store", &text)).await;
                read.map(Some).map_err(NotChanged::from)
            }
        };
        // The outcome is logged and counted, and no caller waits for it.
        let _ = self.put_pushed(known, checked).await;
    }

    fn apply_tiers(&self, known: &mut Known, news: &ControlUpdate) {
        if !news.has_tiers {
            return;
        }
        known.tiers = news.tiers_version.clone();
        self.assigned.change(&news.tiers, news.all_tiers);
    }

    /// Writes the tiers back that the store has lost. Returns whether it has these or newer ones.
    async fn keep_tiers(
        &self,
        control: &Control,
        known: &Known,
        version: &Version,
    ) -> Result<bool, StoreError> {
        if known.tiers != *version {
            return Ok(false);
        }
        let tiers = self.assigned.all();
        control.keep_tiers(version, &tiers).await
    }

    /// Assigns a tier, or withdraws it, on all nodes that share the store.
    pub(crate) async fn assign(self: &Arc<Self>, tier: AssignedTier) -> Result<bool, StoreError> {
        if let Some(control) = &self.control {
            let assigned = self.assign_in_store(control, &tier).await?;
            // This node applies the change as all others do: in the order of the store.
            self.poll().await;
            return Ok(assigned == Assigned::Done);
        }
        let is_new = self.assigned.get(&tier.family, &tier.member).is_none();
        if is_new && !tier.tier.is_empty() && self.assigned.count() as u64 >= ASSIGNED_MAX {
            return Ok(false);
        }
        let mut known = self.changing.lock().await;
        let tiers_version = Version { number: known.tiers.number + 1, ..Version::default() };
        let news =
            ControlUpdate { tiers_version, has_tiers: true, tiers: vec![tier], ..ControlUpdate::default() };
        self.apply_tiers(&mut known, &news);
        Ok(true)
    }

    /// Assigns a tier in the store. Tiers that the store has lost are written back first.
    async fn assign_in_store(&self, control: &Control, tier: &AssignedTier) -> Result<Assigned, StoreError> {
        let known = self.changing.lock().await;
        let assigned = control.assign_tier(&known.tiers, tier).await?;
        if assigned != Assigned::Lost {
            return Ok(assigned);
        }
        self.keep_tiers(control, &known, &known.tiers).await?;
        match control.assign_tier(&known.tiers, tier).await? {
            Assigned::Lost => {
                let (server, why) =
                    ("the store".into(), "it has lost tiers and did not accept them again".into());
                Err(StoreError::Unavailable { server, why })
            }
            assigned => Ok(assigned),
        }
    }

    /// The tier that was assigned to a member of a family.
    pub(crate) fn assigned(&self, family: &str, member: &str) -> Option<Arc<str>> {
        self.assigned.get(family, member)
    }

    /// The tiers that were assigned to the user or the API key of a request, by family.
    pub(crate) fn assigned_to(
        &self,
        policy: &Loaded,
        request: &Descriptors<'_>,
    ) -> Vec<(Box<str>, Arc<str>)> {
        self.assigned.of_request(&policy.limiter.policy().parts().families, request)
    }

    /// Puts another policy in force. Requests under way end by the old one.
    fn replace(&self, checked: &CheckedPolicy, origin: String) -> Result<Arc<Loaded>, NotChanged> {
        let limiter = self.current().limiter.followed_by(checked.policy.clone(), &checked.settings)?;
        let loaded = Arc::new(Loaded::new(limiter, &self.metrics, checked, origin));
        self.current.store(Arc::clone(&loaded));
        self.metrics.keep_rules(rules_of(checked).map(|rule| &*rule.name));
        Ok(loaded)
    }

    fn record(&self, outcome: &Result<Arc<Loaded>, NotChanged>) {
        self.metrics.policy_read(outcome.is_ok());
        let refused = outcome.as_ref().err();
        *self.refused.lock() =
            refused.map(|why| RefusedChange { at: SystemTime::now(), why: why.to_string() });
        match outcome {
            Ok(loaded) => {
                tracing::info!(version = loaded.version, origin = loaded.origin, "policy in force");
                loaded.warnings.iter().for_each(|warning| tracing::warn!("policy: {warning}"));
                loaded.remarks.iter().for_each(|remark| tracing::info!("policy: {remark}"));
            }
            Err(why) => {
                let version = &self.current().version;
                tracing::error!(version, "the policy in force stays: {why}");
            }
        }
    }
}

/// The rules of a policy, the default rule last.
fn rules_of(checked: &CheckedPolicy) -> impl Iterator<Item = &Rule> {
    let parts = checked.policy.parts();
    parts.rules.iter().chain(&parts.default)
}
