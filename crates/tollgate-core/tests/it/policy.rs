//! Policies: which limits a request is checked against.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use proptest::prelude::*;
use tollgate_core::policy::{
    ALL_KEYS, CHECKS_MAX, Descriptors, Endpoint, Family, Glob, KeyPart, KeySpec, Limits, Match, Network,
    PathPattern, PatternError, Policy, PolicyParts, Refusal, Role, Rule, RuleLimit, RuleLimits, Source,
    ValueCondition,
};
use tollgate_core::{Limit, Rate, SlidingLog, TokenBucket};

fn rule(name: &str, matching: Match, key: Vec<Vec<KeyPart>>, limits: Vec<usize>) -> Rule {
    Rule {
        name: name.into(),
        matching,
        key: KeySpec(key),
        limits: RuleLimits::Own(Limits::All(limits)),
        cost: 1,
        max_wait: None,
        stop: false,
        deny_empty_key: None,
        enforced: ALL_KEYS,
        code: None,
    }
}

fn limits(count: usize) -> Vec<RuleLimit> {
    let limit = Limit::TokenBucket(TokenBucket::new(10, Rate::per_second(1)).unwrap());
    (0..count)
        .map(|number| RuleLimit { scope: format!("token_bucket:{number}").into(), limit, candidate: None })
        .collect()
}

fn policy(rules: Vec<Rule>) -> Policy {
    let limits = limits(rules.len());
    Policy::new(PolicyParts { rules, limits, ipv6_prefix: 64, ..PolicyParts::default() })
}

fn path(text: &str) -> Match {
    Match { paths: vec![PathPattern::new(text).unwrap()], ..Match::default() }
}

fn rules_of(policy: &Policy, request: &Descriptors<'_>) -> Vec<usize> {
    policy.select(request, 1).checks.iter().map(|check| check.rule).collect()
}

#[test]
fn paths_match_their_patterns() {
    for (pattern, matching, other) in [
        (
            "/api/login",
            &[
                "/api/login",
                "/api/login/",
                "//api/./login",
                "/api/login?next=/",
                "/api/x/../login",
                "/api/login;v=1",
            ][..],
            &["/api", "/api/login/x", "/API/login"][..],
        ),
        ("/users/{id}", &["/users/7", "/users/%37"], &["/users", "/users/7/x"]),
        ("/users/{id}/posts/{post}", &["/users/7/posts/8"], &["/users/7/posts"]),
        ("/api/*/items", &["/api/v1/items"], &["/api/items", "/api/v1/v2/items"]),
        ("/img/*.png", &["/img/a.png", "/img/.png"], &["/img/a.jpg", "/img/x/a.png"]),
        ("/v*/x*y*z", &["/v1/xaybz", "/v/xyz"], &["/v1/xz", "/v1/xyzz1"]),
        ("/static/**", &["/static", "/static/a/b/c"], &["/statics", "/x/static"]),
        ("/**/secret", &["/secret", "/a/b/secret"], &["/secret/a"]),
        ("/a/**/z", &["/a/z", "/a/b/c/z"], &["/a", "/z", "/a/b"]),
        ("/", &["/", "//", "/a/.."], &["/a"]),
        ("/**", &["/", "/a/b"], &[]),
    ] {
        let policy = policy(vec![rule("r", path(pattern), vec![vec![KeyPart::Global]], vec![0])]);
        for (paths, expected) in [(matching, 1), (other, 0)] {
            for path in paths {
                let found = rules_of(&policy, &Descriptors { path, ..Descriptors::default() });
                assert_eq!(found.len(), expected, "{pattern} and {path}");
            }
        }
    }
}

#[test]
fn patterns_that_can_never_match_are_refused() {
    for (pattern, why) in [
        ("api", PatternError::NoSlash),
        ("/a//b", PatternError::NotPlain),
        ("/a/../b", PatternError::NotPlain),
        ("/a?b=c", PatternError::NotPlain),
        ("/a%20b", PatternError::NotPlain),
        ("/{a", PatternError::Parameter),
        ("/x{a}", PatternError::Parameter),
        ("/{}", PatternError::Parameter),
        ("/{a}/{a}", PatternError::TwiceNamed),
        ("/**/a/**", PatternError::TwoRests),
    ] {
        assert_eq!(PathPattern::new(pattern), Err(why), "{pattern}");
    }
}

