//! The eviction policy of a server.

use redis::RedisResult;
use redis::aio::MultiplexedConnection;

/// The `maxmemory-policy` of a server, if it says one. `INFO` shows it to users that may not read the configuration.
pub(crate) async fn maxmemory_policy(connection: &mut MultiplexedConnection) -> RedisResult<Option<String>> {
    let info: String = redis::cmd("INFO").arg("memory").query_async(connection).await?;
    Ok(info.lines().find_map(|line| line.strip_prefix("maxmemory_policy:")).map(|it| it.trim().to_owned()))
}

/// Whether a server with this `maxmemory-policy` may evict states. All states have a time to live, so `volatile-*` concerns them as
/// `allkeys-*` does.
pub(crate) fn evicts(policy: &str) -> bool {
    policy != "noeviction"
}
