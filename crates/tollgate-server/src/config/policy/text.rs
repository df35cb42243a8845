//! Values of a policy that are written as texts, or in more than one way.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use tollgate::{AlgorithmName, Rate, RateError, UnknownAlgorithm};

use super::file::{Exclusion, LimitFields};
use super::matching::METHODS;
use crate::config::text::{Text, Written, pattern};

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
    fn schema_name() -> Cow<'static, str> {
        format!("One or more of {}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = generator.subschema_for::<T>();
        json_schema!({ "anyOf": [one, { "type": "array", "items": one }] })
    }
}

/// `100/min`, `50/s burst 100`.
pub(in crate::config) type LimitText = Text<RateAndBurst>;
/// `10000/month`.
pub(in crate::config) type QuotaText = Text<Quota>;
/// A weekday, or a day of the month.
pub(in crate::config) type AnchorText = Text<String>;
/// The name of an algorithm.
pub(in crate::config) type AlgorithmText = Text<AlgorithmName>;
/// A part of a limit: `1/10`.
pub(in crate::config) type FactorText = Text<Factor>;
/// `10%`.
pub(in crate::config) type PercentText = Text<Percent>;
/// New subjects in a second: `1000/s`.
pub(in crate::config) type NewSubjectsText = Text<NonZeroU32>;

/// The name of a method, for the schema: editors complete the standard ones, and others are accepted.
pub(in crate::config) struct MethodName;

impl JsonSchema for MethodName {
    fn schema_name() -> Cow<'static, str> {
        "Method".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "enum": METHODS }, { "type": "string" }] })
    }
}

/// Reads a text or fields. Mistakes within the fields keep their position.
struct TextOrFields<T, F> {
    expected: &'static str,
    from_text: fn(&str) -> Result<T, String>,
    from_fields: fn(F) -> T,
}

impl<'de, T, F: Deserialize<'de>> Visitor<'de> for TextOrFields<T, F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.from_text)(text).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
        F::deserialize(MapAccessDeserializer::new(fields)).map(self.from_fields)
    }
}

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
        deserializer.deserialize_any(TextOrFields {
            expected: "a limit such as 100/min, unlimited, or fields such as { limit: 100/min, burst: 20 }",
            from_text: |text| match text {
                "unlimited" => Ok(Self::Unlimited),
                _ => {
                    let limit = Some(Text(RateAndBurst::parse(text)?));
                    Ok(Self::Limit(LimitFields { limit, ..LimitFields::default() }))
                }
            },
            from_fields: Self::Limit,
        })
    }
}

impl JsonSchema for LimitItem {
    fn schema_name() -> Cow<'static, str> {
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
        deserializer.deserialize_any(TextOrFields {
            expected: "a path such as /api/health, or conditions such as { cidr: 10.0.0.0/8 }",
            from_text: |path| Ok(Self::Path(path.to_owned())),
            from_fields: |fields| Self::Match(Box::new(fields)),
        })
    }
}

/// A rate, and how many permits at once.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::config) struct RateAndBurst {
    pub rate: Rate,
    pub burst: Option<u64>,
}

impl Written for RateAndBurst {
    const NAME: &'static str = "Limit";

    fn schema() -> Schema {
        pattern(
            r"^[0-9]+\s*/\s*([a-z]+|([0-9]+(d|h|m|s|ms|us))+)(\s+burst\s+[0-9]+)?$",
            "Permits per period, and how many at once: 100/min, 50/s burst 100",
        )
    }

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a limit such as 100/min or 50/s burst 100, not {text}");
        let (rate, burst) = match text.split_once("burst") {
            Some((rate, burst)) => {
                (rate, Some(burst.trim().parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?))
            }
            None => (text, None),
        };
        let rate = rate.trim().parse().map_err(|why| match why {
            RateError::Form => wrong(),
            RateError::NoPermits | RateError::NoTime => format!("{why}, not {text}"),
        })?;
        Ok(Self { rate, burst })
    }

    fn to_text(&self) -> String {
        let burst = self.burst.map(|burst| format!(" burst {burst}")).unwrap_or_default();
        format!("{}{burst}", self.rate)
    }
}

