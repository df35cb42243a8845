//! What the service counts, in the words of Prometheus. No key is ever a label.

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use tollgate::rules::Role;

use crate::access::Refused;
use crate::identity::Unverified;
use tollgate::{
    AlgorithmName, Basis, BreakerState, Engine, GuardStats, LeaseStats, PolicyVerdict, SHARED_SUBJECT,
    ServerStatus, StoreError, Verdict,
};

/// Upper bounds in seconds: from what a decision in memory takes to what nobody should wait for.
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
    requests: Vec<[Answers; 2]>,
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
        let requests = Family::<CheckLabels, Counter>::default();
        registry.register(
            "rate_limiter_requests",
            "Checks, by algorithm, answer and basis",
            requests.clone(),
        );
        let seconds = Family::<CheckLabels, Histogram, fn() -> Histogram>::new_with_constructor(|| {
            Histogram::new(SECONDS)
        });
        registry.register_with_unit(
            "rate_limiter_check",
            "Time to decide a check",
            Unit::Seconds,
            seconds.clone(),
        );
        let answers = AlgorithmName::ALL.map(|algorithm| {
            Basis::ALL.map(|basis| {
                ["false", "true"].map(|allowed| {
                    let (algorithm, basis) = (algorithm.as_str(), basis.as_str());
                    let labels = CheckLabels { algorithm, allowed, basis };
                    Answers {
                        requests: requests.get_or_create(&labels).clone(),
                        seconds: seconds.get_or_create(&labels).clone(),
                    }
                })
            })
        });
        let rules = Family::<RuleLabels, Counter>::default();
        let help = "Limits of the policy that were checked, by rule, role and answer";
        registry.register("tollgate_rule_checks", help, rules.clone());
        let skipped = Family::<SkippedLabels, Counter>::default();
        let help =
            "Requests that matched a rule and were not checked by it, because they have none of its keys";
        registry.register("tollgate_rule_skipped", help, skipped.clone());
        let unmatched = Counter::default();
        let help = "Requests admitted without a check because no rule of the policy applied, and no default";
        registry.register("tollgate_policy_unmatched", help, unmatched.clone());
        let uncounted = Counter::default();
        let help = "Checks in shadow and of candidates left out: too many limits applied to a request, or too many checks waited";
        registry.register("tollgate_policy_checks_left_out", help, uncounted.clone());
        let judged = Family::<RequestLabels, Counter>::default();
        registry.register("tollgate_policy_requests", "Requests judged by the policy", judged.clone());
        let judged_seconds =
            Family::<RequestLabels, Histogram, fn() -> Histogram>::new_with_constructor(|| {
                Histogram::new(SECONDS)
            });
        let help = "Time to judge a request by the policy";
        registry.register_with_unit("tollgate_policy_request", help, Unit::Seconds, judged_seconds.clone());
        let judged = Basis::ALL.map(|basis| {
            ["false", "true"].map(|allowed| {
                let labels = RequestLabels { allowed, basis: basis.as_str() };
                Answers {
                    requests: judged.get_or_create(&labels).clone(),
                    seconds: judged_seconds.get_or_create(&labels).clone(),
                }
            })
        });
        let unknown_tiers = Counter::default();
        let help = "Requests with a tier that the policy does not know";
        registry.register("tollgate_unknown_tiers", help, unknown_tiers.clone());
        let shared_subjects = Counter::default();
        let help =
            "Requests counted in a shared bucket: more subjects were new in the second than max_new_subjects";
        registry.register("tollgate_shared_subjects", help, shared_subjects.clone());
        let family = Family::<ReasonLabels, Counter>::default();
        registry.register(
            "tollgate_tokens_unverified",
            "Tokens that were not believed, by reason",
            family.clone(),
        );
        let unverified = Unverified::ALL
            .iter()
            .map(|why| family.get_or_create(&ReasonLabels { reason: why.as_str() }).clone())
            .collect();
        let policy = Family::<VersionLabels, Gauge>::default();
        registry.register("tollgate_policy", "The policy in force, by version", policy.clone());
        let policy_since = Gauge::default();
        let help = "When the policy came into force, in epoch seconds";
        registry.register("tollgate_policy_since_seconds", help, policy_since.clone());
        let reads = Family::<ReadLabels, Counter>::default();
        registry.register("tollgate_policy_reads", "Policies that were to come into force", reads.clone());
        let policy_reads =
            ["refused", "in_force"].map(|result| reads.get_or_create(&ReadLabels { result }).clone());
        let connections = Gauge::default();
        registry.register("tollgate_connections", "Open connections", connections.clone());
        let connections_refused = Counter::default();
        let help = "Connections closed at once because their address had too many";
        registry.register("tollgate_connections_refused", help, connections_refused.clone());
        let connections_evicted = Counter::default();
        let help = "Idle connections closed to make room for others";
        registry.register("tollgate_connections_evicted", help, connections_evicted.clone());
        let body_bytes = Gauge::default();
        registry.register("tollgate_body_bytes", "Memory that bodies of requests take", body_bytes.clone());
        let family = Family::<ReasonLabels, Counter>::default();
        let help = "Requests refused for their token, origin or body, by reason";
        registry.register("tollgate_requests_refused", help, family.clone());
        let refused = Refused::ALL
            .iter()
            .map(|why| family.get_or_create(&ReasonLabels { reason: why.as_str() }).clone())
            .collect();
        registry.register(
            "tollgate_build",
            "The version that runs",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        registry.register_collector(Box::new(EngineCollector(engine.clone())));
        Self {
            registry,
            answers: answers.into(),
            rules,
            skipped,
            unmatched,
            uncounted,
            rule_names: Mutex::default(),
            requests: judged.into(),
            unknown_tiers,
            shared_subjects,
            unverified,
            policy,
            policy_since,
            policy_reads,
            connections,
            connections_refused,
            connections_evicted,
            body_bytes,
            refused,
        }
    }

    /// Counts one check.
    #[inline]
    pub(crate) fn checked(&self, algorithm: AlgorithmName, verdict: &Verdict, took: Duration) {
        let by_basis = &self.answers[algorithm as usize][verdict.basis as usize];
        let answers = &by_basis[usize::from(verdict.is_admitted())];
        answers.requests.inc();
        answers.seconds.observe(took.as_secs_f64());
    }

    /// The counters of a rule.
    pub(crate) fn of_rule(&self, rule: &str) -> RuleAnswers {
        self.rule_names.lock().insert(rule.to_owned());
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

    /// Counts one request that was judged by the policy.
    pub(crate) fn judged(&self, verdict: &PolicyVerdict, took: Duration) {
        let answers = &self.requests[verdict.basis() as usize][usize::from(verdict.is_admitted())];
        answers.requests.inc();
        answers.seconds.observe(took.as_secs_f64());
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

    /// A token was not believed.
    pub(crate) fn unverified(&self, why: Unverified) {
        let number = Unverified::ALL.iter().position(|known| *known == why);
        if let Some(counter) = number.and_then(|number| self.unverified.get(number)) {
            counter.inc();
        }
    }

    /// A request was refused.
    pub(crate) fn refused(&self, why: Refused) {
        self.refused[why as usize].inc();
    }

    /// A policy was to come into force.
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

/// What the engine holds and has done, looked up when somebody asks.
#[derive(Debug)]
struct EngineCollector(Engine);

impl prometheus_client::collector::Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        match &self.0 {
            Engine::Memory(engine) => {
                let stats = engine.stats();
                gauge(&mut encoder, "tollgate_keys", "Keys with a state", stats.keys)?;
                gauge(&mut encoder, "tollgate_keys_bytes", "Memory that the keys take", stats.bytes)?;
                let help = "Keys dropped, before they were full again, to make room for others";
                counter(&mut encoder, "tollgate_keys_evicted", help, stats.evicted)
            }
            Engine::Shared(shared) => {
                let engine = shared.redis();
                let stats = engine.stats();
                let up = u64::from(shared.health().is_ok());
                gauge(
                    &mut encoder,
                    "tollgate_store_up",
                    "Whether the store decides, as far as is known",
                    up,
                )?;
                counter(&mut encoder, "tollgate_store_calls", "Calls to the store", stats.calls)?;
                let help = "Checks that these calls have answered";
                counter(&mut encoder, "tollgate_store_checks", help, stats.asked)?;
                let help = "Checks answered by a denial that could be no other, without a call";
                counter(&mut encoder, "tollgate_denials_remembered", help, stats.remembered)?;
                let help = "Calls that gave no decision, by reason";
                let mut failures =
                    encoder.encode_descriptor("tollgate_store_failures", help, None, MetricType::Counter)?;
                for (class, failed) in StoreError::CLASSES.into_iter().zip(stats.failed) {
                    let counter = ConstCounter::new(failed);
                    counter.encode(failures.encode_family(&[("reason", class)])?)?;
                }
                encode_breakers(&mut encoder, &engine.servers())?;
                let help = "Nodes that share the store, as it last said; 0 if it never has";
                gauge(&mut encoder, "tollgate_nodes", help, u64::from(engine.nodes().unwrap_or(0)))?;
                let guarded = shared.stats();
                let help =
                    "Panics in background tasks, which were counted and started again: defects of Tollgate";
                counter(&mut encoder, "tollgate_task_panics", help, stats.panics + guarded.panics)?;
                encode_guard(&mut encoder, &guarded)?;
                encode_leases(&mut encoder, &shared.lease_stats())
            }
        }
    }
}

