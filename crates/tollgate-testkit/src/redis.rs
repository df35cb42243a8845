//! A real Redis server of its own for a test.

mod builder;

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub use builder::RedisServerBuilder;

use crate::clock::SteppedClock;
use crate::network::Place;
use crate::process::Process;
use crate::resp::{Fault, Reply, ask_socket};
use crate::tls::TlsFiles;

/// The file in a server's directory that holds all it prints. A log file of its own would miss what it says of wrong
/// options.
const LOG: &str = "server.log";

/// A `redis-server` on a socket in a temporary directory. It stops when this is dropped.
#[derive(Debug)]
pub struct RedisServer {
    process: Process,
    command: Command,
    ports: Ports,
    directory: TempDir,
    /// Where it runs, if not where the test does.
    place: Option<Place>,
    /// Kept for as long as the server may read them again.
    _tls: Option<TlsFiles>,
    /// Kept for as long as the server looks at it.
    _clock: Option<SteppedClock>,
}

/// Where a server listens besides its socket.
#[derive(Clone, Copy, Debug, Default)]
struct Ports {
    tcp: Option<u16>,
    tls: Option<u16>,
    bus: Option<u16>,
}

impl RedisServer {
    /// Starts a Redis 7 that listens on its socket only and keeps nothing on disk, and waits until it answers.
    ///
    /// # Panics
    /// If there is no `redis-server`, or it does not start.
    pub fn start() -> Self {
        Self::build().start()
    }

    /// A server of another kind, or with more options.
    pub fn build() -> RedisServerBuilder {
        RedisServerBuilder::default()
    }

    /// The path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("redis.sock")
    }

    /// The address of its socket, as clients want it.
    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    /// Where it listens in plain text.
    ///
    /// # Panics
    /// If it was built without [`RedisServerBuilder::tcp`] and [`RedisServerBuilder::place`].
    pub fn tcp_address(&self) -> SocketAddr {
        self.at(self.ports.tcp.expect("the server was built with tcp()"))
    }

    /// Where it listens with TLS.
    ///
    /// # Panics
    /// If it was built without [`RedisServerBuilder::tls`].
    pub fn tls_address(&self) -> SocketAddr {
        self.at(self.ports.tls.expect("the server was built with tls()"))
    }

    /// Where it talks to the other nodes of its cluster, if not where its port says.
    pub(crate) fn bus_port(&self) -> Option<u16> {
        self.ports.bus
    }

    /// Kills it, without a chance to tidy up, and waits until it is gone.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Kills it if it runs, and starts it again: same ports, same directory, same options. Waits until it answers.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        self.restart_without_waiting();
        self.wait_until_ready().unwrap_or_else(|log| panic!("the server did not start again:\n{log}"));
    }

    /// Like [`Self::restart`], but does not wait: at first it is not there, and then it may refuse everything until it
    /// has loaded what it kept.
    pub fn restart_without_waiting(&mut self) {
        self.kill();
        self.process = Process::start_with_log(&self.command, &self.directory.path().join(LOG));
    }

    /// Stops it where it stands: its connections stay open, and nothing answers on them.
    ///
    /// # Panics
    /// If it has ended.
    pub fn pause(&self) {
        self.process.pause();
    }

    /// Lets it go on after a pause.
    ///
    /// # Panics
    /// If it has ended.
    pub fn resume(&self) {
        self.process.resume();
    }

    /// Whether it stands still.
    pub fn is_paused(&self) -> bool {
        self.process.is_paused()
    }

    /// The number of its process.
    pub fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Runs `redis-cli` on its socket and gives back what that printed. A server's refusal is printed like an answer.
    ///
    /// # Panics
    /// If `redis-cli` fails, as it does when it cannot reach the server.
    pub fn cli(&self, arguments: &[&str]) -> String {
        redis_cli(Command::new("redis-cli").arg("-s").arg(self.socket()).args(arguments))
    }

    /// Asks it on its socket, without a program in between.
    fn ask(&self, command: &[&str]) -> Result<Reply, Fault> {
        ask_socket(&self.socket(), command)
    }

    /// Waits until it answers, be it that the question is not allowed. If it ends instead, the end of its log.
    fn wait_until_ready(&mut self) -> Result<(), String> {
        let start = Instant::now();
        loop {
            match self.ask(&["PING"]) {
                Ok(_) => return Ok(()),
                // It is there, but its data is not yet.
                Err(Fault::Refused(why)) if why.starts_with("LOADING") => {}
                Err(Fault::Refused(_)) => return Ok(()),
                Err(Fault::Unreachable(_)) => {}
            }
            if self.process.has_ended() || start.elapsed() > Duration::from_secs(10) {
                return Err(self.log_end());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn at(&self, port: u16) -> SocketAddr {
        (ip_of(self.place.as_ref()), port).into()
    }

    fn log_end(&self) -> String {
        let log = fs::read_to_string(self.directory.path().join(LOG)).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

/// Runs a `redis-cli` to its end and gives back what it printed.
pub(crate) fn redis_cli(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|why| panic!("cannot start redis-cli: {why}; `cargo xtask test` installs it"));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let status = output.status;
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(status.success(), "{command:?} ended with {status}:\n{printed}{complaint}");
    printed
}

/// The address of a server, on a machine of its own or on the test's.
fn ip_of(place: Option<&Place>) -> Ipv4Addr {
    place.map_or(Ipv4Addr::LOCALHOST, Place::ip)
}
