//! The policy: what is written of it, and what it means.

mod diff;
pub(super) mod file;
mod limit;
mod matching;
pub(super) mod text;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tollgate::rules::{
    ALL_KEYS, Endpoint, Family, KeyPart, KeySpec, Limits, Match, Policy, PolicyParts, Rule, RuleLimit,
    RuleLimits,
};
use tollgate::{Limit, LimitSettings, Micros};

pub use self::diff::diff;
use self::file::{Apply, Exclusion, FamilyOf, Mode, PolicyFile, RuleFields};
use self::limit::{Defaults, make, part_of, settings};
use self::matching::{keys, matching};
use self::text::{FactorText, LimitItem, Many};
use crate::identity::IdentityConfig;

/// A policy, and how each of its limits is kept in a store.
#[derive(Clone, Debug)]
pub struct CheckedPolicy {
    /// What tells it from others: the same for the same text, however it is laid out.
    pub version: String,
    /// The policy.
    pub policy: Policy,
    /// By limit.
    pub settings: Vec<LimitSettings>,
    /// What there is to know beyond what was written.
    pub remarks: Vec<String>,
    /// What was written, without what only repeats a default.
    pub written: serde_json::Value,
}

impl CheckedPolicy {
    /// One without rules: every address has the default limit.
    pub(super) fn empty(context: &PolicyContext) -> Self {
        let version = version(&serde_json::Value::Null);
        validate(&PolicyFile::default(), version, context, &mut |_, _| ())
    }
}

/// What a policy is read with: settings that do not change while the service runs.
#[derive(Clone, Debug)]
pub struct PolicyContext {
    ipv6_prefix: u8,
    identity: Arc<IdentityConfig>,
}

impl PolicyContext {
    pub(crate) fn new(ipv6_prefix: u8, identity: Arc<IdentityConfig>) -> Self {
        Self { ipv6_prefix, identity }
    }
}

impl Default for PolicyContext {
    /// As the service has it by default.
    fn default() -> Self {
        let identity = super::identity::validate(&super::identity::Identity::default(), &mut |_, _| ());
        Self::new(64, Arc::new(identity))
    }
}

/// A short name for what was written.
pub(super) fn version(value: &serde_json::Value) -> String {
    let digest = Sha256::digest(value.to_string());
    digest[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A value without fields that say nothing.
fn without_nothing(value: serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    let says_nothing = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => false,
    };
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().map(|(name, value)| (name, without_nothing(value)));
            Value::Object(fields.filter(|(_, value)| !says_nothing(value)).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(without_nothing).collect()),
        other => other,
    }
}

/// Rules of one policy: far more than anybody keeps in mind.
const RULES_MAX: usize = 10_000;
/// Different limits of all rules, with their tiers and factors: as many as the memory engine can tell apart, and some to spare.
const LIMITS_MAX: usize = 2_000;
/// Bytes of a name of a rule, a tier, an endpoint.
const NAME_BYTES_MAX: usize = 64;
/// What requests have that no rule applies to, unless the policy says otherwise.
const DEFAULT_LIMIT: &str = "200/min";
/// The family of the tiers that are written without one.
const USERS: &str = "users";

/// Reports a mistake: the field's path, and why.
type Report<'a> = &'a mut dyn FnMut(&str, String);

/// From what was written to what it means. Mistakes are reported and replaced by what keeps the others visible.
pub(super) fn validate(
    file: &PolicyFile,
    version: String,
    context: &PolicyContext,
    report: Report<'_>,
) -> CheckedPolicy {
    let mut building = Building {
        parts: PolicyParts {
            ipv6_prefix: context.ipv6_prefix,
            first_match: file.apply == Apply::First,
            ..PolicyParts::default()
        },
        context,
        settings: Vec::new(),
        remarks: Vec::new(),
        tiers: Vec::new(),
        file,
        report,
    };
    building.families();
    building.endpoints();
    building.exclusions();
    building.rules();
    building.default_rule();
    let Building { parts, settings, remarks, .. } = building;
    let written = serde_json::to_value(file).map(without_nothing).unwrap_or_default();
    CheckedPolicy { version, policy: Policy::new(parts), settings, remarks, written }
}

struct Building<'a> {
    file: &'a PolicyFile,
    context: &'a PolicyContext,
    report: Report<'a>,
    parts: PolicyParts,
    settings: Vec<LimitSettings>,
    remarks: Vec<String>,
    /// By family, then by tier: where they are written, and the limits.
    tiers: Vec<Vec<(String, &'a Many<LimitItem>)>>,
}

