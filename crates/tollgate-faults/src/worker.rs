//! A program that embeds the library: it makes checks at a steady pace, and writes down what became of each.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tollgate::{Ask, Clock, GuardConfig, Limiter, RedisConfig, RedisEngine, SharedEngine};

use crate::record::{Record, now_us};
use crate::traffic::{LIMITS, Traffic, key_name};

/// Makes checks until it is told to stop.
#[derive(Args)]
pub struct Worker {
    /// The store.
    #[arg(long)]
    store: String,
    /// Where the records go.
    #[arg(long)]
    out: PathBuf,
    /// Checks a second.
    #[arg(long, default_value_t = 1_000)]
    rate: u64,
    /// Draws the same keys again.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Each key is asked for once.
    #[arg(long)]
    new_keys: bool,
}

/// What is written at the end, after the records.
#[derive(serde::Serialize, serde::Deserialize)]
pub(crate) struct Summary {
    /// Tasks alive: a second after the start, and at the end.
    pub(crate) tasks: [usize; 2],
    /// Calls that gave no decision, by class.
    pub(crate) failed: BTreeMap<String, u64>,
    /// Of each tick of the program's clock: when it was due, and how late it was. It waits for nothing but the machine.
    pub(crate) ticks_us: Vec<(u64, u64)>,
}

/// Beyond the keys that are drawn.
const FIRST_NEW_KEY: u32 = 1_000_000;
/// The interval in which checks are drawn and sent.
const TICK: Duration = Duration::from_millis(1);

impl Worker {
    /// Runs to the end.
    pub fn run(self) -> Result<()> {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?
            .block_on(self.check())
    }

    async fn check(self) -> Result<()> {
        let config = RedisConfig::new(self.store.parse().context("the store")?);
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        let (guard, driver) = SharedEngine::new(engine, GuardConfig::default(), Clock::system());
        tokio::spawn(driver.run());
        let limiters: Vec<Limiter> = LIMITS
            .iter()
            .map(|it| guard.limiter(&it.algorithm.to_lowercase(), it.limit(), it.on_failure()))
            .collect::<Result<_, _>>()?;
        let limiters = Arc::new(limiters);
        let records = Arc::new(Mutex::new(Vec::new()));
        let mut traffic = Traffic::new(self.seed);
        let mut stop = signal(SignalKind::terminate())?;
        let mut ticks = interval(TICK);
        // A late tick is made up for: the pace is that of the clock, not of the answers.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let (start, mut sent, mut tasks) = (Instant::now(), 0, 0);
        let mut ticks_us = Vec::new();
        loop {
            tokio::select! {
                _ = stop.recv() => break,
                due = ticks.tick() => {
                    let late_us = due.elapsed().as_micros() as u64;
                    ticks_us.push((now_us() - late_us, late_us));
                }
            }
            if tasks == 0 && start.elapsed() >= Duration::from_secs(1) {
                tasks = alive_tasks();
            }
            let due = (start.elapsed().as_micros() as u64 * self.rate) / 1_000_000;
            while sent < due {
                sent += 1;
                let (limit, mut key) = traffic.next();
                if self.new_keys {
                    key = FIRST_NEW_KEY + sent as u32;
                }
                let (limiters, records) = (Arc::clone(&limiters), Arc::clone(&records));
                tokio::spawn(async move {
                    let record = decide(&limiters[usize::from(limit)], limit, key).await;
                    records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
                });
            }
        }
        // Those under way have a deadline.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let failed =
            tollgate::StoreError::CLASSES.map(str::to_owned).into_iter().zip(guard.redis().stats().failed);
        let summary = Summary { tasks: [tasks, alive_tasks()], failed: failed.collect(), ticks_us };
        let records = records.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = std::io::BufWriter::new(std::fs::File::create(&self.out)?);
        for record in records.iter() {
            serde_json::to_writer(&mut out, record)?;
            out.write_all(b"\n")?;
        }
        serde_json::to_writer(&mut out, &summary)?;
        Ok(out.flush()?)
    }
}

fn alive_tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

async fn decide(limiter: &Limiter, limit: u8, key: u32) -> Record {
    let start_us = now_us();
    let verdict = limiter.acquire(&key_name(key), Ask::of(1)).await;
    let at_us = now_us();
    Record {
        at_us,
        took_us: at_us - start_us,
        node: 0,
        limit,
        key,
        allowed: verdict.is_admitted(),
        ground: verdict.basis.into(),
        status: 0,
    }
}
