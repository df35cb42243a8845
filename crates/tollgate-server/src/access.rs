//! Which callers may name keys: local ones where no tokens are configured, else those with a token or in a trusted network.

use std::net::IpAddr;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue, Request};
use ipnet::IpNet;
use ring::hmac;
use ring::rand::SystemRandom;

use crate::address::{canonical, sender};
use crate::config::{ClientAddress, Token};
use crate::identity::sha256;
use crate::loopback::{LoopbackCheck, is_forwarded};

/// Why a request was refused before it was looked at any further. A label of a metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// It shows a token that is not in `api.token_file`.
    WrongToken,
    /// It names a key, or asks about one, without a token or a trusted network.
    KeyNotAllowed,
    /// Its `Host` is neither a loopback name nor configured.
    ForeignHost,
    /// A browser sent it for a page of another origin.
    ForeignPage,
    /// A proxy has passed it on, and it asks for a page that only this machine may see.
    Forwarded,
    /// It asks for `/admin` beyond loopback, and no admin token is configured.
    NoAdminTokens,
    /// It asks for `/admin` without a token of `admin.token_file`.
    WrongAdminToken,
    /// All memory for bodies is in use.
    BodyMemory,
    /// It calls forward-auth from an address that is not in `client_address.trusted_proxies`.
    NotAProxy,
    /// It calls forward-auth, and its headers do not describe a request.
    ForwardAuth,
}

impl Refused {
    /// All of them, in their order.
    pub(crate) const ALL: [Self; 10] = [
        Self::WrongToken,
        Self::KeyNotAllowed,
        Self::ForeignHost,
        Self::ForeignPage,
        Self::Forwarded,
        Self::NoAdminTokens,
        Self::WrongAdminToken,
        Self::BodyMemory,
        Self::NotAProxy,
        Self::ForwardAuth,
    ];

    /// The label.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::WrongToken => "wrong_token",
            Self::KeyNotAllowed => "key_not_allowed",
            Self::ForeignHost => "foreign_host",
            Self::ForeignPage => "foreign_page",
            Self::Forwarded => "forwarded",
            Self::NoAdminTokens => "no_admin_tokens",
            Self::WrongAdminToken => "wrong_admin_token",
            Self::BodyMemory => "body_memory",
            Self::NotAProxy => "not_a_proxy",
            Self::ForwardAuth => "forward_auth",
        }
    }
}

/// Decides which callers of the API are trusted with keys that are not their own.
#[derive(Debug)]
pub(crate) struct Access {
    /// Whether local callers need no token.
    is_open: bool,
    tokens: KnownTokens,
    trusted: Vec<IpNet>,
    /// Which web pages may call without a token from a trusted network.
    pages: LoopbackCheck,
}

impl Access {
    /// `is_open` for loopback listeners without tokens.
    pub(crate) fn new(is_open: bool, tokens: Vec<Token>, trusted: Vec<IpNet>, pages: LoopbackCheck) -> Self {
        Self { is_open, tokens: KnownTokens::new(tokens), trusted, pages }
    }

    /// Refuses tokens that are not configured, whether or not the request needs one.
    #[inline]
    pub(crate) fn check_token(&self, headers: &HeaderMap) -> Result<(), Refused> {
        match self.shown(headers) {
            Shown::Wrong => Err(Refused::WrongToken),
            Shown::Nothing | Shown::Known => Ok(()),
        }
    }

    /// Whether a caller may name keys. `peer` is the connection's other end.
    #[inline]
    pub(crate) fn may_name_keys(&self, peer: IpAddr, headers: &HeaderMap, proxies: &ClientAddress) -> bool {
        (self.is_open && !is_forwarded(headers))
            || self.shown(headers) == Shown::Known
            || self.trusts(peer, headers, proxies)
    }

    /// Refuses a `Host` that is neither a loopback name nor in `api.allowed_hosts`.
    pub(crate) fn check_host<B>(&self, request: &Request<B>) -> Result<(), Refused> {
        self.pages.check_host(request)
    }

