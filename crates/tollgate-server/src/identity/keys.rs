//! Keys that verify tokens, each with the one algorithm that it is used with. ring checks the signatures.

use std::sync::OnceLock;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256,
    RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents,
    UnparsedPublicKey, VerificationAlgorithm,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{
    AlgorithmIdentifier, InvalidSignature, SignatureVerificationAlgorithm, SubjectPublicKeyInfoDer, alg_id,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use webpki::RawPublicKeyEntity;

/// A signature algorithm of a token. There is no `none`.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum JwtAlgorithm {
    /// HMAC with SHA-256 and a shared secret.
    Hs256,
    /// HMAC with SHA-384 and a shared secret.
    Hs384,
    /// HMAC with SHA-512 and a shared secret.
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

/// The kind of key that an algorithm needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum KeyKind {
    Secret,
    Rsa,
    P256,
    P384,
    Ed25519,
}

/// How ring checks a signature.
enum Check {
    Secret(hmac::Algorithm),
    Rsa(&'static RsaParameters),
    Curve { kind: KeyKind, key_bytes: usize, algorithm: &'static dyn VerificationAlgorithm },
}

impl JwtAlgorithm {
    /// Every algorithm.
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

    /// Returns the name in the header of a token, and how a signature is checked.
    fn described(self) -> (&'static str, Check) {
        let curve = |kind, key_bytes, algorithm| Check::Curve { kind, key_bytes, algorithm };
        match self {
            Self::Hs256 => ("HS256", Check::Secret(hmac::HMAC_SHA256)),
            Self::Hs384 => ("HS384", Check::Secret(hmac::HMAC_SHA384)),
            Self::Hs512 => ("HS512", Check::Secret(hmac::HMAC_SHA512)),
            Self::Rs256 => ("RS256", Check::Rsa(&RSA_PKCS1_2048_8192_SHA256)),
            Self::Rs384 => ("RS384", Check::Rsa(&RSA_PKCS1_2048_8192_SHA384)),
            Self::Rs512 => ("RS512", Check::Rsa(&RSA_PKCS1_2048_8192_SHA512)),
            Self::Ps256 => ("PS256", Check::Rsa(&RSA_PSS_2048_8192_SHA256)),
            Self::Ps384 => ("PS384", Check::Rsa(&RSA_PSS_2048_8192_SHA384)),
            Self::Ps512 => ("PS512", Check::Rsa(&RSA_PSS_2048_8192_SHA512)),
            // An uncompressed point: one byte that says so, and two coordinates.
            Self::Es256 => ("ES256", curve(KeyKind::P256, 65, &ECDSA_P256_SHA256_FIXED)),
            Self::Es384 => ("ES384", curve(KeyKind::P384, 97, &ECDSA_P384_SHA384_FIXED)),
            Self::EdDsa => ("EdDSA", curve(KeyKind::Ed25519, 32, &ED25519)),
        }
    }

    /// Returns the name in the header of a token.
    pub(crate) fn as_str(self) -> &'static str {
        self.described().0
    }

    /// Whether the key that verifies can also sign.
    pub(crate) fn is_symmetric(self) -> bool {
        self.key_kind() == KeyKind::Secret
    }

    /// Returns the output length of the hash: a shorter secret would be the weakest part (RFC 7518, 3.2).
    fn secret_bytes_min(self) -> usize {
        match self.described().1 {
            Check::Secret(hash) => hash.digest_algorithm().output_len(),
            Check::Rsa(_) | Check::Curve { .. } => 0,
        }
    }

    fn key_kind(self) -> KeyKind {
        match self.described().1 {
            Check::Secret(_) => KeyKind::Secret,
            Check::Rsa(_) => KeyKind::Rsa,
            Check::Curve { kind, .. } => kind,
        }
    }
}

/// Keys with the algorithms that they may be used with.
#[derive(Debug)]
pub(crate) struct VerifyingKeys {
    /// The key of a file of its own is used whatever `kid` a token has; a set is searched by `kid`.
    is_set: bool,
    keys: Vec<VerifyingKey>,
}

/// A key with one algorithm. A key for several algorithms is listed once for each.
#[derive(Debug)]
pub(super) struct VerifyingKey {
    id: Option<String>,
    algorithm: JwtAlgorithm,
    key: Key,
}

/// A key as ring takes it. Its debug output shows no secret.
#[derive(Debug)]
enum Key {
    Secret(hmac::Key),
    /// The numbers of an RSA key, as JSON Web Keys hold them.
    RsaNumbers(&'static RsaParameters, RsaPublicKeyComponents<Vec<u8>>),
    Public(UnparsedPublicKey<Vec<u8>>),
}

/// A key as a file holds it.
enum Material {
    Secret(Vec<u8>),
    RsaNumbers(RsaPublicKeyComponents<Vec<u8>>),
    Public(KeyKind, Vec<u8>),
}

/// Why there is no key for a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoKey {
    /// No key has that name, or several keys fit a token that names none.
    Unknown,
    /// The key is for other algorithms.
    Algorithm,
}

/// Keys of a set. Issuers publish a handful, and each is compared for every token.
const KEYS_MAX: usize = 64;
/// 2,048 bits: shorter moduli can be factored.
const RSA_MODULUS_BYTES_MIN: usize = 256;
/// Bytes of an RSA key in DER beside its modulus: tags, lengths and an exponent of one byte.
const RSA_DER_BYTES_MIN: usize = RSA_MODULUS_BYTES_MIN + 12;

impl VerifyingKeys {
    /// Reads a shared secret.
    pub(crate) fn from_secret(secret: &[u8], algorithms: &[JwtAlgorithm]) -> Result<Self, String> {
        if let Some(other) = algorithms.iter().find(|it| !it.is_symmetric()) {
            return Err(format!("{} needs a public key: key_file or jwks_file", other.as_str()));
        }
        for algorithm in algorithms {
            let (name, bytes) = (algorithm.as_str(), algorithm.secret_bytes_min());
            if secret.len() < bytes {
                return Err(format!("{name} needs a secret of at least {bytes} bytes"));
            }
        }
        let keys = Material::Secret(secret.to_vec()).keys(None, algorithms);
        Ok(Self { is_set: false, keys })
    }

