//! Policies that change while the service runs: by file, by signal, by the admin API, through the store.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use tollgate::Micros;
use tollgate_testkit::{Process, RedisServer, wait_until};

use crate::server::{Response, Server, connect, exchange};

fn two(limit: &str) -> String {
    format!("rules: [{{ name: two, key: user, limit: {limit} }}]\n")
}

/// What a user has left, without taking it.
fn remaining(server: &Server, user: &str) -> Value {
    let explained = server.post("/api/v1/explain", &json!({ "user": user }).to_string()).json();
    explained["limits"][0]["remaining"].clone()
}

fn take(server: &Server, user: &str, permits: u64) -> Response {
    server.post("/api/v1/check", &json!({ "user": user, "permits": permits }).to_string())
}

fn version(server: &Server) -> Value {
    server.get("/actuator/info").json()["policy"]["version"].clone()
}

/// As an editor does, and as volumes in Kubernetes are changed: another file under the same name.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, path).unwrap();
}

#[test]
fn a_file_that_changes_is_read_again_and_mistakes_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    std::fs::write(&file, two("10/min")).unwrap();
    let server = Server::with(&format!("policy: {}\n", file.display()));
    assert_eq!(take(&server, "alice", 4).json()["remaining"], 6);
    let first = version(&server);
    replace(&file, &two("20/min"));
    wait_until("the new policy is in force", || version(&server) != first);
    assert_eq!(remaining(&server, "alice"), 16, "consumed stays consumed");
    let second = version(&server);
    replace(&file, "rules: [{ name: two, key: user, limt: 20/min }]\n");
    let refused =
        "tollgate_policy_reads_total{application=\"distributed-rate-limiter\",result=\"refused\"} 1";
    wait_until("the mistake is noticed", || server.get("/actuator/prometheus").body.contains(refused));
    assert_eq!(version(&server), second);
    assert_eq!(remaining(&server, "alice"), 16);
    // Written in place, in two parts with a pause: the first part by itself would be a policy, too.
    std::fs::write(&file, "rules: []\n").unwrap();
    wait_until("it is in force", || version(&server) != second);
    let third = version(&server);
    // A link that leads elsewhere from one moment to the next.
    let link = folder.path().join("..data");
    std::fs::write(folder.path().join("other.yaml"), two("30/min")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("other.yaml"), &link).unwrap();
    std::fs::rename(&link, &file).unwrap();
    wait_until("the linked policy is in force", || version(&server) != third);
    assert_eq!(remaining(&server, "alice"), 26);
}

#[test]
fn the_admin_api_checks_puts_in_force_and_withdraws() {
    let server = Server::with(&format!("policy:\n  {}", two("10/min")));
    let own = version(&server);
    let put = |text: &str| server.ask("PUT", "/admin/policy", "", text);
    let wrong = put("rules: [{ name: two, key: usr, limit: 10/min }]");
    assert_eq!(wrong.status, 422);
    assert!(
        wrong.json()["detail"].as_str().unwrap().contains("policy:1:22: rule \"two\": key: no such key: usr"),
        "{wrong:?}"
    );
    assert_eq!(version(&server), own);
    let checked = server.post("/admin/policy/check", &two("5/min"));
    assert_eq!((checked.status, version(&server)), (200, own.clone()), "looking it over changes nothing");
    let pushed = put(&two("5/min"));
    assert_eq!((pushed.status, &pushed.json()["origin"]), (200, &json!("admin API")));
    assert_eq!(pushed.json()["version"], checked.json()["version"]);
    assert_eq!(take(&server, "alice", 6).status, 400, "more than the pushed limit can ever admit");
    assert_eq!(server.ask("POST", "/admin/policy/reload", "", "").status, 409, "the pushed one is in force");
    assert_eq!(server.ask("DELETE", "/admin/policy", "", "").json()["version"], own);
    assert_eq!(take(&server, "alice", 6).status, 200);
    let page = server.ask("DELETE", "/admin/policy", "origin: http://evil.test\r\n", "");
    assert_eq!(page.status, 403, "browsers say where a page came from");
    let outside = Server::with("listen: 0.0.0.0:0\nadmin: { listen: 127.0.0.1:0 }\n");
    let reachable =
        format!("GET {} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", "/admin/policy");
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], outside.address.port()));
    assert_eq!(exchange(connect(address), &reachable).status, 404, "not where everybody can reach it");
    assert_eq!(exchange(connect(outside.admin), &reachable).status, 200);
}

