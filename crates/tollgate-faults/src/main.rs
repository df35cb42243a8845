//! `cargo xtask faults`: the fault matrix. Calls itself as the nodes and as the program that embeds the library.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use tollgate_faults::lessee::Lessee;
use tollgate_faults::rows::{self, Pace};
use tollgate_faults::worker::Worker;
use tollgate_faults::{Finding, Kind};

/// Breaks parts of a running Tollgate, row by row, and judges every decision.
#[derive(Parser)]
#[command(name = "faults")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the matrix and print one table.
    Run(Matrix),
    /// For `run`: a program that embeds the library.
    #[command(hide = true)]
    Worker(Worker),
    /// For `run`: one that borrows.
    #[command(hide = true)]
    Lessee(Lessee),
}

#[derive(clap::Args)]
struct Matrix {
    /// Exit with an error where a claim does not hold.
    #[arg(long)]
    check: bool,
    /// Write all claims to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only these rows: 1,2,16b.
    #[arg(long, value_name = "ROWS", value_delimiter = ',')]
    rows: Vec<String>,
    /// Shorter phases: to see that it runs, not to judge.
    #[arg(long)]
    quick: bool,
    /// Draws the load; each row is told its own.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> Result<ExitCode> {
    // As a node it is the service, with all its commands.
    let mut arguments = std::env::args_os();
    if arguments.nth(1).is_some_and(|command| command == "tollgate") {
        let arguments = std::iter::once("tollgate".into()).chain(arguments);
        return tollgate_server::cli::Cli::parse_from(arguments).run();
    }
    match Cli::parse().command {
        Command::Run(matrix) => matrix.run().map(|()| ExitCode::SUCCESS),
        Command::Worker(worker) => worker.run().map(|()| ExitCode::SUCCESS),
        Command::Lessee(lessee) => lessee.run().map(|()| ExitCode::SUCCESS),
    }
}

impl Matrix {
    fn run(&self) -> Result<()> {
        let chosen: Vec<_> = rows::ALL
            .iter()
            .filter(|row| self.rows.is_empty() || self.rows.iter().any(|wanted| wanted == row.id))
            .collect();
        if let Some(unknown) = self.rows.iter().find(|wanted| rows::ALL.iter().all(|row| row.id != *wanted)) {
            let known: Vec<_> = rows::ALL.iter().map(|row| row.id).collect();
            bail!("no row {unknown}; there are {}", known.join(", "));
        }
        let pace = if self.quick { Pace::SHORT } else { Pace::FULL };
        let mut findings: Vec<Finding> = Vec::new();
        for (number, row) in chosen.iter().enumerate() {
            eprintln!("[{}/{}] row {}: {}", number + 1, chosen.len(), row.id, row.fault);
            match row.run(pace, self.seed) {
                Some(finding) => {
                    print(&finding);
                    findings.push(finding);
                }
                None => {
                    println!("row {}: {} - needs root and network namespaces, not run", row.id, row.fault)
                }
            }
        }
        print_table(&findings);
        if let Some(path) = &self.json {
            let text = serde_json::to_string_pretty(&findings)?;
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        let missed: Vec<_> =
            findings.iter().filter(|finding| !finding.holds()).map(|it| it.row.as_str()).collect();
        if self.check && (!missed.is_empty() || findings.len() < chosen.len()) {
            bail!(
                "claims missed in row(s) {}; {} of {} rows run",
                missed.join(", "),
                findings.len(),
                chosen.len()
            );
        }
        Ok(())
    }
}

/// Claims as they come, while the next row runs.
fn print(finding: &Finding) {
    println!("\nrow {}: {}", finding.row, finding.fault);
    for claim in &finding.claims {
        let mark = match (claim.kind, claim.holds) {
            (Kind::Note, _) => "note  ",
            (_, true) => "ok    ",
            (_, false) => "MISSED",
        };
        println!("  {mark} {}: {}", claim.expected, claim.measured);
    }
    println!("  {}", finding.timeline);
    if !finding.holds() {
        finding.warnings.iter().for_each(|line| println!("  {line}"));
    }
}

/// One table, a row of the matrix a line. What is promised of all of them stands above it.
fn print_table(findings: &[Finding]) {
    println!(
        "\nIn every row: all requests answered, 5xx only where closed, no panic, exit 0, no reply taken for another call's,\n\
         recovery by itself, and what a node admits alone within its share of the limit.\n"
    );
    println!("| row | fault | expected | measured | pass |\n| --- | --- | --- | --- | --- |");
    for finding in findings {
        let shown = || {
            let claims = finding.claims.iter().filter(|claim| claim.kind != Kind::Note);
            claims.filter(|claim| !claim.common || !claim.holds)
        };
        let expected: Vec<_> = shown().map(|claim| claim.expected.as_str()).collect();
        let measured: Vec<_> = shown().map(|claim| claim.measured.as_str()).collect();
        let pass = match (finding.holds(), finding.repeated_after) {
            (true, None) => "yes".to_owned(),
            (true, Some(late)) => format!("yes, repeated: a timer was {late} ms late"),
            (false, _) => "NO".to_owned(),
        };
        println!(
            "| {} | {} | {} | {} | {pass} |",
            finding.row,
            finding.fault,
            expected.join("; "),
            measured.join("; ")
        );
    }
}
