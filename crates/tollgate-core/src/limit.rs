//! A limit: one of the five algorithms with its parameters, chosen at run time.

use alloc::borrow::Cow;
use alloc::boxed::Box;
use alloc::format;
use core::fmt;
use core::str::FromStr;

use crate::algorithm::{
    Algorithm, BucketState, CalendarQuota, CalendarState, CounterState, FixedWindow, IntervalBucket,
    IntervalState, LeakyBucket, LeakyMode, LeaseBucket, LeaseState, LogState, SlidingCounter, SlidingLog,
    TokenBucket, WindowState,
};
use crate::decision::{Ask, Outcome, Status};
use crate::migrate::Carried;
use crate::time::{Micros, Timestamp};

/// An algorithm with its parameters. Whoever holds one holds a valid one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Limit {
    /// Tokens that flow back evenly.
    TokenBucket(TokenBucket),
    /// Tokens that come back all at once, each period.
    IntervalBucket(IntervalBucket),
    /// Water that drains evenly: a meter, or a queue that spaces its callers.
    LeakyBucket(LeakyBucket),
    /// A count for each window of the clock.
    FixedWindow(FixedWindow),
    /// Every admission of the trailing window.
    SlidingLog(SlidingLog),
    /// Counts of a few sub-buckets, the oldest weighted.
    SlidingCounter(SlidingCounter),
    /// A count for each day, week or month of a time zone.
    CalendarQuota(CalendarQuota),
}

impl Limit {
    /// The name under which callers choose the algorithm. Both refills of the token bucket have one name; a quota is a window of the
    /// calendar.
    pub const fn algorithm(&self) -> AlgorithmName {
        match self {
            Self::TokenBucket(_) | Self::IntervalBucket(_) => AlgorithmName::TokenBucket,
            Self::LeakyBucket(_) => AlgorithmName::LeakyBucket,
            Self::FixedWindow(_) | Self::CalendarQuota(_) => AlgorithmName::FixedWindow,
            Self::SlidingLog(_) => AlgorithmName::SlidingWindow,
            Self::SlidingCounter(_) => AlgorithmName::SlidingWindowCounter,
        }
    }

    /// What its states are kept under in a store: the algorithm, and of a quota the calendar, under another of which it would be
    /// another count.
    pub fn home(&self) -> Cow<'static, str> {
        match self {
            Self::CalendarQuota(it) => format!("calendar_{}", it.calendar().slug()).into(),
            Self::TokenBucket(_)
            | Self::IntervalBucket(_)
            | Self::LeakyBucket(_)
            | Self::FixedWindow(_)
            | Self::SlidingLog(_)
            | Self::SlidingCounter(_) => self.algorithm().as_lowercase().into(),
        }
    }

    /// Of a queue, how long a turn may be waited for at most.
    pub fn queue_length(&self) -> Option<Micros> {
        match self {
            Self::LeakyBucket(it) if it.mode() == LeakyMode::Queue => Some(it.time_to_empty()),
            Self::LeakyBucket(_)
            | Self::TokenBucket(_)
            | Self::IntervalBucket(_)
            | Self::FixedWindow(_)
            | Self::SlidingLog(_)
            | Self::SlidingCounter(_)
            | Self::CalendarQuota(_) => None,
        }
    }

    /// How much of a store's time a check takes, by that of a bucket: a counter with many sub-buckets has many fields, and a log is searched.
    pub const fn work(&self) -> usize {
        match self {
            Self::TokenBucket(_)
            | Self::IntervalBucket(_)
            | Self::LeakyBucket(_)
            | Self::FixedWindow(_)
            | Self::CalendarQuota(_) => 1,
            Self::SlidingCounter(it) => {
                let parts = it.sub_buckets() as usize / 4;
                2 + if parts < 60 { parts } else { 60 }
            }
            Self::SlidingLog(_) => 5,
        }
    }

    /// What a key that was never used could take at once.
    pub const fn size(&self) -> u64 {
        match self {
            Self::TokenBucket(it) => it.capacity(),
            Self::IntervalBucket(it) => it.capacity(),
            Self::LeakyBucket(it) => it.size(),
            Self::FixedWindow(it) => it.limit(),
            Self::SlidingLog(it) => it.limit(),
            Self::SlidingCounter(it) => it.limit(),
            Self::CalendarQuota(it) => it.limit(),
        }
    }

    /// The time in which [`Limit::size`] permits come back: time to full, or the window.
    pub const fn horizon(&self) -> Micros {
        match self {
            Self::TokenBucket(it) => it.time_to_full(),
            Self::IntervalBucket(it) => it.time_to_full(),
            Self::LeakyBucket(it) => it.time_to_empty(),
            Self::FixedWindow(it) => it.window(),
            Self::SlidingLog(it) => it.window(),
            Self::SlidingCounter(it) => it.window(),
            Self::CalendarQuota(it) => it.horizon(),
        }
    }
}

