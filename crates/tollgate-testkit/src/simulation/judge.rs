//! What must hold, whatever happens: everything that is admitted and lent is written down here and judged.

use tollgate_core::{Algorithm, Ask, Consistency, LeaseTerms, Limit, Rate, Timestamp};

use super::report::{Report, Violation};
use super::scenario::{Scenario, Trouble};
use super::{Flaw, Invariant};
use crate::Bound;

/// Permits that the store has lent, seen from outside.
#[derive(Clone, Copy, Debug)]
struct Lent {
    permits: u64,
    /// Neither spent nor taken back.
    left: u64,
    /// From this real instant on nothing of it may be spent.
    ends_us: u64,
    received: bool,
}

#[derive(Debug)]
pub(super) struct Judge {
    pub report: Report,
    limit: Limit,
    rate: Rate,
    next: Option<(Limit, Rate)>,
    admissions: Vec<Vec<(u64, u64)>>,
    lent: Vec<Lent>,
    /// Those that may still live, by key.
    live: Vec<Vec<usize>>,
    /// What faults may add to a key, by the theory.
    allowed: Vec<u64>,
    /// By how much nodes may be too generous together.
    overshoot: u64,
    invariant: Invariant,
    /// Whether what is left and what is out must fit into the limit together, at every instant.
    room: bool,
    replays: bool,
}

impl Judge {
    pub(super) fn new(seed: u64, scenario: &Scenario) -> Self {
        let invariant = match (scenario.trouble, scenario.consistency) {
            (Trouble::StepsBack | Trouble::Steps, _) => Invariant::ClockSteps,
            (Trouble::Failover | Trouble::Guarded, _) => Invariant::Failover,
            (Trouble::Change, _) => Invariant::LimitChange,
            (Trouble::Network, _) => Invariant::Network,
            (_, Consistency::Strict) => Invariant::Strict,
            (_, Consistency::Lease) => Invariant::Lease,
            (_, Consistency::LeaseFast) => Invariant::LeaseFast,
        };
        let overshoot = |limit: &Limit, terms: Option<LeaseTerms>| {
            // Who asks for any number does not keep to the ceiling, by which the overshoot may be smaller.
            let ceiling =
                |terms: LeaseTerms| if scenario.adversarial { limit.size() } else { terms.ceiling() };
            terms
                .map(|terms| terms.with_ceiling(ceiling(terms)))
                .map_or(0, |terms| terms.overshoot(limit, scenario.nodes as u64))
        };
        let after = scenario.next.map_or(0, |(limit, _, terms)| overshoot(&limit, terms));
        let is_judged_as_strict = scenario.flaw == Some(Flaw::ObviousLease);
        let unsure = matches!(scenario.trouble, Trouble::Steps | Trouble::Failover | Trouble::Change);
        Self {
            report: Report::new(seed, scenario.trouble, scenario.consistency),
            limit: scenario.limit,
            rate: scenario.rate,
            next: scenario.next.map(|(limit, rate, _)| (limit, rate)),
            admissions: vec![Vec::new(); scenario.keys],
            lent: Vec::new(),
            live: vec![Vec::new(); scenario.keys],
            allowed: vec![0; scenario.keys],
            overshoot: if is_judged_as_strict {
                0
            } else {
                overshoot(&scenario.limit, scenario.terms).max(after)
            },
            invariant,
            room: !unsure && scenario.terms.is_some_and(|terms| terms.counts_out()),
            replays: !scenario.has_steps() && scenario.trouble != Trouble::Failover,
        }
    }

    pub(super) fn violated(&mut self, invariant: Invariant, at_us: u64, what: String) {
        self.report.violations.push(Violation { invariant, at_us, what });
    }

    /// Somebody was let through.
    pub(super) fn admitted(&mut self, key: usize, at_us: u64, cost: u64) {
        self.report.note([1, key as u64, at_us, cost]);
        self.report.admissions += 1;
        self.admissions[key].push((at_us, cost));
    }

    /// The store has lent permits, which may be spent until `ends_us`.
    pub(super) fn has_lent(&mut self, key: usize, permits: u64, ends_us: u64) -> usize {
        self.report.lent += permits;
        self.lent.push(Lent { permits, left: permits, ends_us, received: false });
        self.live[key].push(self.lent.len() - 1);
        self.lent.len() - 1
    }

    /// A node has got what was lent.
    pub(super) fn received(&mut self, lease: usize, at_us: u64) {
        if core::mem::replace(&mut self.lent[lease].received, true) {
            self.violated(Invariant::Conservation, at_us, format!("lease {lease} was received twice"));
        }
    }

    /// Permits of a lease are spent.
    pub(super) fn spent(&mut self, lease: usize, permits: u64, at_us: u64) {
        let record = &mut self.lent[lease];
        let too_many = permits > record.left;
        record.left = record.left.saturating_sub(permits);
        let ends_us = record.ends_us;
        if too_many {
            self.violated(Invariant::Conservation, at_us, format!("lease {lease} was spent twice"));
        }
        if at_us >= ends_us {
            self.violated(
                Invariant::LeaseEnds,
                at_us,
                format!("lease {lease} ended {} us ago", at_us - ends_us),
            );
        }
    }

    /// The store has taken permits of a lease back.
    pub(super) fn taken_back(&mut self, lease: usize, permits: u64) {
        self.lent[lease].left = self.lent[lease].left.saturating_sub(permits);
    }

