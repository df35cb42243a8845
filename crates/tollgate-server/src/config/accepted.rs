//! Values of variables and flags: how a text becomes the value that its field takes.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::file::ConfigFile;
use super::tree::parse;

/// Reads a text for the field at `path`. A field of text takes it as it is, so that passwords keep their `#`, quotes and leading zeros;
/// numbers and lists are read as the file would read them.
pub(super) fn read(path: &[String], text: &str) -> Value {
    let as_text = Value::String(text.to_owned());
    let parsed = Some(parse(text)).filter(|it| it.mistakes.is_empty()).map(|it| it.value);
    let structure = parsed.clone().filter(|it| it.is_array() || it.is_object());
    let nothing = text.is_empty().then_some(Value::Null);
    let readings = [nothing, structure.clone(), Some(as_text.clone()), parsed];
    let accepted = readings.into_iter().flatten().find(|value| accepts(path, value.clone()));
    accepted.or(structure).unwrap_or(as_text)
}

/// Whether the field at `path` holds further fields, or a list, and nothing else.
pub(super) fn is_section(path: &[String]) -> bool {
    !accepts(path, Value::Null) && (accepts(path, json!({})) || accepts(path, json!([])))
}

fn accepts(path: &[String], value: Value) -> bool {
    let mut file = Value::Null;
    insert(&mut file, path, value);
    ConfigFile::deserialize(&file).is_ok()
}

/// Sets the field at `path`.
pub(super) fn insert(value: &mut Value, path: &[String], leaf: Value) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_taken_as_they_are_and_other_values_as_the_file_has_them() {
        let read = |field: &str, text: &str| {
            let path: Vec<_> = field.split('.').map(str::to_owned).collect();
            read(&path, text)
        };
        for text in ["0123", "a # b", "'a'", "~", "true", "{x", "[a]", " a "] {
            assert_eq!(read("redis.password", text), json!(text));
            assert_eq!(read("store", text), json!(text));
            assert_eq!(read("redis.password_file", text), json!(text));
        }
        assert_eq!(read("redis.password", ""), json!(null));
        assert_eq!(read("memory.max_keys", "12"), json!(12));
        assert_eq!(read("redis.require", "true"), json!(true));
        assert_eq!(read("api.trusted_callers", "[10.0.0.0/8]"), json!(["10.0.0.0/8"]));
        assert_eq!(read("identity.jwt.issuer", "12"), json!("12"));
        assert_eq!(read("identity.jwt.issuer", "[a, b]"), json!(["a", "b"]));
        assert_eq!(read("policy", "policy.yaml"), json!("policy.yaml"));
        assert_eq!(read("policy", "rules: []"), json!({ "rules": [] }));
        assert_eq!(read("log.format", "json"), json!("json"));
        assert_eq!(read("api.on_store_failure", "closed"), json!("closed"));
        assert_eq!(read("redis.deadline", "10"), json!("10"));
    }
}
