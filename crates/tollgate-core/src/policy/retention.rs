//! What the logs of a policy keep for windows other than their own.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use core::ops::Bound;

use super::RuleLimit;
use crate::algorithm::{Retention, SlidingLog};
use crate::limit::Limit;
use crate::time::{Micros, Timestamp};

/// The windows that keys of a scope may come under, each with its largest limit.
type Windows = BTreeMap<Micros, u64>;

/// Makes every log keep what the longer windows of its scope need. Windows of `earlier` limits matter until they have passed once: by
/// then nothing counts any more that was consumed while they were in force.
pub(super) fn retain(limits: &mut [RuleLimit], earlier: &[RuleLimit], now: Timestamp) {
    let mut in_force: BTreeMap<Box<str>, Windows> = BTreeMap::new();
    for (scope, log) in logs(limits) {
        let largest = in_force.entry(scope.clone()).or_default().entry(log.window()).or_default();
        *largest = log.limit().max(*largest);
    }
    let mut withdrawn: BTreeMap<Box<str>, BTreeMap<Micros, (Retention, Timestamp)>> = BTreeMap::new();
    for (scope, log) in logs(earlier) {
        let own = Retention { time: log.window(), entries: log.limit() };
        let lapsing = log.lapsing().filter(|(_, until)| now < *until);
        for (retention, until) in [(own, now.after(log.window()))].into_iter().chain(lapsing) {
            let known = withdrawn.entry(scope.clone()).or_default().entry(retention.time).or_default();
            *known = (known.0.max(retention), known.1.max(until));
        }
    }
    for it in limits {
        let Limit::SlidingLog(log) = &mut it.limit else { continue };
        let longer = (Bound::Excluded(log.window()), Bound::Unbounded);
        let kept = in_force.get(&it.scope).into_iter().flat_map(|windows| windows.range(longer));
        let kept = kept.map(|(window, limit)| Retention { time: *window, entries: *limit });
        *log = log.retaining(kept.fold(Retention::default(), Retention::max));
        let lapsing = withdrawn.get(&it.scope).into_iter().flat_map(|windows| windows.range(longer));
        for (_, (retention, until)) in lapsing {
            let (before, ends) = log.lapsing().unwrap_or_default();
            *log = log.retaining_until(before.max(*retention), ends.max(*until));
        }
    }
}

fn logs(limits: &[RuleLimit]) -> impl Iterator<Item = (&Box<str>, &SlidingLog)> {
    limits.iter().filter_map(|it| match &it.limit {
        Limit::SlidingLog(log) => Some((&it.scope, log)),
        Limit::TokenBucket(_)
        | Limit::IntervalBucket(_)
        | Limit::LeakyBucket(_)
        | Limit::FixedWindow(_)
        | Limit::SlidingCounter(_)
        | Limit::CalendarQuota(_) => None,
    })
}
