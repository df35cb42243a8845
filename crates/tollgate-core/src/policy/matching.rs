//! Which requests a rule is for.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr};

use super::pattern::{Glob, Parameters, PathPattern};
use super::request::{Descriptors, IdentityKind, said};

/// Where a named value stands.
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
        said(fields.get(name))
    }
}

/// A network: an address and how many of its first bits count.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Network {
    /// Whether it is one of IPv4.
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

    /// The network of this prefix that an address is in.
    pub(super) fn around(ip: IpAddr, prefix: u8) -> Self {
        let kept = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
        Self { is_v4: ip.is_ipv4(), prefix, bits: aligned(ip) & kept }
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
    /// Where it stands.
    pub source: Source,
    /// Its name; of a header in lower case.
    pub name: Box<str>,
    /// Any of these; none: any value at all.
    pub any_of: Vec<Glob>,
    /// But none of these.
    pub none_of: Vec<Glob>,
}

/// Which requests a rule is for: all conditions must hold, and of each list one entry. Empty lists ask for nothing.
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
}

impl Match {
    /// Whether it is for every request.
    pub fn is_everything(&self) -> bool {
        *self == Self::default()
    }

    /// What the path's parameters are, if the request matches. `tier_of` finds the tier of a family.
    pub(super) fn parameters<'p, 't>(
        &'p self,
        request: &Descriptors<'_>,
        path: &[&'t str],
        tier_of: impl FnMut(usize) -> Option<usize>,
    ) -> Option<Parameters<'p, 't>> {
        if !self.holds_beyond_path(request, tier_of) {
            return None;
        }
        if self.paths.is_empty() {
            return Some(Parameters::new());
        }
        self.paths.iter().find_map(|pattern| pattern.parameters(path))
    }

    fn holds_beyond_path(
        &self,
        request: &Descriptors<'_>,
        mut tier_of: impl FnMut(usize) -> Option<usize>,
    ) -> bool {
        let method = || self.methods.iter().any(|it| it.eq_ignore_ascii_case(request.method));
        let host = || self.hosts.iter().any(|it| it.matches(request.host));
        let network = || request.ip.is_some_and(|ip| self.networks.iter().any(|it| it.contains(ip)));
        let identity = || self.identities.iter().any(|it| request.is_identified_by(*it));
        (self.methods.is_empty() || method())
            && (self.hosts.is_empty() || host())
            && (self.networks.is_empty() || network())
            && (self.identities.is_empty() || identity())
            && self.values.iter().all(|it| it.holds(request))
            && (self.tiers.is_empty()
                || self.tiers.iter().any(|(family, tier)| tier_of(*family) == Some(*tier)))
    }
}

impl ValueCondition {
    fn holds(&self, request: &Descriptors<'_>) -> bool {
        let Some(value) = self.source.value(request, &self.name) else { return false };
        let is_one_of = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(value));
        (self.any_of.is_empty() || is_one_of(&self.any_of)) && !is_one_of(&self.none_of)
    }
}
