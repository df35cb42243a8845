//! Limitador: a list of limits, each with conditions and variables.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Imported, ImportedLimit, ImportedRule, attribute};

pub(super) fn import(value: &Value) -> Result<Imported, String> {
    let mut imported = Imported::default();
    let limits = value.as_array().ok_or("expected a list of limits")?;
    imported.remark("windows that begin with the first request: here they are those of the clock");
    let namespaces: BTreeSet<_> = limits.iter().filter_map(|limit| limit["namespace"].as_str()).collect();
    for (number, limit) in limits.iter().enumerate() {
        let at = format!("limit {}", number + 1);
        let namespace = limit["namespace"].as_str().ok_or_else(|| format!("{at}: expected `namespace:`"))?;
        let mut rule = ImportedRule {
            name: ["name", "id"]
                .iter()
                .find_map(|field| limit[field].as_str())
                .map_or_else(|| format!("{namespace}-{}", number + 1), str::to_owned),
            ..ImportedRule::default()
        };
        // Of several namespaces, the request says which.
        if namespaces.len() > 1 {
            rule.attributes.insert("namespace".to_owned(), vec![namespace.to_owned()]);
        }
        let permits = limit["max_value"].as_u64().ok_or_else(|| format!("{at}: expected `max_value:`"))?;
        let seconds = limit["seconds"]
            .as_u64()
            .filter(|it| *it > 0)
            .ok_or_else(|| format!("{at}: expected `seconds:`"))?;
        if permits == 0 {
            imported.remark(format!("{}: a limit of 0, which lets nothing through", rule.name));
            continue;
        }
        rule.limit = ImportedLimit::Rate(format!("{permits}/{seconds}s"));
        let mut is_whole = true;
        for condition in texts(&limit["conditions"]) {
            match parse_condition(&condition) {
                Some((name, value)) => {
                    imported.remark_on_name(
                        &variable_name(condition.split(['=', '!']).next().unwrap_or("")),
                        &name,
                    );
                    add(&mut rule.attributes, name, value);
                }
                None => {
                    imported
                        .remark(format!("{}: the condition {condition}, and the limit with it", rule.name));
                    is_whole = false;
                }
            }
        }
        // Limitador's `!=` does not hold for a variable that is absent.
        for values in rule.attributes.values_mut() {
            if values.iter().all(|value| value.starts_with('!')) {
                values.insert(0, "*".to_owned());
            }
        }
        for variable in texts(&limit["variables"]) {
            match variable_name(&variable) {
                Some(name) => {
                    let plain = attribute(&name)?;
                    imported.remark_on_name(&Some(name), &plain);
                    rule.key.push(plain);
                }
                None => {
                    imported.remark(format!("{}: the variable {variable}, and the limit with it", rule.name));
                    is_whole = false;
                }
            }
        }
        if is_whole {
            imported.rules.push(rule);
        }
    }
    Ok(imported)
}

fn add(attributes: &mut BTreeMap<String, Vec<String>>, name: String, value: String) {
    attributes.entry(name).or_default().push(value);
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

/// `NAME == 'VALUE'` and `NAME != 'VALUE'`: what most conditions are.
fn parse_condition(condition: &str) -> Option<(String, String)> {
    let (left, right, not) = match (condition.split_once("=="), condition.split_once("!=")) {
        (Some((left, right)), _) => (left, right, ""),
        (None, Some((left, right))) => (left, right, "!"),
        (None, None) => return None,
    };
    let name = attribute(&variable_name(left.trim())?).ok()?;
    let right = right.trim();
    let inner = ['\'', '"'].iter().find_map(|quote| right.strip_prefix(*quote)?.strip_suffix(*quote))?;
    let is_simple = !inner.is_empty() && !inner.contains(['\'', '"', '*', '\\']) && !inner.starts_with('!');
    is_simple.then(|| (name, format!("{not}{inner}")))
}

/// `user_id`, `descriptors[0].user_id`, `descriptors[0]['req.method']`: the name at the end.
fn variable_name(text: &str) -> Option<String> {
    let text = text.trim();
    let rest = text.strip_prefix("descriptors[0]").unwrap_or(text);
    let bracketed = rest.strip_prefix("['").and_then(|rest| rest.strip_suffix("']"));
    let bracketed = bracketed.or_else(|| rest.strip_prefix("[\"").and_then(|rest| rest.strip_suffix("\"]")));
    let name = bracketed.unwrap_or_else(|| rest.trim_start_matches('.'));
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    (!name.is_empty() && name.chars().all(fits)).then(|| name.to_owned())
}