#[test]
fn first_key_of_the_request_is_used_and_keys_never_collide() {
    let keys =
        vec![vec![KeyPart::ApiKey], vec![KeyPart::User, KeyPart::Ip], vec![KeyPart::Path("id".into())]];
    let policy = policy(vec![rule("r", path("/users/{id}"), keys, vec![0])]);
    let ip: IpAddr = "2001:db8:1:2:3::1".parse().unwrap();
    let request = Descriptors { path: "/users/7", ..Descriptors::default() };
    let subject = |request: &Descriptors<'_>| policy.select(request, 1).subjects[0].clone();
    assert_eq!(subject(&request), "{path.id:7}");
    let request = Descriptors { user: Some("a+b{c}% d"), ..request };
    assert_eq!(subject(&request), "{path.id:7}", "a user without an address is not enough");
    let request = Descriptors { ip: Some(ip), ..request };
    assert_eq!(subject(&request), "{user:a%2Bb%7Bc%7D%25%20d+ip:2001:db8:1:2::/64}");
    let request = Descriptors { api_key: Some("k"), ..request };
    assert_eq!(subject(&request), "{api_key:k}");
    let long = "u".repeat(5_000);
    let request = Descriptors { user: Some(&long), api_key: None, ..request };
    assert_eq!(subject(&request).len(), "{sha256:}".len() + 32);
}

proptest! {
    /// No two users have the same subject, whatever they call themselves.
    #[test]
    fn subjects_of_different_parts_differ(one in "\\PC{1,20}", other in "\\PC{1,20}", user in "\\PC{1,20}", more in "\\PC{1,20}") {
        let keys = vec![vec![KeyPart::User, KeyPart::Value(Source::Attribute, "a".into())]];
        let policy = policy(vec![rule("r", Match::default(), keys, vec![0])]);
        let subject = |user: &str, value: &str| {
            let attributes = vec![("a", value)];
            let request = Descriptors { user: Some(user), attributes: &attributes, ..Descriptors::default() };
            policy.select(&request, 1).subjects[0].clone()
        };
        let (first, second) = (subject(&user, &one), subject(&more, &other));
        prop_assert_eq!((&user, &one) == (&more, &other), first == second);
        prop_assert_eq!(first.matches('{').count(), 1);
        prop_assert_eq!(first.matches('}').count(), 1);
    }

    /// The index finds exactly what looking at every rule by itself finds, in the same order.
    #[test]
    fn the_index_leaves_out_no_rule(matches in prop::collection::vec(any_match(), 1..40), requests in prop::collection::vec(any_request(), 1..20)) {
        let rules: Vec<_> = matches.iter().enumerate()
            .map(|(number, it)| rule(&format!("r{number}"), it.clone(), vec![vec![KeyPart::Global]], vec![number]))
            .collect();
        let together = policy(rules.clone());
        let alone: Vec<_> = rules.into_iter().map(|mut it| {
            it.limits = RuleLimits::Own(Limits::All(vec![0]));
            policy(vec![it])
        }).collect();
        for (path, method, host, ip, attribute) in &requests {
            let attributes = vec![("plan", attribute.as_str())];
            let request = Descriptors { path, method, host, ip: *ip, attributes: &attributes, ..Descriptors::default() };
            let expected: Vec<_> = (0..alone.len()).filter(|number| !rules_of(&alone[*number], &request).is_empty()).collect();
            let found: Vec<_> = together.select(&request, 1).matched.to_vec();
            prop_assert_eq!(found, expected);
        }
    }
}

fn segment() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["a", "b", "ab", "c", "..", "..;", "a%2Fb", "%61%20", "a\\b"])
}

