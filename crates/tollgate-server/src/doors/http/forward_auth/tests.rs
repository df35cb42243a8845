use super::*;
use crate::address::{client, sender};
use tollgate_testkit::{Random, Usage, long_or};

/// A policy that reads two headers and two parameters.
struct Two;

impl Reads for Two {
    fn header(&self, name: &str) -> bool {
        ["x-plan", "authorization"].contains(&name)
    }

    fn query(&self, name: &str) -> bool {
        ["mode", "user"].contains(&name)
    }
}

fn proxies() -> ClientAddress {
    let trusted_proxies = ["10.0.0.0/8", "fd00::/8"].map(|net| net.parse().expect("a network")).to_vec();
    ClientAddress { header: None, trusted_proxies, ipv6_prefix: 64 }
}

#[test]
fn refused_calls_are_logged_once_a_second() {
    let log = ForwardAuthLog::new();
    let is_due = |ms| log.is_due(Duration::from_millis(ms));
    assert_eq!([is_due(0), is_due(1), is_due(999)], [true, false, false]);
    assert_eq!([is_due(1_000), is_due(1_001), is_due(9_000)], [true, false, true]);
}

#[test]
fn paths_of_calls_name_a_known_proxy() {
    let rest = |path| Call::of(path).map(|call| (call.dialect, call.rest));
    assert_eq!(rest("/forward-auth/nginx"), Some((Dialect::Nginx, "")));
    assert_eq!(rest("/forward-auth/envoy"), Some((Dialect::Envoy, "")));
    assert_eq!(rest("/forward-auth/envoy/"), Some((Dialect::Envoy, "/")));
    assert_eq!(rest("/forward-auth/envoy//a/../b"), Some((Dialect::Envoy, "//a/../b")));
    for other in [
        "/forward-auth",
        "/forward-auth/",
        "/forward-auth/nginx/",
        "/forward-auth/NGINX",
        "/x/forward-auth/nginx",
    ] {
        assert_eq!(rest(other), None, "{other}");
    }
}

/// Random header lines, made of pieces that matter to the parsers and of random bytes.
struct Inputs {
    random: Random,
}

const NAMES: [&str; 16] = [
    "x-original-uri",
    "x-original-method",
    "x-original-host",
    "x-real-ip",
    "x-forwarded-for",
    "x-forwarded-uri",
    "x-forwarded-method",
    "x-forwarded-host",
    "x-forwarded-proto",
    "forwarded",
    "via",
    "host",
    "authorization",
    "x-plan",
    "origin",
    "cookie",
];

const PIECES: [&str; 48] = [
    "10.0.0.1",
    "198.51.100.9",
    "::1",
    "fd00::1",
    "[2001:db8::1]:443",
    "::ffff:10.0.0.1",
    "64:ff9b::a00:1",
    "%eth0",
    "for=",
    "For=\"",
    "by=10.0.0.1",
    ";",
    ",",
    ", ",
    "\"",
    "[",
    "]",
    ":",
    ":99999",
    "unknown",
    "_hidden",
    "GET",
    "POST",
    "/",
    "/a/b",
    "//",
    "/../",
    "%2e%2e",
    "?",
    "&",
    "=",
    "+",
    "%",
    "%6D",
    "mode",
    "user",
    "slow",
    "%FF",
    "#",
    "*",
    "http://",
    "shop.example",
    "localhost",
    ".",
    " ",
    "\t",
    "é",
    "0",
];

impl Inputs {
    fn value(&mut self) -> Vec<u8> {
        let mut value = Vec::new();
        let pieces = match self.random.below(1_000) {
            0 => 2_000,
            most => self.random.below(most % 12 + 1),
        };
        for _ in 0..pieces {
            match self.random.below(8) {
                0 => value.push(self.random.number() as u8),
                _ => value
                    .extend_from_slice(PIECES[self.random.below(PIECES.len() as u64) as usize].as_bytes()),
            }
        }
        value
    }

    fn header_value(&mut self) -> HeaderValue {
        let mut value = self.value();
        value.retain(|byte| *byte == b'\t' || (*byte >= b' ' && *byte != 127));
        HeaderValue::from_bytes(&value).expect("bytes that headers may have")
    }

    /// Lines of any names, and often those that a dialect needs, so that calls are read to their end.
    fn headers(&mut self, dialect: Dialect) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for _ in 0..self.random.below(5) {
            let name = NAMES[self.random.below(NAMES.len() as u64) as usize];
            headers.append(HeaderName::from_static(name), self.header_value());
        }
        let needed: &[(&'static str, &'static str)] = match dialect {
            Dialect::Nginx => {
                &[("x-original-method", "GET"), ("x-original-host", "a"), ("x-real-ip", "198.51.100.1")]
            }
            Dialect::Forwarded => &[
                ("x-forwarded-method", "GET"),
                ("x-forwarded-host", "a"),
                ("x-forwarded-for", "198.51.100.1"),
            ],
            Dialect::Envoy => &[("host", "a"), ("x-real-ip", "198.51.100.1")],
        };
        for (name, value) in needed {
            if !self.random.one_in(4) {
                headers.insert(*name, HeaderValue::from_static(value));
            }
        }
        let uri = match dialect {
            Dialect::Nginx => "x-original-uri",
            Dialect::Forwarded | Dialect::Envoy => "x-forwarded-uri",
        };
        if !self.random.one_in(4) {
            let mut target = b"/".to_vec();
            target.extend_from_slice(self.header_value().as_bytes());
            headers.insert(uri, HeaderValue::from_bytes(&target).expect("bytes that headers may have"));
        }
        headers
    }
}

