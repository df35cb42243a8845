//! A node's clock: it started at some other time, and runs a little too fast or too slow.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;
use tollgate::{Clock, Timestamp};

/// How a node's clock relates to real time.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeClock {
    pub(super) offset_us: u64,
    pub(super) drift_ppm: i64,
}

impl NodeClock {
    /// The node's time at a real time.
    pub(super) fn at(self, real_us: u64) -> Timestamp {
        let run = i128::from(real_us) * i128::from(1_000_000 + self.drift_ppm) / 1_000_000;
        Timestamp::from_micros(self.offset_us + run as u64)
    }

    /// The clock that production code reads. `stale_us` is the flaw: it shows a new time only so often.
    pub(super) fn clock(self, start: Instant, stale_us: u64) -> Clock {
        let shown_us = AtomicU64::new(0);
        Clock::derived(move || {
            let mut real_us = start.elapsed().as_micros() as u64;
            if stale_us > 0 {
                if real_us >= shown_us.load(Ordering::Relaxed) + stale_us {
                    shown_us.store(real_us, Ordering::Relaxed);
                }
                real_us = shown_us.load(Ordering::Relaxed);
            }
            self.at(real_us)
        })
    }
}
