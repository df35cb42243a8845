//! A limit: one of the algorithms with its parameters, chosen at run time.

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

/// An algorithm with its parameters. A value of this type is always valid.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Limit {
    /// Tokens flow back evenly.
    TokenBucket(TokenBucket),
    /// Tokens come back all at once, at the end of each period.
    IntervalBucket(IntervalBucket),
    /// Water drains evenly: a meter, or a queue that spaces its callers.
    LeakyBucket(LeakyBucket),
    /// Counts permits for each window of the clock.
    FixedWindow(FixedWindow),
    /// Keeps every admission of the trailing window.
    SlidingLog(SlidingLog),
    /// Counts permits in a few sub-buckets, the oldest weighted.
    SlidingCounter(SlidingCounter),
    /// Counts permits for each day, week or month of a time zone.
    CalendarQuota(CalendarQuota),
}

/// Runs an expression with the algorithm of a limit, as its own type.
#[macro_export]
macro_rules! with_algorithm {
    ($limit:expr, |$it:ident| $body:expr) => {
        match $limit {
            $crate::Limit::TokenBucket($it) => $body,
            $crate::Limit::IntervalBucket($it) => $body,
            $crate::Limit::LeakyBucket($it) => $body,
            $crate::Limit::FixedWindow($it) => $body,
            $crate::Limit::SlidingLog($it) => $body,
            $crate::Limit::SlidingCounter($it) => $body,
            $crate::Limit::CalendarQuota($it) => $body,
        }
    };
}

impl Limit {
    /// The name under which callers choose the algorithm. Both refills of the token bucket have one name. A quota is a fixed window of
    /// the calendar.
    pub const fn algorithm(&self) -> AlgorithmName {
        match self {
            Self::TokenBucket(_) | Self::IntervalBucket(_) => AlgorithmName::TokenBucket,
            Self::LeakyBucket(_) => AlgorithmName::LeakyBucket,
            Self::FixedWindow(_) | Self::CalendarQuota(_) => AlgorithmName::FixedWindow,
            Self::SlidingLog(_) => AlgorithmName::SlidingWindow,
            Self::SlidingCounter(_) => AlgorithmName::SlidingWindowCounter,
        }
    }

