//! What each limit lets through, in figures.

use tollgate::algorithm::Algorithm;
use tollgate::rules::PolicyParts;
use tollgate::{Cycle, LeakyMode, Limit, Micros, Rate, SlidingCounter};

use super::CheckedPolicy;
use super::diff::named_limits;

/// Seconds of a month of the Gregorian calendar, on average.
const MONTH_SECS: f64 = 365.2425 / 12.0 * 86_400.0;

/// What one limit lets through, in permits.
#[derive(Clone, PartialEq, Debug)]
struct Figures {
    /// What a key that was never used gets at once.
    at_once: u64,
    /// What a client that never stops asking gets in the long run.
    per_second: f64,
    /// The length of the limit: its window, or the period of its rate.
    window: String,
    /// The most that any window of this length can see.
    at_most: u64,
    /// How to get less, where an option would.
    hint: String,
}

/// What every limit of a policy lets through, a line each below a heading.
pub fn figures(checked: &CheckedPolicy) -> Vec<String> {
    let parts = checked.policy.parts();
    let mut lines = vec!["what each limit lets through, in permits:".to_owned()];
    for (name, number) in named_limits(parts) {
        lines.push(line(checked, parts, &name, number));
        if let Some(candidate) = parts.limits[number].candidate {
            lines.push(line(checked, parts, &format!("{name}, candidate"), candidate));
        }
    }
    lines
}

fn line(checked: &CheckedPolicy, parts: &PolicyParts, name: &str, number: usize) -> String {
    let limit = &parts.limits[number].limit;
    let Figures { at_once, per_second, window, at_most, hint } = of(limit, checked.rates[number]);
    let algorithm = match limit {
        Limit::CalendarQuota(it) => {
            let unit = match it.calendar().cycle() {
                Cycle::Day => "day",
                Cycle::Week { .. } => "week",
                Cycle::Month { .. } => "month",
            };
            format!("calendar quota per {unit} of {}", it.calendar().zone_name())
        }
        other => other.algorithm().to_string(),
    };
    let per_second = significant(per_second);
    format!(
        "  {name}: {algorithm}: {at_once} at once, {per_second} per second sustained, at most {at_most} in any {window}{hint}"
    )
}

/// The figures of a limit. `rate` is what was written, of all but quotas.
fn of(limit: &Limit, rate: Option<Rate>) -> Figures {
    let size = limit.size();
    let window = rate.map_or(limit.horizon(), Rate::per);
    let permits = rate.map_or(size, Rate::permits);
    let seconds = window.get() as f64 / 1e6;
    let figures = Figures {
        at_once: size,
        per_second: permits as f64 / seconds,
        window: length(window),
        at_most: size.saturating_add(permits),
        hint: String::new(),
    };
    match limit {
        Limit::TokenBucket(_) => figures,
        // All of a period at its end, as far as it fits.
        Limit::IntervalBucket(_) => Figures { at_most: size.saturating_add(permits.min(size)), ..figures },
        Limit::LeakyBucket(it) => match it.mode() {
            LeakyMode::Meter => figures,
            // One after another: the one that starts now, and those whose turn comes within the window.
            LeakyMode::Queue => Figures { at_once: 1, at_most: permits.saturating_add(1), ..figures },
        },
        // All of a window just before its end, and all of the next one.
        Limit::FixedWindow(_) => Figures { at_most: size.saturating_mul(2), ..figures },
        Limit::SlidingLog(_) => Figures { at_most: size, ..figures },
        Limit::SlidingCounter(it) if it.is_strict() => {
            // The oldest part of the window counts in full until all of it has left.
            let parts = f64::from(it.sub_buckets());
            let per_second = figures.per_second * parts / (parts + 1.0);
            Figures { per_second, at_most: size, ..figures }
        }
        Limit::SlidingCounter(it) => {
            Figures { at_most: around_an_edge(it), hint: format!(" ({size} with `strict: true`)"), ..figures }
        }
        Limit::CalendarQuota(it) => {
            // The shortest period of its kind: clocks that are turned forward take an hour.
            let (seconds, window) = match it.calendar().cycle() {
                Cycle::Day => (86_400.0, "23h"),
                Cycle::Week { .. } => (7.0 * 86_400.0, "167h"),
                Cycle::Month { .. } => (MONTH_SECS, "28d"),
            };
            let window = window.to_owned();
            Figures { per_second: size as f64 / seconds, window, at_most: size.saturating_mul(2), ..figures }
        }
    }
}

/// What a client gets that times its bursts around the edge of a weighted counter.
///
/// It takes all permits at the end of one part of the window. At the end of the part that is a window later, their weight is that of
/// one tick, rounded up.
fn around_an_edge(counter: &SlidingCounter) -> u64 {
    let limit = u128::from(counter.size());
    let part = u128::from(counter.horizon().get() / u64::from(counter.sub_buckets()));
    let left = (limit * u128::from(counter.tick())).div_ceil(part);
    u64::try_from(2 * limit - left).unwrap_or(u64::MAX)
}

/// A length of time as it is written in a rate: `60s`.
fn length(window: Micros) -> String {
    let rate = Rate::new(1, window).map(|rate| rate.to_string());
    rate.unwrap_or_default().trim_start_matches("1/").to_owned()
}

/// A number with four significant digits, without zeros at the end.
fn significant(number: f64) -> String {
    let digits = 3 - number.log10().floor().clamp(-12.0, 3.0) as i32;
    let text = format!("{number:.*}", digits.max(0) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}
