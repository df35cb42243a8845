//! Evaluates questions on the state of a key, by the same arithmetic as the scripts.
//!
//! A script that finds a plain state decides, writes, and answers with the state as it was: the questions are evaluated on that, and must
//! come to the same number of admissions. Any other state is evaluated here alone, and its next state is written.

pub(crate) mod exchange;
pub(crate) mod sets;

use smallvec::SmallVec;
use tollgate_core::algorithm::Algorithm;
use tollgate_core::{Ask, Decision, Grant, Limit, Micros, Outcome, State, Status, Timestamp};

use crate::backend::LeaseRequest;
use crate::redis::error::StoreError;
use crate::redis::limit::StoredLimit;
use crate::redis::protocol::{
    Change, Difference, FailoverGuard, Fields, LogView, Question, Reader, Stored, is_lending, is_sent,
    plain_state, stored_state, wanted, write,
};

/// The fields to write, and the time to live in milliseconds.
pub(crate) type Write = (Difference, u64);

/// The result on a state that is not plain, and the write that follows.
pub(crate) struct Computation {
    pub(crate) result: Evaluated,
    /// `None` if the state stays unchanged.
    pub(crate) write: Option<Write>,
    pub(crate) on_loss: OnLoss,
}

/// The next step if other nodes have changed the state before the write.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum OnLoss {
    /// The script is asked first: only a mark kept it from deciding. A mark by this node would follow on the mark of another, without end.
    AskScript,
    /// The next state is computed again. Permits of the state are lent, which few calls change.
    Compute,
    /// The state is marked, so that other nodes compute it as well, and the next state is computed again. Without the mark, calls of the
    /// script would be quicker each time.
    MarkAndCompute,
}

impl OnLoss {
    pub(crate) fn marks(self) -> bool {
        self == Self::MarkAndCompute
    }
}

/// The answers of a call on one key.
pub(crate) struct Evaluated {
    /// One for each question, in order.
    pub(crate) decisions: SmallVec<[Decision; 1]>,
    /// The permits lent to the question that borrows.
    pub(crate) grant: Option<Grant>,
    /// The knowledge from which later requests can be denied.
    pub(crate) memory: Memory,
    /// The server's time.
    pub(crate) now: Timestamp,
    /// The number of returns, if a return was out of turn and not made.
    pub(crate) out_of_turn: Option<u64>,
}

impl Evaluated {
    /// The result of changes, which answer no question.
    fn changed(out_of_turn: Option<u64>, now: Timestamp) -> Self {
        Self { decisions: SmallVec::new(), grant: None, memory: Memory::Nothing, now, out_of_turn }
    }
}

/// The knowledge about a key after a call.
#[derive(Clone, Debug)]
pub(crate) enum Memory {
    /// The whole state.
    State(State),
    /// A denial by a log, which stays in the store.
    Denied(Ask, Decision),
    /// A log that denied nothing.
    Nothing,
}

/// Evaluates questions on the state that a script has answered with.
pub(crate) fn evaluate(
    stored: &StoredLimit,
    questions: &[Question],
    admitted: i64,
    now: Timestamp,
    mut numbers: Reader<'_>,
) -> Result<Evaluated, StoreError> {
    let limit = &stored.limit;
    let (evaluated, taken) = if stored.is_log() {
        evaluate_log(limit, questions, &mut numbers, now)?
    } else {
        let state = plain_state(limit, is_lending(stored, questions), &mut numbers)?;
        evaluate_on(limit, questions, state, now)
    };
    if taken != admitted {
        return Err(StoreError::protocol(format_args!(
            "the script admitted {admitted}, its state says {taken}"
        )));
    }
    Ok(evaluated)
}

/// Evaluates questions on a state. Returns also how many were admitted or lent.
fn evaluate_on(limit: &Limit, questions: &[Question], mut state: State, now: Timestamp) -> (Evaluated, i64) {
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
        decisions.push(decision(limit, outcome, limit.status(&state, now), now));
    }
    let grant = wanted(questions).map(|LeaseRequest { permits, parts, terms }| {
        let grant = terms.lend(limit, &mut state, now, permits, parts);
        taken += grant.permits as i64;
        grant
    });
    (Evaluated { decisions, grant, memory: Memory::State(state), now, out_of_turn: None }, taken)
}

