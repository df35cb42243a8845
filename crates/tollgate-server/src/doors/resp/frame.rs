//! Requests of the Redis protocol: arrays of bulk strings, and inline commands.
//!
//! The parser keeps no state. It reads the first request in the bytes that have arrived, or says that more bytes are needed. Arguments
//! borrow those bytes; only quoted arguments with escapes are copied.

use std::borrow::Cow;

/// One argument of a command. The first one is the command's name.
pub(crate) type Argument<'a> = Cow<'a, [u8]>;

/// The largest requests that are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Caps {
    /// Arguments of a command.
    pub(crate) arguments: usize,
    /// Bytes of one argument.
    pub(crate) argument_bytes: usize,
    /// Bytes of an inline command.
    pub(crate) inline_bytes: usize,
}

impl Caps {
    /// For clients that may use the service. The longest command is `TG.CHECK` with 31 descriptors; its values have at most 4 KiB.
    pub(crate) const FULL: Self = Self { arguments: 64, argument_bytes: 16 * 1024, inline_bytes: 64 * 1024 };
    /// For clients that have not shown a token: enough for `HELLO 3 AUTH user token SETNAME name`.
    pub(crate) const BEFORE_AUTH: Self = Self { arguments: 8, argument_bytes: 1024, inline_bytes: 2 * 1024 };
}

/// What the bytes that have arrived hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Parsed {
    /// A whole request of this many bytes. Without arguments it is empty, and gets no reply.
    Whole(usize),
    /// The beginning of a request that has at least this many bytes.
    NeedsBytes(usize),
}

/// Why bytes are not a request. The connection cannot be used after it, because the start of the next request is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("Protocol error: invalid multibulk length")]
    ArrayLength,
    #[error("Protocol error: unauthenticated multibulk length")]
    ArrayLengthBeforeAuth,
    #[error("Protocol error: too big mbulk count string")]
    ArrayHeader,
    #[error("Protocol error: expected '$', got '{}'", .0.escape_ascii())]
    NotABulkString(u8),
    #[error("Protocol error: invalid bulk length")]
    BulkLength,
    #[error("Protocol error: unauthenticated bulk length")]
    BulkLengthBeforeAuth,
    #[error("Protocol error: too big bulk count string")]
    BulkHeader,
    #[error("Protocol error: expected CRLF after a bulk string")]
    BulkEnd,
    #[error("Protocol error: too big inline request")]
    Inline,
    #[error("Protocol error: unbalanced quotes in request")]
    Quotes,
}

/// Bytes of a header such as `*5` or `$16384` before its line end. The longest one that is accepted has six.
const HEADER_BYTES_MAX: usize = 32;

/// Reads the first request in `input` into `arguments`, which it clears before.
pub(crate) fn parse<'a>(
    input: &'a [u8],
    caps: Caps,
    arguments: &mut Vec<Argument<'a>>,
) -> Result<Parsed, ProtocolError> {
    arguments.clear();
    match input.first() {
        None => Ok(Parsed::NeedsBytes(1)),
        Some(b'*') => parse_array(input, caps, arguments),
        Some(_) => parse_inline(input, caps, arguments),
    }
}

fn parse_array<'a>(
    input: &'a [u8],
    caps: Caps,
    arguments: &mut Vec<Argument<'a>>,
) -> Result<Parsed, ProtocolError> {
    use ProtocolError::{ArrayHeader, ArrayLength, ArrayLengthBeforeAuth};
    let Some((header, mut at)) = line(input, 1, ArrayHeader)? else {
        return Ok(Parsed::NeedsBytes(input.len() + 1));
    };
    let count = number(header).ok_or(ArrayLength)?;
    if count > caps.arguments as i64 {
        return Err(if caps == Caps::FULL { ArrayLength } else { ArrayLengthBeforeAuth });
    }
    for left in (0..count).rev() {
        // Every argument that is still to come has at least `$0\r\n\r\n`.
        let least = |at: usize| Ok(Parsed::NeedsBytes(at.max(input.len() + 1) + left as usize * 6));
        match input.get(at) {
            None => return least(at + 6),
            Some(b'$') => {}
            Some(other) => return Err(ProtocolError::NotABulkString(*other)),
        }
        let Some((header, start)) = line(input, at + 1, ProtocolError::BulkHeader)? else {
            return least(at + 6);
        };
        let length = bulk_length(header, caps)?;
        let end = start + length;
        match input.get(start..end + 2) {
            None => return least(end + 2),
            Some([bytes @ .., b'\r', b'\n']) => arguments.push(Cow::Borrowed(bytes)),
            Some(_) => return Err(ProtocolError::BulkEnd),
        }
        at = end + 2;
    }
    Ok(Parsed::Whole(at))
}

fn bulk_length(header: &[u8], caps: Caps) -> Result<usize, ProtocolError> {
    let length = number(header).and_then(|length| usize::try_from(length).ok());
    match length.ok_or(ProtocolError::BulkLength)? {
        length if length <= caps.argument_bytes => Ok(length),
        _ if caps == Caps::FULL => Err(ProtocolError::BulkLength),
        _ => Err(ProtocolError::BulkLengthBeforeAuth),
    }
}

