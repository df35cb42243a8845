//! What the answers of scripts mean.
//!
//! A script decides and writes; it answers with the state as it was. Whoever has that state and the time knows the answer to
//! every question of the call, by the same arithmetic in Rust: the questions are played through it here.

use std::borrow::Cow;

use redis::Value;
use smallvec::SmallVec;
use tollgate_core::algorithm::{
    Algorithm, BucketState, CalendarState, CounterState, IntervalState, LeaseState, WindowState,
};
use tollgate_core::{
    Ask, Decision, Grant, LeakyMode, Limit, Micros, Outcome, Over, SlidingCounter, Standing, State,
    Timestamp, TokenBucket,
};

use super::answer::Answer;
use super::error::StoreError;
use super::limit::StoredLimit;
use super::script::{Doubt, Question, is_sent, wanted};
use super::set::{CheckSet, GroupCall, SetAnswer, SetCall};
use crate::backend::Wanted;

/// What a call told.
pub(super) struct Told {
    /// One for each question, in order.
    pub(super) decisions: SmallVec<[Decision; 1]>,
    /// What was lent to the one that borrows.
    pub(super) grant: Option<Grant>,
    /// What can be known of later denials.
    pub(super) memory: Memory,
    /// The server's time.
    pub(super) now: Timestamp,
}

/// What is known of a key after a call.
#[derive(Clone, Debug)]
pub(super) enum Memory {
    /// All of it.
    State(State),
    /// A log stays where it is: only that this was denied.
    Denied(Ask, Decision),
    /// A log that denied nothing.
    Nothing,
}

/// Plays questions through the state that a script has answered with.
pub(super) fn replay(
    stored: &StoredLimit,
    questions: &[Question],
    doubt: Option<Doubt>,
    answer: Value,
) -> Result<Told, StoreError> {
    let limit = &stored.limit;
    let mut answer = Answer::new(&answer)?;
    let (admitted, now) = (answer.number()?, Timestamp::from_micros(answer.number()? as u64));
    let (told, taken) = match limit {
        Limit::SlidingLog(_) => replay_log(limit, questions, &mut answer, now)?,
        Limit::TokenBucket(_)
        | Limit::IntervalBucket(_)
        | Limit::LeakyBucket(_)
        | Limit::FixedWindow(_)
        | Limit::SlidingCounter(_)
        | Limit::CalendarQuota(_) => {
            let mut state = believed_state(stored, &mut answer, now, doubt)?;
            let mut decisions = SmallVec::with_capacity(questions.len());
            let mut taken = 0;
            for question in questions {
                let ask = question.ask();
                let outcome = match question.takes() {
                    true => {
                        let outcome = limit.decide(&mut state, now, ask);
                        taken += i64::from(is_sent(limit, ask) && outcome.is_admitted());
                        outcome
                    }
                    false => limit.peek(&state, now, ask),
                };
                decisions.push(decision(limit, outcome, limit.standing(&state, now), now));
            }
            let grant = wanted(questions).map(|Wanted { permits, parts, terms }| {
                let grant = terms.lend(limit, &mut state, now, permits, parts);
                taken += grant.permits as i64;
                grant
            });
            (Told { decisions, grant, memory: Memory::State(state), now }, taken)
        }
    };
    if taken != admitted {
        return Err(StoreError::protocol(format_args!(
            "the script admitted {admitted}, its state says {taken}"
        )));
    }
    Ok(told)
}

/// What a call on sets told.
pub(super) struct SetsTold {
    /// One for each set: those of the first group, then those of the next.
    pub(super) answers: Vec<SetAnswer>,
    /// What can be known of later denials, by state.
    pub(super) memories: Vec<Memory>,
    /// The server's time.
    pub(super) now: Timestamp,
}

