//! The layers of a configuration, and which of them each value came from.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;

use super::file::ConfigFile;
use super::mistakes::{MISTAKES_MAX, nearest, shown};
use super::tree::{Parsed, Places, Position, parse};
use super::{ConfigError, accepted};

/// What was written, layer over layer.
#[derive(Clone, Default)]
pub(super) struct Layers {
    value: Value,
    file_name: String,
    places: Arc<Places>,
    /// Where the value stands in the file, if it is a part of it.
    prefix: Vec<String>,
    /// The names of the rules, in their order.
    rule_names: Arc<Vec<Option<String>>>,
    /// Fields that were set outside the file, and by what.
    set_by: HashMap<Vec<String>, String>,
    errors: Vec<ConfigError>,
    warnings: Vec<String>,
}

/// Values that are read, all readings together, to find further mistakes: each mistake costs a reading of the whole. A large file is
/// read for some hundreds of milliseconds at most.
const VALUES_READ_MAX: usize = 1_000_000;

impl Layers {
    /// The file's layer. `expected` says what a file with a list or a text instead of fields should hold.
    pub(super) fn file(&mut self, name: &str, text: &str, expected: &str) {
        let Parsed { value, places, mistakes } = parse(text);
        name.clone_into(&mut self.file_name);
        self.rule_names = Arc::new(rule_names(&value));
        self.value = value;
        self.places = Arc::new(places);
        for (position, why) in mistakes {
            self.errors.push(ConfigError::new(name, Some(position), &[], &why));
        }
        if !matches!(self.value, Value::Null | Value::Object(_)) {
            self.errors.push(ConfigError::new(name, Some(Position::START), &[], expected));
            self.value = Value::Null;
        }
    }

    /// The environment's layer: `TOLLGATE_LISTEN`, `TOLLGATE_MEMORY__MAX_KEYS`. Variables that name no field are left
    /// alone: Kubernetes sets `TOLLGATE_PORT` and the like for a service called tollgate.
    pub(super) fn environment(&mut self, variables: impl Iterator<Item = (String, String)>) {
        let sections = serde_json::to_value(ConfigFile::default()).unwrap_or_default();
        let Value::Object(sections) = sections else { return };
        let mut variables: Vec<_> = variables.filter(|(name, _)| name.starts_with("TOLLGATE_")).collect();
        variables.sort();
        for (name, text) in variables {
            let path = name["TOLLGATE_".len()..].to_lowercase().replace("__", ".");
            let section = path.split('.').next().unwrap_or_default();
            if sections.contains_key(section) {
                self.set(&path, &name, &text);
                continue;
            }
            let is_within = |it: &String| it.replace('.', "_") == path.replace('.', "_");
            let (why, meant) = match fields_within(&sections).into_iter().find(is_within) {
                Some(field) => (": sections end with two underscores", Some(field)),
                None => {
                    let nearest = nearest(section, sections.keys().map(String::as_str));
                    ("", nearest.map(|meant| path.replacen(section, meant, 1)))
                }
            };
            if let Some(meant) = meant {
                let meant = meant.replace('.', "__").to_uppercase();
                let ignored = format!("{name} is not a setting and is ignored{why}");
                self.warnings.push(format!("{ignored}; did you mean TOLLGATE_{meant}?"));
            }
        }
    }

    /// What may not be as it was meant.
    pub(super) fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Sets a field, as `by`.
    pub(super) fn set(&mut self, field: &str, by: &str, text: &str) {
        let path: Vec<String> = field.split('.').map(str::to_owned).collect();
        accepted::insert(&mut self.value, &path, accepted::read(&path, text));
        self.set_by.insert(path, by.to_owned());
    }

    /// Takes out sections without a value, such as `redis:` with all of its lines commented out: they have their defaults.
    pub(super) fn drop_empty_sections(&mut self) {
        drop_empty_sections(&mut self.value, &mut Vec::new());
    }

    /// Takes out the field of two that an earlier layer has set, if a later one has set the other.
    pub(super) fn later_layer_wins(&mut self, fields: [&str; 2]) {
        let paths = fields.map(|field| field.split('.').map(str::to_owned).collect::<Vec<_>>());
        let is_set = |path: &Vec<String>| {
            let value = path.iter().try_fold(&self.value, |value, name| value.get(name));
            value.is_some_and(|value| !value.is_null())
        };
        if !paths.iter().all(is_set) {
            return;
        }
        let [first, second] = paths.each_ref().map(|path| self.layer(path));
        let earlier = match first.cmp(&second) {
            Ordering::Less => &paths[0],
            Ordering::Greater => &paths[1],
            Ordering::Equal => return,
        };
        Removed::default().remove(&mut self.value, earlier);
    }

