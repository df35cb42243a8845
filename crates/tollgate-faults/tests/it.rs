//! The rows of the fault matrix that take seconds, judged by what was decided: on what ground, and how much of it.
//! `cargo xtask faults` runs all of them, and judges how fast it was as well.

use tollgate_faults::rows::{Pace, row};
use tollgate_faults::{Kind, set_program};

fn check(id: &str) {
    set_program(env!("CARGO_BIN_EXE_tollgate-faults"));
    let row = row(id).expect("there is such a row");
    let Some(finding) = row.run(Pace::SHORT, 1) else {
        println!("row {id} is left out: it needs root and network namespaces");
        return;
    };
    for claim in &finding.claims {
        println!("{:?} {}: {} ({})", claim.kind, claim.expected, claim.measured, claim.holds);
    }
    println!("{}\n{}", finding.timeline, finding.warnings.join("\n"));
    let missed: Vec<_> =
        finding.claims.iter().filter(|claim| claim.kind == Kind::Decision && !claim.holds).collect();
    assert!(missed.is_empty(), "row {id}, {}: {missed:#?}", finding.fault);
}

macro_rules! rows {
    ($($name:ident $id:literal)*) => {
        $(#[test]
        fn $name() {
            check($id);
        })*
    };
}

rows! {
    the_store_is_killed_and_comes_back_empty "1"
    the_store_stands_still "2"
    the_store_loads_for_long "3"
    a_primary_is_killed_and_sentinels_elect_another "4"
    sentinels_switch_primaries "5"
    writes_are_lost_with_a_primary_that_had_lent "6a"
    writes_are_lost_and_the_guard_knows "6b"
    a_primary_of_a_cluster_is_killed "8a"
    slots_move_under_load "9"
    scripts_are_forgotten_all_the_time "11"
    the_store_is_out_of_memory "12"
    new_keys_fill_the_store "12b"
    the_store_is_busy_with_a_script "13"
    the_user_loses_a_privilege "14a"
    the_password_changes "14b"
    snapshots_fail "15a"
    replicas_are_missing "15b"
    the_link_is_too_slow "16b"
    one_packet_in_a_hundred_waits "16f"
    connections_are_reset "16h"
    what_is_sent_is_swallowed "16i"
    the_machine_of_the_store_is_gone "18"
    a_node_with_leases_is_cut_off "19"
    a_node_with_leases_stands_still "22b"
    the_clock_of_the_store_jumps_back "20b"
    the_clock_of_the_store_jumps_ahead "20d"
    the_clocks_of_the_nodes_jump "21"
    the_nodes_are_out_of_files "23"
    one_key_is_asked_for_far_too_often "26"
    policies_change_under_load "27"
    a_node_is_told_to_stop "28a"
    a_node_is_told_to_stop_and_killed "28c"
    nodes_with_leases_are_told_to_stop "28d"
    eight_nodes_with_leases "31a"
    eight_nodes_with_fast_leases "31b"
    clients_leave_before_they_are_answered "33"
    the_store_loses_a_pushed_policy "34"
}
