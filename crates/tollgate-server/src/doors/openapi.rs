//! The API as a machine reads it: OpenAPI 3.1.

use serde_json::{Value, json};

const TOKEN: &str =
    "A token (api.token_file) or a trusted caller (api.trusted_callers) is needed, or the token is wrong";
const NAMED_KEY: &str =
    "A key is named without a token or a trusted caller, or the token is wrong; nothing was taken";

/// The document at `/openapi.json`.
pub(super) fn document() -> Value {
    let key = json!({
        "name": "key", "in": "query",
        "description": "Whose limit it is. Without it: the client's address.",
        "schema": { "$ref": "#/components/schemas/Key" }
    });
    let algorithm =
        json!({ "name": "algorithm", "in": "query", "schema": { "$ref": "#/components/schemas/Algorithm" } });
    let permits = json!({ "name": "permits", "in": "query", "schema": { "type": "integer", "minimum": 1, "default": 1 } });
    let wait = json!({
        "name": "maxWaitMillis", "in": "query",
        "description": "Ready to wait this long: a delay instead of a denial. The answer comes at once all the same.",
        "schema": { "type": "integer", "minimum": 0 }
    });
    let json_of = |schema: &str| json!({ "application/json": { "schema": { "$ref": format!("#/components/schemas/{schema}") } } });
    let problem = |description: &str| {
        json!({
            "description": description,
            "content": { "application/problem+json": { "schema": { "$ref": "#/components/schemas/Problem" } } }
        })
    };
    let status = json!({
        "X-RateLimit-Limit": { "schema": { "type": "integer" } },
        "X-RateLimit-Remaining": { "schema": { "type": "integer" } },
        "X-RateLimit-Reset": { "schema": { "type": "integer" }, "description": "Epoch seconds" },
        "RateLimit": { "schema": { "type": "string" } },
        "RateLimit-Policy": { "schema": { "type": "string" } },
        "X-Tollgate-Basis": {
            "schema": { "$ref": "#/components/schemas/Basis" }, "description": "On what ground it was decided"
        }
    });
    let mut denied_headers = status.clone();
    denied_headers["Retry-After"] = json!({ "schema": { "type": "integer", "minimum": 1 } });
    let check_responses = json!({
        "200": { "description": "Allowed", "headers": status, "content": json_of("Check") },
        "429": { "description": "Denied; nothing was taken", "headers": denied_headers, "content": json_of("Check") },
        "400": problem("A parameter cannot be taken"),
        "401": problem(NAMED_KEY),
        "413": problem("The body is too large"),
        "503": problem("The store does not decide, and the limit is closed without it, or memory for bodies is short; try again in a second")
    });
    let text = |kind: &str| json!({ "200": { "description": "As asked", "content": { kind: { "schema": { "type": "string" } } } } });
    let json_any = json!({ "application/json": { "schema": { "type": "object" } } });
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Tollgate", "version": env!("CARGO_PKG_VERSION"),
            "description": "An exact rate limiter.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" }
        },
        "servers": [{ "url": "/" }],
        "paths": {
            "/api/v1/rate-limit/check": {
                "get": {
                    "operationId": "check", "summary": "Take permits, or be told when",
                    "parameters": [algorithm, key, permits, wait], "responses": check_responses
                },
                "post": {
                    "operationId": "checkPost", "summary": "The same, with a JSON body",
                    "requestBody": { "required": true, "content": json_of("CheckRequest") }, "responses": check_responses
                }
            },
            "/api/v1/rate-limit/check/batch": { "post": {
                "operationId": "checkBatch", "summary": "Independent checks, decided in order",
                "requestBody": { "required": true, "content": json_of("Batch") },
                "responses": {
                    "200": {
                        "description": "One answer for each check: what was decided, or the problem that the check alone would get",
                        "content": json_of("BatchAnswer")
                    },
                    "400": problem("Not a list of objects, or too many; none was decided"),
                    "401": problem(NAMED_KEY),
                    "413": problem("The body is too large")
                }
            } },
            "/api/v1/rate-limit/remaining": { "get": {
                "operationId": "remaining", "summary": "Where a key stands; takes nothing",
                "parameters": [algorithm, key],
                "responses": {
                    "200": { "description": "Also at zero", "headers": status, "content": json_of("Remaining") },
                    "400": problem("A parameter cannot be taken"),
                    "401": problem(TOKEN),
                    "503": problem("The store does not answer, and the limit is closed without it")
                }
            } },
            "/api/v1/rate-limit/reset": { "delete": {
                "operationId": "reset", "summary": "Make a key as good as new",
                "parameters": [algorithm, key],
                "responses": {
                    "200": { "description": "Done, also for a key that was not known", "content": json_of("Reset") },
                    "400": problem("A parameter cannot be taken"),
                    "401": problem(TOKEN),
                    "503": problem("Not done: the store does not answer")
                }
            } },
            "/api/v1/check": { "post": {
                "operationId": "judge", "summary": "Judge a request by the policy: all its limits together",
                "requestBody": { "required": true, "content": json_of("Described") },
                "responses": {
                    "200": { "description": "It may go ahead", "headers": status, "content": json_of("Judged") },
                    "429": { "description": "Denied; nothing was taken", "headers": denied_headers, "content": json_of("Judged") },
                    "403": { "description": "It lacks a key that a rule insists on; the rule settles the status", "content": json_of("Judged") },
                    "400": problem("A member cannot be taken"),
                    "401": problem(TOKEN),
                    "413": problem("The body is too large"),
                    "422": { "description": "More limits apply than can be checked together", "content": json_of("Judged") },
                    "503": problem("The store does not decide, and a limit is closed without it; try again in a second")
                }
            } },
            "/api/v1/check/batch": { "post": {
                "operationId": "judgeBatch", "summary": "Independent requests, judged in order",
                "requestBody": { "required": true, "content": json_of("DescribedBatch") },
                "responses": {
                    "200": {
                        "description": "One answer for each: the verdict, or the problem that the request alone would get",
                        "content": json_of("JudgedBatch")
                    },
                    "400": problem("Not a list of objects, or too many; none was judged"),
                    "401": problem(TOKEN),
                    "413": problem("The body is too large")
                }
            } },
            "/api/v1/explain": { "post": {
                "operationId": "explain", "summary": "The verdict that would be given now, and why; takes nothing",
                "requestBody": { "required": true, "content": json_of("Described") },
                "responses": {
                    "200": { "description": "Also if it would be denied", "content": json_of("Explained") },
                    "400": problem("A member cannot be taken"),
                    "401": problem(TOKEN),
                    "413": problem("The body is too large")
                }
            } },
            "/actuator/health": { "get": { "operationId": "health", "responses": {
                "200": { "description": "It answers by its contract", "content": json_any },
                "503": { "description": "It was told to stop", "content": json_any }
            } } },
            "/actuator/health/liveness": { "get": { "operationId": "liveness", "responses": {
                "200": { "description": "It runs", "content": json_any }
            } } },
            "/actuator/health/readiness": { "get": { "operationId": "readiness", "responses": {
                "200": { "description": "It answers by its contract", "content": json_any },
                "503": { "description": "It was told to stop", "content": json_any }
            } } },
            "/actuator/info": { "get": { "operationId": "info", "responses": text("application/json") } },
            "/actuator/prometheus": { "get": { "operationId": "metrics", "responses": text("text/plain") } }
        },
        "components": { "schemas": schemas() }
    })
}

