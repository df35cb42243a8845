//! An outage of the store, as an operator reads it in the log.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use tollgate_testkit::{Process, RedisServer, wait_until};

use crate::server::{connect, exchange};

/// The log lines with a message, as JSON.
fn lines(log: &Path, message: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["message"].as_str().is_some_and(|it| it.starts_with(message))).collect()
}

#[test]
fn an_outage_is_logged_at_error_once_a_second_and_its_end_at_info_with_the_duration() {
    let mut store = RedisServer::build().tcp().start();
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["--listen", "127.0.0.1:0", "--store", &format!("redis://{}", store.tcp_address())]);
    command.env("TOLLGATE_LOG__FORMAT", "json");
    let _process = Process::start_with_log(&command, &log);
    let mut address = None;
    wait_until("the service listens", || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let said = text.split_once("listens on http://").and_then(|(_, rest)| Some(rest.split_once('\n')?.0));
        address = said.and_then(|it| it.parse().ok());
        address.is_some()
    });
    let check = || {
        let request = "GET /api/v1/rate-limit/check?key=user:7 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        exchange(connect(address.unwrap()), request).header("x-tollgate-basis").map(str::to_owned)
    };
    wait_until("the store decides", || check().as_deref() == Some("exact"));
    store.kill();
    let start = Instant::now();
    let mut failed = 0;
    while start.elapsed() < Duration::from_millis(2_500) {
        failed += u64::from(check().as_deref() != Some("exact"));
    }
    let seconds = start.elapsed().as_secs() + 1;
    let errors = lines(&log, "the store gave no decision");
    let first = errors.first().expect("the first failure is logged at once");
    assert_eq!((&first["level"], &first["key"]), (&"ERROR".into(), &"user:7".into()), "{first}");
    assert_eq!(first["rule"], "token_bucket", "{first}");
    let causes: std::collections::HashSet<_> = errors.iter().map(|it| it["cause"].to_string()).collect();
    assert!(
        errors.len() as u64 <= causes.len() as u64 * seconds,
        "{} lines of {failed} failures",
        errors.len()
    );
    let left_out: u64 = errors.iter().filter_map(|it| it["left_out"].as_u64()).sum();
    assert!(left_out > 0 && left_out < failed, "{left_out} left out of {failed}");

    store.restart();
    wait_until("the store decides again", || check().as_deref() == Some("exact"));
    wait_until("the end is logged", || !lines(&log, "the store decides again").is_empty());
    let end = &lines(&log, "the store decides again")[0];
    assert_eq!(end["level"], "INFO", "{end}");
    let lasted = end["duration_ms"].as_u64().unwrap();
    assert!((2_000..=start.elapsed().as_millis() as u64).contains(&lasted), "{end}");
}
