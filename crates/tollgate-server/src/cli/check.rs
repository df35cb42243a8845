//! `tollgate check`: ask a running server, for scripts and for people.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::client::{Ask, Client};

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
    #[command(flatten)]
    client: Client,
}

impl Check {
    pub(super) async fn run(self) -> Result<ExitCode> {
        let mut body = json!({ "key": self.key, "permits": self.permits });
        if let Some(algorithm) = &self.algorithm {
            body["algorithm"] = json!(algorithm);
        }
        let ask = Ask::new(Method::POST, "/api/v1/rate-limit/check", body.to_string());
        let (status, answer) = self.client.ask(ask).await?;
        let allowed = match status {
            StatusCode::OK => true,
            StatusCode::TOO_MANY_REQUESTS => false,
            _ => return Err(self.client.refusal(status, &answer)),
        };
        // Permits of another key say nothing about this one.
        let answered = answer["key"].as_str().unwrap_or_default();
        if answered != self.key {
            bail!(
                "{} answered for key {answered:?}, not for {:?}; set TOLLGATE_TOKEN to name keys",
                self.client.url,
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
