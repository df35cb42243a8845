//! What is in log lines, and what is not.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use serde_json::json;
use tollgate_testkit::{Process, wait_until};

use crate::server::{Response, connect, exchange};

/// A program that logs to a file.
struct Logging {
    _process: Process,
    address: SocketAddr,
    log: PathBuf,
    folder: tempfile::TempDir,
}

impl Logging {
    fn start(level: &str, format: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
        std::fs::write(folder.path().join("policy.yaml"), "rules: []\n").unwrap();
        command
            .args(["--listen", &address.to_string()])
            .env("TOLLGATE_POLICY", folder.path().join("policy.yaml"));
        command.env("TOLLGATE_LOG__LEVEL", level).env("TOLLGATE_LOG__FORMAT", format);
        let process = Process::start_with_log(&command, &log);
        wait_until("the service listens", || std::net::TcpStream::connect(address).is_ok());
        Self { _process: process, address, log, folder }
    }

    fn ask(&self, method: &str, target: &str, body: &str) -> Response {
        let length = body.len();
        let request = format!(
            "{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        exchange(connect(self.address), &request)
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// The log, once it says this.
    fn text_with(&self, word: &str) -> String {
        wait_until(&format!("the log says {word}"), || self.text().contains(word));
        self.text()
    }
}

#[test]
fn a_denial_names_rule_key_path_and_request_id_and_a_rule_that_starts_denying_is_said_once() {
    let service = Logging::start("debug", "json");
    let policy = "rules: [{ name: login, key: ip, limit: 1/h, match: { path: /login } }]";
    assert_eq!(service.ask("PUT", "/admin/policy", policy).status, 200);
    let body = json!({ "ip": "192.0.2.7", "path": "/login", "method": "POST" }).to_string();
    let request = format!(
        "POST /api/v1/check HTTP/1.1\r\nhost: localhost\r\nx-request-id: abc-1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let statuses = [(); 4].map(|()| exchange(connect(service.address), &request).status);
    assert_eq!(statuses, [200, 429, 429, 429]);
    wait_until("three denials are logged", || service.text().matches("request denied").count() == 3);
    let text = service.text();
    let line = text.lines().find(|line| line.contains("request denied")).unwrap();
    for part in
        [r#""rule":"login""#, r#""key":"ip:192.0.2.7""#, r#""path":"/login""#, r#""id":"abc-1""#, "DEBUG"]
    {
        assert!(line.contains(part), "{part} in {line}");
    }
    let starts: Vec<_> = text.lines().filter(|line| line.contains("starts denying")).collect();
    assert_eq!(starts.len(), 1, "{starts:?}");
    assert!(starts[0].contains(r#""rule":"login""#) && starts[0].contains("INFO"), "{starts:?}");
}

#[test]
fn queries_are_not_logged() {
    let service = Logging::start("trace", "json");
    let request =
        json!({ "path": "/orders?token=hidden-query#hidden-part", "query": { "token": "hidden-query" } });
    assert_eq!(service.ask("POST", "/api/v1/check?from=hidden-query", &request.to_string()).status, 200);
    let many = json!({ "checks": [request] });
    assert_eq!(service.ask("POST", "/api/v1/check/batch", &many.to_string()).status, 200);
    service.ask("GET", "/nowhere?token=hidden-query", "");
    service.ask("GET", "/api/v1/rate-limit/check?key=last&permits=1", "");
    let log = service.text_with("last");
    assert!(log.contains("/orders"), "{log}");
    assert!(!log.contains("hidden"), "{log}");
}

#[test]
fn control_and_direction_characters_are_escaped_in_every_log_line() {
    for format in ["json", "pretty"] {
        let service = Logging::start("debug", format);
        let evil = "a\n2026-01-01 ERROR forged \u{1b}[2J\u{202e}\u{2066}\u{9b}31m\u{7f}\u{200f}end";
        let request = json!({ "path": format!("/{evil}"), "method": evil });
        assert_eq!(service.ask("POST", "/api/v1/check", &request.to_string()).status, 200);
        let policy = format!("rules: [{{ name: a, key: user, limit: {} }}]", json!(evil));
        assert_eq!(service.ask("PUT", "/admin/policy", &policy).status, 422);
        let key = "k%E2%80%AEend-of-key";
        assert_eq!(service.ask("DELETE", &format!("/api/v1/rate-limit/reset?key={key}"), "").status, 200);
        let log = service.text_with("end-of-key");
        assert!(log.contains("forged") && log.contains("\\u202e"), "{log}");
        let hidden = |c: &char| (c.is_control() && *c != '\n') || "\u{202e}\u{2066}\u{200f}".contains(*c);
        assert_eq!(log.chars().find(hidden), None, "{format}: {log:?}");
        assert!(!log.lines().any(|line| line.starts_with("2026-01-01 ERROR")), "{format}: {log}");
        if format == "json" {
            for line in log.lines().filter(|line| line.starts_with('{')) {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                let is_whole = |path: &str| path == format!("/{evil}") || path == "/admin/policy";
                assert!(line["path"].as_str().is_none_or(is_whole), "{line}");
            }
        }
    }
}

#[test]
fn no_accepted_level_disables_logging() {
    for level in ["warning", "WARN", "error", "tollgate=debug", "hyper=error", "tollgate_server=info"] {
        let service = Logging::start(level, "json");
        std::fs::write(service.folder.path().join("policy.yaml"), "rules: mistaken\n").unwrap();
        assert_eq!(service.ask("POST", "/admin/policy/reload", "").status, 422);
        let log = service.text_with("the policy in force stays");
        assert!(log.contains("policy.yaml:1:1: rules: "), "{level}: {log}");
    }
}
