//! The scripts, and what is said to them.

use std::sync::LazyLock;

use redis::Cmd;
use smallvec::SmallVec;
use tollgate_core::{Ask, Calendar, LeakyMode, Limit, Micros, Period, Retention, Timestamp, TokenBucket};

use super::LogStorage;
use super::control::{ASSIGNED_MAX, AssignedTier, Version};
use super::limit::StoredLimit;
use super::node::Bearings;
use super::set::SetCall;
use crate::backend::Wanted;

/// A script by its text and by the name under which servers keep it.
pub(super) struct Script {
    pub(super) source: String,
    pub(super) sha: String,
}

/// One script for each home of states, and one for several limits at once.
pub(super) struct Scripts {
    single: [Script; BODIES.len()],
    pub(super) several: Script,
    /// Finds out whether scripts may read the time and then write.
    pub(super) probe: Script,
    /// Says that a node lives.
    pub(super) presence: Script,
    /// Passes on what all nodes go by.
    control: Script,
}

pub(super) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(Scripts::compose);

const PRELUDE: &str = include_str!("lua/prelude.lua");
const TOKENS: &str = "local AMOUNT, DATED, WATER = 'tokens', 'last_refill', false\n";
const WATER: &str = "local AMOUNT, DATED, WATER = 'level', 'last_leak', true\n";
const BUCKET: &str = include_str!("lua/bucket.lua");
/// What both ways of keeping a log do, before and behind the text that reads and writes one.
const LOG_HEAD: &str = include_str!("lua/log_head.lua");
const LOG: &str = include_str!("lua/log.lua");
/// By [`home`]: a name, and the texts that make up the script.
const BODIES: [(&str, &[&str]); 8] = [
    ("token_bucket", &[TOKENS, BUCKET]),
    ("interval_bucket", &[include_str!("lua/interval_bucket.lua")]),
    ("leaky_bucket", &[WATER, BUCKET]),
    ("fixed_window", &[include_str!("lua/fixed_window.lua")]),
    ("sliding_log", &[LOG_HEAD, include_str!("lua/sliding_log.lua"), LOG]),
    ("sliding_counter", &[include_str!("lua/sliding_counter.lua")]),
    ("sliding_log_packed", &[LOG_HEAD, include_str!("lua/sliding_log_packed.lua"), LOG]),
    ("calendar_quota", &[include_str!("lua/calendar_quota.lua")]),
];
const SEVERAL_HEAD: &str = include_str!("lua/several_head.lua");
const SEVERAL: &str = include_str!("lua/several.lua");
const PRESENCE: &str = include_str!("lua/presence.lua");
const CONTROL: &str = include_str!("lua/control.lua");
const PROBE: &str = "redis.call('TIME') return redis.call('PEXPIRE', 'rate_limiter:probe', 1)";

/// Where in [`BODIES`] the script of a limit is.
const fn home(limit: &Limit, logs: LogStorage) -> usize {
    match (limit, logs) {
        (Limit::TokenBucket(_), _) => 0,
        (Limit::IntervalBucket(_), _) => 1,
        (Limit::LeakyBucket(_), _) => 2,
        (Limit::FixedWindow(_), _) => 3,
        (Limit::SlidingLog(_), LogStorage::SortedSet) => 4,
        (Limit::SlidingCounter(_), _) => 5,
        (Limit::SlidingLog(_), LogStorage::Packed) => 6,
        (Limit::CalendarQuota(_), _) => 7,
    }
}

impl Scripts {
    fn compose() -> Self {
        let script = |source: String| {
            let sha = redis::Script::new(&source).get_hash().to_owned();
            Script { source, sha }
        };
        let single = BODIES.map(|(_, texts)| script(format!("{PRELUDE}{}", texts.concat())));
        let mut several = format!("{PRELUDE}{SEVERAL_HEAD}local algorithms = {{}}\n");
        for (name, texts) in BODIES {
            several += &format!("algorithms.{name} = function(KEYS, ARGV)\n{}end\n", texts.concat());
        }
        Self {
            single,
            several: script(several + SEVERAL),
            probe: script(PROBE.to_owned()),
            presence: script(PRESENCE.to_owned()),
            control: script(CONTROL.to_owned()),
        }
    }

