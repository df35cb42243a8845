//! The circuit breaker of one server, with what the pure one lacks: a clock, chance, a log and the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::{Breaker, BreakerConfig, BreakerState, CallOutcome, Pass, Timestamp};

use super::error::StoreError;

/// Which calls to a server go through.
pub(super) struct Fuse {
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
pub(super) struct Crossing {
    fuse: Arc<Fuse>,
    pass: Pass,
    settled: bool,
}

impl Fuse {
    pub(super) fn new(server: Arc<str>, config: BreakerConfig) -> Arc<Self> {
        let inner = Inner { breaker: Breaker::new(config), why: "".into(), reachable: true, slow: None };
        Arc::new(Self { server, zero: Instant::now(), inner: Mutex::new(inner), opened: AtomicU64::new(0) })
    }

    /// Lets a call through, or says why not.
    pub(super) fn permit(self: &Arc<Self>, now: Instant) -> Result<Crossing, StoreError> {
        let now = self.at(now);
        let mut inner = self.inner.lock();
        match inner.breaker.permit(now) {
            Some(pass) => Ok(Crossing { fuse: Arc::clone(self), pass, settled: false }),
            None => Err(self.refusal(&inner)),
        }
    }

    /// There is a new connection: the next call may try.
    pub(super) fn reachable(&self) {
        // Half-open says nothing yet that a log should hold.
        let _ = self.inner.lock().breaker.reachable();
    }

    /// Whether a server that was too slow only has to be prompt again.
    pub(super) fn is_slow(&self) -> bool {
        self.inner.lock().slow.is_some()
    }

    /// The server has answered in time, be it not to a check. If it is left alone only because it did not, the next call may
    /// try: a moment of silence should not cost half a second.
    pub(super) fn prompt(&self) {
        let mut inner = self.inner.lock();
        if inner.slow.is_some_and(|slow| slow.since.elapsed() >= slow.doubt) {
            let _ = inner.breaker.reachable();
        }
    }

    /// The server has done what it is for, asked by nobody who waits.
    pub(super) fn told(self: &Arc<Self>) {
        if self.state() != BreakerState::Closed
            && let Ok(crossing) = self.permit(Instant::now())
        {
            crossing.succeeded();
        }
    }

    /// What it does now.
    pub(super) fn state(&self) -> BreakerState {
        self.inner.lock().breaker.state()
    }

    /// How often it has opened.
    pub(super) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Whether the next call goes through, or why not. Where nobody has asked since the wait was over, nothing is known to be
    /// wrong.
    pub(super) fn health(&self) -> Result<(), StoreError> {
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

    fn settle(&self, pass: Pass, outcome: CallOutcome, why: Option<&StoreError>, now: Timestamp) {
        let mut jitter = [0];
        if why.is_some() {
            // Without randomness the wait is the plain one.
            let _ = getrandom::fill(&mut jitter);
        }
        let mut inner = self.inner.lock();
        let was = inner.breaker.state();
        let changed = inner.breaker.settle(pass, outcome, now, jitter[0]);
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

impl Crossing {
    /// The server did what it is for, or said who does.
    pub(super) fn succeeded(self) {
        self.succeeded_at(Instant::now());
    }

    /// The same, at an instant that was just read.
    pub(super) fn succeeded_at(mut self, now: Instant) {
        self.settled = true;
        self.fuse.settle(self.pass, CallOutcome::Succeeded, None, self.fuse.at(now));
    }

    /// It did not.
    pub(super) fn failed(mut self, why: &StoreError) {
        let late = matches!(why, StoreError::Timeout(_));
        let outcome = if late { CallOutcome::TimedOut } else { CallOutcome::Failed };
        self.settle(outcome, Some(why));
    }

    fn settle(&mut self, outcome: CallOutcome, why: Option<&StoreError>) {
        self.settled = true;
        self.fuse.settle(self.pass, outcome, why, self.fuse.now());
    }
}

impl Drop for Crossing {
    fn drop(&mut self) {
        if !self.settled {
            self.settle(CallOutcome::Forgone, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(fuse: &Arc<Fuse>, failure: Option<&StoreError>) -> bool {
        let Ok(crossing) = fuse.permit(Instant::now()) else { return false };
        match failure {
            Some(why) => crossing.failed(why),
            None => crossing.succeeded(),
        }
        true
    }

    #[test]
    fn slowness_is_forgotten_when_the_server_is_back_and_openings_are_counted_once() {
        let fuse = Fuse::new("server".into(), BreakerConfig::default());
        let late = StoreError::Timeout(Duration::from_millis(10));
        for outage in 1..=3 {
            while call(&fuse, Some(&late)) {}
            assert!(fuse.is_slow() && fuse.health().is_err());
            // A probe that fails is the same outage.
            fuse.reachable();
            assert!(call(&fuse, Some(&late)) && !call(&fuse, None));
            assert_eq!(fuse.opened(), outage);
            fuse.reachable();
            assert!((0..3).all(|_| call(&fuse, None)));
            assert!(fuse.state() == BreakerState::Closed && !fuse.is_slow() && fuse.health().is_ok());
        }
        let gone = StoreError::Overloaded;
        while call(&fuse, Some(&gone)) {}
        assert!(!fuse.is_slow(), "a prompt PING says nothing of what is not slow");
    }
}
