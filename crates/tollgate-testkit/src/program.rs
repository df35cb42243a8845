//! Which server a test talks to, and where its program lies.

use std::ffi::OsString;
use std::path::Path;

/// Where `cargo xtask test` puts the programs that no package of the system holds.
const PROGRAMS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/programs");

/// A server that speaks the protocol of Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerProgram {
    /// The system's `redis-server`, Redis 7.
    Redis,
    /// Valkey 9. Built without TLS.
    Valkey,
    /// Redis 6.2, the oldest that is supported. Built without TLS.
    Redis62,
}

impl ServerProgram {
    /// The program to start: the one that the environment names, else the one that was installed for the tests, else
    /// the one in the path.
    ///
    /// # Panics
    /// If there is none.
    pub fn path(self) -> OsString {
        let (variable, name) = match self {
            Self::Redis => return "redis-server".into(),
            Self::Valkey => ("VALKEY_SERVER", "valkey-server"),
            Self::Redis62 => ("REDIS62_SERVER", "redis-server-6.2"),
        };
        if let Some(named) = std::env::var_os(variable) {
            return named;
        }
        let installed = Path::new(PROGRAMS).join(name);
        if installed.exists() {
            return installed.into();
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path)
            .map(|directory| directory.join(name))
            .find(|program| program.exists())
            .unwrap_or_else(|| panic!("there is no {name}: run `cargo xtask test`, which installs it"))
            .into()
    }
}
