//! Tokens that are really signed, and everything that must not pass for one.

mod signing;

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use self::signing::{Signer, encode};
use super::*;

const NOW: u64 = 1_800_000_000;
const ISSUER: &str = "https://id.example";

fn rules() -> ClaimRules {
    ClaimRules {
        issuers: vec![ISSUER.to_owned()],
        audiences: vec!["tollgate".to_owned(), "tollgate-staging".to_owned()],
        leeway_secs: 30,
        subject_claim: "sub".to_owned(),
        tier_claim: Some("tier".to_owned()),
    }
}

/// With the signer's public key in PEM, or its secret.
fn verifier(signer: &Signer) -> Verifier {
    verifier_with(signer, rules())
}

fn verifier_with(signer: &Signer, rules: ClaimRules) -> Verifier {
    let algorithms = vec![signer.algorithm];
    let keys = match signer.secret() {
        Some(secret) => VerifyingKeys::from_secret(secret, &algorithms),
        None => VerifyingKeys::from_pem(signer.public_pem().as_bytes(), &algorithms),
    };
    Verifier::new(algorithms, keys.expect("keys"), rules)
}

/// With a set of the keys of several signers.
fn verifier_of_set(keys: &[Value], algorithms: &[JwtAlgorithm]) -> Verifier {
    let set = json!({ "keys": keys }).to_string();
    let keys = VerifyingKeys::from_jwks(set.as_bytes(), algorithms).expect("keys");
    Verifier::new(algorithms.to_vec(), keys, rules())
}

fn claims() -> Value {
    json!({ "iss": ISSUER, "aud": "tollgate", "sub": "alice", "exp": NOW + 60, "nbf": NOW - 60, "tier": "gold" })
}

/// The claims with one of them changed; `null` takes it out.
fn with(claim: &str, value: Value) -> Value {
    let mut claims = claims();
    match value {
        Value::Null => claims.as_object_mut().expect("an object").remove(claim),
        value => claims.as_object_mut().expect("an object").insert(claim.to_owned(), value),
    };
    claims
}

fn alice() -> jwt::Identity {
    jwt::Identity { subject: "alice".to_owned(), issuer: ISSUER.to_owned(), tier: Some("gold".to_owned()) }
}

#[test]
fn good_tokens_of_every_algorithm_are_believed() {
    for signer in Signer::all() {
        let verifier = verifier(&signer);
        let name = signer.algorithm.as_str();
        assert_eq!(verifier.verify(&signer.sign(&claims()), NOW), Ok(alice()), "{name}");
        let other = signer.another();
        assert_eq!(verifier.verify(&other.sign(&claims()), NOW), Err(Unverified::Signature), "{name}");
        let set = verifier_of_set(&[signer.jwk("k")], &[signer.algorithm]);
        assert_eq!(set.verify(&signer.sign(&claims()), NOW), Ok(alice()), "{name}");
        assert_eq!(set.verify(&other.sign(&claims()), NOW), Err(Unverified::Signature), "{name}");
    }
}

#[test]
fn keys_of_a_set_are_chosen_by_their_name() {
    let [rsa, ec, ed] = [Signer::rs256(), Signer::es256(), Signer::ed25519()];
    let algorithms = [JwtAlgorithm::Rs256, JwtAlgorithm::Es256, JwtAlgorithm::EdDsa];
    let verifier = verifier_of_set(&[rsa.jwk("rsa"), ec.jwk("ec"), ed.jwk("ed")], &algorithms);
    for (signer, kid) in [(&rsa, "rsa"), (&ec, "ec"), (&ed, "ed")] {
        let named = signer.sign_with_head(json!({ "alg": signer.algorithm.as_str(), "kid": kid }), &claims());
        assert_eq!(verifier.verify(&named, NOW), Ok(alice()), "{kid}");
        let unnamed = signer.sign(&claims());
        assert_eq!(verifier.verify(&unnamed, NOW), Ok(alice()), "the only key for {kid}");
    }
    let head = |kid| json!({ "alg": "RS256", "kid": kid });
    assert_eq!(
        verifier.verify(&rsa.sign_with_head(head("gone"), &claims()), NOW),
        Err(Unverified::UnknownKey)
    );
    assert_eq!(verifier.verify(&rsa.sign_with_head(head("ec"), &claims()), NOW), Err(Unverified::Algorithm));
    let twins = verifier_of_set(&[ec.jwk("a"), ec.another().jwk("b")], &[JwtAlgorithm::Es256]);
    assert_eq!(twins.verify(&ec.sign(&claims()), NOW), Err(Unverified::UnknownKey), "one of two, unnamed");
}

