//! Rates as people write them (`10/s`, `100/min`, `5/1m30s`) and the units in which they are exact.

use core::fmt;
use core::num::NonZeroU64;
use core::str::FromStr;

use crate::limit::LimitError;
use crate::time::Micros;

/// A number of permits per time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rate {
    permits: NonZeroU64,
    per: NonZeroU64,
}

impl Rate {
    /// `permits` per `per`. Neither may be zero.
    pub fn new(permits: u64, per: Micros) -> Result<Self, RateError> {
        let permits = NonZeroU64::new(permits).ok_or(RateError::NoPermits)?;
        let per = NonZeroU64::new(per.get()).ok_or(RateError::NoTime)?;
        Ok(Self { permits, per })
    }

    /// `permits` a second; zero counts as one, so that a constant needs no error path.
    pub const fn per_second(permits: u64) -> Self {
        Self::per_seconds(permits, 1)
    }

    /// `permits` a minute; zero counts as one.
    pub const fn per_minute(permits: u64) -> Self {
        Self::per_seconds(permits, 60)
    }

    const fn per_seconds(permits: u64, secs: u64) -> Self {
        let Some(permits) = NonZeroU64::new(if permits == 0 { 1 } else { permits }) else { unreachable!() };
        let Some(per) = NonZeroU64::new(secs * 1_000_000) else { unreachable!() };
        Self { permits, per }
    }

    /// The number of permits.
    pub const fn permits(self) -> u64 {
        self.permits.get()
    }

    /// The time they are for.
    pub const fn per(self) -> Micros {
        Micros::new(self.per.get())
    }
}

/// Why a rate is not valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RateError {
    /// `0/s` would deny everything.
    #[error("a rate needs at least 1 permit")]
    NoPermits,
    /// `10/0s` would limit nothing.
    #[error("a rate needs a period above zero")]
    NoTime,
    /// Not of the form `PERMITS/PERIOD`.
    #[error("expected PERMITS/PERIOD, such as 10/s, 100/min or 5/1m30s")]
    Form,
}

impl FromStr for Rate {
    type Err = RateError;

    /// `PERMITS/PERIOD`, where the period is a unit (`s`, `sec`, `min`, `m`, `hour`, `h`, `day`, `d`) or a duration.
    fn from_str(text: &str) -> Result<Self, RateError> {
        let (permits, per) = text.split_once('/').ok_or(RateError::Form)?;
        let permits = parse_number(permits.trim()).ok_or(RateError::Form)?;
        let per = match per.trim() {
            "s" | "sec" | "second" => Micros::from_secs(1),
            "m" | "min" | "minute" => Micros::from_secs(60),
            "h" | "hour" => Micros::from_secs(3_600),
            "d" | "day" => Micros::from_secs(86_400),
            other => parse_duration(other).ok_or(RateError::Form)?,
        };
        Self::new(permits, per)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.per.get();
        write!(f, "{}/", self.permits)?;
        match us {
            _ if us.is_multiple_of(1_000_000) => write!(f, "{}s", us / 1_000_000),
            _ if us.is_multiple_of(1_000) => write!(f, "{}ms", us / 1_000),
            _ => write!(f, "{us}us"),
        }
    }
}

/// Reads a duration such as `500ms`, `1m30s` or `2h`: numbers with units, largest unit first, each unit at most once.
pub fn parse_duration(text: &str) -> Option<Micros> {
    /// Unit names with their length in microseconds, from the largest down.
    const UNITS: [(&str, u64); 6] = [
        ("d", 86_400_000_000),
        ("h", 3_600_000_000),
        ("m", 60_000_000),
        ("s", 1_000_000),
        ("ms", 1_000),
        ("us", 1),
    ];
    let mut rest = text;
    let mut units = UNITS.iter();
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number = parse_number(&rest[..digits])?;
        let after = &rest[digits..];
        let name_len = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (name, tail) = after.split_at(name_len);
        let &(_, length) = units.find(|(unit, _)| *unit == name)?;
        total = total.checked_add(number.checked_mul(length)?)?;
        rest = tail;
    }
    (!text.is_empty()).then_some(Micros::new(total))
}

/// Reads a number of digits only: no sign, no underscore, no space.
fn parse_number(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

/// The unit in which a rate and a bucket's size are whole numbers.
///
/// `unit` units make one permit and `flow` units flow in every `tick`, so no refill is ever rounded. The tick is the
/// smallest of 1 us, 1 ms and 1 s for which a full bucket stays below 2^51 units: exact in a double.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Scale {
    pub tick: NonZeroU64,
    pub unit: NonZeroU64,
    pub flow: NonZeroU64,
}

