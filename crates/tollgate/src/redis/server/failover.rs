//! Failovers and restarts of servers, before which writes may have been lost.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{Pipeline, RedisResult, Value};
use tokio::time::Instant;
use tollgate_core::{Micros, Timestamp};

use crate::redis::server::single;

/// The most data histories that are kept. Each failover begins one.
const HISTORIES_MAX: usize = 1_024;

/// When a server became primary or restarted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failover {
    /// The time on its clock.
    since: Timestamp,
    /// When this was read, and how long ago the failover was then.
    read: Instant,
    age: Duration,
}

impl Failover {
    /// Its time, if it was within `time`. (The age of a restarted server is known to the second.)
    pub(crate) fn within(&self, time: Micros) -> Option<Timestamp> {
        let matters = self.age + self.read.elapsed() < Duration::from(time) + Duration::from_secs(1);
        matters.then_some(self.since)
    }
}

/// The data histories that this engine has seen.
#[derive(Default)]
pub(crate) struct Failovers {
    /// By their replication ids.
    known: Mutex<HashMap<String, Failover>>,
    guarding: Mutex<Guarding>,
}

/// Whether a limit needs the histories, and which server did not tell its own.
#[derive(Default)]
struct Guarding {
    is_wanted: bool,
    unseen: Option<String>,
}

impl Failovers {
    /// Records that a limit relies on the histories.
    pub(crate) fn want(&self) {
        let mut guarding = self.guarding.lock();
        guarding.is_wanted = true;
        if let Some(why) = guarding.unseen.take() {
            warn_of_unseen(&why);
        }
    }

    /// Records that a server did not tell its history. This is logged only if a limit relies on it.
    pub(crate) fn unseen(&self, why: String) {
        let mut guarding = self.guarding.lock();
        match guarding.is_wanted {
            true => warn_of_unseen(&why),
            false => guarding.unseen = Some(why),
        }
    }

    /// Asks a server for its history. The history of a replica that took over from a known primary begins when that is first seen, at the
    /// latest. The history of any other server begins when it started.
    pub(crate) async fn look(&self, connection: &mut MultiplexedConnection) -> RedisResult<Option<Failover>> {
        let mut ask = Pipeline::new();
        ask.cmd("INFO").arg("replication").cmd("INFO").arg("server").cmd("TIME");
        let read = Instant::now();
        let mut answers = connection.send_packed_commands(&ask, 0, 3).await?.into_iter();
        let mut next = || single(Ok(answers.next().unwrap_or(Value::Nil)));
        let replication: String = redis::from_redis_value(next()?)?;
        let server: String = redis::from_redis_value(next()?)?;
        let (secs, us): (u64, u64) = redis::from_redis_value(next()?)?;
        let field = |text: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(|value| value.trim().to_owned())
        };
        let Some(history) = field(&replication, "master_replid") else { return Ok(None) };
        let mut known = self.known.lock();
        if let Some(failover) = known.get(&history) {
            return Ok(Some(*failover));
        }
        let before = field(&replication, "master_replid2").unwrap_or_default();
        let uptime = field(&server, "uptime_in_seconds").and_then(|secs| secs.parse().ok()).unwrap_or(0);
        let age = if known.contains_key(&before) { 0 } else { uptime };
        // The server counts whole seconds of its clock from the second in which it started.
        let started_before = (secs + 1).saturating_sub(age) * 1_000_000;
        let since = Timestamp::from_micros(started_before.min(secs * 1_000_000 + us));
        let failover = Failover { since, read, age: Duration::from_secs(age) };
        if known.len() < HISTORIES_MAX {
            known.insert(history, failover);
        }
        Ok(Some(failover))
    }
}

fn warn_of_unseen(why: &str) {
    tracing::warn!("a failover would go unnoticed (failover_guard): INFO is not answered by {why}");
}
