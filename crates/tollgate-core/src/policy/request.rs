//! The descriptors of a request.

use alloc::boxed::Box;
use core::net::IpAddr;

/// Values by name: headers, query parameters, free attributes.
pub trait Fields: Sync {
    /// The value of a name. Names of headers are in lower case.
    fn get(&self, name: &str) -> Option<&str>;

    /// Whether these are all the names, in this order.
    fn are_named(&self, names: &[Box<str>]) -> bool;
}

impl Fields for () {
    fn get(&self, _: &str) -> Option<&str> {
        None
    }

    fn are_named(&self, names: &[Box<str>]) -> bool {
        names.is_empty()
    }
}

impl<N: AsRef<str> + Sync, V: AsRef<str> + Sync, const MANY: usize> Fields for [(N, V); MANY] {
    fn get(&self, name: &str) -> Option<&str> {
        find(self, name)
    }

    fn are_named(&self, names: &[Box<str>]) -> bool {
        have_names(self, names)
    }
}

impl<N: AsRef<str> + Sync, V: AsRef<str> + Sync> Fields for alloc::vec::Vec<(N, V)> {
    fn get(&self, name: &str) -> Option<&str> {
        find(self, name)
    }

    fn are_named(&self, names: &[Box<str>]) -> bool {
        have_names(self, names)
    }
}

fn have_names<N: AsRef<str>, V>(fields: &[(N, V)], names: &[Box<str>]) -> bool {
    fields.iter().map(|(name, _)| name.as_ref()).eq(names.iter().map(|name| &**name))
}

fn find<'a, N: AsRef<str>, V: AsRef<str>>(fields: &'a [(N, V)], name: &str) -> Option<&'a str> {
    fields.iter().find(|(known, _)| known.as_ref() == name).map(|(_, value)| value.as_ref())
}

/// The descriptors of a request. Empty texts count as absent, except for the path.
#[derive(Clone, Copy)]
pub struct Descriptors<'a> {
    /// The client's address, IPv4 as IPv4.
    pub ip: Option<IpAddr>,
    /// The user, verified.
    pub user: Option<&'a str>,
    /// The identifier of the verified API key: never the key itself.
    pub api_key: Option<&'a str>,
    /// Whether the request has an API key that is not verified.
    pub has_unverified_api_key: bool,
    /// The tier that the request claims, in any family that has a tier of that name.
    pub tier: Option<&'a str>,
    /// Assigned tiers, by family. They take precedence over the claimed tier.
    pub assigned_tiers: &'a dyn Fields,
    /// `GET`.
    pub method: &'a str,
    /// Without its port.
    pub host: &'a str,
    /// As it came.
    pub path: &'a str,
    /// By name in lower case.
    pub headers: &'a dyn Fields,
    /// Parameters of the query.
    pub query: &'a dyn Fields,
    /// Free attributes that the caller adds.
    pub attributes: &'a dyn Fields,
}

impl Default for Descriptors<'_> {
    fn default() -> Self {
        Self {
            ip: None,
            user: None,
            api_key: None,
            has_unverified_api_key: false,
            tier: None,
            assigned_tiers: &(),
            method: "",
            host: "",
            path: "/",
            headers: &(),
            query: &(),
            attributes: &(),
        }
    }
}

/// How a request is identified. A token or an API key that is not verified identifies nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IdentityKind {
    /// By a verified user.
    User,
    /// By a verified API key.
    ApiKey,
    /// Neither by a user nor by an API key.
    Anonymous,
}

impl IdentityKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::User, Self::ApiKey, Self::Anonymous];

    /// The name of the kind in policies and answers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::ApiKey => "api_key",
            Self::Anonymous => "anonymous",
        }
    }
}

impl Descriptors<'_> {
    /// Whether the request is identified in this way. A request with a user and an API key is identified in both ways.
    pub fn is_identified_by(&self, kind: IdentityKind) -> bool {
        let (has_user, has_api_key) = (non_empty(self.user).is_some(), non_empty(self.api_key).is_some());
        match kind {
            IdentityKind::User => has_user,
            IdentityKind::ApiKey => has_api_key,
            IdentityKind::Anonymous => !has_user && !has_api_key,
        }
    }
}

/// A text that is not empty.
pub(super) fn non_empty(text: Option<&str>) -> Option<&str> {
    text.filter(|text| !text.is_empty())
}