    /// The script that decides on one limit.
    pub(super) fn of(&self, limit: &Limit, logs: LogStorage) -> &Script {
        &self.single[home(limit, logs)]
    }

    /// All but the probe: what a server must know before it is asked.
    pub(super) fn all(&self) -> impl Iterator<Item = &Script> {
        self.single.iter().chain([&self.several, &self.presence, &self.control])
    }
}

/// A question that a call answers. Kept small: thousands may wait.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Question {
    /// Takes permits.
    Take(Ask),
    /// The same without taking them.
    Peek(Ask),
    /// Takes permits, and borrows others.
    Borrow(Ask, Box<Wanted>),
}

impl Question {
    pub(super) const fn ask(&self) -> Ask {
        let (Self::Take(ask) | Self::Peek(ask) | Self::Borrow(ask, _)) = self;
        *ask
    }

    /// Whether it takes permits.
    pub(super) const fn takes(&self) -> bool {
        !matches!(self, Self::Peek(_))
    }
}

/// A change that asks nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    Refund {
        permits: u64,
        at: Timestamp,
    },
    Charge {
        permits: u64,
    },
    /// What was lent and not spent. It counts once, as return number `number`.
    Return {
        permits: u64,
        at: Timestamp,
        number: u64,
        /// Whether it was counted as out.
        counted: bool,
    },
}

/// What is not believed of a key: what was written before a server took over may be lost, leases of some life among it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Doubt {
    pub(super) since: Timestamp,
    pub(super) life: Micros,
}

impl Doubt {
    /// What is not believed of the keys of a server, for a limit that wants to know.
    pub(super) fn of(limit: &StoredLimit, server: Bearings) -> Option<Self> {
        let life = limit.distrust?;
        // The sub-bucket of a counter without others counts until two windows later.
        let matters = limit.limit.horizon().get().saturating_mul(2).saturating_add(life.get());
        let since = server.takeover?.within(Micros::new(matters))?;
        Some(Self { since, life })
    }

    fn numbers(self) -> Vec<u8> {
        let mut numbers = Numbers(Vec::with_capacity(16));
        numbers.add([self.since.as_micros() as i64, self.life.get().min(1 << 52) as i64]);
        numbers.0
    }
}

/// Equal questions in a row. A run of none only looks.
struct Run {
    cost: u64,
    wait: i64,
    count: u64,
}

/// What a script is asked for: questions in runs, leaving out those whose answer needs nothing but the state.
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
            Some(run) if run.cost == ask.cost && run.wait == wait && run.count > 0 && count > 0 => {
                run.count += 1
            }
            _ => runs.push(Run { cost: ask.cost, wait, count }),
        }
    }
    runs
}

/// The wait that a script is told: -1 for none stated, where that makes a difference.
const fn accepted_wait(limit: &Limit, ask: Ask) -> i64 {
    match (ask.wait, limit) {
        (Some(wait), _) => {
            let (wait, horizon) = (wait.get(), limit.horizon().get());
            (if wait < horizon { wait } else { horizon }) as i64
        }
        (None, Limit::LeakyBucket(it)) if matches!(it.mode(), LeakyMode::Queue) => -1,
        (None, _) => 0,
    }
}

/// Costs of nothing are always admitted, and those above the limit's size never.
pub(super) const fn is_sent(limit: &Limit, ask: Ask) -> bool {
    ask.cost > 0 && ask.cost <= limit.size()
}