/// Reads one random call by its dialect. True if it describes a request.
fn read_call(inputs: &mut Inputs, proxies: &ClientAddress, peer: IpAddr) -> bool {
    let (name, dialect) = PROXIES[inputs.random.below(PROXIES.len() as u64) as usize];
    let mut request = Request::new(());
    *request.headers_mut() = inputs.headers(dialect);
    let mut path = format!("/forward-auth/{name}");
    if dialect == Dialect::Envoy {
        let target = String::from_utf8_lossy(&inputs.value()).into_owned();
        // Targets that hyper does not accept never reach the door.
        if let Ok(uri) = format!("{path}/{target}").parse() {
            *request.uri_mut() = uri;
        }
        path = request.uri().path().to_owned();
    }
    let Some(call) = Call::of(&path) else { return false };
    let Ok(described) = call.describe(&request, proxies, peer, &Two) else { return false };
    assert!(described.path.starts_with('/') && described.path.len() <= VALUE_BYTES_MAX);
    assert!(described.ip.is_some() && described.permits == 1 && !described.method.is_empty());
    assert!(described.user.is_none() && described.api_key.is_none() && described.tier.is_none());
    assert!(described.headers.len() <= 2 && described.query.len() <= 2);
    assert!(
        described.headers.iter().chain(&described.query).all(|(_, value)| value.len() <= VALUE_BYTES_MAX)
    );
    true
}

/// Reads a random address header, alone and with the hop that a trusted proxy has added on its right.
fn read_address(inputs: &mut Inputs, proxies: &ClientAddress, peer: IpAddr) {
    const HEADERS: [AddressHeader; 3] =
        [AddressHeader::XForwardedFor, AddressHeader::XRealIp, AddressHeader::Forwarded];
    let header = HEADERS[inputs.random.below(3) as usize];
    let config = ClientAddress { header: Some(header), ..proxies.clone() };
    let mut headers = HeaderMap::new();
    for _ in 0..inputs.random.below(3) {
        headers.append(header.name(), inputs.header_value());
    }
    let (found, named) = (client(&config, peer, &headers), named_client(&config, header, peer, &headers));
    let sent = sender(&config, peer, &headers);
    if !is_trusted(&config, peer) {
        assert_eq!(found.network(), crate::address::network(peer, 64), "headers of strangers are ignored");
    } else if named.is_some() {
        assert_eq!(sent, named);
    }
    let hop = if header == AddressHeader::Forwarded { "for=192.0.2.77" } else { "192.0.2.77" };
    // A proxy adds its hop to the line of its client, or as a line of its own.
    let mut line =
        if inputs.random.one_in(2) { inputs.header_value().as_bytes().to_vec() } else { Vec::new() };
    if !line.is_empty() {
        line.extend_from_slice(b", ");
    }
    line.extend_from_slice(hop.as_bytes());
    headers.append(header.name(), HeaderValue::from_bytes(&line).expect("bytes that headers may have"));
    let named = named_client(&config, header, peer, &headers);
    assert_eq!(named, Some(IpAddr::from([192, 0, 2, 77])), "{header:?}: {headers:?}");
}

/// `TESTS_SEED` replays or varies the inputs.
#[test]
fn random_headers_are_read_without_panic_and_in_bounded_memory() {
    let seed = std::env::var("TESTS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut inputs = Inputs { random: Random::new(seed) };
    let count: u64 = long_or(10_000_000, 100_000);
    let proxies = proxies();
    let peers = ["10.0.0.1", "::ffff:10.0.0.1", "fd00::2", "192.0.2.1"]
        .map(|ip| canonical(ip.parse().expect("an address")));
    let mut described = 0;
    let mut rss_after_warm_up = 0;
    for number in 0..count {
        let peer = peers[inputs.random.below(4) as usize];
        if inputs.random.one_in(2) {
            read_address(&mut inputs, &proxies, peer);
        } else if read_call(&mut inputs, &proxies, peer) {
            described += 1;
        }
        if number == count / 10 {
            rss_after_warm_up = Usage::of(std::process::id()).rss_bytes;
        }
    }
    // Otherwise the inputs are too wild to test more than the first line of each parser.
    assert!(described > count / 20, "{described} of {count} inputs describe a request");
    // Other tests run in the same process, so this bound is far above what one call needs, and far below what all inputs together have.
    let grown = Usage::of(std::process::id()).rss_bytes.saturating_sub(rss_after_warm_up);
    assert!(grown < 256 << 20, "{grown} bytes more than after a tenth of the inputs");
    println!("seed {seed}: {count} inputs, {described} described requests, {grown} bytes of growth");
}
