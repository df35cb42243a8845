//! Nodes that hold leases of shared limits, and the store that lends them, in one thread and without I/O: what they decide is
//! the real code, and everything around it comes from a seed, which replays it.

mod conduct;
mod judge;
mod load;
mod node;
mod report;
mod scenario;
mod store;
mod wire;
mod world;

pub use report::{Report, Violation};
pub use scenario::Trouble;

/// Plays a seed.
pub fn play(seed: u64) -> Report {
    world::World::new(seed, None, false).play()
}

/// Plays a seed and tells what happened.
pub fn tell(seed: u64) -> Report {
    world::World::new(seed, None, true).play()
}

/// Plays a seed with something done wrong on purpose, which the judge must see.
pub fn play_flawed(seed: u64, flaw: Flaw) -> Report {
    world::World::new(seed, Some(flaw), false).play()
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
    /// A node looks at its clock only now and then.
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
    /// A table keeps to its cap.
    Cap,
    /// With two limits after each other the larger holds; a cost above the size is denied for ever.
    LimitChange,
    /// Who waits as long as was said is admitted.
    Retry,
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
            Self::Cap => "I15 cap",
            Self::LimitChange => "I16 limit change",
            Self::Retry => "I17 retry",
            Self::Ended => "I20 ended",
        }
    }
}
