//! Checks over gRPC: Tollgate's Rate Limit Service beside throttlecrab-server and beside a bare tonic service that sends a constant
//! response, with h2load as the client. The server has one core, the client the other.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use prost::Message;
use tempfile::TempDir;
use tollgate_testkit::{Process, wait_until};
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use self::proto::rate_limit_descriptor::Entry;
use self::proto::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit};
use self::proto::{HeaderValue, RateLimitDescriptor, RateLimitRequest, RateLimitResponse};
use crate::report::{Options, Report, median};

#[path = "../../tollgate-server/src/doors/rls/proto.rs"]
#[allow(dead_code, unused_imports, reason = "not all messages are used here")]
mod proto;

const SERVER_CORE: &str = "0";
const LOAD_CORE: &str = "1";
/// Connections of the client, and the calls that are under way on each.
const CONNECTIONS: &str = "8";
const STREAMS: &str = "16";

/// A policy with one limit that admits every call.
const POLICY: &str =
    "rules: [{ name: bench, key: \"attribute:key\", limit: 1000000000/s burst 1000000000 }]\n";

/// Who is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Contender {
    Tollgate,
    Throttlecrab,
    Tonic,
}

impl Contender {
    const ALL: [Self; 3] = [Self::Tollgate, Self::Throttlecrab, Self::Tonic];

    const fn name(self) -> &'static str {
        match self {
            Self::Tollgate => "tollgate gRPC",
            Self::Throttlecrab => "throttlecrab-server gRPC",
            Self::Tonic => "bare tonic",
        }
    }

    const fn path(self) -> &'static str {
        match self {
            Self::Tollgate | Self::Tonic => SHOULD_RATE_LIMIT,
            Self::Throttlecrab => "/throttlecrab.RateLimiter/Throttle",
        }
    }

    /// The message that every call sends.
    fn message(self) -> Vec<u8> {
        match self {
            Self::Tollgate | Self::Tonic => rate_limit_request().encode_to_vec(),
            Self::Throttlecrab => ThrottleRequest {
                key: "user:000001".to_owned(),
                max_burst: 1_000_000_000,
                count_per_period: 1_000_000_000,
                period: 1,
                quantity: 1,
            }
            .encode_to_vec(),
        }
    }
}

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

fn rate_limit_request() -> RateLimitRequest {
    let entry = Entry { key: "key".to_owned(), value: "user:000001".to_owned() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    RateLimitRequest { domain: "bench".to_owned(), descriptors: vec![descriptor], hits_addend: 0 }
}

/// The request of throttlecrab-server.
#[derive(Clone, PartialEq, prost::Message)]
struct ThrottleRequest {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(int32, tag = "2")]
    max_burst: i32,
    #[prost(int32, tag = "3")]
    count_per_period: i32,
    #[prost(int32, tag = "4")]
    period: i32,
    #[prost(int32, tag = "5")]
    quantity: i32,
}

/// A server on its core.
struct Server {
    process: Process,
    address: SocketAddr,
    files: TempDir,
}

impl Server {
    fn start(contender: Contender) -> Result<Self> {
        let (files, address) = (tempfile::tempdir()?, free_address()?);
        let port = address.port().to_string();
        let here = std::env::current_exe()?;
        let mut command = Command::new("taskset");
        command.args(["-c", SERVER_CORE]);
        match contender {
            Contender::Tollgate => {
                let policy = files.path().join("policy.yaml");
                std::fs::write(&policy, POLICY)?;
                command.arg(here.with_file_name("tollgate")).args(["--grpc", &address.to_string()]);
                command.args(["--listen", &free_address()?.to_string(), "--policy"]).arg(policy);
            }
            Contender::Throttlecrab => {
                let program =
                    std::env::var_os("THROTTLECRAB_SERVER").context("run by `cargo xtask bench grpc`")?;
                command.arg(program).args(["--grpc", "--grpc-host", "127.0.0.1", "--grpc-port", &port]);
                command.args(["--log-level", "error"]);
            }
            Contender::Tonic => {
                command.arg(here).args(["tonic", &address.to_string()]);
            }
        }
        let process = Process::start(&command);
        wait_until("the server listens", || std::net::TcpStream::connect(address).is_ok());
        let message = contender.message();
        let length = u32::try_from(message.len())?.to_be_bytes();
        std::fs::write(files.path().join(BODY), [&[0], &length[..], &message].concat())?;
        Ok(Self { process, address, files })
    }

    /// Processor time that all threads of the server have used.
    fn cpu(&self) -> Result<Duration> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process.id()))?;
        let of_task = |path: &Path| -> Option<u64> {
            let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse().ok()
        };
        Ok(Duration::from_nanos(tasks.filter_map(|task| of_task(&task.ok()?.path())).sum()))
    }
}

/// The file with the body of every call.
const BODY: &str = "body";

fn free_address() -> Result<SocketAddr> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?)
}