fn any_match() -> impl Strategy<Value = Match> {
    let pattern = prop::collection::vec(prop::sample::select(vec!["a", "b", "ab", "*", "a*", "{x}"]), 0..4);
    let rest = prop::sample::select(vec!["", "/**", "/**/c"]);
    let path = (pattern, rest).prop_map(|(segments, rest)| {
        let mut seen = false;
        let segments: Vec<_> = segments
            .into_iter()
            .map(|segment| match segment {
                "{x}" if std::mem::replace(&mut seen, true) => "*",
                segment => segment,
            })
            .collect();
        let text = format!("/{}{rest}", segments.join("/"));
        PathPattern::new(&text.replace("//", "/")).unwrap()
    });
    let host = prop::sample::select(vec!["one.test", "two.test", "*.test"]).prop_map(Glob::new);
    let network = (0_u8..=32, 0_u32..4)
        .prop_map(|(prefix, last)| Network::new(IpAddr::from([10, 0, 0, last as u8]), prefix).unwrap());
    let globs =
        || prop::collection::vec(prop::sample::select(vec!["free", "pro", "p*"]).prop_map(Glob::new), 0..3);
    let value = (globs(), globs()).prop_map(|(any_of, none_of)| ValueCondition {
        source: Source::Attribute,
        name: "plan".into(),
        any_of,
        none_of,
    });
    (
        prop::collection::vec(path, 0..3),
        prop::collection::vec(prop::sample::select(vec!["GET", "POST"]), 0..2),
        prop::collection::vec(host, 0..2),
        prop::collection::vec(network, 0..2),
        prop::collection::vec(value, 0..2),
    )
        .prop_map(|(paths, methods, hosts, networks, values)| Match {
            paths,
            methods: methods.into_iter().map(Into::into).collect(),
            hosts,
            networks,
            values,
            ..Match::default()
        })
}

type Request = (String, &'static str, &'static str, Option<IpAddr>, String);

fn any_request() -> impl Strategy<Value = Request> {
    (
        prop::collection::vec(segment(), 0..5).prop_map(|segments| format!("/{}", segments.join("/"))),
        prop::sample::select(vec!["GET", "POST", "PUT"]),
        prop::sample::select(vec!["one.test", "two.test", "else"]),
        prop::option::of((0_u8..4).prop_map(|last| IpAddr::from([10, 0, 0, last]))),
        prop::sample::select(vec!["free", "pro", "plus", ""]).prop_map(str::to_owned),
    )
}

#[test]
fn a_stop_ends_the_list_and_a_missing_key_does_not() {
    let everything = || vec![vec![KeyPart::Global]];
    let mut stopping = rule("stop", path("/a"), vec![vec![KeyPart::User]], vec![0]);
    stopping.stop = true;
    let policy = policy(vec![stopping, rule("after", Match::default(), everything(), vec![1])]);
    let request = Descriptors { path: "/a", ..Descriptors::default() };
    assert_eq!(rules_of(&policy, &request), [1], "without a user the rule is left out");
    assert_eq!(rules_of(&policy, &Descriptors { user: Some("u"), ..request }), [0]);
    assert_eq!(rules_of(&policy, &Descriptors { path: "/b", user: Some("u"), ..request }), [1]);
}

#[test]
fn rule_can_refuse_requests_without_its_key() {
    let mut insisting = rule("pay", path("/pay"), vec![vec![KeyPart::User]], vec![0]);
    insisting.deny_empty_key = Some(403);
    let policy = policy(vec![rule("ip", Match::default(), vec![vec![KeyPart::Ip]], vec![1]), insisting]);
    let request =
        Descriptors { path: "/pay", ip: Some("10.0.0.1".parse().unwrap()), ..Descriptors::default() };
    assert_eq!(policy.select(&request, 1).refusal, Some(Refusal::EmptyKey { rule: 1, status: 403 }));
    assert_eq!(
        policy.select(&Descriptors { user: Some(""), ..request }, 1).refusal,
        Some(Refusal::EmptyKey { rule: 1, status: 403 }),
        "an empty name is none"
    );
    assert_eq!(policy.select(&Descriptors { user: Some("u"), ..request }, 1).refusal, None);
}

