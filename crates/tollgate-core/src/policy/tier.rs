//! Tiers: limits that depend on who the caller is.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::request::{Descriptors, said};
use super::subject::KeyPart;

/// A family of tiers: of users, or of API keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Family {
    /// `users`.
    pub name: Box<str>,
    /// The names of its tiers.
    pub tiers: Vec<Box<str>>,
    /// The tier of everybody of whom nothing else is known, by number.
    pub default: usize,
    /// Whose tiers they are: a user's or an API key's.
    pub member: KeyPart,
    /// The tiers of those who are listed, by number.
    pub members: BTreeMap<Box<str>, usize>,
}

impl Family {
    /// The tier that a request has: one that was assigned, one that it claims, one that is listed, or the default.
    pub(super) fn tier_of(&self, request: &Descriptors<'_>) -> usize {
        let known = |name: Option<&str>| said(name).and_then(|name| self.number(name));
        let named = known(request.assigned_tiers.get(&self.name)).or_else(|| known(request.tier));
        let member = match self.member {
            KeyPart::User => said(request.user),
            KeyPart::ApiKey => said(request.api_key),
            KeyPart::Ip
            | KeyPart::UnverifiedApiKeyAddress
            | KeyPart::Host
            | KeyPart::Path(_)
            | KeyPart::Value(..)
            | KeyPart::SecretHeader(_)
            | KeyPart::Global => None,
        };
        named.or_else(|| self.members.get(member?).copied()).unwrap_or(self.default)
    }

    /// A tier by its name.
    pub fn number(&self, name: &str) -> Option<usize> {
        self.tiers.iter().position(|known| **known == *name)
    }
}

/// Whether the request names a tier that no family has.
pub(super) fn is_unknown(families: &[Family], request: &Descriptors<'_>) -> bool {
    let claimed = said(request.tier).is_some_and(|name| families.iter().all(|it| it.number(name).is_none()));
    let assigned = |it: &Family| {
        said(request.assigned_tiers.get(&it.name)).is_some_and(|name| it.number(name).is_none())
    };
    !families.is_empty() && claimed || families.iter().any(assigned)
}
