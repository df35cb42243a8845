//! What the user wrote -> validated values that build the service. The only room that reads files.
//!
//! Layers, each over the one before: defaults, the file, `TOLLGATE_*`, flags. Every mistake of a run is reported at once,
//! each with the place it was made in.

mod file;
mod guard;
mod layers;
mod store;
mod text;
mod tree;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use sha2::{Digest, Sha256};
use tollgate::{
    FixedWindow, GuardConfig, IntervalBucket, LeakyBucket, LeakyMode, Limit, LimitError, MemoryConfig,
    OnFailure, RedisConfig, SlidingCounter, SlidingLog, TokenBucket,
};

pub use self::file::{AddressHeader, LogFormat, schema};
use self::file::{Api, ConfigFile, Refill};
use self::layers::Layers;
use self::text::NetworkText;
pub use self::tree::Position;

/// Everything the service is built from.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the API listens.
    pub listen: SocketAddr,
    /// Where the actuator listens if the API is not on a loopback address.
    pub admin_listen: SocketAddr,
    /// Where the state is kept.
    pub store: Store,
    /// What happens while the store does not decide.
    pub guard: GuardConfig,
    /// The limits of the plain API, one for each algorithm, and what each asks of the guard.
    pub limits: Vec<(Limit, OnFailure)>,
    /// The status of a check that is refused because the store does not decide.
    pub closed_status: u16,
    /// SHA-256 of the tokens that callers may show.
    pub token_digests: Vec<[u8; 32]>,
    /// Callers that need no token.
    pub trusted_callers: Vec<IpNet>,
    /// How the client's address is found.
    pub client_address: ClientAddress,
    /// How connections are held.
    pub server: Serving,
    /// `error` to `trace`, or a filter such as `tollgate_server=debug`.
    pub log_level: String,
    /// How log lines look.
    pub log_format: LogFormat,
}

/// Where the state of all keys is kept.
#[derive(Clone)]
pub enum Store {
    /// In this process.
    Memory(MemoryConfig),
    /// In a store that many nodes share.
    Redis {
        /// Which one, and how it is used.
        config: Box<RedisConfig>,
        /// Whether the service ends if it cannot be reached at start.
        require: bool,
    },
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(_) => f.write_str("memory"),
            Self::Redis { config, .. } => config.url.fmt(f),
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({self})")
    }
}

/// Which peers are believed what they say of the client's address.
#[derive(Clone, Debug, Default)]
pub struct ClientAddress {
    /// The one header that is read, if any.
    pub header: Option<AddressHeader>,
    /// Peers, and hops, that are believed.
    pub trusted_proxies: Vec<IpNet>,
    /// How much of an IPv6 address is one client.
    pub ipv6_prefix: u8,
}

/// Limits of connections, in number and in time.
#[derive(Clone, Copy, Debug)]
pub struct Serving {
    /// Connections at the same time.
    pub max_connections: usize,
    /// Of these, from one address that is not loopback.
    pub max_connections_per_address: usize,
    /// From the first byte of a request to the end of its head.
    pub header_timeout: Duration,
    /// For the whole body.
    pub body_timeout: Duration,
    /// Between two requests.
    pub idle_timeout: Duration,
    /// For load balancers to look elsewhere, when the service is told to stop.
    pub drain_delay: Duration,
    /// For requests under way after that.
    pub drain_timeout: Duration,
}

/// Mistakes, each with its place.
#[derive(Debug)]
pub struct ConfigErrors(pub Vec<ConfigError>);

