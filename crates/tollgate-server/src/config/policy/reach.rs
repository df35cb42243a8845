//! Rules that limit fewer requests than their author may think: never reached, or passed by anonymous callers.

use tollgate::rules::{ALL_KEYS, IdentityKind, KeyPart, Limits, PolicyParts, Rule, RuleLimits};

/// Pairs of rules that are compared: some ten milliseconds.
const PAIRS_MAX: usize = 1_000_000;

/// Warns of rules, and of a default, that no request reaches because an earlier rule covers them.
pub(super) fn unreachable(parts: &PolicyParts) -> Vec<String> {
    let why = match parts.first_match {
        true => "and with `apply: first` only the first rule applies",
        false => "and has `stop: true`",
    };
    let (mut warnings, mut stopping, mut pairs) = (Vec::new(), Vec::<&Rule>::new(), 0);
    for rule in &parts.rules {
        pairs += stopping.len();
        if pairs > PAIRS_MAX {
            break;
        }
        if let Some(earlier) = stopping.iter().find(|it| it.matching.covers(&rule.matching)) {
            let (name, earlier) = (&rule.name, &earlier.name);
            warnings.push(format!(
                "{name}: never applies: the rule {earlier} before it matches every request that it matches, {why}"
            ));
        }
        if (rule.stop || parts.first_match) && decides(rule, true) {
            stopping.push(rule);
        }
    }
    let applies_to_all = |rule: &&Rule| rule.matching.is_everything() && decides(rule, true);
    if let (Some(_), Some(rule)) = (&parts.default, parts.rules.iter().find(applies_to_all)) {
        warnings.push(format!("default: never applies: the rule {} applies to every request", rule.name));
    }
    warnings
}

/// Whether a rule decides on every request that it matches: each has one of its keys, or is refused. A rule that is only counted
/// decides nothing. With `has_address` the requests are those of clients whose address is known.
pub(super) fn decides(rule: &Rule, has_address: bool) -> bool {
    let always = |part: &KeyPart| *part == KeyPart::Global || has_address && *part == KeyPart::Ip;
    let has_a_key = rule.key.0.iter().any(|parts| parts.iter().all(always));
    let is_unlimited = rule.limits == RuleLimits::Own(Limits::Unlimited);
    rule.enforced >= ALL_KEYS && (has_a_key || rule.deny_empty_key.is_some() || is_unlimited)
}

/// Remarks on a rule that counts by user or API key only, and so does not limit callers without one.
pub(super) fn remark_on_anonymous(rule: &Rule) -> Option<String> {
    let needs = |kind: IdentityKind| {
        let is_one = |part: &KeyPart| match kind {
            IdentityKind::User => *part == KeyPart::User,
            IdentityKind::ApiKey => matches!(part, KeyPart::ApiKey | KeyPart::UnverifiedApiKeyAddress),
            IdentityKind::Anonymous => false,
        };
        rule.key.0.iter().filter(|parts| parts.iter().any(is_one)).count()
    };
    let (users, api_keys) = (needs(IdentityKind::User), needs(IdentityKind::ApiKey));
    let (who, key, identified) = match (users, api_keys) {
        (_, 0) => ("a user", "user", &[IdentityKind::User][..]),
        (0, _) => ("an API key", "api_key", &[IdentityKind::ApiKey][..]),
        _ => ("a user or an API key", "user, api_key", &[IdentityKind::User, IdentityKind::ApiKey][..]),
    };
    let keys = rule.key.0.len();
    let kinds = &rule.matching.identities;
    let is_always_identified = !kinds.is_empty() && kinds.iter().all(|kind| identified.contains(kind));
    let is_unlimited = rule.limits == RuleLimits::Own(Limits::Unlimited);
    if keys == 0
        || users + api_keys < keys
        || rule.deny_empty_key.is_some()
        || is_unlimited
        || is_always_identified
    {
        return None;
    }
    Some(format!(
        "{}: requests without {who} are not limited by this rule; add ip to its key (`key: [{key}, ip]`) or set `deny_empty_key: 403`",
        rule.name
    ))
}
