//! A request as its caller describes it.

use std::borrow::Cow;
use std::collections::HashSet;
use std::net::IpAddr;

use http::StatusCode;
use serde_json::{Map, Value};
use tollgate::rules::Descriptors;

use crate::address::canonical;
use crate::doors::json::shown;
use crate::doors::problem::Problem;
use crate::identity::{Identified, IdentityConfig, Unverified, identify, is_api_key_id};

/// The names that a description takes.
const NAMES: &str =
    "ip, user, apiKey, apiKeyId, tier, method, host, path, headers, query, attributes, permits";
/// Bytes of one value: far more than any honest one, and few enough to be compared.
const VALUE_BYTES_MAX: usize = 4 * 1024;
/// Permits of one request: the largest number that every limit is exact with.
const PERMITS_MAX: u64 = 1 << 50;

/// A request as it was described, each part valid by itself.
#[derive(Default, Debug)]
pub(in crate::doors) struct Asked<'a> {
    /// None: the request has no address. The caller's own is never meant.
    ip: Option<IpAddr>,
    user: Option<Cow<'a, str>>,
    api_key: Option<String>,
    tier: Option<Cow<'a, str>>,
    method: &'a str,
    host: String,
    path: &'a str,
    headers: Vec<(String, &'a str)>,
    query: Vec<(String, &'a str)>,
    attributes: Vec<(String, &'a str)>,
    permits: Option<u64>,
    pub(super) not_verified: NotVerified,
}

/// Tokens and API keys of a request that identify nothing.
#[derive(Clone, Copy, Default, Debug)]
pub(in crate::doors) struct NotVerified {
    /// Why the token is not believed.
    pub(super) token: Option<Unverified>,
    /// Whether there is an API key that is not known.
    pub(super) api_key: bool,
}

impl<'a> Asked<'a> {
    /// Reads a description. `is_read` says which headers, by their names in lower case, can change what is decided.
    pub(super) fn from_json(
        value: &'a Value,
        is_read: &dyn Fn(&str) -> bool,
        identity: &IdentityConfig,
        caller_is_proxy: bool,
        now_secs: u64,
    ) -> Result<Self, Problem> {
        let Value::Object(members) = value else {
            let detail = "expected a JSON object such as {\"path\":\"/api/login\",\"method\":\"POST\",\"ip\":\"192.0.2.1\"}";
            return Err(Problem::new(StatusCode::BAD_REQUEST, detail));
        };
        let mut asked = Self { path: "/", ..Self::default() };
        for (name, value) in members {
            match name.as_str() {
                "ip" => asked.ip = ip(value)?,
                "user" => asked.user = Some(text(name, value)?.into()),
                "apiKey" => {
                    let id = identity.api_key_id(text(name, value)?);
                    let wrong = || Problem::parameter(name, "must be 1 to 512 characters of visible ASCII");
                    asked.name_api_key(id.ok_or_else(wrong)?)?;
                }
                "apiKeyId" => {
                    let id = Some(text(name, value)?).filter(|id| is_api_key_id(id));
                    let wrong =
                        || Problem::parameter(name, "must be 32 hexadecimal digits, as answers show it");
                    asked.name_api_key(id.ok_or_else(wrong)?.to_owned())?;
                }
                "tier" => asked.tier = Some(text(name, value)?.into()),
                "method" => asked.method = text(name, value)?,
                "host" => asked.host = host(text(name, value)?),
                "path" => asked.path = path(value)?,
                "headers" => asked.headers = headers(value, is_read)?,
                "query" => asked.query = fields(name, value)?,
                "attributes" => asked.attributes = fields(name, value)?,
                "permits" => {
                    let permits = value.as_u64().filter(|permits| (1..=PERMITS_MAX).contains(permits));
                    asked.permits = Some(permits.ok_or_else(|| {
                        Problem::parameter(
                            name,
                            format_args!("must be a whole number from 1 to {PERMITS_MAX}"),
                        )
                    })?);
                }
                other => {
                    let why = format_args!("no such member; accepted: {NAMES}");
                    return Err(Problem::parameter(&shown(other), why));
                }
            }
        }
        // The caller may say who is asking. It copies `headers` from the client: only a proxy overwrites the trusted ones.
        let header =
            |name: &str| asked.headers.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
        let Identified { user, api_key, has_unverified_api_key, tier, unverified } =
            identify(identity, header, caller_is_proxy, now_secs);
        let said = |text: Option<Cow<'a, str>>| text.filter(|text| !text.is_empty());
        asked.user = said(asked.user).or(user.map(Cow::Owned));
        asked.not_verified =
            NotVerified { token: unverified, api_key: has_unverified_api_key && asked.api_key.is_none() };
        asked.api_key = asked.api_key.or(api_key.map(|id| id.to_string()));
        asked.tier = said(asked.tier).or(tier.map(Cow::Owned));
        Ok(asked)
    }

    /// Sets the API key that the caller names, once.
    fn name_api_key(&mut self, id: String) -> Result<(), Problem> {
        match self.api_key.replace(id) {
            None => Ok(()),
            Some(_) => Err(Problem::parameter("apiKeyId", "only one of apiKey and apiKeyId")),
        }
    }

    /// What the policy is asked.
    pub(super) fn descriptors(&'a self) -> Descriptors<'a> {
        Descriptors {
            ip: self.ip,
            user: self.user.as_deref(),
            api_key: self.api_key.as_deref(),
            has_unverified_api_key: self.not_verified.api_key,
            tier: self.tier.as_deref(),
            method: self.method,
            host: &self.host,
            path: self.path,
            headers: &self.headers,
            query: &self.query,
            attributes: &self.attributes,
            ..Descriptors::default()
        }
    }

    /// The path, without its query, and the method.
    pub(super) fn target(&self) -> (&str, &str) {
        (self.path, self.method)
    }

    pub(super) fn permits(&self) -> u64 {
        self.permits.unwrap_or(1)
    }
}

const MUST_BE_TEXT: &str = "must be a text";

fn text<'a>(name: &str, value: &'a Value) -> Result<&'a str, Problem> {
    short(name, any_text(name, value)?)
}

fn any_text<'a>(name: &str, value: &'a Value) -> Result<&'a str, Problem> {
    value.as_str().ok_or_else(|| Problem::parameter(name, MUST_BE_TEXT))
}

