//! The policy: what is written of it, and what it means.

mod diff;
mod figures;
pub(super) mod file;
mod limit;
mod matching;
mod reach;
mod rule_limits;
pub(super) mod text;
mod tiers;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use serde_json::Value;
use tollgate::rules::{
    ALL_KEYS, CHECKS_MAX, Crowd, Endpoint, KeyPart, KeySpec, Match, Policy, PolicyParts, Rule, RuleLimits,
};
use tollgate::{Limit, LimitSettings, Micros, Rate};

pub use self::diff::diff;
pub use self::figures::figures;
pub(super) use self::file::LimitFields;
use self::file::{Apply, Exclusion, MatchFields, Mode, PolicyFile, RuleFields};
pub(super) use self::limit::make_limit;
pub(crate) use self::matching::is_attribute_name;
use self::matching::{item, keys, matching, never_has_key};
use self::rule_limits::Of;
use self::text::{LimitItem, Many};
pub(super) use self::text::{NewSubjectsText, RateAndBurst};
use crate::config::limits::Settings;
use crate::config::log_limit::LOG_LIMIT_CEILING;
use crate::identity::{IdentityConfig, sha256};

/// A policy, and how each of its limits is kept in a store.
#[derive(Clone, Debug)]
pub struct CheckedPolicy {
    /// What tells it from others: the same for the same text, however it is laid out.
    pub version: String,
    /// The policy.
    pub policy: Policy,
    /// By limit.
    pub settings: Vec<LimitSettings>,
    /// By limit: the rate as it was written; none of a quota.
    pub rates: Vec<Option<Rate>>,
    /// What there is to know beyond what was written.
    pub remarks: Vec<String>,
    /// What may be more than was meant, such as the memory that a log takes.
    pub warnings: Vec<String>,
    /// What was written, without what only repeats a default; nothing where there are mistakes.
    pub written: Value,
    /// The text that it was read from; of a policy within the configuration, an equal text.
    pub text: Arc<str>,
}

impl CheckedPolicy {
    /// The first warnings, marked as such, and remarks.
    pub(crate) fn notes(&self, most: usize) -> Vec<String> {
        notes(&self.warnings, &self.remarks, most)
    }

    /// No policy: every request is admitted, and there is nothing to remark on.
    pub(super) fn empty(context: &PolicyContext) -> Self {
        let version = version(&Value::Null);
        let validated = validate(&PolicyFile::default(), version, context, &mut |_, _| ());
        Self { remarks: Vec::new(), ..validated }
    }
}

/// The first warnings, marked as such, and remarks.
pub(crate) fn notes(warnings: &[String], remarks: &[String], most: usize) -> Vec<String> {
    let warnings = warnings.iter().map(|warning| format!("warning: {warning}"));
    warnings.chain(remarks.iter().cloned()).take(most).collect()
}

/// What a policy is read with: settings that do not change while the service runs.
#[derive(Clone, Debug)]
pub struct PolicyContext {
    pub(super) ipv6_prefix: u8,
    pub(super) identity: Arc<IdentityConfig>,
    /// The largest limit that a log may have.
    pub(super) log_limit_max: u64,
    /// How limits are kept in a store where neither the rule nor the policy says it.
    pub(super) defaults: Settings,
}

impl Default for PolicyContext {
    /// As the service has it by default.
    fn default() -> Self {
        let identity = super::identity::validate(&super::identity::Identity::default(), &mut |_, _| ());
        let (log_limit_max, defaults) = (LOG_LIMIT_CEILING, Settings::default());
        Self { ipv6_prefix: 64, identity: Arc::new(identity), log_limit_max, defaults }
    }
}