/// Permits for each period of the calendar.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::config) struct Quota {
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

impl Written for Quota {
    const NAME: &'static str = "Quota";

    fn schema() -> Schema {
        let about = "Permits per period of the calendar: 10000/month";
        pattern(r"^[0-9]+\s*/\s*(day|week|month)$", about)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a quota such as 1000/day, 5000/week or 10000/month, not {text}");
        let (permits, unit) = text.split_once('/').ok_or_else(wrong)?;
        let unit = [Unit::Day, Unit::Week, Unit::Month].into_iter().find(|it| it.as_str() == unit.trim());
        let permits = permits.trim().parse().ok().filter(|permits| *permits > 0);
        permits.zip(unit).map(|(permits, unit)| Self { permits, unit }).ok_or_else(wrong)
    }

    fn to_text(&self) -> String {
        format!("{}/{}", self.permits, self.unit.as_str())
    }
}

impl Written for String {
    const NAME: &'static str = "Anchor";

    fn schema() -> Schema {
        json_schema!({ "description": "A weekday, or a day of the month", "anyOf": [
            { "enum": ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"] },
            { "type": "integer", "minimum": 1, "maximum": 31 }
        ] })
    }

    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }

    fn to_text(&self) -> String {
        self.clone()
    }
}

impl Written for AlgorithmName {
    const NAME: &'static str = "Algorithm";

    fn schema() -> Schema {
        let names = Self::ALL.map(Self::as_str);
        json_schema!({ "type": "string", "enum": names, "description": "One of the five algorithms" })
    }

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|why: UnknownAlgorithm| format!("{why}, not {text}"))
    }

    fn to_text(&self) -> String {
        self.to_string()
    }
}

/// A part of a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::config) struct Factor {
    pub part: u64,
    pub whole: u64,
}

impl Written for Factor {
    const NAME: &'static str = "Factor";

    fn schema() -> Schema {
        pattern(r"^[0-9]+\s*(/\s*[0-9]+|%)$", "A part of a limit: 1/10, 10%")
    }

    fn parse(text: &str) -> Result<Self, String> {
        let parsed = match text.split_once('/') {
            Some((part, whole)) => part.trim().parse().ok().zip(whole.trim().parse().ok()),
            None => text.strip_suffix('%').and_then(|part| part.trim().parse().ok()).map(|part| (part, 100)),
        };
        match parsed {
            Some((part, whole)) if part > 0 && whole > 0 => Ok(Self { part, whole }),
            _ => Err(format!("expected a part such as 1/10 or 10%, not {text}")),
        }
    }

    fn to_text(&self) -> String {
        format!("{}/{}", self.part, self.whole)
    }
}

/// A percentage, kept in hundredths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::config) struct Percent(pub u64);

impl Written for Percent {
    const NAME: &'static str = "Percent";

    fn schema() -> Schema {
        pattern(r"^[0-9]{1,3}(\.[0-9]{1,2})?\s*%$", "A percentage: 10%, 0.5%")
    }

    fn parse(text: &str) -> Result<Self, String> {
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

    fn to_text(&self) -> String {
        format!("{}.{:02}%", self.0 / 100, self.0 % 100)
    }
}

impl Written for NonZeroU32 {
    const NAME: &'static str = "New subjects";

    fn schema() -> Schema {
        pattern(r"^[0-9]+\s*/s$", "New subjects per second: 1000/s")
    }

    fn parse(text: &str) -> Result<Self, String> {
        let count = text.trim().strip_suffix("/s").and_then(|count| count.trim().parse().ok());
        count.ok_or_else(|| {
            format!("expected new subjects per second, at least 1/s, such as 1000/s, not {text}")
        })
    }

    fn to_text(&self) -> String {
        format!("{self}/s")
    }
}
