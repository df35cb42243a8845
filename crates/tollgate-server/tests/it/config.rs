//! Files, variables and flags; and every mistake of a run at once, each with its place.

use std::path::Path;

use serde_json::{Value, json};
use tollgate_server::config::{self, Config, ConfigErrors, Store};

fn load(yaml: &str, variables: &[(&str, &str)], listen: Option<&str>) -> Result<Config, ConfigErrors> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollgate.yaml");
    std::fs::write(&file, yaml).unwrap();
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let flags = listen.map(|value| ("listen", "--listen", value.to_owned())).into_iter().collect();
    config::load(Some(&file), variables, flags)
}

/// The mistakes, with the file's name instead of its path.
fn mistakes(yaml: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let errors = load(yaml, variables, None).unwrap_err();
    let name = |line: String| {
        line.rsplit_once("tollgate.yaml").map_or(line.clone(), |(_, rest)| format!("file{rest}"))
    };
    errors.0.iter().map(|error| name(error.to_string())).collect()
}

#[test]
fn nothing_said_means_the_defaults() {
    for yaml in ["", "# nothing\n", "---\n", "{}"] {
        let config = load(yaml, &[], None).unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:8080");
        assert!(matches!(config.store, Store::Memory(memory) if memory.max_keys == 1_000_000));
        assert_eq!(config.limits.iter().map(|(limit, _)| limit.size()).collect::<Vec<_>>(), [100; 5]);
    }
}

#[test]
fn flags_win_over_variables_and_variables_over_the_file() {
    let yaml = "listen: 127.0.0.1:1\nmemory:\n  max_keys: 10\n";
    let listen = |variables: &[(&str, &str)], flag| load(yaml, variables, flag).unwrap().listen.port();
    assert_eq!(listen(&[], None), 1);
    assert_eq!(listen(&[("TOLLGATE_LISTEN", "127.0.0.1:2")], None), 2);
    assert_eq!(listen(&[("TOLLGATE_LISTEN", "127.0.0.1:2")], Some("127.0.0.1:3")), 3);
    let config = load(
        yaml,
        &[("TOLLGATE_MEMORY__MAX_KEYS", "20"), ("TOLLGATE_API__TRUSTED_CALLERS", "[10.0.0.0/8]")],
        None,
    )
    .unwrap();
    assert!(matches!(config.store, Store::Memory(memory) if memory.max_keys == 20));
    assert_eq!(config.trusted_callers.len(), 1);
    // What Kubernetes sets for a service called tollgate is not for us.
    assert!(
        load("", &[("TOLLGATE_PORT", "tcp://10.0.0.1:80"), ("TOLLGATE_SERVICE_HOST", "10.0.0.1")], None)
            .is_ok()
    );
}

#[test]
fn a_variable_that_is_nearly_a_setting_is_warned_of() {
    let variables = [
        ("TOLLGATE_LOG_LEVEL", "debug"),
        ("TOLLGATE_POLCY", "a"),
        ("TOLLGATE_REDS__DEADLINE", "1s"),
        ("TOLLGATE_PORT", "tcp://"),
    ];
    assert_eq!(
        load("", &variables, None).unwrap().warnings(),
        [
            "TOLLGATE_LOG_LEVEL is not a setting and is ignored: sections end with two underscores; did you mean TOLLGATE_LOG__LEVEL?",
            "TOLLGATE_POLCY is not a setting and is ignored; did you mean TOLLGATE_POLICY?",
            "TOLLGATE_REDS__DEADLINE is not a setting and is ignored; did you mean TOLLGATE_REDIS__DEADLINE?"
        ]
    );
}

#[test]
fn listeners_are_written_in_every_usual_form() {
    for (text, address) in [
        ("localhost:8080", "127.0.0.1:8080"),
        (":8080", "0.0.0.0:8080"),
        ("[::]:8080", "[::]:8080"),
        ("[::1]:8080", "[::1]:8080"),
        ("10.0.0.1:8080", "10.0.0.1:8080"),
    ] {
        assert_eq!(load("", &[], Some(text)).unwrap().listen, address.parse().unwrap(), "{text}");
    }
    for wrong in ["localhost", "8080", ":", "localhost:", "example.com:80", ":99999"] {
        assert!(load("", &[], Some(wrong)).is_err(), "{wrong}");
    }
}

