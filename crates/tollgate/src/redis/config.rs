//! The configuration of the Redis engine.

use std::sync::Arc;
use std::time::Duration;

use redis::{ClientTlsConfig, TlsCertificates};
use tollgate_core::BreakerConfig;

use crate::clock::Clock;
use crate::redis::key_prefix::KeyPrefix;
use crate::redis::server::ConnectOptions;
use crate::redis::url::{Shape, StoreUrl};

/// The configuration of the Redis engine.
#[derive(Clone)]
pub struct RedisConfig {
    /// The address of the store.
    pub url: StoreUrl,
    /// The deadline of one check, including the wait for other calls, for a connection and for the answer.
    pub deadline: Duration,
    /// The deadline of one call of a limit that nodes borrow from. Its callers wait for `deadline`, but the call goes on, so that a slow
    /// store can lend too.
    pub lease_deadline: Duration,
    /// The time limit for opening a connection.
    pub connect_timeout: Duration,
    /// Connections to each server. One connection can keep a core of the server and of this machine busy.
    pub connections: usize,
    /// The user name, instead of the one in the URL.
    pub username: Option<String>,
    /// The password, instead of the one in the URL.
    pub password: Option<String>,
    /// The user at the sentinels, if they ask for one.
    pub sentinel_username: Option<String>,
    /// The password at the sentinels, if they ask for one.
    pub sentinel_password: Option<String>,
    /// Certificates for TLS beyond those of the system.
    pub tls: TlsConfig,
    /// The circuit breaker of each server.
    pub breaker: BreakerConfig,
    /// How long denials are cached, at most [`REMEMBER_MAX`](super::REMEMBER_MAX). The default leaves time for the call that sees a change.
    pub remember_denials: Duration,
    /// Whether this node sends a heartbeat once a second and counts the nodes: one more key, `PREFIX:nodes`.
    pub count_nodes: bool,
    /// The prefix of every key in the store.
    pub key_prefix: KeyPrefix,
    /// The clock that decides, instead of the clock of the server: for tests and replays.
    pub clock: Option<Clock>,
}

/// Certificates, in PEM.
#[derive(Clone, Default)]
pub struct TlsConfig {
    /// The certificate authority to trust, instead of those of the system.
    pub ca: Option<Vec<u8>>,
    /// The certificate and the key of this client, for servers that require one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl RedisConfig {
    /// The defaults for a store.
    pub fn new(url: StoreUrl) -> Self {
        Self {
            url,
            deadline: Duration::from_millis(10),
            lease_deadline: Duration::from_millis(500),
            connect_timeout: Duration::from_secs(1),
            connections: 1,
            username: None,
            password: None,
            sentinel_username: None,
            sentinel_password: None,
            tls: TlsConfig::default(),
            breaker: BreakerConfig::default(),
            remember_denials: Duration::from_millis(80),
            count_nodes: true,
            key_prefix: KeyPrefix::default(),
            clock: None,
        }
    }

    pub(super) fn connect_options(&self) -> ConnectOptions {
        let identity = self.tls.identity.as_ref();
        ConnectOptions {
            tls: self.url.tls,
            certificates: TlsCertificates {
                client_tls: identity.map(|(cert, key)| ClientTlsConfig {
                    client_cert: cert.clone(),
                    client_key: key.clone(),
                }),
                root_cert: self.tls.ca.clone(),
            },
            username: self.username.clone().or_else(|| self.url.username.clone()),
            password: self.password.clone().or_else(|| self.url.password.clone()),
            database: self.url.database,
            connect_timeout: self.connect_timeout,
            connections: self.connections,
            key_prefix: self.key_prefix.clone(),
            breaker: self.breaker,
            failovers: Some(Arc::default()),
            patience: self.deadline,
            primaries_only: matches!(self.url.shape, Shape::Sentinel { .. }),
        }
    }

    pub(super) fn sentinel_options(&self) -> ConnectOptions {
        ConnectOptions {
            username: self.sentinel_username.clone(),
            password: self.sentinel_password.clone(),
            database: 0,
            failovers: None,
            ..self.connect_options()
        }
    }
}
