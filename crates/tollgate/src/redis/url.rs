//! The address of a store: `redis://`, `rediss://`, `redis+unix://`, `redis+sentinel://`, `redis+cluster://`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use percent_encoding::percent_decode_str;

/// The address of a store, with its credentials. Shown without them.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl {
    pub(super) shape: Shape,
    /// The known servers: the server, the sentinels, or some nodes of the cluster.
    pub(super) seeds: Vec<Address>,
    pub(super) tls: bool,
    pub(super) username: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: i64,
}

/// The topology of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Shape {
    /// One server.
    Standalone,
    /// Sentinels know which server is the primary of this name.
    Sentinel { master: String },
    /// Every primary has some of the slots.
    Cluster,
}

/// One server.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum Address {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Why a text is not the address of a store. It does not quote the text, which may hold a secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StoreUrlError {
    /// None of the schemes.
    #[error(
        "expected redis://HOST, rediss://HOST, redis+unix:///PATH, redis+sentinel://HOST,HOST/MASTER or redis+cluster://HOST,HOST"
    )]
    Scheme,
    /// No server named.
    #[error("names no server")]
    NoHost,
    /// A port must be a number from 1 to 65535.
    #[error("has a port that is no number from 1 to 65535")]
    Port,
    /// A database must be a number.
    #[error("has a database that is no number (redis://HOST:PORT/NUMBER)")]
    Database,
    /// Sentinels need the name of the master.
    #[error("names no master (redis+sentinel://HOST,HOST/MASTER)")]
    NoMaster,
    /// Only sentinels and clusters have several addresses.
    #[error("names several servers; only redis+sentinel:// and redis+cluster:// do")]
    Several,
    /// Clusters have one database.
    #[error("names a database, and a cluster has only one")]
    ClusterDatabase,
    /// Only a Unix socket's address has a query, and only for the database.
    #[error(
        "has a ?, which only redis+unix:///PATH?db=NUMBER takes; elsewhere the database is redis://HOST/NUMBER, and a ? in a password is %3F"
    )]
    Query,
    /// `%` must be followed by two hexadecimal digits that make UTF-8.
    #[error("has a user name or a password that is not percent-encoded UTF-8")]
    Encoding,
}

const REDIS_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

impl FromStr for StoreUrl {
    type Err = StoreUrlError;

    fn from_str(text: &str) -> Result<Self, StoreUrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(StoreUrlError::Scheme)?;
        let (tls, kind) = match scheme.split_once('+') {
            Some(("redis" | "valkey", kind)) => (false, kind),
            Some(("rediss" | "valkeys", kind)) => (true, kind),
            None if matches!(scheme, "redis" | "valkey") => (false, ""),
            None if matches!(scheme, "rediss" | "valkeys") => (true, ""),
            _ => return Err(StoreUrlError::Scheme),
        };
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        if query.is_some() && kind != "unix" {
            return Err(StoreUrlError::Query);
        }
        let (entry, rest) = rest.rsplit_once('@').map_or((None, rest), |(entry, rest)| (Some(entry), rest));
        let (username, password) = credentials(entry)?;
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let url = |shape, seeds, database| Self {
            shape,
            seeds,
            tls,
            username: username.clone(),
            password: password.clone(),
            database,
        };
        match kind {
            "unix" if !tls => {
                if !hosts.is_empty() || path.is_empty() {
                    return Err(StoreUrlError::NoHost);
                }
                let database = match query {
                    Some(query) => query.strip_prefix("db=").ok_or(StoreUrlError::Query)?,
                    None => "",
                };
                let path = PathBuf::from(format!("/{path}"));
                Ok(url(Shape::Standalone, vec![Address::Unix(path)], number(database)?))
            }
            "" => {
                let seeds = addresses(hosts, REDIS_PORT)?;
                if seeds.len() > 1 {
                    return Err(StoreUrlError::Several);
                }
                Ok(url(Shape::Standalone, seeds, number(path)?))
            }
            "sentinel" => {
                let (master, database) = path.split_once('/').unwrap_or((path, ""));
                if master.is_empty() {
                    return Err(StoreUrlError::NoMaster);
                }
                let shape = Shape::Sentinel { master: master.to_owned() };
                Ok(url(shape, addresses(hosts, SENTINEL_PORT)?, number(database)?))
            }
            "cluster" => {
                if number(path)? != 0 {
                    return Err(StoreUrlError::ClusterDatabase);
                }
                Ok(url(Shape::Cluster, addresses(hosts, REDIS_PORT)?, 0))
            }
            _ => Err(StoreUrlError::Scheme),
        }
    }
}

