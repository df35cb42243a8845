//! The policy, field for field, as it is written.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use super::text::{
    AlgorithmText, AnchorText, FactorText, LimitItem, LimitText, Many, MethodName, NewSubjectsText,
    PercentText, QuotaText,
};
use crate::config::file::{ConsistencyName, OnStoreFailure};
use crate::config::limits::{Refill, Settings};
use crate::config::text::{DurationText, NetworkText};

/// Which limits a request is checked against, and whose they are.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
#[schemars(title = "Tollgate policy")]
pub(in crate::config) struct PolicyFile {
    /// Whether all rules apply that a request matches, or only the first.
    pub apply: Apply,
    /// In order. Every one applies that a request matches, up to one with `stop: true`.
    #[serde(serialize_with = "one_by_one")]
    pub rules: Vec<RuleFields>,
    /// Requests that no rule is for.
    pub exclude: Vec<Exclusion>,
    /// For requests that no rule applies to: a limit by address such as 200/min, or `unlimited`. Without it they are admitted and
    /// counted as unmatched.
    pub default: Option<Many<LimitItem>>,
    /// Tiers of users, each with its limits, or `unlimited`. Several families of tiers are written under `families`.
    pub tiers: BTreeMap<String, Many<LimitItem>>,
    /// The tier of callers that have none, or an unknown one; the smallest tier if not set.
    pub default_tier: Option<String>,
    /// Users whose tier is settled here.
    pub members: BTreeMap<String, String>,
    /// Families of tiers: of users, of API keys.
    pub families: BTreeMap<String, FamilyFields>,
    /// Names for requests: for factors, metrics and reports.
    pub endpoints: BTreeMap<String, MatchFields>,
    /// Whether paths that differ in the case of ASCII letters are different; true if not set.
    pub case_sensitive: Option<bool>,
    /// For every rule that does not say it itself. If not set: TOKEN_BUCKET for limits with `burst` or `refill`,
    /// SLIDING_WINDOW_COUNTER for all others.
    pub algorithm: Option<AlgorithmText>,
    /// For every rule that does not say it itself: open, closed or local; as `api.on_store_failure` if not set.
    pub on_store_failure: Option<OnStoreFailure>,
    /// For every rule that does not say it itself: strict, lease or lease_fast; as `api.consistency` if not set.
    pub consistency: Option<ConsistencyName>,
    /// For every rule that does not say it itself; as `api.settle_debt` if not set.
    pub settle_debt: Option<bool>,
    /// For every rule that does not say it itself.
    pub max_new_subjects: Option<NewSubjectsText>,
}

impl PolicyFile {
    /// The settings for every rule that does not have its own.
    pub(super) fn settings(&self) -> Settings {
        Settings {
            consistency: self.consistency,
            on_store_failure: self.on_store_failure,
            settle_debt: self.settle_debt,
            max_new_subjects: self.max_new_subjects,
            ..Settings::default()
        }
    }
}

/// Serializes rules without the fields that say nothing, one rule at a time: all fields of thousands of rules would take tens of
/// megabytes.
fn one_by_one<S: Serializer>(rules: &[RuleFields], serializer: S) -> Result<S::Ok, S::Error> {
    let value = |rule| serde_json::to_value(rule).map(super::without_nothing).unwrap_or_default();
    serializer.collect_seq(rules.iter().map(value))
}

/// Which of the rules apply that a request matches.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(in crate::config) enum Apply {
    /// All of them, together.
    #[default]
    All,
    /// The first one.
    First,
}

