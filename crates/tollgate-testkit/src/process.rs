//! A program that runs as long as the test does, and no longer.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

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
        Self::start_with(&[], command, Stdio::null(), Stdio::null())
    }

    /// Starts a program that writes all it prints to the end of a file.
    ///
    /// # Panics
    /// If there is no such program, or the file cannot be written.
    pub fn start_with_log(command: &Command, log: &Path) -> Self {
        Self::start_with(&[], command, open(log), open(log))
    }

    /// Like [`Self::start_with_log`], with a limit on the files and sockets that the program may have open.
    ///
    /// # Panics
    /// If there is no such program, or the file cannot be written.
    pub fn start_with_files_max(command: &Command, log: &Path, files_max: u32) -> Self {
        let limit = format!("--nofile={files_max}:{files_max}");
        Self::start_with(&["prlimit", &limit], command, open(log), open(log))
    }

    /// Starts a program through another one, which changes itself and then becomes it.
    fn start_with(through: &[&str], command: &Command, output: Stdio, errors: Stdio) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        // `setpriv` asks the system to kill the program when the thread that started it ends, so the thread must be one
        // that lives as long as the program.
        let mut guarded = Command::new("setpriv");
        guarded.args(["--pdeathsig", "KILL"]).args(through);
        guarded.arg(command.get_program()).args(command.get_args());
        if let Some(directory) = command.get_current_dir() {
            guarded.current_dir(directory);
        }
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => guarded.env(key, value),
                None => guarded.env_remove(key),
            };
        }
        guarded.stdin(Stdio::null()).stdout(output).stderr(errors);
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let child = guarded.spawn();
            let id = child.as_ref().map(Child::id).ok();
            if send.send(child).is_ok() {
                // Until the program has ended, for whatever reason.
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

    /// Kills it, without a chance to tidy up, and waits until it is gone.
    pub fn kill(&mut self) {
        // It may be gone already, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks it to end by itself (`SIGTERM`), and does not wait.
    ///
    /// # Panics
    /// If it has ended.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Tells it to read its files again (`SIGHUP`), and does not wait.
    ///
    /// # Panics
    /// If it has ended.
    pub fn hang_up(&self) {
        self.signal(Signal::HUP);
    }

    /// Waits until it ends by itself, and gives back its exit code: as shells have it, 128 and the signal's number if
    /// a signal ended it. `None` if it still runs after that time.
    pub fn wait_for_end(&mut self, within: Duration) -> Option<i32> {
        let start = Instant::now();
        loop {
            let status =
                self.child.try_wait().unwrap_or_else(|why| panic!("cannot watch {}: {why}", self.name));
            if let Some(status) = status {
                return status.code().or_else(|| status.signal().map(|signal| 128 + signal));
            }
            if start.elapsed() >= within {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops it where it stands: its connections stay open, and nothing answers on them.
    ///
    /// # Panics
    /// If it has ended.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        // The signal is delivered some time after it was sent; a test relies on the silence from here on.
        wait_until(&format!("{} is paused", self.name), || self.is_paused());
    }

    /// Lets it go on after a pause.
    ///
    /// # Panics
    /// If it has ended.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
        wait_until(&format!("{} goes on", self.name), || !self.is_paused());
    }

    /// Whether it stands still.
    pub fn is_paused(&self) -> bool {
        // The state is the word after the name, which is in brackets and may itself hold spaces and brackets.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id())).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    }

    fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.id()).ok().and_then(Pid::from_raw).expect("a process has a number");
        kill_process(id, signal).unwrap_or_else(|why| panic!("cannot signal {}: {why}", self.name));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn open(log: &Path) -> Stdio {
    File::options().create(true).append(true).open(log).expect("the log can be written").into()
}

fn is_running(id: u32) -> bool {
    Path::new(&format!("/proc/{id}")).exists()
}

/// Waits until something is true of a real program, which cannot be told the time.
///
/// # Panics
/// After ten seconds.
pub fn wait_until(what: &str, is_true: impl FnMut() -> bool) {
    wait_at_most(Duration::from_secs(10), what, is_true);
}

/// Waits until something is true of real programs that need longer, such as an election among them.
///
/// # Panics
/// After the limit.
pub fn wait_at_most(limit: Duration, what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < limit, "waited {} seconds until {what}", limit.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
}
