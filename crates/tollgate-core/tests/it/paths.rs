//! Paths that servers read in different ways: limits hold for every reading, and freedom from limits for none.

use tollgate_core::policy::{
    ALL_KEYS, CHECKS_MAX, Descriptors, KeyPart, KeySpec, Limits, Match, PathPattern, Policy, PolicyParts,
    Refusal, RequestPath, Role, Rule, RuleLimit, RuleLimits,
};
use tollgate_core::{Limit, Rate, TokenBucket};

fn readings(path: &str) -> Vec<String> {
    RequestPath::new(path, false).readings().map(str::to_owned).collect()
}

fn path(text: &str) -> Match {
    Match { paths: vec![PathPattern::new(text).unwrap()], ..Match::default() }
}

/// A rule that counts all requests together, by the limit of its number.
fn rule(number: usize, matching: Match) -> Rule {
    Rule {
        name: format!("r{number}").into(),
        matching,
        key: KeySpec(vec![vec![KeyPart::Global]]),
        limits: RuleLimits::Own(Limits::All(vec![number])),
        cost: 1,
        max_wait: None,
        stop: false,
        deny_empty_key: None,
        enforced: ALL_KEYS,
        code: None,
    }
}

fn parts(rules: Vec<Rule>) -> PolicyParts {
    let limit = Limit::TokenBucket(TokenBucket::new(10, Rate::per_second(1)).unwrap());
    let limits = (0..=rules.len()).map(|number| RuleLimit {
        scope: format!("token_bucket:{number}").into(),
        limit,
        candidate: None,
    });
    PolicyParts { limits: limits.collect(), rules, ipv6_prefix: 64, ..PolicyParts::default() }
}

fn rules_of(policy: &Policy, path: &str) -> Vec<usize> {
    let selection = policy.select(&Descriptors { path, ..Descriptors::default() }, 1);
    selection.checks.iter().map(|check| check.rule).collect()
}

#[test]
fn a_plain_path_has_one_reading_and_any_other_has_every_reading() {
    for plain in ["/", "/api/login", "/api/login/", "/.well-known/x", "/a..b", "/api/login?x=%2f;.."] {
        assert!(RequestPath::new(plain, false).is_plain(), "{plain}");
        assert_eq!(readings(plain), [plain.split('?').next().unwrap()]);
    }
    for (odd, expected) in [
        ("/a%2fb", &["/a/b", "/a%2Fb", "/a%2fb"][..]),
        ("/a%252fb", &["/a/b", "/a%252fb", "/a%252fb"]),
        ("/api\\login", &["/api/login", "/api\\login", "/api\\login"]),
        ("/login%20", &["/login", "/login ", "/login%20"]),
        ("/a/..;/b", &["/b", "/a/..;/b"]),
        ("/%ff/%2e%2e/api/%6cogin", &["/api/login", "/%ff/%2e%2e/api/%6cogin"]),
        ("/a%zz%", &["/a%zz%", "/a%zz%"]),
        ("/../../etc", &["/etc", "/../../etc"]),
        ("/a#/../b", &["/a", "/b", "/a#/../b"]),
        ("/a%23/../b", &["/b", "/a", "/a%23/../b"]),
        ("/a%3fb", &["/a?b", "/a", "/a%3fb"]),
        ("/a%00b", &["/a\0b", "/a", "/a%00b"]),
    ] {
        assert!(!RequestPath::new(odd, false).is_plain(), "{odd}");
        assert_eq!(readings(odd), expected, "{odd}");
    }
}

#[test]
fn restrictive_rules_match_every_reading_and_exclusions_only_plain_paths() {
    let mut free = rule(1, path("/free/**"));
    free.limits = RuleLimits::Own(Limits::Unlimited);
    free.stop = true;
    let mut parts = parts(vec![rule(0, path("/api/login/**")), free]);
    parts.exclusions = vec![path("/api/health")];
    parts.default = Some(rule(2, Match::default()));
    let policy = Policy::new(parts);
    for (path, expected) in [
        ("/api/login", &[0][..]),
        ("/api/login%2f", &[0, 2]),
        ("/api\\login", &[0, 2]),
        ("/api/login/%20", &[0]),
        ("/api/health", &[]),
        ("/api/health/?a=b", &[]),
        ("/api/login/..;/health", &[0, 2]),
        ("/api/%68ealth", &[2]),
        ("/free/a", &[]),
        ("/free/a%20b", &[2]),
        ("/free/..%2fapi/login", &[0, 2]),
    ] {
        assert_eq!(rules_of(&policy, path), expected, "{path}");
    }
}

#[test]
fn a_rule_stops_the_others_only_where_every_reading_matches_it() {
    for first_match in [false, true] {
        let mut public = rule(0, path("/public/**"));
        public.stop = true;
        let mut parts = parts(vec![public, rule(1, path("/api/login"))]);
        parts.first_match = first_match;
        let policy = Policy::new(parts);
        assert_eq!(rules_of(&policy, "/public/a%20b"), [0]);
        assert_eq!(rules_of(&policy, "/public/..%2fapi/login"), [0, 1]);
        assert_eq!(rules_of(&policy, "/public/..;/api/login"), [0, 1]);
    }
}

#[test]
fn case_is_ignored_where_the_policy_says_so() {
    let mut parts = parts(vec![rule(0, path("/Api/*.PNG/{Id}"))]);
    assert_eq!(rules_of(&Policy::new(parts.clone()), "/api/a.png/1").len(), 0);
    parts.ignore_case = true;
    parts.rules[0].key = KeySpec(vec![vec![KeyPart::Path("Id".into())]]);
    assert_eq!(rules_of(&Policy::new(parts), "/aPI/A.png/X").len(), 1);
}

#[test]
fn checks_in_shadow_are_left_out_before_enforced_ones() {
    let shadow = |number| Rule { enforced: 0, ..rule(number, Match::default()) };
    let many = 2 * CHECKS_MAX;
    let rules = (0..many).map(shadow).chain([rule(many, Match::default())]).collect();
    let policy = Policy::new(parts(rules));
    let selection = policy.select(&Descriptors::default(), 1);
    assert_eq!((selection.refusal, selection.checks.len()), (None, CHECKS_MAX));
    assert_eq!(selection.uncounted, many + 1 - CHECKS_MAX);
    let enforced: Vec<_> = selection.checks.iter().filter(|it| it.role == Role::Enforced).collect();
    assert!(matches!(enforced[..], [check] if check.rule == many));
    assert_eq!(policy.crowds().len(), 1);
    let rules = (0..=CHECKS_MAX).map(|number| rule(number, path(&format!("/{number}")))).collect();
    assert_eq!(Policy::new(parts(rules)).crowds(), [], "rules that never meet are no crowd");
    let rules = (0..=CHECKS_MAX).map(|number| rule(number, path("/a/**"))).collect();
    let crowds = Policy::new(parts(rules)).crowds();
    assert_eq!((crowds.len(), crowds[0].is_refused, &*crowds[0].path), (1, true, "/a"));
}

#[test]
fn more_permits_than_a_limit_can_ever_admit_are_refused_before_any_check() {
    let policy = Policy::new(parts(vec![Rule { cost: 2, ..rule(0, Match::default()) }]));
    let refusal = |permits| policy.select(&Descriptors::default(), permits).refusal;
    assert_eq!(refusal(5), None);
    assert_eq!(refusal(6), Some(Refusal::ExceedsLimit { rule: 0, limit: 0 }));
}
