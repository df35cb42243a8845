//! A program with a temporary folder and a log file.

use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollgate_testkit::Process;

/// How long a program may take to start. Envoy needs about a second; a busy machine needs several times that.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A running program. It is killed when this is dropped, also if the test panics or is killed.
#[derive(Debug)]
pub struct Program {
    process: Process,
    folder: TempDir,
}

impl Program {
    /// Starts a program in a folder, which is removed when the program is dropped.
    ///
    /// # Panics
    /// If the program cannot be started.
    pub fn start(mut command: Command, folder: TempDir) -> Self {
        command.current_dir(folder.path());
        let process = Process::start_with_log(&command, &folder.path().join(LOG));
        Self { process, folder }
    }

    /// Waits until the program accepts connections on an address.
    ///
    /// # Panics
    /// If it ends before that or takes longer than 30 seconds. The message has the program's log.
    pub fn wait_for_listener(&mut self, address: SocketAddr) {
        self.wait_until(&format!("listens on {address}"), |_| TcpStream::connect(address).ok());
    }

    /// Waits until `look`, which gets the program's log, finds something.
    ///
    /// # Panics
    /// If the program ends before that or takes longer than 30 seconds. The message has the program's log.
    pub fn wait_until<T>(&mut self, what: &str, look: impl Fn(&str) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            let has_ended = self.process.has_ended();
            let log = self.log();
            if let Some(found) = look(&log) {
                return found;
            }
            let name = self.process.name();
            assert!(!has_ended, "{name} ended before it {what}. Its log:\n{log}");
            assert!(
                start.elapsed() < START_TIMEOUT,
                "{name} took more than 30 s until it {what}. Its log:\n{log}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The text that the program has written to its standard output and standard error.
    ///
    /// # Panics
    /// If the log file cannot be read.
    pub fn log(&self) -> String {
        let bytes = std::fs::read(self.folder.path().join(LOG)).expect("the log file can be read");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The process, to signal, pause or kill it.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}

/// The log file in the program's folder.
const LOG: &str = "program.log";
