//! JSON of requests: bounded, and without repeated members, of which either could be meant.

use std::cell::Cell;
use std::fmt;

use http::StatusCode;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value};

use super::problem::Problem;

/// Members of one object. Requests of browsers have some 30 headers.
const MEMBERS_MAX: usize = 128;
/// Values of one check, with its headers, query and attributes.
const VALUES_MAX: usize = 1_024;
/// Objects and lists within each other: a check is an object, with objects of headers and the like in it. A small object takes some 600
/// bytes of memory for five of text, so that many within each other would take far more memory than their text.
const LEVELS_MAX: usize = 2;
/// Checks in a batch.
const CHECKS_MAX: usize = 1_000;
/// Characters of a name in an answer.
const SHOWN_CHARS_MAX: usize = 40;

/// Reads a JSON object of texts, numbers and objects of texts, such as one check.
pub(super) fn parse(text: &[u8]) -> Result<Value, Problem> {
    read(text, None)
}

/// Reads the description of a request. Of its headers, those beyond [`MEMBERS_MAX`] are skipped unless `is_read` says that they are read:
/// clients send as many as they like, and a header that nothing reads must not spoil the check.
pub(super) fn parse_described(text: &[u8], is_read: &dyn Fn(&str) -> bool) -> Result<Value, Problem> {
    read(text, Some(is_read))
}

fn read(text: &[u8], is_read: Option<&dyn Fn(&str) -> bool>) -> Result<Value, Problem> {
    let left = Cell::new(VALUES_MAX);
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let any = AnyValue { left: &left, levels: LEVELS_MAX, is_read, is_headers: false };
    let value = any.deserialize(&mut deserializer).map_err(|why| broken(&why))?;
    deserializer.end().map_err(|why| broken(&why))?;
    Ok(value)
}

/// Finds the checks of `{"checks":[...]}`, each an object that is still to be read. That costs little, however large the batch is.
pub(super) fn batch(text: &[u8]) -> Result<Vec<&RawValue>, Problem> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let batch = deserializer.deserialize_any(Batch).map_err(|why| broken(&why))?;
    deserializer.end().map_err(|why| broken(&why))?;
    let expected = "must be a list of checks: {\"checks\":[{\"key\":\"user:123\"}]}";
    match batch {
        Found::Checks(checks) => match checks.iter().position(|check| !check.get().starts_with('{')) {
            None => Ok(checks),
            Some(index) => Err(Problem::parameter(&format!("checks[{index}]"), "must be a JSON object")),
        },
        Found::Other(name) => Err(Problem::parameter(&shown(&name), "no such parameter; accepted: checks")),
        Found::TooMany => Err(Problem::parameter("checks", format_args!("at most {CHECKS_MAX} checks"))),
        Found::Nothing => Err(Problem::parameter("checks", expected)),
    }
}

/// A list of values that are JSON already.
pub(super) fn list(values: &[Vec<u8>]) -> Vec<u8> {
    let mut list = Vec::with_capacity(2 + values.iter().map(|value| value.len() + 1).sum::<usize>());
    list.push(b'[');
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            list.push(b',');
        }
        list.extend_from_slice(value);
    }
    list.push(b']');
    list
}

/// A name that a caller has made up: cut, and without control characters.
pub(super) fn shown(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(SHOWN_CHARS_MAX).collect()
}

fn broken(why: &serde_json::Error) -> Problem {
    match why.classify() {
        serde_json::error::Category::Data => Problem::new(StatusCode::BAD_REQUEST, why.to_string()),
        _ => Problem::new(StatusCode::BAD_REQUEST, format!("invalid JSON: {why}")),
    }
}

fn repeated<E: Error>(name: &str) -> E {
    E::custom(format_args!("the member {:?} stands more than once", shown(name)))
}

/// A value, within the number of values and of levels that are left.
#[derive(Clone, Copy)]
struct AnyValue<'l> {
    left: &'l Cell<usize>,
    levels: usize,
    /// Which headers are read, in a description of a request.
    is_read: Option<&'l dyn Fn(&str) -> bool>,
    /// Whether the value is the headers of a description.
    is_headers: bool,
}

impl AnyValue<'_> {
    /// What is in an object or a list, `name` being its name in the object.
    fn inner<E: Error>(self, name: &str) -> Result<Self, E> {
        let is_headers = self.levels == LEVELS_MAX && name == "headers";
        let too_deep = || E::custom("nested too deeply: expected an object, and objects of texts in it");
        let levels = self.levels.checked_sub(1).ok_or_else(too_deep)?;
        Ok(Self { levels, is_headers, ..self })
    }

    /// Whether a header is read; none if the value is not the headers of a description.
    fn is_read(&self, name: &str) -> Option<bool> {
        let is_read = self.is_read.filter(|_| self.is_headers)?;
        Some(is_read(&name.to_ascii_lowercase()))
    }
}

impl<'de> DeserializeSeed<'de> for AnyValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let left = self.left.get().checked_sub(1);
        let too_many = || D::Error::custom(format_args!("at most {VALUES_MAX} values in one check"));
        self.left.set(left.ok_or_else(too_many)?);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for AnyValue<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        let inner = self.inner("")?;
        while let Some(item) = items.next_element_seed(inner)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        self.inner::<A::Error>("")?;
        while let Some(name) = members.next_key::<String>()? {
            if object.contains_key(&name) {
                return Err(repeated(&name));
            }
            if object.len() >= MEMBERS_MAX {
                match self.is_read(&name) {
                    Some(true) => {}
                    Some(false) => {
                        members.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    None => {
                        let why = format_args!("at most {MEMBERS_MAX} members in one object");
                        return Err(A::Error::custom(why));
                    }
                }
            }
            let value = members.next_value_seed(self.inner(&name)?)?;
            object.insert(name, value);
        }
        Ok(Value::Object(object))
    }
}

