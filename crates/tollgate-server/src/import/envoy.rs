//! envoyproxy/ratelimit: a tree of descriptors, each perhaps with a limit.
//!
//! A limit becomes a rule for requests with exactly the entries that lead to it. At each level an exact value is tried first, then
//! patterns in their order, then the key alone: so a rule excludes the values of the siblings that come before it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{Imported, ImportedLimit, ImportedRule};
use crate::config::{ConfigErrors, is_attribute_name, read_foreign};

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct File {
    domain: String,
    descriptors: Vec<Descriptor>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Descriptor {
    key: String,
    #[serde(deserialize_with = "text")]
    value: String,
    rate_limit: Option<RateLimit>,
    descriptors: Vec<Descriptor>,
    shadow_mode: bool,
    share_threshold: bool,
    quota_mode: bool,
    detailed_metric: bool,
    value_to_metric: bool,
    metadata: Value,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct RateLimit {
    unit: String,
    requests_per_unit: Option<u64>,
    unlimited: bool,
    name: String,
    replaces: Vec<Replaced>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Replaced {
    name: String,
}

/// Reads a value as a text: `80` and `true` are texts there.
fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(match Value::deserialize(deserializer)? {
        Value::String(text) => text,
        Value::Null => String::new(),
        other => other.to_string(),
    })
}

pub(super) fn import(name: &str, yaml: &str) -> Result<Imported, ConfigErrors> {
    read_foreign(name, yaml, "expected `domain:` and `descriptors:`", |file: &File, report| {
        if file.domain.is_empty() {
            report(
                "domain",
                "is missing: expected the domain that requests name, such as `domain: shop`".to_owned(),
            );
        }
        let mut importing = Importing { imported: Imported::default(), report };
        let domain = BTreeMap::from([("domain".to_owned(), vec![file.domain.clone()])]);
        let path = Path {
            name: file.domain.clone(),
            attributes: domain,
            names: vec!["domain".to_owned()],
            ..Path::default()
        };
        importing.level(&file.descriptors, &path);
        importing.imported
    })
}

/// The entries that lead to a descriptor.
#[derive(Clone, Default)]
struct Path {
    /// Where the descriptor stands in the file, with a dot at the end.
    at: String,
    name: String,
    /// Attributes and the values that they must have.
    attributes: BTreeMap<String, Vec<String>>,
    /// The names of all attributes, in their order.
    names: Vec<String>,
    /// Attributes that each value has a count of its own of.
    key: Vec<String>,
}

struct Importing<'a> {
    imported: Imported,
    report: &'a mut dyn FnMut(&str, String),
}

impl Importing<'_> {
    fn level(&mut self, descriptors: &[Descriptor], path: &Path) {
        let mut known = BTreeSet::new();
        for (number, descriptor) in descriptors.iter().enumerate() {
            let at = format!("{}descriptors.{number}", path.at);
            let Descriptor { key, value, .. } = descriptor;
            // Keys and values are joined without an escape there: a_b without a value and a with b are one.
            let joined = if value.is_empty() { key.clone() } else { format!("{key}_{value}") };
            if !known.insert(joined) {
                (self.report)(
                    &at,
                    format!("{key} {value}: a descriptor of this level has the same key and value"),
                );
            }
            if let Some(why) = refused_key(key, path) {
                (self.report)(&format!("{at}.key"), why);
                continue;
            }
            if value.starts_with('!') {
                let name = &path.name;
                self.imported.remark(format!(
                    "{name}-{key}: the value {value}, which means any other value in a policy"
                ));
                continue;
            }
            let path = below(path, descriptor, &descriptors[..number], descriptors, at);
            self.remark_on_modes(descriptor, &path);
            if let Some(limit) = &descriptor.rate_limit {
                self.limit(descriptor, limit, &path);
            }
            self.level(&descriptor.descriptors, &path);
        }
    }

    fn remark_on_modes(&mut self, descriptor: &Descriptor, path: &Path) {
        let no_labels = "values are never labels of metrics here";
        for (is_set, field, why) in [
            (descriptor.quota_mode, "quota_mode", "a request is over its quota only if all of them are"),
            (descriptor.value_to_metric, "value_to_metric", no_labels),
            (descriptor.detailed_metric, "detailed_metric", no_labels),
            (!descriptor.metadata.is_null(), "metadata", "rules have none"),
        ] {
            if is_set {
                self.imported.remark(format!("{}: {field}: {why}", path.name));
            }
        }
    }

    fn limit(&mut self, descriptor: &Descriptor, wanted: &RateLimit, path: &Path) {
        let at = format!("{}rate_limit", path.at);
        let mut wrong = |field: &str, why: &str| (self.report)(&format!("{at}.{field}"), why.to_owned());
        for (number, replaced) in wanted.replaces.iter().enumerate() {
            let field = format!("replaces.{number}");
            if replaced.name.is_empty() {
                wrong(&field, "is empty: expected the name of a limit, such as `- name: per-user`");
            } else if replaced.name == wanted.name {
                wrong(&field, "names the limit itself");
            }
        }
        let limit = match (wanted.unlimited, period(&wanted.unit), wanted.requests_per_unit) {
            (true, _, _) if !wanted.unit.is_empty() => {
                return wrong("unit", "goes without `unlimited: true`");
            }
            (true, _, Some(_)) => return wrong("requests_per_unit", "goes without `unlimited: true`"),
            (true, _, None) => ImportedLimit::Unlimited,
            (false, None, _) => {
                return wrong("unit", "expected second, minute, hour, day, week, month or year");
            }
            (false, Some(_), None) => {
                return wrong("requests_per_unit", "is missing: expected a number of requests");
            }
            (false, Some(_), Some(0)) => ImportedLimit::Nothing,
            (false, Some(period), Some(permits)) => ImportedLimit::Rate(format!("{permits}/{period}")),
        };
        let unit = wanted.unit.to_lowercase();
        if let (Some(period), true) = (period(&unit), matches!(unit.as_str(), "month" | "year")) {
            let name = &path.name;
            self.imported.remark(format!(
                "{name}: a {unit} is {period}, as it was; a calendar quota would follow the calendar"
            ));
        }
        self.imported.rules.push(ImportedRule {
            name: if wanted.name.is_empty() { path.name.clone() } else { wanted.name.clone() },
            limit_name: wanted.name.clone(),
            attributes: path.attributes.clone(),
            attribute_names: path.names.clone(),
            key: path.key.clone(),
            limit,
            is_shadow: descriptor.shadow_mode,
            replaces: wanted.replaces.iter().map(|it| it.name.clone()).collect(),
        });
    }
}