#[test]
fn tiers_come_from_assignment_claim_list_and_default() {
    let family = Family {
        name: "users".into(),
        tiers: vec!["free".into(), "pro".into(), "max".into()],
        default: 0,
        member: KeyPart::User,
        members: BTreeMap::from([("listed".into(), 2)]),
    };
    let of_tier = |tiers: [usize; 3]| tiers.map(|limit| Limits::All(vec![limit])).to_vec();
    let mut plan = rule("plan", Match::default(), vec![vec![KeyPart::User]], vec![]);
    plan.limits =
        RuleLimits::OfTier { family: 0, tiers: of_tier([0, 1, 2]), factors: vec![(0, of_tier([3, 4, 5]))] };
    let policy = Policy::new(PolicyParts {
        rules: vec![plan],
        limits: limits(6),
        families: vec![family],
        endpoints: vec![Endpoint { name: "export".into(), matching: path("/export/**") }],
        ..PolicyParts::default()
    });
    let limits_of = |request: &Descriptors<'_>| -> Vec<usize> {
        policy.select(request, 1).checks.iter().map(|check| check.limit).collect()
    };
    let request = Descriptors { user: Some("u"), ..Descriptors::default() };
    assert_eq!(limits_of(&request), [0]);
    assert_eq!(limits_of(&Descriptors { tier: Some("pro"), ..request }), [1]);
    assert_eq!(limits_of(&Descriptors { user: Some("listed"), ..request }), [2]);
    assert_eq!(limits_of(&Descriptors { user: Some("listed"), tier: Some("pro"), ..request }), [1]);
    let assigned = vec![("users", "max")];
    assert_eq!(limits_of(&Descriptors { assigned_tiers: &assigned, tier: Some("pro"), ..request }), [2]);
    let unknown = Descriptors { tier: Some("platinum"), ..request };
    assert_eq!((limits_of(&unknown), policy.select(&unknown, 1).unknown_tier), (vec![0], true));
    assert_eq!(limits_of(&Descriptors { path: "/export/all", tier: Some("pro"), ..request }), [1, 4]);
}

#[test]
fn a_part_of_the_keys_is_enforced_and_stays_the_same() {
    let mut some = rule("some", Match::default(), vec![vec![KeyPart::User]], vec![0]);
    some.enforced = 1_000;
    let ten_percent = policy(vec![some.clone()]);
    some.enforced = 5_000;
    let half = policy(vec![some]);
    let role = |policy: &Policy, user: &str| {
        policy.select(&Descriptors { user: Some(user), ..Descriptors::default() }, 1).checks[0].role
    };
    let mut enforced = 0;
    for number in 0..10_000 {
        let user = format!("user-{number}");
        if role(&ten_percent, &user) == Role::Enforced {
            enforced += 1;
            assert_eq!(role(&half, &user), Role::Enforced, "more keys include the fewer");
        }
    }
    assert!((850..1_150).contains(&enforced), "{enforced} of 10,000");
}

#[test]
fn more_limits_than_can_be_checked_together_are_a_refusal() {
    let rules = (0..=CHECKS_MAX).map(|number| {
        rule(&format!("r{number}"), Match::default(), vec![vec![KeyPart::Global]], vec![number])
    });
    let policy = policy(rules.collect());
    assert_eq!(policy.select(&Descriptors::default(), 1).refusal, Some(Refusal::TooManyChecks));
}

#[test]
fn logs_count_as_more_than_one_limit_because_they_take_the_store_longer() {
    let refusal = |logs: usize| {
        let rules = (0..logs)
            .map(|it| rule(&format!("r{it}"), Match::default(), vec![vec![KeyPart::Global]], vec![it]));
        let mut parts = policy(rules.collect()).parts().clone();
        for it in &mut parts.limits {
            it.limit = Limit::SlidingLog(SlidingLog::new(Rate::per_minute(10)).unwrap());
        }
        Policy::new(parts).select(&Descriptors::default(), 1).refusal
    };
    assert_eq!([12, 13].map(refusal), [None, Some(Refusal::TooManyChecks)]);
}

