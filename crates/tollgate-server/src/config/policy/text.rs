//! Values of a policy that may be written in more than one way.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use tollgate::{AlgorithmName, Rate};

use super::file::{Exclusion, LimitFields, MatchFields};
use crate::config::text::text;

/// One, or a list of them.
#[derive(Clone, Debug)]
pub(in crate::config) struct Many<T>(pub Vec<T>);

impl<T> Default for Many<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Serialize> Serialize for Many<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [one] => one.serialize(serializer),
            all => all.serialize(serializer),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Many<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrList<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for OneOrList<T> {
            type Value = Many<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("one or a list of them")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Many<T>, A::Error> {
                let items: Vec<T> = Vec::deserialize(SeqAccessDeserializer::new(items))?;
                // Of none, anything or nothing could be meant.
                if items.is_empty() {
                    return Err(de::Error::custom("an empty list; expected at least one entry"));
                }
                Ok(Many(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Many<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(|one| Many(vec![one]))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Many<T>, E> {
                T::deserialize(text.into_deserializer()).map(|one| Many(vec![one]))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Many<T>, E> {
                self.visit_str(&number.to_string())
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Many<T>, E> {
                self.visit_str(&number.to_string())
            }

            fn visit_bool<E: de::Error>(self, yes: bool) -> Result<Many<T>, E> {
                self.visit_str(&yes.to_string())
            }
        }

        deserializer.deserialize_any(OneOrList(PhantomData))
    }
}

impl<T: JsonSchema> JsonSchema for Many<T> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("One or more of {}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = generator.subschema_for::<T>();
        json_schema!({ "anyOf": [one, { "type": "array", "items": one }] })
    }
}

/// `100/min`, `50/s burst 100`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::config) struct LimitText {
    pub rate: Rate,
    pub burst: Option<u64>,
}

impl FromStr for LimitText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a limit such as 100/min or 50/s burst 100, not {text}");
        let (rate, burst) = match text.split_once("burst") {
            Some((rate, burst)) => {
                (rate, Some(burst.trim().parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?))
            }
            None => (text, None),
        };
        let rate = rate.trim().parse().map_err(|why| match why {
            tollgate::RateError::Form => wrong(),
            tollgate::RateError::NoPermits | tollgate::RateError::NoTime => format!("{why}, not {text}"),
        })?;
        Ok(Self { rate, burst })
    }
}

impl fmt::Display for LimitText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.rate)?;
        self.burst.map_or(Ok(()), |burst| write!(f, " burst {burst}"))
    }
}

text!(
    LimitText,
    "Limit",
    r"^[0-9]+\s*/\s*([a-z]+|([0-9]+(d|h|m|s|ms|us))+)(\s+burst\s+[0-9]+)?$",
    "Permits per period, and how many at once: 100/min, 50/s burst 100"
);

/// A limit in a word or with its fields, or `unlimited`.
#[derive(Clone, Debug)]
pub(in crate::config) enum LimitItem {
    Unlimited,
    Limit(LimitFields),
}

impl Serialize for LimitItem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Unlimited => serializer.serialize_str("unlimited"),
            Self::Limit(fields) => match fields.in_a_word() {
                Some(limit) => limit.serialize(serializer),
                None => fields.serialize(serializer),
            },
        }
    }
}

impl<'de> Deserialize<'de> for LimitItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrFields;

        impl<'de> Visitor<'de> for TextOrFields {
            type Value = LimitItem;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a limit such as 100/min, unlimited, or fields such as { limit: 100/min, burst: 20 }",
                )
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<LimitItem, E> {
                if text == "unlimited" {
                    return Ok(LimitItem::Unlimited);
                }
                let limit = Some(text.parse().map_err(E::custom)?);
                Ok(LimitItem::Limit(LimitFields { limit, ..LimitFields::default() }))
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<LimitItem, A::Error> {
                LimitFields::deserialize(MapAccessDeserializer::new(fields)).map(LimitItem::Limit)
            }
        }

        deserializer.deserialize_any(TextOrFields)
    }
}

impl JsonSchema for LimitItem {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Limit or fields".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let (text, fields) =
            (generator.subschema_for::<LimitText>(), generator.subschema_for::<LimitFields>());
        json_schema!({ "anyOf": [text, fields, { "const": "unlimited" }] })
    }
}

impl<'de> Deserialize<'de> for Exclusion {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PathOrMatch;

        impl<'de> Visitor<'de> for PathOrMatch {
            type Value = Exclusion;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path such as /api/health, or conditions such as { cidr: 10.0.0.0/8 }")
            }

