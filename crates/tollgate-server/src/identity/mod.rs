//! Identifies the caller of a request: by a verified token, an API key, or the header of a trusted proxy.
//!
//! This module reads no file and no clock. A token or key that cannot be verified identifies no caller.

mod api_key;
mod jwt;
mod keys;
mod known_keys;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) use self::api_key::{ApiKeyHasher, ApiKeyId, sha256};
pub(crate) use self::jwt::{ClaimRules, Unverified, Verifier};
pub(crate) use self::keys::{JwtAlgorithm, VerifyingKeys};
pub(crate) use self::known_keys::KnownKeys;

/// How callers are identified.
#[derive(Debug, Default)]
pub(crate) struct IdentityConfig {
    /// Tokens, if they are looked at.
    pub jwt: Option<TokenSource>,
    /// API keys, if they are looked at.
    pub api_key: Option<ApiKeySource>,
    /// Headers of trusted proxies.
    pub trusted_header: TrustedHeaders,
    /// What identifies a caller where a rule asks for its identity: the first of these that there is.
    pub order: Vec<Source>,
}

impl IdentityConfig {
    /// Whether a header can identify a caller. `name` is in lower case.
    pub(crate) fn reads_header(&self, name: &str) -> bool {
        self.jwt.as_ref().is_some_and(|source| source.header == name)
            || self.api_key.as_ref().is_some_and(|source| source.header == name)
            || self.trusted_header.user.as_deref() == Some(name)
            || self.trusted_header.tier.as_deref() == Some(name)
    }

    /// The identifier of an API key in the policy or the admin API: of the key itself, or `id:` and the identifier.
    ///
    /// Only the operator writes these. In a request `id:` has no meaning: a client could name another client's key.
    pub(crate) fn api_key_member_id(&self, member: &str) -> Option<String> {
        match member.strip_prefix("id:") {
            Some(id) => is_api_key_id(id).then(|| id.to_owned()),
            None => self.api_key_id(member),
        }
    }

    /// Whether the value of a header, by its name in lower case, is a secret: it must not be in keys or log lines.
    pub(crate) fn is_secret_header(&self, name: &str) -> bool {
        ["authorization", "proxy-authorization", "cookie"].contains(&name)
            || self.jwt.as_ref().is_some_and(|source| source.header == name)
            || self.api_key.as_ref().is_some_and(|source| source.header == name)
    }

    /// The identifier of an API key, wherever it is kept or shown.
    pub(crate) fn api_key_id(&self, key: &str) -> Option<String> {
        let id = match &self.api_key {
            Some(source) => source.hasher.identify(key),
            None => ApiKeyHasher::new(None).identify(key),
        };
        id.map(|id| id.to_string())
    }
}

/// Whether a text is the identifier of an API key: 32 hexadecimal digits, as answers show it.
pub(crate) fn is_api_key_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Where tokens are, and who believes them.
#[derive(Debug)]
pub(crate) struct TokenSource {
    /// The name of the header, in small letters.
    pub header: String,
    /// Which tokens are believed.
    pub verifier: Verifier,
}

/// Where API keys are, and what is kept of them.
#[derive(Debug)]
pub(crate) struct ApiKeySource {
    /// The name of the header, in small letters.
    pub header: String,
    /// How a key becomes an identifier.
    pub hasher: ApiKeyHasher,
    /// Which keys are verified.
    pub known: KnownKeys,
}

impl ApiKeySource {
    /// The identifier of a key that is known; none for any other key, which the client may have invented.
    fn verify(&self, key: &str) -> Option<ApiKeyId> {
        self.known.contains(key).then(|| self.hasher.identify(key)).flatten()
    }
}

/// Headers that are believed only from `client_address.trusted_proxies`, also within the `headers` of `/api/v1/check`. A proxy must
/// overwrite them, whatever a client sends. After validation, names are in lower case.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TrustedHeaders {
    /// The header that names the user, such as X-User.
    pub user: Option<String>,
    /// The header that names the user's tier, such as X-Tier.
    pub tier: Option<String>,
}

/// One of the things that identify a caller.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Source {
    /// The user, of a verified token or of a trusted proxy's header.
    Jwt,
    /// The verified API key.
    ApiKey,
    /// The client's address.
    Ip,
}

/// What is known of a caller.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Identified {
    /// The user, as far as it was verified.
    pub user: Option<String>,
    /// The verified API key, as an identifier that does not tell it.
    pub api_key: Option<ApiKeyId>,
    /// Whether the request has an API key that is not verified.
    pub has_unverified_api_key: bool,
    /// The user's tier.
    pub tier: Option<String>,
    /// Why a token that was shown is not believed.
    pub unverified: Option<Unverified>,
}

/// Reads what a request carries. `headers` looks a header up by its name in small letters; `peer_is_trusted` says whether
/// the connection's other end is a trusted proxy; `now_secs` are seconds since the epoch.
///
/// A verified token comes before what a proxy says. A token that is not believed yields no user of its own.
pub(crate) fn identify<'h>(
    config: &IdentityConfig,
    headers: impl Fn(&str) -> Option<&'h str>,
    peer_is_trusted: bool,
    now_secs: u64,
) -> Identified {
    let mut found = Identified::default();
    if let Some(source) = &config.jwt
        && let Some(token) = headers(&source.header).and_then(|value| token(&source.header, value))
    {
        match source.verifier.verify(token, now_secs) {
            Ok(identity) => {
                found.user = Some(source.verifier.user(&identity));
                found.tier = identity.tier;
            }
            Err(why) => found.unverified = Some(why),
        }
    }
    if let Some(source) = &config.api_key
        && let Some(key) = headers(&source.header).filter(|key| !key.is_empty())
    {
        found.api_key = source.verify(key);
        found.has_unverified_api_key = found.api_key.is_none();
    }
    if peer_is_trusted {
        let said = |name: &Option<String>| Some(clean(headers(name.as_deref()?)?)?.to_owned());
        found.user = found.user.or_else(|| said(&config.trusted_header.user));
        found.tier = found.tier.or_else(|| said(&config.trusted_header.tier));
    }
    found
}

/// The token in a header: behind the word `Bearer`, which only `Authorization` must have.
fn token<'h>(header: &str, value: &'h str) -> Option<&'h str> {
    match value.split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => Some(token.trim()),
        _ if header == "authorization" => None,
        _ => Some(value.trim()),
    }
}

/// Bytes of a name. No issuer gives longer ones, and keys, logs and metrics stay small.
const NAME_BYTES_MAX: usize = 256;

/// A name of a user or a tier, if it is one that can be shown and kept.
fn clean(name: &str) -> Option<&str> {
    let name = name.trim();
    let fits = !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.contains(char::is_control);
    fits.then_some(name)
}

#[cfg(test)]
mod tests;