/// Adds what the script must know of a limit, at a server whose clock shows about this.
fn add_parameters(numbers: &mut Numbers, limit: &Limit, about: Timestamp) {
    let of_bucket = |it: &TokenBucket| [it.tick(), it.unit(), it.flow(), it.capacity()].map(|n| n as i64);
    match limit {
        Limit::TokenBucket(it) => {
            numbers.add(of_bucket(it));
            numbers.add([0]);
        }
        Limit::LeakyBucket(it) => {
            numbers.add(of_bucket(it.room()));
            numbers.add([i64::from(it.mode() == LeakyMode::Queue)]);
        }
        Limit::IntervalBucket(it) => numbers.add([it.capacity(), it.refill(), it.period()].map(|n| n as i64)),
        Limit::FixedWindow(it) => {
            numbers.add([it.limit() as i64, it.window().get() as i64, i64::from(it.counts_denied())]);
        }
        Limit::SlidingLog(it) => {
            numbers.add([it.limit() as i64, it.window().get() as i64, i64::from(it.counts_denied())]);
            let (lapsing, until) = it.lapsing().unwrap_or_default();
            for Retention { time, entries } in [it.retention(), lapsing] {
                numbers.add([time.max(it.window()).get() as i64, entries.min(1 << 52) as i64]);
            }
            numbers.add([until.as_micros() as i64]);
        }
        Limit::SlidingCounter(it) => {
            let tick = if it.is_strict() { 0 } else { it.tick() as i64 };
            let length = it.window().get() / u64::from(it.sub_buckets());
            numbers.add([it.limit() as i64, i64::from(it.sub_buckets()), length as i64, tick]);
            numbers.add([i64::from(it.counts_denied())]);
        }
        Limit::CalendarQuota(it) => {
            numbers.add([it.limit() as i64, it.horizon().get() as i64]);
            numbers.add(periods_around(it.calendar(), about).map(|instant| instant.as_micros() as i64));
        }
    }
}

/// When the periods begin around an instant: the server reads its own clock, which may be a little further.
fn periods_around(calendar: &Calendar, about: Timestamp) -> [Timestamp; 6] {
    let before = |instant: Timestamp| {
        let just_before = Timestamp::from_micros(instant.as_micros().saturating_sub(1));
        calendar.period_at(just_before).start
    };
    let Period { start, end } = calendar.period_at(about);
    let (last, next) = (before(start), calendar.period_at(end).end);
    [before(last), last, start, end, next, calendar.period_at(next).end]
}

/// Numbers as scripts take them.
struct Numbers(Vec<u8>);

/// The numbers of a limit that are the same in every call. Those of a calendar depend on the time.
pub(super) fn fixed_numbers(limit: &Limit) -> Option<Box<[u8]>> {
    if let Limit::CalendarQuota(_) = limit {
        return None;
    }
    let mut numbers = Numbers(Vec::new());
    add_parameters(&mut numbers, limit, Timestamp::default());
    Some(numbers.0.into())
}

impl Numbers {
    fn of(limit: &StoredLimit, about: Timestamp) -> Self {
        // Enough for a limit and one run.
        let mut numbers = Self(Vec::with_capacity(96));
        match &limit.numbers {
            Some(fixed) => numbers.0.extend_from_slice(fixed),
            None => add_parameters(&mut numbers, &limit.limit, about),
        }
        numbers
    }

    fn add<const N: usize>(&mut self, numbers: [i64; N]) {
        for number in numbers {
            self.0.extend_from_slice(&number.to_be_bytes());
        }
    }

    fn add_run(&mut self, run: &Run) {
        self.add([run.cost as i64, run.wait, run.count as i64]);
    }
}

/// A command, and the script that the server must know for it.
pub(super) struct Command {
    pub(super) said: Cmd,
    pub(super) script: Option<&'static Script>,
    /// Whether it writes: an answer to one that does shows that the server decides.
    pub(super) writes: bool,
}

/// The command that forgets a key.
pub(super) fn forget(key: &str) -> Command {
    let mut said = Cmd::new();
    said.arg("UNLINK").arg(key);
    Command { said, script: None, writes: true }
}