/// For which requests, counted by what, with which limits.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(in crate::config) struct RuleFields {
    /// In keys, answers and metrics: letters, digits, - and _.
    pub name: String,
    /// Which requests it is for; all of them if not set.
    pub r#match: MatchFields,
    /// What it counts by: ip, user, api_key, host, header:NAME, query:NAME, path:NAME (a parameter of the path), attribute:NAME,
    /// identity (user, else API key, else address) or global. Of a list the first that the request has; user+ip are both together.
    /// An API key that is not verified counts by its address.
    pub key: Many<String>,
    /// One limit or several, all of which hold: 100/min, 50/s burst 100, or with fields.
    pub limit: Many<LimitItem>,
    /// Whether it lets everything through.
    pub unlimited: bool,
    /// `from_request`: the limits are those of the request's tier.
    pub tier: Option<TierSource>,
    /// Whose tiers these are, if there are several families.
    pub family: Option<String>,
    /// Further limits of their own for endpoints, as a part of the tier's: { ai-generate: 1/10 }.
    pub factor: BTreeMap<String, FactorText>,
    /// Permits that a request takes, for each that it asks for.
    pub cost: Option<u64>,
    /// A delay up to this long instead of a denial.
    pub max_wait: Option<DurationText>,
    /// Whether the rules after it are left out where it applies.
    pub stop: bool,
    /// Names of rules that do not apply where this one does.
    pub replaces: Many<String>,
    /// The status (400 to 499) of the refusal if the request has none of the keys; without it the rule is left out then.
    pub deny_empty_key: Option<u16>,
    /// `shadow`: counted, never enforced.
    pub mode: Mode,
    /// For how many of its keys it is enforced: 10%. For the others it is counted only.
    pub enforce: Option<PercentText>,
    /// A limit to be tried out beside the first one: it is counted and never enforced.
    pub candidate: Option<LimitItem>,
    /// In refusals, in place of IP_LIMIT, USER_LIMIT, APIKEY_LIMIT and the like.
    pub code: Option<String>,
    /// Of its limits that do not say it themselves.
    pub algorithm: Option<AlgorithmText>,
    /// What happens if the store does not decide.
    pub on_store_failure: Option<OnStoreFailure>,
    /// Whether what `local` has admitted is taken from the store's state afterwards.
    pub settle_debt: Option<bool>,
    /// For one check, in place of `redis.deadline`.
    pub deadline: Option<DurationText>,
    /// Whether nodes that share a store borrow from its limits.
    pub consistency: Option<ConsistencyName>,
    /// The most permits that one node borrows of one key.
    pub lease_ceiling: Option<u64>,
    /// Whether keys count as used up when a server of the store takes over from another.
    pub failover_guard: bool,
    /// How many subjects in a second may be new to a node before further new ones share one bucket: 1000/s. No bound if not set.
    pub max_new_subjects: Option<NewSubjectsText>,
}

impl RuleFields {
    pub(super) fn settings(&self) -> Settings {
        Settings {
            consistency: self.consistency,
            lease_ceiling: self.lease_ceiling,
            failover_guard: self.failover_guard,
            on_store_failure: self.on_store_failure,
            settle_debt: self.settle_debt,
            deadline: self.deadline,
            max_new_subjects: self.max_new_subjects,
        }
    }
}

/// Where a tier comes from.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, Debug)]
#[serde(rename_all = "snake_case")]
pub(in crate::config) enum TierSource {
    /// From the request: assigned, claimed by a verified token or a trusted header, or listed under `members`.
    FromRequest,
}

/// Whether a rule decides.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(in crate::config) enum Mode {
    /// It does.
    #[default]
    Enforce,
    /// It is counted only.
    Shadow,
}

