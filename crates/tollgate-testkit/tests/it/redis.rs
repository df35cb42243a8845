//! One server: where it listens, what it survives, how it ends.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use tollgate_testkit::{RedisServer, ServerProgram, wait_until};

#[test]
fn every_program_starts_and_says_its_version() {
    let cases = [
        (ServerProgram::Redis, "redis_version:7."),
        (ServerProgram::Valkey, "valkey_version:9."),
        (ServerProgram::Redis62, "redis_version:6.2."),
    ];
    for (program, version) in cases {
        let server = RedisServer::build().program(program).start();
        let info = server.cli(&["INFO", "server"]);
        assert!(info.contains(version), "{program:?}: {info}");
    }
}

#[test]
fn a_server_answers_on_its_socket_and_its_port() {
    let server = RedisServer::build().tcp().start();
    assert_eq!(server.url(), format!("redis+unix://{}", server.socket().display()));
    let mut near = UnixStream::connect(server.socket()).unwrap();
    let mut far = TcpStream::connect(server.tcp_address()).unwrap();
    near.write_all(b"SET key value\r\n").unwrap();
    assert_eq!(read(&mut near), "+OK\r\n");
    far.write_all(b"GET key\r\n").unwrap();
    assert_eq!(read(&mut far), "$5\r\nvalue\r\n");
}

#[test]
fn a_restart_keeps_the_port_and_what_was_appended() {
    for (is_kept, build) in [(false, RedisServer::build()), (true, RedisServer::build().append_only())] {
        let mut server = build.tcp().start();
        let address = server.tcp_address();
        server.cli(&["SET", "key", "value"]);
        server.kill();
        assert!(TcpStream::connect(address).is_err());
        server.restart();
        assert_eq!(server.tcp_address(), address);
        assert!(TcpStream::connect(address).is_ok());
        assert_eq!(server.cli(&["GET", "key"]).trim() == "value", is_kept);
    }
}

#[test]
fn a_server_that_loads_slowly_says_so() {
    let slow = ["--key-load-delay", "500"];
    let mut server = RedisServer::build().tcp().append_only().args(&slow).start();
    server.cli(&["EVAL", "for number = 1, 5000 do redis.call('SET', number, number) end", "0"]);
    server.restart_without_waiting();
    let ask = || {
        let mut stream = TcpStream::connect(server.tcp_address()).ok()?;
        stream.write_all(b"GET 5000\r\n").ok()?;
        Some(read(&mut stream))
    };
    wait_until("it is loading", || ask().is_some_and(|answer| answer.starts_with("-LOADING")));
    wait_until("it has loaded", || ask().is_some_and(|answer| answer == "$4\r\n5000\r\n"));
}

#[test]
fn a_paused_server_accepts_and_stays_silent_until_it_goes_on() {
    let server = RedisServer::start();
    server.pause();
    assert!(server.is_paused());
    let mut stream = UnixStream::connect(server.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    stream.write_all(b"PING\r\n").unwrap();
    assert!(stream.read(&mut [0]).is_err());
    server.resume();
    stream.set_read_timeout(None).unwrap();
    assert_eq!(read(&mut stream), "+PONG\r\n");
}

#[test]
fn users_are_asked_for_their_passwords() {
    let server = RedisServer::build().users(&["user default off", "user alice on >secret ~* +@all"]).start();
    assert!(server.cli(&["PING"]).contains("NOAUTH"));
    assert_eq!(server.cli(&["--no-auth-warning", "--user", "alice", "--pass", "secret", "PING"]), "PONG\n");
}

#[test]
fn further_options_reach_the_server() {
    let server = RedisServer::build().arg("--maxmemory").arg("7mb").args(&["--databases", "3"]).start();
    assert!(server.cli(&["CONFIG", "GET", "maxmemory"]).contains("7340032"));
    assert!(server.cli(&["CONFIG", "GET", "databases"]).contains('3'));
}

#[test]
#[should_panic(expected = "Bad directive")]
fn a_server_that_does_not_start_says_why() {
    RedisServer::build().args(&["--no-such-option", "1"]).start();
}

#[test]
fn a_dropped_server_is_gone_with_its_files() {
    let server = RedisServer::build().tcp().start();
    let (address, socket, id) = (server.tcp_address(), server.socket(), server.process_id());
    drop(server);
    assert!(!Path::new(&format!("/proc/{id}")).exists());
    assert!(!socket.exists());
    assert!(TcpStream::connect(address).is_err());
}

fn read(stream: &mut impl Read) -> String {
    let mut answer = [0; 64];
    let length = stream.read(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..length]).into_owned()
}
