//! Estimates the recent demand for permits of one key.

use crate::time::{Micros, Timestamp};

/// The estimate covers the last one or two of these slots: short enough for a key that becomes hot, and long enough for a few requests a
/// second.
const SLOT: Micros = Micros::from_millis(250);

/// Permits asked for in this slot of time and in the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    slot: u64,
    count: u64,
    before: u64,
}

impl Demand {
    /// Records a request for permits.
    #[inline]
    pub(super) fn note(&mut self, now: Timestamp, permits: u64) {
        self.turn(now);
        self.count = self.count.saturating_add(permits);
    }

    /// How many permits will be asked for within `time` at this rate.
    #[inline]
    pub(super) fn expected(&self, now: Timestamp, time: Micros) -> u64 {
        let mut demand = *self;
        demand.turn(now);
        let seen = u128::from(demand.before) + u128::from(demand.count);
        let during = SLOT.get() + now.as_micros() % SLOT.get();
        u64::try_from(seen * u128::from(time.get()) / u128::from(during)).unwrap_or(u64::MAX)
    }

    #[inline]
    fn turn(&mut self, now: Timestamp) {
        let slot = now.as_micros() / SLOT.get();
        if slot == self.slot {
            return;
        }
        self.before = if slot == self.slot + 1 { self.count } else { 0 };
        (self.slot, self.count) = (slot, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_demand_follows_the_last_two_slots() {
        let at = |ms: u64| Timestamp::from_micros(1_000_000_000_000 + ms * 1_000);
        let second = Micros::from_secs(1);
        let mut demand = Demand::default();
        for ms in 0..1_000 {
            demand.note(at(ms), 2);
        }
        assert_eq!(demand.expected(at(1_000), second), 2_000);
        assert_eq!(demand.expected(at(1_000), Micros::from_millis(10)), 20);
        assert!(demand.expected(at(1_100), second) < 2_000);
        assert_eq!(demand.expected(at(1_500), second), 0, "long ago");
    }
}
