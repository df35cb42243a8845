//! What a script answers: a list in MessagePack, read item by item.

use redis::Value;

use super::error::StoreError;

/// A list that is read from the front.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer<'a> {
    bytes: &'a [u8],
    /// Items that have not been read yet.
    left: usize,
}

/// One item of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Item<'a> {
    /// Nothing: a field that is absent.
    Nil,
    Number(i64),
    Text(&'a [u8]),
    /// A list of so many items, which follow.
    List(usize),
}

impl<'a> Answer<'a> {
    /// The answer of a script.
    pub(super) fn new(value: &'a Value) -> Result<Self, StoreError> {
        let Value::BulkString(bytes) = value else {
            return Err(StoreError::protocol(format_args!("a packed list was expected, not {value:?}")));
        };
        let mut whole = Self { bytes, left: 1 };
        match whole.item()? {
            Some(Item::List(items)) => Ok(Self { left: items, ..whole }),
            _ => Err(StoreError::protocol("a list was expected")),
        }
    }

    /// The next item, which is a list.
    pub(super) fn list(&mut self) -> Result<Self, StoreError> {
        self.in_list(|list| Ok(*list))
    }

    /// Reads the next item, which is a list. Items of it that are not read are passed over.
    pub(super) fn in_list<R>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        let Some(Item::List(items)) = self.item()? else {
            return Err(StoreError::protocol("a list was expected"));
        };
        let mut list = Self { bytes: self.bytes, left: items };
        let result = read(&mut list)?;
        list.skip()?;
        self.bytes = list.bytes;
        Ok(result)
    }

    /// Whether what is left says that there was no state.
    pub(super) fn is_without_state(&self) -> bool {
        let mut rest = *self;
        matches!(rest.item(), Ok(None | Some(Item::Nil)))
    }

    /// The next item, if it is a text.
    pub(super) fn text(&mut self) -> Option<&'a str> {
        match self.item() {
            Ok(Some(Item::Text(bytes))) => std::str::from_utf8(bytes).ok(),
            Ok(Some(Item::Nil | Item::Number(_) | Item::List(_)) | None) | Err(_) => None,
        }
    }

    /// The next item, which is a number.
    pub(super) fn number(&mut self) -> Result<i64, StoreError> {
        self.number_or_none()?.ok_or_else(|| StoreError::protocol("a number is missing"))
    }

    /// The next item, which is a number, or nothing.
    pub(super) fn number_or(&mut self, absent: i64) -> Result<i64, StoreError> {
        Ok(self.number_or_none()?.unwrap_or(absent))
    }

    fn number_or_none(&mut self) -> Result<Option<i64>, StoreError> {
        match self.item()? {
            Some(Item::Number(number)) => Ok(Some(number)),
            // Fields of a hash are texts.
            Some(Item::Text(bytes)) => {
                let number = std::str::from_utf8(bytes).ok().and_then(|text| text.parse().ok());
                number.map(Some).ok_or_else(|| {
                    StoreError::protocol(format_args!("a number was expected, not {}", bytes.escape_ascii()))
                })
            }
            Some(Item::Nil) | None => Ok(None),
            Some(Item::List(_)) => Err(StoreError::protocol("a number was expected, not a list")),
        }
    }

    /// Passes over everything that is left, lists with their items.
    fn skip(&mut self) -> Result<(), StoreError> {
        while let Some(item) = self.item()? {
            if let Item::List(items) = item {
                self.left += items;
            }
        }
        Ok(())
    }

    /// Reads the next item. Of a list, it reads the length only. `None`: the list has ended.
    fn item(&mut self) -> Result<Option<Item<'a>>, StoreError> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let [tag] = self.take()?;
        let item = match tag {
            0x00..=0x7f => Item::Number(i64::from(tag)),
            0xe0..=0xff => Item::Number(i64::from(tag as i8)),
            0xcc => Item::Number(i64::from(u8::from_be_bytes(self.take()?))),
            0xcd => Item::Number(i64::from(u16::from_be_bytes(self.take()?))),
            0xce => Item::Number(i64::from(u32::from_be_bytes(self.take()?))),
            // Numbers of scripts are below 2^53.
            0xcf | 0xd3 => Item::Number(i64::from_be_bytes(self.take()?)),
            0xd0 => Item::Number(i64::from(i8::from_be_bytes(self.take()?))),
            0xd1 => Item::Number(i64::from(i16::from_be_bytes(self.take()?))),
            0xd2 => Item::Number(i64::from(i32::from_be_bytes(self.take()?))),
            0xc0 | 0xc2 => Item::Nil,
            0xa0..=0xbf => Item::Text(self.take_bytes(usize::from(tag & 0x1f))?),
            0xd9 => {
                let [length] = self.take()?;
                Item::Text(self.take_bytes(usize::from(length))?)
            }
            0xda => {
                let length = u16::from_be_bytes(self.take()?);
                Item::Text(self.take_bytes(usize::from(length))?)
            }
            0xdb => {
                let length = u32::from_be_bytes(self.take()?);
                Item::Text(self.take_bytes(length as usize)?)
            }
            0x90..=0x9f => Item::List(usize::from(tag & 0x0f)),
            0xdc => Item::List(usize::from(u16::from_be_bytes(self.take()?))),
            0xdd => Item::List(u32::from_be_bytes(self.take()?) as usize),
            0x80..=0x8f | 0xc1 | 0xc3..=0xcb | 0xd4..=0xd8 | 0xde | 0xdf => {
                return Err(StoreError::protocol(format_args!("an item of the kind {tag:#x}")));
            }
        };
        Ok(Some(item))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], StoreError> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or_else(too_short)?;
        self.bytes = rest;
        Ok(*taken)
    }

    fn take_bytes(&mut self, length: usize) -> Result<&'a [u8], StoreError> {
        let (taken, rest) = self.bytes.split_at_checked(length).ok_or_else(too_short)?;
        self.bytes = rest;
        Ok(taken)
    }
}

