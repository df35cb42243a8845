//! One server that dies, stands still, refuses or forgets.

use std::process::{Command, Stdio};
use std::time::Duration;

use tollgate_testkit::{RedisServer, wait_at_most, wait_until};

use super::{Parts, judge_outage, judge_unnoticed, play};
use crate::judge::{Cause, Judge, millis};
use crate::rig::{Pace, Rig, SHARERS, Setup};
use crate::traffic::BURST;

fn url(server: &RedisServer) -> String {
    format!("redis://{}", server.tcp_address())
}

/// A server that can be reached but does not decide. It begins and ends with a word to the server.
fn undecided(
    mut server: RedisServer,
    cause: Cause,
    pace: Pace,
    seed: u64,
    break_it: (&str, fn(&RedisServer)),
    mend_it: (&str, fn(&RedisServer)),
) -> Option<Judge> {
    let store = url(&server);
    let (judge, parts) = play(
        &store,
        Setup::new(seed),
        pace,
        &mut server,
        (break_it.0, |server, _| break_it.1(server)),
        (mend_it.0, |server, _| mend_it.1(server)),
    );
    Some(judge_outage(judge, cause, &parts, 0, ""))
}

pub(super) fn killed(pace: Pace, seed: u64) -> Option<Judge> {
    let mut server = RedisServer::build().tcp().start();
    let store = url(&server);
    let (judge, parts) = play(
        &store,
        Setup::new(seed),
        pace,
        &mut server,
        ("kill -9", |server, _| server.kill()),
        ("answers again, empty", |server, _| server.restart()),
    );
    Some(judge_outage(judge, Cause::Unreachable, &parts, BURST, " (its memory is lost)"))
}

pub(super) fn paused(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    undecided(
        server,
        Cause::Reachable,
        pace,
        seed,
        ("SIGSTOP", RedisServer::pause),
        ("SIGCONT", RedisServer::resume),
    )
}

/// The longest pause between two attempts to connect, and some time for a busy machine.
const RECONNECT_WITHIN: Duration = Duration::from_secs(1);

pub(super) fn loading(pace: Pace, seed: u64) -> Option<Judge> {
    // Some thousand keys are there when it is killed; each takes its time.
    let delay_us = (pace.fault.as_micros() / 1_000).to_string();
    let server = RedisServer::build().tcp().append_only();
    let mut server = server
        .args(&["--key-load-delay", &delay_us, "--loading-process-events-interval-bytes", "1024"])
        .start();
    let mut rig = Rig::start(&url(&server), Setup::new(seed));
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    // The file's beginning is a snapshot, whose keys are loaded one by one.
    server.cli(&["BGREWRITEAOF"]);
    wait_until("the file is rewritten", || {
        server.cli(&["INFO", "persistence"]).contains("aof_rewrite_in_progress:0")
    });
    rig.mark("kill -9, restart");
    server.kill();
    server.restart_without_waiting();
    let answer = |server: &RedisServer| {
        let ping = Command::new("redis-cli").arg("-s").arg(server.socket()).arg("PING").output();
        ping.map(|ping| String::from_utf8_lossy(&ping.stdout).into_owned()).unwrap_or_default()
    };
    wait_until("it says LOADING", || answer(&server).starts_with("LOADING"));
    rig.mark("LOADING");
    // Until then a node may have been told that connections are refused.
    rig.wait(RECONNECT_WITHIN);
    let fault = rig.mark("every node has connected again");
    let mending = fault + pace.fault.as_micros() as u64;
    wait_at_most(Duration::from_secs(60), "the server has loaded", || answer(&server).starts_with("PONG"));
    let healed = rig.mark("loaded");
    let mending = mending.min(healed);
    rig.wait(pace.recovery);
    let judge = Judge::of(rig.finish());
    Some(judge_outage(judge, Cause::Reachable, &Parts { begun, fault, mending, healed }, 0, ""))
}

/// One for each limit, and one that says that a node lives.
const SCRIPTS: u64 = 4;

