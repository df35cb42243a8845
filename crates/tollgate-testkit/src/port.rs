//! Ports without a listener.

use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Below the range from which the system takes the near ends of connections. From within that range, a client that
/// tries again and again to reach a killed server would one day connect to itself, and hold the port that the server
/// needs to come back.
const FIRST: u64 = 11_000;
const COUNT: u64 = 21_000;

/// A free port on 127.0.0.1, handed out once to this program. Another program may still be quicker to take it.
pub(crate) fn free_port() -> u16 {
    /// Where this program looks next. It begins anywhere, so that programs that run side by side seldom meet.
    static NEXT: LazyLock<AtomicU64> =
        LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(0) % COUNT));

    (0..COUNT)
        .map(|_| FIRST + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT)
        .map(|port| u16::try_from(port).expect("the range ends below 65536"))
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("there is a free port")
}
