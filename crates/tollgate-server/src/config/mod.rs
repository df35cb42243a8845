//! What the user wrote -> validated values that build the service. The only room that reads files.
//!
//! Layers, each over the one before: defaults, the file, `TOLLGATE_*`, flags. Every mistake of a run is reported at once,
//! each with the place it was made in.

mod accepted;
mod environment;
mod file;
mod guard;
mod identity;
mod layers;
mod limits;
mod log;
mod log_limit;
mod mistakes;
mod policy;
mod secrets;
mod store;
mod text;
mod tree;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::de::DeserializeOwned;
use tollgate::{GuardConfig, Limit, LimitSettings, MemoryConfig, RedisConfig};

pub use self::environment::environment;
use self::file::ConfigFile;
pub use self::file::{AddressHeader, LogFormat, schema};
use self::layers::Layers;
use self::log_limit::LOG_LIMIT_CEILING;
use self::mistakes::MISTAKES_MAX;
pub use self::mistakes::{ConfigError, ConfigErrors};
pub use self::policy::{CheckedPolicy, PolicyContext, diff, figures};
pub(crate) use self::policy::{is_attribute_name, notes};
pub use self::secrets::Token;
use self::text::NetworkText;
use self::tree::Parsed;
pub use self::tree::Position;
use crate::identity::IdentityConfig;

/// Everything the service is built from.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the API listens.
    pub listen: SocketAddr,
    /// Where the admin port listens, if it was said.
    pub admin_listen: Option<SocketAddr>,
    /// Where Redis clients connect, if anywhere.
    pub resp_listen: Option<SocketAddr>,
    /// Where gRPC listens, if it does.
    pub grpc_listen: Option<SocketAddr>,
    /// The tokens of `/admin`.
    pub admin_tokens: Vec<Token>,
    /// Where the state is kept.
    pub store: Store,
    /// What happens while the store does not decide.
    pub guard: GuardConfig,
    /// The limits of the plain API, one for each algorithm, and how each is kept in a store.
    pub limits: Vec<(Limit, LimitSettings)>,
    /// Which limits requests are checked against.
    pub policy: PolicyConfig,
    /// How callers are identified.
    pub(crate) identity: Arc<IdentityConfig>,
    /// The status of a check that is refused because the store does not decide.
    pub closed_status: u16,
    /// The tokens of the API.
    pub token_digests: Vec<Token>,
    /// Callers that need no token.
    pub trusted_callers: Vec<IpNet>,
    /// Host names of a loopback address without tokens, beside those of loopback.
    pub allowed_hosts: Vec<String>,
    /// How the client's address is found.
    pub client_address: ClientAddress,
    /// How connections are held.
    pub server: Serving,
    /// Directives of a log filter, such as `info,tollgate_server=debug`.
    pub log_level: String,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Variables that look like settings and are none.
    warnings: Vec<String>,
}

impl Config {
    /// What there is to know about the limits beyond what was written.
    pub fn remarks(&self) -> Vec<String> {
        let of_limits = self.limits.iter().filter_map(limits::explain);
        of_limits
            .chain(self.policy.checked.remarks.iter().map(|remark| format!("policy: {remark}")))
            .collect()
    }

    /// What may be more than was meant.
    pub fn warnings(&self) -> Vec<String> {
        let of_limits = self.limits.iter().filter_map(|(limit, _)| log_limit::warning(limit));
        let of_variables = self.warnings.iter().cloned();
        of_variables
            .chain(of_limits)
            .chain(self.policy.checked.warnings.iter().map(|warning| format!("policy: {warning}")))
            .collect()
    }
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

/// The policy that the service starts with, and where it is read again.
#[derive(Clone, Debug)]
pub struct PolicyConfig {
    /// Where it is written.
    pub origin: PolicyOrigin,
    /// The policy.
    pub checked: CheckedPolicy,
    /// What this policy, and every one that follows it, is read with.
    pub context: PolicyContext,
}

impl fmt::Display for PolicyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = self.checked.policy.parts().rules.len();
        match &self.origin {
            PolicyOrigin::None => f.write_str("none (set one with --policy FILE)"),
            origin => write!(f, "{origin}, version {}, rules: {rules}", self.checked.version),
        }
    }
}

/// Where the policy of a node is written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PolicyOrigin {
    /// Nowhere: the node has no policy of its own.
    None,
    /// In the configuration, which is read at start only.
    Configuration,
    /// In a file of its own, which is read again when it changes.
    File(PathBuf),
}

impl PolicyOrigin {
    /// The file that is read again.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::None | Self::Configuration => None,
        }
    }
}

