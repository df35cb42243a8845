//! What a server says of its primary and its replicas.

use std::net::SocketAddr;

use crate::resp::{Fault, ask};

/// Whether a server says this among what it knows of itself.
pub(crate) fn says(server: SocketAddr, section: &str, what: &str) -> bool {
    ask(server, &["INFO", section]).is_ok_and(|info| info.text().contains(what))
}

/// Has an empty primary write something that its replicas can confirm. A replica whose link is up may still get nothing
/// for a second, until it has reported for the first time; what was written in that second would be lost with the
/// primary, which tests do not expect of replicas that were waited for.
pub(crate) fn write_to_replicas(primary: SocketAddr) -> Result<(), Fault> {
    // Handed on even where there is nothing to delete.
    ask(primary, &["FLUSHALL"]).map(drop)
}

/// Whether this number of replicas has confirmed all writes of a primary.
pub(crate) fn is_confirmed(primary: SocketAddr, replicas: usize) -> bool {
    let info = ask(primary, &["INFO", "replication"]).map(|info| info.text()).unwrap_or_default();
    let Some(written) = info.lines().find_map(|line| line.strip_prefix("master_repl_offset:")) else {
        return false;
    };
    let confirmed = |line: &&str| line.starts_with("slave") && line.contains(&format!("offset={written},"));
    info.lines().filter(confirmed).count() == replicas
}