/// Plays sets through the states that a script has answered with.
pub(super) fn replay_sets(
    call: &SetCall<'_>,
    doubts: &[Option<Doubt>],
    answer: Value,
) -> Result<SetsTold, StoreError> {
    let mut answer = Answer::new(&answer)?;
    let mut taken = answer.list()?;
    let mut now = Timestamp::default();
    let mut states = Vec::with_capacity(call.states.len());
    for (member, doubt) in call.states.iter().zip(doubts) {
        let state = answer.in_list(|answer| {
            (_, now) = (answer.number()?, Timestamp::from_micros(answer.number()? as u64));
            Played::new(&member.limit, *doubt, answer, now)
        });
        states.push(state?);
    }
    let mut answers = Vec::new();
    for GroupCall { set, count, states: numbers } in &call.groups {
        let mut admitted = 0;
        for _ in 0..*count {
            let all = play_set(set, numbers, &mut states, now, &mut answers)?;
            admitted += i64::from(all);
        }
        let told = taken.number()?;
        if told != admitted {
            return Err(StoreError::protocol(format_args!(
                "the script took {told} sets, its states say {admitted}"
            )));
        }
    }
    Ok(SetsTold { answers, memories: states.into_iter().map(Played::into_memory).collect(), now })
}

/// Plays one set, and says whether it is taken.
fn play_set(
    set: &CheckSet,
    numbers: &[usize],
    states: &mut [Played<'_>],
    now: Timestamp,
    answers: &mut Vec<SetAnswer>,
) -> Result<bool, StoreError> {
    let mut outcomes: SmallVec<[Outcome; 4]> = SmallVec::new();
    for (member, number) in set.members.iter().zip(numbers) {
        outcomes.push(states[*number].look(member.ask, now)?);
    }
    let all =
        set.members.iter().zip(&outcomes).all(|(member, outcome)| !member.enforced || outcome.is_admitted());
    let members = set.members.iter().zip(numbers).zip(outcomes);
    let decisions = members.map(|((member, number), outcome)| {
        let state = &mut states[*number];
        // A limit that denies by itself may keep what a denial keeps.
        if all || !outcome.is_admitted() {
            state.take(member.ask, outcome, now);
        }
        Some(decision(member.limit(), outcome, state.standing(now), now))
    });
    answers.push(SetAnswer { all, decisions: decisions.collect() });
    Ok(all)
}

/// A state that sets are played through.
enum Played<'a> {
    /// `next` is the state after the ask that was looked at last.
    State {
        limit: &'a Limit,
        state: State,
        next: Option<State>,
    },
    Log {
        limit: &'a Limit,
        log: LogPlayed<'a>,
    },
}

struct LogPlayed<'a> {
    view: LogView,
    starts: Starts,
    answer: Answer<'a>,
    /// The start of the next ask, if it has been looked at and not been taken.
    ahead: Option<i64>,
    memory: Memory,
}

impl<'a> Played<'a> {
    fn new(
        stored: &'a StoredLimit,
        doubt: Option<Doubt>,
        answer: &mut Answer<'a>,
        now: Timestamp,
    ) -> Result<Self, StoreError> {
        let limit = &stored.limit;
        if let Limit::SlidingLog(_) = limit {
            let view = LogView::read(answer)?;
            let log = LogPlayed {
                view,
                starts: Starts::default(),
                answer: *answer,
                ahead: None,
                memory: Memory::Nothing,
            };
            return Ok(Self::Log { limit, log });
        }
        Ok(Self::State { limit, state: believed_state(stored, answer, now, doubt)?, next: None })
    }

    /// What the next ask would be answered.
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
                    None => log.starts.next(&mut log.answer)?,
                };
                log.ahead = Some(start);
                Ok(log.view.outcome(limit, ask, start, now))
            }
        }
    }

    /// Takes what was looked at.
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
                let told = decision(limit, outcome, log.view.standing(limit, now), now);
                log.memory = Memory::of_log(ask, told, charged);
            }
        }
    }

    fn standing(&self, now: Timestamp) -> Standing {
        match self {
            Self::State { limit, state, .. } => limit.standing(state, now),
            Self::Log { limit, log } => log.view.standing(limit, now),
        }
    }

    fn into_memory(self) -> Memory {
        match self {
            Self::State { state, .. } => Memory::State(state),
            Self::Log { log, .. } => log.memory,
        }
    }
}

fn decision(limit: &Limit, outcome: Outcome, standing: Standing, at: Timestamp) -> Decision {
    Decision { outcome, limit: limit.size(), remaining: standing.remaining, reset: standing.reset, at }
}

