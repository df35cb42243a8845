//! The programs of Redis itself: redis-cli and redis-benchmark.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::server::Server;

fn run(server: &Server, program: &str, arguments: &[&str], input: &str) -> String {
    let port = server.resp.unwrap().port().to_string();
    let mut child = Command::new(program)
        .args(["-h", "127.0.0.1", "-p", &port])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn start() -> Server {
    Server::with("resp: { listen: '127.0.0.1:0' }\n")
}

#[test]
fn redis_cli_talks_in_both_versions_and_in_pipelines() {
    let server = start();
    let cli = |arguments: &[&str], input: &str| run(&server, "redis-cli", arguments, input);
    assert_eq!(cli(&["CL.THROTTLE", "user123", "15", "30", "60"], ""), "0\n16\n15\n-1\n2\n");
    assert!(cli(&["TG.CHECK", "KEY", "user:1"], "").starts_with("allowed\n1\nkey\nuser:1\n"));
    let pretty = cli(&["--no-raw", "-3", "TG.CHECK", "KEY", "user:1"], "");
    assert!(pretty.contains("\"allowed\" => (true)"), "{pretty}");
    assert!(pretty.contains("\"remaining\" => (integer) 98"), "{pretty}");
    let several = cli(&[], "PING\nCL.THROTTLE user123 15 30 60 0\nFOO\n");
    assert!(several.starts_with("PONG\n0\n16\n15\n-1\n2\nERR unknown command 'FOO'"), "{several}");
    let piped = cli(&["--pipe"], &"CL.THROTTLE piped 999 1 60\r\n".repeat(1_000));
    assert!(piped.contains("errors: 0, replies: 1000"), "{piped}");
    assert!(cli(&["CL.THROTTLE", "piped", "999", "1", "60"], "").starts_with("1\n1000\n0\n60\n"));
}

#[test]
fn redis_benchmark_runs_with_and_without_pipelines() {
    let server = start();
    for depth in ["1", "16"] {
        let options = [
            "-q",
            "-n",
            "5000",
            "-c",
            "10",
            "-r",
            "100",
            "-P",
            depth,
            "CL.THROTTLE",
            "key:__rand_int__",
            "15",
            "30",
            "60",
        ];
        let output = run(&server, "redis-benchmark", &options, "");
        assert!(output.contains("requests per second"), "{output}");
    }
    let metrics = server.get("/actuator/prometheus").body;
    let counts = metrics.lines().filter(|line| line.starts_with("rate_limiter_requests_total"));
    let counted: u64 = counts.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum();
    // redis-benchmark sends whole pipelines, so some commands more than it was told to.
    assert!((10_000..10_200).contains(&counted), "{counted} commands were decided");
}
