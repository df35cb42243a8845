//! What an issuer has: keys that are made for the test, and tokens that are signed with them.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use num_bigint::BigUint;
use ring::rand::{SecureRandom, SystemRandom};
use ring::rsa::{KeyPairComponents, PublicKeyComponents};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256, RSA_PSS_SHA256,
    RsaKeyPair,
};
use ring::{hmac, rsa};
use serde_json::{Value, json};

use crate::identity::JwtAlgorithm;

/// Signs tokens in one way.
pub(crate) struct Signer {
    pub(crate) algorithm: JwtAlgorithm,
    key: Key,
}

enum Key {
    Secret(Vec<u8>),
    Rsa(RsaKeyPair),
    Ec(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

impl Signer {
    /// One of each kind.
    pub(crate) fn all() -> [Self; 5] {
        let pss = Self { algorithm: JwtAlgorithm::Ps256, ..Self::rs256() };
        [Self::hs256(), Self::rs256(), pss, Self::es256(), Self::ed25519()]
    }

    pub(crate) fn hs256() -> Self {
        let mut secret = [0; 32];
        SystemRandom::new().fill(&mut secret).expect("random bytes");
        Self::with_secret(&secret)
    }

    pub(crate) fn with_secret(secret: &[u8]) -> Self {
        Self { algorithm: JwtAlgorithm::Hs256, key: Key::Secret(secret.to_vec()) }
    }

    /// With one of two keys: they take a while to make.
    pub(crate) fn rs256() -> Self {
        Self { algorithm: JwtAlgorithm::Rs256, key: Key::Rsa(rsa_key(0)) }
    }

    pub(crate) fn es256() -> Self {
        let random = SystemRandom::new();
        let made = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).expect("a key");
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, made.as_ref(), &random)
            .expect("a key");
        Self { algorithm: JwtAlgorithm::Es256, key: Key::Ec(key) }
    }

    pub(crate) fn ed25519() -> Self {
        let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).expect("a key");
        let key = Ed25519KeyPair::from_pkcs8(made.as_ref()).expect("a key");
        Self { algorithm: JwtAlgorithm::EdDsa, key: Key::Ed(key) }
    }

    /// Somebody else, with a key of the same kind.
    pub(crate) fn another(&self) -> Self {
        let other = match &self.key {
            Key::Secret(_) => Self::hs256(),
            Key::Rsa(_) => Self { algorithm: self.algorithm, key: Key::Rsa(rsa_key(1)) },
            Key::Ec(_) => Self::es256(),
            Key::Ed(_) => Self::ed25519(),
        };
        Self { algorithm: self.algorithm, ..other }
    }

    pub(crate) fn sign(&self, claims: &Value) -> String {
        self.sign_with_head(json!({ "alg": self.algorithm.as_str(), "typ": "JWT" }), claims)
    }

    pub(crate) fn sign_with_head(&self, head: Value, claims: &Value) -> String {
        self.sign_raw(&head.to_string(), &claims.to_string())
    }

    pub(crate) fn sign_raw(&self, head: &str, claims: &str) -> String {
        let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(head), URL_SAFE_NO_PAD.encode(claims));
        let signature = self.signature(message.as_bytes());
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    fn signature(&self, message: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match &self.key {
            Key::Secret(secret) => {
                hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), message).as_ref().to_vec()
            }
            Key::Rsa(key) => {
                let mut signature = vec![0; key.public().modulus_len()];
                let signed = match self.algorithm {
                    JwtAlgorithm::Ps256 => key.sign(&RSA_PSS_SHA256, &random, message, &mut signature),
                    _ => key.sign(&RSA_PKCS1_SHA256, &random, message, &mut signature),
                };
                signed.expect("a signature");
                signature
            }
            Key::Ec(key) => key.sign(&random, message).expect("a signature").as_ref().to_vec(),
            Key::Ed(key) => key.sign(message).as_ref().to_vec(),
        }
    }

    pub(crate) fn secret(&self) -> Option<&[u8]> {
        match &self.key {
            Key::Secret(secret) => Some(secret),
            Key::Rsa(_) | Key::Ec(_) | Key::Ed(_) => None,
        }
    }

    /// `SubjectPublicKeyInfo` in PEM.
    pub(crate) fn public_pem(&self) -> String {
        let (identifier, key): (&[u8], &[u8]) = match &self.key {
            Key::Secret(_) => panic!("a secret is not published"),
            Key::Rsa(key) => (RSA_ENCRYPTION, key.public_key().as_ref()),
            Key::Ec(key) => (EC_P256, key.public_key().as_ref()),
            Key::Ed(key) => (ED25519, key.public_key().as_ref()),
        };
        let bits = der(0x03, &[&[0], key].concat());
        pem(&der(0x30, &[der(0x30, identifier), bits].concat()))
    }

    pub(crate) fn jwk(&self, kid: &str) -> Value {
        let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        match &self.key {
            Key::Secret(secret) => json!({ "kty": "oct", "kid": kid, "k": text(secret) }),
            Key::Rsa(key) => {
                let public = PublicKeyComponents::<Vec<u8>>::from(key.public_key());
                json!({ "kty": "RSA", "kid": kid, "n": text(&public.n), "e": text(&public.e) })
            }
            Key::Ec(key) => {
                let (x, y) = key.public_key().as_ref()[1..].split_at(32);
                json!({ "kty": "EC", "kid": kid, "crv": "P-256", "x": text(x), "y": text(y) })
            }
            Key::Ed(key) => {
                json!({ "kty": "OKP", "kid": kid, "crv": "Ed25519", "x": text(key.public_key().as_ref()) })
            }
        }
    }
}

