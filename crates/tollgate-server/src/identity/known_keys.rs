//! API keys that are verified: a file lists their digests.

use std::collections::HashSet;
use std::fmt;

use super::api_key::{DIGEST_BYTES, sha256};

/// Digests of one file. A million take about 60 MB of memory; a deployment with more keys should issue tokens.
const DIGESTS_MAX: usize = 1_000_000;

/// The digests of all API keys that count as verified.
///
/// A client that reads this list still has no key: it would have to find a text with one of these digests. So the digests
/// need no comparison in constant time.
#[derive(Default)]
pub(crate) struct KnownKeys(HashSet<[u8; DIGEST_BYTES]>);

impl KnownKeys {
    /// Reads the lines of a file: a SHA-256 digest in hexadecimal, then an optional note. `#` begins a comment line.
    ///
    /// An error never shows the line: it may be the key itself.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut digests = HashSet::new();
        for (number, line) in text.lines().enumerate() {
            let Some(word) = line.split_whitespace().next().filter(|word| !word.starts_with('#')) else {
                continue;
            };
            let digest = digest(word).ok_or_else(|| {
                let expected = "expected the SHA-256 digest of an API key, 64 hexadecimal digits";
                format!("line {}: {expected} (printf %s KEY | sha256sum)", number + 1)
            })?;
            if digests.len() == DIGESTS_MAX {
                return Err(format!("line {}: at most {DIGESTS_MAX} digests", number + 1));
            }
            digests.insert(digest);
        }
        match digests.is_empty() {
            true => Err("holds no digest of an API key".to_owned()),
            false => Ok(Self(digests)),
        }
    }

    /// Whether no key is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the file lists this key's digest.
    pub(super) fn contains(&self, key: &str) -> bool {
        !self.0.is_empty() && self.0.contains(&sha256(key))
    }
}

/// The bytes of a digest that is written in hexadecimal digits.
fn digest(text: &str) -> Option<[u8; DIGEST_BYTES]> {
    if text.len() != 2 * DIGEST_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut digest = [0; DIGEST_BYTES];
    for (byte, place) in digest.iter_mut().zip((0..text.len()).step_by(2)) {
        *byte = u8::from_str_radix(&text[place..place + 2], 16).ok()?;
    }
    Some(digest)
}

impl fmt::Debug for KnownKeys {
    /// Keys that are easily guessed could be found out from their digests.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KnownKeys({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_file_holds_digests_with_notes_and_comment_lines() {
        let text = format!("# keys\r\n\r\n  {}  -\r\n{ABC} again\n   # end", ABC.to_uppercase());
        let known = KnownKeys::parse(&text).expect("digests");
        assert!(known.contains("abc"));
        assert!(
            !known.contains(ABC) && !known.contains("ABC") && !known.contains("abc ") && !known.contains("")
        );
        assert_eq!(format!("{known:?}"), "KnownKeys(1)");
    }

    #[test]
    fn a_wrong_line_is_named_and_never_shown() {
        for (text, expected) in [
            (format!("{ABC}\nsecret-key\n"), "line 2: expected the SHA-256 digest"),
            (format!("{}\n", &ABC[1..]), "line 1: expected the SHA-256 digest"),
            (format!("{ABC}0\n"), "line 1: expected the SHA-256 digest"),
            (format!("{}+1\n", &ABC[2..]), "line 1: expected the SHA-256 digest"),
            (format!("sha256:{ABC}\n"), "line 1: expected the SHA-256 digest"),
            ("# nothing\n\n".to_owned(), "holds no digest of an API key"),
            (String::new(), "holds no digest of an API key"),
        ] {
            let why = KnownKeys::parse(&text).expect_err(&text);
            assert!(why.starts_with(expected) && !why.contains("secret-key"), "{text}: {why}");
        }
    }
}
