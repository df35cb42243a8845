//! What one node of a cluster knows of all of them: its answer to `CLUSTER NODES`.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

use crate::resp::{Fault, ask};

/// A node, as one of the nodes sees it.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: String,
    pub(super) address: SocketAddr,
    /// Whether it is the one that was asked.
    pub(super) is_myself: bool,
    pub(super) is_primary: bool,
    /// The node that it is a replica of.
    pub(super) follows: Option<String>,
    /// Greater for the node that was elected later.
    pub(super) epoch: u64,
    slots: Vec<RangeInclusive<u16>>,
    /// The slots on their way to another node, with that node. Only a node itself knows.
    migrating: Vec<(u16, String)>,
}

impl Node {
    pub(super) fn serves(&self, slot: u16) -> bool {
        self.slots.iter().any(|range| range.contains(&slot))
    }

    /// The node that a slot is moving to.
    pub(super) fn destination(&self, slot: u16) -> Option<&str> {
        self.migrating.iter().find(|(moving, _)| *moving == slot).map(|(_, to)| to.as_str())
    }
}

/// Asks a node for all nodes.
pub(super) fn nodes_of(node: SocketAddr) -> Result<Vec<Node>, Fault> {
    Ok(ask(node, &["CLUSTER", "NODES"])?.text().lines().filter_map(parse).collect())
}

/// One line: `id ip:port@bus flags follows ping pong epoch link slots...`. None for a node without an address yet.
fn parse(line: &str) -> Option<Node> {
    let words: Vec<_> = line.split(' ').collect();
    let [id, address, flags, follows, _ping, _pong, epoch, _link, slots @ ..] = words.as_slice() else {
        return None;
    };
    let flags: Vec<_> = flags.split(',').collect();
    Some(Node {
        id: (*id).to_owned(),
        address: address.split('@').next()?.parse().ok()?,
        is_myself: flags.contains(&"myself"),
        is_primary: flags.contains(&"master"),
        follows: (*follows != "-").then(|| (*follows).to_owned()),
        epoch: epoch.parse().ok()?,
        slots: slots.iter().filter_map(|word| parse_slots(word)).collect(),
        migrating: slots.iter().filter_map(|word| parse_migrating(word)).collect(),
    })
}

/// `7` or `7-9`.
fn parse_slots(word: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = word.split_once('-').unwrap_or((word, word));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

/// `[7->-id]`: slot 7 is on its way to that node.
fn parse_migrating(word: &str) -> Option<(u16, String)> {
    let (slot, to) = word.strip_prefix('[')?.strip_suffix(']')?.split_once("->-")?;
    Some((slot.parse().ok()?, to.to_owned()))
}
