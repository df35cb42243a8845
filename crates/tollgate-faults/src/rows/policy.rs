//! Policies that change under load.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tollgate_testkit::{Bound, RedisServer, wait_until};

use super::{Parts, judge_unnoticed};
use crate::judge::Judge;
use crate::record::now_us;
use crate::rig::{Pace, Rig, Setup, get};

/// Policies that are pushed, good and bad.
const CHANGES: usize = 100;
/// The interval of policies with a mistake among them.
const WRONG_EVERY: usize = 5;
/// Users that ask far more often than they are admitted.
const USERS: u64 = 3;
/// Clients of each node, and the pause between two requests of one.
const CLIENTS: usize = 2;
const PAUSE: Duration = Duration::from_millis(8);

/// The limits that take turns. The larger one bounds what may be admitted, the smaller one what must be.
const SMALL: Bound = Bound { burst: 20, permits: 10, period_us: 1_000_000 };
const LARGE: Bound = Bound { burst: 60, permits: 30, period_us: 1_000_000 };

fn policy(number: usize) -> String {
    let Bound { burst, permits, .. } = if number.is_multiple_of(2) { LARGE } else { SMALL };
    let field = if number % WRONG_EVERY == WRONG_EVERY - 1 { "limt" } else { "limit" };
    format!("rules: [{{ name: hot, key: user, {field}: {permits}/s burst {burst} }}]\n")
}

/// One answer.
struct Seen {
    at_us: u64,
    took_us: u64,
    user: u64,
    status: u16,
    /// Whether the store has decided.
    is_exact: bool,
}

