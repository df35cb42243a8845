//! `tollgate`: parse, run, exit. Only this file exits.

use std::process::ExitCode;

use clap::Parser;
use tollgate_server::cli::Cli;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(code) => code,
        Err(why) => {
            eprintln!("tollgate: {why:#}");
            ExitCode::from(2)
        }
    }
}
