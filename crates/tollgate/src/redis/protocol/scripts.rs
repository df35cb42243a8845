//! The scripts, composed of the texts beside this file when they are first needed.

use std::sync::LazyLock;

use tollgate_core::Limit;

use super::bucket::{Names, TOKENS, WATER};

/// A script by its text and by the name under which servers keep it.
pub(crate) struct Script {
    pub(crate) source: String,
    pub(crate) sha: String,
}

/// One script for each algorithm, and those that serve all of them.
pub(crate) struct Scripts {
    single: [Script; ALGORITHMS],
    /// Those that lend, of the token bucket and of the leaky bucket.
    lend: [Script; 2],
    /// Decides on a log that is not plain.
    pub(super) full_log: Script,
    /// Decides on sets of limits.
    pub(super) set: Script,
    /// The same with logs that are not plain, and with computed states, which it writes.
    pub(super) full_set: Script,
    /// Reads states.
    pub(super) read: Script,
    /// Tests whether scripts may read the time and then write.
    pub(crate) probe: Script,
    /// Sends the heartbeat of a node.
    pub(super) membership: Script,
    /// Changes the data shared by all nodes.
    pub(super) control: Script,
}

pub(crate) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(Scripts::compose);

const TIME: &str = include_str!("time.lua");
const RARE: &str = include_str!("rare.lua");
const SINGLE: &str = include_str!("single.lua");
const SET: &str = include_str!("set.lua");
const SET_ALGORITHM: &str = include_str!("set_algorithm.lua");
const LEND: &str = include_str!("lend.lua");
const BUCKET: &str = include_str!("bucket.lua");
const FULL_LOG: [&str; 4] = [
    include_str!("full_log.lua"),
    include_str!("full_log_state.lua"),
    include_str!("full_log_decide.lua"),
    include_str!("full_log_save.lua"),
];
const SINGLE_FULL_LOG: &str = include_str!("single_full_log.lua");
const SET_FULL_LOG: &str = include_str!("set_full_log.lua");
const PROBE: &str = "redis.call('TIME') return redis.call('PEXPIRE', ARGV[1], 1)";

const ALGORITHMS: usize = 7;
/// The algorithms by [`kind`] - 1.
const BODIES: [(&str, Names); ALGORITHMS] = [
    (BUCKET, TOKENS),
    (BUCKET, WATER),
    (include_str!("interval_bucket.lua"), TOKENS),
    (include_str!("fixed_window.lua"), TOKENS),
    (include_str!("sliding_counter.lua"), TOKENS),
    (include_str!("calendar_quota.lua"), TOKENS),
    (include_str!("sliding_log.lua"), TOKENS),
];

/// The number of an algorithm in the script of sets. Number 0 is a state that was computed here.
pub(super) const fn kind(limit: &Limit) -> u8 {
    match limit {
        Limit::TokenBucket(_) => 1,
        Limit::LeakyBucket(_) => 2,
        Limit::IntervalBucket(_) => 3,
        Limit::FixedWindow(_) => 4,
        Limit::SlidingCounter(_) => 5,
        Limit::CalendarQuota(_) => 6,
        Limit::SlidingLog(_) => 7,
    }
}

impl Scripts {
    fn compose() -> Self {
        let bodies = BODIES.map(|(text, names)| with_names(text, names));
        let branches: [String; ALGORITHMS] = std::array::from_fn(|number| {
            let with_sections = with_sections(SET_ALGORITHM, &bodies[number]);
            with_sections.replace("@kind", &(number + 1).to_string())
        });
        // The log is the last one.
        let hashes = branches[..ALGORITHMS - 1].concat();
        let full_log = FULL_LOG.concat();
        let lend_of = |names| finish(&with_names(LEND, names), RARE);
        // A state that is not plain ends the function that reads it; the fields are read behind it.
        let (steps, end) = SET.split_once("\n@rare").unwrap_or((SET, ""));
        let set_of = |algorithms: &str| {
            let text = finish(&steps.replace("@algorithms", algorithms), "do return end");
            Script::new(format!("{text}\n{RARE}{end}"))
        };
        Self {
            single: bodies.each_ref().map(|text| Script::new(finish(&with_sections(SINGLE, text), RARE))),
            lend: [TOKENS, WATER].map(|names| Script::new(lend_of(names))),
            full_log: Script::new(finish(&SINGLE_FULL_LOG.replace("@log", &full_log), "")),
            set: set_of(&branches.concat()),
            full_set: set_of(&format!("{hashes}{}", SET_FULL_LOG.replace("@log", &full_log))),
            read: Script::new(format!("{TIME}{RARE}")),
            probe: Script::new(PROBE.to_owned()),
            membership: Script::new(finish(include_str!("membership.lua"), "")),
            control: Script::new(include_str!("control.lua").to_owned()),
        }
    }

