//! What goes over the network, and when it arrives.

use tollgate_core::{Ask, Grant, Outcome, Timestamp};

use super::scenario::Scenario;
use super::store::Returned;
use crate::Random;

/// What a node asks of the store.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    /// Decide on a request, if there is one, and lend.
    Borrow { ask: Option<Ask>, wanted: u64, parts: u64 },
    /// Take back what was not spent. The lease is the judge's name for it.
    Return { lease: usize, permits: u64, at: Timestamp, ends: Timestamp, number: u64, attempts: u32 },
    /// Take what was admitted alone.
    Charge { permits: u64 },
}

/// What the store says.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    Borrow {
        outcome: Option<Outcome>,
        grant: Option<Grant>,
        lease: Option<usize>,
        /// When it was decided, in real time.
        at_us: u64,
        /// How often the key had become better than it promised.
        generation: u64,
    },
    Return(Returned),
    Charged,
}

/// When a call, or a reply, arrives at the other end. Not at all: never. Twice: a doubled packet.
pub(super) fn arrivals(
    random: &mut Random,
    scenario: &Scenario,
    may_double: bool,
    is_return: bool,
) -> Vec<u64> {
    let usual = |random: &mut Random| scenario.latency_us + random.below(scenario.latency_us);
    if !scenario.bad_network {
        return vec![usual(random)];
    }
    // Long enough that leases end, epochs pass and deadlines are missed on the way.
    let life_us = scenario.terms.map_or(scenario.limit.horizon(), |terms| terms.life()).get();
    let stall_us = life_us + scenario.limit.horizon().get();
    let late = |random: &mut Random| match random.below(20) {
        // A store that hangs does later what it was told.
        0..5 if is_return => random.below(stall_us),
        0 if random.one_in(8) => random.below(stall_us),
        0 => random.below(life_us + life_us / 2 + scenario.deadline_us),
        1 | 2 => scenario.latency_us * (1 + random.below(12)),
        _ => usual(random),
    };
    match random.below(40) {
        0 => Vec::new(),
        1 | 2 if may_double && scenario.doubles => vec![late(random), late(random)],
        _ => vec![late(random)],
    }
}
