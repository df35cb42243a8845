//! Three primaries, each with a replica, that share the 16,384 slots.

mod slot_move;
mod view;

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use crate::process::wait_at_most;
use crate::program::ServerProgram;
use crate::redis::{RedisServer, redis_cli};
use crate::replication::{is_confirmed, says, write_to_replicas};
use crate::resp::{Reply, ask};
use view::{Node, nodes_of};

/// How long the nodes may take to find each other, or to elect another primary: some seconds, more on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Six nodes. All stop when this is dropped.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<RedisServer>,
}

impl Cluster {
    /// Starts a cluster of Redis 7 and waits until it serves all slots and the replicas follow their primaries.
    ///
    /// # Panics
    /// If the nodes do not start, or do not find each other.
    pub fn start() -> Self {
        Self::start_with(ServerProgram::Redis)
    }

    /// Like [`Self::start`], with nodes of another program.
    ///
    /// # Panics
    /// If the nodes do not start, or do not find each other.
    pub fn start_with(program: ServerProgram) -> Self {
        let cluster = Self { nodes: (0..6).map(|_| start_node(program)).collect() };
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]);
        create.args(cluster.nodes.iter().map(|node| match node.bus_port() {
            Some(bus) => format!("{}@{bus}", node.tcp_address()),
            None => node.tcp_address().to_string(),
        }));
        redis_cli(create.args(["--cluster-replicas", "1", "--cluster-yes"]));
        wait_at_most(PATIENCE, "all nodes know each other and all replicas follow", || {
            cluster.nodes().into_iter().all(is_settled)
        });
        let nodes = cluster.nodes().into_iter();
        let primaries: Vec<_> = nodes.filter(|node| says(*node, "replication", "role:master")).collect();
        for primary in &primaries {
            write_to_replicas(*primary).unwrap_or_else(|why| panic!("a primary does not write: {why}"));
        }
        wait_at_most(PATIENCE, "all replicas confirm a write", || {
            primaries.iter().all(|primary| is_confirmed(*primary, 1))
        });
        cluster
    }

    /// Where all nodes listen, be they running or not.
    pub fn nodes(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(RedisServer::tcp_address).collect()
    }

    /// The addresses of three nodes, as clients want them.
    pub fn url(&self) -> String {
        let nodes: Vec<_> = self.nodes().iter().take(3).map(SocketAddr::to_string).collect();
        format!("redis+cluster://{}", nodes.join(","))
    }

    /// One of the nodes.
    ///
    /// # Panics
    /// If none listens there.
    pub fn node(&self, address: SocketAddr) -> &RedisServer {
        self.nodes.iter().find(|node| node.tcp_address() == address).expect("a node listens there")
    }

    /// One of the nodes, to be killed or restarted.
    ///
    /// # Panics
    /// If none listens there.
    pub fn node_mut(&mut self, address: SocketAddr) -> &mut RedisServer {
        self.nodes.iter_mut().find(|node| node.tcp_address() == address).expect("a node listens there")
    }

    /// The slot of a key, as the cluster says.
    ///
    /// # Panics
    /// If the first node does not answer.
    pub fn slot_of(&self, key: &str) -> u16 {
        let node = self.node(self.nodes()[0]);
        node.cli(&["CLUSTER", "KEYSLOT", key]).trim().parse().expect("a slot is a number")
    }

    /// The primary that serves a slot. While there is none, as after [`Self::kill_primary_of`], waits for the next.
    ///
    /// # Panics
    /// If there is none in the end.
    pub fn primary_of(&self, slot: u16) -> SocketAddr {
        self.owner(slot).address
    }

    /// A replica that follows this primary. While there is none, as just after an election, waits for one.
    ///
    /// # Panics
    /// If there is none in the end.
    pub fn replica_of(&self, primary: SocketAddr) -> SocketAddr {
        let id = command(primary, &["CLUSTER", "MYID"]).text();
        let mut replica = None;
        wait_at_most(PATIENCE, "a replica follows the primary", || {
            let mut nodes = self.views().into_iter().flatten().filter(|node| node.is_myself);
            replica = nodes.find(|node| node.follows.as_deref() == Some(&id)).map(|node| node.address);
            replica.is_some_and(|replica| says(replica, "replication", "master_link_status:up"))
        });
        replica.expect("it was waited for")
    }

    /// Kills the primary that serves a slot, and gives back where it listened. Its replica will take its place.
    ///
    /// # Panics
    /// If no primary serves the slot.
    pub fn kill_primary_of(&mut self, slot: u16) -> SocketAddr {
        let primary = self.primary_of(slot);
        self.node_mut(primary).kill();
        primary
    }

    /// Has the replica take the place of the primary that serves a slot, and waits until all nodes know.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn failover_of(&self, slot: u16) -> SocketAddr {
        let replica = self.replica_of(self.primary_of(slot));
        command(replica, &["CLUSTER", "FAILOVER"]);
        self.wait_until_all_know(slot, replica);
        replica
    }

    /// Waits until every running node knows who serves a slot.
    fn wait_until_all_know(&self, slot: u16, primary: SocketAddr) {
        wait_at_most(PATIENCE, "all nodes know who serves the slot", || {
            self.views().iter().all(|nodes| {
                nodes.iter().any(|node| node.address == primary && node.is_primary && node.serves(slot))
            })
        });
    }

    /// The node that says of itself that it serves a slot. Of two, the one that was elected later: the other does not
    /// know yet that it was replaced.
    fn owner(&self, slot: u16) -> Node {
        let mut owner = None;
        wait_at_most(PATIENCE, "a node serves the slot", || {
            let nodes = self.views().into_iter().flatten();
            let owners = nodes.filter(|node| node.is_myself && node.is_primary && node.serves(slot));
            owner = owners.max_by_key(|node| node.epoch);
            owner.is_some()
        });
        owner.expect("it was waited for")
    }

    /// What each node knows of all nodes. Those that are dead or paused have no say.
    fn views(&self) -> Vec<Vec<Node>> {
        let awake = self.nodes.iter().filter(|node| !node.is_paused());
        awake.filter_map(|node| nodes_of(node.tcp_address()).ok()).collect()
    }
}

fn start_node(program: ServerProgram) -> RedisServer {
    let node = RedisServer::build().program(program).tcp().cluster_node();
    node.args(&[
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        "1500",
        // Slots whose primary lives stay served while others are without one.
        "--cluster-require-full-coverage",
        "no",
        // However long ago a replica last heard its primary, it may take its place.
        "--cluster-replica-validity-factor",
        "0",
    ])
    .start()
}

fn is_settled(node: SocketAddr) -> bool {
    let state = ask(node, &["CLUSTER", "INFO"]).map(|reply| reply.text()).unwrap_or_default();
    let follows =
        says(node, "replication", "role:master") || says(node, "replication", "master_link_status:up");
    let replicas =
        nodes_of(node).map_or(0, |nodes| nodes.iter().filter(|node| node.follows.is_some()).count());
    state.contains("cluster_state:ok") && state.contains("cluster_known_nodes:6") && follows && replicas == 3
}

/// Gives a node a command that it must carry out.
fn command(node: SocketAddr, command: &[impl AsRef<[u8]>]) -> Reply {
    let shown =
        || command.iter().map(|part| String::from_utf8_lossy(part.as_ref())).collect::<Vec<_>>().join(" ");
    ask(node, command).unwrap_or_else(|why| panic!("{node} did not carry out {}: {why}", shown()))
}