/// The call that says that a node lives.
pub(super) fn live(key: &str, node: &str, counts_for_us: u64, now: Option<Timestamp>) -> Command {
    let mut command = evalsha(&SCRIPTS.presence, &[key], now);
    command.said.arg(node).arg(counts_for_us);
    command
}

/// What is said to all nodes, or asked.
pub(super) enum Order<'a> {
    /// What is there that a node who knows these versions does not?
    Poll { policy: &'a Version, tiers: &'a Version },
    /// A policy, or none, from a node that knows this number.
    Push { known: u64, epoch: &'a str, text: &'a str },
    /// A policy that the store has lost.
    Keep { version: &'a Version, text: &'a str },
    /// A tier, from a node that knows this number.
    Assign { known: u64, epoch: &'a str, tier: &'a AssignedTier },
    /// Some of the tiers that the store has lost, gathered under `place`; with the last of them, how many there are.
    Restore { version: &'a Version, place: &'a str, members: Option<usize>, tiers: &'a [AssignedTier] },
}

/// Unfinished tiers are kept for so long after the last part: their node may be gone.
const UNFINISHED_KEPT_MS: u64 = 60_000;

/// The call that passes on what all nodes go by.
pub(super) fn control(keys: &[String; 2], order: &Order<'_>, now: Option<Timestamp>) -> Command {
    let mut names = vec![keys[0].as_str(), keys[1].as_str()];
    if let Order::Restore { place, .. } = order {
        names.push(place);
    }
    let mut command = evalsha(&SCRIPTS.control, &names, now);
    command.writes = !matches!(order, Order::Poll { .. });
    let said = &mut command.said;
    match order {
        Order::Poll { policy, tiers } => {
            said.arg("poll").arg(policy.number).arg(&policy.epoch).arg(tiers.number).arg(&tiers.epoch);
        }
        Order::Push { known, epoch, text } => {
            said.arg("push").arg(known).arg(epoch).arg(text);
        }
        Order::Keep { version, text } => {
            said.arg("keep").arg(version.number).arg(&version.epoch).arg(text);
        }
        Order::Assign { known, epoch, tier: AssignedTier { family, member, tier } } => {
            said.arg("assign").arg(known).arg(epoch).arg(family).arg(member).arg(tier).arg(ASSIGNED_MAX);
        }
        Order::Restore { version, members, tiers, .. } => {
            said.arg("restore").arg(version.number).arg(&version.epoch);
            said.arg(members.map(|count| count.to_string()).unwrap_or_default()).arg(UNFINISHED_KEPT_MS);
            for AssignedTier { family, member, tier } in *tiers {
                said.arg(format!("t {family} {member}")).arg(tier);
            }
        }
    }
    command
}

/// A call of a script: EVALSHA, its keys, and the time if it is not to read its own.
fn evalsha(script: &'static Script, keys: &[&str], now: Option<Timestamp>) -> Command {
    let mut command = Cmd::with_capacity(16, 256);
    command.arg("EVALSHA").arg(&script.sha).arg(keys.len());
    for key in keys {
        command.arg(*key);
    }
    match now {
        Some(now) => command.arg(now.as_micros()),
        None => command.arg(""),
    };
    Command { said: command, script: Some(script), writes: true }
}

