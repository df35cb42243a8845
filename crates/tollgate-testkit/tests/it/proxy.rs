//! How badly bytes can be carried.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tollgate_testkit::{ChaosProxy, Fault, RedisServer, wait_until};

/// Far above what an answer takes, so that a hung connection fails its test.
const PATIENCE: Duration = Duration::from_secs(10);

/// Long enough that an answer which is on its way would have come.
const SILENCE: Duration = Duration::from_millis(100);

const PONG: &str = "+PONG\r\n";

#[test]
fn without_a_fault_everything_passes_in_both_directions() {
    let (_server, proxy) = start();
    let mut client = connect(proxy.address());
    // Beyond what any buffer on the way holds.
    let value: Vec<u8> = (0..32_u32 << 20).map(|number| (number % 251) as u8).collect();
    let mut sender = client.try_clone().unwrap();
    let request = [format!("*2\r\n$4\r\nECHO\r\n${}\r\n", value.len()).as_bytes(), &value, b"\r\n"].concat();
    let sending = std::thread::spawn(move || sender.write_all(&request).unwrap());
    let mut answer = vec![0; format!("${}\r\n", value.len()).len() + value.len() + 2];
    client.read_exact(&mut answer).unwrap();
    sending.join().unwrap();
    assert!(answer.ends_with(&[&value[..], b"\r\n"].concat()));
    assert_eq!((proxy.connections(), proxy.accepted()), (1, 1));

    // The end of what the client sends reaches the server, whose end reaches the client.
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    wait_until("the connection is gone", || proxy.connections() == 0);
}

#[test]
fn a_delay_is_exact_and_costs_no_throughput() {
    let (_server, proxy) = start();
    let mut client = connect(proxy.address());
    let each_way = Duration::from_millis(7);
    proxy.set(Fault::Delay { each_way, jitter: Duration::ZERO });
    let mut trips: Vec<_> = (0..30).map(|_| ping(&mut client)).collect();
    trips.sort();
    println!("2 x 7 ms took {:?} at least, {:?} in the middle, {:?} at most", trips[0], trips[15], trips[29]);
    assert!(trips[0] >= 2 * each_way, "{trips:?}");

    // A thousand questions, each sent by itself, are under way at once.
    let start = Instant::now();
    let mut sender = client.try_clone().unwrap();
    let sending = std::thread::spawn(move || (0..1_000).for_each(|_| sender.write_all(b"PING\r\n").unwrap()));
    client.read_exact(&mut vec![0; PONG.len() * 1_000]).unwrap();
    sending.join().unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());

    proxy.set(Fault::Delay { each_way, jitter: Duration::from_millis(20) });
    let mut trips: Vec<_> = (0..20).map(|_| ping(&mut client)).collect();
    trips.sort();
    assert!(trips[0] >= 2 * each_way && trips[19] > trips[0] + Duration::from_millis(10), "{trips:?}");

    proxy.set(Fault::None);
    let fastest = (0..30).map(|_| ping(&mut client)).min();
    println!("without a delay a round trip takes {fastest:?}");
    assert!(fastest < trips.first().copied(), "{fastest:?}");
}

#[test]
fn the_order_is_kept_whatever_waits() {
    let (_server, proxy) = start();
    let mut client = connect(proxy.address());
    let faults = [
        Fault::Delay { each_way: Duration::ZERO, jitter: Duration::from_millis(5) },
        Fault::Stall { percent: 20, pause: Duration::from_millis(5) },
        Fault::None,
    ];
    let mut expected = String::new();
    for number in 0..300 {
        proxy.set(faults[number % 3]);
        client.write_all(format!("ECHO {number:03}\r\n").as_bytes()).unwrap();
        expected += &format!("$3\r\n{number:03}\r\n");
    }
    let mut answer = vec![0; expected.len()];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(String::from_utf8(answer).unwrap(), expected);
}

#[test]
fn a_share_of_the_pieces_stalls() {
    let (_server, proxy) = start();
    let mut client = connect(proxy.address());
    let pause = Duration::from_millis(50);
    proxy.set(Fault::Stall { percent: 20, pause });
    let slow = (0..50).filter(|_| ping(&mut client) >= pause).count();
    // A round trip has two pieces: 18 of 50 are expected. The seed makes it the same number each time.
    assert!((8..30).contains(&slow), "{slow}");
    proxy.set(Fault::Stall { percent: 100, pause });
    assert!(ping(&mut client) >= 2 * pause);
}