#[test]
fn a_change_with_if_match_replaces_that_version_and_no_other() {
    for server in [Server::with("policy: { rules: [] }"), Server::on_redis("policy: { rules: [] }")] {
        let shown = server.ask("GET", "/admin/policy", "", "");
        let own = version(&server).to_string();
        assert_eq!(shown.header("etag"), Some(own.as_str()));
        let put = |if_match: &str, limit: &str| {
            server.ask("PUT", "/admin/policy", &format!("if-match: {if_match}\r\n"), &two(limit))
        };
        let first = put(&own, "5/min");
        assert_eq!(first.status, 200, "{first:?}");
        let tag = first.header("etag").unwrap().to_owned();
        let late = put(&own, "6/min");
        assert_eq!(late.status, 412);
        assert!(late.json()["detail"].as_str().unwrap().contains("GET /admin/policy"), "{late:?}");
        assert_eq!(server.ask("GET", "/admin/policy", "", "").json()["text"], two("5/min"));
        assert_eq!(put("5", "6/min").status, 400, "not in quotes");
        assert_eq!(put("*", "7/min").status, 200);
        let delete =
            |tag: &str| server.ask("DELETE", "/admin/policy", &format!("if-match: {tag}\r\n"), "").status;
        assert_eq!(delete(&tag), 412);
        assert_eq!(delete(&version(&server).to_string()), 200);
    }
}

#[test]
fn a_refused_change_is_shown_until_another_one_is_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    std::fs::write(&file, two("5/min")).unwrap();
    let server = Server::with(&format!("policy: {}", file.display()));
    let refused = || server.ask("GET", "/admin/policy", "", "").json()["refusedChange"]["why"].clone();
    assert_eq!(refused(), json!(null));
    std::fs::write(&file, "rules: [{ name: two, key: usr, limit: 5/min }]").unwrap();
    assert_eq!(server.ask("POST", "/admin/policy/reload", "", "").status, 422);
    assert!(refused().as_str().unwrap().contains("rule \"two\": key: no such key: usr"), "{}", refused());
    let info = server.get("/actuator/info").json();
    assert_eq!(info["policy"]["refusedChange"]["why"], refused());
    std::fs::write(&file, two("6/min")).unwrap();
    assert_eq!(server.ask("POST", "/admin/policy/reload", "", "").status, 200);
    assert_eq!(refused(), json!(null));
}

#[test]
fn the_last_twenty_pushed_policies_are_kept_and_can_be_pushed_again() {
    for server in [Server::with("policy: { rules: [] }"), Server::on_redis("policy: { rules: [] }")] {
        let history = || server.ask("GET", "/admin/policy/history", "", "").json()["pushed"].clone();
        assert_eq!(history(), json!([]));
        for limit in 1..=22 {
            assert_eq!(server.ask("PUT", "/admin/policy", "", &two(&format!("{limit}/min"))).status, 200);
        }
        assert_eq!(server.ask("DELETE", "/admin/policy", "", "").status, 200);
        let kept = history();
        assert_eq!(kept.as_array().unwrap().len(), 20);
        assert_eq!(
            (&kept[0]["version"], &kept[0]["author"]),
            (&json!(null), &json!("loopback")),
            "withdrawn"
        );
        let (newest, oldest) = (&kept[1], &kept[19]);
        let text = |entry: &Value| {
            server.ask("GET", &format!("/admin/policy/history/{}", entry["number"]), "", "").json()["text"]
                .clone()
        };
        assert_eq!((text(newest), text(oldest)), (json!(two("22/min")), json!(two("4/min"))));
        let back = server.ask("POST", &format!("/admin/policy/rollback/{}", oldest["number"]), "", "");
        assert_eq!((back.status, &back.json()["version"]), (200, &oldest["version"]));
        assert_eq!(server.ask("GET", "/admin/policy", "", "").json()["text"], two("4/min"));
        assert_eq!(history()[0]["version"], oldest["version"], "a rollback is a push");
        for wrong in ["0", "x", "99999999999999999999"] {
            assert_eq!(server.ask("POST", &format!("/admin/policy/rollback/{wrong}"), "", "").status, 404);
        }
    }
}

const TIERS: &str = "algorithm: TOKEN_BUCKET\ntiers: { free: 10/min, pro: 100/min }\nrules: [{ name: plan, key: user, tier: from_request }]\n";

#[test]
fn tiers_are_assigned_and_a_change_of_tier_is_no_refill() {
    let indented: String = TIERS.lines().map(|line| format!("  {line}\n")).collect();
    let yaml = format!("policy:\n{indented}");
    for server in [Server::with(&yaml), Server::on_redis(&yaml)] {
        let assign = |tier: &str| {
            let body = json!({ "tier": tier }).to_string();
            server.ask("PUT", "/admin/tiers/users/alice", "", &body).status
        };
        assert_eq!(take(&server, "alice", 4).json()["remaining"], 6);
        assert_eq!(assign("platinum"), 400);
        assert_eq!(assign("pro"), 200);
        let tiers = server.ask("GET", "/admin/tiers", "", "").json();
        assert_eq!(tiers, json!({ "tiers": [{ "family": "users", "member": "alice", "tier": "pro" }] }));
        assert_eq!(take(&server, "alice", 1).json()["remaining"], 95, "what was consumed stays consumed");
        assert_eq!(take(&server, "alice", 95).json()["remaining"], 0);
        for _ in 0..10 {
            assert_eq!(assign("free"), 200);
            assert_eq!(take(&server, "alice", 1).status, 429);
            assert_eq!(assign("pro"), 200);
            assert_eq!(take(&server, "alice", 1).status, 429, "toggling gives nothing");
        }
        // Nor does it after some time: 90 are still consumed, which is more than the smaller tier has, and the larger one has ten left.
        server.clock.advance(Micros::from_secs(6));
        assert_eq!((assign("free"), remaining(&server, "alice")), (200, json!(0)));
        assert_eq!((assign("pro"), remaining(&server, "alice")), (200, json!(10)));
        assert_eq!(server.ask("DELETE", "/admin/tiers/users/alice", "", "").status, 200);
        assert_eq!(server.get("/admin/tiers/users/alice").json()["tier"], Value::Null);
        assert_eq!(server.get("/admin/tiers/nobody/alice").status, 404);
    }
}

