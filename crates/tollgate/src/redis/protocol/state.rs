//! Limits and states of all algorithms, as scripts take, answer and store them.

use std::borrow::Cow;

use tollgate_core::algorithm::Algorithm;
use tollgate_core::{Beside, CarriedDebt, Forgone, LeakyMode, Limit, State, Timestamp};

use super::fields::{Difference, Fields, NewFields};
use super::numbers::{Numbers, Reader};
use super::{bucket, calendar_quota, fixed_window, interval_bucket, sliding_counter, sliding_log};
use crate::redis::error::StoreError;
use crate::redis::limit::StoredLimit;

/// Adds a limit as scripts take it: its text and its numbers, for a server whose clock shows about this.
pub(super) fn add_parameters(numbers: &mut Numbers, limit: &Limit, about: Timestamp) {
    numbers.add_text(limit.parameters().to_string().as_bytes());
    match limit {
        Limit::TokenBucket(it) => bucket::parameters(it, LeakyMode::Meter, numbers),
        Limit::LeakyBucket(it) => bucket::parameters(it.room(), it.mode(), numbers),
        Limit::IntervalBucket(it) => interval_bucket::parameters(it, numbers),
        Limit::FixedWindow(it) => fixed_window::parameters(it, numbers),
        Limit::SlidingLog(it) => sliding_log::parameters(it, numbers),
        Limit::SlidingCounter(it) => sliding_counter::parameters(it, numbers),
        Limit::CalendarQuota(it) => calendar_quota::parameters(it, about, numbers),
    }
}

/// A limit as scripts take it, if it is the same in every call. The numbers of a calendar depend on the time.
pub(crate) fn parameters(limit: &Limit) -> Option<Box<[u8]>> {
    if let Limit::CalendarQuota(_) = limit {
        return None;
    }
    let mut numbers = Numbers(Vec::new());
    add_parameters(&mut numbers, limit, Timestamp::default());
    Some(numbers.0.into())
}

/// The plain state that a script has answered. `lent`: the script was the one that lends.
pub(crate) fn plain_state(limit: &Limit, lent: bool, numbers: &mut Reader<'_>) -> Result<State, StoreError> {
    match limit {
        Limit::TokenBucket(_) | Limit::LeakyBucket(_) if lent => bucket::plain_lent(numbers),
        Limit::TokenBucket(_) | Limit::LeakyBucket(_) => bucket::plain(numbers),
        Limit::IntervalBucket(_) => interval_bucket::plain(numbers),
        Limit::FixedWindow(_) => fixed_window::plain(numbers),
        Limit::SlidingCounter(it) => sliding_counter::plain(it, numbers),
        Limit::CalendarQuota(_) => calendar_quota::plain(numbers),
        Limit::SlidingLog(_) => Err(StoreError::protocol("a log has no state here")),
    }
}

/// A state, and the limit it was written under.
pub(crate) struct Stored {
    pub(crate) under: Limit,
    pub(crate) state: State,
}

/// The state that stored fields hold.
pub(crate) fn stored_state(asking: &StoredLimit, fields: &Fields<'_>) -> Result<Stored, String> {
    let limit = &asking.limit;
    let text = match (fields.get("limit"), limit) {
        (None, Limit::SlidingCounter(it)) => {
            Some(Cow::Owned(sliding_counter::limit_of_old_state(it, fields)?))
        }
        (text, _) => text.map(Cow::Borrowed),
    };
    let (under, carried_debt) = written_under(asking, text.as_deref())?;
    let state = match &under {
        Limit::TokenBucket(it) => bucket::stored(it, bucket::TOKENS, fields, limit.lender().is_some()),
        Limit::LeakyBucket(it) => bucket::stored(it.room(), bucket::WATER, fields, limit.lender().is_some()),
        Limit::IntervalBucket(it) => interval_bucket::stored(it, fields),
        Limit::FixedWindow(it) => fixed_window::stored(it, fields),
        Limit::SlidingCounter(it) => sliding_counter::stored(it, fields),
        Limit::CalendarQuota(_) => calendar_quota::stored(fields),
        Limit::SlidingLog(_) => Err("a log has no fields".to_owned()),
    }?;
    let unit = match &under {
        Limit::TokenBucket(it) => it.unit(),
        Limit::LeakyBucket(it) => it.room().unit(),
        Limit::IntervalBucket(_) => 1,
        Limit::FixedWindow(_) | Limit::SlidingLog(_) | Limit::SlidingCounter(_) | Limit::CalendarQuota(_) => {
            u64::MAX
        }
    };
    if carried_debt.rest as u64 >= unit {
        return Err(format!("a carried debt of {} units beyond whole permits", carried_debt.rest));
    }
    let forgone = pairs(fields.get("forgone"))?;
    let forgone = forgone.into_iter().map(|(start, units)| Forgone { start, units }).collect();
    Ok(Stored { under, state: state.with(Beside { carried_debt, forgone }) })
}

