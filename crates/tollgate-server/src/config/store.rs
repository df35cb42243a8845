//! Where the state is kept, from what was written of it.

use std::path::PathBuf;

use tollgate::{KeyPrefix, KeyPrefixError, MemoryConfig, REMEMBER_MAX, RedisConfig, StoreUrl, TlsConfig};

use super::file::ConfigFile;
use super::secrets::read;
use super::{Store, guard};

pub(super) fn validate(file: &ConfigFile, report: &mut dyn FnMut(&str, String)) -> Store {
    let memory = MemoryConfig { max_keys: usize::try_from(file.memory.max_keys).unwrap_or(usize::MAX) };
    let redis = &file.redis;
    if redis.remember_denials.0 > REMEMBER_MAX {
        let most = REMEMBER_MAX.as_millis();
        report(
            "redis.remember_denials",
            format!("at most {most}ms: changes by other nodes are seen within it"),
        );
    }
    if redis.password.is_some() && redis.password_file.is_some() {
        report("redis.password_file", "redis.password is set, too: leave one of the two out".to_owned());
    }
    let key_prefix = redis.key_prefix.parse().unwrap_or_else(|why: KeyPrefixError| {
        report("redis.key_prefix", format!("{why}, not {}", redis.key_prefix));
        KeyPrefix::default()
    });
    let breaker = guard::breaker(&file.guard.breaker, report);
    let mut file_at = |field: &str, path: &Option<PathBuf>| {
        path.as_deref().and_then(|path| read(path).map_err(|why| report(field, why)).ok())
    };
    let password_file = file_at("redis.password_file", &redis.password_file);
    let sentinel_password = file_at("redis.sentinel_password_file", &redis.sentinel_password_file);
    let ca = file_at("redis.tls.ca_file", &redis.tls.ca_file);
    let cert = file_at("redis.tls.cert_file", &redis.tls.cert_file);
    let key = file_at("redis.tls.key_file", &redis.tls.key_file);
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
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let config = RedisConfig {
        deadline: redis.deadline.0,
        lease_deadline: redis.lease_deadline.0,
        connect_timeout: redis.connect_timeout.0,
        connections: redis.connections,
        username: redis.username.clone(),
        password: redis.password.clone().or_else(|| password_file.map(text)),
        sentinel_username: redis.sentinel_username.clone(),
        sentinel_password: sentinel_password.map(text),
        tls: TlsConfig { ca, identity: cert.zip(key) },
        breaker,
        count_nodes: redis.count_nodes,
        key_prefix,
        remember_denials: redis.remember_denials.0,
        ..RedisConfig::new(url)
    };
    Store::Redis { config: Box::new(config), require: redis.require }
}
