//! How large the limit of a log may be, and the memory that one of its keys takes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate::{Limit, LimitSettings};

/// A log keeps an entry for every admission: beyond this, a window mostly belongs in a counter.
pub(super) const LOG_LIMIT_DEFAULT: u64 = 100_000;
/// The largest limit that can be set: what the benchmark of script calls covers, and some more.
pub(super) const LOG_LIMIT_CEILING: u64 = 1_000_000;
/// Bytes of an entry, measured with 600,000 of them (docs/sliding-log.md).
const SORTED_SET_ENTRY_BYTES: u64 = 130;
/// Bytes of an entry in the memory engine, whose logs have up to half of their room free.
const MEMORY_ENTRY_BYTES: u64 = 48;

/// The exact log, SLIDING_WINDOW.
#[derive(Deserialize, Serialize, JsonSchema, Debug)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SlidingWindow {
    /// The largest limit that a log may have, at most 1000000. A key takes up to 130 bytes for each permit of it.
    pub max_limit: u64,
}

impl Default for SlidingWindow {
    fn default() -> Self {
        Self { max_limit: LOG_LIMIT_DEFAULT }
    }
}

/// Why a limit is larger than a log may have, if it is.
pub(super) fn refusal(limit: &Limit, max: u64) -> Option<String> {
    let permits = log_limit(limit).filter(|permits| *permits > max)?;
    Some(format!(
        "at most {max} permits (sliding_window.max_limit, up to {LOG_LIMIT_CEILING}), not {permits}: a log keeps an entry for every \
         permit, SLIDING_WINDOW_COUNTER does not"
    ))
}

/// Why a limit cannot have a failover guard, if it cannot.
pub(super) fn guard_refusal(limit: &Limit, settings: &LimitSettings) -> Option<String> {
    let is_guarded_log = settings.failover_guard && log_limit(limit).is_some();
    is_guarded_log.then(|| "a log has no failover guard; SLIDING_WINDOW_COUNTER does".to_owned())
}

/// The memory that a key of a log takes, if its limit is above the default.
pub(super) fn warning(limit: &Limit) -> Option<String> {
    let permits = log_limit(limit).filter(|permits| *permits > LOG_LIMIT_DEFAULT)?;
    let megabytes = |entry: u64| (permits * entry).div_ceil(1_000_000);
    Some(format!(
        "SLIDING_WINDOW with {permits} permits: one key takes up to {} MB in Redis, {} MB in memory; \
         needs sliding_window.max_limit: {permits}",
        megabytes(SORTED_SET_ENTRY_BYTES),
        megabytes(MEMORY_ENTRY_BYTES),
    ))
}

fn log_limit(limit: &Limit) -> Option<u64> {
    matches!(limit, Limit::SlidingLog(_)).then(|| limit.size())
}
