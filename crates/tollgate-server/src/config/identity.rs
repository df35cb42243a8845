//! The section `identity` of the configuration: how callers are identified.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::HeaderName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::secrets::{read, read_text};
use super::text::{DurationText, Text};
use crate::identity::{
    ApiKeyHasher, ApiKeySource, ClaimRules, IdentityConfig, JwtAlgorithm, KnownKeys, Source, TokenSource,
    TrustedHeaders, Verifier, VerifyingKeys,
};

/// How callers are identified: by a token, by the header of a trusted proxy, by an API key, or by address.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Identity {
    /// Tokens of users. None by default: they are not looked at.
    pub jwt: Option<Jwt>,
    /// API keys. None by default: they are not looked at.
    pub api_key: Option<ApiKey>,
    /// Headers that are believed only from `client_address.trusted_proxies`.
    pub trusted_header: TrustedHeaders,
    /// What identifies a caller where a rule asks for its identity: the first of these that there is.
    pub order: Vec<Source>,
}

impl Default for Identity {
    fn default() -> Self {
        Self {
            jwt: None,
            api_key: None,
            trusted_header: TrustedHeaders::default(),
            order: vec![Source::Jwt, Source::ApiKey, Source::Ip],
        }
    }
}

/// Which JSON Web Tokens are believed. One of `key_file`, `secret_file` and `jwks_file` holds the keys.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Jwt {
    /// How tokens may be signed. Either HS* or the others, not both.
    pub algorithms: Vec<JwtAlgorithm>,
    /// A file with a public key, in PEM.
    pub key_file: Option<PathBuf>,
    /// A file with a secret that is shared with the issuer, for HS*.
    pub secret_file: Option<PathBuf>,
    /// A file with a JSON Web Key Set. A token names its key by `kid`; keys for other uses are left out.
    pub jwks_file: Option<PathBuf>,
    /// Who may have issued a token: one name, or several that sign with the same keys. With several, users are known as
    /// `issuer|subject`.
    pub issuer: Names,
    /// Whom a token must be made for: one name, or several of which one must be in it.
    pub audience: Names,
    /// How far the issuer's clock may be off: at most 60s.
    pub leeway: DurationText,
    /// The claim that names the user.
    pub subject_claim: String,
    /// The claim that names the user's tier, if there is one.
    pub tier_claim: Option<String>,
    /// The header that holds the token; in `Authorization` behind the word Bearer.
    pub header: String,
}

impl Default for Jwt {
    fn default() -> Self {
        Self {
            algorithms: Vec::new(),
            key_file: None,
            secret_file: None,
            jwks_file: None,
            issuer: Names::Many(Vec::new()),
            audience: Names::Many(Vec::new()),
            leeway: Text(Duration::from_secs(30)),
            subject_claim: "sub".to_owned(),
            tier_claim: None,
            header: "Authorization".to_owned(),
        }
    }
}

/// One name or a list of them.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(untagged, expecting = "expected a name or a list of names")]
pub(super) enum Names {
    /// One.
    One(String),
    /// Any number.
    Many(Vec<String>),
}

impl Names {
    fn to_vec(&self) -> Vec<String> {
        match self {
            Self::One(name) => vec![name.clone()],
            Self::Many(names) => names.clone(),
        }
    }
}

/// Where API keys are. Only digests of them are kept.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ApiKey {
    /// The header that holds the key.
    pub header: String,
    /// A file with a secret of at least 16 bytes that is hashed with each key, the same for all nodes. Without it, keys that
    /// are easily guessed could be found out from what is in the store.
    pub salt_file: Option<PathBuf>,
    /// A file with the keys that are verified: on each line the SHA-256 digest of one in hexadecimal (`printf %s KEY |
    /// sha256sum`), then an optional note; `#` begins a comment line. It is read at start. Keys that are not in it count by
    /// the address of the request, because a client can invent them.
    pub known_file: Option<PathBuf>,
}

impl Default for ApiKey {
    fn default() -> Self {
        Self { header: "X-API-Key".to_owned(), salt_file: None, known_file: None }
    }
}