    /// Admits a caller by its token, or else by the address of the connection's other end. Forwarding headers are not looked at.
    pub(crate) fn admit_peer(&self, peer: IpAddr, headers: &HeaderMap) -> Result<(), Refused> {
        match self.shown(headers) {
            Shown::Wrong => Err(Refused::WrongToken),
            Shown::Known => Ok(()),
            Shown::Nothing if self.is_open || self.trusts_address(canonical(peer)) => Ok(()),
            Shown::Nothing => Err(Refused::KeyNotAllowed),
        }
    }

    fn trusts_address(&self, ip: IpAddr) -> bool {
        self.trusted.iter().any(|net| net.contains(&ip))
    }

    /// Whether both ends of the way are in a trusted network: the connection's other end, and the client that a trusted proxy
    /// names. A forwarded request whose client is unknown is not trusted, nor is a web page under a host that is not allowed: a
    /// browser in a trusted network shows pages from anywhere.
    fn trusts(&self, peer: IpAddr, headers: &HeaderMap, proxies: &ClientAddress) -> bool {
        self.trusts_address(canonical(peer))
            && self.pages.allows_page(headers)
            && sender(proxies, peer, headers).is_some_and(|ip| self.trusts_address(ip))
    }

    /// Whether any token is configured.
    pub(crate) fn has_tokens(&self) -> bool {
        !self.tokens.known.is_empty()
    }

    /// Whether a text is one of the configured tokens.
    pub(crate) fn is_token(&self, text: &[u8]) -> bool {
        self.tokens.holder(text).is_some()
    }

    fn shown(&self, headers: &HeaderMap) -> Shown {
        let mut shown = Shown::Nothing;
        for token in tokens(headers) {
            if !self.is_token(token) {
                return Shown::Wrong;
            }
            shown = Shown::Known;
        }
        shown
    }
}

/// What the tokens of a request are worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shown {
    Nothing,
    Wrong,
    Known,
}

/// Decides who may use `/admin` on the admin listener.
#[derive(Debug)]
pub(crate) struct AdminAccess {
    is_loopback: bool,
    tokens: KnownTokens,
}

/// The name of a caller in the audit log where no token is needed.
pub(crate) const LOCAL_ADMIN: &str = "loopback";

impl AdminAccess {
    pub(crate) fn new(is_loopback: bool, tokens: Vec<Token>) -> Self {
        Self { is_loopback, tokens: KnownTokens::new(tokens) }
    }

    /// The name of a caller who may use `/admin`.
    pub(crate) fn admit(&self, headers: &HeaderMap) -> Result<&str, Refused> {
        if self.tokens.known.is_empty() {
            return match self.is_loopback && !is_forwarded(headers) {
                true => Ok(LOCAL_ADMIN),
                false => Err(Refused::NoAdminTokens),
            };
        }
        let mut name = None;
        for token in tokens(headers) {
            name = Some(self.tokens.holder(token).ok_or(Refused::WrongAdminToken)?);
        }
        name.ok_or(Refused::WrongAdminToken)
    }
}

/// Configured tokens, each as a tag under a random key. A caller cannot compute tags, so the duration of a comparison tells
/// nothing about a token.
#[derive(Debug)]
struct KnownTokens {
    key: hmac::Key,
    /// Tags with the names of the holders.
    known: Vec<(hmac::Tag, String)>,
}

impl KnownTokens {
    fn new(tokens: Vec<Token>) -> Self {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        let key = key.expect("the operating system gives random numbers");
        let tagged = |token: Token| (hmac::sign(&key, &token.digest), token.name);
        Self { known: tokens.into_iter().map(tagged).collect(), key }
    }

    /// Returns the name of a token's holder, if the token is configured.
    fn holder(&self, token: &[u8]) -> Option<&str> {
        if self.known.is_empty() {
            return None;
        }
        let tag = hmac::sign(&self.key, &sha256(token));
        let found = self.known.iter().find(|(known, _)| known.as_ref() == tag.as_ref());
        found.map(|(_, name)| name.as_str())
    }
}

