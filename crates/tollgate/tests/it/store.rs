//! The store as it is met: missing, refusing, forgetful, holding what is not ours. And changes by one node as others see them.

use std::time::{Duration, Instant};

use tollgate::{
    Backend, Check, Limit, Outcome, Rate, RateLimiter, RedisConfig, RedisEngine, RedisLimiter, SlidingLog,
    StoreError, TlsConfig, TokenBucket,
};
use tollgate_testkit::{Cluster, RedisServer, SentinelTrio, ServerProgram, TlsFiles};

use crate::guard::until;
use crate::limits::{LIMITS, named_limit};
use crate::run;

/// The privileges that Tollgate needs, as docs/redis.md has them.
pub(crate) const ACL: &str = "resetkeys ~rate_limiter:* resetchannels -@all +evalsha +script|load +time +ping +hmget +hset \
     +hgetall +hdel +pexpire +zadd +zcard +zcount +zrange +zrangebyscore +zrem +zremrangebyrank +zremrangebyscore +unlink";

/// An engine with patience, and its driver running.
pub(crate) fn engine_with(url: &str, set: impl FnOnce(&mut RedisConfig)) -> RedisEngine {
    let mut config = RedisConfig::new(url.parse().unwrap());
    config.deadline = Duration::from_secs(10);
    config.connect_timeout = Duration::from_secs(5);
    set(&mut config);
    let (engine, driver) = RedisEngine::new(config);
    tokio::spawn(driver.run());
    engine
}

pub(crate) fn engine(url: &str) -> RedisEngine {
    engine_with(url, |_| ())
}

fn bucket(capacity: u64, per_second: u64) -> Limit {
    Limit::TokenBucket(TokenBucket::new(capacity, Rate::per_second(per_second)).unwrap())
}

/// A bucket of 100 that hardly refills: what is taken stays taken.
pub(crate) fn slow_bucket(engine: &RedisEngine) -> RedisLimiter {
    let limit = TokenBucket::new(100, "1/1h".parse().unwrap()).unwrap();
    engine.limiter("token_bucket", Limit::TokenBucket(limit))
}