/// A clock that is off by more is to be set, not tolerated.
const LEEWAY_MAX: Duration = Duration::from_secs(60);
/// Shorter salts could be guessed.
const SALT_BYTES_MIN: usize = 16;

pub(super) fn validate(identity: &Identity, report: &mut dyn FnMut(&str, String)) -> IdentityConfig {
    let mut names = HeaderNames::default();
    let jwt = identity.jwt.as_ref().and_then(|jwt| {
        let header = names.take("identity.jwt.header", &jwt.header, report);
        Some(TokenSource { header: header?, verifier: verifier(jwt, report)? })
    });
    let api_key = identity.api_key.as_ref().and_then(|api_key| {
        let header = names.take("identity.api_key.header", &api_key.header, report);
        let salt = api_key.salt_file.as_deref().and_then(|path| {
            let salt = read(path).and_then(|salt| match salt.len() {
                SALT_BYTES_MIN.. => Ok(salt),
                _ => Err(format!("{} holds fewer than {SALT_BYTES_MIN} bytes", path.display())),
            });
            salt.map_err(|why| report("identity.api_key.salt_file", why)).ok()
        });
        let known = api_key
            .known_file
            .as_deref()
            .and_then(|path| known_keys(path).map_err(|why| report("identity.api_key.known_file", why)).ok());
        let hasher = ApiKeyHasher::new(salt.as_deref());
        Some(ApiKeySource { header: header?, hasher, known: known.unwrap_or_default() })
    });
    let mut trusted = |field: &str, name: &Option<String>| {
        let name = name.as_deref()?;
        if name.contains('_') {
            // Many servers take both for one name, and a proxy may overwrite only one of them.
            report(field, format!("{name}: write - in place of _"));
        }
        names.take(field, name, report)
    };
    let trusted_header = TrustedHeaders {
        user: trusted("identity.trusted_header.user", &identity.trusted_header.user),
        tier: trusted("identity.trusted_header.tier", &identity.trusted_header.tier),
    };
    IdentityConfig { jwt, api_key, trusted_header, order: order(&identity.order, report) }
}

fn verifier(jwt: &Jwt, report: &mut dyn FnMut(&str, String)) -> Option<Verifier> {
    let rules = ClaimRules {
        issuers: jwt.issuer.to_vec(),
        audiences: jwt.audience.to_vec(),
        leeway_secs: jwt.leeway.0.as_secs(),
        subject_claim: jwt.subject_claim.clone(),
        tier_claim: jwt.tier_claim.clone(),
    };
    for (field, names) in
        [("identity.jwt.issuer", &rules.issuers), ("identity.jwt.audience", &rules.audiences)]
    {
        if names.is_empty() {
            report(field, "is required: tokens that are meant for others would be believed".to_owned());
        }
        if names.iter().any(String::is_empty) {
            report(field, "a name cannot be empty".to_owned());
        }
    }
    if rules.issuers.iter().any(|issuer| issuer.contains('|')) {
        report("identity.jwt.issuer", "cannot contain |, which stands between issuers and users".to_owned());
    }
    if jwt.leeway.0 > LEEWAY_MAX {
        report("identity.jwt.leeway", format!("at most {}s", LEEWAY_MAX.as_secs()));
    }
    if jwt.subject_claim.is_empty() {
        report("identity.jwt.subject_claim", "the name of a claim such as sub".to_owned());
    }
    if jwt.tier_claim.as_ref().is_some_and(String::is_empty) {
        report("identity.jwt.tier_claim", "the name of a claim such as tier".to_owned());
    }
    let symmetric = jwt.algorithms.iter().filter(|it| it.is_symmetric()).count();
    if jwt.algorithms.is_empty() {
        report("identity.jwt.algorithms", "at least one such as RS256, ES256, EdDSA or HS256".to_owned());
        return None;
    }
    if symmetric != 0 && symmetric != jwt.algorithms.len() {
        let why = "either HS* or the others: a public key must never be taken for a secret";
        report("identity.jwt.algorithms", why.to_owned());
        return None;
    }
    let keys = keys(jwt, report)?;
    Some(Verifier::new(jwt.algorithms.clone(), keys, rules))
}

