//! The limits of a rule: its own, those of tiers, their parts for endpoints.

use tollgate::rules::{Limits, RuleLimit, RuleLimits};
use tollgate::{Limit, LimitSettings};

use super::file::{PolicyFile, RuleFields};
use super::limit::{make_limit, part_of};
use super::text::{AlgorithmText, Factor, LimitItem, Many};
use super::{Building, Report};
use crate::config::limits::Settings;
use crate::config::log_limit;
use crate::config::mistakes::listed;

/// Limits of all rules, with their tiers and factors: some megabytes.
const LIMITS_MAX: usize = 20_000;
/// Different ones among them: while one policy takes the place of another, the memory engine tells those of both apart, of which it can
/// some 2,000.
const DISTINCT_MAX: usize = 1_000;

/// What tells the limits of a rule from each other, in their scopes.
#[derive(Clone, Copy)]
pub(super) enum Part<'a> {
    Main,
    Endpoint(&'a str),
    Candidate,
}

/// Whose limits are made, and what they have that they do not say themselves.
#[derive(Clone, Copy)]
pub(super) struct Of<'a> {
    rule: &'a str,
    part: Part<'a>,
    settings: LimitSettings,
    /// The algorithm of limits that name none.
    algorithm: Option<AlgorithmText>,
    /// A part of what is written, and where that is said.
    factor: Option<(&'a str, Factor)>,
}

impl<'a> Of<'a> {
    /// The rule's own settings win over those of the policy, and these over `defaults`.
    pub(super) fn rule(
        fields: &'a RuleFields,
        at: &str,
        file: &PolicyFile,
        defaults: Settings,
        report: Report<'_>,
    ) -> Self {
        Self {
            rule: &fields.name,
            part: Part::Main,
            settings: fields.settings().or(file.settings()).or(defaults).validate(at, report),
            algorithm: fields.algorithm.or(file.algorithm),
            factor: None,
        }
    }
}

