//! The API as a machine reads it: OpenAPI 3.1, generated from the routes and the types of the messages.

use bytes::Bytes;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::actuator::{Health, Info};
use super::admin::{CheckedAnswer, HistoryAnswer, PolicySummary, PushedAnswer, TierAnswer, TiersAnswer};
use super::input::{KeyCheck, KeyOnly, RequestCheck, TierChange};
use super::problem::ProblemBody;
use super::routes::{Audience, Operation, ROUTES};
use crate::answer::{Explanation, KeyAnswer, RemainingAnswer, RequestAnswer, ResetAnswer};

/// Writes the document. `permits_max` is the most permits that a limit of the plain API can admit at once.
pub(crate) fn document(permits_max: u64) -> Bytes {
    Bytes::from(described(permits_max).to_string())
}

fn described(permits_max: u64) -> Value {
    let mut schemas = Schemas { permits_max, ..Schemas::new() };
    let mut paths = Map::new();
    for (method, path, operation) in ROUTES {
        let described = describe(operation, path, &mut schemas);
        let item = paths.entry(path).or_insert_with(|| json!({}));
        item[method.as_str().to_ascii_lowercase()] = described;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Tollgate", "version": env!("CARGO_PKG_VERSION"),
            "description": "An exact, distributed rate limiter. `/admin` and the pages below `/actuator`, except health, are on the admin port where tokens are configured or the API is not on loopback. `/forward-auth`, which reverse proxies call by any method, is described in docs/proxies.md.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" }
        },
        "servers": [{ "url": "/" }],
        "tags": [
            { "name": "keys", "description": "Checks of one key by one of five algorithms" },
            { "name": "policy", "description": "Checks of requests by the rules of the policy" },
            { "name": "actuator", "description": "Health, info and metrics" },
            { "name": "admin", "description": "The policy in force and assigned tiers" }
        ],
        "paths": paths,
        "components": {
            "schemas": schemas.definitions(),
            "securitySchemes": {
                "apiToken": { "type": "http", "scheme": "bearer", "description": "A token of `api.token_file`. Callers on loopback need none where no tokens are configured; nor do callers in `api.trusted_callers`." },
                "adminToken": { "type": "http", "scheme": "bearer", "description": "A token of `admin.token_file`. Callers on loopback need none where no tokens are configured." }
            }
        }
    })
}

/// The schemas of messages. A member that may be absent in a request is always there in an answer, so each has a generator.
struct Schemas {
    requests: SchemaGenerator,
    answers: SchemaGenerator,
    permits_max: u64,
}

impl Schemas {
    fn new() -> Self {
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
            settings.meta_schema = None;
        });
        Self {
            requests: settings.clone().into_generator(),
            answers: settings.for_serialize().into_generator(),
            permits_max: u64::MAX,
        }
    }

    fn definitions(&mut self) -> Map<String, Value> {
        let mut definitions = self.requests.take_definitions(true);
        definitions.extend(self.answers.take_definitions(true));
        if let Some(check) = definitions.get_mut("KeyCheck") {
            check["properties"]["permits"]["maximum"] = json!(self.permits_max);
        }
        definitions
    }
}

/// An operation, as the document describes it.
struct Description<'s> {
    schemas: &'s mut Schemas,
    operation: Value,
}

