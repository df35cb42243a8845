//! The limits of the plain API: what is written of them, and what it means.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate::{
    Consistency, FailureMode, FixedWindow, IntervalBucket, LeakyBucket, LeakyMode, Limit, LimitError,
    LimitSettings, OnFailure, Rate, SlidingCounter, SlidingLog, TokenBucket,
};

use super::file::{Api, ConsistencyName, OnStoreFailure};
use super::log_limit;
use super::text::{DurationText, RateText};

/// The limit of each algorithm.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Defaults {
    pub token_bucket: TokenBucketFields,
    pub leaky_bucket: LeakyBucketFields,
    pub fixed_window: WindowFields,
    pub sliding_window: WindowFields,
    pub sliding_window_counter: CounterFields,
}

/// How a limit is kept in a store, as it is written.
pub(super) struct Settings {
    pub(super) consistency: Option<ConsistencyName>,
    pub(super) lease_ceiling: Option<u64>,
    pub(super) failover_guard: bool,
    pub(super) on_store_failure: Option<OnStoreFailure>,
    pub(super) settle_debt: Option<bool>,
    pub(super) deadline: Option<DurationText>,
}

impl Settings {
    pub(super) fn meaning(&self) -> LimitSettings {
        LimitSettings {
            consistency: match self.consistency {
                Some(ConsistencyName::Strict) | None => Consistency::Strict,
                Some(ConsistencyName::Lease) => Consistency::Lease,
                Some(ConsistencyName::LeaseFast) => Consistency::LeaseFast,
            },
            lease_ceiling: self.lease_ceiling,
            failover_guard: self.failover_guard,
            on_failure: OnFailure {
                mode: match self.on_store_failure {
                    Some(OnStoreFailure::Open) | None => FailureMode::Open,
                    Some(OnStoreFailure::Closed) => FailureMode::Closed,
                    Some(OnStoreFailure::Local) => FailureMode::Local,
                },
                settle: self.settle_debt.unwrap_or(false),
                deadline: self.deadline.map(|deadline| deadline.0),
            },
            max_new_subjects: None,
        }
    }
}