    /// The name that its states have in store keys: the algorithm, or the calendar of a quota. Quotas of different calendars count apart.
    pub fn home(&self) -> Cow<'static, str> {
        if let Self::CalendarQuota(it) = self {
            return format!("calendar_{}", it.calendar().slug()).into();
        }
        self.algorithm().as_lowercase().into()
    }

    /// The most permits that an unused key could take at once.
    #[inline]
    pub fn size(&self) -> u64 {
        with_algorithm!(self, |it| it.size())
    }

    /// The time in which [`Limit::size`] permits come back: time to full, or the window.
    pub fn horizon(&self) -> Micros {
        with_algorithm!(self, |it| it.horizon())
    }

    /// The longest wait for a turn, if the limit is a queue.
    pub fn queue_length(&self) -> Option<Micros> {
        matches!(self, Self::LeakyBucket(it) if it.mode() == LeakyMode::Queue).then(|| self.horizon())
    }

    /// The cost of a check for the store, in checks of a bucket. A counter with many sub-buckets has many fields, and a log is searched.
    pub fn work(&self) -> usize {
        match self {
            Self::TokenBucket(_)
            | Self::IntervalBucket(_)
            | Self::LeakyBucket(_)
            | Self::FixedWindow(_)
            | Self::CalendarQuota(_) => 1,
            Self::SlidingCounter(it) => 2 + (it.sub_buckets() as usize / 4).min(60),
            Self::SlidingLog(_) => 5,
        }
    }

    /// Whether denied requests count too.
    pub const fn counts_denied(&self) -> bool {
        match self {
            Self::FixedWindow(it) => it.counts_denied(),
            Self::SlidingLog(it) => it.counts_denied(),
            Self::SlidingCounter(it) => it.counts_denied(),
            Self::TokenBucket(_)
            | Self::IntervalBucket(_)
            | Self::LeakyBucket(_)
            | Self::CalendarQuota(_) => false,
        }
    }

    /// Takes a state for used up as far as writes before `since` may have been lost, among them leases with this `life`. Logs keep every
    /// admission and are trusted.
    pub fn distrust(&self, state: &mut State, now: Timestamp, since: Timestamp, life: Micros) {
        let state = state.plain_mut();
        match (self, self.bucket(), &mut *state) {
            (_, Some(it), State::Bucket(state)) => it.distrust(state, since, life),
            (_, Some(it), State::Lent(state)) => it.distrust(&mut state.bucket, since, life),
            (Self::IntervalBucket(it), _, State::Interval(state)) => it.distrust(state, since),
            (Self::FixedWindow(it), _, State::Window(state)) => it.distrust(state, now, since),
            (Self::SlidingCounter(it), _, State::Counter(state)) => it.distrust(state, now, since),
            (Self::CalendarQuota(it), _, State::Calendar(state)) => it.distrust(state, now, since),
            (Self::SlidingLog(_), ..) => {}
            _ => *state = self.fresh(now),
        }
    }

    /// The bucket that refills evenly, if the limit has one.
    pub const fn bucket(&self) -> Option<&TokenBucket> {
        match self {
            Self::TokenBucket(it) => Some(it),
            Self::LeakyBucket(it) => Some(it.room()),
            Self::IntervalBucket(_)
            | Self::FixedWindow(_)
            | Self::SlidingLog(_)
            | Self::SlidingCounter(_)
            | Self::CalendarQuota(_) => None,
        }
    }

    /// The bucket that can lend permits, if the limit has one. A queue spaces its callers, which a lease would undo.
    pub const fn lender(&self) -> Option<LeaseBucket> {
        match self.bucket() {
            Some(_) if matches!(self, Self::LeakyBucket(it) if matches!(it.mode(), LeakyMode::Queue)) => None,
            Some(it) => Some(LeaseBucket(*it)),
            None => None,
        }
    }

    /// Takes back permits that were lent. Permits that were not `counted` as out are an ordinary refund.
    pub fn take_back(&self, state: &mut State, now: Timestamp, permits: u64, at: Timestamp, counted: bool) {
        if !counted {
            return self.refund(state, now, permits, at);
        }
        self.with_beside(state, now, |state| {
            // A state without leases has nothing out.
            if let (Some(lender), State::Lent(lent)) = (self.lender(), state) {
                lender.take_back(lent, now, permits, at);
            }
        });
    }

    /// Replaces a state of another algorithm by a fresh one.
    fn adopt(&self, state: &mut State, now: Timestamp) {
        let plain = state.plain();
        let is_lent = matches!(plain, State::Lent(_)) && self.lender().is_some();
        if !is_lent && !with_algorithm!(self, |it| owns(it, plain)) {
            *state = self.fresh(now);
        }
    }
}

/// Whether a state is one of this algorithm.
fn owns<A: Algorithm<State: PlainState>>(_: &A, state: &State) -> bool {
    A::State::of(state).is_some()
}

/// The state of one key, for any algorithm.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// Of a token bucket or a leaky bucket.
    Bucket(BucketState),
    /// Of a bucket with permits out on leases.
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
    /// Of any of them, with data that is kept beside it.
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

/// The state of one algorithm, which a [`State`] holds.
pub trait PlainState: Clone + Into<State> {
    /// This state, if the given one holds it.
    fn of(state: &State) -> Option<&Self>;

    /// This state, to be changed, if the given one holds it.
    fn of_mut(state: &mut State) -> Option<&mut Self>;
}

macro_rules! plain_state {
    ($variant:ident, $state:ident) => {
        impl From<$state> for State {
            fn from(state: $state) -> Self {
                Self::$variant(state)
            }
        }

        impl PlainState for $state {
            fn of(state: &State) -> Option<&Self> {
                if let State::$variant(own) = state { Some(own) } else { None }
            }

            fn of_mut(state: &mut State) -> Option<&mut Self> {
                if let State::$variant(own) = state { Some(own) } else { None }
            }
        }
    };
}

