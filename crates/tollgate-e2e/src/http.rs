//! An HTTP client that sends one request over one connection.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::Value;

/// How long a response may take. No test waits on purpose for that long.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A response, read to its end.
#[derive(Debug)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Names in lower case, in the order of the response.
    pub headers: Vec<(String, String)>,
    /// The body as text.
    pub body: String,
}

impl Response {
    /// The first header of a name, which is in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|why| panic!("{why}: {self:?}"))
    }
}

/// Sends a GET request without further headers.
///
/// # Panics
/// If no response arrives within 30 seconds.
pub fn get(address: SocketAddr, target: &str) -> Response {
    send(address, "GET", target, &[], "")
}

/// Sends a request. The `Host` header is `localhost` unless `headers` has one.
///
/// # Panics
/// If the request is invalid, or no response arrives within 30 seconds.
pub fn send(
    address: SocketAddr,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Response {
    let mut request = Request::builder().method(method).uri(target);
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        request = request.header("host", "localhost");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::from(body.to_owned())).expect("the request is valid");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
    let response =
        runtime.block_on(async { tokio::time::timeout(TIMEOUT, exchange(address, request)).await });
    response
        .unwrap_or_else(|_| panic!("{method} {target} on {address} was not answered within 30 s"))
        .unwrap_or_else(|why| panic!("{method} {target} on {address} failed: {why}"))
}

type Failure = Box<dyn std::error::Error>;

async fn exchange(address: SocketAddr, request: Request<Full<Bytes>>) -> Result<Response, Failure> {
    let stream = tokio::net::TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The connection reports its failures to the request as well.
    tokio::spawn(connection);
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = String::from_utf8(body.collect().await?.to_bytes().to_vec())?;
    let headers = head.headers.iter();
    let headers = headers
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect();
    Ok(Response { status: head.status.as_u16(), headers, body })
}
