//! A request as a client describes it: `name value` pairs behind `TG.CHECK`, `TG.PEEK`, `TG.RESET` and `TG.EXPLAIN`.

use std::borrow::Cow;
use std::fmt::Display;

use super::frame::Argument;
use super::reply::Reply;
use super::throttle::text;
use crate::address::canonical;
use crate::identity::{IdentityConfig, is_api_key_id};
use crate::request::{Described, PERMITS_MAX, VALUE_BYTES_MAX, Values, host};

/// The names that a request is described with.
pub(super) const ACCEPTED: &str =
    "user, ip, apiKey, apiKeyId, tier, method, host, path, permits, header:NAME, query:NAME, attribute:NAME";

/// Reads `name value` pairs. `is_read` says which headers can change the decision; the others are left out.
pub(super) fn parse<'a>(
    arguments: &mut [Argument<'a>],
    is_read: &dyn Fn(&str) -> bool,
    identity: &IdentityConfig,
) -> Result<Described<'a>, Reply> {
    let mut request = Described::default();
    let mut seen: Vec<Cow<'a, str>> = Vec::with_capacity(arguments.len() / 2);
    for pair in arguments.chunks_mut(2) {
        let name = text("the name of a descriptor", std::mem::take(&mut pair[0]))?;
        let Some(value) = pair.get_mut(1) else {
            return Err(wrong(&name, "has no value; descriptors are pairs of name and value"));
        };
        let value = text(&shown(&name), std::mem::take(value))?;
        if value.len() > VALUE_BYTES_MAX {
            return Err(wrong(&name, format_args!("must have at most {VALUE_BYTES_MAX} bytes")));
        }
        if seen.contains(&name) {
            return Err(wrong(&name, "stands more than once"));
        }
        set(&mut request, &name, value, is_read, identity)?;
        seen.push(name);
    }
    Ok(request)
}

fn set<'a>(
    request: &mut Described<'a>,
    name: &str,
    value: Cow<'a, str>,
    is_read: &dyn Fn(&str) -> bool,
    identity: &IdentityConfig,
) -> Result<(), Reply> {
    match name {
        "user" => request.user = Some(value),
        "tier" => request.tier = Some(value),
        "method" => request.method = value,
        "host" => request.host = host(&value),
        "path" => request.path = path(value)?,
        "ip" => {
            let ip = value
                .parse()
                .map_err(|_| wrong(name, "must be an address such as 192.0.2.1 or 2001:db8::1"))?;
            request.ip = Some(canonical(ip));
        }
        "permits" => request.permits = permits(&value)?,
        "apiKey" | "apiKeyId" if request.api_key.is_some() => {
            return Err(wrong("apiKeyId", "only one of apiKey and apiKeyId"));
        }
        "apiKey" => {
            let id = identity.api_key_id(&value);
            request.api_key =
                Some(id.ok_or_else(|| wrong(name, "must be 1 to 512 characters of visible ASCII"))?);
        }
        "apiKeyId" if is_api_key_id(&value) => request.api_key = Some(value.into_owned()),
        "apiKeyId" => return Err(wrong(name, "must be 32 hexadecimal digits, as answers show it")),
        _ => return set_value(request, name, value, is_read),
    }
    Ok(())
}

/// Sets `header:NAME`, `query:NAME` or `attribute:NAME`.
fn set_value<'a>(
    request: &mut Described<'a>,
    name: &str,
    value: Cow<'a, str>,
    is_read: &dyn Fn(&str) -> bool,
) -> Result<(), Reply> {
    let add = |values: &mut Values<'a>, name: String| values.push((Cow::Owned(name), value));
    match name.split_once(':') {
        Some(("header", header)) if !header.is_empty() => {
            let header = header.to_ascii_lowercase();
            // A name in two spellings would leave open which value counts.
            if request.headers.iter().any(|(known, _)| *known == header) {
                return Err(wrong(name, "stands more than once"));
            }
            if is_read(&header) {
                add(&mut request.headers, header);
            }
        }
        Some(("query", parameter)) if !parameter.is_empty() => add(&mut request.query, parameter.to_owned()),
        Some(("attribute", attribute)) if !attribute.is_empty() => {
            add(&mut request.attributes, attribute.to_owned());
        }
        Some(_) | None => return Err(wrong(name, format_args!("no such descriptor; accepted: {ACCEPTED}"))),
    }
    Ok(())
}

/// A path without its query.
fn path(target: Cow<'_, str>) -> Result<Cow<'_, str>, Reply> {
    if !target.starts_with('/') {
        return Err(wrong("path", "must begin with /"));
    }
    let length = target.find('?').unwrap_or(target.len());
    Ok(match target {
        Cow::Borrowed(target) => Cow::Borrowed(&target[..length]),
        Cow::Owned(mut target) => {
            target.truncate(length);
            Cow::Owned(target)
        }
    })
}

/// A number of permits.
pub(super) fn permits(text: &str) -> Result<u64, Reply> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| is_number && (1..=PERMITS_MAX).contains(number));
    let why = || format!("must be a whole number from 1 to {PERMITS_MAX}, not {}", shown(text));
    number.ok_or_else(|| wrong("permits", why()))
}

/// An error that names a descriptor.
pub(super) fn wrong(name: &str, why: impl Display) -> Reply {
    Reply::error(format_args!("{}: {why}", shown(name)))
}

/// Characters of a client's text in an error.
const SHOWN_CHARS_MAX: usize = 40;

/// A client's text in an error: cut, and without control characters.
pub(super) fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(SHOWN_CHARS_MAX).collect()
}
