//! `tollgate explain`: why a request is allowed or denied.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use http::Method;
use serde_json::{Value, json};

use super::client::{Ask, Client};
use super::print;

#[derive(Args)]
pub(super) struct Explain {
    /// The path of the request.
    path: String,
    /// The method of the request [default: GET].
    #[arg(long, value_name = "METHOD", default_value = "GET")]
    method: String,
    /// The client's address.
    #[arg(long, value_name = "ADDRESS")]
    ip: Option<String>,
    /// The user.
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// The host that the request names.
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// A header of the request. May be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    header: Vec<(String, String)>,
    /// Print the server's answer as it is.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    client: Client,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE, such as x-plan=pro")?;
    Ok((name.to_owned(), value.to_owned()))
}

impl Explain {
    pub(super) async fn run(self) -> Result<ExitCode> {
        let headers: BTreeMap<_, _> = self.header.iter().cloned().collect();
        let mut body = json!({ "path": self.path, "method": self.method, "headers": headers });
        for (name, text) in [("ip", &self.ip), ("user", &self.user), ("host", &self.host)] {
            if let Some(text) = text {
                body[name] = json!(text);
            }
        }
        let ask = Ask::new(Method::POST, "/api/v1/explain", body.to_string());
        let answer = self.client.ask_for_success(ask).await?;
        let text = if self.json { format!("{answer}\n") } else { explained(&answer) };
        print(&text)
    }
}

/// The answer for a person: the verdict, each limit with its arithmetic, and each rule with the reason why it applies or not.
fn explained(answer: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut lines = Vec::new();
    let rule = answer["rule"].as_str().map(|rule| format!(" (rule {rule})")).unwrap_or_default();
    lines.push(match answer["allowed"].as_bool() {
        Some(true) => format!("allowed{rule}"),
        _ => format!(
            "denied{rule}: {}; try again in {} s",
            text(&answer["message"]),
            answer["retryAfterSeconds"]
        ),
    });
    for limit in answer["limits"].as_array().into_iter().flatten() {
        let [rule, key, arithmetic] = ["rule", "key", "arithmetic"].map(|name| text(&limit[name]));
        lines.push(format!("  limit of {rule} for {key}: {arithmetic}"));
    }
    for rule in answer["rules"].as_array().into_iter().flatten() {
        lines.push(format!("  rule {}: {}", text(&rule["rule"]), text(&rule["why"])));
    }
    for rule in answer["notMatched"].as_array().into_iter().flatten() {
        lines.push(format!("  rule {} does not apply: {}", text(&rule["rule"]), text(&rule["why"])));
    }
    lines.push(format!("policy version {}", text(&answer["policy"])));
    lines.join("\n") + "\n"
}
