//! Imports policies of other limiters. Unsupported settings are listed, never dropped silently.

mod envoy;
mod limitador;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::{Result, anyhow};
use serde_json::Value;

use crate::config::read_yaml;

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
    /// The names of all attributes, in their order; empty: a request may have any.
    attribute_names: Vec<String>,
    limit: ImportedLimit,
    is_shadow: bool,
    /// The name that `replaces` of other limits refer to; several limits may share it.
    limit_name: String,
    /// Names of limits that do not apply where this one does.
    replaces: Vec<String>,
}

/// The limit of a rule.
#[derive(Default, Debug)]
enum ImportedLimit {
    #[default]
    Unlimited,
    /// No request is admitted.
    Nothing,
    /// `500/s`
    Rate(String),
}

/// Reads a file of another limiter.
pub(crate) fn import(dialect: Dialect, name: &str, text: &str) -> Result<Imported> {
    let mut imported = match dialect {
        Dialect::Envoy => envoy::import(name, text)?,
        Dialect::Limitador => {
            limitador::import(&read_yaml(name, text)?).map_err(|why| anyhow!("{name}: {why}"))?
        }
    };
    imported.name_rules();
    imported.resolve_replaced();
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

    /// Turns names of limits in `replaces` into names of rules.
    fn resolve_replaced(&mut self) {
        let mut by_limit: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for rule in &self.rules {
            by_limit.entry(rule.limit_name.clone()).or_default().push(rule.name.clone());
        }
        for number in 0..self.rules.len() {
            let mut rules = Vec::new();
            for replaced in std::mem::take(&mut self.rules[number].replaces) {
                match by_limit.get(&replaced) {
                    Some(names) => rules.extend(names.iter().cloned()),
                    None => {
                        let name = self.rules[number].name.clone();
                        self.remark(format!("{name}: replaces {replaced}, a name that no limit has"));
                    }
                }
            }
            self.rules[number].replaces = rules;
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
                let values = rule.attributes.iter();
                let values = values.map(|(name, values)| format!("{}: {}", quoted(name), list(values)));
                let mut conditions = format!("attribute: {{ {} }}", values.collect::<Vec<_>>().join(", "));
                if !rule.attribute_names.is_empty() {
                    let names: Vec<_> = rule.attribute_names.iter().map(|name| quoted(name)).collect();
                    let _ = write!(conditions, ", attribute_names: [{}]", names.join(", "));
                }
                let _ = writeln!(yaml, "    match: {{ {conditions} }}");
            }
            let key = match rule.key.is_empty() {
                true => "global".to_owned(),
                false => {
                    rule.key.iter().map(|name| format!("attribute:{name}")).collect::<Vec<_>>().join("+")
                }
            };
            // No limit admits nothing: a rule that insists on a user, which these requests never have, refuses them all.
            let key = if matches!(rule.limit, ImportedLimit::Nothing) { "user".to_owned() } else { key };
            let _ = writeln!(yaml, "    key: {}", quoted(&key));
            let _ = match &rule.limit {
                ImportedLimit::Rate(limit) => {
                    writeln!(yaml, "    limit: {limit}\n    algorithm: FIXED_WINDOW")
                }
                ImportedLimit::Nothing => writeln!(yaml, "    limit: 1/s\n    deny_empty_key: 429"),
                ImportedLimit::Unlimited => writeln!(yaml, "    unlimited: true"),
            };
            if !rule.replaces.is_empty() {
                let _ = writeln!(yaml, "    replaces: {}", list(&rule.replaces));
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