#[test]
fn every_mistake_is_named_with_its_line_and_column() {
    let yaml = "\
listen: localhost
memory:
  max_keys: many
  max_key: 3
api:
  defaults:
    token_bucket: { capacity: 0, refill_rate: 10 per second }
    sliding_window:
      limit: 200000/min
  trusted_callers: [10.0.0.0/8, nowhere, 10.0.0.1/8, '::ffff:10.0.0.0/104', 0.0.0.0/0]
server:
  idle_timeout: 60
storage: memory
";
    let found = mistakes(yaml, &[("TOLLGATE_LOG__LEVEL", "[loud")]);
    let expected = [
        "TOLLGATE_LOG__LEVEL: log.level: accepted: error, warn,",
        "file:1:1: listen: expected ADDRESS:PORT such as 127.0.0.1:8080, localhost:8080, [::]:8080 or :8080",
        "file:3:3: memory.max_keys: invalid type: string \"many\", expected a whole number",
        "file:4:3: memory.max_key: no such field (did you mean `max_keys`?); accepted here: max_keys",
        "file:7:5: api.defaults.token_bucket: a limit needs room for at least 1 permit",
        "file:7:34: api.defaults.token_bucket.refill_rate: expected PERMITS/PERIOD, such as 10/s,",
        "file:9:7: api.defaults.sliding_window.limit: at most 100000 permits",
        "file:10:33: api.trusted_callers.1: expected a network such as 10.0.0.0/8, not nowhere",
        "file:10:42: api.trusted_callers.2: 10.0.0.1/8 has bits beyond its prefix; did you mean 10.0.0.0/8?",
        "file:10:54: api.trusted_callers.3: ::ffff:10.0.0.0/104: write IPv4 networks as IPv4",
        "file:10:77: api.trusted_callers.4: 0.0.0.0/0 would trust everybody",
        "file:12:3: server.idle_timeout: expected a duration such as 500ms, 10s or 1m30s, not 60",
        "file:13:1: storage: no such field (did you mean `store`?); accepted here: listen, store,",
    ];
    assert_eq!(found.len(), expected.len(), "{}", found.join("\n"));
    for (line, expected) in found.iter().zip(expected) {
        assert!(line.starts_with(expected), "{line}\nshould begin with\n{expected}");
    }
}

#[test]
fn networks_that_would_trust_everybody_are_refused() {
    let yaml = "api:\n  trusted_callers: [10.0.0.1/8, '::ffff:10.0.0.0/104', 0.0.0.0/0]\n";
    let found = mistakes(yaml, &[]).join("\n");
    for why in ["did you mean 10.0.0.0/8?", "write IPv4 networks as IPv4", "would trust everybody"] {
        assert!(found.contains(why), "{why} in\n{found}");
    }
    let found = mistakes("client_address: { header: X-Forwarded-For }", &[]).join("\n");
    assert!(found.contains("trusted_proxies is empty"), "{found}");
    for host in ["http://a.example", "a.example:80", "*.example", ""] {
        let found = mistakes(&format!("api: {{ allowed_hosts: ['{host}'] }}"), &[]).join("\n");
        assert!(found.contains("api.allowed_hosts.0: expected a host name"), "{found}");
    }
    assert!(mistakes("server: { max_body_bytes: 1000 }", &[])[0].contains("at least 1048576"));
}

#[test]
fn two_wrong_items_of_a_list_are_two_mistakes() {
    let found = mistakes("api:\n  trusted_callers:\n    - nowhere\n    - 10.0.0.0/8\n    - elsewhere\n", &[]);
    let places: Vec<_> = found.iter().map(|line| line.split(" api").next().unwrap()).collect();
    assert_eq!(places, ["file:3:7:", "file:5:7:"], "{found:?}");
}