/// Why a key cannot be the name of an attribute, if it cannot.
fn refused_key(key: &str, path: &Path) -> Option<String> {
    if key.is_empty() {
        return Some("is empty: expected the key of an entry, such as `key: remote_address`".to_owned());
    }
    if !is_attribute_name(key) {
        return Some(format!("{key} cannot be an attribute: expected visible ASCII without + {{ }} %"));
    }
    let is_taken = path.names.iter().any(|name| name == key);
    is_taken.then(|| format!("{key} cannot be an attribute twice; `domain` is the attribute with the domain"))
}

/// The path of a descriptor below another. `before` are the siblings that come before it in the file.
fn below(
    path: &Path,
    descriptor: &Descriptor,
    before: &[Descriptor],
    all: &[Descriptor],
    at: String,
) -> Path {
    let Descriptor { key, value, share_threshold, .. } = descriptor;
    let (is_key_alone, is_pattern) = (value.is_empty(), value.contains('*'));
    let excluded = |siblings: &[Descriptor], is_one: fn(&str) -> bool| -> Vec<String> {
        let values = siblings.iter().filter(|it| it.key == *key && is_one(&it.value));
        values.map(|it| format!("!{}", it.value)).collect()
    };
    let mut values = vec![if is_key_alone { "*".to_owned() } else { value.clone() }];
    if is_key_alone {
        values.extend(excluded(all, |value| !value.is_empty() && !value.starts_with('!')));
    } else if is_pattern {
        values.extend(excluded(all, |value| {
            !value.is_empty() && !value.contains('*') && !value.starts_with('!')
        }));
        values.extend(excluded(before, |value| value.contains('*') && !value.starts_with('!')));
    }
    let mut path = Path { at: format!("{at}."), ..path.clone() };
    path.name = match is_key_alone {
        true => format!("{}-{key}", path.name),
        false => format!("{}-{key}-{}", path.name, value.replace('*', "any")),
    };
    path.names.push(key.clone());
    path.attributes.insert(key.clone(), values);
    // Each value of a pattern has a count of its own, unless they share one.
    if is_key_alone || is_pattern && !share_threshold {
        path.key.push(key.clone());
    }
    path
}

/// The length of a unit. Windows begin at multiples of it since the epoch, as those of FIXED_WINDOW do.
fn period(unit: &str) -> Option<&'static str> {
    Some(match unit.to_lowercase().as_str() {
        "second" => "s",
        "minute" => "min",
        "hour" => "h",
        "day" => "day",
        "week" => "7d",
        "month" => "30d",
        "year" => "365d",
        _ => return None,
    })
}