/// The state that stored fields stand for, as far as they are believed, under the limit that asks.
fn believed_state(
    asking: &StoredLimit,
    answer: &mut Answer<'_>,
    now: Timestamp,
    doubt: Option<Doubt>,
) -> Result<State, StoreError> {
    let limit = &asking.limit;
    let stored = match (answer.is_without_state(), doubt) {
        (true, None) => return Ok(limit.fresh(now)),
        // A key that is not there may have been there.
        (true, Some(_)) => Stored { under: *limit, state: limit.fresh(Timestamp::default()) },
        (false, _) => stored_state(asking, answer)?,
    };
    let Stored { under, mut state } = stored;
    if let Some(Doubt { since, life }) = doubt {
        under.distrust(&mut state, now, since, life);
    }
    Ok(limit.carry_over(&under, state, now))
}

/// A state, and the limit it was written under.
struct Stored {
    under: Limit,
    state: State,
}

impl Stored {
    /// The limit that is kept beside a state, and what lies over. States that say nothing are the asking limit's own.
    fn under(asking: &StoredLimit, text: Option<&str>) -> Result<(Limit, Over), StoreError> {
        let limit = &asking.limit;
        let Some(text) = text else { return Ok((*limit, Over::NONE)) };
        let foreign = || StoreError::protocol(format_args!("no limit: {}", text.escape_debug()));
        let (parameters, over) = match text.split_once(" over ") {
            None => (text, Over::NONE),
            Some((parameters, over)) => {
                let (permits, rest) = over.split_once(' ').ok_or_else(foreign)?;
                let number = |text: &str| text.parse().ok().filter(|number| (0..1 << 53).contains(number));
                let (permits, rest) = number(permits).zip(number(rest)).ok_or_else(foreign)?;
                (parameters, Over { permits, rest })
            }
        };
        if *parameters == *asking.parameters {
            return Ok((*limit, over));
        }
        Ok((limit.with_parameters(parameters).ok_or_else(foreign)?, over))
    }

    fn new(under: Limit, state: State, over: Over) -> Self {
        Self { under, state: state.with(over.into()) }
    }
}

/// The state that stored fields stand for, by the same bounds as in the scripts.
fn stored_state(asking: &StoredLimit, answer: &mut Answer<'_>) -> Result<Stored, StoreError> {
    let limit = &asking.limit;
    match limit {
        Limit::TokenBucket(_) | Limit::IntervalBucket(_) | Limit::LeakyBucket(_) => {
            let (amount, frac, dated) = (answer.number()?, answer.number_or(0)?, answer.number()?);
            let (leases, text) = (answer.text(), answer.text());
            let (under, over) = Stored::under(asking, text)?;
            let state = match under {
                Limit::IntervalBucket(it) => {
                    let capacity = it.capacity() as i64;
                    let tokens = amount.min(capacity).max(-capacity - it.refill() as i64);
                    State::Interval(IntervalState { tokens, last: dated })
                }
                Limit::LeakyBucket(it) => bucket_state(it.room(), true, amount, frac, dated),
                Limit::TokenBucket(it) => bucket_state(&it, false, amount, frac, dated),
                Limit::FixedWindow(_)
                | Limit::SlidingLog(_)
                | Limit::SlidingCounter(_)
                | Limit::CalendarQuota(_) => {
                    return Err(StoreError::protocol("a bucket of another algorithm"));
                }
            };
            // Nothing is lent from a queue or at intervals, and what was lent before is an ordinary debit there.
            let state = match (leases, lender(limit), lender(&under), state) {
                (Some(leases), Some(_), Some(it), State::Bucket(bucket)) => {
                    let (life, since, out) = leases_of(leases).ok_or_else(|| {
                        StoreError::protocol(format_args!("no leases: {}", leases.escape_debug()))
                    })?;
                    State::Lent(LeaseState::new(&it, bucket, life, since, out))
                }
                (_, _, _, state) => state,
            };
            Ok(Stored::new(under, state, over))
        }
        Limit::FixedWindow(_) => {
            let (window, count, text) = (answer.number()?, answer.number()?, answer.text());
            let (under, over) = Stored::under(asking, text)?;
            let window = window.div_euclid(under.horizon().get() as i64);
            let count = count.min(3 * under.size() as i64).max(0);
            Ok(Stored::new(under, State::Window(WindowState { window, count }), over))
        }
        Limit::SlidingCounter(it) => counter_state(asking, it, answer),
        Limit::CalendarQuota(_) => {
            let (end, count) = (answer.number()?, answer.number()?);
            let state = CalendarState { end, count: count.clamp(0, COUNT_MAX) };
            Ok(Stored::new(*limit, State::Calendar(state), Over::NONE))
        }
        Limit::SlidingLog(_) => Err(StoreError::protocol("a log has no state here")),
    }
}

