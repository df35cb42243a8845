//! How a program is held, ended and looked at.

use std::fs;
use std::process::Command;
use std::time::Duration;

use tollgate_testkit::{Process, Usage, wait_until};

const PATIENCE: Duration = Duration::from_secs(10);

#[test]
fn a_program_that_is_asked_to_end_says_how_it_ended() {
    let cases = [
        // The signal itself ends it.
        ("echo ready; exec sleep 60", 128 + 15),
        ("trap 'exit 7' TERM; echo ready; while true; do sleep 0.01; done", 7),
    ];
    for (script, code) in cases {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut process = Process::start_with_log(Command::new("sh").args(["-c", script]), &log);
        wait_until("the program is ready for the signal", || fs::read_to_string(&log).unwrap() == "ready\n");
        assert_eq!(process.wait_for_end(Duration::ZERO), None);
        process.terminate();
        assert_eq!(process.wait_for_end(PATIENCE), Some(code), "{script}");
        assert!(process.has_ended());
    }
}

#[test]
fn a_program_may_be_held_to_few_files() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n; ulimit -H -n"]);
    let mut process = Process::start_with_files_max(&command, &log, 64);
    assert_eq!(process.wait_for_end(PATIENCE), Some(0));
    assert_eq!(fs::read_to_string(log).unwrap(), "64\n64\n");
}

#[test]
fn usage_follows_what_a_process_does() {
    let usage = Usage::of(std::process::id());
    assert!(usage.rss_bytes > 1 << 20 && usage.threads >= 2, "{usage:?}");

    // What this process hands down to others is in both.
    let idle = Process::start(Command::new("sleep").arg("60"));
    let busy = Process::start(Command::new("sh").args(["-c", "exec 7</dev/null; while true; do :; done"]));
    wait_until("it has one file more", || {
        Usage::of(busy.id()).open_files == Usage::of(idle.id()).open_files + 1
    });
    wait_until("it has used a tenth of a second", || Usage::of(busy.id()).cpu >= Duration::from_millis(100));
    assert_eq!(Usage::of(busy.id()).threads, 1);
}
