//! The client's address: the connection's other end, or what trusted proxies say of it, read from the right.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use http::HeaderMap;
use ipnet::IpNet;

use crate::config::{AddressHeader, ClientAddress};
use crate::loopback::is_forwarded;

/// Hops of a header that are looked at, from the right. No honest path is longer; entries farther left come from the client.
const HOPS_MAX: usize = 32;
/// Bytes of a hop that can be read. No address is longer, also beside the other parameters of `Forwarded`.
const HOP_BYTES_MAX: usize = 1_024;

/// A client: an IPv4 address, or the prefix of an IPv6 address, of which one client can have very many.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Client {
    ip: IpAddr,
    ipv6_prefix: u8,
    /// Whether it is known that the request comes from this address, and not through it.
    is_sender: bool,
}

impl Client {
    /// The first address of the client's network, by which clients are told apart.
    pub(crate) fn network(&self) -> IpAddr {
        network(self.ip, self.ipv6_prefix)
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ip {
            IpAddr::V4(ip) => write!(f, "{ip}"),
            IpAddr::V6(_) => write!(f, "{}/{}", self.network(), self.ipv6_prefix),
        }
    }
}

/// The first address of a client's network: an IPv4 address itself, or an IPv6 address cut to its prefix.
pub(crate) fn network(ip: IpAddr, ipv6_prefix: u8) -> IpAddr {
    let IpAddr::V6(ip) = ip else { return ip };
    let kept = u128::MAX.checked_shl(128 - u32::from(ipv6_prefix)).unwrap_or(0);
    IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & kept))
}

/// Finds the address that a request is counted by. Where it cannot be found, this is the nearest hop that is known.
pub(crate) fn client(config: &ClientAddress, peer: IpAddr, headers: &HeaderMap) -> Client {
    let Walk { ip, is_complete } = walk(config, peer, headers);
    Client { ip, ipv6_prefix: config.ipv6_prefix, is_sender: is_complete || !is_forwarded(headers) }
}

/// Finds the address that sent the request; none if a proxy passed it on and does not say for whom.
///
/// A forwarded request needs a trusted peer and a header of which every hop up to the client can be read. Anything less leaves
/// the client unknown, and the address of a proxy is no ground to trust its clients.
pub(crate) fn sender(config: &ClientAddress, peer: IpAddr, headers: &HeaderMap) -> Option<IpAddr> {
    let client = client(config, peer, headers);
    client.is_sender.then_some(client.ip)
}

/// Whether a trusted proxy itself sent the request, not a client behind it.
pub(crate) fn is_proxy(config: &ClientAddress, client: Client) -> bool {
    client.is_sender && is_trusted(config, client.ip)
}

/// Finds the client that a trusted proxy names in a header; none if the header is missing or a hop cannot be read.
pub(crate) fn named_client(
    config: &ClientAddress,
    header: AddressHeader,
    proxy: IpAddr,
    headers: &HeaderMap,
) -> Option<IpAddr> {
    let Walk { ip, is_complete } = from_header(config, header, canonical(proxy), headers);
    is_complete.then_some(ip)
}

/// How far the way of a request can be followed back.
struct Walk {
    /// The last hop that is known.
    ip: IpAddr,
    /// Whether a header says that this is the client.
    is_complete: bool,
}

fn walk(config: &ClientAddress, peer: IpAddr, headers: &HeaderMap) -> Walk {
    let peer = canonical(peer);
    match config.header {
        Some(header) if is_trusted(config, peer) => from_header(config, header, peer, headers),
        Some(_) | None => Walk { ip: peer, is_complete: false },
    }
}

/// Whether a canonical address is one of a trusted proxy.
pub(crate) fn is_trusted(config: &ClientAddress, ip: IpAddr) -> bool {
    config.trusted_proxies.iter().any(|net: &IpNet| net.contains(&ip))
}

impl AddressHeader {
    /// The name of the header, in lower case.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::XForwardedFor => "x-forwarded-for",
            Self::XRealIp => "x-real-ip",
            Self::Forwarded => "forwarded",
        }
    }
}

/// From right to left through trusted hops: the first one that is not trusted is the client. What cannot be read ends the
/// walk at the last hop that could.
fn from_header(config: &ClientAddress, header: AddressHeader, peer: IpAddr, headers: &HeaderMap) -> Walk {
    let mut last_good = peer;
    // In bytes and from the right: what a client has written on the left is neither copied nor looked at.
    let lines = headers.get_all(header.name()).iter().rev();
    let mut hops = lines.flat_map(|line| rsplit_outside_quotes(line.as_bytes(), b','));
    let mut is_empty = true;
    for hop in hops.by_ref().take(HOPS_MAX) {
        is_empty = false;
        let hop = Some(hop).filter(|hop| hop.len() <= HOP_BYTES_MAX);
        let address = match header {
            AddressHeader::XForwardedFor | AddressHeader::XRealIp => hop,
            AddressHeader::Forwarded => hop.and_then(forwarded_for),
        };
        let address = address.and_then(|address| parse_hop(str::from_utf8(address).ok()?));
        let Some(address) = address else { return Walk { ip: last_good, is_complete: false } };
        last_good = address;
        if !is_trusted(config, address) {
            return Walk { ip: address, is_complete: true };
        }
    }
    Walk { ip: last_good, is_complete: !is_empty && hops.next().is_none() }
}

