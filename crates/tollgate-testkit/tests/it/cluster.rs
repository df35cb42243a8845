//! Elections and slots on the move.

use tollgate_testkit::{Cluster, ServerProgram};

/// The slot of the key `foo`.
const SLOT: u16 = 12182;

#[test]
fn a_slot_moves_with_its_keys() {
    let cluster = Cluster::start();
    let from = cluster.primary_of(SLOT);
    let to = cluster.primary_of(0);
    assert_ne!(from, to);
    for number in 0..250 {
        cluster.node(from).cli(&["SET", &format!("{{foo}}{number}"), "value"]);
    }

    cluster.begin_move(SLOT, to);
    assert_eq!(cluster.primary_of(SLOT), from);
    assert!(cluster.node(from).cli(&["GET", "{foo}absent"]).starts_with("ASK"));
    assert_eq!(cluster.move_keys(SLOT), 250);
    assert!(cluster.node(from).cli(&["GET", "{foo}7"]).starts_with("ASK"));
    cluster.end_move(SLOT);

    assert_eq!(cluster.primary_of(SLOT), to);
    assert_eq!(cluster.node(to).cli(&["GET", "{foo}7"]), "value\n");
    assert!(cluster.node(from).cli(&["GET", "{foo}7"]).starts_with("MOVED"));
    cluster.move_slot(SLOT, from);
    assert_eq!(cluster.node(from).cli(&["GET", "{foo}7"]), "value\n");
}

#[test]
fn a_replica_takes_the_place_of_its_primary() {
    let mut cluster = Cluster::start();
    let [a, b, c, ..]: [_; 6] = cluster.nodes().try_into().unwrap();
    assert_eq!(cluster.url(), format!("redis+cluster://{a},{b},{c}"));
    let first = cluster.primary_of(SLOT);
    let second = cluster.replica_of(first);

    assert_eq!(cluster.failover_of(SLOT), second);
    assert_eq!(cluster.primary_of(SLOT), second);
    assert_eq!(cluster.replica_of(second), first);

    assert_eq!(cluster.kill_primary_of(SLOT), second);
    assert_eq!(cluster.primary_of(SLOT), first);
}

#[test]
fn other_programs_make_clusters_too() {
    for program in [ServerProgram::Valkey, ServerProgram::Redis62] {
        let cluster = Cluster::start_with(program);
        let to = cluster.primary_of(0);
        cluster.node(cluster.primary_of(SLOT)).cli(&["SET", "foo", "value"]);
        cluster.move_slot(SLOT, to);
        assert_eq!(cluster.node(to).cli(&["GET", "foo"]), "value\n");
        let replica = cluster.failover_of(SLOT);
        assert_eq!(cluster.node(replica).cli(&["GET", "foo"]), "value\n");
    }
}
