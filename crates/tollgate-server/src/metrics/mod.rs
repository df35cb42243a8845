//! Metrics of the service. No key is ever a label.

mod classic;
mod engine;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};
use tollgate::rules::{Policy, Role};
use tollgate::{AlgorithmName, Basis, Engine, PolicyVerdict, SHARED_SUBJECT, Verdict};

pub(crate) use self::classic::without_openmetrics;
use self::engine::EngineCollector;
use crate::access::Refused;
use crate::identity::Unverified;

/// Upper bounds in seconds: from a decision in memory to a wait that no client accepts.
const SECONDS: [f64; 12] = [1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 1e-4, 2.5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.25];

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct RuleLabels {
    rule: String,
    /// enforced, shadow or candidate.
    role: &'static str,
    allowed: &'static str,
}

/// Roles of a limit, in the order of [`RuleAnswers`].
const ROLES: [&str; 3] = ["enforced", "shadow", "candidate"];
/// Denied and allowed, in the order of [`RuleAnswers`].
const ALLOWED: [&str; 2] = ["false", "true"];

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct SkippedLabels {
    rule: String,
}

/// The counters of one rule, looked up once.
pub(crate) struct RuleAnswers {
    /// By role, then denied or allowed.
    checks: [[Counter; 2]; 3],
    skipped: Counter,
}

impl RuleAnswers {
    /// Counts the answer of one limit.
    pub(crate) fn count(&self, role: Role, is_candidate: bool, allowed: bool) {
        let role = match role {
            Role::Enforced => 0,
            Role::Shadow if is_candidate => 2,
            Role::Shadow => 1,
        };
        self.checks[role][usize::from(allowed)].inc();
    }

