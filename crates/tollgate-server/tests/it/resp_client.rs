//! A client of the Redis protocol that says exactly what it is told to.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

use crate::server::connect;

/// A reply.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Reply {
    Simple(String),
    Error(String),
    Integer(i64),
    Text(String),
    Bool(bool),
    Null,
    List(Vec<Reply>),
    Map(Vec<(Reply, Reply)>),
}

impl Reply {
    /// The value of a name, in a map or in a flat list of names and values.
    pub(crate) fn get(&self, name: &str) -> &Self {
        let is_name = |reply: &Self| *reply == Self::Text(name.to_owned());
        match self {
            Self::Map(members) => members.iter().find(|(known, _)| is_name(known)).map(|(_, value)| value),
            Self::List(items) => items.chunks(2).find(|pair| is_name(&pair[0])).map(|pair| &pair[1]),
            _ => None,
        }
        .unwrap_or_else(|| panic!("no {name} in {self:?}"))
    }

    /// The names of a map or of a flat list of names and values.
    pub(crate) fn names(&self) -> Vec<String> {
        let text = |reply: &Self| match reply {
            Self::Text(text) => text.clone(),
            other => panic!("not a name: {other:?}"),
        };
        match self {
            Self::Map(members) => members.iter().map(|(name, _)| text(name)).collect(),
            Self::List(items) => items.chunks(2).map(|pair| text(&pair[0])).collect(),
            other => panic!("no names: {other:?}"),
        }
    }

    pub(crate) fn integers(&self) -> Vec<i64> {
        let Self::List(items) = self else { panic!("not a list: {self:?}") };
        items.iter().map(Self::integer).collect()
    }

    pub(crate) fn integer(&self) -> i64 {
        match self {
            Self::Integer(number) => *number,
            other => panic!("not a number: {other:?}"),
        }
    }

    pub(crate) fn error(&self) -> &str {
        match self {
            Self::Error(text) => text,
            other => panic!("not an error: {other:?}"),
        }
    }

    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            other => panic!("not a text: {other:?}"),
        }
    }
}

/// A command as clients send it.
pub(crate) fn command(arguments: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        bytes.extend_from_slice(format!("${}\r\n{argument}\r\n", argument.len()).as_bytes());
    }
    bytes
}

/// A connection.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    received: Vec<u8>,
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let stream = connect(address);
        stream.set_nodelay(true).unwrap();
        Self { stream, received: Vec::new() }
    }

    /// Sends a command, in words that are separated by spaces, and reads its reply.
    pub(crate) fn call(&mut self, words: &str) -> Reply {
        self.call_words(&words.split(' ').collect::<Vec<_>>())
    }

    pub(crate) fn call_words(&mut self, words: &[&str]) -> Reply {
        self.send(&command(words));
        self.reply()
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn end_sending(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    /// Whether the server has closed the connection, and everything was read.
    pub(crate) fn is_closed(&mut self) -> bool {
        self.received.is_empty() && matches!(self.stream.read(&mut [0; 1024]), Ok(0) | Err(_))
    }

    pub(crate) fn reply(&mut self) -> Reply {
        let line = self.line();
        let (kind, rest) = line.split_at(1);
        let number = || rest.parse::<i64>().unwrap_or_else(|_| panic!("not a number: {line}"));
        match kind {
            "+" => Reply::Simple(rest.to_owned()),
            "-" => Reply::Error(rest.to_owned()),
            ":" => Reply::Integer(number()),
            "#" => Reply::Bool(rest == "t"),
            "_" => Reply::Null,
            "$" | "*" if number() < 0 => Reply::Null,
            "$" => {
                let mut text = self.bytes(number() as usize + 2);
                text.truncate(text.len() - 2);
                Reply::Text(String::from_utf8(text).unwrap())
            }
            "*" => Reply::List((0..number()).map(|_| self.reply()).collect()),
            "%" => Reply::Map((0..number()).map(|_| (self.reply(), self.reply())).collect()),
            _ => panic!("not a reply: {line}"),
        }
    }

    fn line(&mut self) -> String {
        loop {
            if let Some(end) = self.received.windows(2).position(|bytes| bytes == b"\r\n") {
                let mut line: Vec<_> = self.received.drain(..end + 2).collect();
                line.truncate(end);
                return String::from_utf8(line).unwrap();
            }
            self.read();
        }
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        while self.received.len() < count {
            self.read();
        }
        self.received.drain(..count).collect()
    }

    fn read(&mut self) {
        let mut part = [0; 16 * 1024];
        let length = self.stream.read(&mut part).unwrap();
        assert_ne!(
            length,
            0,
            "closed by the server; received {:?}",
            self.received.escape_ascii().to_string()
        );
        self.received.extend_from_slice(&part[..length]);
    }
}
