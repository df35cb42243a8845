//! The wiring, on one page: configuration in, a running service out. Only this room and `serve.rs` spawn.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate::{
    AlgorithmName, Clock, Engine, LeaseStats, MemoryEngine, RedisConfig, RedisEngine, SharedEngine,
};

use crate::access::{Access, AdminAccess};
use crate::config::{Config, Serving, Store};
use crate::doors::http::{Actuator, Admin, AdminDoor, ApiDoor, BodyMemory, ForwardAuthLog, openapi_document};
use crate::doors::resp::RespDoor;
use crate::doors::rls;
use crate::limiter::{Limiter, Overrides};
use crate::live::{LivePolicy, Loaded, hangups, keep_up};
use crate::loopback::LoopbackCheck;
use crate::metrics::Metrics;
use crate::named_limits::NamedLimits;
use crate::serve::{Http2, Stopping, serve};
use crate::telemetry;

/// A service whose listeners are bound, so that its ports are known before it runs.
pub struct App {
    config: Config,
    listener: TcpListener,
    /// Whether the API is for all callers on this machine: its address is loopback, and no tokens are configured.
    is_open: bool,
    /// Whether the API's port has the pages of the admin port, too.
    has_admin_pages: bool,
    /// The admin port, where it was configured or where the API's port does not have its pages.
    admin: Option<TcpListener>,
    /// The port for Redis clients, where it was configured.
    resp: Option<TcpListener>,
    /// The gRPC port, where it was configured.
    grpc: Option<TcpListener>,
    engine: Engine,
    clock: Clock,
}

/// For what is owed to the store, when the service stops.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);
/// Connections of the admin port: scrapers, probes and operators are few.
const ADMIN_CONNECTIONS: usize = 16;
/// Where the admin port listens unless it is configured.
const ADMIN_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8090);
/// A whole sweep of the table takes this long: keys that nobody uses any more are gone by then.
const SWEEP_SECS: usize = 30;

impl App {
    /// Binds the listeners, starts the log and finds the store. Decisions are made by `clock`; those of a store, which has a
    /// clock of its own, only if it is one that is handed in.
    pub async fn bind(config: Config, clock: Clock) -> Result<Self> {
        telemetry::init(&config);
        let listener = listen(config.listen, "--listen").await?;
        let is_open = is_loopback(&listener)? && config.token_digests.is_empty();
        let has_admin_pages = is_open && config.admin_tokens.is_empty();
        let admin = match config.admin_listen {
            None if has_admin_pages => None,
            chosen => Some(listen(chosen.unwrap_or(ADMIN_LISTEN), "admin.listen").await?),
        };
        let resp = match config.resp_listen {
            None => None,
            Some(address) => Some(listen(address, "resp.listen").await?),
        };
        let grpc = match config.grpc_listen {
            None => None,
            Some(address) => Some(listen(address, "grpc.listen").await?),
        };
        let engine = engine(&config, clock.clone()).await?;
        Ok(Self { config, listener, is_open, has_admin_pages, admin, resp, grpc, engine, clock })
    }

