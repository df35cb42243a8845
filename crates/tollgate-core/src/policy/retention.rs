//! Makes the logs of a policy keep entries for windows longer than their own.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use core::ops::Bound;

use super::RuleLimit;
use crate::algorithm::{Algorithm, Retention, SlidingLog};
use crate::limit::Limit;
use crate::time::{Micros, Timestamp};

/// The windows of a scope, each with its largest limit.
type Windows = BTreeMap<Micros, u64>;

/// Makes every log keep the entries that longer windows of its scope need. Windows of `earlier` limits matter until they have passed once:
/// after that, no permit counts that was consumed under them.
pub(super) fn retain(limits: &mut [RuleLimit], earlier: &[RuleLimit], now: Timestamp) {
    let mut in_force: BTreeMap<Box<str>, Windows> = BTreeMap::new();
    for (scope, log) in logs(limits) {
        let largest = in_force.entry(scope.clone()).or_default().entry(log.horizon()).or_default();
        *largest = log.size().max(*largest);
    }
    let mut withdrawn: BTreeMap<Box<str>, BTreeMap<Micros, (Retention, Timestamp)>> = BTreeMap::new();
    for (scope, log) in logs(earlier) {
        let own = Retention { time: log.horizon(), entries: log.size() };
        let lapsing = log.lapsing().filter(|(_, until)| now < *until);
        for (retention, until) in [(own, now.after(log.horizon()))].into_iter().chain(lapsing) {
            let known = withdrawn.entry(scope.clone()).or_default().entry(retention.time).or_default();
            *known = (known.0.max(retention), known.1.max(until));
        }
    }
    for it in limits {
        let Limit::SlidingLog(log) = &mut it.limit else { continue };
        let longer = (Bound::Excluded(log.horizon()), Bound::Unbounded);
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
    limits.iter().filter_map(|it| {
        let Limit::SlidingLog(log) = &it.limit else { return None };
        Some((&it.scope, log))
    })
}
