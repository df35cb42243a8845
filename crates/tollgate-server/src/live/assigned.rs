//! The tiers that were assigned to members of families, as this node knows them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;
use tollgate::AssignedTier;
use tollgate::rules::{Descriptors, Family, KeyPart};

/// Tiers by member.
type Members = HashMap<Box<str>, Arc<str>>;

/// Tiers by family, then by member.
#[derive(Default)]
pub(crate) struct AssignedTiers {
    families: RwLock<HashMap<Box<str>, Members>>,
    /// How many are assigned, to be read without the lock.
    count: AtomicUsize,
}

impl AssignedTiers {
    /// How many tiers are assigned.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Takes over tiers; an empty one is taken away. With `all`, these are all that there are.
    pub(crate) fn change(&self, tiers: &[AssignedTier], all: bool) {
        let mut families = self.families.write();
        if all {
            families.clear();
        }
        for AssignedTier { family, member, tier } in tiers {
            let members = families.entry(family.as_str().into()).or_default();
            match tier.is_empty() {
                true => members.remove(member.as_str()),
                false => members.insert(member.as_str().into(), tier.as_str().into()),
            };
        }
        families.retain(|_, members| !members.is_empty());
        self.count.store(families.values().map(HashMap::len).sum(), Ordering::Relaxed);
    }

    /// The tier of a member of a family.
    pub(crate) fn get(&self, family: &str, member: &str) -> Option<Arc<str>> {
        self.families.read().get(family)?.get(member).cloned()
    }

    /// The tiers of the caller of a request, by family.
    pub(crate) fn of_request(
        &self,
        families: &[Family],
        request: &Descriptors<'_>,
    ) -> Vec<(Box<str>, Arc<str>)> {
        let mut found = Vec::new();
        if self.count() == 0 {
            return found;
        }
        let assigned = self.families.read();
        for family in families {
            let member = match family.member {
                KeyPart::ApiKey => request.api_key,
                _ => request.user,
            };
            let tier = member.and_then(|member| assigned.get(&family.name)?.get(member));
            found.extend(tier.map(|tier| (family.name.clone(), Arc::clone(tier))));
        }
        found
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<AssignedTier> {
        let families = self.families.read();
        let members =
            families.iter().flat_map(|(family, members)| members.iter().map(move |it| (family, it)));
        members
            .map(|(family, (member, tier))| AssignedTier {
                family: family.to_string(),
                member: member.to_string(),
                tier: tier.to_string(),
            })
            .collect()
    }
}