/// The value of `for=` in an element of `Forwarded`; none if there are two, of which a client may have written one.
fn forwarded_for(element: &[u8]) -> Option<&[u8]> {
    let mut values = rsplit_outside_quotes(element, b';').filter_map(|pair| {
        let (name, value) = pair.trim_ascii().split_at_checked("for=".len())?;
        name.eq_ignore_ascii_case(b"for=").then_some(value)
    });
    values.next().filter(|_| values.next().is_none())
}

/// Splits from the right, so that a quote which a client leaves open garbles only what the client has written.
fn rsplit_outside_quotes(text: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let mut quoted = false;
    text.rsplit(move |byte| {
        quoted ^= *byte == b'"';
        *byte == separator && !quoted
    })
}

/// An address as proxies write it: bare, with a port, in brackets, in quotes.
fn parse_hop(hop: &str) -> Option<IpAddr> {
    let hop = hop.trim();
    let hop = hop.strip_prefix('"').and_then(|hop| hop.strip_suffix('"')).unwrap_or(hop);
    let parsed = if let Some(rest) = hop.strip_prefix('[') {
        let (ip, port) = rest.split_once(']')?;
        let port_is_one =
            port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok());
        port_is_one.then(|| without_zone(ip).parse::<Ipv6Addr>().ok()).flatten().map(IpAddr::V6)
    } else {
        let ip = without_zone(hop).parse::<IpAddr>().ok();
        ip.or_else(|| hop.parse::<SocketAddr>().ok().filter(SocketAddr::is_ipv4).map(|address| address.ip()))
    };
    parsed.map(canonical)
}

fn without_zone(ip: &str) -> &str {
    ip.split_once('%').map_or(ip, |(ip, _)| ip)
}