/// Conditions: all must hold, and of each list one entry.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(in crate::config) struct MatchFields {
    /// /api/login, /api/*/items, /users/{id}, /static/**
    pub path: Many<String>,
    /// GET, POST
    #[schemars(with = "Many<MethodName>")]
    pub method: Many<String>,
    /// api.example.com, *.example.com
    pub host: Many<String>,
    /// Headers by name; * for any value, !VALUE for any other, or none.
    pub header: BTreeMap<String, Many<String>>,
    /// Parameters of the query by name; * for any value, !VALUE for any other, or none.
    pub query: BTreeMap<String, Many<String>>,
    /// Attributes by name; * for any value, !VALUE for any other, or none.
    pub attribute: BTreeMap<String, Many<String>>,
    /// The names of all attributes that the request has, in this order. A request with further attributes does not match.
    pub attribute_names: Option<Vec<String>>,
    /// Networks of the client: 10.0.0.0/8
    pub cidr: Many<NetworkText>,
    /// Tiers of the request.
    pub tier: Many<String>,
    /// How the request is identified: user, api_key or anonymous. Tokens and API keys count only if they are verified.
    pub identity: Many<IdentityName>,
}

/// How a request is identified.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
pub(in crate::config) enum IdentityName {
    /// By a verified user.
    User,
    /// By a verified API key.
    ApiKey,
    /// Neither by a user nor by an API key.
    Anonymous,
}

/// A path, or conditions.
#[derive(Serialize, JsonSchema, Debug)]
#[serde(untagged)]
pub(in crate::config) enum Exclusion {
    /// A path.
    Path(String),
    /// Conditions.
    Match(Box<MatchFields>),
}

/// A family of tiers.
#[derive(Deserialize, Serialize, JsonSchema, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(in crate::config) struct FamilyFields {
    /// Each with its limits, or `unlimited`.
    pub tiers: BTreeMap<String, Many<LimitItem>>,
    /// The tier of callers that have none, or an unknown one; the smallest tier if not set.
    pub default: Option<String>,
    /// Whose tiers they are.
    pub of: FamilyOf,
    /// Those whose tier is settled here. An API key is written as it is, or as `id:` and the identifier that answers show.
    pub members: BTreeMap<String, String>,
}

/// Whose tiers they are.
#[derive(Deserialize, Serialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(in crate::config) enum FamilyOf {
    /// Users.
    #[default]
    User,
    /// API keys.
    ApiKey,
}

/// A limit with its fields.
#[derive(Deserialize, Serialize, JsonSchema, Clone, PartialEq, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(in crate::config) struct LimitFields {
    /// 100/min, 50/s burst 100
    pub limit: Option<LimitText>,
    /// In place of `limit`: so many for each day, week or month of the calendar: 10000/month
    pub quota: Option<QuotaText>,
    /// Of a quota: whose calendar, as an IANA name such as Asia/Seoul; UTC if not set.
    pub zone: Option<String>,
    /// Of a quota: the day on which it begins: a weekday (monday if not set), or a day of the month (1 if not set; in shorter months
    /// their last).
    pub anchor: Option<AnchorText>,
    /// The most permits at once, of TOKEN_BUCKET and LEAKY_BUCKET; those of one period if not set.
    pub burst: Option<u64>,
    /// TOKEN_BUCKET, LEAKY_BUCKET, FIXED_WINDOW, SLIDING_WINDOW, SLIDING_WINDOW_COUNTER. If not set: TOKEN_BUCKET with `burst` or
    /// `refill`, else SLIDING_WINDOW_COUNTER.
    pub algorithm: Option<AlgorithmText>,
    /// Of TOKEN_BUCKET: greedy, or interval: all of a period at its end.
    pub refill: Option<Refill>,
    /// Of SLIDING_WINDOW_COUNTER: into how many parts the window is cut.
    pub sub_buckets: Option<u32>,
    /// Of SLIDING_WINDOW_COUNTER: never more than the limit in any trailing window.
    pub strict: bool,
    /// Of the three windows: whether denied requests count too, up to the limit.
    pub count_denied: bool,
    /// Of LEAKY_BUCKET: whether requests are spaced evenly, each waiting for its turn.
    pub queue: bool,
}

impl LimitFields {
    /// The limit by itself, if nothing else is said of it.
    pub(super) fn in_a_word(&self) -> Option<LimitText> {
        let bare = Self { limit: self.limit, ..Self::default() };
        self.limit.filter(|_| *self == bare)
    }
}
