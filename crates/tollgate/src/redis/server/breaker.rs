//! The circuit breaker of one server: adds a clock, random numbers, log lines and the reason to the pure breaker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::{Breaker, BreakerConfig, BreakerState, CallOutcome, Pass, Timestamp};

use crate::redis::error::StoreError;

/// Decides which calls to a server go through.
pub(crate) struct ServerBreaker {
    server: Arc<str>,
    /// The breaker's time begins here.
    zero: Instant,
    inner: Mutex<Inner>,
    opened: AtomicU64,
}

struct Inner {
    breaker: Breaker,
    /// The last failure.
    why: Arc<str>,
    /// Whether that failure left the server reachable.
    reachable: bool,
    /// If it is open because the server was too slow: since when, and how long fast answers to other commands are ignored.
    slow: Option<Slow>,
}

#[derive(Clone, Copy)]
struct Slow {
    since: Instant,
    doubt: Duration,
}

/// How long fast answers are ignored after a server was too slow, the first time. The time doubles each time.
const DOUBT_MIN: Duration = Duration::from_millis(50);
/// The longest of these times: by default the wait of the breaker is over soon after.
const DOUBT_MAX: Duration = Duration::from_millis(400);

/// A call under way. If its outcome is not recorded, it counts as given up.
pub(crate) struct BreakerPermit {
    breaker: Arc<ServerBreaker>,
    pass: Pass,
    recorded: bool,
}

impl ServerBreaker {
    pub(crate) fn new(server: Arc<str>, config: BreakerConfig) -> Arc<Self> {
        let inner = Inner { breaker: Breaker::new(config), why: "".into(), reachable: true, slow: None };
        Arc::new(Self { server, zero: Instant::now(), inner: Mutex::new(inner), opened: AtomicU64::new(0) })
    }

    /// Lets a call through, or says why not.
    pub(crate) fn permit(self: &Arc<Self>, now: Instant) -> Result<BreakerPermit, StoreError> {
        let now = self.at(now);
        let mut inner = self.inner.lock();
        match inner.breaker.permit(now) {
            Some(pass) => Ok(BreakerPermit { breaker: Arc::clone(self), pass, recorded: false }),
            None => Err(self.refusal(&inner)),
        }
    }

    /// Records a new connection, so that the next call may try.
    pub(crate) fn reachable(&self) {
        // A half-open breaker is not worth a log line.
        let _ = self.inner.lock().breaker.reachable();
    }

    /// Whether it is open because the server was too slow.
    pub(crate) fn is_slow(&self) -> bool {
        self.inner.lock().slow.is_some()
    }

    /// Records an answer in time to another command than a check. If the breaker is open because the server was too slow, the next
    /// call may try, so that a short stall does not cost half a second.
    pub(crate) fn prompt(&self) {
        let mut inner = self.inner.lock();
        if inner.slow.is_some_and(|slow| slow.since.elapsed() >= slow.doubt) {
            let _ = inner.breaker.reachable();
        }
    }

    /// Records a background success, so that the breaker can close.
    pub(crate) fn record_background_success(self: &Arc<Self>) {
        if self.state() != BreakerState::Closed
            && let Ok(permit) = self.permit(Instant::now())
        {
            permit.succeeded();
        }
    }

    /// Its state.
    pub(crate) fn state(&self) -> BreakerState {
        self.inner.lock().breaker.state()
    }

    /// How often it has opened.
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Whether the next call goes through, or why not. An open breaker whose wait is over counts as healthy.
    pub(crate) fn health(&self) -> Result<(), StoreError> {
        let now = self.now();
        let inner = self.inner.lock();
        if inner.breaker.is_refusing(now) { Err(self.refusal(&inner)) } else { Ok(()) }
    }

    fn refusal(&self, inner: &Inner) -> StoreError {
        let (server, why) = (Arc::clone(&self.server), Arc::clone(&inner.why));
        StoreError::BreakerOpen { server, why, reachable: inner.reachable }
    }