#[test]
fn keys_of_a_set_for_other_uses_are_left_out() {
    let signer = Signer::es256();
    let read = |changes: Value, algorithm| {
        let mut jwk = signer.jwk("k");
        for (name, value) in changes.as_object().expect("an object") {
            jwk[name] = value.clone();
        }
        VerifyingKeys::from_jwks(json!({ "keys": [jwk] }).to_string().as_bytes(), &[algorithm]).map(|_| ())
    };
    assert_eq!(read(json!({}), JwtAlgorithm::Es256), Ok(()));
    assert_eq!(
        read(json!({ "use": "sig", "alg": "ES256", "key_ops": ["verify"] }), JwtAlgorithm::Es256),
        Ok(())
    );
    for changes in [
        json!({ "use": "enc" }),
        json!({ "key_ops": ["encrypt"] }),
        json!({ "alg": "ES384" }),
        json!({ "alg": "RSA-OAEP" }),
        json!({ "crv": "P-384" }),
        json!({ "crv": "secp256k1" }),
        json!({ "kty": "AKP" }),
        json!({ "x": "AAAA" }),
    ] {
        let refused = Err("holds no key that can be used with ES256".to_owned());
        assert_eq!(read(changes.clone(), JwtAlgorithm::Es256), refused, "{changes}");
    }
    assert!(read(json!({}), JwtAlgorithm::Hs256).is_err());
    assert!(VerifyingKeys::from_jwks(b"{}", &[JwtAlgorithm::Es256]).is_err());
    let short = json!({ "keys": [{ "kty": "oct", "k": "c2hvcnQ", "kid": "k" }] }).to_string();
    assert!(VerifyingKeys::from_jwks(short.as_bytes(), &[JwtAlgorithm::Hs256]).is_err());
}

#[test]
fn secrets_of_a_set_are_believed_where_secrets_are() {
    let signer = Signer::hs256();
    let verifier = verifier_of_set(&[signer.jwk("k")], &[JwtAlgorithm::Hs256]);
    assert_eq!(verifier.verify(&signer.sign(&claims()), NOW), Ok(alice()));
}

#[test]
fn unsigned_tokens_are_not_believed() {
    for signer in Signer::all() {
        let verifier = verifier(&signer);
        for alg in ["none", "None", "NONE", "nOnE", ""] {
            let token = format!("{}.{}.", encode(&json!({ "alg": alg })), encode(&claims()));
            assert_eq!(verifier.verify(&token, NOW), Err(Unverified::Algorithm), "{alg}");
        }
        let name = signer.algorithm.as_str();
        let unsigned = format!("{}.{}.", encode(&json!({ "alg": name })), encode(&claims()));
        assert_eq!(verifier.verify(&unsigned, NOW), Err(Unverified::Signature), "{name}");
    }
}

#[test]
fn a_public_key_is_no_secret() {
    let rsa = Signer::rs256();
    let pem = rsa.public_pem();
    let forger = Signer::with_secret(pem.as_bytes());
    for verifier in [
        verifier(&rsa),
        verifier_of_set(&[rsa.jwk("rsa")], &[JwtAlgorithm::Rs256]),
        verifier_of_set(&[rsa.jwk("rsa")], &[JwtAlgorithm::Rs256, JwtAlgorithm::Hs256]),
    ] {
        let forged = forger.sign(&claims());
        assert_eq!(verifier.verify(&forged, NOW), Err(Unverified::Algorithm));
        // The head says RS256, and the signature is the HMAC.
        let forged = forger.sign_with_head(json!({ "alg": "RS256" }), &claims());
        assert_eq!(verifier.verify(&forged, NOW), Err(Unverified::Signature));
    }
    assert!(VerifyingKeys::from_secret(pem.as_bytes(), &[JwtAlgorithm::Rs256]).is_err());
    assert!(VerifyingKeys::from_pem(pem.as_bytes(), &[JwtAlgorithm::Rs256, JwtAlgorithm::Hs256]).is_err());
}

