//! Keys that tokens are verified with, from what the files hold, each with the algorithms that it may be used with.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jsonwebtoken::jwk::{
    AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyAlgorithm, KeyOperations, PublicKeyUse,
};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A signature algorithm of a token. There is no `none`.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum JwtAlgorithm {
    /// HMAC with SHA-256, by a shared secret.
    Hs256,
    /// HMAC with SHA-384, by a shared secret.
    Hs384,
    /// HMAC with SHA-512, by a shared secret.
    Hs512,
    /// RSA (PKCS #1) with SHA-256.
    Rs256,
    /// RSA (PKCS #1) with SHA-384.
    Rs384,
    /// RSA (PKCS #1) with SHA-512.
    Rs512,
    /// RSA (PSS) with SHA-256.
    Ps256,
    /// RSA (PSS) with SHA-384.
    Ps384,
    /// RSA (PSS) with SHA-512.
    Ps512,
    /// ECDSA on P-256 with SHA-256.
    Es256,
    /// ECDSA on P-384 with SHA-384.
    Es384,
    /// Ed25519.
    #[serde(rename = "EdDSA")]
    EdDsa,
}

/// What kind of key an algorithm needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum KeyKind {
    Secret,
    Rsa,
    P256,
    P384,
    Ed25519,
}

impl JwtAlgorithm {
    /// All of them.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 12] = [
        Self::Hs256,
        Self::Hs384,
        Self::Hs512,
        Self::Rs256,
        Self::Rs384,
        Self::Rs512,
        Self::Ps256,
        Self::Ps384,
        Self::Ps512,
        Self::Es256,
        Self::Es384,
        Self::EdDsa,
    ];

    /// Its name in the head of a token.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Hs256 => "HS256",
            Self::Hs384 => "HS384",
            Self::Hs512 => "HS512",
            Self::Rs256 => "RS256",
            Self::Rs384 => "RS384",
            Self::Rs512 => "RS512",
            Self::Ps256 => "PS256",
            Self::Ps384 => "PS384",
            Self::Ps512 => "PS512",
            Self::Es256 => "ES256",
            Self::Es384 => "ES384",
            Self::EdDsa => "EdDSA",
        }
    }

    /// Whether whoever verifies could sign as well.
    pub(crate) const fn is_symmetric(self) -> bool {
        matches!(self.key_kind(), KeyKind::Secret)
    }

    const fn key_kind(self) -> KeyKind {
        match self {
            Self::Hs256 | Self::Hs384 | Self::Hs512 => KeyKind::Secret,
            Self::Rs256 | Self::Rs384 | Self::Rs512 | Self::Ps256 | Self::Ps384 | Self::Ps512 => KeyKind::Rsa,
            Self::Es256 => KeyKind::P256,
            Self::Es384 => KeyKind::P384,
            Self::EdDsa => KeyKind::Ed25519,
        }
    }

    /// Its name in the library.
    pub(super) const fn library(self) -> Algorithm {
        match self {
            Self::Hs256 => Algorithm::HS256,
            Self::Hs384 => Algorithm::HS384,
            Self::Hs512 => Algorithm::HS512,
            Self::Rs256 => Algorithm::RS256,
            Self::Rs384 => Algorithm::RS384,
            Self::Rs512 => Algorithm::RS512,
            Self::Ps256 => Algorithm::PS256,
            Self::Ps384 => Algorithm::PS384,
            Self::Ps512 => Algorithm::PS512,
            Self::Es256 => Algorithm::ES256,
            Self::Es384 => Algorithm::ES384,
            Self::EdDsa => Algorithm::EdDSA,
        }
    }

    /// The output of the hash: a shorter secret would be the weakest part (RFC 7518, 3.2).
    const fn secret_bytes_min(self) -> usize {
        match self {
            Self::Hs384 => 48,
            Self::Hs512 => 64,
            _ => 32,
        }
    }
}

/// Keys and what they may be used with.
#[derive(Debug)]
pub(crate) struct VerifyingKeys {
    /// A key of a file of its own is asked whatever `kid` a token has; of a set, only the one with that name.
    is_set: bool,
    keys: Vec<VerifyingKey>,
}

/// A key with the algorithms that it may be used with: all of one kind.
#[derive(Debug)]
struct VerifyingKey {
    id: Option<String>,
    algorithms: Vec<JwtAlgorithm>,
    key: DecodingKey,
}

/// Why there is no key for a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoKey {
    /// None by that name, or several without one.
    Unknown,
    /// Only for other algorithms.
    Algorithm,
}

/// Keys of a set. Issuers publish a handful; each is looked at for every token.
const KEYS_MAX: usize = 64;

