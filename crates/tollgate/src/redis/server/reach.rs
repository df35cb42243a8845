//! Whether a server that does not answer can be reached: then it is busy or stopped, and not gone.
//!
//! The system of a stopped server accepts connections until the server's queue is full, and acknowledges what is sent on those that it
//! has accepted. So one connection is kept for this question, and asked again and again: a new one for each time would fill the queue,
//! after which the server would seem to be gone.

use std::io::ErrorKind;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout};

use crate::redis::url::Address;

/// For one attempt.
const ASK_FOR: Duration = Duration::from_millis(400);
/// What is sent must be acknowledged within this, or the connection is broken.
#[cfg(target_os = "linux")]
const ACKNOWLEDGED_WITHIN_MS: u32 = 300;
/// Others who ask at the same time share the answer.
const FRESH_FOR: Duration = Duration::from_millis(200);

/// What is known of a server that does not answer.
#[derive(Default)]
pub(in crate::redis) struct Reach {
    kept: Option<TcpStream>,
    told: Option<(Instant, bool)>,
}

impl Reach {
    /// Whether the server can be reached.
    pub(in crate::redis) async fn ask(&mut self, address: &Address) -> bool {
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

    /// The server answers again: what was kept for the question is let go.
    pub(in crate::redis) fn forget(&mut self) {
        (self.kept, self.told) = (None, None);
    }

    /// Asks on the connection that is kept. None: there is none any more, and another one may tell.
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
                // What was sent was not acknowledged. Anything else comes from a server that is there.
                (why.kind() == ErrorKind::TimedOut).then_some(false)
            }
            // Acknowledged, or it would have failed by now.
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
