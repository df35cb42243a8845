//! One exchange with a server on the states of keys: mostly one call. If a state is not plain, the next state is computed here and
//! written by a compare-and-set, which is repeated if the state has changed meanwhile. One deadline covers all of it.

use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::{Micros, Outcome, Timestamp};

use crate::redis::Inner;
use crate::redis::error::StoreError;
use crate::redis::evaluate::sets::{SetsComputed, SetsEvaluated, compute_sets, evaluate_sets, with_logs};
use crate::redis::evaluate::{
    Computation, Evaluated, Memory, OnLoss, Write, compute, compute_changes, evaluate,
};
use crate::redis::limit::StoredLimit;
use crate::redis::protocol::{
    self, Change, Command, FailoverGuard, Kind, Question, Reader, Reply, Snapshots,
};
use crate::redis::queue::QueueKey;
use crate::redis::queue::set::{GroupCall, SetCall};
use crate::redis::server::ServerContext;

/// A result, and when the server was asked for the state that it is computed from.
pub(crate) struct Exchanged<T> {
    pub(crate) result: T,
    pub(crate) sent: Instant,
    pub(crate) received: Instant,
}

/// The steps of a call on one key.
#[derive(Clone, Copy)]
pub(crate) enum Work<'a> {
    Ask(&'a [Question]),
    /// Refunds, or one other change. A return that is out of turn is told the number of returns.
    Change(&'a [Change]),
}

impl Work<'_> {
    /// The call that does the steps on a plain state, or on a log in any state, or that reads the state.
    fn call(
        self,
        limit: &StoredLimit,
        (kind, key): (Kind, &str),
        doubt: Option<FailoverGuard>,
        to: ServerContext,
    ) -> Command {
        let is_refund = |change: &Change| matches!(change, Change::Refund { .. });
        match self {
            Self::Ask(questions) => protocol::ask(limit, (kind, key), questions, doubt, to),
            Self::Change(changes) if limit.is_log() || changes.iter().all(is_refund) => {
                protocol::change(limit, key, changes, doubt, to)
            }
            Self::Change(_) => protocol::read([key].into_iter(), to),
        }
    }

    /// The result of that call.
    fn decided(
        self,
        limit: &StoredLimit,
        admitted: i64,
        now: Timestamp,
        numbers: Reader<'_>,
    ) -> Result<Evaluated, StoreError> {
        match self {
            Self::Ask(questions) => evaluate(limit, questions, admitted, now, numbers),
            Self::Change(_) => Ok(Evaluated::changed(None, now)),
        }
    }

    /// The result on a state that is not plain, and the fields to write.
    fn compute(
        self,
        limit: &StoredLimit,
        doubt: Option<FailoverGuard>,
        state: (&str, &[u8]),
        now: Timestamp,
    ) -> Result<Computation, StoreError> {
        match self {
            Self::Ask(questions) => compute(limit, questions, doubt, state, now),
            Self::Change(changes) => compute_changes(limit, changes, doubt, state, now),
        }
    }
}

/// A computed state that is still to be written.
struct Pending {
    exchanged: Exchanged<Evaluated>,
    snapshots: Snapshots,
    doubt: Option<FailoverGuard>,
    write: Write,
    on_loss: OnLoss,
}

enum Next {
    Done(Exchanged<Evaluated>),
    FullLog,
    /// Another node was quicker, and the state may be plain by now.
    Again,
    Commit(Pending),
}

