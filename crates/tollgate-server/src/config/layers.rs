//! The layers of a configuration, and which of them each value came from.

use std::collections::HashMap;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;

use super::ConfigError;
use super::file::schema;
use super::tree::{Position, Tree, parse};

/// What was written, layer over layer.
#[derive(Default)]
pub(super) struct Layers {
    value: Value,
    file_name: String,
    tree: Tree,
    /// Where the value stands in the file, if it is a part of it.
    prefix: Vec<String>,
    /// Fields that were set outside the file, and by what.
    set_by: HashMap<Vec<String>, String>,
    errors: Vec<ConfigError>,
}

/// Mistakes in one run. Nobody reads more, and each costs a reading of the whole.
const ERRORS_MAX: usize = 100;

impl Layers {
    /// The file's layer.
    pub(super) fn file(&mut self, name: &str, text: &str) {
        let (tree, mistakes) = parse(text);
        name.clone_into(&mut self.file_name);
        self.value = tree.value.clone();
        self.tree = tree;
        for (position, why) in mistakes {
            self.errors.push(ConfigError {
                place: name.to_owned(),
                position: Some(position),
                field: String::new(),
                why,
            });
        }
        if !matches!(self.value, Value::Null | Value::Object(_)) {
            self.errors.push(ConfigError {
                place: name.to_owned(),
                position: Some(Position { line: 1, column: 1 }),
                field: String::new(),
                why: "expected fields, such as `listen: 127.0.0.1:8080`".into(),
            });
            self.value = Value::Null;
        }
    }

    /// The environment's layer: `TOLLGATE_LISTEN`, `TOLLGATE_MEMORY__MAX_KEYS`. Variables that name no field are left
    /// alone: Kubernetes sets `TOLLGATE_PORT` and the like for a service called tollgate.
    pub(super) fn environment(&mut self, variables: impl Iterator<Item = (String, String)>) {
        let schema = schema();
        let known = |field: &str| schema["properties"].get(field).is_some();
        let mut variables: Vec<_> = variables.filter(|(name, _)| name.starts_with("TOLLGATE_")).collect();
        variables.sort();
        for (name, text) in variables {
            let path = name["TOLLGATE_".len()..].to_lowercase().replace("__", ".");
            if path.split('.').next().is_some_and(known) {
                self.set(&path, &name, &text);
            }
        }
    }

    /// Sets a field, as `by`.
    pub(super) fn set(&mut self, field: &str, by: &str, text: &str) {
        let path: Vec<String> = field.split('.').map(str::to_owned).collect();
        // A value is read as the file would read it, so that lists and numbers can be set too.
        let (tree, mistakes) = parse(text);
        let value = if mistakes.is_empty() { tree.value } else { Value::String(text.to_owned()) };
        self.set_by.insert(path.clone(), by.to_owned());
        insert(&mut self.value, &path, value);
    }

    /// A part of what was written, to be read by itself.
    pub(super) fn part(&self, field: &str, value: Value) -> Self {
        let prefix = vec![field.to_owned()];
        Self {
            value,
            file_name: self.file_name.clone(),
            tree: self.tree.clone(),
            prefix,
            set_by: self.set_by.clone(),
            errors: Vec::new(),
        }
    }

    /// What was written, all layers together.
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

    /// The fields, and every mistake in them: what is wrong is noted, taken out, and the rest is read again.
    pub(super) fn read<T: DeserializeOwned + Default>(&self) -> (T, Vec<ConfigError>, Removed) {
        let mut errors = self.errors.clone();
        let mut value = match &self.value {
            Value::Null => Value::Object(Map::new()),
            value => value.clone(),
        };
        let mut removed = Removed::default();
        while errors.len() < ERRORS_MAX {
            let error = match serde_path_to_error::deserialize::<_, T>(&value) {
                Ok(file) => return (file, errors, removed),
                Err(error) => error,
            };
            let path: Vec<String> = error.path().iter().filter_map(segment).collect();
            let why = ["u64", "usize", "u32", "u8"].iter().fold(error.inner().to_string(), |why, number| {
                why.replace(&format!("expected {number}"), "expected a whole number")
            });
            let (path, why) = match unknown_field(&why) {
                // The path may end before the name that is unknown.
                Some((name, expected)) => {
                    let mut path = path;
                    if path.last() != Some(&name) {
                        path.push(name);
                    }
                    (path, format!("no such field; accepted here: {expected}"))
                }
                None => (path, why),
            };
            errors.push(self.error_at(&removed.written(&path), why));
            if !removed.remove(&mut value, &path) {
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
        let field = path.join(".");
        // Where the field was set, or the nearest field around it.
        for length in (0..=path.len()).rev() {
            let path = &path[..length];
            if let Some(by) = self.set_by.get(path) {
                return ConfigError { place: by.clone(), position: None, field, why };
            }
            if let Some(position) = self.tree.names.get(path).or_else(|| self.tree.values.get(path)) {
                return ConfigError { place: self.file_name.clone(), position: Some(*position), field, why };
            }
        }
        ConfigError { place: self.file_name.clone(), position: None, field, why }
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

fn insert(value: &mut Value, path: &[String], leaf: Value) {
    let Some((first, rest)) = path.split_first() else {
        *value = leaf;
        return;
    };
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    if let Value::Object(fields) = value {
        insert(fields.entry(first.clone()).or_insert(Value::Null), rest, leaf);
    }
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
