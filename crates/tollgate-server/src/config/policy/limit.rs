//! From a limit as it is written to what it means.

use tollgate::{
    AlgorithmName, Calendar, CalendarQuota, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, Limit,
    LimitError, Rate, SlidingCounter, SlidingLog, TokenBucket,
};

use super::file::LimitFields;
use super::text::{AlgorithmText, Factor, LimitItem, Many, Quota, RateAndBurst, Unit};
use crate::config::limits::Refill;
use crate::config::text::{Text, Written};

/// The limit that fields stand for, or why they stand for none.
///
/// This is the only place where limits are made: those of rules, of tiers and of the plain API. `default` is the algorithm of a limit that
/// names none.
pub(in crate::config) fn make_limit(
    fields: &LimitFields,
    default: Option<AlgorithmText>,
) -> Result<Limit, String> {
    if let Some(quota) = fields.quota {
        return make_quota(fields, quota.0);
    }
    let Some(Text(RateAndBurst { rate, burst })) = fields.limit else {
        return Err("needs `limit: 100/min`, or `quota: 10000/month`".to_owned());
    };
    if fields.zone.is_some() || fields.anchor.is_some() {
        return Err("zone and anchor belong to a quota: `quota: 10000/month`".to_owned());
    }
    if burst.is_some() && fields.burst.is_some() {
        return Err("burst stands twice".to_owned());
    }
    let burst = fields.burst.or(burst);
    // `100/min` means about 100 in any minute. A bucket would let 200 through in the first one.
    let unnamed = match burst.is_some() || fields.refill.is_some() {
        true => AlgorithmName::TokenBucket,
        false => AlgorithmName::SlidingWindowCounter,
    };
    let algorithm = fields.algorithm.or(default).map_or(unnamed, |it| it.0);
    check_fields(fields, burst, algorithm)?;
    let size = burst.unwrap_or(rate.permits());
    let made: Result<Limit, LimitError> = match algorithm {
        AlgorithmName::TokenBucket => match fields.refill.unwrap_or(Refill::Greedy) {
            Refill::Greedy => TokenBucket::new(size, rate).map(Limit::TokenBucket),
            Refill::Interval => IntervalBucket::new(size, rate).map(Limit::IntervalBucket),
        },
        AlgorithmName::LeakyBucket => {
            let mode = if fields.queue { LeakyMode::Queue } else { LeakyMode::Meter };
            LeakyBucket::new(size, rate, mode).map(Limit::LeakyBucket)
        }
        AlgorithmName::FixedWindow => {
            FixedWindow::new(rate).map(|it| Limit::FixedWindow(it.counting_denied(fields.count_denied)))
        }
        AlgorithmName::SlidingWindow => {
            SlidingLog::new(rate).map(|it| Limit::SlidingLog(it.counting_denied(fields.count_denied)))
        }
        AlgorithmName::SlidingWindowCounter => {
            let sub_buckets = fields.sub_buckets.unwrap_or(if fields.strict { 10 } else { 1 });
            SlidingCounter::new(rate, sub_buckets, fields.strict)
                .map(|it| Limit::SlidingCounter(it.counting_denied(fields.count_denied)))
        }
    };
    made.map_err(|why| why.to_string())
}

/// So many for each period of a calendar.
fn make_quota(fields: &LimitFields, quota: Quota) -> Result<Limit, String> {
    let LimitFields { zone, anchor, .. } = fields.clone();
    let own = LimitFields { quota: Some(Text(quota)), zone, anchor, ..LimitFields::default() };
    if *fields != own {
        return Err("a quota has a zone and an anchor, and nothing else beside it".to_owned());
    }
    let anchor = own.anchor.as_ref().map(|anchor| anchor.0.as_str());
    let calendar = Calendar::parse(own.zone.as_deref().unwrap_or("UTC"), quota.unit.as_str(), anchor);
    let made = CalendarQuota::new(quota.permits, calendar.map_err(|why| why.to_string())?);
    made.map(Limit::CalendarQuota).map_err(|why| why.to_string())
}

/// Refuses fields of other algorithms, which would have no effect.
fn check_fields(fields: &LimitFields, burst: Option<u64>, algorithm: AlgorithmName) -> Result<(), String> {
    use AlgorithmName::{FixedWindow, LeakyBucket, SlidingWindow, SlidingWindowCounter, TokenBucket};
    let windows = [FixedWindow, SlidingWindow, SlidingWindowCounter];
    for (field, is_set, belongs_to) in [
        ("burst", burst.is_some(), &[TokenBucket, LeakyBucket] as &[_]),
        ("refill", fields.refill.is_some(), &[TokenBucket]),
        ("queue", fields.queue, &[LeakyBucket]),
        ("sub_buckets", fields.sub_buckets.is_some(), &[SlidingWindowCounter]),
        ("strict", fields.strict, &[SlidingWindowCounter]),
        ("count_denied", fields.count_denied, &windows),
    ] {
        if is_set && !belongs_to.contains(&algorithm) {
            let names: Vec<_> = belongs_to.iter().map(|it| it.as_str()).collect();
            return Err(format!("{field} belongs to {}, not to {algorithm}", names.join(", ")));
        }
    }
    Ok(())
}

/// A part of a limit, rounded down.
pub(super) fn part_of(fields: &LimitFields, factor: Factor) -> Result<LimitFields, String> {
    let cut = |permits: u64| {
        let part = u128::from(permits) * u128::from(factor.part) / u128::from(factor.whole);
        u64::try_from(part).unwrap_or(u64::MAX)
    };
    let too_small = |what: &str, permits: u64| {
        Err(format!("{} of {what} {permits} leaves less than 1 permit", factor.to_text()))
    };
    if let Some(Text(quota)) = fields.quota {
        return match cut(quota.permits) {
            0 => too_small("the quota", quota.permits),
            permits => Ok(LimitFields { quota: Some(Text(Quota { permits, ..quota })), ..fields.clone() }),
        };
    }
    let Some(Text(RateAndBurst { rate, burst })) = fields.limit else { return Ok(fields.clone()) };
    let Ok(less) = Rate::new(cut(rate.permits()), rate.per()) else {
        return too_small("the limit", rate.permits());
    };
    for burst in [burst, fields.burst].into_iter().flatten() {
        if cut(burst) == 0 {
            return too_small("the burst", burst);
        }
    }
    let limit = Some(Text(RateAndBurst { rate: less, burst: burst.map(cut) }));
    Ok(LimitFields { limit, burst: fields.burst.map(cut), ..fields.clone() })
}

/// Returns the permits that the first limit lets through in a billion seconds, to find the smallest tier.
pub(super) fn speed(limits: &Many<LimitItem>) -> u128 {
    match limits.0.first() {
        Some(LimitItem::Limit(fields)) => {
            let days = |quota: Quota| match quota.unit {
                Unit::Day => 1,
                Unit::Week => 7,
                Unit::Month => 30,
            };
            let of_quota = fields.quota.map(|it| (it.0.permits, days(it.0) * 86_400_000_000));
            let of_limit = fields.limit.map(|it| (it.0.rate.permits(), it.0.rate.per().get()));
            let (permits, per) = of_quota.or(of_limit).unwrap_or((0, 1));
            u128::from(permits) * 1_000_000_000_000_000 / u128::from(per)
        }
        Some(LimitItem::Unlimited) => u128::MAX,
        None => 0,
    }
}
