//! A primary with two replicas, watched by three sentinels.

use std::net::SocketAddr;
use std::time::Duration;

use crate::process::wait_at_most;
use crate::redis::RedisServer;
use crate::replication::{is_confirmed, says, write_to_replicas};
use crate::resp::{Fault, Reply, ask};

/// How long the servers may take to find each other, or to elect another primary: some seconds, more on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// The name by which the sentinels know the primary.
const NAME: &str = "mymaster";

/// Three stores and the three sentinels that decide which of them is the primary. All stop when this is dropped.
#[derive(Debug)]
pub struct SentinelTrio {
    /// First, so that they are gone before they could wonder where the stores are.
    sentinels: Vec<RedisServer>,
    stores: Vec<RedisServer>,
}

impl SentinelTrio {
    /// Starts all six and waits until they know each other and the replicas follow the primary.
    ///
    /// # Panics
    /// If they do not start, or do not find each other.
    pub fn start() -> Self {
        let primary = RedisServer::build().tcp().start();
        let port = primary.tcp_address().port().to_string();
        let replica = || RedisServer::build().tcp().args(&["--replicaof", "127.0.0.1", &port]).start();
        let stores = vec![replica(), replica(), primary];
        let primary = stores[2].tcp_address();
        // A sentinel asks a healthy primary for its replicas only every ten seconds: they must be there the first time.
        wait_at_most(PATIENCE, "both replicas follow the primary", || {
            stores[..2]
                .iter()
                .all(|replica| says(replica.tcp_address(), "replication", "master_link_status:up"))
        });
        write_to_replicas(primary).unwrap_or_else(|why| panic!("the primary does not write: {why}"));
        wait_at_most(PATIENCE, "both replicas confirm a write", || is_confirmed(primary, 2));
        let sentinels = (0..3).map(|_| start_sentinel(&port)).collect();
        let trio = Self { sentinels, stores };
        wait_at_most(PATIENCE, "the sentinels know all replicas and each other", || {
            trio.sentinels().iter().all(|sentinel| {
                says(*sentinel, "sentinel", "status=ok")
                    && says(*sentinel, "sentinel", "slaves=2,sentinels=3")
            })
        });
        trio
    }

    /// Where the sentinels listen.
    pub fn sentinels(&self) -> Vec<SocketAddr> {
        self.sentinels.iter().map(RedisServer::tcp_address).collect()
    }

    /// The addresses of the sentinels and the name of the primary, as clients want them.
    pub fn url(&self) -> String {
        let sentinels: Vec<_> = self.sentinels().iter().map(SocketAddr::to_string).collect();
        format!("redis+sentinel://{}/{NAME}", sentinels.join(","))
    }

    /// Where the primary listens, as a sentinel says.
    ///
    /// # Panics
    /// If no sentinel answers.
    pub fn primary(&self) -> SocketAddr {
        self.opinions().first().copied().expect("a sentinel answers")
    }

    /// Has another store made the primary, and waits until all sentinels name it and it says so itself. The other two
    /// may still be on their way to follow it, and what the old one wrote meanwhile is lost.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn failover(&self) -> SocketAddr {
        let before = self.primary();
        // Just after another failover the sentinel says that one is in progress, or that no replica is good enough yet.
        wait_at_most(PATIENCE, "a sentinel begins a failover", || {
            self.ask_sentinel(&["SENTINEL", "FAILOVER", NAME]).is_ok()
        });
        self.wait_for_another_primary(before)
    }

    /// Waits until all sentinels name another primary than this one and it says so itself.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn wait_for_another_primary(&self, before: SocketAddr) -> SocketAddr {
        wait_at_most(PATIENCE, "the sentinels agree on another primary", || {
            let opinions = self.opinions();
            let Some(named) = opinions.first() else { return false };
            let agreed = opinions.iter().all(|now| *now != before && now == named);
            agreed && says(*named, "replication", "role:master")
        });
        self.primary()
    }

    /// Kills the store that is the primary, and gives back where it listened. The sentinels will elect another.
    ///
    /// # Panics
    /// If the sentinels name a server that is none of the three.
    pub fn kill_primary(&mut self) -> SocketAddr {
        let primary = self.primary();
        self.store_mut(primary).kill();
        primary
    }

    /// How long the sentinels miss a primary before they act: a second, unless set.
    ///
    /// # Panics
    /// If a sentinel does not take it.
    pub fn set_down_after(&self, time: Duration) {
        let ms = time.as_millis().to_string();
        for sentinel in self.sentinels() {
            ask(sentinel, &["SENTINEL", "SET", NAME, "down-after-milliseconds", &ms])
                .unwrap_or_else(|why| panic!("a sentinel did not take its patience: {why}"));
        }
    }

    /// Where the stores listen, be they running or not.
    pub fn stores(&self) -> Vec<SocketAddr> {
        self.stores.iter().map(RedisServer::tcp_address).collect()
    }

    /// One of the stores.
    ///
    /// # Panics
    /// If none listens there.
    pub fn store(&self, address: SocketAddr) -> &RedisServer {
        self.stores.iter().find(|store| store.tcp_address() == address).expect("a store listens there")
    }

    /// One of the stores, to be killed or restarted.
    ///
    /// # Panics
    /// If none listens there.
    pub fn store_mut(&mut self, address: SocketAddr) -> &mut RedisServer {
        self.stores.iter_mut().find(|store| store.tcp_address() == address).expect("a store listens there")
    }

    /// Which store each sentinel takes for the primary.
    fn opinions(&self) -> Vec<SocketAddr> {
        self.sentinels()
            .into_iter()
            .filter_map(|sentinel| ask(sentinel, &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]).ok())
            .filter_map(|reply| reply.text().replace('\n', ":").parse().ok())
            .collect()
    }

    fn ask_sentinel(&self, command: &[&str]) -> Result<Reply, Fault> {
        ask(self.sentinels[0].tcp_address(), command)
    }
}

fn start_sentinel(primary_port: &str) -> RedisServer {
    let configuration = format!(
        "sentinel monitor {NAME} 127.0.0.1 {primary_port} 2\n\
         sentinel down-after-milliseconds {NAME} 1000\n\
         sentinel failover-timeout {NAME} 3000\n"
    );
    let sentinel = RedisServer::build().tcp().sentinel(configuration).start();
    // By default they greet each other every two seconds, look at replicas every ten, and decide nothing for thirty after
    // the machine had no time for them: made for years, not for tests.
    let periods = ["PUBLISH-PERIOD", "200", "INFO-PERIOD", "500", "TILT-PERIOD", "1000"];
    ask(sentinel.tcp_address(), &[&["SENTINEL", "DEBUG"], &periods[..]].concat())
        .unwrap_or_else(|why| panic!("a sentinel did not take its periods: {why}"));
    sentinel
}