/// What was measured of one contender.
#[derive(Default)]
struct Figures {
    per_second: Vec<f64>,
    cpu_us: Vec<f64>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let (rounds, calls) = if options.quick { (1, 20_000) } else { (5, 200_000) };
    let contenders: Vec<_> =
        Contender::ALL.into_iter().filter(|it| it.name().contains(&options.only)).collect();
    println!(
        "{CONNECTIONS} connections with {STREAMS} calls each, server on core {SERVER_CORE}, h2load on core {LOAD_CORE}; median of {rounds} interleaved rounds of {calls} calls.\n"
    );
    let servers: Vec<_> = contenders.iter().map(|it| Server::start(*it)).collect::<Result<_>>()?;
    let mut figures: Vec<Figures> = contenders.iter().map(|_| Figures::default()).collect();
    for round in 0..=rounds {
        for (index, server) in servers.iter().enumerate() {
            let before = server.cpu()?;
            let per_second = load(server, contenders[index], calls)?;
            let used = server.cpu()? - before;
            // The first round warms up.
            if round > 0 {
                figures[index].per_second.push(per_second);
                figures[index].cpu_us.push(used.as_secs_f64() * 1e6 / f64::from(calls));
            }
        }
    }
    judge(&contenders, &figures, options)
}

/// Runs h2load, and says how many calls were answered in a second.
fn load(server: &Server, contender: Contender, calls: u32) -> Result<f64> {
    let output = Command::new("taskset")
        .args(["-c", LOAD_CORE, "h2load", "-n", &calls.to_string(), "-c", CONNECTIONS, "-m", STREAMS])
        .args(["-H", "content-type: application/grpc", "-H", "te: trailers", "-d"])
        .arg(server.files.path().join(BODY))
        .arg(format!("http://{}{}", server.address, contender.path()))
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let name = contender.name();
    ensure!(output.status.success(), "h2load: {text}{}", String::from_utf8_lossy(&output.stderr));
    ensure!(text.contains(&format!("{calls} succeeded, 0 failed")), "{name} failed some calls: {text}");
    let figure = text.lines().find_map(|line| line.strip_prefix("finished in ")?.split(", ").nth(1));
    let figure = figure.and_then(|figure| figure.strip_suffix(" req/s"));
    figure.context("no figure in the output of h2load")?.parse().context("not a figure")
}

fn judge(contenders: &[Contender], figures: &[Figures], options: &Options) -> Result<()> {
    let mut report = Report::default();
    println!("{:<26} {:>12} {:>16}", "", "calls/s", "server us/call");
    for (contender, Figures { per_second, cpu_us }) in contenders.iter().zip(figures) {
        let (name, rate, cpu) = (contender.name(), median(per_second.clone()), median(cpu_us.clone()));
        println!("{name:<26} {rate:>12.0} {cpu:>16.2}");
        report.figure(&format!("{name}, calls/s"), rate);
        report.figure(&format!("{name}, server us a call"), cpu);
    }
    println!();
    let of = |contender| contenders.iter().position(|it| *it == contender).map(|index| &figures[index]);
    // Round by round: both of a pair have met the same machine.
    let ratio = |ours: &[f64], theirs: &[f64]| median(ours.iter().zip(theirs).map(|(a, b)| b / a).collect());
    let Some(ours) = of(Contender::Tollgate) else { return report.finish(options) };
    for (contender, least) in [(Contender::Throttlecrab, 1.4), (Contender::Tonic, 0.7)] {
        let Some(theirs) = of(contender) else { continue };
        let speed = ratio(&ours.cpu_us, &theirs.cpu_us);
        let name = format!("calls in the same server time, times those of {}", contender.name());
        report.bar(&name, speed, speed >= least, &format!(">= {least:.1}"));
    }
    report.finish(options)
}

/// A tonic service that sends the same response to every call, without deciding anything.
#[derive(Args)]
pub(crate) struct BareTonic {
    address: SocketAddr,
}

impl BareTonic {
    pub(crate) fn run(&self) -> Result<()> {
        let server = tonic::transport::Server::builder().add_service(Constant);
        tokio::runtime::Runtime::new()?.block_on(async { Ok(server.serve(self.address).await?) })
    }
}

/// The service, as tonic's own generator writes it.
#[derive(Clone)]
struct Constant;

impl NamedService for Constant {
    const NAME: &'static str = "envoy.service.ratelimit.v3.RateLimitService";
}

impl Service<http::Request<tonic::body::Body>> for Constant {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = Grpc::new(ProstCodec::<RateLimitResponse, RateLimitRequest>::default());
            Ok(grpc.unary(Constant, request).await)
        })
    }
}

impl UnaryService<RateLimitRequest> for Constant {
    type Response = RateLimitResponse;
    type Future = BoxFuture<Response<RateLimitResponse>, Status>;

    fn call(&mut self, _: Request<RateLimitRequest>) -> Self::Future {
        Box::pin(async { Ok(Response::new(same_response())) })
    }
}

fn same_response() -> RateLimitResponse {
    let headers = [
        ("x-ratelimit-limit", "1000000000"),
        ("x-ratelimit-remaining", "999999999"),
        ("x-ratelimit-reset", "1794779374"),
        ("ratelimit", "\"token_bucket:bench\";r=999999999;t=1"),
        ("ratelimit-policy", "\"token_bucket:bench\";q=1000000000;w=1"),
    ];
    let header = |(key, value): (&str, &str)| HeaderValue { key: key.to_owned(), value: value.to_owned() };
    let limit =
        RateLimit { requests_per_unit: 1_000_000_000, unit: Unit::Second.into(), name: "bench".to_owned() };
    let status = DescriptorStatus {
        code: Code::Ok.into(),
        current_limit: Some(limit),
        limit_remaining: 999_999_999,
        duration_until_reset: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
    };
    RateLimitResponse {
        overall_code: Code::Ok.into(),
        statuses: vec![status],
        response_headers_to_add: headers.map(header).to_vec(),
    }
}
