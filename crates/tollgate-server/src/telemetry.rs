//! Log lines: pretty on a terminal, JSON otherwise.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::{Config, LogFormat};

/// Starts logging to standard error, once for the process.
pub(crate) fn init(config: &Config) {
    let pretty = match config.log_format {
        LogFormat::Auto => std::io::stderr().is_terminal(),
        LogFormat::Pretty => true,
        LogFormat::Json => false,
    };
    let filter = EnvFilter::builder().parse_lossy(&config.log_level);
    let lines =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // A second start, as in tests, keeps the first one's log.
    let _ = if pretty { lines.try_init() } else { lines.json().flatten_event(true).try_init() };
}
