//! The real program, as a shell sees it.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Output, Stdio};

fn tollgate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command
        .args(arguments)
        .env_remove("TOLLGATE_CONFIG")
        .env_remove("TOLLGATE_URL")
        .env_remove("TOLLGATE_TOKEN");
    command
}

pub(crate) fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = tollgate(arguments).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// A running service; killed when dropped.
struct Service {
    child: Child,
    lines: Vec<String>,
}

impl Service {
    fn start(arguments: &[&str]) -> Self {
        let mut child = tollgate(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = Vec::new();
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            lines.push(line.unwrap());
            if lines.last().is_some_and(|line| line.starts_with("Try: ")) {
                break;
            }
        }
        Self { child, lines }
    }

    fn url(&self) -> String {
        self.lines[0].split(' ').find(|word| word.starts_with("http://")).unwrap().to_owned()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn it_says_where_it_listens_and_its_own_curl_line_works() {
    let service = Service::start(&["--listen", "localhost:0"]);
    assert!(service.lines[0].starts_with("Tollgate "));
    assert_eq!(service.lines[1..3], ["  store:  memory", "  policy: none (set one with --policy FILE)"]);
    let curl = service.lines[3].strip_prefix("Try: ").unwrap();
    let Output { status, stdout, .. } =
        Command::new("sh").args(["-c", &format!("{curl} --silent")]).output().unwrap();
    assert!(status.success());
    let answer: serde_json::Value = serde_json::from_slice(&stdout).unwrap();
    assert_eq!((answer["allowed"].as_bool(), answer["key"].as_str()), (Some(true), Some("user:123")));
}

#[test]
fn a_policy_file_is_named_on_the_command_line_and_in_the_banner() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    std::fs::write(&file, "rules: [{ name: all, key: ip, limit: 1/min }]").unwrap();
    let service = Service::start(&["--listen", ":0", "--policy", file.to_str().unwrap()]);
    assert!(service.lines[0].contains("http://0.0.0.0:"), "{:?}", service.lines);
    let policy = format!("  policy: {}, version ", file.display());
    assert!(
        service.lines[2].starts_with(&policy) && service.lines[2].ends_with(", rules: 1"),
        "{:?}",
        service.lines
    );
    assert!(service.lines.last().unwrap().contains("http://127.0.0.1:"), "an address that curl can reach");
}

#[test]
fn policies_are_pushed_shown_listed_and_rolled_back_and_a_request_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, limit: &str| {
        let (path, text) = (
            folder.path().join(name),
            format!("rules:\n  - {{ name: login, match: {{ path: /login }}, key: ip, limit: {limit} }}\n"),
        );
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (first, second) = (write("first.yaml", "1/h"), write("second.yaml", "9/h"));
    let service = Service::start(&["--listen", "127.0.0.1:0"]);
    let url = service.url();
    let policy = |arguments: &[&str]| run(&[&["policy"], arguments, &["--url", &url]].concat());
    assert_eq!(policy(&["history"]), (Some(0), "nothing was pushed yet\n".to_owned(), String::new()));
    let (code, out, err) = policy(&["push", &first]);
    assert!(code == Some(0) && out.ends_with(" in force, from admin API, rules: 1\n"), "{out}{err}");
    let version = out.split(' ').nth(1).unwrap().to_owned();
    assert_eq!(policy(&["push", &second, "--replace", "000000000000"]).0, Some(2));
    assert_eq!(policy(&["push", &second, "--replace", &version]).0, Some(0));
    let (_, shown, about) = policy(&["show"]);
    assert_eq!(shown, std::fs::read_to_string(&second).unwrap());
    assert!(about.contains("from admin API, rules: 1"), "{about}");
    let (_, history, _) = policy(&["history"]);
    let oldest = history.lines().last().unwrap();
    assert!(
        history.lines().count() == 2 && oldest.contains(&version) && oldest.ends_with("loopback"),
        "{history}"
    );
    assert_eq!(policy(&["rollback", oldest.split(' ').next().unwrap()]).0, Some(0));
    assert_eq!(policy(&["show"]).1, std::fs::read_to_string(&first).unwrap());

    let explain = |path: &str| run(&["explain", path, "--ip", "192.0.2.1", "--url", &url]);
    let (code, out, err) = explain("/login");
    assert!(
        code == Some(0)
            && out.starts_with("allowed (rule login)\n  limit of login for ip:192.0.2.1: 1 of 1 left"),
        "{out}{err}"
    );
    let (_, out, _) = explain("/other");
    assert!(out.starts_with("allowed\n  rule login does not apply: match.path is another one\n"), "{out}");
    let (code, _, err) = run(&["explain", "login", "--url", &url]);
    assert!(code == Some(2) && err.contains("path: must begin with /"), "{err}");
}

#[test]
fn check_exits_with_the_answer() {
    let service = Service::start(&["serve", "--listen", "127.0.0.1:0"]);
    let url = service.url();
    let check = |more: &[&str]| run(&[&["check", "user:1", "--url", &url], more].concat());
    let (code, out, _) = check(&["--permits", "100", "--algorithm", "SLIDING_WINDOW"]);
    assert_eq!((code, out.as_str()), (Some(0), "allowed: 0 of 100 left, resets in 60 s\n"));
    let (code, out, _) = check(&["--algorithm", "SLIDING_WINDOW"]);
    assert_eq!((code, out.starts_with("denied: 0 of 100 left, try again in ")), (Some(1), true), "{out}");
    let (code, out, _) = check(&["--json"]);
    assert_eq!(
        (code, out.starts_with("{\"algorithm\"") || out.starts_with("{\"allowed\"")),
        (Some(0), true),
        "{out}"
    );
    let (code, _, error) = check(&["--algorithm", "BEST_EFFORT"]);
    assert_eq!(code, Some(2));
    assert!(error.contains("algorithm: expected TOKEN_BUCKET"), "{error}");
    for url in ["http://127.0.0.1:1", "https://127.0.0.1", "nonsense"] {
        let (code, _, error) = run(&["check", "user:1", "--url", url]);
        assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
    }
}

#[test]
fn check_fails_if_the_answer_is_about_another_key() {
    // A server that counts by the address of the caller instead of the key that was named.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"}") {
            let mut part = [0; 1024];
            let length = stream.read(&mut part).unwrap();
            request.extend_from_slice(&part[..length]);
        }
        let body = r#"{"allowed":true,"key":"ip:192.0.2.1","remaining":99,"limit":100}"#;
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    });
    let (code, out, error) = run(&["check", "user:1", "--url", &url]);
    server.join().unwrap();
    assert_eq!((code, out.as_str()), (Some(2), ""), "{error}");
    assert!(error.contains("ip:192.0.2.1") && error.contains("user:1"), "{error}");
}