/// A node as a process of its own.
struct Node {
    process: Process,
    address: std::net::SocketAddr,
}

impl Node {
    fn start(store: &str, policy: &Path) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
        command.args(["--listen", &address.to_string(), "--store", store]);
        command.env("TOLLGATE_POLICY", policy).env("TOLLGATE_REDIS__DEADLINE", "5s");
        let process = Process::start(&command);
        wait_until("the node listens", || std::net::TcpStream::connect(address).is_ok());
        Self { process, address }
    }

    fn ask(&self, method: &str, target: &str, body: &str) -> Response {
        let length = body.len();
        let request = format!(
            "{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        exchange(connect(self.address), &request)
    }

    fn version(&self) -> Value {
        self.ask("GET", "/admin/policy", "").json()["version"].clone()
    }

    fn take(&self, permits: u64) -> Value {
        self.ask("POST", "/api/v1/check", &json!({ "user": "alice", "permits": permits }).to_string()).json()
    }
}

#[test]
fn what_one_node_is_told_reaches_all_that_share_the_store() {
    let store = RedisServer::build().tcp().start();
    let url = format!("redis://{}", store.tcp_address());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    std::fs::write(&file, TIERS).unwrap();
    let (one, two) = (Node::start(&url, &file), Node::start(&url, &file));
    let own = one.version();
    assert_eq!((two.version(), one.take(4)["remaining"].clone()), (own.clone(), json!(6)));
    // A tier.
    assert_eq!(one.ask("PUT", "/admin/tiers/users/alice", r#"{"tier":"pro"}"#).status, 200);
    let limit = |node: &Node| {
        node.ask("POST", "/api/v1/explain", r#"{"user":"alice"}"#).json()["limits"][0]["limit"].clone()
    };
    wait_until("the other node knows the tier", || limit(&two) == 100);
    // A policy.
    let pushed = one.ask("PUT", "/admin/policy", &TIERS.replace("100/min", "50/min"));
    assert_eq!(pushed.status, 200);
    wait_until("the other node has the policy", || two.version() == pushed.json()["version"]);
    assert_eq!(limit(&two), 50);
    // A node that comes later goes by the same.
    let mut three = Node::start(&url, &file);
    assert_eq!((three.version(), limit(&three)), (pushed.json()["version"].clone(), json!(50)));
    // Its file is read, and is not in force now.
    three.process.hang_up();
    assert_eq!(three.version(), pushed.json()["version"]);
    assert_eq!(three.ask("DELETE", "/admin/policy", "").status, 200);
    wait_until("all go by their files again", || {
        [&one, &two, &three].iter().all(|node| node.version() == own)
    });
    // And now it is.
    std::fs::write(&file, TIERS.replace("100/min", "70/min")).unwrap();
    three.process.hang_up();
    wait_until("the file is in force", || limit(&three) == 70);
    assert!(!three.process.has_ended());
}

/// What was written before the store restarted may be lost: with the guard, keys count as used up.
#[test]
fn failover_guard_works_as_soon_as_a_policy_with_it_is_active() {
    const UNGUARDED: &str = "rules: [{ name: two, key: user, limit: 10/h burst 10 }]\n";
    const GUARDED: &str = "rules: [{ name: two, key: user, limit: 10/h burst 10, failover_guard: true }]\n";
    let by_push = |node: &Node, _: &Path| {
        assert_eq!(node.ask("PUT", "/admin/policy", GUARDED).status, 200);
    };
    let by_file = |node: &Node, file: &Path| {
        let before = node.version();
        replace(file, GUARDED);
        wait_until("the file is in force", || node.version() != before);
    };
    for activate in [&by_push as &dyn Fn(&Node, &Path), &by_file] {
        let mut store = RedisServer::build().tcp().append_only().start();
        let url = format!("redis://{}", store.tcp_address());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("policy.yaml");
        std::fs::write(&file, UNGUARDED).unwrap();
        let node = Node::start(&url, &file);
        assert_eq!(node.take(4)["remaining"], 6);
        store.kill();
        store.restart();
        // Only looked at: what is written after the restart is believed.
        let left = || node.ask("POST", "/api/v1/explain", r#"{"user":"alice"}"#).json()["limits"][0].clone();
        wait_until("the store answers again, and is believed", || left()["remaining"] == 6);
        activate(&node, &file);
        let guarded = node.take(1);
        assert_eq!((&guarded["allowed"], &guarded["basis"]), (&json!(false), &json!("exact")));
    }
}
