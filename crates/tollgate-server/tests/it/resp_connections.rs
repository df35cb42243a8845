//! Connections of Redis clients: who may use them, how large commands may be, and clients that are slow, hostile or gone.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use tollgate_testkit::RedisServer;

use crate::resp_client::{Client, Reply, command};
use crate::server::Server;

const LISTEN: &str = "resp: { listen: '127.0.0.1:0' }\n";
const TOKEN: &str = "correct-horse-battery-staple";

fn start(yaml: &str) -> (Server, Client) {
    let server = Server::with(&format!("{LISTEN}{yaml}"));
    let client = Client::connect(server.resp.unwrap());
    (server, client)
}

/// A server whose clients need a token, with the file that holds it.
fn with_token(yaml: &str) -> (Server, Client, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{TOKEN}\n")).unwrap();
    let (server, client) = start(&format!("api: {{ token_file: {}, {yaml} }}\n", file.path().display()));
    (server, client, file)
}

#[test]
fn without_the_setting_there_is_no_port() {
    assert_eq!(Server::start().resp, None);
}

#[test]
fn with_tokens_commands_need_one() {
    let (server, mut client, _file) = with_token("");
    let no_auth = "NOAUTH Authentication required.";
    for words in ["PING", "CL.THROTTLE a 15 30 60", "TG.CHECK KEY a", "TG.RESET KEY a", "CLIENT ID", "FOO"] {
        assert_eq!(client.call(words).error(), no_auth, "{words}");
    }
    assert!(client.call("HELLO 3").error().starts_with("NOAUTH HELLO must be called"));
    let wrong = "WRONGPASS invalid username-password pair or user is disabled.";
    assert_eq!(client.call("AUTH correct-horse-battery-stapl").error(), wrong);
    assert_eq!(client.call("HELLO 3 AUTH default nothing").error(), wrong);
    assert_eq!(client.call("PING").error(), no_auth, "still");
    assert_eq!(client.call(&format!("AUTH {TOKEN}")), Reply::Simple("OK".to_owned()));
    assert_eq!(
        client.call("CL.THROTTLE a 15 30 60").integers(),
        [0, 16, 15, -1, 2],
        "refusals have taken nothing"
    );
    assert_eq!(client.call("RESET"), Reply::Simple("RESET".to_owned()));
    assert_eq!(client.call("PING").error(), no_auth, "RESET forgets the token");
    assert_eq!(client.call(&format!("AUTH anyone {TOKEN}")), Reply::Simple("OK".to_owned()));
    let mut other = Client::connect(server.resp.unwrap());
    assert_eq!(other.call(&format!("HELLO 3 AUTH default {TOKEN} SETNAME app")).get("proto").integer(), 3);
    assert_eq!(other.call("CLIENT GETNAME").text(), "app");
    let metrics = crate::server::exchange(
        crate::server::connect(server.admin),
        "GET /actuator/prometheus HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    );
    let counted =
        "tollgate_requests_refused_total{reason=\"wrong_token\",application=\"distributed-rate-limiter\"} 2";
    let reordered =
        "tollgate_requests_refused_total{application=\"distributed-rate-limiter\",reason=\"wrong_token\"} 2";
    assert!(metrics.body.contains(counted) || metrics.body.contains(reordered), "{}", metrics.body);
}

#[test]
fn trusted_callers_need_no_token() {
    let (_server, mut client, _file) = with_token("trusted_callers: [127.0.0.0/8]");
    assert_eq!(client.call("CL.THROTTLE a 15 30 60").integers()[0], 0);
}

#[test]
fn commands_before_auth_are_small() {
    let (server, mut client, _file) = with_token("");
    client.send(b"*9\r\n");
    assert_eq!(client.reply().error(), "ERR Protocol error: unauthenticated multibulk length");
    assert!(client.is_closed());
    let mut client = Client::connect(server.resp.unwrap());
    client.send(b"*2\r\n$4\r\nAUTH\r\n$2000\r\n");
    assert_eq!(client.reply().error(), "ERR Protocol error: unauthenticated bulk length");
    assert!(client.is_closed());
}

#[test]
fn a_broken_frame_is_named_and_ends_the_connection_after_earlier_replies() {
    let (_server, mut client) = start("");
    let mut bytes = command(&["CL.THROTTLE", "a", "15", "30", "60"]);
    bytes.extend_from_slice(b"*1\r\n$-5\r\n");
    bytes.extend_from_slice(&command(&["CL.THROTTLE", "a", "15", "30", "60"]));
    client.send(&bytes);
    assert_eq!(client.reply().integers(), [0, 16, 15, -1, 2]);
    assert_eq!(client.reply().error(), "ERR Protocol error: invalid bulk length");
    assert!(client.is_closed());
}

#[test]
fn browsers_are_not_served() {
    let (server, _client) = start("");
    let body = "CL.THROTTLE a 15 30 60 16\r\nTG.RESET KEY a\r\n";
    for method in ["POST", "GET", "OPTIONS", "PUT", "TG.RESET", "CL.THROTTLE"] {
        let mut client = Client::connect(server.resp.unwrap());
        let request = format!(
            "{method} /KEY HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        client.send(request.as_bytes());
        let mut replies = String::new();
        // The server may close before it has read everything, which resets the connection.
        let _ = client.stream.read_to_string(&mut replies);
        assert!(!replies.contains(':') || replies.starts_with('-'), "{method}: {replies}");
    }
    let mut client = Client::connect(server.resp.unwrap());
    assert_eq!(client.call("CL.THROTTLE a 15 30 60 0").integers(), [0, 16, 16, -1, 0], "nothing was taken");
}

#[test]
fn the_largest_command_is_read_again_and_again() {
    let (_server, mut client) = start("server: { max_body_bytes: 1048576 }\n");
    let value = "x".repeat(16 * 1024);
    let mut words = vec!["ECHO"];
    words.extend(std::iter::repeat_n(value.as_str(), 63));
    for _ in 0..3 {
        client.send(&command(&words));
        assert_eq!(client.reply().error(), "ERR wrong number of arguments for 'echo' command");
    }
    assert_eq!(client.call_words(&["ECHO", &value]).text(), value);
}

#[test]
fn a_client_that_has_ended_sending_gets_all_its_replies() {
    let (_server, mut client) = start("");
    let pipeline: Vec<u8> = (0..100).flat_map(|_| command(&["CL.THROTTLE", "a", "999", "1", "60"])).collect();
    client.send(&pipeline);
    client.end_sending();
    for left in (900..1_000).rev() {
        assert_eq!(client.reply().integers()[2], left);
    }
    assert!(client.is_closed());
}

#[test]
fn a_half_sent_command_times_out_whatever_is_added_to_it() {
    let (_server, mut client) = start("server: { header_timeout: 200ms }\n");
    let start = Instant::now();
    client.send(b"*2\r\n$4\r\nECHO\r\n$1000\r\n");
    while start.elapsed() < Duration::from_secs(5) && client.stream.write_all(b"x").is_ok() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(start.elapsed() < Duration::from_secs(5), "single bytes keep the connection open");
    assert!(client.is_closed());
}

#[test]
fn an_idle_client_and_a_client_that_never_reads_are_dropped() {
    let (server, mut idle) = start("server: { idle_timeout: 200ms }\n");
    let mut deaf = Client::connect(server.resp.unwrap());
    let start = Instant::now();
    let text = "x".repeat(16 * 1024);
    let echo = command(&["ECHO", &text]);
    while start.elapsed() < Duration::from_secs(8) && deaf.stream.write_all(&echo).is_ok() {}
    assert!(start.elapsed() < Duration::from_secs(8), "the server takes commands whose replies are not read");
    assert!(idle.is_closed());
}

#[test]
fn idle_clients_give_way_to_new_ones() {
    let (server, mut first) = start("server: { max_connections: 4 }\n");
    assert_eq!(first.call("PING"), Reply::Simple("PONG".to_owned()));
    let _others: Vec<_> = (0..3).map(|_| Client::connect(server.resp.unwrap())).collect();
    let mut last = Client::connect(server.resp.unwrap());
    assert_eq!(last.call("PING"), Reply::Simple("PONG".to_owned()));
    assert!(first.is_closed(), "the one that was idle for longest");
}

#[test]
fn commands_under_way_are_answered_when_the_service_stops() {
    let server = Server::on_redis(LISTEN);
    let mut client = Client::connect(server.resp.unwrap());
    assert_eq!(client.call("CL.THROTTLE a 15 30 60").integers()[0], 0);
    let store = server.store.as_ref().unwrap();
    store.pause();
    client.send(&command(&["CL.THROTTLE", "a", "15", "30", "60"]));
    // The second command is only sent when the first one waits for the store.
    std::thread::sleep(Duration::from_millis(100));
    server.tell_to_stop();
    std::thread::sleep(Duration::from_millis(400));
    store.resume();
    assert_eq!(client.reply().integers(), [0, 16, 14, -1, 4]);
    assert!(client.is_closed());
}

#[test]
fn two_nodes_on_one_store_share_keys_between_protocols() {
    let store = RedisServer::build().tcp().start();
    let yaml = format!("{LISTEN}store: redis://{}\nredis: {{ deadline: 10s }}\n", store.tcp_address());
    let (one, two) = (Server::with(&yaml), Server::with(&yaml));
    let (mut first, mut second) = (Client::connect(one.resp.unwrap()), Client::connect(two.resp.unwrap()));
    // Exhausted over REST on one node, denied by every command on the other.
    assert_eq!(one.get("/api/v1/rate-limit/check?key=a&permits=100").status, 200);
    assert_eq!(second.call("CL.THROTTLE a 99 10 1").integers(), [1, 100, 0, 1, 10]);
    assert_eq!(second.call("TG.CHECK KEY a").get("allowed").integer(), 0);
    // And the reverse.
    assert_eq!(second.call("CL.THROTTLE b 99 10 1 100").integers(), [0, 100, 0, -1, 10]);
    assert_eq!(one.get("/api/v1/rate-limit/check?key=b").status, 429);
    assert_eq!(second.call("TG.CHECK KEY c PERMITS 100").get("allowed").integer(), 1);
    assert_eq!(one.get("/api/v1/rate-limit/check?key=c").status, 429);
    assert_eq!(first.call("CL.THROTTLE c 99 10 1").integers()[0], 1);
    assert_eq!(first.call("TG.RESET KEY c").get("key").text(), "c");
    assert_eq!(two.get("/api/v1/rate-limit/check?key=c").status, 200);
}
