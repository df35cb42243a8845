//! Envoy's Rate Limit Service, field for field.

use tollgate::Micros;

use crate::rls_client::proto::rate_limit_response::{Code, rate_limit::Unit};
use crate::rls_client::proto::{RateLimitRequest, RateLimitUnit};
use crate::rls_client::{
    Client, codes, current_limit, descriptor, giving_back, header, limited, request, taking,
};
use crate::server::{NOW_SECS, Server};

/// Half a minute is left of the minute.
const POLICY: &str = r#"
grpc: { listen: "127.0.0.1:0" }
policy:
  rules:
    - { name: per-address, match: { attribute: { domain: web } }, key: "attribute:remote_address", limit: 3/min, algorithm: FIXED_WINDOW }
    - { name: per-path, match: { attribute: { domain: web } }, key: "attribute:path", limit: 5/min, algorithm: FIXED_WINDOW }
    - { name: tried, match: { attribute: { domain: web } }, key: "attribute:user", limit: 1/min, mode: shadow }
    - { name: trusted, match: { attribute: { domain: web, partner: gold } }, key: "attribute:partner", limit: unlimited }
    - { name: ten-seconds, match: { attribute: { domain: odd } }, key: "attribute:a", limit: 7/10s, algorithm: FIXED_WINDOW }
    - { name: large, match: { attribute: { domain: odd } }, key: "attribute:b", limit: 5000000000/day, algorithm: FIXED_WINDOW }
    - { name: slow, match: { attribute: { domain: odd } }, key: "attribute:c", limit: 1/min burst 1, max_wait: 5m }
    - { name: tokens, match: { attribute: { domain: each } }, key: "attribute:token", limit: 1/s burst 10 }
    - { name: leaky, match: { attribute: { domain: each } }, key: "attribute:leaky", limit: 1/s burst 10, algorithm: LEAKY_BUCKET }
    - { name: fixed, match: { attribute: { domain: each } }, key: "attribute:fixed", limit: 10/min, algorithm: FIXED_WINDOW }
    - { name: log, match: { attribute: { domain: each } }, key: "attribute:log", limit: 10/min, algorithm: SLIDING_WINDOW }
    - { name: counter, match: { attribute: { domain: each } }, key: "attribute:counter", limit: 10/min }
    - { name: monthly, match: { attribute: { domain: each } }, key: "attribute:monthly", limit: { quota: 10/month, zone: UTC } }
"#;

/// These tests run twice, with the state in memory and in a store: the module's name says which.
fn start() -> (Server, Client) {
    start_with("")
}

fn start_with(more: &str) -> (Server, Client) {
    let yaml = format!("{POLICY}{more}");
    let server =
        if module_path!().ends_with("redis") { Server::on_redis(&yaml) } else { Server::with(&yaml) };
    let client = Client::new(server.grpc.unwrap());
    (server, client)
}

#[test]
fn calls_up_to_the_limit_are_ok_and_the_next_is_over_limit() {
    let (server, client) = start();
    let call = || client.ask(request("web", [descriptor(&[("remote_address", "192.0.2.1")])]));
    for remaining in [2, 1, 0] {
        let response = call();
        assert_eq!(response.overall_code(), Code::Ok);
        let status = &response.statuses[0];
        assert_eq!(status.code(), Code::Ok);
        assert_eq!(status.current_limit, current_limit(3, Unit::Minute, "per-address"));
        assert_eq!(status.limit_remaining, remaining);
        assert_eq!(status.duration_until_reset.map(|time| (time.seconds, time.nanos)), Some((30, 0)));
        assert_eq!(header(&response, "x-ratelimit-limit"), Some("3"));
        assert_eq!(header(&response, "x-ratelimit-remaining"), Some(remaining.to_string().as_str()));
        assert_eq!(header(&response, "x-ratelimit-reset"), Some((NOW_SECS + 30).to_string().as_str()));
        assert_eq!(
            header(&response, "ratelimit"),
            Some(format!("\"fixed_window:per-address\";r={remaining};t=30").as_str())
        );
        assert_eq!(header(&response, "ratelimit-policy"), Some("\"fixed_window:per-address\";q=3;w=60"));
        assert_eq!(header(&response, "retry-after"), None);
    }
    server.clock.advance(Micros::new(500_000));
    let denied = call();
    assert_eq!((denied.overall_code(), codes(&denied)), (Code::OverLimit, vec![Code::OverLimit]));
    assert_eq!(denied.statuses[0].limit_remaining, 0);
    let reset = denied.statuses[0].duration_until_reset.unwrap();
    assert_eq!((reset.seconds, reset.nanos), (30, 0), "29.5 seconds, rounded up");
    assert_eq!(header(&denied, "retry-after"), Some("30"));
    assert_eq!(client.ask_one("web", &[("remote_address", "192.0.2.2")]).code(), Code::Ok, "another key");
    server.clock.advance(Micros::new(29_500_000));
    assert_eq!(call().overall_code(), Code::Ok);
}

