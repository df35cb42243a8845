//! Requests that a loopback listener without tokens answers: from this machine, and not from a web page elsewhere.
//!
//! A loopback address keeps other machines out, but not the pages that a browser on this machine shows, nor the clients of a
//! proxy on this machine. A page under a rebound DNS name is told by its `Host`, any other page by `Origin` or
//! `Sec-Fetch-Site`, and a proxy by the headers that it adds.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::header::{HOST, HeaderName, ORIGIN};
use http::{HeaderMap, HeaderValue, Request};

use crate::access::Refused;
use crate::address::canonical;

/// Headers that proxies and content delivery networks add to a request, beside all that begin with `X-Forwarded`.
const FORWARDING_HEADERS: [&str; 16] = [
    "forwarded",
    "via",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-original-forwarded-for",
    "x-original-host",
    "x-envoy-external-address",
    "x-envoy-original-path",
    "x-azure-clientip",
    "x-proxyuser-ip",
    "true-client-ip",
    "cf-connecting-ip",
    "cdn-loop",
    "fastly-client-ip",
    "fly-client-ip",
];

/// Whether a proxy has passed the request on. Its client can be anywhere, whatever the address of the connection.
pub(crate) fn is_forwarded(headers: &HeaderMap) -> bool {
    let is_forwarding = |name: &HeaderName| {
        let name = name.as_str();
        name.starts_with("x-forwarded") || FORWARDING_HEADERS.contains(&name)
    };
    headers.keys().any(is_forwarding)
}

/// Whether a browser sent the request for a page of another origin.
pub(crate) fn is_from_foreign_page(headers: &HeaderMap) -> bool {
    let is_cross_site = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"cross-site");
    headers.get_all("sec-fetch-site").iter().any(is_cross_site)
        || headers.get_all(ORIGIN).iter().any(|origin| !is_own_origin(origin, headers.get(HOST)))
}

/// Whether an origin is the one that the request was sent to. `null`, which sandboxed pages send, is not.
fn is_own_origin(origin: &HeaderValue, host: Option<&HeaderValue>) -> bool {
    let origin = origin.as_bytes();
    let authority = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
    match (authority, host) {
        (Some(authority), Some(host)) => authority.eq_ignore_ascii_case(host.as_bytes()),
        (Some(_) | None, _) => false,
    }
}

/// The check that every request to a loopback listener without tokens must pass.
#[derive(Debug)]
pub(crate) struct LoopbackCheck {
    /// Names beside those of loopback, in small letters.
    allowed_hosts: Vec<String>,
}

impl LoopbackCheck {
    pub(crate) fn new(allowed_hosts: Vec<String>) -> Self {
        Self { allowed_hosts }
    }

    pub(crate) fn check<B>(&self, request: &Request<B>) -> Result<(), Refused> {
        self.check_host(request)?;
        if is_from_foreign_page(request.headers()) {
            return Err(Refused::ForeignPage);
        }
        Ok(())
    }

    /// Refuses a host that is neither a loopback name nor configured: a page under a rebound DNS name has one.
    pub(crate) fn check_host<B>(&self, request: &Request<B>) -> Result<(), Refused> {
        // A target such as `GET http://name/path` names a host as well. HTTP/1.0 need not name any; browsers always do.
        let in_target = request.uri().authority().map(|authority| authority.as_str());
        let in_headers = request.headers().get_all(HOST).iter().map(|host| host.to_str().unwrap_or_default());
        if !in_headers.chain(in_target).all(|host| self.is_allowed(host)) {
            return Err(Refused::ForeignHost);
        }
        Ok(())
    }

    /// Whether no browser sent the request, or one for a page of this service under an allowed name.
    ///
    /// `Host` and `Origin` agree after DNS rebinding, too; only a name that is known tells such a page from the service's own.
    pub(crate) fn allows_page(&self, headers: &HeaderMap) -> bool {
        let is_of_browser = |name: &HeaderName| *name == ORIGIN || name.as_str().starts_with("sec-fetch-");
        if !headers.keys().any(is_of_browser) {
            return true;
        }
        let mut hosts = headers.get_all(HOST).iter().map(|host| host.to_str().unwrap_or_default()).peekable();
        hosts.peek().is_some() && hosts.all(|host| self.is_allowed(host)) && !is_from_foreign_page(headers)
    }