#[test]
fn what_is_no_yaml_is_one_mistake_with_its_place() {
    for (yaml, place) in [
        ("listen: [", "file:"),
        ("a: b: c", "file:1:"),
        ("listen: x\nlisten: y", "file:2:1"),
        ("- 1", "file:1:1"),
    ] {
        let found = mistakes(yaml, &[]);
        assert!(found[0].starts_with(place), "{yaml}: {found:?}");
    }
    let bomb = "a: &a [1,1,1]\nb: *a\n";
    assert!(mistakes(bomb, &[])[0].contains("aliases are not read"));
    assert!(!mistakes(&"[".repeat(100_000), &[]).is_empty());
}

#[test]
fn secrets_do_not_come_back_in_messages() {
    let found = mistakes("store: rediss://user:secret@host:port", &[]).join("\n");
    assert!(found.contains("a port that is no number") && !found.contains("secret"), "{found}");
    let config =
        load("store: redis://user:secret@host", &[("TOLLGATE_REDIS__PASSWORD", "hidden")], None).unwrap();
    assert_eq!(config.store.to_string(), "redis://***@host:6379");
    let shown = format!("{config:?}");
    assert!(!shown.contains("secret") && !shown.contains("hidden"), "{shown}");
    let directory = tempfile::tempdir().unwrap();
    let tokens = directory.path().join("tokens");
    std::fs::write(&tokens, "short-secret\n").unwrap();
    let found = mistakes(&format!("api: {{ token_file: {} }}", tokens.display()), &[]).join("\n");
    assert!(found.contains("fewer than 16 characters") && !found.contains("short-secret"), "{found}");
}

#[test]
fn mistakes_in_the_file_of_admin_tokens_are_named_without_the_token() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("admin-tokens");
    let yaml = format!("admin: {{ token_file: {} }}", file.display());
    for (text, why) in [
        ("", "has no tokens; expected lines such as alice:TOKEN"),
        ("# alice:hidden-hidden-hidden\n\n", "has no tokens"),
        ("# a comment\nhidden-hidden-hidden\n", ":2: expected NAME:TOKEN"),
        ("alice:hidden\n", ":1: a token has at least 16 visible ASCII characters"),
        (":hidden-hidden-hidden\n", ":1: a name has 1 to 64 letters"),
        ("al ice:hidden-hidden-hidden\n", ":1: a name has 1 to 64 letters"),
    ] {
        std::fs::write(&file, text).unwrap();
        let found = mistakes(&yaml, &[]).join("\n");
        assert!(found.contains("admin.token_file") && found.contains(why), "{text}: {found}");
        assert!(!found.contains("hidden"), "{found}");
    }
    std::fs::write(&file, "# comment\n\nalice:hidden-hidden-hidden\nbob: other-other-other \n").unwrap();
    let config = load(&yaml, &[], None).unwrap();
    let names: Vec<_> = config.admin_tokens.iter().map(|token| token.name.as_str()).collect();
    assert_eq!(names, ["alice", "bob"]);
    assert!(!format!("{config:?}").contains("hidden-hidden"));
}