fn schemas() -> Value {
    let natural = json!({ "type": "integer", "minimum": 0 });
    let algorithm = json!({ "$ref": "#/components/schemas/Algorithm" });
    let key = json!({ "$ref": "#/components/schemas/Key" });
    let mut schemas = json!({
        "Algorithm": {
            "type": "string", "default": "TOKEN_BUCKET",
            "enum": ["TOKEN_BUCKET", "LEAKY_BUCKET", "FIXED_WINDOW", "SLIDING_WINDOW", "SLIDING_WINDOW_COUNTER"]
        },
        "Key": { "type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[^{}\\x00-\\x1f\\x7f]+$", "examples": ["user:123"] },
        "Basis": { "enum": ["exact", "leased", "local", "open", "closed"] },
        "CheckRequest": {
            "type": "object", "additionalProperties": false,
            "properties": {
                "algorithm": algorithm, "key": key,
                "permits": { "type": "integer", "minimum": 1, "default": 1 }, "maxWaitMillis": natural
            }
        },
        "Batch": {
            "type": "object", "additionalProperties": false, "required": ["checks"],
            "properties": { "checks": { "type": "array", "maxItems": 1000, "items": { "$ref": "#/components/schemas/CheckRequest" } } }
        },
        "Check": {
            "type": "object", "additionalProperties": false,
            "required": ["allowed", "key", "algorithm", "remaining", "resetAfterSeconds", "retryAfterSeconds", "message",
                "limit", "basis", "delayMillis", "retryAfterMillis"],
            "properties": {
                "allowed": { "type": "boolean" }, "key": key, "algorithm": algorithm, "remaining": natural,
                "resetAfterSeconds": natural, "retryAfterSeconds": natural, "retryAfterMillis": natural,
                "message": { "enum": ["Request allowed", "Rate limit exceeded"] },
                "limit": natural,
                "basis": { "$ref": "#/components/schemas/Basis" },
                "delayMillis": natural
            }
        },
        "BatchAnswer": { "type": "array", "items": { "anyOf": [
            { "$ref": "#/components/schemas/Check" }, { "$ref": "#/components/schemas/Problem" }
        ] } },
        "Remaining": {
            "type": "object", "additionalProperties": false,
            "required": ["key", "algorithm", "limit", "remaining", "resetAfterSeconds"],
            "properties": {
                "key": key, "algorithm": algorithm, "limit": natural, "remaining": natural, "resetAfterSeconds": natural
            }
        },
        "Reset": {
            "type": "object", "additionalProperties": false, "required": ["key", "algorithm", "message"],
            "properties": { "key": key, "algorithm": algorithm, "message": { "type": "string" } }
        },
        "Problem": {
            "type": "object", "required": ["type", "title", "status", "detail"],
            "properties": {
                "type": { "type": "string" }, "title": { "type": "string" }, "status": { "type": "integer" },
                "detail": { "type": "string" }, "parameter": { "type": "string" },
                "code": { "enum": ["PERMITS_EXCEED_LIMIT"] }
            }
        }
    });
    if let (Value::Object(all), Value::Object(of_policy)) = (&mut schemas, policy_schemas()) {
        all.extend(of_policy);
    }
    schemas
}

