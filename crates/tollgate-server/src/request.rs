//! A request as a door describes it: the one type that every protocol turns its input into.

use std::borrow::Cow;
use std::net::IpAddr;

use tollgate::rules::Descriptors;

use crate::identity::{Identified, IdentityConfig, Unverified, identify};

/// Bytes of one value: far more than an honest client sends, and few enough to be compared.
pub(crate) const VALUE_BYTES_MAX: usize = 4 * 1024;
/// Permits of one request: the largest number with which every limit is exact.
pub(crate) const PERMITS_MAX: u64 = 1 << 50;

/// Values by name, such as headers. Names of headers are in lower case.
pub(crate) type Values<'a> = Vec<(Cow<'a, str>, Cow<'a, str>)>;

/// What a door knows of a request, each part valid by itself.
#[derive(Debug)]
pub(crate) struct Described<'a> {
    /// The client's address; none if the request has no address.
    pub(crate) ip: Option<IpAddr>,
    /// The user.
    pub(crate) user: Option<Cow<'a, str>>,
    /// The identifier of the API key.
    pub(crate) api_key: Option<String>,
    /// The tier that the caller names.
    pub(crate) tier: Option<Cow<'a, str>>,
    /// The method, as sent.
    pub(crate) method: Cow<'a, str>,
    /// The host, in lower case and without a port.
    pub(crate) host: String,
    /// The path, without its query.
    pub(crate) path: Cow<'a, str>,
    /// The headers that the policy or the identification of callers reads.
    pub(crate) headers: Values<'a>,
    /// The parameters of the query.
    pub(crate) query: Values<'a>,
    /// Further values, by which protocols and callers describe what has no place above.
    pub(crate) attributes: Values<'a>,
    /// How many permits the request takes.
    pub(crate) permits: u64,
    /// Credentials that were not verified.
    pub(crate) not_verified: NotVerified,
}

impl Default for Described<'_> {
    fn default() -> Self {
        Self {
            ip: None,
            user: None,
            api_key: None,
            tier: None,
            method: Cow::Borrowed(""),
            host: String::new(),
            path: Cow::Borrowed("/"),
            headers: Values::new(),
            query: Values::new(),
            attributes: Values::new(),
            permits: 1,
            not_verified: NotVerified::default(),
        }
    }
}

/// Tokens and API keys of a request that identify nothing.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct NotVerified {
    /// Why the token is not accepted.
    pub(crate) token: Option<Unverified>,
    /// Whether there is an API key that is not known.
    pub(crate) api_key: bool,
}

impl<'a> Described<'a> {
    /// Adds the user, the API key and the tier that the headers prove. What the door has already set stays.
    ///
    /// `caller_is_proxy` says whether the trusted headers come from a trusted proxy: only a proxy overwrites those of its clients.
    pub(crate) fn identify(&mut self, identity: &IdentityConfig, caller_is_proxy: bool, now_secs: u64) {
        let header =
            |name: &str| self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| &**value);
        let Identified { user, api_key, has_unverified_api_key, tier, unverified } =
            identify(identity, header, caller_is_proxy, now_secs);
        self.user = said(self.user.take()).or(user.map(Cow::Owned));
        self.tier = said(self.tier.take()).or(tier.map(Cow::Owned));
        self.not_verified =
            NotVerified { token: unverified, api_key: has_unverified_api_key && self.api_key.is_none() };
        self.api_key = self.api_key.take().or(api_key.map(|id| id.to_string()));
    }

    /// What the policy reads.
    pub(crate) fn descriptors(&self) -> Descriptors<'_> {
        Descriptors {
            ip: self.ip,
            user: self.user.as_deref(),
            api_key: self.api_key.as_deref(),
            has_unverified_api_key: self.not_verified.api_key,
            tier: self.tier.as_deref(),
            method: &self.method,
            host: &self.host,
            path: &self.path,
            headers: &self.headers,
            query: &self.query,
            attributes: &self.attributes,
            ..Descriptors::default()
        }
    }

    /// The request in log lines.
    pub(crate) fn target(&self) -> Target<'a> {
        Target { path: Some(self.path.clone()), method: Some(self.method.clone()) }
    }
}

/// A request in log lines. Requests that name only a key have neither a path nor a method.
#[derive(Default, Debug)]
pub(crate) struct Target<'a> {
    path: Option<Cow<'a, str>>,
    method: Option<Cow<'a, str>>,
}

impl Target<'_> {
    /// The path without its fragment: fragments, like queries, can hold what should not be in a log, such as tokens.
    pub(crate) fn path(&self) -> Option<&str> {
        self.path.as_deref().and_then(|path| path.split('#').next())
    }

    pub(crate) fn method(&self) -> Option<&str> {
        self.method.as_deref()
    }
}

fn said(text: Option<Cow<'_, str>>) -> Option<Cow<'_, str>> {
    text.filter(|text| !text.is_empty())
}

/// A host in lower case, without its port and without the dot that may end it.
pub(crate) fn host(text: &str) -> String {
    let text = match text.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !host.ends_with(':') => host,
        Some(_) | None => text,
    };
    text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase()
}
