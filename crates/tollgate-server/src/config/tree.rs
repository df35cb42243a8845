//! YAML as a plain value, and the position of each part of it.
//!
//! Memory is bounded by the number of values and the length of texts, so by a small multiple of the input.

use std::hash::{DefaultHasher, Hash, Hasher};

use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use serde_json::{Map, Value};

use super::mistakes::{MISTAKES_MAX, shown};

/// Line and column, both from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Position {
    /// The line.
    pub line: u32,
    /// The column, in characters.
    pub column: u32,
}

impl Position {
    /// The beginning of a file.
    pub(super) const START: Self = Self { line: 1, column: 1 };

    fn new(line: usize, column: usize) -> Self {
        let number = |number| u32::try_from(number).unwrap_or(u32::MAX);
        Self { line: number(line), column: number(column + 1) }
    }

    fn of(span: Span) -> Self {
        Self::new(span.start.line(), span.start.col())
    }
}

/// The positions of a document's parts: a tree of the document's own shape.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// Of a field its name's position, of anything else the value's.
    at: Position,
    parts: Parts,
}

#[derive(Clone, Debug)]
enum Parts {
    None,
    Items(Vec<Places>),
    /// By digest of the name: the value holds the names already, and two that share a digest only share a position.
    Fields(Vec<(u64, Places)>),
}

impl Default for Places {
    fn default() -> Self {
        Self { at: Position::START, parts: Parts::None }
    }
}

impl Places {
    /// Finds the position of a part. None if the document has no such part.
    pub(super) fn find(&self, path: &[String]) -> Option<Position> {
        let part = path.iter().try_fold(self, |places, name| match &places.parts {
            Parts::None => None,
            Parts::Items(items) => items.get(name.parse::<usize>().ok()?),
            // Of a repeated field the last one counts, as in the value.
            Parts::Fields(fields) => {
                let digest = digest(name);
                fields.iter().rev().find(|(known, _)| *known == digest).map(|it| &it.1)
            }
        });
        part.map(|places| places.at)
    }
}

/// Values of a file. A policy of 10,000 rules has fewer; this many take some 30 MB until they are rules.
const NODES_MAX: usize = 100_000;
/// Entries of one list: as many as a policy may have rules.
const ITEMS_MAX: usize = 10_000;
/// Levels of nesting.
const DEPTH_MAX: usize = 32;
/// Bytes of the name of a field. API keys are the longest names, with 512.
const NAME_BYTES_MAX: usize = 1_024;
/// Bytes of a text: as many as a path or a header may have in a request.
const TEXT_BYTES_MAX: usize = 4 * 1_024;

fn digest(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// A mistake and its position.
pub(super) type Mistake = (Position, String);

/// A document, its positions, and the mistakes in it.
#[derive(Default)]
pub(super) struct Parsed {
    pub value: Value,
    pub places: Places,
    pub mistakes: Vec<Mistake>,
}

/// Reads one document. Mistakes that leave the rest readable are collected.
pub(super) fn parse(text: &str) -> Parsed {
    let mut reader = Reader { parser: Parser::new_from_str(text), mistakes: Vec::new(), nodes: 0 };
    match reader.document() {
        Ok((value, places)) => Parsed { value, places, mistakes: reader.mistakes },
        Err(mistake) => {
            // One more than the maximum: it is the mistake that ended the reading.
            reader.mistakes.push(mistake);
            Parsed { mistakes: reader.mistakes, ..Parsed::default() }
        }
    }
}

struct Reader<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    mistakes: Vec<Mistake>,
    nodes: usize,
}

