//! Replies of the Redis protocol, in its versions 2 and 3.

use std::borrow::Cow;
use std::fmt::Display;

use serde::Serialize;

use super::to_reply::ToReply;

/// The version of the protocol that a client has chosen with `HELLO`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Version {
    #[default]
    Resp2,
    Resp3,
}

impl Version {
    pub(super) const fn number(self) -> i64 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// One reply.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Reply {
    /// A short text such as `OK`.
    Simple(&'static str),
    /// An error, with its code in front: `ERR ...`.
    Error(String),
    Integer(i64),
    /// 1 or 0 in version 2.
    Bool(bool),
    Text(Cow<'static, str>),
    Bytes(Vec<u8>),
    Null,
    List(Vec<Reply>),
    /// The five numbers of `CL.THROTTLE`.
    Five([i64; 5]),
    /// Names and values. A flat list in version 2.
    Map(Vec<(Cow<'static, str>, Reply)>),
}

impl Reply {
    pub(super) const OK: Self = Self::Simple("OK");

    pub(super) fn text(text: impl Into<Cow<'static, str>>) -> Self {
        Self::Text(text.into())
    }

    /// An error with the code `ERR`.
    pub(super) fn error(why: impl Display) -> Self {
        Self::Error(format!("ERR {why}"))
    }

    /// An answer with the names and values that its JSON form has.
    pub(super) fn of(answer: &impl Serialize) -> Self {
        answer.serialize(ToReply).unwrap_or_else(Self::error)
    }

    /// Adds the reply to the bytes to be sent.
    pub(super) fn write(&self, version: Version, to: &mut Vec<u8>) {
        match self {
            Self::Simple(text) => line(to, b'+', text.as_bytes()),
            Self::Error(text) => error(to, text),
            Self::Integer(number) => integer(to, *number),
            Self::Bool(it) => match version {
                Version::Resp2 => integer(to, i64::from(*it)),
                Version::Resp3 => to.extend_from_slice(if *it { b"#t\r\n" } else { b"#f\r\n" }),
            },
            Self::Text(text) => bulk(to, text.as_bytes()),
            Self::Bytes(bytes) => bulk(to, bytes),
            Self::Null => to.extend_from_slice(match version {
                Version::Resp2 => b"$-1\r\n",
                Version::Resp3 => b"_\r\n",
            }),
            Self::List(items) => {
                length(to, b'*', items.len());
                items.iter().for_each(|item| item.write(version, to));
            }
            Self::Five(numbers) => {
                to.extend_from_slice(b"*5\r\n");
                numbers.iter().for_each(|number| integer(to, *number));
            }
            Self::Map(members) => {
                match version {
                    Version::Resp2 => length(to, b'*', members.len() * 2),
                    Version::Resp3 => length(to, b'%', members.len()),
                }
                for (name, value) in members {
                    bulk(to, name.as_bytes());
                    value.write(version, to);
                }
            }
        }
    }
}

fn line(to: &mut Vec<u8>, kind: u8, text: &[u8]) {
    to.push(kind);
    to.extend_from_slice(text);
    to.extend_from_slice(b"\r\n");
}

/// An error is one line: line ends within its text become spaces.
fn error(to: &mut Vec<u8>, text: &str) {
    to.push(b'-');
    to.extend(text.bytes().map(|byte| if matches!(byte, b'\r' | b'\n') { b' ' } else { byte }));
    to.extend_from_slice(b"\r\n");
}

fn integer(to: &mut Vec<u8>, number: i64) {
    line(to, b':', itoa::Buffer::new().format(number).as_bytes());
}

fn length(to: &mut Vec<u8>, kind: u8, length: usize) {
    line(to, kind, itoa::Buffer::new().format(length).as_bytes());
}

fn bulk(to: &mut Vec<u8>, bytes: &[u8]) {
    length(to, b'$', bytes.len());
    to.extend_from_slice(bytes);
    to.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(reply: &Reply, version: Version) -> String {
        let mut bytes = Vec::new();
        reply.write(version, &mut bytes);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn every_reply_in_both_versions() {
        let map = Reply::Map(vec![("a".into(), Reply::Bool(true)), ("b".into(), Reply::Null)]);
        for (reply, resp2, resp3) in [
            (Reply::OK, "+OK\r\n", "+OK\r\n"),
            (Reply::error("no\r\nline end"), "-ERR no  line end\r\n", "-ERR no  line end\r\n"),
            (Reply::Integer(-1), ":-1\r\n", ":-1\r\n"),
            (Reply::text("é"), "$2\r\né\r\n", "$2\r\né\r\n"),
            (
                Reply::Five([0, 16, 15, -1, 2]),
                "*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n",
                "*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n",
            ),
            (Reply::List(vec![Reply::Null]), "*1\r\n$-1\r\n", "*1\r\n_\r\n"),
            (map, "*4\r\n$1\r\na\r\n:1\r\n$1\r\nb\r\n$-1\r\n", "%2\r\n$1\r\na\r\n#t\r\n$1\r\nb\r\n_\r\n"),
        ] {
            assert_eq!(written(&reply, Version::Resp2), resp2);
            assert_eq!(written(&reply, Version::Resp3), resp3);
        }
    }

    #[test]
    fn answers_keep_the_names_and_the_order_of_their_fields() {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Inner {
            scope_name: String,
        }
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Answer {
            retry_after: u64,
            allowed: bool,
            rule: Option<&'static str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            absent: Option<u64>,
            list: Vec<u64>,
            #[serde(flatten)]
            inner: Option<Inner>,
        }
        let inner = Some(Inner { scope_name: "s".to_owned() });
        let answer =
            Answer { retry_after: 2, allowed: false, rule: None, absent: None, list: vec![7], inner };
        let expected = Reply::Map(vec![
            ("retryAfter".into(), Reply::Integer(2)),
            ("allowed".into(), Reply::Bool(false)),
            ("rule".into(), Reply::Null),
            ("list".into(), Reply::List(vec![Reply::Integer(7)])),
            ("scopeName".into(), Reply::text("s")),
        ]);
        assert_eq!(Reply::of(&answer), expected);
    }
}
