//! JSON Web Tokens: which are believed, and whom they name.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::clean;
use super::keys::{JwtAlgorithm, NoKey, VerifyingKeys};

/// Bytes of a token. Browsers and proxies send no longer header.
const TOKEN_BYTES_MAX: usize = 8 * 1024;

/// Verifies tokens: by keys and algorithms that the configuration names, never the token.
#[derive(Debug)]
pub(crate) struct Verifier {
    algorithms: Vec<JwtAlgorithm>,
    keys: VerifyingKeys,
    rules: ClaimRules,
}

/// What must be said in a token.
#[derive(Clone, Debug)]
pub(crate) struct ClaimRules {
    /// Who may have issued it. All of them sign with the same keys.
    pub issuers: Vec<String>,
    /// One of these it must be made for.
    pub audiences: Vec<String>,
    /// How far the issuer's clock may be off.
    pub leeway_secs: u64,
    /// The claim that names the user.
    pub subject_claim: String,
    /// The claim that names the user's tier.
    pub tier_claim: Option<String>,
}

/// Whom a token names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    /// The user, as its issuer knows it.
    pub subject: String,
    /// Who says so.
    pub issuer: String,
    /// The user's tier, if the token has one.
    pub tier: Option<String>,
}

/// Why a token is not believed. Only `signature` and what comes before it can be had without a key of the issuer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Unverified {
    /// Longer than any honest one.
    TooLong,
    /// No token, or one without the claims that each must have.
    Malformed,
    /// Signed in a way that is not accepted, or not at all.
    Algorithm,
    /// Signed with a key that is not known.
    UnknownKey,
    /// Not signed by its issuer, or changed since.
    Signature,
    /// Issued by an issuer that is not configured.
    Issuer,
    /// Made for another audience.
    Audience,
    /// Not valid any more.
    Expired,
    /// Not valid yet.
    NotYet,
    /// Has no valid subject.
    NoSubject,
}

impl Unverified {
    /// All of them, for metrics that are there before they are needed.
    pub(crate) const ALL: [Self; 10] = [
        Self::TooLong,
        Self::Malformed,
        Self::Algorithm,
        Self::UnknownKey,
        Self::Signature,
        Self::Issuer,
        Self::Audience,
        Self::Expired,
        Self::NotYet,
        Self::NoSubject,
    ];

    /// The word for it in metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::Malformed => "malformed",
            Self::Algorithm => "algorithm",
            Self::UnknownKey => "unknown_key",
            Self::Signature => "signature",
            Self::Issuer => "issuer",
            Self::Audience => "audience",
            Self::Expired => "expired",
            Self::NotYet => "not_yet",
            Self::NoSubject => "no_subject",
        }
    }
}

/// The part of a token's head that is looked at.
#[derive(Deserialize)]
struct Head {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

impl Verifier {
    /// `algorithms` are all that are accepted, whatever the keys could do.
    pub(crate) fn new(algorithms: Vec<JwtAlgorithm>, keys: VerifyingKeys, rules: ClaimRules) -> Self {
        Self { algorithms, keys, rules }
    }

    /// Whom a token names, `now_secs` seconds after the epoch.
    pub(crate) fn verify(&self, token: &str, now_secs: u64) -> Result<Identity, Unverified> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(Unverified::TooLong);
        }
        let (message, signature) = token.rsplit_once('.').ok_or(Unverified::Malformed)?;
        let (head, claims) = message.split_once('.').ok_or(Unverified::Malformed)?;
        if claims.contains('.') {
            return Err(Unverified::Malformed);
        }
        let head: Head = read(head)?;
        // Extensions that a token calls critical are not known here, and it must be refused (RFC 7515, 4.1.11).
        if head.crit.is_some() {
            return Err(Unverified::Malformed);
        }
        let algorithm = self.algorithms.iter().find(|it| it.as_str() == head.alg);
        let algorithm = *algorithm.ok_or(Unverified::Algorithm)?;
        let key = self.keys.find(head.kid.as_deref(), algorithm).map_err(|why| match why {
            NoKey::Unknown => Unverified::UnknownKey,
            NoKey::Algorithm => Unverified::Algorithm,
        })?;
        if !key.verifies(message.as_bytes(), &decode(signature)?) {
            return Err(Unverified::Signature);
        }
        self.rules.check(&read(claims)?, now_secs)
    }

    /// The name of a user among those of all issuers. Names of issuers have no `|` in them, so that it tells them apart.
    pub(crate) fn user(&self, identity: &Identity) -> String {
        match self.rules.issuers.len() {
            0 | 1 => identity.subject.clone(),
            _ => format!("{}|{}", identity.issuer, identity.subject),
        }
    }
}

fn decode(part: &str) -> Result<Vec<u8>, Unverified> {
    URL_SAFE_NO_PAD.decode(part).map_err(|_| Unverified::Malformed)
}

/// Reads the header or the claims of a token.
fn read<T: DeserializeOwned>(part: &str) -> Result<T, Unverified> {
    serde_json::from_slice(&decode(part)?).map_err(|_| Unverified::Malformed)
}

impl ClaimRules {
    /// Not left to the library, which reads the clock, and has taken what it could not read for absent.
    fn check(&self, claims: &Map<String, Value>, now_secs: u64) -> Result<Identity, Unverified> {
        let issuer = claims.get("iss").and_then(Value::as_str);
        let issuer =
            issuer.and_then(|it| self.issuers.iter().find(|known| *known == it)).ok_or(Unverified::Issuer)?;
        if !claims.get("aud").is_some_and(|it| self.is_for_us(it)) {
            return Err(Unverified::Audience);
        }
        let (now, leeway) = (now_secs as f64, self.leeway_secs as f64);
        let expires = claims.get("exp").and_then(Value::as_f64).ok_or(Unverified::Malformed)?;
        if now >= expires + leeway {
            return Err(Unverified::Expired);
        }
        if let Some(begins) = claims.get("nbf") {
            let begins = begins.as_f64().ok_or(Unverified::Malformed)?;
            if now + leeway < begins {
                return Err(Unverified::NotYet);
            }
        }
        let subject = claims.get(&self.subject_claim).and_then(name).ok_or(Unverified::NoSubject)?;
        let tier = self.tier_claim.as_ref().and_then(|it| claims.get(it)).and_then(name);
        Ok(Identity { subject, issuer: issuer.clone(), tier })
    }

    /// One name, or a list of names, one of which is ours.
    fn is_for_us(&self, audience: &Value) -> bool {
        let ours = |it: &str| self.audiences.iter().any(|known| known == it);
        match audience {
            Value::String(one) => ours(one),
            Value::Array(many) => {
                many.iter().all(Value::is_string) && many.iter().filter_map(Value::as_str).any(ours)
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => false,
        }
    }
}

/// A name, or a whole number as its digits.
fn name(claim: &Value) -> Option<String> {
    match claim {
        // A name that has to be trimmed could be taken for the name of another user.
        Value::String(text) => clean(text).filter(|it| *it == text).map(str::to_owned),
        Value::Number(number) if !number.is_f64() => Some(number.to_string()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => None,
    }
}