type Read = Result<(Value, Places), Mistake>;

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Position), Mistake> {
        match self.parser.next() {
            Some(Ok((event, span))) => Ok((event, Position::of(span))),
            Some(Err(why)) => {
                let marker = why.marker();
                Err((Position::new(marker.line(), marker.col()), format!("no YAML: {}", why.info())))
            }
            None => Ok((Event::StreamEnd, Position::START)),
        }
    }

    fn document(&mut self) -> Read {
        loop {
            let (event, position) = self.next()?;
            match event {
                Event::StreamStart | Event::DocumentStart(_) | Event::Nothing => {}
                // An empty file says nothing, and nothing is wrong with that.
                Event::StreamEnd | Event::DocumentEnd => return Ok((Value::Null, Places::default())),
                event => {
                    let read = self.node(event, position, 0)?;
                    self.end()?;
                    return Ok(read);
                }
            }
        }
    }

    /// One document a file.
    fn end(&mut self) -> Result<(), Mistake> {
        loop {
            let (event, position) = self.next()?;
            match event {
                Event::StreamEnd => return Ok(()),
                Event::DocumentStart(_) => {
                    return Err((position, "a second document; expected one".to_owned()));
                }
                _ => {}
            }
        }
    }

    fn node(&mut self, event: Event<'a>, at: Position, depth: usize) -> Read {
        self.nodes += 1;
        if self.nodes > NODES_MAX || depth > DEPTH_MAX {
            return Err((at, format!("too large: at most {NODES_MAX} values, nested {DEPTH_MAX} deep")));
        }
        match event {
            Event::Scalar(text, style, ..) => {
                let value = scalar(check_length(&text, "a text", TEXT_BYTES_MAX, at)?, style);
                Ok((value, Places { at, parts: Parts::None }))
            }
            Event::SequenceStart(..) => self.items(at, depth),
            Event::MappingStart(..) => self.fields(at, depth),
            Event::Alias(_) => Err((at, "anchors and aliases are not read; write the value out".to_owned())),
            _ => Err((at, "expected a value".to_owned())),
        }
    }

    fn items(&mut self, at: Position, depth: usize) -> Read {
        let (mut items, mut places) = (Vec::new(), Vec::new());
        loop {
            let (event, position) = self.next()?;
            if matches!(event, Event::SequenceEnd) {
                items.shrink_to_fit();
                places.shrink_to_fit();
                return Ok((Value::Array(items), Places { at, parts: Parts::Items(places) }));
            }
            if items.len() == ITEMS_MAX {
                return Err((position, format!("a list may have at most {ITEMS_MAX} entries")));
            }
            let (item, place) = self.node(event, position, depth + 1)?;
            items.push(item);
            places.push(place);
        }
    }

    fn fields(&mut self, at: Position, depth: usize) -> Read {
        let (mut fields, mut places) = (Map::new(), Vec::new());
        loop {
            let (event, name_at) = self.next()?;
            let name = match event {
                Event::MappingEnd => {
                    places.shrink_to_fit();
                    return Ok((Value::Object(fields), Places { at, parts: Parts::Fields(places) }));
                }
                Event::Scalar(name, ..) => name,
                _ => return Err((name_at, "expected the name of a field".to_owned())),
            };
            let name = check_length(&name, "the name of a field", NAME_BYTES_MAX, name_at)?;
            let (event, position) = self.next()?;
            let (value, place) = self.node(event, position, depth + 1)?;
            places.push((digest(name), Places { at: name_at, ..place }));
            if fields.insert(name.to_owned(), value).is_some() && self.mistakes.len() < MISTAKES_MAX {
                self.mistakes.push((name_at, format!("{}: stands here a second time", shown(name))));
            }
        }
    }
}

fn check_length<'t>(text: &'t str, what: &str, most: usize, at: Position) -> Result<&'t str, Mistake> {
    if text.len() > most { Err((at, format!("{what} may have at most {most} bytes"))) } else { Ok(text) }
}

/// A scalar as YAML 1.2 reads it: quoted texts are texts, plain ones may be null, booleans or numbers.
fn scalar(text: &str, style: ScalarStyle) -> Value {
    if style != ScalarStyle::Plain {
        return Value::String(text.to_owned());
    }
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        _ => match text.parse::<i64>() {
            Ok(number) => number.into(),
            Err(_) => text.parse::<u64>().map_or_else(|_| Value::String(text.to_owned()), Value::from),
        },
    }
}