impl fmt::Display for PolicyOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::None | Self::Configuration => f.write_str("configuration"),
        }
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
    /// How much of an IPv6 address is one address in that count.
    pub ipv6_prefix: u8,
    /// Memory for the bodies of all requests together.
    pub max_body_bytes: usize,
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
        let expected = "expected fields, such as `listen: 127.0.0.1:8080`";
        layers.file(&path.display().to_string(), &read_file(path)?, expected);
    }
    layers.environment(variables);
    for (field, flag, value) in flags {
        layers.set(field, flag, &value);
    }
    layers.drop_empty_sections();
    layers.later_layer_wins(["redis.password", "redis.password_file"]);
    let (file, mut errors, removed) = layers.read::<ConfigFile>();
    let mut mistakes = Vec::new();
    let identity =
        identity::validate(&file.identity, &mut |field, why| mistakes.push((field.to_owned(), why)));
    let identity = Arc::new(identity);
    let context = PolicyContext {
        ipv6_prefix: file.client_address.ipv6_prefix,
        identity: Arc::clone(&identity),
        log_limit_max: file.sliding_window.max_limit,
        defaults: file.api.settings(),
    };
    let policy = policy_of(&file, &layers, path, context, &mut errors);
    let mut report = |field: &str, why: String| errors.push(layers.error(field, &removed, why));
    mistakes.into_iter().for_each(|(field, why)| report(&field, why));
    let mut config = validate(&file, policy, identity, &mut report);
    config.warnings = layers.warnings().to_vec();
    if errors.is_empty() { Ok(config) } else { Err(ConfigErrors::new(errors)) }
}

fn read_file(path: &Path) -> Result<String, ConfigErrors> {
    std::fs::read_to_string(path).map_err(|why| {
        let why = format!("cannot be read: {why}");
        ConfigErrors(vec![ConfigError::new(&path.display().to_string(), None, &[], &why)])
    })
}

/// The policy of a configuration: its own part, or a file beside it.
fn policy_of(
    file: &ConfigFile,
    layers: &Layers,
    config_path: Option<&Path>,
    context: PolicyContext,
    errors: &mut Vec<ConfigError>,
) -> PolicyConfig {
    match &file.policy.0 {
        serde_json::Value::String(name) => {
            let beside = config_path.and_then(Path::parent).filter(|_| !layers.is_set_outside("policy"));
            let path = beside.map_or_else(|| PathBuf::from(name), |folder| folder.join(name));
            let checked = load_policy(&path, &context).unwrap_or_else(|mistakes| {
                errors.extend(mistakes.0);
                CheckedPolicy::empty(&context)
            });
            PolicyConfig { origin: PolicyOrigin::File(path), checked, context }
        }
        serde_json::Value::Null => {
            PolicyConfig { origin: PolicyOrigin::None, checked: CheckedPolicy::empty(&context), context }
        }
        value => {
            let (checked, mistakes) = check_policy(&mut layers.part("policy", value.clone()), &context);
            errors.extend(mistakes);
            PolicyConfig { origin: PolicyOrigin::Configuration, checked, context }
        }
    }
}

/// Reads any YAML.
pub fn read_yaml(name: &str, text: &str) -> Result<serde_json::Value, ConfigErrors> {
    let Parsed { value, mistakes, .. } = tree::parse(text);
    let error = |(position, why): tree::Mistake| ConfigError::new(name, Some(position), &[], &why);
    if mistakes.is_empty() {
        Ok(value)
    } else {
        Err(ConfigErrors::new(mistakes.into_iter().map(error).collect()))
    }
}

/// Reads a file of another program and turns it into a value. `convert` reports mistakes by the paths of their fields.
pub(crate) fn read_foreign<T: DeserializeOwned + Default, R>(
    name: &str,
    text: &str,
    expected: &str,
    convert: impl FnOnce(&T, &mut dyn FnMut(&str, String)) -> R,
) -> Result<R, ConfigErrors> {
    let mut layers = Layers::default();
    layers.file(name, text, expected);
    let (file, mut errors, removed) = layers.read();
    // Fields that could not be read are missing now, which is no further mistake.
    let is_readable = errors.is_empty();
    let converted = convert(&file, &mut |field, why| {
        if is_readable && errors.len() < MISTAKES_MAX {
            errors.push(layers.error(field, &removed, why));
        }
    });
    if errors.is_empty() { Ok(converted) } else { Err(ConfigErrors::new(errors)) }
}

/// The JSON Schema of a policy.
pub fn policy_schema() -> serde_json::Value {
    let mut schema = schemars::schema_for!(policy::file::PolicyFile).to_value();
    schema["$id"] = "urn:tollgate:policy".into();
    schema
}

/// Reads the file of a policy.
pub fn load_policy(path: &Path, context: &PolicyContext) -> Result<CheckedPolicy, ConfigErrors> {
    read_policy(&path.display().to_string(), &read_file(path)?, context)
}