    /// The layer that a field was set in: the file, the environment, the flags.
    fn layer(&self, path: &[String]) -> u8 {
        match self.set_by.get(path) {
            None => 0,
            Some(by) if by.starts_with("--") => 2,
            Some(_) => 1,
        }
    }

    /// A part of what was written, to be read by itself.
    pub(super) fn part(&self, field: &str, value: Value) -> Self {
        Self { value, prefix: vec![field.to_owned()], errors: Vec::new(), ..self.clone() }
    }

    /// What was written, all layers together, without what had mistakes when it was read.
    pub(super) fn value(&self) -> &Value {
        &self.value
    }

    /// Whether nothing at all was written.
    pub(super) fn says_nothing(&self) -> bool {
        match &self.value {
            Value::Object(fields) => fields.is_empty(),
            value => value.is_null(),
        }
    }

    /// Whether a field was set outside the file.
    pub(super) fn is_set_outside(&self, field: &str) -> bool {
        self.set_by.contains_key(&[field.to_owned()][..])
    }

    /// The fields, and the mistakes in them: what is wrong is noted, taken out, and the rest is read again.
    pub(super) fn read<T: DeserializeOwned + Default>(&mut self) -> (T, Vec<ConfigError>, Removed) {
        let mut errors = self.errors.clone();
        let mut removed = Removed::default();
        let nothing = Value::Object(Map::new());
        for _ in 0..(VALUES_READ_MAX / count(&self.value)).clamp(1, MISTAKES_MAX) {
            if errors.len() >= MISTAKES_MAX {
                break;
            }
            let written = if self.value.is_null() { &nothing } else { &self.value };
            let error = match serde_path_to_error::deserialize::<_, T>(written) {
                Ok(file) => return (file, errors, removed),
                Err(error) => error,
            };
            let path: Vec<String> = error.path().iter().filter_map(segment).collect();
            let (path, why) = mistake(path, &error.inner().to_string());
            errors.push(self.error_at(&removed.written(&path), why));
            if !removed.remove(&mut self.value, &path) {
                break;
            }
        }
        (T::default(), errors, removed)
    }

    /// A mistake in the meaning of a field, by its path in what was read.
    pub(super) fn error(&self, field: &str, removed: &Removed, why: String) -> ConfigError {
        let path: Vec<String> = field.split('.').map(str::to_owned).collect();
        self.error_at(&removed.written(&path), why)
    }

    fn error_at(&self, path: &[String], why: String) -> ConfigError {
        let path = [&self.prefix, path].concat();
        let error = self.placed_error(&path, why);
        let in_rules = path.iter().position(|name| name == "rules").map(|at| &path[at + 1..]);
        let Some([number, field @ ..]) = in_rules else { return error };
        let Ok(number) = number.parse::<usize>() else { return error };
        match self.rule_names.get(number).and_then(Option::as_deref) {
            Some(name) => error.in_rule(&format!("rule {:?}", shown(name)), field),
            None => error.in_rule(&format!("rule number {}, which has no name", number + 1), field),
        }
    }

    fn placed_error(&self, path: &[String], why: String) -> ConfigError {
        // Where the field was set, or the nearest field around it.
        for length in (0..=path.len()).rev() {
            let part = &path[..length];
            if let Some(by) = self.set_by.get(part) {
                return ConfigError::new(by, None, path, &why);
            }
            if let Some(position) = self.places.find(part).filter(|_| !self.file_name.is_empty()) {
                return ConfigError::new(&self.file_name, Some(position), path, &why);
            }
        }
        ConfigError::new(&self.file_name, None, path, &why)
    }
}

/// The fields of all sections: `log.level`.
fn fields_within(sections: &Map<String, Value>) -> Vec<String> {
    let fields = |(section, fields): (&String, &Value)| -> Vec<String> {
        let names = fields.as_object().into_iter().flat_map(Map::keys);
        names.map(|field| format!("{section}.{field}")).collect()
    };
    sections.iter().flat_map(fields).collect()
}

/// The names of the rules in a policy, or in a configuration with a policy.
fn rule_names(value: &Value) -> Vec<Option<String>> {
    let rules = value.get("rules").or_else(|| value.get("policy")?.get("rules"));
    let name = |rule: &Value| Some(rule.get("name")?.as_str()?.to_owned()).filter(|name| !name.is_empty());
    rules.and_then(Value::as_array).into_iter().flatten().map(name).collect()
}

fn drop_empty_sections(value: &mut Value, path: &mut Vec<String>) {
    let Value::Object(fields) = value else { return };
    fields.retain(|name, value| {
        path.push(name.clone());
        let is_empty_section = value.is_null() && accepted::is_section(path);
        drop_empty_sections(value, path);
        path.pop();
        !is_empty_section
    });
}

