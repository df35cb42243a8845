//! What is asked of a limit, and what it answers.

use crate::time::{Micros, Timestamp};

/// One request, as a limit sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    /// How many permits it takes. Zero takes none: a peek.
    pub cost: u64,
    /// The delay that the caller accepts instead of a denial. `None`: not stated, which is no delay for every
    /// algorithm but the queue, whose callers wait for their turn however long the queue is.
    pub wait: Option<Micros>,
}

impl Ask {
    /// `cost` permits, now or not at all.
    pub const fn of(cost: u64) -> Self {
        Self { cost, wait: None }
    }

    /// The same, by a caller that is ready to wait.
    pub const fn within(self, wait: Micros) -> Self {
        Self { wait: Some(wait), ..self }
    }
}

/// Whether the request may go ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Yes, after `delay`. The permits are taken.
    Admitted {
        /// How long the caller holds the request back; zero for "at once".
        delay: Micros,
    },
    /// No. Nothing was taken.
    Denied {
        /// The same call would be admitted after this long, if nobody else asked: refused one microsecond before.
        retry: Micros,
    },
    /// Never: the cost is above what the limit can hold. Waiting does not help.
    Impossible,
}

impl Outcome {
    /// Admitted without delay.
    pub const NOW: Self = Self::Admitted { delay: Micros::ZERO };

    /// Whether the request may go ahead, now or after its delay.
    pub const fn is_admitted(self) -> bool {
        matches!(self, Self::Admitted { .. })
    }

    /// How long an admitted request is to be held back.
    pub const fn delay(self) -> Micros {
        match self {
            Self::Admitted { delay } => delay,
            Self::Denied { .. } | Self::Impossible => Micros::ZERO,
        }
    }

    /// How long a denied caller waits before it asks again.
    pub const fn retry(self) -> Micros {
        match self {
            Self::Denied { retry } => retry,
            Self::Admitted { .. } | Self::Impossible => Micros::ZERO,
        }
    }
}

/// Where a key stands at an instant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// Whole permits that could be taken now, rounded down.
    pub remaining: u64,
    /// Until full again (buckets), until the window ends (fixed window, counter), until the oldest entry leaves
    /// (log); zero for a key that is as good as new.
    pub reset: Micros,
}

/// The whole answer to one check, all of it from the same evaluation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decision {
    /// Whether the request may go ahead.
    pub outcome: Outcome,
    /// The limit's size: what a key that was never used could take at once.
    pub limit: u64,
    /// Whole permits left after this decision.
    pub remaining: u64,
    /// As in [`Status`].
    pub reset: Micros,
    /// When it was decided, on the clock of whoever decided. A refund names this and the delay.
    pub at: Timestamp,
}

impl Decision {
    /// Whether the request may go ahead, now or after its delay.
    pub const fn is_admitted(&self) -> bool {
        self.outcome.is_admitted()
    }

    /// Where the key stands after this decision.
    pub const fn status(&self) -> Status {
        Status { remaining: self.remaining, reset: self.reset }
    }
}