/// The bucket that lends, if the limit does.
fn lender(limit: &Limit) -> Option<TokenBucket> {
    match limit {
        Limit::TokenBucket(it) => Some(*it),
        Limit::LeakyBucket(it) if it.mode() == LeakyMode::Meter => Some(*it.room()),
        Limit::LeakyBucket(_)
        | Limit::IntervalBucket(_)
        | Limit::FixedWindow(_)
        | Limit::SlidingLog(_)
        | Limit::SlidingCounter(_)
        | Limit::CalendarQuota(_) => None,
    }
}

fn bucket_state(it: &TokenBucket, water: bool, amount: i64, frac: i64, dated: i64) -> State {
    let (size, unit, flow) = (it.capacity() as i64, it.unit() as i64, it.flow() as i64);
    let beyond = size + (it.flow().div_ceil(it.unit())) as i64;
    let units = amount.min(size + beyond).max(-beyond) * unit + frac.min(unit - 1).max(0);
    let full = size * unit;
    let level = if water { full - units } else { units };
    let at = dated.div_euclid(it.tick() as i64);
    State::Bucket(BucketState { level: level.min(full).max(-full - flow), at })
}

/// Which return it would have to be, if something was given back out of turn.
pub(super) fn out_of_turn(answer: Value) -> Result<Option<u64>, StoreError> {
    let mut answer = Answer::new(&answer)?;
    let (done, _now) = (answer.number()?, answer.number()?);
    if done >= 0 { Ok(None) } else { Ok(Some(answer.number()?.max(0) as u64)) }
}

/// How long leases live, when the epoch began, and the permits lent in it and in the one before.
fn leases_of(text: &str) -> Option<(Micros, Timestamp, [u64; 2])> {
    let mut numbers = text.split(' ').map(|number| number.parse::<u64>().ok());
    let mut next = || numbers.next().flatten();
    let (life, since, out, before) = (next()?, next()?, next()?, next()?);
    Some((Micros::new(life), Timestamp::from_micros(since), [out, before]))
}

/// Counts are history, of whichever limit: only what no limit can have written is cut.
const COUNT_MAX: i64 = 3 << 51;

/// A counter from the fields of its hash.
fn counter_state(
    asking: &StoredLimit,
    own: &SlidingCounter,
    answer: &mut Answer<'_>,
) -> Result<Stored, StoreError> {
    let (mut seen, mut tail, mut sub, mut text) = (None, None, None, None);
    let mut counts = Vec::new();
    while let Some(name) = answer.text() {
        if name == "limit" {
            text = answer.text();
            continue;
        }
        let value = answer.number();
        match name {
            "seen" => seen = Some(value?),
            "tail" => tail = Some(value?),
            "sub" => sub = Some(value?),
            // Fields that later versions may add are none of ours.
            other => {
                if let Ok(index) = other.parse::<i64>() {
                    counts.push((index, value?.clamp(0, COUNT_MAX)));
                }
            }
        }
    }
    let (Some(seen), Some(tail), Some(sub)) = (seen, tail, sub) else {
        return Err(StoreError::protocol("a counter without its times"));
    };
    // Before there was the field, the length of the sub-buckets was all that was known.
    let parts = i64::from(own.sub_buckets());
    let text = text.map_or_else(
        || Cow::Owned(format!("{}/{}/{parts}", own.limit(), sub.saturating_mul(parts))),
        Cow::Borrowed,
    );
    let (under, over) = Stored::under(asking, Some(&*text))?;
    let Limit::SlidingCounter(it) = under else {
        return Err(StoreError::protocol("a counter of another algorithm"));
    };
    let buckets = i64::from(it.sub_buckets());
    let length = it.window().get() as i64 / buckets;
    let first = seen.div_euclid(length) - buckets;
    let mut state = CounterState { seen, tail, first, counts: Default::default(), waiting: Vec::new() };
    for (index, count) in counts {
        if index < first {
            continue;
        }
        let at = (index - first) as usize;
        if at as i64 > 3 * buckets + 2 {
            return Err(StoreError::protocol("a counter with a sub-bucket far ahead"));
        }
        if at >= state.counts.len() {
            state.counts.resize(at + 1, 0);
        }
        state.counts[at] = count;
    }
    Ok(Stored::new(under, State::Counter(state), over))
}