/// A part of a token.
pub(crate) fn encode(part: &Value) -> String {
    URL_SAFE_NO_PAD.encode(part.to_string())
}

/// Identifiers of the kinds of keys, in DER.
const RSA_ENCRYPTION: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1, 0x05, 0];
const EC_P256: &[u8] =
    &[0x06, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1, 0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7];
const ED25519: &[u8] = &[0x06, 3, 0x2b, 0x65, 0x70];

fn der(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = match content.len() {
        short @ ..128 => vec![short as u8],
        long => [&[0x82], &(long as u16).to_be_bytes()[..]].concat(),
    };
    [&[tag], &length[..], content].concat()
}

pub(crate) fn pem(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<_> = text.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n", lines.join("\n"))
}

/// ring makes no RSA keys: they are made here, two of them, once.
fn rsa_key(which: usize) -> RsaKeyPair {
    static PRIMES: std::sync::LazyLock<[BigUint; 4]> =
        std::sync::LazyLock::new(|| std::array::from_fn(|_| prime()));
    let [p, q] = [&PRIMES[2 * which], &PRIMES[2 * which + 1]];
    let (p, q) = (p.max(q), p.min(q));
    let (one, e) = (BigUint::from(1_u8), BigUint::from(65_537_u32));
    let (p_less, q_less) = (p - &one, q - &one);
    let d = e.modinv(&(&p_less * &q_less)).expect("65537 divides neither p - 1 nor q - 1");
    let components = KeyPairComponents {
        public_key: rsa::PublicKeyComponents { n: (p * q).to_bytes_be(), e: e.to_bytes_be() },
        dP: (&d % &p_less).to_bytes_be(),
        dQ: (&d % &q_less).to_bytes_be(),
        qInv: q.modinv(p).expect("two primes").to_bytes_be(),
        d: d.to_bytes_be(),
        p: p.to_bytes_be(),
        q: q.to_bytes_be(),
    };
    RsaKeyPair::from_components(&components).expect("a key")
}

/// A prime of 1,024 bits with the two highest set, as the test of Fermat finds them: good enough for a test.
fn prime() -> BigUint {
    let (random, two) = (SystemRandom::new(), BigUint::from(2_u8));
    loop {
        let mut bytes = [0; 128];
        random.fill(&mut bytes).expect("random bytes");
        bytes[0] |= 0xc0;
        bytes[127] |= 1;
        let candidate = BigUint::from_bytes_be(&bytes);
        let less = &candidate - 1_u8;
        let has_small_factor = (3..2_000_u32).step_by(2).any(|it| (&candidate % it) == BigUint::ZERO);
        let fits_65537 = &less % 65_537_u32 != BigUint::ZERO;
        if !has_small_factor && fits_65537 && two.modpow(&less, &candidate) == BigUint::from(1_u8) {
            return candidate;
        }
    }
}
