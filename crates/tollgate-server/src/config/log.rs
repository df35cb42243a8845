//! Which log lines are written, from what was written of it.

use tracing_subscriber::filter::LevelFilter;

/// The level for parts that no directive names, so that a filter for one part does not silence the rest.
const LEVEL_DEFAULT: &str = "info";

/// Turns `log.level` into the directives of a filter.
pub(super) fn validate(level: &str, report: &mut dyn FnMut(&str, String)) -> String {
    match directives(level) {
        Some(directives) => directives,
        None => {
            report(
                "log.level",
                "accepted: error, warn, info, debug, trace, off, or a filter such as tollgate_server=debug"
                    .to_owned(),
            );
            LEVEL_DEFAULT.to_owned()
        }
    }
}

fn directives(text: &str) -> Option<String> {
    let (mut all, mut has_level) = (Vec::new(), false);
    for directive in text.split(',').map(str::trim) {
        match directive.split_once('=') {
            Some((target, level)) if is_target(target.trim()) => {
                all.push(format!("{}={}", target.trim(), known_level(level)?));
            }
            Some(_) => return None,
            None => {
                has_level = true;
                all.push(known_level(directive)?.to_string());
            }
        }
    }
    if !has_level {
        all.insert(0, LEVEL_DEFAULT.to_owned());
    }
    Some(all.join(","))
}

/// A level by its name; `warning` is what many other programs call `warn`.
fn known_level(name: &str) -> Option<LevelFilter> {
    match name.trim().to_ascii_lowercase().as_str() {
        "error" => Some(LevelFilter::ERROR),
        "warn" | "warning" => Some(LevelFilter::WARN),
        "info" => Some(LevelFilter::INFO),
        "debug" => Some(LevelFilter::DEBUG),
        "trace" => Some(LevelFilter::TRACE),
        "off" => Some(LevelFilter::OFF),
        _ => None,
    }
}

/// A path of modules, such as `tollgate_server::live`.
fn is_target(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_no_level_is_never_taken_for_a_filter() {
        for (text, expected) in [
            ("warning", Some("warn")),
            ("WARN", Some("warn")),
            ("tollgate_server=debug", Some("info,tollgate_server=debug")),
            ("error, tollgate=trace", Some("error,tollgate=trace")),
            ("verbose", None),
            ("information", None),
            ("tollgate=loud", None),
            ("", None),
            ("=info", None),
            ("[span]=info", None),
        ] {
            assert_eq!(directives(text).as_deref(), expected, "{text}");
        }
    }
}