/// Answers questions on a state that is not plain, and computes the write.
pub(crate) fn compute(
    stored: &StoredLimit,
    questions: &[Question],
    doubt: Option<FailoverGuard>,
    (key, snapshot): (&str, &[u8]),
    now: Timestamp,
) -> Result<Computation, StoreError> {
    let fields = Fields::parse(snapshot)?;
    let found = Found::new(stored, key, &fields, doubt, now)?;
    let (evaluated, _) = evaluate_on(&stored.limit, questions, found.state.clone(), now);
    let takes = questions.iter().any(|it| it.takes() && is_sent(&stored.limit, it.ask()))
        || wanted(questions).is_some_and(|wanted| wanted.permits > 0);
    let write = match &evaluated.memory {
        Memory::State(state) if takes && (found.is_converted || is_changed(&found.state, state)) => {
            Some(write(stored, state, &fields, now))
        }
        Memory::State(_) | Memory::Denied(..) | Memory::Nothing => None,
    };
    let waits = questions.iter().any(|it| it.ask().wait.is_some());
    let on_loss = if waits { OnLoss::MarkAndCompute } else { found.on_loss };
    Ok(Computation { result: evaluated, write, on_loss })
}

/// Whether there is something to write. A bucket without leases is stored without their field.
fn is_changed(before: &State, after: &State) -> bool {
    let as_stored = |state: &State| {
        let (mut plain, beside) = state.clone().into_plain();
        if let State::Lent(lent) = &plain
            && lent.out + lent.out_before == 0
        {
            plain = State::Bucket(lent.bucket);
        }
        plain.with(beside)
    };
    before != after && as_stored(before) != as_stored(after)
}

/// Computes changes of a state. A return that is out of turn changes nothing, and gets the number of returns.
pub(crate) fn compute_changes(
    stored: &StoredLimit,
    changes: &[Change],
    doubt: Option<FailoverGuard>,
    (key, snapshot): (&str, &[u8]),
    now: Timestamp,
) -> Result<Computation, StoreError> {
    let computed = |out_of_turn, write| Computation {
        result: Evaluated::changed(out_of_turn, now),
        write,
        on_loss: OnLoss::MarkAndCompute,
    };
    let fields = Fields::parse(snapshot)?;
    let limit = &stored.limit;
    let Found { state: found, is_converted, .. } = Found::new(stored, key, &fields, doubt, now)?;
    let (mut state, mut keeps, mut returned) = (found.clone(), false, None);
    for change in changes {
        match *change {
            Change::Refund { permits, at } => limit.refund(&mut state, now, permits, at),
            Change::Charge { permits } => {
                limit.charge(&mut state, now, permits);
                keeps = is_converted && permits > 0;
            }
            Change::Return { permits, at, number, counted } => {
                let returns = fields.number("returns").map_err(|why| StoreError::foreign(key, why))?;
                let returns = returns.unwrap_or(0).max(0) as u64;
                if returns != number {
                    return Ok(computed(Some(returns), None));
                }
                // Leases from before this server took over may be unknown here, so they stay lent.
                if doubt.is_none_or(|doubt| at >= doubt.since) {
                    limit.take_back(&mut state, now, permits, at, counted);
                    returned = Some(number + 1);
                }
            }
        }
    }
    if !is_changed(&found, &state) && !keeps {
        return Ok(computed(None, None));
    }
    let (mut difference, matters) = write(stored, &state, &fields, now);
    if let Some(number) = returned {
        difference.set.extend(["returns".to_owned(), number.to_string()]);
    }
    Ok(computed(None, Some((difference, matters))))
}

/// A state from the store, as far as it is trusted, converted to the limit that asks.
pub(crate) struct Found {
    pub(crate) state: State,
    /// Whether it was written under another limit.
    pub(crate) is_converted: bool,
    /// The next step of an ask if other nodes change the state meanwhile.
    pub(crate) on_loss: OnLoss,
}

