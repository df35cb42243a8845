//! Instants and lengths of time, in whole microseconds.

/// An instant, in microseconds since the Unix epoch.
///
/// At most 2^53 - 1 (the year 2255), because Redis scripts compute with doubles and must get the same results.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The last instant that can be told apart from its neighbours in a double.
    pub const MAX: Self = Self((1 << 53) - 1);

    /// The instant this many microseconds after the epoch, or [`Timestamp::MAX`] if that is earlier.
    pub const fn from_micros(us: u64) -> Self {
        if us > Self::MAX.0 as u64 { Self::MAX } else { Self(us as i64) }
    }

    /// Microseconds since the epoch.
    pub const fn as_micros(self) -> u64 {
        self.0 as u64
    }

    /// The instant `wait` later, at most [`Timestamp::MAX`].
    pub const fn after(self, wait: Micros) -> Self {
        Self::from_micros((self.0 as u64).saturating_add(wait.0))
    }

    /// Time from `earlier` to this instant; zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Micros {
        Micros((self.0 as u64).saturating_sub(earlier.0 as u64))
    }

    /// Whole seconds since the epoch, rounded up, so that the promise of a "reset at" header has come true by then.
    pub const fn as_secs_ceil(self) -> u64 {
        (self.0 as u64).div_ceil(1_000_000)
    }

    pub(crate) const fn us(self) -> i64 {
        self.0
    }

    pub(crate) const fn at(us: i64) -> Self {
        if us < 0 { Self(0) } else { Self::from_micros(us as u64) }
    }
}

/// A length of time, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Micros(u64);

impl Micros {
    /// No time at all.
    pub const ZERO: Self = Self(0);

    /// This many microseconds.
    pub const fn new(us: u64) -> Self {
        Self(us)
    }

    /// This many milliseconds.
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000))
    }

    /// This many seconds.
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000))
    }

    /// The number of microseconds.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Whole milliseconds, rounded up: a caller must not start earlier.
    pub const fn as_millis_ceil(self) -> u64 {
        self.0.div_ceil(1_000)
    }

    /// Whole seconds, rounded up: a caller that retries earlier would be denied again.
    pub const fn as_secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    pub(crate) const fn us(self) -> i64 {
        if self.0 > i64::MAX as u64 { i64::MAX } else { self.0 as i64 }
    }

    /// This many microseconds, or zero if negative.
    pub(crate) const fn of(us: i64) -> Self {
        Self(if us < 0 { 0 } else { us as u64 })
    }
}

impl From<core::time::Duration> for Micros {
    /// Rounded up to the next microsecond.
    fn from(duration: core::time::Duration) -> Self {
        Self(duration.as_nanos().div_ceil(1_000).min(u128::from(u64::MAX)) as u64)
    }
}

impl From<Micros> for core::time::Duration {
    fn from(micros: Micros) -> Self {
        Self::from_micros(micros.0)
    }
}