/// A short name for what was written.
pub(super) fn version(value: &Value) -> String {
    sha256(value.to_string())[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What was written, without what only repeats a default.
pub(super) fn written(file: &PolicyFile) -> Value {
    serde_json::to_value(file).map(without_nothing).unwrap_or_default()
}

/// A value without fields that say nothing.
fn without_nothing(value: Value) -> Value {
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

/// Rules of one policy. The index keeps matching fast up to this number.
const RULES_MAX: usize = 10_000;
/// Bytes of a name of a rule, a tier, an endpoint.
const NAME_BYTES_MAX: usize = 64;
/// Keys of one rule, of which the first that a request has counts.
const KEYS_MAX: usize = 16;
/// Endpoints of one policy: every factor of a rule is looked up among them.
const ENDPOINTS_MAX: usize = 1_000;
/// Entries of `replaces` in all rules: each is looked at for every request.
const REPLACEMENTS_MAX: usize = 1_000;
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
            ignore_case: file.case_sensitive == Some(false),
            ..PolicyParts::default()
        },
        context,
        settings: Vec::new(),
        rates: Vec::new(),
        remarks: Vec::new(),
        warnings: Vec::new(),
        distinct: HashSet::new(),
        limits_read: 0,
        tiers: Vec::new(),
        file,
        report,
    };
    building.families();
    building.endpoints();
    building.exclusions();
    building.rules();
    building.replacements();
    building.default_rule();
    building.remark_on_unverified_api_keys();
    let Building { parts, settings, rates, remarks, mut warnings, .. } = building;
    let policy = Policy::new(parts);
    warnings.extend(policy.crowds().iter().map(warn_of));
    warnings.extend(reach::unreachable(policy.parts()));
    let (written, text) = (Value::Null, "".into());
    CheckedPolicy { version, policy, settings, rates, remarks, warnings, written, text }
}

fn warn_of(Crowd { path, is_refused, uncounted }: &Crowd) -> String {
    if *is_refused {
        return format!(
            "requests such as {path} are refused: more limits apply to them together than are checked at once ({CHECKS_MAX}, or fewer logs and counters)"
        );
    }
    format!(
        "more limits apply to requests such as {path} than are checked at once ({CHECKS_MAX}, or fewer logs and counters): {uncounted} checks in shadow or of candidates are left out"
    )
}

struct Building<'a> {
    file: &'a PolicyFile,
    context: &'a PolicyContext,
    report: Report<'a>,
    parts: PolicyParts,
    settings: Vec<LimitSettings>,
    rates: Vec<Option<Rate>>,
    remarks: Vec<String>,
    warnings: Vec<String>,
    /// The limits that were made, each once.
    distinct: HashSet<Limit>,
    /// How many limits were read, with those that have mistakes.
    limits_read: usize,
    /// By family, then by tier: where they are written, and the limits.
    tiers: Vec<Vec<(String, &'a Many<LimitItem>)>>,
}

impl<'a> Building<'a> {
    fn wrong(&mut self, field: &str, why: impl Into<String>) {
        (self.report)(field, why.into());
    }

    /// Whether a name can be one, in keys and in metrics.
    fn check_name(&mut self, field: &str, what: &str, name: &str) {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if name.is_empty() {
            return self.wrong(field, format!("is missing: give {what} a name, such as `name: per-user`"));
        }
        if name.len() > NAME_BYTES_MAX || !name.bytes().all(fits) {
            let why = format!("the name of {what} has 1 to {NAME_BYTES_MAX} letters, digits, - and _");
            self.wrong(field, why);
        }
    }

    fn matching(&mut self, field: &str, fields: &MatchFields) -> Match {
        matching(fields, &self.parts.families, field, self.report)
    }