plain_state!(Bucket, BucketState);
plain_state!(Interval, IntervalState);
plain_state!(Window, WindowState);
plain_state!(Log, LogState);
plain_state!(Counter, CounterState);
plain_state!(Calendar, CalendarState);

/// Runs `$body` with the algorithm and its own state, which `$of` reads. A state of another algorithm counts as missing.
macro_rules! dispatch {
    ($limit:expr, $state:expr, $of:ident, $now:expr, |$it:ident, $own:ident| $body:expr) => {
        if let State::Lent($own) = $state
            && let Some($it) = $limit.lender()
        {
            $body
        } else {
            with_algorithm!($limit, |$it| {
                let mut fresh = None;
                let $own = match PlainState::$of($state) {
                    Some(own) => own,
                    None => fresh.insert($it.fresh($now)),
                };
                $body
            })
        }
    };
}

impl Algorithm for Limit {
    type State = State;

    fn size(&self) -> u64 {
        Self::size(self)
    }

    fn horizon(&self) -> Micros {
        Self::horizon(self)
    }

    fn fresh(&self, now: Timestamp) -> State {
        with_algorithm!(self, |it| it.fresh(now).into())
    }

    fn take(&self, state: &mut State, now: Timestamp, ask: Ask) -> Outcome {
        self.adopt(state, now);
        let before = (ask.wait.is_some() && self.forgoes()).then(|| state.plain().clone());
        let outcome = self.with_beside(state, now, |state| {
            dispatch!(self, state, of_mut, now, |it, own| it.take(own, now, ask))
        });
        match (outcome, before) {
            (Outcome::Admitted { delay }, Some(before)) if delay > Micros::ZERO => {
                self.note_forgone(state, &before, now, ask.cost, now.after(delay));
            }
            // The denial has counted the permits left in the window.
            (Outcome::Denied { .. }, _) if self.counts_denied_in_window() => Self::forgo_for_good(state),
            (Outcome::Admitted { .. } | Outcome::Denied { .. } | Outcome::Impossible, _) => {}
        }
        outcome
    }

    fn status(&self, state: &State, now: Timestamp) -> Status {
        let state = state.plain();
        dispatch!(self, state, of, now, |it, own| it.status(own, now))
    }

    fn refund(&self, state: &mut State, now: Timestamp, cost: u64, at: Timestamp) {
        self.adopt(state, now);
        let forgone = Self::forgone_for(state, at);
        let restored = self.with_beside(state, now, |state| {
            let before = forgone.map(|_| state.clone());
            dispatch!(self, state, of_mut, now, |it, own| it.refund(own, now, cost, at));
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
        self.with_beside(state, now, |state| {
            dispatch!(self, state, of_mut, now, |it, own| it.charge(own, now, cost))
        })
    }

    fn full_at(&self, state: &State) -> Timestamp {
        if let State::Carried(carried) = state {
            return self.full_with_debt(&carried.state, carried.beside.carried_debt);
        }
        dispatch!(self, state, of, Timestamp::default(), |it, own| it.full_at(own))
    }
}

/// The name of an algorithm, as callers write it.
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
    /// All names, in the order of help texts.
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

/// The name is not one of an algorithm.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected TOKEN_BUCKET, LEAKY_BUCKET, FIXED_WINDOW, SLIDING_WINDOW or SLIDING_WINDOW_COUNTER")]
pub struct UnknownAlgorithm;

/// Why parameters do not make a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LimitError {
    /// A limit of zero would deny everything.
    #[error("a limit needs room for at least 1 permit")]
    Empty,
    /// A window of zero would limit nothing.
    #[error("a window must be longer than zero")]
    NoWindow,
    /// The arithmetic would not be exact.
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
