//! The configuration file, field for field, with its defaults. The JSON Schema is derived from it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use tollgate::{KeyPrefix, Rate, Share};

use super::identity::Identity;
use super::limits::{Defaults, Settings};
use super::log_limit::SlidingWindow;
use super::policy::file::PolicyFile;
use super::text::{DurationText, ListenText, NetworkText, RateText, ShareText, Text};

/// Configuration of the Tollgate service.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
#[schemars(title = "Tollgate")]
pub(super) struct ConfigFile {
    /// Where the API listens.
    pub listen: ListenText,
    /// Where the state of all keys is kept: `memory`, or the address of a Redis or Valkey store: `redis://HOST`,
    /// `rediss://HOST` (TLS), `redis+unix:///PATH`, `redis+sentinel://HOST,HOST/MASTER`, `redis+cluster://HOST,HOST`.
    pub store: String,
    /// The admin port: health with details, info, metrics and `/admin`.
    pub admin: Admin,
    /// The listener for Redis clients.
    pub resp: Resp,
    /// The listener for gRPC.
    pub grpc: Grpc,
    /// The memory engine.
    pub memory: Memory,
    /// How a Redis or Valkey store is used. Its address is in `store`.
    pub redis: Redis,
    /// What happens while a store does not decide.
    pub guard: Guard,
    /// The exact log, SLIDING_WINDOW.
    pub sliding_window: SlidingWindow,
    /// The plain REST API.
    pub api: Api,
    /// How callers are identified: tokens, API keys, headers of trusted proxies.
    pub identity: Identity,
    /// Which limits `/api/v1/check` decides by: written here, or the path of a file with it, which is read again when it changes.
    pub policy: PolicySource,
    /// How the client's address is found.
    pub client_address: Address,
    /// How connections are held.
    pub server: Server,
    /// Log lines.
    pub log: Log,
}

impl Default for ConfigFile {
    fn default() -> Self {
        Self {
            listen: Text(SocketAddr::from(([127, 0, 0, 1], 8080))),
            store: "memory".to_owned(),
            admin: Admin::default(),
            resp: Resp::default(),
            grpc: Grpc::default(),
            memory: Memory::default(),
            redis: Redis::default(),
            guard: Guard::default(),
            sliding_window: SlidingWindow::default(),
            api: Api::default(),
            identity: Identity::default(),
            policy: PolicySource::default(),
            client_address: Address::default(),
            server: Server::default(),
            log: Log::default(),
        }
    }
}

/// A policy, or the path of a file with one.
#[derive(Deserialize, Serialize, Debug, Default)]
#[serde(transparent)]
pub(super) struct PolicySource(pub serde_json::Value);

impl JsonSchema for PolicySource {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Policy or path".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let policy = generator.subschema_for::<PolicyFile>();
        json_schema!({ "anyOf": [policy, { "type": "string" }, { "type": "null" }] })
    }
}

/// The admin port: health with details, info, metrics and `/admin`. The API's port has them, too, while it is a loopback address
/// and no tokens are configured.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Admin {
    /// Where the admin port listens: any address. 127.0.0.1:8090 by default, if the API's port does not have these pages.
    pub listen: Option<ListenText>,
    /// A file with lines `NAME:TOKEN`. `/admin` needs one of the tokens (`Authorization: Bearer TOKEN`), and the log shows the name
    /// with each change. Without it `/admin` is open on loopback, and answers 403 beyond.
    pub token_file: Option<PathBuf>,
}

/// The Redis protocol (RESP), for Redis clients: `CL.THROTTLE` and `TG.CHECK`.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Resp {
    /// Where Redis clients connect, such as 127.0.0.1:6380. Not set: nowhere. Beyond loopback clients need a token of `api.token_file`
    /// (`AUTH TOKEN`) or an address in `api.trusted_callers`.
    pub listen: Option<ListenText>,
}

/// The gRPC listener: Envoy's Rate Limit Service, health and reflection. Calls are decided by the policy.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Grpc {
    /// Where gRPC listens; without it, nowhere. On other addresses than loopback, callers need a token of `api.token_file` or an
    /// address in `api.trusted_callers`.
    pub listen: Option<ListenText>,
}

/// The memory engine.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Memory {
    /// Keys kept at the same time, at most 48 bytes each: up to 1,000,000,000. Beyond it, keys that have used the least of their limit go first.
    pub max_keys: u64,
}

impl Default for Memory {
    fn default() -> Self {
        Self { max_keys: 1_000_000 }
    }
}

