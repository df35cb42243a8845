//! Requests on the wire: query parameters and JSON bodies, read into values that are valid by themselves.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use http::StatusCode;
use percent_encoding::percent_decode_str;
use schemars::JsonSchema;
use serde::de::value::MapDeserializer;
use serde::de::{Deserializer, Error, IntoDeserializer, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use serde_json::value::RawValue;
use tollgate::{AlgorithmName, Ask, Key, Micros};

use super::problem::Problem;
use crate::address::canonical;
use crate::identity::{IdentityConfig, is_api_key_id};
use crate::request::{Described, PERMITS_MAX, VALUE_BYTES_MAX, Values, host};
use crate::schema::{
    AddressSchema, AlgorithmSchema, ApiKeyIdSchema, ApiKeySchema, HeadersSchema, KeySchema, MembersSchema,
    PathSchema, ShortSchema, one,
};

/// Members of `query` and of `attributes`.
const MEMBERS_MAX: usize = 128;
/// Checks in a batch.
const CHECKS_MAX: usize = 1_000;
/// Characters of a client's text in an answer.
const SHOWN_CHARS_MAX: usize = 40;

/// A check of one key by one of the five algorithms.
#[derive(Deserialize, JsonSchema, Default, Debug)]
#[serde(
    rename_all = "camelCase",
    deny_unknown_fields,
    default,
    expecting = "a JSON object such as {\"key\":\"user:123\"}"
)]
pub(super) struct KeyCheck<'a> {
    /// The algorithm that decides.
    #[schemars(with = "AlgorithmSchema")]
    pub(super) algorithm: Algorithm,
    /// Whose limit it is. Without a key, the client's address.
    #[serde(borrow, deserialize_with = "present")]
    #[schemars(with = "KeySchema")]
    pub(super) key: Option<KeyText<'a>>,
    /// How many permits the request takes.
    #[schemars(with = "u64", range(min = 1), default = "one")]
    permits: Permits,
    /// Accepts a delay up to this long instead of a denial. The answer comes at once, and names the delay.
    #[serde(deserialize_with = "present")]
    #[schemars(with = "u64")]
    max_wait_millis: Option<Millis>,
}

impl KeyCheck<'_> {
    pub(super) fn ask(&self) -> Ask {
        let wait = self.max_wait_millis.map(|Millis(millis)| Micros::from_millis(millis));
        Ask { cost: self.permits.0, wait }
    }
}

/// The key whose limit is shown or reset.
#[derive(Deserialize, JsonSchema, Default, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct KeyOnly<'a> {
    /// The algorithm that decides.
    #[schemars(with = "AlgorithmSchema")]
    pub(super) algorithm: Algorithm,
    /// Whose limit it is. Without a key, the client's address.
    #[serde(borrow, deserialize_with = "present")]
    #[schemars(with = "KeySchema")]
    pub(super) key: Option<KeyText<'a>>,
}

/// A request that the policy decides on.
#[derive(Deserialize, JsonSchema, Default, Debug)]
#[schemars(extend("not" = { "required": ["apiKey", "apiKeyId"] }))]
#[serde(
    rename_all = "camelCase",
    deny_unknown_fields,
    default,
    expecting = "a JSON object such as {\"path\":\"/api/login\",\"method\":\"POST\",\"ip\":\"192.0.2.1\"}"
)]
pub(super) struct RequestCheck<'a> {
    /// The client's address. Without it the request has no address; the caller's own is never used.
    #[schemars(with = "Option<AddressSchema>")]
    ip: Option<Address>,
    /// The user. It counts as verified.
    #[serde(borrow, deserialize_with = "present")]
    #[schemars(with = "ShortSchema")]
    user: Option<Text<'a>>,
    /// The API key itself. It counts as verified.
    #[serde(borrow, deserialize_with = "present")]
    #[schemars(with = "ApiKeySchema")]
    api_key: Option<Text<'a>>,
    /// The identifier of an API key, as answers show it, in place of `apiKey`.
    #[serde(borrow, deserialize_with = "present")]
    #[schemars(with = "ApiKeyIdSchema")]
    api_key_id: Option<Text<'a>>,
    /// The tier of the user.
    #[serde(borrow, deserialize_with = "present")]
    #[schemars(with = "ShortSchema")]
    tier: Option<Text<'a>>,
    /// The method.
    #[serde(borrow)]
    #[schemars(with = "ShortSchema")]
    method: Text<'a>,
    /// The host. A port is ignored.
    #[serde(borrow)]
    #[schemars(with = "ShortSchema")]
    host: Text<'a>,
    /// The path. A query behind it is ignored.
    #[serde(borrow, deserialize_with = "present")]
    #[schemars(with = "PathSchema")]
    path: Option<PathText<'a>>,
    /// The headers, as the client sent them. An API key in them counts as verified if `identity.api_key.known_file` lists it. Trusted
    /// headers are read only if the caller is a trusted proxy.
    #[serde(borrow)]
    #[schemars(with = "HeadersSchema")]
    headers: Members<'a>,
    /// The parameters of the query.
    #[serde(borrow)]
    #[schemars(with = "MembersSchema")]
    query: FewMembers<'a>,
    /// Further values that rules can read.
    #[serde(borrow)]
    #[schemars(with = "MembersSchema")]
    attributes: FewMembers<'a>,
    /// How many permits the request takes.
    #[schemars(with = "u64", range(min = 1, max = 1_125_899_906_842_624_u64), default = "one")]
    permits: Permits,
}