impl Description<'_> {
    fn respond(&mut self, status: u16, description: &str, content: Value) -> &mut Self {
        self.operation["responses"][status.to_string()] =
            json!({ "description": description, "content": content });
        self
    }

    fn answer<T: JsonSchema>(&mut self, status: u16, description: &str) -> &mut Self {
        let schema = self.schemas.answers.subschema_for::<T>();
        self.respond(status, description, json!({ "application/json": { "schema": schema } }))
    }

    /// An answer with the headers of a verdict.
    fn verdict<T: JsonSchema>(&mut self, status: u16, description: &str) -> &mut Self {
        self.answer::<T>(status, description);
        let number =
            |description: &str| json!({ "schema": { "type": "integer" }, "description": description });
        let text = |description: &str| json!({ "schema": { "type": "string" }, "description": description });
        let mut headers = json!({
            "X-RateLimit-Limit": number("The limit with the fewest permits left"),
            "X-RateLimit-Remaining": number("Whole permits left of it"),
            "X-RateLimit-Reset": number("When it is full, or its window ends, in epoch seconds"),
            "RateLimit": text("Every limit: r permits left, within t seconds"),
            "RateLimit-Policy": text("Every limit: q permits in w seconds"),
            "X-Tollgate-Basis": text("How the decision was made")
        });
        if status == 429 {
            headers["Retry-After"] = number("Seconds until the permits fit");
        }
        self.operation["responses"][status.to_string()]["headers"] = headers;
        self
    }

    /// Answers with a problem.
    fn problems(&mut self, problems: &[(u16, &str)]) -> &mut Self {
        for (status, description) in problems {
            let schema = self.schemas.answers.subschema_for::<ProblemBody<'_>>();
            self.respond(*status, description, json!({ "application/problem+json": { "schema": schema } }));
        }
        self
    }

    fn body<T: JsonSchema>(&mut self, example: Value) -> &mut Self {
        let schema = self.schemas.requests.subschema_for::<T>();
        let content = json!({ "application/json": { "schema": schema, "example": example } });
        self.operation["requestBody"] = json!({ "required": true, "content": content });
        self
    }

    /// Up to 1,000 checks in one body; the answer is a list of answers or problems. A check that is not valid does not spoil the batch, so
    /// the document asks only for objects.
    fn batch<T: JsonSchema, A: JsonSchema>(&mut self, example: Value) -> &mut Self {
        let name = T::schema_name();
        self.schemas.requests.subschema_for::<T>();
        let description = format!("Each a {name}. One that is not valid gets a problem as its answer.");
        let checks = json!({
            "type": "array", "maxItems": 1_000, "items": { "type": "object" }, "description": description
        });
        let schema = json!({
            "type": "object", "additionalProperties": false, "required": ["checks"], "properties": { "checks": checks }
        });
        let content = json!({ "application/json": { "schema": schema, "example": example } });
        self.operation["requestBody"] = json!({ "required": true, "content": content });
        let answer = self.schemas.answers.subschema_for::<A>();
        let problem = self.schemas.answers.subschema_for::<ProblemBody<'_>>();
        let answers = json!({ "type": "array", "items": { "anyOf": [answer, problem] } });
        let description =
            "One answer for each check, in order: the verdict, or the problem that the check alone would get";
        self.respond(200, description, json!({ "application/json": { "schema": answers } }))
    }

    /// A policy as a body.
    fn policy_text(&mut self) -> &mut Self {
        let example = "rules:\n  - { name: per-user, key: user, limit: 100/min }\n";
        let media = json!({ "schema": { "type": "string" }, "example": example });
        self.operation["requestBody"] = json!({ "required": true, "content": { "application/yaml": media } });
        self
    }

    /// The parameters of a query: the members of a type.
    fn query<T: JsonSchema>(&mut self) -> &mut Self {
        let schema = self.schemas.requests.root_schema_for::<T>();
        let properties = schema.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
        for (name, mut schema) in properties {
            let description = schema.as_object_mut().and_then(|schema| schema.remove("description"));
            if name == "permits" {
                schema["maximum"] = json!(self.schemas.permits_max);
            }
            self.parameter(
                json!({ "name": name, "in": "query", "description": description, "schema": schema }),
            );
        }
        self
    }

    fn parameter(&mut self, parameter: Value) -> &mut Self {
        match &mut self.operation["parameters"] {
            Value::Array(parameters) => parameters.push(parameter),
            none => *none = json!([parameter]),
        }
        self
    }

    /// `If-Match`, which guards a change of the policy.
    fn if_match(&mut self) -> &mut Self {
        let description = "Only if this version is in force: a version in quotes, as `ETag` has it, or `*`";
        let schema = json!({ "type": "string", "pattern": "^(\\*|\"[^\"]*\")$" });
        self.parameter(
            json!({ "name": "If-Match", "in": "header", "description": description, "schema": schema, "example": "*" }),
        )
    }
}

const INVALID: (u16, &str) = (400, "A parameter or member is not accepted; nothing was taken");
const NOT_CHECKED: (u16, &str) = (400, "Not a list of objects, or more than 1,000 checks; nothing was taken");
const TOKEN: (u16, &str) =
    (401, "A token or a trusted caller is needed, or the token is wrong; nothing was taken");
const FOREIGN: (u16, &str) =
    (403, "The Host or Origin is not accepted on a loopback listener without tokens");
const TOO_LARGE: (u16, &str) = (413, "The body is too large");
const NO_STORE: (u16, &str) =
    (503, "The store gives no decision and the limit is closed without it, or memory for bodies is short");
const ADMIN: [(u16, &str); 2] = [
    (401, "An admin token is needed, or the token is wrong"),
    (
        403,
        "No admin token is configured and the caller is beyond loopback, or a browser or a proxy sent the request",
    ),
];
const NOT_STORED: (u16, &str) = (503, "The store did not answer");