/// 2,048 bits: shorter moduli are within reach of whoever has the machines.
const RSA_MODULUS_BYTES_MIN: usize = 256;

impl VerifyingKeys {
    /// A shared secret.
    pub(crate) fn from_secret(secret: &[u8], algorithms: &[JwtAlgorithm]) -> Result<Self, String> {
        if let Some(other) = algorithms.iter().find(|it| !it.is_symmetric()) {
            return Err(format!("{} needs a public key: key_file or jwks_file", other.as_str()));
        }
        check_secret(secret, algorithms)?;
        Ok(Self::one(algorithms, DecodingKey::from_secret(secret)))
    }

    /// A public key in PEM.
    pub(crate) fn from_pem(pem: &[u8], algorithms: &[JwtAlgorithm]) -> Result<Self, String> {
        if let Some(other) = algorithms.iter().find(|it| it.is_symmetric()) {
            return Err(format!("{} needs a secret: secret_file", other.as_str()));
        }
        let text = String::from_utf8_lossy(pem);
        if text.contains("PRIVATE KEY-----") {
            return Err(
                "holds a private key, which only the issuer may have; expected the public one".to_owned()
            );
        }
        if text.matches("-----BEGIN ").count() > 1 {
            return Err("holds more than one key; several go into a jwks_file".to_owned());
        }
        let der = read_pem(&text).ok_or("expected a public key in PEM: -----BEGIN PUBLIC KEY-----")?;
        let (kind, key) = read_public_key(&der)
            .filter(|(kind, key)| is_sound(*kind, key, algorithms))
            .ok_or("expected a public key: RSA of at least 2048 bits, P-256, P-384 or Ed25519")?;
        if let Some(other) = algorithms.iter().find(|it| it.key_kind() != kind) {
            return Err(format!("{} cannot be used with a key of the kind {kind:?}", other.as_str()));
        }
        Ok(Self::one(algorithms, key))
    }

    /// A set of keys. Those for other purposes or other algorithms are left out, as issuers publish all kinds; one must be
    /// left.
    pub(crate) fn from_jwks(json: &[u8], algorithms: &[JwtAlgorithm]) -> Result<Self, String> {
        let set: JwkSet =
            serde_json::from_slice(json).map_err(|why| format!("expected a JSON Web Key Set: {why}"))?;
        if set.keys.len() > KEYS_MAX {
            return Err(format!("at most {KEYS_MAX} keys"));
        }
        let keys: Vec<_> =
            set.keys.iter().filter_map(|jwk| VerifyingKey::from_jwk(jwk, algorithms)).collect();
        if keys.is_empty() {
            let names: Vec<_> = algorithms.iter().map(|it| it.as_str()).collect();
            return Err(format!("holds no key that can be used with {}", names.join(", ")));
        }
        Ok(Self { is_set: true, keys })
    }

    fn one(algorithms: &[JwtAlgorithm], key: DecodingKey) -> Self {
        Self { is_set: false, keys: vec![VerifyingKey { id: None, algorithms: algorithms.to_vec(), key }] }
    }

    /// The key for a token. Its `kid` chooses among keys that are here; it is never a place to fetch one from.
    pub(super) fn find(&self, id: Option<&str>, algorithm: JwtAlgorithm) -> Result<&DecodingKey, NoKey> {
        let mut named =
            self.keys.iter().filter(|key| !self.is_set || id.is_none() || key.id.as_deref() == id).peekable();
        if named.peek().is_none() {
            return Err(NoKey::Unknown);
        }
        let mut fitting = named.filter(|key| key.algorithms.contains(&algorithm));
        let key = fitting.next().ok_or(NoKey::Algorithm)?;
        if fitting.next().is_some() { Err(NoKey::Unknown) } else { Ok(&key.key) }
    }
}

impl VerifyingKey {
    /// A key of a set, if it is one that may be used.
    fn from_jwk(jwk: &Jwk, algorithms: &[JwtAlgorithm]) -> Option<Self> {
        let common = &jwk.common;
        let signs = common.public_key_use.as_ref().is_none_or(|it| *it == PublicKeyUse::Signature);
        let verifies = common.key_operations.as_ref().is_none_or(|it| it.contains(&KeyOperations::Verify));
        let kind = match &jwk.algorithm {
            AlgorithmParameters::OctetKey(_) => KeyKind::Secret,
            AlgorithmParameters::RSA(_) => KeyKind::Rsa,
            AlgorithmParameters::EllipticCurve(it) if it.curve == EllipticCurve::P256 => KeyKind::P256,
            AlgorithmParameters::EllipticCurve(it) if it.curve == EllipticCurve::P384 => KeyKind::P384,
            AlgorithmParameters::OctetKeyPair(it) if it.curve == EllipticCurve::Ed25519 => KeyKind::Ed25519,
            _ => return None,
        };
        let said = |it: JwtAlgorithm| {
            common.key_algorithm.is_none_or(|said| said == KeyAlgorithm::from(it.library()))
        };
        let fitting: Vec<_> =
            algorithms.iter().copied().filter(|it| it.key_kind() == kind && said(*it)).collect();
        let key = DecodingKey::from_jwk(jwk).ok()?;
        (signs && verifies && !fitting.is_empty() && is_sound(kind, &key, &fitting)).then(|| Self {
            id: common.key_id.clone(),
            algorithms: fitting,
            key,
        })
    }
}

