//! Keys as callers name them, validated.

use std::fmt;

/// The most bytes of a key. This keeps request lines, log lines and store keys small; longer identities should be hashed.
pub const KEY_BYTES_MAX: usize = 256;

/// The key of a limit, such as `user:123` or `ip:192.0.2.1`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key<'a>(&'a str);

/// Why a text is not a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KeyError {
    /// All clients without a name would share one limit.
    #[error("must not be empty")]
    Empty,
    /// See [`KEY_BYTES_MAX`].
    #[error("must be at most {KEY_BYTES_MAX} bytes long, not {0}")]
    TooLong(usize),
    /// Braces would choose the slot in a Redis cluster, and control characters would forge log lines.
    #[error("must not contain control characters, '{{' or '}}'")]
    Forbidden,
}

impl<'a> Key<'a> {
    /// Validates a text.
    pub fn new(text: &'a str) -> Result<Self, KeyError> {
        if text.is_empty() {
            return Err(KeyError::Empty);
        }
        if text.len() > KEY_BYTES_MAX {
            return Err(KeyError::TooLong(text.len()));
        }
        if text.chars().any(|c| c.is_control() || c == '{' || c == '}') {
            return Err(KeyError::Forbidden);
        }
        Ok(Self(text))
    }

    /// The text.
    pub const fn as_str(self) -> &'a str {
        self.0
    }
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_validated() {
        for good in ["a", "user:123", "ip:2001:db8::/64", "한글", &"k".repeat(256)] {
            assert_eq!(Key::new(good).map(Key::as_str), Ok(good));
        }
        assert_eq!(Key::new(""), Err(KeyError::Empty));
        assert_eq!(Key::new(&"k".repeat(257)), Err(KeyError::TooLong(257)));
        assert_eq!(Key::new(&"한".repeat(86)), Err(KeyError::TooLong(258)));
        for bad in ["a\n", "a\0", "{a}", "a}", "\u{7f}", "\u{85}"] {
            assert_eq!(Key::new(bad), Err(KeyError::Forbidden), "{bad:?}");
        }
    }
}