#[test]
fn a_store_is_checked_before_it_is_asked() {
    for (yaml, variables, mistake) in [
        ("store: postgres://h", vec![], "file:1:1: store: expected redis://HOST"),
        ("store: redis+sentinel://h", vec![], "file:1:1: store: names no master"),
        ("", vec![("TOLLGATE_STORE", "redis://a,b")], "TOLLGATE_STORE: store: names several servers"),
        ("redis: { deadline: 0ms }", vec![], "redis.deadline: at least 1ms"),
        ("redis: { remember_denials: 1s }", vec![], "redis.remember_denials: at most 100ms"),
        ("redis: { connections: 0 }", vec![], "redis.connections: between 1 and 64"),
        ("redis: { tls: { cert_file: /nowhere } }", vec![], "redis.tls: cert_file and key_file go together"),
        ("redis: { password_file: /nowhere }", vec![], "redis.password_file: /nowhere cannot be read"),
        (
            "guard: { breaker: { failure_rate_threshold: 0 } }",
            vec![],
            "guard.breaker.failure_rate_threshold: the failure rate must be from 1 to 100",
        ),
        (
            "guard: { breaker: { sliding_window_size: 65 } }",
            vec![],
            "sliding_window_size: the window must be",
        ),
        ("guard: { breaker: { permitted_calls_in_half_open_state: 0 } }", vec![], "at least 1 probe"),
        ("guard: { local_share: 3/2 }", vec![], "guard.local_share: must be a fraction such as 1/2"),
        ("guard: { local_max_keys: 0 }", vec![], "guard.local_max_keys: between 1 and"),
        ("guard: { open_ceiling: { burst: 0 } }", vec![], "file:1:10: guard.open_ceiling: "),
        ("api: { closed_status: 500 }", vec![], "api.closed_status: 503 or 429"),
        ("api: { on_store_failure: fall }", vec![], "api.on_store_failure: "),
        (
            "api: { defaults: { fixed_window: { deadline: 0ms } } }",
            vec![],
            "api.defaults.fixed_window.deadline: at least 1ms",
        ),
    ] {
        let found = mistakes(yaml, &variables).join("\n");
        assert!(found.contains(mistake), "{found}");
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    std::fs::write(&file, "s3cret\n").unwrap();
    let yaml = format!("store: redis+cluster://a,b\nredis: {{ password_file: {} }}", file.display());
    let Store::Redis { config, .. } = load(&yaml, &[], None).unwrap().store else { panic!("no store") };
    assert_eq!(config.password.as_deref(), Some("s3cret"));
}

#[test]
fn the_example_is_valid_by_the_schema_and_by_the_program() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/tollgate.yaml");
    config::load(Some(&example), std::iter::empty(), Vec::new()).unwrap();
    let schema = config::schema();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let written: Value = json!({
        "listen": "127.0.0.1:8080",
        "api": { "defaults": { "token_bucket": { "capacity": 5, "refill_rate": "10/s", "refill": "greedy" } } },
        "server": { "idle_timeout": "1m30s" }
    });
    assert!(validator.is_valid(&written));
    let example = config::read_yaml("example", &std::fs::read_to_string(&example).unwrap()).unwrap();
    assert!(validator.is_valid(&example), "{:?}", validator.validate(&example).err());
    assert!(validator.is_valid(&json!({ "redis": null, "api": null })), "all lines are commented out");
    for wrong in [
        json!({"listne": "x"}),
        json!({"server": {"idle_timeout": "soon"}}),
        json!({"memory": {"max_keys": -1}}),
    ] {
        assert!(!validator.is_valid(&wrong), "{wrong}");
    }
}

