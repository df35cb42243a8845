//! How much a limit may admit at most, by the theory and for the trouble of a seed.

use tollgate_core::{Algorithm, Ask, Consistency, Limit, Rate, Timestamp};

use super::Invariant;
use super::scenario::{LimitPlan, Scenario, Trouble, Version};
use crate::Bound;

/// What one state may admit.
pub(super) struct Bounds {
    pub(super) limit: Limit,
    pub(super) rate: Rate,
    next: Option<(Limit, Rate)>,
    /// The life of a lease, or zero.
    pub(super) life_us: u64,
    /// What faults may add.
    pub(super) allowed: u64,
    /// By how much nodes may be too generous together.
    pub(super) overshoot: u64,
    /// What is violated by more than that.
    pub(super) invariant: Invariant,
    /// Whether remaining permits plus lent permits must never exceed the limit.
    pub(super) room: bool,
    has_steps: bool,
    /// Whether admissions can be replayed: the store's clock and its states are what they seem.
    replays: bool,
}

impl Bounds {
    pub(super) fn new(scenario: &Scenario, plan: &LimitPlan) -> Self {
        let Version { added, rate, terms } = &plan.now;
        let invariant = match (scenario.trouble, added.settings.consistency) {
            (Trouble::StepsBack | Trouble::Steps, _) => Invariant::ClockSteps,
            (Trouble::Failover | Trouble::Guarded, _) => Invariant::Failover,
            (Trouble::Change, _) => Invariant::LimitChange,
            (Trouble::Network, _) => Invariant::Network,
            (_, Consistency::Strict) => Invariant::Strict,
            (_, Consistency::Lease) => Invariant::Lease,
            (_, Consistency::LeaseFast) => Invariant::LeaseFast,
        };
        let overshoot = |version: &Version| {
            // A node that borrows any number does not keep to the ceiling, by which the overshoot may be smaller.
            let ceiling = if scenario.adversarial { u64::MAX } else { 0 };
            version.terms.map_or(0, |terms| {
                let terms = terms.with_ceiling(terms.ceiling().max(ceiling));
                terms.overshoot(version.limit(), scenario.nodes as u64)
            })
        };
        let unsure = matches!(scenario.trouble, Trouble::Steps | Trouble::Failover | Trouble::Change);
        let life_us = plan.next.as_ref().map_or(0, Version::life_us).max(plan.now.life_us());
        Self {
            limit: added.limit,
            rate: *rate,
            next: plan.next.as_ref().map(|next| (*next.limit(), next.rate)),
            life_us,
            allowed: 0,
            overshoot: plan.next.as_ref().map_or(0, overshoot).max(overshoot(&plan.now)),
            invariant,
            room: !unsure && terms.is_some_and(|terms| terms.counts_out()),
            has_steps: scenario.has_steps(),
            replays: !scenario.has_steps() && scenario.trouble != Trouble::Failover,
        }
    }

    /// A return was executed after the end of its lease. A store whose clock was set back cannot tell, and takes it all the same.
    pub(super) fn allow_late_return(&mut self, permits: u64) {
        if self.has_steps {
            self.allowed += permits;
            self.room = false;
        }
    }

    /// Permits beyond the limit in the worst interval. None: the theory says nothing of it.
    pub(super) fn excess(
        &self,
        admissions: &mut [(u64, u64)],
        on_store: impl Fn(u64) -> Timestamp,
    ) -> Option<u64> {
        match self.limit {
            Limit::TokenBucket(_) | Limit::LeakyBucket(_) => Some(self.bound().excess(admissions).permits),
            _ if !self.replays => None,
            Limit::IntervalBucket(it) => {
                Some(interval_excess(it.size(), it.refill(), it.period(), admissions))
            }
            Limit::FixedWindow(_)
            | Limit::SlidingCounter(_)
            | Limit::SlidingLog(_)
            | Limit::CalendarQuota(_) => Some(self.refused_in_replay(admissions, on_store)),
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

    /// The permits that the plain algorithm would deny if every request came when it was admitted.
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
pub(super) fn flow(rate: Rate, us: u64) -> u64 {
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