fn encode_breakers(encoder: &mut DescriptorEncoder, servers: &[ServerStatus]) -> Result<(), std::fmt::Error> {
    let help = "Circuit breaker of a server of the store: 0 closed, 1 half-open, 2 open";
    let mut states = encoder.encode_descriptor("tollgate_breaker_state", help, None, MetricType::Gauge)?;
    for ServerStatus { server, breaker, .. } in servers {
        let state: u64 = match breaker {
            BreakerState::Closed => 0,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        };
        ConstGauge::new(state).encode(states.encode_family(&[("server", &**server)])?)?;
    }
    let help = "How often the circuit breaker of a server has opened";
    let mut opened = encoder.encode_descriptor("tollgate_breaker_opened", help, None, MetricType::Counter)?;
    for status in servers {
        ConstCounter::new(status.opened).encode(opened.encode_family(&[("server", &*status.server)])?)?;
    }
    Ok(())
}

fn encode_guard(encoder: &mut DescriptorEncoder, stats: &GuardStats) -> Result<(), std::fmt::Error> {
    let help = "Keys that this node decides alone, while the store does not";
    gauge(encoder, "tollgate_local_keys", help, stats.local_keys)?;
    let help = "Permits admitted by this node alone that are still to be taken from the store's state";
    gauge(encoder, "tollgate_debt_permits", help, stats.debt)?;
    let help = "Permits that were taken from the store's state afterwards";
    counter(encoder, "tollgate_debt_settled_permits", help, stats.debt_settled)?;
    let help = "Permits that could not be taken from the store's state for sure, and are not any more";
    counter(encoder, "tollgate_debt_lost_permits", help, stats.debt_lost)
}