impl Found {
    pub(crate) fn new(
        asking: &StoredLimit,
        key: &str,
        fields: &Fields<'_>,
        doubt: Option<FailoverGuard>,
        now: Timestamp,
    ) -> Result<Self, StoreError> {
        let limit = &asking.limit;
        let Stored { under, mut state } = match (fields.is_empty(), doubt) {
            (true, None) => Stored { under: *limit, state: limit.fresh(now) },
            // A missing key may have been lost.
            (true, Some(_)) => Stored { under: *limit, state: limit.fresh(Timestamp::default()) },
            (false, _) => stored_state(asking, fields).map_err(|why| StoreError::foreign(key, why))?,
        };
        let is_converted = !limit.understands(&under);
        let on_loss = match is_converted || doubt.is_some() {
            true => OnLoss::MarkAndCompute,
            false => on_loss(&state, now),
        };
        if let Some(FailoverGuard { since, life }) = doubt {
            under.distrust(&mut state, now, since, life);
        }
        Ok(Self { state: limit.migrate(&under, state, now), is_converted, on_loss })
    }
}

/// The next step after a lost race for a state that was written under the limit that asks.
fn on_loss(state: &State, now: Timestamp) -> OnLoss {
    match state {
        State::Lent(_) => OnLoss::Compute,
        State::Carried(_) => OnLoss::MarkAndCompute,
        State::Counter(it) if it.tail > now.as_micros() as i64 => OnLoss::MarkAndCompute,
        State::Bucket(_)
        | State::Interval(_)
        | State::Window(_)
        | State::Log(_)
        | State::Counter(_)
        | State::Calendar(_) => OnLoss::AskScript,
    }
}

pub(crate) fn decision(limit: &Limit, outcome: Outcome, status: Status, at: Timestamp) -> Decision {
    Decision { outcome, limit: limit.size(), remaining: status.remaining, reset: status.reset, at }
}

/// As [`evaluate`], from the starts that the script has found.
fn evaluate_log(
    limit: &Limit,
    questions: &[Question],
    numbers: &mut Reader<'_>,
    now: Timestamp,
) -> Result<(Evaluated, i64), StoreError> {
    let (mut view, mut starts, mut numbers) = LogView::read(numbers)?;
    let mut decisions = SmallVec::with_capacity(questions.len());
    let (mut memory, mut taken) = (Memory::Nothing, 0);
    for question in questions {
        let (ask, takes) = (question.ask(), question.takes());
        if !is_sent(limit, ask) {
            let outcome = if ask.cost == 0 { Outcome::NOW } else { Outcome::Impossible };
            decisions.push(decision(limit, outcome, view.status(limit, now), now));
            continue;
        }
        let start = starts.next(&mut numbers)?;
        let outcome = view.outcome(limit, ask, start, now);
        let charged = if takes { view.take(limit, ask, outcome, start) } else { 0 };
        let decided = decision(limit, outcome, view.status(limit, now), now);
        if takes {
            taken += i64::from(outcome.is_admitted());
            memory = Memory::of_log(ask, decided, charged);
        }
        decisions.push(decided);
    }
    Ok((Evaluated { decisions, grant: None, memory, now, out_of_turn: None }, taken))
}

impl Memory {
    /// The knowledge about a log after a take. A denial that was counted changes the next one.
    pub(crate) fn of_log(ask: Ask, decided: Decision, charged: i64) -> Self {
        match decided.outcome {
            Outcome::Denied { .. } if charged == 0 => Self::Denied(ask, decided),
            Outcome::Denied { .. } | Outcome::Admitted { .. } | Outcome::Impossible => Self::Nothing,
        }
    }

