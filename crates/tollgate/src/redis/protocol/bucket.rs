//! The state of a token bucket or a leaky bucket, as `bucket.lua` and `lend.lua` keep it.

use tollgate_core::algorithm::{Algorithm, BucketState, LeaseBucket, LeaseState};
use tollgate_core::{LeakyMode, Micros, State, Timestamp, TokenBucket};

use super::fields::{Fields, NewFields};
use super::numbers::{Numbers, Reader};
use crate::redis::error::StoreError;

/// The fields that a bucket's amount and its date are kept in, and whether the amount is water.
#[derive(Clone, Copy)]
pub(super) struct Names {
    pub(super) amount: &'static str,
    pub(super) dated: &'static str,
    pub(super) is_water: bool,
}

pub(super) const TOKENS: Names = Names { amount: "tokens", dated: "last_refill", is_water: false };
pub(super) const WATER: Names = Names { amount: "level", dated: "last_leak", is_water: true };

pub(super) fn parameters(it: &TokenBucket, mode: LeakyMode, numbers: &mut Numbers) {
    numbers.add(it.parts().map(|number| number as i64));
    numbers.add([i64::from(mode == LeakyMode::Queue)]);
}

pub(super) fn plain(numbers: &mut Reader<'_>) -> Result<State, StoreError> {
    let [level, at] = numbers.take()?;
    Ok(State::Bucket(BucketState { level, at }))
}

/// The state that `lend.lua` answers.
pub(super) fn plain_lent(numbers: &mut Reader<'_>) -> Result<State, StoreError> {
    let [level, at, life, epoch, out, out_before] = numbers.take()?;
    let bucket = BucketState { level, at };
    if out + out_before == 0 {
        return Ok(State::Bucket(bucket));
    }
    let (out, out_before) = (out as u64, out_before as u64);
    Ok(State::Lent(LeaseState { bucket, life, epoch, out, out_before }))
}

/// The state that fields stand for under the limit that they were written under. `lends`: whether the asking limit can lend.
pub(super) fn stored(
    it: &TokenBucket,
    names: Names,
    fields: &Fields<'_>,
    lends: bool,
) -> Result<State, String> {
    let (amount, dated) = (fields.needed(names.amount)?, fields.needed(names.dated)?);
    let frac = fields.number("frac")?.unwrap_or(0);
    let (size, unit, flow) = (it.size() as i64, it.unit() as i64, it.flow() as i64);
    // The bounds keep foreign values in range: debts and reservations go at most one capacity and one tick below empty.
    let beyond = size + it.flow().div_ceil(it.unit()) as i64;
    let units = amount.min(size + beyond).max(-beyond) * unit + frac.min(unit - 1).max(0);
    let full = size * unit;
    let level = if names.is_water { full - units } else { units };
    let bucket =
        BucketState { level: level.min(full).max(-full - flow), at: dated.div_euclid(it.tick() as i64) };
    match fields.get("leases").filter(|_| lends) {
        None => Ok(State::Bucket(bucket)),
        Some(text) => {
            let (life, since, out) =
                leases(text).ok_or_else(|| format!("no leases: {}", text.escape_debug()))?;
            Ok(State::Lent(LeaseState::new(it, bucket, life, since, out)))
        }
    }
}

/// How long leases live, when the epoch began, and the permits lent in it and in the one before.
fn leases(text: &str) -> Option<(Micros, Timestamp, [u64; 2])> {
    let numbers = text.split(' ').map(|number| number.parse().ok().filter(|number| *number < 1_u64 << 53));
    let [life, since, out, before] = numbers.collect::<Option<Vec<_>>>()?.try_into().ok()?;
    Some((Micros::new(life), Timestamp::from_micros(since), [out, before]))
}

pub(super) fn fields(it: &TokenBucket, names: Names, state: &State, fields: &mut NewFields) {
    let bucket = match state {
        State::Bucket(bucket) => bucket,
        State::Lent(lent) => {
            let lender = LeaseBucket(*it);
            if lent.out + lent.out_before > 0 {
                let (life, since) = (lender.life(lent).get(), lender.since(lent).as_micros());
                fields.set("leases", format!("{life} {since} {} {}", lent.out, lent.out_before));
            }
            &lent.bucket
        }
        State::Interval(_)
        | State::Window(_)
        | State::Log(_)
        | State::Counter(_)
        | State::Calendar(_)
        | State::Carried(_) => return,
    };
    let (unit, tick) = (it.unit() as i64, it.tick() as i64);
    let amount = if names.is_water { it.size() as i64 * unit - bucket.level } else { bucket.level };
    fields.set(names.amount, amount.div_euclid(unit));
    fields.set(names.dated, bucket.at * tick);
    let frac = amount.rem_euclid(unit);
    if frac > 0 {
        fields.set("frac", frac);
    }
}

/// Whether a field is optional in a bucket.
pub(super) fn is_optional(name: &str) -> bool {
    matches!(name, "frac" | "leases" | "forgone")
}