/// `user:password`, `:password` or `user`.
fn credentials(entry: Option<&str>) -> Result<(Option<String>, Option<String>), StoreUrlError> {
    let Some(entry) = entry else { return Ok((None, None)) };
    let (username, password) =
        entry.split_once(':').map_or((entry, None), |(username, password)| (username, Some(password)));
    let decode = |text: &str| match percent_decode_str(text).decode_utf8() {
        Ok(text) => Ok(text.into_owned()),
        Err(_) => Err(StoreUrlError::Encoding),
    };
    let username = if username.is_empty() { None } else { Some(decode(username)?) };
    Ok((username, password.map(decode).transpose()?))
}

fn addresses(hosts: &str, port: u16) -> Result<Vec<Address>, StoreUrlError> {
    hosts.split(',').map(|host| address(host.trim(), port)).collect()
}

/// `host`, `host:port`, `[v6]` or `[v6]:port`.
fn address(text: &str, default: u16) -> Result<Address, StoreUrlError> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => text.rsplit_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    if host.is_empty() {
        return Err(StoreUrlError::NoHost);
    }
    let port = match port {
        Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or(StoreUrlError::Port)?,
        None => default,
    };
    Ok(Address::Tcp { host: host.to_owned(), port })
}

fn number(text: &str) -> Result<i64, StoreUrlError> {
    if text.is_empty() {
        return Ok(0);
    }
    text.parse::<u32>().map(i64::from).map_err(|_| StoreUrlError::Database)
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "rediss" } else { "redis" };
        let kind = match (&self.shape, self.seeds.first()) {
            (Shape::Standalone, Some(Address::Unix(_))) => "+unix",
            (Shape::Standalone, _) => "",
            (Shape::Sentinel { .. }, _) => "+sentinel",
            (Shape::Cluster, _) => "+cluster",
        };
        write!(f, "{scheme}{kind}://")?;
        if self.username.is_some() || self.password.is_some() {
            f.write_str("***@")?;
        }
        let seeds: Vec<_> = self.seeds.iter().map(Address::to_string).collect();
        f.write_str(&seeds.join(","))?;
        if let Shape::Sentinel { master } = &self.shape {
            write!(f, "/{master}")?;
        }
        match (self.database, kind) {
            (0, _) => Ok(()),
            (database, "+unix") => write!(f, "?db={database}"),
            (database, _) => write!(f, "/{database}"),
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_urls_are_parsed_and_shown_without_secrets() {
        for (text, shown) in [
            ("redis://localhost", "redis://localhost:6379"),
            ("rediss://user:p%40ss@10.0.0.1:7000/3", "rediss://***@10.0.0.1:7000/3"),
            ("redis://:secret@[::1]:6380", "redis://***@[::1]:6380"),
            ("redis+unix:///run/redis.sock", "redis+unix:///run/redis.sock"),
            ("redis+unix:///run/redis.sock?db=2", "redis+unix:///run/redis.sock?db=2"),
            ("redis+sentinel://a,b:1,c/mymaster", "redis+sentinel://a:26379,b:1,c:26379/mymaster"),
            ("rediss+sentinel://u@a/main/4", "rediss+sentinel://***@a:26379/main/4"),
            ("redis+cluster://a,b,c", "redis+cluster://a:6379,b:6379,c:6379"),
            ("valkey+cluster://a:1", "redis+cluster://a:1"),
        ] {
            assert_eq!(text.parse::<StoreUrl>().map(|url| url.to_string()), Ok(shown.to_owned()), "{text}");
        }
        let url: StoreUrl = "rediss://user:p%40ss@h".parse().expect("an address");
        assert_eq!((url.username.as_deref(), url.password.as_deref()), (Some("user"), Some("p@ss")));
        assert!(!format!("{url:?}").contains("p@ss"));
    }

    #[test]
    fn invalid_store_urls_are_rejected_with_the_reason() {
        use StoreUrlError as E;
        for (text, why) in [
            ("localhost:6379", E::Scheme),
            ("http://localhost", E::Scheme),
            ("redis+tcp://localhost", E::Scheme),
            ("rediss+unix:///a", E::Scheme),
            ("redis://", E::NoHost),
            ("redis+unix://a/b", E::NoHost),
            ("redis://h:0", E::Port),
            ("redis://h:70000", E::Port),
            ("redis://h/x", E::Database),
            ("redis://h/-1", E::Database),
            ("redis+sentinel://h", E::NoMaster),
            ("redis://a,b", E::Several),
            ("redis+cluster://a/1", E::ClusterDatabase),
            ("redis://:%ff@h", E::Encoding),
            ("redis://h?db=3", E::Query),
            ("redis://h/3?protocol=resp3", E::Query),
            ("redis+cluster://a,b?", E::Query),
            ("redis+unix:///a?database=3", E::Query),
        ] {
            assert_eq!(text.parse::<StoreUrl>(), Err(why), "{text}");
        }
    }
}
