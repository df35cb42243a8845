//! What the user wrote -> validated values that build the service. The only room that reads files.
//!
//! Layers, each over the one before: defaults, the file, `TOLLGATE_*`, flags. Every mistake of a run is reported at once,
//! each with the place it was made in.

mod accepted;
mod admin_tokens;
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
mod store;
mod text;
mod tree;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use sha2::{Digest, Sha256};
use tollgate::{GuardConfig, Limit, LimitSettings, MemoryConfig, RedisConfig};

pub use self::admin_tokens::AdminToken;
pub use self::environment::environment;
use self::file::ConfigFile;
pub use self::file::{AddressHeader, LogFormat, schema};
use self::layers::Layers;
use self::log_limit::LOG_LIMIT_CEILING;
use self::mistakes::MISTAKES_MAX;
pub use self::mistakes::{ConfigError, ConfigErrors};
use self::policy::StoreDefaults;
pub(crate) use self::policy::notes;
pub use self::policy::{CheckedPolicy, PolicyContext, diff, figures};
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
    /// The tokens of `/admin`.
    pub admin_tokens: Vec<AdminToken>,
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
    /// SHA-256 of the tokens that callers may show.
    pub token_digests: Vec<[u8; 32]>,
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
    let context = PolicyContext::new(file.client_address.ipv6_prefix, Arc::clone(&identity))
        .with_log_limit_max(file.sliding_window.max_limit)
        .with_defaults(StoreDefaults {
            consistency: Some(file.api.consistency),
            on_store_failure: Some(file.api.on_store_failure),
            settle_debt: Some(file.api.settle_debt),
        });
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

/// The JSON Schema of a policy.
pub fn policy_schema() -> serde_json::Value {
    schemars::schema_for!(policy::file::PolicyFile).to_value()
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
    for (field, header) in [
        ("identity.trusted_header.user", &file.identity.trusted_header.user),
        ("identity.trusted_header.tier", &file.identity.trusted_header.tier),
    ] {
        if header.is_some() && file.client_address.trusted_proxies.is_empty() {
            let why = "is believed from trusted proxies only, and client_address.trusted_proxies is empty";
            report(field, why.to_owned());
        }
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
    if file.server.max_body_bytes < BODY_BYTES_LEAST {
        report("server.max_body_bytes", format!("at least {BODY_BYTES_LEAST}, the size of the largest body"));
    }
    for (index, host) in file.api.allowed_hosts.iter().enumerate() {
        if !is_host_name(host) {
            let why = format!(
                "expected a host name such as tollgate.internal, without scheme and port, not {host}"
            );
            report(&format!("api.allowed_hosts.{index}"), why);
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
    if !(1..=LOG_LIMIT_CEILING).contains(&file.sliding_window.max_limit) {
        report("sliding_window.max_limit", format!("between 1 and {LOG_LIMIT_CEILING}"));
    }
    if ![503, 429].contains(&file.api.closed_status) {
        report("api.closed_status", "503 or 429".to_owned());
    }
    let log_level = log::validate(&file.log.level, report);
    let token_digests = match &file.api.token_file {
        Some(path) => read_tokens(path).unwrap_or_else(|why| {
            report("api.token_file", why);
            Vec::new()
        }),
        None => Vec::new(),
    };
    let admin_tokens = file.admin.token_file.as_deref().map_or(Ok(Vec::new()), admin_tokens::read);
    let admin_tokens = admin_tokens.unwrap_or_else(|why| {
        report("admin.token_file", why);
        Vec::new()
    });
    Config {
        listen: file.listen.0,
        admin_listen: file.admin.listen.map(|listen| listen.0),
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

/// One token a line; of each only its digest is kept. Lines that begin with # are comments.
fn read_tokens(path: &Path) -> Result<Vec<[u8; 32]>, String> {
    let text =
        std::fs::read_to_string(path).map_err(|why| format!("{} cannot be read: {why}", path.display()))?;
    let lines = text.lines().map(str::trim).enumerate();
    let tokens: Vec<_> = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).collect();
    if tokens.is_empty() {
        return Err(format!("{} holds no token; expected one a line", path.display()));
    }
    if let Some((line, _)) = tokens.iter().find(|(_, token)| token.len() < TOKEN_CHARS_MIN) {
        return Err(format!(
            "line {} of {}: the token has fewer than {TOKEN_CHARS_MIN} characters",
            line + 1,
            path.display()
        ));
    }
    Ok(tokens.into_iter().map(|(_, token)| Sha256::digest(token).into()).collect())
}

/// The variable that names the file.
const CONFIG_VARIABLE: &str = "TOLLGATE_CONFIG";

/// The file that is named on the command line or in the environment; none is read unless named.
pub fn named_file(flag: Option<PathBuf>) -> Option<PathBuf> {
    flag.or_else(|| std::env::var_os(CONFIG_VARIABLE).map(PathBuf::from))
}
