//! YAML as a plain value, and where in the text each part of it stands.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use serde_json::{Map, Value};

/// Line and column, both from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
}

impl Position {
    fn of(span: Span) -> Self {
        Self { line: span.start.line(), column: span.start.col() + 1 }
    }
}

/// A document and the positions of its parts.
#[derive(Clone, Default, Debug)]
pub(super) struct Tree {
    pub value: Value,
    /// Where a field's name stands, by path.
    pub names: HashMap<Vec<String>, Position>,
    /// Where a value stands, by path.
    pub values: HashMap<Vec<String>, Position>,
}

/// Nodes of a file, aliases followed: more would be a bomb, not a configuration.
const NODES_MAX: usize = 100_000;
/// Levels of nesting.
const DEPTH_MAX: usize = 32;

/// A mistake and where it stands.
pub(super) type Mistake = (Position, String);

/// Reads one document. Mistakes that leave the rest readable are collected.
pub(super) fn parse(text: &str) -> (Tree, Vec<Mistake>) {
    let mut reader =
        Reader { parser: Parser::new_from_str(text), tree: Tree::default(), mistakes: Vec::new(), nodes: 0 };
    match reader.document() {
        Ok(value) => reader.tree.value = value,
        Err(mistake) => reader.mistakes.push(mistake),
    }
    (reader.tree, reader.mistakes)
}

struct Reader<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    tree: Tree,
    mistakes: Vec<Mistake>,
    nodes: usize,
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Position), Mistake> {
        match self.parser.next() {
            Some(Ok((event, span))) => Ok((event, Position::of(span))),
            Some(Err(why)) => {
                let marker = why.marker();
                Err((
                    Position { line: marker.line(), column: marker.col() + 1 },
                    format!("no YAML: {}", why.info()),
                ))
            }
            None => Ok((Event::StreamEnd, Position { line: 1, column: 1 })),
        }
    }

    fn document(&mut self) -> Result<Value, Mistake> {
        loop {
            let (event, position) = self.next()?;
            match event {
                Event::StreamStart | Event::DocumentStart(_) | Event::Nothing => {}
                // An empty file says nothing, and nothing is wrong with that.
                Event::StreamEnd | Event::DocumentEnd => return Ok(Value::Null),
                event => {
                    let value = self.node(event, position, &mut Vec::new())?;
                    self.end()?;
                    return Ok(value);
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

    fn node(
        &mut self,
        event: Event<'a>,
        position: Position,
        path: &mut Vec<String>,
    ) -> Result<Value, Mistake> {
        self.nodes += 1;
        if self.nodes > NODES_MAX || path.len() > DEPTH_MAX {
            return Err((
                position,
                format!("too large: at most {NODES_MAX} values, nested {DEPTH_MAX} deep"),
            ));
        }
        self.tree.values.insert(path.clone(), position);
        match event {
            Event::Scalar(text, style, ..) => Ok(scalar(&text, style)),
            Event::SequenceStart(..) => {
                let mut items = Vec::new();
                loop {
                    let (event, position) = self.next()?;
                    if matches!(event, Event::SequenceEnd) {
                        return Ok(Value::Array(items));
                    }
                    path.push(items.len().to_string());
                    items.push(self.node(event, position, path)?);
                    path.pop();
                }
            }
            Event::MappingStart(..) => {
                let mut fields = Map::new();
                loop {
                    let (event, name_position) = self.next()?;
                    let name = match event {
                        Event::MappingEnd => return Ok(Value::Object(fields)),
                        Event::Scalar(name, ..) => name.into_owned(),
                        _ => return Err((name_position, "expected the name of a field".to_owned())),
                    };
                    path.push(name.clone());
                    self.tree.names.insert(path.clone(), name_position);
                    let (event, position) = self.next()?;
                    let value = self.node(event, position, path)?;
                    path.pop();
                    if fields.insert(name.clone(), value).is_some() {
                        self.mistakes.push((name_position, format!("{name}: stands here a second time")));
                    }
                }
            }
            Event::Alias(_) => {
                Err((position, "anchors and aliases are not read; write the value out".to_owned()))
            }
            _ => Err((position, "expected a value".to_owned())),
        }
    }
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
