//! Limits that are asked together: a set as it waits, and sets that go to the server in one call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tollgate_core::policy::WORK_MAX;
use tollgate_core::{Ask, Decision, Limit};

use crate::redis::Inner;
use crate::redis::error::StoreError;
use crate::redis::limit::StoredLimit;
use crate::redis::queue::QueueKey;

/// Sets in one call. Equal ones cost the server no more than one.
const SETS_MAX: usize = 1_024;
/// One limit applied to one key, as part of a set.
#[derive(Clone)]
pub(in crate::redis) struct Member {
    pub(in crate::redis) limit: Arc<StoredLimit>,
    /// The key in the store.
    pub(in crate::redis) queue_key: QueueKey,
    pub(in crate::redis) ask: Ask,
    pub(in crate::redis) enforced: bool,
}

impl Member {
    pub(in crate::redis) fn limit(&self) -> &Limit {
        &self.limit.limit
    }

    /// Whether it can never be admitted.
    pub(in crate::redis) fn is_impossible(&self) -> bool {
        self.ask.cost > self.limit().size()
    }

    /// Whether its state decides: what asks for nothing is always admitted, and what asks for too much never.
    pub(in crate::redis) fn is_asked(&self) -> bool {
        self.ask.cost > 0 && !self.is_impossible()
    }

    pub(in crate::redis) fn is_of(&self, queue_key: &QueueKey) -> bool {
        self.queue_key == *queue_key
    }

    fn has_state_of(&self, other: &Self) -> bool {
        self.queue_key.hash == other.queue_key.hash
    }

    fn is_equal(&self, other: &Self) -> bool {
        self.ask == other.ask && self.enforced == other.enforced && self.queue_key == other.queue_key
    }

    /// Whether equal asks in a row are decided as one: nobody waits, and a denial leaves no trace.
    fn is_plain(&self) -> bool {
        let counts_denied = match self.limit() {
            Limit::FixedWindow(it) => it.counts_denied(),
            Limit::SlidingLog(it) => it.counts_denied(),
            Limit::SlidingCounter(it) => it.counts_denied(),
            Limit::TokenBucket(_)
            | Limit::IntervalBucket(_)
            | Limit::LeakyBucket(_)
            | Limit::CalendarQuota(_) => false,
        };
        !counts_denied && self.ask.wait.is_none_or(|wait| wait.get() == 0)
    }
}

/// Checks of one request whose keys are in one slot: all of them are taken, or none. No state stands twice.
pub(in crate::redis) struct CheckSet {
    pub(in crate::redis) members: SmallVec<[Member; 4]>,
}

impl CheckSet {
    pub(in crate::redis) fn is_equal(&self, other: &Self) -> bool {
        self.members.len() == other.members.len()
            && self.members.iter().zip(&other.members).all(|(one, other)| one.is_equal(other))
    }

    fn is_plain(&self) -> bool {
        self.members.iter().all(Member::is_plain)
    }

    fn work(&self) -> usize {
        self.members.iter().map(|member| member.limit().work()).sum()
    }

    /// The number of the member with this key, if the set has one.
    pub(in crate::redis) fn number_in(&self, queue_key: &QueueKey) -> Option<usize> {
        self.members.iter().position(|member| member.is_of(queue_key))
    }

    /// Lets the driver give back what was taken for a request that is gone.
    pub(in crate::redis) fn give_back(&self, inner: &Arc<Inner>, answer: &SetAnswer) {
        if !answer.all {
            return;
        }
        for (member, decision) in self.members.iter().zip(&answer.decisions) {
            if let Some(decision) = decision.filter(Decision::is_admitted) {
                let (member, to) = (member.clone(), Arc::clone(inner));
                inner.tasks.hand_over(async move {
                    let start = decision.at.after(decision.outcome.delay());
                    // What cannot be given back comes back as the limit refills.
                    let _ = to.refund(&member.limit, member.queue_key.clone(), member.ask.cost, start).await;
                });
            }
        }
    }

    /// The answer that is known of one member alone.
    pub(in crate::redis) fn denied_by(&self, number: usize, decision: Decision) -> SetAnswer {
        let mut decisions = SmallVec::from_elem(None, self.members.len());
        decisions[number] = Some(decision);
        SetAnswer { all: false, decisions }
    }
}

/// What became of a set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::redis) struct SetAnswer {
    /// Whether permits were taken: from all of its limits, but those that are only counted and deny.
    pub(in crate::redis) all: bool,
    /// By member. None: another member is known to deny, and nobody has asked for this one.
    pub(in crate::redis) decisions: SmallVec<[Option<Decision>; 4]>,
}

/// Somebody whose set has not been decided yet.
pub(in crate::redis) struct SetWaiter {
    pub(in crate::redis) set: Arc<CheckSet>,
    pub(in crate::redis) answer: oneshot::Sender<Result<SetAnswer, StoreError>>,
    /// Set when the request is gone, where the waiting goes on without it.
    pub(in crate::redis) left: Arc<AtomicBool>,
}

impl SetWaiter {
    pub(in crate::redis) fn has_left(&self) -> bool {
        self.answer.is_closed() || self.left.load(Ordering::Acquire)
    }
}

/// Equal sets in one call.
pub(in crate::redis) struct Group {
    pub(in crate::redis) set: Arc<CheckSet>,
    pub(in crate::redis) waiters: Vec<SetWaiter>,
}

