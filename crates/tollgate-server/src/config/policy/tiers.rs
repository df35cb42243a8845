//! Families of tiers, as they are written.

use std::collections::BTreeMap;

use tollgate::rules::{Family, KeyPart};

use super::file::FamilyOf;
use super::text::{LimitItem, Many};
use super::{Building, limit};
use crate::config::mistakes::listed;

/// The family of the tiers that are written without one.
const USERS: &str = "users";
/// Families of tiers. People have few; this many keep every look-up short.
const FAMILIES_MAX: usize = 100;
/// Tiers of one family, of which every rule that goes by them makes limits.
const TIERS_MAX: usize = 100;

impl<'a> Building<'a> {
    pub(super) fn families(&mut self) {
        let file = self.file;
        if !file.tiers.is_empty() {
            if file.families.contains_key(USERS) {
                self.wrong("tiers", "are those of `families.users` too; write them in one place");
            }
            let at = ["tiers", "default_tier", "members"];
            self.family(USERS, at, &file.tiers, file.default_tier.as_deref(), FamilyOf::User, &file.members);
        } else if file.default_tier.is_some() || !file.members.is_empty() {
            self.wrong(
                if file.default_tier.is_some() { "default_tier" } else { "members" },
                "there are no `tiers`",
            );
        }
        if file.families.len() > FAMILIES_MAX {
            self.wrong("families", format!("at most {FAMILIES_MAX} families"));
            return;
        }
        for (name, family) in &file.families {
            self.check_name(&format!("families.{name}"), "a family", name);
            let at = ["tiers", "default", "members"].map(|part| format!("families.{name}.{part}"));
            let at = at.each_ref().map(String::as_str);
            self.family(name, at, &family.tiers, family.default.as_deref(), family.of, &family.members);
        }
    }

    fn family(
        &mut self,
        name: &str,
        [at, at_default, at_members]: [&str; 3],
        tiers: &'a BTreeMap<String, Many<LimitItem>>,
        default: Option<&str>,
        of: FamilyOf,
        members: &BTreeMap<String, String>,
    ) {
        if tiers.is_empty() {
            self.wrong(at, "a family needs at least one tier");
        }
        if tiers.len() > TIERS_MAX {
            self.wrong(at, format!("at most {TIERS_MAX} tiers"));
            return;
        }
        for tier in tiers.keys() {
            let field = format!("{at}.{tier}");
            self.check_name(&field, "a tier", tier);
        }
        let names: Vec<&String> = tiers.keys().collect();
        let number = |tier: &str| names.iter().position(|known| *known == tier);
        let known = || listed(names.iter().map(|name| name.as_str()));
        let default = match default {
            Some(tier) => number(tier).unwrap_or_else(|| {
                (self.report)(at_default, format!("no such tier: {tier}; there are {}", known()));
                0
            }),
            None => {
                // An unknown caller must not get the largest tier.
                let smallest = tiers.values().enumerate().min_by_key(|(_, limits)| limit::speed(limits));
                let smallest = smallest.map_or(0, |(number, _)| number);
                if let Some(tier) = names.get(smallest).filter(|_| names.len() > 1) {
                    self.remarks.push(format!(
                        "{name}: who has no tier, or an unknown one, has the smallest: {tier} ({at_default} would settle it)"
                    ));
                }
                smallest
            }
        };
        let mut listed = BTreeMap::new();
        for (member, tier) in members {
            match number(tier) {
                Some(tier) => {
                    let id = match of {
                        FamilyOf::User => Some(member.clone()),
                        FamilyOf::ApiKey => self.context.identity.api_key_member_id(member),
                    };
                    match id {
                        Some(id) => drop(listed.insert(id.into(), tier)),
                        None => self.wrong(&format!("{at_members}.{member}"), "can never be an API key"),
                    }
                }
                None => {
                    let why = format!("no such tier: {tier}; there are {}", known());
                    self.wrong(&format!("{at_members}.{member}"), why);
                }
            }
        }
        self.tiers.push(tiers.iter().map(|(tier, limits)| (format!("{at}.{tier}"), limits)).collect());
        self.parts.families.push(Family {
            name: name.into(),
            tiers: names.iter().map(|name| name.as_str().into()).collect(),
            default,
            member: match of {
                FamilyOf::User => KeyPart::User,
                FamilyOf::ApiKey => KeyPart::ApiKey,
            },
            members: listed,
        });
    }
}
