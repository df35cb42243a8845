//! JSON Schemas of values that several messages have.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use tollgate::rules::IdentityKind;
use tollgate::{AlgorithmName, Basis};

/// Declares a named schema.
macro_rules! schema {
    ($name:ident as $shown:literal: $schema:expr) => {
        pub(crate) struct $name;

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                $shown.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                $schema
            }
        }
    };
}

schema!(AlgorithmSchema as "Algorithm": json_schema!({
    "type": "string",
    "default": "TOKEN_BUCKET",
    "enum": AlgorithmName::ALL.map(AlgorithmName::as_str),
}));
schema!(KeySchema as "Key": json_schema!({
    "type": "string",
    "minLength": 1,
    "maxLength": 256,
    "pattern": "^[^{}\\x00-\\x1f\\x7f-\\x9f]+$",
    "description": "At most 256 bytes, without control characters and braces.",
    "examples": ["user:123"],
}));
schema!(BasisSchema as "Basis": json_schema!({
    "type": "string",
    "description": "How the decision was made. `exact`: by the shared state; `leased`: by borrowed permits, within the shared limit; `local`, `open` and `closed`: without the store, by the limit's failure mode; `shadow`: counted only.",
    "enum": [
        Basis::Exact.as_str(), Basis::Leased.as_str(), Basis::Local.as_str(), Basis::Open.as_str(), Basis::Closed.as_str(),
        "shadow"
    ],
}));
schema!(AddressSchema as "Address": json_schema!({
    "type": "string",
    "anyOf": [{ "format": "ipv4" }, { "format": "ipv6" }],
    "examples": ["192.0.2.1", "2001:db8::1"],
}));
schema!(ShortSchema as "ShortText": json_schema!({ "type": "string", "maxLength": 4096 }));
schema!(PathSchema as "Path": json_schema!({
    "type": "string", "pattern": "^/", "maxLength": 4096, "examples": ["/api/login"],
}));
schema!(ApiKeySchema as "ApiKey": json_schema!({ "type": "string", "pattern": "^[!-~]{1,512}$" }));
schema!(ApiKeyIdSchema as "ApiKeyId": json_schema!({ "type": "string", "pattern": "^[0-9a-f]{32}$" }));
schema!(IdentitySchema as "Identity": json_schema!({
    "type": "string", "enum": IdentityKind::ALL.map(IdentityKind::as_str),
}));
schema!(HeadersSchema as "Headers": json_schema!({
    "type": "object",
    "additionalProperties": { "type": "string" },
    "examples": [{ "x-plan": "pro" }],
}));
schema!(MembersSchema as "Values": json_schema!({
    "type": "object",
    "maxProperties": 128,
    "additionalProperties": { "type": "string", "maxLength": 4096 },
}));

/// The default of `permits`.
pub(crate) const fn one() -> u64 {
    1
}
