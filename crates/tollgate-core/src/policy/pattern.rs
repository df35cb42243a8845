//! Patterns for paths and other texts.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use smallvec::SmallVec;

/// Segments of a pattern: far more than a path needs.
pub const SEGMENTS_MAX: usize = 64;

/// A text with `*` for any run of characters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Glob {
    /// The texts between the stars.
    parts: Box<[Box<str>]>,
}

impl Glob {
    /// Reads a pattern. Every text is one.
    pub fn new(text: &str) -> Self {
        Self { parts: text.split('*').map(Box::from).collect() }
    }

    /// The text of a pattern without stars.
    pub fn literal(&self) -> Option<&str> {
        match &*self.parts {
            [only] => Some(only),
            _ => None,
        }
    }

    /// Whether it matches every text.
    fn is_any(&self) -> bool {
        self.parts.len() > 1 && self.parts.iter().all(|part| part.is_empty())
    }

    /// The same pattern in lower case.
    fn lowered(&self) -> Self {
        Self { parts: self.parts.iter().map(|part| part.to_ascii_lowercase().into()).collect() }
    }

    /// A text that matches.
    pub(super) fn example(&self) -> String {
        self.parts.join("x")
    }

    /// Whether the whole text matches.
    pub fn matches(&self, text: &str) -> bool {
        let [first, middle @ .., last] = &*self.parts else {
            return self.literal() == Some(text);
        };
        let Some(mut rest) = text.strip_prefix(&**first) else { return false };
        for part in middle {
            match rest.find(&**part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        rest.ends_with(&**last)
    }
}

/// A part of a path pattern, between two slashes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Segment {
    /// `login`
    Literal(Box<str>),
    /// `*`, `*.png`
    Glob(Glob),
    /// `{id}`: one segment, under a name.
    Parameter(Box<str>),
    /// `**`: any number of segments, also none.
    Rest,
}

/// A path with wildcards: `/api/login`, `/api/*/items`, `/users/{id}`, `/static/**`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathPattern {
    segments: Box<[Segment]>,
}

/// Why a text is not a pattern for paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PatternError {
    /// Paths begin with a slash.
    #[error("a path begins with /")]
    NoSlash,
    /// Paths are compared in their plain form, which has none of these.
    #[error(
        "can never match: paths are compared without //, /./, /../ and %XX, and without what follows ?, # or ;"
    )]
    NotPlain,
    /// A brace is not at the edge of a segment.
    #[error("a parameter is a whole segment: /users/{{id}}")]
    Parameter,
    /// Two parameters have the same name.
    #[error("a parameter's name stands twice")]
    TwiceNamed,
    /// See [`SEGMENTS_MAX`].
    #[error("at most {SEGMENTS_MAX} segments")]
    TooLong,
    /// Two of them would have to be tried in every combination.
    #[error("at most one ** in a path")]
    TwoRests,
}

/// The names and values of the parameters of a path.
pub(super) type Parameters<'p, 't> = SmallVec<[(&'p str, &'t str); 4]>;

impl PathPattern {
    /// Reads a pattern.
    pub fn new(text: &str) -> Result<Self, PatternError> {
        let path = text.strip_prefix('/').ok_or(PatternError::NoSlash)?;
        let mut segments = Vec::new();
        let mut names: Vec<&str> = Vec::new();
        // A slash at the end makes no difference.
        for segment in split(path) {
            if segment.is_empty() || matches!(segment, "." | "..") || segment.contains(['%', '?', '#', ';']) {
                return Err(PatternError::NotPlain);
            }
            let parameter = segment.strip_prefix('{').and_then(|inner| inner.strip_suffix('}'));
            segments.push(match parameter {
                Some(name) if is_name(name) => {
                    if names.contains(&name) {
                        return Err(PatternError::TwiceNamed);
                    }
                    names.push(name);
                    Segment::Parameter(name.into())
                }
                _ if segment.contains(['{', '}']) => return Err(PatternError::Parameter),
                _ if segment == "**" => Segment::Rest,
                _ if segment.contains('*') => Segment::Glob(Glob::new(segment)),
                _ => Segment::Literal(segment.into()),
            });
        }
        if segments.len() > SEGMENTS_MAX {
            return Err(PatternError::TooLong);
        }
        if segments.iter().filter(|segment| matches!(segment, Segment::Rest)).count() > 1 {
            return Err(PatternError::TwoRests);
        }
        Ok(Self { segments: segments.into() })
    }