impl Inner {
    /// Does the steps of a call on the state of one key.
    pub(crate) async fn exchange(
        &self,
        limit: &StoredLimit,
        queue_key: &QueueKey,
        work: Work<'_>,
        deadline: Instant,
    ) -> Result<Exchanged<Evaluated>, StoreError> {
        let slot = self.routes.slot(&queue_key.key);
        // The doubt about the server that answers: each server that is tried has its own.
        let doubt = Mutex::new(None);
        let mut pending: Option<Pending> = None;
        let mut kind = Kind::Plain;
        loop {
            let say = |to: ServerContext| {
                let doubted = FailoverGuard::of(limit, to);
                *doubt.lock() = doubted;
                match &pending {
                    None => work.call(limit, (kind, &queue_key.key), doubted, to),
                    Some(Pending { snapshots, doubt, write, on_loss, .. }) if *doubt == doubted => {
                        let snapshot = snapshots.get(0).unwrap_or_default();
                        protocol::commit(&queue_key.key, snapshot, (write, on_loss.marks()), to)
                    }
                    // Another server has taken over.
                    Some(_) => protocol::read([&*queue_key.key].into_iter(), to),
                }
            };
            let needs_time = (queue_key.hash.low, limit.needs_time());
            let reply = self.call(&queue_key.key, slot, needs_time, deadline, say).await?;
            let (sent, received) = (reply.sent, reply.received);
            let next = Reply::new(&reply.value).and_then(|answer| match (answer, pending.take()) {
                (Reply::Decided { .. }, Some(written)) => Ok(Next::Done(written.exchanged)),
                (Reply::Decided { first, now, numbers }, None) => {
                    let result = work.decided(limit, first, now, numbers)?;
                    Ok(Next::Done(Exchanged { result, sent, received }))
                }
                (Reply::Rare { .. }, None) if limit.is_log() && kind == Kind::Plain => Ok(Next::FullLog),
                (Reply::Rare { .. }, Some(Pending { on_loss: OnLoss::AskScript, .. })) => Ok(Next::Again),
                (Reply::Rare { now, snapshots }, _) => {
                    let doubt = *doubt.lock();
                    let state = (&*queue_key.key, snapshots.get(0)?);
                    let Computation { result, write, on_loss } = work.compute(limit, doubt, state, now)?;
                    let exchanged = Exchanged { result, sent, received };
                    Ok(match write {
                        None => Next::Done(exchanged),
                        Some(write) => Next::Commit(Pending { exchanged, snapshots, doubt, write, on_loss }),
                    })
                }
            });
            match next.inspect_err(|why| self.count_failure(why))? {
                Next::Done(exchanged) => return Ok(exchanged),
                Next::FullLog => kind = Kind::FullLog,
                Next::Again => {}
                Next::Commit(next) => pending = Some(next),
            }
        }
    }
}

/// States of sets from which the next states are computed.
struct PendingSets {
    snapshots: Snapshots,
    doubts: Vec<Option<FailoverGuard>>,
    now: Timestamp,
    sent: Instant,
    received: Instant,
}

impl PendingSets {
    fn compute(&self, call: &SetCall<'_>, log: Outcome) -> Result<SetsComputed<'_>, StoreError> {
        compute_sets(call, &self.doubts, &self.snapshots, self.now, log)
    }
}

impl Inner {
    /// Asks for sets whose keys are in one slot.
    pub(crate) async fn ask_set_states(
        &self,
        call: &SetCall<'_>,
        deadline: Instant,
    ) -> Result<Exchanged<SetsEvaluated>, StoreError> {
        let mut pending = match self.exchange_sets(call, Kind::Plain, None, deadline).await? {
            NextSets::Done(exchanged) => return Ok(exchanged),
            NextSets::Commit(pending) if !call.has_logs() => Some(pending),
            NextSets::Commit(_) | NextSets::Again => None,
        };
        loop {
            let kind = if call.has_logs() { Kind::FullLog } else { Kind::Plain };
            match self.exchange_sets(call, kind, pending.take(), deadline).await? {
                NextSets::Done(exchanged) => return Ok(exchanged),
                NextSets::Commit(_) if call.has_logs() && call.sets() > 1 => {
                    return Ok(self.ask_one_by_one(call, deadline).await);
                }
                NextSets::Commit(next) => pending = Some(next),
                NextSets::Again => {}
            }
        }
    }