#[test]
fn refusal_codes_name_the_key() {
    let code = |parts: Vec<KeyPart>| rule("r", Match::default(), vec![parts], vec![]).code(0);
    let expected: HashMap<&str, Vec<KeyPart>> = HashMap::from([
        ("IP_LIMIT", vec![KeyPart::Ip]),
        ("USER_LIMIT", vec![KeyPart::User]),
        ("APIKEY_LIMIT", vec![KeyPart::ApiKey]),
        ("USER_IP_LIMIT", vec![KeyPart::User, KeyPart::Ip]),
        ("HEADER_LIMIT", vec![KeyPart::Value(Source::Header, "x-tenant".into())]),
        ("GLOBAL_LIMIT", vec![KeyPart::Global]),
    ]);
    for (expected, parts) in expected {
        assert_eq!(code(parts), expected);
    }
}

#[test]
fn unlimited_rule_needs_no_key_and_can_stop() {
    let mut office = rule("office", path("/office"), vec![], vec![]);
    office.limits = RuleLimits::Own(Limits::Unlimited);
    office.stop = true;
    let rules = vec![office, rule("all", Match::default(), vec![vec![KeyPart::Global]], vec![1])];
    let mut parts = PolicyParts { rules, limits: limits(3), ipv6_prefix: 64, ..PolicyParts::default() };
    parts.default = Some(rule("default", Match::default(), vec![vec![KeyPart::Global]], vec![2]));
    let policy = Policy::new(parts);
    let at = |path| Descriptors { path, ..Descriptors::default() };
    assert!(rules_of(&policy, &at("/office")).is_empty());
    assert_eq!(rules_of(&policy, &at("/else")), [1]);
}

#[test]
fn rule_in_shadow_changes_no_decision() {
    let global = || vec![vec![KeyPart::Global]];
    for first_match in [false, true] {
        let mut shadow = rule("shadow", Match::default(), vec![vec![KeyPart::User]], vec![0]);
        (shadow.enforced, shadow.stop, shadow.deny_empty_key) = (0, true, Some(403));
        let real = rule("real", path("/real"), global(), vec![1]);
        let mut parts = PolicyParts {
            rules: vec![shadow, real],
            limits: limits(3),
            first_match,
            ..PolicyParts::default()
        };
        parts.default = Some(rule("default", Match::default(), global(), vec![2]));
        let policy = Policy::new(parts);
        let anonymous = policy.select(&Descriptors { path: "/real", ..Descriptors::default() }, 1);
        assert_eq!((anonymous.refusal, anonymous.checks.len()), (None, 1), "it refuses no request");
        let request = Descriptors { user: Some("u"), path: "/real", ..Descriptors::default() };
        assert_eq!(rules_of(&policy, &request), [0, 1], "it stops nothing");
        assert_eq!(
            rules_of(&policy, &Descriptors { path: "/else", ..request }),
            [0, 2],
            "the default applies"
        );
    }
}

#[test]
fn a_pattern_covers_every_path_of_a_narrower_one() {
    let pattern = |text| PathPattern::new(text).unwrap();
    for (wide, narrow) in [
        ("/api/**", "/api/login"),
        ("/api/**", "/api"),
        ("/api/**", "/api/*/items/**"),
        ("/**", "/**"),
        ("/api/*", "/api/{id}"),
        ("/api/{id}", "/api/*.png"),
        ("/img/*.png", "/img/a.png"),
        ("/**/items", "/api/v1/items"),
        ("/**/items", "/api/**/items"),
    ] {
        assert!(pattern(wide).covers(&pattern(narrow)), "{wide} {narrow}");
    }
    for (wide, narrow) in [
        ("/api/login", "/api/**"),
        ("/api/*", "/api/**"),
        ("/api/*", "/api"),
        ("/api/*", "/api/a/b"),
        ("/img/*.png", "/img/*"),
        ("/img/a*", "/img/{id}"),
        ("/**/items", "/api/**"),
        ("/a", "/b"),
    ] {
        assert!(!pattern(wide).covers(&pattern(narrow)), "{wide} {narrow}");
    }
}

