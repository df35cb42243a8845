//! Three nodes and a program that embeds the library, on one store, under load, with a timeline of what was done to them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use tollgate_testkit::{Process, Usage, wait_at_most};

use crate::http::Load;
use crate::program::program;
use crate::record::{Record, now_us};
use crate::traffic::CONFIG;
use crate::worker::Summary;

/// Processes of the service.
pub(crate) const NODES: usize = 3;
/// All that share a limit: the nodes and the program that embeds the library.
pub(crate) const SHARERS: u64 = NODES as u64 + 1;

/// How long the parts of a run take.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Before the fault: what the load is like without it.
    pub baseline: Duration,
    /// With the fault.
    pub fault: Duration,
    /// After it.
    pub recovery: Duration,
}

impl Pace {
    /// As the published table has it.
    pub const FULL: Self = Self {
        baseline: Duration::from_secs(4),
        fault: Duration::from_secs(6),
        recovery: Duration::from_secs(4),
    };
    /// For tests, which judge what is decided and not how fast.
    pub const SHORT: Self = Self {
        baseline: Duration::from_millis(2_500),
        fault: Duration::from_millis(1_500),
        recovery: Duration::from_millis(2_500),
    };
}

/// How a rig is set up, beside its store.
pub(crate) struct Setup {
    pub(crate) seed: u64,
    /// Checks a second by the program that embeds the library.
    pub(crate) rate: u64,
    /// How many files a node may open.
    pub(crate) files_max: Option<u32>,
    /// Extra environment of nodes and worker.
    pub(crate) environment: Vec<(String, String)>,
}

impl Setup {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, rate: 1_000, files_max: None, environment: Vec::new() }
    }
}

/// A running system.
pub(crate) struct Rig {
    pub(crate) nodes: Vec<Node>,
    worker: Process,
    records: PathBuf,
    /// A second program that embeds the library, and where its records go.
    flood: Option<(Process, PathBuf)>,
    load: Load,
    timeline: Vec<(u64, String)>,
    before: Vec<(u32, Usage)>,
    directory: TempDir,
    seed: u64,
}

/// A `tollgate` process.
pub(crate) struct Node {
    pub(crate) process: Process,
    pub(crate) address: SocketAddr,
    log: PathBuf,
}

impl Node {
    fn start(directory: &std::path::Path, number: usize, store: &str, setup: &Setup) -> Self {
        let config = directory.join(format!("node{number}.yaml"));
        std::fs::write(&config, CONFIG).expect("the configuration is written");
        let log = directory.join(format!("node{number}.log"));
        let mut command = program("tollgate");
        command.args(["--listen", "127.0.0.1:0", "--store", store, "--config"]).arg(&config);
        command.envs(setup.environment.iter().cloned());
        let process = match setup.files_max {
            Some(most) => Process::start_with_files_max(&command, &log, most),
            None => Process::start_with_log(&command, &log),
        };
        let mut address = None;
        wait_at_most(Duration::from_secs(60), "a node listens", || {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let said =
                text.split_once("listens on http://").and_then(|(_, rest)| Some(rest.split_once('\n')?.0));
            address = said.and_then(|it| it.parse().ok());
            address.is_some()
        });
        Self { process, address: address.expect("just waited for"), log }
    }

    /// How many share the store, as this node has heard.
    fn counts(&self) -> Option<u64> {
        let info = get(self.address, "/actuator/info")?;
        let (_, body) = info.split_once("\r\n\r\n")?;
        serde_json::from_str::<serde_json::Value>(body).ok()?["store"]["nodes"].as_u64()
    }

    pub(crate) fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Rig {
    /// Starts everything on a store and lets it run until all nodes know of each other.
    pub(crate) fn start(store: &str, setup: Setup) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let nodes: Vec<_> =
            (0..NODES).map(|number| Node::start(directory.path(), number, store, &setup)).collect();
        let records = directory.path().join("records");
        let mut worker = worker(store, setup.rate, setup.seed, &records);
        worker.envs(setup.environment.iter().cloned());
        let worker = Process::start_with_log(&worker, &directory.path().join("worker.log"));
        let addresses: Vec<_> = nodes.iter().map(|node| node.address).collect();
        let load = Load::start(&addresses, setup.seed);
        let (timeline, seed) = (Vec::new(), setup.seed);
        let (flood, before) = (None, Vec::new());
        let mut rig = Self { nodes, worker, records, flood, load, timeline, before, directory, seed };
        rig.mark("load begins");
        wait_at_most(Duration::from_secs(60), "the nodes know of each other", || {
            rig.nodes.iter().all(|node| node.counts() == Some(SHARERS))
        });
        // Each says once a second that it lives: then the last has heard of all others, too.
        std::thread::sleep(Duration::from_millis(1_300));
        rig.before = rig.usage();
        rig
    }