#[test]
fn answers_drip() {
    let (_server, proxy) = start();
    let mut client = connect(proxy.address());
    let pause = Duration::from_millis(10);
    proxy.set(Fault::Drip { pause });
    client.write_all(b"PING\r\n").unwrap();
    let start = Instant::now();
    let mut answer = Vec::new();
    while answer.len() < PONG.len() {
        let mut buffer = [0; 64];
        let length = client.read(&mut buffer).unwrap();
        answer.extend_from_slice(&buffer[..length]);
    }
    assert_eq!(answer, PONG.as_bytes());
    assert!(start.elapsed() >= pause * 6, "{:?}", start.elapsed());
}

#[test]
fn connections_are_reset() {
    let (_server, proxy) = start();
    let mut old = connect(proxy.address());
    ping(&mut old);
    proxy.set(Fault::Reset);
    assert_eq!(proxy.connections(), 0);
    assert_eq!(old.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let mut new = connect(proxy.address());
    assert_eq!(new.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(proxy.accepted(), 2);
    proxy.set(Fault::None);
    ping(&mut connect(proxy.address()));
}

#[test]
fn half_open_connections_stay_silent_and_are_reset_if_they_lost_something() {
    let (_server, proxy) = start();
    let mut asking = connect(proxy.address());
    let mut idle = connect(proxy.address());
    let mut leaving = connect(proxy.address());
    for client in [&mut asking, &mut idle, &mut leaving] {
        ping(client);
    }
    proxy.set(Fault::HalfOpen);
    let mut new = connect(proxy.address());
    for client in [&mut asking, &mut new] {
        client.write_all(b"PING\r\n").unwrap();
        assert_silent(client);
    }
    // What is swallowed is taken, however much it is.
    asking.write_all(&vec![b'x'; 16 << 20]).unwrap();
    drop(leaving);
    wait_until("the client's end is seen", || proxy.connections() == 3);

    proxy.set(Fault::None);
    for client in [&mut asking, &mut new] {
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
    ping(&mut idle);
}

#[test]
fn out_of_a_black_hole_everything_comes_back() {
    let (_server, proxy) = start();
    let mut old = connect(proxy.address());
    ping(&mut old);
    proxy.set(Fault::Blackhole);
    let mut new = connect(proxy.address());
    for client in [&mut old, &mut new] {
        client.write_all(b"PING\r\n").unwrap();
        assert_silent(client);
    }
    assert_eq!((proxy.connections(), proxy.accepted()), (1, 1));
    proxy.set(Fault::None);
    for client in [&mut old, &mut new] {
        assert_eq!(read(client, PONG.len()), PONG);
        ping(client);
    }
}

#[test]
fn a_proxy_refuses_and_listens_again() {
    let (_server, proxy) = start();
    for _ in 0..20 {
        let mut client = connect(proxy.address());
        ping(&mut client);
        proxy.set(Fault::Refuse);
        assert_eq!(TcpStream::connect(proxy.address()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        proxy.set(Fault::None);
    }
    ping(&mut connect(proxy.address()));
}

#[test]
fn a_server_that_is_gone_is_a_reset_and_comes_back() {
    let (mut server, proxy) = start();
    server.kill();
    let mut client = connect(proxy.address());
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    server.restart();
    ping(&mut connect(proxy.address()));
}

#[test]
fn a_dropped_proxy_is_gone_even_in_a_runtime() {
    let server = RedisServer::build().tcp().start();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let proxy = ChaosProxy::start(server.tcp_address(), 1);
        let mut client = connect(proxy.address());
        proxy.set(Fault::Delay { each_way: Duration::from_millis(1), jitter: Duration::ZERO });
        ping(&mut client);
        let address = proxy.address();
        drop(proxy);
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        assert!(TcpStream::connect(address).is_err());
    });
}

fn start() -> (RedisServer, ChaosProxy) {
    let server = RedisServer::build().tcp().start();
    let proxy = ChaosProxy::start(server.tcp_address(), 7);
    (server, proxy)
}

fn connect(address: SocketAddr) -> TcpStream {
    let client = TcpStream::connect(address).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.set_write_timeout(Some(PATIENCE)).unwrap();
    client.set_nodelay(true).unwrap();
    client
}

/// How long a round trip takes.
fn ping(client: &mut TcpStream) -> Duration {
    let start = Instant::now();
    client.write_all(b"PING\r\n").unwrap();
    assert_eq!(read(client, PONG.len()), PONG);
    start.elapsed()
}

fn read(client: &mut TcpStream, length: usize) -> String {
    let mut answer = vec![0; length];
    client.read_exact(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

fn assert_silent(client: &mut TcpStream) {
    client.set_read_timeout(Some(SILENCE)).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    client.set_read_timeout(Some(PATIENCE)).unwrap();
}