#[test]
fn conditions_cover_narrower_ones_and_no_others() {
    let get = |text| Match { methods: vec!["GET".into()], ..path(text) };
    assert!(Match::default().covers(&get("/api")) && path("/api/**").covers(&get("/api/x")));
    assert!(get("/api/**").covers(&get("/api/x")));
    assert!(!get("/api/**").covers(&path("/api/x")) && !path("/api").covers(&Match::default()));
    let named = Match { attribute_names: Some(vec!["a".into()]), ..Match::default() };
    assert!(Match::default().covers(&named) && !named.covers(&Match::default()) && named.covers(&named));
}

#[test]
fn attribute_names_are_matched_in_number_and_order() {
    let names = |names: &[&str]| Match {
        attribute_names: Some(names.iter().map(|name| (*name).into()).collect()),
        ..Match::default()
    };
    let policy = policy(vec![
        rule("two", names(&["a", "b"]), vec![vec![KeyPart::Global]], vec![0]),
        rule("none", names(&[]), vec![vec![KeyPart::Global]], vec![1]),
    ]);
    let of = |attributes: Vec<(&str, &str)>| {
        rules_of(&policy, &Descriptors { attributes: &attributes, ..Descriptors::default() })
    };
    assert_eq!(of(vec![("a", "1"), ("b", "2")]), [0]);
    assert_eq!(of(vec![]), [1]);
    for other in [vec![("a", "1")], vec![("b", "2"), ("a", "1")], vec![("a", "1"), ("b", "2"), ("c", "3")]] {
        assert_eq!(of(other.clone()), [0_usize; 0], "{other:?}");
    }
}

#[test]
fn a_replaced_rule_does_not_apply_where_the_other_one_matches() {
    let rules = vec![
        rule("all", Match::default(), vec![vec![KeyPart::Global]], vec![0]),
        rule("login", path("/login"), vec![vec![KeyPart::Global]], vec![1]),
        rule("user", path("/user"), vec![vec![KeyPart::User]], vec![2]),
    ];
    let parts = PolicyParts {
        replacements: vec![(1, 0), (2, 0)],
        rules,
        limits: limits(3),
        ..PolicyParts::default()
    };
    let policy = Policy::new(parts);
    let at = |path| Descriptors { path, ..Descriptors::default() };
    assert_eq!(rules_of(&policy, &at("/else")), [0]);
    assert_eq!(rules_of(&policy, &at("/login")), [1]);
    assert_eq!(rules_of(&policy, &at("/user")), [0], "a rule that is skipped replaces nothing");
    let mut other = policy.select(&at("/else"), 1);
    other.leave_out(&policy.select(&at("/login"), 1).replaced);
    assert!(other.checks.is_empty(), "of two requests that are decided together");
}

proptest! {
    #[test]
    fn conditions_that_cover_others_hold_wherever_these_do(
        wide in any_match(), narrow in any_match(), requests in prop::collection::vec(any_request(), 1..20),
    ) {
        // With all of its conditions it would hardly ever cover the other one.
        let by_path = Match { paths: wide.paths.clone(), ..Match::default() };
        let Some(wide) = [wide, by_path].into_iter().find(|wide| wide.covers(&narrow)) else { return Ok(()) };
        let everyone = || vec![vec![KeyPart::Global]];
        let policy = policy(vec![rule("wide", wide, everyone(), vec![0]), rule("narrow", narrow, everyone(), vec![1])]);
        for (path, method, host, ip, plan) in &requests {
            let attributes = vec![("plan", plan.as_str())];
            let request = Descriptors { path, method, host, ip: *ip, attributes: &attributes, ..Descriptors::default() };
            let rules = rules_of(&policy, &request);
            prop_assert!(!rules.contains(&1) || rules.contains(&0), "{request:?}", request = (path, method, host, ip, plan));
        }
    }
}