#[test]
fn every_mistake_in_a_policy_is_named_with_its_line_and_column() {
    let rule = |fields: &str| format!("rules:\n  - {{ name: a, key: ip, {fields} }}\n");
    for (yaml, mistake) in [
        (rule("limit: often"), "2:25: rule \"a\": limit: expected a limit such as 100/min or 50/s burst 100, not often"),
        (rule("limit: 0/s"), "rule \"a\": limit: a rate needs at least 1 permit"),
        (rule("limt: 5/s"), "rule \"a\": limt: no such field (did you mean `limit`?); accepted here: name, match, key, limit"),
        (rule("cost: 2"), "rule \"a\": needs one of `limit: 100/min`, `tier: from_request` and `unlimited: true`"),
        (rule("limit: 5/s, unlimited: true"), "rule \"a\": has limit and unlimited: keep one of them"),
        (rule("limit: 5/s, algorithm: GCRA"), "rule \"a\": algorithm: expected TOKEN_BUCKET"),
        (rule("limit: 5/s burst 9, algorithm: FIXED_WINDOW"), "burst belongs to TOKEN_BUCKET, LEAKY_BUCKET"),
        (rule("limit: { limit: 5/s, strict: true, algorithm: FIXED_WINDOW }"), "strict belongs to SLIDING_WINDOW_COUNTER"),
        (rule("limit: 99999999999999999/s"), "rule \"a\": limit: too large to be exact: at most"),
        (rule("limit: 1000001/min, algorithm: SLIDING_WINDOW"), "at most 1000000 permits (sliding_window.max_limit"),
        (rule("limit: { quota: 5/year }"), "rule \"a\": limit.quota: expected a quota such as 1000/day"),
        (rule("limit: { quota: 5/day, zone: Asia/Soul }"), "rule \"a\": limit: no such time zone: Asia/Soul"),
        (rule("limit: { quota: 5/month, anchor: 32 }"), "rule \"a\": limit: "),
        (rule("limit: { limit: 5/s, zone: UTC }"), "zone and anchor belong to a quota"),
        (rule("limit: 5/s, match: { path: login }"), "rule \"a\": match.path: login: a path begins with /"),
        (rule("limit: 5/s, match: { path: [/a, /b//c] }"), "rule \"a\": match.path.1: /b//c: can never match"),
        (rule("limit: 5/s, match: { tier: gold }"), "rule \"a\": match.tier: can never match: no tier is called gold"),
        (rule("limit: 5/s, match: { host: 'a:80' }"), "rule \"a\": match.host: can never match: a:80"),
        (rule("limit: 5/s, match: { cidr: 10.0.0.1/8 }"), "rule \"a\": match.cidr: 10.0.0.1/8 has bits beyond its prefix"),
        (rule("limit: 5/s, match: { header: { x-a: '' } }"), "rule \"a\": match.header.x-a: can never match"),
        (rule("limit: 5/s, tier: from_request"), "rule \"a\": has limit and tier: keep one of them"),
        (rule("limit: 5/s, match: { method: GETT }"), "rule \"a\": match.method: GETT is not a standard method (did you mean GET?)"),
        ("rules: [{ key: ip, limit: 5/s }]".to_owned(), "rule number 1, which has no name: name: is missing: give a rule a name, such as `name: per-user`"),
        ("- { name: a, key: ip, limit: 5/s }".to_owned(), "p:1:1: a policy is not a list or a text: write `rules:`, and the rules below it"),
        ("policy:\n  rules: []".to_owned(), "p:1:1: policy: a file with a policy begins with `rules:`"),
        (rule("tier: from_request"), "rule \"a\": tier: there are no `tiers`"),
        (rule("limit: 5/s, factor: { x: 1/2 }"), "rule \"a\": factor: belongs to `tier: from_request`"),
        (rule("limit: 5/s, enforce: 101%"), "rule \"a\": enforce: expected a percentage from 0% to 100%"),
        (rule("limit: 5/s, mode: shadow, enforce: 5%"), "rule \"a\": enforce: a rule in shadow is enforced for no key"),
        (rule("limit: 5/s, deny_empty_key: 200"), "rule \"a\": deny_empty_key: a status from 400 to 499"),
        (rule("limit: 5/s, code: nope"), "rule \"a\": code: capital letters"),
        ("rules: [{ name: a, limit: 5/s }]".to_owned(), "rule \"a\": key: what does it count by?"),
        ("rules: [{ name: 'a b', key: ip, limit: 5/s }]".to_owned(), "rule \"a b\": name: the name of a rule has 1 to 64"),
        ("rules: [{ name: default, key: ip, limit: 5/s }]".to_owned(), "rule \"default\": name: is the name of what applies"),
        ("rules: [{ name: a, key: 'path:id', limit: 5/s }]".to_owned(), "rule \"a\": key: path:id: a path of the rule has no {id}"),
        ("rules: [{ name: a, key: [ip, user+ip], limit: 5/s }]".to_owned(), "rule \"a\": key.1: can never be used"),
        (
            "rules: [{ name: a, key: ip, limit: 5/s }, { name: a, key: ip, limit: 5/s }]".to_owned(),
            "rule \"a\": name: rule 1 has this name too",
        ),
        (
            "rules: [{ name: a, key: global, limit: 5/s, stop: true }, { name: b, key: ip, limit: 5/s }]".to_owned(),
            "rule \"b\": can never apply: every request stops at the rule a",
        ),
        ("tiers: { free: [] }".to_owned(), "tiers.free: an empty list; expected at least one entry"),
        ("tiers: { free: [1/s, unlimited] }\nrules: [{ name: a, key: ip, tier: from_request }]".to_owned(), "tiers.free: `unlimited` stands alone"),
        (rule("limit: [5/s, unlimited]"), "rule \"a\": limit: `unlimited` stands alone"),
        (rule("limit: 5/s, match: { cidr: [] }"), "rule \"a\": match.cidr: an empty list"),
        (rule("limit: 5/s, cost: 6"), "rule \"a\": cost: 6 is more than a limit of the rule can ever admit: 5"),
        (rule("limit: 5/s, candidate: unlimited"), "rule \"a\": candidate: is a limit such as 50/min"),
        ("".to_owned(), "p:1:1: is empty; write `rules: []` if there are none"),
        ("tiers: { free: 1/s }\ndefault_tier: gold".to_owned(), "default_tier: no such tier: gold; there are free"),
        ("tiers: { free: 1/s }\nmembers: { alice: gold }".to_owned(), "members.alice: no such tier: gold"),
        (
            "tiers: { free: 5/s }\nendpoints: { e: { path: /e } }\nrules: [{ name: a, key: ip, tier: from_request, factor: { e: 1/10 } }]"
                .to_owned(),
            "rule \"a\": factor.e: 1/10 of the limit 5 leaves less than 1 permit",
        ),
        (rule("limit: 5/s, replaces: b"), "rule \"a\": replaces: no rule is called b"),
        (rule("limit: 5/s, replaces: a"), "rule \"a\": replaces: a rule cannot replace itself"),
        ("endpoints: { e: {} }".to_owned(), "endpoints.e: needs a condition"),
        ("exclude: [{}]".to_owned(), "exclude.0: would exclude everything"),
    ] {
        let errors = config::read_policy("p", &yaml, &config::PolicyContext::default()).expect_err(&yaml);
        assert!(errors.to_string().contains(mistake), "{yaml}\n{errors}");
        assert!(errors.0.iter().all(|error| error.position.is_some()), "{yaml}\n{errors}");
    }
    // Inline, the places are those of the file around it.
    let inline =
        mistakes("listen: 127.0.0.1:1\npolicy:\n  rules:\n    - { name: a, key: ip, limit: often }\n", &[]);
    let expected =
        "file:4:27: rule \"a\": limit: expected a limit such as 100/min or 50/s burst 100, not often";
    assert_eq!(inline, [expected]);
}