/// The limit that a state was written under, and its carried debt. States without that field belong to the limit that asks.
fn written_under(asking: &StoredLimit, text: Option<&str>) -> Result<(Limit, CarriedDebt), String> {
    let Some(text) = text else { return Ok((asking.limit, CarriedDebt::NONE)) };
    let foreign = || format!("no limit: {}", text.escape_debug());
    let (parameters, carried_debt) = match text.split_once(" over ") {
        None => (text, CarriedDebt::NONE),
        Some((parameters, carried_debt)) => {
            let [(permits, rest)] = pairs(Some(carried_debt))?.try_into().map_err(|_| foreign())?;
            (parameters, CarriedDebt { permits, rest })
        }
    };
    if *parameters == *asking.parameters {
        return Ok((asking.limit, carried_debt));
    }
    Ok((asking.limit.with_parameters(parameters).ok_or_else(foreign)?, carried_debt))
}

/// Reads pairs of numbers from a text.
pub(super) fn pairs(text: Option<&str>) -> Result<Vec<(i64, i64)>, String> {
    let Some(text) = text else { return Ok(Vec::new()) };
    let numbers = text.split_whitespace().map(|number| number.parse::<i64>().ok());
    let numbers: Option<Vec<_>> = numbers.map(|it| it.filter(|it| (0..1 << 53).contains(it))).collect();
    let numbers = numbers.filter(|numbers| numbers.len() % 2 == 0);
    let numbers = numbers.ok_or_else(|| format!("no pairs of numbers: {}", text.escape_debug()))?;
    Ok(numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
}

/// The fields to write for a state of this limit, and its time to live in milliseconds.
pub(crate) fn write(
    limit: &StoredLimit,
    state: &State,
    stored: &Fields<'_>,
    now: Timestamp,
) -> (Difference, u64) {
    let mut fields = NewFields::default();
    let (plain, beside) = state.clone().into_plain();
    match &limit.limit {
        Limit::TokenBucket(it) => bucket::fields(it, bucket::TOKENS, &plain, &mut fields),
        Limit::LeakyBucket(it) => bucket::fields(it.room(), bucket::WATER, &plain, &mut fields),
        Limit::IntervalBucket(_) => interval_bucket::fields(&plain, &mut fields),
        Limit::FixedWindow(it) => fixed_window::fields(it, &plain, &mut fields),
        Limit::SlidingCounter(it) => sliding_counter::fields(it, &plain, &mut fields),
        Limit::CalendarQuota(_) => calendar_quota::fields(&plain, &mut fields),
        Limit::SlidingLog(_) => {}
    }
    if !limit.parameters.is_empty() {
        // A suffix keeps scripts from reading a state with data beside it as plain.
        let is_waited_for = matches!(&plain, State::Counter(it) if sliding_counter::is_waited_for(it));
        let is_plain = beside == Beside::default() && !is_waited_for;
        let CarriedDebt { permits, rest } = beside.carried_debt;
        let suffix = if is_plain { String::new() } else { format!(" over {permits} {rest}") };
        fields.set("limit", format!("{}{suffix}", limit.parameters));
    }
    if !beside.forgone.is_empty() {
        let forgone = beside.forgone.iter().map(|it| format!(" {} {}", it.start, it.units));
        fields.set("forgone", forgone.collect::<String>());
    }
    let is_counter = matches!(limit.limit, Limit::SlidingCounter(_));
    let is_known = |name: &str| match is_counter {
        true => sliding_counter::is_optional(name),
        false => bucket::is_optional(name),
    };
    let matters = limit.limit.full_at(state).as_micros().saturating_sub(now.as_micros());
    (fields.differences(stored, is_known), matters.div_ceil(1_000) + 1_000)
}
