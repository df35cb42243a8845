//! A slot moves from one primary to another, in the steps that clients can meet it in.

use std::net::SocketAddr;

use super::view::nodes_of;
use super::{Cluster, command};

/// Keys moved by one command.
const KEYS_AT_ONCE: &str = "100";

impl Cluster {
    /// Moves a slot with all its keys to another primary, and waits until all nodes know.
    ///
    /// # Panics
    /// If `to` is not a primary, or serves the slot already.
    pub fn move_slot(&self, slot: u16, to: SocketAddr) {
        self.begin_move(slot, to);
        self.move_keys(slot);
        self.end_move(slot);
    }

    /// Begins to move a slot: for keys that are not at the old primary, it now sends clients to the new one (`ASK`).
    ///
    /// # Panics
    /// If `to` is not a primary, or serves the slot already.
    pub fn begin_move(&self, slot: u16, to: SocketAddr) {
        let from = self.owner(slot);
        let number = slot.to_string();
        command(to, &["CLUSTER", "SETSLOT", &number, "IMPORTING", &from.id]);
        command(from.address, &["CLUSTER", "SETSLOT", &number, "MIGRATING", &id_of(to)]);
    }

    /// Moves all keys of a slot whose move has begun, and says how many there were.
    ///
    /// # Panics
    /// If no move of the slot has begun.
    pub fn move_keys(&self, slot: u16) -> usize {
        let (from, to) = self.ends_of_move(slot);
        let (host, port) = (to.ip().to_string(), to.port().to_string());
        let mut count = 0;
        loop {
            let keys = command(from, &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), KEYS_AT_ONCE]).0;
            if keys.is_empty() {
                return count;
            }
            count += keys.len();
            let migrate: Vec<Vec<u8>> = ["MIGRATE", &host, &port, "", "0", "5000", "KEYS"]
                .map(|word| word.as_bytes().to_vec())
                .into();
            command(from, &[migrate, keys].concat());
        }
    }

    /// Ends the move of a slot: the new primary serves it. Waits until all nodes know.
    ///
    /// # Panics
    /// If no move of the slot has begun, or the old primary still has keys of the slot.
    pub fn end_move(&self, slot: u16) {
        let (from, to) = self.ends_of_move(slot);
        let (number, id) = (slot.to_string(), id_of(to));
        let others = self.views().into_iter().flatten().filter(|node| node.is_myself && node.is_primary);
        let others = others.map(|node| node.address).filter(|node| ![to, from].contains(node));
        // The new primary first: were it to fail between the two, the old one would still know where to send clients.
        for node in [to, from].into_iter().chain(others) {
            command(node, &["CLUSTER", "SETSLOT", &number, "NODE", &id]);
        }
        // The replicas hear of it from the primaries.
        self.wait_until_all_know(slot, to);
    }

    /// From where and to where a slot moves.
    fn ends_of_move(&self, slot: u16) -> (SocketAddr, SocketAddr) {
        let owner = self.owner(slot);
        let destination = owner.destination(slot).expect("a move of the slot has begun");
        let nodes = nodes_of(owner.address).expect("the slot's primary answers");
        let to = nodes.iter().find(|node| node.id == destination).expect("the destination is known");
        (owner.address, to.address)
    }
}

fn id_of(node: SocketAddr) -> String {
    command(node, &["CLUSTER", "MYID"]).text()
}
