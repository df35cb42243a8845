//! Fixtures of the end-to-end tests: a `tollgate` server, proxies, an upstream, an HTTP client and packages of other languages.
//!
//! `cargo xtask e2e` installs the programs that they start and builds the server.

mod address;
mod example;
pub mod http;
mod packages;
mod program;
mod proxy;
mod tollgate;
mod upstream;

pub use address::free_address;
pub use example::Example;
pub use packages::{node, python};
pub use program::Program;
pub use proxy::{PROBE, Proxy};
pub use tollgate::Tollgate;
pub use upstream::Upstream;

use std::path::{Path, PathBuf};

/// Where `cargo xtask e2e` installs programs and packages.
fn installed(name: &str) -> PathBuf {
    let path = root().join("target/programs").join(name);
    assert!(path.exists(), "{} is missing: `cargo xtask e2e` installs it", path.display());
    path
}

/// The root of the repository.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