/// The bytes from `start` to the next line end, and the position behind it. None if the line end has not arrived.
fn line(
    input: &[u8],
    start: usize,
    too_long: ProtocolError,
) -> Result<Option<(&[u8], usize)>, ProtocolError> {
    let rest = &input[start..];
    let seen = &rest[..rest.len().min(HEADER_BYTES_MAX)];
    match seen.iter().position(|byte| *byte == b'\r') {
        Some(end) if rest.get(end + 1) == Some(&b'\n') => Ok(Some((&rest[..end], start + end + 2))),
        // A carriage return alone does not end a line: as a part of a number it is refused.
        Some(end) if end + 1 < rest.len() => Ok(Some((&rest[..=end], start + end + 1))),
        None if rest.len() >= HEADER_BYTES_MAX => Err(too_long),
        Some(_) | None => Ok(None),
    }
}

/// A whole number without a plus sign, leading zeros or spaces.
fn number(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let is_canonical = digits.first().is_some_and(|first| *first != b'0') || text == b"0";
    // At most 18 digits: these fit into 64 bits.
    if !is_canonical || digits.len() > 18 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let value = digits.iter().fold(0, |value, digit| value * 10 + i64::from(digit - b'0'));
    Some(if digits.len() < text.len() { -value } else { value })
}

fn parse_inline<'a>(
    input: &'a [u8],
    caps: Caps,
    arguments: &mut Vec<Argument<'a>>,
) -> Result<Parsed, ProtocolError> {
    let seen = &input[..input.len().min(caps.inline_bytes)];
    let Some(end) = seen.iter().position(|byte| *byte == b'\n') else {
        return if input.len() < caps.inline_bytes {
            Ok(Parsed::NeedsBytes(input.len() + 1))
        } else {
            Err(ProtocolError::Inline)
        };
    };
    let mut rest = seen[..end].trim_ascii();
    while !rest.is_empty() {
        if arguments.len() >= caps.arguments {
            return Err(ProtocolError::Inline);
        }
        let (argument, behind) = word(rest)?;
        arguments.push(argument);
        rest = behind.trim_ascii_start();
    }
    Ok(Parsed::Whole(end + 1))
}

/// The first word of an inline command, which may be quoted, and the bytes behind it.
fn word(text: &[u8]) -> Result<(Argument<'_>, &[u8]), ProtocolError> {
    let quote = match text[0] {
        quote @ (b'"' | b'\'') => quote,
        _ => {
            let end = text.iter().position(u8::is_ascii_whitespace).unwrap_or(text.len());
            let (word, rest) = text.split_at(end);
            // Redis accepts quotes inside of a word; here a quote begins the word.
            let has_quote = word.iter().any(|byte| matches!(byte, b'"' | b'\''));
            return if has_quote { Err(ProtocolError::Quotes) } else { Ok((Cow::Borrowed(word), rest)) };
        }
    };
    let text = &text[1..];
    let ends_word = |at: usize| text.get(at).is_none_or(u8::is_ascii_whitespace);
    let plain = text.iter().position(|byte| *byte == quote || *byte == b'\\').ok_or(ProtocolError::Quotes)?;
    if text[plain] == quote && ends_word(plain + 1) {
        return Ok((Cow::Borrowed(&text[..plain]), &text[plain + 1..]));
    }
    let (mut word, mut at) = (Vec::new(), 0);
    loop {
        match *text.get(at).ok_or(ProtocolError::Quotes)? {
            b'\\' => at += escape(&text[at + 1..], quote, &mut word)? + 1,
            byte if byte == quote && ends_word(at + 1) => return Ok((Cow::Owned(word), &text[at + 1..])),
            byte if byte == quote => return Err(ProtocolError::Quotes),
            byte => {
                word.push(byte);
                at += 1;
            }
        }
    }
}

/// Adds the byte that the escape behind a backslash means, and says how long the escape is. Single quotes know only `\'`.
fn escape(text: &[u8], quote: u8, word: &mut Vec<u8>) -> Result<usize, ProtocolError> {
    let hex =
        |digit: Option<&u8>| digit.and_then(|digit| char::from(*digit).to_digit(16)).map(|digit| digit as u8);
    let first = *text.first().ok_or(ProtocolError::Quotes)?;
    if quote == b'\'' {
        if first != quote {
            word.push(b'\\');
            return Ok(0);
        }
        word.push(first);
        return Ok(1);
    }
    if let (b'x', Some(high), Some(low)) = (first, hex(text.get(1)), hex(text.get(2))) {
        word.push(high * 16 + low);
        return Ok(3);
    }
    word.push(match first {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 0x08,
        b'a' => 0x07,
        other => other,
    });
    Ok(1)
}

#[cfg(test)]
mod tests;
