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
/// Checks in a batch.
const CHECKS_MAX: usize = 1_000;
/// Characters of a name in an answer.
const SHOWN_CHARS_MAX: usize = 40;

/// Reads the JSON of one check.
pub(super) fn parse(text: &[u8]) -> Result<Value, Problem> {
    let left = Cell::new(VALUES_MAX);
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = AnyValue { left: &left }.deserialize(&mut deserializer).map_err(|why| broken(&why))?;
    deserializer.end().map_err(|why| broken(&why))?;
    Ok(value)
}

/// Finds the checks of `{"checks":[...]}`, each still to be read. That costs little, however large the batch is.
pub(super) fn batch(text: &[u8]) -> Result<Vec<&RawValue>, Problem> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let batch = deserializer.deserialize_any(Batch).map_err(|why| broken(&why))?;
    deserializer.end().map_err(|why| broken(&why))?;
    let expected = "must be a list of checks: {\"checks\":[{\"key\":\"user:123\"}]}";
    match batch {
        Found::Checks(checks) => Ok(checks),
        Found::Other(name) => Err(Problem::parameter(&shown(&name), "no such parameter; accepted: checks")),
        Found::TooMany => Err(Problem::parameter("checks", format_args!("at most {CHECKS_MAX} checks"))),
        Found::Nothing => Err(Problem::parameter("checks", expected)),
    }
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

/// A value, within the number of values that are left.
#[derive(Clone, Copy)]
struct AnyValue<'l> {
    left: &'l Cell<usize>,
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
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            if object.contains_key(&name) {
                return Err(repeated(&name));
            }
            if object.len() == MEMBERS_MAX {
                let why = format_args!("at most {MEMBERS_MAX} members in one object");
                return Err(A::Error::custom(why));
            }
            let value = members.next_value_seed(self)?;
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
        let text = r#"{"a":[1,-2,2.5,true,null,"x\u00e9"],"b":{"c":{}}}"#;
        assert_eq!(
            parse(text.as_bytes()),
            Ok(json!({ "a": [1, -2, 2.5, true, null, "xé"], "b": { "c": {} } }))
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
        let nested = "[".repeat(100_000);
        assert!(parse(nested.as_bytes()).is_err());
    }

    #[test]
    fn a_batch_is_one_list_of_checks() {
        let texts = |text: &'static str| {
            batch(text.as_bytes()).map(|checks| checks.into_iter().map(RawValue::get).collect::<Vec<_>>())
        };
        assert_eq!(texts(r#"{"checks":[{"a":1}, 2 ]}"#), Ok(vec![r#"{"a":1}"#, "2"]));
        for wrong in
            [r#"{"checks":[],"checks":[]}"#, r#"{"checks":[],"more":1}"#, r#"{"checks":{}}"#, "[]", "{}"]
        {
            assert!(texts(wrong).is_err(), "{wrong}");
        }
    }
}
