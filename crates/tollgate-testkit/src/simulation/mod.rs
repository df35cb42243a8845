//! Nodes and the store that they share, in one thread, in virtual time and without I/O. A node is the production code
//! `Lease<Guard<S>>` with its background tasks; the store, the network, the clocks and the load come from a seed, which replays them.

mod agenda;
mod asker;
mod bounds;
mod clock;
mod judge;
mod network;
mod node;
mod report;
mod scenario;
mod world;

pub use report::{Report, Violation};
pub use scenario::Trouble;

/// Plays a seed.
pub fn play(seed: u64) -> Report {
    world::play(seed, None, false)
}

/// Plays a seed and tells what happened.
pub fn tell(seed: u64) -> Report {
    world::play(seed, None, true)
}

/// Plays a seed with something done wrong on purpose, which the judge must see.
pub fn play_flawed(seed: u64, flaw: Flaw) -> Report {
    world::play(seed, Some(flaw), false)
}

/// Something done wrong on purpose: a judge that does not see it is blind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// Leases are ordinary debits with a long life, and the bucket refills as if they had been spent.
    ObviousLease,
    /// What is out is forgotten at the end of an epoch before what flowed until then has found the room taken.
    UnchargedEpochs,
    /// A lease lives from when the node hears of it.
    LifeFromReceipt,
    /// A return counts each time that it arrives.
    UnnumberedReturns,
    /// A node's clock shows a new time only now and then.
    SpendAfterEnd,
}

impl Flaw {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::ObviousLease,
        Self::UnchargedEpochs,
        Self::LifeFromReceipt,
        Self::UnnumberedReturns,
        Self::SpendAfterEnd,
    ];

    /// The invariant by which the judge must see it.
    pub const fn violates(self) -> Invariant {
        match self {
            Self::ObviousLease | Self::UnchargedEpochs => Invariant::Lease,
            Self::LifeFromReceipt | Self::SpendAfterEnd => Invariant::LeaseEnds,
            Self::UnnumberedReturns => Invariant::ReturnOnce,
        }
    }

    /// What it is called.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ObviousLease => "the obvious lease",
            Self::UnchargedEpochs => "epochs whose end is not charged",
            Self::LifeFromReceipt => "life from the receipt",
            Self::UnnumberedReturns => "returns without numbers",
            Self::SpendAfterEnd => "spent after the end",
        }
    }
}

/// What must hold.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Invariant {
    /// Never more than the limit where the store decides everything.
    Strict,
    /// Never more than the limit and its stated overshoot.
    LeaseFast,
    /// Never more than the limit where nodes decide, and what is left and what is out fit into it together.
    Lease,
    /// What was granted is spent, held, given back, expired or lost.
    Conservation,
    /// Nothing is spent after its lease's end.
    LeaseEnds,
    /// What is denied without asking would be denied.
    LocalDenial,
    /// A run of asks is answered as each alone.
    Batch,
    /// Deleting a state when it is full changes no answer.
    Deletion,
    /// A clock that is set back adds nothing; one that is set forward adds what flows and what is out.
    ClockSteps,
    /// Lost, late, doubled and overtaken calls add nothing.
    Network,
    /// What is given back counts once.
    ReturnOnce,
    /// A failover adds what it lost and what is out; nothing with the guard.
    Failover,
    /// What is owed is charged once.
    Debts,
    /// With two limits after each other the larger holds; a cost above the size is denied for ever.
    LimitChange,
    /// Who waits as long as was said is admitted.
    Retry,
    /// Every request is answered within its deadline.
    Answered,
    /// A node whose store is well again decides by it.
    Recovery,
    /// A node that was told to end holds nothing.
    Ended,
}

impl Invariant {
    /// The number that it has in the theory.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Strict => "I1 strict",
            Self::LeaseFast => "I2 lease_fast",
            Self::Lease => "I3 lease",
            Self::Conservation => "I4 conservation",
            Self::LeaseEnds => "I5 lease ends",
            Self::LocalDenial => "I6 local denial",
            Self::Batch => "I7 batch",
            Self::Deletion => "I9 deletion",
            Self::ClockSteps => "I10 clock steps",
            Self::Network => "I11 network",
            Self::ReturnOnce => "I12 return once",
            Self::Failover => "I13 failover",
            Self::Debts => "I14 debts",
            Self::LimitChange => "I16 limit change",
            Self::Retry => "I17 retry",
            Self::Answered => "I18 answered",
            Self::Recovery => "I19 recovery",
            Self::Ended => "I20 ended",
        }
    }
}
