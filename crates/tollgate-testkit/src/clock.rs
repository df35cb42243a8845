//! A wall clock for other programs that a test can set while they run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock};

use tempfile::TempDir;

/// A clock that starts with the true time. It is for programs that are linked dynamically and get its
/// [environment](Self::environment), and only for their time of day: what counts from boot stays true. Its file goes with the
/// last clone of this, and a server that uses it keeps one.
#[derive(Clone, Debug)]
pub struct SteppedClock {
    directory: Arc<Directory>,
}

#[derive(Debug)]
struct Directory(TempDir);

impl SteppedClock {
    /// A clock that is right.
    ///
    /// # Panics
    /// If its file cannot be written.
    #[expect(clippy::new_without_default, reason = "it makes a file")]
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let clock = Self { directory: Arc::new(Directory(directory)) };
        clock.step(0);
        clock
    }

    /// Sets the clock ahead of the true time by some microseconds, or behind it if negative. From then on it goes on at
    /// the usual pace. Programs see it the next time they ask.
    ///
    /// # Panics
    /// If its file cannot be written.
    pub fn step(&self, offset_us: i64) {
        let sign = if offset_us < 0 { '-' } else { '+' };
        let (seconds, micros) = (offset_us.unsigned_abs() / 1_000_000, offset_us.unsigned_abs() % 1_000_000);
        let next = self.directory.0.path().join("next");
        // Renamed into place, so that no reader sees half a number.
        fs::write(&next, format!("{sign}{seconds}.{micros:06}\n"))
            .and_then(|()| fs::rename(&next, self.file()))
            .expect("a file in the temporary directory can be written");
    }

    /// What makes a program use this clock.
    ///
    /// # Panics
    /// If there is no `faketime`.
    pub fn environment(&self) -> Vec<(String, String)> {
        let file = self.file().to_string_lossy().into_owned();
        // The C library follows by name, so that memory comes from it. Redis's own allocator asks for the time before the
        // first library is ready to tell it.
        let libraries = format!("{} libc.so.6", library());
        let pairs = [
            ("LD_PRELOAD", libraries.as_str()),
            ("FAKETIME_TIMESTAMP_FILE", &file),
            // Else it would be read every ten seconds.
            ("FAKETIME_NO_CACHE", "1"),
            // Under its older name, too.
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ("DONT_FAKE_MONOTONIC", "1"),
        ];
        pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    fn file(&self) -> PathBuf {
        self.directory.0.path().join("offset")
    }
}

impl Drop for Directory {
    /// Removes what programs under such clocks leave in shared memory when they are killed, if they are gone.
    fn drop(&mut self) {
        for entry in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let names = ["faketime_shm_", "sem.faketime_sem_"];
            let owner = names.iter().find_map(|start| name.strip_prefix(start));
            if owner.is_some_and(|id| !Path::new("/proc").join(id).exists()) {
                // Another process may have been quicker.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// The library that does it. Where it lies differs from system to system, and the program that comes with it knows.
fn library() -> &'static str {
    static LIBRARY: LazyLock<String> = LazyLock::new(|| {
        let output = Command::new("faketime").args(["-f", "+0", "env"]).env_remove("LD_PRELOAD").output();
        let output = output
            .unwrap_or_else(|why| panic!("cannot start faketime: {why}; `cargo xtask test` installs it"));
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let library = printed.lines().find_map(|line| line.strip_prefix("LD_PRELOAD="));
        library.expect("faketime names its library").to_owned()
    });
    &LIBRARY
}
