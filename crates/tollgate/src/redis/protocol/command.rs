//! Commands for the server.

use redis::Cmd;
use smallvec::SmallVec;
use tollgate_core::{Ask, LeakyMode, Limit, Timestamp};

use super::fields::{Difference, Snapshots};
use super::numbers::Numbers;
use super::scripts::{SCRIPTS, Script, kind};
use super::state::add_parameters;
use super::{Change, FailoverGuard, Question, is_sent, sliding_log};
use crate::backend::LeaseRequest;
use crate::redis::limit::StoredLimit;
use crate::redis::queue::set::{Member, SetCall};
use crate::redis::server::ServerContext;

/// A command, and the script that the server must know for it.
pub(crate) struct Command {
    pub(crate) said: Cmd,
    pub(crate) script: Option<&'static Script>,
    /// Whether it writes. An answer to a write shows that the server decides.
    pub(crate) writes: bool,
}

/// A call of a script: EVALSHA and its keys.
pub(super) fn evalsha<'a>(script: &'static Script, keys: impl ExactSizeIterator<Item = &'a str>) -> Command {
    let mut command = Cmd::with_capacity(16, 256);
    command.arg("EVALSHA").arg(&script.sha).arg(keys.len());
    for key in keys {
        command.arg(key);
    }
    Command { said: command, script: Some(script), writes: true }
}

/// A call of a script on states, with its numbers, and with the time if the script may not read it.
fn on_states<'a>(
    script: &'static Script,
    keys: impl ExactSizeIterator<Item = &'a str>,
    numbers: &Numbers,
    now: Option<Timestamp>,
) -> Command {
    let mut command = evalsha(script, keys);
    command.said.arg(&numbers.0[..]);
    if let Some(now) = now {
        command.said.arg(now.as_micros());
    }
    command
}

impl Numbers {
    /// Adds the parameters of a limit, and the distrust of the server.
    fn add_limit(&mut self, limit: &StoredLimit, doubt: Option<FailoverGuard>, about: Timestamp) {
        match &limit.numbers {
            Some(fixed) => self.0.extend_from_slice(fixed),
            None => add_parameters(self, &limit.limit, about),
        }
        // A log is trusted.
        if !limit.is_log() {
            self.add([doubt.map_or(0, |doubt| doubt.since.as_micros() as i64)]);
        }
    }
}

/// The accepted wait for a script: -1 if none is stated, for a queue.
fn accepted_wait(limit: &Limit, ask: Ask) -> i64 {
    match (ask.wait, limit) {
        (Some(wait), _) => wait.min(limit.horizon()).get() as i64,
        (None, Limit::LeakyBucket(it)) if matches!(it.mode(), LeakyMode::Queue) => -1,
        (None, _) => 0,
    }
}

/// Equal asks in a row: cost, accepted wait, count. A count of 0 only peeks.
type Run = (u64, i64, u64);

/// The runs of questions for a script. Questions that the state alone answers are left out.
fn runs(limit: &Limit, questions: &[Question]) -> SmallVec<[Run; 1]> {
    let mut runs: SmallVec<[Run; 1]> = SmallVec::new();
    for question in questions {
        let (ask, count) = match question {
            Question::Take(ask) | Question::Borrow(ask, _) => (*ask, 1),
            Question::Peek(ask) if matches!(limit, Limit::SlidingLog(_)) => (*ask, 0),
            Question::Peek(_) => continue,
        };
        if !is_sent(limit, ask) {
            continue;
        }
        let wait = accepted_wait(limit, ask);
        match runs.last_mut() {
            Some((cost, known, many)) if (*cost, *known) == (ask.cost, wait) && *many > 0 && count > 0 => {
                *many += 1;
            }
            _ => runs.push((ask.cost, wait, count)),
        }
    }
    runs
}

/// The permits to lend after all questions of a call. At most one question borrows.
pub(crate) fn wanted(questions: &[Question]) -> Option<LeaseRequest> {
    questions.iter().rev().find_map(|question| match question {
        Question::Borrow(_, wanted) => Some(**wanted),
        Question::Take(_) | Question::Peek(_) => None,
    })
}

/// Whether these questions go to the script that lends permits and counts them as out. Unlike a plain script, it also decides while
/// permits are out, but not on requests that wait.
pub(crate) fn is_lending(limit: &StoredLimit, questions: &[Question]) -> bool {
    match wanted(questions) {
        Some(wanted) => wanted.terms.counts_out() && limit.limit.lender().is_some(),
        None => {
            limit.counts_out && questions.iter().all(|it| it.ask().wait.is_none_or(|wait| wait.get() == 0))
        }
    }
}