#[test]
fn check_without_the_token_that_is_needed_exits_with_2() {
    let tokens = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(tokens.path(), "a-token-long-enough\n").unwrap();
    let settings = tempfile::NamedTempFile::new().unwrap();
    let yaml =
        format!("admin: {{ listen: '127.0.0.1:0' }}\napi: {{ token_file: {} }}\n", tokens.path().display());
    std::fs::write(settings.path(), yaml).unwrap();
    let service = Service::start(&["--listen", "127.0.0.1:0", "--config", settings.path().to_str().unwrap()]);
    let check = |token: Option<&str>| {
        let mut command = tollgate(&["check", "user:1", "--url", &service.url()]);
        if let Some(token) = token {
            command.env("TOLLGATE_TOKEN", token);
        }
        let Output { status, stderr, .. } = command.output().unwrap();
        (status.code(), String::from_utf8(stderr).unwrap())
    };
    for token in [None, Some("a-wrong-token-long")] {
        let (code, error) = check(token);
        assert!(code == Some(2) && error.contains("api.token_file"), "{error}");
    }
    assert_eq!(check(Some("a-token-long-enough")).0, Some(0));
}

#[test]
fn a_port_that_is_taken_is_one_clear_line() {
    let service = Service::start(&["--listen", "127.0.0.1:0"]);
    let address = service.url().replace("http://", "");
    let (code, _, error) = run(&["--listen", &address]);
    assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
    assert!(error.contains(&format!("cannot listen on {address} (choose another with --listen)")), "{error}");
}