fn describe(operation: Operation, path: &str, schemas: &mut Schemas) -> Value {
    let (id, summary) = name(operation);
    let (tag, security) = match operation.audience() {
        Audience::Clients if path.starts_with("/api/v1/rate-limit") => {
            ("keys", json!([{}, { "apiToken": [] }]))
        }
        Audience::Clients => ("policy", json!([{}, { "apiToken": [] }])),
        Audience::Probes | Audience::Readers => ("actuator", json!([])),
        Audience::Admins => ("admin", json!([{}, { "adminToken": [] }])),
    };
    let operation_object = json!({
        "operationId": id, "summary": summary, "tags": [tag], "security": security, "responses": {}
    });
    let mut it = Description { schemas, operation: operation_object };
    for name in path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')) {
        let schema = match name {
            "number" => json!({ "type": "integer", "minimum": 1 }),
            _ => json!({ "type": "string", "pattern": "^[^\\x00-\\x1f\\x7f-\\x9f]{1,64}$" }),
        };
        it.parameter(json!({ "name": name, "in": "path", "required": true, "schema": schema }));
    }
    match operation.audience() {
        Audience::Clients => describe_check(&mut it, operation),
        Audience::Probes | Audience::Readers => describe_actuator(&mut it, operation),
        Audience::Admins => describe_admin(&mut it, operation),
    };
    it.operation
}

/// The id of an operation and what it does.
const fn name(operation: Operation) -> (&'static str, &'static str) {
    match operation {
        Operation::Check => ("check", "Take permits of a key, or learn when they are free"),
        Operation::CheckPost => ("checkPost", "The same, with a JSON body"),
        Operation::CheckBatch => ("checkBatch", "Check up to 1,000 keys, each by itself, in order"),
        Operation::Remaining => ("remaining", "Show the permits left of a key; takes none"),
        Operation::Reset => ("reset", "Reset the limit of a key"),
        Operation::PolicyCheck => ("checkRequest", "Check a request against all its limits together"),
        Operation::PolicyCheckBatch => {
            ("checkRequestBatch", "Check up to 1,000 requests, each by itself, in order")
        }
        Operation::Explain => {
            ("explain", "Explain the answer that a request would get now; takes no permits")
        }
        Operation::OpenApi => ("openapi", "This document"),
        Operation::Health => ("health", "Whether the node answers; with details on the admin port"),
        Operation::Liveness => ("liveness", "Whether the process runs"),
        Operation::Readiness => ("readiness", "Whether the node accepts requests"),
        Operation::Info => ("info", "The version, the store and the policy"),
        Operation::Prometheus => ("metrics", "Metrics for Prometheus"),
        Operation::GetPolicy => ("getPolicy", "The policy in force, with its text and version"),
        Operation::PutPolicy => ("putPolicy", "Push a policy to all nodes that share the store"),
        Operation::DeletePolicy => {
            ("deletePolicy", "Withdraw the pushed policy: each node uses its own again")
        }
        Operation::CheckPolicy => {
            ("checkPolicy", "Find the mistakes of a policy without putting it in force")
        }
        Operation::ReloadPolicy => ("reloadPolicy", "Read the policy's file again"),
        Operation::PolicyHistory => ("policyHistory", "The policies that were pushed last"),
        Operation::PushedPolicy => ("pushedPolicy", "The text of a policy that was pushed"),
        Operation::RollBackPolicy => ("rollBackPolicy", "Push an earlier policy again"),
        Operation::ListTiers => ("listTiers", "All tiers that were assigned"),
        Operation::GetTier => ("getTier", "The tier that a member was assigned"),
        Operation::PutTier => ("putTier", "Assign a tier to a member"),
        Operation::DeleteTier => ("deleteTier", "Withdraw the tier of a member"),
    }
}

fn describe_check(it: &mut Description<'_>, operation: Operation) {
    let request = json!({ "user": "alice", "ip": "192.0.2.1", "method": "GET", "path": "/api/items" });
    match operation {
        Operation::Check | Operation::CheckPost => {
            match operation {
                Operation::Check => it.query::<KeyCheck<'_>>(),
                _ => it.body::<KeyCheck<'_>>(json!({ "key": "user:123", "permits": 1 })),
            };
            it.verdict::<KeyAnswer<'_>>(200, "Allowed, perhaps after a delay")
                .verdict::<KeyAnswer<'_>>(429, "Denied; nothing was taken")
                .problems(&[INVALID, TOKEN, FOREIGN, TOO_LARGE, NO_STORE])
        }
        Operation::CheckBatch => it
            .batch::<KeyCheck<'_>, KeyAnswer<'_>>(json!({ "checks": [{ "key": "user:123" }, { "key": "user:456" }] }))
            .problems(&[NOT_CHECKED, TOKEN, FOREIGN, TOO_LARGE, NO_STORE]),
        Operation::Remaining => it
            .query::<KeyOnly<'_>>()
            .verdict::<RemainingAnswer<'_>>(200, "Also if no permit is left")
            .problems(&[INVALID, TOKEN, FOREIGN, NO_STORE]),
        Operation::Reset => it
            .query::<KeyOnly<'_>>()
            .answer::<ResetAnswer<'_>>(200, "Reset, also if the key was not known")
            .problems(&[INVALID, TOKEN, FOREIGN, NOT_STORED]),
        Operation::PolicyCheck => it
            .body::<RequestCheck<'_>>(request)
            .verdict::<RequestAnswer<'_>>(200, "Allowed, perhaps after a delay")
            .verdict::<RequestAnswer<'_>>(429, "Denied; nothing was taken")
            .answer::<RequestAnswer<'_>>(422, "More limits apply than can be checked together")
            .problems(&[INVALID, TOKEN, (403, "A rule needs a key that the request does not have, or the Host or Origin is not accepted"), TOO_LARGE, NO_STORE]),
        Operation::PolicyCheckBatch => it
            .batch::<RequestCheck<'_>, RequestAnswer<'_>>(json!({ "checks": [request] }))
            .problems(&[NOT_CHECKED, TOKEN, FOREIGN, TOO_LARGE, NO_STORE]),
        Operation::Explain => it
            .body::<RequestCheck<'_>>(request)
            .answer::<Explanation<'_>>(200, "Also if the request would be denied")
            .problems(&[INVALID, TOKEN, FOREIGN, TOO_LARGE, NO_STORE]),
        _ => it
            .respond(200, "The document", json!({ "application/json": { "schema": { "type": "object" } } }))
            .problems(&[FOREIGN]),
    };
}

