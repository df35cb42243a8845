//! From conditions and keys as they are written to what they mean.

use tollgate::rules::{
    Family, Glob, IdentityKind, KeyPart, KeySpec, Match, Network, PathPattern, Source, ValueCondition,
    is_name,
};

use super::Report;
use super::file::{IdentityName, MatchFields};
use super::text::Many;
use crate::config::check_network;
use crate::config::mistakes::nearest;
use crate::config::text::Text;
use crate::identity::{self, IdentityConfig};

/// The standard methods. Others are accepted, unless they look like a misspelled one of these.
pub(super) const METHODS: [&str; 9] =
    ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];

/// The conditions that fields stand for. What can never hold is a mistake.
pub(super) fn matching(fields: &MatchFields, families: &[Family], at: &str, report: Report<'_>) -> Match {
    let mut made = Match::default();
    for (number, path) in fields.path.0.iter().enumerate() {
        match PathPattern::new(path) {
            Ok(pattern) => made.paths.push(pattern),
            Err(why) => report(&item(at, "path", &fields.path, number), format!("{path}: {why}")),
        }
    }
    for (number, method) in fields.method.0.iter().enumerate() {
        let method = method.to_ascii_uppercase();
        if method.parse::<http::Method>().is_err() {
            report(&item(at, "method", &fields.method, number), format!("no method: {method}"));
        } else if !METHODS.contains(&method.as_str())
            && let Some(meant) = nearest(&method, METHODS.into_iter())
        {
            let why = format!("{method} is not a standard method (did you mean {meant}?)");
            report(&item(at, "method", &fields.method, number), why);
        }
        made.methods.push(method.into());
    }
    for (number, host) in fields.host.0.iter().enumerate() {
        if host.is_empty() || host.contains(['/', ' ']) || host.rsplit_once(':').is_some() {
            let why = format!("can never match: {host}; a host has no scheme, port or path");
            report(&item(at, "host", &fields.host, number), why);
        }
        made.hosts.push(Glob::new(&host.to_ascii_lowercase()));
    }
    for Text(net) in &fields.cidr.0 {
        check_network(net, |why| report(&format!("{at}.cidr"), why));
        made.networks.extend(Network::new(net.addr(), net.prefix_len()));
    }
    for (number, tier) in fields.tier.0.iter().enumerate() {
        let found = families.iter().enumerate().filter_map(|(family, it)| Some((family, it.number(tier)?)));
        let found: Vec<_> = found.collect();
        if found.is_empty() {
            report(
                &item(at, "tier", &fields.tier, number),
                format!("can never match: no tier is called {tier}"),
            );
        }
        made.tiers.extend(found);
    }
    made.identities.extend(fields.identity.0.iter().map(|name| match name {
        IdentityName::User => IdentityKind::User,
        IdentityName::ApiKey => IdentityKind::ApiKey,
        IdentityName::Anonymous => IdentityKind::Anonymous,
    }));
    for (source, word, conditions) in [
        (Source::Header, "header", &fields.header),
        (Source::Query, "query", &fields.query),
        (Source::Attribute, "attribute", &fields.attribute),
    ] {
        for (name, values) in conditions {
            let field = format!("{at}.{word}.{name}");
            let name = match source {
                Source::Header => name.to_ascii_lowercase(),
                Source::Query | Source::Attribute => name.clone(),
            };
            if source == Source::Header && name.parse::<http::HeaderName>().is_err() {
                report(&field, format!("no header is called {name}"));
            }
            if values.0.is_empty() || values.0.iter().any(|value| value.is_empty() || value == "!") {
                report(&field, "can never match; * stands for any value, !VALUE for any other".to_owned());
            }
            let not = |value: &String| value.strip_prefix('!').map(Glob::new);
            let any_of = values.0.iter().filter(|value| not(value).is_none()).map(|value| Glob::new(value));
            let (any_of, none_of) = (any_of.collect(), values.0.iter().filter_map(not).collect());
            made.values.push(ValueCondition { source, name: name.into(), any_of, none_of });
        }
    }
    let names = fields.attribute_names.as_ref();
    made.attribute_names = names.map(|names| names.iter().map(|name| name.as_str().into()).collect());
    made
}

