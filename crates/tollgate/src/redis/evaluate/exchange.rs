//! One exchange with a server on the states of keys: mostly one call. Where a state is not plain, the next state is computed here and
//! written by a compare-and-set, again if it has changed meanwhile, all within one deadline.

use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::{Limit, Micros, Outcome, Timestamp};

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

/// A result, and between which instants the server was asked for the state that it is computed from.
pub(in crate::redis) struct Exchanged<T> {
    pub(in crate::redis) result: T,
    pub(in crate::redis) sent: Instant,
    pub(in crate::redis) received: Instant,
}

/// What is done on one state.
pub(in crate::redis) trait Exchange {
    type Result;

    /// The call that does it on a plain state, or on a log in every state, or reads the state.
    fn call(
        &self,
        limit: &StoredLimit,
        key: (Kind, &str),
        doubt: Option<FailoverGuard>,
        to: ServerContext,
    ) -> Command;

    /// The result of that call.
    fn decided(
        &self,
        limit: &StoredLimit,
        admitted: i64,
        now: Timestamp,
        numbers: Reader<'_>,
    ) -> Result<Self::Result, StoreError>;

    /// The result on a state that is not plain, and what has to be written.
    fn compute(
        &self,
        limit: &StoredLimit,
        doubt: Option<FailoverGuard>,
        state: (&str, &[u8]),
        now: Timestamp,
    ) -> Result<Computation<Self::Result>, StoreError>;
}

/// Questions on one key.
pub(in crate::redis) struct Questions<'a>(pub(in crate::redis) &'a [Question]);

impl Exchange for Questions<'_> {
    type Result = Evaluated;

    fn call(
        &self,
        limit: &StoredLimit,
        key: (Kind, &str),
        doubt: Option<FailoverGuard>,
        to: ServerContext,
    ) -> Command {
        protocol::ask(limit, key, self.0, doubt, to)
    }

    fn decided(
        &self,
        limit: &StoredLimit,
        admitted: i64,
        now: Timestamp,
        numbers: Reader<'_>,
    ) -> Result<Evaluated, StoreError> {
        evaluate(limit, self.0, admitted, now, numbers)
    }

    fn compute(
        &self,
        limit: &StoredLimit,
        doubt: Option<FailoverGuard>,
        state: (&str, &[u8]),
        now: Timestamp,
    ) -> Result<Computation<Evaluated>, StoreError> {
        compute(limit, self.0, doubt, state, now)
    }
}

/// Changes of one key: refunds, or one other change. A return that is out of turn says which number it would have.
pub(in crate::redis) struct Changes<'a>(pub(in crate::redis) &'a [Change]);

impl Exchange for Changes<'_> {
    type Result = Option<u64>;

    fn call(
        &self,
        limit: &StoredLimit,
        (_, key): (Kind, &str),
        doubt: Option<FailoverGuard>,
        to: ServerContext,
    ) -> Command {
        let is_log = matches!(limit.limit, Limit::SlidingLog(_));
        if is_log || self.0.iter().all(|change| matches!(change, Change::Refund { .. })) {
            protocol::change(limit, key, self.0, doubt, to)
        } else {
            protocol::read([key].into_iter(), to)
        }
    }

    fn decided(
        &self,
        _: &StoredLimit,
        _: i64,
        _: Timestamp,
        _: Reader<'_>,
    ) -> Result<Option<u64>, StoreError> {
        Ok(None)
    }

    fn compute(
        &self,
        limit: &StoredLimit,
        doubt: Option<FailoverGuard>,
        state: (&str, &[u8]),
        now: Timestamp,
    ) -> Result<Computation<Option<u64>>, StoreError> {
        compute_changes(limit, self.0, doubt, state, now)
    }
}

/// A state that was computed here and is to be written.
struct Pending<T> {
    exchanged: Exchanged<T>,
    snapshots: Snapshots,
    doubt: Option<FailoverGuard>,
    write: Write,
    on_loss: OnLoss,
}

enum Next<T> {
    Done(Exchanged<T>),
    FullLog,
    /// Others were quicker, and the state may be plain by now.
    Again,
    Commit(Pending<T>),
}

impl Inner {
    /// Does something on the state of one key.
    pub(in crate::redis) async fn exchange<E: Exchange>(
        &self,
        limit: &StoredLimit,
        queue_key: &QueueKey,
        exchange: &E,
        deadline: Instant,
    ) -> Result<Exchanged<E::Result>, StoreError> {
        let (slot, is_log) = (self.routes.slot(&queue_key.key), matches!(limit.limit, Limit::SlidingLog(_)));
        // That of the server that has answered: each one that is tried has its own.
        let doubt = Mutex::new(None);
        let mut pending: Option<Pending<E::Result>> = None;
        let mut kind = Kind::Plain;
        loop {
            let say = |to: ServerContext| {
                let doubted = FailoverGuard::of(limit, to);
                *doubt.lock() = doubted;
                match &pending {
                    None => exchange.call(limit, (kind, &queue_key.key), doubted, to),
                    Some(Pending { snapshots, doubt, write, on_loss, .. }) if *doubt == doubted => {
                        let snapshot = snapshots.get(0).unwrap_or_default();
                        protocol::commit(&queue_key.key, snapshot, (write, on_loss.marks()), to)
                    }
                    // Another server has taken over meanwhile.
                    Some(_) => protocol::read([&*queue_key.key].into_iter(), to),
                }
            };
            let needs_time = (queue_key.hash.low, limit.needs_time());
            let reply = self.call(&queue_key.key, slot, needs_time, deadline, say).await?;
            let (sent, received) = (reply.sent, reply.received);
            let next = Reply::new(&reply.value).and_then(|answer| match (answer, pending.take()) {
                (Reply::Decided { .. }, Some(written)) => Ok(Next::Done(written.exchanged)),
                (Reply::Decided { first, now, numbers }, None) => {
                    let result = exchange.decided(limit, first, now, numbers)?;
                    Ok(Next::Done(Exchanged { result, sent, received }))
                }
                (Reply::Rare { .. }, None) if is_log && kind == Kind::Plain => Ok(Next::FullLog),
                (Reply::Rare { .. }, Some(Pending { on_loss: OnLoss::AskScript, .. })) => Ok(Next::Again),
                (Reply::Rare { now, snapshots }, _) => {
                    let doubt = *doubt.lock();
                    let state = (&*queue_key.key, snapshots.get(0)?);
                    let Computation { result, write, on_loss } =
                        exchange.compute(limit, doubt, state, now)?;
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

/// States of sets that were computed here and are to be written.
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
    pub(in crate::redis) async fn ask_set_states(
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

    /// Asks for one set after another: the script decides on logs, and its decision on a set has to be known before the next set. If the
    /// deadline comes first, the sets that are left have no answer.
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
        // An error is told of the first key, whichever of them it was.
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
        // Those of the server that has answered: each one that is tried has its own.
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
                // Another server has taken over meanwhile.
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
    /// Others were quicker, and the states may be plain by now.
    Again,
    Commit(PendingSets),
}
