//! The policy that is in force, how another one takes its place, and the tiers that were assigned.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use parking_lot::{Mutex, RwLock};
use tollgate::rules::{Descriptors, KeyPart, Rule};
use tollgate::{
    ASSIGNED_MAX, AssignedTier, Control, Engine, News, PolicyLimiter, PolicyVerdict, StoreError,
    TooManyLimits,
};

use crate::config::{CheckedPolicy, ConfigErrors, PolicyConfig, PolicyContext, load_policy, read_policy};
use crate::metrics::{RuleAnswers, SharedMetrics};

/// The policy in force. Requests see it whole: the old one or the new one.
pub(crate) struct LivePolicy {
    metrics: SharedMetrics,
    current: ArcSwap<Loaded>,
    /// The policy that this node was started with, and its file.
    own: Mutex<PolicyConfig>,
    context: PolicyContext,
    /// Changes come one after another. A policy is read with the lock held, so that the memory for reading is taken once.
    changing: tokio::sync::Mutex<Known>,
    assigned: RwLock<HashMap<(String, String), Arc<str>>>,
    /// How many are assigned, to be read without the lock.
    assigned_count: AtomicU64,
    control: Option<Control>,
}

/// What this node knows of what all go by.
#[derive(Default)]
struct Known {
    policy_number: u64,
    tiers_number: u64,
    /// Whether the policy in force was pushed: then the file is not looked at.
    is_pushed: bool,
}

/// A policy in force, with all that belongs to it.
pub(crate) struct Loaded {
    /// What tells it from others.
    pub(crate) version: String,
    /// Since when it is in force.
    pub(crate) since: SystemTime,
    /// Where it came from: a file, the configuration, the admin API.
    pub(crate) origin: String,
    /// What there is to know beyond what was written.
    pub(crate) remarks: Vec<String>,
    pub(crate) limiter: PolicyLimiter,
    /// By rule, the default rule last.
    answers: Vec<RuleAnswers>,
}

