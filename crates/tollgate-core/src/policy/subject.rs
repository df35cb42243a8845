//! Makes the subject of a check, which is the key of its state, from the descriptors of a request.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write;
use core::net::{IpAddr, Ipv6Addr};

use sha2::{Digest, Sha256};

use super::matching::{Network, Source};
use super::request::{Descriptors, non_empty};

/// A part of a key that a limit counts by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeyPart {
    /// The client's address.
    Ip,
    /// The user.
    User,
    /// The verified API key.
    ApiKey,
    /// The address of a request whose API key is not verified.
    UnverifiedApiKeyAddress,
    /// The host of the request.
    Host,
    /// A parameter of the path.
    Path(Box<str>),
    /// A header, a parameter of the query, an attribute.
    Value(Source, Box<str>),
    /// A header whose value is a secret, such as `authorization`: a digest stands for the value.
    SecretHeader(Box<str>),
    /// All requests together.
    Global,
}

/// Keys to choose from. The first key of which the request has every part is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeySpec(pub Vec<Vec<KeyPart>>);

/// Bytes of a subject in a key; a longer one is replaced by its hash.
const SUBJECT_BYTES_MAX: usize = 200;

impl KeyPart {
    /// Its name in the codes of refusals.
    pub(super) const fn code(&self) -> &'static str {
        match self {
            Self::Ip | Self::UnverifiedApiKeyAddress => "IP",
            Self::User => "USER",
            Self::ApiKey => "APIKEY",
            Self::Host => "HOST",
            Self::Path(_) => "PATH",
            Self::Value(Source::Header, _) | Self::SecretHeader(_) => "HEADER",
            Self::Value(Source::Query, _) => "QUERY",
            Self::Value(Source::Attribute, _) => "ATTRIBUTE",
            Self::Global => "GLOBAL",
        }
    }

    fn is_in(&self, request: &Descriptors<'_>, parameters: &[(&str, &str)]) -> bool {
        match self {
            Self::Ip => request.ip.is_some(),
            Self::UnverifiedApiKeyAddress => request.has_unverified_api_key && request.ip.is_some(),
            Self::Global => true,
            Self::User
            | Self::ApiKey
            | Self::Host
            | Self::Path(_)
            | Self::Value(..)
            | Self::SecretHeader(_) => self.text(request, parameters).is_some(),
        }
    }

    /// Its text, if it has one.
    fn text<'a>(&self, request: &'a Descriptors<'_>, parameters: &'a [(&str, &'a str)]) -> Option<&'a str> {
        match self {
            Self::Ip | Self::UnverifiedApiKeyAddress | Self::Global => None,
            Self::User => non_empty(request.user),
            Self::ApiKey => non_empty(request.api_key),
            Self::Host => non_empty(Some(request.host)),
            Self::Path(name) => {
                parameters.iter().find(|(known, _)| *known == &**name).map(|(_, value)| *value)
            }
            Self::Value(source, name) => source.value(request, name),
            Self::SecretHeader(name) => Source::Header.value(request, name),
        }
    }

    fn write(
        &self,
        subject: &mut String,
        request: &Descriptors<'_>,
        parameters: &[(&str, &str)],
        ipv6_prefix: u8,
    ) {
        // Writing to a string does not fail.
        let _ = match self {
            Self::Ip | Self::UnverifiedApiKeyAddress => write_ip(subject, request.ip, ipv6_prefix),
            Self::User => write!(subject, "user:"),
            Self::ApiKey => write!(subject, "api_key:"),
            Self::Host => write!(subject, "host:"),
            Self::Path(name) => write!(subject, "path.{name}:"),
            Self::Value(Source::Header, name) => write!(subject, "header.{name}:"),
            Self::SecretHeader(name) => write!(subject, "header.{name}:"),
            Self::Value(Source::Query, name) => write!(subject, "query.{name}:"),
            Self::Value(Source::Attribute, name) => write!(subject, "attribute.{name}:"),
            Self::Global => write!(subject, "global"),
        };
        match (self, self.text(request, parameters)) {
            (Self::SecretHeader(_), Some(secret)) => write_digest(subject, secret),
            (_, Some(text)) => write_escaped(subject, text),
            (_, None) => {}
        }
    }

    /// The name of the header, if its value is a secret.
    pub fn secret_header(&self) -> Option<&str> {
        if let Self::SecretHeader(name) = self { Some(name) } else { None }
    }
}

impl KeySpec {
    /// Adds a last key for requests whose API key is not verified: their address in place of the API key.
    ///
    /// A client can invent such keys. If each had a limit of its own, none of them would limit the client.
    pub fn with_unverified_api_keys(mut self) -> Self {
        let by_address: Vec<_> = self.0.iter().filter_map(|parts| by_address(parts)).collect();
        self.0.extend(by_address);
        self
    }

    /// Whether a key is one for requests whose API key is not verified.
    pub(super) fn is_of_unverified_api_key(&self, number: usize) -> bool {
        self.0.get(number).is_some_and(|parts| parts.contains(&KeyPart::UnverifiedApiKeyAddress))
    }

    /// The first key that the request has, by number.
    pub(super) fn choose(&self, request: &Descriptors<'_>, parameters: &[(&str, &str)]) -> Option<usize> {
        self.0.iter().position(|parts| parts.iter().all(|part| part.is_in(request, parameters)))
    }

    /// The subject of one of the keys. Different keys have different subjects.
    pub(super) fn subject(
        &self,
        number: usize,
        request: &Descriptors<'_>,
        parameters: &[(&str, &str)],
        ipv6_prefix: u8,
    ) -> String {
        let mut subject = String::with_capacity(32);
        subject.push('{');
        for (position, part) in self.0.get(number).into_iter().flatten().enumerate() {
            if position > 0 {
                subject.push('+');
            }
            part.write(&mut subject, request, parameters, ipv6_prefix);
        }
        ended(subject)
    }
}

/// The subject of attributes, in their order. No two different lists of them have the same.
pub fn subject_of_attributes<'a>(attributes: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut subject = String::with_capacity(64);
    subject.push('{');
    for (position, (name, value)) in attributes.enumerate() {
        if position > 0 {
            subject.push('+');
        }
        subject.push_str("attribute.");
        for (number, part) in name.split(':').enumerate() {
            if number > 0 {
                subject.push_str("%3A");
            }
            write_escaped(&mut subject, part);
        }
        subject.push(':');
        write_escaped(&mut subject, value);
    }
    ended(subject)
}

