//! What a seed stands for: a limit, how it is lent, and what goes wrong meanwhile.

use tollgate_core::{
    Consistency, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, LeaseTerms, Limit, Micros, Rate,
    SlidingCounter, TokenBucket,
};

use super::Flaw;
use crate::Random;

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
    pub trouble: Trouble,
    pub consistency: Consistency,
    pub limit: Limit,
    pub rate: Rate,
    pub terms: Option<LeaseTerms>,
    /// What the limit changes to, half way through.
    pub next: Option<(Limit, Rate, Option<LeaseTerms>)>,
    pub nodes: usize,
    pub keys: usize,
    /// Entries in a node's table.
    pub cap: usize,
    /// Whether wishes are replaced by any number.
    pub adversarial: bool,
    /// Whether some callers are ready to wait.
    pub waits: bool,
    pub bad_network: bool,
    /// Whether packets may be doubled. Then nobody can be sure that a return was refused: perhaps its double was not.
    pub doubles: bool,
    pub duration_us: u64,
    /// Between two requests, on average.
    pub pause_us: u64,
    /// A call under way, at least.
    pub latency_us: u64,
    pub deadline_us: u64,
    pub sweep_us: u64,
    pub flaw: Option<Flaw>,
}

impl Scenario {
    pub(super) fn draw(random: &mut Random, flaw: Option<Flaw>) -> Self {
        let trouble = match flaw {
            None => Trouble::ALL[random.below(Trouble::ALL.len() as u64) as usize],
            Some(Flaw::ObviousLease | Flaw::UnchargedEpochs) => Trouble::None,
            Some(Flaw::LifeFromReceipt | Flaw::UnnumberedReturns) => Trouble::Network,
            Some(Flaw::SpendAfterEnd) => Trouble::Nodes,
        };
        let consistency = match flaw {
            None => Consistency::ALL[random.below(3) as usize],
            Some(Flaw::ObviousLease) => Consistency::LeaseFast,
            Some(_) => Consistency::Lease,
        };
        // Another limit half way through and a bucket's bound: only where the state says what it would mean.
        let only_buckets = flaw.is_some() || trouble == Trouble::Change;
        let (limit, rate) = draw_limit(random, only_buckets);
        let terms = draw_terms(random, &limit, consistency, flaw);
        let next = (trouble == Trouble::Change).then(|| {
            let (limit, rate) = draw_same_algorithm(random, &limit);
            (limit, rate, draw_terms(random, &limit, consistency, flaw))
        });
        let horizon = limit.horizon().get();
        let life = terms.map_or(horizon / 10, |terms| terms.life().get());
        let latency_us = (life / (10 + random.below(200))).clamp(5, 2_000);
        let nodes = 1 + random.below(8) as usize;
        let load_percent = 30 + random.below(300);
        // Three permits a request, on average.
        let per_horizon = (limit.size() * load_percent / 300).clamp(40, 1_200);
        let horizons = (1_500 / per_horizon).clamp(2, 12);
        Self {
            trouble,
            consistency,
            limit,
            rate,
            terms,
            next,
            nodes,
            keys: 1 + random.below(3) as usize,
            cap: if random.one_in(4) { 1 } else { 8 },
            adversarial: flaw.is_some() || random.one_in(3),
            waits: matches!(trouble, Trouble::None | Trouble::Network | Trouble::Nodes)
                && matches!(limit, Limit::TokenBucket(_) | Limit::LeakyBucket(_))
                && random.one_in(4),
            bad_network: trouble == Trouble::Network || (trouble != Trouble::None && random.one_in(2)),
            doubles: flaw.is_some() || random.one_in(2),
            duration_us: horizon * horizons,
            pause_us: (horizon / per_horizon).max(1),
            latency_us,
            deadline_us: latency_us * (4 + random.below(20)),
            sweep_us: (life / (2 + random.below(6))).max(100),
            flaw,
        }
    }

    pub(super) fn has_steps(&self) -> bool {
        matches!(self.trouble, Trouble::Steps | Trouble::StepsBack)
    }
}

fn draw_size(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => 1 + random.below(20),
        1 => 20 + random.below(180),
        _ => 200 + random.below(1_801),
    }
}

fn draw_horizon_us(random: &mut Random) -> u64 {
    match random.below(3) {
        0 => 5_000 + random.below(45_000),
        1 => 50_000 + random.below(450_000),
        _ => 500_000 + random.below(2_500_000),
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

fn draw_terms(
    random: &mut Random,
    limit: &Limit,
    consistency: Consistency,
    flaw: Option<Flaw>,
) -> Option<LeaseTerms> {
    let terms = LeaseTerms::of_any_size(limit, consistency).ok()?;
    let horizon = limit.horizon().get();
    let ceiling = 1 + random.below(limit.size());
    let terms = if random.one_in(4) { terms.with_ceiling(ceiling) } else { terms };
    // The length that makes an ordinary debit the obvious, and wrong, lease.
    if flaw == Some(Flaw::ObviousLease) {
        return Some(terms.with_life(Micros::new(horizon / 5)));
    }
    match random.below(3) {
        0 => Some(terms),
        1 => Some(terms.with_life(Micros::new(horizon / (1 + random.below(8))))),
        _ => Some(terms.with_life(Micros::new(200 + random.below(horizon.max(201) - 199)))),
    }
}
