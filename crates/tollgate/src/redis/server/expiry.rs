//! How a server frees keys that have expired.

use std::collections::HashMap;

use redis::Cmd;
use redis::aio::MultiplexedConnection;

use crate::redis::server::single;

const SETTING: &str = "lazyfree-lazy-expire";

/// Whether a server frees expired keys while others wait. Servers that do not let this user ask count as well set.
pub(in crate::redis) async fn blocks_on_expiry(connection: &mut MultiplexedConnection) -> bool {
    let mut ask = Cmd::new();
    ask.arg("CONFIG").arg("GET").arg(SETTING);
    let answer = single(connection.send_packed_command(&ask).await);
    let Ok(Ok(settings)) = answer.map(redis::from_redis_value::<HashMap<String, String>>) else {
        return false;
    };
    settings.get(SETTING).is_some_and(|value| value == "no")
}

pub(in crate::redis) fn warn_of_blocking_expiry(server: &str) {
    tracing::warn!(
        server,
        "{SETTING} is off: the server stops for milliseconds when a large log expires; set it to yes \
         (deploy/redis.conf)"
    );
}