    /// Reads a public key in PEM.
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
        let info = SubjectPublicKeyInfoDer::from_pem_slice(pem)
            .map_err(|_| "expected a public key in PEM: -----BEGIN PUBLIC KEY-----")?;
        let expected = "expected a public key: RSA of at least 2048 bits, P-256, P-384 or Ed25519";
        let (kind, key) = read_public_key(&info).ok_or(expected)?;
        if let Some(other) = algorithms.iter().find(|it| it.key_kind() != kind) {
            return Err(format!("{} cannot be used with a key of the kind {kind:?}", other.as_str()));
        }
        match Material::Public(kind, key).keys(None, algorithms) {
            keys if keys.is_empty() => Err(expected.to_owned()),
            keys => Ok(Self { is_set: false, keys }),
        }
    }

    /// Reads a JSON Web Key Set. Keys for other uses or algorithms are left out, because issuers publish all kinds; one key must fit.
    pub(crate) fn from_jwks(json: &[u8], algorithms: &[JwtAlgorithm]) -> Result<Self, String> {
        let set: JwkSet =
            serde_json::from_slice(json).map_err(|why| format!("expected a JSON Web Key Set: {why}"))?;
        if set.keys.len() > KEYS_MAX {
            return Err(format!("at most {KEYS_MAX} keys"));
        }
        let keys: Vec<_> = set.keys.iter().flat_map(|jwk| jwk.keys(algorithms)).collect();
        if keys.is_empty() {
            let names: Vec<_> = algorithms.iter().map(|it| it.as_str()).collect();
            return Err(format!("holds no key that can be used with {}", names.join(", ")));
        }
        Ok(Self { is_set: true, keys })
    }

    /// Finds the key for a token. Its `kid` chooses among the configured keys; it is never an address to fetch a key from.
    pub(super) fn find(&self, id: Option<&str>, algorithm: JwtAlgorithm) -> Result<&VerifyingKey, NoKey> {
        let is_named = |key: &&VerifyingKey| !self.is_set || id.is_none() || key.id.as_deref() == id;
        let mut named = self.keys.iter().filter(is_named).peekable();
        if named.peek().is_none() {
            return Err(NoKey::Unknown);
        }
        let mut fitting = named.filter(|key| key.algorithm == algorithm);
        let key = fitting.next().ok_or(NoKey::Algorithm)?;
        if fitting.next().is_some() { Err(NoKey::Unknown) } else { Ok(key) }
    }
}

impl VerifyingKey {
    /// Whether the signature of a message was made with this key.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let checked = match &self.key {
            Key::Secret(key) => hmac::verify(key, message, signature),
            Key::RsaNumbers(parameters, key) => key.verify(parameters, message, signature),
            Key::Public(key) => key.verify(message, signature),
        };
        checked.is_ok()
    }
}

impl Material {
    /// Makes a key for each algorithm that the material can be used with.
    fn keys(&self, id: Option<&str>, algorithms: &[JwtAlgorithm]) -> Vec<VerifyingKey> {
        let key = |algorithm: &JwtAlgorithm| {
            let key = self.key_for(*algorithm)?;
            Some(VerifyingKey { id: id.map(str::to_owned), algorithm: *algorithm, key })
        };
        algorithms.iter().filter_map(key).collect()
    }

