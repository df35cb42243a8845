//! `CL.THROTTLE` beside the arithmetic of redis-cell, on random calls in random steps of time.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tollgate::Micros;

use crate::resp_client::Client;
use crate::server::Server;

/// A limit as callers name it.
#[derive(Clone, Copy, Debug)]
struct Terms {
    max_burst: i64,
    count: i64,
    period_secs: i64,
}

/// Time that passes, and the permits that are asked for then.
type Step = (u64, i64);

/// A model of one key, which says the five numbers of a reply.
trait Model {
    fn new(terms: Terms) -> Self;
    fn throttle(&mut self, now_us: i64, quantity: i64) -> [i64; 5];
}

/// The published arithmetic of redis-cell: nanoseconds, and seconds rounded up from whole milliseconds.
struct Published {
    limit: i64,
    interval_ns: i64,
    /// The theoretical arrival time, while the key exists.
    tat_ns: Option<i64>,
}

impl Model for Published {
    fn new(terms: Terms) -> Self {
        let interval_ns = (terms.period_secs as f64 * 1e9 / terms.count as f64) as i64;
        Self { limit: terms.max_burst + 1, interval_ns, tat_ns: None }
    }

    fn throttle(&mut self, now_us: i64, quantity: i64) -> [i64; 5] {
        let now = now_us * 1_000;
        let (increment, tolerance) = (self.interval_ns * quantity, self.interval_ns * self.limit);
        // The key expires at its arrival time.
        let tat = self.tat_ns.filter(|tat| *tat > now).unwrap_or(now);
        let new_tat = tat + increment;
        let over = new_tat - tolerance - now;
        let (limited, retry_ns, ttl) = match over > 0 {
            true => (1, if increment <= tolerance { over } else { -1_000_000_000 }, tat - now),
            false => {
                self.tat_ns = Some(new_tat);
                (0, -1_000_000_000, new_tat - now)
            }
        };
        let secs = |ns: i64| ns / 1_000_000_000 + i64::from(ns % 1_000_000_000 >= 1_000_000);
        let left = ((tolerance - ttl) / 1_000) as f64 / (self.interval_ns / 1_000) as f64;
        [limited, self.limit, left as i64, secs(retry_ns), secs(ttl)]
    }
}

/// The same without any rounding but that of the reply: times are multiplied by the count, so that they are whole numbers.
struct Exact {
    terms: Terms,
    tat: i128,
}

impl Model for Exact {
    fn new(terms: Terms) -> Self {
        Self { terms, tat: 0 }
    }

    fn throttle(&mut self, now_us: i64, quantity: i64) -> [i64; 5] {
        let Terms { max_burst, count, period_secs } = self.terms;
        let (count, interval) = (i128::from(count), i128::from(period_secs) * 1_000_000);
        let (now, limit) = (i128::from(now_us) * count, i128::from(max_burst) + 1);
        let tat = self.tat.max(now);
        let over = tat + interval * i128::from(quantity) - interval * limit - now;
        let secs = |time: i128| ((time + count * 1_000_000 - 1) / (count * 1_000_000)) as i64;
        let (limited, retry) = match over > 0 {
            true if i128::from(quantity) > limit => (1, -1),
            true => (1, secs(over)),
            false => {
                self.tat = tat + interval * i128::from(quantity);
                (0, -1)
            }
        };
        let ttl = self.tat.max(now) - now;
        [limited, limit as i64, ((interval * limit - ttl) / interval) as i64, retry, secs(ttl)]
    }
}

/// Runs random steps of random limits, each on a key of its own, and compares every reply.
fn agrees<M: Model>(terms: impl Strategy<Value = Terms>, steps_us: BoxedStrategy<u64>) {
    let server = Server::with("resp: { listen: '127.0.0.1:0' }\n");
    let client = RefCell::new(Client::connect(server.resp.unwrap()));
    let (keys, calls) = (Cell::new(0), Cell::new(0));
    let steps = proptest::collection::vec((steps_us, 0..6_i64), 1..100);
    let agrees = |(terms, steps): (Terms, Vec<Step>)| {
        let mut model = M::new(terms);
        keys.set(keys.get() + 1);
        for (number, (pause, quantity)) in steps.iter().enumerate() {
            server.clock.advance(Micros::new(*pause));
            let now_us = server.clock.now().as_micros() as i64;
            let Terms { max_burst, count, period_secs } = terms;
            let words = format!("CL.THROTTLE k{} {max_burst} {count} {period_secs} {quantity}", keys.get());
            let reply = client.borrow_mut().call(&words).integers();
            prop_assert_eq!(reply, model.throttle(now_us, *quantity), "call {}: {}", number, words);
            calls.set(calls.get() + 1);
        }
        Ok(())
    };
    TestRunner::default().run(&(terms, steps), agrees).unwrap();
    assert!(calls.get() >= 10_000, "only {} calls", calls.get());
}

#[test]
fn throttle_agrees_with_redis_cell_where_permits_come_in_whole_milliseconds() {
    // Divisors of the milliseconds in a period, and times in whole milliseconds: nothing is rounded on either side.
    let counts =
        prop::sample::select(vec![1_i64, 2, 4, 5, 8, 10, 20, 25, 40, 50, 100, 125, 200, 250, 500, 1_000]);
    let terms = (0..20_i64, counts, 1..120_i64).prop_map(|(max_burst, count, period_secs)| Terms {
        max_burst,
        count,
        period_secs,
    });
    let steps = prop_oneof![Just(0), 0..50_u64, 0..5_000_u64, 0..100_000_u64].prop_map(|ms| ms * 1_000);
    agrees::<Published>(terms, steps.boxed());
}

#[test]
fn throttle_is_exact_for_every_rate_and_every_microsecond() {
    let terms = (0..50_i64, 1..1_000_i64, 1..3_600_i64).prop_map(|(max_burst, count, period_secs)| Terms {
        max_burst,
        count,
        period_secs,
    });
    let steps = prop_oneof![Just(0), 0..1_000_u64, 0..1_000_000_u64, 0..100_000_000_u64];
    agrees::<Exact>(terms, steps.boxed());
}
