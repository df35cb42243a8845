//! Values of variables and flags: which kinds a field accepts, and how a text becomes one of them.

use serde_json::Value;

use super::tree::parse;

/// The kinds of values that a field accepts, by the schema.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct Accepted {
    texts: bool,
    /// Lists, or fields.
    structures: bool,
    nothing: bool,
}

impl Accepted {
    /// What the field at `path` accepts; nothing that is known if there is no such field.
    pub(super) fn at(schema: &Value, path: &[String]) -> Self {
        let field = path.iter().try_fold(schema, |field, name| {
            alternatives(schema, field).into_iter().find_map(|it| it["properties"].get(name))
        });
        let mut accepted = Self::default();
        for kind in field.map(|field| alternatives(schema, field)).unwrap_or_default() {
            let types = match &kind["type"] {
                Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
                Value::String(only) => vec![only.as_str()],
                // The words of a closed set.
                _ if kind.get("const").or(kind.get("enum")).is_some() => vec!["string"],
                _ => Vec::new(),
            };
            accepted.texts |= types.contains(&"string");
            accepted.structures |= types.contains(&"array") || types.contains(&"object");
            accepted.nothing |= types.contains(&"null");
        }
        accepted
    }

    /// The names of the fields of a section.
    pub(super) fn fields(schema: &Value, section: &str) -> Vec<String> {
        let kinds = alternatives(schema, &schema["properties"][section]);
        kinds
            .into_iter()
            .filter_map(|it| it["properties"].as_object())
            .flat_map(|it| it.keys().cloned())
            .collect()
    }

    /// Whether the field holds further fields, or a list, and nothing else.
    pub(super) fn is_section(&self) -> bool {
        self.structures && !self.texts
    }

    /// Reads a text. Where the field takes a text it is taken as it is, so that passwords keep their `#`, quotes and leading zeros;
    /// numbers and lists are read as the file would read them.
    pub(super) fn read(&self, text: &str) -> Value {
        if self.nothing && text.is_empty() {
            return Value::Null;
        }
        if self.texts && !self.structures {
            return Value::String(text.to_owned());
        }
        let parsed = parse(text);
        let as_text = || Value::String(text.to_owned());
        match parsed.value {
            _ if !parsed.mistakes.is_empty() => as_text(),
            value @ (Value::Array(_) | Value::Object(_)) => value,
            _ if self.texts => as_text(),
            value => value,
        }
    }
}

/// The schemas of which a value must fit one, references followed.
fn alternatives<'s>(root: &'s Value, schema: &'s Value) -> Vec<&'s Value> {
    let name = schema["$ref"].as_str().and_then(|name| name.strip_prefix("#/$defs/"));
    if let Some(name) = name {
        return alternatives(root, &root["$defs"][name]);
    }
    match schema.get("anyOf").or(schema.get("oneOf")).and_then(Value::as_array) {
        Some(all) => all.iter().flat_map(|one| alternatives(root, one)).collect(),
        None => vec![schema],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::schema;
    use serde_json::json;

    #[test]
    fn texts_are_taken_as_they_are_and_other_values_as_the_file_has_them() {
        let read = |field: &str, text: &str| {
            let path: Vec<_> = field.split('.').map(str::to_owned).collect();
            Accepted::at(&schema(), &path).read(text)
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
