//! Sliding logs in a store: the work of one call is bounded, whatever the log holds.

use std::time::Duration;

use redis::Connection;
use tollgate::{
    Ask, Clock, Limit, Micros, Rate, RateLimiter, RedisConfig, RedisEngine, RedisLimiter, SlidingLog,
    Timestamp,
};
use tollgate_testkit::RedisServer;

use crate::run;

const BEGIN_US: u64 = 1_763_000_000_000_000;
/// Far more entries than one call removes.
const MANY: u64 = 3_000;

/// A log of a window of a minute, with a time that is handed in.
struct Log {
    server: RedisServer,
    connection: Connection,
    clock: Clock,
    limiter: RedisLimiter,
    stored: &'static str,
}

impl Log {
    async fn start(limit: u64) -> Self {
        let server = RedisServer::start();
        let clock = Clock::manual(Timestamp::from_micros(BEGIN_US));
        let mut config = RedisConfig::new(server.url().parse().unwrap());
        config.clock = Some(clock.clone());
        config.deadline = Duration::from_secs(10);
        config.remember_denials = Duration::ZERO;
        config.count_nodes = false;
        let (engine, driver) = RedisEngine::new(config);
        tokio::spawn(driver.run());
        engine.connected(Duration::from_secs(10)).await.unwrap();
        let limit = Limit::SlidingLog(SlidingLog::new(Rate::per_minute(limit)).unwrap());
        let stored = "rate_limiter:sliding_window:user:1";
        let connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        Self { limiter: engine.limiter("sliding_window", limit), server, connection, clock, stored }
    }

    fn at(&self, us: u64) {
        self.clock.set(Timestamp::from_micros(BEGIN_US + us));
    }

    /// Admits single permits, a microsecond apart, from an instant on.
    async fn admit(&self, from_us: u64, many: u64) {
        for number in 0..many {
            self.at(from_us + number);
            assert!(self.limiter.try_acquire("user:1", 1).await.unwrap().is_admitted());
        }
    }

    /// Members of the sorted set.
    fn members(&mut self) -> u64 {
        redis::cmd("ZCARD").arg(self.stored).query(&mut self.connection).unwrap()
    }

    /// Commands that the server has run so far, those of scripts among them.
    fn commands(&self) -> u64 {
        let stats = self.server.cli(&["INFO", "commandstats"]);
        let calls = stats.lines().filter_map(|line| line.split("calls=").nth(1)?.split(',').next());
        calls.map(|calls| calls.parse::<u64>().unwrap()).sum()
    }

    fn has_run(&self, command: &str) -> bool {
        self.server.cli(&["INFO", "commandstats"]).contains(&format!("cmdstat_{command}:"))
    }
}

#[test]
fn one_check_removes_a_bounded_number_of_expired_entries_and_counts_none_of_them() {
    run(async {
        let mut log = Log::start(MANY).await;
        log.admit(0, MANY - 1).await;
        log.admit(30_000_000, 1).await;
        log.at(61_000_000);
        let decision = log.limiter.try_acquire("user:1", 1).await.unwrap();
        assert_eq!((decision.is_admitted(), decision.remaining), (true, MANY - 2), "two are not expired");
        let left = log.members();
        assert!(left > MANY - 100, "one check has removed {} members", MANY + 1 - left);
        log.admit(61_000_001, 100).await;
        assert_eq!(log.members(), 102, "a hundred checks have removed all that are expired");
    });
}

#[test]
fn a_log_that_is_expired_or_reset_is_unlinked() {
    run(async {
        let log = Log::start(MANY).await;
        log.admit(0, 200).await;
        log.at(61_000_000);
        let before = log.commands();
        assert_eq!(log.limiter.try_acquire("user:1", 1).await.unwrap().remaining, MANY - 1);
        assert!(log.commands() - before < 20);
        assert!(log.has_run("unlink") && !log.has_run("zremrangebyscore"));
        log.limiter.reset("user:1").await.unwrap();
        assert_eq!(log.server.cli(&["EXISTS", log.stored]).trim(), "0");
        assert!(!log.has_run("del"));
    });
}

#[test]
fn a_refund_of_many_grants_is_a_bounded_number_of_commands() {
    run(async {
        let log = Log::start(MANY).await;
        log.admit(0, MANY).await;
        let before = log.commands();
        let oldest = Timestamp::from_micros(BEGIN_US);
        log.limiter.refund("user:1", MANY - 10, oldest).await.unwrap();
        assert!(log.commands() - before < 100, "{} commands", log.commands() - before);
        assert_eq!(log.limiter.remaining("user:1").await.unwrap(), MANY - 10);
        let denied = log.limiter.peek("user:1", Ask::of(MANY - 9)).await.unwrap();
        let youngest_us = MANY - 10;
        let expected = Micros::new(60_000_000 + youngest_us - (MANY - 1));
        assert_eq!(denied.outcome.retry(), expected, "the ten youngest are left");
    });
}
