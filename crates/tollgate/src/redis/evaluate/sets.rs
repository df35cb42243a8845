//! Evaluates sets of limits on the states of their keys: of each set all limits are taken, or none.

use smallvec::SmallVec;
use tollgate_core::algorithm::Algorithm;
use tollgate_core::{Ask, Limit, Outcome, State, Status, Timestamp};

use crate::redis::error::StoreError;
use crate::redis::evaluate::{Found, Memory, OnLoss, decision};
use crate::redis::protocol::{
    Computed, FailoverGuard, Fields, LogView, Reader, Snapshots, Starts, plain_state, write,
};
use crate::redis::queue::set::{CheckSet, GroupCall, SetAnswer, SetCall};

/// The answers of a call on sets.
#[derive(Clone)]
pub(crate) struct SetsEvaluated {
    /// One for each set: those of the first group, then those of the next.
    pub(crate) answers: Vec<SetAnswer>,
    /// Why there are fewer answers than sets, if there are.
    pub(crate) undecided: Option<StoreError>,
    /// The knowledge from which later requests can be denied, by state.
    pub(crate) memories: Vec<Memory>,
    /// The server's time.
    pub(crate) now: Timestamp,
}

/// Evaluates sets on the states that a script has answered with.
pub(crate) fn evaluate_sets(
    call: &SetCall<'_>,
    now: Timestamp,
    mut numbers: Reader<'_>,
) -> Result<SetsEvaluated, StoreError> {
    let mut taken = numbers.split(call.groups.len())?;
    let states = call.states.iter().map(|member| {
        let limit = member.limit();
        if let Limit::SlidingLog(_) = limit {
            return Evaluating::log(limit, &mut numbers);
        }
        Ok(Evaluating::state(limit, plain_state(limit, false, &mut numbers)?))
    });
    let mut states = states.collect::<Result<Vec<_>, _>>()?;
    let (answers, _) = evaluate_groups(call, &mut states, now, Some(&mut taken))?;
    let memories = states.into_iter().map(Evaluating::into_memory).collect();
    Ok(SetsEvaluated { answers, undecided: None, memories, now })
}

/// Sets that were evaluated here, and the states that have to be written.
pub(crate) struct SetsComputed<'a> {
    pub(crate) evaluated: SetsEvaluated,
    /// By state. `None` for a log, on which the script decides.
    pub(crate) computed: Vec<Option<Computed<'a>>>,
    pub(crate) on_loss: OnLoss,
}

impl SetsComputed<'_> {
    /// Whether there is nothing to write, and nothing for the script to decide.
    pub(crate) fn is_final(&self) -> bool {
        self.computed.iter().all(|it| it.as_ref().is_some_and(|it| it.write.is_none()))
    }
}

/// Evaluates sets on states that are not plain. The outcome `log` is assumed for logs: a call with logs has one set, on which the script
/// decides.
pub(crate) fn compute_sets<'a>(
    call: &SetCall<'_>,
    doubts: &[Option<FailoverGuard>],
    snapshots: &'a Snapshots,
    now: Timestamp,
    log: Outcome,
) -> Result<SetsComputed<'a>, StoreError> {
    let mut found: Vec<Option<(Fields<'_>, Found)>> = Vec::with_capacity(call.states.len());
    let mut states = Vec::with_capacity(call.states.len());
    for ((number, member), doubt) in call.states.iter().enumerate().zip(doubts) {
        let limit = member.limit();
        if let Limit::SlidingLog(_) = limit {
            found.push(None);
            states.push(Evaluating::Assumed { limit, outcome: log });
            continue;
        }
        let fields = Fields::parse(snapshots.get(number)?)?;
        let state = Found::new(&member.limit, &member.queue_key.key, &fields, *doubt, now)?;
        states.push(Evaluating::state(limit, state.state.clone()));
        found.push(Some((fields, state)));
    }
    let waits = call.states.iter().any(|member| member.ask.wait.is_some());
    let worst = found.iter().flatten().map(|(_, found)| found.on_loss).max().unwrap_or(OnLoss::AskScript);
    let on_loss = if waits { OnLoss::MarkAndCompute } else { worst };
    let (answers, takers) = evaluate_groups(call, &mut states, now, None)?;
    let memories: Vec<_> = states.into_iter().map(Evaluating::into_memory).collect();
    let mut computed = Vec::with_capacity(found.len());
    for (number, found) in found.into_iter().enumerate() {
        let (Some((fields, found)), Memory::State(state)) = (found, &memories[number]) else {
            computed.push(None);
            continue;
        };
        let is_written = found.state != *state || found.is_converted && is_decided(call, number, &answers);
        let write = is_written.then(|| write(&call.states[number].limit, state, &fields, now));
        computed.push(Some(Computed { snapshot: snapshots.get(number)?, write, takers: takers[number] }));
    }
    Ok(SetsComputed {
        evaluated: SetsEvaluated { answers, undecided: None, memories, now },
        computed,
        on_loss,
    })
}

