//! Tests whether a server that does not answer is reachable: then it is busy or stopped, and not gone.
//!
//! The operating system of a stopped server accepts connections until the queue of the server is full, and acknowledges the data sent on
//! them. So one connection is kept and reused for this test: a new connection for each test would fill the queue, and then the server
//! would seem to be gone.

use std::io::ErrorKind;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout};

use crate::redis::url::Address;

/// The time limit of one test.
const ASK_FOR: Duration = Duration::from_millis(400);
/// Data must be acknowledged within this time, or the connection is broken.
#[cfg(target_os = "linux")]
const ACKNOWLEDGED_WITHIN_MS: u32 = 300;
/// How long a result is reused.
const FRESH_FOR: Duration = Duration::from_millis(200);

/// The reachability of a server that does not answer.
#[derive(Default)]
pub(crate) struct Reach {
    kept: Option<TcpStream>,
    told: Option<(Instant, bool)>,
}

impl Reach {
    /// Whether the server is reachable.
    pub(crate) async fn ask(&mut self, address: &Address) -> bool {
        if let Some((when, told)) = self.told
            && when.elapsed() < FRESH_FOR
        {
            return told;
        }
        let told = match address {
            Address::Unix(path) => match UnixStream::connect(path).await {
                Ok(_) => true,
                // Its queue is full.
                Err(why) => why.kind() == ErrorKind::WouldBlock,
            },
            Address::Tcp { host, port } => match self.ask_kept().await {
                Some(told) => told,
                None => {
                    self.kept = timeout(ASK_FOR, connect(host, *port)).await.ok().flatten();
                    self.kept.is_some()
                }
            },
        };
        self.told = Some((Instant::now(), told));
        told
    }

    /// Drops the connection and the result: the server answers again.
    pub(crate) fn forget(&mut self) {
        (self.kept, self.told) = (None, None);
    }

    /// Tests the kept connection. `None`: there is none, and a new one has to be opened.
    async fn ask_kept(&mut self) -> Option<bool> {
        let stream = self.kept.as_mut()?;
        let asked = async {
            stream.write_all(b"PING\r\n").await?;
            let mut answer = [0; 256];
            match stream.read(&mut answer).await? {
                0 => Err(std::io::Error::from(ErrorKind::UnexpectedEof)),
                _ => Ok(()),
            }
        };
        match timeout(ASK_FOR, asked).await {
            Ok(Ok(())) => Some(true),
            Ok(Err(why)) => {
                self.kept = None;
                // A timeout means that the data was not acknowledged. Other errors come from a reachable server.
                (why.kind() == ErrorKind::TimedOut).then_some(false)
            }
            // Acknowledged: otherwise the connection would have failed by now.
            Err(_) if cfg!(target_os = "linux") => Some(true),
            Err(_) => {
                self.kept = None;
                None
            }
        }
    }
}

async fn connect(host: &str, port: u16) -> Option<TcpStream> {
    let stream = TcpStream::connect((host, port)).await.ok()?;
    #[cfg(target_os = "linux")]
    rustix::net::sockopt::set_tcp_user_timeout(&stream, ACKNOWLEDGED_WITHIN_MS).ok()?;
    Some(stream)
}
