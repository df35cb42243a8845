//! What an operator reads when a node starts, reads its policy again, or finds that the store has lost data.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tollgate_testkit::{Process, RedisServer, wait_until};

use crate::server::{Response, connect, exchange};

const TEN: &str = "rules: [{ name: ten, key: user, limit: 10/min }]\n";
const FIVE: &str = "rules: [{ name: ten, key: user, limit: 5/min }]\n";

/// A node as a process of its own, whose log is kept.
struct Node {
    process: Process,
    address: SocketAddr,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

impl Node {
    fn start(settings: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
        command.args(["--listen", &address.to_string()]).env("TOLLGATE_LOG__FORMAT", "json");
        command.env("TOLLGATE_REDIS__DEADLINE", "5s").env_remove("TOLLGATE_CONFIG");
        command.envs(settings.iter().copied());
        let process = Process::start_with_log(&command, &log);
        wait_until("the node listens", || std::net::TcpStream::connect(address).is_ok());
        let node = Self { process, address, log, _folder: folder };
        // It answers as soon as everything that is said at start was said.
        assert_eq!(node.ask("GET", "/actuator/health", "").status, 200);
        node
    }

    fn ask(&self, method: &str, target: &str, body: &str) -> Response {
        let length = body.len();
        let request = format!(
            "{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        exchange(connect(self.address), &request)
    }

    /// The log lines that contain a text, as JSON.
    fn lines(&self, text: &str) -> Vec<Value> {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines = log.lines().filter(|line| line.contains(text));
        lines.filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// The levels of the log lines that contain a text.
    fn levels(&self, text: &str) -> Vec<String> {
        self.lines(text).iter().map(|line| line["level"].as_str().unwrap().to_owned()).collect()
    }

    fn refused_reads(&self) -> u64 {
        let metrics = self.ask("GET", "/actuator/prometheus", "").body;
        let start =
            "tollgate_policy_reads_total{application=\"distributed-rate-limiter\",result=\"refused\"} ";
        metrics.lines().find_map(|line| line.strip_prefix(start)).unwrap().parse().unwrap()
    }
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn a_pushed_policy_beside_a_policy_file_is_no_error_at_start_or_on_sighup() {
    let store = RedisServer::build().tcp().start();
    let url = format!("redis://{}", store.tcp_address());
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "policy.yaml", TEN);
    let settings = [("TOLLGATE_STORE", url.as_str()), ("TOLLGATE_POLICY", file.as_str())];
    let one = Node::start(&settings);
    assert_eq!(one.ask("PUT", "/admin/policy", FIVE).status, 200);
    let two = Node::start(&settings);
    let stays = "the policy's file was read and is not in force";
    wait_until("the file is read once", || two.levels(stays) == ["INFO"]);
    two.process.hang_up();
    wait_until("the signal is heard", || two.levels(stays) == ["INFO", "INFO"]);
    assert_eq!((two.levels("\"ERROR\"").len(), two.refused_reads()), (0, 0));
    assert_eq!(two.ask("POST", "/admin/policy/reload", "").status, 409, "an admin who asks is told");
    assert_eq!((two.levels("the policy in force stays"), two.refused_reads()), (vec!["ERROR".to_owned()], 1));
}

#[test]
fn a_reload_without_a_policy_file_is_409_and_a_warning() {
    for (policy, why) in
        [(TEN.trim(), "the policy is written in the configuration"), ("", "no policy is configured")]
    {
        let node = Node::start(&[("TOLLGATE_POLICY", policy)]);
        let reload = node.ask("POST", "/admin/policy/reload", "");
        assert_eq!(reload.status, 409);
        let detail = reload.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.starts_with(why) && detail.contains("name a file"), "{detail}");
        assert_eq!(node.levels(why), ["WARN"]);
        node.process.hang_up();
        wait_until("the signal is heard", || node.levels(why) == ["WARN", "WARN"]);
        assert_eq!(node.refused_reads(), 0, "nothing was read");
    }
}

#[test]
fn a_lost_withdrawal_is_not_called_a_lost_policy() {
    let store = RedisServer::build().tcp().start();
    let url = format!("redis://{}", store.tcp_address());
    let node = Node::start(&[("TOLLGATE_STORE", &url)]);
    assert_eq!(node.ask("PUT", "/admin/policy", FIVE).status, 200);
    assert_eq!(node.ask("DELETE", "/admin/policy", "").status, 200);
    store.cli(&["FLUSHALL"]);
    wait_until("it is written back", || {
        !node.lines("the store has the withdrawal of a policy again").is_empty()
    });
    assert_eq!(node.levels("the store has lost the withdrawal of a policy"), ["WARN"]);
    assert!(node.lines("the pushed policy").is_empty());
}

/// More limits than one request may be checked against.
fn crowded() -> String {
    let rule = |n: u64| format!("  - {{ name: r{n}, key: ip, limit: 5/s }}\n");
    format!("rules:\n{}", (0..40).map(rule).collect::<String>())
}

#[test]
fn warnings_about_a_policy_are_logged_at_warn_without_a_store_at_start_on_reload_and_on_push() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "policy.yaml", &crowded());
    let node = Node::start(&[("TOLLGATE_POLICY", &file)]);
    let warning = "requests such as / are refused: more limits apply";
    assert_eq!(node.levels(warning), ["WARN"], "at start");
    write(folder.path(), "policy.yaml", &crowded().replace("5/s", "6/s"));
    assert_eq!(node.ask("POST", "/admin/policy/reload", "").status, 200);
    assert_eq!(node.levels(warning), ["WARN", "WARN"], "on reload");
    let checked = node.ask("POST", "/admin/policy/check", &crowded()).json();
    let remarks = checked["remarks"].as_array().unwrap();
    assert!(remarks[0].as_str().unwrap().starts_with(&format!("warning: {warning}")), "{checked}");
    assert_eq!(node.ask("PUT", "/admin/policy", &crowded()).status, 200);
    assert_eq!(node.levels(warning), ["WARN"; 3], "on push");
}