fn encode_leases(encoder: &mut DescriptorEncoder, stats: &LeaseStats) -> Result<(), std::fmt::Error> {
    let help = "Permits borrowed from the store, by what became of them";
    let mut permits = encoder.encode_descriptor("tollgate_lease_permits", help, None, MetricType::Counter)?;
    let events = [
        ("granted", stats.granted),
        ("spent", stats.spent),
        ("returned", stats.returned),
        ("expired", stats.expired),
        ("lost", stats.lost),
    ];
    for (event, count) in events {
        ConstCounter::new(count).encode(permits.encode_family(&[("event", event)])?)?;
    }
    let help = "Permits that this node has borrowed and may still spend";
    gauge(encoder, "tollgate_lease_held_permits", help, stats.held)?;
    gauge(encoder, "tollgate_lease_keys", "Keys that are looked after for leases", stats.keys)?;
    let help = "By how many permits a burst can be too large, with consistency lease_fast";
    gauge(encoder, "tollgate_lease_overshoot_permits", help, stats.overshoot)
}

fn gauge(encoder: &mut DescriptorEncoder, name: &str, help: &str, value: u64) -> Result<(), std::fmt::Error> {
    let gauge = ConstGauge::new(value);
    gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
}

fn counter(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    value: u64,
) -> Result<(), std::fmt::Error> {
    let counter = ConstCounter::new(value);
    counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)
}

/// The older text format, for scrapers that do not know OpenMetrics: there, a counter is described under the name of its
/// only sample, and information is a gauge.
pub(crate) fn without_openmetrics(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut help = "";
    for line in text.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            help = described.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|typed| typed.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                other => ("", other),
            };
            // Writing to a string does not fail.
            let _ = write!(plain, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}\n");
        } else if !line.starts_with("# ") {
            let _ = writeln!(plain, "{line}");
        }
    }
    plain
}

/// Shared by all doors.
pub(crate) type SharedMetrics = Arc<Metrics>;