#[test]
fn descriptors_of_a_call_are_decided_together_and_a_denied_call_takes_nothing() {
    let (_server, client) = start();
    let (address, path) = (descriptor(&[("remote_address", "192.0.2.1")]), descriptor(&[("path", "/a")]));
    let both = || client.ask(request("web", [address.clone(), path.clone()]));
    for left in [2, 1, 0] {
        let response = both();
        assert_eq!(codes(&response), [Code::Ok, Code::Ok]);
        let remaining: Vec<_> = response.statuses.iter().map(|status| status.limit_remaining).collect();
        assert_eq!(remaining, [left, left + 2]);
        assert_eq!(header(&response, "x-ratelimit-limit"), Some("3"), "the limit with the least left");
    }
    for _ in 0..3 {
        let denied = both();
        assert_eq!(denied.overall_code(), Code::OverLimit);
        assert_eq!(codes(&denied), [Code::OverLimit, Code::Ok]);
    }
    let status = client.ask_one("web", &[("path", "/a")]);
    assert_eq!((status.code(), status.limit_remaining), (Code::Ok, 1), "nothing was taken by denied calls");
    let swapped = client.ask(request("web", [path, address]));
    assert_eq!(codes(&swapped), [Code::Ok, Code::OverLimit], "statuses are in the order of descriptors");
}

#[test]
fn two_descriptors_with_the_same_key_take_the_sum() {
    let (_server, client) = start();
    let same = || descriptor(&[("remote_address", "192.0.2.1")]);
    assert_eq!(client.ask(request("web", [same(), same()])).overall_code(), Code::Ok);
    assert_eq!(client.ask(request("web", [same(), same()])).overall_code(), Code::OverLimit);
    let last = client.ask_one("web", &[("remote_address", "192.0.2.1")]);
    assert_eq!((last.code(), last.limit_remaining), (Code::Ok, 0));
}

#[test]
fn permits_come_from_the_request_or_from_the_descriptor() {
    let (_server, client) = start();
    let path = |value: &str| descriptor(&[("path", value)]);
    let two = |descriptor| RateLimitRequest { hits_addend: 2, ..request("web", [descriptor]) };
    let remaining = |request| client.ask(request).statuses[0].limit_remaining;
    assert_eq!(remaining(request("web", [path("/a")])), 4, "0 means 1");
    assert_eq!(remaining(two(path("/a"))), 2);
    assert_eq!(remaining(two(taking(1, path("/a")))), 1, "the descriptor's own permits win");
    let denied = client.ask(two(path("/a")));
    assert_eq!((denied.overall_code(), denied.statuses[0].limit_remaining), (Code::OverLimit, 1));
}

#[test]
fn zero_permits_look_and_take_nothing() {
    let (_server, client) = start();
    let look = || client.ask(request("web", [taking(0, descriptor(&[("path", "/a")]))]));
    for _ in 0..2 {
        assert_eq!((look().overall_code(), look().statuses[0].limit_remaining), (Code::Ok, 5));
    }
    let all = client.ask(request("web", [taking(5, descriptor(&[("path", "/a")]))]));
    assert_eq!(all.overall_code(), Code::Ok);
    assert_eq!(look().overall_code(), Code::OverLimit, "one permit more would be denied");
    // A look that finds nothing left denies the call: nothing is taken for its other descriptors.
    let address = descriptor(&[("remote_address", "192.0.2.1")]);
    let mixed = request("web", [address.clone(), taking(0, descriptor(&[("path", "/a")]))]);
    assert_eq!(codes(&client.ask(mixed)), [Code::Ok, Code::OverLimit]);
    assert_eq!(client.ask(request("web", [address])).statuses[0].limit_remaining, 2);
}