    fn now(&self) -> Timestamp {
        self.at(Instant::now())
    }

    fn at(&self, now: Instant) -> Timestamp {
        Timestamp::from_micros(now.saturating_duration_since(self.zero).as_micros() as u64)
    }

    fn record(&self, pass: Pass, outcome: CallOutcome, why: Option<&StoreError>, now: Timestamp) {
        let mut jitter = [0];
        if why.is_some() {
            // Without randomness the wait is the plain one.
            let _ = getrandom::fill(&mut jitter);
        }
        let mut inner = self.inner.lock();
        let was = inner.breaker.state();
        let changed = inner.breaker.record(pass, outcome, now, jitter[0]);
        match changed {
            Some(BreakerState::Open) => {
                inner.why = why.map_or_else(|| "".into(), |why| why.to_string().into());
                inner.reachable = why.is_none_or(StoreError::is_reachable);
                let doubt = inner.slow.map_or(DOUBT_MIN, |slow| DOUBT_MAX.min(slow.doubt * 2));
                let is_slow = matches!(why, Some(StoreError::Timeout(_)));
                inner.slow = is_slow.then(|| Slow { since: Instant::now(), doubt });
                // A failed probe is part of the same outage.
                if was == BreakerState::Closed {
                    self.opened.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(server = %self.server, why = %inner.why, "circuit breaker open");
                }
            }
            Some(BreakerState::Closed) => {
                inner.slow = None;
                tracing::info!(server = %self.server, "circuit breaker closed again");
            }
            Some(BreakerState::HalfOpen) | None => {}
        }
    }
}

impl BreakerPermit {
    /// Records a success: the server decided, or redirected the call.
    pub(crate) fn succeeded(self) {
        self.succeeded_at(Instant::now());
    }

    /// The same, at an instant that was just read.
    pub(crate) fn succeeded_at(mut self, now: Instant) {
        self.recorded = true;
        self.breaker.record(self.pass, CallOutcome::Succeeded, None, self.breaker.at(now));
    }

    /// Records a failure.
    pub(crate) fn failed(mut self, why: &StoreError) {
        let late = matches!(why, StoreError::Timeout(_));
        let outcome = if late { CallOutcome::TimedOut } else { CallOutcome::Failed };
        self.record(outcome, Some(why));
    }

    fn record(&mut self, outcome: CallOutcome, why: Option<&StoreError>) {
        self.recorded = true;
        self.breaker.record(self.pass, outcome, why, self.breaker.now());
    }
}

impl Drop for BreakerPermit {
    fn drop(&mut self) {
        if !self.recorded {
            self.record(CallOutcome::Forgone, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(breaker: &Arc<ServerBreaker>, failure: Option<&StoreError>) -> bool {
        let Ok(permit) = breaker.permit(Instant::now()) else { return false };
        match failure {
            Some(why) => permit.failed(why),
            None => permit.succeeded(),
        }
        true
    }

    #[test]
    fn slowness_is_forgotten_when_the_breaker_closes_and_openings_are_counted_once() {
        let breaker = ServerBreaker::new("server".into(), BreakerConfig::default());
        let late = StoreError::Timeout(Duration::from_millis(10));
        for outage in 1..=3 {
            while call(&breaker, Some(&late)) {}
            assert!(breaker.is_slow() && breaker.health().is_err());
            // A probe that fails is the same outage.
            breaker.reachable();
            assert!(call(&breaker, Some(&late)) && !call(&breaker, None));
            assert_eq!(breaker.opened(), outage);
            breaker.reachable();
            assert!((0..3).all(|_| call(&breaker, None)));
            assert!(
                breaker.state() == BreakerState::Closed && !breaker.is_slow() && breaker.health().is_ok()
            );
        }
        let gone = StoreError::Overloaded;
        while call(&breaker, Some(&gone)) {}
        assert!(!breaker.is_slow(), "a prompt PING says nothing of what is not slow");
    }
}
