//! Values that are written as texts: rates, durations, shares, addresses. Each is parsed once, where it is read.

use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use tollgate::{Rate, Share, parse_duration};

/// A rate such as `100/min`.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateText(pub Rate);

/// A duration such as `1m30s`.
#[derive(Clone, Copy, Debug)]
pub(super) struct DurationText(pub Duration);

/// A fraction such as `1/2`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShareText(pub Share);

/// An address to listen on.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListenText(pub SocketAddr);

/// A network such as `10.0.0.0/8`.
#[derive(Clone, Copy, Debug)]
pub(super) struct NetworkText(pub IpNet);

impl FromStr for RateText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|why: tollgate::RateError| format!("{why}, not {text}"))
    }
}

impl FromStr for DurationText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let micros = parse_duration(text)
            .ok_or_else(|| format!("expected a duration such as 500ms, 10s or 1m30s, not {text}"))?;
        Ok(Self(micros.into()))
    }
}

impl FromStr for ShareText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|why: tollgate::ShareError| format!("{why}, not {text}"))
    }
}

impl FromStr for ListenText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected ADDRESS:PORT such as 127.0.0.1:8080, localhost:8080, [::]:8080 or :8080 (all IPv4 addresses)";
        let address = match text.rsplit_once(':') {
            Some(("", port)) => format!("{}:{port}", Ipv4Addr::UNSPECIFIED),
            Some((name, port)) if name.eq_ignore_ascii_case("localhost") => {
                format!("{}:{port}", Ipv4Addr::LOCALHOST)
            }
            Some(_) | None => text.to_owned(),
        };
        address.parse().map(Self).map_err(|_| format!("{expected}, not {text}"))
    }
}

impl FromStr for NetworkText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| format!("expected a network such as 10.0.0.0/8, not {text}"))
    }
}

impl std::fmt::Display for DurationText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}ms", self.0.as_millis())
    }
}

macro_rules! display_as_inner {
    ($($type:ident),*) => {
        $(impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        })*
    };
}

display_as_inner!(RateText, ShareText, ListenText, NetworkText);

/// Texts that are parsed once, at the door.
macro_rules! text {
    ($type:ident, $name:literal, $pattern:literal, $description:literal) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                // A number is no text, but is answered with what is expected, not with how it was read.
                let text = match serde_json::Value::deserialize(deserializer)? {
                    serde_json::Value::String(text) => text,
                    other => other.to_string(),
                };
                text.parse().map_err(de::Error::custom)
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "pattern": $pattern, "description": $description })
            }
        }
    };
}

pub(super) use text;

text!(
    RateText,
    "Rate",
    r"^[0-9]+\s*/\s*([a-z]+|([0-9]+(d|h|m|s|ms|us))+)$",
    "Permits per period: 10/s, 100/min, 5/1m30s"
);
text!(DurationText, "Duration", r"^([0-9]+(d|h|m|s|ms|us))+$", "Largest unit first: 500ms, 10s, 1m30s");

text!(ShareText, "Share", r"^[0-9]+\s*(/\s*[0-9]+|%)?$", "A part of a whole: 1/2, 50%");
text!(
    ListenText,
    "Listen",
    r"^.*:[0-9]+$",
    "Address and port: 127.0.0.1:8080, localhost:8080, [::1]:8080, :8080 (all IPv4 addresses)"
);
text!(
    NetworkText,
    "Network",
    r"^[0-9a-fA-F.:]+/[0-9]+$",
    "An address and the length of its prefix: 10.0.0.0/8, fd00::/8"
);