    /// Notes that something happens now.
    pub(crate) fn mark(&mut self, what: &str) -> u64 {
        let now = now_us();
        self.timeline.push((now, what.to_owned()));
        now
    }

    pub(crate) fn wait(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Starts a second program that embeds the library: it makes `rate` checks a second, each on a new key.
    pub(crate) fn start_flood(&mut self, store: &str, rate: u64) {
        let records = self.directory.path().join("flood");
        let mut flood = worker(store, rate, self.seed + 1, &records);
        flood.arg("--new-keys");
        let log = self.directory.path().join("flood.log");
        self.flood = Some((Process::start_with_log(&flood, &log), records));
    }

    /// Ends it. Returns what became of its checks.
    pub(crate) fn end_flood(&mut self) -> Vec<Record> {
        let Some((mut flood, records)) = self.flood.take() else { return Vec::new() };
        flood.terminate();
        flood.wait_for_end(Duration::from_secs(20));
        read_records(&records).0
    }

    fn usage(&self) -> Vec<(u32, Usage)> {
        let nodes = self.nodes.iter().map(|node| node.process.id());
        nodes.chain([self.worker.id()]).filter(|id| is_alive(*id)).map(|id| (id, Usage::of(id))).collect()
    }

    /// Stops everything and gathers what was seen.
    pub(crate) fn finish(mut self) -> Run {
        let end = self.mark("load ends");
        let after = self.usage();
        let mut records = self.load.finish();
        self.worker.terminate();
        let worker_exit = self.worker.wait_for_end(Duration::from_secs(10));
        let (decided, summary) = read_records(&self.records);
        records.extend(decided);
        records.sort_by_key(|record| record.at_us);
        let mut logs = std::fs::read_to_string(self.directory.path().join("worker.log")).unwrap_or_default();
        let mut exits = vec![worker_exit];
        for node in &mut self.nodes {
            if !node.process.has_ended() {
                node.process.terminate();
            }
            exits.push(node.process.wait_for_end(Duration::from_secs(15)));
            logs += &node.log_text();
        }
        Run {
            records,
            timeline: self.timeline,
            before: self.before,
            after,
            summary,
            logs,
            exits,
            end,
            seed: self.seed,
        }
    }
}

/// A program that embeds the library.
fn worker(store: &str, rate: u64, seed: u64, records: &Path) -> Command {
    let mut worker = program("worker");
    worker.args(["--store", store, "--rate", &rate.to_string(), "--seed", &seed.to_string()]);
    worker.arg("--out").arg(records);
    worker
}

/// What a program that embeds the library has written: its records, and at the end its summary.
fn read_records(path: &Path) -> (Vec<Record>, Option<Summary>) {
    let written = std::fs::read_to_string(path).unwrap_or_default();
    let (mut records, mut summary) = (Vec::new(), None);
    for line in written.lines() {
        match serde_json::from_str::<Record>(line) {
            Ok(record) => records.push(record),
            Err(_) => summary = serde_json::from_str(line).ok(),
        }
    }
    (records, summary)
}

/// What a node answers to one request on a connection of its own, if it does.
pub(crate) fn get(address: SocketAddr, path: &str) -> Option<String> {
    let patience = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&address, patience).ok()?;
    stream.set_read_timeout(Some(patience)).ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

fn is_alive(id: u32) -> bool {
    std::path::Path::new(&format!("/proc/{id}/status")).exists()
}

/// All that was seen of a run.
pub(crate) struct Run {
    /// By time.
    pub(crate) records: Vec<Record>,
    pub(crate) timeline: Vec<(u64, String)>,
    /// By process: of the nodes, then of the worker.
    pub(crate) before: Vec<(u32, Usage)>,
    pub(crate) after: Vec<(u32, Usage)>,
    pub(crate) summary: Option<Summary>,
    pub(crate) logs: String,
    /// Of the worker, then of the nodes.
    pub(crate) exits: Vec<Option<i32>>,
    pub(crate) end: u64,
    pub(crate) seed: u64,
}

impl Run {
    /// A run without records.
    pub(crate) fn empty(seed: u64) -> Self {
        Self {
            records: Vec::new(),
            timeline: Vec::new(),
            before: Vec::new(),
            after: Vec::new(),
            summary: None,
            logs: String::new(),
            exits: Vec::new(),
            end: 0,
            seed,
        }
    }
}