#[test]
fn negative_hits_give_permits_back_up_to_the_limit() {
    let (_server, client) = start();
    for key in ["token", "leaky", "fixed", "log", "counter", "monthly"] {
        let of = |hits| taking(hits, descriptor(&[(key, "a")]));
        let back = |hits| giving_back(hits, descriptor(&[(key, "a")]));
        let ask = |descriptor| client.ask(request("each", [descriptor])).statuses[0].clone();
        assert_eq!(ask(of(10)).code(), Code::Ok, "{key}");
        assert_eq!(ask(of(1)).code(), Code::OverLimit, "{key}");
        let refunded = ask(back(4));
        assert_eq!((refunded.code(), refunded.limit_remaining), (Code::Ok, 4), "{key}");
        assert_eq!(ask(of(5)).code(), Code::OverLimit, "{key}");
        assert_eq!(ask(of(4)).code(), Code::Ok, "{key}");
        assert_eq!(ask(back(1_000)).limit_remaining, 10, "{key}: never more than the limit");
        assert_eq!(ask(of(11)).code(), Code::OverLimit, "{key}");
        assert_eq!(ask(of(10)).code(), Code::Ok, "{key}");
    }
}

#[test]
fn permits_are_given_back_only_if_the_call_is_admitted() {
    let (_server, client) = start();
    let of = |key: &str, hits| taking(hits, descriptor(&[(key, "a")]));
    assert_eq!(client.ask(request("each", [of("fixed", 10), of("log", 10)])).overall_code(), Code::Ok);
    let back = giving_back(5, descriptor(&[("fixed", "a")]));
    let mixed = client.ask(request("each", [back.clone(), of("log", 1)]));
    assert_eq!(codes(&mixed), [Code::Ok, Code::OverLimit]);
    assert_eq!(mixed.statuses[0].limit_remaining, 0, "nothing was given back");
    let admitted = client.ask(request("each", [back, of("counter", 1)]));
    assert_eq!(admitted.statuses[0].limit_remaining, 5);
}

#[test]
fn a_limit_of_the_descriptor_wins_over_the_policy() {
    let (server, client) = start();
    let entries = [("remote_address", "192.0.2.1"), ("user", "a")];
    let own = |permits| limited(permits, RateLimitUnit::Hour, descriptor(&entries));
    for left in [1, 0] {
        let status = client.ask(request("web", [own(2)])).statuses[0].clone();
        assert_eq!(status.current_limit, current_limit(2, Unit::Hour, "proxy:override"));
        assert_eq!((status.code(), status.limit_remaining), (Code::Ok, left));
    }
    let denied = client.ask(request("web", [own(2)]));
    assert_eq!(denied.overall_code(), Code::OverLimit);
    assert_eq!(header(&denied, "x-ratelimit-limit"), Some("2"));
    assert!(header(&denied, "retry-after").is_some());
    assert_eq!(
        client.ask_one("web", &entries).limit_remaining,
        2,
        "nothing was taken from the policy's limit"
    );
    let key_of_others = [("remote_address", "192.0.2.1"), ("user", "a+user:b")];
    let of_others = limited(2, RateLimitUnit::Hour, descriptor(&key_of_others));
    assert_eq!(client.ask(request("web", [of_others])).statuses[0].limit_remaining, 1, "other entries");
    assert_eq!(client.ask(request("app", [own(2)])).overall_code(), Code::Ok, "another domain");
    assert_eq!(
        client.ask(request("web", [own(3)])).statuses[0].limit_remaining,
        0,
        "2 of 3 were taken before"
    );
    assert_eq!(client.ask(request("web", [own(0)])).overall_code(), Code::OverLimit);
    let per_day = limited(2, RateLimitUnit::Day, descriptor(&entries));
    assert_eq!(client.ask(request("web", [per_day])).statuses[0].limit_remaining, 1, "another window");
    let too_many = taking(4, own(3));
    assert_eq!(client.ask(request("web", [too_many])).overall_code(), Code::OverLimit);
    server.clock.advance(Micros::from_secs(3_600));
    assert_eq!(client.ask(request("web", [own(2)])).overall_code(), Code::Ok, "the next hour");
    let odd = limited(1, RateLimitUnit::Unknown, descriptor(&entries));
    let why = client.call(request("web", [odd])).unwrap_err();
    assert_eq!(why.code(), tonic::Code::InvalidArgument);
    assert!(why.message().contains("descriptors[0].limit.unit"), "{why}");
}

