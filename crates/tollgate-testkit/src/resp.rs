//! One command to a server and its answer, for the fixtures' own questions: no client under test is involved.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long a server may think. Far above what any answer takes, so that a hung server fails its test by name.
const PATIENCE: Duration = Duration::from_secs(5);

/// The answer's strings and numbers in their order, whatever arrays they came in.
#[derive(Debug)]
pub(crate) struct Reply(pub(crate) Vec<Vec<u8>>);

impl Reply {
    /// The answer as text, one part per line.
    pub(crate) fn text(&self) -> String {
        let parts: Vec<_> = self.0.iter().map(|part| String::from_utf8_lossy(part)).collect();
        parts.join("\n")
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The server said no: its words, such as `NOAUTH ...`.
    Refused(String),
    /// The server could not be reached, or fell silent.
    Unreachable(io::Error),
}

impl fmt::Display for Fault {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(words) => write!(to, "it refused: {words}"),
            Self::Unreachable(why) => write!(to, "it could not be reached: {why}"),
        }
    }
}

impl From<io::Error> for Fault {
    fn from(why: io::Error) -> Self {
        Self::Unreachable(why)
    }
}

/// Asks a server that listens on TCP.
pub(crate) fn ask(address: SocketAddr, command: &[impl AsRef<[u8]>]) -> Result<Reply, Fault> {
    let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    exchange(stream, command)
}

/// Asks a server that listens on a socket file.
pub(crate) fn ask_socket(socket: &Path, command: &[impl AsRef<[u8]>]) -> Result<Reply, Fault> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    exchange(stream, command)
}

fn exchange(mut stream: impl Read + Write, command: &[impl AsRef<[u8]>]) -> Result<Reply, Fault> {
    let mut request = format!("*{}\r\n", command.len()).into_bytes();
    for part in command {
        let part = part.as_ref();
        request.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
        request.extend_from_slice(part);
        request.extend_from_slice(b"\r\n");
    }
    stream.write_all(&request)?;
    let mut parts = Vec::new();
    read_value(&mut BufReader::new(stream), &mut parts)?;
    Ok(Reply(parts))
}

fn read_value(from: &mut impl BufRead, parts: &mut Vec<Vec<u8>>) -> Result<(), Fault> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    let line = line.strip_suffix("\r\n").ok_or(io::Error::from(io::ErrorKind::UnexpectedEof))?;
    let (kind, rest) = line.split_at_checked(1).ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
    let length = || rest.parse::<i64>().map_err(|_| io::Error::from(io::ErrorKind::InvalidData));
    match kind {
        "+" | ":" => parts.push(rest.as_bytes().to_vec()),
        "-" => return Err(Fault::Refused(rest.to_owned())),
        "*" => {
            for _ in 0..length()? {
                read_value(from, parts)?;
            }
        }
        "$" => {
            // A length of -1 stands for nothing.
            if let Ok(length) = usize::try_from(length()?) {
                let mut part = vec![0; length + 2];
                from.read_exact(&mut part)?;
                part.truncate(length);
                parts.push(part);
            }
        }
        _ => return Err(io::Error::from(io::ErrorKind::InvalidData).into()),
    }
    Ok(())
}
