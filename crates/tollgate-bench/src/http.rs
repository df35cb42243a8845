//! Checks over HTTP. The server has one core, the load the other; what counts is the server's processor time a request,
//! because the load's core is usually the one that is full.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::http::HeaderMap;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use axum::routing::get;
use clap::Args;
use tempfile::TempDir;
use tollgate_testkit::{Process, wait_until};

use crate::load::{Pace, Requests, Seen, run as run_load};
use crate::report::{Options, Report, median};

/// Keys that requests name.
const KEYS: usize = 100_000;
/// Connections that are kept busy.
const CONNECTIONS: u64 = 64;
/// Checks a second at which the latency is measured.
const STEADY_PER_SECOND: u64 = 10_000;

pub(crate) const SERVER_CORE: &str = "0";
pub(crate) const LOAD_CORE: &str = "1";

/// Who is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Contender {
    Tollgate,
    Axum,
    Nginx,
    Throttlecrab,
}

impl Contender {
    const ALL: [Self; 4] = [Self::Tollgate, Self::Axum, Self::Nginx, Self::Throttlecrab];

    const fn name(self) -> &'static str {
        match self {
            Self::Tollgate => "tollgate",
            Self::Axum => "bare axum",
            Self::Nginx => "nginx limit_req",
            Self::Throttlecrab => "throttlecrab-server",
        }
    }

    fn requests(self) -> Requests {
        (0..KEYS)
            .map(|key| match self {
                Self::Tollgate | Self::Axum => {
                    format!("GET /api/v1/rate-limit/check?key=user:{key:06} HTTP/1.1\r\nHost: localhost\r\n\r\n")
                }
                Self::Nginx => format!("GET /?key=user:{key:06} HTTP/1.1\r\nHost: localhost\r\n\r\n"),
                Self::Throttlecrab => {
                    let body = format!(r#"{{"key":"user:{key:06}","max_burst":100,"count_per_period":10,"period":1}}"#);
                    format!(
                        "POST /throttle HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                        body.len()
                    )
                }
            })
            .map(String::into_bytes)
            .collect()
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
        let files = tempfile::tempdir()?;
        let address = free_address()?;
        let port = address.port().to_string();
        let mut command = Command::new("taskset");
        command.args(["-c", SERVER_CORE]);
        let here = std::env::current_exe()?;
        match contender {
            Contender::Tollgate => {
                command.arg(here.with_file_name("tollgate")).args(["--listen", &address.to_string()]);
            }
            Contender::Axum => {
                command.arg(here).args(["axum", &address.to_string()]);
            }
            Contender::Nginx => {
                let config = files.path().join("nginx.conf");
                std::fs::write(&config, nginx_config(address, files.path()))?;
                command.args(["/usr/sbin/nginx", "-e", "stderr", "-c"]).arg(config);
            }
            Contender::Throttlecrab => {
                let program =
                    std::env::var_os("THROTTLECRAB_SERVER").context("run by `cargo xtask bench http`")?;
                command.arg(program).args([
                    "--http",
                    "--http-host",
                    "127.0.0.1",
                    "--http-port",
                    &port,
                    "--log-level",
                    "error",
                ]);
            }
        }
        let process = Process::start(&command);
        wait_until("the server listens", || std::net::TcpStream::connect(address).is_ok());
        Ok(Self { process, address, _files: files })
    }
}

/// Processor time that a server has used, user and system.
pub(crate) fn cpu(server: &Process) -> Result<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{}/schedstat", server.id()))?;
    let mut total: u64 = text.split_whitespace().next().context("no schedstat")?.parse()?;
    // Its other threads.
    total = std::fs::read_dir(format!("/proc/{}/task", server.id()))?
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok())
        .filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok())
        .sum::<u64>()
        .max(total);
    Ok(Duration::from_nanos(total))
}

fn nginx_config(address: SocketAddr, directory: &Path) -> String {
    let directory = directory.display();
    format!(
        "daemon off; master_process off; pid {directory}/pid; error_log /dev/null;
         events {{ worker_connections 1024; }}
         http {{
           access_log off; keepalive_requests 1000000000; client_body_temp_path {directory}/b; proxy_temp_path {directory}/p;
           fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
           limit_req_zone $arg_key zone=keys:64m rate=10r/s;
           server {{ listen {address}; location / {{ limit_req zone=keys burst=100 nodelay; limit_req_status 429; return 200 'ok'; }} }}
         }}"
    )
}

pub(crate) fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}