    /// Counts a request that has none of the rule's keys.
    pub(crate) fn count_skipped(&self) {
        self.skipped.inc();
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct RequestLabels {
    allowed: &'static str,
    basis: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct ReadLabels {
    result: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct VersionLabels {
    version: String,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct CheckLabels {
    algorithm: &'static str,
    allowed: &'static str,
    basis: &'static str,
}

/// The counters of one kind of answer, looked up once.
struct Answers {
    requests: Counter,
    seconds: Histogram,
}

/// All metrics of a process.
pub(crate) struct Metrics {
    registry: Registry,
    /// By algorithm, then by basis, then denied or allowed.
    answers: Vec<[[Answers; 2]; Basis::ALL.len()]>,
    /// By rule.
    rules: Family<RuleLabels, Counter>,
    /// By rule.
    skipped: Family<SkippedLabels, Counter>,
    unmatched: Counter,
    uncounted: Counter,
    /// The rules that have counters.
    rule_names: Mutex<HashSet<String>>,
    /// By basis, then denied or allowed.
    requests: Vec<[Counter; 2]>,
    unknown_tiers: Counter,
    shared_subjects: Counter,
    /// By [`Unverified`].
    unverified: Vec<Counter>,
    policy: Family<VersionLabels, Gauge>,
    policy_since: Gauge,
    /// Refused, or put in force.
    policy_reads: [Counter; 2],
    /// Connections that are open.
    pub(crate) connections: Gauge,
    /// Connections that were closed at once because their address had too many.
    pub(crate) connections_refused: Counter,
    /// Idle connections that were closed for others.
    pub(crate) connections_evicted: Counter,
    /// Memory that bodies of requests take.
    pub(crate) body_bytes: Gauge,
    /// By [`Refused`].
    refused: Vec<Counter>,
}

impl Metrics {
    /// Metrics of this process and its engine.
    pub(crate) fn new(engine: &Engine) -> Self {
        let mut registry =
            Registry::with_labels([("application".into(), "distributed-rate-limiter".into())].into_iter());
        let it = &mut registry;
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        it.register("tollgate_build", "The version that runs", version);
        it.register_collector(Box::new(EngineCollector(engine.clone())));
        Self {
            answers: answers(it),
            requests: requests(it),
            rules: added(it, "tollgate_rule_checks", "Limits that were checked, by rule, role and answer"),
            skipped: added(
                it,
                "tollgate_rule_skipped",
                "Requests that matched a rule and were not checked by it, because they have none of its keys",
            ),
            rule_names: Mutex::default(),
            unmatched: added(
                it,
                "tollgate_policy_unmatched",
                "Requests admitted without a check because no rule of the policy applied, and no default",
            ),
            uncounted: added(
                it,
                "tollgate_policy_checks_left_out",
                "Checks in shadow and of candidates left out: too many limits applied, or too many checks waited",
            ),
            unknown_tiers: added(
                it,
                "tollgate_unknown_tiers",
                "Requests with a tier that the policy does not know",
            ),
            shared_subjects: added(
                it,
                "tollgate_shared_subjects",
                "Requests counted in a shared bucket: more subjects were new in the second than max_new_subjects",
            ),
            unverified: by_reason(
                it,
                "tollgate_tokens_unverified",
                "Tokens that were not accepted, by reason",
                Unverified::ALL.iter().map(|why| why.as_str()),
            ),
            policy: added(it, "tollgate_policy", "The policy in force, by version"),
            policy_since: added(
                it,
                "tollgate_policy_since_seconds",
                "When the policy came into force, in epoch seconds",
            ),
            policy_reads: policy_reads(it),
            connections: added(it, "tollgate_connections", "Open connections"),
            connections_refused: added(
                it,
                "tollgate_connections_refused",
                "Connections closed at once because their address had too many",
            ),
            connections_evicted: added(
                it,
                "tollgate_connections_evicted",
                "Idle connections closed to make room for others",
            ),
            body_bytes: added(it, "tollgate_body_bytes", "Memory that bodies of requests take"),
            refused: by_reason(
                it,
                "tollgate_requests_refused",
                "Requests refused for their token, origin or body, by reason",
                Refused::ALL.iter().map(|why| why.as_str()),
            ),
            registry,
        }
    }

    /// The counters of a rule of a policy, which are dropped when no policy in force has the rule.
    pub(crate) fn of_rule(&self, rule: &str) -> RuleAnswers {
        self.rule_names.lock().insert(rule.to_owned());
        self.rule_answers(rule)
    }

    /// The counters of a rule.
    pub(crate) fn rule_answers(&self, rule: &str) -> RuleAnswers {
        let checks = ROLES.map(|role| {
            ALLOWED.map(|allowed| {
                self.rules.get_or_create(&RuleLabels { rule: rule.to_owned(), role, allowed }).clone()
            })
        });
        let skipped = self.skipped.get_or_create(&SkippedLabels { rule: rule.to_owned() }).clone();
        RuleAnswers { checks, skipped }
    }

    /// Drops the counters of all other rules: they belong to policies that are no longer in force.
    pub(crate) fn keep_rules<'r>(&self, rules: impl Iterator<Item = &'r str>) {
        let kept: HashSet<&str> = rules.collect();
        let mut names = self.rule_names.lock();
        for gone in names.extract_if(|name| !kept.contains(name.as_str())) {
            for role in ROLES {
                for allowed in ALLOWED {
                    self.rules.remove(&RuleLabels { rule: gone.clone(), role, allowed });
                }
            }
            self.skipped.remove(&SkippedLabels { rule: gone });
        }
    }

    /// Counts a request, and each of its limits that was decided.
    pub(crate) fn decided(&self, policy: &Policy, verdict: &PolicyVerdict, took: Duration) {
        let took = took.as_secs_f64();
        self.requests[verdict.basis() as usize][usize::from(verdict.is_admitted())].inc();
        for (_, check, decided) in verdict.known() {
            self.checked(policy.limits()[check.limit].limit.algorithm(), decided, took);
        }
        if verdict.selection.unknown_tier {
            self.unknown_tiers.inc();
        }
        if verdict.selection.unmatched {
            self.unmatched.inc();
        }
        self.uncounted.inc_by(verdict.selection.uncounted as u64);
        if verdict.selection.subjects.iter().any(|subject| subject == SHARED_SUBJECT) {
            self.shared_subjects.inc();
        }
    }

    /// Counts a request with one limit, which belongs to no rule.
    pub(crate) fn decided_alone(&self, algorithm: AlgorithmName, verdict: &Verdict, took: Duration) {
        self.requests[verdict.basis as usize][usize::from(verdict.is_admitted())].inc();
        self.checked(algorithm, verdict, took.as_secs_f64());
    }

    /// Counts one limit that was decided.
    fn checked(&self, algorithm: AlgorithmName, verdict: &Verdict, took_secs: f64) {
        let by_basis = &self.answers[algorithm as usize][verdict.basis as usize];
        let answers = &by_basis[usize::from(verdict.is_admitted())];
        answers.requests.inc();
        answers.seconds.observe(took_secs);
    }

    /// Counts a token that was not accepted.
    pub(crate) fn unverified(&self, why: Unverified) {
        let number = Unverified::ALL.iter().position(|known| *known == why);
        if let Some(counter) = number.and_then(|number| self.unverified.get(number)) {
            counter.inc();
        }
    }

    /// Counts a request that was refused.
    pub(crate) fn refused(&self, why: Refused) {
        self.refused[why as usize].inc();
    }

    /// Counts a policy that was to come into force.
    pub(crate) fn policy_read(&self, is_in_force: bool) {
        self.policy_reads[usize::from(is_in_force)].inc();
    }

    /// Another policy is in force.
    pub(crate) fn policy_in_force(&self, version: &str) {
        self.policy.clear();
        self.policy.get_or_create(&VersionLabels { version: version.to_owned() }).set(1);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.policy_since.set(i64::try_from(since.as_secs()).unwrap_or(i64::MAX));
    }

    /// The OpenMetrics text.
    pub(crate) fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// A metric, added to the registry.
fn added<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// Counters by reason, in the order of the reasons.
fn by_reason(
    registry: &mut Registry,
    name: &str,
    help: &str,
    reasons: impl Iterator<Item = &'static str>,
) -> Vec<Counter> {
    let family: Family<ReasonLabels, Counter> = added(registry, name, help);
    reasons.map(|reason| family.get_or_create(&ReasonLabels { reason }).clone()).collect()
}

fn policy_reads(registry: &mut Registry) -> [Counter; 2] {
    let family: Family<ReadLabels, Counter> =
        added(registry, "tollgate_policy_reads", "Policies that were to come into force");
    ["refused", "in_force"].map(|result| family.get_or_create(&ReadLabels { result }).clone())
}

/// Counters of checks, by algorithm, basis and answer.
fn answers(registry: &mut Registry) -> Vec<[[Answers; 2]; Basis::ALL.len()]> {
    let requests: Family<CheckLabels, Counter> =
        added(registry, "rate_limiter_requests", "Checks, by algorithm, answer and basis");
    let seconds =
        Family::<CheckLabels, Histogram, fn() -> Histogram>::new_with_constructor(|| Histogram::new(SECONDS));
    let help = "Time to decide a check, together with the other checks of its request";
    registry.register_with_unit("rate_limiter_check", help, Unit::Seconds, seconds.clone());
    let of = |algorithm: AlgorithmName, basis: Basis, allowed| {
        let labels = CheckLabels { algorithm: algorithm.as_str(), allowed, basis: basis.as_str() };
        Answers {
            requests: requests.get_or_create(&labels).clone(),
            seconds: seconds.get_or_create(&labels).clone(),
        }
    };
    let by_basis = |algorithm| Basis::ALL.map(|basis| ALLOWED.map(|allowed| of(algorithm, basis, allowed)));
    AlgorithmName::ALL.map(by_basis).into()
}

/// Counters of requests, by basis and answer.
fn requests(registry: &mut Registry) -> Vec<[Counter; 2]> {
    let family: Family<RequestLabels, Counter> =
        added(registry, "tollgate_requests", "Requests, by answer and basis");
    let of = |basis: Basis, allowed| {
        family.get_or_create(&RequestLabels { allowed, basis: basis.as_str() }).clone()
    };
    Basis::ALL.map(|basis| ALLOWED.map(|allowed| of(basis, allowed))).into()
}

/// Shared by all doors.
pub(crate) type SharedMetrics = Arc<Metrics>;