/// What tells the limits of a rule from each other, in their scopes.
#[derive(Clone, Copy)]
enum Part<'a> {
    Main,
    Endpoint(&'a str),
    Candidate,
}

impl<'a> Building<'a> {
    fn wrong(&mut self, field: &str, why: impl Into<String>) {
        (self.report)(field, why.into());
    }

    /// Whether a name can be one, in keys and in metrics.
    fn check_name(&mut self, field: &str, what: &str, name: &str) {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(fits) {
            let why = format!("the name of {what} has 1 to {NAME_BYTES_MAX} letters, digits, - and _");
            self.wrong(field, why);
        }
    }

    fn families(&mut self) {
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
        for tier in tiers.keys() {
            let field = format!("{at}.{tier}");
            self.check_name(&field, "a tier", tier);
        }
        let names: Vec<&String> = tiers.keys().collect();
        let number = |tier: &str| names.iter().position(|known| *known == tier);
        let known = || names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
        let default = match default {
            Some(tier) => number(tier).unwrap_or_else(|| {
                (self.report)(at_default, format!("no such tier: {tier}; there are {}", known()));
                0
            }),
            None => {
                // Whoever is unknown must not get the most.
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
                        FamilyOf::ApiKey => self.context.identity.api_key_id(member),
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

    fn matching(&mut self, field: &str, fields: &file::MatchFields) -> Match {
        matching(fields, &self.parts.families, field, self.report)
    }

    fn endpoints(&mut self) {
        for (name, fields) in &self.file.endpoints {
            let field = format!("endpoints.{name}");
            self.check_name(&field, "an endpoint", name);
            let matching = self.matching(&field, fields);
            if matching.is_everything() {
                self.wrong(&field, "needs a condition, such as `path: /api/export/**`");
            }
            self.parts.endpoints.push(Endpoint { name: name.as_str().into(), matching });
        }
    }

    fn exclusions(&mut self) {
        for (number, exclusion) in self.file.exclude.iter().enumerate() {
            let field = format!("exclude.{number}");
            let made = match exclusion {
                Exclusion::Path(path) => {
                    let fields = file::MatchFields { path: Many(vec![path.clone()]), ..Default::default() };
                    matching(&fields, &self.parts.families, &field, &mut |_, why| (self.report)(&field, why))
                }
                Exclusion::Match(fields) => {
                    let made = self.matching(&field, fields);
                    if made.is_everything() {
                        self.wrong(&field, "would exclude everything");
                    }
                    made
                }
            };
            self.parts.exclusions.push(made);
        }
    }

    fn rules(&mut self) {
        let rules = &self.file.rules;
        if rules.len() > RULES_MAX {
            self.wrong("rules", format!("at most {RULES_MAX} rules, not {}", rules.len()));
            return;
        }
        let mut names: BTreeMap<&str, usize> = BTreeMap::new();
        let mut all_stop_at: Option<&str> = None;
        for (number, fields) in rules.iter().enumerate() {
            let at = format!("rules.{number}");
            self.check_name(&format!("{at}.name"), "a rule", &fields.name);
            if let Some(other) = names.insert(&fields.name, number) {
                let why =
                    format!("rule {} has this name too: names tell states and metrics apart", other + 1);
                self.wrong(&format!("{at}.name"), why);
            }
            let rule = self.rule(&at, fields);
            if let Some(earlier) = all_stop_at {
                self.wrong(&at, format!("can never apply: every request stops at the rule {earlier}"));
            }
            let takes_all = rule.matching.is_everything() && always_has_a_key(&rule);
            if takes_all && (rule.stop || self.parts.first_match) {
                all_stop_at = all_stop_at.or(Some(&fields.name));
            }
            self.parts.rules.push(rule);
        }
    }

    fn rule(&mut self, at: &str, fields: &RuleFields) -> Rule {
        let matching = self.matching(&format!("{at}.match"), &fields.r#match);
        let key =
            keys(&fields.key.0, &matching, &self.context.identity.order, &format!("{at}.key"), self.report);
        if fields.key.0.is_empty() && !fields.unlimited {
            self.wrong(&format!("{at}.key"), "what does it count by? For example `key: [ip]`");
        }
        for (field, bad, why) in [
            ("cost", fields.cost == Some(0), "at least 1; `unlimited: true` takes nothing"),
            (
                "lease_ceiling",
                fields.lease_ceiling == Some(0),
                "at least 1; `consistency: strict` borrows none",
            ),
            (
                "deny_empty_key",
                fields.deny_empty_key.is_some_and(|it| !(400..500).contains(&it)),
                "a status from 400 to 499, such as 403",
            ),
            ("deadline", fields.deadline.is_some_and(|it| it.0 < Duration::from_millis(1)), "at least 1ms"),
            (
                "enforce",
                fields.enforce.is_some() && fields.mode == Mode::Shadow,
                "a rule in shadow is enforced for no key: leave one of the two out",
            ),
            ("family", fields.family.is_some() && fields.tier.is_none(), "belongs to `tier: from_request`"),
            (
                "factor",
                !fields.factor.is_empty() && fields.tier.is_none(),
                "belongs to `tier: from_request`: it is a part of the tier's limits",
            ),
        ] {
            if bad {
                self.wrong(&format!("{at}.{field}"), why);
            }
        }
        let limits = self.rule_limits(at, fields);
        self.check_cost(at, fields, &limits);
        Rule {
            name: fields.name.as_str().into(),
            matching,
            key,
            limits,
            cost: fields.cost.unwrap_or(1),
            max_wait: fields.max_wait.map(|wait| Micros::new(wait.0.as_micros() as u64)),
            stop: fields.stop,
            deny_empty_key: fields.deny_empty_key,
            enforced: match (fields.mode, fields.enforce) {
                (Mode::Shadow, _) => 0,
                (Mode::Enforce, Some(percent)) => percent.0,
                (Mode::Enforce, None) => ALL_KEYS,
            },
            code: self.code(at, fields),
        }
    }

    /// A request that costs more than a limit can ever hold would be denied for ever.
    fn check_cost(&mut self, at: &str, fields: &RuleFields, limits: &RuleLimits) {
        let cost = fields.cost.unwrap_or(1);
        let all: Vec<&Limits> = match limits {
            RuleLimits::Own(limits) => vec![limits],
            RuleLimits::OfTier { tiers, factors, .. } => {
                tiers.iter().chain(factors.iter().flat_map(|(_, tiers)| tiers)).collect()
            }
        };
        let numbers = all.into_iter().flat_map(|limits| match limits {
            Limits::All(limits) => limits.as_slice(),
            Limits::Unlimited => &[],
        });
        let smallest = numbers.map(|limit| self.parts.limits[*limit].limit.size()).min();
        if let Some(size) = smallest.filter(|size| cost > *size) {
            let why = format!("{cost} is more than a limit of the rule can ever admit: {size}");
            self.wrong(&format!("{at}.cost"), why);
        }
    }

    fn code(&mut self, at: &str, fields: &RuleFields) -> Option<Box<str>> {
        let code = fields.code.as_deref()?;
        let fits = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
        if code.is_empty() || code.len() > NAME_BYTES_MAX || !code.bytes().all(fits) {
            self.wrong(&format!("{at}.code"), "capital letters, digits and _, such as LOGIN_LIMIT");
        }
        Some(code.into())
    }

    /// What a rule is made of must be one thing: limits of its own, those of a tier, or none.
    fn rule_limits(&mut self, at: &str, fields: &RuleFields) -> RuleLimits {
        let ways = [!fields.limit.0.is_empty(), fields.tier.is_some(), fields.unlimited];
        if ways.iter().filter(|way| **way).count() != 1 {
            self.wrong(at, "needs one of `limit: 100/min`, `tier: from_request` and `unlimited: true`");
            return RuleLimits::Own(Limits::Unlimited);
        }
        if fields.unlimited {
            if fields.candidate.is_some() {
                self.wrong(&format!("{at}.candidate"), "goes with a limit of the rule's own");
            }
            return RuleLimits::Own(Limits::Unlimited);
        }
        let settings = settings(fields, self.file);
        let defaults = Defaults { algorithm: fields.algorithm.or(self.file.algorithm) };
        if fields.tier.is_some() {
            return self.tier_limits(at, fields, settings, defaults);
        }
        let own = self.limits(
            &format!("{at}.limit"),
            &fields.name,
            Part::Main,
            &fields.limit,
            settings,
            defaults,
            None,
        );
        if let (Some(candidate), Limits::All(limits)) = (&fields.candidate, &own) {
            let many = Many(vec![candidate.clone()]);
            let field = format!("{at}.candidate");
            let made = self.limits(&field, &fields.name, Part::Candidate, &many, settings, defaults, None);
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

    fn tier_limits(
        &mut self,
        at: &str,
        fields: &RuleFields,
        settings: LimitSettings,
        defaults: Defaults,
    ) -> RuleLimits {
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
                (Some(name), false) => {
                    ("family", format!("no such family: {name}; there are {}", names.join(", ")))
                }
                (None, false) => ("tier", format!("of which family? `family:` one of {}", names.join(", "))),
            };
            self.wrong(&format!("{at}.{field}"), why);
            return RuleLimits::Own(Limits::Unlimited);
        };
        let written = self.tiers[family].clone();
        let of_tiers =
            |building: &mut Self, part: Part<'_>, factor: Option<(&str, FactorText)>| -> Vec<Limits> {
                let made = written.iter().map(|(field, limits)| {
                    building.limits(field, &fields.name, part, limits, settings, defaults, factor)
                });
                made.collect()
            };
        let tiers = of_tiers(self, Part::Main, None);
        self.remark_on_algorithms(&fields.name, &tiers);
        let mut factors = Vec::new();
        for (endpoint, factor) in &fields.factor {
            let field = format!("{at}.factor.{endpoint}");
            let Some(number) = self.parts.endpoints.iter().position(|known| *known.name == **endpoint) else {
                self.wrong(&field, "no such endpoint; `endpoints` names them");
                continue;
            };
            factors.push((number, of_tiers(self, Part::Endpoint(endpoint), Some((&field, *factor)))));
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
                    "{rule}: its tiers differ in algorithm or calendar; whoever changes tier starts afresh with limit {}",
                    position + 1
                ));
            }
        }
    }

