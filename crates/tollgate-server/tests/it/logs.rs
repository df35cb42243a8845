//! Sliding logs in the service: how large they may be, what they keep, and what is said of it.

use std::process::Command;
use std::time::Duration;

use tollgate::rules::Descriptors;
use tollgate::{
    Clock, Engine, GuardConfig, Micros, PolicyLimiter, RedisConfig, RedisEngine, SharedEngine, Timestamp,
};
use tollgate_server::config::{self, PolicyContext};
use tollgate_testkit::{Process, RedisServer, wait_until};

const LARGE: &str = "rules:\n  - { name: exports, key: user, limit: 600000/h, algorithm: SLIDING_WINDOW }\n";

fn write(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

fn tollgate(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tollgate")).args(arguments).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn a_log_above_the_default_limit_needs_a_setting_and_is_warned_of_with_its_memory() {
    let policy = write(LARGE);
    let (code, said) = tollgate(&["policy", "check", policy.path().to_str().unwrap()]);
    assert_eq!(code, Some(0), "{said}");
    let warning = "warning: exports: SLIDING_WINDOW with 600000 permits: one key takes up to 78 MB in Redis, 29 MB in memory";
    assert!(said.contains(warning) && said.contains("sliding_window.max_limit: 600000"), "{said}");

    let inline = format!("policy: {}\n", policy.path().display());
    let (code, said) = tollgate(&["config", "check", write(&inline).path().to_str().unwrap()]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("rule \"exports\": limit: at most 100000 permits") && said.contains("not 600000"),
        "{said}"
    );

    let allowed = format!("sliding_window: {{ max_limit: 600000 }}\n{inline}");
    let (code, said) = tollgate(&["config", "check", write(&allowed).path().to_str().unwrap()]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("warning: policy: exports: SLIDING_WINDOW with 600000 permits"), "{said}");

    let default =
        "sliding_window: { max_limit: 600000 }\napi:\n  defaults:\n    sliding_window: { limit: 600001/h }\n";
    let (code, said) = tollgate(&["config", "check", write(default).path().to_str().unwrap()]);
    assert!(
        code == Some(2) && said.contains("api.defaults.sliding_window.limit: at most 600000 permits"),
        "{said}"
    );

    let beyond = "sliding_window: { max_limit: 1000001 }\n";
    let (code, said) = tollgate(&["config", "check", write(beyond).path().to_str().unwrap()]);
    assert!(code == Some(2) && said.contains("sliding_window.max_limit: between 1 and 1000000"), "{said}");
}

/// What a node logs until it has said `awaited`.
fn log_of_start(store: &RedisServer, settings: &[(&str, &str)], awaited: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["--listen", "127.0.0.1:0", "--store", &store.url()]).envs(settings.iter().copied());
    let _node = Process::start_with_log(&command, &log);
    let read = || std::fs::read_to_string(&log).unwrap_or_default();
    wait_until("the node says it", || read().contains(awaited));
    read()
}

#[test]
fn a_node_warns_at_start_of_a_large_log() {
    let (store, policy) = (RedisServer::start(), write(LARGE));
    let settings = [
        ("TOLLGATE_POLICY", policy.path().to_str().unwrap()),
        ("TOLLGATE_SLIDING_WINDOW__MAX_LIMIT", "600000"),
    ];
    let said = log_of_start(&store, &settings, "SLIDING_WINDOW with 600000 permits");
    let line = said.lines().find(|line| line.contains("600000 permits")).unwrap();
    assert!(line.contains("WARN") && line.contains("78 MB"), "{line}");
}

#[test]
fn a_store_that_frees_expired_keys_while_others_wait_is_warned_of() {
    let blocking = RedisServer::build().args(&["--lazyfree-lazy-expire", "no"]).start();
    // What is said after the connection was opened tells that nothing else comes.
    let said = log_of_start(&blocking, &[], "lazyfree-lazy-expire is off");
    assert!(said.contains("set it to yes"), "{said}");
    let lazy = RedisServer::build()
        .args(&["--lazyfree-lazy-expire", "yes", "--maxmemory-policy", "allkeys-lru"])
        .start();
    assert!(!log_of_start(&lazy, &[], "allkeys-lru").contains("lazyfree"), "nothing to warn of");
}

/// Requests of one user, judged by policies that follow each other, at times that are handed in.
struct Requests {
    clock: Clock,
    engine: Engine,
    limiter: Option<PolicyLimiter>,
}

impl Requests {
    async fn on(store: &RedisServer) -> Self {
        let clock = Clock::manual(Timestamp::from_micros(1_763_000_000_000_000));
        let mut config = RedisConfig::new(store.url().parse().unwrap());
        config.clock = Some(clock.clone());
        config.deadline = Duration::from_secs(10);
        config.remember_denials = Duration::ZERO;
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        engine.connected(Duration::from_secs(10)).await.unwrap();
        let (shared, _driver) = SharedEngine::new(engine, GuardConfig::default(), clock.clone());
        Self { clock, engine: Engine::Shared(shared), limiter: None }
    }

    fn load(&mut self, tiers: &str) {
        let text = format!(
            "tiers: {tiers}\nrules:\n  - {{ name: plan, key: user, tier: from_request, algorithm: SLIDING_WINDOW }}\n"
        );
        let checked = config::read_policy("policy", &text, &PolicyContext::default()).unwrap();
        let next = match &self.limiter {
            None => PolicyLimiter::new(&self.engine, checked.policy, &checked.settings),
            Some(before) => before.followed_by(checked.policy, &checked.settings),
        };
        self.limiter = Some(next.unwrap());
    }

    /// Whether the next request is admitted, so much later.
    async fn after(&self, pause: Micros, tier: &str) -> bool {
        self.clock.advance(pause);
        let request = Descriptors { user: Some("alice"), tier: Some(tier), ..Descriptors::default() };
        let verdict = self.limiter.as_ref().unwrap().check(&request, 1).await;
        verdict.is_admitted()
    }
}

fn entries(store: &RedisServer) -> u64 {
    store.cli(&["ZCARD", "rate_limiter:sliding_window:plan:{user:alice}"]).trim().parse().unwrap()
}

#[test]
fn a_short_window_beside_a_long_one_keeps_a_bounded_log_and_forgets_it_when_the_long_one_is_withdrawn() {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let store = RedisServer::start();
        let mut requests = Requests::on(&store).await;
        let both = "{ fast: 10/s, daily: 200/day }";
        requests.load(both);
        for _ in 0..1_000 {
            assert!(requests.after(Micros::from_millis(100), "fast").await);
        }
        assert!(entries(&store) <= 200 + 12, "{} entries", entries(&store));
        assert!(!requests.after(Micros::ZERO, "daily").await, "what was consumed stays consumed");

        requests.load("{ fast: 10/s }");
        assert!(requests.after(Micros::from_millis(100), "fast").await);
        requests.load(both);
        assert!(!requests.after(Micros::ZERO, "daily").await, "also over a reload and back");

        requests.load("{ fast: 10/s }");
        for _ in 0..2 {
            // A day has passed since the long window was withdrawn.
            assert!(requests.after(Micros::from_secs(86_400), "fast").await);
        }
        for _ in 0..30 {
            assert!(requests.after(Micros::from_millis(100), "fast").await);
        }
        assert!(entries(&store) <= 12, "{} entries", entries(&store));
    });
}
