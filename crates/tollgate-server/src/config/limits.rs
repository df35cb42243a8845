//! The limits of the plain API, and how limits are kept in a store.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate::{AlgorithmName, Consistency, FailureMode, Limit, LimitSettings, OnFailure, Rate};

use super::file::{Api, ConsistencyName, OnStoreFailure};
use super::log_limit;
use super::policy::{LimitFields, NewSubjectsText, RateAndBurst, make_limit};
use super::text::{DurationText, RateText, Text};

/// The limit of each algorithm.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Defaults {
    /// Bursts up to the capacity, and the refill rate in the long run.
    pub token_bucket: TokenBucketFields,
    /// Water that drains evenly.
    pub leaky_bucket: LeakyBucketFields,
    /// A number of permits for each window of the clock.
    pub fixed_window: WindowFields,
    /// A number of permits in any window, by a log of all admissions.
    pub sliding_window: WindowFields,
    /// A number of permits in any window, estimated by counts.
    pub sliding_window_counter: CounterFields,
}

/// How a limit is kept in a store, as it is written. A rule's own settings win over those of the policy, and these over those of `api`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Settings {
    pub(super) consistency: Option<ConsistencyName>,
    pub(super) lease_ceiling: Option<u64>,
    pub(super) failover_guard: bool,
    pub(super) on_store_failure: Option<OnStoreFailure>,
    pub(super) settle_debt: Option<bool>,
    pub(super) deadline: Option<DurationText>,
    pub(super) max_new_subjects: Option<NewSubjectsText>,
}

impl Settings {
    /// Takes what is not set here from `other`.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            consistency: self.consistency.or(other.consistency),
            on_store_failure: self.on_store_failure.or(other.on_store_failure),
            settle_debt: self.settle_debt.or(other.settle_debt),
            max_new_subjects: self.max_new_subjects.or(other.max_new_subjects),
            ..self
        }
    }

    /// Returns the settings in the library's terms.
    pub(super) fn validate(&self, at: &str, report: &mut dyn FnMut(&str, String)) -> LimitSettings {
        if self.deadline.is_some_and(|deadline| deadline.0 < Duration::from_millis(1)) {
            report(&format!("{at}.deadline"), "at least 1ms".to_owned());
        }
        if self.lease_ceiling == Some(0) {
            let why = "at least 1; `consistency: strict` borrows none";
            report(&format!("{at}.lease_ceiling"), why.to_owned());
        }
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
            max_new_subjects: self.max_new_subjects.map(|it| it.0),
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
            fn settings(&self) -> Settings {
                Settings {
                    consistency: self.consistency,
                    lease_ceiling: self.lease_ceiling,
                    failover_guard: self.failover_guard,
                    on_store_failure: self.on_store_failure,
                    settle_debt: self.settle_debt,
                    deadline: self.deadline,
                    max_new_subjects: None,
                }
            }
        }
    };
}

limit_fields! {
    /// TOKEN_BUCKET: bursts up to the capacity, the refill rate in the long run.
    TokenBucketFields {
        /// The most permits at once.
        capacity: u64 = 100;
        /// Permits that come back.
        refill_rate: RateText = Text(Rate::per_second(10));
        /// How permits come back.
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
        /// The most permits at once.
        size: u64 = 100;
        /// Permits that drain.
        outflow: RateText = Text(Rate::per_second(10));
    }
}

limit_fields! {
    /// FIXED_WINDOW and SLIDING_WINDOW: so many per window.
    WindowFields {
        /// Permits in a window.
        limit: RateText = Text(Rate::per_minute(100));
        /// Whether denied requests count too, up to the limit.
        count_denied: bool = false;
    }
}

limit_fields! {
    /// SLIDING_WINDOW_COUNTER: counts instead of a log.
    CounterFields {
        /// Permits in a window.
        limit: RateText = Text(Rate::per_minute(100));
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
    let Defaults { token_bucket, leaky_bucket, fixed_window, sliding_window, sliding_window_counter } =
        &api.defaults;
    let fields = |algorithm, rate: RateText| LimitFields {
        limit: Some(Text(RateAndBurst { rate: rate.0, burst: None })),
        algorithm: Some(Text(algorithm)),
        ..LimitFields::default()
    };
    let window = |algorithm, it: &WindowFields| LimitFields {
        count_denied: it.count_denied,
        ..fields(algorithm, it.limit)
    };
    let written = [
        (
            LimitFields {
                burst: Some(token_bucket.capacity),
                refill: Some(token_bucket.refill),
                ..fields(AlgorithmName::TokenBucket, token_bucket.refill_rate)
            },
            token_bucket.settings(),
        ),
        (
            LimitFields {
                burst: Some(leaky_bucket.size),
                ..fields(AlgorithmName::LeakyBucket, leaky_bucket.outflow)
            },
            leaky_bucket.settings(),
        ),
        (window(AlgorithmName::FixedWindow, fixed_window), fixed_window.settings()),
        (window(AlgorithmName::SlidingWindow, sliding_window), sliding_window.settings()),
        (
            LimitFields {
                sub_buckets: sliding_window_counter.sub_buckets,
                strict: sliding_window_counter.strict,
                count_denied: sliding_window_counter.count_denied,
                ..fields(AlgorithmName::SlidingWindowCounter, sliding_window_counter.limit)
            },
            sliding_window_counter.settings(),
        ),
    ];
    let mut limits = Vec::with_capacity(written.len());
    for (fields, settings) in written {
        let name = fields.algorithm.map_or("", |it| it.0.as_lowercase());
        let field = format!("api.defaults.{name}");
        let settings = settings.or(api.settings()).validate(&field, report);
        match make_limit(&fields, None) {
            Ok(limit) => {
                if let Some(why) = log_limit::refusal(&limit, log_limit_max) {
                    report(&format!("{field}.limit"), why);
                }
                if let Some(why) = log_limit::guard_refusal(&limit, &settings) {
                    report(&format!("{field}.failover_guard"), why);
                }
                limits.push((limit, settings));
            }
            Err(why) => report(&field, why),
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
