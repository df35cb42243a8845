//! What a seed stands for: limits, how they are lent, and what goes wrong meanwhile.

use std::sync::Arc;
use std::time::Duration;

use tollgate::{Deadlines, FailureMode, LimitSettings, OnFailure};
use tollgate_core::{
    Consistency, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, LeaseTerms, Limit, Micros, Rate,
    SlidingCounter, TokenBucket,
};

use super::Flaw;
use crate::Random;
use crate::fake_store::FakeLimit;

/// What mainly goes wrong in a seed. All but the first may come with a bad network as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// Nothing but delays.
    None,
    /// Calls and replies that are lost, late, doubled or overtake each other.
    Network,
    /// Nodes that pause, crash, or are told to end.
    Nodes,
    /// The store's clock is set back.
    StepsBack,
    /// The store's clock is set back and forward.
    Steps,
    /// A failover forgets the latest writes.
    Failover,
    /// The same, and the store distrusts what it finds.
    Guarded,
    /// Nodes that cannot reach the store admit alone and owe it.
    Debts,
    /// Another limit half way through.
    Change,
}

impl Trouble {
    /// All of them, as the summary lists them.
    pub const ALL: [Self; 9] = [
        Self::None,
        Self::Network,
        Self::Nodes,
        Self::StepsBack,
        Self::Steps,
        Self::Failover,
        Self::Guarded,
        Self::Debts,
        Self::Change,
    ];

    /// The word for it in the summary.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Network => "network",
            Self::Nodes => "nodes",
            Self::StepsBack => "clock back",
            Self::Steps => "clock steps",
            Self::Failover => "failover",
            Self::Guarded => "guarded failover",
            Self::Debts => "debts",
            Self::Change => "limit change",
        }
    }
}

/// Everything that a seed fixes before the first event.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub seed: u64,
    pub trouble: Trouble,
    pub limits: Vec<LimitPlan>,
    /// Keys of each limit.
    pub keys: usize,
    pub nodes: usize,
    /// How many nodes the store says there are.
    pub known_nodes: Option<u32>,
    /// Whether nodes borrow any number of permits, whatever they wished for.
    pub adversarial: bool,
    /// Whether some callers are ready to wait.
    pub waits: bool,
    /// Whether some callers leave before they are answered.
    pub leaves: bool,
    pub bad_network: bool,
    /// Whether calls may be executed twice.
    pub doubles: bool,
    pub duration_us: u64,
    /// Between two requests, on average.
    pub pause_us: u64,
    /// A call under way, at least.
    pub latency_us: u64,
    pub deadlines: Deadlines,
    pub flaw: Option<Flaw>,
}

/// A limit of a scenario.
#[derive(Clone, Debug)]
pub(super) struct LimitPlan {
    pub now: Version,
    /// What the limit changes to, half way through.
    pub next: Option<Version>,
}

/// A limit as nodes add it.
#[derive(Clone, Debug)]
pub(super) struct Version {
    pub added: Arc<FakeLimit>,
    pub rate: Rate,
    pub terms: Option<LeaseTerms>,
}

impl Scenario {
    pub(super) fn draw(seed: u64, random: &mut Random, flaw: Option<Flaw>) -> Self {
        let trouble = match flaw {
            None => Trouble::ALL[random.below(Trouble::ALL.len() as u64) as usize],
            Some(Flaw::ObviousLease | Flaw::UnchargedEpochs) => Trouble::None,
            Some(Flaw::LifeFromReceipt | Flaw::UnnumberedReturns) => Trouble::Network,
            Some(Flaw::SpendAfterEnd) => Trouble::Nodes,
        };
        // Another limit half way through and a bucket's bound: only where the state says what it would mean.
        let only_buckets = flaw.is_some() || trouble == Trouble::Change;
        let on_failure = OnFailure {
            mode: [FailureMode::Local, FailureMode::Local, FailureMode::Open, FailureMode::Closed]
                [random.below(4) as usize],
            settle: trouble == Trouble::Debts || random.one_in(2),
            deadline: None,
        };
        let count = if flaw.is_some() { 1 } else { 1 + random.below(3) as usize };
        let mut limits = Vec::new();
        for number in 0..count {
            let consistency = match flaw {
                None => Consistency::ALL[random.below(3) as usize],
                Some(_) => Consistency::Lease,
            };
            let settings = LimitSettings {
                consistency,
                failover_guard: trouble == Trouble::Guarded,
                on_failure,
                ..LimitSettings::default()
            };
            let (limit, rate) = draw_limit(random, only_buckets);
            let now = Version::new(random, number, limit, rate, settings);
            let next = (trouble == Trouble::Change).then(|| {
                let (limit, rate) = draw_same_algorithm(random, &limit);
                Version::new(random, number, limit, rate, settings)
            });
            limits.push(LimitPlan { now, next });
        }
        let first = &limits[0].now;
        let horizon = first.limit().horizon().get();
        let life = first.terms.map_or(horizon / 10, |terms| terms.life().get());
        let latency_us = (life / (10 + random.below(100))).clamp(50, 8_000);
        let nodes = 1 + random.below(6) as usize;
        let load_percent = 30 + random.below(300);
        // Three permits a request, on average.
        let per_horizon = (first.limit().size() * load_percent / 300).clamp(40, 800);
        let horizons = (900 / per_horizon).clamp(2, 10);
        let wait = Duration::from_millis(3 + 4 * latency_us / 1_000 + random.below(20));
        let call = wait.max(
            [Duration::ZERO, Duration::from_millis(100), Duration::from_millis(500)]
                [random.below(3) as usize],
        );
        let adversarial = flaw.is_some() || random.one_in(3);
        let is_bucket =
            |plan: &LimitPlan| matches!(plan.now.limit(), Limit::TokenBucket(_) | Limit::LeakyBucket(_));
        Self {
            seed,
            trouble,
            nodes,
            keys: 1 + random.below(3) as usize,
            known_nodes: match random.below(4) {
                0 if !adversarial => None,
                _ if adversarial => Some(1),
                _ => Some(nodes as u32),
            },
            adversarial,
            waits: matches!(trouble, Trouble::None | Trouble::Network | Trouble::Nodes)
                && limits.iter().all(is_bucket)
                && random.one_in(4),
            leaves: flaw.is_none() && random.one_in(3),
            bad_network: trouble == Trouble::Network || (trouble != Trouble::None && random.one_in(2)),
            doubles: flaw.is_some() || random.one_in(2),
            duration_us: horizon * horizons,
            pause_us: (horizon / per_horizon).max(1),
            latency_us,
            deadlines: Deadlines { wait, call },
            flaw,
            limits,
        }
    }

