//! The command line: what can be said, and what each command does.

mod check;
mod client;
mod explain;
mod policy;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use tokio::runtime::{Builder, Runtime};
use tollgate::Clock;

use crate::app::{App, Signals, signals};
use crate::config::{self, Config, Flags, PolicyOrigin};
use crate::serve::raise_files_max;

/// Tollgate: an exact rate limiter.
///
/// Without a command it serves: one node, state in memory, nothing to install. A first check:
///
///   curl 'http://127.0.0.1:8080/api/v1/rate-limit/check?key=user:123'
///
/// Settings come from a file (--config), then TOLLGATE_* variables, then flags; the later one wins.
/// `tollgate config schema` describes every field of the file, `tollgate config check FILE` finds every mistake in one.
#[derive(Parser)]
#[command(name = "tollgate", version, args_conflicts_with_subcommands = true, verbatim_doc_comment)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: Serve,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the API (what `tollgate` alone does).
    Serve(Serve),
    /// Ask a running server for permits. Exits with 0 if allowed, 1 if denied, 2 if it could not be asked.
    #[command(
        after_help = "Examples:\n  tollgate check user:123\n  tollgate check user:123 --algorithm FIXED_WINDOW --permits 5\n  tollgate check deploy --json && ./deploy.sh"
    )]
    Check(check::Check),
    /// Ask a running server why it allows or denies a request. Takes no permits.
    #[command(
        after_help = "Examples:\n  tollgate explain /api/login --method POST --ip 192.0.2.1\n  tollgate explain /search --user alice --header x-plan=pro"
    )]
    Explain(explain::Explain),
    /// Check or describe configuration files.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Check, compare, import, push and roll back policies.
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Print a completion script for a shell.
    #[command(after_help = "Example:\n  tollgate completions bash > /etc/bash_completion.d/tollgate")]
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// Where `--resp` without an address listens.
const RESP_LISTEN: &str = "127.0.0.1:6380";

/// What serving takes. Flags win over TOLLGATE_* variables, and these over the file.
#[derive(Args)]
struct Serve {
    /// Where the API listens [default: 127.0.0.1:8080]: also localhost:8080, or :8080 for all IPv4 addresses. On other addresses
    /// than loopback, callers need a token to choose a key and to call /api/v1/check.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Accept Redis clients (CL.THROTTLE, TG.CHECK) on this address [without one: 127.0.0.1:6380].
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, default_missing_value = RESP_LISTEN)]
    resp: Option<String>,
    /// Where gRPC listens, for Envoy's Rate Limit Service [without ADDRESS:PORT: 127.0.0.1:8081]. It does not listen without this flag or
    /// `grpc.listen`.
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, default_missing_value = "127.0.0.1:8081")]
    grpc: Option<String>,
    /// A YAML file with the policy: which requests have which limits. It is read again when it changes.
    #[arg(long, value_name = "FILE", value_parser = NonEmptyStringValueParser::new())]
    policy: Option<String>,
    /// Where the state is kept [default: memory]: memory, redis://HOST, rediss://HOST, redis+unix:///PATH,
    /// redis+sentinel://HOST,HOST/MASTER or redis+cluster://HOST,HOST.
    #[arg(long, value_name = "STORE")]
    store: Option<String>,
    /// End if the store cannot be reached at start, instead of trying again and again.
    #[arg(long)]
    require_store: bool,
    /// A YAML file with settings. None is read unless named here or in TOLLGATE_CONFIG.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Name file, line and column of every mistake in a configuration file, and say what leases come to.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Print the JSON Schema of the configuration file, for editors and for reading.
    Schema,
}

impl Cli {
    /// Does what was said. Errors are the caller's to print.
    pub fn run(self) -> Result<ExitCode> {
        match self.command {
            None => self.serve.run(),
            Some(Command::Serve(serve)) => serve.run(),
            Some(Command::Check(check)) => block_on(check.run()),
            Some(Command::Explain(explain)) => block_on(explain.run()),
            Some(Command::Config(ConfigCommand::Check { file })) => {
                let config = config::load(Some(&file), std::iter::empty(), Flags::new())?;
                let mut lines = vec![format!("{}: no mistakes", file.display())];
                lines.extend(config.warnings().iter().map(|warning| format!("warning: {warning}")));
                lines.extend(config.remarks());
                print(&(lines.join("\n") + "\n"))
            }
            Some(Command::Config(ConfigCommand::Schema)) => {
                print(&format!("{}\n", serde_json::to_string_pretty(&config::schema())?))
            }
            Some(Command::Policy(command)) => command.run(),
            Some(Command::Completions { shell }) => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Self::command(), "tollgate", &mut script);
                print(&String::from_utf8_lossy(&script))
            }
        }
    }
}

