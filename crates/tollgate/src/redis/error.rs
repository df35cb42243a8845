//! Errors of the store, by what the reader can do about them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};

/// Why the store gave no decision.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// No answer in time. Whether it was decided is unknown; it counts as not admitted, and is not repeated.
    #[error("the store did not answer within {} ms", .0.as_micros().div_ceil(1_000))]
    Timeout(Duration),
    /// No connection can be opened, or no server is known for the key. Nothing was sent.
    #[error("no connection to {server}: {why}")]
    Unreachable {
        /// The server.
        server: Arc<str>,
        /// The message of the system.
        why: Arc<str>,
    },
    /// The connection broke while the call was under way. Whether it was decided is unknown, as with a timeout.
    #[error("the connection to {server} broke: {why}")]
    Interrupted {
        /// The server.
        server: Arc<str>,
        /// The message of the system.
        why: Arc<str>,
    },
    /// The circuit breaker is open: the server has failed too often and is not called for a moment.
    #[error("{server} has failed and is left alone for a moment: {why}")]
    BreakerOpen {
        /// The server.
        server: Arc<str>,
        /// The last failure.
        why: Arc<str>,
        /// Whether the server can still be connected to, as far as is known.
        reachable: bool,
    },
    /// The server is reachable, but cannot decide now: loading, busy, silent, out of memory, a replica.
    #[error("{server} cannot decide now: {why}")]
    Unavailable {
        /// The server.
        server: Arc<str>,
        /// The message of the server.
        why: Arc<str>,
    },
    /// The server rejects the credentials, privileges, database or TLS settings. A retry does not help.
    #[error("{server} refuses this client: {why}; {hint}")]
    Refused {
        /// The server.
        server: Arc<str>,
        /// The message of the server.
        why: Arc<str>,
        /// The setting to look at.
        hint: &'static str,
    },
    /// The key holds a value that Tollgate has not written. It is left unchanged.
    #[error("the key {key} holds a foreign value: {why}")]
    Foreign {
        /// The key in the store.
        key: Arc<str>,
        /// The message of the server.
        why: Arc<str>,
    },
    /// The answer is not one of a script of Tollgate.
    #[error("an answer of the store was not understood: {0}")]
    Protocol(Arc<str>),
    /// Too many checks wait.
    #[error("too many checks wait for the store")]
    Overloaded,
    /// The engine's driver has stopped, and with it the engine.
    #[error("the engine has stopped")]
    Stopped,
    /// The limit was removed. Nothing was sent.
    #[error("the limit was removed")]
    Removed,
    /// The call was ended by a panic. Whether it was decided is unknown, as with a timeout.
    #[error("the call to the store was ended by a panic")]
    Panicked,
}

impl StoreError {
    /// The name of the kind of failure, for metrics.
    pub const fn class(&self) -> &'static str {
        match self {
            Self::Timeout(_) => "timeout",
            Self::Unreachable { .. } => "unreachable",
            Self::Interrupted { .. } => "interrupted",
            Self::BreakerOpen { .. } => "breaker_open",
            Self::Unavailable { .. } => "unavailable",
            Self::Refused { .. } => "refused",
            Self::Foreign { .. } => "foreign",
            Self::Protocol(_) => "protocol",
            Self::Overloaded => "overloaded",
            Self::Stopped => "stopped",
            Self::Removed => "removed",
            Self::Panicked => "panicked",
        }
    }

    /// The names of all kinds, in the order of metrics.
    pub const CLASSES: [&'static str; 12] = [
        "timeout",
        "unreachable",
        "interrupted",
        "breaker_open",
        "unavailable",
        "refused",
        "foreign",
        "protocol",
        "overloaded",
        "stopped",
        "removed",
        "panicked",
    ];

    /// Whether the store may have taken permits: only the answer is missing.
    pub const fn may_have_run(&self) -> bool {
        match self {
            Self::Timeout(_) | Self::Interrupted { .. } | Self::Protocol(_) | Self::Panicked => true,
            Self::Unreachable { .. }
            | Self::BreakerOpen { .. }
            | Self::Unavailable { .. }
            | Self::Refused { .. }
            | Self::Foreign { .. }
            | Self::Overloaded
            | Self::Removed
            | Self::Stopped => false,
        }
    }

    /// Whether the store is reachable, as far as is known. Clients can cause such a failure by overloading the store, so it never
    /// admits requests: a limit that fails open is decided locally.
    pub const fn is_reachable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Refused { .. } => false,
            Self::BreakerOpen { reachable, .. } => *reachable,
            Self::Timeout(_)
            | Self::Interrupted { .. }
            | Self::Unavailable { .. }
            | Self::Foreign { .. }
            | Self::Protocol(_)
            | Self::Overloaded
            | Self::Removed
            | Self::Stopped
            | Self::Panicked => true,
        }
    }

    pub(super) fn foreign(key: &str, why: String) -> Self {
        Self::Foreign { key: key.into(), why: why.into() }
    }

    pub(super) fn protocol(why: impl fmt::Display) -> Self {
        Self::Protocol(why.to_string().into())
    }
}

/// The meaning of an error for the call and for the connection.
pub(super) enum Fault {
    /// The server does not know the script. The call did not run.
    NoScript,
    /// The key is on another server. The call did not run.
    Moved(Redirect),
    /// The slot is moving, and this key is on the other server already. The call did not run.
    Ask(Redirect),
    /// Keys are moving. The call did not run.
    TryAgain,
    /// The clock of the server shows this time, in microseconds, and not the expected one. The call did not run.
    OtherTime(u64),
    /// The connection is gone.
    Broken(StoreError),
    /// The server is not, or no longer, the one to ask.
    Demoted(StoreError),
    /// The server answered with an error; the connection is fine.
    Answered(StoreError),
}