/// What was measured of one contender.
#[derive(Default)]
struct Figures {
    cpu_us: Vec<f64>,
    per_second: Vec<f64>,
    p99_ms: Vec<f64>,
    steady_p99_ms: Vec<f64>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    // This process is the load.
    let pinned = Command::new("taskset")
        .args(["-a", "-c", "-p", LOAD_CORE, &std::process::id().to_string()])
        .output()?;
    anyhow::ensure!(pinned.status.success(), "taskset cannot pin this process: two cores are needed");
    let (rounds, seconds) = if options.quick { (1, 1) } else { (5, 4) };
    let contenders: Vec<_> =
        Contender::ALL.into_iter().filter(|it| it.name().contains(&options.only)).collect();
    println!(
        "{KEYS} keys, {CONNECTIONS} connections, server on core {SERVER_CORE}, load on core {LOAD_CORE}; median of {rounds} interleaved rounds of {seconds} s.\n"
    );
    let servers: Vec<_> = contenders.iter().map(|it| Server::start(*it)).collect::<Result<_>>()?;
    let requests: Vec<_> = contenders.iter().map(|it| it.requests()).collect();
    let mut figures: Vec<Figures> = contenders.iter().map(|_| Figures::default()).collect();
    let duration = Duration::from_secs(seconds);
    for round in 0..=rounds {
        for (index, server) in servers.iter().enumerate() {
            let before = cpu(&server.process)?;
            let seen: Seen = run_load(server.address, &requests[index], CONNECTIONS, duration, Pace::Closed)?;
            let used = cpu(&server.process)? - before;
            let every = Duration::from_secs(1).mul_f64(CONNECTIONS as f64 / STEADY_PER_SECOND as f64);
            let steady =
                run_load(server.address, &requests[index], CONNECTIONS, duration, Pace::Open { every })?;
            // The first round warms up.
            if round > 0 {
                let figures = &mut figures[index];
                figures.cpu_us.push(used.as_secs_f64() * 1e6 / seen.requests as f64);
                figures.per_second.push(seen.per_second());
                figures.p99_ms.push(seen.p99_ms());
                figures.steady_p99_ms.push(steady.p99_ms());
            }
        }
    }
    judge(&contenders, &figures, options)
}

fn judge(contenders: &[Contender], figures: &[Figures], options: &Options) -> Result<()> {
    let mut report = Report::default();
    println!(
        "{:<22} {:>16} {:>12} {:>10} {:>18}",
        "", "server us/check", "checks/s", "p99 ms", "p99 ms at 10,000/s"
    );
    for (contender, figures) in contenders.iter().zip(figures) {
        let name = contender.name();
        let Figures { cpu_us, per_second, p99_ms, steady_p99_ms } = figures;
        let [cpu, rate, p99, steady] =
            [cpu_us, per_second, p99_ms, steady_p99_ms].map(|figures| median(figures.clone()));
        println!("{name:<22} {cpu:>16.2} {rate:>12.0} {p99:>10.2} {steady:>18.2}");
        for (what, value) in
            [("server us a check", cpu), ("checks/s", rate), ("p99 ms", p99), ("p99 ms at 10,000/s", steady)]
        {
            report.figure(&format!("{name}, {what}"), value);
        }
    }
    println!();
    let Some(ours) = contenders.iter().position(|it| *it == Contender::Tollgate).map(|index| &figures[index])
    else {
        return report.finish(options);
    };
    for (contender, theirs) in contenders.iter().zip(figures) {
        // Round by round: both of a pair have met the same machine.
        let ratio =
            median(ours.cpu_us.iter().zip(&theirs.cpu_us).map(|(ours, theirs)| ours / theirs).collect());
        match contender {
            Contender::Tollgate => {}
            Contender::Axum => report.bar("server time, times bare axum's", ratio, ratio <= 1.15, "<= 1.15"),
            Contender::Throttlecrab => {
                report.bar("server time, times throttlecrab's", ratio, ratio <= 0.85, "<= 0.85")
            }
            Contender::Nginx => {
                println!("         server time, times nginx's: {ratio:.2} (the one to reach)");
                report.figure("server time, times nginx's", ratio);
            }
        }
    }
    let p99 = median(ours.steady_p99_ms.clone());
    report.bar("p99 ms at 10,000 checks/s", p99, p99 < 10.0, "< 10");
    report.finish(options)
}

/// One axum route that sends the bytes of a check's answer, without deciding anything.
#[derive(Args)]
pub(crate) struct BareAxum {
    address: SocketAddr,
}

impl BareAxum {
    pub(crate) fn run(&self) -> Result<()> {
        let route = axum::Router::new().route("/api/v1/rate-limit/check", get(same_bytes));
        tokio::runtime::Runtime::new()?.block_on(async {
            let listener = tokio::net::TcpListener::bind(self.address).await?;
            Ok(axum::serve(listener, route).await?)
        })
    }
}

async fn same_bytes() -> (HeaderMap, &'static str) {
    let mut headers = HeaderMap::with_capacity(12);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    const FIELDS: [(HeaderName, HeaderValue); 6] = [
        (HeaderName::from_static("x-ratelimit-limit"), HeaderValue::from_static("100")),
        (HeaderName::from_static("x-ratelimit-remaining"), HeaderValue::from_static("99")),
        (HeaderName::from_static("x-ratelimit-reset"), HeaderValue::from_static("1794779374")),
        (HeaderName::from_static("ratelimit"), HeaderValue::from_static("\"token_bucket\";r=99;t=1")),
        (
            HeaderName::from_static("ratelimit-policy"),
            HeaderValue::from_static("\"token_bucket\";q=100;w=10"),
        ),
        (HeaderName::from_static("x-tollgate-basis"), HeaderValue::from_static("exact")),
    ];
    for (name, value) in FIELDS {
        headers.insert(name, value);
    }
    (
        headers,
        r#"{"allowed":true,"key":"user:012345","algorithm":"TOKEN_BUCKET","remaining":99,"resetAfterSeconds":1,"retryAfterSeconds":0,"message":"Request allowed","limit":100,"basis":"exact","delayMillis":0}"#,
    )
}