/// Those of requests that are described and judged.
fn policy_schemas() -> Value {
    let natural = json!({ "type": "integer", "minimum": 0 });
    let algorithm = json!({ "$ref": "#/components/schemas/Algorithm" });
    let texts =
        json!({ "type": "object", "maxProperties": 128, "additionalProperties": { "type": "string" } });
    let limit = json!({
                    "type": "object", "additionalProperties": false,
                    "required": ["rule", "key", "algorithm", "allowed", "cost", "limit", "remaining", "resetAfterSeconds",
                        "retryAfterSeconds", "retryAfterMillis", "delayMillis", "basis"],
                    "properties": {
                        "rule": { "type": "string" }, "key": { "type": "string" }, "algorithm": algorithm,
                        "allowed": { "type": "boolean" }, "cost": natural, "limit": natural, "remaining": natural,
                        "resetAfterSeconds": natural, "retryAfterSeconds": natural, "retryAfterMillis": natural, "delayMillis": natural,
                        "basis": { "enum": ["exact", "leased", "local", "open", "closed", "shadow"] },
                        "candidate": { "type": "boolean" }
                    }
    });
    json!({
        "Described": {
            "type": "object", "additionalProperties": false,
            "properties": {
                "ip": { "type": ["string", "null"], "examples": ["192.0.2.1"],
                    "description": "The client's address; absent or null: the request has none" },
                "user": { "type": "string" }, "tier": { "type": "string" },
                "apiKey": { "type": "string", "description": "The API key itself; it counts as verified" },
                "apiKeyId": { "type": "string", "pattern": "^[0-9a-f]{32}$",
                    "description": "The identifier of an API key, as answers show it, in place of apiKey" },
                "method": { "type": "string" }, "host": { "type": "string" },
                "path": { "type": "string", "pattern": "^/" },
                "headers": { "type": "object", "additionalProperties": { "type": "string" },
                    "description": "As the client sent them. An API key counts as verified if identity.api_key.known_file lists it; trusted headers are believed only if the caller is a trusted proxy" },
                "query": texts, "attributes": texts,
                "permits": { "type": "integer", "minimum": 1, "default": 1 }
            }
        },
        "DescribedBatch": {
            "type": "object", "additionalProperties": false, "required": ["checks"],
            "properties": { "checks": { "type": "array", "maxItems": 1000, "items": { "$ref": "#/components/schemas/Described" } } }
        },
        "Judged": {
            "type": "object", "additionalProperties": false,
            "required": ["allowed", "rule", "code", "message", "limit", "remaining", "resetAfterSeconds", "retryAfterSeconds",
                "retryAfterMillis", "delayMillis", "basis", "limits"],
            "properties": {
                "allowed": { "type": "boolean" }, "rule": { "type": ["string", "null"] }, "code": { "type": ["string", "null"] },
                "message": { "type": "string" },
                "limit": { "type": ["integer", "null"] }, "remaining": { "type": ["integer", "null"] },
                "resetAfterSeconds": natural, "retryAfterSeconds": natural, "retryAfterMillis": natural, "delayMillis": natural,
                "basis": { "$ref": "#/components/schemas/Basis" },
                "skippedRules": { "type": "array", "items": { "type": "string" },
                    "description": "Rules that match and were not checked, because the request has none of their keys" },
                "retryAfterIsLowerBound": { "const": true,
                    "description": "Only the limit that denies was looked at: the others may need a longer wait" },
                "unmatched": { "const": true, "description": "No rule applied, and no default" },
                "unverifiedToken": { "type": "string" },
                "unverifiedApiKey": { "const": true },
                "limits": { "type": "array", "items": limit }
            }
        },
        "JudgedBatch": { "type": "array", "items": { "anyOf": [
            { "$ref": "#/components/schemas/Judged" }, { "$ref": "#/components/schemas/Problem" }
        ] } },
        "Explained": {
            "type": "object", "description": "What Judged has, and why",
            "required": ["allowed", "limits", "rules", "notMatched", "identity", "excluded", "endpoint", "tiers", "unknownTier", "policy"],
            "properties": {
                "identity": {
                    "type": "array", "items": { "enum": ["user", "api_key", "anonymous"] },
                    "description": "How the request is identified, after verification: what `match: { identity: ... }` compares"
                },
                "rules": { "type": "array", "items": {
                    "type": "object", "properties": { "rule": { "type": "string" }, "why": { "type": "string" } }
                } },
                "notMatched": { "type": "array", "items": {
                    "type": "object", "properties": { "rule": { "type": "string" }, "why": { "type": "string" } }
                }, "description": "Rules that do not match, each with its first condition that does not hold; at most 100" },
                "excluded": { "type": "boolean" }, "endpoint": { "type": ["string", "null"] },
                "tiers": { "type": "object", "additionalProperties": { "type": "string" } },
                "unknownTier": { "type": "boolean" }, "policy": { "type": "string" }
            }
        }
    })
}
