//! What an issuer has: keys that are made for the test, and tokens that are signed with them.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use num_bigint::BigUint;
use ring::rand::{SecureRandom, SystemRandom};
use ring::rsa::{KeyPairComponents, PublicKeyComponents};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair, EcdsaSigningAlgorithm,
    Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256, RSA_PKCS1_SHA384, RSA_PKCS1_SHA512, RSA_PSS_SHA256,
    RSA_PSS_SHA384, RSA_PSS_SHA512, RsaEncoding, RsaKeyPair,
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
    /// One for each algorithm.
    pub(crate) fn all() -> [Self; 12] {
        JwtAlgorithm::ALL.map(|algorithm| Self::new(algorithm, 0))
    }

    pub(crate) fn hs256() -> Self {
        Self::new(JwtAlgorithm::Hs256, 0)
    }

    pub(crate) fn rs256() -> Self {
        Self::new(JwtAlgorithm::Rs256, 0)
    }

    pub(crate) fn es256() -> Self {
        Self::new(JwtAlgorithm::Es256, 0)
    }

    pub(crate) fn ed25519() -> Self {
        Self::new(JwtAlgorithm::EdDsa, 0)
    }

    pub(crate) fn with_secret(secret: &[u8]) -> Self {
        Self { algorithm: JwtAlgorithm::Hs256, key: Key::Secret(secret.to_vec()) }
    }

    /// With a key that is made now; RSA keys are made once, as it takes a while.
    fn new(algorithm: JwtAlgorithm, which_rsa: usize) -> Self {
        let random = SystemRandom::new();
        let key = match algorithm {
            JwtAlgorithm::Hs256 | JwtAlgorithm::Hs384 | JwtAlgorithm::Hs512 => {
                let mut secret = vec![0; 64];
                random.fill(&mut secret).expect("random bytes");
                Key::Secret(secret)
            }
            JwtAlgorithm::Es256 => Key::Ec(ec_key(&ECDSA_P256_SHA256_FIXED_SIGNING)),
            JwtAlgorithm::Es384 => Key::Ec(ec_key(&ECDSA_P384_SHA384_FIXED_SIGNING)),
            JwtAlgorithm::EdDsa => {
                let made = Ed25519KeyPair::generate_pkcs8(&random).expect("a key");
                Key::Ed(Ed25519KeyPair::from_pkcs8(made.as_ref()).expect("a key"))
            }
            _ => Key::Rsa(rsa_key(which_rsa)),
        };
        Self { algorithm, key }
    }

    /// Another signer, with a key of the same kind.
    pub(crate) fn another(&self) -> Self {
        Self::new(self.algorithm, 1)
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
                let algorithm = match self.algorithm {
                    JwtAlgorithm::Hs384 => hmac::HMAC_SHA384,
                    JwtAlgorithm::Hs512 => hmac::HMAC_SHA512,
                    _ => hmac::HMAC_SHA256,
                };
                hmac::sign(&hmac::Key::new(algorithm, secret), message).as_ref().to_vec()
            }
            Key::Rsa(key) => {
                let padding: &dyn RsaEncoding = match self.algorithm {
                    JwtAlgorithm::Rs384 => &RSA_PKCS1_SHA384,
                    JwtAlgorithm::Rs512 => &RSA_PKCS1_SHA512,
                    JwtAlgorithm::Ps256 => &RSA_PSS_SHA256,
                    JwtAlgorithm::Ps384 => &RSA_PSS_SHA384,
                    JwtAlgorithm::Ps512 => &RSA_PSS_SHA512,
                    _ => &RSA_PKCS1_SHA256,
                };
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(padding, &random, message, &mut signature).expect("a signature");
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

    pub(crate) fn public_pem(&self) -> String {
        pem(&self.public_der())
    }

    /// As `SubjectPublicKeyInfo`.
    pub(crate) fn public_der(&self) -> Vec<u8> {
        let (identifier, key): (&[u8], &[u8]) = match &self.key {
            Key::Secret(_) => panic!("a secret is not published"),
            Key::Rsa(key) => (RSA_ENCRYPTION, key.public_key().as_ref()),
            Key::Ec(key) if self.algorithm == JwtAlgorithm::Es384 => (EC_P384, key.public_key().as_ref()),
            Key::Ec(key) => (EC_P256, key.public_key().as_ref()),
            Key::Ed(key) => (ED25519, key.public_key().as_ref()),
        };
        let bits = der(0x03, &[&[0], key].concat());
        der(0x30, &[der(0x30, identifier), bits].concat())
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
                let point = &key.public_key().as_ref()[1..];
                let (x, y) = point.split_at(point.len() / 2);
                let curve = if self.algorithm == JwtAlgorithm::Es384 { "P-384" } else { "P-256" };
                json!({ "kty": "EC", "kid": kid, "crv": curve, "x": text(x), "y": text(y) })
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
const EC_P384: &[u8] = &[0x06, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1, 0x06, 5, 0x2b, 0x81, 4, 0, 0x22];
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

fn ec_key(algorithm: &'static EcdsaSigningAlgorithm) -> EcdsaKeyPair {
    let random = SystemRandom::new();
    let made = EcdsaKeyPair::generate_pkcs8(algorithm, &random).expect("a key");
    EcdsaKeyPair::from_pkcs8(algorithm, made.as_ref(), &random).expect("a key")
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
