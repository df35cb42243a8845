//! Metrics of the engine, read when a scraper asks.

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use tollgate::{BreakerState, Engine, GuardStats, LeaseStats, ServerStatus, StoreError};

/// Reads the metrics of an engine.
#[derive(Debug)]
pub(super) struct EngineCollector(pub(super) Engine);

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
                let help = "Checks answered by a cached denial, without a call";
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
                let help = "Panics in background tasks, which were restarted: defects of Tollgate";
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
    let help = "Permits that were given up, because the store did not confirm that it took them";
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
    gauge(encoder, "tollgate_lease_keys", "Keys with a lease or with demand for one", stats.keys)?;
    let help = "The most permits by which consistency lease_fast can exceed a burst";
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
