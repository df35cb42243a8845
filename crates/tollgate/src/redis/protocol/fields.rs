//! The stored fields of a hash, and the changes to write.

use std::borrow::Cow;

use crate::redis::error::StoreError;

/// The fields of all states of a call, as MessagePack: a list with one text for each state.
#[derive(Clone, Debug)]
pub(crate) struct Snapshots(Vec<Vec<u8>>);

impl Snapshots {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, StoreError> {
        let mut list = List::new(bytes)?;
        let mut snapshots = Vec::new();
        while let Some(snapshot) = list.text()? {
            snapshots.push(snapshot.to_vec());
        }
        Ok(Self(snapshots))
    }

    /// The stored bytes of a state by its number: empty if it is not a hash.
    pub(crate) fn get(&self, number: usize) -> Result<&[u8], StoreError> {
        let missing = || StoreError::protocol("a state is missing in the answer");
        self.0.get(number).map(Vec::as_slice).ok_or_else(missing)
    }
}

/// The fields of one hash.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Fields<'a> {
    /// Reads one snapshot: a list in which names and values alternate.
    pub(crate) fn parse(snapshot: &'a [u8]) -> Result<Self, StoreError> {
        let mut list = List::new(snapshot)?;
        let mut fields = Vec::new();
        while let Some(name) = list.text()? {
            let value = list.text()?.ok_or_else(|| StoreError::protocol("a field without a value"))?;
            let (Ok(name), Ok(value)) = (std::str::from_utf8(name), std::str::from_utf8(value)) else {
                continue;
            };
            fields.push((name, value));
        }
        Ok(Self(fields))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn get(&self, name: &str) -> Option<&'a str> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'a str, &'a str)> + '_ {
        self.0.iter().copied()
    }

    /// A field that holds a number.
    pub(crate) fn number(&self, name: &str) -> Result<Option<i64>, String> {
        self.get(name).map(|value| number(name, value)).transpose()
    }

    /// A required field that holds a number.
    pub(crate) fn needed(&self, name: &str) -> Result<i64, String> {
        self.number(name)?.ok_or_else(|| format!("the field {name} is missing"))
    }
}

/// Reads a whole number that is exact in a double.
pub(super) fn number(name: &str, value: &str) -> Result<i64, String> {
    let number = value.parse().ok().filter(|number: &i64| number.unsigned_abs() < 1 << 53);
    number.ok_or_else(|| format!("the field {name} is not a number: {}", value.escape_debug()))
}

/// The wanted fields of a state.
#[derive(Debug, Default)]
pub(crate) struct NewFields {
    fields: Vec<(Cow<'static, str>, String)>,
}

impl NewFields {
    pub(super) fn set(&mut self, name: impl Into<Cow<'static, str>>, value: impl ToString) {
        self.fields.push((name.into(), value.to_string()));
    }

    /// The changes to write: changed fields, and known fields that are not wanted any more.
    pub(super) fn differences(&self, stored: &Fields<'_>, is_known: impl Fn(&str) -> bool) -> Difference {
        let changed = self.fields.iter().filter(|(name, value)| stored.get(name) != Some(value));
        let removed =
            stored.iter().filter(|(name, _)| is_known(name) && !self.fields.iter().any(|(it, _)| it == name));
        Difference {
            set: changed.flat_map(|(name, value)| [name.to_string(), value.clone()]).collect(),
            removed: removed.map(|(name, _)| name.to_owned()).collect(),
        }
    }
}

/// The changes that turn the stored fields into the wanted ones.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Difference {
    /// Names and values in turn.
    pub(crate) set: Vec<String>,
    pub(crate) removed: Vec<String>,
}

/// A list of texts in MessagePack.
struct List<'a> {
    bytes: &'a [u8],
    left: usize,
}

impl<'a> List<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, StoreError> {
        let (tag, rest) = bytes.split_first().ok_or_else(odd)?;
        let (left, bytes) = match tag {
            // An empty table of Lua is a list or a map.
            0x80 | 0x90 => (0, rest),
            0x91..=0x9f => (usize::from(tag & 0x0f), rest),
            0xdc => length::<2>(rest)?,
            0xdd => length::<4>(rest)?,
            _ => return Err(odd()),
        };
        Ok(Self { bytes, left })
    }

    fn text(&mut self) -> Result<Option<&'a [u8]>, StoreError> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let (tag, rest) = self.bytes.split_first().ok_or_else(odd)?;
        let (length, rest) = match tag {
            0xa0..=0xbf => (usize::from(tag & 0x1f), rest),
            0xd9 | 0xc4 => length::<1>(rest)?,
            0xda | 0xc5 => length::<2>(rest)?,
            0xdb | 0xc6 => length::<4>(rest)?,
            _ => return Err(odd()),
        };
        let (text, rest) = rest.split_at_checked(length).ok_or_else(odd)?;
        self.bytes = rest;
        Ok(Some(text))
    }
}

/// Reads a length of `N` bytes. Returns also the rest.
fn length<const N: usize>(bytes: &[u8]) -> Result<(usize, &[u8]), StoreError> {
    let (length, rest) = bytes.split_first_chunk::<N>().ok_or_else(odd)?;
    Ok((length.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest))
}

fn odd() -> StoreError {
    StoreError::protocol("the fields of a state were not understood")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_in_order() {
        let long = "x".repeat(40);
        let mut bytes = vec![0x94, 0xa1, b'a', 0xa2, b'1', b'2', 0xa1, b'b', 0xd9, 40];
        bytes.extend_from_slice(long.as_bytes());
        let fields = Fields::parse(&bytes).unwrap();
        assert_eq!(fields.iter().collect::<Vec<_>>(), [("a", "12"), ("b", long.as_str())]);
        assert_eq!(fields.number("a"), Ok(Some(12)));
        assert!(fields.number("b").is_err() && fields.needed("c").is_err());
        assert!(Fields::parse(&[0x90]).unwrap().is_empty() && Fields::parse(&[0x80]).unwrap().is_empty());
    }

    #[test]
    fn truncated_or_unknown_answers_are_errors() {
        for bytes in [&[][..], &[0x05], &[0x91], &[0x92, 0xa1, b'a'], &[0x91, 0xa3, b'a'], &[0x92, 1, 2]] {
            assert!(Fields::parse(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn only_changed_and_removed_fields_are_written() {
        let bytes = [0x96, 0xa1, b'a', 0xa1, b'1', 0xa1, b'b', 0xa1, b'2', 0xa1, b'z', 0xa1, b'9'];
        let stored = Fields::parse(&bytes).unwrap();
        let mut wanted = NewFields::default();
        wanted.set("a", 1);
        wanted.set("c", 3);
        let difference = wanted.differences(&stored, |name| name != "z");
        assert_eq!(difference, Difference { set: vec!["c".into(), "3".into()], removed: vec!["b".into()] });
    }
}