/// Which states a call decides on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Plain,
    /// Logs in every state.
    FullLog,
}

/// The call that answers questions on one key.
pub(crate) fn ask(
    limit: &StoredLimit,
    (kind, key): (Kind, &str),
    questions: &[Question],
    doubt: Option<FailoverGuard>,
    to: ServerContext,
) -> Command {
    let lends = is_lending(limit, questions);
    let script = match kind {
        _ if lends => SCRIPTS.lending(&limit.limit),
        Kind::Plain => SCRIPTS.of(&limit.limit),
        Kind::FullLog => &SCRIPTS.full_log,
    };
    // Enough for a limit and one run.
    let mut numbers = Numbers(Vec::with_capacity(96));
    numbers.add_limit(limit, doubt, to.about);
    let runs = runs(&limit.limit, questions);
    for (cost, wait, count) in &runs {
        numbers.add([*cost as i64, *wait, *count as i64, 0]);
    }
    if runs.is_empty() && !lends && !(limit.is_log() && kind == Kind::FullLog) {
        numbers.add([1, 0, 0, 0]);
    }
    // No limit has more permits or parts.
    let cut = |number: u64| number.min(1 << 52) as i64;
    match wanted(questions) {
        Some(LeaseRequest { permits, parts, terms }) if lends => {
            numbers.add([cut(permits), cut(parts.max(1)), cut(terms.life().get())]);
        }
        Some(LeaseRequest { permits: permits @ 1.., parts, .. }) => {
            numbers.add([1, 0, cut(permits), cut(parts.max(1))]);
        }
        // Nothing is wanted of the script that lends.
        None if lends => numbers.add([0, 1, 1]),
        Some(_) | None => {}
    }
    on_states(script, [key].into_iter(), &numbers, to.now)
}

/// The script and the last argument that a check sends beside its key and the time.
pub(crate) fn wire(limit: &StoredLimit, ask: Ask) -> (&'static str, Vec<u8>) {
    let mut numbers = Numbers(Vec::new());
    numbers.add_limit(limit, None, Timestamp::default());
    numbers.add([ask.cost as i64, accepted_wait(&limit.limit, ask), 1, 0]);
    (&SCRIPTS.of(&limit.limit).source, numbers.0)
}

/// The call that gives back permits of a plain state, or changes a log.
pub(crate) fn change(
    limit: &StoredLimit,
    key: &str,
    changes: &[Change],
    doubt: Option<FailoverGuard>,
    to: ServerContext,
) -> Command {
    let script = if limit.is_log() { &SCRIPTS.full_log } else { SCRIPTS.of(&limit.limit) };
    let mut numbers = Numbers(Vec::with_capacity(96));
    numbers.add_limit(limit, doubt, to.about);
    // Every algorithm cuts larger costs.
    let size = limit.limit.size();
    for change in changes {
        match change {
            Change::Charge { permits } => numbers.add([(*permits).min(2 * size) as i64, 0, -2, 0]),
            Change::Refund { permits, at } | Change::Return { permits, at, .. } => {
                numbers.add([(*permits).min(size) as i64, at.as_micros() as i64, -1, 0]);
            }
        }
    }
    on_states(script, [key].into_iter(), &numbers, to.now)
}

/// The call that reads states.
pub(crate) fn read<'a>(keys: impl ExactSizeIterator<Item = &'a str>, to: ServerContext) -> Command {
    Command { writes: false, ..on_states(&SCRIPTS.read, keys, &Numbers(Vec::new()), to.now) }
}

/// A computed state.
pub(crate) struct Computed<'a> {
    /// The fields that it was computed from.
    pub(crate) snapshot: &'a [u8],
    /// The fields to write, and the time to live in milliseconds. `None`: the state stays unchanged.
    pub(crate) write: Option<(Difference, u64)>,
    /// How many sets take from it.
    pub(crate) takers: u64,
}

impl Numbers {
    /// Adds a computed state.
    fn add_computed(
        &mut self,
        (marks, enforced): (bool, bool),
        takers: u64,
        snapshot: &[u8],
        write: Option<&(Difference, u64)>,
    ) {
        let (set, removed, ttl) = match write {
            Some((Difference { set, removed }, ttl)) => (&set[..], &removed[..], *ttl as i64),
            None => (&[][..], &[][..], 0),
        };
        self.0.extend_from_slice(&[if marks { 0 } else { 8 }, u8::from(enforced)]);
        self.add([takers as i64, ttl, set.len() as i64]);
        self.add_text(snapshot);
        self.0.extend_from_slice(&(removed.len() as u32).to_be_bytes());
        for text in set.iter().chain(removed) {
            self.add_text(text.as_bytes());
        }
    }