fn describe_actuator(it: &mut Description<'_>, operation: Operation) {
    let here = (404, "This page is on the admin port");
    match operation {
        Operation::Info => it.answer::<Info<'_>>(200, "As asked").problems(&[FOREIGN, here]),
        Operation::Prometheus => {
            let text = json!({ "schema": { "type": "string" } });
            let content = json!({ "text/plain": text, "application/openmetrics-text": text });
            it.respond(200, "The format by `Accept`", content).problems(&[FOREIGN, here])
        }
        _ => it
            .answer::<Health<'_>>(200, "In service")
            .answer::<Health<'_>>(503, "Told to stop")
            .problems(&[FOREIGN]),
    };
}

fn describe_admin(it: &mut Description<'_>, operation: Operation) {
    let mistakes = (422, "The policy has mistakes, or too many limits; nothing was changed");
    let other_version = (412, "Another version is in force");
    let no_such_number = (404, "No such number is kept");
    let no_such_family = (404, "The policy has no such family");
    let here = (404, "This page is on the admin port");
    it.problems(&ADMIN).problems(&[here]);
    match operation {
        Operation::GetPolicy => it.answer::<PolicySummary>(200, "As asked"),
        Operation::PutPolicy => {
            it.policy_text().if_match().answer::<PolicySummary>(200, "In force").problems(&[
                (400, "Not UTF-8, or `If-Match` is not accepted"),
                other_version,
                TOO_LARGE,
                mistakes,
                NOT_STORED,
            ])
        }
        Operation::DeletePolicy => it
            .if_match()
            .answer::<PolicySummary>(200, "The node's own policy is in force")
            .problems(&[(400, "`If-Match` is not accepted"), other_version, mistakes, NOT_STORED]),
        Operation::CheckPolicy => it.policy_text().answer::<CheckedAnswer>(200, "No mistakes").problems(&[
            (400, "Not UTF-8"),
            TOO_LARGE,
            mistakes,
            NOT_STORED,
        ]),
        Operation::ReloadPolicy => it
            .answer::<PolicySummary>(200, "Read again")
            .problems(&[(409, "A pushed policy is in force, or there is no file"), mistakes]),
        Operation::PolicyHistory => it.answer::<HistoryAnswer>(200, "As asked").problems(&[NOT_STORED]),
        Operation::PushedPolicy => {
            it.answer::<PushedAnswer>(200, "As asked").problems(&[no_such_number, NOT_STORED])
        }
        Operation::RollBackPolicy => it.if_match().answer::<PolicySummary>(200, "In force").problems(&[
            (400, "`If-Match` is not accepted"),
            no_such_number,
            other_version,
            mistakes,
            NOT_STORED,
        ]),
        Operation::GetTier => {
            it.answer::<TierAnswer>(200, "Also if none is assigned").problems(&[INVALID, no_such_family])
        }
        Operation::PutTier => it
            .body::<TierChange<'_>>(json!({ "tier": "pro" }))
            .answer::<TierAnswer>(200, "Assigned on all nodes")
            .problems(&[
                INVALID,
                no_such_family,
                TOO_LARGE,
                NOT_STORED,
                (507, "Too many members have a tier"),
            ]),
        Operation::DeleteTier => it.answer::<TierAnswer>(200, "Withdrawn on all nodes").problems(&[
            INVALID,
            no_such_family,
            NOT_STORED,
        ]),
        _ => it.answer::<TiersAnswer>(200, "As asked"),
    };
}
