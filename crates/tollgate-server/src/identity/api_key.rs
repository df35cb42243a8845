//! API keys: of each only a digest is known beyond this file.

use std::fmt;

use ring::{digest, hmac};

/// Bytes of an API key. Longer ones are not looked at.
const API_KEY_BYTES_MAX: usize = 512;

/// Stands for an API key in stores, logs and metrics: 128 bits of its digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ApiKeyId([u8; 16]);

/// Makes identifiers of keys.
///
/// Without a salt every reader of an identifier can compare it with the hashes of guessed keys. With a salt, which all nodes of a
/// deployment must share, only a holder of the salt can.
#[derive(Debug)]
pub(crate) struct ApiKeyHasher {
    salt: Option<hmac::Key>,
}

impl ApiKeyHasher {
    /// SHA-256, or HMAC-SHA-256 with a salt.
    pub(crate) fn new(salt: Option<&[u8]>) -> Self {
        Self { salt: salt.map(|salt| hmac::Key::new(hmac::HMAC_SHA256, salt)) }
    }

    /// The identifier of a key; none for what is no key: nothing, too long, or with more than visible ASCII in it.
    pub(crate) fn identify(&self, key: &str) -> Option<ApiKeyId> {
        if !(1..=API_KEY_BYTES_MAX).contains(&key.len()) || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        let mut id = ApiKeyId([0; 16]);
        match &self.salt {
            Some(salt) => id.0.copy_from_slice(&hmac::sign(salt, key.as_bytes()).as_ref()[..16]),
            None => id.0.copy_from_slice(&sha256(key)[..16]),
        }
        Some(id)
    }
}

/// Bytes of a SHA-256 digest.
pub(crate) const DIGEST_BYTES: usize = 32;

/// The SHA-256 digest of a text.
pub(crate) fn sha256(text: impl AsRef<[u8]>) -> [u8; DIGEST_BYTES] {
    let mut bytes = [0; DIGEST_BYTES];
    bytes.copy_from_slice(digest::digest(&digest::SHA256, text.as_ref()).as_ref());
    bytes
}

impl fmt::Display for ApiKeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for ApiKeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeyId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(salt: Option<&[u8]>, key: &str) -> Option<String> {
        ApiKeyHasher::new(salt).identify(key).map(|id| id.to_string())
    }

    #[test]
    fn an_identifier_is_the_first_half_of_a_digest() {
        // SHA-256 of "abc", and the second test case of RFC 4231.
        assert_eq!(id(None, "abc").as_deref(), Some("ba7816bf8f01cfea414140de5dae2223"));
        let jefe = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, b"Jefe"), b"what-do-ya-want");
        let hex: String = jefe.as_ref()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(id(Some(b"Jefe"), "what-do-ya-want"), Some(hex));
        assert_ne!(id(Some(b"Jefe"), "abc"), id(None, "abc"));
        assert_ne!(id(Some(b"Jefe"), "abc"), id(Some(b"Jeff"), "abc"));
    }

    #[test]
    fn a_text_that_is_no_key_has_no_identifier() {
        for key in ["", "two words", "tab\there", "line\nbreak", "schl\u{fc}ssel", "nul\0", &"k".repeat(513)]
        {
            assert_eq!(id(None, key), None, "{key:?}");
        }
        assert!(id(None, &"k".repeat(512)).is_some());
    }
}
