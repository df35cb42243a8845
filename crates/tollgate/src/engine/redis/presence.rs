//! How many nodes share the store: each says once in a while that it lives, and hears how many do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use redis::Value;
use tokio::time::{Instant, sleep};

use super::node::jittered;
use super::routes::Routes;
use super::{KEY_PREFIX, script};

/// How often a node says that it lives.
const SAY_EVERY: Duration = Duration::from_secs(1);
/// Nobody waits for it: a store that is too slow for checks should still know who is there.
const SAY_WITHIN: Duration = Duration::from_millis(500);
/// For how long a node counts after that: some of its words may be lost.
const COUNTS_FOR: Duration = Duration::from_secs(5);

/// This node among the others.
pub(super) struct Presence {
    id: String,
    /// How many there were when the store last said so; 0 if it never has.
    nodes: AtomicU32,
}

impl Presence {
    /// A node that nobody has heard of yet.
    pub(super) fn new() -> Arc<Self> {
        let mut id = [0; 16];
        // Without randomness some nodes would count as one, and each would take a larger share of a limit.
        getrandom::fill(&mut id).expect("the operating system gives random numbers");
        Arc::new(Self { id: format!("{:032x}", u128::from_be_bytes(id)), nodes: AtomicU32::new(0) })
    }

    /// How many nodes there were when the store last said so, this one among them.
    pub(super) fn nodes(&self) -> Option<u32> {
        Some(self.nodes.load(Ordering::Relaxed)).filter(|nodes| *nodes > 0)
    }

    /// Says and hears it, again and again.
    pub(super) async fn keep_up(self: Arc<Self>, routes: Arc<Routes>) {
        let key = format!("{KEY_PREFIX}:nodes");
        loop {
            let say = |now| script::live(&key, &self.id, COUNTS_FOR.as_micros() as u64, now);
            if let Some(Value::Int(nodes)) = routes.tell(&key, Instant::now() + SAY_WITHIN, say).await {
                self.nodes.store(u32::try_from(nodes).unwrap_or(u32::MAX), Ordering::Relaxed);
            }
            sleep(jittered(SAY_EVERY)).await;
        }
    }
}