#[test]
fn the_token_does_not_choose_the_algorithm() {
    let rsa = Signer::rs256();
    let keys = VerifyingKeys::from_pem(rsa.public_pem().as_bytes(), &[JwtAlgorithm::Ps256]).expect("keys");
    let verifier = Verifier::new(vec![JwtAlgorithm::Ps256], keys, rules());
    assert_eq!(verifier.verify(&rsa.sign(&claims()), NOW), Err(Unverified::Algorithm));
    let head = json!({ "alg": "PS256" });
    assert_eq!(verifier.verify(&rsa.sign_with_head(head, &claims()), NOW), Err(Unverified::Signature));
}

#[test]
fn keys_that_a_token_brings_along_are_not_looked_at() {
    let [ours, theirs] = [Signer::es256(), Signer::es256()];
    let verifier = verifier(&ours);
    let head = json!({
        "alg": "ES256", "jwk": theirs.jwk("k"), "jku": "https://evil.example/jwks", "x5u": "https://evil.example/x5u",
    });
    assert_eq!(verifier.verify(&theirs.sign_with_head(head, &claims()), NOW), Err(Unverified::Signature));
    let critical = json!({ "alg": "ES256", "crit": ["b64"], "b64": false });
    assert_eq!(verifier.verify(&ours.sign_with_head(critical, &claims()), NOW), Err(Unverified::Malformed));
}

