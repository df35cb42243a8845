//! Policies of other limiters, in the words of Tollgate. What has no equal is told, never dropped in silence.

mod envoy;
mod limitador;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde_json::Value;

/// Whose file it is.
#[derive(clap::ValueEnum, Clone, Copy, Debug)]
pub(crate) enum Dialect {
    /// envoyproxy/ratelimit: `domain` and `descriptors`.
    Envoy,
    /// Limitador: a list of limits.
    Limitador,
}

/// A policy that was read, and what could not be carried over.
#[derive(Default, Debug)]
pub(crate) struct Imported {
    rules: Vec<ImportedRule>,
    pub(crate) remarks: Vec<String>,
}

/// A rule, as it is to be written.
#[derive(Default, Debug)]
struct ImportedRule {
    name: String,
    /// Attributes and what they must be.
    attributes: BTreeMap<String, Vec<String>>,
    /// Attributes that it counts by; none: everybody together.
    key: Vec<String>,
    /// `500/s`; none: unlimited.
    limit: Option<String>,
    is_shadow: bool,
}

/// Reads a file of another limiter.
pub(crate) fn import(dialect: Dialect, value: &Value) -> Result<Imported, String> {
    let mut imported = match dialect {
        Dialect::Envoy => envoy::import(value)?,
        Dialect::Limitador => limitador::import(value)?,
    };
    imported.name_rules();
    Ok(imported)
}

impl Imported {
    fn remark(&mut self, what: impl Into<String>) {
        let what = what.into();
        if !self.remarks.contains(&what) {
            self.remarks.push(what);
        }
    }

    /// Says so where a name has changed.
    fn remark_on_name(&mut self, before: &Option<String>, after: &str) {
        if let Some(before) = before.as_ref().filter(|before| *before != after) {
            self.remark(format!("the name {before}: it is the attribute {after} here"));
        }
    }

    /// Names that are different, and made of what names are made of.
    fn name_rules(&mut self) {
        let mut taken: BTreeSet<String> = BTreeSet::new();
        for rule in &mut self.rules {
            let plain: String = rule
                .name
                .chars()
                .map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' })
                .take(56)
                .collect();
            let plain = if plain.is_empty() || plain == "default" { "limit".to_owned() } else { plain };
            let mut name = plain.clone();
            let mut number = 1;
            while !taken.insert(name.clone()) {
                number += 1;
                name = format!("{plain}-{number}");
            }
            rule.name = name;
        }
    }

    /// The policy as YAML, with what was not carried over on top.
    pub(crate) fn to_yaml(&self) -> String {
        let mut yaml = String::new();
        for remark in &self.remarks {
            yaml += &format!("# Not carried over: {}\n", remark.replace('\n', " "));
        }
        // What these limiters do not know they do not limit.
        yaml += "default: unlimited\nrules:\n";
        for rule in &self.rules {
            let _ = writeln!(yaml, "  - name: {}", quoted(&rule.name));
            if !rule.attributes.is_empty() {
                let conditions: Vec<_> = rule
                    .attributes
                    .iter()
                    .map(|(name, values)| format!("{}: {}", quoted(name), list(values)))
                    .collect();
                let _ = writeln!(yaml, "    match: {{ attribute: {{ {} }} }}", conditions.join(", "));
            }
            let key = match rule.key.is_empty() {
                true => "global".to_owned(),
                false => {
                    rule.key.iter().map(|name| format!("attribute:{name}")).collect::<Vec<_>>().join("+")
                }
            };
            let _ = writeln!(yaml, "    key: {}", quoted(&key));
            match &rule.limit {
                Some(limit) => {
                    let _ = writeln!(yaml, "    limit: {limit}\n    algorithm: FIXED_WINDOW");
                }
                None => yaml += "    unlimited: true\n",
            }
            if rule.is_shadow {
                yaml += "    mode: shadow\n";
            }
        }
        if self.rules.is_empty() {
            yaml = yaml.replace("rules:\n", "rules: []\n");
        }
        yaml
    }
}

/// A text that YAML reads as a text.
fn quoted(text: &str) -> String {
    let is_plain = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '/'))
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && !matches!(text, "true" | "false" | "null");
    if is_plain { text.to_owned() } else { Value::String(text.to_owned()).to_string() }
}

fn list(values: &[String]) -> String {
    match values {
        [one] => quoted(one),
        many => format!("[{}]", many.iter().map(|value| quoted(value)).collect::<Vec<_>>().join(", ")),
    }
}

/// An attribute's name, if it can be one here.
fn attribute(name: &str) -> Result<String, String> {
    let plain: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '_' | '-') { c } else { '_' })
        .collect();
    if plain.is_empty() { Err("an entry without a key".to_owned()) } else { Ok(plain) }
}