impl<'a> RequestCheck<'a> {
    /// Reads a description from JSON.
    pub(super) fn parse(text: &'a [u8]) -> Result<Self, Problem> {
        parse(text)
    }

    /// The request. `is_read` says which headers, by their names in lower case, can change the decision: the others may be as long and
    /// as many as the client likes.
    pub(super) fn described(
        self,
        is_read: &dyn Fn(&str) -> bool,
        identity: &IdentityConfig,
    ) -> Result<Described<'a>, Problem> {
        let text = |text: Option<Text<'a>>| text.map(|Text(text)| text);
        let path = self.path.map_or(Cow::Borrowed("/"), |PathText(path)| path);
        Ok(Described {
            ip: self.ip.map(|Address(ip)| ip),
            api_key: api_key_id(self.api_key, self.api_key_id, identity)?,
            user: text(self.user),
            tier: text(self.tier),
            method: self.method.0,
            host: host(&self.host.0),
            path,
            headers: read_headers(self.headers.0, is_read)?,
            query: self.query.0,
            attributes: self.attributes.0,
            permits: self.permits.0,
            ..Described::default()
        })
    }
}

fn api_key_id(
    key: Option<Text<'_>>,
    id: Option<Text<'_>>,
    identity: &IdentityConfig,
) -> Result<Option<String>, Problem> {
    match (key, id) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => Err(Problem::parameter("apiKeyId", "only one of apiKey and apiKeyId")),
        (Some(Text(key)), None) => {
            let wrong = || Problem::parameter("apiKey", "must be 1 to 512 characters of visible ASCII");
            identity.api_key_id(&key).ok_or_else(wrong).map(Some)
        }
        (None, Some(Text(id))) if is_api_key_id(&id) => Ok(Some(id.into_owned())),
        (None, Some(_)) => {
            Err(Problem::parameter("apiKeyId", "must be 32 hexadecimal digits, as answers show it"))
        }
    }
}

/// Keeps the headers that are read, by their names in lower case.
fn read_headers<'a>(headers: Values<'a>, is_read: &dyn Fn(&str) -> bool) -> Result<Values<'a>, Problem> {
    let mut read = Values::new();
    for (name, value) in headers {
        if !is_read(&name) {
            continue;
        }
        let field = format!("headers.{}", shown(&name));
        if value.len() > VALUE_BYTES_MAX {
            return Err(Problem::parameter(&field, too_long()));
        }
        read.push((name, value));
    }
    Ok(read)
}

/// The tier that a member gets.
#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields, expecting = "a JSON object such as {\"tier\":\"pro\"}")]
pub(super) struct TierChange<'a> {
    /// A tier of the family.
    #[serde(borrow)]
    #[schemars(with = "String")]
    pub(super) tier: Text<'a>,
}

/// Independent checks. Each is read by itself.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, expecting = "a JSON object such as {\"checks\":[{\"key\":\"user:123\"}]}")]
struct Batch<'a> {
    #[serde(borrow)]
    checks: Vec<&'a RawValue>,
}

/// Finds the checks of `{"checks":[...]}`, each an object that is still to be read.
pub(super) fn batch(text: &[u8]) -> Result<Vec<&[u8]>, Problem> {
    // Without the path of a mistake: following it would copy what `RawValue` borrows.
    refuse_list(text)?;
    let Batch { checks } = serde_json::from_slice(text).map_err(|why| broken("", &why))?;
    if checks.len() > CHECKS_MAX {
        return Err(Problem::parameter("checks", format_args!("at most {CHECKS_MAX} checks")));
    }
    match checks.iter().position(|check| !check.get().starts_with('{')) {
        None => Ok(checks.into_iter().map(|check| check.get().as_bytes()).collect()),
        Some(index) => Err(Problem::parameter(&format!("checks[{index}]"), "must be a JSON object")),
    }
}

/// Reads a JSON body.
pub(super) fn parse<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Problem> {
    refuse_list(text)?;
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut deserializer)
        .map_err(|why| broken(&why.path().to_string(), why.inner()))?;
    deserializer.end().map_err(|why| broken("", &why))?;
    Ok(value)
}