    /// Whether it has a parameter of this name.
    pub fn has_parameter(&self, name: &str) -> bool {
        self.segments.iter().any(|segment| matches!(segment, Segment::Parameter(known) if **known == *name))
    }

    /// Whether every path that `other` matches also matches this pattern. A false answer may be wrong, a true one never is.
    pub fn covers(&self, other: &Self) -> bool {
        covers(&self.segments, &other.segments)
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The pattern for paths in lower case. Names of parameters stay as they are.
    pub(super) fn lowered(&self) -> Self {
        let lowered = self.segments.iter().map(|segment| match segment {
            Segment::Literal(text) => Segment::Literal(text.to_ascii_lowercase().into()),
            Segment::Glob(glob) => Segment::Glob(glob.lowered()),
            Segment::Parameter(name) => Segment::Parameter(name.clone()),
            Segment::Rest => Segment::Rest,
        });
        Self { segments: lowered.collect() }
    }

    /// A path that matches.
    pub(super) fn example(&self) -> String {
        let mut path = String::new();
        for segment in &self.segments {
            match segment {
                Segment::Literal(text) => path.extend(["/", text]),
                Segment::Glob(glob) => path.extend(["/", &glob.example()]),
                Segment::Parameter(_) => path.push_str("/x"),
                Segment::Rest => {}
            }
        }
        if path.is_empty() { "/".into() } else { path }
    }

    /// The parameters, if the path matches.
    pub(super) fn parameters<'p, 't>(&'p self, path: &[&'t str]) -> Option<Parameters<'p, 't>> {
        let mut found = Parameters::new();
        let rest = self.segments.iter().position(|segment| matches!(segment, Segment::Rest));
        let (before, after) = match rest {
            Some(at) => (&self.segments[..at], &self.segments[at + 1..]),
            None => (&*self.segments, &[] as &[Segment]),
        };
        let fixed = before.len() + after.len();
        if path.len() < fixed || rest.is_none() && path.len() > fixed {
            return None;
        }
        let tail = &path[path.len() - after.len()..];
        for (segment, text) in before.iter().zip(path).chain(after.iter().zip(tail)) {
            let fits = match segment {
                Segment::Literal(literal) => **literal == **text,
                Segment::Glob(glob) => glob.matches(text),
                Segment::Parameter(name) => {
                    found.push((name, text));
                    true
                }
                Segment::Rest => true,
            };
            if !fits {
                return None;
            }
        }
        Some(found)
    }
}

fn covers(wide: &[Segment], narrow: &[Segment]) -> bool {
    match (wide, narrow) {
        ([], []) => true,
        ([Segment::Rest, after @ ..], _) => {
            covers(after, narrow) || narrow.split_first().is_some_and(|(_, rest)| covers(wide, rest))
        }
        ([first, wide @ ..], [other, narrow @ ..]) => first.covers(other) && covers(wide, narrow),
        ([], [_, ..]) | ([_, ..], []) => false,
    }
}

impl Segment {
    /// Whether it stands for one segment, and for every segment that `other` stands for.
    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (_, Self::Rest) | (Self::Rest, _) => false,
            (Self::Parameter(_), _) => true,
            (Self::Glob(glob), Self::Literal(text)) => glob.matches(text),
            (Self::Glob(glob), Self::Glob(_) | Self::Parameter(_)) => glob.is_any() || self == other,
            (Self::Literal(text), Self::Literal(other)) => text == other,
            (Self::Literal(_), Self::Glob(_) | Self::Parameter(_)) => false,
        }
    }
}

/// Whether a text can be the name of a parameter.
pub fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}

/// The segments of a path without its first slash.
pub(super) fn split(path: &str) -> impl Iterator<Item = &str> {
    let path = path.strip_suffix('/').unwrap_or(path);
    path.split('/').filter(move |_| !path.is_empty())
}