pub(super) fn flushed(pace: Pace, seed: u64) -> Option<Judge> {
    let mut server = RedisServer::build().tcp().start();
    let store = url(&server);
    let mut flushes = 0;
    let (mut judge, parts) = play(
        &store,
        Setup::new(seed),
        Pace { fault: Duration::ZERO, ..pace },
        &mut server,
        ("SCRIPT FLUSH every 10 ms", |server, _| {
            server.cli(&["CONFIG", "RESETSTAT"]);
            flushes = pace.fault.as_millis() as u64 / 10;
            let times = flushes.to_string();
            server.cli(&["-r", &times, "-i", "0.01", "SCRIPT", "FLUSH"]);
        }),
        ("no more", |_, _| ()),
    );
    let stats = server.cli(&["INFO", "commandstats"]);
    let calls = |command: &str| -> u64 {
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.and_then(|rest| rest.split(',').next()).and_then(|word| word.parse().ok()).unwrap_or(0)
    };
    judge.decision(
        "each script loaded at most once a flush and process",
        format!("{} loads, {flushes} flushes", calls("script|load")),
        calls("script|load") <= flushes * SHARERS * SCRIPTS && calls("script|load") > 0,
    );
    Some(judge_unnoticed(judge, &parts, 0, ""))
}

pub(super) fn out_of_memory(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().args(&["--maxmemory-policy", "noeviction"]).start();
    undecided(
        server,
        Cause::Full,
        pace,
        seed,
        ("CONFIG SET maxmemory 1", |server| drop(server.cli(&["CONFIG", "SET", "maxmemory", "1"]))),
        ("CONFIG SET maxmemory 0", |server| drop(server.cli(&["CONFIG", "SET", "maxmemory", "0"]))),
    )
}

pub(super) fn busy(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().args(&["--lua-time-limit", "100"]).start();
    undecided(
        server,
        Cause::Reachable,
        pace,
        seed,
        ("EVAL of a loop", |server| {
            let mut endless = Command::new("redis-cli");
            endless.arg("-s").arg(server.socket()).args(["EVAL", "while true do end", "0"]);
            // It ends with the script.
            let _ = endless.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        }),
        ("SCRIPT KILL", |server| {
            wait_until("the script is ended", || server.cli(&["SCRIPT", "KILL"]).contains("NOTBUSY"));
        }),
    )
}

/// What Tollgate needs, as docs/redis.md has it.
const ACL: &str = "resetkeys ~rate_limiter:* resetchannels -@all +evalsha +script|load +time +ping +hmget +hset \
     +hgetall +hdel +pexpire +zadd +zcard +zcount +zrange +zrangebyscore +zrem +zremrangebyrank +zremrangebyscore +unlink";
const SECRET: &str = "0ld-s3cret";

/// A server that wants a password, and its address with it.
fn guarded() -> (RedisServer, String) {
    let user = format!("user tollgate on >{SECRET} {ACL}");
    let server = RedisServer::build().tcp().users(&["user default on nopass ~* &* +@all", &user]).start();
    let store = format!("redis://tollgate:{SECRET}@{}", server.tcp_address());
    (server, store)
}

fn judge_refusal(mut judge: Judge, parts: &Parts, attempts: u64) -> Judge {
    let secs = (parts.healed - parts.fault) as f64 / 1e6;
    let rate = attempts as f64 / secs / SHARERS as f64;
    judge.measure(
        "attempts to enter <= 1/s for each connection",
        format!("{rate:.2}/s ({attempts} in {})", millis(parts.healed - parts.fault)),
        rate <= 1.0,
    );
    let shown = judge.run.logs.matches(SECRET).count();
    judge.decision("the password is in no log", format!("{shown} times"), shown == 0);
    let said = judge.run.logs.contains("refuses this client") || judge.run.logs.contains("refused");
    judge.decision("the log says what is wrong", if said { "yes" } else { "no" }, said);
    judge_outage(judge, Cause::Unreachable, parts, 0, "")
}

