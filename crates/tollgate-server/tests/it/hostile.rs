//! Requests and policies made to keep the service busy. The service has one thread here, so whatever keeps it busy keeps everybody
//! waiting. Times are compared with others that are measured in the same process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::panic::AssertUnwindSafe;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tollgate_server::config::{self, PolicyContext};
use tollgate_testkit::{Process, wait_until};

use crate::server::{Response, Server, connect};

const BATCH: &str = "/api/v1/check/batch";
const PLAIN_BATCH: &str = "/api/v1/rate-limit/check/batch";
/// The most bytes of a batch or a policy.
const MIB: usize = 1024 * 1024;
/// How often a time is measured: the shortest counts, which the rest of the machine has disturbed the least.
const MEASURED: usize = 5;

/// Sends a request whose body may be refused before all of it is sent.
fn send(address: SocketAddr, method: &str, target: &str, body: &str) -> Response {
    let mut stream = connect(address);
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let _ = stream.write_all(body.as_bytes());
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    Response::parse(&answer)
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let done = work();
    (start.elapsed(), done)
}

/// The shortest of several measurements.
fn shortest(work: impl Fn()) -> Duration {
    (0..MEASURED).map(|_| timed(&work).0).min().unwrap()
}

/// Asks for health again and again on one connection while `work` runs. Returns the longest wait, how long the work took, and its
/// result.
fn longest_wait<T>(server: &Server, work: impl FnOnce() -> T) -> (Duration, Duration, T) {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let probe = scope.spawn(|| {
            let mut stream = server.connect();
            let mut longest = Duration::ZERO;
            while !is_done.load(Ordering::Relaxed) {
                longest = longest.max(timed(|| ask_health(&mut stream)).0);
            }
            longest
        });
        let (took, done) = timed(|| std::panic::catch_unwind(AssertUnwindSafe(work)));
        // The probe ends in every case, or a failure would hang.
        is_done.store(true, Ordering::Relaxed);
        let longest = probe.join().unwrap();
        match done {
            Ok(done) => (longest, took, done),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn ask_health(stream: &mut TcpStream) {
    stream.write_all(b"GET /actuator/health HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let read = stream.read(&mut buffer).unwrap();
        assert!(read > 0, "health hung up");
        answer.extend_from_slice(&buffer[..read]);
        let text = String::from_utf8_lossy(&answer);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        if body.len() >= length.parse().unwrap() {
            return;
        }
    }
}

fn joined(count: usize, item: impl Fn(usize) -> String) -> String {
    (0..count).map(item).collect::<Vec<_>>().join(",")
}

/// A batch of this item, so often that it has almost 1 MiB, but not more than 1,000 times.
fn batch_of(item: &str) -> String {
    let count = (MIB / (item.len() + 1) - 1).clamp(1, 1_000);
    format!("{{\"checks\":[{}]}}", joined(count, |_| item.to_owned()))
}

fn headers(count: usize) -> String {
    format!("{{\"headers\":{{{}}}}}", joined(count, |number| format!("\"h{number:x}\":\"\"")))
}

fn padded(mut text: String) -> String {
    text.push_str(&" ".repeat(MIB - text.len()));
    text
}

/// What a service at its largest does: 1,000 checks, a kilobyte each.
fn honest_batch() -> String {
    let item = |number: usize| {
        let more = joined(20, |header| format!("\"x-header-{header}\":\"a value of thirty characters\""));
        format!(
            "{{\"ip\":\"192.0.2.1\",\"user\":\"u{number}\",\"path\":\"/api/items\",\"headers\":{{{more}}}}}"
        )
    };
    format!("{{\"checks\":[{}]}}", joined(1_000, item))
}

#[test]
fn no_batch_of_1_mib_takes_much_longer_than_an_honest_one() {
    let server = Server::start();
    let honest = honest_batch();
    assert!(honest.len() < MIB, "{}", honest.len());
    let baseline = shortest(|| assert_eq!(send(server.address, "POST", BATCH, &honest).status, 200));
    let names =
        |count: usize| format!("{{\"query\":{{{}}}}}", joined(count, |it| format!("\"{it:0200}\":\"\"")));
    let worst = [
        ("60,000 headers in one check", batch_of(&headers(60_000)), 200),
        ("the most headers in every check", batch_of(&headers(128)), 200),
        ("one header too many in every check", batch_of(&headers(129)), 200),
        ("long names that differ at their ends", batch_of(&names(128)), 200),
        (
            "100,000 members beside the checks",
            format!("{{{}}}", joined(80_000, |it| format!("\"{it}\":0"))),
            400,
        ),
        ("empty checks", format!("{{\"checks\":[{}]}}", joined(300_000, |_| "{}".to_owned())), 400),
        ("lists of zeros", batch_of(&format!("{{\"ip\":[{}]}}", joined(500_000, |_| "0".to_owned()))), 200),
        ("nested lists", format!("{{\"checks\":[{}", "[".repeat(900_000)), 400),
        ("nested objects", format!("{{\"checks\":[{}", "{\"a\":".repeat(180_000)), 400),
        ("one long escaped text", batch_of(&format!("{{\"user\":\"{}\"}}", "\\u0041".repeat(170_000))), 200),
        ("one long name", batch_of(&format!("{{\"{}\":1}}", "a".repeat(1_000_000))), 200),
        ("one long number", batch_of(&format!("{{\"permits\":{}}}", "9".repeat(1_000_000))), 200),
        ("white space", padded("{\"checks\":[]}".to_owned()), 200),
    ];
    for (what, body, status) in worst {
        assert!(body.len() <= MIB, "{what}: {}", body.len());
        for target in [BATCH, PLAIN_BATCH] {
            let answer = send(server.address, "POST", target, &body);
            let expected = if target == BATCH { status } else { answer.status };
            assert_eq!(answer.status, expected, "{what}: {}", &answer.body[..answer.body.len().min(300)]);
            let is_bad = answer.status != 200 || answer.body.starts_with("[{\"type\"");
            let items = answer.body.matches("{\"type\"").count().max(1);
            assert!(!is_bad || answer.body.len() < items * 1_000, "{what}: the answer repeats the question");
            let took = shortest(|| drop(send(server.address, "POST", target, &body)));
            println!("{what}: {took:?}, an honest batch {baseline:?}");
            assert!(took < 10 * baseline, "{what} took {took:?}, an honest batch {baseline:?}");
        }
    }
}

#[test]
fn health_is_answered_while_a_batch_is_decided() {
    // Every check goes by 30 rules, so that a batch takes many turns.
    let rules = joined(30, |rule| format!("{{ name: r{rule}, key: [user], limit: 1000000/s }}"));
    let server = Server::with(&format!("policy:\n  rules: [{rules}]\n"));
    let (honest, worst) = (honest_batch(), batch_of(&headers(128)));
    let share = |number: usize| {
        let body = if number.is_multiple_of(2) { &honest } else { &worst };
        let (waited, took, answer) = longest_wait(&server, || send(server.address, "POST", BATCH, body));
        assert_eq!(answer.status, 200);
        println!("a batch: health waited {waited:?} of {took:?}");
        waited.as_secs_f64() / took.as_secs_f64()
    };
    for first in [0, 1] {
        let least = (0..MEASURED).map(|it| share(2 * it + first)).fold(f64::MAX, f64::min);
        assert!(least < 0.5, "health waited for {:.0}% of a batch", least * 100.0);
    }
}

/// Policies that cost as much as possible to read.
fn hostile_policies() -> Vec<(&'static str, String)> {
    let long = "n".repeat(440_000);
    let nested = |depth: usize, leaves: usize| {
        let mut text = String::new();
        for level in 0..depth {
            text += &format!("{}{}:\n", " ".repeat(level), "k".repeat(1_000));
        }
        text + &format!("{}[{}]\n", " ".repeat(depth), joined(leaves, |_| "0".to_owned()))
    };
    let up_to_1_mib = |head: &str, line: &dyn Fn(usize) -> String| {
        let mut text = head.to_owned();
        for number in 0.. {
            let line = line(number);
            if text.len() + line.len() > MIB {
                break;
            }
            text += &line;
        }
        text
    };
    vec![
        ("a long name around many values", format!("{long}:\n{}", " - 0\n".repeat(88_000))),
        ("long names within each other", nested(31, 9_900)),
        ("empty rules", format!("rules:\n{}", "- {}\n".repeat(10_000))),
        ("1 MiB of empty rules", up_to_1_mib("rules:\n", &|_| "- {}\n".to_owned())),
        ("1 MiB of empty entries", up_to_1_mib("rules:\n", &|_| "-\n".to_owned())),
        ("unknown fields", up_to_1_mib("", &|it| format!("f{it}: 0\n"))),
        ("one field again and again", up_to_1_mib("", &|_| "a: 0\n".to_owned())),
        ("wrong limits", up_to_1_mib("tiers:\n", &|it| format!(" t{it}: x\n"))),
        ("tiers for every rule", {
            let tiers: String = (0..30_000).map(|it| format!(" t{it}: 1/s\n")).collect();
            up_to_1_mib(&format!("tiers:\n{tiers}rules:\n"), &|it| {
                format!("- {{name: r{it}, key: ip, tier: from_request}}\n")
            })
        }),
        (
            "members of unknown tiers",
            up_to_1_mib("tiers: {free: 1/s}\nmembers:\n", &|it| format!(" m{it}: x\n")),
        ),
        ("one rule with many keys", {
            let keys = joined(9_000, |it| format!("header:h{it}"));
            format!("rules: [{{ name: a, limit: 1/s, key: [{keys}] }}]\n")
        }),
        ("a path of many segments", {
            format!(
                "rules: [{{ name: a, limit: 1/s, key: ip, match: {{ path: {} }} }}]\n",
                "/a".repeat(500_000)
            )
        }),
        ("nested lists", "[".repeat(MIB)),
        ("nested items", "- ".repeat(MIB / 2)),
        ("nested keys", "? ".repeat(MIB / 2)),
        ("documents", "---\n".repeat(MIB / 4)),
        ("anchors", up_to_1_mib("", &|it| format!("a{it}: &a{it} 0\n"))),
    ]
}

/// The largest policy that is accepted: as many rules as there may be.
fn largest_policy() -> String {
    let rules = (0..10_000)
        .map(|it| format!("- {{ name: r{it}, match: {{ path: /r{it} }}, key: ip, limit: 5/s }}\n"));
    format!("rules:\n{}", rules.collect::<String>())
}

/// A node as a process of its own, whose memory can be looked at.
struct Node {
    process: Process,
    address: SocketAddr,
}

impl Node {
    fn start() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
        command.args(["--listen", &address.to_string()]).env("TOLLGATE_LOG__LEVEL", "error");
        let process = Process::start(&command);
        wait_until("the node listens", || TcpStream::connect(address).is_ok());
        Self { process, address }
    }

    /// The most memory that the process has had, in bytes.
    fn peak_bytes(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
    }
}

/// Items of batches that took the most memory for their text.
fn large_items() -> Vec<(&'static str, String)> {
    let chain = format!("{}{{}}{}", "{\"\":".repeat(120), "}".repeat(120));
    let objects =
        |name: &str| format!("{{\"{name}\":{{{}}}}}", joined(128, |it| format!("\"{it:x}\":{{\"\":0}}")));
    vec![
        ("objects within each other", format!("{{\"x\":[{}]}}", joined(8, |_| chain.clone()))),
        ("objects in headers", objects("headers")),
        ("objects in an unknown member", objects("x")),
        ("many headers", headers(128)),
        ("lists", format!("{{\"x\":[{}]}}", joined(1_000, |_| "0".to_owned()))),
        ("empty checks", "{}".to_owned()),
        ("a mistake", "{\"\":0}".to_owned()),
    ]
}

#[test]
fn a_batch_takes_a_small_multiple_of_its_size() {
    const TOGETHER: usize = 8;
    for (what, item) in large_items() {
        for target in [BATCH, PLAIN_BATCH] {
            let node = Node::start();
            let body = padded(batch_of(&item));
            let before = node.peak_bytes();
            std::thread::scope(|scope| {
                for _ in 0..TOGETHER {
                    scope.spawn(|| assert_eq!(send(node.address, "POST", target, &body).status, 200));
                }
            });
            let grown = node.peak_bytes() - before;
            println!(
                "{what}, {target}: {} KiB for each of {TOGETHER} batches of 1 MiB",
                grown / TOGETHER / 1024
            );
            // The body itself, 1,000 answers, and what the socket holds.
            assert!(
                grown < TOGETHER * 6 * MIB,
                "{what}, {target}: {grown} bytes for {TOGETHER} batches of 1 MiB"
            );
        }
    }
}

#[test]
fn garbage_in_a_forwarding_header_does_not_slow_a_batch_down() {
    let server =
        Server::with("client_address: { header: X-Forwarded-For, trusted_proxies: ['127.0.0.0/8'] }\n");
    let body = format!("{{\"checks\":[{}]}}", joined(1_000, |_| "{}".to_owned()));
    let took = |header: &str| {
        let head = format!(
            "POST {PLAIN_BATCH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-forwarded-for: {header}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        shortest(|| {
            let mut stream = server.connect();
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(body.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert_eq!(answer.matches("\"ip:198.51.100.7\"").count(), 1_000);
        })
    };
    let plain = took("198.51.100.7");
    for garbage in ["\u{ff}", "a", "a,", "10.0.0.1,", "\"", "%"] {
        let long = took(&format!("{}, 198.51.100.7", garbage.repeat(14_000 / garbage.len())));
        println!("{garbage:?}: {long:?}, without it {plain:?}");
        // The second part is for a busy machine: an attack that works takes seconds.
        assert!(long < 3 * plain + Duration::from_millis(20), "{garbage:?}: {long:?}, without it {plain:?}");
    }
}

#[test]
fn reading_a_policy_takes_a_small_multiple_of_its_size() {
    for (what, policy) in hostile_policies() {
        let node = Node::start();
        let before = node.peak_bytes();
        let answer = send(node.address, "POST", "/admin/policy/check", &policy);
        assert_eq!(answer.status, 422, "{what}: {}", &answer.body[..answer.body.len().min(300)]);
        let grown = node.peak_bytes() - before;
        println!("{what}: {} KiB of policy, {} KiB of memory", policy.len() / 1024, grown / 1024);
        // The policy itself is held by the socket, as a body and as a text.
        assert!(grown < 40 * MIB, "{what}: {} bytes of policy took {grown} bytes", policy.len());
        let mistakes = answer.json()["detail"].as_str().unwrap().lines().count() - 1;
        assert!((1..=100).contains(&mistakes), "{what}: {mistakes} mistakes");
        assert!(answer.body.len() < 128 * 1024, "{what}: an answer of {} bytes", answer.body.len());
    }
}

#[test]
fn no_policy_of_1_mib_takes_much_longer_to_read_than_an_honest_one() {
    let read = |policy: &str| config::read_policy("p", policy, &PolicyContext::default()).is_ok();
    let largest = largest_policy();
    let baseline = shortest(|| assert!(read(&largest)));
    for (what, policy) in hostile_policies() {
        let took = shortest(|| assert!(!read(&policy), "{what}"));
        println!("{what}: {took:?}, the largest policy {baseline:?}");
        // Ten readings, for ten mistakes.
        assert!(took < 10 * baseline, "{what} took {took:?}, the largest policy {baseline:?}");
    }
}

#[test]
fn health_is_answered_while_a_large_policy_is_read_pushed_or_measured() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    std::fs::write(&file, "rules: []\n").unwrap();
    let server = Server::with(&format!("policy: {}\n", file.display()));
    let policy = largest_policy();
    let version = || server.get("/actuator/info").json()["policy"]["version"].clone();
    let by_file = |number: usize| {
        let text = format!("{policy}- {{ name: last{number}, key: user, limit: 5/s }}\n").replacen(
            "- { name: r0,",
            "- { name: first,",
            1,
        );
        let text = text.replacen("- { name: r1, match: { path: /r1 }, key: ip, limit: 5/s }\n", "", 1);
        let new = file.with_extension("new");
        std::fs::write(&new, text).unwrap();
        let before = version();
        let reading = shortest(|| {
            config::load_policy(&new, &PolicyContext::default()).unwrap();
        });
        std::fs::rename(&new, &file).unwrap();
        let (waited, _, ()) = longest_wait(&server, || wait_until("it is in force", || version() != before));
        println!("the file: health waited {waited:?}, reading takes {reading:?}");
        waited.as_secs_f64() / reading.as_secs_f64()
    };
    let least = (0..MEASURED).map(by_file).fold(f64::MAX, f64::min);
    assert!(least < 0.5, "health waited for {:.0}% of the time that reading the file takes", least * 100.0);
    for (method, target) in
        [("POST", "/admin/policy/check"), ("PUT", "/admin/policy"), ("GET", "/actuator/prometheus")]
    {
        let by_request = |_| {
            let body = if method == "GET" { "" } else { &policy };
            let (waited, took, answer) = longest_wait(&server, || send(server.address, method, target, body));
            assert_eq!(answer.status, 200, "{}", answer.body);
            println!("{method} {target}: health waited {waited:?} of {took:?}");
            waited.as_secs_f64() / took.as_secs_f64()
        };
        let least = (0..MEASURED).map(by_request).fold(f64::MAX, f64::min);
        assert!(least < 0.5, "{method} {target}: health waited for {:.0}% of it", least * 100.0);
    }
}