            fn visit_str<E: de::Error>(self, path: &str) -> Result<Exclusion, E> {
                Ok(Exclusion::Path(path.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Exclusion, A::Error> {
                MatchFields::deserialize(MapAccessDeserializer::new(fields)).map(Exclusion::Match)
            }
        }

        deserializer.deserialize_any(PathOrMatch)
    }
}

/// `10000/month`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::config) struct QuotaText {
    pub permits: u64,
    pub unit: Unit,
}

/// A period of the calendar.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::config) enum Unit {
    Day,
    Week,
    Month,
}

impl Unit {
    pub(in crate::config) const fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
        }
    }
}

impl FromStr for QuotaText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a quota such as 1000/day, 5000/week or 10000/month, not {text}");
        let (permits, unit) = text.split_once('/').ok_or_else(wrong)?;
        let unit = [Unit::Day, Unit::Week, Unit::Month].into_iter().find(|it| it.as_str() == unit.trim());
        let permits = permits.trim().parse().ok().filter(|permits| *permits > 0);
        permits.zip(unit).map(|(permits, unit)| Self { permits, unit }).ok_or_else(wrong)
    }
}

impl fmt::Display for QuotaText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.permits, self.unit.as_str())
    }
}

text!(
    QuotaText,
    "Quota",
    r"^[0-9]+\s*/\s*(day|week|month)$",
    "Permits per period of the calendar: 10000/month"
);

/// A weekday, or a day of the month.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::config) struct AnchorText(pub String);

impl fmt::Display for AnchorText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for AnchorText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::String(text) => Ok(Self(text)),
            other => Ok(Self(other.to_string())),
        }
    }
}

impl Serialize for AnchorText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl JsonSchema for AnchorText {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Anchor".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [
            { "enum": ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"] },
            { "type": "integer", "minimum": 1, "maximum": 31 }
        ] })
    }
}

/// The name of an algorithm.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::config) struct AlgorithmText(pub AlgorithmName);

impl FromStr for AlgorithmText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|why: tollgate::UnknownAlgorithm| format!("{why}, not {text}"))
    }
}

impl fmt::Display for AlgorithmText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

text!(
    AlgorithmText,
    "Algorithm",
    "^(TOKEN_BUCKET|LEAKY_BUCKET|FIXED_WINDOW|SLIDING_WINDOW|SLIDING_WINDOW_COUNTER)$",
    "One of the five algorithms"
);

/// A part of a limit: `1/10`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::config) struct FactorText {
    pub part: u64,
    pub whole: u64,
}

impl FromStr for FactorText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = match text.split_once('/') {
            Some((part, whole)) => part.trim().parse().ok().zip(whole.trim().parse().ok()),
            None => text.strip_suffix('%').and_then(|part| part.trim().parse().ok()).map(|part| (part, 100)),
        };
        match parsed {
            Some((part, whole)) if part > 0 && whole > 0 => Ok(Self { part, whole }),
            _ => Err(format!("expected a part such as 1/10 or 10%, not {text}")),
        }
    }
}

impl fmt::Display for FactorText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.part, self.whole)
    }
}

text!(FactorText, "Factor", r"^[0-9]+\s*(/\s*[0-9]+|%)$", "A part of a limit: 1/10, 10%");

/// A percentage, kept in hundredths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::config) struct PercentText(pub u64);

impl FromStr for PercentText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a percentage from 0% to 100% such as 10% or 0.5%, not {text}");
        let number = text.strip_suffix('%').ok_or_else(wrong)?.trim();
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || whole.len() > 3 || part.len() > 2 || !digits(whole) || !digits(part) {
            return Err(wrong());
        }
        let hundredths = format!("{whole}{part:0<2}").parse().map_err(|_| wrong())?;
        if hundredths <= 10_000 { Ok(Self(hundredths)) } else { Err(wrong()) }
    }
}

impl fmt::Display for PercentText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}%", self.0 / 100, self.0 % 100)
    }
}

text!(PercentText, "Percent", r"^[0-9]{1,3}(\.[0-9]{1,2})?\s*%$", "10%, 0.5%");

/// New subjects in a second: `1000/s`.
#[derive(Clone, Copy, Debug)]
pub(in crate::config) struct NewSubjectsText(pub NonZeroU32);

impl FromStr for NewSubjectsText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let count = text.trim().strip_suffix("/s").and_then(|count| count.trim().parse().ok());
        count.map(Self).ok_or_else(|| {
            format!("expected new subjects per second, at least 1/s, such as 1000/s, not {text}")
        })
    }
}

impl fmt::Display for NewSubjectsText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", self.0)
    }
}

text!(NewSubjectsText, "New subjects", r"^[0-9]+\s*/s$", "Per second: 1000/s");