/// The tokens that a request shows. `Bearer` is the name of a scheme, and those have no case (RFC 9110).
fn tokens(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    const SCHEME: usize = "bearer".len();
    headers.get_all(AUTHORIZATION).iter().map(HeaderValue::as_bytes).filter_map(|value| {
        let (scheme, rest) = value.split_at_checked(SCHEME)?;
        let is_bearer = scheme.eq_ignore_ascii_case(b"bearer") && matches!(rest.first(), None | Some(b' '));
        is_bearer.then(|| rest.trim_ascii())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().expect("a header"))])
    }

    fn bearer(token: &str) -> HeaderMap {
        header("authorization", &format!("Bearer {token}"))
    }

    fn access(is_open: bool, trusted: &[&str]) -> Access {
        let tokens = vec![Token { name: String::new(), digest: sha256("correct horse battery") }];
        let trusted = trusted.iter().map(|net| net.parse().expect("a network")).collect();
        Access::new(is_open, tokens, trusted, LoopbackCheck::new(vec!["gate.internal".to_owned()]))
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn beyond_loopback_a_token_or_a_trusted_network_is_needed() {
        let access = access(false, &["10.1.0.0/16"]);
        let may = |peer: IpAddr, headers: &HeaderMap| {
            access.may_name_keys(peer, headers, &ClientAddress::default())
        };
        let [far, near, mapped] = ["192.0.2.1", "10.1.2.3", "::ffff:10.1.2.3"].map(ip);
        assert!(!may(far, &HeaderMap::new()));
        assert!(!may(far, &bearer("wrong horse battery..")));
        assert!(!may(far, &bearer("")));
        assert!(may(far, &bearer("correct horse battery")));
        assert!(may(near, &HeaderMap::new()));
        assert!(may(mapped, &HeaderMap::new()));
        assert!(!may(near, &header("sec-fetch-site", "cross-site")), "a page in a trusted network's browser");
        assert!(!may(near, &header("x-forwarded-for", "10.1.2.3")), "the peer is no trusted proxy");
    }

    #[test]
    fn bearer_has_no_case_and_other_schemes_are_no_tokens() {
        let access = access(false, &[]);
        for scheme in ["Bearer", "bearer", "BEARER", "bEaReR", "Bearer  "] {
            let shown = access.shown(&header("authorization", &format!("{scheme} correct horse battery")));
            assert_eq!(shown, Shown::Known, "{scheme}");
        }
        for wrong in ["Bearer", "bearer x", "Bearer correct horse"] {
            assert_eq!(access.shown(&header("authorization", wrong)), Shown::Wrong, "{wrong}");
        }
        for other in ["Basic eDp5", "Bearerx y", "Token correct horse battery", "B"] {
            assert_eq!(access.shown(&header("authorization", other)), Shown::Nothing, "{other}");
        }
        let mut two = bearer("correct horse battery");
        two.append(AUTHORIZATION, HeaderValue::from_static("Bearer another"));
        assert_eq!(access.shown(&two), Shown::Wrong);
    }

    #[test]
    fn clients_of_a_proxy_are_trusted_by_their_own_address() {
        let access = access(false, &["10.0.0.0/8", "127.0.0.0/8"]);
        let proxies = ClientAddress {
            header: Some(crate::config::AddressHeader::XForwardedFor),
            trusted_proxies: vec!["10.0.0.1/32".parse().expect("a network")],
            ipv6_prefix: 64,
        };
        let by_proxy = |client: &str| header("x-forwarded-for", client);
        assert!(access.may_name_keys(ip("10.0.0.1"), &by_proxy("10.0.0.9"), &proxies));
        assert!(!access.may_name_keys(ip("10.0.0.1"), &by_proxy("198.51.100.1"), &proxies));
        assert!(access.may_name_keys(ip("127.0.0.1"), &HeaderMap::new(), &proxies));
        assert!(!access.may_name_keys(ip("127.0.0.1"), &by_proxy("10.0.0.9"), &proxies), "no trusted proxy");
    }
}
