//! Which rules deny: for the log line when a rule starts to.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A rule that has denied nothing for this long starts to deny with its next denial. So a flood makes one log line for each rule.
const QUIET: Duration = Duration::from_secs(10);

/// When each rule last denied a request.
pub(crate) struct Denials {
    zero: Instant,
    /// Milliseconds after `zero`, plus one; 0 for never.
    last_ms: Box<[AtomicU64]>,
}

impl Denials {
    pub(crate) fn new(rules: usize) -> Self {
        Self { zero: Instant::now(), last_ms: (0..rules).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Records a denial by a rule. True if the rule starts to deny with it.
    pub(crate) fn record(&self, rule: usize) -> bool {
        self.record_at(rule, self.zero.elapsed())
    }

    fn record_at(&self, rule: usize, now: Duration) -> bool {
        let Some(last) = self.last_ms.get(rule) else { return false };
        let now_ms = now.as_millis() as u64 + 1;
        let before = last.swap(now_ms, Ordering::Relaxed);
        before == 0 || now_ms.saturating_sub(before) >= QUIET.as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_starts_to_deny_once_until_it_was_quiet_for_a_while() {
        let denials = Denials::new(2);
        let record = |rule, ms| denials.record_at(rule, Duration::from_millis(ms));
        assert_eq!([record(0, 0), record(0, 1), record(1, 1), record(0, 9_000)], [true, false, true, false]);
        assert_eq!([record(0, 18_999), record(0, 28_999), record(7, 0)], [false, true, false]);
    }
}