#[test]
fn claims_are_checked_strictly() {
    let signer = Signer::hs256();
    let verifier = verifier(&signer);
    let verify =
        |claim: &str, value: Value| verifier.verify(&signer.sign(&with(claim, value)), NOW).map(|_| ());
    let cases = [
        ("exp", json!(NOW - 29), Ok(())),
        ("exp", json!(NOW as f64 - 29.5), Ok(())),
        ("exp", json!(NOW - 30), Err(Unverified::Expired)),
        ("exp", json!(0), Err(Unverified::Expired)),
        ("exp", json!(-1), Err(Unverified::Expired)),
        ("exp", json!(u64::MAX), Ok(())),
        ("exp", json!((NOW + 60).to_string()), Err(Unverified::Malformed)),
        ("exp", json!([NOW + 60]), Err(Unverified::Malformed)),
        ("exp", json!(true), Err(Unverified::Malformed)),
        ("exp", Value::Null, Err(Unverified::Malformed)),
        ("nbf", json!(NOW + 30), Ok(())),
        ("nbf", json!(NOW + 31), Err(Unverified::NotYet)),
        ("nbf", json!((NOW + 31).to_string()), Err(Unverified::Malformed)),
        ("nbf", json!({}), Err(Unverified::Malformed)),
        ("nbf", Value::Null, Ok(())),
        ("iss", json!("https://id.example/"), Err(Unverified::Issuer)),
        ("iss", json!([ISSUER]), Err(Unverified::Issuer)),
        ("iss", json!(1), Err(Unverified::Issuer)),
        ("iss", Value::Null, Err(Unverified::Issuer)),
        ("aud", json!("other"), Err(Unverified::Audience)),
        ("aud", json!(["other", "tollgate"]), Ok(())),
        ("aud", json!(["tollgate", "tollgate"]), Ok(())),
        ("aud", json!(["tollgate-staging"]), Ok(())),
        ("aud", json!(["other", "another"]), Err(Unverified::Audience)),
        ("aud", json!(["tollgate", 1]), Err(Unverified::Audience)),
        ("aud", json!([]), Err(Unverified::Audience)),
        ("aud", json!({ "tollgate": true }), Err(Unverified::Audience)),
        ("aud", Value::Null, Err(Unverified::Audience)),
        ("sub", Value::Null, Err(Unverified::NoSubject)),
        ("sub", json!(""), Err(Unverified::NoSubject)),
        ("sub", json!(" alice"), Err(Unverified::NoSubject)),
        ("sub", json!("ali\nce"), Err(Unverified::NoSubject)),
        ("sub", json!("ali\u{9b}ce"), Err(Unverified::NoSubject)),
        ("sub", json!(["alice"]), Err(Unverified::NoSubject)),
        ("sub", json!({ "id": "alice" }), Err(Unverified::NoSubject)),
        ("sub", json!(4711), Ok(())),
        ("sub", json!(-1), Ok(())),
        ("sub", json!(1.5), Err(Unverified::NoSubject)),
        ("sub", json!("a".repeat(256)), Ok(())),
        ("sub", json!("a".repeat(257)), Err(Unverified::NoSubject)),
    ];
    for (claim, value, expected) in cases {
        assert_eq!(verify(claim, value.clone()), expected, "{claim}: {value}");
    }
    // A claim that is there and null is not absent.
    let token = signer
        .sign_raw(r#"{"alg":"HS256"}"#, &claims().to_string().replace(&format!("{}", NOW - 60), "null"));
    assert_eq!(verifier.verify(&token, NOW), Err(Unverified::Malformed));
}

#[test]
fn subjects_and_tiers_are_named_by_configured_claims() {
    let signer = Signer::hs256();
    let named =
        ClaimRules { subject_claim: "uid".to_owned(), tier_claim: Some("plan".to_owned()), ..rules() };
    let verifier = verifier_with(&signer, named);
    assert_eq!(verifier.verify(&signer.sign(&claims()), NOW), Err(Unverified::NoSubject));
    let mut claims = with("uid", json!(4711));
    claims["plan"] = json!(["gold"]);
    let found = verifier.verify(&signer.sign(&claims), NOW).expect("a user");
    assert_eq!((found.subject.as_str(), found.tier), ("4711", None));
}

#[test]
fn long_tokens_and_garbage_are_not_read() {
    let signer = Signer::hs256();
    let verifier = verifier(&signer);
    let long = signer.sign(&with("filler", json!("x".repeat(8 * 1024))));
    assert_eq!(verifier.verify(&long, NOW), Err(Unverified::TooLong));
    let good = signer.sign(&claims());
    let [head, body, signature]: [&str; 3] =
        good.split('.').collect::<Vec<_>>().try_into().expect("three parts");
    let deep = "[".repeat(2_000);
    for (token, expected) in [
        (String::new(), Unverified::Malformed),
        ("..".to_owned(), Unverified::Malformed),
        (format!("{head}.{body}"), Unverified::Malformed),
        (format!("{good}."), Unverified::Malformed),
        (format!("{good}.{signature}"), Unverified::Malformed),
        (format!("{good}="), Unverified::Malformed),
        (format!(" {good}"), Unverified::Malformed),
        (format!("{body}.{body}.{signature}"), Unverified::Malformed),
        (format!("{head}.{head}.{signature}"), Unverified::Signature),
        (signer.sign_raw(r#"{"alg":"HS256","alg":"HS256"}"#, "{}"), Unverified::Malformed),
        (signer.sign_raw(r#"{"kid":"k"}"#, "{}"), Unverified::Malformed),
        (signer.sign_raw(r#"{"alg":"HS256","kid":1}"#, "{}"), Unverified::Malformed),
        (signer.sign_raw(r#"{"alg":"HS256"}"#, "[]"), Unverified::Malformed),
        (signer.sign_raw(r#"{"alg":"HS256"}"#, &deep), Unverified::Malformed),
        (signer.sign_raw(&deep, "{}"), Unverified::Malformed),
    ] {
        assert_eq!(verifier.verify(&token, NOW), Err(expected), "{token}");
    }
}

#[test]
fn words_for_metrics_are_short_and_different() {
    let words: std::collections::HashSet<_> = Unverified::ALL.iter().map(|why| why.as_str()).collect();
    assert_eq!(words.len(), Unverified::ALL.len());
    assert!(words.iter().all(|word| word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')));
}

/// The digest of the API key `abc`.
const KNOWN: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

/// Tokens in `Authorization`, keys in `X-API-Key`, users in `X-User`, tiers in `X-Tier`.
fn config(signer: &Signer, rules: ClaimRules) -> IdentityConfig {
    IdentityConfig {
        jwt: Some(TokenSource { header: "authorization".to_owned(), verifier: verifier_with(signer, rules) }),
        api_key: Some(ApiKeySource {
            header: "x-api-key".to_owned(),
            hasher: ApiKeyHasher::new(None),
            known: KnownKeys::parse(KNOWN).expect("a digest"),
        }),
        trusted_header: TrustedHeaders { user: Some("x-user".to_owned()), tier: Some("x-tier".to_owned()) },
        order: vec![Source::Jwt, Source::ApiKey, Source::Ip],
    }
}

fn found(config: &IdentityConfig, headers: &[(&str, &str)], peer_is_trusted: bool) -> Identified {
    let look_up = |name: &str| headers.iter().find(|(header, _)| *header == name).map(|(_, value)| *value);
    identify(config, look_up, peer_is_trusted, NOW)
}

#[test]
fn callers_are_who_they_can_show_to_be() {
    let signer = Signer::es256();
    let config = config(&signer, rules());
    let bearer = format!("Bearer {}", signer.sign(&claims()));
    let user = |user: &str, tier: Option<&str>| Identified {
        user: Some(user.to_owned()),
        tier: tier.map(str::to_owned),
        ..Identified::default()
    };
    assert_eq!(found(&config, &[("authorization", &bearer)], false), user("alice", Some("gold")));
    let small = bearer.replace("Bearer", "bearer");
    assert_eq!(found(&config, &[("authorization", &small)], false), user("alice", Some("gold")));
    assert_eq!(found(&config, &[("authorization", "Basic YWxpY2U6c2VjcmV0")], false), Identified::default());
    assert_eq!(found(&config, &[], true), Identified::default());
    let said = [("x-user", "bob"), ("x-tier", "free")];
    assert_eq!(found(&config, &said, false), Identified::default(), "every client can send the header");
    assert_eq!(found(&config, &said, true), user("bob", Some("free")));
    assert_eq!(found(&config, &[("x-user", "bo\u{7f}b")], true), Identified::default());
    let both = [("authorization", bearer.as_str()), ("x-user", "bob"), ("x-tier", "free")];
    assert_eq!(found(&config, &both, true), user("alice", Some("gold")), "what is verified comes first");
}

#[test]
fn a_forged_or_expired_token_yields_no_user() {
    let signer = Signer::es256();
    let config = config(&signer, rules());
    for (token, why) in [
        (signer.another().sign(&claims()), Unverified::Signature),
        (signer.sign(&with("exp", json!(NOW - 600))), Unverified::Expired),
        ("opaque".to_owned(), Unverified::Malformed),
    ] {
        let bearer = format!("Bearer {token}");
        let headers = [("authorization", bearer.as_str()), ("x-api-key", "abc"), ("x-user", "alice")];
        let found = found(&config, &headers, false);
        assert_eq!((found.user.as_deref(), found.tier.as_deref()), (None, None));
        assert_eq!(found.unverified, Some(why));
        assert!(found.api_key.is_some(), "the API key is another matter");
    }
}

#[test]
fn only_known_api_keys_are_verified_with_and_without_a_salt() {
    let mut config = config(&Signer::hs256(), rules());
    for salt in [None, Some(b"a salt of sixteen".as_slice())] {
        let source = config.api_key.as_mut().expect("API keys");
        source.hasher = ApiKeyHasher::new(salt);
        let id = source.hasher.identify("abc");
        for (key, expected) in
            [("abc", (id, false)), ("abd", (None, true)), (KNOWN, (None, true)), ("", (None, false))]
        {
            let found = found(&config, &[("x-api-key", key)], true);
            assert_eq!((found.api_key, found.has_unverified_api_key), expected, "{key}");
        }
    }
}

#[test]
fn users_of_several_issuers_are_told_apart() {
    let signer = Signer::hs256();
    let issuers = vec![ISSUER.to_owned(), "https://other.example".to_owned()];
    let config = config(&signer, ClaimRules { issuers, ..rules() });
    let user = |issuer: &str| {
        let bearer = format!("Bearer {}", signer.sign(&with("iss", json!(issuer))));
        found(&config, &[("authorization", &bearer)], false).user
    };
    assert_eq!(user(ISSUER).as_deref(), Some("https://id.example|alice"));
    assert_eq!(user("https://other.example").as_deref(), Some("https://other.example|alice"));
    assert_eq!(user("https://third.example"), None);
}

#[test]
fn other_headers_hold_a_token_as_it_is() {
    let signer = Signer::hs256();
    let mut config = config(&signer, rules());
    config.jwt.as_mut().expect("tokens").header = "x-token".to_owned();
    let token = signer.sign(&claims());
    assert!(found(&config, &[("x-token", &token)], false).user.is_some());
    assert!(found(&config, &[("x-token", &format!("Bearer {token}"))], false).user.is_some());
}

#[test]
fn secrets_are_not_shown() {
    let signer = Signer::with_secret(b"correct horse battery staple, 32 bytes");
    let mut config = config(&signer, rules());
    config.api_key = Some(ApiKeySource {
        header: "x-api-key".to_owned(),
        hasher: ApiKeyHasher::new(Some(b"correct horse battery staple")),
        known: KnownKeys::default(),
    });
    let shown = format!("{config:?}");
    assert!(
        !shown.contains("horse") && !shown.contains(&format!("{:?}", b"correct horse")[1..20]),
        "{shown}"
    );
}

fn signers() -> &'static [Signer] {
    static ONCE: LazyLock<[Signer; 12]> = LazyLock::new(Signer::all);
    &*ONCE
}

/// Each with a token that it believes.
fn verifiers() -> &'static [(Verifier, Vec<u8>)] {
    static ONCE: LazyLock<Vec<(Verifier, Vec<u8>)>> = LazyLock::new(|| {
        signers().iter().map(|signer| (verifier(signer), signer.sign(&claims()).into_bytes())).collect()
    });
    &ONCE
}

/// A place of a token, from what is random in a test.
fn place(index: &prop::sample::Index, token: &[u8]) -> usize {
    index.index(token.len())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn noise_never_verifies(noise in prop_oneof![".{0,200}", "[A-Za-z0-9_-]{0,80}\\.[A-Za-z0-9_-]{0,80}\\.[A-Za-z0-9_-]{0,90}"]) {
        for (verifier, _) in verifiers() {
            prop_assert!(verifier.verify(&noise, NOW).is_err());
        }
    }

    #[test]
    fn a_token_that_was_changed_never_verifies(
        which in 0..12_usize, at in any::<prop::sample::Index>(), to in any::<prop::sample::Index>(),
        byte in any::<u8>(), change in 0..5_u8,
    ) {
        let (verifier, good) = &verifiers()[which];
        let (at, to) = (place(&at, good), place(&to, good));
        let mut changed = good.clone();
        match change {
            0 => changed[at] = byte,
            1 => { changed.remove(at); }
            2 => changed.insert(at, byte),
            3 => changed.truncate(at),
            _ => changed.swap(at, to),
        }
        prop_assume!(changed != *good);
        let changed = String::from_utf8_lossy(&changed);
        prop_assert!(verifier.verify(&changed, NOW).is_err(), "{changed}");
    }

    #[test]
    fn a_key_that_was_changed_never_panics(
        which in 3..12_usize, at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>(),
    ) {
        let signer = &signers()[which];
        let mut der = signer.public_der();
        let at = at.index(der.len());
        if cut { der.truncate(at) } else { der[at] = byte }
        let changed = signing::pem(&der);
        if let Ok(keys) = VerifyingKeys::from_pem(changed.as_bytes(), &[signer.algorithm]) {
            let verifier = Verifier::new(vec![signer.algorithm], keys, rules());
            let same = der == signer.public_der();
            prop_assert!(same || verifier.verify(&signer.sign(&claims()), NOW).is_err());
        }
    }

    #[test]
    fn claims_of_any_kind_never_panic(
        claim in prop::sample::select(vec!["iss", "aud", "sub", "exp", "nbf", "tier"]), value in values(),
    ) {
        let signer = Signer::hs256();
        let verdict = verifier(&signer).verify(&signer.sign(&with(claim, value.clone())), NOW);
        if let Ok(identity) = verdict {
            prop_assert!(!identity.subject.is_empty() && identity.subject.len() <= 256);
            prop_assert!(claim != "exp" || value.is_number());
            prop_assert!(claim != "nbf" || value.is_number() || value.is_null());
        }
    }
}

/// Any JSON, two levels deep.
fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,300}".prop_map(Value::from),
        Just(json!("tollgate")),
    ];
    leaf.prop_recursive(2, 8, 4, |inner| prop::collection::vec(inner, 0..4).prop_map(Value::from))
}