#[test]
fn a_rule_that_is_only_counted_stops_no_other_rule() {
    let behind = |first: &str| {
        let yaml = format!(
            "rules: [{{ name: a, limit: 5/s, stop: true, {first} }}, {{ name: b, key: ip, limit: 5/s }}]"
        );
        config::read_policy("p", &yaml, &config::PolicyContext::default()).is_ok()
    };
    assert!(
        behind("key: global, mode: shadow") && behind("key: global, enforce: 50%") && behind("key: user")
    );
    assert!(!behind("key: global") && !behind("key: user, deny_empty_key: 403"));
}

#[test]
fn many_rules_may_have_the_same_limit() {
    let rules: String = (0..5_000)
        .map(|n| format!("- {{ name: r{n}, match: {{ path: /r{n} }}, key: ip, limit: 5/s }}\n"))
        .collect();
    assert!(config::read_policy("p", &format!("rules:\n{rules}"), &config::PolicyContext::default()).is_ok());
    let other: String =
        (0..1_001).map(|n| format!("- {{ name: r{n}, key: ip, limit: {}/s }}\n", n + 1)).collect();
    let why =
        config::read_policy("p", &format!("rules:\n{other}"), &config::PolicyContext::default()).unwrap_err();
    assert!(why.to_string().contains("1000 different ones"), "{why}");
}

#[test]
fn the_policy_of_the_example_is_valid_by_its_schema() {
    let schema = config::policy_schema();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let example =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/policy.yaml"));
    let value = config::read_yaml("policy.yaml", &example.unwrap()).unwrap();
    let errors: Vec<_> = validator.iter_errors(&value).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}");
    for wrong in
        [json!({"rules": [{"nmae": "a"}]}), json!({"apply": "some"}), json!({"default": {"limit": 5}})]
    {
        assert!(!validator.is_valid(&wrong), "{wrong}");
    }
}