#[test]
fn a_limit_of_the_descriptor_and_those_of_the_policy_are_decided_together() {
    let (_server, client) = start();
    let own = limited(1, RateLimitUnit::Minute, descriptor(&[("a", "b")]));
    let path = descriptor(&[("path", "/a")]);
    let call = || client.ask(request("web", [own.clone(), path.clone()]));
    assert_eq!(call().overall_code(), Code::Ok);
    assert_eq!(codes(&call()), [Code::OverLimit, Code::Ok]);
    assert_eq!(client.ask(request("web", [path.clone()])).statuses[0].limit_remaining, 3);
}

#[test]
fn a_descriptor_without_an_enforced_limit_is_ok() {
    let (_server, client) = start();
    let unmatched: [(&str, &[(&str, &str)]); 3] = [
        ("nowhere", &[("remote_address", "192.0.2.1")]),
        ("web", &[("generic_key", "a")]),
        ("web", &[("remote_address", "")]),
    ];
    for _ in 0..5 {
        for (domain, entries) in unmatched {
            let status = client.ask_one(domain, entries);
            assert_eq!((status.code(), &status.current_limit), (Code::Ok, &None), "{domain} {entries:?}");
            assert_eq!(status.limit_remaining, 0);
        }
        let shadow = client.ask_one("web", &[("user", "a")]);
        assert_eq!(shadow.code(), Code::Ok, "a rule in shadow is counted only");
        assert_eq!(shadow.current_limit, current_limit(1, Unit::Minute, "tried"));
        assert_eq!(shadow.limit_remaining, 0);
        let unlimited = client.ask_one("web", &[("partner", "gold")]);
        assert_eq!((unlimited.code(), unlimited.limit_remaining), (Code::Ok, u32::MAX));
    }
}

#[test]
fn an_entry_does_not_replace_the_domain() {
    let (_server, client) = start();
    let status = client.ask_one("nowhere", &[("domain", "web"), ("remote_address", "192.0.2.1")]);
    assert_eq!(status.current_limit, None);
}

#[test]
fn a_window_without_a_unit_is_unknown_and_the_headers_tell_it() {
    let (_server, client) = start();
    let response = client.ask(request("odd", [descriptor(&[("a", "x")])]));
    assert_eq!(response.statuses[0].current_limit, current_limit(7, Unit::Unknown, "ten-seconds"));
    assert_eq!(header(&response, "ratelimit-policy"), Some("\"fixed_window:ten-seconds\";q=7;w=10"));
}

#[test]
fn numbers_beyond_32_bits_are_cut_to_the_largest() {
    let (_server, client) = start();
    let response = client.ask(request("odd", [taking(10, descriptor(&[("b", "x")]))]));
    let status = &response.statuses[0];
    assert_eq!(status.current_limit, current_limit(u32::MAX, Unit::Day, "large"));
    assert_eq!(status.limit_remaining, u32::MAX);
    assert_eq!(header(&response, "x-ratelimit-remaining"), Some("4999999990"));
}

#[test]
fn a_call_is_never_admitted_with_a_delay() {
    let (_server, client) = start();
    assert_eq!(client.ask_one("odd", &[("c", "x")]).code(), Code::Ok);
    assert_eq!(client.ask_one("odd", &[("c", "x")]).code(), Code::OverLimit);
}