/// How a Redis or Valkey store is used. Its address is in `store`.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Redis {
    /// For one check, with everything: waiting for others, for a connection, for the answer.
    pub deadline: DurationText,
    /// For one call of a limit with leases. Callers are answered within `deadline`, but the call goes on, so that a store that is
    /// far away still lends.
    pub lease_deadline: DurationText,
    /// For one connection to be opened.
    pub connect_timeout: DurationText,
    /// Connections to each server; one keeps a core of it busy.
    pub connections: usize,
    /// Whether the service ends if the store cannot be reached at start; it goes on trying otherwise.
    pub require: bool,
    /// How long a denial is answered without asking the store again, as long as it can be no other: at most 100ms, within
    /// which resets and refunds by other nodes are seen.
    pub remember_denials: DurationText,
    /// Whether this node says once a second that it lives, and hears how many do, in `PREFIX:nodes`: without it, its share
    /// of a limit that it decides alone is `guard.local_share`.
    pub count_nodes: bool,
    /// What heads every key in the store, so that several installations can share one: letters, digits and _ - . : only.
    pub key_prefix: String,
    /// In place of the one in the address.
    pub username: Option<String>,
    /// In place of the one in the address. Better kept in `password_file` or in TOLLGATE_REDIS__PASSWORD.
    pub password: Option<String>,
    /// A file that holds the password.
    pub password_file: Option<PathBuf>,
    /// The user at the sentinels, if they ask for one.
    pub sentinel_username: Option<String>,
    /// A file that holds the password at the sentinels.
    pub sentinel_password_file: Option<PathBuf>,
    /// Certificates for `rediss://`.
    pub tls: Tls,
}

impl Default for Redis {
    fn default() -> Self {
        Self {
            deadline: Text(Duration::from_millis(10)),
            lease_deadline: Text(Duration::from_millis(500)),
            connect_timeout: Text(Duration::from_secs(1)),
            connections: 1,
            require: false,
            remember_denials: Text(Duration::from_millis(80)),
            count_nodes: true,
            key_prefix: KeyPrefix::default().to_string(),
            username: None,
            password: None,
            password_file: None,
            sentinel_username: None,
            sentinel_password_file: None,
            tls: Tls::default(),
        }
    }
}

/// Certificates for `rediss://`, in PEM. Without them the system's are trusted.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Tls {
    /// Whom to trust instead of the system's certificates.
    pub ca_file: Option<PathBuf>,
    /// The client's own certificate, for servers that want one.
    pub cert_file: Option<PathBuf>,
    /// Its key.
    pub key_file: Option<PathBuf>,
}

/// What happens while a store does not decide. Which of it a limit asks for is said by its `on_store_failure`.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Guard {
    /// When a server of the store that fails is left alone, and when it is asked again.
    pub breaker: Breaker,
    /// This node's share of a limit that it decides alone, while it is not known how many nodes there are.
    pub local_share: ShareText,
    /// Keys that are decided by this node alone, at most 48 bytes each.
    pub local_max_keys: u64,
    /// How many requests the whole node lets through while it fails open. None by default: all of them.
    pub open_ceiling: Option<Ceiling>,
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            breaker: Breaker::default(),
            local_share: Text(Share::HALF),
            local_max_keys: 100_000,
            open_ceiling: None,
        }
    }
}

/// When a server of the store that fails is left alone, and when it is asked again.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Breaker {
    /// Percent of the last calls that have failed.
    pub failure_rate_threshold: u32,
    /// How many calls these are: 1 to 64.
    pub sliding_window_size: u32,
    /// How long the server is left alone, and up to a quarter more; less if there is a new connection to it, or if it was only
    /// slow and is prompt again.
    pub wait_duration_in_open_state: DurationText,
    /// Calls, one after another, that must succeed before all go through again.
    pub permitted_calls_in_half_open_state: u32,
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            failure_rate_threshold: 50,
            sliding_window_size: 10,
            wait_duration_in_open_state: Text(Duration::from_millis(500)),
            permitted_calls_in_half_open_state: 3,
        }
    }
}

/// A bucket of requests.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Ceiling {
    /// The most requests at once.
    pub burst: u64,
    /// Requests in the long run.
    pub rate: RateText,
}

impl Default for Ceiling {
    fn default() -> Self {
        Self { burst: 1_000, rate: Text(Rate::per_second(1_000)) }
    }
}

/// What happens to a check that the store does not decide.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum OnStoreFailure {
    /// It is let through while the store cannot be reached. If the store is only too slow or full, it is decided as with `local`.
    Open,
    /// It is refused.
    Closed,
    /// It is decided by this node alone, with its share of the limit.
    Local,
}

/// How a limit is kept that many nodes share through a store.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, Debug)]
#[serde(rename_all = "snake_case")]
pub(super) enum ConsistencyName {
    /// Every check is decided by the store.
    Strict,
    /// Nodes borrow permits from the store and decide by themselves; never more than the limit, in any interval. Limits that are
    /// too small for that, logs and queues stay strict: `config check` says so.
    Lease,
    /// The same with a little less care: a burst can be larger by what `config check` says.
    LeaseFast,
}