#[test]
fn a_node_that_starts_without_its_store_warns_that_it_goes_by_its_own_policy() {
    let mut store = RedisServer::build().tcp().append_only().start();
    let url = format!("redis://{}", store.tcp_address());
    let settings = [("TOLLGATE_STORE", url.as_str()), ("TOLLGATE_POLICY", TEN.trim())];
    let own = "goes by its own policy";
    let one = Node::start(&settings);
    let pushed = one.ask("PUT", "/admin/policy", FIVE).json()["version"].clone();
    assert!(one.lines(own).is_empty(), "its store answers");
    store.kill();
    let two = Node::start(&settings);
    assert_eq!(two.levels(own), ["WARN"]);
    store.restart();
    wait_until("it hears the pushed policy", || {
        two.ask("GET", "/admin/policy", "").json()["version"] == pushed
    });
}

#[test]
fn trusted_proxies_before_a_loopback_api_without_tokens_are_warned_of() {
    let proxies = ("TOLLGATE_CLIENT_ADDRESS__TRUSTED_PROXIES", "[127.0.0.0/8]");
    let warning = "without a forwarding header count as local callers";
    assert_eq!(Node::start(&[proxies]).levels(warning), ["WARN"]);
    assert!(Node::start(&[]).lines(warning).is_empty(), "no proxy is configured");
    let folder = tempfile::tempdir().unwrap();
    let tokens = write(folder.path(), "tokens", "a-token-long-enough\n");
    let with_tokens =
        [proxies, ("TOLLGATE_API__TOKEN_FILE", tokens.as_str()), ("TOLLGATE_ADMIN__LISTEN", "127.0.0.1:0")];
    assert!(Node::start(&with_tokens).lines(warning).is_empty(), "tokens are configured");
}

#[test]
fn secret_headers_are_in_no_key_and_no_log_line() {
    let mut store = RedisServer::build().tcp().start();
    let url = format!("redis://{}", store.tcp_address());
    let policy = "rules:
  - { name: token, key: 'header:Authorization', limit: 10/min }
  - { name: session, key: 'header:cookie+ip', limit: 10/min }
  - { name: proxy, key: 'header:proxy-authorization', limit: 10/min }
  - { name: customer, key: 'header:x-customer-key', limit: 10/min }
  - { name: tenant, key: 'header:x-tenant', limit: 10/min }
";
    let node = Node::start(&[
        ("TOLLGATE_STORE", &url),
        ("TOLLGATE_POLICY", policy),
        ("TOLLGATE_IDENTITY__API_KEY__HEADER", "X-Customer-Key"),
    ]);
    let request = json!({ "ip": "192.0.2.1", "headers": {
        "authorization": "Bearer hidden-1", "cookie": "id=hidden-2", "proxy-authorization": "Basic hidden-3",
        "x-customer-key": "hidden-4", "x-tenant": "acme",
    }});
    let check = || node.ask("POST", "/api/v1/check", &request.to_string()).json();
    let keys: Vec<_> =
        check()["limits"].as_array().unwrap().iter().map(|limit| limit["key"].to_string()).collect();
    assert!(keys[0].starts_with("\"header.authorization:sha256:") && keys[0].len() == 62, "{keys:?}");
    assert!(keys[1].ends_with("+ip:192.0.2.1\"") && keys[4] == "\"header.x-tenant:acme\"", "{keys:?}");
    let stored = store.cli(&["KEYS", "*"]);
    assert!(stored.contains("header.cookie:sha256:") && !stored.contains("hidden"), "{stored}");
    store.kill();
    wait_until("the outage is logged", || {
        check();
        !node.lines("the store gave no decision").is_empty()
    });
    let log = std::fs::read_to_string(&node.log).unwrap();
    assert!(log.contains("sha256:") && !log.contains("hidden"), "{log}");
    assert_eq!(node.levels("header:authorization holds a secret"), ["WARN"]);

    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "policy.yaml", policy);
    let (code, said, _) = crate::cli::run(&["policy", "check", &file]);
    assert_eq!(code, Some(0));
    for name in ["authorization", "cookie", "proxy-authorization"] {
        assert!(said.contains(&format!(": header:{name} holds a secret")), "{name} in {said}");
    }
    assert!(!said.contains("header:x-tenant holds"), "{said}");
}
