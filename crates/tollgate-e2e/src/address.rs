//! Free addresses on loopback.

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// The ports above the range from which Linux takes the ports of outgoing connections, without the last one. A client that polls a
/// port in that range until a proxy listens there can connect to itself. The test kit uses the ports below that range.
const FIRST: u16 = 61_000;
const COUNT: u16 = 4_500;

/// Returns an address on 127.0.0.1 on which no program listens. Each call in this process returns another port.
///
/// # Panics
/// If all ports of the range are in use.
pub fn free_address() -> SocketAddr {
    /// The start is random, so that test programs that run at the same time rarely try the same port.
    static NEXT: LazyLock<AtomicU16> =
        LazyLock::new(|| AtomicU16::new(RandomState::new().hash_one(0) as u16));

    (0..COUNT)
        .map(|_| FIRST + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT)
        .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .find(|address| TcpListener::bind(address).is_ok())
        .expect("one of the ports is free")
}