#[test]
fn sections_without_a_value_have_their_defaults() {
    for yaml in [
        "redis:\n  # deadline: 20ms\napi:\nadmin:\nmemory:\nguard:\nserver:\nlog:\nidentity:\nclient_address:\n",
        "api:\n  trusted_callers:\n  defaults:\n    token_bucket:\nguard:\n  breaker:\nredis:\n  tls:\n",
    ] {
        let config = load(yaml, &[], None).unwrap();
        assert_eq!(config.limits.iter().map(|(limit, _)| limit.size()).collect::<Vec<_>>(), [100; 5]);
    }
    let config = load("memory:\n", &[("TOLLGATE_MEMORY__MAX_KEYS", "7")], None).unwrap();
    assert!(matches!(config.store, Store::Memory(memory) if memory.max_keys == 7));
}

#[test]
fn mistakes_name_no_types_of_the_program() {
    for (yaml, variables, expected) in [
        (
            "api: 5\n",
            &[][..],
            "file:1:1: api: invalid type: integer `5`, expected fields, each as NAME: VALUE",
        ),
        ("store:\n", &[], "file:1:1: store: has no value: write one, or leave the field out"),
        (
            "memory:\n  max_keys:\n",
            &[],
            "file:2:3: memory.max_keys: has no value: write one, or leave the field out",
        ),
        (
            "policy:\n  rules:\n",
            &[],
            "file:2:3: policy.rules: has no value: write one, or leave the field out",
        ),
        (
            "api: { trusted_callers: 5 }\n",
            &[],
            "file:1:8: api.trusted_callers: invalid type: integer `5`, expected a list such as [a, b]",
        ),
        (
            "",
            &[("TOLLGATE_API__TRUSTED_CALLERS", "10.0.0.0/8")],
            "TOLLGATE_API__TRUSTED_CALLERS: api.trusted_callers: expected a list: [10.0.0.0/8]",
        ),
    ] {
        assert_eq!(mistakes(yaml, variables), [expected], "{yaml}");
    }
}

#[test]
fn settings_of_the_example_can_be_uncommented() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/tollgate.yaml");
    let text = std::fs::read_to_string(example).unwrap();
    let line = "  # listen: 127.0.0.1:8090";
    assert!(text.contains(line), "the example names the admin port");
    let config = load(&text.replace(line, "  listen: 127.0.0.1:8090"), &[], None).unwrap();
    assert_eq!(config.admin_listen.map(|listen| listen.port()), Some(8090));
}

#[test]
fn the_consistency_and_debts_of_the_api_are_the_default_of_policy_limits() {
    let rules = "rules: [{ name: a, key: ip, limit: 100/s }, { name: b, key: ip, limit: 100/s, consistency: strict, settle_debt: false }]";
    let settings = |policy: &str| -> Vec<_> {
        let yaml = format!("api: {{ consistency: lease, settle_debt: true }}\npolicy: {{ {policy} }}\n");
        let settings = load(&yaml, &[], None).unwrap().policy.checked.settings;
        settings.iter().map(|it| (it.consistency.as_str(), it.on_failure.settle)).collect()
    };
    assert_eq!(settings(rules), [("lease", true), ("strict", false)]);
    let with_own = format!("consistency: lease_fast, settle_debt: false, {rules}");
    assert_eq!(settings(&with_own), [("lease_fast", false), ("strict", false)]);
}

fn checked(yaml: &str) -> config::CheckedPolicy {
    config::read_policy("p", yaml, &config::PolicyContext::default())
        .unwrap_or_else(|why| panic!("{yaml}: {why}"))
}