#[test]
fn configuration_mistakes_end_the_start_and_the_check_alike() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollgate.yaml");
    let name = file.to_str().unwrap();
    std::fs::write(&file, "listen: 127.0.0.1:0\nlimits: 5\nmemory: { max_keys: 0 }\n").unwrap();
    for arguments in [&["config", "check", name][..], &["--config", name]] {
        let (code, _, error) = run(arguments);
        assert_eq!(code, Some(2));
        assert!(error.contains(&format!("{name}:2:1: limits: no such field")), "{error}");
        assert!(error.contains(&format!("{name}:3:11: memory.max_keys: at least 1")), "{error}");
    }
    let (code, _, error) = run(&["--config", "/nowhere/tollgate.yaml"]);
    assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
    assert!(error.contains("/nowhere/tollgate.yaml: cannot be read"), "{error}");
    let (code, _, error) = run(&["--store", "postgres://u:p@h/db"]);
    assert_eq!(code, Some(2));
    assert!(error.contains("--store: store: expected redis://HOST") && !error.contains("u:p"), "{error}");
    std::fs::write(&file, "listen: 127.0.0.1:0\n").unwrap();
    assert_eq!(run(&["config", "check", name]).0, Some(0));
}

#[test]
fn the_check_of_a_configuration_says_what_leases_come_to() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollgate.yaml");
    let yaml = "\
api:
  consistency: lease
  defaults:
    token_bucket: { capacity: 1000, refill_rate: 1000/s }
    leaky_bucket: { size: 10000, outflow: 1000/s, consistency: lease_fast }
    sliding_window: { limit: 1000/60s }
    sliding_window_counter: { limit: 6000/60s, consistency: strict }
";
    std::fs::write(&file, yaml).unwrap();
    let (code, out, error) = run(&["config", "check", file.to_str().unwrap()]);
    assert_eq!((code, error.as_str()), (Some(0), ""));
    let lines: Vec<_> = out.lines().skip(1).collect();
    assert_eq!(
        lines,
        [
            "token_bucket: lease, for about 200 ms at a time, among at most 11 nodes (with more it is strict); never more than \
             the limit",
            "leaky_bucket: lease_fast, for about 500 ms at a time, among at most 101 nodes (with more it is strict); a burst can \
             be larger by 500 permits, the rate never",
            "fixed_window: stays strict, not lease: 100 permits are too few to lend from: at least 200",
            "sliding_window: stays strict, not lease: a log and a queue know the time of every request, which a lease does not",
        ],
        "{out}"
    );
}

