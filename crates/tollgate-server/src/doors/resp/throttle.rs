//! `CL.THROTTLE key max_burst count_per_period period [quantity]`, as redis-cell answers it.
//!
//! The numbers are those of redis-cell, computed exactly. redis-cell cuts the time between two permits to whole nanoseconds and waits to
//! whole milliseconds; here no time is cut, and seconds are rounded up, so the wait in a reply is never too short.

use std::borrow::Cow;

use tollgate::{Key, Outcome, Verdict};

use super::RespDoor;
use super::conversation::Pending;
use super::frame::Argument;
use super::reply::Reply;
use crate::named_limits::BucketTerms;
use crate::request::PERMITS_MAX;

/// What a client asks for.
struct Throttle<'a> {
    key: Cow<'a, str>,
    terms: BucketTerms,
    quantity: u64,
}

impl RespDoor {
    /// Starts a check by the limit that the client names.
    pub(super) fn throttle<'a>(&'a self, arguments: &mut [Argument<'a>]) -> Result<Pending<'a>, Reply> {
        let Throttle { key, terms, quantity } = Throttle::parse(arguments)?;
        Ok(Box::pin(async move {
            match self.limiter.throttle(terms, &key, quantity).await {
                Ok(verdict) => reply(&verdict),
                Err(why) => Reply::error(format_args!("max_burst, count_per_period, period: {why}")),
            }
        }))
    }
}

impl<'a> Throttle<'a> {
    fn parse(arguments: &mut [Argument<'a>]) -> Result<Self, Reply> {
        let (key, numbers) = match arguments {
            [_, key, numbers @ ..] if matches!(numbers.len(), 3 | 4) => (key, numbers),
            _ => {
                return Err(cell_error(
                    "Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]",
                ));
            }
        };
        let (max_burst, count, period) = (number(&numbers[0])?, number(&numbers[1])?, number(&numbers[2])?);
        let quantity = numbers.get(3).map_or(Ok(1), |quantity| number(quantity))?;
        if count == 0 || period == 0 {
            return Err(cell_error("Zero rates are not supported"));
        }
        let terms = BucketTerms {
            capacity: within("max_burst", max_burst, 0)? + 1,
            refill: within("count_per_period", count, 1)?,
            period_secs: within("period", period, 1)?,
        };
        let quantity = within("quantity", quantity, 0)?;
        Ok(Self { key: key_of(std::mem::take(key))?, terms, quantity })
    }
}

/// A key that a client names.
pub(super) fn key_of(argument: Argument<'_>) -> Result<Cow<'_, str>, Reply> {
    let key = text("key", argument)?;
    Key::new(&key).map_err(|why| Reply::error(format_args!("key: {why}")))?;
    Ok(key)
}

/// An argument as a text. `name` is what the error calls it.
pub(super) fn text<'a>(name: &str, argument: Argument<'a>) -> Result<Cow<'a, str>, Reply> {
    let wrong = || Reply::error(format_args!("{name}: must be UTF-8"));
    match argument {
        Cow::Borrowed(bytes) => std::str::from_utf8(bytes).map(Cow::Borrowed).map_err(|_| wrong()),
        Cow::Owned(bytes) => String::from_utf8(bytes).map(Cow::Owned).map_err(|_| wrong()),
    }
}

/// An error in redis-cell's words.
fn cell_error(why: &str) -> Reply {
    Reply::Error(format!("Cell error: Store error: {why}"))
}

fn number(argument: &[u8]) -> Result<i64, Reply> {
    let number = std::str::from_utf8(argument).ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| cell_error(&format!("Couldn't parse as integer: {}", argument.escape_ascii())))
}

fn within(name: &str, number: i64, least: i64) -> Result<u64, Reply> {
    let wrong = || {
        Reply::error(format_args!(
            "{name}: must be a whole number from {least} to {PERMITS_MAX}, not {number}"
        ))
    };
    u64::try_from(number).ok().filter(|it| number >= least && *it <= PERMITS_MAX).ok_or_else(wrong)
}

/// Whether the key is limited, its limit, the permits left, seconds until a retry can succeed (-1 if none is needed or none can), and
/// seconds until all permits are back.
fn reply(verdict: &Verdict) -> Reply {
    let decision = &verdict.decision;
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let (limited, retry_after) = match decision.outcome {
        Outcome::Admitted { .. } => (0, -1),
        Outcome::Denied { retry } => (1, number(retry.as_secs_ceil())),
        Outcome::Impossible => (1, -1),
    };
    let (limit, remaining) = (number(decision.limit), number(decision.remaining));
    Reply::Five([limited, limit, remaining, retry_after, number(decision.reset.as_secs_ceil())])
}
