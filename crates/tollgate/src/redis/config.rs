//! Which store, and how it is used.

use std::sync::Arc;
use std::time::Duration;

use redis::{ClientTlsConfig, TlsCertificates};
use tollgate_core::BreakerConfig;

use crate::clock::Clock;
use crate::redis::key_prefix::KeyPrefix;
use crate::redis::server::ConnectOptions;
use crate::redis::url::{Shape, StoreUrl};

/// Which store, and how it is used.
#[derive(Clone)]
pub struct RedisConfig {
    /// Where the store is.
    pub url: StoreUrl,
    /// For one check, with everything: waiting for others, for a connection, for the answer.
    pub deadline: Duration,
    /// For one call of a limit that nodes borrow from. Its callers wait for `deadline`, but the call goes on: a store that is far away
    /// lends all the same.
    pub lease_deadline: Duration,
    /// For one connection to be opened.
    pub connect_timeout: Duration,
    /// Connections to each server. One keeps a server's core busy, and one core of this machine.
    pub connections: usize,
    /// In place of what the URL says.
    pub username: Option<String>,
    /// In place of what the URL says.
    pub password: Option<String>,
    /// The user at the sentinels, if they ask for one.
    pub sentinel_username: Option<String>,
    /// The password at the sentinels, if they ask for one.
    pub sentinel_password: Option<String>,
    /// What TLS needs beyond the system's own certificates.
    pub tls: TlsConfig,
    /// When a server that fails is left alone, and when it is asked again.
    pub breaker: BreakerConfig,
    /// How long denials are remembered, at most [`REMEMBER_MAX`](super::REMEMBER_MAX). The default leaves time for the call that sees a change.
    pub remember_denials: Duration,
    /// Whether this node says once a second that it lives, and hears how many do: one more key, `PREFIX:nodes`.
    pub count_nodes: bool,
    /// What heads every key in the store.
    pub key_prefix: KeyPrefix,
    /// The time by which everything is decided, instead of the server's own: for tests and replays.
    pub clock: Option<Clock>,
}

/// Certificates, in PEM.
#[derive(Clone, Default)]
pub struct TlsConfig {
    /// Whom to trust instead of the system's certificates.
    pub ca: Option<Vec<u8>>,
    /// The client's own certificate and its key, for servers that want one.
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