/// The largest size in units: the sum of two sizes is exact in a double.
pub(crate) const UNITS_MAX: u64 = 1 << 51;
/// The longest time to full, 35 years: far from the end of [`crate::Timestamp`].
pub(crate) const HORIZON_MAX_US: u64 = 1 << 50;
/// The ticks to choose from, in microseconds.
pub(crate) const TICKS_US: [u64; 3] = [1, 1_000, 1_000_000];

impl Scale {
    /// The finest scale at which `size` permits, refilled at `rate`, are exact.
    pub(crate) fn choose(size: u64, rate: Rate) -> Result<Self, LimitError> {
        let (permits, per) = (rate.permits(), rate.per().get());
        if per > HORIZON_MAX_US {
            return Err(LimitError::TooSlow);
        }
        if permits > UNITS_MAX {
            return Err(LimitError::TooLarge { max: UNITS_MAX });
        }
        let mut fits = 0;
        for tick in TICKS_US.into_iter().filter(|tick| per.is_multiple_of(*tick)) {
            let shared = gcd(permits, per / tick);
            let (unit, flow) = (per / tick / shared, permits / shared);
            if size.checked_mul(unit).is_none_or(|units| units > UNITS_MAX) {
                fits = UNITS_MAX / unit;
                continue;
            }
            if (size * unit).div_ceil(flow).checked_mul(tick).is_none_or(|us| us > HORIZON_MAX_US) {
                return Err(LimitError::TooSlow);
            }
            let nonzero = |n| NonZeroU64::new(n).ok_or(LimitError::TooSlow);
            return Ok(Self { tick: nonzero(tick)?, unit: nonzero(unit)?, flow: nonzero(flow)? });
        }
        Err(LimitError::TooLarge { max: fits })
    }
}

const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn rates_parse_from_permits_and_period() {
        for (text, permits, secs) in
            [("10/s", 10, 1), ("100/min", 100, 60), ("5/1m", 5, 60), ("60/hour", 60, 3_600)]
        {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.permits(), rate.per()), (permits, Micros::from_secs(secs)), "{text}");
        }
        assert_eq!("5/1m30s".parse::<Rate>().unwrap().per(), Micros::from_secs(90));
        assert_eq!("7/250ms".parse::<Rate>().unwrap().to_string(), "7/250ms");
    }

    #[test]
    fn invalid_rates_are_rejected() {
        for text in [
            "",
            "/",
            "10",
            "10/",
            "/s",
            "-1/s",
            "1.5/s",
            "+1/s",
            "10/0",
            "10/fortnight",
            "10/s/s",
            "10/30s1m",
        ] {
            assert_eq!(text.parse::<Rate>(), Err(RateError::Form), "{text}");
        }
        assert_eq!("0/s".parse::<Rate>(), Err(RateError::NoPermits));
        assert_eq!("1/0s".parse::<Rate>(), Err(RateError::NoTime));
    }

    #[test]
    fn durations_with_several_units_are_summed_without_overflow() {
        assert_eq!(parse_duration("1h2m3s4ms5us"), Some(Micros::new(3_723_004_005)));
        assert_eq!(parse_duration("0s"), Some(Micros::ZERO));
        assert_eq!(parse_duration("99999999999999999999d"), None);
        assert_eq!(parse_duration("300000000d"), None);
        assert_eq!(parse_duration("1s1s"), None);
    }

    #[test]
    fn scale_uses_the_finest_tick_that_holds_the_bucket() {
        // 625,000 an hour share a factor with the hour; a prime beside it does not and needs the millisecond.
        let scale = Scale::choose(10, Rate::per_second(10)).unwrap();
        assert_eq!((scale.tick.get(), scale.unit.get(), scale.flow.get()), (1, 100_000, 1));
        let prime = Rate::new(1_000_003, Micros::from_secs(3_600)).unwrap();
        assert_eq!(Scale::choose(1_000_003, prime).unwrap().tick.get(), 1_000);
        let slow = Rate::new(1, Micros::new(HORIZON_MAX_US)).unwrap();
        assert_eq!(Scale::choose(2, slow), Err(LimitError::TooSlow));
        let odd = Rate::new(1, Micros::new(1_000_003)).unwrap();
        assert_eq!(Scale::choose(u64::MAX, odd), Err(LimitError::TooLarge { max: UNITS_MAX / 1_000_003 }));
    }
}