#[test]
fn more_permits_than_the_limit_are_over_limit_and_take_nothing() {
    let (_server, client) = start();
    let (address, path) = (descriptor(&[("remote_address", "192.0.2.1")]), descriptor(&[("path", "/a")]));
    for hits in [6, u64::MAX] {
        let response = client.ask(request("web", [taking(hits, path.clone()), address.clone()]));
        assert_eq!(codes(&response), [Code::OverLimit, Code::Ok]);
        assert_eq!(response.statuses[0].current_limit, current_limit(5, Unit::Minute, "per-path"));
        assert_eq!(response.statuses[0].limit_remaining, 5);
        assert_eq!(header(&response, "retry-after"), None, "no wait would help");
    }
    assert_eq!(client.ask(request("web", [address])).statuses[0].limit_remaining, 2);
}

#[test]
fn calls_at_the_same_time_get_exactly_the_limit() {
    let (_server, client) = start();
    let ask = || async {
        let call = request("each", [descriptor(&[("fixed", "x")]), descriptor(&[("log", "x")])]);
        client.call_with(tonic_prost::ProstCodec::default(), call).await.unwrap().overall_code()
    };
    let calls = futures_util::future::join_all((0..300).map(|_| ask()));
    let admitted = client.runtime.block_on(calls).into_iter().filter(|code| *code == Code::Ok).count();
    assert_eq!(admitted, 10);
}

#[test]
fn bad_calls_say_what_is_wrong_and_take_nothing() {
    let (_server, client) = start();
    let path = || descriptor(&[("path", "/a")]);
    let cases = [
        (request("", [path()]), "domain"),
        (request("web", []), "descriptors"),
        (request("web", (0..33).map(|_| path())), "descriptors: expected 1 to 32, got 33"),
        (request("web", [path(), descriptor(&[])]), "descriptors[1].entries"),
        (request("web", [path(), descriptor(&[("a", "b"), ("", "c")])]), "descriptors[1].entries[1].key"),
        (request("web", [path(), descriptor(&[("a", "b"); 33])]), "descriptors[1].entries: expected 1 to 32"),
    ];
    for (call, named) in cases {
        let why = client.call(call).unwrap_err();
        assert_eq!(why.code(), tonic::Code::InvalidArgument, "{named}: {why}");
        assert!(why.message().contains(named), "{named}: {why}");
    }
    // The domain is not UTF-8.
    let why = client.call_raw(vec![0x0a, 2, 0xff, 0xfe]).unwrap_err();
    assert_eq!(why.code(), tonic::Code::InvalidArgument);
    assert!(why.message().contains("domain") && why.message().contains("UTF-8"), "{why}");
    assert_eq!(client.call_raw(vec![0x0a, 200]).unwrap_err().code(), tonic::Code::InvalidArgument);
    let long = "x".repeat(65_536);
    let why = client.call(request("web", [descriptor(&[("path", &long)])])).unwrap_err();
    assert_eq!(why.code(), tonic::Code::ResourceExhausted);
    assert!(why.message().contains("65536"), "{why}");
    assert_eq!(client.ask(request("web", [path()])).statuses[0].limit_remaining, 4);
}

#[test]
fn more_limits_than_can_be_checked_together_are_refused() {
    let (_server, client) = start();
    let value = |number: usize| format!("/{number}");
    let paths = |count| request("web", (0..count).map(|number| descriptor(&[("path", &value(number))])));
    assert_eq!(client.ask(paths(32)).overall_code(), Code::Ok);
    let both = |number| descriptor(&[("path", &value(number)), ("remote_address", &value(number))]);
    let why = client.call(request("web", (0..17).map(both))).unwrap_err();
    assert_eq!(why.code(), tonic::Code::FailedPrecondition);
    assert!(why.message().contains("at most 32"), "{why}");
    assert_eq!(client.ask(paths(1)).statuses[0].limit_remaining, 3);
    // Limits that are only counted are left out first.
    let counted = |number| descriptor(&[("path", &value(number)), ("user", &value(number))]);
    assert_eq!(client.ask(request("web", (0..32).map(counted))).overall_code(), Code::Ok);
}
