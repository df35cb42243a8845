//! A program that runs as long as the test does, and no longer.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running program. It is killed when this is dropped; should the test itself be killed, the system kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts a program.
    ///
    /// # Panics
    /// If there is no such program: `cargo xtask test` installs what the tests need.
    pub fn start(command: &Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        // `setpriv` asks the system to kill the program when the thread that started it ends, so the thread must be one
        // that lives as long as the program.
        let mut guarded = Command::new("setpriv");
        guarded.args(["--pdeathsig", "KILL"]).arg(command.get_program()).args(command.get_args());
        if let Some(directory) = command.get_current_dir() {
            guarded.current_dir(directory);
        }
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => guarded.env(key, value),
                None => guarded.env_remove(key),
            };
        }
        guarded.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let child = guarded.spawn();
            let id = child.as_ref().map(Child::id).ok();
            if send.send(child).is_ok() {
                // Until the program is gone, whoever has ended it.
                while id.is_some_and(is_running) {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        });
        let child = receive.recv().expect("the starting thread answers");
        let child =
            child.unwrap_or_else(|why| panic!("cannot start {name}: {why}; `cargo xtask test` installs it"));
        Self { child, name }
    }

    /// The program's process number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// The program's name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone already, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_running(id: u32) -> bool {
    std::path::Path::new(&format!("/proc/{id}")).exists()
}

/// Waits until something is true of a real program, which cannot be told the time.
///
/// # Panics
/// After ten seconds.
pub fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited ten seconds until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