/// The target of a redirect in a cluster.
pub(super) struct Redirect {
    pub(super) slot: u16,
    /// Empty: the host of the node that redirects.
    pub(super) host: String,
    pub(super) port: u16,
}

impl Redirect {
    fn of(error: &RedisError) -> Option<Self> {
        let (address, slot) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        Some(Self { slot, host: host.to_owned(), port: port.parse().ok()? })
    }
}

/// Classifies an error of a call on `key`. Older servers wrap codes in the message of a script, so these count too.
pub(super) fn fault(error: &RedisError, server: &Arc<str>, key: &str) -> Fault {
    let text: Arc<str> = describe(error).into();
    let says = |code: &str| error.code() == Some(code) || text.contains(code);
    if let ErrorKind::Server(kind) = error.kind() {
        match (kind, Redirect::of(error)) {
            (ServerErrorKind::NoScript, _) => return Fault::NoScript,
            (ServerErrorKind::Moved, Some(redirect)) => return Fault::Moved(redirect),
            (ServerErrorKind::Ask, Some(redirect)) => return Fault::Ask(redirect),
            (ServerErrorKind::TryAgain, _) => return Fault::TryAgain,
            _ => {}
        }
    }
    if error.is_io_error() || error.is_connection_dropped() {
        let (server, why) = (Arc::clone(server), text);
        return Fault::Broken(StoreError::Interrupted { server, why });
    }
    if let Some(us) = other_time(&text) {
        return Fault::OtherTime(us);
    }
    let server = Arc::clone(server);
    // A field that is not a number stops a script before it has written.
    const NOT_A_NUMBER: [&str; 3] =
        ["attempt to perform arithmetic", "attempt to compare", "number expected, got"];
    if says("WRONGTYPE") || says("TOLLGATE foreign value") || NOT_A_NUMBER.iter().any(|text| says(text)) {
        return Fault::Answered(StoreError::Foreign { key: key.into(), why: text });
    }
    if let Some(hint) = hint(&text) {
        return Fault::Answered(StoreError::Refused { server, why: text, hint });
    }
    if says("READONLY") || says("MASTERDOWN") {
        return Fault::Demoted(StoreError::Unavailable { server, why: text });
    }
    // The cluster knows no owner of the slot.
    if says("CLUSTERDOWN") {
        return Fault::Answered(StoreError::Unreachable { server, why: text });
    }
    const PASSING: [&str; 6] = ["LOADING", "BUSY", "OOM", "MISCONF", "NOREPLICAS", "Script killed"];
    if PASSING.iter().any(|code| says(code)) {
        return Fault::Answered(StoreError::Unavailable { server, why: text });
    }
    Fault::Answered(StoreError::Protocol(text))
}

/// The time that a script has found instead of the one that it was prepared for.
fn other_time(text: &str) -> Option<u64> {
    let (_, time) = text.split_once("TOLLGATE time ")?;
    time.split(|other: char| !other.is_ascii_digit()).next()?.parse().ok()
}

/// Why there is no connection. A server that answers with an error is reachable, as is one with too many clients.
pub(super) fn connect_error(error: &RedisError, server: &Arc<str>) -> StoreError {
    let (server, why): (_, Arc<str>) = (Arc::clone(server), describe(error).into());
    match hint(&why) {
        Some(hint) => StoreError::Refused { server, why, hint },
        None if error.code().is_some() || why.contains("max number of clients") => {
            StoreError::Unavailable { server, why }
        }
        None => StoreError::Unreachable { server, why },
    }
}

/// The message of the server, without the words of the library.
fn describe(error: &RedisError) -> String {
    if error.kind() == ErrorKind::AuthenticationFailed {
        return "it does not accept the user name or the password".to_owned();
    }
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) if !detail.starts_with(code) => format!("{code} {detail}"),
        (_, Some(detail)) => detail.to_owned(),
        _ => error.to_string(),
    }
}

/// Whether retries cannot help.
pub(super) fn is_refusal(error: &RedisError) -> bool {
    hint(&describe(error)).is_some()
}

/// The setting to look at, if the message points at one.
fn hint(text: &str) -> Option<&'static str> {
    const HINTS: [(&str, &str); 17] = [
        ("WRONGPASS", "look at the user name and the password of the store"),
        ("invalid password", "look at the password of the store"),
        ("NOAUTH", "the store needs a password: redis.password_file, or in its URL"),
        ("without any password configured", "the store has no password: leave it out"),
        ("does not accept the user name", "look at the user name and the password of the store"),
        ("NOPERM", "the user lacks a privilege: docs/redis.md has the ACL line"),
        ("The user executing the script", "the user lacks a privilege: docs/redis.md has the ACL line"),
        ("no permissions", "the user lacks a privilege: docs/redis.md has the ACL line"),
        ("DB index is out of range", "look at the database number at the end of the store's URL"),
        ("database number", "look at the database number at the end of the store's URL"),
        ("SELECT is not allowed in cluster mode", "a cluster has only database 0"),
        ("not valid for name", "the certificate is for another name than the one in the store's URL"),
        ("NotValidForName", "the certificate is for another name than the one in the store's URL"),
        ("Certificate", "look at redis.tls: the CA, the client's certificate and its key"),
        ("certificate", "look at redis.tls: the CA, the client's certificate and its key"),
        ("InvalidContentType", "the server speaks no TLS at this port: write redis:// instead of rediss://"),
        ("cluster support disabled", "the server is no cluster: write redis:// instead of redis+cluster://"),
    ];
    HINTS.iter().find(|(words, _)| text.contains(words)).map(|(_, hint)| *hint)
}