/// IPv4 in whichever form it comes is IPv4: mapped (`::ffff:a.b.c.d`) and translated (`64:ff9b::/96`) addresses too.
pub(crate) fn canonical(ip: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = ip else { return ip };
    match v6.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => IpAddr::V4(Ipv4Addr::from_bits(v6.to_bits() as u32)),
        _ => ip.to_canonical(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use http::header::HeaderName;

    fn config(header: AddressHeader) -> ClientAddress {
        let trusted_proxies = ["10.0.0.0/8", "fd00::/8"].map(|net| net.parse().expect("a network")).to_vec();
        ClientAddress { header: Some(header), trusted_proxies, ipv6_prefix: 64 }
    }

    fn found(header: AddressHeader, name: &'static str, peer: &str, lines: &[&'static str]) -> String {
        let lines = lines.iter().map(|line| (HeaderName::from_static(name), HeaderValue::from_static(line)));
        client(&config(header), peer.parse().expect("an address"), &HeaderMap::from_iter(lines)).to_string()
    }

    fn forwarded_for(peer: &str, lines: &[&'static str]) -> String {
        found(AddressHeader::XForwardedFor, "x-forwarded-for", peer, lines)
    }

    #[test]
    fn headers_of_strangers_are_ignored() {
        assert_eq!(forwarded_for("192.0.2.9", &["198.51.100.1"]), "192.0.2.9");
        let none = ClientAddress { ipv6_prefix: 64, ..ClientAddress::default() };
        let headers = HeaderMap::from_iter([(
            HeaderName::from_static("x-forwarded-for"),
            HeaderValue::from_static("1.2.3.4"),
        )]);
        assert_eq!(client(&none, "10.0.0.1".parse().expect("an address"), &headers).to_string(), "10.0.0.1");
    }

    #[test]
    fn the_header_is_read_from_the_right_through_trusted_hops() {
        assert_eq!(forwarded_for("10.0.0.1", &["6.6.6.6, 198.51.100.1, 10.0.0.2"]), "198.51.100.1");
        assert_eq!(forwarded_for("10.0.0.1", &["6.6.6.6", "198.51.100.1", "10.0.0.2"]), "198.51.100.1");
        assert_eq!(
            forwarded_for("10.0.0.1", &["10.0.0.3, 10.0.0.2"]),
            "10.0.0.3",
            "all trusted: the farthest"
        );
        assert_eq!(
            forwarded_for("10.0.0.1", &["unknown, 10.0.0.2"]),
            "10.0.0.2",
            "garbage: the last good one"
        );
        assert_eq!(forwarded_for("10.0.0.1", &["6.6.6.6, <script>, 10.0.0.2"]), "10.0.0.2");
        assert_eq!(forwarded_for("10.0.0.1", &[]), "10.0.0.1");
    }

    #[test]
    fn forms_of_one_address_are_one_client() {
        for form in
            ["198.51.100.1:4711", "::ffff:198.51.100.1", "[::ffff:198.51.100.1]:80", "64:ff9b::c633:6401"]
        {
            let form: &'static str = form;
            assert_eq!(forwarded_for("10.0.0.1", &[form]), "198.51.100.1", "{form}");
        }
        assert_eq!(forwarded_for("::ffff:10.0.0.1", &["198.51.100.1"]), "198.51.100.1");
    }

    #[test]
    fn ipv6_clients_are_their_prefix() {
        assert_eq!(forwarded_for("2001:db8:1:2:3:4:5:6", &[]), "2001:db8:1:2::/64");
        assert_eq!(forwarded_for("fd00::1", &["2001:db8::1"]), "2001:db8::/64");
        assert_eq!(forwarded_for("fd00::1", &["[2001:db8::1%eth0]:443"]), "2001:db8::/64");
    }

    #[test]
    fn forwarded_is_read_with_its_quotes() {
        let read = |lines: &[&'static str]| found(AddressHeader::Forwarded, "forwarded", "10.0.0.1", lines);
        assert_eq!(read(&["for=6.6.6.6, for=198.51.100.1;by=10.0.0.2"]), "198.51.100.1");
        assert_eq!(read(&[r#"For="[2001:db8:cafe::17]:4711";proto=https"#]), "2001:db8:cafe::/64");
        assert_eq!(read(&[r#"for="6.6.6.6, 7.7.7.7""#]), "10.0.0.1");
        assert_eq!(read(&["by=10.0.0.2"]), "10.0.0.1");
        assert_eq!(
            read(&["for=198.51.100.1;for=192.0.2.9"]),
            "10.0.0.1",
            "one of the two may be the client's"
        );
    }

    #[test]
    fn the_sender_of_a_forwarded_request_is_known_only_if_every_hop_can_be_read() {
        let config = config(AddressHeader::XForwardedFor);
        let sender_of = |config: &ClientAddress, peer: &str, name: &'static str, value: &'static str| {
            let header = (HeaderName::from_static(name), HeaderValue::from_static(value));
            let peer = peer.parse().expect("an address");
            super::sender(config, peer, &HeaderMap::from_iter([header])).map(|ip| ip.to_string())
        };
        for (peer, name, value, expected) in [
            ("10.0.0.1", "x-forwarded-for", "198.51.100.1", Some("198.51.100.1")),
            ("10.0.0.1", "x-forwarded-for", "unknown, 198.51.100.1", Some("198.51.100.1")),
            ("10.0.0.1", "x-forwarded-for", "10.0.0.9", Some("10.0.0.9")),
            ("10.0.0.1", "accept", "*/*", Some("10.0.0.1")),
            ("192.0.2.9", "accept", "*/*", Some("192.0.2.9")),
            ("10.0.0.1", "x-forwarded-for", "", None),
            ("10.0.0.1", "x-forwarded-for", "unknown", None),
            ("10.0.0.1", "x-forwarded-for", "198.51.100.1, _hidden", None),
            ("10.0.0.1", "x-forwarded-for", "unknown, 10.0.0.2", None),
            ("10.0.0.1", "via", "1.1 proxy", None),
            ("192.0.2.9", "x-forwarded-for", "192.0.2.9", None),
        ] {
            assert_eq!(sender_of(&config, peer, name, value).as_deref(), expected, "{peer} {name}: {value}");
        }
        let no_header = ClientAddress { header: None, ..config };
        assert_eq!(sender_of(&no_header, "10.0.0.1", "x-forwarded-for", "198.51.100.1"), None);
    }

    #[test]
    fn of_many_hops_the_rightmost_32_are_read() {
        let leak = |hops: Vec<&str>| -> &'static str { Box::leak(hops.join(",").into_boxed_str()) };
        let mut hops = vec!["6.6.6.6"; 1_000];
        hops.push("198.51.100.1");
        assert_eq!(forwarded_for("10.0.0.1", &[leak(hops)]), "198.51.100.1");
        let mut hops = vec!["6.6.6.6"];
        hops.extend(["10.0.0.2"; 31]);
        assert_eq!(forwarded_for("10.0.0.1", &[leak(hops.clone())]), "6.6.6.6", "the 32nd from the right");
        hops.push("10.0.0.2");
        assert_eq!(forwarded_for("10.0.0.1", &[leak(hops)]), "10.0.0.2", "the 33rd is not read");
    }

    #[test]
    fn what_a_client_writes_on_the_left_does_not_hide_what_the_proxy_has_added() {
        assert_eq!(forwarded_for("10.0.0.1", &["\", 198.51.100.1"]), "198.51.100.1");
        let read = |lines: &[&'static str]| found(AddressHeader::Forwarded, "forwarded", "10.0.0.1", lines);
        assert_eq!(read(&["for=\"_, for=198.51.100.1"]), "198.51.100.1");
        assert_eq!(read(&["for=\"_", "for=198.51.100.1"]), "198.51.100.1");
        let bytes = [&b"\xff\xfe"[..], b"198.51.100.1"].map(|line| {
            let value = HeaderValue::from_bytes(line).expect("a header");
            (HeaderName::from_static("x-forwarded-for"), value)
        });
        let peer = "10.0.0.1".parse().expect("an address");
        let client = client(&config(AddressHeader::XForwardedFor), peer, &HeaderMap::from_iter(bytes));
        assert_eq!(client.to_string(), "198.51.100.1");
    }
}