/// What a log says of itself without its entries.
struct LogView {
    time: i64,
    used: i64,
    oldest: Option<i64>,
    earliest: i64,
}

impl LogView {
    fn read(answer: &mut Answer<'_>) -> Result<Self, StoreError> {
        let (time, used, oldest, earliest) =
            (answer.number()?, answer.number()?, answer.number()?, answer.number()?);
        Ok(Self { time, used, oldest: (oldest >= 0).then_some(oldest), earliest })
    }

    fn remaining(&self, limit: &Limit) -> i64 {
        if self.earliest > self.time { 0 } else { (limit.size() as i64 - self.used).max(0) }
    }

    fn standing(&self, limit: &Limit, now: Timestamp) -> Standing {
        let reset =
            self.oldest.map_or(0, |oldest| oldest + limit.horizon().get() as i64 - now.as_micros() as i64);
        Standing { remaining: self.remaining(limit) as u64, reset: Micros::new(reset.max(0) as u64) }
    }

    /// What an ask is answered whose earliest start the script has found.
    fn outcome(&self, limit: &Limit, ask: Ask, start: i64, now: Timestamp) -> Outcome {
        let wait = ask.wait.map_or(0, |wait| wait.get().min(limit.horizon().get()) as i64);
        let delay = start - now.as_micros() as i64;
        if start == self.time {
            Outcome::NOW
        } else if delay <= wait {
            Outcome::Admitted { delay: Micros::new(delay.max(0) as u64) }
        } else {
            Outcome::Denied { retry: Micros::new((delay - wait) as u64) }
        }
    }

    /// Takes what an ask is answered. Returns the permits that a denial was charged.
    fn take(&mut self, limit: &Limit, ask: Ask, outcome: Outcome, start: i64) -> i64 {
        if outcome.is_admitted() {
            self.add(start, ask.cost as i64);
            return 0;
        }
        let counts_denied = matches!(limit, Limit::SlidingLog(it) if it.counts_denied());
        let charged = if counts_denied { (ask.cost as i64).min(self.remaining(limit)) } else { 0 };
        if charged > 0 {
            self.add(self.earliest, charged);
        }
        charged
    }

    fn add(&mut self, start: i64, permits: i64) {
        self.used += permits;
        self.earliest = start;
        self.oldest = self.oldest.or(Some(start));
    }
}

/// As [`replay`], from the starts that the script has found.
fn replay_log(
    limit: &Limit,
    questions: &[Question],
    answer: &mut Answer<'_>,
    now: Timestamp,
) -> Result<(Told, i64), StoreError> {
    let mut view = LogView::read(answer)?;
    let mut starts = Starts::default();
    let mut decisions = SmallVec::with_capacity(questions.len());
    let (mut memory, mut taken) = (Memory::Nothing, 0);
    for question in questions {
        let (ask, takes) = (question.ask(), question.takes());
        if !is_sent(limit, ask) {
            let outcome = if ask.cost == 0 { Outcome::NOW } else { Outcome::Impossible };
            decisions.push(decision(limit, outcome, view.standing(limit, now), now));
            continue;
        }
        let start = starts.next(answer)?;
        let outcome = view.outcome(limit, ask, start, now);
        let charged = if takes { view.take(limit, ask, outcome, start) } else { 0 };
        let decided = decision(limit, outcome, view.standing(limit, now), now);
        if takes {
            taken += i64::from(outcome.is_admitted());
            memory = Memory::of_log(ask, decided, charged);
        }
        decisions.push(decided);
    }
    Ok((Told { decisions, grant: None, memory, now }, taken))
}

