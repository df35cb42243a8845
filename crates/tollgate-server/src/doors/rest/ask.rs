//! What a request asks for, from its query or its JSON.

use std::borrow::Cow;
use std::fmt::Display;

use http::Request;
use percent_encoding::percent_decode_str;
use serde_json::Value;
use tollgate::{AlgorithmName, Ask, Key, Micros};

use crate::doors::json::shown;
use crate::doors::problem::Problem;

/// The names that a check takes.
const NAMES: [&str; 4] = ["algorithm", "key", "permits", "maxWaitMillis"];

/// A check as it was asked for, each part valid by itself.
#[derive(Default, Debug)]
pub(super) struct Asked<'a> {
    pub(super) algorithm: Option<AlgorithmName>,
    pub(super) key: Option<Cow<'a, str>>,
    permits: Option<u64>,
    max_wait_millis: Option<u64>,
}

impl Asked<'_> {
    /// What the limiter is asked.
    pub(super) fn ask(&self) -> Ask {
        Ask { cost: self.permits.unwrap_or(1), wait: self.max_wait_millis.map(Micros::from_millis) }
    }

    /// The same without what it was read from.
    pub(super) fn into_owned(self) -> Asked<'static> {
        Asked { key: self.key.map(|key| Cow::Owned(key.into_owned())), ..self }
    }

    /// Fails if more than these names were used.
    pub(super) fn only(&self, names: &[&str]) -> Result<(), Problem> {
        for (name, used) in
            [("permits", self.permits.is_some()), ("maxWaitMillis", self.max_wait_millis.is_some())]
        {
            if used {
                return Err(unknown(name, names));
            }
        }
        Ok(())
    }
}

fn unknown(name: &str, names: &[&str]) -> Problem {
    Problem::parameter(&shown(name), format_args!("no such parameter; accepted: {}", names.join(", ")))
}

/// The parameters of a query.
pub(super) fn from_query<B>(request: &Request<B>) -> Result<Asked<'_>, Problem> {
    let mut asked = Asked::default();
    let query = request.uri().query().unwrap_or("");
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let name = decoded(name).ok_or_else(|| unknown(name, &NAMES))?;
        let value = decoded(value).ok_or_else(|| Problem::parameter(&shown(&name), "must be UTF-8"))?;
        match name.as_ref() {
            "algorithm" => set(&mut asked.algorithm, "algorithm", algorithm(&value)?)?,
            "key" => set(&mut asked.key, "key", key(value)?)?,
            "permits" => set(
                &mut asked.permits,
                "permits",
                digits(&value).filter(|n| *n > 0).ok_or_else(permits_problem)?,
            )?,
            "maxWaitMillis" => {
                set(&mut asked.max_wait_millis, "maxWaitMillis", digits(&value).ok_or_else(wait_problem)?)?
            }
            other => return Err(unknown(other, &NAMES)),
        }
    }
    Ok(asked)
}

/// A name or a value of a query: `+` is a space, `%41` an A. None if the bytes are no UTF-8.
fn decoded(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('+') {
        return percent_decode_str(text).decode_utf8().ok();
    }
    let spaced = text.replace('+', " ");
    percent_decode_str(&spaced).decode_utf8().ok().map(|text| Cow::Owned(text.into_owned()))
}

/// The members of a JSON object.
pub(super) fn from_json(value: &Value) -> Result<Asked<'_>, Problem> {
    let Value::Object(members) = value else {
        return Err(Problem::new(
            http::StatusCode::BAD_REQUEST,
            "expected a JSON object such as {\"key\":\"user:123\"}",
        ));
    };
    let mut asked = Asked::default();
    for (name, value) in members {
        let text = |what: &str| {
            value.as_str().ok_or_else(|| Problem::parameter(name, format_args!("must be {what}")))
        };
        match name.as_str() {
            "algorithm" => asked.algorithm = Some(algorithm(text("a text")?)?),
            "key" => asked.key = Some(key(Cow::Borrowed(text("a text")?))?),
            "permits" => asked.permits = Some(value.as_u64().filter(|n| *n > 0).ok_or_else(permits_problem)?),
            "maxWaitMillis" => asked.max_wait_millis = Some(value.as_u64().ok_or_else(wait_problem)?),
            other => return Err(unknown(other, &NAMES)),
        }
    }
    Ok(asked)
}

/// A parameter stands once: of two, either could be meant.
fn set<T>(slot: &mut Option<T>, name: &str, value: T) -> Result<(), Problem> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(Problem::parameter(name, "stands more than once")),
    }
}

fn algorithm(name: &str) -> Result<AlgorithmName, Problem> {
    name.parse().map_err(|why| problem("algorithm", &why))
}

fn key(text: Cow<'_, str>) -> Result<Cow<'_, str>, Problem> {
    Key::new(&text).map_err(|why| problem("key", &why))?;
    Ok(text)
}

fn problem(name: &str, why: &dyn Display) -> Problem {
    Problem::parameter(name, why)
}

fn permits_problem() -> Problem {
    Problem::parameter("permits", "must be a whole number, at least 1")
}

fn wait_problem() -> Problem {
    Problem::parameter("maxWaitMillis", "must be a whole number of milliseconds, at least 0")
}

/// Digits only: no sign, no space.
fn digits(text: &str) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}
