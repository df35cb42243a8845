//! `tollgate policy`: policies, looked at before they are in force.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use http::Method;
use serde_json::Value;

use super::client::{Ask, Client};
use super::{block_on, print};
use crate::config::{self, CheckedPolicy, PolicyContext};
use crate::import::{Dialect, import};

#[derive(Subcommand)]
pub(super) enum PolicyCommand {
    /// Name file, line and column of every mistake in a policy, and print what each of its limits lets through.
    #[command(
        after_help = "Examples:\n  tollgate policy check policy.yaml\n  tollgate policy check - < policy.yaml"
    )]
    Check {
        /// The file; - for standard input.
        file: PathBuf,
    },
    /// Say what changes if one policy takes the place of another, and what becomes of what was consumed. Exits with 0 if nothing
    /// does, 1 if something does, 2 if one of them has mistakes.
    #[command(after_help = "Example:\n  tollgate policy diff policy.yaml new-policy.yaml")]
    Diff {
        /// The policy in force.
        old: PathBuf,
        /// The policy that is to follow.
        new: PathBuf,
    },
    /// Print a policy made of another limiter's file. Unsupported settings are listed at the top, and on standard error.
    #[command(
        after_help = "Examples:\n  tollgate policy import --from envoy ratelimit.yaml > policy.yaml\n  tollgate policy import --from limitador limits.yaml > policy.yaml"
    )]
    Import {
        /// Whose file it is.
        #[arg(long)]
        from: Dialect,
        /// The file.
        file: PathBuf,
    },
    /// Print the JSON Schema of a policy, for editors and for reading.
    Schema,
    /// Put a policy in force on all nodes that share the server's store.
    #[command(after_help = "Example:\n  tollgate policy push policy.yaml --replace 3f2a9c41d0be")]
    Push {
        /// The file.
        file: PathBuf,
        /// Push only if this version is in force, as `policy show` prints it.
        #[arg(long, value_name = "VERSION")]
        replace: Option<String>,
        #[command(flatten)]
        client: Client,
    },
    /// Print the policy in force. Its version and origin are printed to standard error.
    Show {
        #[command(flatten)]
        client: Client,
    },
    /// List the policies that were pushed last, the newest first.
    History {
        #[command(flatten)]
        client: Client,
    },
    /// Push an earlier policy again.
    #[command(after_help = "Example:\n  tollgate policy history\n  tollgate policy rollback 1763442000001")]
    Rollback {
        /// Its number in the history.
        number: u64,
        #[command(flatten)]
        client: Client,
    },
}

impl PolicyCommand {
    pub(super) fn run(self) -> Result<ExitCode> {
        match self {
            Self::Check { file } => {
                let checked = load(&file)?;
                let parts = checked.policy.parts();
                let mut lines = vec![format!(
                    "{}: no mistakes; {} rules, {} limits, version {}",
                    file.display(),
                    parts.rules.len(),
                    parts.limits.len(),
                    checked.version
                )];
                lines.extend(config::figures(&checked));
                lines.extend(checked.notes(usize::MAX));
                print(&(lines.join("\n") + "\n"))
            }
            Self::Diff { old, new } => {
                let lines = config::diff(&load(&old)?, &load(&new)?);
                if lines.is_empty() {
                    return print("no difference\n");
                }
                print(&(lines.join("\n") + "\n"))?;
                Ok(ExitCode::from(1))
            }
            Self::Import { from, file } => {
                let text = std::fs::read_to_string(&file)
                    .with_context(|| format!("{} cannot be read", file.display()))?;
                let imported = import(from, &file.display().to_string(), &text)?;
                for remark in &imported.remarks {
                    eprintln!("not carried over: {remark}");
                }
                print(&imported.to_yaml())
            }
            Self::Push { file, replace, client } => block_on(async {
                let text = std::fs::read_to_string(&file)
                    .with_context(|| format!("{} cannot be read", file.display()))?;
                let ask =
                    Ask { if_match: replace.as_deref(), ..Ask::new(Method::PUT, "/admin/policy", text) };
                print(&in_force(&client.ask_for_success(ask).await?))
            }),
            Self::Show { client } => block_on(async {
                let shown = client.ask_for_success(Ask::new(Method::GET, "/admin/policy", "")).await?;
                eprint!("{}", in_force(&shown));
                if let Some(why) = shown["refusedChange"]["why"].as_str() {
                    eprintln!("the last change was refused: {why}");
                }
                let text = shown["text"].as_str().unwrap_or_default();
                print(&format!("{}\n", text.trim_end()))
            }),
            Self::History { client } => block_on(async {
                let ask = Ask::new(Method::GET, "/admin/policy/history", "");
                print(&history(&client.ask_for_success(ask).await?))
            }),
            Self::Rollback { number, client } => block_on(async {
                let path = format!("/admin/policy/rollback/{number}");
                print(&in_force(&client.ask_for_success(Ask::new(Method::POST, &path, "")).await?))
            }),
            Self::Schema => print(&format!("{}\n", serde_json::to_string_pretty(&config::policy_schema())?)),
        }
    }
}

/// Which policy is in force, in a line.
fn in_force(shown: &Value) -> String {
    let text = |name: &str| shown[name].as_str().unwrap_or_default().to_owned();
    format!("version {} in force, from {}, rules: {}\n", text("version"), text("origin"), shown["rules"])
}

/// What was pushed, in a line each.
fn history(shown: &Value) -> String {
    let mut lines = String::new();
    for it in shown["pushed"].as_array().into_iter().flatten() {
        let at = jiff::Timestamp::from_second(it["atEpochSeconds"].as_i64().unwrap_or_default());
        let at = at.unwrap_or_default();
        let (version, author) = (it["version"].as_str().unwrap_or("withdrawn"), it["author"].as_str());
        lines += &format!("{}  {at}  {version:<12}  {}\n", it["number"], author.unwrap_or_default());
    }
    if lines.is_empty() { "nothing was pushed yet\n".to_owned() } else { lines }
}

/// Bytes of a policy on standard input, as many as a server accepts. A longer one is not read to its end.
const POLICY_BYTES_MAX: u64 = 1024 * 1024;

fn load(file: &Path) -> Result<CheckedPolicy> {
    let context = PolicyContext::default();
    if file != Path::new("-") {
        return Ok(config::load_policy(file, &context)?);
    }
    let mut text = String::new();
    let read = std::io::stdin().take(POLICY_BYTES_MAX + 1).read_to_string(&mut text);
    if read.context("standard input cannot be read")? as u64 > POLICY_BYTES_MAX {
        bail!("standard input: a policy has at most {POLICY_BYTES_MAX} bytes");
    }
    Ok(config::read_policy("standard input", &text, &context)?)
}