impl Limit {
    /// What may be believed of a state if writes before `since` may have been lost, leases of `life` among them: nothing that was
    /// taken until then is back before it would be if everything had been taken. Logs keep every admission and are believed.
    pub fn distrust(&self, state: &mut State, now: Timestamp, since: Timestamp, life: Micros) {
        match (self, state.plain_mut()) {
            (Self::TokenBucket(it), State::Bucket(state)) => it.distrust(state, since, life),
            (Self::TokenBucket(it), State::Lent(state)) => it.distrust(&mut state.bucket, since, life),
            (Self::LeakyBucket(it), State::Bucket(state)) => it.room().distrust(state, since, life),
            (Self::LeakyBucket(it), State::Lent(state)) => it.room().distrust(&mut state.bucket, since, life),
            (Self::IntervalBucket(it), State::Interval(state)) => it.distrust(state, since),
            (Self::FixedWindow(it), State::Window(state)) => it.distrust(state, now, since),
            (Self::SlidingCounter(it), State::Counter(state)) => it.distrust(state, now, since),
            (Self::CalendarQuota(it), State::Calendar(state)) => it.distrust(state, now, since),
            (Self::SlidingLog(_), _) => {}
            (_, other) => *other = self.fresh(now),
        }
    }

    /// The bucket that can have permits out, if it is one. A queue spaces its callers, which a lease would undo.
    pub(crate) const fn lender(&self) -> Option<LeaseBucket> {
        match self {
            Self::TokenBucket(it) => Some(LeaseBucket(*it)),
            Self::LeakyBucket(it) if matches!(it.mode(), LeakyMode::Meter) => Some(LeaseBucket(*it.room())),
            Self::LeakyBucket(_)
            | Self::IntervalBucket(_)
            | Self::FixedWindow(_)
            | Self::SlidingLog(_)
            | Self::SlidingCounter(_)
            | Self::CalendarQuota(_) => None,
        }
    }

    /// Starts afresh where the state is of another algorithm: nothing in it can be carried over.
    fn adopt(&self, state: &mut State, now: Timestamp) {
        let plain = state.plain();
        let own = match self {
            Self::TokenBucket(_) | Self::LeakyBucket(_) => match plain {
                State::Bucket(_) => true,
                State::Lent(_) => self.lender().is_some(),
                State::Interval(_)
                | State::Window(_)
                | State::Log(_)
                | State::Counter(_)
                | State::Calendar(_)
                | State::Carried(_) => false,
            },
            Self::IntervalBucket(_) => matches!(plain, State::Interval(_)),
            Self::FixedWindow(_) => matches!(plain, State::Window(_)),
            Self::SlidingLog(_) => matches!(plain, State::Log(_)),
            Self::SlidingCounter(_) => matches!(plain, State::Counter(_)),
            Self::CalendarQuota(_) => matches!(plain, State::Calendar(_)),
        };
        if !own {
            *state = self.fresh(now);
        }
    }
}