    /// Asks for one set after another: the script decides on logs, and its decision on a set must be known before the next set. After
    /// the deadline, the remaining sets have no answer.
    async fn ask_one_by_one(&self, call: &SetCall<'_>, deadline: Instant) -> Exchanged<SetsEvaluated> {
        let now = Instant::now();
        let memories = vec![Memory::Nothing; call.states.len()];
        let result =
            SetsEvaluated { answers: Vec::new(), undecided: None, memories, now: Timestamp::default() };
        let mut all = Exchanged { result, sent: now, received: now };
        for GroupCall { set, count, states } in &call.groups {
            for _ in 0..*count {
                let one = SetCall::one(set);
                let exchanged = match Box::pin(self.ask_set_states(&one, deadline)).await {
                    Ok(exchanged) => exchanged,
                    Err(why) => {
                        all.result.undecided = Some(why);
                        return all;
                    }
                };
                (all.sent, all.received) = (exchanged.sent, exchanged.received);
                all.result.now = exchanged.result.now;
                for (memory, state) in exchanged.result.memories.into_iter().zip(states) {
                    all.result.memories[*state] = memory;
                }
                all.result.answers.extend(exchanged.result.answers);
            }
        }
        all
    }

    /// One call on sets.
    async fn exchange_sets(
        &self,
        call: &SetCall<'_>,
        kind: Kind,
        pending: Option<PendingSets>,
        deadline: Instant,
    ) -> Result<NextSets, StoreError> {
        // An error names the first key, whichever key it was.
        let first = call.states.first().map(|member| &member.queue_key);
        let key = first.map_or("", |queue_key| &*queue_key.key);
        let computed = pending.as_ref().map(|it| it.compute(call, Outcome::NOW)).transpose();
        let computed = computed.inspect_err(|why| self.count_failure(why))?;
        if let (Some(computed), Some(pending)) = (&computed, &pending)
            && computed.is_final()
        {
            let result = computed.evaluated.clone();
            return Ok(NextSets::Done(Exchanged { result, sent: pending.sent, received: pending.received }));
        }
        // The doubts about the server that answers: each server that is tried has its own.
        let doubts = Mutex::new(Vec::new());
        let say = |to: ServerContext| {
            let doubted: Vec<_> = call.states.iter().map(|it| FailoverGuard::of(&it.limit, to)).collect();
            let command = match (&pending, &computed) {
                (Some(pending), Some(computed)) if pending.doubts == doubted => {
                    let PendingSets { snapshots, now, .. } = pending;
                    protocol::commit_sets(
                        call,
                        (&computed.computed, computed.on_loss.marks()),
                        (snapshots, *now),
                        to,
                    )
                }
                // Another server has taken over.
                (Some(_), _) => protocol::read(call.keys(), to),
                (None, _) => protocol::ask_sets(call, kind, &doubted, to),
            };
            *doubts.lock() = doubted;
            command
        };
        let needs_time = call.states.iter().any(|member| member.limit.needs_time());
        let hash = first.map_or(0, |queue_key| queue_key.hash.low);
        let reply = self.call(key, self.routes.slot(key), (hash, needs_time), deadline, say).await?;
        let (sent, received) = (reply.sent, reply.received);
        let next = Reply::new(&reply.value).and_then(|answer| match (answer, &pending, computed) {
            (Reply::Decided { numbers, .. }, Some(pending), Some(computed)) => {
                let (sent, received) = (pending.sent, pending.received);
                let mut result = computed.evaluated;
                if call.has_logs() {
                    let (mut taken, all) = (numbers, result.answers.first().is_some_and(|it| it.all));
                    if all && taken.next()? == 0 {
                        let log = Outcome::Denied { retry: Micros::ZERO };
                        result = pending.compute(call, log)?.evaluated;
                    }
                    result = with_logs(result, call, numbers)?;
                }
                Ok(NextSets::Done(Exchanged { result, sent, received }))
            }
            (Reply::Decided { now, numbers, .. }, _, _) => {
                let result = evaluate_sets(call, now, numbers)?;
                Ok(NextSets::Done(Exchanged { result, sent, received }))
            }
            (Reply::Rare { .. }, Some(_), Some(SetsComputed { on_loss: OnLoss::AskScript, .. })) => {
                Ok(NextSets::Again)
            }
            (Reply::Rare { now, snapshots }, _, _) => {
                let doubts = doubts.lock().clone();
                Ok(NextSets::Commit(PendingSets { snapshots, doubts, now, sent, received }))
            }
        });
        next.inspect_err(|why| self.count_failure(why))
    }
}

enum NextSets {
    Done(Exchanged<SetsEvaluated>),
    /// Another node was quicker, and the states may be plain by now.
    Again,
    Commit(PendingSets),
}