    /// Where the API listens.
    pub fn address(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// Whether callers on this machine may name keys without a token.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Where the pages of the admin port are: on the API's port, if the admin port is not open.
    pub fn admin_address(&self) -> Result<SocketAddr> {
        Ok(self.admin.as_ref().unwrap_or(&self.listener).local_addr()?)
    }

    /// Where Redis clients connect, if anywhere.
    pub fn resp_address(&self) -> Result<Option<SocketAddr>> {
        Ok(self.resp.as_ref().map(TcpListener::local_addr).transpose()?)
    }

    /// Where gRPC listens, if it does.
    pub fn grpc_address(&self) -> Result<Option<SocketAddr>> {
        Ok(self.grpc.as_ref().map(TcpListener::local_addr).transpose()?)
    }

    /// Serves until told to stop, then lets the requests under way finish.
    pub async fn run(self, stop: CancellationToken) -> Result<()> {
        let Self { config, listener, is_open, has_admin_pages, admin, resp, grpc, engine, clock } = self;
        let hangups = hangups()?;
        let tasks = TaskTracker::new();
        if let Engine::Memory(engine) = &engine {
            tasks.spawn(sweep(engine.clone(), stop.clone()));
        }
        let metrics = Arc::new(Metrics::new(&engine));
        let builtin = Arc::new(Loaded::builtin(&engine, &metrics, &config.limits)?);
        let permits_max = config.limits.iter().map(|(limit, _)| limit.size()).max().unwrap_or(0);
        config.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
        if matches!(engine, Engine::Shared(_)) {
            config.remarks().iter().for_each(|remark| tracing::info!("{remark}"));
        }
        if is_open && !config.client_address.trusted_proxies.is_empty() {
            tracing::warn!(
                "the API listens on loopback without tokens behind a proxy: requests that the proxy passes on without a forwarding header count as local callers, who may name any key; let the proxy set the header (nginx: proxy_set_header), or set api.token_file"
            );
        }
        let identity = config.identity;
        let policy = Arc::new(LivePolicy::new(&engine, Arc::clone(&metrics), config.policy)?);
        // Before anybody is let in: what all nodes go by counts from the first request on.
        if !policy.poll().await {
            let own = policy.current().version.clone();
            tracing::warn!(
                version = own,
                "the store does not answer: this node goes by its own policy, if it has one, until the store tells it of a pushed one"
            );
        }
        tasks.spawn(keep_up(Arc::clone(&policy), hangups, stop.clone()));
        let store = config.store.to_string();
        let actuator =
            Actuator::new(Arc::clone(&metrics), engine.clone(), store, Arc::clone(&policy), stop.clone());
        let body_timeout = config.server.body_timeout;
        let body_memory = Arc::new(BodyMemory::new(config.server.max_body_bytes, metrics.body_bytes.clone()));
        let inside = Arc::new(Admin {
            actuator,
            policy: Arc::clone(&policy),
            identity: Arc::clone(&identity),
            body_timeout,
            body_memory: Arc::clone(&body_memory),
            metrics: Arc::clone(&metrics),
        });
        let loopback_check = || LoopbackCheck::new(config.allowed_hosts.clone());
        // Buckets that callers name are kept as the plain API's bucket is.
        let settings = config.limits.get(AlgorithmName::TokenBucket as usize).map(|(_, settings)| *settings);
        let named = NamedLimits::new(&engine, settings.unwrap_or_default());
        // Limits that proxies name are kept as the plain API's fixed window is.
        let settings = config.limits.get(AlgorithmName::FixedWindow as usize).map(|(_, settings)| *settings);
        let overrides = Overrides::new(&engine, Arc::clone(&metrics), settings.unwrap_or_default());
        let limiter = Arc::new(Limiter {
            builtin,
            named,
            overrides,
            live: policy,
            identity,
            clock,
            metrics: Arc::clone(&metrics),
        });
        let stopping = Stopping { told: stop.clone(), ..Stopping::default() };
        if let Some(resp) = resp {
            let is_open = is_loopback(&resp)? && config.token_digests.is_empty();
            let (tokens, callers) = (config.token_digests.clone(), config.trusted_callers.clone());
            let access = Access::new(is_open, tokens, callers, loopback_check());
            let door = RespDoor::new(Arc::clone(&limiter), access, &config.server);
            tasks.spawn(serve(resp, Arc::new(door), config.server, Arc::clone(&metrics), stopping.clone()));
        }
        if let Some(grpc) = grpc {
            let is_open = is_loopback(&grpc)? && config.token_digests.is_empty();
            let (digests, callers) = (config.token_digests.clone(), config.trusted_callers.clone());
            let access = Access::new(is_open, digests, callers, loopback_check());
            let (door, health) = rls::door(Arc::clone(&limiter), access, config.server.max_body_bytes)?;
            tasks.spawn(rls::report_health(health, stop.clone()));
            let door = Arc::new(Http2 { door: Arc::new(door), limits: config.server });
            tasks.spawn(serve(grpc, door, config.server, Arc::clone(&metrics), stopping.clone()));
        }
        let door = Arc::new(ApiDoor {
            limiter: Arc::clone(&limiter),
            access: Access::new(is_open, config.token_digests, config.trusted_callers, loopback_check()),
            client_address: config.client_address,
            loopback: is_open.then(loopback_check),
            body_timeout,
            body_memory,
            closed_status: config.closed_status,
            forward_auth_log: ForwardAuthLog::new(),
            admin: Arc::clone(&inside),
            has_admin_pages,
            openapi: openapi_document(permits_max),
        });
        tasks.spawn(serve(listener, door, config.server, Arc::clone(&metrics), stopping.clone()));
        if let Some(admin) = admin {
            let limits = Serving { max_connections: ADMIN_CONNECTIONS, ..config.server };
            let is_loopback = is_loopback(&admin)?;
            let loopback = (is_loopback && config.admin_tokens.is_empty()).then(loopback_check);
            if !is_loopback && config.admin_tokens.is_empty() {
                tracing::info!(
                    "/admin answers 403 on the admin port: it is beyond loopback, and admin.token_file is not set"
                );
            }
            let access = AdminAccess::new(is_loopback, config.admin_tokens);
            let door = Arc::new(AdminDoor { admin: inside, access, loopback });
            tasks.spawn(serve(admin, door, limits, metrics, stopping.clone()));
        }
        tasks.close();
        stop.cancelled().await;
        tracing::info!("stopping: requests under way are finished first");
        tokio::time::sleep(config.server.drain_delay).await;
        stopping.closing.cancel();
        tasks.wait().await;
        if let Engine::Shared(shared) = &engine {
            // What the store does not take within this is lost, as with a crash.
            let settle = async { tokio::join!(shared.give_leases_back(), shared.repay_debts()) };
            let _ = tokio::time::timeout(SETTLE_TIMEOUT, settle).await;
            let LeaseStats { granted, spent, returned, expired, lost, held, .. } = shared.lease_stats();
            if granted > 0 {
                tracing::info!(granted, spent, returned, expired, lost, held, "leases given back");
            }
        }
        // A limit must exist until its borrowed permits are given back.
        drop(limiter);
        tracing::info!("stopped");
        Ok(())
    }
}

/// The engine for a store. One that cannot be reached is tried again and again, unless it is required.
async fn engine(config: &Config, clock: Clock) -> Result<Engine> {
    let guard = config.guard;
    match &config.store {
        Store::Memory(memory) => Ok(Engine::Memory(MemoryEngine::new(*memory, clock))),
        Store::Redis { config, require } => {
            let config =
                RedisConfig { clock: Some(clock.clone()).filter(Clock::is_manual), ..(**config).clone() };
            let within = config.connect_timeout * 2;
            let (engine, driver) = RedisEngine::new(config);
            // Ends with the engine: decisions need it until the last request is answered.
            tokio::spawn(driver.run());
            if *require {
                engine.connected(within).await.context("the store is required (--require-store)")?;
            }
            let (shared, driver) = SharedEngine::new(engine, guard, clock);
            tokio::spawn(driver.run());
            Ok(Engine::Shared(shared))
        }
    }
}

fn is_loopback(listener: &TcpListener) -> Result<bool> {
    Ok(listener.local_addr()?.ip().to_canonical().is_loopback())
}

async fn listen(address: SocketAddr, setting: &str) -> Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address} (choose another with {setting})"))
}

/// Gives the memory of keys that nobody uses back, a part of the table at a time.
async fn sweep(engine: MemoryEngine, stop: CancellationToken) {
    let parts = engine.parts().div_ceil(SWEEP_SECS);
    let mut seconds = tokio::time::interval(Duration::from_secs(1));
    let mut part = 0;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = seconds.tick() => part = engine.sweep(part, parts),
        }
    }
}

/// What the system asks of the process.
pub struct Signals {
    /// To end, with everybody answered.
    pub stop: CancellationToken,
    /// To end at once: it was asked a second time.
    pub hurry: CancellationToken,
}

/// Listens to SIGTERM and SIGINT.
pub fn signals() -> Result<Signals> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (stop, hurry) = (CancellationToken::new(), CancellationToken::new());
    let told = [stop.clone(), hurry.clone()];
    tokio::spawn(async move {
        for told in told {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            told.cancel();
        }
    });
    Ok(Signals { stop, hurry })
}