/// The subject with its closing brace; a digest in place of a long one.
fn ended(mut subject: String) -> String {
    if subject.len() > SUBJECT_BYTES_MAX {
        let whole = core::mem::replace(&mut subject, String::from("{"));
        write_digest(&mut subject, &whole);
    }
    subject.push('}');
    subject
}

/// The parts of a key by API key with the address in place of the API key.
fn by_address(parts: &[KeyPart]) -> Option<Vec<KeyPart>> {
    if !parts.contains(&KeyPart::ApiKey) {
        return None;
    }
    // The address is part of the key once, however often it is named.
    let others = parts.iter().filter(|part| !matches!(part, KeyPart::ApiKey | KeyPart::Ip)).cloned();
    Some(core::iter::once(KeyPart::UnverifiedApiKeyAddress).chain(others).collect())
}

/// As the plain API names addresses: `ip:192.0.2.1`, `ip:2001:db8::/64`.
fn write_ip(subject: &mut String, ip: Option<IpAddr>, ipv6_prefix: u8) -> core::fmt::Result {
    match ip {
        Some(IpAddr::V4(ip)) => write!(subject, "ip:{ip}"),
        Some(ip @ IpAddr::V6(_)) => {
            let network = Ipv6Addr::from_bits(Network::around(ip, ipv6_prefix.min(128)).bits);
            write!(subject, "ip:{network}/{ipv6_prefix}")
        }
        None => Ok(()),
    }
}

/// Writes 128 bits of the SHA-256 of a text. Collisions cannot be found, and nodes need no shared secret.
fn write_digest(subject: &mut String, text: &str) {
    subject.push_str("sha256:");
    for byte in &Sha256::digest(text.as_bytes())[..16] {
        let _ = write!(subject, "{byte:02x}");
    }
}

/// Escapes characters as `%XX` that would end the hash tag, join two parts or forge a line.
fn write_escaped(subject: &mut String, text: &str) {
    for c in text.chars() {
        if c.is_control() || matches!(c, '{' | '}' | '+' | '%' | ' ') {
            let _ = c.encode_utf8(&mut [0; 4]).bytes().try_for_each(|byte| write!(subject, "%{byte:02X}"));
        } else {
            subject.push(c);
        }
    }
}

/// A number below `parts` that is the same for a subject on all nodes, at all times.
pub(super) fn part_of(rule: &str, subject: &str, parts: u64) -> u64 {
    let digest =
        Sha256::new().chain_update(rule.as_bytes()).chain_update([0]).chain_update(subject).finalize();
    let mut number = [0; 8];
    number.copy_from_slice(&digest[..8]);
    u64::from_be_bytes(number) % parts
}
