//! `tollgate check`: ask a running server, for scripts and for people.

use std::env::VarError;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde_json::{Map, Value};
use tokio::net::TcpStream;

/// Longer than any server's own deadline; a script should not hang on a server that does.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of an answer: a few hundred are usual.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

#[derive(Args)]
pub(super) struct Check {
    /// Whose limit it is, such as user:123 or ip:192.0.2.1.
    key: String,
    /// TOKEN_BUCKET, LEAKY_BUCKET, FIXED_WINDOW, SLIDING_WINDOW or SLIDING_WINDOW_COUNTER [default: TOKEN_BUCKET].
    #[arg(long, value_name = "NAME")]
    algorithm: Option<String>,
    /// How many permits to take.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    permits: u64,
    /// Print the server's answer as it is.
    #[arg(long)]
    json: bool,
    /// The server. A token for it is read from TOLLGATE_TOKEN.
    #[arg(long, value_name = "URL", env = "TOLLGATE_URL", default_value = "http://127.0.0.1:8080")]
    url: String,
}

impl Check {
    pub(super) async fn run(self) -> Result<ExitCode> {
        let asked = tokio::time::timeout(PATIENCE, self.ask());
        let (status, body) = asked.await.with_context(|| format!("{} does not answer", self.url))??;
        let answer: Value = serde_json::from_slice(&body)
            .with_context(|| format!("{} answered {status}, without JSON", self.url))?;
        let allowed = match status {
            StatusCode::OK => true,
            StatusCode::TOO_MANY_REQUESTS => false,
            _ => bail!(
                "{} answered {status}: {}",
                self.url,
                answer["detail"].as_str().unwrap_or("no reason given")
            ),
        };
        // Permits of another key say nothing about this one.
        let answered = answer["key"].as_str().unwrap_or_default();
        if answered != self.key {
            bail!(
                "{} answered for key {answered:?}, not for {:?}; set TOLLGATE_TOKEN to name keys",
                self.url,
                self.key
            );
        }
        if self.json {
            println!("{answer}");
        } else {
            println!("{}", sentence(allowed, &answer));
        }
        Ok(if allowed { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }

    async fn ask(&self) -> Result<(StatusCode, Bytes)> {
        let base: Uri = self.url.parse().with_context(|| format!("{} is no URL", self.url))?;
        if base.scheme_str() != Some("http") {
            bail!("{}: only http:// is spoken here", self.url);
        }
        let authority = base.authority().with_context(|| format!("{} names no host", self.url))?;
        let mut body = Map::from_iter([
            ("key".to_owned(), Value::from(self.key.as_str())),
            ("permits".to_owned(), Value::from(self.permits)),
        ]);
        if let Some(algorithm) = &self.algorithm {
            body.insert("algorithm".to_owned(), Value::from(algorithm.as_str()));
        }
        let path = format!("{}/api/v1/rate-limit/check", base.path().trim_end_matches('/'));
        let mut request =
            Request::post(path).header(HOST, authority.as_str()).header(CONTENT_TYPE, "application/json");
        match std::env::var("TOLLGATE_TOKEN") {
            Ok(token) => {
                let value = HeaderValue::try_from(format!("Bearer {token}"));
                // Not the value: it is a secret.
                let value = value.ok().context(
                    "TOLLGATE_TOKEN: the value has a character that no header can have, such as a line end",
                )?;
                request = request.header(AUTHORIZATION, value);
            }
            Err(VarError::NotPresent) => {}
            Err(VarError::NotUnicode(_)) => bail!("TOLLGATE_TOKEN: the value is not UTF-8"),
        }
        let request = request.body(Full::<Bytes>::from(Value::Object(body).to_string()))?;

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
                    bail!("{} hung up", self.url)
                }
            }
        }
    }
}

/// The answer for a person.
fn sentence(allowed: bool, answer: &Value) -> String {
    let number = |name: &str| answer[name].as_u64().unwrap_or(0);
    let (remaining, limit) = (number("remaining"), number("limit"));
    if allowed {
        format!("allowed: {remaining} of {limit} left, resets in {} s", number("resetAfterSeconds"))
    } else {
        format!("denied: {remaining} of {limit} left, try again in {} s", number("retryAfterSeconds"))
    }
}
