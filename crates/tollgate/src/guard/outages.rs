//! Log lines about outages: the first failure of a cause at once, then at most one a second, and the end with its duration.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::redis::StoreError;

/// The pause between two log lines of one cause.
const LOG_EVERY: Duration = Duration::from_secs(1);
/// An outage is over when no check has failed for this long. Otherwise an unstable store would log its recovery after each failure.
const OVER_AFTER: Duration = Duration::from_secs(1);

/// The outage under way, if there is one.
#[derive(Default)]
pub(super) struct Outages {
    /// Whether there is one. Every decision reads this.
    is_under_way: AtomicBool,
    outage: Mutex<Option<Outage>>,
}

struct Outage {
    begun: Instant,
    /// The last check that the store did not decide.
    last: Instant,
    why: StoreError,
    /// The first sign after that check that the store decides again.
    back: Option<Instant>,
    /// Checks that the store did not decide.
    checks: u64,
    /// By [`StoreError::CLASSES`].
    causes: [Cause; StoreError::CLASSES.len()],
}

#[derive(Clone, Copy, Default)]
struct Cause {
    logged: Option<Instant>,
    /// Checks since then that have no log line.
    left_out: u64,
}

impl Outages {
    /// Records a check that the store did not decide, and logs it unless its cause was just logged.
    pub(super) fn note(&self, rule: &str, key: &str, why: &StoreError) {
        if let Some(left_out) = self.count(why, Instant::now()) {
            tracing::error!(cause = why.class(), rule, key, left_out, "the store gave no decision: {why}");
        }
    }

    /// Counts a failure. Returns how many of its cause were left out since the last log line, if it is time for another.
    fn count(&self, why: &StoreError, now: Instant) -> Option<u64> {
        let mut outage = self.outage.lock();
        let outage = outage.get_or_insert_with(|| Outage {
            begun: now,
            last: now,
            why: why.clone(),
            back: None,
            checks: 0,
            causes: [Cause::default(); StoreError::CLASSES.len()],
        });
        self.is_under_way.store(true, Ordering::Relaxed);
        (outage.last, outage.back) = (now, None);
        outage.checks += 1;
        let class = StoreError::CLASSES.iter().position(|class| *class == why.class())?;
        let cause = &mut outage.causes[class];
        if cause.logged.is_some_and(|logged| now - logged < LOG_EVERY) {
            cause.left_out += 1;
            return None;
        }
        outage.why = why.clone();
        cause.logged = Some(now);
        Some(std::mem::take(&mut cause.left_out))
    }

    /// Records that the store has decided a check.
    #[inline]
    pub(super) fn decided(&self) {
        if self.is_under_way.load(Ordering::Relaxed) {
            self.back(Instant::now());
        }
    }

    /// Records a sign that the store decides again.
    pub(super) fn back(&self, at: Instant) {
        if let Some(outage) = &mut *self.outage.lock()
            && at > outage.last
        {
            outage.back.get_or_insert(at);
        }
    }

    /// Why the store has not decided the last check of an outage, unless it has decided others since.
    pub(super) fn why(&self) -> Option<StoreError> {
        self.outage.lock().as_ref().filter(|outage| outage.back.is_none()).map(|outage| outage.why.clone())
    }

    /// Logs the end of the outage, once the store decides again and no check has failed for a while.
    pub(super) fn end(&self) {
        if let Some((lasted, checks)) = self.ended(Instant::now()) {
            let duration_ms = lasted.as_millis() as u64;
            tracing::info!(duration_ms, checks, "the store decides again");
        }
    }

    /// How long the outage lasted, from its first failed check to the first sign that the store decides again, and how many checks failed.
    fn ended(&self, now: Instant) -> Option<(Duration, u64)> {
        let mut outage = self.outage.lock();
        let ended = outage.take_if(|it| it.back.is_some() && now - it.last >= OVER_AFTER)?;
        self.is_under_way.store(false, Ordering::Relaxed);
        Some((ended.back? - ended.begun, ended.checks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_logged_at_once_and_then_once_a_second_with_a_count() {
        let (outages, start) = (Outages::default(), Instant::now());
        let after = |ms| start + Duration::from_millis(ms);
        let (late, full) = (StoreError::Timeout(Duration::ZERO), StoreError::Overloaded);
        assert_eq!(outages.count(&late, after(0)), Some(0));
        assert_eq!([1, 2, 999].map(|ms| outages.count(&late, after(ms))), [None; 3]);
        assert_eq!(outages.count(&full, after(3)), Some(0), "another cause has its own line");
        assert_eq!(outages.count(&late, after(1_000)), Some(3));
        outages.back(after(1_500));
        assert_eq!(outages.count(&late, after(2_000)), Some(0));
        assert_eq!(outages.ended(after(3_000)), None, "nothing was decided since the last failure");
        assert!(outages.why().is_some());
        outages.back(after(2_000));
        assert_eq!(outages.ended(after(8_000)), None, "a sign of the instant of the failure says nothing");
        outages.back(after(8_500));
        outages.back(after(8_600));
        assert!(outages.why().is_none());
        assert_eq!(outages.ended(after(9_000)), Some((Duration::from_millis(8_500), 7)));
        assert_eq!(outages.ended(after(9_000)), None, "the end is logged once");
        assert_eq!(outages.count(&late, after(9_001)), Some(0), "another outage begins anew");
        outages.back(after(9_100));
        assert_eq!(outages.ended(after(9_900)), None, "a store that stutters");
    }
}