pub(super) fn pushed(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    let mut rig = Rig::start(&format!("redis://{}", server.tcp_address()), Setup::new(seed));
    let addresses: Vec<_> = rig.nodes.iter().map(|node| node.address).collect();
    let mut admins: Vec<_> = addresses.iter().map(|address| Connection::to(*address)).collect();
    let mut put = |number: usize, text: &str| {
        let node = number % admins.len();
        admins[node].ask("PUT", "/admin/policy", text)
    };
    put(0, &policy(0));
    let knows =
        |address: &SocketAddr| get(*address, "/admin/policy").is_some_and(|it| it.contains(r#""rules":1"#));
    wait_until("all nodes have heard of the first", || addresses.iter().all(knows));
    let begun = rig.mark("baseline");
    let load = Load::start(&addresses);
    rig.wait(pace.baseline);
    let fault = rig.mark("100 policies are pushed");
    let (mut taken, mut refused, mut undone, mut others) = (0, 0, 0, 0);
    for number in 1..=CHANGES {
        match put(number, &policy(number)).map(|(status, _)| status) {
            Some(200) => taken += 1,
            Some(422) => refused += 1,
            // The store was slower than a second, and the push fails with that error.
            Some(503) => undone += 1,
            Some(_) | None => others += 1,
        }
        rig.wait(pace.fault / CHANGES as u32);
    }
    let healed = rig.mark("the last is in force");
    rig.wait(pace.recovery);
    let seen = load.finish();
    let mut judge = Judge::of(rig.finish());
    let wrong = CHANGES / WRONG_EVERY;
    judge.decision(
        format!("{} in force, {wrong} refused", CHANGES - wrong),
        format!("{taken} and {refused}, {undone} told that the store is slow, others {others}"),
        (taken + undone, refused, others) == (CHANGES - wrong, wrong, 0) && taken > undone,
    );
    let failed = seen.iter().filter(|it| ![200, 429].contains(&it.status)).count();
    judge.decision(
        "failed requests 0",
        format!("{failed} of {}", seen.len()),
        failed == 0 && !seen.is_empty(),
    );
    let mut by_user: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
    let alone = seen.iter().filter(|it| it.status == 200 && !it.is_exact).count();
    judge.note("admitted without the store", alone);
    for it in seen.iter().filter(|it| it.status == 200 && it.is_exact) {
        by_user.entry(it.user).or_default().push((it.at_us, 1));
    }
    let slowest = seen.iter().filter(|it| it.status == 200).map(|it| it.took_us).max().unwrap_or(0);
    let tolerance = (LARGE.permits * slowest).div_ceil(LARGE.period_us) + 1;
    let excess = by_user.values_mut().map(|it| LARGE.excess(it).permits).max().unwrap_or(0);
    judge.decision(
        "excess 0 over the larger limit",
        format!("{excess} (noise {tolerance})"),
        excess <= tolerance,
    );
    let least = by_user.values().map(Vec::len).min().unwrap_or(0) as u64;
    let span_us = seen.last().map_or(0, |it| it.at_us) - seen.first().map_or(0, |it| it.at_us);
    let wanted = SMALL.permits * span_us / SMALL.period_us;
    judge.decision(
        format!("each user at least the smaller limit: {wanted}"),
        least,
        least * 10 >= wanted * 9,
    );
    Some(judge_unnoticed(judge, &Parts { begun, fault, mending: healed, healed }, 0, ""))
}

/// How often the store loses everything.
const LOSSES: u32 = 5;
/// Nodes poll the store five times a second. Within this time after a loss, one of them has written the policy back.
const WRITTEN_BACK_WITHIN: Duration = Duration::from_secs(1);

pub(super) fn lost(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    let mut rig = Rig::start(&format!("redis://{}", server.tcp_address()), Setup::new(seed));
    let addresses: Vec<_> = rig.nodes.iter().map(|node| node.address).collect();
    let versions = || -> Vec<Option<String>> { addresses.iter().map(|address| version(*address)).collect() };
    let of_all = |versions: &[Option<String>]| match versions {
        [Some(first), others @ ..] if others.iter().all(|it| it.as_ref() == Some(first)) => {
            Some(first.clone())
        }
        _ => None,
    };
    let own = of_all(&versions());
    Connection::to(addresses[0]).ask("PUT", "/admin/policy", &policy(0));
    wait_until("all nodes go by the first policy", || of_all(&versions()).is_some_and(|it| Some(it) != own));
    let first = of_all(&versions());
    rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark("FLUSHALL, again and again");
    let (mut kept, mut written_back) = (0, 0);
    for _ in 0..LOSSES {
        server.cli(&["FLUSHALL"]);
        rig.wait((pace.fault / LOSSES).max(WRITTEN_BACK_WITHIN));
        kept += u32::from(versions().iter().all(|it| *it == first));
        written_back += u32::from(server.cli(&["EXISTS", "rate_limiter:{control}:policy"]).trim() == "1");
    }
    // The node that is told has heard nothing of the others since the last loss.
    server.cli(&["FLUSHALL"]);
    let pushed =
        Connection::to(addresses[1]).ask("PUT", "/admin/policy", &policy(1)).map(|(status, _)| status);
    let healed = rig.mark("another policy is pushed");
    rig.wait(WRITTEN_BACK_WITHIN);
    let last = of_all(&versions());
    rig.wait(pace.recovery);
    let is_the_same = last.is_some() && last == of_all(&versions());
    let mut judge = Judge::of(rig.finish());
    judge.decision(
        "the pushed policy stays in force on all nodes",
        format!("{kept} of {LOSSES} times"),
        kept == LOSSES,
    );
    judge.decision(
        "a node writes it back",
        format!("{written_back} of {LOSSES} times"),
        written_back == LOSSES,
    );
    judge.decision(
        "all nodes go by the policy that is pushed afterwards",
        format!("{last:?} after {first:?}"),
        pushed == Some(200) && is_the_same && last != first,
    );
    judge.none_open(fault, healed);
    judge.no_leak();
    Some(judge)
}

/// The version of the policy that a node goes by.
fn version(node: SocketAddr) -> Option<String> {
    let answer = get(node, "/admin/policy")?;
    let (_, body) = answer.split_once("\r\n\r\n")?;
    let policy: serde_json::Value = serde_json::from_str(body).ok()?;
    policy["version"].as_str().map(str::to_owned)
}

/// Clients that ask for what the policy limits.
struct Load {
    stop: std::sync::Arc<AtomicBool>,
    clients: Vec<JoinHandle<Vec<Seen>>>,
}

impl Load {
    fn start(nodes: &[SocketAddr]) -> Self {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let clients = nodes.iter().flat_map(|node| (0..CLIENTS).map(|number| (*node, number as u64)));
        let clients = clients.map(|(node, number)| {
            let stop = std::sync::Arc::clone(&stop);
            std::thread::spawn(move || ask_until(node, number, &stop))
        });
        Self { clients: clients.collect(), stop }
    }

    fn finish(self) -> Vec<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        let mut seen: Vec<_> =
            self.clients.into_iter().flat_map(|client| client.join().unwrap_or_default()).collect();
        seen.sort_by_key(|it| it.at_us);
        seen
    }
}

fn ask_until(node: SocketAddr, number: u64, stop: &AtomicBool) -> Vec<Seen> {
    let mut connection = Connection::to(node);
    let mut seen = Vec::new();
    let mut user = number;
    while !stop.load(Ordering::Relaxed) {
        user = (user + 1) % USERS;
        let start = now_us();
        let answer = connection.ask("POST", "/api/v1/check", &format!(r#"{{"user":"user-{user}"}}"#));
        let (at_us, (status, is_exact)) = (now_us(), answer.unwrap_or((0, false)));
        seen.push(Seen { at_us, took_us: at_us - start, user, status, is_exact });
        std::thread::sleep(PAUSE);
    }
    seen
}

/// A connection that is kept.
struct Connection {
    address: SocketAddr,
    stream: Option<TcpStream>,
}

impl Connection {
    fn to(address: SocketAddr) -> Self {
        Self { address, stream: None }
    }

    /// The status of the answer, if there is one, and whether the store has decided.
    fn ask(&mut self, method: &str, path: &str, body: &str) -> Option<(u16, bool)> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => TcpStream::connect(self.address).ok()?,
        };
        stream.set_nodelay(true).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        let length = body.len();
        let request =
            format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).ok()?;
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        loop {
            let read = stream.read(&mut buffer).ok().filter(|read| *read > 0)?;
            bytes.extend_from_slice(&buffer[..read]);
            let text = String::from_utf8_lossy(&bytes);
            let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            if body.len() < length.and_then(|it| it.parse().ok()).unwrap_or(0) {
                continue;
            }
            let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
            let is_exact = head.lines().any(|line| line == "x-tollgate-basis: exact");
            self.stream = Some(stream);
            return status.map(|status| (status, is_exact));
        }
    }
}