fn keys(jwt: &Jwt, report: &mut dyn FnMut(&str, String)) -> Option<VerifyingKeys> {
    type Make = fn(&[u8], &[JwtAlgorithm]) -> Result<VerifyingKeys, String>;
    let files: [(&str, &Option<PathBuf>, Make); 3] = [
        ("identity.jwt.key_file", &jwt.key_file, VerifyingKeys::from_pem),
        ("identity.jwt.secret_file", &jwt.secret_file, VerifyingKeys::from_secret),
        ("identity.jwt.jwks_file", &jwt.jwks_file, VerifyingKeys::from_jwks),
    ];
    let mut named = files.into_iter().filter_map(|(field, path, make)| Some((field, path.as_deref()?, make)));
    let Some((field, path, make)) = named.next() else {
        report("identity.jwt", "one of key_file, secret_file and jwks_file is required".to_owned());
        return None;
    };
    if let Some((field, _, _)) = named.next() {
        report(field, "only one of key_file, secret_file and jwks_file".to_owned());
    }
    let keys = read(path)
        .and_then(|bytes| make(&bytes, &jwt.algorithms).map_err(|why| format!("{}: {why}", path.display())));
    keys.map_err(|why| report(field, why)).ok()
}

fn known_keys(path: &Path) -> Result<KnownKeys, String> {
    KnownKeys::parse(&read_text(path)?).map_err(|why| format!("{}: {why}", path.display()))
}

fn order(order: &[Source], report: &mut dyn FnMut(&str, String)) -> Vec<Source> {
    if order.is_empty() {
        report("identity.order", "at least one of jwt, api_key and ip".to_owned());
    }
    for (index, source) in order.iter().enumerate() {
        if order[..index].contains(source) {
            report(&format!("identity.order.{index}"), "is there already".to_owned());
        }
    }
    order.to_vec()
}

/// Names of headers, each of which means one thing.
#[derive(Default)]
struct HeaderNames(Vec<String>);