/// The call that answers questions on one key.
pub(super) fn ask(
    stored: &StoredLimit,
    logs: LogStorage,
    key: &str,
    questions: &[Question],
    doubt: Option<Doubt>,
    to: Bearings,
) -> Command {
    let limit = &stored.limit;
    let mut command = evalsha(SCRIPTS.of(limit, logs), &[key], to.now);
    let mut numbers = Numbers::of(stored, to.about);
    for run in &runs(limit, questions) {
        numbers.add_run(run);
    }
    command.said.arg("ask").arg(numbers.0).arg(&*stored.parameters);
    if let Some(wanted) = wanted(questions) {
        let life = if wanted.terms.counts_out() { wanted.terms.life().get() } else { 0 };
        let mut numbers = Numbers(Vec::with_capacity(24));
        // Nobody has more permits to lend, and nobody cuts them into more parts.
        numbers.add([wanted.permits, wanted.parts, life].map(|number| number.min(1 << 52) as i64));
        command.said.arg(numbers.0);
    } else if doubt.is_some() {
        command.said.arg("");
    }
    if let Some(doubt) = doubt {
        command.said.arg(doubt.numbers());
    }
    command
}

/// What is to be lent after all questions of a call: at most one of them borrows.
pub(super) fn wanted(questions: &[Question]) -> Option<Wanted> {
    questions.iter().rev().find_map(|question| match question {
        Question::Borrow(_, wanted) => Some(**wanted),
        Question::Take(_) | Question::Peek(_) => None,
    })
}

/// The call that makes a change on one key.
pub(super) fn change(
    stored: &StoredLimit,
    logs: LogStorage,
    key: &str,
    change: Change,
    doubt: Option<Doubt>,
    to: Bearings,
) -> Command {
    let (limit, under) = (&stored.limit, &*stored.parameters);
    let mut command = evalsha(SCRIPTS.of(limit, logs), &[key], to.now);
    let mut numbers = Numbers::of(stored, to.about);
    // Larger costs say no more: every algorithm cuts them to twice its size, at most 2^52.
    let cut = |permits: u64| permits.min(1 << 52) as i64;
    match change {
        Change::Refund { permits, at } => {
            numbers.add([cut(permits), at.as_micros() as i64]);
            command.said.arg("refund").arg(numbers.0).arg(under).arg("");
        }
        Change::Charge { permits } => {
            numbers.add([cut(permits)]);
            command.said.arg("charge").arg(numbers.0).arg(under).arg("");
        }
        Change::Return { permits, at, number, counted } => {
            numbers.add([cut(permits), at.as_micros() as i64, i64::from(counted)]);
            command.said.arg("return").arg(numbers.0).arg(under).arg(number);
        }
    }
    if let Some(doubt) = doubt {
        command.said.arg(doubt.numbers());
    }
    command
}

/// The call that decides sets of limits: of each all are taken, or none.
pub(super) fn ask_sets(
    call: &SetCall<'_>,
    doubts: &[Option<Doubt>],
    logs: LogStorage,
    to: Bearings,
) -> Command {
    let keys: SmallVec<[&str; 8]> = call.states.iter().map(|member| &*member.line.key).collect();
    let mut command = evalsha(&SCRIPTS.several, &keys, to.now);
    let mut sizes = Numbers(Vec::with_capacity(8 + 16 * call.groups.len()));
    sizes.add([i64::from(call.has_shared)]);
    for group in &call.groups {
        let own = group.states.len() - usize::from(call.has_shared);
        sizes.add([group.count as i64, own as i64]);
    }
    command.said.arg(sizes.0);
    // How many sets ask for each state: those of its group, or all of them for the one that they have in common.
    let mut askers: SmallVec<[usize; 8]> = SmallVec::from_elem(0, call.states.len());
    for group in &call.groups {
        group.states.iter().for_each(|state| askers[*state] += group.count);
    }
    for ((member, doubt), askers) in call.states.iter().zip(doubts).zip(askers) {
        let (limit, ask) = (member.limit(), member.ask);
        let mut numbers = Numbers::of(&member.limit, to.about);
        numbers.add([ask.cost as i64, accepted_wait(limit, ask), askers as i64]);
        command.said.arg(BODIES[home(limit, logs)].0).arg(u8::from(member.enforced));
        command.said.arg(numbers.0).arg(&*member.limit.parameters);
        command.said.arg(doubt.map(Doubt::numbers).unwrap_or_default());
    }
    command
}