/// Runs a command that asks a server.
fn block_on(command: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    Builder::new_current_thread().enable_all().build()?.block_on(command)
}

/// Prints a text. A reader that closes the pipe early is no error.
fn print(text: &str) -> Result<ExitCode> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(why) if why.kind() != std::io::ErrorKind::BrokenPipe => Err(why).context("cannot print"),
        Ok(()) | Err(_) => Ok(ExitCode::SUCCESS),
    }
}

impl Serve {
    fn run(self) -> Result<ExitCode> {
        let file = config::named_file(self.config.clone());
        let config = config::load(file.as_deref(), config::environment()?.into_iter(), self.flags())?;
        raise_files_max();
        runtime()?.block_on(serve(config))
    }

    fn flags(self) -> Flags {
        let listen = self.listen.map(|value| ("listen", "--listen", value));
        let resp = self.resp.map(|value| ("resp.listen", "--resp", value));
        let grpc = self.grpc.map(|value| ("grpc.listen", "--grpc", value));
        let policy = self.policy.map(|value| ("policy", "--policy", value));
        let store = self.store.map(|value| ("store", "--store", value));
        let require = self.require_store.then(|| ("redis.require", "--require-store", "true".to_owned()));
        listen.into_iter().chain(resp).chain(grpc).chain(policy).chain(store).chain(require).collect()
    }
}

/// What the service says of itself when it starts, with a command that works.
fn banner(app: &App, store: &str, (policy, has_policy): (&str, bool)) -> Result<String> {
    let (api, admin) = (app.address()?, app.admin_address()?);
    let mut lines = format!("Tollgate {} listens on http://{api}\n", env!("CARGO_PKG_VERSION"));
    lines += &format!("  store:  {store}\n  policy: {policy}\n");
    if admin != api {
        lines += &format!("  admin:  http://{admin} (health, metrics, /admin)\n");
    }
    if let Some(resp) = app.resp_address()? {
        let resp = local(resp);
        lines += &format!(
            "  redis:  redis-cli -h {} -p {} CL.THROTTLE user:123 99 10 1\n",
            resp.ip(),
            resp.port()
        );
    }
    if let Some(grpc) = app.grpc_address()? {
        lines += &format!("  gRPC:   http://{grpc} (Envoy Rate Limit Service)\n");
    }
    let (api, key) = (local(api), if app.is_open() { "?key=user:123" } else { "" });
    lines += &match app.is_open() && has_policy {
        true => format!(
            "Try: curl http://{api}/api/v1/check -d '{{\"ip\":\"192.0.2.1\",\"method\":\"GET\",\"path\":\"/\"}}'\n"
        ),
        false => format!("Try: curl 'http://{api}/api/v1/rate-limit/check{key}'\n"),
    };
    Ok(lines)
}

/// An address under which this machine reaches a listener.
fn local(listener: SocketAddr) -> SocketAddr {
    match listener.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), listener.port()),
        IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), listener.port()),
        IpAddr::V4(_) | IpAddr::V6(_) => listener,
    }
}

/// A thread for each core that the process may use; on a single one, no thread beside this one.
fn runtime() -> Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut builder = if cores == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    Ok(builder.enable_all().build()?)
}

async fn serve(config: Config) -> Result<ExitCode> {
    let Signals { stop, hurry } = signals()?;
    let (store, policy) = (config.store.to_string(), config.policy.to_string());
    let has_policy = config.policy.origin != PolicyOrigin::None;
    let app = App::bind(config, Clock::system()).await?;
    print(&banner(&app, &store, (&policy, has_policy))?)?;
    tokio::select! {
        ran = app.run(stop) => ran?,
        () = hurry.cancelled() => tracing::warn!("stopped at once, as it was asked a second time"),
    }
    Ok(ExitCode::SUCCESS)
}