    /// Makes limits, and files them. `factor` is a part of them, and where that is written.
    #[expect(clippy::too_many_arguments, reason = "each of them is one thing that is written")]
    fn limits(
        &mut self,
        field: &str,
        rule: &str,
        part: Part<'_>,
        written: &Many<LimitItem>,
        settings: LimitSettings,
        defaults: Defaults,
        factor: Option<(&str, FactorText)>,
    ) -> Limits {
        let mut made = Vec::new();
        let has_unlimited = written.0.iter().any(|item| matches!(item, LimitItem::Unlimited));
        if has_unlimited && written.0.len() > 1 {
            self.wrong(field, "`unlimited` stands alone");
        }
        if has_unlimited {
            return Limits::Unlimited;
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
            let limit = match cut.and_then(|fields| make(&fields, defaults)) {
                Ok(limit) => limit,
                Err(why) => {
                    let at = factor.map_or(place.as_str(), |(at, _)| at);
                    // A tier's limit that is wrong is said once, not once for each factor.
                    self.wrong(at, why);
                    continue;
                }
            };
            if settings.failover_guard && matches!(limit, Limit::SlidingLog(_)) {
                self.wrong(&place, "a log has no failover guard; SLIDING_WINDOW_COUNTER does");
            }
            if self.parts.limits.len() >= LIMITS_MAX {
                self.wrong("rules", format!("at most {LIMITS_MAX} limits, with all tiers and factors"));
                break;
            }
            if let Some(remark) = super::limits::explain(&(limit, settings)) {
                self.remarks.push(format!("{rule}: {remark}"));
            }
            made.push(self.parts.limits.len());
            self.parts.limits.push(RuleLimit {
                scope: scope(&limit, rule, part, position),
                limit,
                candidate: None,
            });
            self.settings.push(settings);
        }
        Limits::All(made)
    }