    /// Adds a state that the script decides on.
    fn add_state(&mut self, member: &Member, askers: usize, doubt: Option<FailoverGuard>, about: Timestamp) {
        let (limit, ask) = (member.limit(), member.ask);
        self.0.extend_from_slice(&[kind(limit), u8::from(member.enforced)]);
        self.add_limit(&member.limit, doubt, about);
        self.add([ask.cost as i64, accepted_wait(limit, ask), askers as i64, 0]);
    }

    /// Adds a log, with its snapshot of an instant.
    fn add_log(&mut self, member: &Member, askers: usize, (snapshot, at): (&[u8], Timestamp)) {
        let (limit, ask) = (member.limit(), member.ask);
        self.0.extend_from_slice(&[kind(limit), u8::from(member.enforced)]);
        self.add_text(snapshot);
        if let Limit::SlidingLog(it) = limit {
            sliding_log::parameters(it, self);
        }
        self.add([ask.cost as i64, accepted_wait(limit, ask), askers as i64, 0]);
        self.add([at.as_micros() as i64]);
    }

    /// Whether the sets share a state, and the number of sets and of own states of each group.
    fn of_groups(call: &SetCall<'_>) -> Self {
        let mut numbers = Self(Vec::with_capacity(2 + 8 * call.groups.len() + 128 * call.states.len()));
        let common = usize::from(call.has_shared);
        numbers.0.extend_from_slice(&[common as u8, call.groups.len() as u8]);
        for group in &call.groups {
            for count in [group.count, group.states.len() - common] {
                numbers.0.extend_from_slice(&(count as u32).to_be_bytes());
            }
        }
        numbers
    }
}

/// The call that writes one computed state, if the stored state has not changed.
pub(crate) fn commit(
    key: &str,
    snapshot: &[u8],
    (write, marks): (&(Difference, u64), bool),
    to: ServerContext,
) -> Command {
    // One group of one set with one state.
    let mut numbers = Numbers(vec![0, 1, 0, 0, 0, 1, 0, 0, 0, 1]);
    numbers.add_computed((marks, true), 1, snapshot, Some(write));
    on_states(&SCRIPTS.full_set, [key].into_iter(), &numbers, to.now)
}

/// The call that decides sets of limits: of each all are taken, or none.
pub(crate) fn ask_sets(
    call: &SetCall<'_>,
    kind: Kind,
    doubts: &[Option<FailoverGuard>],
    to: ServerContext,
) -> Command {
    let script = match kind {
        Kind::Plain => &SCRIPTS.set,
        Kind::FullLog => &SCRIPTS.full_set,
    };
    let mut numbers = Numbers::of_groups(call);
    for ((member, doubt), askers) in call.states.iter().zip(doubts).zip(call.askers()) {
        numbers.add_state(member, askers, *doubt, to.about);
    }
    on_states(script, call.keys(), &numbers, to.now)
}

/// The call that writes computed states of an instant. The other states are logs, on which the script decides as of that instant.
pub(crate) fn commit_sets(
    call: &SetCall<'_>,
    (computed, marks): (&[Option<Computed<'_>>], bool),
    (snapshots, at): (&Snapshots, Timestamp),
    to: ServerContext,
) -> Command {
    let mut numbers = Numbers::of_groups(call);
    for (((number, member), computed), askers) in
        call.states.iter().enumerate().zip(computed).zip(call.askers())
    {
        match computed {
            Some(Computed { snapshot, write, takers }) => {
                numbers.add_computed((marks, member.enforced), *takers, snapshot, write.as_ref());
            }
            None => {
                let log = (snapshots.get(number).unwrap_or_default(), at);
                numbers.add_log(member, askers, log);
            }
        }
    }
    on_states(&SCRIPTS.full_set, call.keys(), &numbers, to.now)
}

/// The command that forgets a key.
pub(crate) fn forget(key: &str) -> Command {
    let mut said = Cmd::new();
    said.arg("UNLINK").arg(key);
    Command { said, script: None, writes: true }
}

/// The heartbeat of a node.
pub(crate) fn live(key: &str, node: &str, counts_for_us: i64, now: Option<Timestamp>) -> Command {
    let mut numbers = Numbers(Vec::new());
    numbers.add([counts_for_us]);
    numbers.add_text(node.as_bytes());
    on_states(&SCRIPTS.membership, [key].into_iter(), &numbers, now)
}