/// Whether a state was taken from, or has denied: a state that was converted is kept then.
fn is_decided(call: &SetCall<'_>, state: usize, answers: &[SetAnswer]) -> bool {
    let mut answers = answers.iter();
    call.groups.iter().any(|group| {
        let place = group.states.iter().position(|number| *number == state);
        let answers: Vec<_> = answers.by_ref().take(group.count).collect();
        place.is_some_and(|place| {
            answers.iter().any(|it| it.all || it.decisions[place].is_some_and(|it| !it.is_admitted()))
        })
    })
}

/// Evaluates all sets in order. Returns also how many take from each state. `taken` is the number of admitted sets of each group, from a
/// script.
fn evaluate_groups(
    call: &SetCall<'_>,
    states: &mut [Evaluating<'_, '_>],
    now: Timestamp,
    mut taken: Option<&mut Reader<'_>>,
) -> Result<(Vec<SetAnswer>, Vec<u64>), StoreError> {
    let mut answers = Vec::new();
    let mut takers = vec![0; states.len()];
    for GroupCall { set, count, states: numbers } in &call.groups {
        let mut admitted = 0;
        for _ in 0..*count {
            let answer = evaluate_set(set, numbers, states, now)?;
            admitted += i64::from(answer.all);
            for (number, decision) in numbers.iter().zip(&answer.decisions) {
                takers[*number] += u64::from(answer.all && decision.is_some_and(|it| it.is_admitted()));
            }
            answers.push(answer);
        }
        let told = taken.as_mut().map_or(Ok(admitted), |taken| taken.next())?;
        if told != admitted {
            return Err(StoreError::protocol(format_args!(
                "the script took {told} sets, its states say {admitted}"
            )));
        }
    }
    Ok((answers, takers))
}

/// Evaluates one set.
fn evaluate_set(
    set: &CheckSet,
    numbers: &[usize],
    states: &mut [Evaluating<'_, '_>],
    now: Timestamp,
) -> Result<SetAnswer, StoreError> {
    let mut outcomes: SmallVec<[Outcome; 4]> = SmallVec::new();
    for (member, number) in set.members.iter().zip(numbers) {
        outcomes.push(states[*number].look(member.ask, now)?);
    }
    let all =
        set.members.iter().zip(&outcomes).all(|(member, outcome)| !member.enforced || outcome.is_admitted());
    let members = set.members.iter().zip(numbers).zip(outcomes);
    let decisions = members.map(|((member, number), outcome)| {
        let state = &mut states[*number];
        // A limit that denies by itself may count the denial.
        if all || !outcome.is_admitted() {
            state.take(member.ask, outcome, now);
        }
        Some(decision(member.limit(), outcome, state.status(now), now))
    });
    Ok(SetAnswer { all, decisions: decisions.collect() })
}

