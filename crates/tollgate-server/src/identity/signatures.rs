//! Signatures of tokens, checked by ring.
//!
//! jsonwebtoken leaves the cryptography to a provider. Its own two would each be a second library for it: AWS-LC takes
//! four times as long to build as ring, and the one in pure Rust has an RSA with an open advisory (RUSTSEC-2023-0071).
//! ring is here for TLS.

use jsonwebtoken::crypto::{CryptoProvider, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::signature::{Error, Verifier};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use ring::hmac;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256,
    RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents,
    UnparsedPublicKey, VerificationAlgorithm,
};

/// Nothing is signed here, and no keys are converted.
static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(ErrorKind::UnsupportedAlgorithm.into()),
    verifier_factory: |algorithm, key| {
        // A public key, which anybody has, is no secret: without this one could sign with it as if it were.
        if key.family() != algorithm.family() {
            return Err(ErrorKind::InvalidAlgorithm.into());
        }
        Ok(Box::new(Check { algorithm: *algorithm, key: key.clone() }))
    },
    key_utils: KeyUtils::new_unimplemented(),
};

/// Makes ring the provider of this process. There is no other, so that a second time changes nothing.
pub(super) fn use_ring() {
    let _ = PROVIDER.install_default();
}

struct Check {
    algorithm: Algorithm,
    key: DecodingKey,
}

impl JwtVerifier for Check {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

impl Verifier<Vec<u8>> for Check {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), Error> {
        let with_secret = |algorithm| self.with_secret(algorithm, message, signature);
        let with_rsa = |algorithm| self.with_rsa(algorithm, message, signature);
        let with_point = |algorithm| self.with_point(algorithm, message, signature);
        match self.algorithm {
            Algorithm::HS256 => with_secret(hmac::HMAC_SHA256),
            Algorithm::HS384 => with_secret(hmac::HMAC_SHA384),
            Algorithm::HS512 => with_secret(hmac::HMAC_SHA512),
            Algorithm::RS256 => with_rsa(&RSA_PKCS1_2048_8192_SHA256),
            Algorithm::RS384 => with_rsa(&RSA_PKCS1_2048_8192_SHA384),
            Algorithm::RS512 => with_rsa(&RSA_PKCS1_2048_8192_SHA512),
            Algorithm::PS256 => with_rsa(&RSA_PSS_2048_8192_SHA256),
            Algorithm::PS384 => with_rsa(&RSA_PSS_2048_8192_SHA384),
            Algorithm::PS512 => with_rsa(&RSA_PSS_2048_8192_SHA512),
            Algorithm::ES256 => with_point(&ECDSA_P256_SHA256_FIXED),
            Algorithm::ES384 => with_point(&ECDSA_P384_SHA384_FIXED),
            Algorithm::EdDSA => with_point(&ED25519),
            _ => Err(Error::new()),
        }
    }
}

impl Check {
    fn bytes(&self) -> Result<&[u8], Error> {
        self.key.try_get_as_bytes().map_err(Error::from_source)
    }

    /// In constant time.
    fn with_secret(&self, algorithm: hmac::Algorithm, message: &[u8], signature: &[u8]) -> Result<(), Error> {
        let secret = hmac::Key::new(algorithm, self.bytes()?);
        hmac::verify(&secret, message, signature).map_err(|_| Error::new())
    }

    fn with_rsa(
        &self,
        algorithm: &'static RsaParameters,
        message: &[u8],
        signature: &[u8],
    ) -> Result<(), Error> {
        let DecodingKeyKind::RsaModulusExponent { n, e } = self.key.kind() else { return Err(Error::new()) };
        RsaPublicKeyComponents { n, e }.verify(algorithm, message, signature).map_err(|_| Error::new())
    }

    fn with_point(
        &self,
        algorithm: &'static dyn VerificationAlgorithm,
        message: &[u8],
        signature: &[u8],
    ) -> Result<(), Error> {
        UnparsedPublicKey::new(algorithm, self.bytes()?).verify(message, signature).map_err(|_| Error::new())
    }
}
