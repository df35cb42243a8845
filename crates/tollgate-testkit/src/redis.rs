//! A real Redis server of its own for a test.

use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use crate::process::{Process, wait_until};

/// A `redis-server` on a socket in a temporary directory, without persistence. It stops when this is dropped.
#[derive(Debug)]
pub struct RedisServer {
    process: Process,
    directory: TempDir,
}

impl RedisServer {
    /// Starts a server and waits until it listens.
    ///
    /// # Panics
    /// If there is no `redis-server`, or it does not start.
    pub fn start() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let mut command = Command::new("redis-server");
        command.args([
            "--port",
            "0",
            "--save",
            "",
            "--appendonly",
            "no",
            "--unixsocket",
            "redis.sock",
            "--dir",
        ]);
        command.arg(directory.path()).current_dir(directory.path());
        let mut server = Self { process: Process::start(&command), directory };
        wait_until("redis-server listens", || {
            assert!(!server.process.has_ended(), "redis-server ended at once");
            std::os::unix::net::UnixStream::connect(server.socket()).is_ok()
        });
        server
    }

    /// The path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("redis.sock")
    }

    /// Its address, as clients want it.
    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }
}