    pub(super) fn has_steps(&self) -> bool {
        matches!(self.trouble, Trouble::Steps | Trouble::StepsBack)
    }

    /// The number of the state of a key.
    pub(super) const fn place(&self, limit: usize, key: usize) -> usize {
        limit * self.keys + key
    }

    /// The limit of a state.
    pub(super) fn limit_of(&self, place: usize) -> &LimitPlan {
        &self.limits[place / self.keys]
    }

    pub(super) fn places(&self) -> usize {
        self.limits.len() * self.keys
    }

    /// The longest life of a lease, or zero.
    pub(super) fn life_us(&self) -> u64 {
        self.limits
            .iter()
            .flat_map(|plan| [Some(&plan.now), plan.next.as_ref()])
            .flatten()
            .map(Version::life_us)
            .max()
            .unwrap_or(0)
    }
}

impl Version {
    fn new(random: &mut Random, number: usize, limit: Limit, rate: Rate, settings: LimitSettings) -> Self {
        let ceiling = 1 + random.below(limit.size());
        let lease_ceiling = random.one_in(4).then_some(ceiling);
        let settings = LimitSettings { lease_ceiling, ..settings };
        let scope = format!("{number}").into();
        let terms = settings.lease_terms(&limit).ok();
        Self { added: Arc::new(FakeLimit { scope, limit, settings }), rate, terms }
    }

    pub(super) fn limit(&self) -> &Limit {
        &self.added.limit
    }

    pub(super) fn life_us(&self) -> u64 {
        self.terms.map_or(0, |terms| terms.life().get())
    }
}

/// Mostly large enough to be lent from.
fn draw_size(random: &mut Random) -> u64 {
    match random.below(6) {
        0 => 1 + random.below(199),
        1 | 2 => 200 + random.below(200),
        _ => 400 + random.below(1_601),
    }
}

/// Mostly long enough to be lent from.
fn draw_horizon_us(random: &mut Random) -> u64 {
    match random.below(3) {
        0 => 40_000 + random.below(260_000),
        1 => 300_000 + random.below(700_000),
        _ => 1_000_000 + random.below(3_000_000),
    }
}

fn draw_limit(random: &mut Random, only_buckets: bool) -> (Limit, Rate) {
    loop {
        let (size, horizon) = (draw_size(random), draw_horizon_us(random));
        let choice = random.below(if only_buckets { 7 } else { 12 });
        let sub_buckets = [1, 2, 10][random.below(3) as usize];
        let strict = random.one_in(2);
        let whole = Rate::new(size, Micros::new(horizon / 10 * 10));
        // Some refills come in one piece for each permit, some in a few.
        let pieces = 1 + random.below(size.min(4));
        let part = Rate::new(size.div_ceil(pieces), Micros::new((horizon / pieces).max(1)));
        let (Ok(whole), Ok(part)) = (whole, part) else { continue };
        let drawn = match choice {
            0..6 => TokenBucket::new(size, whole).map(|it| (Limit::TokenBucket(it), whole)),
            6 => LeakyBucket::new(size, whole, LeakyMode::Meter).map(|it| (Limit::LeakyBucket(it), whole)),
            7 => IntervalBucket::new(size, part).map(|it| (Limit::IntervalBucket(it), part)),
            8 | 9 => FixedWindow::new(whole).map(|it| (Limit::FixedWindow(it), whole)),
            _ => SlidingCounter::new(whole, sub_buckets, strict).map(|it| (Limit::SlidingCounter(it), whole)),
        };
        if let Ok(drawn) = drawn {
            return drawn;
        }
    }
}

/// Another size and another rate.
fn draw_same_algorithm(random: &mut Random, limit: &Limit) -> (Limit, Rate) {
    loop {
        let (other, rate) = draw_limit(random, true);
        if core::mem::discriminant(&other) == core::mem::discriminant(limit) {
            return (other, rate);
        }
    }
}