fn connections(server: &RedisServer) -> u64 {
    let stats = server.cli(&["INFO", "stats"]);
    let count = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// A user who is not let in, or not let do its work, and is again. How often it tries meanwhile is counted.
fn refused(
    pace: Pace,
    seed: u64,
    break_it: (&str, fn(&RedisServer)),
    mend_it: (&str, fn(&RedisServer)),
) -> Option<Judge> {
    let (mut server, store) = guarded();
    let (mut before, mut after) = (0, 0);
    let (judge, parts) = play(
        &store,
        Setup::new(seed),
        pace,
        &mut server,
        (break_it.0, |server: &mut RedisServer, _: &mut Rig| {
            break_it.1(server);
            before = connections(server);
        }),
        (mend_it.0, |server, _| {
            after = connections(server);
            mend_it.1(server);
        }),
    );
    // One of them was to count them.
    Some(judge_refusal(judge, &parts, after - before - 1))
}

pub(super) fn without_privilege(pace: Pace, seed: u64) -> Option<Judge> {
    refused(
        pace,
        seed,
        ("ACL SETUSER tollgate -hset -zadd", |server| {
            server.cli(&["ACL", "SETUSER", "tollgate", "-hset", "-zadd"]);
        }),
        ("ACL SETUSER tollgate +hset +zadd", |server| {
            server.cli(&["ACL", "SETUSER", "tollgate", "+hset", "+zadd"]);
        }),
    )
}

pub(super) fn with_another_password(pace: Pace, seed: u64) -> Option<Judge> {
    refused(
        pace,
        seed,
        ("another password, CLIENT KILL", |server| {
            server.cli(&["ACL", "SETUSER", "tollgate", "resetpass", ">an0ther"]);
            server.cli(&["CLIENT", "KILL", "USER", "tollgate"]);
        }),
        ("the old password", |server| {
            server.cli(&["ACL", "SETUSER", "tollgate", &format!(">{SECRET}")]);
        }),
    )
}

pub(super) fn disk_full(pace: Pace, seed: u64) -> Option<Judge> {
    let mut server = RedisServer::build().tcp().args(&["--dbfilename", "snapshot"]).start();
    let store = url(&server);
    let directory = server.cli(&["CONFIG", "GET", "dir"]).lines().nth(1).unwrap_or_default().to_owned();
    // Where the snapshot belongs there is something that cannot be replaced by one.
    let obstacle = std::path::Path::new(&directory).join("snapshot");
    let last_was = |server: &RedisServer, status: &str| {
        server.cli(&["INFO", "persistence"]).contains(&format!("rdb_last_bgsave_status:{status}"))
    };
    let mut rig = Rig::start(&store, Setup::new(seed));
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    std::fs::create_dir(&obstacle).expect("the obstacle is put in place");
    std::fs::write(obstacle.join("full"), "").expect("the obstacle is put in place");
    server.cli(&["CONFIG", "SET", "save", "3600 1"]);
    server.cli(&["BGSAVE"]);
    wait_until("a snapshot has failed", || last_was(&server, "err"));
    let fault = rig.mark("a snapshot has failed");
    rig.wait(pace.fault);
    let mending = rig.mark("mending");
    std::fs::remove_dir_all(&obstacle).expect("the obstacle is taken away");
    server.cli(&["BGSAVE"]);
    wait_until("a snapshot has succeeded", || last_was(&server, "ok"));
    let healed = rig.mark("a snapshot has succeeded");
    rig.wait(pace.recovery);
    let judge = Judge::of(rig.finish());
    server.kill();
    Some(judge_outage(judge, Cause::Reachable, &Parts { begun, fault, mending, healed }, 0, ""))
}

pub(super) fn without_replicas(pace: Pace, seed: u64) -> Option<Judge> {
    let server = RedisServer::build().tcp().start();
    undecided(
        server,
        Cause::Reachable,
        pace,
        seed,
        ("min-replicas-to-write 1", |server| {
            drop(server.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]));
        }),
        ("min-replicas-to-write 0", |server| {
            drop(server.cli(&["CONFIG", "SET", "min-replicas-to-write", "0"]));
        }),
    )
}