/// The fields of a limit with their defaults: its own, and those that every limit has. (Fields that are flattened in would not be
/// checked for misspelt ones.)
macro_rules! limit_fields {
    ($(#[$about:meta])* $name:ident { $($(#[$note:meta])* $field:ident: $type:ty = $default:expr;)* }) => {
        $(#[$about])*
        #[derive(Deserialize, Serialize, JsonSchema, Debug)]
        #[serde(default, deny_unknown_fields)]
        pub(super) struct $name {
            $($(#[$note])* pub $field: $type,)*
            /// Whether nodes that share a store borrow from this limit; as `api.consistency` by default.
            pub consistency: Option<ConsistencyName>,
            /// The most permits that one node borrows of one key; all of them by default.
            pub lease_ceiling: Option<u64>,
            /// Whether keys count as used up when a server of the store takes over from another, until everything that may have
            /// been lost with the other one has come back. Right for bursts, wrong for a quota of a day.
            pub failover_guard: bool,
            /// What happens if the store does not decide; as `api.on_store_failure` by default.
            pub on_store_failure: Option<OnStoreFailure>,
            /// As `api.settle_debt` by default.
            pub settle_debt: Option<bool>,
            /// For one check, in place of `redis.deadline`.
            pub deadline: Option<DurationText>,
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    $($field: $default,)*
                    consistency: None,
                    lease_ceiling: None,
                    failover_guard: false,
                    on_store_failure: None,
                    settle_debt: None,
                    deadline: None,
                }
            }
        }

        impl $name {
            /// What it says of itself, or what the API says for all.
            fn settings(&self, api: &Api) -> LimitSettings {
                Settings {
                    consistency: self.consistency.or(Some(api.consistency)),
                    lease_ceiling: self.lease_ceiling,
                    failover_guard: self.failover_guard,
                    on_store_failure: self.on_store_failure.or(Some(api.on_store_failure)),
                    settle_debt: self.settle_debt.or(Some(api.settle_debt)),
                    deadline: self.deadline,
                }
                .meaning()
            }
        }
    };
}

limit_fields! {
    /// TOKEN_BUCKET: bursts up to the capacity, the refill rate in the long run.
    TokenBucketFields {
        capacity: u64 = 100;
        refill_rate: RateText = RateText(Rate::per_second(10));
        refill: Refill = Refill::Greedy;
    }
}

/// How tokens come back.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, PartialEq, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum Refill {
    /// Evenly.
    Greedy,
    /// All of a period at its end.
    Interval,
}

limit_fields! {
    /// LEAKY_BUCKET: water that drains evenly.
    LeakyBucketFields {
        size: u64 = 100;
        outflow: RateText = RateText(Rate::per_second(10));
    }
}

limit_fields! {
    /// FIXED_WINDOW and SLIDING_WINDOW: so many per window.
    WindowFields {
        limit: RateText = RateText(Rate::per_minute(100));
        /// Whether denied requests count too, up to the limit.
        count_denied: bool = false;
    }
}

limit_fields! {
    /// SLIDING_WINDOW_COUNTER: counts instead of a log.
    CounterFields {
        limit: RateText = RateText(Rate::per_minute(100));
        /// Into how many parts the window is cut: 1 by default, 10 if `strict`.
        sub_buckets: Option<u32> = None;
        /// Never more than the limit in any trailing window, at the price of denying a little too long.
        strict: bool = false;
        /// Whether denied requests count too, up to the limit.
        count_denied: bool = false;
    }
}

pub(super) fn validate(
    api: &Api,
    log_limit_max: u64,
    report: &mut dyn FnMut(&str, String),
) -> Vec<(Limit, LimitSettings)> {
    let Defaults {
        token_bucket: bucket,
        leaky_bucket: leaky,
        fixed_window: window,
        sliding_window: log,
        sliding_window_counter: counter,
    } = &api.defaults;
    let sub_buckets = counter.sub_buckets.unwrap_or(if counter.strict { 10 } else { 1 });
    if log.failover_guard {
        report(
            "api.defaults.sliding_window.failover_guard",
            "a log has none; SLIDING_WINDOW_COUNTER does".to_owned(),
        );
    }
    let token_bucket = match bucket.refill {
        Refill::Greedy => TokenBucket::new(bucket.capacity, bucket.refill_rate.0).map(Limit::TokenBucket),
        Refill::Interval => {
            IntervalBucket::new(bucket.capacity, bucket.refill_rate.0).map(Limit::IntervalBucket)
        }
    };
    let made: [(&str, Result<Limit, LimitError>, LimitSettings); 5] = [
        ("api.defaults.token_bucket", token_bucket, bucket.settings(api)),
        (
            "api.defaults.leaky_bucket",
            LeakyBucket::new(leaky.size, leaky.outflow.0, LeakyMode::Meter).map(Limit::LeakyBucket),
            leaky.settings(api),
        ),
        (
            "api.defaults.fixed_window",
            FixedWindow::new(window.limit.0)
                .map(|it| Limit::FixedWindow(it.counting_denied(window.count_denied))),
            window.settings(api),
        ),
        (
            "api.defaults.sliding_window",
            SlidingLog::new(log.limit.0).map(|it| Limit::SlidingLog(it.counting_denied(log.count_denied))),
            log.settings(api),
        ),
        (
            "api.defaults.sliding_window_counter",
            SlidingCounter::new(counter.limit.0, sub_buckets, counter.strict)
                .map(|it| Limit::SlidingCounter(it.counting_denied(counter.count_denied))),
            counter.settings(api),
        ),
    ];
    let mut limits = Vec::with_capacity(made.len());
    for (field, limit, settings) in made {
        if settings.on_failure.deadline.is_some_and(|deadline| deadline < Duration::from_millis(1)) {
            report(&format!("{field}.deadline"), "at least 1ms".to_owned());
        }
        if settings.lease_ceiling == Some(0) {
            report(
                &format!("{field}.lease_ceiling"),
                "at least 1; `consistency: strict` borrows none".to_owned(),
            );
        }
        match limit {
            Ok(limit) => {
                if let Some(why) = log_limit::refusal(&limit, log_limit_max) {
                    report(&format!("{field}.limit"), why);
                }
                limits.push((limit, settings));
            }
            Err(why) => report(field, why.to_string()),
        }
    }
    limits
}

/// What nodes borrow of a limit, in a sentence.
pub(super) fn explain((limit, settings): &(Limit, LimitSettings)) -> Option<String> {
    if settings.consistency == Consistency::Strict {
        return None;
    }
    let name = limit.algorithm().as_lowercase();
    let asked = settings.consistency.as_str();
    let terms = match settings.lease_terms(limit) {
        Ok(terms) => terms,
        Err(why) => return Some(format!("{name}: stays strict, not {asked}: {why}")),
    };
    let nodes = terms.nodes_max();
    let life = terms.life().get() / 1_000;
    let over = match terms.overshoot(limit, nodes) {
        0 => "never more than the limit".to_owned(),
        permits => format!("a burst can be larger by {permits} permits, the rate never"),
    };
    Some(format!(
        "{name}: {asked}, for about {life} ms at a time, among at most {nodes} nodes (with more it is strict); {over}"
    ))
}
