//! This node's copy of the control data in the store: the pushed policy and the assigned tiers.

use std::collections::VecDeque;
use std::sync::Arc;

use tollgate::{ControlUpdate, HistoryEntry, Pushed, StoreError, Version};

/// This node's copy of the control data that all nodes share.
#[derive(Default)]
pub(super) struct Known {
    pub(super) policy: Version,
    /// The policy that was pushed last, to be written back if the store loses it; empty if it was withdrawn.
    pub(super) pushed: Arc<str>,
    pub(super) tiers: Version,
    /// Whether the policy in force was pushed: then the file is not read.
    pub(super) is_pushed: bool,
    /// Whether the loss of the policy, and of the tiers, has been logged.
    has_lost: [bool; 2],
    /// The last logged reason why lost data could not be written back.
    not_kept: Option<String>,
    /// The policies that were pushed, with their texts, where no store keeps them.
    pub(super) history: VecDeque<(HistoryEntry, Arc<str>)>,
}

/// Pushed policies that are kept where there is no store: as many as a store keeps.
const HISTORY_KEPT: usize = 20;

impl Known {
    /// Adds a policy to the history of a node without a store.
    pub(super) fn keep(&mut self, pushed: &Pushed<'_>) {
        let number = self.history.back().map_or(1, |(last, _)| last.number + 1);
        let (label, author) = (pushed.label.to_owned(), pushed.author.to_owned());
        let entry = HistoryEntry { number, label, author, at_secs: pushed.at_secs };
        self.history.push_back((entry, pushed.text.into()));
        if self.history.len() > HISTORY_KEPT {
            self.history.pop_front();
        }
    }

    /// The data that the store has lost. A missing key is not a withdrawal: that leaves its number behind.
    pub(super) fn lost(&mut self, news: &ControlUpdate) -> Lost {
        let is_lost =
            [news.policy_version.number < self.policy.number, news.tiers_version.number < self.tiers.number];
        let had_lost = std::mem::replace(&mut self.has_lost, is_lost);
        // A withdrawal is kept in the store as well, and can be lost.
        let policy = if self.pushed.is_empty() { "the withdrawal of a policy" } else { "the pushed policy" };
        let what = [policy, "the assigned tiers"];
        for ((what, is_lost), had_lost) in what.into_iter().zip(is_lost).zip(had_lost) {
            match (is_lost, had_lost) {
                (true, false) => {
                    tracing::warn!(
                        "the store has lost {what}: this node keeps using its copy, and writes it back"
                    );
                }
                (false, true) => tracing::info!("the store has {what} again"),
                (true, true) | (false, false) => {}
            }
        }
        Lost {
            policy: is_lost[0].then(|| (self.policy.clone(), Arc::clone(&self.pushed))),
            tiers: is_lost[1].then(|| self.tiers.clone()),
        }
    }

    /// Logs why lost data could not be written back, once for each reason.
    pub(super) fn not_kept(&mut self, why: Option<StoreError>) {
        let why = why.map(|why| why.to_string());
        if let Some(why) = why.as_ref().filter(|why| self.not_kept.as_ref() != Some(why)) {
            tracing::warn!("data that the store has lost could not be written back: {why}");
        }
        self.not_kept = why;
    }
}

/// Data that the store has lost, to be written back.
#[derive(Default)]
pub(super) struct Lost {
    pub(super) policy: Option<(Version, Arc<str>)>,
    pub(super) tiers: Option<Version>,
}
