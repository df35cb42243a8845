//! The result of one check, as its caller has seen it.

use serde::{Deserialize, Serialize};
use tollgate::Basis;

/// Microseconds on the clock that all processes of a machine share.
pub(crate) fn now_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000
}

/// On what ground a check was answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Ground {
    Exact,
    Leased,
    Local,
    Open,
    Closed,
    /// There was no answer.
    None,
}

impl From<Basis> for Ground {
    fn from(basis: Basis) -> Self {
        match basis {
            Basis::Exact => Self::Exact,
            Basis::Leased => Self::Leased,
            Basis::Local => Self::Local,
            Basis::Open => Self::Open,
            Basis::Closed => Self::Closed,
        }
    }
}

/// One check.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    /// When the answer was there.
    pub(crate) at_us: u64,
    /// How long it took.
    pub(crate) took_us: u64,
    /// Who was asked: 0 is the program that embeds the library.
    pub(crate) node: u8,
    /// Which of [`LIMITS`](crate::traffic::LIMITS).
    pub(crate) limit: u8,
    pub(crate) key: u32,
    pub(crate) allowed: bool,
    pub(crate) ground: Ground,
    /// The HTTP status; 0 in process, or without an answer.
    pub(crate) status: u16,
}