/// The state of one key, of whichever algorithm its limit has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// Of a token bucket or a leaky bucket.
    Bucket(BucketState),
    /// Of one some of whose permits are out.
    Lent(LeaseState),
    /// Of a token bucket with interval refill.
    Interval(IntervalState),
    /// Of a fixed window.
    Window(WindowState),
    /// Of a sliding log.
    Log(LogState),
    /// Of a sliding counter.
    Counter(CounterState),
    /// Of a calendar quota.
    Calendar(CalendarState),
    /// Of any of them, with what was consumed under earlier limits beside it.
    Carried(Box<Carried>),
}

impl State {
    /// The state by which a limit decides.
    pub fn plain(&self) -> &Self {
        if let Self::Carried(carried) = self { &carried.state } else { self }
    }

    pub(crate) fn plain_mut(&mut self) -> &mut Self {
        if let Self::Carried(carried) = self { &mut carried.state } else { self }
    }
}

/// Runs `$body` with the algorithm and its own state; a state of another algorithm counts as none.
macro_rules! dispatch {
    ($limit:expr, $state:expr, $now:expr, |$it:ident, $own:ident| $body:expr) => {
        if let State::Lent($own) = $state
            && let Some($it) = $limit.lender()
        {
            $body
        } else {
            dispatch!(@plain $limit, $state, $now, |$it, $own| $body)
        }
    };
    (@plain $limit:expr, $state:expr, $now:expr, |$it:ident, $own:ident| $body:expr) => {
        match $limit {
            Limit::TokenBucket($it) => dispatch!(@own $state, Bucket, $it, $now, $own, $body),
            Limit::IntervalBucket($it) => dispatch!(@own $state, Interval, $it, $now, $own, $body),
            Limit::LeakyBucket($it) => dispatch!(@own $state, Bucket, $it, $now, $own, $body),
            Limit::FixedWindow($it) => dispatch!(@own $state, Window, $it, $now, $own, $body),
            Limit::SlidingLog($it) => dispatch!(@own $state, Log, $it, $now, $own, $body),
            Limit::SlidingCounter($it) => dispatch!(@own $state, Counter, $it, $now, $own, $body),
            Limit::CalendarQuota($it) => dispatch!(@own $state, Calendar, $it, $now, $own, $body),
        }
    };
    (@own $state:expr, $variant:ident, $it:ident, $now:expr, $own:ident, $body:expr) => {{
        let mut fresh = None;
        let $own = match $state {
            State::$variant(own) => own,
            _ => fresh.insert($it.fresh($now)),
        };
        $body
    }};
}

impl Algorithm for Limit {
    type State = State;

    fn fresh(&self, now: Timestamp) -> State {
        match self {
            Self::TokenBucket(it) => State::Bucket(it.fresh(now)),
            Self::IntervalBucket(it) => State::Interval(it.fresh(now)),
            Self::LeakyBucket(it) => State::Bucket(it.fresh(now)),
            Self::FixedWindow(it) => State::Window(it.fresh(now)),
            Self::SlidingLog(it) => State::Log(it.fresh(now)),
            Self::SlidingCounter(it) => State::Counter(it.fresh(now)),
            Self::CalendarQuota(it) => State::Calendar(it.fresh(now)),
        }
    }

    fn decide(&self, state: &mut State, now: Timestamp, ask: Ask) -> Outcome {
        self.adopt(state, now);
        let before = (ask.wait.is_some() && self.forgoes()).then(|| state.plain().clone());
        let outcome = self
            .with_beside(state, now, |state| dispatch!(self, state, now, |it, own| it.decide(own, now, ask)));
        match (outcome, before) {
            (Outcome::Admitted { delay }, Some(before)) if delay > Micros::ZERO => {
                self.note_forgone(state, &before, now, ask.cost, now.after(delay));
            }
            // The denial has counted what was left of the window.
            (Outcome::Denied { .. }, _) if self.counts_denied_in_window() => Self::forgo_for_good(state),
            (Outcome::Admitted { .. } | Outcome::Denied { .. } | Outcome::Impossible, _) => {}
        }
        outcome
    }

    fn status(&self, state: &State, now: Timestamp) -> Status {
        let state = state.plain();
        dispatch!(self, state, now, |it, own| it.status(own, now))
    }

