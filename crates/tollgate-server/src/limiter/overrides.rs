//! Limits that a proxy names with its request, in place of those of the policy.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tollgate::rules::Selection;
use tollgate::{Ask, Engine, FixedWindow, Limit, LimitSettings, Micros, PolicyLimiter, Rate, TooManyLimits};

use super::Part;
use crate::live::{FixedRule, Loaded};
use crate::metrics::SharedMetrics;

/// Limits that are ready to be asked. Proxies name a handful. A new limit beyond this number replaces all others, whose states stay.
const LIMITS_MAX: usize = 1_024;
/// The rule of all of these limits, in answers and metrics. A policy cannot have a rule of this name: names have no colon.
const RULE: &str = "proxy:override";

/// A limit as a proxy names it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct OverrideTerms {
    /// Permits in a window, at least one.
    pub(crate) permits: u32,
    pub(crate) window: OverrideWindow,
}

/// The length of a window. Windows of different lengths have different states.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum OverrideWindow {
    Second,
    Minute,
    Hour,
    Day,
    Month,
    Year,
}

impl OverrideWindow {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// A month has 30 days, and a year 365.
    const fn length(self) -> Micros {
        const DAY_SECS: u64 = 86_400;
        Micros::from_secs(match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => DAY_SECS,
            Self::Month => 30 * DAY_SECS,
            Self::Year => 365 * DAY_SECS,
        })
    }
}

/// Fixed windows by their terms.
pub(crate) struct Overrides {
    engine: Engine,
    metrics: SharedMetrics,
    /// How the limits are kept in a store.
    settings: LimitSettings,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// None before the first limit.
    rules: Option<Arc<Loaded>>,
    /// The limits in the order of their numbers.
    terms: Vec<OverrideTerms>,
    numbers: HashMap<OverrideTerms, usize>,
}

impl Overrides {
    pub(crate) fn new(engine: &Engine, metrics: SharedMetrics, settings: LimitSettings) -> Self {
        Self { engine: engine.clone(), metrics, settings, known: Mutex::default() }
    }

    /// Selects the limit of these terms for a subject.
    pub(crate) fn select(
        &self,
        terms: OverrideTerms,
        subject: String,
        permits: u64,
    ) -> Result<Part, TooManyLimits> {
        let (policy, number) = self.rule(terms)?;
        Ok(Part { policy, selection: Selection::of_rule(number, number, subject, Ask::of(permits)) })
    }

    /// The rules with the limit of these terms, and its number.
    fn rule(&self, terms: OverrideTerms) -> Result<(Arc<Loaded>, usize), TooManyLimits> {
        let mut known = self.known.lock();
        if let (Some(rules), Some(number)) = (&known.rules, known.numbers.get(&terms)) {
            return Ok((Arc::clone(rules), *number));
        }
        let mut all = if known.terms.len() < LIMITS_MAX { known.terms.clone() } else { Vec::new() };
        all.push(terms);
        let fixed: Vec<_> = all.iter().filter_map(|terms| self.fixed_rule(*terms)).collect();
        let before = known.rules.clone();
        let rules = Arc::new(Loaded::fixed(&self.metrics, &fixed, |policy, settings| match &before {
            Some(before) => before.limiter.followed_by(policy, settings),
            None => PolicyLimiter::new(&self.engine, policy, settings),
        })?);
        let number = all.len() - 1;
        let numbers = all.iter().enumerate().map(|(number, terms)| (*terms, number)).collect();
        *known = Known { rules: Some(Arc::clone(&rules)), terms: all, numbers };
        Ok((rules, number))
    }

    /// The rule of a limit. Limits with the same window share a scope: a proxy that changes the number of permits does not reset its keys.
    fn fixed_rule(&self, OverrideTerms { permits, window }: OverrideTerms) -> Option<FixedRule> {
        // One permit or more in a window of one second or more: this is always a limit.
        let rate = Rate::new(u64::from(permits), window.length()).ok()?;
        let limit = Limit::FixedWindow(FixedWindow::new(rate).ok()?);
        let scope = format!("{}:{RULE}.{}", limit.algorithm().as_lowercase(), window.as_str());
        Some(FixedRule { name: RULE.into(), scope: scope.into(), limit, settings: self.settings })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use tollgate::{Clock, MemoryConfig, MemoryEngine, Timestamp};

    fn overrides() -> Overrides {
        let clock = Clock::manual(Timestamp::from_micros(1_000_000));
        let engine = Engine::Memory(MemoryEngine::new(MemoryConfig::default(), clock));
        Overrides::new(&engine, Arc::new(Metrics::new(&engine)), LimitSettings::default())
    }

    async fn is_admitted(overrides: &Overrides, permits: u32) -> bool {
        let terms = OverrideTerms { permits, window: OverrideWindow::Hour };
        let Part { policy, selection } = overrides.select(terms, "{a}".to_owned(), 1).expect("a limit");
        policy.limiter.decide(selection).await.is_admitted()
    }

    #[tokio::test]
    async fn the_number_of_limits_is_bounded_and_their_states_stay() {
        let overrides = overrides();
        assert!(is_admitted(&overrides, 1).await);
        for permits in 2..=LIMITS_MAX as u32 {
            let terms = OverrideTerms { permits, window: OverrideWindow::Day };
            overrides.rule(terms).expect("a limit");
        }
        assert_eq!(overrides.known.lock().terms.len(), LIMITS_MAX);
        assert!(!is_admitted(&overrides, 1).await);
        assert!(is_admitted(&overrides, 2).await, "one more of a larger limit of the same window");
        assert_eq!(overrides.known.lock().terms.len(), 1, "the limit that was one too many is alone");
        assert!(!is_admitted(&overrides, 2).await);
    }
}
