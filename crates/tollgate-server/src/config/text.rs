//! Values that are written as texts, such as rates and durations. Each is parsed once, when the file is read.

use std::borrow::Cow;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::Value;
use tollgate::{Rate, RateError, Share, ShareError, parse_duration};

/// A value that is written as a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::config) struct Text<T>(pub T);

/// How the values of a type are written.
pub(in crate::config) trait Written: Sized {
    /// The name of the type in the schema.
    const NAME: &'static str;

    fn schema() -> Schema;

    fn parse(text: &str) -> Result<Self, String>;

    fn to_text(&self) -> String;
}

impl<'de, T: Written> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // A number is parsed too, so that the mistake says what is expected.
        let text = match Value::deserialize(deserializer)? {
            Value::String(text) => text,
            other => other.to_string(),
        };
        T::parse(&text).map(Self).map_err(de::Error::custom)
    }
}

impl<T: Written> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_text())
    }
}

impl<T: Written> JsonSchema for Text<T> {
    fn schema_name() -> Cow<'static, str> {
        T::NAME.into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        T::schema()
    }
}

/// The schema of a text.
pub(in crate::config) fn pattern(pattern: &str, description: &str) -> Schema {
    json_schema!({ "type": "string", "pattern": pattern, "description": description })
}

/// A rate such as `100/min`.
pub(in crate::config) type RateText = Text<Rate>;
/// A duration such as `1m30s`.
pub(in crate::config) type DurationText = Text<Duration>;
/// A fraction such as `1/2`.
pub(in crate::config) type ShareText = Text<Share>;
/// An address to listen on.
pub(in crate::config) type ListenText = Text<SocketAddr>;
/// A network such as `10.0.0.0/8`.
pub(in crate::config) type NetworkText = Text<IpNet>;

impl Written for Rate {
    const NAME: &'static str = "Rate";

    fn schema() -> Schema {
        pattern(
            r"^[0-9]+\s*/\s*([a-z]+|([0-9]+(d|h|m|s|ms|us))+)$",
            "Permits per period: 10/s, 100/min, 5/1m30s",
        )
    }

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|why: RateError| format!("{why}, not {text}"))
    }

    fn to_text(&self) -> String {
        self.to_string()
    }
}

impl Written for Duration {
    const NAME: &'static str = "Duration";

    fn schema() -> Schema {
        pattern(r"^([0-9]+(d|h|m|s|ms|us))+$", "Largest unit first: 500ms, 10s, 1m30s")
    }

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a duration such as 500ms, 10s or 1m30s, not {text}");
        parse_duration(text).map(Self::from).ok_or_else(wrong)
    }

    fn to_text(&self) -> String {
        format!("{}ms", self.as_millis())
    }
}

impl Written for Share {
    const NAME: &'static str = "Share";

    fn schema() -> Schema {
        pattern(r"^[0-9]+\s*(/\s*[0-9]+|%)?$", "A part of a whole: 1/2, 50%")
    }

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|why: ShareError| format!("{why}, not {text}"))
    }

    fn to_text(&self) -> String {
        self.to_string()
    }
}

impl Written for SocketAddr {
    const NAME: &'static str = "Listen";

    fn schema() -> Schema {
        let forms = "127.0.0.1:8080, localhost:8080, [::1]:8080, :8080 (all IPv4 addresses)";
        pattern(r"^.*:[0-9]+$", &format!("Address and port: {forms}"))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let expected = "expected ADDRESS:PORT such as 127.0.0.1:8080, localhost:8080, [::]:8080 or :8080 (all IPv4 addresses)";
        let ip = match text.rsplit_once(':') {
            Some(("", _)) => Some(Ipv4Addr::UNSPECIFIED),
            Some((name, _)) if name.eq_ignore_ascii_case("localhost") => Some(Ipv4Addr::LOCALHOST),
            Some(_) | None => None,
        };
        let port = text.rsplit(':').next().unwrap_or_default();
        let address = ip.map_or_else(|| text.to_owned(), |ip| format!("{ip}:{port}"));
        address.parse().map_err(|_| format!("{expected}, not {text}"))
    }

    fn to_text(&self) -> String {
        self.to_string()
    }
}

impl Written for IpNet {
    const NAME: &'static str = "Network";

    fn schema() -> Schema {
        let about = "An address and the length of its prefix: 10.0.0.0/8, fd00::/8";
        pattern(r"^[0-9a-fA-F.:]+/[0-9]+$", about)
    }

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("expected a network such as 10.0.0.0/8, not {text}"))
    }

    fn to_text(&self) -> String {
        self.to_string()
    }
}
