//! Sets of checks that are decided together: a set as it waits, and sets in one call.

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
pub(crate) struct Member {
    pub(crate) limit: Arc<StoredLimit>,
    /// The key in the store.
    pub(crate) queue_key: QueueKey,
    pub(crate) ask: Ask,
    pub(crate) enforced: bool,
}

impl Member {
    pub(crate) fn limit(&self) -> &Limit {
        &self.limit.limit
    }

    /// Whether it can never be admitted.
    pub(crate) fn is_impossible(&self) -> bool {
        self.ask.cost > self.limit().size()
    }

    /// Whether its state decides: a cost of 0 is always admitted, and a cost above the size never.
    pub(crate) fn is_asked(&self) -> bool {
        self.ask.cost > 0 && !self.is_impossible()
    }

    pub(crate) fn is_of(&self, queue_key: &QueueKey) -> bool {
        self.queue_key == *queue_key
    }

    fn has_state_of(&self, other: &Self) -> bool {
        self.queue_key.hash == other.queue_key.hash
    }

    fn is_equal(&self, other: &Self) -> bool {
        self.ask == other.ask && self.enforced == other.enforced && self.queue_key == other.queue_key
    }

    /// Whether equal asks in a row are decided as one: the ask does not wait, and a denial changes nothing.
    fn is_plain(&self) -> bool {
        !self.limit().counts_denied() && self.ask.wait.is_none_or(|wait| wait.get() == 0)
    }
}

/// Checks of one request whose keys are in one slot: all of them are taken, or none. No state occurs twice.
pub(crate) struct CheckSet {
    pub(crate) members: SmallVec<[Member; 4]>,
}

impl CheckSet {
    pub(crate) fn is_equal(&self, other: &Self) -> bool {
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
    pub(crate) fn number_in(&self, queue_key: &QueueKey) -> Option<usize> {
        self.members.iter().position(|member| member.is_of(queue_key))
    }

    /// Lets the driver give back the permits of a request that has left.
    pub(crate) fn give_back(&self, inner: &Arc<Inner>, answer: &SetAnswer) {
        if !answer.all {
            return;
        }
        for (member, decision) in self.members.iter().zip(&answer.decisions) {
            if let Some(decision) = decision.filter(Decision::is_admitted) {
                let (member, to) = (member.clone(), Arc::clone(inner));
                inner.tasks.hand_over(async move {
                    let start = decision.at.after(decision.outcome.delay());
                    // Permits that cannot be given back return as the limit refills.
                    let _ = to.refund(&member.limit, member.queue_key.clone(), member.ask.cost, start).await;
                });
            }
        }
    }

    /// The answer with the denial of one member alone.
    pub(crate) fn denied_by(&self, number: usize, decision: Decision) -> SetAnswer {
        let mut decisions = SmallVec::from_elem(None, self.members.len());
        decisions[number] = Some(decision);
        SetAnswer { all: false, decisions }
    }
}

/// The answer to a set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SetAnswer {
    /// Whether permits were taken: from all of its limits, except for those that are only counted and deny.
    pub(crate) all: bool,
    /// By member. `None`: another member is known to deny, and this one was not asked.
    pub(crate) decisions: SmallVec<[Option<Decision>; 4]>,
}

/// A caller that waits for its set.
pub(crate) struct SetWaiter {
    pub(crate) set: Arc<CheckSet>,
    pub(crate) answer: oneshot::Sender<Result<SetAnswer, StoreError>>,
    /// Set when the request has left while the set still waits.
    pub(crate) left: Arc<AtomicBool>,
}

impl SetWaiter {
    pub(crate) fn has_left(&self) -> bool {
        self.answer.is_closed() || self.left.load(Ordering::Acquire)
    }
}

/// Equal sets in one call.
pub(crate) struct Group {
    pub(crate) set: Arc<CheckSet>,
    pub(crate) waiters: Vec<SetWaiter>,
}

/// Sets that one call decides. Either they are equal, or they share exactly one key.
#[derive(Default)]
pub(crate) struct SetBatch {
    pub(crate) groups: Vec<Group>,
    sets: usize,
    work: usize,
}

impl SetBatch {
    pub(crate) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Adds a request that waits for a key. Returns the request if it has to go in another call.
    pub(crate) fn add(&mut self, waiter: SetWaiter, queue_key: &QueueKey) -> Result<(), SetWaiter> {
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
        // The last group is most often the right one: a hot subject has equal sets.
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
        // The script does not tell the answer of a log to sets that another limit denies.
        if !first.members[one].is_equal(&set.members[other]) || first.members[one].limit.is_log() {
            return false;
        }
        let own = || set.members.iter().enumerate().filter(|(number, _)| *number != other);
        self.groups.iter().all(|group| {
            own().all(|(_, member)| group.set.members.iter().all(|known| !member.has_state_of(known)))
        })
    }
}

/// Sets as they go to the server: every state once.
pub(crate) struct SetCall<'a> {
    /// The state that all groups share comes first, if there is one.
    pub(crate) states: Vec<&'a Member>,
    pub(crate) has_shared: bool,
    pub(crate) groups: Vec<GroupCall<'a>>,
}

pub(crate) struct GroupCall<'a> {
    pub(crate) set: &'a Arc<CheckSet>,
    /// How many equal sets.
    pub(crate) count: usize,
    /// By member: the number of its state.
    pub(crate) states: SmallVec<[usize; 4]>,
}

impl<'a> SetCall<'a> {
    pub(crate) fn one(set: &'a Arc<CheckSet>) -> Self {
        Self {
            states: set.members.iter().collect(),
            has_shared: false,
            groups: vec![GroupCall { set, count: 1, states: (0..set.members.len()).collect() }],
        }
    }

    /// The keys of the states in the store.
    pub(crate) fn keys(&self) -> impl ExactSizeIterator<Item = &str> {
        self.states.iter().map(|member| &*member.queue_key.key)
    }

    /// How many sets ask for each state: the sets of its group, or all sets for the shared state.
    pub(crate) fn askers(&self) -> SmallVec<[usize; 8]> {
        let mut askers = SmallVec::from_elem(0, self.states.len());
        for group in &self.groups {
            group.states.iter().for_each(|state| askers[*state] += group.count);
        }
        askers
    }

    /// How many sets are asked for.
    pub(crate) fn sets(&self) -> usize {
        self.groups.iter().map(|group| group.count).sum()
    }

    /// Whether some of the limits are logs.
    pub(crate) fn has_logs(&self) -> bool {
        self.states.iter().any(|member| member.limit.is_log())
    }

    /// The members of all groups except the one with this key, each with the number of its group.
    pub(crate) fn others(&self, queue_key: &QueueKey) -> Vec<(&'a Member, usize)> {
        let groups = self.groups.iter().enumerate();
        groups
            .flat_map(|(number, group)| group.set.members.iter().map(move |member| (member, number)))
            .filter(|(member, _)| member.enforced && !member.is_of(queue_key))
            .collect()
    }

    pub(crate) fn of(batch: &'a SetBatch, queue_key: &QueueKey) -> Self {
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