#[test]
fn unreachable_store_fails_at_once_and_is_used_as_soon_as_it_is_up() {
    run(async {
        let mut server = RedisServer::build().tcp().start();
        let url = format!("redis://{}", server.tcp_address());
        server.kill();
        let limiter = slow_bucket(&engine(&url));
        let error = limiter.try_acquire("user:1", 1).await.unwrap_err();
        assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains(&server.tcp_address().to_string()), "{error}");
        server.restart();
        let start = Instant::now();
        while limiter.try_acquire("user:1", 1).await.is_err() {
            assert!(start.elapsed() < Duration::from_secs(5), "a store that is back is found");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn a_refusal_names_its_cause_and_the_setting() {
    run(async {
        let files = TlsFiles::generate();
        let server = RedisServer::build()
            .tcp()
            .users(&[
                "user default off",
                "user reader on >s3cret ~* -@all +ping +evalsha +script|load +time",
                "user limited on >s3cret ~other:* +@all",
            ])
            .start();
        let address = server.tcp_address();
        let wrong_name = RedisServer::build().tls_by_wrong_name(&files).start();
        let wrong_name = format!("rediss://localhost:{}", wrong_name.tls_address().port());
        for (url, cause, setting) in [
            (format!("redis://nobody:wrong@{address}"), "does not accept", "password"),
            (format!("redis://{address}"), "NOAUTH", "password"),
            (format!("redis://reader:s3cret@{address}"), "the user executing the script", "docs/redis.md"),
            (format!("redis://limited:s3cret@{address}"), "key", "docs/redis.md"),
            (format!("redis://limited:s3cret@{address}/99"), "DB index", "database number"),
            (wrong_name, "not valid for name", "certificate"),
        ] {
            let tls = TlsConfig { ca: Some(std::fs::read(files.authority()).unwrap()), identity: None };
            let engine = engine_with(&url, |config| config.tls = tls);
            let error = slow_bucket(&engine).try_acquire("user:1", 1).await.unwrap_err();
            let text = error.to_string();
            println!("{text}");
            assert!(matches!(error, StoreError::Refused { .. }), "{url}: {error:?}");
            assert!(
                text.to_lowercase().contains(&cause.to_lowercase()) && text.contains(setting),
                "{url}: {text}"
            );
            assert!(!text.contains("s3cret") && !text.contains("wrong@"), "{text}");
        }
    });
}

#[test]
fn the_least_privileges_are_enough_over_tls_with_a_client_certificate() {
    run(async {
        let files = TlsFiles::generate();
        let user = format!("user tollgate on >s3cret {ACL}");
        let server = RedisServer::build().tls(&files).users(&["user default off", &user]).start();
        let url = format!("rediss://tollgate:s3cret@localhost:{}", server.tls_address().port());
        let client = files.client();
        let read = |path: &std::path::Path| std::fs::read(path).unwrap();
        let tls = TlsConfig {
            ca: Some(read(&files.authority())),
            identity: Some((read(&client.certificate), read(&client.key))),
        };
        let engine = engine_with(&url, |config| config.tls = tls);
        for name in LIMITS {
            let limit = named_limit(name);
            let limiter = engine.limiter(limit.algorithm().as_lowercase(), limit);
            let decision = limiter.try_acquire("user:1", 3).await.unwrap();
            assert!(decision.is_admitted(), "{name}");
            limiter.refund("user:1", 1, decision.at).await.unwrap();
            limiter.charge("user:1", 1).await.unwrap();
            limiter.remaining("user:1").await.unwrap();
            limiter.reset("user:1").await.unwrap();
            assert_eq!(limiter.remaining("user:1").await.unwrap(), limit.size(), "{name}");
        }
        let (limiter, other) = (slow_bucket(&engine), engine.limiter("second", bucket(10, 1)));
        engine
            .decide(&[Check::new(limiter.id(), "user:2", 1), Check::new(other.id(), "user:2", 1)])
            .await
            .unwrap();
        until("the store has counted this node", async || engine.nodes() == Some(1)).await;
        let without = engine_with(&url, |config| config.tls.ca = Some(read(&files.authority())));
        let error = slow_bucket(&without).try_acquire("user:1", 1).await.unwrap_err();
        assert!(error.to_string().contains("redis.tls"), "a client without certificate: {error}");
    });
}

#[test]
fn foreign_value_fails_the_check_and_stays_unchanged() {
    run(async {
        let server = RedisServer::start();
        let engine = engine(&server.url());
        let buckets = slow_bucket(&engine);
        let logs = engine
            .limiter("sliding_window", Limit::SlidingLog(SlidingLog::new(Rate::per_minute(5)).unwrap()));
        for (command, key) in [
            ("SET rate_limiter:token_bucket:a text", "a"),
            ("HSET rate_limiter:token_bucket:b tokens many frac 0 last_refill 1", "b"),
            ("HSET rate_limiter:token_bucket:c tokens 5 frac 0", "c"),
            ("HSET rate_limiter:token_bucket:d tokens 1.5 frac 0 last_refill 1", "d"),
            ("HSET rate_limiter:token_bucket:e tokens 1e300 frac 0 last_refill 1", "e"),
            ("HSET rate_limiter:token_bucket:g tokens 5 frac garbage last_refill 1", "g"),
            ("HSET rate_limiter:token_bucket:h tokens 0x10 frac 0 last_refill 1", "h"),
            ("HSET rate_limiter:token_bucket:i last_refill 1", "i"),
        ] {
            server.cli(&command.split(' ').collect::<Vec<_>>());
            let before = server.cli(&["DUMP", &format!("rate_limiter:token_bucket:{key}")]);
            let error = buckets.try_acquire(key, 1).await.unwrap_err();
            assert!(matches!(error, StoreError::Foreign { .. }), "{command}: {error}");
            assert!(error.to_string().contains(&format!("rate_limiter:token_bucket:{key}")), "{error}");
            assert_eq!(server.cli(&["DUMP", &format!("rate_limiter:token_bucket:{key}")]), before);
        }
        server.cli(&["ZADD", "rate_limiter:sliding_window:a", "1", "something"]);
        let error = logs.try_acquire("a", 1).await.unwrap_err();
        assert!(matches!(error, StoreError::Foreign { .. }), "{error}");
        let foreign = StoreError::CLASSES.iter().position(|class| *class == "foreign").unwrap();
        assert_eq!(engine.stats().failed[foreign], 9, "each is counted");
        assert!(buckets.try_acquire("f", 1).await.unwrap().is_admitted(), "other keys go on");
    });
}

#[test]
fn forgotten_scripts_are_loaded_again_without_a_second_decision() {
    run(async {
        let mut server = RedisServer::build().append_only().start();
        let limiter = slow_bucket(&engine(&server.url()));
        assert_eq!(limiter.try_acquire("user:1", 10).await.unwrap().remaining, 90);
        server.cli(&["SCRIPT", "FLUSH"]);
        assert_eq!(limiter.try_acquire("user:1", 10).await.unwrap().remaining, 80);
        // The append-only file has the state, but not the scripts.
        server.kill();
        server.restart();
        let start = Instant::now();
        let decision = loop {
            match limiter.try_acquire("user:1", 10).await {
                Ok(decision) => break decision,
                Err(_) => assert!(start.elapsed() < Duration::from_secs(5)),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert_eq!(decision.remaining, 70, "consumed permits stay consumed");
    });
}

#[test]
fn time_is_estimated_if_scripts_may_not_read_it() {
    run(async {
        let build = || RedisServer::build().program(ServerProgram::Redis62);
        let server = build().args(&["--lua-replicate-commands", "no"]).start();
        let engine = engine(&server.url());
        let limiter = engine.limiter("token_bucket", bucket(100, 1));
        let first = limiter.try_acquire("user:1", 40).await.unwrap();
        assert_eq!((first.is_admitted(), first.remaining), (true, 60));
        let second = limiter.try_acquire("user:1", 40).await.unwrap();
        assert!(second.at >= first.at && second.is_admitted());
        let told: Vec<u64> = server.cli(&["TIME"]).lines().map(|line| line.trim().parse().unwrap()).collect();
        let told = told[0] * 1_000_000 + told[1];
        assert!(second.at.as_micros() <= told, "never ahead of the server");
        assert!(told - second.at.as_micros() < 5_000_000, "and not far behind");
    });
}

#[test]
fn changes_by_one_node_are_seen_by_nodes_with_a_cached_denial() {
    run(async {
        let server = RedisServer::start();
        let (one, other) = (slow_bucket(&engine(&server.url())), slow_bucket(&engine(&server.url())));
        let seen_within = async |what: &str| {
            let start = Instant::now();
            while !other.try_acquire("user:1", 1).await.unwrap().is_admitted() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let took = start.elapsed();
            println!("{what}: seen after {took:?}");
            // A busy machine may take longer than the 100 ms that are meant; what must not be is that it is never seen.
            assert!(took < Duration::from_secs(2), "{what}: {took:?}");
        };
        let exhaust = async || {
            one.charge("user:1", 1_000).await.unwrap();
            one.reset("user:1").await.unwrap();
            let taken = one.try_acquire("user:1", 100).await.unwrap();
            let denied = other.try_acquire("user:1", 1).await.unwrap();
            assert!(taken.is_admitted() && matches!(denied.outcome, Outcome::Denied { .. }));
            taken
        };
        exhaust().await;
        one.reset("user:1").await.unwrap();
        seen_within("a reset").await;
        let taken = exhaust().await;
        one.refund("user:1", 50, taken.at).await.unwrap();
        seen_within("a refund").await;
    });
}

#[test]
fn raised_limit_ignores_cached_denials_of_the_old_one() {
    run(async {
        let server = RedisServer::start();
        let engine = engine(&server.url());
        let window = |permits| Limit::SlidingLog(SlidingLog::new(Rate::per_minute(permits)).unwrap());
        let (old, raised) =
            (engine.limiter("sliding_window", window(5)), engine.limiter("sliding_window", window(10)));
        assert!(old.try_acquire("user:1", 5).await.unwrap().is_admitted());
        assert!(!old.try_acquire("user:1", 1).await.unwrap().is_admitted());
        let decision = raised.try_acquire("user:1", 1).await.unwrap();
        assert_eq!(
            (decision.is_admitted(), decision.remaining),
            (true, 4),
            "what was consumed stays consumed"
        );
    });
}

#[test]
fn caller_that_leaves_cancels_no_other_request() {
    run(async {
        let server = RedisServer::start();
        let engine = engine(&server.url());
        let limiter = slow_bucket(&engine);
        limiter.try_acquire("user:1", 1).await.unwrap();
        server.pause();
        // The first one's call is under way when it leaves; those behind it wait.
        let (leads, waits) = (limiter.clone(), limiter.clone());
        let leader = tokio::spawn(async move { leads.try_acquire("user:1", 1).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        let leaves = waits.clone();
        let leaver = tokio::spawn(async move { leaves.try_acquire("user:1", 50).await });
        let waiter = tokio::spawn(async move { waits.try_acquire("user:1", 1).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        leader.abort();
        leaver.abort();
        tokio::time::sleep(Duration::from_millis(20)).await;
        server.resume();
        let decision = waiter.await.unwrap().unwrap();
        assert_eq!(decision.remaining, 97, "the leader's call was decided; who left unsent has not paid");
    });
}

#[test]
fn stalled_store_costs_no_more_than_the_deadline() {
    run(async {
        let server = RedisServer::start();
        let engine = engine_with(&server.url(), |config| config.deadline = Duration::from_millis(50));
        let limiter = slow_bucket(&engine);
        engine.connected(Duration::from_secs(5)).await.unwrap();
        server.pause();
        let checks = (0..200).map(|number| {
            let limiter = limiter.clone();
            tokio::spawn(async move { limiter.try_acquire(&format!("user:{}", number % 20), 1).await })
        });
        for check in checks.collect::<Vec<_>>() {
            let error = check.await.unwrap().unwrap_err();
            let expected = ["timeout", "unreachable", "breaker_open"];
            assert!(expected.contains(&error.class()), "{error}");
        }
        server.resume();
        until_admitted(&limiter).await;
    });
}

/// Gives every server the user that the documents describe, and says the address with it.
fn with_user(url: &str, extra: &str, servers: &[&RedisServer]) -> String {
    let user = format!("ACL SETUSER tollgate on >s3cret {ACL} {extra}");
    for server in servers {
        let said = server.cli(&user.split_whitespace().collect::<Vec<_>>());
        assert_eq!(said.trim(), "OK");
    }
    url.replacen("://", "://tollgate:s3cret@", 1)
}

#[test]
fn the_least_privileges_are_enough_with_sentinels_and_on_a_cluster() {
    run(async {
        let trio = SentinelTrio::start();
        let servers: Vec<_> = trio.stores().into_iter().map(|address| trio.store(address)).collect();
        let url = with_user(&trio.url(), "+role", &servers);
        let logs = engine(&url).limiter("sliding_window", named_limit("sliding_log"));
        assert!(logs.try_acquire("user:1", 1).await.unwrap().is_admitted());
        assert_eq!(slow_bucket(&engine(&url)).try_acquire("user:1", 1).await.unwrap().remaining, 99);

        let cluster = Cluster::start();
        let servers: Vec<_> = cluster.nodes().into_iter().map(|address| cluster.node(address)).collect();
        let url = with_user(&cluster.url(), "+cluster|slots +asking", &servers);
        let limiter = slow_bucket(&engine(&url));
        for number in 0..20 {
            let key = format!("user:{number}");
            assert_eq!(limiter.try_acquire(&key, 1).await.unwrap().remaining, 99);
        }
        let slot = cluster.slot_of("rate_limiter:token_bucket:user:0");
        cluster.begin_move(slot, cluster.primary_of((slot + 8_000) % 16_384));
        cluster.move_keys(slot);
        assert_eq!(
            limiter.try_acquire("user:0", 1).await.unwrap().remaining,
            98,
            "asked where it is moving to"
        );
    });
}

#[test]
fn the_recommended_settings_are_valid() {
    let conf = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/redis.conf");
    let server = RedisServer::build().append_only().args(&["--include", conf]).start();
    assert!(server.cli(&["CONFIG", "GET", "maxmemory-policy"]).contains("noeviction"));
    assert!(server.cli(&["CONFIG", "GET", "appendfsync"]).contains("everysec"));
    assert!(server.cli(&["CONFIG", "GET", "lazyfree-lazy-expire"]).contains("yes"));
    run(async {
        assert!(slow_bucket(&engine(&server.url())).try_acquire("user:1", 1).await.unwrap().is_admitted())
    });
}

fn connections(server: &RedisServer) -> u64 {
    let stats = server.cli(&["INFO", "stats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:")).unwrap();
    line.trim().parse().unwrap()
}

/// Asks for a second, and says how many connections that has cost beside the ones of asking for that.
async fn connections_while_asking(limiter: &RedisLimiter, server: &RedisServer) -> u64 {
    let (before, start) = (connections(server), Instant::now());
    while start.elapsed() < Duration::from_secs(1) {
        limiter.try_acquire("user:1", 1).await.unwrap_err();
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    connections(server) - before - 1
}

#[test]
fn refusals_make_no_storm_of_connections() {
    run(async {
        let server = RedisServer::build().tcp().start();
        let limiter = slow_bucket(&engine(&format!("redis://nobody:wrong@{}", server.tcp_address())));
        limiter.try_acquire("user:1", 1).await.unwrap_err();
        let opened = connections_while_asking(&limiter, &server).await;
        assert!(opened <= 1, "{opened} connections for a password that is wrong");

        let cluster = slow_bucket(&engine(&format!("redis+cluster://nobody:wrong@{}", server.tcp_address())));
        cluster.try_acquire("user:1", 1).await.unwrap_err();
        let opened = connections_while_asking(&cluster, &server).await;
        assert!(opened <= 2, "{opened} connections for a password that is wrong, of a cluster");
    });
}

/// Asks until the breaker lets a call through that succeeds, and it is closed again.
async fn until_admitted(limiter: &RedisLimiter) {
    let (start, mut admitted) = (Instant::now(), 0);
    while admitted < 3 {
        admitted += u32::from(limiter.try_acquire("user:1", 1).await.is_ok());
        assert!(start.elapsed() < Duration::from_secs(10), "a server that is well is asked again");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn a_server_that_may_not_write_is_asked_again_without_a_storm() {
    run(async {
        let (primary, replica) = (RedisServer::build().tcp().start(), RedisServer::build().tcp().start());
        let port = primary.tcp_address().port().to_string();
        replica.cli(&["REPLICAOF", "127.0.0.1", &port]);
        let limiter = slow_bucket(&engine(&format!("redis://{}", replica.tcp_address())));
        let error = limiter.try_acquire("user:1", 1).await.unwrap_err();
        assert!(
            matches!(error, StoreError::Unavailable { .. }) && error.to_string().contains("READONLY"),
            "{error}"
        );
        let opened = connections_while_asking(&limiter, &replica).await;
        assert!(opened <= 10, "{opened} connections to a replica");
        replica.cli(&["REPLICAOF", "NO", "ONE"]);
        until_admitted(&limiter).await;

        let limiter = slow_bucket(&engine(&format!("redis://{}", primary.tcp_address())));
        limiter.try_acquire("user:1", 1).await.unwrap();
        primary.cli(&["CONFIG", "SET", "min-replicas-to-write", "3"]);
        let error = limiter.try_acquire("user:1", 1).await.unwrap_err();
        assert!(error.to_string().contains("NOREPLICAS"), "{error}");
        assert_eq!(connections_while_asking(&limiter, &primary).await, 0, "it is the right server");
        primary.cli(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        until_admitted(&limiter).await;
        primary.cli(&["CONFIG", "SET", "maxmemory", "1"]);
        let error = limiter.try_acquire("user:2", 1).await.unwrap_err();
        assert!(
            matches!(error, StoreError::Unavailable { .. }) && error.to_string().contains("OOM"),
            "{error}"
        );
    });
}

#[test]
fn idle_dead_connection_is_reopened_before_the_next_request() {
    run(async {
        let mut server = RedisServer::start();
        let engine = engine(&server.url());
        let limiter = slow_bucket(&engine);
        limiter.try_acquire("user:1", 1).await.unwrap();
        server.restart();
        let start = Instant::now();
        while engine.health().is_ok() {
            assert!(start.elapsed() < Duration::from_secs(5), "its death is noticed");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        engine.connected(Duration::from_secs(5)).await.unwrap();
        assert!(limiter.try_acquire("user:1", 1).await.is_ok(), "no request had to fail for it");
    });
}

#[test]
fn key_that_occurs_twice_in_a_request_is_asked_for_the_sum() {
    run(async {
        let server = RedisServer::start();
        let engine = engine(&server.url());
        let limiter = engine.limiter("token_bucket", bucket(5, 1));
        let twice = engine
            .decide(&[Check::new(limiter.id(), "a", 4), Check::new(limiter.id(), "a", 4)])
            .await
            .unwrap();
        assert!(twice.iter().flatten().all(|it| it.decision.outcome == Outcome::Impossible), "{twice:?}");
        let twice = engine
            .decide(&[Check::new(limiter.id(), "a", 2), Check::new(limiter.id(), "a", 3)])
            .await
            .unwrap();
        assert!(twice.iter().flatten().all(|it| it.is_admitted() && it.decision.remaining == 0), "{twice:?}");
        let many: Vec<_> = (0..33).map(|_| Check::new(limiter.id(), "a", 1)).collect();
        assert!(matches!(engine.decide(&many).await, Err(StoreError::Overloaded)));
    });
}

#[test]
fn a_batch_of_unequal_asks_does_not_hold_the_server_up() {
    run(async {
        let server = RedisServer::start();
        let engine = engine(&server.url());
        let limit = Limit::SlidingLog(SlidingLog::new(Rate::per_minute(20_000)).unwrap());
        let limiter = engine.limiter("sliding_window", limit);
        limiter.try_acquire("a", 20_000).await.unwrap();
        let asks = (0..1_000).map(|number| limiter.try_acquire("a", 1 + number % 2));
        let denied = futures_util::future::join_all(asks).await;
        assert!(denied.into_iter().all(|answer| !answer.unwrap().is_admitted()));
        let stats = engine.stats();
        assert!(stats.calls > 30, "they went in many calls: {stats:?}");
    });
}

#[test]
fn installations_with_different_key_prefixes_on_one_cluster_never_meet() {
    run(async {
        let cluster = Cluster::start();
        let with_prefix = |prefix: &str| {
            let prefix = prefix.parse().unwrap();
            engine_with(&cluster.url(), |config| config.key_prefix = prefix)
        };
        let [shop, bank] = ["shop", "bank:eu"].map(with_prefix);
        for number in 0..20 {
            let key = format!("user:{number}");
            for engine in [&shop, &bank] {
                assert_eq!(slow_bucket(engine).try_acquire(&key, 60).await.unwrap().remaining, 40, "{key}");
            }
        }
        slow_bucket(&shop).reset("user:0").await.unwrap();
        assert_eq!(slow_bucket(&bank).remaining("user:0").await.unwrap(), 40);
        let nothing = tollgate::Version::default();
        shop.control()
            .push_policy(
                &nothing,
                &tollgate::Pushed { text: "rules: []", label: "", author: "", at_secs: 0 },
                false,
            )
            .await
            .unwrap();
        let news = bank.control().news(&nothing, &nothing).await.unwrap();
        assert_eq!((news.policy_version, news.policy), (nothing, None), "a policy of the other installation");
        until("both count themselves only", async || shop.nodes() == Some(1) && bank.nodes() == Some(1))
            .await;
        let mut heads = std::collections::BTreeSet::new();
        for address in cluster.nodes() {
            for key in cluster.node(address).cli(&["KEYS", "*"]).lines() {
                heads.insert(key.rsplit_once(":user:").map_or(key, |(head, _)| head).to_owned());
            }
        }
        assert!(heads.iter().all(|key| key.starts_with("shop:") || key.starts_with("bank:eu:")), "{heads:?}");
        assert!(heads.contains("shop:token_bucket") && heads.contains("bank:eu:token_bucket"), "{heads:?}");
    });
}

/// Values that scripts would compute with, if they did not look: what is not a whole number, or not a plausible one.
const ODD_NUMBERS: [&str; 9] =
    ["nan", "-nan", "inf", "-inf", "1e300", "-1e300", "9007199254740993", "1.5", "x"];

#[test]
fn odd_numbers_in_a_state_block_no_server_and_leave_no_key_without_time_to_live() {
    run(async {
        let server = RedisServer::start();
        let engine = engine(&server.url());
        for name in LIMITS {
            let limit = named_limit(name);
            if matches!(limit, Limit::SlidingLog(_)) {
                continue;
            }
            let limiter = engine.limiter(name, limit);
            let key = format!("rate_limiter:{name}:user:1");
            limiter.try_acquire("user:1", 1).await.unwrap();
            let stored = server.cli(&["HGETALL", &key]);
            let fields: Vec<_> = stored.lines().step_by(2).collect();
            assert!(!fields.is_empty(), "{name}: {stored}");
            for field in fields {
                for odd in ODD_NUMBERS {
                    limiter.reset("user:1").await.unwrap();
                    limiter.try_acquire("user:1", 1).await.unwrap();
                    server.cli(&["HSET", &key, field, odd]);
                    // Whether it is rejected or understood, it is answered, and so are all other requests.
                    let answered = limiter.try_acquire("user:1", 1).await;
                    let context = format!("{name}: {field} = {odd}: {answered:?}");
                    assert!(!matches!(answered, Err(tollgate::StoreError::Timeout(_))), "{context}");
                    assert_eq!(server.cli(&["PING"]).trim(), "PONG", "{context}");
                    let left: i64 = server.cli(&["PTTL", &key]).trim().parse().unwrap();
                    assert!(left > 0, "{context}: time to live {left}");
                }
            }
        }
    });
}

#[test]
fn a_bucket_of_one_permit_with_waiting_callers_takes_one_call_for_each_check() {
    run(async {
        let server = RedisServer::start();
        let engine = engine(&server.url());
        let limit = Limit::TokenBucket(tollgate::TokenBucket::new(1, Rate::per_second(10)).unwrap());
        let limiter = engine.limiter("token_bucket", limit);
        let ask = tollgate::Ask::of(1).within(tollgate::Micros::from_millis(100));
        limiter.acquire("user:1", ask).await.unwrap();
        let before = engine.stats().calls;
        let waits = limiter.acquire("user:1", ask).await.unwrap();
        assert!(waits.is_admitted() && waits.outcome.delay() > tollgate::Micros::ZERO, "{waits:?}");
        assert_eq!(engine.stats().calls - before, 1);
    });
}

#[test]
fn a_carried_debt_that_no_limit_can_have_is_refused() {
    run(async {
        let server = RedisServer::start();
        let engine = engine(&server.url());
        let limiter = slow_bucket(&engine);
        limiter.try_acquire("user:1", 1).await.unwrap();
        let key = "rate_limiter:token_bucket:user:1";
        let limit = server.cli(&["HGET", key, "limit"]);
        let debt = format!("{} over 0 9007199254740000", limit.trim());
        server.cli(&["HSET", key, "limit", &debt]);
        let refused = limiter.try_acquire("user:1", 1).await;
        assert!(matches!(refused, Err(tollgate::StoreError::Foreign { .. })), "{refused:?}");
        assert_eq!(server.cli(&["HGET", key, "limit"]).trim(), debt, "it is left alone");
    });
}
