//! The conditions of a rule.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::path::Segments;
use super::pattern::{Glob, Parameters, PathPattern};
use super::request::{Descriptors, IdentityKind, non_empty};

/// The place of a named value in a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Source {
    /// A header.
    Header,
    /// A parameter of the query.
    Query,
    /// An attribute.
    Attribute,
}

impl Source {
    pub(super) fn value<'a>(self, request: &Descriptors<'a>, name: &str) -> Option<&'a str> {
        let fields = match self {
            Self::Header => request.headers,
            Self::Query => request.query,
            Self::Attribute => request.attributes,
        };
        non_empty(fields.get(name))
    }
}

/// A network: an address and how many of its first bits count.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Network {
    /// Whether it is an IPv4 network.
    pub(super) is_v4: bool,
    pub(super) prefix: u8,
    /// The bits that count, at the top; the others are zero.
    pub(super) bits: u128,
}

impl Network {
    /// A network; none if the prefix is longer than the address.
    pub fn new(ip: IpAddr, prefix: u8) -> Option<Self> {
        let longest = if ip.is_ipv4() { 32 } else { 128 };
        (prefix <= longest).then(|| Self::around(ip, prefix))
    }

    /// The network with this prefix around an address.
    pub(super) fn around(ip: IpAddr, prefix: u8) -> Self {
        let kept = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
        Self { is_v4: ip.is_ipv4(), prefix, bits: aligned(ip) & kept }
    }

    /// The first address of the network.
    pub(super) fn first(&self) -> IpAddr {
        match self.is_v4 {
            true => Ipv4Addr::from_bits((self.bits >> 96) as u32).into(),
            false => Ipv6Addr::from_bits(self.bits).into(),
        }
    }

    /// Whether an address is in it.
    pub fn contains(&self, ip: IpAddr) -> bool {
        ip.is_ipv4() == self.is_v4 && Self::around(ip, self.prefix).bits == self.bits
    }
}

/// The bits of an address, the first one at the top.
fn aligned(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()) << 96,
        IpAddr::V6(ip) => Ipv6Addr::to_bits(ip),
    }
}

/// A condition on a named value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ValueCondition {
    /// The place of the value.
    pub source: Source,
    /// Its name; of a header in lower case.
    pub name: Box<str>,
    /// The value matches one of these. Empty: any value.
    pub any_of: Vec<Glob>,
    /// The value matches none of these. Without `any_of`, a request without the value meets the condition too.
    pub none_of: Vec<Glob>,
}

/// The conditions of a rule: all must hold, and of each list one entry. Empty lists are no condition.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Match {
    /// Paths.
    pub paths: Vec<PathPattern>,
    /// Methods, in upper case.
    pub methods: Vec<Box<str>>,
    /// Hosts, in lower case.
    pub hosts: Vec<Glob>,
    /// Networks of the client.
    pub networks: Vec<Network>,
    /// Tiers, by family and number.
    pub tiers: Vec<(usize, usize)>,
    /// Ways in which the request is identified.
    pub identities: Vec<IdentityKind>,
    /// Headers, query parameters, attributes.
    pub values: Vec<ValueCondition>,
    /// The names of all attributes, in their order. None: the request may have any attributes.
    pub attribute_names: Option<Vec<Box<str>>>,
}

/// How a request meets the conditions of a rule.
pub(super) struct Met<'p, 't> {
    /// The parameters of the path.
    pub(super) parameters: Parameters<'p, 't>,
    /// Whether the path matches in every reading.
    pub(super) in_every_reading: bool,
}

impl Match {
    /// Whether every request meets the conditions.
    pub fn is_everything(&self) -> bool {
        *self == Self::default()
    }

    /// Whether every request that `other` is for also meets these conditions. A false answer may be wrong, a true one never is.
    pub fn covers(&self, other: &Self) -> bool {
        let paths = || {
            !other.paths.is_empty()
                && other.paths.iter().all(|narrow| self.paths.iter().any(|wide| wide.covers(narrow)))
        };
        (self.paths.is_empty() || paths())
            && includes(&self.methods, &other.methods)
            && includes(&self.hosts, &other.hosts)
            && includes(&self.networks, &other.networks)
            && includes(&self.tiers, &other.tiers)
            && includes(&self.identities, &other.identities)
            && self.values.iter().all(|condition| other.values.contains(condition))
            && (self.attribute_names.is_none() || self.attribute_names == other.attribute_names)
    }

