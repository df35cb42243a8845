//! The prefix of all keys in a store.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The prefix that heads every key of an installation, so that several can share one store. `rate_limiter` unless another is set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyPrefix(Arc<str>);

/// The longest prefix: it is part of every key.
const LENGTH_MAX: usize = 64;

/// Why a text is not a prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected 1 to {LENGTH_MAX} letters, digits, and characters of _ - . :")]
pub struct KeyPrefixError;

impl FromStr for KeyPrefix {
    type Err = KeyPrefixError;

    fn from_str(text: &str) -> Result<Self, KeyPrefixError> {
        // Braces would move all keys to one slot of a cluster, and a * would be a pattern in the ACL line.
        let is_accepted = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
        let fits = (1..=LENGTH_MAX).contains(&text.len()) && text.bytes().all(is_accepted);
        if fits { Ok(Self(text.into())) } else { Err(KeyPrefixError) }
    }
}

impl Default for KeyPrefix {
    fn default() -> Self {
        Self("rate_limiter".into())
    }
}

impl fmt::Display for KeyPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_accepted() {
        for good in ["rate_limiter", "shop:eu-1", "a", "v1.2", &"x".repeat(64)] {
            assert_eq!(good.parse::<KeyPrefix>().map(|it| it.to_string()).as_deref(), Ok(good));
        }
        for bad in ["", "{a}", "a b", "a*", "é", "a\n", &"x".repeat(65)] {
            assert_eq!(bad.parse::<KeyPrefix>(), Err(KeyPrefixError), "{bad}");
        }
    }
}