/// Why another policy did not come into force. The one before still is.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotChanged {
    /// It has mistakes.
    #[error("{0}")]
    Mistakes(#[from] ConfigErrors),
    /// It has more limits than the engine can tell apart.
    #[error("{0}")]
    TooManyLimits(#[from] TooManyLimits),
    /// It was to reach all nodes, and the store did not take it.
    #[error("the store did not take it: {0}")]
    Store(#[from] StoreError),
    /// A policy that was pushed is in force.
    #[error("a policy that was pushed is in force; withdraw it first (DELETE /admin/policy)")]
    Pushed,
}

impl LivePolicy {
    pub(crate) fn new(
        engine: &Engine,
        metrics: SharedMetrics,
        own: PolicyConfig,
        context: PolicyContext,
    ) -> Result<Self, TooManyLimits> {
        let checked = &own.checked;
        let limiter = PolicyLimiter::new(engine, checked.policy.clone(), &checked.settings)?;
        let loaded = Loaded::new(limiter, &metrics, checked, origin(&own));
        let control = match engine {
            Engine::Memory(_) => None,
            Engine::Redis(guard) => Some(guard.engine().control()),
        };
        Ok(Self {
            metrics,
            current: ArcSwap::from_pointee(loaded),
            own: Mutex::new(own),
            context,
            changing: tokio::sync::Mutex::default(),
            assigned: RwLock::default(),
            assigned_count: AtomicU64::new(0),
            control,
        })
    }

    /// The policy in force. Kept across waits, so as a share of its own.
    pub(crate) fn current(&self) -> Arc<Loaded> {
        self.current.load_full()
    }

    /// The file that the policy is read from again when it changes.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        self.own.lock().file.clone()
    }

    /// Looks a policy over without putting it in force, and sums it up.
    pub(crate) async fn check<T: Send + 'static>(
        self: &Arc<Self>,
        text: String,
        sum_up: fn(&CheckedPolicy) -> T,
    ) -> Result<T, ConfigErrors> {
        let _turn = self.changing.lock().await;
        self.off_workers(move |live| live.read("policy", &text).map(|checked| sum_up(&checked))).await
    }

    /// Reads the policy's file again. A file with mistakes changes nothing.
    pub(crate) async fn reload(self: &Arc<Self>) -> Result<Arc<Loaded>, NotChanged> {
        let known = self.changing.lock().await;
        let is_pushed = known.is_pushed;
        self.off_workers(move |live| {
            let before = live.current();
            let outcome = live.read_again(is_pushed);
            if !outcome.as_ref().is_ok_and(|loaded| Arc::ptr_eq(loaded, &before)) {
                live.say(&outcome);
            }
            outcome
        })
        .await
    }

    /// Runs work that takes milliseconds or more, such as reading a large policy, where no request waits for the thread.
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
        read_policy(name, text, &self.context)
    }

    fn read_again(&self, is_pushed: bool) -> Result<Arc<Loaded>, NotChanged> {
        let mut own = self.own.lock();
        if let Some(path) = own.file.clone() {
            own.checked = load_policy(&path, &self.context)?;
        }
        if is_pushed {
            return Err(NotChanged::Pushed);
        }
        let current = self.current();
        if current.version == own.checked.version && current.origin == origin(&own) {
            return Ok(current);
        }
        self.replace(&own.checked, origin(&own))
    }

    /// Puts a policy in force on all nodes that share the store, or on this one if there is no store. None: the one that was pushed is
    /// withdrawn, and each node goes by its own again.
    pub(crate) async fn push(self: &Arc<Self>, text: Option<String>) -> Result<Arc<Loaded>, NotChanged> {
        let mut known = self.changing.lock().await;
        let (text, checked) = self
            .off_workers(move |live| {
                let checked = text.as_deref().map(|text| live.read("policy", text)).transpose()?;
                if let Some(checked) = &checked {
                    // Whatever can be wrong with it is found before any other node hears of it.
                    live.current().limiter.followed_by(checked.policy.clone(), &checked.settings)?;
                }
                Ok::<_, NotChanged>((text, checked))
            })
            .await?;
        known.policy_number = match &self.control {
            Some(control) => control.push_policy(text.as_deref()).await?,
            None => 0,
        };
        self.put_pushed(&mut known, Ok(checked)).await
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
                live.say(&outcome);
                outcome
            })
            .await;
        known.is_pushed = is_pushed && (outcome.is_ok() || known.is_pushed);
        outcome
    }

    fn back_to_own(&self) -> Result<Arc<Loaded>, NotChanged> {
        let mut own = self.own.lock();
        if let Some(path) = own.file.clone() {
            match load_policy(&path, &self.context) {
                Ok(checked) => own.checked = checked,
                // It is withdrawn all the same: the last one of this node's own that was good is in force.
                Err(why) => tracing::error!("the policy's file is not read again: {why}"),
            }
        }
        self.replace(&own.checked, origin(&own))
    }

    /// What the store tells of other nodes' changes.
    pub(crate) async fn hear(self: &Arc<Self>) {
        let Some(control) = &self.control else { return };
        let mut known = self.changing.lock().await;
        let Some(news) = control.news(known.policy_number, known.tiers_number).await else { return };
        self.hear_tiers(&mut known, &news);
        let Some(text) = news.policy else { return };
        known.policy_number = news.policy_number;
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
        let _ = self.put_pushed(&mut known, checked).await;
    }

    fn hear_tiers(&self, known: &mut Known, news: &News) {
        if news.tiers_number == known.tiers_number {
            return;
        }
        known.tiers_number = news.tiers_number;
        let mut assigned = self.assigned.write();
        if news.all_tiers {
            assigned.clear();
        }
        for AssignedTier { family, member, tier } in &news.tiers {
            let key = (family.clone(), member.clone());
            match tier.is_empty() {
                true => assigned.remove(&key),
                false => assigned.insert(key, tier.as_str().into()),
            };
        }
        self.assigned_count.store(assigned.len() as u64, Ordering::Relaxed);
    }

    /// Assigns a tier, or takes it away, on all nodes that share the store.
    pub(crate) async fn assign(self: &Arc<Self>, tier: AssignedTier) -> Result<bool, StoreError> {
        if let Some(control) = &self.control {
            // This node hears of it as all others do: in the order of the store.
            let taken = control.assign_tier(&tier).await?.is_some();
            self.hear().await;
            return Ok(taken);
        }
        let is_new = !self.assigned.read().contains_key(&(tier.family.clone(), tier.member.clone()));
        if is_new && !tier.tier.is_empty() && self.assigned.read().len() as u64 >= ASSIGNED_MAX {
            return Ok(false);
        }
        let mut known = self.changing.lock().await;
        let number = known.tiers_number + 1;
        let news = News { tiers_number: number, tiers: vec![tier], ..News::default() };
        self.hear_tiers(&mut known, &news);
        Ok(true)
    }

    /// The tier that was assigned to a member of a family.
    pub(crate) fn assigned(&self, family: &str, member: &str) -> Option<Arc<str>> {
        self.assigned.read().get(&(family.to_owned(), member.to_owned())).cloned()
    }

    /// The tiers that were assigned to who asks, by family.
    pub(crate) fn assigned_to(
        &self,
        policy: &Loaded,
        request: &Descriptors<'_>,
    ) -> Vec<(Box<str>, Arc<str>)> {
        let mut found = Vec::new();
        if self.assigned_count.load(Ordering::Relaxed) == 0 {
            return found;
        }
        for family in &policy.limiter.policy().parts().families {
            let member = match family.member {
                KeyPart::ApiKey => request.api_key,
                _ => request.user,
            };
            if let Some(tier) = member.and_then(|member| self.assigned(&family.name, member)) {
                found.push((family.name.clone(), tier));
            }
        }
        found
    }

    /// Puts another policy in force. Requests under way end by the old one.
    fn replace(&self, checked: &CheckedPolicy, origin: String) -> Result<Arc<Loaded>, NotChanged> {
        let limiter = self.current().limiter.followed_by(checked.policy.clone(), &checked.settings)?;
        let loaded = Arc::new(Loaded::new(limiter, &self.metrics, checked, origin));
        self.current.store(Arc::clone(&loaded));
        self.metrics.keep_rules(rules_of(checked).map(|rule| &*rule.name));
        Ok(loaded)
    }

    fn say(&self, outcome: &Result<Arc<Loaded>, NotChanged>) {
        self.metrics.policy_read(outcome.is_ok());
        match outcome {
            Ok(loaded) => {
                tracing::info!(version = loaded.version, origin = loaded.origin, "policy in force");
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

fn origin(own: &PolicyConfig) -> String {
    own.file.as_ref().map_or_else(|| "configuration".to_owned(), |path| path.display().to_string())
}

impl Loaded {
    fn new(limiter: PolicyLimiter, metrics: &SharedMetrics, checked: &CheckedPolicy, origin: String) -> Self {
        let answers = rules_of(checked).map(|rule| metrics.of_rule(&rule.name)).collect();
        metrics.policy_in_force(&checked.version);
        Self {
            version: checked.version.clone(),
            since: SystemTime::now(),
            origin,
            remarks: checked.warnings.iter().chain(&checked.remarks).cloned().collect(),
            limiter,
            answers,
        }
    }

    /// Counts what was decided.
    pub(crate) fn count(&self, verdict: &PolicyVerdict) {
        for (check, decided) in verdict.selection.checks.iter().zip(&verdict.verdicts) {
            if let Some(answers) = self.answers.get(check.rule) {
                answers.count(check.role, check.is_candidate, decided.is_admitted());
            }
        }
        for rule in &verdict.selection.skipped {
            if let Some(answers) = self.answers.get(*rule) {
                answers.count_skipped();
            }
        }
    }
}
