//! The API as a machine reads it: OpenAPI 3.1.

use serde_json::{Value, json};

/// The document at `/openapi.json`.
pub(super) fn document() -> Value {
    let key = json!({
        "name": "key", "in": "query",
        "description": "Whose limit it is. Without it, or where the caller may not choose it: the client's address.",
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
    let standing = json!({
        "X-RateLimit-Limit": { "schema": { "type": "integer" } },
        "X-RateLimit-Remaining": { "schema": { "type": "integer" } },
        "X-RateLimit-Reset": { "schema": { "type": "integer" }, "description": "Epoch seconds" },
        "RateLimit": { "schema": { "type": "string" } },
        "RateLimit-Policy": { "schema": { "type": "string" } },
        "X-Tollgate-Basis": {
            "schema": { "$ref": "#/components/schemas/Basis" }, "description": "On what ground it was decided"
        }
    });
    let mut denied_headers = standing.clone();
    denied_headers["Retry-After"] = json!({ "schema": { "type": "integer", "minimum": 1 } });
    let check_responses = json!({
        "200": { "description": "Allowed", "headers": standing, "content": json_of("Check") },
        "429": { "description": "Denied; nothing was taken", "headers": denied_headers, "content": json_of("Check") },
        "400": problem("A parameter cannot be taken"),
        "413": problem("The body is too large"),
        "503": problem("The store does not decide, and the limit is closed without it; try again in a second")
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
                        "description": "One answer for each check",
                        "content": { "application/json": { "schema": {
                            "type": "array", "items": { "$ref": "#/components/schemas/Check" } } } }
                    },
                    "400": problem("A check cannot be taken; none was decided"),
                    "413": problem("The body is too large")
                }
            } },
            "/api/v1/rate-limit/remaining": { "get": {
                "operationId": "remaining", "summary": "Where a key stands; takes nothing",
                "parameters": [algorithm, key],
                "responses": {
                    "200": { "description": "Also at zero", "headers": standing, "content": json_of("Remaining") },
                    "400": problem("A parameter cannot be taken"),
                    "401": problem("Beyond loopback a token or a trusted network is needed"),
                    "503": problem("The store does not answer, and the limit is closed without it")
                }
            } },
            "/api/v1/rate-limit/reset": { "delete": {
                "operationId": "reset", "summary": "Make a key as good as new",
                "parameters": [algorithm, key],
                "responses": {
                    "200": { "description": "Done, also for a key that was not known", "content": json_of("Reset") },
                    "400": problem("A parameter cannot be taken"),
                    "401": problem("Beyond loopback a token or a trusted network is needed"),
                    "503": problem("Not done: the store does not answer")
                }
            } },
            "/actuator/health": { "get": { "operationId": "health", "responses": {
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
    json!({
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
                "limit", "basis", "delayMillis"],
            "properties": {
                "allowed": { "type": "boolean" }, "key": key, "algorithm": algorithm, "remaining": natural,
                "resetAfterSeconds": natural, "retryAfterSeconds": natural,
                "message": { "enum": ["Request allowed", "Rate limit exceeded"] },
                "limit": natural,
                "basis": { "$ref": "#/components/schemas/Basis" },
                "delayMillis": natural
            }
        },
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
                "detail": { "type": "string" }, "parameter": { "type": "string" }
            }
        }
    })
}
