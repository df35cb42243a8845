//! What Tollgate's tests share: real servers on free ports that stop with the test, what goes wrong around them, and
//! seeded randomness.

mod clock;
mod cluster;
mod excess;
mod fake_store;
mod network;
mod port;
mod process;
mod program;
mod proxy;
mod random;
mod redis;
mod replication;
mod resp;
mod sentinel;
pub mod simulation;
mod tls;
mod usage;

pub use clock::SteppedClock;
pub use cluster::Cluster;
pub use excess::{Bound, Excess};
pub use fake_store::FakeStore;
pub use network::{Network, Place};
pub use process::{Process, wait_at_most, wait_until};
pub use program::ServerProgram;
pub use proxy::{ChaosProxy, Fault};
pub use random::Random;
pub use redis::{RedisServer, RedisServerBuilder};
pub use sentinel::SentinelTrio;
pub use tls::{CertificateFiles, TlsFiles};
pub use usage::Usage;

/// How much more a long run does than an ordinary one: `TESTS_LONG=1`, as `cargo xtask test --long` sets it.
pub fn long_or<T>(long: T, ordinary: T) -> T {
    if std::env::var_os("TESTS_LONG").is_some() { long } else { ordinary }
}
