//! Laws that every decision of the core keeps. The fake store checks them with each call.

use tollgate_core::{Algorithm, Ask, Limit, Micros, State, Timestamp};

/// A law that every decision of the core keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Law {
    /// Deleting a state when it is full changes no answer.
    Deletion,
    /// A run of asks is answered as each alone.
    Batch,
    /// A denied caller is admitted after the promised wait, and not before.
    Retry,
}

/// Denied a microsecond before, admitted at it. That a clock was set back is noted by the denial itself.
pub(super) fn is_exact(limit: &Limit, seen: &State, now: Timestamp, ask: Ask, retry: Micros) -> bool {
    let mut seen = seen.clone();
    limit.decide(&mut seen, now, ask);
    let then = now.after(retry);
    let before = Timestamp::from_micros(then.as_micros() - 1);
    limit.peek(&seen, then, ask).is_admitted() && !limit.peek(&seen, before, ask).is_admitted()
}

/// As a script decides a run of equal asks: as many as fit into what is left.
pub(super) fn is_batch_alike(limit: &Limit, seen: &State, now: Timestamp, cost: u64) -> bool {
    let fit = limit.status(seen, now).remaining / cost.max(1);
    let mut state = seen.clone();
    let admitted = (0..3).filter(|_| limit.decide(&mut state, now, Ask::of(cost)).is_admitted()).count();
    admitted as u64 == fit.min(3)
}
