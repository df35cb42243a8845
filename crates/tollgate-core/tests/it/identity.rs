//! How requests are identified, and what an API key that is not verified changes.

use std::net::IpAddr;

use proptest::prelude::*;
use tollgate_core::policy::{
    ALL_KEYS, Descriptors, IdentityKind, KeyPart, KeySpec, Limits, Match, Policy, PolicyParts, Rule,
    RuleLimit, RuleLimits,
};
use tollgate_core::{Limit, Rate, TokenBucket};

fn rule(number: usize, key: Vec<Vec<KeyPart>>) -> Rule {
    Rule {
        name: format!("rule-{number}").into(),
        matching: Match::default(),
        key: KeySpec(key).with_unverified_api_keys(),
        limits: RuleLimits::Own(Limits::All(vec![number])),
        cost: 1,
        max_wait: None,
        stop: false,
        deny_empty_key: None,
        enforced: ALL_KEYS,
        code: None,
    }
}

fn policy(rules: Vec<Rule>, default: Option<Rule>, first_match: bool) -> Policy {
    let limit = Limit::TokenBucket(TokenBucket::new(10, Rate::per_second(1)).unwrap());
    let limits = (0..=rules.len())
        .map(|number| RuleLimit { scope: format!("token_bucket:{number}").into(), limit, candidate: None })
        .collect();
    Policy::new(PolicyParts {
        rules,
        default,
        first_match,
        limits,
        ipv6_prefix: 64,
        ..PolicyParts::default()
    })
}

/// What a request is checked against: limits and whose they are.
fn checks(policy: &Policy, request: &Descriptors<'_>) -> Vec<(usize, String)> {
    let selection = policy.select(request, 1);
    selection.checks.iter().map(|check| (check.limit, selection.subjects[check.subject].clone())).collect()
}

#[test]
fn unverified_api_keys_count_by_address_in_every_composed_key() {
    use KeyPart::{ApiKey, Host, Ip, User};
    let address: IpAddr = "192.0.2.1".parse().unwrap();
    let rows = [
        (vec![vec![ApiKey]], "{ip:192.0.2.1}", "IP_LIMIT"),
        (vec![vec![ApiKey], vec![Ip]], "{ip:192.0.2.1}", "IP_LIMIT"),
        (vec![vec![ApiKey, Ip]], "{ip:192.0.2.1}", "IP_LIMIT"),
        (vec![vec![Ip, ApiKey]], "{ip:192.0.2.1}", "IP_LIMIT"),
        (vec![vec![User, ApiKey]], "{ip:192.0.2.1+user:alice}", "IP_USER_LIMIT"),
        (vec![vec![ApiKey, Host]], "{ip:192.0.2.1+host:a.test}", "IP_HOST_LIMIT"),
        (vec![vec![ApiKey], vec![User]], "{user:alice}", "USER_LIMIT"),
    ];
    for (key, subject, code) in rows {
        let policy = policy(vec![rule(0, key.clone())], None, false);
        let request = Descriptors {
            ip: Some(address),
            user: Some("alice"),
            host: "a.test",
            has_unverified_api_key: true,
            ..Descriptors::default()
        };
        let selection = policy.select(&request, 1);
        assert_eq!(selection.subjects[..], [subject.to_owned()], "{key:?}");
        assert_eq!(policy.rule(0).unwrap().code(selection.checks[0].key), code, "{key:?}");
    }
}

#[test]
fn a_request_with_a_user_and_an_api_key_is_identified_by_both() {
    let kinds = |request: &Descriptors<'_>| -> Vec<&str> {
        let kinds = IdentityKind::ALL.into_iter().filter(|kind| request.is_identified_by(*kind));
        kinds.map(IdentityKind::as_str).collect()
    };
    let nothing = Descriptors::default();
    assert_eq!(kinds(&nothing), ["anonymous"]);
    assert_eq!(kinds(&Descriptors { user: Some(""), api_key: Some(""), ..nothing }), ["anonymous"]);
    assert_eq!(kinds(&Descriptors { has_unverified_api_key: true, ..nothing }), ["anonymous"]);
    assert_eq!(kinds(&Descriptors { user: Some("u"), ..nothing }), ["user"]);
    assert_eq!(kinds(&Descriptors { api_key: Some("k"), ..nothing }), ["api_key"]);
    assert_eq!(kinds(&Descriptors { user: Some("u"), api_key: Some("k"), ..nothing }), ["user", "api_key"]);
}

fn keys() -> impl Strategy<Value = Vec<Vec<KeyPart>>> {
    let part = prop::sample::select(vec![
        KeyPart::Ip,
        KeyPart::User,
        KeyPart::ApiKey,
        KeyPart::Host,
        KeyPart::Global,
    ]);
    prop::collection::vec(prop::collection::vec(part, 1..3), 1..4)
}

proptest! {
    /// Whatever the rules are: an API key that is not verified adds checks and removes none.
    #[test]
    fn an_unverified_api_key_removes_no_check(
        rules in prop::collection::vec((keys(), any::<bool>(), any::<bool>(), prop::sample::select(vec![0, 5_000, ALL_KEYS])), 1..5),
        default in prop::option::of(keys()),
        first_match in any::<bool>(),
        has_ip in any::<bool>(),
        has_user in any::<bool>(),
    ) {
        let count = rules.len();
        let rules = rules.into_iter().enumerate().map(|(number, (key, stop, for_anonymous, enforced))| {
            let identities = if for_anonymous { vec![IdentityKind::Anonymous] } else { Vec::new() };
            let matching = Match { identities, ..Match::default() };
            Rule { matching, stop, enforced, ..rule(number, key) }
        });
        let policy = policy(rules.collect(), default.map(|key| rule(count, key)), first_match);
        let request = Descriptors {
            ip: has_ip.then(|| IpAddr::from([192, 0, 2, 1])),
            user: has_user.then_some("alice"),
            host: "a.test",
            ..Descriptors::default()
        };
        let with = checks(&policy, &Descriptors { has_unverified_api_key: true, ..request });
        for check in checks(&policy, &request) {
            prop_assert!(with.contains(&check), "{check:?} is not in {with:?}");
        }
    }
}
