//! Example requests, to find requests with too many limits.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr};

use super::matching::{Match, Source};
use super::request::{Descriptors, Fields};
use super::{Limits, Policy, Refusal, RuleLimits};

/// Examples times rules that are tried: some ten milliseconds.
const PAIRS_MAX: usize = 1_000_000;
/// Crowds that are reported. They mostly have the same cause.
const CROWDS_MAX: usize = 3;

/// A request that more than [`super::CHECKS_MAX`] limits apply to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Crowd {
    /// The path of the example.
    pub path: String,
    /// Whether it is refused, because the enforced limits alone are too many.
    pub is_refused: bool,
    /// Checks in shadow and of candidates that are left out.
    pub uncounted: usize,
}

impl Policy {
    /// Finds requests with more limits than are checked together, by an example for each rule.
    pub fn crowds(&self) -> Vec<Crowd> {
        let rules = &self.parts.rules;
        let most = (PAIRS_MAX / rules.len().max(1)).max(1);
        let mut crowds: Vec<Crowd> = Vec::new();
        for rule in rules.iter().take(most) {
            let example = Example::of(&rule.matching, self);
            let selection = self.select(&example.descriptors(), 1);
            let is_refused = selection.refusal == Some(Refusal::TooManyChecks);
            if !is_refused && selection.uncounted == 0 {
                continue;
            }
            let crowd = Crowd { path: example.path, is_refused, uncounted: selection.uncounted };
            if !crowds.contains(&crowd) {
                crowds.push(crowd);
            }
            if crowds.len() == CROWDS_MAX {
                break;
            }
        }
        crowds
    }

    /// The tier of a family that has the most limits.
    fn largest_tier(&self, family: usize) -> usize {
        let of_family = |limits: &RuleLimits| match limits {
            RuleLimits::OfTier { family: known, tiers, .. } if *known == family => {
                tiers.iter().map(count).collect()
            }
            RuleLimits::OfTier { .. } | RuleLimits::Own(_) => Vec::new(),
        };
        let counts = self.parts.rules.iter().flat_map(|rule| of_family(&rule.limits).into_iter().enumerate());
        counts.max_by_key(|(_, count)| *count).map_or(0, |(tier, _)| tier)
    }
}

fn count(limits: &Limits) -> usize {
    match limits {
        Limits::Unlimited => 0,
        Limits::All(limits) => limits.len(),
    }
}

/// A request that meets the conditions of a rule, and has every key.
struct Example {
    path: String,
    method: String,
    host: String,
    ip: IpAddr,
    tiers: Values,
    headers: Values,
    query: Values,
    attributes: Values,
}

/// Values by name, and `x` for every other name.
struct Values(Vec<(Box<str>, String)>);

impl Fields for Values {
    fn get(&self, name: &str) -> Option<&str> {
        let given = self.0.iter().find(|(known, _)| **known == *name);
        Some(given.map_or("x", |(_, value)| value))
    }

    /// An example meets every condition on names.
    fn are_named(&self, _: &[Box<str>]) -> bool {
        true
    }
}

impl Example {
    fn of(matching: &Match, policy: &Policy) -> Self {
        let values = |source: Source| {
            let named = matching.values.iter().filter(|it| it.source == source);
            let given = named.filter_map(|it| Some((it.name.clone(), it.any_of.first()?.example())));
            Values(given.collect())
        };
        let families = policy.parts.families.iter().enumerate();
        let tiers = families.map(|(number, family)| {
            let wanted = matching.tiers.iter().find(|(known, _)| *known == number);
            let tier = wanted.map_or_else(|| policy.largest_tier(number), |(_, tier)| *tier);
            (
                family.name.clone(),
                family.tiers.get(tier).map(|name| String::from(&**name)).unwrap_or_default(),
            )
        });
        Self {
            path: matching.paths.first().map_or_else(|| "/".into(), |path| path.example()),
            method: matching.methods.first().map_or_else(|| "GET".into(), |method| String::from(&**method)),
            host: matching.hosts.first().map_or_else(|| "x".into(), |host| host.example()),
            ip: matching.networks.first().map_or(Ipv4Addr::LOCALHOST.into(), |network| network.first()),
            tiers: Values(tiers.collect()),
            headers: values(Source::Header),
            query: values(Source::Query),
            attributes: values(Source::Attribute),
        }
    }

    fn descriptors(&self) -> Descriptors<'_> {
        Descriptors {
            ip: Some(self.ip),
            user: Some("x"),
            api_key: Some("x"),
            assigned_tiers: &self.tiers,
            method: &self.method,
            host: &self.host,
            path: &self.path,
            headers: &self.headers,
            query: &self.query,
            attributes: &self.attributes,
            ..Descriptors::default()
        }
    }
}
