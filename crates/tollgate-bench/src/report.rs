//! Options that all benchmarks share, and how their figures are judged and written.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Map, Value, json};

/// What every benchmark takes.
#[derive(Args)]
pub(crate) struct Options {
    /// Exit with an error where a figure misses its bar.
    #[arg(long)]
    pub(crate) check: bool,
    /// Write the raw figures of every contender to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Fewer and shorter rounds: to see that it runs, not to judge.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only the scenarios whose name contains this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) only: String,
}

/// Figures, and the bars they are held to.
#[derive(Default)]
pub(crate) struct Report {
    figures: Map<String, Value>,
    missed: Vec<String>,
}

impl Report {
    /// Keeps a raw figure.
    pub(crate) fn figure(&mut self, name: &str, value: impl Into<Value>) {
        self.figures.insert(name.to_owned(), value.into());
    }

    /// Prints a figure beside its bar.
    pub(crate) fn bar(&mut self, name: &str, value: f64, holds: bool, bar: &str) {
        println!("  {} {name}: {value:.2} (bar: {bar})", if holds { "ok    " } else { "MISSED" });
        self.figure(name, json!(value));
        if !holds {
            self.missed.push(format!("{name}: {value:.2}, bar {bar}"));
        }
    }

    /// Writes the figures and, with `--check`, fails where a bar was missed.
    pub(crate) fn finish(self, options: &Options) -> Result<()> {
        if let Some(path) = &options.json {
            let text = serde_json::to_string_pretty(&self.figures)?;
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        if options.check && !self.missed.is_empty() {
            bail!("{} bar(s) missed:\n  {}", self.missed.len(), self.missed.join("\n  "));
        }
        Ok(())
    }
}

/// The middle of some figures.
pub(crate) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    match figures.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => figures[n / 2],
        n => f64::midpoint(figures[n / 2 - 1], figures[n / 2]),
    }
}
