//! Asks, outcomes, statuses and decisions.

use crate::time::{Micros, Timestamp};

/// One request, as a limit sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    /// How many permits it takes. Zero takes none.
    pub cost: u64,
    /// The delay that the caller accepts instead of a denial. `None` means no delay, except for a queue, whose callers
    /// wait for their turn however long it takes.
    pub wait: Option<Micros>,
}

impl Ask {
    /// Asks for `cost` permits, now or not at all.
    pub const fn of(cost: u64) -> Self {
        Self { cost, wait: None }
    }

    /// The same ask, by a caller that accepts a wait.
    pub const fn within(self, wait: Micros) -> Self {
        Self { wait: Some(wait), ..self }
    }
}

/// Whether the request may go ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Yes, after `delay`. The permits are taken.
    Admitted {
        /// How long the caller delays the request; zero for "at once".
        delay: Micros,
    },
    /// No. Nothing was taken.
    Denied {
        /// After this time the same call would be admitted if no other request came. One microsecond earlier it would be denied.
        retry: Micros,
    },
    /// Never: the cost is above the size of the limit. Waiting does not help.
    Impossible,
}

impl Outcome {
    /// Admitted without delay.
    pub const NOW: Self = Self::Admitted { delay: Micros::ZERO };

    /// Whether the request may go ahead, now or after its delay.
    pub const fn is_admitted(self) -> bool {
        matches!(self, Self::Admitted { .. })
    }

    /// The delay of an admitted request.
    pub const fn delay(self) -> Micros {
        match self {
            Self::Admitted { delay } => delay,
            Self::Denied { .. } | Self::Impossible => Micros::ZERO,
        }
    }

    /// The wait of a denied caller before it asks again.
    pub const fn retry(self) -> Micros {
        match self {
            Self::Denied { retry } => retry,
            Self::Admitted { .. } | Self::Impossible => Micros::ZERO,
        }
    }
}

/// Permits left and time to reset of a key at an instant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// Whole permits that could be taken now, rounded down.
    pub remaining: u64,
    /// Until full again (buckets), until the window ends (fixed window, counter), until the oldest entry leaves
    /// (log); zero for an unused key.
    pub reset: Micros,
}

/// The whole answer to one check, from one evaluation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decision {
    /// Whether the request may go ahead.
    pub outcome: Outcome,
    /// The size of the limit: the most permits that an unused key could take at once.
    pub limit: u64,
    /// Whole permits left after this decision.
    pub remaining: u64,
    /// As in [`Status`].
    pub reset: Micros,
    /// When it was decided, on the clock of the engine or the store. A refund names this and the delay.
    pub at: Timestamp,
}

impl Decision {
    /// Whether the request may go ahead, now or after its delay.
    pub const fn is_admitted(&self) -> bool {
        self.outcome.is_admitted()
    }

    /// The status of the key after this decision.
    pub const fn status(&self) -> Status {
        Status { remaining: self.remaining, reset: self.reset }
    }
}
