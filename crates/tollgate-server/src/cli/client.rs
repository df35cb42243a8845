//! Asks a running server over HTTP.

use std::env::VarError;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, IF_MATCH};
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// Longer than any server's own deadline; a script should not hang on a server that does.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of an answer: a policy has up to 1 MiB, which JSON can double.
const ANSWER_BYTES_MAX: usize = 4 * 1024 * 1024;

/// The server that a command asks.
#[derive(Args)]
pub(super) struct Client {
    /// The server. A token for it is read from TOLLGATE_TOKEN.
    #[arg(long, value_name = "URL", env = "TOLLGATE_URL", default_value = "http://127.0.0.1:8080")]
    pub(super) url: String,
}

/// A request for a server.
pub(super) struct Ask<'a> {
    pub(super) method: Method,
    pub(super) path: &'a str,
    pub(super) body: String,
    /// The version of the policy that a change replaces.
    pub(super) if_match: Option<&'a str>,
}

impl<'a> Ask<'a> {
    pub(super) fn new(method: Method, path: &'a str, body: impl Into<String>) -> Self {
        Self { method, path, body: body.into(), if_match: None }
    }
}

impl Client {
    /// The status and the JSON of an answer.
    pub(super) async fn ask(&self, ask: Ask<'_>) -> Result<(StatusCode, Value)> {
        let asked = tokio::time::timeout(PATIENCE, self.send(ask));
        let (status, body) = asked.await.with_context(|| format!("{} does not answer", self.url))??;
        let answer = serde_json::from_slice(&body)
            .with_context(|| format!("{} answered {status}, without JSON", self.url))?;
        Ok((status, answer))
    }

    /// The JSON of an answer that is 200. Any other is an error, with its reason.
    pub(super) async fn ask_for_success(&self, ask: Ask<'_>) -> Result<Value> {
        match self.ask(ask).await? {
            (StatusCode::OK, answer) => Ok(answer),
            (status, answer) => Err(self.refusal(status, &answer)),
        }
    }

    /// An answer that is not what was asked for, as an error.
    pub(super) fn refusal(&self, status: StatusCode, answer: &Value) -> anyhow::Error {
        let detail = answer["detail"].as_str().unwrap_or("no reason given");
        anyhow::anyhow!("{} answered {status}: {detail}", self.url)
    }

    async fn send(&self, ask: Ask<'_>) -> Result<(StatusCode, Bytes)> {
        let base: Uri = self.url.parse().with_context(|| format!("{} is no URL", self.url))?;
        if base.scheme_str() != Some("http") {
            bail!("{}: only http:// is supported", self.url);
        }
        let authority = base.authority().with_context(|| format!("{} names no host", self.url))?;
        let path = format!("{}{}", base.path().trim_end_matches('/'), ask.path);
        let mut request = Request::builder()
            .method(ask.method)
            .uri(path)
            .header(HOST, authority.as_str())
            .header(CONTENT_TYPE, "application/json");
        if let Some(version) = ask.if_match {
            request = request.header(IF_MATCH, format!("\"{version}\""));
        }
        if let Some(token) = token()? {
            request = request.header(AUTHORIZATION, token);
        }
        let request = request.body(Full::<Bytes>::from(ask.body))?;

        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((host, authority.port_u16().unwrap_or(80)))
            .await
            .with_context(|| format!("cannot reach {}", self.url))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let asked = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
            let body =
                body.map_err(|why| anyhow::anyhow!("the answer of {} cannot be read: {why}", self.url))?;
            Ok((status, body.to_bytes()))
        };
        let mut asked = pin!(asked);
        tokio::select! {
            answer = asked.as_mut() => answer,
            // The answer may have come together with the end of the connection.
            ended = connection => match asked.await {
                Ok(answer) => Ok(answer),
                Err(_) => {
                    ended?;
                    bail!("{} closed the connection without an answer", self.url)
                }
            }
        }
    }
}

/// The header with the token of TOLLGATE_TOKEN, if it is set.
fn token() -> Result<Option<HeaderValue>> {
    match std::env::var("TOLLGATE_TOKEN") {
        Ok(token) => {
            let value = HeaderValue::try_from(format!("Bearer {token}"));
            // Not the value: it is a secret.
            let value = value.ok().context(
                "TOLLGATE_TOKEN: the value has a character that no header can have, such as a line end",
            )?;
            Ok(Some(value))
        }
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => bail!("TOLLGATE_TOKEN: the value is not UTF-8"),
    }
}
