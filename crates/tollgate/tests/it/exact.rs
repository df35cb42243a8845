//! Many nodes on one key admit exactly what one algorithm would, on the store's own clock: four processes of 64 tasks each,
//! whatever the store's shape and whatever the nodes' clocks show.

use tollgate::algorithm::Algorithm;
use tollgate::{Ask, Limit, Timestamp};
use tollgate_testkit::{Cluster, RedisServer, SentinelTrio};

use crate::limits::{LIMITS, named_limit};
use crate::worker::{Seen, Worker};

const NODES: usize = 4;

/// All nodes hammer one key; what they saw is judged by the algorithm itself.
fn hammer(shape: &str, url: &str, names: &[&str], skew_secs: u64) {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        let key = format!("hot:{name}:{skew_secs}");
        let workers: Vec<_> = (0..NODES)
            .map(|number| Worker::start(directory.path(), number, url, name, &key, number as u64 * skew_secs))
            .collect();
        let mut seen: Vec<Seen> = workers.into_iter().flat_map(Worker::finish).collect();
        seen.sort_unstable();
        let what = format!("{shape}, {name}, clocks {skew_secs} s apart");
        judge(&what, &named_limit(name), &seen);
        assert!(seen.iter().any(|check| check.denied), "{what}: the limit was reached");
        let admitted = seen.iter().filter(|check| !check.denied).count() as u64;
        assert!(admitted > named_limit(name).size(), "{what}: the burst was used up, and more came back");
    }
}

/// Every check, in the order of the store's time, is decided again.
pub(crate) fn judge(what: &str, limit: &Limit, seen: &[Seen]) {
    let first = Timestamp::from_micros(seen[0].at);
    let mut state = limit.fresh(first);
    let mut admitted = 0;
    let mut full_again = false;
    for check in seen {
        let at = Timestamp::from_micros(check.at);
        full_again |= admitted > 0 && limit.status(&state, at).remaining == limit.size();
        let outcome = limit.decide(&mut state, at, Ask::of(1));
        assert_eq!(
            outcome.is_admitted(),
            !check.denied,
            "{what}: check at {} after {admitted} admissions",
            check.at
        );
        assert!(
            !check.denied || check.remaining == 0,
            "{what}: denied with {} permits left",
            check.remaining
        );
        admitted += u64::from(!check.denied);
    }
    // Workers that start slowly let the bucket fill up between their first checks: then the formula says nothing.
    let line = if full_again { String::new() } else { whole_line(limit, seen, admitted) };
    println!("{what}: {} checks, {admitted} admitted{line}", seen.len());
}

/// The token bucket's own formula, for a bucket that was never full again.
fn whole_line(limit: &Limit, seen: &[Seen], admitted: u64) -> String {
    let (Limit::TokenBucket(it), true) = (limit, seen.iter().any(|check| check.denied)) else {
        return String::new();
    };
    let took_us = seen[seen.len() - 1].at - seen[0].at;
    let whole = (it.size() * it.unit() + took_us * it.flow()) / it.unit();
    let left = seen[seen.len() - 1].remaining;
    assert_eq!(admitted + left, whole, "burst and refill of {took_us} us");
    format!(", floor(b + r x t) = {whole}, {left} left")
}

#[test]
fn on_one_server() {
    let server = RedisServer::build().tcp().start();
    hammer("standalone", &format!("redis://{}", server.tcp_address()), &LIMITS, 0);
}

#[test]
fn on_one_server_with_clocks_apart() {
    let server = RedisServer::start();
    hammer("standalone", &server.url(), &LIMITS, 5);
}

#[test]
fn on_a_primary_that_sentinels_know() {
    let trio = SentinelTrio::start();
    hammer("Sentinel", &trio.url(), &LIMITS, 0);
}

#[test]
fn on_a_cluster() {
    let cluster = Cluster::start();
    hammer("Cluster", &cluster.url(), &LIMITS, 0);
}