/// A state that sets are evaluated on.
enum Evaluating<'a, 'n> {
    /// `next` is the state after the last ask that was looked at.
    State {
        limit: &'a Limit,
        state: State,
        next: Option<State>,
    },
    Log {
        limit: &'a Limit,
        log: LogEvaluating<'n>,
    },
    /// A log on which a script decides later.
    Assumed {
        limit: &'a Limit,
        outcome: Outcome,
    },
}

struct LogEvaluating<'n> {
    view: LogView,
    starts: Starts,
    numbers: Reader<'n>,
    /// The start of the next ask, if it was peeked at and not taken.
    ahead: Option<i64>,
    memory: Memory,
}

impl<'a, 'n> Evaluating<'a, 'n> {
    const fn state(limit: &'a Limit, state: State) -> Self {
        Self::State { limit, state, next: None }
    }

    fn log(limit: &'a Limit, numbers: &mut Reader<'n>) -> Result<Self, StoreError> {
        let (view, starts, numbers) = LogView::read(numbers)?;
        let log = LogEvaluating { view, starts, numbers, ahead: None, memory: Memory::Nothing };
        Ok(Self::Log { limit, log })
    }

    /// The outcome of the next ask.
    fn look(&mut self, ask: Ask, now: Timestamp) -> Result<Outcome, StoreError> {
        match self {
            Self::State { limit, state, next } => {
                let mut after = state.clone();
                let outcome = limit.decide(&mut after, now, ask);
                *next = Some(after);
                Ok(outcome)
            }
            Self::Log { limit, log } => {
                let start = match log.ahead {
                    Some(start) => start,
                    None => log.starts.next(&mut log.numbers)?,
                };
                log.ahead = Some(start);
                Ok(log.view.outcome(limit, ask, start, now))
            }
            Self::Assumed { outcome, .. } => Ok(*outcome),
        }
    }

    /// Takes the permits of the ask that was looked at.
    fn take(&mut self, ask: Ask, outcome: Outcome, now: Timestamp) {
        match self {
            Self::State { state, next, .. } => {
                if let Some(after) = next.take() {
                    *state = after;
                }
            }
            Self::Log { limit, log } => {
                let start = log.ahead.take().unwrap_or_default();
                let charged = log.view.take(limit, ask, outcome, start);
                let decided = decision(limit, outcome, log.view.status(limit, now), now);
                log.memory = Memory::of_log(ask, decided, charged);
            }
            Self::Assumed { .. } => {}
        }
    }

    fn status(&self, now: Timestamp) -> Status {
        match self {
            Self::State { limit, state, .. } => limit.status(state, now),
            Self::Log { limit, log } => log.view.status(limit, now),
            Self::Assumed { limit, .. } => limit.status(&limit.fresh(now), now),
        }
    }

    fn into_memory(self) -> Memory {
        match self {
            Self::State { state, .. } => Memory::State(state),
            Self::Log { log, .. } => log.memory,
            Self::Assumed { .. } => Memory::Nothing,
        }
    }
}

/// The answer to one set with logs, on which the script has decided: the computed states, and the answers of the logs.
pub(crate) fn with_logs(
    computed: SetsEvaluated,
    call: &SetCall<'_>,
    mut numbers: Reader<'_>,
) -> Result<SetsEvaluated, StoreError> {
    let taken = numbers.next()? > 0;
    let SetsEvaluated { mut answers, mut memories, now, .. } = computed;
    let Some(answer) = answers.first_mut() else {
        return Err(StoreError::protocol("a set without an answer"));
    };
    for (number, member) in call.states.iter().enumerate() {
        let limit @ Limit::SlidingLog(_) = member.limit() else { continue };
        let mut log = Evaluating::log(limit, &mut numbers)?;
        let outcome = log.look(member.ask, now)?;
        if taken || !outcome.is_admitted() {
            log.take(member.ask, outcome, now);
        }
        answer.decisions[number] = Some(decision(limit, outcome, log.status(now), now));
        memories[number] = log.into_memory();
    }
    answer.all = taken;
    Ok(SetsEvaluated { answers, undecided: None, memories, now })
}