/// The plain REST API.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Api {
    /// The limit of each algorithm.
    pub defaults: Defaults,
    /// A file with one token a line; lines that begin with # are comments. Callers that show one (`Authorization: Bearer ...`) may
    /// name keys. Without it, so may all callers of a loopback address.
    pub token_file: Option<PathBuf>,
    /// Networks whose callers need no token.
    pub trusted_callers: Vec<NetworkText>,
    /// Host names under which a loopback address without tokens is called, beside `localhost` and loopback addresses: without port.
    pub allowed_hosts: Vec<String>,
    /// For every limit that does not say it itself, those of policies too.
    pub consistency: ConsistencyName,
    /// For every limit that does not say it itself, those of policies too.
    pub on_store_failure: OnStoreFailure,
    /// Whether what `local` has admitted is taken from the store's state afterwards, into bounded debt. For every limit that does not
    /// say it itself, those of policies too.
    pub settle_debt: bool,
    /// The status of a check that is refused because the store does not decide: 503, or 429.
    pub closed_status: u16,
}

impl Api {
    /// The settings for every limit that does not have its own.
    pub(super) fn settings(&self) -> Settings {
        Settings {
            consistency: Some(self.consistency),
            on_store_failure: Some(self.on_store_failure),
            settle_debt: Some(self.settle_debt),
            ..Settings::default()
        }
    }
}

impl Default for Api {
    fn default() -> Self {
        Self {
            defaults: Defaults::default(),
            token_file: None,
            trusted_callers: Vec::new(),
            allowed_hosts: Vec::new(),
            consistency: ConsistencyName::Strict,
            on_store_failure: OnStoreFailure::Open,
            settle_debt: false,
            closed_status: 503,
        }
    }
}

/// How the client's address is found when a request names no key.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Address {
    /// The one header that is read, from trusted proxies only. None by default: the address of the connection counts.
    pub header: Option<AddressHeader>,
    /// Networks of the proxies that are believed.
    pub trusted_proxies: Vec<NetworkText>,
    /// How many bits of an IPv6 address are one client.
    pub ipv6_prefix: u8,
}

impl Default for Address {
    fn default() -> Self {
        Self { header: None, trusted_proxies: Vec::new(), ipv6_prefix: 64 }
    }
}

/// Headers in which proxies name the client.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressHeader {
    /// `X-Forwarded-For: client, proxy, proxy`
    #[serde(rename = "X-Forwarded-For")]
    XForwardedFor,
    /// `X-Real-IP: client`
    #[serde(rename = "X-Real-IP")]
    XRealIp,
    /// `Forwarded: for=client;by=proxy, for=proxy`
    #[serde(rename = "Forwarded")]
    Forwarded,
}

/// How connections are held.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Server {
    /// Connections at the same time. A further one takes the place of the one that has waited for its client for longest, or waits if
    /// all have a request that is being answered.
    pub max_connections: usize,
    /// Of these, from one address that is not loopback, but at most a quarter of all; further ones are closed. IPv6 addresses count by
    /// `client_address.ipv6_prefix`.
    pub max_connections_per_address: usize,
    /// Memory for the bodies of all requests together. A body beyond it is answered with 503. Callers that may not name keys have half of
    /// it, and each of their addresses a sixteenth.
    pub max_body_bytes: usize,
    /// From the first byte of a request to the end of its head.
    pub header_timeout: DurationText,
    /// For the whole body of a request.
    pub body_timeout: DurationText,
    /// Between two requests of a connection.
    pub idle_timeout: DurationText,
    /// How long connections are still accepted after the service was told to stop, while its health says 503: the time that
    /// load balancers need to look elsewhere.
    pub drain_delay: DurationText,
    /// For the requests under way after that.
    pub drain_timeout: DurationText,
}

impl Default for Server {
    fn default() -> Self {
        let secs = |secs| Text(Duration::from_secs(secs));
        Self {
            max_connections: 10_000,
            max_connections_per_address: 1_000,
            max_body_bytes: 64 * 1024 * 1024,
            header_timeout: secs(5),
            body_timeout: secs(10),
            idle_timeout: secs(60),
            drain_delay: secs(0),
            drain_timeout: secs(10),
        }
    }
}

/// Log lines.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Log {
    /// error, warn (or warning), info, debug (every decision), trace, off, or a filter such as tollgate_server=debug.
    pub level: String,
    /// How log lines look.
    pub format: LogFormat,
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Auto }
    }
}

/// How log lines look.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Pretty on a terminal, JSON otherwise.
    Auto,
    /// For people.
    Pretty,
    /// For machines.
    Json,
}

/// The JSON Schema of the file. A section may be empty, as it is when all of its lines are commented out.
pub fn schema() -> serde_json::Value {
    let mut schema = schemars::schema_for!(ConfigFile).to_value();
    schema["$id"] = "urn:tollgate:config".into();
    let definitions = schema["$defs"].clone();
    for field in schema["properties"].as_object_mut().into_iter().flat_map(|fields| fields.values_mut()) {
        let Some(reference) = field["$ref"].as_str().map(str::to_owned) else { continue };
        let name = reference.strip_prefix("#/$defs/").unwrap_or_default();
        if definitions[name]["type"] == "object" {
            field.as_object_mut().and_then(|field| field.remove("$ref"));
            field["anyOf"] = serde_json::json!([{ "$ref": reference }, { "type": "null" }]);
        }
    }
    schema
}
