//! What changes if one policy takes the place of another: what was written, and what becomes of the states.

use std::collections::BTreeMap;

use serde_json::Value;
use tollgate::Limit;
use tollgate::rules::{Limits, PolicyParts, RuleLimits};

use super::CheckedPolicy;

/// The differences between two policies, a line each; none if there are none.
pub fn diff(old: &CheckedPolicy, new: &CheckedPolicy) -> Vec<String> {
    let mut lines = Vec::new();
    let (before, after) = (by_name(&old.written), by_name(&new.written));
    compare("", &before, &after, &mut lines);
    order_of_rules(&old.written, &new.written, &mut lines);
    if !lines.is_empty() {
        lines.extend(states(old.policy.parts(), new.policy.parts()));
    }
    lines
}

/// A policy whose rules are found by their names.
fn by_name(written: &Value) -> Value {
    let mut written = written.clone();
    let rules = written["rules"].as_array().cloned().unwrap_or_default();
    if let Value::Object(fields) = &mut written {
        let named = rules.into_iter().map(|mut rule| {
            let name = rule["name"].as_str().unwrap_or_default().to_owned();
            if let Value::Object(fields) = &mut rule {
                fields.remove("name");
            }
            (name, rule)
        });
        fields.insert("rules".to_owned(), Value::Object(named.collect()));
    }
    written
}

fn compare(path: &str, before: &Value, after: &Value, lines: &mut Vec<String>) {
    if before == after {
        return;
    }
    if let (Value::Object(old), Value::Object(new)) = (before, after) {
        let mut names: Vec<_> = old.keys().chain(new.keys()).collect();
        names.sort();
        names.dedup();
        for name in names {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            match (old.get(name), new.get(name)) {
                (Some(old), Some(new)) => compare(&path, old, new, lines),
                (Some(old), None) => lines.push(format!("- {path}: {}", shown(old))),
                (None, Some(new)) => lines.push(format!("+ {path}: {}", shown(new))),
                (None, None) => {}
            }
        }
        return;
    }
    lines.push(format!("~ {path}: {} -> {}", shown(before), shown(after)));
}

/// A value on one line, as one would write it.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => format!("[{}]", items.iter().map(shown).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => match (fields.get("limit"), fields.len()) {
            (Some(limit), 1) => shown(limit),
            _ => {
                let fields: Vec<_> =
                    fields.iter().map(|(name, value)| format!("{name}: {}", shown(value))).collect();
                format!("{{ {} }}", fields.join(", "))
            }
        },
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

/// Whether rules that both have stand in another order.
fn order_of_rules(before: &Value, after: &Value, lines: &mut Vec<String>) {
    let names = |written: &Value| -> Vec<String> {
        let rules = written["rules"].as_array().cloned().unwrap_or_default();
        rules.iter().filter_map(|rule| rule["name"].as_str().map(str::to_owned)).collect()
    };
    let (old, new) = (names(before), names(after));
    let shared = |names: &[String], others: &[String]| -> Vec<String> {
        names.iter().filter(|name| others.contains(name)).cloned().collect()
    };
    let (old, new) = (shared(&old, &new), shared(&new, &old));
    if old != new {
        lines.push(format!("~ order of rules: {} -> {}", old.join(", "), new.join(", ")));
    }
}

/// What becomes of the states of limits that change.
fn states(old: &PolicyParts, new: &PolicyParts) -> Vec<String> {
    let limits_of = |parts: &PolicyParts| -> BTreeMap<String, Limit> {
        named_limits(parts).into_iter().map(|(name, number)| (name, parts.limits[number].limit)).collect()
    };
    let (before, after) = (limits_of(old), limits_of(new));
    let mut lines = Vec::new();
    for (name, old) in &before {
        match after.get(name) {
            None => lines.push(format!("  {name}: no longer counted")),
            Some(new) if old.home() != new.home() => {
                let name_of = |limit: &Limit| match limit.home() {
                    home if home == limit.algorithm().as_lowercase() => limit.algorithm().to_string(),
                    home => home.into_owned(),
                };
                lines.push(format!("  {name}: starts afresh: {} becomes {}", name_of(old), name_of(new)));
            }
            Some(new) if old != new => {
                let change = match new.size().cmp(&old.size()) {
                    std::cmp::Ordering::Less => "smaller",
                    std::cmp::Ordering::Equal => "other",
                    std::cmp::Ordering::Greater => "larger",
                };
                lines.push(format!("  {name}: {change}; what was consumed stays consumed"));
            }
            Some(_) => {}
        }
    }
    for name in after.keys().filter(|name| !before.contains_key(*name)) {
        lines.push(format!("  {name}: counted from now on"));
    }
    lines
}

/// All limits by number but for candidates, each under a name that it keeps whatever its algorithm is.
pub(super) fn named_limits(parts: &PolicyParts) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let mut add = |name: &str, limits: &Limits| {
        let Limits::All(limits) = limits else { return };
        for (position, limit) in limits.iter().enumerate() {
            let name =
                if position == 0 { name.to_owned() } else { format!("{name}, limit {}", position + 1) };
            found.push((name, *limit));
        }
    };
    for rule in parts.rules.iter().chain(&parts.default) {
        match &rule.limits {
            RuleLimits::Own(limits) => add(&rule.name, limits),
            RuleLimits::OfTier { family, tiers, factors } => {
                let names = &parts.families[*family].tiers;
                for (tier, limits) in names.iter().zip(tiers) {
                    add(&format!("{} of {tier}", rule.name), limits);
                }
                for (endpoint, tiers) in factors {
                    let endpoint = &parts.endpoints[*endpoint].name;
                    for (tier, limits) in names.iter().zip(tiers) {
                        add(&format!("{} of {tier} at {endpoint}", rule.name), limits);
                    }
                }
            }
        }
    }
    found
}
