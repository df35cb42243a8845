//! Where the state is kept, from what was written of it.

use std::path::Path;
use std::time::Duration;

use tollgate::{KeyPrefix, KeyPrefixError, MemoryConfig, REMEMBER_MAX, RedisConfig, StoreUrl, TlsConfig};

use super::file::ConfigFile;
use super::{Store, guard};

/// Keys in memory: 48 GB, more than one node of a rate limiter should lose when it restarts.
const KEYS_MAX: u64 = 1_000_000_000;
/// Connections to one server: more than the cores of any machine keep busy.
const CONNECTIONS_MAX: usize = 64;

pub(super) fn validate(file: &ConfigFile, report: &mut dyn FnMut(&str, String)) -> Store {
    if !(1..=KEYS_MAX).contains(&file.memory.max_keys) {
        report("memory.max_keys", format!("at least 1, at most {KEYS_MAX}"));
    }
    let memory = MemoryConfig { max_keys: usize::try_from(file.memory.max_keys).unwrap_or(usize::MAX) };
    let redis = &file.redis;
    for (field, time) in [
        ("redis.deadline", redis.deadline.0),
        ("redis.lease_deadline", redis.lease_deadline.0),
        ("redis.connect_timeout", redis.connect_timeout.0),
    ] {
        if time < Duration::from_millis(1) {
            report(field, "at least 1ms".to_owned());
        }
    }
    if redis.remember_denials.0 > REMEMBER_MAX {
        let most = REMEMBER_MAX.as_millis();
        report(
            "redis.remember_denials",
            format!("at most {most}ms: changes by other nodes are seen within it"),
        );
    }
    if !(1..=CONNECTIONS_MAX).contains(&redis.connections) {
        report("redis.connections", format!("between 1 and {CONNECTIONS_MAX}"));
    }
    if redis.password.is_some() && redis.password_file.is_some() {
        report("redis.password_file", "redis.password is set, too: leave one of the two out".to_owned());
    }
    let key_prefix = redis.key_prefix.parse().unwrap_or_else(|why: KeyPrefixError| {
        report("redis.key_prefix", format!("{why}, not {}", redis.key_prefix));
        KeyPrefix::default()
    });
    let breaker = guard::breaker(&file.guard.breaker, report);
    let mut read = |field: &str, path: &Option<std::path::PathBuf>| {
        path.as_deref().and_then(|path| read_bytes(path).map_err(|why| report(field, why)).ok())
    };
    let password_file = read("redis.password_file", &redis.password_file);
    let sentinel_password = read("redis.sentinel_password_file", &redis.sentinel_password_file);
    let ca = read("redis.tls.ca_file", &redis.tls.ca_file);
    let cert = read("redis.tls.cert_file", &redis.tls.cert_file);
    let key = read("redis.tls.key_file", &redis.tls.key_file);
    if redis.tls.cert_file.is_some() != redis.tls.key_file.is_some() {
        report("redis.tls", "cert_file and key_file go together".to_owned());
    }
    if file.store == "memory" {
        return Store::Memory(memory);
    }
    let url: StoreUrl = match file.store.parse() {
        Ok(url) => url,
        Err(why) => {
            // Not what was written: it may hold a password.
            report("store", format!("{why}, or memory"));
            return Store::Memory(memory);
        }
    };
    let config = RedisConfig {
        deadline: redis.deadline.0,
        lease_deadline: redis.lease_deadline.0,
        connect_timeout: redis.connect_timeout.0,
        connections: redis.connections,
        username: redis.username.clone(),
        password: redis.password.clone().or_else(|| password_file.map(|bytes| secret(&bytes))),
        sentinel_username: redis.sentinel_username.clone(),
        sentinel_password: sentinel_password.map(|bytes| secret(&bytes)),
        tls: TlsConfig { ca, identity: cert.zip(key) },
        breaker,
        count_nodes: redis.count_nodes,
        key_prefix,
        remember_denials: redis.remember_denials.0,
        ..RedisConfig::new(url)
    };
    Store::Redis { config: Box::new(config), require: redis.require }
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|why| format!("{} cannot be read: {why}", path.display()))
}

/// What a file holds, without the line end that editors add.
fn secret(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches(['\r', '\n']).to_owned()
}