/// The members of a batch.
struct Batch;

enum Found<'de> {
    Nothing,
    Checks(Vec<&'de RawValue>),
    TooMany,
    /// A member that a batch does not take.
    Other(String),
}

impl<'de> Visitor<'de> for Batch {
    type Value = Found<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object such as {\"checks\":[{\"key\":\"user:123\"}]}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Found<'de>, A::Error> {
        let mut found = Found::Nothing;
        while let Some(name) = members.next_key::<String>()? {
            match (name.as_str(), &found) {
                ("checks", Found::Nothing) => found = members.next_value_seed(Checks)?,
                ("checks", _) => return Err(repeated("checks")),
                _ => {
                    members.next_value::<IgnoredAny>()?;
                    found = Found::Other(name);
                    // What follows is not looked at: the batch is refused.
                    while members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                    return Ok(found);
                }
            }
        }
        Ok(found)
    }
}

/// The list of checks.
struct Checks;

impl<'de> DeserializeSeed<'de> for Checks {
    type Value = Found<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Found<'de>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Checks {
    type Value = Found<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of checks: {\"checks\":[{\"key\":\"user:123\"}]}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Found<'de>, A::Error> {
        let mut checks = Vec::new();
        while let Some(check) = items.next_element::<&RawValue>()? {
            if checks.len() == CHECKS_MAX {
                while items.next_element::<IgnoredAny>()?.is_some() {}
                return Ok(Found::TooMany);
            }
            checks.push(check);
        }
        Ok(Found::Checks(checks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_read_as_they_are_and_repeated_members_are_refused() {
        let text = r#"{"a":[1,-2,2.5,true,null,"x\u00e9"],"b":{"c":""}}"#;
        assert_eq!(
            parse(text.as_bytes()),
            Ok(json!({ "a": [1, -2, 2.5, true, null, "xé"], "b": { "c": "" } }))
        );
        for text in [r#"{"a":1,"a":1}"#, r#"{"a":{"b":1,"b":2}}"#, r#"[{"a":1,"\u0061":2}]"#] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
        for text in ["", "{", "{}x", "\"\\ud800\"", "\"\u{1}\"", "NaN"] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn members_and_values_are_bounded() {
        let members = |count: usize| {
            let members: Vec<_> = (0..count).map(|number| format!("\"m{number}\":0")).collect();
            format!("{{{}}}", members.join(","))
        };
        assert!(parse(members(MEMBERS_MAX).as_bytes()).is_ok());
        assert!(parse(members(MEMBERS_MAX + 1).as_bytes()).is_err());
        let list = |count: usize| format!("[{}0]", "0,".repeat(count - 1));
        assert!(parse(list(VALUES_MAX - 1).as_bytes()).is_ok());
        assert!(parse(list(VALUES_MAX).as_bytes()).is_err());
        for nested in [r#"{"a":{"b":{}}}"#, r#"{"a":[[]]}"#, r#"[[{"a":1}]]"#, &"[".repeat(100_000)] {
            assert!(
                parse(nested.as_bytes()).is_err_and(|why| format!("{why:?}").contains("deep")),
                "{nested:.20}"
            );
        }
    }

    #[test]
    fn surplus_headers_are_skipped_unless_they_are_read() {
        let headers = |count: usize, last: &str| {
            let headers: Vec<_> = (0..count).map(|number| format!("\"h{number}\":\"\"")).collect();
            format!("{{\"headers\":{{{},\"{last}\":\"x\"}}}}", headers.join(","))
        };
        let parse = |text: &str| parse_described(text.as_bytes(), &|name| name == "x-plan");
        let found = parse(&headers(60_000, "other")).expect("headers that nothing reads");
        assert_eq!(found["headers"].as_object().map(Map::len), Some(MEMBERS_MAX));
        let found = parse(&headers(MEMBERS_MAX - 1, "X-Plan")).expect("as many as there may be");
        assert_eq!(found["headers"]["X-Plan"], "x");
        let found = parse(&headers(1_000, "X-Plan")).expect("more than there may be, and one that is read");
        assert_eq!(found["headers"]["X-Plan"], "x");
        assert!(parse(&headers(MEMBERS_MAX, "other").replace("headers", "query")).is_err());
    }

    #[test]
    fn a_batch_is_one_list_of_checks() {
        let texts = |text: &'static str| {
            batch(text.as_bytes()).map(|checks| checks.into_iter().map(RawValue::get).collect::<Vec<_>>())
        };
        assert_eq!(texts(r#"{"checks":[{"a":1}, {} ]}"#), Ok(vec![r#"{"a":1}"#, "{}"]));
        for wrong in [
            r#"{"checks":[{}, 2 ]}"#,
            r#"{"checks":[],"checks":[]}"#,
            r#"{"checks":[],"more":1}"#,
            r#"{"checks":{}}"#,
            "[]",
            "{}",
        ] {
            assert!(texts(wrong).is_err(), "{wrong}");
        }
    }
}
