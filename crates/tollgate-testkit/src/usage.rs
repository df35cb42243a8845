//! What a process uses of the machine, as the system says.

use std::fs;
use std::time::Duration;

/// The system counts a process's time in ticks of a hundredth of a second, on every machine that Linux runs on today.
const TICK: Duration = Duration::from_millis(10);

/// What a process uses, at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Memory that it has touched and that is not swapped out.
    pub rss_bytes: u64,
    /// Files, sockets and whatever else has a descriptor.
    pub open_files: usize,
    /// Its threads, the first one included.
    pub threads: usize,
    /// Processor time since it began, its own and the system's on its behalf.
    pub cpu: Duration,
}

impl Usage {
    /// What a process uses now.
    ///
    /// # Panics
    /// If there is no such process, or it is another user's.
    pub fn of(process_id: u32) -> Self {
        let read = |file: &str| {
            let path = format!("/proc/{process_id}/{file}");
            fs::read_to_string(&path).unwrap_or_else(|why| panic!("cannot read {path}: {why}"))
        };
        let status = read("status");
        let number = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or_default()
        };
        let files =
            fs::read_dir(format!("/proc/{process_id}/fd")).expect("the process's files can be listed");
        // The name of the program is in brackets and may itself hold spaces and brackets. It is the second word of the
        // line, and the times are the 14th and the 15th.
        let stat = read("stat");
        let (_, words) = stat.rsplit_once(") ").expect("the name of the program is in brackets");
        let ticks: u32 = words.split(' ').skip(11).take(2).filter_map(|word| word.parse::<u32>().ok()).sum();
        Self {
            rss_bytes: number("VmRSS:") * 1024,
            open_files: files.count(),
            threads: usize::try_from(number("Threads:")).expect("threads can be counted"),
            cpu: TICK * ticks,
        }
    }
}
