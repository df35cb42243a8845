//! The circuit breaker of one server, with what the pure one lacks: a clock, chance, a log and the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::{Breaker, BreakerConfig, BreakerState, CallOutcome, Pass, Timestamp};

use crate::redis::error::StoreError;

/// Which calls to a server go through.
pub(in crate::redis) struct ServerBreaker {
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
    /// If it is open because the server was too slow: since when, and how long a prompt answer to something else is not
    /// believed.
    slow: Option<Slow>,
}

#[derive(Clone, Copy)]
struct Slow {
    since: Instant,
    doubt: Duration,
}

/// How long a prompt answer is not believed after a server was too slow, the first time. Then twice that, and so on.
const DOUBT_MIN: Duration = Duration::from_millis(50);
/// The longest: after that the breaker's own wait is over as well, by default.
const DOUBT_MAX: Duration = Duration::from_millis(400);

/// A call under way. If nobody says what became of it, nothing was learned from it.
pub(in crate::redis) struct BreakerPermit {
    breaker: Arc<ServerBreaker>,
    pass: Pass,
    recorded: bool,
}

impl ServerBreaker {
    pub(in crate::redis) fn new(server: Arc<str>, config: BreakerConfig) -> Arc<Self> {
        let inner = Inner { breaker: Breaker::new(config), why: "".into(), reachable: true, slow: None };
        Arc::new(Self { server, zero: Instant::now(), inner: Mutex::new(inner), opened: AtomicU64::new(0) })
    }

    /// Lets a call through, or says why not.
    pub(in crate::redis) fn permit(self: &Arc<Self>, now: Instant) -> Result<BreakerPermit, StoreError> {
        let now = self.at(now);
        let mut inner = self.inner.lock();
        match inner.breaker.permit(now) {
            Some(pass) => Ok(BreakerPermit { breaker: Arc::clone(self), pass, recorded: false }),
            None => Err(self.refusal(&inner)),
        }
    }

    /// There is a new connection: the next call may try.
    pub(in crate::redis) fn reachable(&self) {
        // Half-open says nothing yet that a log should hold.
        let _ = self.inner.lock().breaker.reachable();
    }

    /// Whether a server that was too slow only has to be prompt again.
    pub(in crate::redis) fn is_slow(&self) -> bool {
        self.inner.lock().slow.is_some()
    }

    /// The server has answered in time, be it not to a check. If it is left alone only because it did not, the next call may
    /// try: a moment of silence should not cost half a second.
    pub(in crate::redis) fn prompt(&self) {
        let mut inner = self.inner.lock();
        if inner.slow.is_some_and(|slow| slow.since.elapsed() >= slow.doubt) {
            let _ = inner.breaker.reachable();
        }
    }

    /// The server has done what it is for, asked by nobody who waits.
    pub(in crate::redis) fn record_background_success(self: &Arc<Self>) {
        if self.state() != BreakerState::Closed
            && let Ok(permit) = self.permit(Instant::now())
        {
            permit.succeeded();
        }
    }

    /// What it does now.
    pub(in crate::redis) fn state(&self) -> BreakerState {
        self.inner.lock().breaker.state()
    }

    /// How often it has opened.
    pub(in crate::redis) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Whether the next call goes through, or why not. Where nobody has asked since the wait was over, nothing is known to be
    /// wrong.
    pub(in crate::redis) fn health(&self) -> Result<(), StoreError> {
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
                // A probe that fails is no news.
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
    /// The server did what it is for, or said who does.
    pub(in crate::redis) fn succeeded(self) {
        self.succeeded_at(Instant::now());
    }

    /// The same, at an instant that was just read.
    pub(in crate::redis) fn succeeded_at(mut self, now: Instant) {
        self.recorded = true;
        self.breaker.record(self.pass, CallOutcome::Succeeded, None, self.breaker.at(now));
    }

    /// It did not.
    pub(in crate::redis) fn failed(mut self, why: &StoreError) {
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
    fn slowness_is_forgotten_when_the_server_is_back_and_openings_are_counted_once() {
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