/// The groups of asks with one start, as the script lists them: of the run at hand, those that are left.
#[derive(Default)]
struct Starts {
    groups: i64,
    many: i64,
    start: i64,
}

impl Starts {
    fn next(&mut self, answer: &mut Answer<'_>) -> Result<i64, StoreError> {
        if self.many == 0 {
            if self.groups == 0 {
                self.groups = answer.number()?;
            }
            self.groups -= 1;
            // A run that only looks has one group, of no asks.
            self.many = answer.number()?.max(1);
            self.start = answer.number()?;
        }
        self.many -= 1;
        Ok(self.start)
    }
}

impl Memory {
    /// What is known of a log after a take. A denial that was charged has changed what the next one is told.
    fn of_log(ask: Ask, decided: Decision, charged: i64) -> Self {
        match decided.outcome {
            Outcome::Denied { .. } if charged == 0 => Self::Denied(ask, decided),
            Outcome::Denied { .. } | Outcome::Admitted { .. } | Outcome::Impossible => Self::Nothing,
        }
    }

    /// The answer to an ask, if it can be no other than a denial. The server's time is between `early` and `late`.
    pub(super) fn denies(
        &self,
        limit: &Limit,
        ask: Ask,
        early: Timestamp,
        late: Timestamp,
    ) -> Option<Decision> {
        match self {
            Self::State(state) => {
                let mut next = state.clone();
                // Others have taken since, if anything, so what is denied here is denied there. A denial that would change
                // the state must reach it.
                if !matches!(limit.decide(&mut next, late, ask), Outcome::Denied { .. }) || next != *state {
                    return None;
                }
                let outcome = limit.peek(state, early, ask);
                Some(decision(limit, outcome, limit.standing(state, early), early))
            }
            Self::Denied(asked, denied) => {
                let since = |instant: Timestamp| instant.as_micros().saturating_sub(denied.at.as_micros());
                let left = denied.outcome.retry().get().min(denied.reset.get().max(1));
                if *asked != ask || since(late) >= left {
                    return None;
                }
                let after = |time: Micros| Micros::new(time.get().saturating_sub(since(early)));
                let outcome = Outcome::Denied { retry: after(denied.outcome.retry()) };
                Some(Decision { outcome, reset: after(denied.reset), at: early, ..*denied })
            }
            Self::Nothing => None,
        }
    }
}