/// Where an item of a list stands, or of what is no list.
pub(super) fn item<T>(at: &str, field: &str, many: &Many<T>, number: usize) -> String {
    match many.0.len() {
        1 => format!("{at}.{field}"),
        _ => format!("{at}.{field}.{number}"),
    }
}

/// The keys that texts stand for.
pub(super) fn keys(
    texts: &[String],
    matching: &Match,
    identity: &IdentityConfig,
    at: &str,
    report: Report<'_>,
) -> KeySpec {
    let mut keys = Vec::new();
    for (number, text) in texts.iter().enumerate() {
        let field = if texts.len() == 1 { at.to_owned() } else { format!("{at}.{number}") };
        if text == "identity" {
            keys.extend(identity.order.iter().map(|source| {
                vec![match source {
                    identity::Source::Jwt => KeyPart::User,
                    identity::Source::ApiKey => KeyPart::ApiKey,
                    identity::Source::Ip => KeyPart::Ip,
                }]
            }));
            continue;
        }
        let mut parts = Vec::new();
        for part in text.split('+') {
            match key_part(part.trim(), matching, identity) {
                Ok(part) if parts.contains(&part) => report(&field, format!("{text}: one part stands twice")),
                Ok(part) => parts.push(part),
                Err(why) => report(&field, why),
            }
        }
        if parts.len() > 1 && parts.contains(&KeyPart::Global) {
            report(&field, format!("{text}: global stands alone"));
        }
        if let Some(before) =
            keys.iter().position(|before: &Vec<KeyPart>| before.iter().all(|part| parts.contains(part)))
        {
            report(
                &field,
                format!("can never be used: where the request has {text}, it has key {} too", before + 1),
            );
        }
        keys.push(parts);
    }
    KeySpec(keys).with_unverified_api_keys()
}

/// Whether requests that match never have one of the keys: an anonymous request has no user.
pub(super) fn never_has_key(matching: &Match, keys: &KeySpec) -> bool {
    matching.identities == [IdentityKind::Anonymous]
        && !keys.0.is_empty()
        && keys.0.iter().all(|parts| parts.contains(&KeyPart::User))
}

/// Whether a name can be part of a key. Callers choose the names of attributes, so these may have more than letters and digits.
pub(crate) fn is_attribute_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic() && !b"+{}%".contains(&byte))
}

fn key_part(text: &str, matching: &Match, identity: &IdentityConfig) -> Result<KeyPart, String> {
    let (kind, name) = text.split_once(':').map_or((text, None), |(kind, name)| (kind, Some(name.trim())));
    Ok(match (kind, name) {
        ("ip", None) => KeyPart::Ip,
        ("user", None) => KeyPart::User,
        ("api_key", None) => KeyPart::ApiKey,
        ("host", None) => KeyPart::Host,
        ("global", None) => KeyPart::Global,
        ("header", Some(name)) if name.parse::<http::HeaderName>().is_ok() => {
            let name = name.to_ascii_lowercase();
            match identity.is_secret_header(&name) {
                true => KeyPart::SecretHeader(name.into()),
                false => KeyPart::Value(Source::Header, name.into()),
            }
        }
        ("query", Some(name)) if is_name(name) => KeyPart::Value(Source::Query, name.into()),
        ("attribute", Some(name)) if is_attribute_name(name) => {
            KeyPart::Value(Source::Attribute, name.into())
        }
        ("path", Some(name)) if is_name(name) => {
            let has = |pattern: &PathPattern| pattern.has_parameter(name);
            if matching.paths.is_empty() || !matching.paths.iter().all(has) {
                return Err(format!("path:{name}: a path of the rule has no {{{name}}}"));
            }
            KeyPart::Path(name.into())
        }
        _ => {
            return Err(format!(
                "no such key: {text}; accepted: ip, user, api_key, host, header:NAME, query:NAME, path:NAME, attribute:NAME, identity, global, and several joined with +"
            ));
        }
    })
}
