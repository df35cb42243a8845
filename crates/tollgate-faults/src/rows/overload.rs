//! More work than the store or the machine can do. The store is reachable all the time, so no request is admitted by mode `open`.

use std::process::{Child, Command, Stdio};

use tollgate_testkit::RedisServer;

use super::play;
use crate::judge::Judge;
use crate::record::Ground;
use crate::rig::{Pace, Setup};

/// Checks a second that a client makes: several times as many as the store decides beside the nodes on two cores.
const FLOOD_RATE: u64 = 150_000;
/// Processes that do nothing but keep cores busy.
const BUSY_PROCESSES: usize = 7;
/// New keys a second that fill a store. Each check is answered in time.
const NEW_KEYS_RATE: u64 = 5_000;

pub(super) fn flooded(pace: Pace, seed: u64) -> Option<Judge> {
    let mut server = RedisServer::build().tcp().start();
    let store = format!("redis://{}", server.tcp_address());
    let mut flooded = Vec::new();
    let (mut judge, parts) = play(
        &store,
        Setup::new(seed),
        pace,
        &mut server,
        ("a client makes 150,000 checks a second", |_, rig| rig.start_flood(&store, FLOOD_RATE)),
        ("the client ends", |_, rig| flooded = rig.end_flood()),
    );
    judge.none_open(parts.fault, parts.healed);
    let open = flooded.iter().filter(|it| it.ground == Ground::Open).count();
    let exact = flooded.iter().filter(|it| it.ground == Ground::Exact).count();
    let told = format!("{open} open of {}, {exact} by the store", flooded.len());
    judge.decision("none of the client's own checks let through", told, open == 0 && !flooded.is_empty());
    judge.excess(0, "");
    judge.recovered(parts.healed);
    judge.no_leak();
    Some(judge)
}

/// Processes that end with this.
struct Busy(Vec<Child>);

impl Busy {
    fn start() -> Self {
        let busy = |_| {
            let mut shell = Command::new("sh");
            shell.args(["-c", "while :; do :; done"]).stdout(Stdio::null()).spawn().expect("a shell starts")
        };
        Self((0..BUSY_PROCESSES).map(busy).collect())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub(super) fn saturated(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    let store = format!("redis://{}", server.tcp_address());
    let mut busy = None;
    let (mut judge, parts) = play(
        &store,
        Setup::new(seed),
        pace,
        &mut busy,
        ("seven processes keep two cores busy", |busy, _| *busy = Some(Busy::start())),
        ("they end", |busy, _| *busy = None),
    );
    judge.none_open(parts.fault, parts.healed);
    let (mut all, mut exact) = (0_u64, 0);
    for it in judge.between(parts.fault, parts.healed) {
        (all, exact) = (all + 1, exact + u64::from(it.ground == Ground::Exact));
    }
    judge.measure(
        "by the store >= 99.5%",
        format!("{exact} of {all}"),
        (all - exact) * 200 <= all && all > 0,
    );
    judge.excess(0, "");
    judge.no_leak();
    Some(judge)
}

pub(super) fn filled(pace: Pace, seed: u64) -> Option<Judge> {
    let mut server = RedisServer::build().tcp().args(&["--maxmemory-policy", "noeviction"]).start();
    let store = format!("redis://{}", server.tcp_address());
    let mut flooded = Vec::new();
    let (mut judge, parts) = play(
        &store,
        Setup::new(seed),
        pace,
        &mut server,
        ("new keys fill a store with a megabyte left", |server: &mut RedisServer, rig| {
            let memory = server.cli(&["INFO", "memory"]);
            let used = memory.lines().find_map(|line| line.strip_prefix("used_memory:"));
            let used: u64 =
                used.and_then(|used| used.trim().parse().ok()).expect("the server tells its memory");
            server.cli(&["CONFIG", "SET", "maxmemory", &(used + (1 << 20)).to_string()]);
            rig.start_flood(&store, NEW_KEYS_RATE);
        }),
        ("the store has room again", |server, rig| {
            flooded = rig.end_flood();
            server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
        }),
    );
    judge.none_open(parts.fault, parts.healed);
    let on = |basis| flooded.iter().filter(|it| it.ground == basis).count();
    let told = format!(
        "{} open, {} locally, {} by the store",
        on(Ground::Open),
        on(Ground::Local),
        on(Ground::Exact)
    );
    judge.decision(
        "new keys: none let through once the store is full",
        told,
        on(Ground::Open) == 0 && on(Ground::Local) > 0,
    );
    judge.excess(0, "");
    judge.latency(parts.begun, parts.fault, parts.healed);
    judge.recovered(parts.healed);
    judge.no_leak();
    Some(judge)
}
