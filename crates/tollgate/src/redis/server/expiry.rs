//! How a server frees expired keys.

use std::collections::HashMap;

use redis::RedisResult;
use redis::aio::MultiplexedConnection;

const SETTING: &str = "lazyfree-lazy-expire";

/// Whether a server frees expired keys while clients wait. A server that does not tell this user counts as well configured.
pub(crate) async fn blocks_on_expiry(connection: &mut MultiplexedConnection) -> bool {
    let settings: RedisResult<HashMap<String, String>> =
        redis::cmd("CONFIG").arg("GET").arg(SETTING).query_async(connection).await;
    settings.is_ok_and(|settings| settings.get(SETTING).is_some_and(|value| value == "no"))
}

pub(crate) fn warn_of_blocking_expiry(server: &str) {
    tracing::warn!(
        server,
        "{SETTING} is off: the server stops for milliseconds when a large log expires; set it to yes \
         (deploy/redis.conf)"
    );
}
