//! Calendar quotas go by the store's clock, whatever the node's clock shows.

use tollgate::{
    Backend, BreakerState, Calendar, CalendarQuota, Check, Limit, Micros, RateLimiter, RedisEngine,
    RedisLimiter,
};
use tollgate_testkit::{RedisServer, SteppedClock};

use crate::run;
use crate::store::engine;

const DAY_US: i64 = 86_400_000_000;

/// Three each day of UTC.
fn daily(engine: &RedisEngine) -> RedisLimiter {
    let quota = CalendarQuota::new(3, Calendar::parse("UTC", "day", None).unwrap()).unwrap();
    engine.limiter("calendar", Limit::CalendarQuota(quota))
}

/// A server whose clock is `days` ahead of this process's clock.
fn server(days: i64) -> (SteppedClock, RedisServer) {
    let clock = SteppedClock::new();
    clock.step(days * DAY_US);
    let server = RedisServer::build().clock(&clock).start();
    (clock, server)
}

fn server_us(server: &RedisServer) -> u64 {
    let time = server.cli(&["TIME"]);
    let mut lines = time.lines().map(|line| line.trim().parse::<u64>().unwrap());
    lines.next().unwrap() * 1_000_000 + lines.next().unwrap()
}

fn assert_no_failure(engine: &RedisEngine) {
    assert_eq!(engine.stats().failed.iter().sum::<u64>(), 0, "{:?}", engine.recent_failures());
    assert!(engine.servers().iter().all(|server| server.breaker == BreakerState::Closed));
}

#[test]
fn calendar_quotas_go_by_the_stores_time_however_wrong_the_nodes_clock_is() {
    run(async {
        for days in [-400, -3, 3, 400] {
            let (_clock, server) = server(days);
            let engine = engine(&server.url());
            let limiter = daily(&engine);
            let before = server_us(&server);
            for left in [2, 1, 0] {
                let decision = limiter.try_acquire("user:1", 1).await.unwrap();
                assert_eq!((decision.is_admitted(), decision.remaining), (true, left), "{days} days");
            }
            let denied = limiter.try_acquire("user:1", 1).await.unwrap();
            let after = server_us(&server);
            let at = denied.at.as_micros();
            assert!(!denied.is_admitted() && (before..=after).contains(&at), "{days} days: {denied:?}");
            let midnight = (at / DAY_US as u64 + 1) * DAY_US as u64;
            assert_eq!(denied.outcome.retry(), Micros::new(midnight - at), "until the store's next day");
            let check = Check::new(limiter.id(), "user:2", 1);
            let other = engine.limiter("more", *limiter.limit());
            let both = [check, Check { limit: other.id(), ..check }];
            let decisions = engine.decide(&both).await.unwrap();
            let decisions: Vec<_> = decisions.into_iter().flatten().map(|it| it.decision).collect();
            assert!(decisions.iter().all(|it| it.is_admitted() && it.remaining == 2), "{decisions:?}");
            limiter.refund("user:2", 1, decisions[0].at).await.unwrap();
            assert_eq!(limiter.remaining("user:2").await.unwrap(), 3);
            assert_no_failure(&engine);
        }
    });
}

#[test]
fn a_store_whose_clock_is_set_goes_on_in_its_new_period_without_a_failure() {
    run(async {
        let (clock, server) = server(0);
        let engine = engine(&server.url());
        let limiter = daily(&engine);
        assert!(limiter.try_acquire("user:1", 3).await.unwrap().is_admitted());
        clock.step(40 * DAY_US);
        let decision = limiter.try_acquire("user:1", 1).await.unwrap();
        assert_eq!((decision.is_admitted(), decision.remaining), (true, 2), "a day forty days later");
        // Far back: what was taken on a day to come counts against this one, so that a clock that jumps gives nothing away.
        clock.step(-40 * DAY_US);
        let decision = limiter.try_acquire("user:1", 1).await.unwrap();
        assert!(!decision.is_admitted() && decision.outcome.retry() <= Micros::new(DAY_US as u64));
        let check = Check::new(limiter.id(), "user:2", 1);
        clock.step(80 * DAY_US);
        let other = engine.limiter("more", *limiter.limit());
        let decisions = engine.decide(&[check, Check { limit: other.id(), ..check }]).await.unwrap();
        let decisions: Vec<_> = decisions.into_iter().flatten().map(|it| it.decision).collect();
        assert!(decisions.iter().all(|it| it.is_admitted()), "{decisions:?}");
        assert_no_failure(&engine);
    });
}
