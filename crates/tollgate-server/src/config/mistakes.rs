//! Mistakes as they are reported: few enough to be read, and each of them short.

use std::fmt;

use super::Position;
use crate::escape::escaped;

/// Mistakes of one run. Further ones are found when these are mended.
pub(super) const MISTAKES_MAX: usize = 100;
/// Characters of a name within a mistake. Names of fields and rules have up to 64.
const NAME_CHARS_MAX: usize = 64;
/// Characters of the reason. The longest list of accepted fields has some 400.
const WHY_CHARS_MAX: usize = 600;
/// Names of a list within a mistake, such as the tiers that there are.
const NAMES_MAX: usize = 20;

/// Mistakes, each with its place.
#[derive(Debug)]
pub struct ConfigErrors(pub Vec<ConfigError>);

/// One mistake.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigError {
    /// `tollgate.yaml`, `TOLLGATE_LISTEN`, `--listen`.
    pub place: String,
    /// Where in the file.
    pub position: Option<Position>,
    /// The path of the field: `memory.max_keys`, `rules.0.limit`; empty for the whole file.
    pub field: String,
    /// The field as it is shown: a rule by its name.
    shown_field: String,
    /// What is wrong, and what is accepted.
    pub why: String,
}

impl ConfigError {
    /// A mistake in the field at `path`, which is empty for the whole file.
    pub(super) fn new(place: &str, position: Option<Position>, path: &[String], why: &str) -> Self {
        let names: Vec<_> = path.iter().map(|name| shown(name)).collect();
        let field = names.join(".");
        Self {
            place: place.to_owned(),
            position,
            shown_field: field.clone(),
            field,
            why: cut(why, WHY_CHARS_MAX),
        }
    }

    /// The same mistake in a rule: `rule` is its name, and the field is the one at `path` within the rule.
    pub(super) fn in_rule(self, rule: &str, path: &[String]) -> Self {
        let names = path.iter().map(|name| shown(name)).collect::<Vec<_>>().join(".");
        let shown_field = if names.is_empty() { rule.to_owned() } else { format!("{rule}: {names}") };
        Self { shown_field, ..self }
    }
}

impl ConfigErrors {
    /// Mistakes in the order of their positions, at most as many as are reported.
    pub(super) fn new(mut errors: Vec<ConfigError>) -> Self {
        errors.sort_by_key(|error| error.position);
        errors.truncate(MISTAKES_MAX);
        Self(errors)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escaped(&self.place))?;
        if let Some(Position { line, column }) = self.position {
            write!(f, ":{line}:{column}")?;
        }
        if !self.shown_field.is_empty() {
            write!(f, ": {}", escaped(&self.shown_field))?;
        }
        write!(f, ": {}", escaped(&self.why))
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> = self.0.iter().map(ConfigError::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for ConfigErrors {}

/// The name that was probably meant by one that is unknown.
pub(super) fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    // Two letters may be wrong, of short names one.
    let most = (name.chars().count() / 3).clamp(1, 2);
    let distance = |it: &str| strsim::osa_distance(&name.to_lowercase(), &it.to_lowercase());
    known.map(|it| (distance(it), it)).filter(|(distance, _)| *distance <= most).min().map(|(_, it)| it)
}

/// A name, cut to a length that can be read.
pub(super) fn shown(name: &str) -> String {
    cut(name, NAME_CHARS_MAX)
}

/// The first names of a list, and how many more there are.
pub(super) fn listed<'n>(names: impl ExactSizeIterator<Item = &'n str>) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    let mut listed = names.take(NAMES_MAX).map(shown).collect::<Vec<_>>().join(", ");
    if more > 0 {
        listed += &format!(" and {more} more");
    }
    listed
}

fn cut(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