/// Refuses a list where an object is expected: serde would take its items for the members, by their order.
fn refuse_list(text: &[u8]) -> Result<(), Problem> {
    match text.trim_ascii_start().first() {
        Some(b'[') => Err(Problem::new(StatusCode::BAD_REQUEST, "expected a JSON object, not a list")),
        Some(_) | None => Ok(()),
    }
}

/// Reads the parameters of a query.
pub(super) fn parse_query<'a, T: Deserialize<'a>>(query: Option<&'a str>) -> Result<T, Problem> {
    let mut pairs: Vec<(Cow<'a, str>, QueryValue<'a>)> = Vec::new();
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let not_utf8 = |name: &str| Problem::parameter(&shown(name), "must be UTF-8");
        let name = decoded(name).ok_or_else(|| not_utf8(name))?;
        let value = decoded(value).ok_or_else(|| not_utf8(&name))?;
        pairs.push((name, QueryValue(value)));
    }
    let pairs = pairs.into_iter().map(|(name, value)| (QueryValue(name), value));
    serde_path_to_error::deserialize(MapDeserializer::new(pairs))
        .map_err(|why| explained(&why.path().to_string(), &why.inner().to_string()))
}

/// A name or a value of a query: `+` is a space, `%41` an A. None if the bytes are not UTF-8.
fn decoded(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('+') {
        return percent_decode_str(text).decode_utf8().ok();
    }
    let spaced = text.replace('+', " ");
    percent_decode_str(&spaced).decode_utf8().ok().map(|text| Cow::Owned(text.into_owned()))
}

/// A text of a query. Where a number is expected, it is read as one: digits only.
struct QueryValue<'a>(Cow<'a, str>);

impl<'de> Deserializer<'de> for QueryValue<'de> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match self.0 {
            Cow::Borrowed(text) => visitor.visit_borrowed_str(text),
            Cow::Owned(text) => visitor.visit_string(text),
        }
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        let is_number = self.0.bytes().all(|byte| byte.is_ascii_digit());
        match self.0.parse() {
            Ok(number) if is_number => visitor.visit_u64(number),
            Ok(_) | Err(_) => self.deserialize_any(visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct option seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de> for QueryValue<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Reads a member that may be absent, but not `null`.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// A client's text in an answer: cut, and without control characters.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(SHOWN_CHARS_MAX).collect()
}

fn broken(path: &str, why: &serde_json::Error) -> Problem {
    match why.classify() {
        serde_json::error::Category::Data => explained(path, &why.to_string()),
        _ => Problem::new(StatusCode::BAD_REQUEST, format!("invalid JSON: {why}")),
    }
}

/// A problem of the member at `path`. Serde names members that are unknown or repeated in its text only.
fn explained(path: &str, why: &str) -> Problem {
    let named = |prefix: &str| why.strip_prefix(prefix)?.split_once('`');
    if let Some((name, rest)) = named("unknown field `") {
        let accepted = rest.trim_start_matches(", expected ").trim_start_matches("one of ").replace('`', "");
        return Problem::parameter(&shown(name), format_args!("no such parameter; accepted: {accepted}"));
    }
    if let Some((name, _)) = named("duplicate field `") {
        return Problem::parameter(&shown(name), "stands more than once");
    }
    match path {
        "" | "." | "?" => Problem::new(StatusCode::BAD_REQUEST, why),
        path => Problem::parameter(&shown(path), why),
    }
}

/// A text of at most [`VALUE_BYTES_MAX`] bytes.
#[derive(Default, Debug)]
pub(super) struct Text<'a>(pub(super) Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let AnyText(text) = AnyText::deserialize(deserializer)?;
        if text.len() > VALUE_BYTES_MAX {
            return Err(D::Error::custom(too_long()));
        }
        Ok(Self(text))
    }
}

pub(super) fn too_long() -> String {
    format!("must have at most {VALUE_BYTES_MAX} bytes")
}

/// A text of any length, borrowed from the request where it has no escapes.
struct AnyText<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for AnyText<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Cow<'de, str>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Cow::Borrowed(text))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Cow::Owned(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Self::Value, E> {
                Ok(Cow::Owned(text))
            }
        }
        deserializer.deserialize_str(Reader).map(Self)
    }
}

/// A key that a caller names.
#[derive(Debug)]
pub(super) struct KeyText<'a>(pub(super) Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for KeyText<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let AnyText(text) = AnyText::deserialize(deserializer)?;
        Key::new(&text).map_err(D::Error::custom)?;
        Ok(Self(text))
    }
}

