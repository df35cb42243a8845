//! Numbers as scripts take and return them: eight bytes each, big-endian.

use redis::Value;
use tollgate_core::Timestamp;

use super::fields::Snapshots;
use crate::redis::error::StoreError;

/// Numbers for a script.
pub(super) struct Numbers(pub(super) Vec<u8>);

impl Numbers {
    pub(super) fn add<const N: usize>(&mut self, numbers: [i64; N]) {
        for number in numbers {
            self.0.extend_from_slice(&(number as f64).to_be_bytes());
        }
    }

    /// Adds a text behind four bytes with its length.
    pub(super) fn add_text(&mut self, text: &[u8]) {
        self.0.extend_from_slice(&(text.len() as u32).to_be_bytes());
        self.0.extend_from_slice(text);
    }
}

/// The answer to a call on states.
pub(crate) enum Reply<'a> {
    /// The states were plain, and the script has decided.
    Decided { first: i64, now: Timestamp, numbers: Reader<'a> },
    /// The script has not decided. These are the stored fields.
    Rare { now: Timestamp, snapshots: Snapshots },
}

impl<'a> Reply<'a> {
    pub(crate) fn new(value: &'a Value) -> Result<Self, StoreError> {
        let Value::BulkString(bytes) = value else {
            return Err(StoreError::protocol(format_args!("numbers were expected, not {value:?}")));
        };
        let mut numbers = Reader(bytes);
        let (first, now) = (numbers.next()?, numbers.next()?);
        let now = Timestamp::from_micros(now as u64);
        match first {
            -1 => Ok(Self::Rare { now, snapshots: Snapshots::parse(numbers.0)? }),
            _ => Ok(Self::Decided { first, now, numbers }),
        }
    }
}

/// Numbers that are read one after another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn next(&mut self) -> Result<i64, StoreError> {
        let (number, rest) = self.0.split_first_chunk().ok_or_else(too_short)?;
        self.0 = rest;
        Ok(f64::from_be_bytes(*number) as i64)
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn take<const N: usize>(&mut self) -> Result<[i64; N], StoreError> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            *number = self.next()?;
        }
        Ok(numbers)
    }

    /// Splits off `count` numbers, to be read separately.
    pub(crate) fn split(&mut self, count: usize) -> Result<Self, StoreError> {
        let (numbers, rest) = self.0.split_at_checked(count.saturating_mul(8)).ok_or_else(too_short)?;
        self.0 = rest;
        Ok(Self(numbers))
    }
}

fn too_short() -> StoreError {
    StoreError::protocol("the answer is too short")
}