/// One mistake.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigError {
    /// `tollgate.yaml`, `TOLLGATE_LISTEN`, `--listen`.
    pub place: String,
    /// Where in the file.
    pub position: Option<Position>,
    /// `memory.max_keys`; empty for the whole file.
    pub field: String,
    /// What is wrong, and what is accepted.
    pub why: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)?;
        if let Some(Position { line, column }) = self.position {
            write!(f, ":{line}:{column}")?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.why)
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> = self.0.iter().map(ConfigError::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for ConfigErrors {}

/// What is set on the command line, as `(field, flag, value)`.
pub type Flags = Vec<(&'static str, &'static str, String)>;

/// Reads all layers. `variables` is the environment.
pub fn load(
    path: Option<&Path>,
    variables: impl Iterator<Item = (String, String)>,
    flags: Flags,
) -> Result<Config, ConfigErrors> {
    let mut layers = Layers::default();
    if let Some(path) = path {
        let text = std::fs::read_to_string(path).map_err(|why| {
            ConfigErrors(vec![ConfigError {
                place: path.display().to_string(),
                position: None,
                field: String::new(),
                why: format!("cannot be read: {why}"),
            }])
        })?;
        layers.file(&path.display().to_string(), &text);
    }
    layers.environment(variables);
    for (field, flag, value) in flags {
        layers.set(field, flag, &value);
    }
    let (file, mut errors, removed) = layers.read();
    let config = validate(&file, &mut |field, why| errors.push(layers.error(field, &removed, why)));
    errors.sort_by_key(|error| error.position);
    if errors.is_empty() { Ok(config) } else { Err(ConfigErrors(errors)) }
}

/// From what was written to what it means. Mistakes are reported and replaced by what keeps the others visible.
fn validate(file: &ConfigFile, report: &mut dyn FnMut(&str, String)) -> Config {
    if !file.admin.listen.0.ip().is_loopback() {
        report("admin.listen", "must be a loopback address: the actuator has no authentication".to_owned());
    }
    for (index, net) in networks(&file.client_address.trusted_proxies).iter().enumerate() {
        check_network(net, |why| report(&format!("client_address.trusted_proxies.{index}"), why));
    }
    for (index, net) in networks(&file.api.trusted_callers).iter().enumerate() {
        check_network(net, |why| report(&format!("api.trusted_callers.{index}"), why));
    }
    if file.client_address.header.is_some() && file.client_address.trusted_proxies.is_empty() {
        report(
            "client_address.header",
            "is read from trusted proxies only, and trusted_proxies is empty".to_owned(),
        );
    }
    if !(1..=128).contains(&file.client_address.ipv6_prefix) {
        report("client_address.ipv6_prefix", "between 1 and 128".to_owned());
    }
    for (field, connections) in [
        ("server.max_connections", file.server.max_connections),
        ("server.max_connections_per_address", file.server.max_connections_per_address),
    ] {
        if connections == 0 {
            report(field, "at least 1".to_owned());
        }
    }
    for (field, timeout) in [
        ("server.header_timeout", file.server.header_timeout.0),
        ("server.body_timeout", file.server.body_timeout.0),
        ("server.idle_timeout", file.server.idle_timeout.0),
    ] {
        if timeout < Duration::from_millis(1) {
            report(field, "at least 1ms".to_owned());
        }
    }
    if ![503, 429].contains(&file.api.closed_status) {
        report("api.closed_status", "503 or 429".to_owned());
    }
    if file.log.level.parse::<tracing_subscriber::EnvFilter>().is_err() {
        report(
            "log.level",
            "accepted: error, warn, info, debug, trace, or a filter such as tollgate_server=debug".to_owned(),
        );
    }
    let token_digests = match &file.api.token_file {
        Some(path) => read_tokens(path).unwrap_or_else(|why| {
            report("api.token_file", why);
            Vec::new()
        }),
        None => Vec::new(),
    };
    Config {
        listen: file.listen.0,
        admin_listen: file.admin.listen.0,
        store: store::validate(file, report),
        guard: guard::validate(&file.guard, report),
        limits: limits(&file.api, report),
        closed_status: file.api.closed_status,
        token_digests,
        trusted_callers: networks(&file.api.trusted_callers),
        client_address: ClientAddress {
            header: file.client_address.header,
            trusted_proxies: networks(&file.client_address.trusted_proxies),
            ipv6_prefix: file.client_address.ipv6_prefix,
        },
        server: Serving {
            max_connections: file.server.max_connections,
            max_connections_per_address: file.server.max_connections_per_address,
            header_timeout: file.server.header_timeout.0,
            body_timeout: file.server.body_timeout.0,
            idle_timeout: file.server.idle_timeout.0,
            drain_delay: file.server.drain_delay.0,
            drain_timeout: file.server.drain_timeout.0,
        },
        log_level: file.log.level.clone(),
        log_format: file.log.format,
    }
}

fn networks(texts: &[NetworkText]) -> Vec<IpNet> {
    texts.iter().map(|network| network.0).collect()
}

/// Networks that would believe everybody, or that do not say what they seem to.
fn check_network(net: &IpNet, mut report: impl FnMut(String)) {
    if net.prefix_len() == 0 {
        report(format!("{net} would trust everybody"));
    }
    if let IpNet::V6(v6) = net
        && v6.network().to_ipv4_mapped().is_some()
    {
        report(format!("{net}: write IPv4 networks as IPv4"));
    }
    if net.trunc() != *net {
        report(format!("{net} has bits beyond its prefix; did you mean {}?", net.trunc()));
    }
}

/// Shorter tokens could be guessed.
const TOKEN_CHARS_MIN: usize = 16;

/// One token a line; of each only its digest is kept.
fn read_tokens(path: &Path) -> Result<Vec<[u8; 32]>, String> {
    let text =
        std::fs::read_to_string(path).map_err(|why| format!("{} cannot be read: {why}", path.display()))?;
    let tokens: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if let Some(line) = tokens.iter().position(|token| token.len() < TOKEN_CHARS_MIN) {
        return Err(format!(
            "token {} of {} has fewer than {TOKEN_CHARS_MIN} characters",
            line + 1,
            path.display()
        ));
    }
    Ok(tokens.into_iter().map(|token| Sha256::digest(token).into()).collect())
}

/// A log keeps an entry for every admission: beyond this, a window belongs in a counter.
const LOG_LIMIT_MAX: u64 = 100_000;

fn limits(api: &Api, report: &mut dyn FnMut(&str, String)) -> Vec<(Limit, OnFailure)> {
    let defaults = &api.defaults;
    let bucket = &defaults.token_bucket;
    let leaky = &defaults.leaky_bucket;
    let window = &defaults.fixed_window;
    let log = &defaults.sliding_window;
    let counter = &defaults.sliding_window_counter;
    let sub_buckets = counter.sub_buckets.unwrap_or(if counter.strict { 10 } else { 1 });
    if log.limit.0.permits() > LOG_LIMIT_MAX {
        report(
            "api.defaults.sliding_window.limit",
            format!("at most {LOG_LIMIT_MAX} permits; a log keeps every one of them"),
        );
    }
    let made: [(&str, Result<Limit, LimitError>); 5] = [
        (
            "api.defaults.token_bucket",
            match bucket.refill {
                Refill::Greedy => {
                    TokenBucket::new(bucket.capacity, bucket.refill_rate.0).map(Limit::TokenBucket)
                }
                Refill::Interval => {
                    IntervalBucket::new(bucket.capacity, bucket.refill_rate.0).map(Limit::IntervalBucket)
                }
            },
        ),
        (
            "api.defaults.leaky_bucket",
            LeakyBucket::new(leaky.size, leaky.outflow.0, LeakyMode::Meter).map(Limit::LeakyBucket),
        ),
        (
            "api.defaults.fixed_window",
            FixedWindow::new(window.limit.0)
                .map(|it| Limit::FixedWindow(it.counting_denied(window.count_denied))),
        ),
        (
            "api.defaults.sliding_window",
            SlidingLog::new(log.limit.0).map(|it| Limit::SlidingLog(it.counting_denied(log.count_denied))),
        ),
        (
            "api.defaults.sliding_window_counter",
            SlidingCounter::new(counter.limit.0, sub_buckets, counter.strict)
                .map(|it| Limit::SlidingCounter(it.counting_denied(counter.count_denied))),
        ),
    ];
    let on_failure = [
        guard::on_failure(api, bucket.on_store_failure, bucket.settle_debt, bucket.deadline),
        guard::on_failure(api, leaky.on_store_failure, leaky.settle_debt, leaky.deadline),
        guard::on_failure(api, window.on_store_failure, window.settle_debt, window.deadline),
        guard::on_failure(api, log.on_store_failure, log.settle_debt, log.deadline),
        guard::on_failure(api, counter.on_store_failure, counter.settle_debt, counter.deadline),
    ];
    let mut limits = Vec::with_capacity(made.len());
    for ((field, limit), on_failure) in made.into_iter().zip(on_failure) {
        if on_failure.deadline.is_some_and(|deadline| deadline < Duration::from_millis(1)) {
            report(&format!("{field}.deadline"), "at least 1ms".to_owned());
        }
        match limit {
            Ok(limit) => limits.push((limit, on_failure)),
            Err(why) => report(field, why.to_string()),
        }
    }
    limits
}

/// The file that is named on the command line or in the environment; none is read unless named.
pub fn named_file(flag: Option<PathBuf>) -> Option<PathBuf> {
    flag.or_else(|| std::env::var_os("TOLLGATE_CONFIG").map(PathBuf::from))
}