    fn refund(&self, state: &mut State, now: Timestamp, cost: u64, at: Timestamp) {
        self.adopt(state, now);
        let forgone = Self::forgone_for(state, at);
        let restored = self.with_beside(state, now, |state| {
            let before = forgone.map(|_| state.clone());
            dispatch!(self, state, now, |it, own| it.refund(own, now, cost, at));
            match (forgone, before) {
                (Some(forgone), Some(before)) if *state != before => self.restore(state, forgone),
                _ => false,
            }
        });
        if restored {
            Self::forget_forgone(state, at);
        }
    }

    fn charge(&self, state: &mut State, now: Timestamp, cost: u64) {
        self.adopt(state, now);
        self.with_beside(state, now, |state| dispatch!(self, state, now, |it, own| it.charge(own, now, cost)))
    }

    fn full_at(&self, state: &State) -> Timestamp {
        if let State::Carried(carried) = state {
            return self.full_with_debt(&carried.state, carried.beside.carried_debt);
        }
        dispatch!(self, state, Timestamp::default(), |it, own| it.full_at(own))
    }
}

/// The five names that callers know.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum AlgorithmName {
    /// `TOKEN_BUCKET`
    TokenBucket,
    /// `LEAKY_BUCKET`
    LeakyBucket,
    /// `FIXED_WINDOW`
    FixedWindow,
    /// `SLIDING_WINDOW`: the exact log
    SlidingWindow,
    /// `SLIDING_WINDOW_COUNTER`
    SlidingWindowCounter,
}

impl AlgorithmName {
    /// All of them, in the order in which help texts list them.
    pub const ALL: [Self; 5] = [
        Self::TokenBucket,
        Self::LeakyBucket,
        Self::FixedWindow,
        Self::SlidingWindow,
        Self::SlidingWindowCounter,
    ];

    /// The name on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TokenBucket => "TOKEN_BUCKET",
            Self::LeakyBucket => "LEAKY_BUCKET",
            Self::FixedWindow => "FIXED_WINDOW",
            Self::SlidingWindow => "SLIDING_WINDOW",
            Self::SlidingWindowCounter => "SLIDING_WINDOW_COUNTER",
        }
    }

    /// The name in store keys and metric names.
    pub const fn as_lowercase(self) -> &'static str {
        match self {
            Self::TokenBucket => "token_bucket",
            Self::LeakyBucket => "leaky_bucket",
            Self::FixedWindow => "fixed_window",
            Self::SlidingWindow => "sliding_window",
            Self::SlidingWindowCounter => "sliding_window_counter",
        }
    }
}

impl fmt::Display for AlgorithmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for AlgorithmName {
    type Err = UnknownAlgorithm;

    fn from_str(name: &str) -> Result<Self, UnknownAlgorithm> {
        Self::ALL.into_iter().find(|it| it.as_str() == name).ok_or(UnknownAlgorithm)
    }
}

/// A name that none of the five algorithms has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected TOKEN_BUCKET, LEAKY_BUCKET, FIXED_WINDOW, SLIDING_WINDOW or SLIDING_WINDOW_COUNTER")]
pub struct UnknownAlgorithm;

/// Why parameters make no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LimitError {
    /// A limit of zero would be a wall.
    #[error("a limit needs room for at least 1 permit")]
    Empty,
    /// A window of zero would limit nothing.
    #[error("a window must be longer than zero")]
    NoWindow,
    /// Exact arithmetic ends here.
    #[error("too large to be exact: at most {max} permits with this period")]
    TooLarge {
        /// The largest size that fits.
        max: u64,
    },
    /// The window or the time to full is over 35 years.
    #[error("too slow: a key would take more than 35 years to recover")]
    TooSlow,
    /// Sub-buckets must be equally long.
    #[error("the window of {window_us} us cannot be cut into {sub_buckets} equal sub-buckets")]
    Uneven {
        /// The window asked for.
        window_us: u64,
        /// The sub-buckets asked for.
        sub_buckets: u32,
    },
    /// Counters keep every sub-bucket in memory.
    #[error("between 1 and {max} sub-buckets")]
    SubBuckets {
        /// The most that a counter keeps.
        max: u32,
    },
}
