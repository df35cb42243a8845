//! A circuit breaker: when to stop asking a server that has failed, and when to ask it again.
//!
//! Closed, it lets every call through and looks at the last few. Open, it lets none through for a while. Half-open, it lets
//! one call through at a time; a few that succeed close it, and one that fails opens it again. Calls that time out together
//! count as one failure: one stall of the server, or of this process, says no more than that. Time and chance are handed in.

use crate::time::{Micros, Timestamp};

/// When a breaker opens, for how long, and what closes it again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BreakerConfig {
    failures: u32,
    window: u32,
    open_for: Micros,
    probes: u32,
}

/// Why there is no such breaker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BreakerError {
    /// The share of failures.
    #[error("the failure rate must be from 1 to 100 percent")]
    FailureRate,
    /// The number of calls that are looked at.
    #[error("the window must be from 1 to {} calls", BreakerConfig::WINDOW_MAX)]
    Window,
    /// The number of calls that close it.
    #[error("there must be at least 1 probe")]
    Probes,
}

impl BreakerConfig {
    /// Calls that are looked at: one bit each.
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
        // Of a whole window, also while it is still filling: the first few calls of a server that is down open it as well.
        let failures = (failure_percent * window).div_ceil(100);
        Ok(Self { failures, window, open_for, probes })
    }
}

impl Default for BreakerConfig {
    /// Half of the last 10 calls, half a second, 3 probes.
    fn default() -> Self {
        Self { failures: 5, window: 10, open_for: Micros::from_millis(500), probes: 3 }
    }
}

/// What a breaker does now.
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
    /// A word for metrics, health and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half-open",
            Self::Open => "open",
        }
    }
}

/// A call that was let through. What becomes of it is told with [`Breaker::record`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pass {
    era: u64,
    /// When the call was let through.
    at: Timestamp,
}

/// What became of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallOutcome {
    /// The server did what it is for.
    Succeeded,
    /// It did not.
    Failed,
    /// It did not answer in time.
    TimedOut,
    /// Nothing was learned: the call was given up before it could succeed or fail.
    Forgone,
}

/// Decides for one server which calls go through.
#[derive(Clone, Debug)]
pub struct Breaker {
    config: BreakerConfig,
    phase: Phase,
    /// Counts the phases: what is told of a call from an earlier one says nothing of this one.
    era: u64,
    /// When a call last timed out that counted. Calls that began before it were under way in the same stall.
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

    /// What it does now. An open one whose time is over stays open until somebody asks.
    pub const fn state(&self) -> BreakerState {
        match self.phase {
            Phase::Closed { .. } => BreakerState::Closed,
            Phase::Open { .. } => BreakerState::Open,
            Phase::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// Whether it would let no call through now, and none is under way that could change that.
    pub fn is_refusing(&self, now: Timestamp) -> bool {
        matches!(self.phase, Phase::Open { until } if now < until)
    }

    /// Lets a call through, or not.
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

    /// Hears what became of a call. `jitter` is random, so that many nodes do not come back at once. Says what the breaker
    /// does from now on, if that is something else.
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
            // No call is let through by an open breaker: this one is of an earlier era.
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

    /// There is a new connection to the server: a reason to try, however long the wait still is.
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