/// Sets that one call decides. Either they are equal, or they share exactly one key.
#[derive(Default)]
pub(in crate::redis) struct SetBatch {
    pub(in crate::redis) groups: Vec<Group>,
    sets: usize,
    work: usize,
}

impl SetBatch {
    pub(in crate::redis) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Adds a request that waits for a key. Returns the request if it has to go in another call.
    pub(in crate::redis) fn add(&mut self, waiter: SetWaiter, queue_key: &QueueKey) -> Result<(), SetWaiter> {
        if self.sets >= SETS_MAX {
            return Err(waiter);
        }
        let set = &waiter.set;
        let Some(first) = self.groups.first().map(|group| Arc::clone(&group.set)) else {
            (self.sets, self.work) = (1, set.work());
            self.groups.push(Group { set: Arc::clone(set), waiters: vec![waiter] });
            return Ok(());
        };
        if !first.is_plain() {
            return Err(waiter);
        }
        // The last is most often the one: a hot subject has equal sets.
        if let Some(group) = self.groups.iter_mut().rev().find(|group| group.set.is_equal(set)) {
            group.waiters.push(waiter);
            self.sets += 1;
            return Ok(());
        }
        if !set.is_plain() || self.work + set.work() > WORK_MAX || !self.can_share(&first, set, queue_key) {
            return Err(waiter);
        }
        (self.sets, self.work) = (self.sets + 1, self.work + set.work());
        self.groups.push(Group { set: Arc::clone(set), waiters: vec![waiter] });
        Ok(())
    }

    /// Whether a set can join this call: both sets ask the same of the key that they wait for, and have no other key in common.
    fn can_share(&self, first: &CheckSet, set: &CheckSet, queue_key: &QueueKey) -> bool {
        let (Some(one), Some(other)) = (first.number_in(queue_key), set.number_in(queue_key)) else {
            return false;
        };
        // What a log would answer to those whom another limit denies is not told by the script.
        if !first.members[one].is_equal(&set.members[other])
            || matches!(first.members[one].limit(), Limit::SlidingLog(_))
        {
            return false;
        }
        let own = || set.members.iter().enumerate().filter(|(number, _)| *number != other);
        self.groups.iter().all(|group| {
            own().all(|(_, member)| group.set.members.iter().all(|known| !member.has_state_of(known)))
        })
    }
}

/// Sets as they go to the server: every state once.
pub(in crate::redis) struct SetCall<'a> {
    /// The one that all groups have in common comes first, if there is one.
    pub(in crate::redis) states: Vec<&'a Member>,
    pub(in crate::redis) has_shared: bool,
    pub(in crate::redis) groups: Vec<GroupCall<'a>>,
}

pub(in crate::redis) struct GroupCall<'a> {
    pub(in crate::redis) set: &'a Arc<CheckSet>,
    /// How many equal sets.
    pub(in crate::redis) count: usize,
    /// By member: the number of its state.
    pub(in crate::redis) states: SmallVec<[usize; 4]>,
}

impl<'a> SetCall<'a> {
    pub(in crate::redis) fn one(set: &'a Arc<CheckSet>) -> Self {
        Self {
            states: set.members.iter().collect(),
            has_shared: false,
            groups: vec![GroupCall { set, count: 1, states: (0..set.members.len()).collect() }],
        }
    }

    /// The keys of the states in the store.
    pub(in crate::redis) fn keys(&self) -> impl ExactSizeIterator<Item = &str> {
        self.states.iter().map(|member| &*member.queue_key.key)
    }

    /// How many sets ask for each state: those of its group, or all of them for the one that they have in common.
    pub(in crate::redis) fn askers(&self) -> SmallVec<[usize; 8]> {
        let mut askers = SmallVec::from_elem(0, self.states.len());
        for group in &self.groups {
            group.states.iter().for_each(|state| askers[*state] += group.count);
        }
        askers
    }

    /// How many sets are asked for.
    pub(in crate::redis) fn sets(&self) -> usize {
        self.groups.iter().map(|group| group.count).sum()
    }

    /// Whether some of the limits are logs.
    pub(in crate::redis) fn has_logs(&self) -> bool {
        self.states.iter().any(|member| matches!(member.limit(), Limit::SlidingLog(_)))
    }

    /// The members of all groups except the one with this key, each with the number of its group.
    pub(in crate::redis) fn others(&self, queue_key: &QueueKey) -> Vec<(&'a Member, usize)> {
        let groups = self.groups.iter().enumerate();
        groups
            .flat_map(|(number, group)| group.set.members.iter().map(move |member| (member, number)))
            .filter(|(member, _)| member.enforced && !member.is_of(queue_key))
            .collect()
    }

    pub(in crate::redis) fn of(batch: &'a SetBatch, queue_key: &QueueKey) -> Self {
        let shared = match &batch.groups[..] {
            [first, _, ..] => first.set.members.iter().find(|member| member.is_of(queue_key)),
            _ => None,
        };
        let mut states: Vec<_> = shared.into_iter().collect();
        let groups = batch.groups.iter().map(|group| {
            let number = |member: &'a Member| match shared {
                Some(_) if member.is_of(queue_key) => 0,
                _ => {
                    states.push(member);
                    states.len() - 1
                }
            };
            GroupCall {
                set: &group.set,
                count: group.waiters.len(),
                states: group.set.members.iter().map(number).collect(),
            }
        });
        let groups = groups.collect();
        Self { states, has_shared: shared.is_some(), groups }
    }
}
