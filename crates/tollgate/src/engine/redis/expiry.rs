//! How a server frees keys that have expired.

use std::collections::HashMap;

use redis::Cmd;
use redis::aio::MultiplexedConnection;

use super::node::single;

const SETTING: &str = "lazyfree-lazy-expire";

/// Warns of a server that frees expired keys while others wait. Servers that do not let this user ask are not warned of.
pub(super) async fn warn_of_blocking_expiry(server: &str, connection: &mut MultiplexedConnection) {
    let mut ask = Cmd::new();
    ask.arg("CONFIG").arg("GET").arg(SETTING);
    let answer = single(connection.send_packed_command(&ask).await);
    let Ok(Ok(settings)) = answer.map(redis::from_redis_value::<HashMap<String, String>>) else { return };
    if settings.get(SETTING).is_some_and(|value| value == "no") {
        tracing::warn!(
            server,
            "{SETTING} is off: the server stops for milliseconds when a large log expires; set it to yes \
             (deploy/redis.conf)"
        );
    }
}
