//! Tiers: limits that depend on the user or the API key.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::request::{Descriptors, non_empty};
use super::subject::KeyPart;

/// A family of tiers: of users, or of API keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Family {
    /// Its name, such as `users`.
    pub name: Box<str>,
    /// The names of its tiers.
    pub tiers: Vec<Box<str>>,
    /// The tier of members without another tier, by number.
    pub default: usize,
    /// The members of the family: users or API keys.
    pub member: KeyPart,
    /// The tiers of listed members, by number.
    pub members: BTreeMap<Box<str>, usize>,
}

impl Family {
    /// The tier of a request: the assigned one, the claimed one, the listed one, or the default.
    pub(super) fn tier_of(&self, request: &Descriptors<'_>) -> usize {
        let known = |name: Option<&str>| non_empty(name).and_then(|name| self.number(name));
        let named = known(request.assigned_tiers.get(&self.name)).or_else(|| known(request.tier));
        let member = if self.member == KeyPart::User { request.user } else { request.api_key };
        named.or_else(|| self.members.get(non_empty(member)?).copied()).unwrap_or(self.default)
    }

    /// A tier by its name.
    pub fn number(&self, name: &str) -> Option<usize> {
        self.tiers.iter().position(|known| **known == *name)
    }
}

/// Whether the request names a tier that no family has.
pub(super) fn is_unknown(families: &[Family], request: &Descriptors<'_>) -> bool {
    let claimed =
        non_empty(request.tier).is_some_and(|name| families.iter().all(|it| it.number(name).is_none()));
    let assigned = |it: &Family| {
        non_empty(request.assigned_tiers.get(&it.name)).is_some_and(|name| it.number(name).is_none())
    };
    !families.is_empty() && claimed || families.iter().any(assigned)
}