/// What is not believed is the same in the scripts and here: that a script admitted as many as its state says is checked by every
/// replay, and that the state it left is the one left here by the next one.
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use tollgate_core::{
        Consistency, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, LeaseTerms, Rate, SlidingCounter,
    };
    use tollgate_testkit::{Random, RedisServer, long_or};

    use std::time::Duration;

    use super::super::LogStorage;
    use super::super::node::Bearings;
    use super::super::script::{Command, ask};
    use super::*;
    use crate::check::LimitId;
    use crate::settings::LimitSettings;

    fn random_limit(random: &mut Random) -> Limit {
        let (size, us) = (1 + random.below(300), 1_000 + random.below(5_000_000));
        let rate = Rate::new(1 + random.below(size), Micros::new(us)).unwrap();
        let whole = Rate::new(size, Micros::new(us * 10)).unwrap();
        let mode = if random.one_in(2) { LeakyMode::Meter } else { LeakyMode::Queue };
        match random.below(6) {
            0 | 1 => Limit::TokenBucket(TokenBucket::new(size, rate).unwrap()),
            2 => Limit::LeakyBucket(LeakyBucket::new(size, rate, mode).unwrap()),
            3 => Limit::IntervalBucket(IntervalBucket::new(size, rate).unwrap()),
            4 => Limit::FixedWindow(FixedWindow::new(whole).unwrap()),
            _ => Limit::SlidingCounter(
                SlidingCounter::new(whole, [1, 10][random.below(2) as usize], random.one_in(2)).unwrap(),
            ),
        }
    }

    fn stored(limit: Limit) -> StoredLimit {
        let deadlines = (Duration::from_secs(1), Duration::from_secs(1), LogStorage::SortedSet);
        StoredLimit::new(LimitId(0), "doubted", limit, &LimitSettings::default(), deadlines)
    }

    fn random_questions(random: &mut Random, limit: &Limit) -> Vec<Question> {
        let mut questions: Vec<_> = (0..1 + random.below(3))
            .map(|_| {
                let cost = 1 + random.below(limit.size().min(20));
                let wait = random.one_in(4).then(|| Micros::new(random.below(limit.horizon().get())));
                Question::Take(Ask { cost, wait })
            })
            .collect();
        let kind = if random.one_in(4) { Consistency::LeaseFast } else { Consistency::Lease };
        if let Ok(terms) = LeaseTerms::of_any_size(limit, kind)
            && random.one_in(3)
        {
            let wanted = Wanted { permits: random.below(limit.size()), parts: 1 + random.below(3), terms };
            questions.push(Question::Borrow(Ask::of(1), Box::new(wanted)));
        }
        questions
    }

    #[test]
    fn what_is_not_believed_is_the_same_in_the_scripts() {
        let server = RedisServer::start();
        let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        let mut random = Random::new(1);
        let (mut distrusted, mut admitted) = (0, 0);
        for round in 0..long_or(4_000, 200) {
            // Every other one comes under two limits in turn.
            let mut limit = random_limit(&mut random);
            let mut other = limit;
            while round % 2 == 0 && (other == limit || other.algorithm() != limit.algorithm()) {
                other = random_limit(&mut random);
            }
            let (key, horizon) = (format!("doubted:{round}"), limit.horizon().get());
            let begun = 1_763_000_000_000_000 + random.below(1_000_000);
            let since = Timestamp::from_micros(begun + random.below(3 * horizon));
            let life = Micros::new(random.below(horizon));
            let (mut now, mut left): (u64, Option<(Limit, State)>) = (begun, None);
            for step in 0..30 {
                if random.one_in(4) {
                    (limit, other) = (other, limit);
                }
                now = match random.below(12) {
                    0 => now - random.below(horizon / 4 + 1),
                    1 | 2 => now + random.below(horizon + 1),
                    _ => now + random.below(horizon / 8 + 1),
                };
                let time = Timestamp::from_micros(now);
                let doubt = (time >= since).then_some(Doubt { since, life });
                let questions = random_questions(&mut random, &limit);
                let to = Bearings { now: Some(time), about: time, takeover: None };
                let stored = stored(limit);
                let Command { said, script, .. } =
                    ask(&stored, LogStorage::SortedSet, &key, &questions, doubt, to);
                let _: Value = redis::cmd("SCRIPT")
                    .arg("LOAD")
                    .arg(&script.unwrap().source)
                    .query(&mut connection)
                    .unwrap();
                let answer: Value = said.query(&mut connection).unwrap();
                let context =
                    format!("round {round}, step {step}: {limit:?}, {now}, {doubt:?}, {questions:?}");
                // The state that the last step has left is the one that this one has found.
                let found = believed_state(&stored, &mut after_two(&answer), time, None).unwrap();
                if let Some((under, left)) = left {
                    let left = limit.carry_over(&under, left, time);
                    assert_eq!(limit.standing(&left, time), limit.standing(&found, time), "{context}");
                }
                let told = replay(&stored, &questions, doubt, answer)
                    .unwrap_or_else(|why| panic!("{context}: {why}"));
                let Memory::State(state) = told.memory else { panic!("{context}: no state") };
                distrusted += u64::from(doubt.is_some());
                admitted += told.decisions.iter().filter(|it| it.is_admitted()).count();
                // What only denied has left nothing behind.
                let took = told.decisions.iter().any(Decision::is_admitted)
                    || told.grant.is_some_and(|grant| grant.permits > 0);
                left = if took { Some((limit, state)) } else { None };
            }
        }
        assert!(distrusted > 1_000 && admitted > 1_000, "{distrusted} distrusted, {admitted} admitted");
    }

    fn after_two(answer: &Value) -> Answer<'_> {
        let mut answer = Answer::new(answer).unwrap();
        answer.number().unwrap();
        answer.number().unwrap();
        answer
    }
}
