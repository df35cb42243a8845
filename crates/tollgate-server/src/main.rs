//! `tollgate`: parse, run, exit. Only this file exits.

use std::process::ExitCode;

use clap::Parser;
use tollgate_server::cli::Cli;
use tollgate_server::config::ConfigErrors;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(code) => code,
        Err(why) => {
            match why.downcast_ref::<ConfigErrors>() {
                // Each mistake is a line that editors can jump to.
                Some(mistakes) => eprintln!("{mistakes}"),
                None => eprintln!("tollgate: {why:#}"),
            }
            ExitCode::from(2)
        }
    }
}
