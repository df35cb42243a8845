//! What a server does when its memory is full.

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisResult};

use crate::redis::server::single;

/// The policy under which a full server refuses writes. Under every other one it may drop states, and with them what was consumed: all
/// states have a time to live, so `volatile-*` concerns them as `allkeys-*` does.
const KEEPS_ALL: &str = "noeviction";

/// The `maxmemory-policy` of a server, if it says one. `INFO` tells it to users who may not read the configuration.
pub(in crate::redis) async fn maxmemory_policy(
    connection: &mut MultiplexedConnection,
) -> RedisResult<Option<String>> {
    let mut ask = Cmd::new();
    ask.arg("INFO").arg("memory");
    let info: String = redis::from_redis_value(single(connection.send_packed_command(&ask).await)?)?;
    Ok(info.lines().find_map(|line| line.strip_prefix("maxmemory_policy:")).map(|it| it.trim().to_owned()))
}

/// Whether a server with this `maxmemory-policy` may drop states.
pub(in crate::redis) fn evicts(policy: &str) -> bool {
    policy != KEEPS_ALL
}
