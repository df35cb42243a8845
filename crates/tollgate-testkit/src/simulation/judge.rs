//! What must hold, whatever happens: everything that is admitted, lent and owed is written down here and judged.

use std::collections::BTreeMap;

use tollgate::lease::Lease;
use tollgate::{Grant, Timestamp};

use super::Invariant;
use super::bounds::{Bounds, flow};
use super::report::{Report, Violation};
use super::scenario::{Scenario, Trouble};

/// The part of its life by which a lease ends earlier on its node.
const DRIFT_PARTS: u64 = 5_000;
/// A node that got less than it wished for asks again after this long, or after a quarter of a lease's life.
const PACE_MAX_US: u64 = 50_000;

/// Permits that the store has lent.
#[derive(Clone, Copy, Debug)]
struct Loan {
    holder: usize,
    place: usize,
    /// Neither spent nor given up.
    left: u64,
    /// Given up, and not taken back yet.
    returning: u64,
    /// What the store knows it by.
    at: Timestamp,
    life_us: u64,
    /// From this real instant on nothing of it may be spent.
    ends_us: u64,
    /// When it ends on its node's clock, if the node has got it.
    node_ends: Option<Timestamp>,
}

impl Loan {
    /// Whether a node holds it as this lease.
    fn is(&self, lease: &Lease) -> bool {
        self.at == lease.at && self.node_ends == Some(lease.ends)
    }
}

/// A denial that a node has heard of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Denial {
    pub executed_us: u64,
    /// How often the state had become better than it promised.
    pub generation: u64,
}

pub(super) struct Judge {
    pub report: Report,
    bounds: Vec<Bounds>,
    /// By place: when, and how many.
    admissions: Vec<Vec<(u64, u64)>>,
    loans: Vec<Loan>,
    /// Those that may still live, by place.
    live: Vec<Vec<usize>>,
    denials: BTreeMap<(usize, usize), Denial>,
    /// Until when a node leaves a state alone.
    paced_until_us: BTreeMap<(usize, usize), u64>,
    /// By place: admitted by nodes alone, and charged for that.
    owed: Vec<u64>,
    charged: Vec<u64>,
    /// What a failover has forgotten may be done once more.
    forgets: bool,
}