impl HeaderNames {
    /// The name in small letters, if it is one and has no other meaning.
    fn take(&mut self, field: &str, name: &str, report: &mut dyn FnMut(&str, String)) -> Option<String> {
        let Ok(header) = HeaderName::from_bytes(name.as_bytes()) else {
            report(field, format!("expected the name of a header such as X-API-Key, not {name}"));
            return None;
        };
        let header = header.as_str().to_owned();
        if self.0.contains(&header) {
            report(field, format!("{name} has another meaning already"));
            return None;
        }
        self.0.push(header.clone());
        Some(header)
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// Files by name: what is written as `@name` in a configuration is the path of one.
    struct Files(TempDir);

    impl Files {
        fn new(files: &[(&str, &str)]) -> Self {
            let directory = tempfile::tempdir().expect("a directory");
            for (name, text) in files {
                std::fs::write(directory.path().join(name), text).expect("a file");
            }
            Self(directory)
        }

        /// What is reported, each with its field, and with the paths as they were written.
        fn check(&self, yaml: serde_json::Value) -> (IdentityConfig, Vec<String>) {
            let root = format!("{}/", self.0.path().display());
            let identity = serde_json::from_str(&yaml.to_string().replace('@', &root)).expect("fields");
            let mut reports = Vec::new();
            let config = validate(&identity, &mut |field, why| {
                reports.push(format!("{field}: {}", why.replace(&root, "@")))
            });
            (config, reports)
        }
    }

    const SECRET: &str = "0123456789abcdef0123456789abcdef\n";
    const ED25519: &str = "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PUBLIC KEY-----
";

    #[test]
    fn nothing_is_looked_at_unless_it_is_asked_for() {
        let (config, reports) = Files::new(&[]).check(serde_json::json!({}));
        assert_eq!(reports, Vec::<String>::new());
        assert!(config.jwt.is_none() && config.api_key.is_none() && config.trusted_header.user.is_none());
        assert_eq!(config.order, [Source::Jwt, Source::ApiKey, Source::Ip]);
    }

    #[test]
    fn what_is_right_is_taken() {
        let files = Files::new(&[("key.pem", ED25519), ("salt", SECRET)]);
        let (config, reports) = files.check(serde_json::json!({
            "jwt": { "algorithms": ["EdDSA"], "key_file": "@key.pem", "issuer": "https://id.example",
                "audience": ["a", "b"], "leeway": "60s", "tier_claim": "plan" },
            "api_key": { "salt_file": "@salt" },
            "trusted_header": { "user": "X-User", "tier": "X-Tier" },
            "order": ["api_key", "jwt"],
        }));
        assert_eq!(reports, Vec::<String>::new());
        assert_eq!(config.jwt.expect("tokens").header, "authorization");
        assert_eq!(config.api_key.expect("keys").header, "x-api-key");
        assert_eq!(config.trusted_header.user.as_deref(), Some("x-user"));
        assert_eq!(config.order, [Source::ApiKey, Source::Jwt]);
    }

    #[test]
    fn every_mistake_of_a_token_is_reported_with_its_field() {
        let files =
            Files::new(&[("secret", SECRET), ("short", "short"), ("key.pem", ED25519), ("set", "{}")]);
        let good = serde_json::json!({ "algorithms": ["HS256"], "secret_file": "@secret", "issuer": "i", "audience": "a" });
        assert!(files.check(serde_json::json!({ "jwt": good })).0.jwt.is_some());
        let cases = [
            (
                r#"{ "algorithms": [] }"#,
                "identity.jwt.algorithms: at least one such as RS256, ES256, EdDSA or HS256",
            ),
            (
                r#"{ "algorithms": ["HS256", "RS256"] }"#,
                "identity.jwt.algorithms: either HS* or the others: a public key must never be taken for a secret",
            ),
            (
                r#"{ "algorithms": ["RS256"] }"#,
                "identity.jwt.secret_file: @secret: RS256 needs a public key: key_file or jwks_file",
            ),
            (
                r#"{ "secret_file": null, "key_file": "@key.pem" }"#,
                "identity.jwt.key_file: @key.pem: HS256 needs a secret: secret_file",
            ),
            (
                r#"{ "secret_file": null, "key_file": "@key.pem", "algorithms": ["RS256"] }"#,
                "identity.jwt.key_file: @key.pem: RS256 cannot be used with a key of the kind Ed25519",
            ),
            (
                r#"{ "secret_file": null, "key_file": "@secret", "algorithms": ["RS256"] }"#,
                "identity.jwt.key_file: @secret: expected a public key in PEM: -----BEGIN PUBLIC KEY-----",
            ),
            (
                r#"{ "secret_file": null, "jwks_file": "@set" }"#,
                "identity.jwt.jwks_file: @set: expected a JSON Web Key Set: missing field `keys` at line 1 column 2",
            ),
            (
                r#"{ "secret_file": null }"#,
                "identity.jwt: one of key_file, secret_file and jwks_file is required",
            ),
            (
                r#"{ "jwks_file": "@set" }"#,
                "identity.jwt.jwks_file: only one of key_file, secret_file and jwks_file",
            ),
            (
                r#"{ "secret_file": "@gone" }"#,
                "identity.jwt.secret_file: @gone cannot be read: No such file or directory (os error 2)",
            ),
            (
                r#"{ "secret_file": "@short" }"#,
                "identity.jwt.secret_file: @short: HS256 needs a secret of at least 32 bytes",
            ),
            (
                r#"{ "issuer": [] }"#,
                "identity.jwt.issuer: is required: tokens that are meant for others would be believed",
            ),
            (
                r#"{ "audience": [] }"#,
                "identity.jwt.audience: is required: tokens that are meant for others would be believed",
            ),
            (r#"{ "audience": "" }"#, "identity.jwt.audience: a name cannot be empty"),
            (
                r#"{ "issuer": "a|b" }"#,
                "identity.jwt.issuer: cannot contain |, which stands between issuers and users",
            ),
            (r#"{ "leeway": "61s" }"#, "identity.jwt.leeway: at most 60s"),
            (r#"{ "subject_claim": "" }"#, "identity.jwt.subject_claim: the name of a claim such as sub"),
            (r#"{ "tier_claim": "" }"#, "identity.jwt.tier_claim: the name of a claim such as tier"),
            (
                r#"{ "header": "X Token" }"#,
                "identity.jwt.header: expected the name of a header such as X-API-Key, not X Token",
            ),
        ];
        for (changes, expected) in cases {
            let mut jwt = good.clone();
            let changes: serde_json::Value = serde_json::from_str(changes).expect("changes");
            for (field, value) in changes.as_object().expect("an object") {
                jwt[field] = value.clone();
            }
            assert_eq!(files.check(serde_json::json!({ "jwt": jwt })).1, [expected], "{changes}");
        }
    }

    #[test]
    fn private_keys_and_several_keys_are_refused() {
        let private = ED25519.replace("PUBLIC", "PRIVATE");
        let files = Files::new(&[("private", &private), ("two", &ED25519.repeat(2))]);
        let check = |file: &str| {
            let jwt = serde_json::json!({ "algorithms": ["EdDSA"], "key_file": file, "issuer": "i", "audience": "a" });
            files.check(serde_json::json!({ "jwt": jwt })).1
        };
        assert!(check("@private")[0].contains("holds a private key"), "{:?}", check("@private"));
        assert!(check("@two")[0].contains("holds more than one key"), "{:?}", check("@two"));
    }

    #[test]
    fn other_mistakes_are_reported_with_their_fields() {
        let files = Files::new(&[("salt", "0123456789abcde\n")]);
        let (_, reports) = files.check(serde_json::json!({
            "api_key": { "header": "X-User", "salt_file": "@salt" },
            "trusted_header": { "user": "x-user", "tier": "x_tier" },
            "order": ["ip", "ip"],
        }));
        assert_eq!(
            reports,
            [
                "identity.api_key.salt_file: @salt holds fewer than 16 bytes",
                "identity.trusted_header.user: x-user has another meaning already",
                "identity.trusted_header.tier: x_tier: write - in place of _",
                "identity.order.1: is there already",
            ]
        );
        assert_eq!(
            files.check(serde_json::json!({ "order": [] })).1,
            ["identity.order: at least one of jwt, api_key and ip"]
        );
    }

    #[test]
    fn fields_that_do_not_exist_are_refused() {
        for text in [
            r#"{ "jwt": { "jku": "https://id.example" } }"#,
            r#"{ "jwt": { "algorithms": ["none"] } }"#,
            r#"{ "jwt": { "algorithms": ["rs256"] } }"#,
            r#"{ "order": ["cookie"] }"#,
            r#"{ "keys": [] }"#,
        ] {
            assert!(serde_json::from_str::<Identity>(text).is_err(), "{text}");
        }
        let why = serde_json::from_str::<Identity>(r#"{ "jwt": { "issuer": 1 } }"#).expect_err("a number");
        assert!(why.to_string().starts_with("expected a name or a list of names"), "{why}");
    }

    #[test]
    fn the_schema_knows_what_is_accepted() {
        let schema = serde_json::to_value(schemars::schema_for!(Identity)).expect("a schema");
        let validator = jsonschema::validator_for(&schema).expect("a schema");
        let defaults = serde_json::to_value(Identity::default()).expect("defaults");
        assert!(validator.is_valid(&defaults));
        assert!(
            validator
                .is_valid(&serde_json::json!({ "jwt": { "algorithms": ["EdDSA", "RS256"], "issuer": "i" } }))
        );
        assert!(!validator.is_valid(&serde_json::json!({ "jwt": { "algorithms": ["none"] } })));
    }
}
