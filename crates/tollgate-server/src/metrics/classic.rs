//! The older text format of Prometheus, for scrapers that do not know OpenMetrics.

use std::fmt::Write;

/// Turns OpenMetrics into the older format: there, a counter is described under the name of its only sample, and information is a gauge.
pub(crate) fn without_openmetrics(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut help = "";
    for line in text.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            help = described.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|typed| typed.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                other => ("", other),
            };
            // Writing to a string does not fail.
            let _ = write!(plain, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}\n");
        } else if !line.starts_with("# ") {
            let _ = writeln!(plain, "{line}");
        }
    }
    plain
}