impl Judge {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let places = scenario.places();
        let bounds = (0..places).map(|place| Bounds::new(scenario, scenario.limit_of(place))).collect();
        let consistency = scenario.limits[0].now.added.settings.consistency;
        Self {
            report: Report::new(scenario.seed, scenario.trouble, consistency),
            bounds,
            admissions: vec![Vec::new(); places],
            loans: Vec::new(),
            live: vec![Vec::new(); places],
            denials: BTreeMap::new(),
            paced_until_us: BTreeMap::new(),
            owed: vec![0; places],
            charged: vec![0; places],
            forgets: matches!(scenario.trouble, Trouble::Failover | Trouble::Guarded),
        }
    }

    pub(super) fn violated(&mut self, invariant: Invariant, at_us: u64, what: String) {
        self.report.violations.push(Violation { invariant, at_us, what });
    }

    /// A request was admitted.
    pub(super) fn admitted(&mut self, place: usize, at_us: u64, cost: u64) {
        self.report.note([1, place as u64, at_us, cost]);
        self.report.admissions += 1;
        self.admissions[place].push((at_us, cost));
    }

    /// The store has lent permits.
    pub(super) fn lent(&mut self, holder: usize, place: usize, grant: &Grant, at_us: u64) -> usize {
        self.report.note([2, place as u64, at_us, grant.permits]);
        self.report.lent += grant.permits;
        let life_us = grant.life.get();
        self.loans.push(Loan {
            holder,
            place,
            left: grant.permits,
            returning: 0,
            at: grant.at,
            life_us,
            ends_us: at_us + life_us,
            node_ends: None,
        });
        self.live[place].push(self.loans.len() - 1);
        self.loans.len() - 1
    }

    /// A node has got a loan that it asked for at `sent`.
    pub(super) fn received(&mut self, loan: usize, sent: Timestamp) {
        let life_us = self.loans[loan].life_us;
        let life_us = life_us - life_us.div_ceil(DRIFT_PARTS);
        self.loans[loan].node_ends = Some(Timestamp::from_micros(sent.as_micros() + life_us));
    }

    /// A node has admitted a request by what it holds. `now` is its own time.
    pub(super) fn spent(&mut self, holder: usize, place: usize, permits: u64, at_us: u64, now: Timestamp) {
        self.admitted(place, at_us, permits);
        let mut held = self.held(holder, place);
        // Those that end first before others, as the node does; those that have ended last, and never if all is well.
        held.sort_by_key(|loan| {
            let Loan { ends_us, node_ends, .. } = self.loans[*loan];
            (at_us >= ends_us, node_ends.is_none_or(|ends| now >= ends), node_ends)
        });
        let mut missing = permits;
        for loan in held {
            let Loan { left, ends_us, .. } = &mut self.loans[loan];
            let taken = missing.min(*left);
            *left -= taken;
            missing -= taken;
            if taken > 0 && at_us >= *ends_us {
                let what =
                    format!("node {holder} spends {taken} of a lease that ended {} us ago", at_us - *ends_us);
                self.violated(Invariant::LeaseEnds, at_us, what);
            }
            if missing == 0 {
                return;
            }
        }
        let what =
            format!("node {holder} spends {permits} of place {place}, {missing} more than it was lent");
        self.violated(Invariant::Conservation, at_us, what);
    }

    /// A node gives a lease up, perhaps not for the first time.
    pub(super) fn given_up(&mut self, holder: usize, place: usize, lease: &Lease) {
        let held = self.held(holder, place);
        if let Some(loan) = held.into_iter().find(|loan| self.loans[*loan].is(lease)) {
            let Loan { left, returning, .. } = &mut self.loans[loan];
            let moved = lease.left.saturating_sub(*returning).min(*left);
            (*left, *returning) = (*left - moved, *returning + moved);
        }
    }

    /// The store has taken a lease back. `again`: the same call has done so before.
    pub(super) fn taken_back(&mut self, holder: usize, place: usize, lease: &Lease, at_us: u64, again: bool) {
        let permits = lease.left;
        self.report.note([3, place as u64, at_us, permits]);
        let mut held = self.held(holder, place);
        // A request under way has spent of one loan, which is not known yet: the others make up for it.
        held.sort_by_key(|loan| (!self.loans[*loan].is(lease), self.loans[*loan].node_ends));
        let mut missing = permits;
        for loan in held {
            let is_the_one = self.loans[loan].is(lease);
            if is_the_one && at_us >= self.loans[loan].ends_us {
                self.bounds[place].allow_late_return(permits);
            }
            let Loan { left, returning, .. } = &mut self.loans[loan];
            if is_the_one {
                let taken = missing.min(*returning);
                (*returning, missing) = (*returning - taken, missing - taken);
            }
            let taken = missing.min(*left);
            (*left, missing) = (*left - taken, missing - taken);
        }
        if (missing > 0 || again) && !self.forgets {
            let what =
                format!("node {holder} returns {permits} of place {place}, {missing} more than it held");
            self.violated(Invariant::ReturnOnce, at_us, what);
        }
    }

    /// A node has admitted permits alone, or may have.
    pub(super) fn owes(&mut self, place: usize, permits: u64) {
        self.owed[place] += permits;
    }

    /// The store was told to take what is owed.
    pub(super) fn charged(&mut self, place: usize, permits: u64, at_us: u64) {
        self.report.note([4, place as u64, at_us, permits]);
        self.report.charged += permits;
        self.charged[place] += permits;
        let (charged, owed) = (self.charged[place], self.owed[place]);
        if charged > owed {
            self.violated(Invariant::Debts, at_us, format!("place {place}: {charged} charged, {owed} owed"));
        }
    }

    /// A node has heard that it cannot have what it asked for.
    pub(super) fn heard_denial(&mut self, holder: usize, place: usize, denial: Denial) {
        self.denials.insert((holder, place), denial);
    }

    /// A node leaves a state alone for a moment.
    pub(super) fn paces(&mut self, holder: usize, place: usize, now_us: u64) {
        let pace_us = self.bounds[place].life_us.div_ceil(4).min(PACE_MAX_US);
        let until_us = now_us + pace_us + pace_us / 1_000 + 2;
        self.paced_until_us.insert((holder, place), until_us);
    }

    /// The denial by which a node denies without asking, unless it only leaves the state alone.
    pub(super) fn denial(&self, holder: usize, place: usize, now_us: u64) -> Option<Option<Denial>> {
        let paced = self.paced_until_us.get(&(holder, place)).is_some_and(|until_us| now_us < *until_us);
        (!paced).then(|| self.denials.get(&(holder, place)).copied())
    }

    /// Permits that are lent and may still be spent, or come back.
    fn out(&mut self, place: usize, at_us: u64) -> u64 {
        let loans = &self.loans;
        self.live[place].retain(|loan| at_us < loans[*loan].ends_us);
        self.live[place].iter().map(|loan| loans[*loan].left + loans[*loan].returning).sum()
    }

    /// The loans that a node has got of a state, with something left.
    fn held(&self, holder: usize, place: usize) -> Vec<usize> {
        let is_held = |(_, loan): &(usize, &Loan)| {
            loan.holder == holder
                && loan.place == place
                && loan.node_ends.is_some()
                && loan.left + loan.returning > 0
        };
        self.loans.iter().enumerate().filter(is_held).map(|(number, _)| number).collect()
    }

    /// What is left and what is out fit into the limit together.
    pub(super) fn check_room(&mut self, place: usize, remaining: u64, at_us: u64) {
        if !self.bounds[place].room {
            return;
        }
        let (out, size) = (self.out(place, at_us), self.bounds[place].limit.size());
        if remaining + out > size {
            let what = format!("place {place}: {remaining} left and {out} out of {size}");
            self.violated(self.bounds[place].invariant, at_us, what);
        }
    }

    /// The store's clock goes forward: what would have flowed meanwhile, and what is out without being counted any more.
    pub(super) fn allow_step(&mut self, by_us: u64, at_us: u64) {
        for place in 0..self.bounds.len() {
            let out = self.out(place, at_us);
            let bounds = &mut self.bounds[place];
            bounds.allowed += flow(bounds.rate, by_us).min(bounds.limit.size()) + out;
        }
    }

    /// A failover loses writes. `lost` is how many permits they had taken from each state.
    pub(super) fn allow_loss(&mut self, lost: &[u64]) {
        for (bounds, lost) in self.bounds.iter_mut().zip(lost) {
            let size = bounds.limit.size();
            bounds.allowed += (*lost).min(size) + flow(bounds.rate, bounds.life_us).min(size);
        }
    }

    /// When all is over. `on_store` is what the store's clock says at a real time.
    pub(super) fn judge(&mut self, end_us: u64, on_store: impl Fn(u64) -> Timestamp) {
        let got: u64 = self.report.granted;
        self.report.lost_on_the_way = self.report.lent.saturating_sub(got);
        for place in 0..self.bounds.len() {
            let mut admissions = core::mem::take(&mut self.admissions[place]);
            let bounds = &self.bounds[place];
            let Some(excess) = bounds.excess(&mut admissions, &on_store) else { continue };
            let (invariant, allowed) = (bounds.invariant, bounds.allowed + bounds.overshoot);
            self.report.worst_excess = self.report.worst_excess.max(excess);
            if excess > allowed {
                let what = format!("place {place}: {excess} permits too many, {allowed} allowed");
                self.violated(invariant, end_us, what);
            }
        }
    }
}
