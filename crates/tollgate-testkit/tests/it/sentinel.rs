//! Elections among three stores.

use tollgate_testkit::{SentinelTrio, wait_until};

#[test]
fn a_failover_and_a_death_each_make_another_store_the_primary() {
    let mut trio = SentinelTrio::start();
    let first = trio.primary();
    assert_eq!(trio.store(first).cli(&["SET", "key", "value"]), "OK\n");

    let second = trio.failover();
    assert_ne!(second, first);
    assert_eq!(trio.primary(), second);
    assert_eq!(trio.store(second).cli(&["GET", "key"]), "value\n");
    assert!(trio.store(second).cli(&["SET", "key", "other"]).contains("OK"));

    assert_eq!(trio.kill_primary(), second);
    let third = trio.wait_for_another_primary(second);
    assert_ne!(third, second);

    // The dead one comes back as a replica.
    trio.store_mut(second).restart();
    wait_until("the old primary follows", || trio.store(second).cli(&["ROLE"]).contains("slave"));
}

#[test]
fn the_url_names_all_sentinels() {
    let trio = SentinelTrio::start();
    let [a, b, c] = trio.sentinels().try_into().unwrap();
    assert_eq!(trio.url(), format!("redis+sentinel://{a},{b},{c}/mymaster"));
    assert_eq!(trio.stores().len(), 3);
}
