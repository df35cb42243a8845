//! The answer of `sliding_log.lua`. A log stays in the store: the answer holds its counts, and the starts that were found.

use tollgate_core::{Algorithm, Ask, Limit, Micros, Outcome, Retention, SlidingLog, Status, Timestamp};

use super::numbers::{Numbers, Reader};
use crate::redis::error::StoreError;

pub(super) fn parameters(it: &SlidingLog, numbers: &mut Numbers) {
    numbers.add([it.size() as i64, it.horizon().get() as i64, i64::from(it.counts_denied())]);
    let (lapsing, until) = it.lapsing().unwrap_or_default();
    for Retention { time, entries } in [it.retention(), lapsing] {
        numbers.add([time.max(it.horizon()).get() as i64, entries.min(1 << 52) as i64]);
    }
    numbers.add([until.as_micros() as i64]);
}

/// The counts of a log, without its entries.
pub(crate) struct LogView {
    time: i64,
    used: i64,
    oldest: Option<i64>,
    earliest: i64,
}

impl LogView {
    /// Reads the counts of a log, and the starts that follow.
    pub(crate) fn read<'a>(numbers: &mut Reader<'a>) -> Result<(Self, Starts, Reader<'a>), StoreError> {
        let count = numbers.next()?;
        let mut numbers = numbers.split(count.max(0) as usize)?;
        let [time, used, oldest, earliest] = numbers.take()?;
        let view = Self { time, used, oldest: (oldest >= 0).then_some(oldest), earliest };
        let starts = Starts { at_once: numbers.is_empty(), groups: 0, many: 0, start: time };
        Ok((view, starts, numbers))
    }

    fn remaining(&self, limit: &Limit) -> i64 {
        if self.earliest > self.time { 0 } else { (limit.size() as i64 - self.used).max(0) }
    }

    pub(crate) fn status(&self, limit: &Limit, now: Timestamp) -> Status {
        let reset =
            self.oldest.map_or(0, |oldest| oldest + limit.horizon().get() as i64 - now.as_micros() as i64);
        Status { remaining: self.remaining(limit) as u64, reset: Micros::new(reset.max(0) as u64) }
    }

    /// The outcome of an ask whose earliest start the script has found.
    pub(crate) fn outcome(&self, limit: &Limit, ask: Ask, start: i64, now: Timestamp) -> Outcome {
        let wait = ask.wait.map_or(0, |wait| wait.get().min(limit.horizon().get()) as i64);
        let delay = start - now.as_micros() as i64;
        if start == self.time {
            Outcome::NOW
        } else if delay <= wait {
            Outcome::Admitted { delay: Micros::new(delay.max(0) as u64) }
        } else {
            Outcome::Denied { retry: Micros::new((delay - wait) as u64) }
        }
    }

    /// Takes the permits of an ask with this outcome. Returns the permits that a denial has counted.
    pub(crate) fn take(&mut self, limit: &Limit, ask: Ask, outcome: Outcome, start: i64) -> i64 {
        if outcome.is_admitted() {
            self.add(start, ask.cost as i64);
            return 0;
        }
        let charged = if limit.counts_denied() { (ask.cost as i64).min(self.remaining(limit)) } else { 0 };
        if charged > 0 {
            self.add(self.earliest, charged);
        }
        charged
    }

    fn add(&mut self, start: i64, permits: i64) {
        self.used += permits;
        self.earliest = start;
        self.oldest = self.oldest.or(Some(start));
    }
}

/// The groups of asks with one start, as the script lists them: of the run at hand, those that are left. A script that lists none has
/// admitted all asks at once.
pub(crate) struct Starts {
    at_once: bool,
    groups: i64,
    many: i64,
    start: i64,
}

impl Starts {
    pub(crate) fn next(&mut self, numbers: &mut Reader<'_>) -> Result<i64, StoreError> {
        if self.at_once {
            return Ok(self.start);
        }
        if self.many == 0 {
            if self.groups == 0 {
                self.groups = numbers.next()?;
            }
            self.groups -= 1;
            // A run that only looks has one group, of no asks.
            self.many = numbers.next()?.max(1);
            self.start = numbers.next()?;
        }
        self.many -= 1;
        Ok(self.start)
    }
}