impl Building<'_> {
    /// What a rule is made of must be one thing: limits of its own, those of a tier, or none.
    pub(super) fn rule_limits(&mut self, at: &str, fields: &RuleFields) -> RuleLimits {
        let ways = [!fields.limit.0.is_empty(), fields.tier.is_some(), fields.unlimited];
        if ways.iter().filter(|way| **way).count() != 1 {
            let set: Vec<_> = ["limit", "tier", "unlimited"]
                .into_iter()
                .zip(ways)
                .filter(|(_, way)| *way)
                .map(|it| it.0)
                .collect();
            self.wrong(
                at,
                match set.is_empty() {
                    true => {
                        "needs one of `limit: 100/min`, `tier: from_request` and `unlimited: true`".to_owned()
                    }
                    false => format!("has {}: keep one of them", set.join(" and ")),
                },
            );
            return RuleLimits::Own(Limits::Unlimited);
        }
        if fields.unlimited {
            if fields.candidate.is_some() {
                self.wrong(&format!("{at}.candidate"), "goes with a limit of the rule's own");
            }
            return RuleLimits::Own(Limits::Unlimited);
        }
        let of = Of::rule(fields, at, self.file, self.context.defaults, self.report);
        if fields.tier.is_some() {
            return self.tier_limits(at, fields, of);
        }
        let own = self.limits(of, &format!("{at}.limit"), &fields.limit);
        if let (Some(candidate), Limits::All(limits)) = (&fields.candidate, &own) {
            let many = Many(vec![candidate.clone()]);
            let field = format!("{at}.candidate");
            let made = self.limits(Of { part: Part::Candidate, ..of }, &field, &many);
            match (made, limits.first()) {
                (Limits::All(made), Some(first)) => {
                    self.parts.limits[*first].candidate = made.first().copied()
                }
                (Limits::Unlimited, _) => self.wrong(&field, "is a limit such as 50/min"),
                (Limits::All(_), None) => {}
            }
        }
        RuleLimits::Own(own)
    }

    fn tier_limits(&mut self, at: &str, fields: &RuleFields, of: Of<'_>) -> RuleLimits {
        if fields.candidate.is_some() {
            self.wrong(
                &format!("{at}.candidate"),
                "goes with limits of the rule's own; try another tier out in shadow",
            );
        }
        let names: Vec<_> = self.parts.families.iter().map(|family| family.name.clone()).collect();
        let family = match (&fields.family, names.len()) {
            (Some(name), _) => names.iter().position(|known| **known == **name),
            (None, 1) => Some(0),
            (None, _) => None,
        };
        let Some(family) = family else {
            let (field, why) = match (&fields.family, names.is_empty()) {
                (_, true) => ("tier", "there are no `tiers`".to_owned()),
                (Some(name), false) => (
                    "family",
                    format!("no such family: {name}; there are {}", listed(names.iter().map(|name| &**name))),
                ),
                (None, false) => {
                    let names = listed(names.iter().map(|name| &**name));
                    ("tier", format!("of which family? `family:` one of {names}"))
                }
            };
            self.wrong(&format!("{at}.{field}"), why);
            return RuleLimits::Own(Limits::Unlimited);
        };
        let written = self.tiers[family].clone();
        let of_tiers = |building: &mut Self, of: Of<'_>| -> Vec<Limits> {
            written.iter().map(|(field, limits)| building.limits(of, field, limits)).collect()
        };
        let tiers = of_tiers(self, of);
        self.remark_on_algorithms(&fields.name, &tiers);
        let mut factors = Vec::new();
        for (endpoint, factor) in &fields.factor {
            let field = format!("{at}.factor.{endpoint}");
            let Some(number) = self.parts.endpoints.iter().position(|known| *known.name == **endpoint) else {
                self.wrong(&field, "no such endpoint; `endpoints` names them");
                continue;
            };
            let of = Of { part: Part::Endpoint(endpoint), factor: Some((&field, factor.0)), ..of };
            factors.push((number, of_tiers(self, of)));
        }
        RuleLimits::OfTier { family, tiers, factors }
    }

    /// A change of tier carries the state over only where the algorithm stays the same.
    fn remark_on_algorithms(&mut self, rule: &str, tiers: &[Limits]) {
        let algorithms = |position: usize| {
            tiers.iter().filter_map(move |limits| match limits {
                Limits::All(limits) => limits.get(position).copied(),
                Limits::Unlimited => None,
            })
        };
        let longest =
            tiers.iter().map(|it| if let Limits::All(limits) = it { limits.len() } else { 0 }).max();
        for position in 0..longest.unwrap_or(0) {
            let mut used: Vec<_> =
                algorithms(position).map(|limit| self.parts.limits[limit].limit.home()).collect();
            used.dedup();
            if used.len() > 1 {
                self.remarks.push(format!(
                    "{rule}: its tiers differ in algorithm or calendar; a caller that changes tier starts afresh with limit {}",
                    position + 1
                ));
            }
        }
    }

    /// Makes limits of what is written at a field, and files them.
    pub(super) fn limits(&mut self, of: Of<'_>, field: &str, written: &Many<LimitItem>) -> Limits {
        let Of { rule, part, settings, algorithm, factor } = of;
        let mut made = Vec::new();
        let has_unlimited = written.0.iter().any(|item| matches!(item, LimitItem::Unlimited));
        if has_unlimited && written.0.len() > 1 {
            self.wrong(field, "`unlimited` stands alone");
        }
        if has_unlimited {
            return Limits::Unlimited;
        }
        let read_before = self.limits_read;
        self.limits_read += written.0.len();
        if self.limits_read > LIMITS_MAX {
            // Said once: every rule and tier behind it would say it again.
            if read_before <= LIMITS_MAX {
                self.wrong("rules", too_many());
            }
            return Limits::All(made);
        }
        for (position, item) in written.0.iter().enumerate() {
            let LimitItem::Limit(fields) = item else { continue };
            let place = match written.0.len() {
                1 => field.to_owned(),
                _ => format!("{field}.{position}"),
            };
            let cut = match factor {
                None => Ok(fields.clone()),
                Some((_, factor)) => part_of(fields, factor),
            };
            let made_of = cut
                .and_then(|fields| Ok((make_limit(&fields, algorithm)?, fields.limit.map(|it| it.0.rate))));
            let (limit, rate) = match made_of {
                Ok(made) => made,
                Err(why) => {
                    let at = factor.map_or(place.as_str(), |(at, _)| at);
                    // A tier's limit that is wrong by itself is said of the tier, not of each factor.
                    if factor.is_none() || make_limit(fields, algorithm).is_ok() {
                        self.wrong(at, why);
                    }
                    continue;
                }
            };
            if let Some(why) = log_limit::refusal(&limit, self.context.log_limit_max) {
                self.wrong(&place, why);
            }
            if let Some(why) = log_limit::guard_refusal(&limit, &settings) {
                self.wrong(&place, why);
            }
            self.distinct.insert(limit);
            if self.distinct.len() > DISTINCT_MAX {
                self.wrong("rules", too_many());
                break;
            }
            if let Some(remark) = crate::config::limits::explain(&(limit, settings)) {
                self.remarks.push(format!("{rule}: {remark}"));
            }
            if let Some(warning) = log_limit::warning(&limit) {
                self.warnings.push(format!("{rule}: {warning}"));
            }
            made.push(self.parts.limits.len());
            self.parts.limits.push(RuleLimit {
                scope: scope(&limit, rule, part, position),
                limit,
                candidate: None,
            });
            self.settings.push(settings);
            self.rates.push(rate);
        }
        Limits::All(made)
    }

    /// A request that costs more than a limit can ever hold would be refused for ever.
    pub(super) fn check_cost(&mut self, at: &str, fields: &RuleFields, limits: &RuleLimits) {
        let cost = fields.cost.unwrap_or(1);
        let named: Vec<(String, &Limits)> = match limits {
            RuleLimits::Own(limits) => vec![("a limit of the rule".to_owned(), limits)],
            RuleLimits::OfTier { family, tiers, factors } => {
                let names = &self.parts.families[*family].tiers;
                let of_endpoints = factors.iter().flat_map(|(endpoint, tiers)| {
                    let endpoint = &self.parts.endpoints[*endpoint].name;
                    names
                        .iter()
                        .zip(tiers)
                        .map(move |(tier, it)| (format!("the tier {tier} at {endpoint}"), it))
                });
                let whole = names.iter().zip(tiers).map(|(tier, it)| (format!("the tier {tier}"), it));
                whole.chain(of_endpoints).collect()
            }
        };
        let mut mistakes = Vec::new();
        for (name, limits) in named {
            let Limits::All(limits) = limits else { continue };
            let candidates = limits.iter().filter_map(|limit| self.parts.limits[*limit].candidate);
            let sizes = limits.iter().copied().chain(candidates).map(|it| self.parts.limits[it].limit.size());
            if let Some(size) = sizes.min().filter(|size| cost > *size) {
                mistakes.push(format!("{cost} is more than {name} can ever admit: {size}"));
            }
        }
        mistakes.into_iter().for_each(|why| self.wrong(&format!("{at}.cost"), why));
    }
}

fn too_many() -> String {
    format!("at most {LIMITS_MAX} limits, with all tiers and factors, and {DISTINCT_MAX} different ones")
}

/// Under which name states are kept. The tier is not part of it: who changes tier keeps what was consumed.
fn scope(limit: &Limit, rule: &str, part: Part<'_>, position: usize) -> Box<str> {
    let mut scope = format!("{}:{rule}", limit.home());
    if position > 0 {
        scope += &format!(".{}", position + 1);
    }
    match part {
        Part::Main => {}
        Part::Endpoint(name) => scope += &format!("@{name}"),
        Part::Candidate => scope += "~candidate",
    }
    scope.into()
}
