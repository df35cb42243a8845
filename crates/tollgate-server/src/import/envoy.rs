//! envoyproxy/ratelimit: a tree of descriptors, each perhaps with a limit.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Imported, ImportedRule, attribute};

/// Levels of descriptors: Envoy sends a handful of entries.
const DEPTH_MAX: usize = 16;

pub(super) fn import(value: &Value) -> Result<Imported, String> {
    let mut imported = Imported::default();
    let domain = value["domain"].as_str().ok_or("expected `domain:` and `descriptors:`")?;
    let descriptors = value["descriptors"].as_array().ok_or("expected a list of `descriptors:`")?;
    imported.remark(format!(
        "the domain {domain}: a policy of Tollgate is for one; requests name their entries as attributes"
    ));
    imported
        .remark("a limit for exactly its entries: here it applies to requests that have more of them, too");
    let path = Path { name: domain.to_owned(), ..Path::default() };
    level(&mut imported, descriptors, &path)?;
    Ok(imported)
}

/// The entries that lead to a descriptor.
#[derive(Clone, Default)]
struct Path {
    name: String,
    attributes: BTreeMap<String, Vec<String>>,
    key: Vec<String>,
    depth: usize,
}

fn level(imported: &mut Imported, descriptors: &[Value], path: &Path) -> Result<(), String> {
    if path.depth >= DEPTH_MAX {
        return Err(format!("descriptors are nested more than {DEPTH_MAX} deep"));
    }
    for descriptor in descriptors {
        let entry = descriptor["key"].as_str().ok_or("a descriptor without `key:`")?;
        let name = attribute(entry)?;
        if name != entry {
            imported.remark(format!("the key {entry} is the attribute {name} here"));
        }
        let value = text(&descriptor["value"]);
        if let Some(value) = value.as_ref().filter(|value| value.starts_with('!')) {
            imported
                .remark(format!("{}-{name}: the value {value}, which would mean any other here", path.name));
            continue;
        }
        let mut path = path.clone();
        path.depth += 1;
        path.name = format!("{}-{name}", path.name);
        match &value {
            Some(value) => {
                path.name = format!("{}-{}", path.name, value.replace('*', "any"));
                path.attributes.insert(name.clone(), vec![value.clone()]);
                // Each value that a wildcard stands for has a limit of its own, unless they share one.
                if value.contains('*') && descriptor["share_threshold"] != true {
                    path.key.push(name);
                }
            }
            None => {
                // The values that stand beside it by themselves have their own limits.
                let beside = descriptors.iter().filter(|other| other["key"].as_str() == Some(entry));
                let mut values = vec!["*".to_owned()];
                values.extend(
                    beside.filter_map(|other| text(&other["value"])).map(|value| format!("!{value}")),
                );
                path.attributes.insert(name.clone(), values);
                path.key.push(name);
            }
        }
        limit(imported, descriptor, &path)?;
        if let Some(nested) = descriptor["descriptors"].as_array() {
            level(imported, nested, &path)?;
        }
    }
    Ok(())
}

fn limit(imported: &mut Imported, descriptor: &Value, path: &Path) -> Result<(), String> {
    for (field, why) in [
        ("quota_mode", "quota_mode: a request is over its quota only if all of them are"),
        ("value_to_metric", "value_to_metric: values are never labels of metrics here"),
        ("metadata", "metadata"),
    ] {
        if !descriptor[field].is_null() && descriptor[field] != false {
            imported.remark(format!("{}: {why}", path.name));
        }
    }
    let wanted = &descriptor["rate_limit"];
    if wanted.is_null() {
        return Ok(());
    }
    if wanted["replaces"].as_array().is_some_and(|replaced| !replaced.is_empty()) {
        imported.remark(format!(
            "{}: replaces (all limits hold together; `stop: true` leaves the later ones out)",
            path.name
        ));
    }
    let name = wanted["name"].as_str().map_or_else(|| path.name.clone(), str::to_owned);
    let limit = if wanted["unlimited"] == true {
        None
    } else {
        let unit = wanted["unit"].as_str().unwrap_or_default().to_lowercase();
        let period = match unit.as_str() {
            "second" => "s",
            "minute" => "min",
            "hour" => "h",
            "day" => "day",
            "week" => "7d",
            "month" => "30d",
            "year" => "365d",
            other => return Err(format!("{}: no such unit: {other:?}", path.name)),
        };
        if matches!(unit.as_str(), "month" | "year") {
            imported.remark(format!(
                "{}: a {unit} is {period}, as it was; a calendar quota would follow the calendar",
                path.name
            ));
        }
        match wanted["requests_per_unit"].as_u64() {
            Some(0) => {
                imported.remark(format!("{}: a limit of 0, which lets nothing through", path.name));
                return Ok(());
            }
            Some(permits) => Some(format!("{permits}/{period}")),
            None => return Err(format!("{}: expected `requests_per_unit:`", path.name)),
        }
    };
    imported.rules.push(ImportedRule {
        name,
        attributes: path.attributes.clone(),
        key: path.key.clone(),
        limit,
        is_shadow: descriptor["shadow_mode"] == true,
    });
    Ok(())
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(yes) => Some(yes.to_string()),
        _ => None,
    }
}