/// A path without its query, which rules do not read and which may be long.
#[derive(Debug)]
struct PathText<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for PathText<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let AnyText(target) = AnyText::deserialize(deserializer)?;
        let path = match target {
            Cow::Borrowed(target) => Cow::Borrowed(without_query(target)),
            Cow::Owned(target) => Cow::Owned(without_query(&target).to_owned()),
        };
        if !path.starts_with('/') {
            return Err(D::Error::custom("must begin with /"));
        }
        if path.len() > VALUE_BYTES_MAX {
            return Err(D::Error::custom(too_long()));
        }
        Ok(Self(path))
    }
}

fn without_query(target: &str) -> &str {
    target.split('?').next().unwrap_or(target)
}

#[derive(Debug)]
struct Address(IpAddr);

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let AnyText(text) = AnyText::deserialize(deserializer)?;
        let wrong = |_| D::Error::custom("must be an address such as 192.0.2.1 or 2001:db8::1");
        text.parse().map(|ip| Self(canonical(ip))).map_err(wrong)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Algorithm(pub(super) AlgorithmName);

impl Default for Algorithm {
    fn default() -> Self {
        Self(AlgorithmName::TokenBucket)
    }
}

impl<'de> Deserialize<'de> for Algorithm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let AnyText(name) = AnyText::deserialize(deserializer)?;
        name.parse().map(Self).map_err(D::Error::custom)
    }
}

/// How many permits a request takes.
#[derive(Clone, Copy, Debug)]
struct Permits(u64);

impl Default for Permits {
    fn default() -> Self {
        Self(1)
    }
}

impl<'de> Deserialize<'de> for Permits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = format!("a whole number from 1 to {PERMITS_MAX}");
        deserializer.deserialize_u64(WholeNumber { least: 1, most: PERMITS_MAX, expected }).map(Self)
    }
}

#[derive(Clone, Copy, Debug)]
struct Millis(u64);

impl<'de> Deserialize<'de> for Millis {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a whole number of milliseconds, at least 0".to_owned();
        deserializer.deserialize_u64(WholeNumber { least: 0, most: u64::MAX, expected }).map(Self)
    }
}

struct WholeNumber {
    least: u64,
    most: u64,
    expected: String,
}

impl Visitor<'_> for WholeNumber {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.expected)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<u64, E> {
        match (self.least..=self.most).contains(&number) {
            true => Ok(number),
            false => Err(E::custom(format_args!("must be {}, not {number}", self.expected))),
        }
    }

    /// `5.0` is a whole number, as JSON Schema says.
    fn visit_f64<E: Error>(self, number: f64) -> Result<u64, E> {
        match number.fract() == 0.0 && (0.0..FLOAT_EXACT_BELOW).contains(&number) {
            true => self.visit_u64(number as u64),
            false => Err(E::invalid_value(Unexpected::Float(number), &self)),
        }
    }
}

/// Below this, every whole number has a floating-point number of its own.
const FLOAT_EXACT_BELOW: f64 = 9_007_199_254_740_992.0;

/// Texts by name in lower case. A name that stands twice is refused: either value could be meant.
#[derive(Default, Debug)]
struct Members<'a>(Values<'a>);

/// At most [`MEMBERS_MAX`] texts by name, each of at most [`VALUE_BYTES_MAX`] bytes. Names keep their case.
#[derive(Default, Debug)]
struct FewMembers<'a>(Values<'a>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut members = deserializer.deserialize_map(MembersReader { most: usize::MAX })?;
        for (name, _) in &mut members {
            if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
                name.to_mut().make_ascii_lowercase();
            }
        }
        refuse_repeated(&members).map_err(D::Error::custom)?;
        Ok(Self(members))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for FewMembers<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let members = deserializer.deserialize_map(MembersReader { most: MEMBERS_MAX })?;
        refuse_repeated(&members).map_err(D::Error::custom)?;
        match members.iter().find(|(_, value)| value.len() > VALUE_BYTES_MAX) {
            None => Ok(Self(members)),
            Some((name, _)) => Err(D::Error::custom(format_args!("{}: {}", shown(name), too_long()))),
        }
    }
}

fn refuse_repeated(members: &Values<'_>) -> Result<(), String> {
    let mut names: Vec<&str> = members.iter().map(|(name, _)| &**name).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(format!("{} stands more than once", shown(pair[0]))),
    }
}

struct MembersReader {
    most: usize,
}

impl<'de> Visitor<'de> for MembersReader {
    type Value = Values<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts, such as {\"x-plan\":\"pro\"}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Values<'de>, A::Error> {
        let mut members = Values::new();
        while let Some((AnyText(name), AnyText(value))) = object.next_entry()? {
            if members.len() >= self.most {
                return Err(A::Error::custom(format_args!("at most {} members", self.most)));
            }
            members.push((name, value));
        }
        Ok(members)
    }
}
