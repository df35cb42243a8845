//! Counts the nodes that share the store: each node sends heartbeats and gets the number of live nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use redis::Value;
use tokio::time::{Instant, sleep};

use crate::redis::key_prefix::KeyPrefix;
use crate::redis::protocol;
use crate::redis::server::{ServerContext, jittered};
use crate::redis::topology::Routes;

/// The interval of heartbeats.
const SAY_EVERY: Duration = Duration::from_secs(1);
/// The deadline of a heartbeat. A store that is too slow for checks should still count its nodes.
const SAY_WITHIN: Duration = Duration::from_millis(500);
/// How long a node counts after a heartbeat: some heartbeats may be lost.
const COUNTS_FOR: Duration = Duration::from_secs(5);

/// This node among the others.
pub(crate) struct Membership {
    id: String,
    /// The key of the heartbeats.
    key: String,
    /// The number of nodes by the last answer of the store; 0 before the first.
    nodes: AtomicU32,
    /// While the store reports fewer nodes: since when, without a gap, and the most that it reported.
    fewer: Mutex<Option<Fewer>>,
    /// The last heartbeat that the store answered.
    said: Mutex<Option<Instant>>,
}

struct Fewer {
    since: Instant,
    last: Instant,
    most: u32,
}

impl Membership {
    /// A node before its first heartbeat.
    pub(crate) fn new(prefix: &KeyPrefix) -> Arc<Self> {
        let mut id = [0; 16];
        // Without randomness some nodes would count as one, and each would take a larger share of a limit.
        getrandom::fill(&mut id).expect("the operating system gives random numbers");
        Arc::new(Self {
            key: format!("{prefix}:nodes"),
            id: format!("{:032x}", u128::from_be_bytes(id)),
            nodes: AtomicU32::new(0),
            fewer: Mutex::new(None),
            said: Mutex::new(None),
        })
    }

    /// The number of nodes by the last answer of the store, including this one.
    pub(crate) fn nodes(&self) -> Option<u32> {
        Some(self.nodes.load(Ordering::Relaxed)).filter(|nodes| *nodes > 0)
    }

    /// The last heartbeat that the store recorded.
    pub(crate) fn last_heartbeat(&self) -> Option<Instant> {
        *self.said.lock()
    }

    /// Sends heartbeats, again and again.
    pub(crate) async fn keep_alive(self: Arc<Self>, routes: Arc<Routes>) {
        let key = &self.key;
        loop {
            let say =
                |to: ServerContext| protocol::live(key, &self.id, COUNTS_FOR.as_micros() as i64, to.now);
            let begun = Instant::now();
            if let Ok(Value::Int(nodes)) = routes.send(key, begun + SAY_WITHIN, say).await {
                *self.said.lock() = Some(begun);
                self.update(u32::try_from(nodes).unwrap_or(u32::MAX), Instant::now());
            }
            sleep(jittered(SAY_EVERY)).await;
        }
    }

    /// More nodes count at once. Fewer nodes count only after all nodes had time for a heartbeat: a store that comes back empty knows no
    /// node at first, and a share that is too large would last until the next outage ends.
    fn update(&self, nodes: u32, now: Instant) {
        let mut fewer = self.fewer.lock();
        if nodes >= self.nodes.load(Ordering::Relaxed) {
            *fewer = None;
            self.nodes.store(nodes, Ordering::Relaxed);
            return;
        }
        let run = fewer.take().filter(|run| now - run.last < SAY_EVERY * 2);
        let run = run.unwrap_or(Fewer { since: now, last: now, most: nodes });
        let run = Fewer { last: now, most: run.most.max(nodes), ..run };
        if now - run.since >= COUNTS_FOR {
            self.nodes.store(run.most, Ordering::Relaxed);
        } else {
            *fewer = Some(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_nodes_count_at_once_and_fewer_only_after_all_had_time_for_a_heartbeat() {
        let (membership, start) = (Membership::new(&KeyPrefix::default()), Instant::now());
        let update = |secs: u64, nodes| {
            membership.update(nodes, start + Duration::from_secs(secs));
            membership.nodes()
        };
        assert_eq!(membership.nodes(), None);
        assert_eq!(update(0, 1), Some(1));
        assert_eq!(update(1, 4), Some(4));
        // The store has lost its data, and counts one node after another.
        assert_eq!([update(60, 1), update(61, 2), update(62, 4)], [Some(4); 3]);
        // One is really gone.
        assert_eq!([70, 71, 72, 73, 74].map(|secs| update(secs, 3)), [Some(4); 5]);
        assert_eq!(update(75, 3), Some(3));
        // A gap begins anew.
        assert_eq!([80, 81, 82, 90, 91, 92, 93, 94].map(|secs| update(secs, 1)), [Some(3); 8]);
        assert_eq!(update(95, 2), Some(2), "the most that was reported");
    }
}