#[test]
fn a_rule_behind_a_wider_rule_that_stops_is_warned_of() {
    let warnings = |top: &str, first: &str, second: &str| {
        let rules = format!("{{ name: a, {first}, limit: 5/s }}, {{ name: b, {second}, limit: 5/s }}");
        checked(&format!("{top}rules: [{rules}]")).warnings
    };
    let (api, login) = ("match: { path: /api/** }", "match: { path: /api/login }");
    let stops = format!("{api}, key: ip, stop: true");
    let by_ip = |matching: &str| format!("{matching}, key: ip");
    assert_eq!(
        warnings("", &stops, &by_ip(login)),
        [
            "b: never applies: the rule a before it matches every request that it matches, and has `stop: true`"
        ]
    );
    assert_eq!(
        warnings("apply: first\n", &by_ip(api), &by_ip(login)),
        [
            "b: never applies: the rule a before it matches every request that it matches, and with `apply: first` only the first rule applies"
        ]
    );
    for (top, first, second) in [
        ("", by_ip(api), by_ip(login)),
        ("", stops.clone(), by_ip("match: { path: /other }")),
        ("", stops.clone(), "key: ip".to_owned()),
        ("", format!("{stops}, mode: shadow"), by_ip(login)),
        ("", format!("{api}, key: user, stop: true"), by_ip(login)),
        ("", "match: { path: /api/**, method: GET }, key: ip, stop: true".to_owned(), by_ip(login)),
        ("apply: first\n", by_ip(login), by_ip(api)),
    ] {
        assert_eq!(warnings(top, &first, &second), [""; 0], "{first} {second}");
    }
    let unused = checked("default: 9/s\nrules: [{ name: a, key: [user, ip], limit: 5/s }]").warnings;
    assert_eq!(unused, ["default: never applies: the rule a applies to every request"]);
    assert_eq!(checked("default: 9/s\nrules: [{ name: a, key: user, limit: 5/s }]").warnings, [""; 0]);
}

#[test]
fn a_rule_by_identity_that_lets_anonymous_callers_pass_is_remarked_on() {
    let remark = |rule: &str| {
        let yaml = format!("default: 9/s\nrules: [{{ name: a, limit: 5/s, {rule} }}]");
        checked(&yaml).remarks.join("\n")
    };
    for (rule, who, key) in [
        ("key: user", "a user", "[user, ip]"),
        ("key: user+path:id, match: { path: '/{id}' }", "a user", "[user, ip]"),
        ("key: api_key", "an API key", "[api_key, ip]"),
        ("key: [user, api_key]", "a user or an API key", "[user, api_key, ip]"),
    ] {
        let expected = format!(
            "a: requests without {who} are not limited by this rule; add ip to its key (`key: {key}`) or set `deny_empty_key: 403`"
        );
        assert_eq!(remark(rule), expected, "{rule}");
    }
    for rule in [
        "key: [user, ip]",
        "key: ip",
        "key: identity",
        "key: user, deny_empty_key: 401",
        "key: user, match: { identity: user }",
        "key: [user, api_key], match: { identity: [user, api_key] }",
    ] {
        assert_eq!(remark(rule), "", "{rule}");
    }
}

#[test]
fn every_property_of_a_schema_is_described() {
    fn walk(schema: &Value, path: &str, missing: &mut Vec<String>) {
        match schema {
            Value::Object(members) => {
                for (name, property) in
                    members.get("properties").and_then(Value::as_object).into_iter().flatten()
                {
                    if property["description"].as_str().is_none_or(str::is_empty) {
                        missing.push(format!("{path}.{name}"));
                    }
                }
                members.iter().for_each(|(name, value)| walk(value, &format!("{path}/{name}"), missing));
            }
            Value::Array(items) => items.iter().for_each(|item| walk(item, path, missing)),
            _ => {}
        }
    }
    for (schema, title) in [(config::schema(), "Tollgate"), (config::policy_schema(), "Tollgate policy")] {
        let mut missing = Vec::new();
        walk(&schema, "", &mut missing);
        assert_eq!(missing, [""; 0], "{title}");
        assert_eq!(schema["title"], title);
        assert!(schema["$id"].as_str().is_some_and(|id| id.starts_with("urn:tollgate:")), "{title}");
        let algorithms = &schema["$defs"]["Algorithm"]["enum"];
        assert_eq!(algorithms.as_array().map(Vec::len), Some(5), "{algorithms}");
        let methods = &schema["$defs"]["Method"]["anyOf"][0]["enum"];
        assert!(methods.as_array().is_some_and(|all| all.contains(&json!("PATCH"))), "{methods}");
    }
}