fn short<'a>(name: &str, text: &'a str) -> Result<&'a str, Problem> {
    if text.len() > VALUE_BYTES_MAX {
        return Err(Problem::parameter(name, format_args!("must have at most {VALUE_BYTES_MAX} bytes")));
    }
    Ok(text)
}

fn ip(value: &Value) -> Result<Option<IpAddr>, Problem> {
    if value.is_null() {
        return Ok(None);
    }
    let parsed = value.as_str().and_then(|text| text.parse().ok()).map(canonical);
    parsed
        .map(Some)
        .ok_or_else(|| Problem::parameter("ip", "must be an address such as 192.0.2.1 or 2001:db8::1"))
}

/// Without its query, which no rule reads and which may be long.
fn path(value: &Value) -> Result<&str, Problem> {
    let target = any_text("path", value)?;
    let path = short("path", target.split('?').next().unwrap_or(target))?;
    if path.starts_with('/') { Ok(path) } else { Err(Problem::parameter("path", "must begin with /")) }
}

/// Lower case, without its port.
fn host(text: &str) -> String {
    let text = match text.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !host.ends_with(':') => host,
        Some(_) | None => text,
    };
    // With its last dot it is the same host.
    text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase()
}

fn members<'a>(name: &str, value: &'a Value) -> Result<&'a Map<String, Value>, Problem> {
    let wrong = || Problem::parameter(name, "must be an object of texts, such as {\"x-plan\":\"pro\"}");
    value.as_object().ok_or_else(wrong)
}

fn fields<'a>(name: &str, value: &'a Value) -> Result<Vec<(String, &'a str)>, Problem> {
    let fields = members(name, value)?.iter();
    fields.map(|(member, value)| Ok((member.clone(), text(&field(name, member), value)?))).collect()
}

/// The headers that are read, by their names in lower case. The others may be as long as their client likes.
fn headers<'a>(value: &'a Value, is_read: &dyn Fn(&str) -> bool) -> Result<Vec<(String, &'a str)>, Problem> {
    let members = members("headers", value)?;
    let mut headers = Vec::new();
    let mut known = HashSet::with_capacity(members.len());
    for (member, value) in members {
        let field = || field("headers", member);
        let value = value.as_str().ok_or_else(|| Problem::parameter(&field(), MUST_BE_TEXT))?;
        let name = member.to_ascii_lowercase();
        if is_read(&name) {
            headers.push((name.clone(), short(&field(), value)?));
        }
        // Of two, either could be the one that somebody else has set.
        if !known.insert(name) {
            return Err(Problem::parameter(&field(), "stands more than once"));
        }
    }
    Ok(headers)
}

/// The name of a member in an answer.
fn field(name: &str, member: &str) -> String {
    format!("{name}.{}", shown(member))
}
