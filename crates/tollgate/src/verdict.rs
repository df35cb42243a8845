//! Decisions, and the basis on which each was made.

use smallvec::SmallVec;
use tollgate_core::Decision;

/// The basis of a decision.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Basis {
    /// The whole state was known.
    Exact,
    /// Decided by this node, with permits borrowed from the store or by a cached denial of the store.
    Leased,
    /// Decided by this node alone, with its share of the limit.
    Local,
    /// Admitted, because the store gave no decision.
    Open,
    /// Denied, because the store gave no decision.
    Closed,
}

impl Basis {
    /// All of them, in the order of metrics.
    pub const ALL: [Self; 5] = [Self::Exact, Self::Leased, Self::Local, Self::Open, Self::Closed];

    /// Its name in answers, headers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Leased => "leased",
            Self::Local => "local",
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }
}

/// A decision and its basis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The decision.
    pub decision: Decision,
    /// Its basis.
    pub basis: Basis,
}

impl Verdict {
    /// A decision by the whole state.
    pub const fn exact(decision: Decision) -> Self {
        Self { decision, basis: Basis::Exact }
    }

    /// Whether the request may go ahead, now or after its delay.
    pub const fn is_admitted(&self) -> bool {
        self.decision.is_admitted()
    }
}

/// The verdicts on the checks of a request, in order. `None`: the check was not decided, because another limit is known to deny the
/// request, or because the check is only counted and would have delayed the others.
pub type Verdicts = SmallVec<[Option<Verdict>; 1]>;
