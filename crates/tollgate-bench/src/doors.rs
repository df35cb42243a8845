//! Checks over the Redis protocol, beside throttlecrab-server's and beside `SET` of Redis itself, with redis-benchmark as the client. The
//! server has one core, the client the other.

use std::net::SocketAddr;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use tollgate_testkit::{Process, wait_until};

use crate::http::{LOAD_CORE, SERVER_CORE, cpu, free_address};
use crate::report::{Options, Report, median};

/// Commands that a client sends before it reads their replies.
const DEPTHS: [u32; 2] = [1, 16];
/// Connections of the client.
const CONNECTIONS: &str = "50";
/// Keys that commands name at random.
const KEYS: &str = "100000";

/// Who is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Contender {
    Tollgate,
    Throttlecrab,
    Redis,
}

impl Contender {
    const ALL: [Self; 3] = [Self::Tollgate, Self::Throttlecrab, Self::Redis];

    const fn name(self) -> &'static str {
        match self {
            Self::Tollgate => "tollgate CL.THROTTLE",
            Self::Throttlecrab => "throttlecrab-server THROTTLE",
            Self::Redis => "redis SET",
        }
    }

    /// The command, of which the client replaces the last part of the key.
    const fn command(self) -> &'static [&'static str] {
        match self {
            Self::Tollgate => &["CL.THROTTLE", "key:__rand_int__", "15", "30", "60"],
            Self::Throttlecrab => &["THROTTLE", "key:__rand_int__", "15", "30", "60"],
            Self::Redis => &["SET", "key:__rand_int__", "15"],
        }
    }
}

/// A server on its core.
struct Server {
    process: Process,
    address: SocketAddr,
    _files: TempDir,
}

impl Server {
    fn start(contender: Contender) -> Result<Self> {
        let (files, address) = (tempfile::tempdir()?, free_address()?);
        let port = address.port().to_string();
        let mut command = Command::new("taskset");
        command.args(["-c", SERVER_CORE]);
        match contender {
            Contender::Tollgate => {
                command.arg(std::env::current_exe()?.with_file_name("tollgate"));
                command.args(["--listen", &free_address()?.to_string(), "--resp", &address.to_string()]);
            }
            Contender::Throttlecrab => {
                let program =
                    std::env::var_os("THROTTLECRAB_SERVER").context("run by `cargo xtask bench doors`")?;
                command.arg(program).args(["--redis", "--redis-host", "127.0.0.1", "--redis-port", &port]);
                command.args(["--log-level", "error"]);
            }
            Contender::Redis => {
                command.args(["redis-server", "--port", &port, "--save", "", "--appendonly", "no"]);
                command.arg("--dir").arg(files.path());
            }
        }
        let process = Process::start(&command);
        wait_until("the server listens", || std::net::TcpStream::connect(address).is_ok());
        Ok(Self { process, address, _files: files })
    }
}

/// What was measured of one contender at one depth.
#[derive(Default)]
struct Figures {
    per_second: Vec<f64>,
    cpu_us: Vec<f64>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let (rounds, commands) = if options.quick { (1, 20_000) } else { (5, 400_000) };
    let contenders: Vec<_> =
        Contender::ALL.into_iter().filter(|it| it.name().contains(&options.only)).collect();
    println!(
        "{KEYS} keys, {CONNECTIONS} connections, server on core {SERVER_CORE}, redis-benchmark on core {LOAD_CORE}; median of {rounds} interleaved rounds of {commands} commands.\n"
    );
    let servers: Vec<_> = contenders.iter().map(|it| Server::start(*it)).collect::<Result<_>>()?;
    let mut figures: Vec<[Figures; 2]> = contenders.iter().map(|_| Default::default()).collect();
    for round in 0..=rounds {
        for (index, server) in servers.iter().enumerate() {
            for (figures, depth) in figures[index].iter_mut().zip(DEPTHS) {
                let before = cpu(&server.process)?;
                let per_second = load(server.address, contenders[index], depth, commands)?;
                let used = cpu(&server.process)? - before;
                // The first round warms up.
                if round > 0 {
                    figures.per_second.push(per_second);
                    figures.cpu_us.push(used.as_secs_f64() * 1e6 / f64::from(commands));
                }
            }
        }
    }
    judge(&contenders, &figures, options)
}

/// Runs redis-benchmark, and says how many commands were answered in a second.
fn load(server: SocketAddr, contender: Contender, depth: u32, commands: u32) -> Result<f64> {
    let (commands, depth) = (commands.to_string(), depth.to_string());
    let port = server.port().to_string();
    let output = Command::new("taskset")
        .args(["-c", LOAD_CORE, "redis-benchmark", "-h", "127.0.0.1", "-p", &port, "--csv"])
        .args(["-n", &commands, "-c", CONNECTIONS, "-r", KEYS, "-P", &depth])
        .args(contender.command())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "redis-benchmark: {text}{}", String::from_utf8_lossy(&output.stderr));
    // The last line is the result: "name","commands a second",...
    let figure = text.lines().last().and_then(|line| line.rsplit("\",\"").nth(LATENCIES));
    figure.context("no figure in the output of redis-benchmark")?.parse().context("not a figure")
}

/// Columns of latencies behind the one with the commands a second.
const LATENCIES: usize = 6;

fn judge(contenders: &[Contender], figures: &[[Figures; 2]], options: &Options) -> Result<()> {
    let mut report = Report::default();
    println!("{:<30} {:>6} {:>14} {:>18}", "", "-P", "commands/s", "server us/command");
    for (contender, figures) in contenders.iter().zip(figures) {
        for (Figures { per_second, cpu_us }, depth) in figures.iter().zip(DEPTHS) {
            let (name, rate, cpu) = (contender.name(), median(per_second.clone()), median(cpu_us.clone()));
            println!("{name:<30} {depth:>6} {rate:>14.0} {cpu:>18.2}");
            report.figure(&format!("{name}, -P {depth}, commands/s"), rate);
            report.figure(&format!("{name}, -P {depth}, server us a command"), cpu);
        }
    }
    println!();
    let of = |contender| contenders.iter().position(|it| *it == contender).map(|index| &figures[index]);
    // Round by round: both of a pair have met the same machine.
    let ratio = |ours: &[f64], theirs: &[f64]| median(ours.iter().zip(theirs).map(|(a, b)| a / b).collect());
    for (number, depth) in DEPTHS.into_iter().enumerate() {
        let Some(ours) = of(Contender::Tollgate).map(|it| &it[number]) else { continue };
        if let Some(theirs) = of(Contender::Throttlecrab).map(|it| &it[number]) {
            let (rate, least) =
                (ratio(&ours.per_second, &theirs.per_second), if depth == 1 { 1.0 } else { 10.0 });
            let name = format!("-P {depth}: commands/s, times throttlecrab-server's");
            report.bar(&name, rate, rate >= least, &format!(">= {least:.1}"));
        }
        if let Some(theirs) = of(Contender::Redis).map(|it| &it[number]) {
            let cpu = ratio(&ours.cpu_us, &theirs.cpu_us);
            let name = format!("-P {depth}: server time, times that of Redis SET");
            report.bar(&name, cpu, cpu <= 1.5, "<= 1.5");
        }
    }
    report.finish(options)
}