/// Reads a policy. `name` stands for it in what is said of mistakes.
pub fn read_policy(name: &str, text: &str, context: &PolicyContext) -> Result<CheckedPolicy, ConfigErrors> {
    let mut layers = Layers::default();
    layers.file(
        name,
        text,
        "a policy is not a list or a text: write `rules:`, and the rules below it, each with `- name: ...`",
    );
    if layers.value().get("policy").is_some() && layers.value().get("rules").is_none() {
        let why = "a file with a policy begins with `rules:`; `policy:` around it is for configuration files: remove this line, and the \
                   indentation below it";
        return Err(ConfigErrors(vec![ConfigError::new(
            name,
            Some(Position::START),
            &["policy".to_owned()],
            why,
        )]));
    }
    let says_nothing = layers.says_nothing();
    let (mut checked, mut errors) = check_policy(&mut layers, context);
    checked.text = text.into();
    if errors.is_empty() && says_nothing {
        // A file that is just being written, a pipe that broke: the rules of the policy in force must not vanish for that.
        let why = "is empty; write `rules: []` if there are none";
        errors.push(ConfigError::new(name, Some(Position::START), &[], why));
    }
    if errors.is_empty() { Ok(checked) } else { Err(ConfigErrors::new(errors)) }
}

fn check_policy(layers: &mut Layers, context: &PolicyContext) -> (CheckedPolicy, Vec<ConfigError>) {
    let (file, mut errors, removed) = layers.read();
    let version = policy::version(layers.value());
    let layers = &*layers;
    let unread: Vec<_> = errors.iter().map(|error| error.field.clone()).collect();
    let mut report = |field: &str, why: String| {
        if errors.len() >= MISTAKES_MAX {
            return;
        }
        let error = layers.error(field, &removed, why);
        // What is wrong within it was taken out, and is what there is to mend.
        let is_around =
            |inner: &String| inner.strip_prefix(&error.field).is_some_and(|rest| rest.starts_with('.'));
        // A tier's mistake is found by every rule that goes by it.
        if !unread.iter().any(is_around) && !errors.contains(&error) {
            errors.push(error);
        }
    };
    let mut checked = policy::validate(&file, version, context, &mut report);
    if errors.is_empty() {
        checked.written = policy::written(&file);
        checked.text = serde_json::to_string_pretty(&checked.written).unwrap_or_default().into();
    }
    (checked, errors)
}

/// From what was written to what it means. Mistakes are reported and replaced by what keeps the others visible.
fn validate(
    file: &ConfigFile,
    policy: PolicyConfig,
    identity: Arc<IdentityConfig>,
    report: &mut dyn FnMut(&str, String),
) -> Config {
    check_ranges(file, report);
    check_networks(file, report);
    for (index, host) in file.api.allowed_hosts.iter().enumerate() {
        if !is_host_name(host) {
            let why = format!(
                "expected a host name such as tollgate.internal, without scheme and port, not {host}"
            );
            report(&format!("api.allowed_hosts.{index}"), why);
        }
    }
    if ![503, 429].contains(&file.api.closed_status) {
        report("api.closed_status", "503 or 429".to_owned());
    }
    let log_level = log::validate(&file.log.level, report);
    let mut tokens = |field: &str, path: &Option<PathBuf>, read: fn(&Path) -> Result<Vec<Token>, String>| {
        let read = path.as_deref().map_or(Ok(Vec::new()), read);
        read.map_err(|why| report(field, why)).unwrap_or_default()
    };
    let token_digests = tokens("api.token_file", &file.api.token_file, secrets::api_tokens);
    let admin_tokens = tokens("admin.token_file", &file.admin.token_file, secrets::admin_tokens);
    Config {
        listen: file.listen.0,
        admin_listen: file.admin.listen.map(|listen| listen.0),
        resp_listen: file.resp.listen.map(|listen| listen.0),
        grpc_listen: file.grpc.listen.map(|listen| listen.0),
        admin_tokens,
        store: store::validate(file, report),
        guard: guard::validate(&file.guard, report),
        limits: limits::validate(&file.api, file.sliding_window.max_limit, report),
        policy,
        identity,
        closed_status: file.api.closed_status,
        token_digests,
        trusted_callers: networks(&file.api.trusted_callers),
        allowed_hosts: file.api.allowed_hosts.clone(),
        client_address: ClientAddress {
            header: file.client_address.header,
            trusted_proxies: networks(&file.client_address.trusted_proxies),
            ipv6_prefix: file.client_address.ipv6_prefix,
        },
        server: Serving {
            max_connections: file.server.max_connections,
            max_connections_per_address: file.server.max_connections_per_address,
            ipv6_prefix: file.client_address.ipv6_prefix,
            max_body_bytes: file.server.max_body_bytes,
            header_timeout: file.server.header_timeout.0,
            body_timeout: file.server.body_timeout.0,
            idle_timeout: file.server.idle_timeout.0,
            drain_delay: file.server.drain_delay.0,
            drain_timeout: file.server.drain_timeout.0,
        },
        log_level,
        log_format: file.log.format,
        warnings: Vec::new(),
    }
}