    /// Denies an ask if the store would provably deny it too. The server's time is between `early` and `late`.
    pub(crate) fn denies(
        &self,
        limit: &Limit,
        ask: Ask,
        early: Timestamp,
        late: Timestamp,
    ) -> Option<Decision> {
        match self {
            Self::State(state) => {
                let mut next = state.clone();
                // Other nodes can only have taken permits since, so a denial here is a denial there. A denial that would change the
                // state must reach it.
                if !matches!(limit.decide(&mut next, late, ask), Outcome::Denied { .. }) || next != *state {
                    return None;
                }
                let outcome = limit.peek(state, early, ask);
                Some(decision(limit, outcome, limit.status(state, early), early))
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

/// States that are not trusted after a failover: scripts treat them as plain only where that makes no difference.
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use std::time::Duration;

    use redis::Value;
    use tollgate_core::{
        Consistency, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, LeaseTerms, Rate, SlidingCounter,
        TokenBucket,
    };
    use tollgate_testkit::{Random, RedisServer, long_or};

    use super::*;
    use crate::check::LimitId;
    use crate::redis::protocol::{self, Command, Kind, Reply, SCRIPTS};
    use crate::redis::server::ServerContext;
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
        let (prefix, deadline) = (Default::default(), Duration::from_secs(1));
        let scope = (&prefix, "doubted");
        StoredLimit::new(LimitId(0), scope, limit, &LimitSettings::default(), (deadline, deadline))
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
            let wanted =
                LeaseRequest { permits: random.below(limit.size()), parts: 1 + random.below(3), terms };
            questions.push(Question::Borrow(Ask::of(1), Box::new(wanted)));
        }
        questions
    }

    /// The same state without a server.
    #[derive(Default)]
    struct Model(Option<(Limit, State)>);

    impl Model {
        fn ask(
            &mut self,
            limit: &Limit,
            questions: &[Question],
            doubt: Option<FailoverGuard>,
            now: Timestamp,
        ) -> Evaluated {
            let (under, mut state) = self.0.clone().unwrap_or_else(|| {
                let since = if doubt.is_some() { Timestamp::default() } else { now };
                (*limit, limit.fresh(since))
            });
            if let Some(FailoverGuard { since, life }) = doubt {
                under.distrust(&mut state, now, since, life);
            }
            let believed = limit.migrate(&under, state, now);
            let (evaluated, _) = evaluate_on(limit, questions, believed.clone(), now);
            if let Memory::State(state) = &evaluated.memory
                && (is_changed(&believed, state) || !limit.understands(&under))
            {
                self.0 = Some((*limit, state.clone()));
            }
            evaluated
        }
    }

    #[test]
    fn distrusted_states_decide_alike_with_and_without_the_store() {
        let server = RedisServer::start();
        let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        for script in SCRIPTS.all() {
            let _: Value =
                redis::cmd("SCRIPT").arg("LOAD").arg(&script.source).query(&mut connection).unwrap();
        }
        let mut random = Random::new(1);
        let (mut plain, mut rare, mut distrusted) = (0, 0, 0);
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
            let (mut now, mut model) = (begun, Model::default());
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
                let doubt = (time >= since).then_some(FailoverGuard { since, life });
                let questions = random_questions(&mut random, &limit);
                let context =
                    format!("round {round}, step {step}: {limit:?}, {now}, {doubt:?}, {questions:?}");
                let expected = model.ask(&limit, &questions, doubt, time);
                let (limit, to) =
                    (stored(limit), ServerContext { now: Some(time), about: time, failover: None });
                let mut say = |command: Command| -> Value { command.said.query(&mut connection).unwrap() };
                let value = say(protocol::ask(&limit, (Kind::Plain, &key), &questions, doubt, to));
                let found = match Reply::new(&value).unwrap() {
                    Reply::Decided { first, now, numbers } => {
                        plain += 1;
                        evaluate(&limit, &questions, first, now, numbers)
                            .unwrap_or_else(|why| panic!("{context}: {why}"))
                    }
                    Reply::Rare { now, snapshots } => {
                        rare += 1;
                        let snapshot = snapshots.get(0).unwrap();
                        let Computation { result: found, write, on_loss } =
                            compute(&limit, &questions, doubt, (&key, snapshot), now).unwrap();
                        if let Some(write) = write {
                            let value = say(protocol::commit(&key, snapshot, (&write, on_loss.marks()), to));
                            assert!(matches!(Reply::new(&value), Ok(Reply::Decided { .. })), "{context}");
                        }
                        found
                    }
                };
                assert_eq!(found.decisions, expected.decisions, "{context}");
                assert_eq!(found.grant, expected.grant, "{context}");
                distrusted += u64::from(doubt.is_some());
            }
        }
        assert!(distrusted > 1_000 && plain > 500 && rare > 500, "{distrusted}: {plain} plain, {rare} rare");
    }
}