    /// Matches a request: some reading of its path must match. `tier_of` finds the tier of a family.
    pub(super) fn met<'p, 't>(
        &'p self,
        request: &Descriptors<'_>,
        readings: &[Segments<'t>],
        tier_of: impl FnMut(usize) -> Option<usize>,
    ) -> Option<Met<'p, 't>> {
        if self.first_unmet_beyond_path(request, tier_of).is_some() {
            return None;
        }
        if self.paths.is_empty() {
            return Some(Met { parameters: Parameters::new(), in_every_reading: true });
        }
        let mut first = None;
        let mut in_every_reading = true;
        for path in readings {
            match self.paths.iter().find_map(|pattern| pattern.parameters(path)) {
                Some(found) => first = first.or(Some(found)),
                None => in_every_reading = false,
            }
        }
        first.map(|parameters| Met { parameters, in_every_reading })
    }

    /// The first condition that the request does not meet, if there is one.
    pub(super) fn first_unmet(
        &self,
        request: &Descriptors<'_>,
        readings: &[Segments<'_>],
        tier_of: impl FnMut(usize) -> Option<usize>,
    ) -> Option<Unmet<'_>> {
        let path = || readings.iter().any(|it| self.paths.iter().any(|path| path.parameters(it).is_some()));
        if !self.paths.is_empty() && !path() {
            return Some(Unmet::Path);
        }
        self.first_unmet_beyond_path(request, tier_of)
    }

    fn first_unmet_beyond_path(
        &self,
        request: &Descriptors<'_>,
        mut tier_of: impl FnMut(usize) -> Option<usize>,
    ) -> Option<Unmet<'_>> {
        let method = || self.methods.iter().any(|it| it.eq_ignore_ascii_case(request.method));
        let host = || self.hosts.iter().any(|it| it.matches(request.host));
        let network = || request.ip.is_some_and(|ip| self.networks.iter().any(|it| it.contains(ip)));
        let identity = || self.identities.iter().any(|it| request.is_identified_by(*it));
        if !self.methods.is_empty() && !method() {
            return Some(Unmet::Method);
        }
        if !self.hosts.is_empty() && !host() {
            return Some(Unmet::Host);
        }
        if !self.networks.is_empty() && !network() {
            return Some(Unmet::Network);
        }
        if !self.identities.is_empty() && !identity() {
            return Some(Unmet::Identity);
        }
        if let Some(value) = self.values.iter().find(|it| !it.holds(request)) {
            return Some(Unmet::Value(value.source, &value.name));
        }
        if let Some(names) = self.attribute_names.as_ref().filter(|it| !request.attributes.are_named(it)) {
            return Some(Unmet::Value(Source::Attribute, names.last().map_or("", |name| name)));
        }
        let tier =
            self.tiers.is_empty() || self.tiers.iter().any(|(family, tier)| tier_of(*family) == Some(*tier));
        (!tier).then_some(Unmet::Tier)
    }
}

/// Whether a list of accepted entries accepts all that another list does. An empty list accepts everything.
fn includes<T: PartialEq>(wide: &[T], narrow: &[T]) -> bool {
    wide.is_empty() || !narrow.is_empty() && narrow.iter().all(|it| wide.contains(it))
}

/// A condition of a rule that a request does not meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmet<'r> {
    /// No path of the rule matches.
    Path,
    /// The method is another one.
    Method,
    /// The host is another one.
    Host,
    /// The address is not in a network of the rule, or there is none.
    Network,
    /// The request is not identified in that way.
    Identity,
    /// A named value is missing or another one.
    Value(Source, &'r str),
    /// The tier is another one.
    Tier,
}

impl ValueCondition {
    fn holds(&self, request: &Descriptors<'_>) -> bool {
        let Some(value) = self.source.value(request, &self.name) else {
            // An absent value is not one of the excluded values.
            return self.any_of.is_empty() && !self.none_of.is_empty();
        };
        let is_one_of = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(value));
        (self.any_of.is_empty() || is_one_of(&self.any_of)) && !is_one_of(&self.none_of)
    }
}
