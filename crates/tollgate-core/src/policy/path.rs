//! The path of a request, in every way in which a server may read it.
//!
//! Servers differ: some decode `%2f`, some read `\\` as `/`, some cut `;parameters`, some cut at `#`, some resolve `..` before they match
//! the path and some after. A limit on `/api/login` must hold for all of these spellings, and an exclusion for none.

use alloc::borrow::Cow;
use alloc::string::String;
use alloc::vec::Vec;

use smallvec::{SmallVec, smallvec};

use super::pattern::split;

/// How often escapes are decoded: a proxy and the server behind it may both decode.
const DECODINGS: usize = 2;

/// Characters at which a server that looks for query and fragment after decoding, or that keeps paths as C strings, ends a path.
const ENDS: [char; 3] = ['?', '#', '\0'];

/// The segments of a path.
pub(super) type Segments<'a> = SmallVec<[&'a str; 16]>;

/// The readings of a request's path, each without its query. A path in plain form has one.
#[derive(Debug)]
pub struct RequestPath<'a> {
    readings: SmallVec<[Cow<'a, str>; 5]>,
    is_plain: bool,
}

impl<'a> RequestPath<'a> {
    /// Reads a path as received. With `ignore_case` its ASCII letters are compared in lower case.
    pub fn new(path: &'a str, ignore_case: bool) -> Self {
        let raw = path.split('?').next().unwrap_or(path);
        let is_plain = is_plain(raw);
        let mut readings: SmallVec<[Cow<'a, str>; 5]> = smallvec![Cow::Borrowed(raw)];
        if !is_plain {
            let without_fragment = raw.split('#').next().unwrap_or(raw);
            // The reading that merges the most spellings comes first, because a limit counts by its parameters.
            let first = decoded(without_fragment, &[]);
            let others = [plain(without_fragment), decoded(raw, &[]), decoded(raw, &ENDS)];
            readings = smallvec![Cow::Owned(first)];
            for other in others {
                if !readings.contains(&Cow::Borrowed(other.as_str())) {
                    readings.push(Cow::Owned(other));
                }
            }
            readings.push(Cow::Borrowed(raw));
        }
        if ignore_case {
            for reading in &mut readings {
                *reading = Cow::Owned(reading.to_ascii_lowercase());
            }
        }
        Self { readings, is_plain }
    }

    /// Whether all servers read the path alike: nothing in it needs decoding, resolving or trimming.
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// The readings, without their query.
    pub fn readings(&self) -> impl Iterator<Item = &str> {
        self.readings.iter().map(|reading| &**reading)
    }

    /// The segments of each reading.
    pub(super) fn segments(&self) -> SmallVec<[Segments<'_>; 1]> {
        let segments = |reading| split(str::strip_prefix(reading, '/').unwrap_or(reading)).collect();
        self.readings().map(segments).collect()
    }
}

fn is_plain(path: &str) -> bool {
    let is_odd = |c: char| matches!(c, '%' | ';' | '\\' | '#') || c.is_whitespace() || c.is_control();
    path.starts_with('/')
        && !path.contains("//")
        && !path.contains(is_odd)
        && !path.split('/').any(|segment| matches!(segment, "." | ".."))
}

/// The path without `//`, `.`, `..` and `;parameters`, and with `%XX` decoded once, but for an encoded slash.
fn plain(path: &str) -> String {
    let bare: Vec<&str> = path.split('/').map(without_parameters).collect();
    let decoded = decode(&bare.join("/"), b"/%");
    resolved(decoded.split('/'))
}

/// The same with everything decoded, `\` taken for `/`, and segments without white space at their ends. The first of `ends` ends the path.
fn decoded(path: &str, ends: &[char]) -> String {
    let mut text = Cow::Borrowed(path);
    for _ in 0..DECODINGS {
        if !text.contains('%') {
            break;
        }
        text = Cow::Owned(decode(&text, b""));
    }
    let is_blank = |c: char| c.is_whitespace() || c.is_control();
    let text = text.split(ends).next().unwrap_or(&text);
    let segments = text.split(['/', '\\']);
    resolved(segments.map(|segment| without_parameters(segment).trim_end_matches(is_blank)))
}

fn without_parameters(segment: &str) -> &str {
    segment.split(';').next().unwrap_or(segment)
}

/// A path of these segments, without empty ones, `.` and `..`.
fn resolved<'s>(segments: impl Iterator<Item = &'s str>) -> String {
    let mut kept: Vec<&str> = Vec::new();
    for segment in segments {
        match segment {
            "" | "." => {}
            ".." => {
                kept.pop();
            }
            segment => kept.push(segment),
        }
    }
    let mut path = String::from("/");
    path.push_str(&kept.join("/"));
    path
}

/// Decodes `%XX` once, except for the bytes in `kept`, which stay encoded in capitals. Bytes that are not UTF-8 are replaced, so that
/// one such byte does not hide the rest.
fn decode(path: &str, kept: &[u8]) -> String {
    let bytes = path.as_bytes();
    let digit = |at: usize| bytes.get(at).and_then(|byte| char::from(*byte).to_digit(16));
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        match (byte, digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                let byte = (high * 16 + low) as u8;
                if kept.contains(&byte) {
                    decoded.extend(bytes[at..at + 3].iter().map(u8::to_ascii_uppercase));
                } else {
                    decoded.push(byte);
                }
                at += 3;
            }
            _ => {
                decoded.push(*byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}