    fn is_allowed(&self, host: &str) -> bool {
        let Some(name) = without_port(host) else { return false };
        let name = name.strip_suffix('.').unwrap_or(name);
        is_loopback_name(name) || self.allowed_hosts.iter().any(|known| known.eq_ignore_ascii_case(name))
    }
}

/// The name in `name:port`, or the address in `[address]:port` with its brackets.
fn without_port(host: &str) -> Option<&str> {
    let end = match host.strip_prefix('[') {
        Some(rest) => rest.find(']')? + 2,
        None => host.find(':').unwrap_or(host.len()),
    };
    let (name, port) = host.split_at(end);
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    (port.is_empty() || port.strip_prefix(':').is_some_and(is_port)).then_some(name)
}

/// `localhost` and names below it, which resolvers answer with loopback (RFC 6761), and loopback addresses.
fn is_loopback_name(name: &str) -> bool {
    let ip = match name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(ip) => ip.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        None => name.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
    };
    if let Some(ip) = ip {
        return canonical(ip).is_loopback();
    }
    let last = name.rsplit('.').next().unwrap_or(name);
    last.eq_ignore_ascii_case("localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_loopback_names_or_configured() {
        let check = LoopbackCheck::new(vec!["gate.internal".to_owned()]);
        for host in [
            "localhost",
            "LocalHost:8080",
            "localhost.",
            "app.localhost:1",
            "127.0.0.1",
            "127.9.9.9:80",
            "[::1]",
            "[::1]:8080",
            "[::ffff:127.0.0.1]:1",
            "gate.internal",
            "Gate.Internal:8080",
        ] {
            assert!(check.is_allowed(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "notlocalhost",
            "127.0.0.1.evil.example",
            "127.1",
            "10.0.0.1",
            "[2001:db8::1]",
            "[::1",
            "[::1]x",
            "localhost:80@evil.example",
            "evil@localhost",
            "localhost:8080:9",
            "a.gate.internal",
        ] {
            assert!(!check.is_allowed(host), "{host}");
        }
    }

    #[test]
    fn a_page_needs_an_allowed_host_and_other_callers_need_none() {
        let check = LoopbackCheck::new(vec!["gate.internal".to_owned()]);
        let allows = |host: &'static str, name: &'static str, value: &'static str| {
            let headers = [(HOST, host), (HeaderName::from_static(name), value)];
            check.allows_page(&HeaderMap::from_iter(
                headers.map(|(name, value)| (name, HeaderValue::from_static(value))),
            ))
        };
        assert!(allows("evil.example", "accept", "*/*"));
        assert!(allows("gate.internal:8080", "origin", "http://gate.internal:8080"));
        assert!(allows("gate.internal", "sec-fetch-site", "same-origin"));
        for (host, name, value) in [
            ("evil.example", "origin", "http://evil.example"),
            ("evil.example", "sec-fetch-site", "same-origin"),
            ("evil.example", "sec-fetch-mode", "cors"),
            ("gate.internal", "origin", "http://evil.example"),
            ("gate.internal", "sec-fetch-site", "cross-site"),
        ] {
            assert!(!allows(host, name, value), "{host} {name}: {value}");
        }
        assert!(!check.allows_page(&HeaderMap::from_iter([(ORIGIN, HeaderValue::from_static("null"))])));
    }

    #[test]
    fn an_origin_is_own_only_if_it_is_the_host() {
        let host = HeaderValue::from_static("localhost:8080");
        let is_own = |origin: &'static str| is_own_origin(&HeaderValue::from_static(origin), Some(&host));
        assert!(is_own("http://localhost:8080") && is_own("http://LOCALHOST:8080"));
        for foreign in
            ["null", "", "http://localhost:3000", "http://localhost", "http://evil.example", "localhost:8080"]
        {
            assert!(!is_own(foreign), "{foreign}");
        }
        assert!(!is_own_origin(&HeaderValue::from_static("http://localhost"), None));
    }
}
