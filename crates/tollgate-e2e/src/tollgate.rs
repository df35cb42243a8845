//! The `tollgate` server as a process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use crate::{Program, http};

/// A running `tollgate` server on free ports. It is killed when this is dropped.
#[derive(Debug)]
pub struct Tollgate {
    /// Where the API listens.
    pub address: SocketAddr,
    /// Where the admin pages are: the API's address unless the settings turn the admin listener on.
    pub admin: SocketAddr,
    /// The process, its folder and its log.
    pub program: Program,
}

impl Tollgate {
    /// Starts a server with the settings of a YAML file. Without `listen` in them, it listens on a free port of 127.0.0.1.
    ///
    /// # Panics
    /// If the server does not start. The message has its log.
    pub fn start(settings: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let file = folder.path().join("tollgate.yaml");
        let has_listen = settings.lines().any(|line| line.starts_with("listen:"));
        let listen = if has_listen { "" } else { "listen: 127.0.0.1:0\n" };
        std::fs::write(&file, format!("{listen}{settings}")).expect("the temporary folder can be written");
        let mut command = Command::new(binary());
        command.arg("--config").arg(file);
        let mut program = Program::start(command, folder);
        let (address, admin) = program.wait_until("prints its addresses", addresses);
        Self { address, admin, program }
    }

    /// Sends a GET request to the API.
    pub fn get(&self, target: &str) -> http::Response {
        http::get(self.address, target)
    }
}

/// The binary that `TOLLGATE_BINARY` names, else the one that was built in the same profile as this test program.
fn binary() -> PathBuf {
    std::env::var_os("TOLLGATE_BINARY").map_or_else(built_binary, PathBuf::from)
}

/// Finds `target/debug/tollgate` from the path of the test program, `target/debug/deps/NAME`.
fn built_binary() -> PathBuf {
    let test = std::env::current_exe().expect("the test program has a path");
    let binary = test.ancestors().nth(2).expect("the test program is in a target folder").join("tollgate");
    assert!(binary.exists(), "{} is missing: `cargo build` makes it", binary.display());
    binary
}

/// Reads the addresses of the API and of the admin pages from the lines that the server prints when it listens.
fn addresses(log: &str) -> Option<(SocketAddr, SocketAddr)> {
    // The line that follows all addresses.
    let (banner, _) = log.split_once("\nTry: ")?;
    let address = |label: &str| banner.split_once(label)?.1.split_whitespace().next()?.parse().ok();
    let api = address("listens on http://")?;
    Some((api, address("admin:  http://").unwrap_or(api)))
}