fn too_short() -> StoreError {
    StoreError::protocol("the answer is too short")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use super::*;

    #[test]
    fn items_are_read_in_order() {
        // [7, -1, 300, 1763000000000000, "12", nil, [1, ["a"]], false]
        let mut bytes = vec![0x98, 7, 0xff, 0xcd, 1, 44, 0xcf];
        bytes.extend_from_slice(&1_763_000_000_000_000_u64.to_be_bytes());
        bytes.extend_from_slice(&[0xa2, b'1', b'2', 0xc0, 0x92, 1, 0x91, 0xa1, b'a', 0xc2]);
        let value = Value::BulkString(bytes);
        let mut answer = Answer::new(&value).unwrap();
        let numbers = [7, -1, 300, 1_763_000_000_000_000, 12];
        assert_eq!([(); 5].map(|()| answer.number().unwrap()), numbers);
        assert!(answer.is_without_state());
        assert_eq!(answer.number_or(5).unwrap(), 5);
        let mut inner = answer.list().unwrap();
        assert_eq!(inner.number().unwrap(), 1);
        assert_eq!(inner.list().unwrap().text(), Some("a"));
        assert!(inner.number().is_err());
        assert_eq!((answer.text(), answer.number_or(3).unwrap()), (None, 3));
    }

    #[test]
    fn what_no_script_says_is_an_error() {
        for bytes in
            [&[][..], &[0x05], &[0x92, 1], &[0x91, 0xa3, b'a'], &[0x91, 0xcb], &[0xdd, 0xff, 0xff, 0xff]]
        {
            let value = Value::BulkString(bytes.to_vec());
            let read = Answer::new(&value).and_then(|mut answer| Ok((answer.number()?, answer.number()?)));
            assert!(read.is_err(), "{bytes:?}");
        }
        assert!(Answer::new(&Value::Int(1)).is_err());
    }
}