/// Whether a key could ever verify anything. ring refuses what is too short with every signature, without a word.
fn is_sound(kind: KeyKind, key: &DecodingKey, algorithms: &[JwtAlgorithm]) -> bool {
    let bytes = match key.kind() {
        DecodingKeyKind::RsaModulusExponent { n, .. } => n,
        DecodingKeyKind::SecretOrDer(bytes) => bytes,
    };
    match kind {
        KeyKind::Secret => check_secret(bytes, algorithms).is_ok(),
        KeyKind::Rsa => bytes.len() >= RSA_MODULUS_BYTES_MIN,
        // An uncompressed point: a byte that says so, and two coordinates.
        KeyKind::P256 => bytes.len() == 65,
        KeyKind::P384 => bytes.len() == 97,
        KeyKind::Ed25519 => bytes.len() == 32,
    }
}

fn check_secret(secret: &[u8], algorithms: &[JwtAlgorithm]) -> Result<(), String> {
    match algorithms.iter().find(|it| secret.len() < it.secret_bytes_min()) {
        Some(it) => {
            Err(format!("{} needs a secret of at least {} bytes", it.as_str(), it.secret_bytes_min()))
        }
        None => Ok(()),
    }
}

/// What is between the lines that say that it is a public key.
fn read_pem(text: &str) -> Option<Vec<u8>> {
    let (_, rest) = text.split_once("-----BEGIN PUBLIC KEY-----")?;
    let (body, _) = rest.split_once("-----END PUBLIC KEY-----")?;
    STANDARD.decode(body.split_ascii_whitespace().collect::<String>()).ok()
}

/// Names of kinds of keys, as `AlgorithmIdentifier`s in DER (RFC 3279, RFC 5480, RFC 8410).
const KEY_KINDS: [(&[u8], KeyKind); 4] = [
    (b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x01\x01\x05\x00", KeyKind::Rsa),
    (b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07", KeyKind::P256),
    (b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x05\x2b\x81\x04\x00\x22", KeyKind::P384),
    (b"\x06\x03\x2b\x65\x70", KeyKind::Ed25519),
];

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const SEQUENCE: u8 = 0x30;

/// The key in a `SubjectPublicKeyInfo`. It is read here because the library's reader brings ten crates along.
fn read_public_key(der: &[u8]) -> Option<(KeyKind, DecodingKey)> {
    let (info, b"") = element(der, SEQUENCE)? else { return None };
    let (identifier, rest) = element(info, SEQUENCE)?;
    let (bits, b"") = element(rest, BIT_STRING)? else { return None };
    let (_, kind) = KEY_KINDS.into_iter().find(|(known, _)| *known == identifier)?;
    // The first byte is the number of bits that are left over.
    let key = bits.strip_prefix(b"\0")?;
    let key = match kind {
        KeyKind::Rsa => {
            let (numbers, b"") = element(key, SEQUENCE)? else { return None };
            let (modulus, rest) = element(numbers, INTEGER)?;
            let (exponent, b"") = element(rest, INTEGER)? else { return None };
            // A number whose highest bit is set has a zero before it, lest it be negative.
            DecodingKey::from_rsa_raw_components(modulus.strip_prefix(b"\0").unwrap_or(modulus), exponent)
        }
        KeyKind::P256 | KeyKind::P384 => DecodingKey::from_ec_der(key),
        KeyKind::Ed25519 => DecodingKey::from_ed_der(key),
        KeyKind::Secret => return None,
    };
    Some((kind, key))
}

/// The content of an element in DER, and what follows it.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&first, rest) = der.strip_prefix(&[tag])?.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81 => (usize::from(*rest.first()?), &rest[1..]),
        0x82 => (usize::from(u16::from_be_bytes(*rest.first_chunk()?)), &rest[2..]),
        _ => return None,
    };
    rest.split_at_checked(length)
}