    fn default_rule(&mut self) {
        let built_in = Many(vec![limit::read(DEFAULT_LIMIT)]);
        let written = self.file.default.as_ref().unwrap_or(&built_in);
        let fields = RuleFields { name: "default".to_owned(), ..RuleFields::default() };
        if let Some(number) = self.file.rules.iter().position(|rule| rule.name == fields.name) {
            self.wrong(&format!("rules.{number}.name"), "is the name of what applies where no rule does");
        }
        let (settings, defaults) =
            (settings(&fields, self.file), Defaults { algorithm: self.file.algorithm });
        let limits = self.limits("default", &fields.name, Part::Main, written, settings, defaults, None);
        self.parts.default = Some(Rule {
            name: fields.name.into(),
            matching: Match::default(),
            key: KeySpec(vec![vec![KeyPart::Ip]]),
            limits: RuleLimits::Own(limits),
            cost: 1,
            max_wait: None,
            stop: false,
            deny_empty_key: None,
            enforced: ALL_KEYS,
            code: None,
        });
    }
}

/// Whether every request has one of its keys, or is refused: then no rule behind it is ever reached for want of one.
fn always_has_a_key(rule: &Rule) -> bool {
    let always = |parts: &Vec<KeyPart>| parts.iter().all(|part| matches!(part, KeyPart::Global));
    rule.limits == RuleLimits::Own(Limits::Unlimited) || rule.key.0.iter().any(always)
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