    /// Permits of a key that are lent and may still be spent, or come back.
    pub(super) fn out(&mut self, key: usize, at_us: u64) -> u64 {
        let lent = &self.lent;
        self.live[key].retain(|lease| at_us < lent[*lease].ends_us && lent[*lease].left > 0);
        self.live[key].iter().map(|lease| lent[*lease].left).sum()
    }

    /// What is left and what is out fit into the limit together.
    pub(super) fn check_room(&mut self, key: usize, remaining: u64, at_us: u64) {
        if !self.room {
            return;
        }
        let (out, size) = (self.out(key, at_us), self.limit.size());
        if remaining + out > size {
            let what = format!("key {key}: {remaining} left and {out} out of {size}");
            self.violated(self.invariant, at_us, what);
        }
    }

    /// The store's clock goes forward: what would have flowed meanwhile, and what is out without being counted any more.
    pub(super) fn allow_step(&mut self, by_us: u64, at_us: u64) {
        for key in 0..self.allowed.len() {
            let flows = flow(self.rate, by_us).min(self.limit.size());
            self.allowed[key] += flows + self.out(key, at_us);
        }
    }

    /// Writes are lost, by which so much was taken of each key, and leases of so long a life.
    pub(super) fn allow_loss(&mut self, lost: &[u64], life_us: u64) {
        for (allowed, lost) in self.allowed.iter_mut().zip(lost) {
            let size = self.limit.size();
            *allowed += (*lost).min(size) + flow(self.rate, life_us).min(size);
        }
    }

    /// What the store has lent is what nodes got, and what was lost on the way.
    pub(super) fn settle_lent(&mut self, granted: u64, at_us: u64) {
        let report = &mut self.report;
        report.lost_on_the_way = report.lent - granted.min(report.lent);
        let received: u64 = self.lent.iter().filter(|lent| lent.received).map(|lent| lent.permits).sum();
        if received != granted {
            let what = format!("{received} permits were received and {granted} accounted for");
            self.violated(Invariant::Conservation, at_us, what);
        }
    }

    /// When all is over. `on_store` is what the store's clock says at a real time.
    pub(super) fn judge(&mut self, end_us: u64, on_store: impl Fn(u64) -> Timestamp) {
        for key in 0..self.admissions.len() {
            let mut admissions = core::mem::take(&mut self.admissions[key]);
            let allowed = self.allowed[key] + self.overshoot;
            let excess = match self.limit {
                Limit::TokenBucket(_) | Limit::LeakyBucket(_) => self.bound().excess(&mut admissions).permits,
                Limit::IntervalBucket(it) => {
                    interval_excess(it.capacity(), it.refill(), it.period(), &mut admissions)
                }
                Limit::FixedWindow(_)
                | Limit::SlidingCounter(_)
                | Limit::SlidingLog(_)
                | Limit::CalendarQuota(_) => match self.replays {
                    true => self.refused_in_replay(&mut admissions, &on_store),
                    false => 0,
                },
            };
            // Without bookkeeping of what is out the theory says nothing tighter for these.
            let is_bucket = matches!(self.limit, Limit::TokenBucket(_) | Limit::LeakyBucket(_));
            if !is_bucket && !self.replays {
                continue;
            }
            self.report.worst_excess = self.report.worst_excess.max(excess);
            if excess > allowed {
                let what = format!("key {key}: {excess} permits too many, {allowed} allowed");
                self.violated(self.invariant, end_us, what);
            }
        }
    }

    /// The larger burst and the larger rate of both limits.
    fn bound(&self) -> Bound {
        let faster = self.next.map(|(_, rate)| rate).filter(|rate| {
            u128::from(rate.permits()) * u128::from(self.rate.per().get())
                > u128::from(self.rate.permits()) * u128::from(rate.per().get())
        });
        let rate = faster.unwrap_or(self.rate);
        let burst = self.next.map_or(0, |(limit, _)| limit.size()).max(self.limit.size());
        Bound { burst, permits: rate.permits(), period_us: rate.per().get() }
    }

    /// The permits that the plain algorithm would refuse if everybody came when they were let through.
    fn refused_in_replay(&self, admissions: &mut [(u64, u64)], on_store: impl Fn(u64) -> Timestamp) -> u64 {
        admissions.sort_unstable_by_key(|(at_us, _)| *at_us);
        let mut state = self.limit.fresh(on_store(0));
        let refused = admissions.iter().filter(|(at_us, cost)| {
            !self.limit.decide(&mut state, on_store(*at_us), Ask::of(*cost)).is_admitted()
        });
        refused.map(|(_, cost)| *cost).sum()
    }
}

/// What flows in some time, rounded up.
fn flow(rate: Rate, us: u64) -> u64 {
    let permits = (u128::from(rate.permits()) * u128::from(us)).div_ceil(u128::from(rate.per().get()));
    u64::try_from(permits).unwrap_or(u64::MAX)
}

/// Refills are a period apart or more: in an interval of length t there are at most t / period and one, on top of what was there.
fn interval_excess(capacity: u64, refill: u64, period_us: u64, admissions: &mut [(u64, u64)]) -> u64 {
    admissions.sort_unstable_by_key(|(at_us, _)| *at_us);
    let mut worst = 0;
    for first in 0..admissions.len() {
        let (from_us, mut total) = (admissions[first].0, 0_u64);
        for (at_us, cost) in &admissions[first..] {
            total += cost;
            let bound = capacity + refill * ((at_us - from_us) / period_us + 1);
            worst = worst.max(total.saturating_sub(bound));
        }
    }
    worst
}
