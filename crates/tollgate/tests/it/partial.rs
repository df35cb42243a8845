//! Some servers of a cluster are gone while others decide.

use std::net::SocketAddr;
use std::time::Duration;

use tollgate::{Ask, Basis, FailureMode, GuardConfig, GuardStats, Limiter, OnFailure};
use tollgate_testkit::Cluster;

use crate::guard::{guard_with, slow, until};
use crate::run;

/// Keys of a scope on one primary.
fn keys_on(cluster: &Cluster, scope: &str, primary: SocketAddr, count: usize) -> Vec<String> {
    let key = |number| format!("user:{number}");
    let is_there =
        |key: &String| cluster.primary_of(cluster.slot_of(&format!("rate_limiter:{scope}:{key}"))) == primary;
    (0..).map(key).filter(is_there).take(count).collect()
}

#[test]
fn debts_to_a_dead_server_delay_no_others_and_cost_no_calls() {
    run(async {
        let mut cluster = Cluster::start();
        for node in cluster.nodes() {
            // No server takes over from the dead one: its replica is told to stay a replica.
            cluster.node(node).cli(&["CONFIG", "SET", "cluster-replica-no-failover", "yes"]);
        }
        let [dead, well] = [0, 16_000].map(|slot| cluster.primary_of(slot));
        let guard = guard_with(&cluster.url(), GuardConfig::default(), |config| {
            config.deadline = Duration::from_millis(100);
        });
        let on_failure = OnFailure { mode: FailureMode::Local, settle: true, ..OnFailure::default() };
        let limiter: Limiter = guard.limiter("settling", slow(), on_failure).unwrap();
        let (lost, kept) = (keys_on(&cluster, "settling", dead, 40), keys_on(&cluster, "settling", well, 40));
        until("the store has counted this node", async || guard.redis().nodes() == Some(1)).await;
        until("both decide", async || {
            limiter.acquire(&lost[0], Ask::of(1)).await.basis == Basis::Exact
                && limiter.acquire(&kept[0], Ask::of(1)).await.basis == Basis::Exact
        })
        .await;
        cluster.node_mut(dead).kill();
        cluster.node(well).cli(&["CONFIG", "SET", "min-replicas-to-write", "9"]);
        for key in lost.iter().chain(&kept) {
            until("it is decided alone", async || {
                limiter.acquire(key, Ask::of(1)).await.basis == Basis::Local
            })
            .await;
        }
        // All but the first few, of which it is unknown whether the store has taken them.
        assert!(guard.stats().debt >= 60, "{:?}", guard.stats());
        cluster.node(well).cli(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        let GuardStats { debt, .. } = guard.stats();
        until("the debts to the server that is back are settled", async || {
            guard.stats().debt_settled >= 30 && guard.stats().debt <= debt - 30
        })
        .await;
        // Every decision by the other server used to be a reason to try all debts to the dead one again.
        let failed = || guard.redis().stats().failed.iter().sum::<u64>();
        let (before, mut decided) = (failed(), 0_u64);
        while decided < 2_000 {
            let key = &kept[decided as usize % kept.len()];
            decided += u64::from(limiter.acquire(key, Ask::of(1)).await.basis == Basis::Exact);
        }
        let retries = failed() - before;
        assert!(retries < decided / 10, "{retries} failed calls during {decided} decisions");
    });
}
