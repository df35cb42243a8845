//! `tollgate policy`: policies, looked at before they are in force.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use clap::Subcommand;

use super::print;
use crate::config::{self, CheckedPolicy, PolicyContext};
use crate::import::{Dialect, import};

#[derive(Subcommand)]
pub(super) enum PolicyCommand {
    /// Name file, line and column of every mistake in a policy, and print what each of its limits lets through.
    #[command(after_help = "Example:\n  tollgate policy check policy.yaml")]
    Check {
        /// The file.
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
    /// Print a policy made of another limiter's file. What could not be carried over stands on top, and on standard error.
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
                let value = config::read_yaml(&file.display().to_string(), &text)?;
                let imported = import(from, &value).map_err(|why| anyhow!("{}: {why}", file.display()))?;
                for remark in &imported.remarks {
                    eprintln!("not carried over: {remark}");
                }
                print(&imported.to_yaml())
            }
            Self::Schema => print(&format!("{}\n", serde_json::to_string_pretty(&config::policy_schema())?)),
        }
    }
}

fn load(file: &Path) -> Result<CheckedPolicy> {
    Ok(config::load_policy(file, &PolicyContext::default())?)
}