    fn endpoints(&mut self) {
        if self.file.endpoints.len() > ENDPOINTS_MAX {
            self.wrong("endpoints", format!("at most {ENDPOINTS_MAX} endpoints"));
            return;
        }
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
                    let fields = MatchFields { path: Many(vec![path.clone()]), ..MatchFields::default() };
                    matching(&fields, &self.parts.families, &field, &mut |_, why| (self.report)(&field, why))
                }
                Exclusion::Match(fields) => self.matching(&field, fields),
            };
            if matches!(exclusion, Exclusion::Match(_)) && made.is_everything() {
                self.wrong(&field, "would exclude everything");
            }
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
            self.remarks.extend(reach::remark_on_anonymous(&rule));
            if let Some(earlier) = all_stop_at {
                self.wrong(&at, format!("can never apply: every request stops at the rule {earlier}"));
            }
            let takes_all = rule.matching.is_everything() && reach::decides(&rule, false);
            if takes_all && (rule.stop || self.parts.first_match) {
                all_stop_at = all_stop_at.or(Some(&fields.name));
            }
            self.parts.rules.push(rule);
        }
    }

    fn replacements(&mut self) {
        let rules = &self.file.rules;
        if rules.iter().map(|rule| rule.replaces.0.len()).sum::<usize>() > REPLACEMENTS_MAX {
            self.wrong("rules", format!("at most {REPLACEMENTS_MAX} entries of `replaces` in all rules"));
            return;
        }
        for (number, rule) in rules.iter().enumerate() {
            for (position, name) in rule.replaces.0.iter().enumerate() {
                let field = item(&format!("rules.{number}"), "replaces", &rule.replaces, position);
                match rules.iter().position(|it| it.name == *name) {
                    Some(other) if other == number => self.wrong(&field, "a rule cannot replace itself"),
                    Some(other) => self.parts.replacements.push((number, other)),
                    None => self.wrong(&field, format!("no rule is called {name}")),
                }
            }
        }
    }

    fn rule(&mut self, at: &str, fields: &RuleFields) -> Rule {
        let matching = self.matching(&format!("{at}.match"), &fields.r#match);
        if fields.key.0.len() > KEYS_MAX {
            self.wrong(&format!("{at}.key"), format!("at most {KEYS_MAX} keys"));
        }
        let texts = &fields.key.0[..fields.key.0.len().min(KEYS_MAX)];
        let key = keys(texts, &matching, &self.context.identity, &format!("{at}.key"), self.report);
        self.warn_of_secrets(&fields.name, &key);
        if fields.key.0.is_empty() && !fields.unlimited {
            self.wrong(&format!("{at}.key"), "what does it count by? For example `key: [ip]`");
        }
        for (field, bad, why) in [
            ("cost", fields.cost == Some(0), "at least 1; `unlimited: true` takes nothing"),
            (
                "deny_empty_key",
                fields.deny_empty_key.is_some_and(|it| !(400..500).contains(&it)),
                "a status from 400 to 499, such as 403",
            ),
            (
                "key",
                fields.deny_empty_key.is_none() && never_has_key(&matching, &key),
                "can never apply: an anonymous request has no user; `key: ip` counts it, `deny_empty_key: 403` refuses it",
            ),
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
                (Mode::Enforce, Some(percent)) => percent.0.0,
                (Mode::Enforce, None) => ALL_KEYS,
            },
            code: self.code(at, fields),
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

    /// Warns of keys that are secrets: only a digest of them is kept, and a client can invent any number of them.
    fn warn_of_secrets(&mut self, rule: &str, key: &KeySpec) {
        let names: BTreeSet<_> = key.0.iter().flatten().filter_map(KeyPart::secret_header).collect();
        for name in names {
            self.warnings.push(format!(
                "{rule}: header:{name} holds a secret, which is not verified: keys and log lines have its digest instead; `user` and `api_key` count by what is verified"
            ));
        }
    }

    /// Tells what becomes of API keys in headers where none of them is verified.
    fn remark_on_unverified_api_keys(&mut self) {
        let by_api_key = |rule: &Rule| rule.key.0.iter().any(|parts| parts.contains(&KeyPart::ApiKey));
        let is_used = self.parts.rules.iter().any(by_api_key)
            || self.parts.families.iter().any(|family| family.member == KeyPart::ApiKey);
        let api_key = self.context.identity.api_key.as_ref();
        if is_used && api_key.is_some_and(|source| source.known.is_empty()) {
            let remark = "API keys in headers are not verified, because identity.api_key.known_file is not set: they count by address and have the default tier";
            self.remarks.push(remark.to_owned());
        }
    }

    fn default_rule(&mut self) {
        let fields = RuleFields { name: "default".to_owned(), ..RuleFields::default() };
        if let Some(number) = self.file.rules.iter().position(|rule| rule.name == fields.name) {
            self.wrong(&format!("rules.{number}.name"), "is the name of what applies where no rule does");
        }
        let Some(written) = &self.file.default else {
            let remark =
                "no `default`: requests that no rule applies to are admitted, and counted as unmatched";
            self.remarks.push(remark.to_owned());
            return;
        };
        let of = Of::rule(&fields, "default", self.file, self.context.defaults, self.report);
        let limits = self.limits(of, "default", written);
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
