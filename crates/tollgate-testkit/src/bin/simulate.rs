//! `cargo xtask sim`: plays seeds of the simulation and judges them.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use clap::Parser;
use serde_json::json;
use tollgate_testkit::simulation::{self, Flaw, Report, Trouble};

/// Nodes that hold leases of shared limits, against one store, by seed: the nodes run the production code.
#[derive(Parser)]
#[command(name = "cargo xtask sim")]
struct Cli {
    /// How many seeds to play, from 0 on.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    seeds: u64,
    /// Play only this seed, and tell what happened.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Exit with an error on any violation, and where a flaw made on purpose is not seen.
    #[arg(long)]
    check: bool,
    /// Write the summary to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A judge that has not seen a flaw in this many seeds does not work.
const FLAWED_SEEDS: u64 = 100;

/// What came of many seeds.
#[derive(Default)]
struct Summary {
    seeds: u64,
    events: u64,
    requests: u64,
    admissions: u64,
    local_denials: u64,
    lent: u64,
    spent: u64,
    given_back: u64,
    expired: u64,
    lost: u64,
    lost_on_the_way: u64,
    charged: u64,
    worst_excess: u64,
    violations: Vec<(u64, String)>,
}

impl Summary {
    fn add(&mut self, report: &Report) {
        self.seeds += 1;
        self.events += report.events;
        self.requests += report.requests;
        self.admissions += report.admissions;
        self.local_denials += report.local_denials;
        self.lent += report.lent;
        self.spent += report.spent;
        self.given_back += report.given_back;
        self.expired += report.expired;
        self.lost += report.lost;
        self.lost_on_the_way += report.lost_on_the_way;
        self.charged += report.charged;
        self.worst_excess = self.worst_excess.max(report.worst_excess);
        // One of a seed is enough: the others follow from it.
        if let Some(first) = report.violations.first() {
            self.violations.push((report.seed, format!("{}: {}", first.invariant.as_str(), first.what)));
        }
    }

    fn columns(&self) -> [u64; 14] {
        [
            self.seeds,
            self.events,
            self.requests,
            self.admissions,
            self.local_denials,
            self.lent,
            self.spent,
            self.given_back,
            self.expired,
            self.lost,
            self.lost_on_the_way,
            self.charged,
            self.worst_excess,
            self.violations.len() as u64,
        ]
    }
}

const COLUMNS: [&str; 14] = [
    "seeds",
    "events",
    "requests",
    "admissions",
    "local denials",
    "lent",
    "spent",
    "given back",
    "expired",
    "lost",
    "lost on the way",
    "charged",
    "worst excess",
    "violations",
];

fn main() -> Result<()> {
    let cli = Cli::parse();
    if let Some(seed) = cli.seed {
        return tell(seed, cli.check);
    }
    let summaries = play(cli.seeds);
    print_table(&summaries);
    let violations: Vec<_> = summaries.values().flat_map(|summary| &summary.violations).collect();
    for (seed, what) in violations.iter().take(20) {
        println!("seed {seed} violates {what}");
    }
    let flaws = Flaw::ALL.map(|flaw| (flaw, first_seen(flaw)));
    println!();
    for (flaw, seen) in &flaws {
        match seen {
            Some(report) => println!(
                "flaw \"{}\": seen in seed {}, by {}",
                flaw.as_str(),
                report.seed,
                flaw.violates().as_str()
            ),
            None => println!("flaw \"{}\": NOT SEEN in {FLAWED_SEEDS} seeds", flaw.as_str()),
        }
    }
    if let Some(path) = &cli.json {
        let rows = summaries.iter().map(|(name, summary)| {
            let numbers: serde_json::Map<_, _> = COLUMNS
                .iter()
                .zip(summary.columns())
                .map(|(column, number)| (column.replace(' ', "_"), json!(number)))
                .collect();
            (name.clone(), json!(numbers))
        });
        let rows: serde_json::Map<_, _> = rows.collect();
        let flaws = flaws
            .iter()
            .map(|(flaw, seen)| (flaw.as_str().to_owned(), json!(seen.as_ref().map(|report| report.seed))));
        let flaws: serde_json::Map<_, _> = flaws.collect();
        let all = json!({ "scenarios": rows, "violations": violations, "flaws_seen_in_seed": flaws });
        std::fs::write(path, serde_json::to_string_pretty(&all)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let unseen = flaws.iter().filter(|(_, seen)| seen.is_none()).count();
    if cli.check && (!violations.is_empty() || unseen > 0) {
        bail!("{} seeds with violations, {unseen} flaws not seen", violations.len());
    }
    Ok(())
}

fn tell(seed: u64, check: bool) -> Result<()> {
    let report = simulation::tell(seed);
    report.timeline.iter().for_each(|line| println!("{line}"));
    for violation in &report.violations {
        println!("violated at {} us: {}: {}", violation.at_us, violation.invariant.as_str(), violation.what);
    }
    println!(
        "seed {seed}: {}, {}, {} events, {} violations, digest {:016x}",
        report.trouble.as_str(),
        report.consistency.as_str(),
        report.events,
        report.violations.len(),
        report.digest
    );
    if check && !report.violations.is_empty() {
        bail!("seed {seed} violates what must hold");
    }
    Ok(())
}

/// Plays all seeds, on every core; the summaries by what goes wrong and how exact the state of the first limit is kept.
fn play(seeds: u64) -> BTreeMap<String, Summary> {
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let (next, done) = (AtomicU64::new(0), Mutex::new(BTreeMap::<String, Summary>::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let report = simulation::play(seed);
                    let place = Trouble::ALL.iter().position(|it| *it == report.trouble).unwrap_or(0);
                    let (trouble, consistency) = (report.trouble.as_str(), report.consistency.as_str());
                    let name = format!("{} {trouble}, {consistency}", place + 1);
                    let mut summaries = done.lock().unwrap_or_else(PoisonError::into_inner);
                    summaries.entry(name).or_default().add(&report);
                    if (seed + 1).is_multiple_of(1_000) {
                        eprintln!("{} of {seeds} seeds", seed + 1);
                    }
                }
            });
        }
    });
    let mut summaries = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    summaries.values_mut().for_each(|summary| summary.violations.sort());
    summaries
}

fn print_table(summaries: &BTreeMap<String, Summary>) {
    println!("| scenario | {} |\n| --- |{}", COLUMNS.join(" | "), " ---: |".repeat(COLUMNS.len()));
    let mut total = [0; 14];
    for (name, summary) in summaries {
        let columns = summary.columns();
        print_row(name, columns);
        for (place, (sum, number)) in total.iter_mut().zip(columns).enumerate() {
            *sum = if COLUMNS[place] == "worst excess" { number.max(*sum) } else { *sum + number };
        }
    }
    print_row("all", total);
}

fn print_row(name: &str, columns: [u64; 14]) {
    println!("| {name} | {} |", columns.map(|number| number.to_string()).join(" | "));
}

fn first_seen(flaw: Flaw) -> Option<Report> {
    (0..FLAWED_SEEDS)
        .map(|seed| simulation::play_flawed(seed, flaw))
        .find(|report| report.violations.iter().any(|it| it.invariant == flaw.violates()))
}
