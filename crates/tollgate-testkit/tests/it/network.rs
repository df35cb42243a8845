//! Places, and what can be cut between them.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use tollgate_testkit::{Network, Place, Process, RedisServer, wait_until};

const PATIENCE: Duration = Duration::from_secs(10);

/// Long enough that an answer which is on its way would have come.
const SILENCE: Duration = Duration::from_millis(300);

#[test]
fn a_server_in_a_place_is_cut_off_and_comes_back() {
    let Some(network) = network() else { return };
    let place = network.place();
    let mut server = RedisServer::build().place(&place).append_only().start();
    assert_eq!(server.tcp_address().ip(), place.ip());
    let mut client = connect(server.tcp_address());
    assert_eq!(ask(&mut client, "SET key 1"), "+OK\r\n");
    assert_eq!(server.cli(&["GET", "key"]), "1\n");

    place.cut();
    client.write_all(b"INCR key\r\n").unwrap();
    assert_silent(&mut client);
    let new = TcpStream::connect_timeout(&server.tcp_address(), SILENCE);
    assert_eq!(new.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(server.cli(&["GET", "key"]), "1\n");
    place.heal();
    assert_eq!(read(&mut client), ":2\r\n");

    place.cut_outgoing();
    client.write_all(b"INCR key\r\n").unwrap();
    wait_until("the question arrives", || server.cli(&["GET", "key"]) == "3\n");
    assert_silent(&mut client);
    place.heal_outgoing();
    assert_eq!(read(&mut client), ":3\r\n");

    server.restart();
    assert_eq!(ask(&mut connect(server.tcp_address()), "GET key"), "$1\r\n3\r\n");
}

#[test]
fn places_are_cut_off_from_each_other_and_not_from_the_test() {
    let Some(network) = network() else { return };
    let [primary_place, replica_place, third] = [(); 3].map(|()| network.place());
    let primary = RedisServer::build().place(&primary_place).start();
    let (ip, port) = (primary_place.ip().to_string(), primary.tcp_address().port().to_string());
    let replica = RedisServer::build().place(&replica_place).args(&["--replicaof", &ip, &port]).start();
    let has = |value: &str| replica.cli(&["GET", "key"]).trim() == value;
    primary.cli(&["SET", "key", "before"]);
    wait_until("the replica follows", || has("before"));

    network.cut_between(&primary_place, &replica_place);
    for server in [&primary, &replica] {
        assert_eq!(ask(&mut connect(server.tcp_address()), "PING"), "+PONG\r\n");
        assert!(pings(&third, server));
    }
    primary.cli(&["SET", "key", "during"]);
    assert!(!pings(&replica_place, &primary));
    assert!(has("before"));
    network.heal_between(&primary_place, &replica_place);
    wait_until("the replica catches up", || has("during"));

    network.cut_one_way(&primary_place, &replica_place);
    primary.cli(&["SET", "key", "lost"]);
    assert!(!pings(&replica_place, &primary) && pings(&third, &primary));
    assert!(has("during"));
    network.heal_one_way(&primary_place, &replica_place);
    wait_until("the replica catches up again", || has("lost"));
}

#[test]
fn a_destroyed_place_falls_silent() {
    let Some(network) = network() else { return };
    let place = network.place();
    let server = RedisServer::build().place(&place).start();
    let mut client = connect(server.tcp_address());
    assert_eq!(ask(&mut client, "PING"), "+PONG\r\n");
    place.destroy();
    client.write_all(b"PING\r\n").unwrap();
    assert_silent(&mut client);
    // It still runs, but no other place can reach it.
    assert_eq!(server.cli(&["PING"]), "PONG\n");
}

#[test]
fn a_process_in_a_place_reaches_the_test_and_ends_with_it() {
    let Some(network) = network() else { return };
    let place = network.place();
    let listener = TcpListener::bind((network.host_ip(), 0)).unwrap();
    let (ip, port) = (network.host_ip(), listener.local_addr().unwrap().port());
    let mut command = place.command("bash");
    command.args(["-c", &format!("echo hello >/dev/tcp/{ip}/{port}; exec sleep 60")]);
    let process = Process::start(&command);
    let (mut stream, from) = listener.accept().unwrap();
    assert_eq!(from.ip(), place.ip());
    assert_eq!(read(&mut stream), "hello\n");
    // It is the program itself that was started and will be killed, not one in between.
    let name = format!("/proc/{}/comm", process.id());
    wait_until("it sleeps", || fs::read_to_string(&name).is_ok_and(|name| name == "sleep\n"));
    drop(process);
    assert!(fs::read_to_string(name).is_err());
}

#[test]
fn a_dropped_network_leaves_nothing() {
    let Some(network) = network() else { return };
    let address = format!(" {}/", network.host_ip());
    let place = network.place();
    let is_there = || addresses().contains(&address);
    drop(network);
    assert!(is_there(), "a place keeps its network");
    drop(place);
    assert!(!is_there());
}

/// None for ordinary users, who cannot make networks.
fn network() -> Option<Network> {
    let is_available = Network::is_available();
    if !is_available {
        println!("left out: networks can be made by root only, where there is `ip`");
    }
    is_available.then(Network::new)
}

fn addresses() -> String {
    let output =
        std::process::Command::new("/usr/sbin/ip").args(["-4", "-oneline", "address"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Whether a program in a place gets an answer from a server.
fn pings(from: &Place, to: &RedisServer) -> bool {
    let address = to.tcp_address();
    let mut command = from.command("timeout");
    command.args([
        "0.5",
        "redis-cli",
        "-h",
        &address.ip().to_string(),
        "-p",
        &address.port().to_string(),
        "PING",
    ]);
    String::from_utf8(command.output().unwrap().stdout).unwrap() == "PONG\n"
}

fn connect(address: SocketAddr) -> TcpStream {
    let client = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client
}

fn ask(client: &mut TcpStream, question: &str) -> String {
    client.write_all(format!("{question}\r\n").as_bytes()).unwrap();
    read(client)
}

fn read(client: &mut impl Read) -> String {
    let mut answer = [0; 64];
    let length = client.read(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

fn assert_silent(client: &mut TcpStream) {
    client.set_read_timeout(Some(SILENCE)).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    client.set_read_timeout(Some(PATIENCE)).unwrap();
}
