//! Benchmarks of Tollgate beside its peers, in one run: `cargo xtask bench NAME`.

mod doors;
mod doors_grpc;
mod engine;
mod four_leased;
mod growth;
mod http;
mod instructions;
mod keys;
mod lease;
mod load;
mod log;
mod mixed;
mod node;
mod policy;
mod redis;
mod report;
mod scripts;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::report::Options;

/// Measures Tollgate and its peers in the same run, on the same keys, and prints the ratios.
#[derive(Parser)]
#[command(name = "bench")]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Decisions in process: Tollgate's memory engine, governor and the throttlecrab library.
    Engine(Options),
    /// Checks over HTTP: Tollgate, a bare axum route that sends the same bytes, nginx limit_req and throttlecrab-server.
    Http(Options),
    /// Checks over the Redis protocol, beside throttlecrab-server and `SET` of Redis, and over gRPC, beside throttlecrab-server and a bare
    /// tonic service that sends a constant response. `--json FILE` writes the figures of gRPC to `FILE.grpc`.
    Doors(Options),
    /// Checks in Redis: Tollgate's Redis engine, redis-benchmark, limitador's Redis storage and an earlier Tollgate.
    Redis(Options),
    /// Decisions by leases, in process, on a real Redis: hot keys, Zipf keys, and the three consistencies side by side.
    Lease(Options),
    /// The longest script calls in Redis: on long logs, and on many limits at once.
    Log(Options),
    /// Policies: finding the rules of a request among many, and asking several limits together.
    Policy(Options),
    /// For `http`: the bare axum route.
    #[command(hide = true)]
    Axum(http::BareAxum),
    /// For `grpc`: the bare tonic service.
    #[command(hide = true)]
    Tonic(doors_grpc::BareTonic),
    /// For `engine`: fills one contender with keys, in a process of its own, and prints what the memory has grown by.
    #[command(hide = true)]
    Fill(engine::Fill),
    /// For `engine`: makes checks on many keys, for cachegrind to watch.
    #[command(hide = true)]
    Touch(growth::Touch),
    /// For `engine`: makes checks with one contender, for callgrind to count instructions.
    #[command(hide = true)]
    Count(engine::Count),
}

fn main() -> Result<()> {
    match Cli::parse().bench {
        Bench::Engine(options) => engine::run(&options),
        Bench::Http(options) => http::run(&options),
        Bench::Doors(options) => {
            let resp = doors::run(&options);
            let json = options.json.as_ref().map(|file| {
                let mut name = file.clone().into_os_string();
                name.push(".grpc");
                PathBuf::from(name)
            });
            resp.and(doors_grpc::run(&Options { json, ..options }))
        }
        Bench::Redis(options) => redis::run(&options),
        Bench::Lease(options) => lease::run(&options),
        Bench::Log(options) => log::run(&options),
        Bench::Policy(options) => policy::run(&options),
        Bench::Axum(server) => server.run(),
        Bench::Tonic(server) => server.run(),
        Bench::Fill(fill) => fill.run(),
        Bench::Touch(touch) => touch.run(),
        Bench::Count(count) => count.run(),
    }
}
