//! Who is asking, over HTTP: a client cannot choose its limit by inventing keys, tokens and headers.

use std::path::PathBuf;

use serde_json::{Value, json};
use tollgate_server::config;

use crate::policy_on_memory::token;
use crate::server::{NOW_SECS, Response, Server};

const SECRET: &str = "a secret of thirty-two characters";
const CALLER: &str = "authorization: Bearer token-of-the-calling-backend\r\n";
/// An API key whose digest is in the file of known keys.
const KNOWN: &str = "known-key-1";

/// A service that reads tokens, API keys and trusted headers, and a folder with its files.
struct Service {
    server: Server,
    _folder: tempfile::TempDir,
}

/// What the service knows of its callers, beside the policy.
#[derive(Clone, Copy)]
struct Setup {
    knows_keys: bool,
    caller_is_proxy: bool,
}

/// The known key is known, and the caller is an ordinary backend.
const BACKEND: Setup = Setup { knows_keys: true, caller_is_proxy: false };

impl Service {
    fn start(setup: Setup, policy: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| -> PathBuf {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let known = file("known", &format!("# keys of customers\n{}  -\n", sha256(KNOWN)));
        let known = format!(", known_file: {}", known.display());
        let proxy = if setup.caller_is_proxy { "127.0.0.1/32" } else { "10.9.0.0/16" };
        let yaml = format!(
            "api: {{ token_file: {} }}
identity:
  jwt: {{ algorithms: [HS256], secret_file: {}, issuer: id, audience: api, tier_claim: plan }}
  api_key: {{ header: X-API-Key{} }}
  trusted_header: {{ user: X-User, tier: X-Tier }}
client_address: {{ header: X-Forwarded-For, trusted_proxies: [{proxy}] }}
policy:
{}",
            file("tokens", "token-of-the-calling-backend\n").display(),
            file("secret", SECRET).display(),
            if setup.knows_keys { &known } else { "" },
            policy.lines().map(|line| format!("  {line}\n")).collect::<String>(),
        );
        Self { server: Server::with(&yaml), _folder: folder }
    }

    fn ask(&self, target: &str, request: &Value) -> Response {
        self.server.ask("POST", target, CALLER, &request.to_string())
    }

    fn check(&self, request: &Value) -> Response {
        self.ask("/api/v1/check", request)
    }

    /// The keys of the limits that a request is checked against.
    fn keys(&self, request: &Value) -> Vec<String> {
        let response = self.check(request);
        let answer = response.json();
        let limits = answer["limits"].as_array().unwrap_or_else(|| panic!("{response:?}"));
        limits.iter().map(|limit| limit["key"].as_str().unwrap().to_owned()).collect()
    }
}

/// The SHA-256 digest of a text, in hexadecimal digits.
fn sha256(text: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn id_of(key: &str) -> String {
    sha256(key)[..32].to_owned()
}

/// A bearer token with this subject and one claim changed.
fn bearer(secret: &str, subject: &str, (claim, value): (&str, Value)) -> Value {
    let mut claims =
        json!({ "iss": "id", "aud": "api", "sub": subject, "plan": "paid", "exp": NOW_SECS + 60 });
    claims[claim] = value;
    json!(format!("Bearer {}", token(secret, &claims)))
}

fn unsigned(subject: &str) -> Value {
    use base64::Engine;
    let encode = |text: String| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(text);
    let claims = json!({ "iss": "id", "aud": "api", "sub": subject, "exp": NOW_SECS + 60 });
    json!(format!("Bearer {}.{}.", encode(json!({ "alg": "none" }).to_string()), encode(claims.to_string())))
}

/// The headers of one attempt, by number.
type Attempt = fn(usize) -> Value;

/// Everything that a client can invent to be taken for somebody else each time.
const ATTACKS: &[(&str, Attempt)] = &[
    ("no identity at all", |_| json!({})),
    ("API keys", |n| json!({ "X-API-Key": format!("invented-{n}") })),
    ("API keys, and none in between", |n| match n % 2 {
        0 => json!({}),
        _ => json!({ "X-API-Key": format!("invented-{n}") }),
    }),
    ("spellings of the header's name", |n| {
        let name = ["X-API-Key", "x-api-key", "X-API-KEY", "X-Api-Key"][n % 4];
        json!({ name: format!("invented-{n}") })
    }),
    (
        "names that proxies mistake for the header's",
        |n| json!({ "X_API_KEY": format!("a-{n}"), "X-API-Key ": format!("b-{n}"), "apikey": format!("c-{n}") }),
    ),
    ("identifiers in place of API keys", |n| json!({ "X-API-Key": format!("id:{n:032x}") })),
    ("the identifier of a known key", |n| match n % 2 {
        0 => json!({ "X-API-Key": format!("id:{}", id_of(KNOWN)) }),
        _ => json!({ "X-API-Key": id_of(KNOWN) }),
    }),
    ("the digest of a known key", |_| json!({ "X-API-Key": sha256(KNOWN) })),
    ("nearly a known key", |n| {
        let padded = format!("{KNOWN}{}", " ".repeat(n));
        let keys = [padded + " ", KNOWN.to_uppercase(), KNOWN[..n % 11].to_owned(), format!("{KNOWN},{n}")];
        json!({ "X-API-Key": keys[n % 4] })
    }),
    ("API keys that cannot be one", |n| {
        let keys = [format!("{n} words"), "k".repeat(600 + n), format!("schl\u{fc}ssel-{n}"), String::new()];
        json!({ "X-API-Key": keys[n % 4] })
    }),
    (
        "tokens signed with another secret",
        |n| json!({ "Authorization": bearer("another secret of as many characters", &format!("user-{n}"), ("x", json!(1))) }),
    ),
    ("unsigned tokens", |n| json!({ "Authorization": unsigned(&format!("user-{n}")) })),
    (
        "expired tokens",
        |n| json!({ "Authorization": bearer(SECRET, &format!("user-{n}"), ("exp", json!(NOW_SECS - 60))) }),
    ),
    (
        "tokens for another audience",
        |n| json!({ "Authorization": bearer(SECRET, &format!("user-{n}"), ("aud", json!("other"))) }),
    ),
    (
        "tokens of another issuer",
        |n| json!({ "Authorization": bearer(SECRET, &format!("user-{n}"), ("iss", json!("other"))) }),
    ),
    ("opaque tokens", |n| json!({ "Authorization": format!("Bearer opaque-{n}") })),
    (
        "other schemes",
        |n| json!({ "Authorization": format!("{} secret-{n}", ["Basic", "ApiKey", ""][n % 3]) }),
    ),
    ("users and tiers in trusted headers", |n| json!({ "X-User": format!("user-{n}"), "X-Tier": "paid" })),
    (
        "addresses in forwarding headers",
        |n| json!({ "X-Forwarded-For": format!("10.0.0.{n}"), "X-Real-IP": format!("10.0.1.{n}"), "Forwarded": format!("for=10.0.2.{n}") }),
    ),
    ("all of them", |n| {
        let forged = bearer("another secret of as many characters", &format!("user-{n}"), ("x", json!(1)));
        json!({ "X-API-Key": format!("k-{n}"), "Authorization": forged, "X-User": format!("u-{n}"), "X-Tier": "paid" })
    }),
];

/// Rules that end with the address, as people write them.
const KEYS: [&str; 6] = [
    "identity",
    "[api_key, ip]",
    "[user, api_key, ip]",
    "[api_key, user, ip]",
    "[api_key+ip, ip]",
    "[api_key+user, user, ip]",
];

#[test]
fn nothing_that_a_client_invents_gives_it_a_fresh_limit() {
    let rules: String = KEYS
        .iter()
        .enumerate()
        .map(|(number, key)| {
            format!(
                "  - {{ name: r{number}, match: {{ path: /r{number} }}, key: {key}, tier: from_request }}\n"
            )
        })
        .collect();
    let policy = format!("tiers: {{ free: 3/min, paid: 1000/min }}\nrules:\n{rules}");
    for knows_keys in [true, false] {
        let service = Service::start(Setup { knows_keys, ..BACKEND }, &policy);
        for (row, (attack, headers)) in ATTACKS.iter().enumerate() {
            for (number, key) in KEYS.iter().enumerate() {
                let ip = format!("198.51.{row}.{number}");
                let allowed = (0..20).filter(|n| {
                    let request = json!({ "ip": ip, "path": format!("/r{number}"), "headers": headers(*n) });
                    let response = service.check(&request);
                    assert!([200, 429].contains(&response.status), "{attack}: {response:?}");
                    response.status == 200
                });
                assert_eq!(allowed.count(), 3, "{attack}, counted by {key}, keys known: {knows_keys}");
            }
        }
    }
}

#[test]
fn an_invented_api_key_takes_no_address_limit_away() {
    let policies = [
        "rules: [{ name: customers, key: api_key, limit: 1000/min }]\ndefault: 3/min",
        "rules:
  - { name: customers, key: api_key, limit: 1000/min, stop: true }
  - { name: all, key: ip, limit: 3/min }
",
        "apply: first
rules:
  - { name: customers, key: api_key, limit: 1000/min }
  - { name: all, key: ip, limit: 3/min }
",
        "rules:
  - { name: customers, match: { identity: api_key }, unlimited: true, stop: true }
  - { name: all, key: ip, limit: 3/min }
",
    ];
    for policy in policies {
        let service = Service::start(BACKEND, policy);
        for (row, (attack, headers)) in ATTACKS.iter().enumerate() {
            let request = |n| json!({ "ip": format!("198.51.100.{row}"), "headers": headers(n) });
            let allowed = (0..20).filter(|n| service.check(&request(*n)).status == 200).count();
            assert_eq!(allowed, 3, "{attack}: {policy}");
        }
        let customer = json!({ "ip": "198.51.100.1", "headers": { "X-API-Key": KNOWN } });
        let allowed = (0..20).filter(|_| service.check(&customer).status == 200).count();
        assert_eq!(allowed, 20, "a verified key has the customers' limit: {policy}");
    }
}

#[test]
fn a_rule_by_api_key_alone_counts_unverified_keys_by_address() {
    let policy = "rules:
  - { name: key, match: { path: /key }, key: api_key, limit: 3/min }
  - { name: refusing, match: { path: /refusing }, key: api_key, limit: 3/min, deny_empty_key: 403 }
  - { name: parts, match: { path: '/parts/{id}' }, key: 'api_key+path:id', limit: 3/min }
default: unlimited
";
    let service = Service::start(BACKEND, policy);
    for path in ["/key", "/refusing", "/parts/7"] {
        let allowed = (0..20).filter(|n| {
            let headers = json!({ "X-API-Key": format!("invented-{n}") });
            let answer =
                service.check(&json!({ "ip": "192.0.2.1", "path": path, "headers": headers })).json();
            assert_eq!(answer["unverifiedApiKey"], true, "{answer}");
            answer["allowed"] == true
        });
        assert_eq!(allowed.count(), 3, "{path}");
    }
    let denied =
        service.check(&json!({ "ip": "192.0.2.1", "path": "/key", "headers": { "X-API-Key": "another" } }));
    let answer = denied.json();
    assert_eq!((&answer["code"], &answer["limits"][0]["key"]), (&json!("IP_LIMIT"), &json!("ip:192.0.2.1")));
    // Without an address the rule skips the request, or refuses it, as if it had no API key.
    let without =
        |path: &str| service.check(&json!({ "ip": null, "path": path, "headers": { "X-API-Key": "k" } }));
    assert_eq!((without("/key").status, without("/key").json()["limits"].clone()), (200, json!([])));
    assert_eq!(without("/refusing").status, 403);
    // A known key has its own limit, wherever it comes from.
    let known = json!({ "ip": "192.0.2.1", "path": "/key", "headers": { "X-API-Key": KNOWN } });
    assert_eq!(service.keys(&known), [format!("api_key:{}", id_of(KNOWN))]);
    assert_eq!(service.check(&known).json()["unverifiedApiKey"], Value::Null);
    assert_eq!(
        service.keys(&json!({ "ip": null, "path": "/key", "headers": { "X-API-Key": KNOWN } })).len(),
        1
    );
    assert_eq!(
        service.keys(&json!({ "ip": "192.0.2.1", "path": "/parts/7", "headers": { "X-API-Key": KNOWN } })),
        [format!("api_key:{}+path.id:7", id_of(KNOWN))]
    );
}

#[test]
fn an_api_key_that_the_caller_names_is_verified() {
    let service = Service::start(
        Setup { knows_keys: false, ..BACKEND },
        "rules: [{ name: id, key: identity, limit: 3/min }]",
    );
    let key = |request: Value| service.keys(&request);
    let of = |key: &str| vec![format!("api_key:{}", id_of(key))];
    assert_eq!(key(json!({ "ip": "192.0.2.1", "apiKey": "k-1" })), of("k-1"));
    assert_eq!(
        key(json!({ "ip": "192.0.2.1", "apiKey": "k-1", "headers": { "X-API-Key": "k-2" } })),
        of("k-1")
    );
    assert_eq!(key(json!({ "ip": "192.0.2.1", "headers": { "X-API-Key": "k-1" } })), ["ip:192.0.2.1"]);
    let answer = service.check(&json!({ "apiKey": "k-1", "headers": { "X-API-Key": "k-2" } })).json();
    assert_eq!(answer["unverifiedApiKey"], Value::Null, "the key of the headers is not used");
}

#[test]
fn an_api_key_that_begins_with_id_is_never_another_clients_key() {
    let service = Service::start(BACKEND, "rules: [{ name: id, key: api_key, limit: 3/min }]");
    let victim = id_of("victim");
    let named = service.keys(&json!({ "apiKeyId": victim }));
    assert_eq!(named, [format!("api_key:{victim}")]);
    assert_eq!(named, service.keys(&json!({ "apiKey": "victim" })));
    let forged = format!("id:{victim}");
    assert_eq!(service.keys(&json!({ "apiKey": forged })), [format!("api_key:{}", id_of(&forged))]);
    for (request, parameter) in [
        (json!({ "apiKeyId": forged }), "apiKeyId"),
        (json!({ "apiKeyId": victim.to_uppercase() }), "apiKeyId"),
        (json!({ "apiKeyId": "" }), "apiKeyId"),
        (json!({ "apiKeyId": victim, "apiKey": "victim" }), "apiKeyId"),
        (json!({ "apiKey": "" }), "apiKey"),
    ] {
        let refused = service.check(&request);
        assert_eq!(
            (refused.status, refused.json()["parameter"].as_str()),
            (400, Some(parameter)),
            "{request}"
        );
    }
}

#[test]
fn trusted_headers_are_believed_only_from_callers_that_are_proxies() {
    let policy =
        "tiers: { free: 3/min, paid: 1000/min }\nrules: [{ name: id, key: identity, tier: from_request }]";
    let request =
        json!({ "ip": "192.0.2.1", "headers": { "X-User": "alice", "X-Tier": "paid" } }).to_string();
    let rows = [
        (true, "", "user:alice", 1_000),
        (false, "", "ip:192.0.2.1", 3),
        (true, "x-forwarded-for: 127.0.0.1\r\n", "user:alice", 1_000),
        // A backend that calls through a proxy is no proxy.
        (true, "x-forwarded-for: 10.0.0.7\r\n", "ip:192.0.2.1", 3),
        (false, "x-forwarded-for: 10.9.0.1\r\n", "ip:192.0.2.1", 3),
        // Nor is a client that the proxy does not name.
        (true, "x-forwarded-for: unknown\r\n", "ip:192.0.2.1", 3),
        (true, "x-forwarded-for: 10.0.0.7, _hidden\r\n", "ip:192.0.2.1", 3),
        (true, "x-forwarded-for:\r\n", "ip:192.0.2.1", 3),
        (true, "via: 1.1 proxy\r\n", "ip:192.0.2.1", 3),
    ];
    for (caller_is_proxy, header, key, limit) in rows {
        let service = Service::start(Setup { caller_is_proxy, ..BACKEND }, policy);
        for target in ["/api/v1/check", "/api/v1/check/batch", "/api/v1/explain"] {
            let body = if target.ends_with("batch") {
                format!("{{\"checks\":[{request}]}}")
            } else {
                request.clone()
            };
            let response = service.server.ask("POST", target, &format!("{CALLER}{header}"), &body);
            let answer = response.json();
            let answer = answer.get(0).unwrap_or(&answer);
            let found = (&answer["limits"][0]["key"], &answer["limits"][0]["limit"]);
            assert_eq!(
                found,
                (&json!(key), &json!(limit)),
                "{caller_is_proxy} {header} {target}: {response:?}"
            );
        }
    }
}

#[test]
fn an_unverified_api_key_has_no_tier_of_its_own() {
    let policy = format!(
        "families:
  api_keys: {{ of: api_key, tiers: {{ basic: 3/min, paid: 1000/min }}, default: basic, members: {{ {KNOWN}: paid, listed: paid }} }}
rules:
  - {{ name: key, key: [api_key, ip], tier: from_request }}
"
    );
    let service = Service::start(BACKEND, &policy);
    let limit = |request: Value| service.check(&request).json()["limits"][0]["limit"].clone();
    let of_headers = |key: &str| limit(json!({ "ip": "192.0.2.1", "headers": { "X-API-Key": key } }));
    assert_eq!(of_headers(KNOWN), 1_000);
    assert_eq!(of_headers("listed"), 3, "the key is in the policy and not in the file of known keys");
    assert_eq!(of_headers("invented"), 3);
    assert_eq!(limit(json!({ "apiKey": "listed" })), 1_000);
}

#[test]
fn a_tier_assigned_to_an_api_key_needs_the_key_to_be_verified() {
    let server = Server::with(
        "identity: { api_key: {} }
policy:
  families: { api_keys: { of: api_key, tiers: { basic: 3/min, paid: 1000/min }, default: basic } }
  rules: [{ name: key, key: [api_key, ip], tier: from_request }]
",
    );
    assert_eq!(server.ask("PUT", "/admin/tiers/api_keys/customer", "", r#"{"tier":"paid"}"#).status, 200);
    let limit = |request: Value| {
        server.post("/api/v1/check", &request.to_string()).json()["limits"][0]["limit"].clone()
    };
    assert_eq!(limit(json!({ "apiKey": "customer" })), 1_000);
    assert_eq!(limit(json!({ "ip": "192.0.2.1", "headers": { "X-API-Key": "customer" } })), 3);
}

#[test]
fn mistakes_about_identity_are_named_with_their_fields() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name).display().to_string()
    };
    let digest = sha256(KNOWN);
    let known =
        |name: &str, text: &str| format!("identity: {{ api_key: {{ known_file: {} }} }}", file(name, text));
    let rule = |fields: &str| format!("policy: {{ rules: [{{ name: a, limit: 5/s, {fields} }}] }}");
    let rows = [
        (
            known("key", &format!("{digest}\nsecret-key\n")),
            "identity.api_key.known_file: ",
            "key: line 2: expected the SHA-256 digest of an API key, 64 hexadecimal digits",
        ),
        (known("empty", "# none\n"), "identity.api_key.known_file: ", "empty: holds no digest of an API key"),
        (
            "identity: { api_key: { known_file: /nowhere } }".to_owned(),
            "identity.api_key.known_file: ",
            "/nowhere cannot be read",
        ),
        (
            "identity: { trusted_header: { user: X-User } }".to_owned(),
            "identity.trusted_header.user: ",
            "is believed from trusted proxies only, and client_address.trusted_proxies is empty",
        ),
        (
            rule("key: ip, match: { identity: somebody }"),
            "match.identity: ",
            "`user`, `api_key`, `anonymous`",
        ),
        (
            rule("key: user, match: { identity: anonymous }"),
            ": key: ",
            "can never apply: an anonymous request has no user",
        ),
    ];
    for (yaml, field, why) in rows {
        let path = file("tollgate.yaml", &yaml);
        let errors =
            config::load(Some(path.as_ref()), std::iter::empty(), Vec::new()).unwrap_err().to_string();
        assert!(errors.contains(field) && errors.contains(why), "{yaml}: {errors}");
        assert!(!errors.contains("secret-key"), "a key is never shown: {errors}");
    }
    for good in [
        known("good", &format!("# keys\n\n{digest}  -\n{} second key\n", digest.to_uppercase())),
        rule("key: user, match: { identity: anonymous }, deny_empty_key: 401"),
        rule("key: [user, ip], match: { identity: anonymous }"),
        rule("key: api_key, match: { identity: anonymous }"),
        rule("key: ip, match: { identity: [user, api_key, anonymous] }"),
    ] {
        let path = file("tollgate.yaml", &good);
        config::load(Some(path.as_ref()), std::iter::empty(), Vec::new())
            .unwrap_or_else(|why| panic!("{good}: {why}"));
    }
}

#[test]
fn the_schemas_know_known_file_and_match_identity() {
    let valid = |schema: &Value, value: Value| jsonschema::validator_for(schema).unwrap().is_valid(&value);
    let (settings, policy) = (config::schema(), config::policy_schema());
    assert!(valid(
        &settings,
        json!({ "identity": { "api_key": { "known_file": "/etc/tollgate/api-keys" } } })
    ));
    let rule = |identity: Value| json!({ "rules": [{ "name": "a", "match": { "identity": identity } }] });
    assert!(valid(&policy, rule(json!("anonymous"))));
    assert!(valid(&policy, rule(json!(["user", "api_key"]))));
    assert!(!valid(&policy, rule(json!("somebody"))));
}

#[test]
fn a_policy_by_api_key_remarks_that_no_key_is_verified() {
    let remarks = |api_key: &str, rule: &str| {
        let folder = tempfile::tempdir().unwrap();
        let known = folder.path().join("known");
        std::fs::write(&known, sha256(KNOWN)).unwrap();
        let api_key = api_key.replace('@', &known.display().to_string());
        let path = folder.path().join("tollgate.yaml");
        std::fs::write(&path, format!("identity: {{ {api_key} }}\npolicy: {{ rules: [{rule}] }}\n")).unwrap();
        config::load(Some(&path), std::iter::empty(), Vec::new()).unwrap().remarks().join("\n")
    };
    let says = "because identity.api_key.known_file is not set";
    let by_key = "{ name: a, key: identity, limit: 5/s }";
    assert!(remarks("api_key: {}", by_key).contains(says));
    assert!(!remarks("api_key: { known_file: @ }", by_key).contains(says));
    assert!(!remarks("", by_key).contains(says), "API keys are not read from headers");
    assert!(!remarks("api_key: {}", "{ name: a, key: ip, limit: 5/s }").contains(says));
}

#[test]
fn rules_match_by_identity_after_verification() {
    let policy = "rules:
  - { name: user, match: { identity: user }, key: user, limit: 50/min }
  - { name: api-key, match: { identity: api_key }, key: api_key, limit: 40/min }
  - { name: anonymous, match: { identity: anonymous }, key: ip, limit: 30/min }
  - { name: either, match: { identity: [user, api_key] }, key: global, limit: 20000/min }
default: unlimited
";
    let good = bearer(SECRET, "alice", ("x", json!(1)));
    let forged = bearer("another secret of as many characters", "alice", ("x", json!(1)));
    let backend = Service::start(BACKEND, policy);
    let proxy = Service::start(Setup { caller_is_proxy: true, ..BACKEND }, policy);
    let rows = [
        ("nothing", &backend, json!({}), vec!["anonymous"], vec!["anonymous"]),
        (
            "a verified token",
            &backend,
            json!({ "headers": { "Authorization": good } }),
            vec!["user"],
            vec!["user", "either"],
        ),
        (
            "a forged token",
            &backend,
            json!({ "headers": { "Authorization": forged } }),
            vec!["anonymous"],
            vec!["anonymous"],
        ),
        (
            "an invented API key",
            &backend,
            json!({ "headers": { "X-API-Key": "k" } }),
            vec!["anonymous"],
            vec!["anonymous"],
        ),
        (
            "a known API key",
            &backend,
            json!({ "headers": { "X-API-Key": KNOWN } }),
            vec!["api_key"],
            vec!["api-key", "either"],
        ),
        (
            "a forged token and a known API key",
            &backend,
            json!({ "headers": { "Authorization": forged, "X-API-Key": KNOWN } }),
            vec!["api_key"],
            vec!["api-key", "either"],
        ),
        (
            "a verified token and a known API key",
            &backend,
            json!({ "headers": { "Authorization": good, "X-API-Key": KNOWN } }),
            vec!["user", "api_key"],
            vec!["user", "api-key", "either"],
        ),
        (
            "a trusted header of a client",
            &backend,
            json!({ "headers": { "X-User": "a" } }),
            vec!["anonymous"],
            vec!["anonymous"],
        ),
        (
            "a trusted header of a proxy",
            &proxy,
            json!({ "headers": { "X-User": "a" } }),
            vec!["user"],
            vec!["user", "either"],
        ),
        (
            "a user that the caller names",
            &backend,
            json!({ "user": "a" }),
            vec!["user"],
            vec!["user", "either"],
        ),
        ("an empty user", &backend, json!({ "user": "" }), vec!["anonymous"], vec!["anonymous"]),
        (
            "an API key that the caller names",
            &backend,
            json!({ "apiKey": "k" }),
            vec!["api_key"],
            vec!["api-key", "either"],
        ),
        (
            "an identifier that the caller names",
            &backend,
            json!({ "apiKeyId": id_of("k") }),
            vec!["api_key"],
            vec!["api-key", "either"],
        ),
    ];
    for (what, service, mut request, identity, rules) in rows {
        request["ip"] = json!("192.0.2.1");
        let explained = service.ask("/api/v1/explain", &request).json();
        assert_eq!(explained["identity"], json!(identity), "{what}");
        for answer in [explained, service.check(&request).json()] {
            let limits = answer["limits"].as_array().unwrap_or_else(|| panic!("{answer}"));
            let found: Vec<_> = limits.iter().map(|limit| limit["rule"].as_str().unwrap()).collect();
            assert_eq!(found, rules, "{what}");
        }
    }
}

#[test]
fn clients_who_are_not_logged_in_have_a_limit_of_their_own() {
    let policy = "rules:
  - { name: all, key: ip, limit: 10/min }
  - { name: not-logged-in, match: { identity: anonymous }, key: ip, limit: 3/min }
";
    let service = Service::start(BACKEND, policy);
    let forged = bearer("another secret of as many characters", "alice", ("x", json!(1)));
    let good = bearer(SECRET, "alice", ("x", json!(1)));
    let allowed = |headers: Value| {
        let request = json!({ "ip": "192.0.2.1", "headers": headers });
        (0..20).filter(|_| service.check(&request).status == 200).count()
    };
    assert_eq!(allowed(json!({ "Authorization": forged })), 3);
    assert_eq!(allowed(json!({})), 0, "a forged token and none are the same client");
    assert_eq!(allowed(json!({ "Authorization": good })), 7, "what is left of the limit for all");
}

#[test]
fn the_openapi_document_knows_who_can_be_named() {
    let service = Service::start(BACKEND, "rules: [{ name: id, key: identity, limit: 3/min }]");
    let document = service.server.get("/openapi.json").json();
    let valid = |schema: &str, value: &Value| {
        let schemas =
            document["components"]["schemas"].to_string().replace("#/components/schemas/", "#/$defs/");
        let schemas: Value = serde_json::from_str(&schemas).unwrap();
        let whole = json!({ "$ref": format!("#/$defs/{schema}"), "$defs": schemas });
        jsonschema::validator_for(&whole).unwrap().is_valid(value)
    };
    assert!(valid("RequestCheck", &json!({ "apiKeyId": id_of("k") })));
    assert!(!valid("RequestCheck", &json!({ "apiKeyId": "id:k" })));
    let request = json!({ "ip": "192.0.2.1", "headers": { "X-API-Key": "k", "Authorization": "Bearer x" } });
    let answer = service.check(&request).json();
    assert!(valid("RequestAnswer", &answer), "{answer}");
    let mut explained = service.ask("/api/v1/explain", &request).json();
    assert!(valid("Explanation", &explained), "{explained}");
    explained["identity"] = json!(["somebody"]);
    assert!(!valid("Explanation", &explained));
}
