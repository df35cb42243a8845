//! A node's share of a limit.

use std::fmt;
use std::str::FromStr;

/// A fraction above 0 and at most 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    part: u32,
    whole: u32,
}

/// Why a text is not a share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("must be a fraction such as 1/2 or a percentage such as 50%, above 0 and at most 1")]
pub struct ShareError;

impl Share {
    /// One half.
    pub const HALF: Self = Self { part: 1, whole: 2 };

    /// A part of a whole.
    pub const fn new(part: u32, whole: u32) -> Result<Self, ShareError> {
        if part == 0 || part > whole { Err(ShareError) } else { Ok(Self { part, whole }) }
    }

    /// The share of one of several equal nodes.
    pub(super) const fn one_of(nodes: u32) -> Self {
        Self { part: 1, whole: if nodes == 0 { 1 } else { nodes } }
    }

    /// A cost scaled up for a node with this share; rounded up, against the caller.
    pub(super) const fn weigh(self, cost: u64) -> u64 {
        let weight = (cost as u128 * self.whole as u128).div_ceil(self.part as u128);
        if weight > u64::MAX as u128 { u64::MAX } else { weight as u64 }
    }

    /// This share of a number of permits, rounded down.
    pub(super) const fn of(self, permits: u64) -> u64 {
        (permits as u128 * self.part as u128 / self.whole as u128) as u64
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.part, self.whole)
    }
}

impl FromStr for Share {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, ShareError> {
        let number = |digits: &str| digits.trim().parse().map_err(|_| ShareError);
        match (text.split_once('/'), text.strip_suffix('%')) {
            (Some((part, whole)), _) => Self::new(number(part)?, number(whole)?),
            (None, Some(percent)) => Self::new(number(percent)?, 100),
            (None, None) => Self::new(number(text)?, 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_parse_from_fractions_and_percentages() {
        for (text, share) in
            [("1/2", Ok("1/2")), ("50%", Ok("50/100")), ("1", Ok("1/1")), (" 2 / 3 ", Ok("2/3"))]
        {
            assert_eq!(text.parse::<Share>().map(|share| share.to_string()), share.map(str::to_owned));
        }
        for text in ["", "0", "0%", "101%", "3/2", "1/0", "-1/2", "0.5", "half"] {
            assert_eq!(text.parse::<Share>(), Err(ShareError), "{text}");
        }
    }

    #[test]
    fn shares_round_against_the_caller() {
        let third = Share::one_of(3);
        assert_eq!((third.weigh(1), third.of(100)), (3, 33));
        let two_thirds = Share { part: 2, whole: 3 };
        assert_eq!((two_thirds.weigh(1), two_thirds.weigh(2), two_thirds.of(10)), (2, 3, 6));
        assert_eq!(third.weigh(u64::MAX), u64::MAX);
        assert_eq!(Share::one_of(0).weigh(7), 7);
    }
}