    /// Returns none for another kind of key, and for a key of the wrong length: ring would refuse every signature, without a reason.
    fn key_for(&self, algorithm: JwtAlgorithm) -> Option<Key> {
        match (self, algorithm.described().1) {
            (Self::Secret(secret), Check::Secret(hash)) => (secret.len() >= algorithm.secret_bytes_min())
                .then(|| Key::Secret(hmac::Key::new(hash, secret))),
            (Self::RsaNumbers(key), Check::Rsa(parameters)) => {
                (key.n.len() >= RSA_MODULUS_BYTES_MIN).then(|| Key::RsaNumbers(parameters, key.clone()))
            }
            (Self::Public(KeyKind::Rsa, key), Check::Rsa(parameters)) => (key.len() >= RSA_DER_BYTES_MIN)
                .then(|| Key::Public(UnparsedPublicKey::new(parameters, key.clone()))),
            (Self::Public(found, key), Check::Curve { kind, key_bytes, algorithm }) => (*found == kind
                && key.len() == key_bytes)
                .then(|| Key::Public(UnparsedPublicKey::new(algorithm, key.clone()))),
            (Self::Secret(_) | Self::RsaNumbers(_) | Self::Public(..), _) => None,
        }
    }
}

/// A JSON Web Key (RFC 7517), as far as it is read.
#[derive(Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    key_ops: Option<Vec<String>>,
    alg: Option<String>,
    crv: Option<String>,
    k: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

#[derive(Deserialize)]
struct JwkSet {
    keys: Vec<Jwk>,
}

impl Jwk {
    /// Returns the key with each algorithm that it is for; none if it is not for verifying signatures.
    fn keys(&self, algorithms: &[JwtAlgorithm]) -> Vec<VerifyingKey> {
        let signs = self.purpose.as_ref().is_none_or(|it| it == "sig");
        let verifies = self.key_ops.as_ref().is_none_or(|it| it.iter().any(|it| it == "verify"));
        let named = |it: &JwtAlgorithm| self.alg.as_ref().is_none_or(|alg| alg == it.as_str());
        let algorithms: Vec<_> = algorithms.iter().copied().filter(named).collect();
        match self.material().filter(|_| signs && verifies) {
            Some(material) => material.keys(self.kid.as_deref(), &algorithms),
            None => Vec::new(),
        }
    }

    fn material(&self) -> Option<Material> {
        let bytes = |text: &Option<String>| URL_SAFE_NO_PAD.decode(text.as_ref()?).ok();
        let point = || Some([vec![4], bytes(&self.x)?, bytes(&self.y)?].concat());
        Some(match (self.kty.as_str(), self.crv.as_deref()) {
            ("oct", _) => Material::Secret(bytes(&self.k)?),
            ("RSA", _) => {
                Material::RsaNumbers(RsaPublicKeyComponents { n: bytes(&self.n)?, e: bytes(&self.e)? })
            }
            ("EC", Some("P-256")) => Material::Public(KeyKind::P256, point()?),
            ("EC", Some("P-384")) => Material::Public(KeyKind::P384, point()?),
            ("OKP", Some("Ed25519")) => Material::Public(KeyKind::Ed25519, bytes(&self.x)?),
            _ => return None,
        })
    }
}

/// Reads a `SubjectPublicKeyInfo`.
fn read_public_key(info: &SubjectPublicKeyInfoDer<'_>) -> Option<(KeyKind, Vec<u8>)> {
    let info = RawPublicKeyEntity::try_from(info).ok()?;
    let kinds = [
        (KeyKind::Rsa, alg_id::RSA_ENCRYPTION),
        (KeyKind::P256, alg_id::ECDSA_P256),
        (KeyKind::P384, alg_id::ECDSA_P384),
        (KeyKind::Ed25519, alg_id::ED25519),
    ];
    kinds.into_iter().find_map(|(kind, id)| {
        let copied = CopiedKey { id, key: OnceLock::new() };
        info.verify_signature(&copied, &[], &[]).ok()?;
        Some((kind, copied.key.into_inner()?))
    })
}

/// Copies the key out of a `SubjectPublicKeyInfo`: webpki reads it, but hands the key only to a signature algorithm.
#[derive(Debug)]
struct CopiedKey {
    id: AlgorithmIdentifier,
    key: OnceLock<Vec<u8>>,
}

impl SignatureVerificationAlgorithm for CopiedKey {
    fn verify_signature(&self, key: &[u8], _: &[u8], _: &[u8]) -> Result<(), InvalidSignature> {
        self.key.set(key.to_vec()).map_err(|_| InvalidSignature)
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        self.id
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        self.id
    }
}