#[test]
fn help_and_completions_are_there() {
    for arguments in [&["--help"][..], &["serve", "--help"], &["check", "--help"], &["config", "--help"]] {
        let (code, out, _) = run(arguments);
        assert_eq!(code, Some(0));
        assert!(out.contains("Usage: tollgate"), "{out}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(run(&["completions", shell]).1.contains("tollgate"));
    }
    let schema: serde_json::Value = serde_json::from_str(&run(&["config", "schema"]).1).unwrap();
    assert!(schema["properties"]["listen"].is_object());
}

#[test]
fn sigterm_ends_it_with_success() {
    let mut service = Service::start(&["--listen", "127.0.0.1:0"]);
    let killed = Command::new("kill").args(["-TERM", &service.child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(service.child.wait().unwrap().code(), Some(0));
}

#[test]
fn policies_are_checked_compared_and_imported() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/policy.yaml");
    let (code, out, _) = run(&["policy", "check", example]);
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("no mistakes; 8 rules, 23 limits"), "{out}");
    let old = write(
        "old.yaml",
        "rules: [{ name: login, key: ip, limit: 5/min }, { name: all, key: ip, limit: 9/s }]",
    );
    let new = write(
        "new.yaml",
        "rules: [{ name: all, key: ip, limit: 9/s, algorithm: FIXED_WINDOW }, { name: login, key: ip, limit: 10/min }]",
    );
    assert_eq!(run(&["policy", "diff", &old, &old]), (Some(0), "no difference\n".to_owned(), String::new()));
    let (code, out, _) = run(&["policy", "diff", &old, &new]);
    let expected = "+ rules.all.algorithm: FIXED_WINDOW
~ rules.login.limit: 5/60s -> 10/60s
~ order of rules: login, all -> all, login
  all: starts afresh: SLIDING_WINDOW_COUNTER becomes FIXED_WINDOW
  login: larger; what was consumed stays consumed
";
    assert_eq!((code, out.as_str()), (Some(1), expected));
    let wrong = write("wrong.yaml", "rules:\n  - { name: login, key: ip, limit: often }\n");
    let (code, _, err) = run(&["policy", "diff", &old, &wrong]);
    assert_eq!(code, Some(2));
    let why = "wrong.yaml:2:29: rule \"login\": limit: expected a limit such as 100/min or 50/s burst 100, not often\n";
    assert!(err.ends_with(why), "{err}");

    let envoy = write(
        "envoy.yaml",
        "domain: shop
descriptors:
  - key: database
    value: users
    rate_limit: { unit: second, requests_per_unit: 500 }
  - key: database
    rate_limit: { unit: month, requests_per_unit: 50 }
    shadow_mode: true
    descriptors:
      - { key: path, value: /foo*, rate_limit: { unit: hour, requests_per_unit: 5, replaces: [{ name: x }] } }
  - { key: vip, value: yes, rate_limit: { unlimited: true } }
",
    );
    let (code, out, err) = run(&["policy", "import", "--from", "envoy", &envoy]);
    assert_eq!(code, Some(0), "{err}");
    for line in [
        "    match: { attribute: { database: [\"*\", \"!users\"], domain: shop }, attribute_names: [domain, database] }",
        "    key: \"attribute:database\"",
        "    limit: 50/30d",
        "    mode: shadow",
        "    key: \"attribute:database+attribute:path\"",
        "    unlimited: true",
    ] {
        assert!(out.lines().any(|known| known == line), "{line} in {out}");
    }
    assert!(err.contains("replaces") && err.contains("a month is 30d"), "{err}");
    let imported = write("imported.yaml", &out);
    assert_eq!(run(&["policy", "check", &imported]).0, Some(0));

    let limitador = write(
        "limitador.yaml",
        "- { namespace: shop, max_value: 10, seconds: 60, conditions: [\"req_method == 'GET'\"], variables: [user_id] }
- { namespace: shop, max_value: 5, seconds: 10, conditions: [\"size(x) > 3\"], variables: [] }
",
    );
    let (code, out, err) = run(&["policy", "import", "--from", "limitador", &limitador]);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("    limit: 10/60s\n") && out.contains("attribute: { req_method: GET }"), "{out}");
    assert!(err.contains("size(x) > 3"), "{err}");
    let imported = write("imported.yaml", &out);
    assert_eq!(run(&["policy", "check", &imported]).0, Some(0));
}

#[test]
fn a_policy_is_checked_on_standard_input() {
    let check = |text: &str| {
        let mut command = tollgate(&["policy", "check", "-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // A policy that is too long is not read to its end.
        let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
        let output = child.wait_with_output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (output.status.code(), out, err)
    };
    let (code, out, err) = check("rules: [{ name: a, key: ip, limit: 5/s }]\n");
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    assert!(out.starts_with("-: no mistakes; 1 rules, 1 limits"), "{out}");
    let (code, _, err) = check("rules:\n  - { name: a, key: ip, limit: often }\n");
    assert_eq!(code, Some(2));
    assert!(err.starts_with("standard input:2:25: rule \"a\": limit: expected a limit"), "{err}");
    let (code, _, err) = check(&format!("# {}\n", "long ".repeat(250_000)));
    assert_eq!(code, Some(2));
    assert!(err.contains("at most 1048576 bytes"), "{err}");
}
