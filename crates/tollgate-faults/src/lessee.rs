//! A program that embeds the library and borrows: it makes checks at a steady pace on keys that are asked for far more often than
//! they can be admitted, and writes down what became of each before it goes on, so that nothing is lost if it is killed.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tollgate::{
    Ask, Basis, Clock, Consistency, FailureMode, GuardConfig, Limit, LimitSettings, OnFailure, Rate,
    RedisConfig, RedisEngine, SharedEngine, TokenBucket,
};
use tollgate_testkit::Random;

use crate::record::Ground;

/// Makes checks until it is told to stop, and then gives back what it has borrowed.
#[derive(Args)]
pub struct Lessee {
    /// The store.
    #[arg(long)]
    store: String,
    /// Where the records go; beside it, what it has borrowed.
    #[arg(long)]
    out: PathBuf,
    /// Checks a second.
    #[arg(long)]
    rate: u64,
    /// Draws the same keys again.
    #[arg(long)]
    seed: u64,
    /// How many nodes there will be. It begins when it knows of all.
    #[arg(long)]
    nodes: u32,
    /// `strict`, `lease` or `lease_fast`.
    #[arg(long)]
    consistency: String,
    /// Permits at once, of each key.
    #[arg(long)]
    burst: u64,
    /// Permits a second.
    #[arg(long)]
    permits: u64,
    /// Keys that are asked for most often, each as often as the others.
    #[arg(long)]
    hot_keys: u64,
    /// Keys that are each asked for a fifth as often.
    #[arg(long)]
    warm_keys: u64,
    /// Whether half of the checks go to many other keys, of which some are much more common.
    #[arg(long)]
    zipf: bool,
    /// Whether keys count as used up after a failover.
    #[arg(long)]
    failover_guard: bool,
}

/// What is told of a lessee at its end.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Lending {
    pub(crate) granted: u64,
    pub(crate) spent: u64,
    pub(crate) returned: u64,
    pub(crate) expired: u64,
    pub(crate) lost: u64,
    pub(crate) held: u64,
    /// By how many permits a burst may be too large.
    pub(crate) overshoot: u64,
    /// Calls to the store.
    pub(crate) calls: u64,
}

/// One check: when it was decided (on a wall clock: the store's, or that of the node if it has decided itself), on which key, on what
/// ground, and whether it was admitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Check {
    pub(crate) at_us: u64,
    pub(crate) key: u32,
    pub(crate) ground: Ground,
    pub(crate) allowed: bool,
}

const GROUNDS: [Ground; 5] = [Ground::Exact, Ground::Leased, Ground::Local, Ground::Open, Ground::Closed];
const CHECK_BYTES: usize = 16;

impl Check {
    fn bytes(self) -> [u8; CHECK_BYTES] {
        let mut bytes = [0; CHECK_BYTES];
        bytes[..8].copy_from_slice(&self.at_us.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.key.to_le_bytes());
        bytes[12] = GROUNDS.iter().position(|ground| *ground == self.ground).unwrap_or(0) as u8;
        bytes[13] = u8::from(self.allowed);
        bytes
    }

    /// All that were written.
    pub(crate) fn read(bytes: &[u8]) -> Vec<Self> {
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        let one = |bytes: &[u8]| Self {
            at_us: number(&bytes[..8]),
            key: number(&bytes[8..12]) as u32,
            ground: GROUNDS[usize::from(bytes[12]) % GROUNDS.len()],
            allowed: bytes[13] == 1,
        };
        bytes.chunks_exact(CHECK_BYTES).map(one).collect()
    }
}

/// The interval in which checks are drawn and sent.
const TICK: Duration = Duration::from_millis(1);
/// Keys beside the hot ones.
const ZIPF_KEYS: u64 = 10_000;

impl Lessee {
    /// Runs to the end.
    pub fn run(self) -> Result<()> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(self.check())
    }

    fn settings(&self) -> Result<LimitSettings> {
        let named = Consistency::ALL.into_iter().find(|it| it.as_str() == self.consistency);
        Ok(LimitSettings {
            consistency: named.context("strict, lease or lease_fast")?,
            failover_guard: self.failover_guard,
            on_failure: OnFailure { mode: FailureMode::Closed, ..OnFailure::default() },
            ..LimitSettings::default()
        })
    }

    async fn check(self) -> Result<()> {
        let config = RedisConfig::new(self.store.parse().context("the store")?);
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        let (guard, driver) = SharedEngine::new(engine.clone(), GuardConfig::default(), Clock::system());
        tokio::spawn(driver.run());
        let limit = Limit::TokenBucket(TokenBucket::new(self.burst, Rate::per_second(self.permits))?);
        let limiter = guard.limiter("lent", limit, self.settings()?)?;
        let begun = Instant::now();
        while engine.nodes() != Some(self.nodes) {
            if begun.elapsed() > Duration::from_secs(30) {
                bail!("{:?} nodes, not {}", engine.nodes(), self.nodes);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        println!("ready");
        let records = Arc::new(File::create(&self.out)?);
        let mut random = Random::new(self.seed);
        let mut stop = signal(SignalKind::terminate())?;
        let mut ticks = interval(TICK);
        // A late tick is made up for: the pace is that of the clock, not of the answers.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let (start, mut sent) = (Instant::now(), 0);
        loop {
            tokio::select! {
                _ = stop.recv() => break,
                _ = ticks.tick() => {}
            }
            let due = (start.elapsed().as_micros() as u64 * self.rate) / 1_000_000;
            while sent < due {
                sent += 1;
                let key = self.draw(&mut random);
                let (limiter, records) = (limiter.clone(), Arc::clone(&records));
                tokio::spawn(async move {
                    let verdict = limiter.acquire(&format!("user:{key}"), Ask::of(1)).await;
                    let (at_us, allowed) = (verdict.decision.at.as_micros(), verdict.is_admitted());
                    let ground = Basis::into(verdict.basis);
                    // A program that cannot write its records is of no use.
                    (&*records).write_all(&Check { at_us, key, ground, allowed }.bytes()).expect("a record");
                });
            }
        }
        // Those under way have a deadline; what comes now is decided by the store.
        tokio::time::sleep(Duration::from_millis(50)).await;
        guard.give_leases_back().await;
        let stats = guard.lease_stats();
        let lending = Lending {
            granted: stats.granted,
            spent: stats.spent,
            returned: stats.returned,
            expired: stats.expired,
            lost: stats.lost,
            held: stats.held,
            overshoot: stats.overshoot,
            calls: engine.stats().calls,
        };
        Ok(std::fs::write(self.out.with_extension("lending"), serde_json::to_vec(&lending)?)?)
    }

    fn draw(&self, random: &mut Random) -> u32 {
        let named = self.hot_keys + self.warm_keys;
        let key = if !self.zipf || random.one_in(2) {
            match random.below(self.hot_keys * 5 + self.warm_keys) {
                hot if hot < self.hot_keys * 5 => hot / 5,
                warm => warm - self.hot_keys * 5 + self.hot_keys,
            }
        } else {
            // The product of two even draws leans to the small ones.
            named + random.below(ZIPF_KEYS) * random.below(ZIPF_KEYS) / ZIPF_KEYS
        };
        key as u32
    }
}