/// How many values there are, those within others included.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

/// Where a mistake is and what is wrong, from what serde says of it.
fn mistake(mut path: Vec<String>, why: &str) -> (Vec<String>, String) {
    if let Some((name, expected)) = unknown_field(why) {
        // The path may end before the name that is unknown.
        if path.last() != Some(&name) {
            path.push(name);
        }
        let meant = path.last().and_then(|name| nearest(name, expected.split(", ")));
        let meant = meant.map(|meant| format!(" (did you mean `{meant}`?)")).unwrap_or_default();
        return (path, format!("no such field{meant}; accepted here: {expected}"));
    }
    if why.starts_with("invalid type: null") || why.starts_with("invalid type: unit value") {
        return (path, "has no value: write one, or leave the field out".to_owned());
    }
    if may_hold_secret(&path) {
        // What serde says would repeat the value.
        let why = "has the wrong type (the value is not shown: it may be a secret); write texts in quotes";
        return (path, why.to_owned());
    }
    let why = ["u64", "usize", "u32", "u16", "u8"].iter().fold(why.to_owned(), |why, number| {
        why.replace(&format!("expected {number}"), "expected a whole number")
    });
    (path, without_rust_words(&why))
}

/// What serde says of a value that should be a list or have fields, in words of the file.
fn without_rust_words(why: &str) -> String {
    let Some((found, expected)) = why.rsplit_once(", expected ") else { return why.to_owned() };
    if expected == "a sequence" {
        let text = found.strip_prefix("invalid type: string \"").and_then(|text| text.strip_suffix('"'));
        return text.map_or_else(
            || format!("{found}, expected a list such as [a, b]"),
            |text| format!("expected a list: [{text}]"),
        );
    }
    let is_structure = ["struct ", "a map", "map"].iter().any(|word| expected.starts_with(word));
    if is_structure { format!("{found}, expected fields, each as NAME: VALUE") } else { why.to_owned() }
}

/// Whether a field's value may be a secret, or contain one.
fn may_hold_secret(path: &[String]) -> bool {
    match path {
        [only] => matches!(only.as_str(), "store" | "redis"),
        [.., field] => ["password", "secret", "token_file", "salt"].iter().any(|word| field.contains(word)),
        [] => false,
    }
}

fn segment(segment: &Segment) -> Option<String> {
    match segment {
        Segment::Seq { index } => Some(index.to_string()),
        Segment::Map { key } => Some(key.clone()),
        Segment::Enum { variant } => Some(variant.clone()),
        Segment::Unknown => None,
    }
}

/// The name and what was expected, of serde's "unknown field `x`, expected one of `y`, `z`".
fn unknown_field(why: &str) -> Option<(String, String)> {
    let (name, rest) = why.strip_prefix("unknown field `")?.split_once('`')?;
    let expected = rest.split_once("expected ").map_or("none", |(_, expected)| expected);
    Some((name.to_owned(), expected.trim_start_matches("one of ").replace('`', "")))
}

/// Items that were taken out of lists: the ones behind them have moved up, but not in the file.
#[derive(Default)]
pub(super) struct Removed(HashMap<Vec<String>, Vec<usize>>);

impl Removed {
    /// Takes a part out, so that its default stands in for it. False if there is none.
    fn remove(&mut self, value: &mut Value, path: &[String]) -> bool {
        let Some((last, parents)) = path.split_last() else { return false };
        let parent = parents.iter().try_fold(value, |parent, name| match parent {
            Value::Object(fields) => fields.get_mut(name),
            Value::Array(items) => items.get_mut(name.parse::<usize>().ok()?),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
        });
        match parent {
            Some(Value::Object(fields)) => fields.remove(last).is_some(),
            Some(Value::Array(items)) => {
                let Some(index) = last.parse().ok().filter(|index| *index < items.len()) else {
                    return false;
                };
                items.remove(index);
                let written = self.written(path);
                let gone = self.0.entry(parents.to_vec()).or_default();
                gone.extend(written.last().and_then(|index| index.parse::<usize>().ok()));
                gone.sort_unstable();
                true
            }
            Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) | None => false,
        }
    }

    /// The path as it stands in the file.
    fn written(&self, path: &[String]) -> Vec<String> {
        let mut written = path.to_vec();
        for length in 0..path.len() {
            if let (Some(gone), Ok(mut index)) = (self.0.get(&path[..length]), path[length].parse::<usize>())
            {
                for before in gone {
                    index += usize::from(*before <= index);
                }
                written[length] = index.to_string();
            }
        }
        written
    }
}
