//! A circuit breaker: decides when to stop calling a server that fails, and when to call it again.
//!
//! A closed breaker lets every call through and counts failures among the last few. An open breaker lets no call through for a
//! while. A half-open breaker lets one call through at a time; a few successes close it, and one failure opens it again. Calls
//! that time out together count as one failure, because one stall of the server or of this process causes all of them. Time
//! and random numbers are handed in.

use crate::time::{Micros, Timestamp};

/// When a breaker opens, for how long, and when it closes again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BreakerConfig {
    failures: u32,
    window: u32,
    open_for: Micros,
    probes: u32,
}

/// Why settings do not make a breaker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BreakerError {
    /// The failure rate is out of range.
    #[error("the failure rate must be from 1 to 100 percent")]
    FailureRate,
    /// The window is out of range.
    #[error("the window must be from 1 to {} calls", BreakerConfig::WINDOW_MAX)]
    Window,
    /// There are no probes.
    #[error("there must be at least 1 probe")]
    Probes,
}

impl BreakerConfig {
    /// The largest window, in calls: one bit each.
    pub const WINDOW_MAX: u32 = 64;

    /// Opens when `failure_percent` of the last `window` calls have failed, for `open_for` and up to a quarter more; closes
    /// after `probes` calls that succeed.
    pub const fn new(
        failure_percent: u32,
        window: u32,
        open_for: Micros,
        probes: u32,
    ) -> Result<Self, BreakerError> {
        if failure_percent < 1 || failure_percent > 100 {
            return Err(BreakerError::FailureRate);
        }
        if window < 1 || window > Self::WINDOW_MAX {
            return Err(BreakerError::Window);
        }
        if probes < 1 {
            return Err(BreakerError::Probes);
        }
        // Counted of a whole window, also while it is filling, so that the first calls to a dead server open it too.
        let failures = (failure_percent * window).div_ceil(100);
        Ok(Self { failures, window, open_for, probes })
    }
}

impl Default for BreakerConfig {
    /// Opens at half of the last 10 calls, for half a second, and closes after 3 probes.
    fn default() -> Self {
        Self { failures: 5, window: 10, open_for: Micros::from_millis(500), probes: 3 }
    }
}

/// The state of a breaker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BreakerState {
    /// Every call goes through.
    Closed,
    /// One call at a time goes through.
    HalfOpen,
    /// No call goes through.
    Open,
}

impl BreakerState {
    /// Its name in metrics, health and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half-open",
            Self::Open => "open",
        }
    }
}

/// A call that was let through. Its outcome is reported with [`Breaker::record`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pass {
    era: u64,
    /// When the call was let through.
    at: Timestamp,
}

/// The outcome of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallOutcome {
    /// The server decided.
    Succeeded,
    /// The server failed.
    Failed,
    /// The server did not answer in time.
    TimedOut,
    /// The call was given up before it could succeed or fail.
    Forgone,
}

/// Decides for one server which calls go through.
#[derive(Clone, Debug)]
pub struct Breaker {
    config: BreakerConfig,
    phase: Phase,
    /// Counts the phases. The outcome of a call from an earlier phase is ignored.
    era: u64,
    /// The last timeout that counted. Calls that began before it were part of the same stall.
    stalled: Timestamp,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// The last calls, the latest in the lowest bit; a one has failed.
    Closed {
        failed: u64,
    },
    Open {
        until: Timestamp,
    },
    HalfOpen {
        succeeded: u32,
        probing: bool,
    },
}

impl Breaker {
    /// A closed breaker.
    pub const fn new(config: BreakerConfig) -> Self {
        Self { config, phase: Phase::Closed { failed: 0 }, era: 0, stalled: Timestamp::from_micros(0) }
    }

    /// Its state. An open breaker whose time is over stays open until the next call.
    pub const fn state(&self) -> BreakerState {
        match self.phase {
            Phase::Closed { .. } => BreakerState::Closed,
            Phase::Open { .. } => BreakerState::Open,
            Phase::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// Whether it is open and its time is not over.
    pub fn is_refusing(&self, now: Timestamp) -> bool {
        matches!(self.phase, Phase::Open { until } if now < until)
    }

    /// Lets a call through, or returns `None`.
    pub fn permit(&mut self, now: Timestamp) -> Option<Pass> {
        match &mut self.phase {
            Phase::Closed { .. } => {}
            Phase::Open { until } if now < *until => return None,
            Phase::Open { .. } => self.enter(Phase::HalfOpen { succeeded: 0, probing: true }),
            Phase::HalfOpen { probing, .. } if *probing => return None,
            Phase::HalfOpen { probing, .. } => *probing = true,
        }
        Some(Pass { era: self.era, at: now })
    }

    /// Records the outcome of a call. `jitter` is random, so that nodes do not retry at the same time. Returns the new state, if
    /// it has changed.
    pub fn record(
        &mut self,
        pass: Pass,
        outcome: CallOutcome,
        now: Timestamp,
        jitter: u8,
    ) -> Option<BreakerState> {
        if pass.era != self.era {
            return None;
        }
        match (&mut self.phase, outcome) {
            // An open breaker lets no call through, so this call is from an earlier phase.
            (Phase::Open { .. }, _) | (Phase::Closed { .. }, CallOutcome::Forgone) => return None,
            (Phase::Closed { .. }, CallOutcome::TimedOut) if pass.at < self.stalled => return None,
            (Phase::Closed { failed }, outcome) => {
                let window = u64::MAX >> (BreakerConfig::WINDOW_MAX - self.config.window);
                *failed = (*failed << 1 | u64::from(outcome != CallOutcome::Succeeded)) & window;
                if outcome == CallOutcome::TimedOut {
                    self.stalled = now;
                }
                if failed.count_ones() < self.config.failures {
                    return None;
                }
                self.open(now, jitter);
            }
            (Phase::HalfOpen { .. }, CallOutcome::Failed | CallOutcome::TimedOut) => self.open(now, jitter),
            (Phase::HalfOpen { probing, .. }, CallOutcome::Forgone) => {
                *probing = false;
                return None;
            }
            (Phase::HalfOpen { succeeded, probing }, CallOutcome::Succeeded) => {
                (*succeeded, *probing) = (*succeeded + 1, false);
                if *succeeded < self.config.probes {
                    return None;
                }
                self.enter(Phase::Closed { failed: 0 });
            }
        }
        Some(self.state())
    }

    /// Records a new connection to the server, which is a reason to try before the wait is over.
    pub fn reachable(&mut self) -> Option<BreakerState> {
        let Phase::Open { .. } = self.phase else { return None };
        self.enter(Phase::HalfOpen { succeeded: 0, probing: false });
        Some(self.state())
    }

    fn open(&mut self, now: Timestamp, jitter: u8) {
        let wait = self.config.open_for.get();
        let more = (wait / 4).saturating_mul(u64::from(jitter)) / 256;
        self.enter(Phase::Open { until: now.after(Micros::new(wait.saturating_add(more))) });
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.era += 1;
    }
}