/// Below this a single batch of the allowed size would never fit.
const BODY_BYTES_LEAST: usize = 1024 * 1024;
/// Keys in memory: 48 GB, more than one node of a rate limiter should lose when it restarts.
const KEYS_MAX: u64 = 1_000_000_000;
/// Half a gigabyte: a node should not find out in an outage that its machine is too small.
const LOCAL_KEYS_MAX: u64 = 10_000_000;
/// Connections to one server: more than the cores of any machine keep busy.
const CONNECTIONS_MAX: usize = 64;

/// Checks the settings that have a least and a largest value.
fn check_ranges(file: &ConfigFile, report: &mut dyn FnMut(&str, String)) {
    let (redis, server) = (&file.redis, &file.server);
    for (field, value, range) in [
        ("guard.local_max_keys", file.guard.local_max_keys, 1..=LOCAL_KEYS_MAX),
        ("redis.connections", redis.connections as u64, 1..=CONNECTIONS_MAX as u64),
        ("client_address.ipv6_prefix", file.client_address.ipv6_prefix.into(), 1..=128),
        ("sliding_window.max_limit", file.sliding_window.max_limit, 1..=LOG_LIMIT_CEILING),
    ] {
        if !range.contains(&value) {
            report(field, format!("between {} and {}", range.start(), range.end()));
        }
    }
    if !(1..=KEYS_MAX).contains(&file.memory.max_keys) {
        report("memory.max_keys", format!("at least 1, at most {KEYS_MAX}"));
    }
    for (field, value, least, why) in [
        ("server.max_connections", server.max_connections, 1, ""),
        ("server.max_connections_per_address", server.max_connections_per_address, 1, ""),
        ("server.max_body_bytes", server.max_body_bytes, BODY_BYTES_LEAST, ", the size of the largest body"),
    ] {
        if value < least {
            report(field, format!("at least {least}{why}"));
        }
    }
    for (field, time) in [
        ("redis.deadline", redis.deadline),
        ("redis.lease_deadline", redis.lease_deadline),
        ("redis.connect_timeout", redis.connect_timeout),
        ("server.header_timeout", server.header_timeout),
        ("server.body_timeout", server.body_timeout),
        ("server.idle_timeout", server.idle_timeout),
    ] {
        if time.0 < Duration::from_millis(1) {
            report(field, "at least 1ms".to_owned());
        }
    }
}

/// Checks networks, and headers that are believed from trusted proxies only.
fn check_networks(file: &ConfigFile, report: &mut dyn FnMut(&str, String)) {
    let proxies = &file.client_address.trusted_proxies;
    for (field, networks) in
        [("client_address.trusted_proxies", proxies), ("api.trusted_callers", &file.api.trusted_callers)]
    {
        for (index, net) in networks.iter().enumerate() {
            let mut report = |why| report(&format!("{field}.{index}"), why);
            if net.0.prefix_len() == 0 {
                report(format!("{} would trust everybody", net.0));
            }
            check_network(&net.0, report);
        }
    }
    let headers = &file.identity.trusted_header;
    for (field, is_set) in [
        ("client_address.header", file.client_address.header.is_some()),
        ("identity.trusted_header.user", headers.user.is_some()),
        ("identity.trusted_header.tier", headers.tier.is_some()),
    ] {
        if is_set && proxies.is_empty() {
            let why = "is believed from trusted proxies only, and client_address.trusted_proxies is empty";
            report(field, why.to_owned());
        }
    }
}

/// Letters, digits, dots and hyphens: a name without scheme, port or wildcard.
fn is_host_name(text: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    text.split('.').all(is_part)
}

fn networks(texts: &[NetworkText]) -> Vec<IpNet> {
    texts.iter().map(|network| network.0).collect()
}

/// Checks that a network means what it seems to.
fn check_network(net: &IpNet, mut report: impl FnMut(String)) {
    if let IpNet::V6(v6) = net
        && v6.network().to_ipv4_mapped().is_some()
    {
        report(format!("{net}: write IPv4 networks as IPv4"));
    }
    if net.trunc() != *net {
        report(format!("{net} has bits beyond its prefix; did you mean {}?", net.trunc()));
    }
}

/// The variable that names the file.
const CONFIG_VARIABLE: &str = "TOLLGATE_CONFIG";

/// The file that is named on the command line or in the environment; none is read unless named.
pub fn named_file(flag: Option<PathBuf>) -> Option<PathBuf> {
    flag.or_else(|| std::env::var_os(CONFIG_VARIABLE).map(PathBuf::from))
}