    /// The script that decides on one limit.
    pub(super) fn of(&self, limit: &Limit) -> &Script {
        &self.single[usize::from(kind(limit)) - 1]
    }

    /// The script that also lends permits and counts them as out.
    pub(super) fn lending(&self, limit: &Limit) -> &Script {
        &self.lend[usize::from(matches!(limit, Limit::LeakyBucket(_)))]
    }

    /// All scripts except the probe. A server must know them before the first call.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Script> {
        let others = [&self.full_log, &self.set, &self.full_set, &self.read, &self.membership, &self.control];
        self.single.iter().chain(&self.lend).chain(others)
    }
}

impl Script {
    fn new(source: String) -> Self {
        let sha = redis::Script::new(&source).get_hash().to_owned();
        Self { source, sha }
    }
}

/// Puts the field names of a bucket into a text.
fn with_names(text: &str, names: Names) -> String {
    let quoted = |name: &str| format!("'{name}'");
    text.replace("AMOUNT", &quoted(names.amount))
        .replace("DATED", &quoted(names.dated))
        .replace("WATER", &names.is_water.to_string())
}

/// Puts the sections of an algorithm, which begin with lines `-- @name`, into the places of their names.
fn with_sections(frame: &str, algorithm: &str) -> String {
    let mut text = frame.to_owned();
    for section in algorithm.split("-- @").skip(1) {
        let (name, body) = section.split_once('\n').unwrap_or((section, ""));
        text = text.replace(&format!("@{name}\n"), body);
    }
    text
}

/// Inserts the common parts of scripts, and the handling of a state that is not plain.
fn finish(text: &str, rare: &str) -> String {
    let mut finished = String::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if let Some(instant) = trimmed.strip_prefix("@expire(").and_then(|rest| rest.strip_suffix(')')) {
            // A second more covers the server's own, coarser clock of expiries.
            finished += &format!("call('PEXPIRE', key, ceil(max(0, {instant} - now) / 1000) + 1000)");
        } else if trimmed == "@rare" {
            finished += rare;
        } else if trimmed == "@time" {
            finished += TIME;
        } else if !trimmed.starts_with("--") {
            finished += trimmed;
        }
        finished.push('\n');
    }
    finished
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_have_no_open_placeholders_and_different_names() {
        let scripts: Vec<_> = SCRIPTS.all().collect();
        for script in &scripts {
            for line in script.source.lines().filter(|line| !line.trim_start().starts_with("--")) {
                assert!(!line.contains('@'), "{line}");
            }
            let equal = scripts.iter().filter(|other| other.sha == script.sha);
            assert_eq!(equal.count(), 1, "{}", script.source);
        }
    }

    #[test]
    fn script_sources_stay_short() {
        let frames = [TIME, RARE, SINGLE, SET, SET_ALGORITHM, SET_FULL_LOG, SINGLE_FULL_LOG, LEND];
        let others = [include_str!("membership.lua"), include_str!("control.lua")];
        let bodies = BODIES.iter().map(|(text, _)| text);
        let mut code = std::collections::HashMap::new();
        for text in frames.iter().chain(&FULL_LOG).chain(&others).chain(bodies) {
            assert!(text.lines().count() <= 120, "{} lines: {}", text.lines().count(), &text[..80]);
            let lines =
                text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("--"));
            code.insert(*text, lines.count());
        }
        assert!(code.values().sum::<usize>() <= 800, "lines of all scripts: {code:?}");
    }
}
