//! The commands of the Redis protocol, reply for reply.

use serde_json::Value;
use tollgate::Micros;

use crate::resp_client::{Client, Reply, command};
use crate::server::Server;

/// These tests run twice, with the state in memory and in a store: the module's name says which.
fn with(yaml: &str) -> (Server, Client) {
    let yaml = format!("resp: {{ listen: '127.0.0.1:0' }}\n{yaml}");
    let server =
        if module_path!().ends_with("redis") { Server::on_redis(&yaml) } else { Server::with(&yaml) };
    let client = Client::connect(server.resp.unwrap());
    (server, client)
}

const POLICY: &str = "policy:
  rules:
    - { name: per-user, match: { path: /api/** }, key: user, limit: 2/min }
    - { name: per-plan, match: { header: { x-plan: free } }, key: attribute:tenant, limit: 1/min }
";

#[test]
fn throttle_replies_as_the_documentation_of_redis_cell_shows() {
    let (server, mut client) = with("");
    assert_eq!(client.call("CL.THROTTLE user123 15 30 60").integers(), [0, 16, 15, -1, 2]);
    assert_eq!(client.call("cl.throttle user123 15 30 60 5").integers(), [0, 16, 10, -1, 12]);
    assert_eq!(
        client.call("CL.THROTTLE user123 15 30 60 0").integers(),
        [0, 16, 10, -1, 12],
        "zero only shows"
    );
    assert_eq!(client.call("CL.THROTTLE user123 15 30 60 11").integers(), [1, 16, 10, 2, 12]);
    assert_eq!(client.call("CL.THROTTLE user123 15 30 60 17").integers(), [1, 16, 10, -1, 12], "never fits");
    assert_eq!(client.call("CL.THROTTLE user123 15 30 60 10").integers(), [0, 16, 0, -1, 32]);
    server.clock.advance(Micros::new(1_999_999));
    assert_eq!(client.call("CL.THROTTLE user123 15 30 60").integers(), [1, 16, 0, 1, 31]);
    server.clock.advance(Micros::new(1));
    assert_eq!(client.call("CL.THROTTLE user123 15 30 60").integers(), [0, 16, 0, -1, 32]);
    assert_eq!(client.call("CL.THROTTLE other 0 1 1").integers(), [0, 1, 0, -1, 1], "a limit of one");
    assert_eq!(client.call("CL.THROTTLE other 0 1 1").integers(), [1, 1, 0, 1, 1]);
}

#[test]
fn wrong_arguments_of_throttle_take_nothing_and_are_named() {
    let (_server, mut client) = with("");
    let usage = "Cell error: Store error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]";
    let key = "k".repeat(257);
    for (words, why) in [
        ("CL.THROTTLE", usage),
        ("CL.THROTTLE a 1 2", usage),
        ("CL.THROTTLE a 1 2 3 4 5", usage),
        ("CL.THROTTLE a x 30 60", "Cell error: Store error: Couldn't parse as integer: x"),
        ("CL.THROTTLE a 15 30 60 1.5", "Cell error: Store error: Couldn't parse as integer: 1.5"),
        ("CL.THROTTLE a 15 0 60", "Cell error: Store error: Zero rates are not supported"),
        ("CL.THROTTLE a 15 30 0", "Cell error: Store error: Zero rates are not supported"),
        (
            "CL.THROTTLE a -1 30 60",
            "ERR max_burst: must be a whole number from 0 to 1125899906842624, not -1",
        ),
        (
            "CL.THROTTLE a 15 -30 60",
            "ERR count_per_period: must be a whole number from 1 to 1125899906842624, not -30",
        ),
        (
            "CL.THROTTLE a 15 30 60 -1",
            "ERR quantity: must be a whole number from 0 to 1125899906842624, not -1",
        ),
        ("CL.THROTTLE {a} 15 30 60", "ERR key: must not contain control characters, '{' or '}'"),
        ("CL.THROTTLE  15 30 60", "ERR key: must not be empty"),
        (&format!("CL.THROTTLE {key} 15 30 60"), "ERR key: must be at most 256 bytes long, not 257"),
        (
            "CL.THROTTLE a 15 1 1125899906842624",
            "ERR max_burst, count_per_period, period: too slow: a key would take more than 35 years to recover",
        ),
    ] {
        assert_eq!(client.call(words).error(), why, "{words}");
    }
    client.send(b"*5\r\n$11\r\nCL.THROTTLE\r\n$1\r\n\xff\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n");
    assert_eq!(client.reply().error(), "ERR key: must be UTF-8");
    assert_eq!(client.call("CL.THROTTLE a 15 30 60").integers(), [0, 16, 15, -1, 2], "nothing was taken");
}

#[test]
fn one_key_is_one_state_through_every_door() {
    let (server, mut client) = with("");
    // The default bucket: capacity 100, 10 a second.
    assert_eq!(client.call("CL.THROTTLE user:1 99 10 1 60").integers(), [0, 100, 40, -1, 6]);
    let rest = server.get("/api/v1/rate-limit/check?key=user:1&permits=30").json();
    assert_eq!((&rest["allowed"], &rest["remaining"]), (&Value::Bool(true), &Value::from(10)));
    let reply = client.call("TG.CHECK KEY user:1 PERMITS 10");
    assert_eq!((reply.get("allowed").integer(), reply.get("remaining").integer()), (1, 0));
    assert_eq!(server.get("/api/v1/rate-limit/check?key=user:1").status, 429);
    assert_eq!(client.call("CL.THROTTLE user:1 99 10 1").integers(), [1, 100, 0, 1, 10]);
    // Under a smaller limit the key has still used all of it.
    assert_eq!(client.call("CL.THROTTLE user:1 15 30 60").integers()[..3], [1, 16, 0]);
    assert_eq!(client.call("TG.RESET KEY user:1").get("message").text(), "Rate limit reset");
    assert_eq!(client.call("CL.THROTTLE user:1 99 10 1").integers(), [0, 100, 99, -1, 1]);
    if let Some(store) = &server.store {
        assert_eq!(store.cli(&["EXISTS", "rate_limiter:token_bucket:user:1"]).trim(), "1");
    }
}

#[test]
fn a_check_of_a_key_has_the_fields_of_the_rest_answer() {
    let (server, mut client) = with("");
    for algorithm in
        ["TOKEN_BUCKET", "LEAKY_BUCKET", "FIXED_WINDOW", "SLIDING_WINDOW", "SLIDING_WINDOW_COUNTER"]
    {
        let rest = server.get(&format!("/api/v1/rate-limit/check?key=a&algorithm={algorithm}&permits=60"));
        let expected: Vec<(String, Value)> = ordered(&rest.body);
        let reply = client.call(&format!("TG.CHECK KEY b ALGORITHM {algorithm} PERMITS 60"));
        assert_eq!(reply.names(), expected.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>());
        for (name, value) in &expected {
            match (name.as_str(), value) {
                ("key", _) => assert_eq!(reply.get(name).text(), "b"),
                (_, Value::Bool(it)) => assert_eq!(reply.get(name).integer(), i64::from(*it), "{name}"),
                (_, Value::Number(it)) => {
                    assert_eq!(reply.get(name).integer(), it.as_i64().unwrap(), "{name}")
                }
                (_, Value::String(it)) => assert_eq!(reply.get(name).text(), it, "{name}"),
                (_, other) => panic!("{other}"),
            }
        }
        let denied =
            client.call(&format!("tg.check key b algorithm {} permits 60", algorithm.to_lowercase()));
        assert_eq!(denied.get("message").text(), "Rate limit exceeded");
        let left = client.call(&format!("TG.PEEK KEY b ALGORITHM {algorithm}"));
        assert_eq!(left.names(), ["key", "algorithm", "limit", "remaining", "resetAfterSeconds"]);
        assert_eq!(left.get("remaining").integer(), 40);
    }
}

/// The members of a JSON object in their order.
fn ordered(json: &str) -> Vec<(String, Value)> {
    let object: Value = serde_json::from_str(json).unwrap();
    let mut members: Vec<_> = object.as_object().unwrap().clone().into_iter().collect();
    members.sort_by_key(|(name, _)| json.find(&format!("\"{name}\":")));
    members
}

#[test]
fn requests_are_checked_by_the_policy() {
    let (_server, mut client) = with(POLICY);
    let first = client.call("TG.CHECK user alice path /api/items method GET ip 192.0.2.1");
    assert_eq!((first.get("allowed").integer(), first.get("rule").text()), (1, "per-user"));
    let Reply::List(limits) = first.get("limits") else { panic!("{first:?}") };
    assert_eq!((limits[0].get("key").text(), limits[0].get("remaining").integer()), ("user:alice", 1));
    let peeked = client.call("TG.PEEK user alice path /api/items?page=2 permits 1");
    assert_eq!((peeked.get("allowed").integer(), peeked.get("remaining").integer()), (1, 1));
    assert_eq!(client.call("TG.CHECK user alice path /api/items").get("allowed").integer(), 1);
    let denied = client.call("TG.CHECK user alice path /api/items");
    assert_eq!((denied.get("allowed").integer(), denied.get("code").text()), (0, "USER_LIMIT"));
    assert!(denied.get("retryAfterSeconds").integer() > 0);
    assert_eq!(client.call("TG.CHECK user bob path /api/items").get("allowed").integer(), 1);
    let explained = client.call("TG.EXPLAIN user alice path /api/items");
    let explained: Value = serde_json::from_str(explained.text()).unwrap();
    assert_eq!(
        (&explained["allowed"], &explained["rules"][0]["why"]),
        (&Value::Bool(false), &"applies".into())
    );
    assert_eq!(client.call("TG.RESET user alice path /api/items"), Reply::Simple("OK".to_owned()));
    assert_eq!(client.call("TG.CHECK user alice path /api/items").get("allowed").integer(), 1);
    let plan =
        "TG.CHECK header:X-Plan free attribute:tenant t1 query:page 2 host Shop.Example:80 path /other";
    assert_eq!(client.call(plan).get("rule").text(), "per-plan");
    assert_eq!(client.call(plan).get("allowed").integer(), 0);
    let unmatched = client.call("TG.CHECK path /other");
    assert_eq!((unmatched.get("allowed").integer(), unmatched.get("unmatched").integer()), (1, 1));
    assert_eq!(*unmatched.get("rule"), Reply::Null);
}

#[test]
fn wrong_descriptors_take_nothing_and_are_named() {
    let (_server, mut client) = with(POLICY);
    let accepted = "accepted: user, ip, apiKey, apiKeyId, tier, method, host, path, permits, header:NAME, query:NAME, attribute:NAME";
    let long = "x".repeat(4097);
    for (words, why) in [
        ("TG.CHECK", format!("ERR expected descriptors as pairs of name and value, or KEY key; {accepted}")),
        ("TG.CHECK usr alice", format!("ERR usr: no such descriptor; {accepted}")),
        ("TG.CHECK header: x", format!("ERR header:: no such descriptor; {accepted}")),
        ("TG.CHECK user", "ERR user: has no value; descriptors are pairs of name and value".to_owned()),
        ("TG.CHECK user a user b", "ERR user: stands more than once".to_owned()),
        ("TG.CHECK header:X-Plan a header:x-plan b", "ERR header:x-plan: stands more than once".to_owned()),
        ("TG.CHECK ip nowhere", "ERR ip: must be an address such as 192.0.2.1 or 2001:db8::1".to_owned()),
        ("TG.CHECK path api", "ERR path: must begin with /".to_owned()),
        (
            "TG.CHECK permits 0",
            "ERR permits: must be a whole number from 1 to 1125899906842624, not 0".to_owned(),
        ),
        (
            "TG.CHECK permits +1",
            "ERR permits: must be a whole number from 1 to 1125899906842624, not +1".to_owned(),
        ),
        ("TG.CHECK apiKeyId x", "ERR apiKeyId: must be 32 hexadecimal digits, as answers show it".to_owned()),
        ("TG.CHECK apiKey x apiKeyId y", "ERR apiKeyId: only one of apiKey and apiKeyId".to_owned()),
        (&format!("TG.CHECK user {long}"), "ERR user: must have at most 4096 bytes".to_owned()),
        ("TG.CHECK KEY", "ERR KEY: expected KEY key [ALGORITHM algorithm] [PERMITS permits]".to_owned()),
        (
            "TG.CHECK KEY a LIMIT 5",
            "ERR LIMIT: no such option; accepted behind KEY key: ALGORITHM, PERMITS".to_owned(),
        ),
        ("TG.CHECK KEY a PERMITS", "ERR PERMITS: has no value".to_owned()),
        (
            "TG.CHECK KEY a PERMITS 101",
            "ERR permits: must be a whole number from 1 to 100, the limit".to_owned(),
        ),
        (
            "TG.CHECK user alice path /api/items permits 3",
            "ERR permits: must be a whole number from 1 to 2, the limit of the rule per-user".to_owned(),
        ),
        ("TG.EXPLAIN KEY a", format!("ERR TG.EXPLAIN explains requests, not keys; {accepted}")),
    ] {
        assert_eq!(client.call(words).error(), why, "{words}");
    }
    let unknown = client.call("TG.CHECK KEY a ALGORITHM x");
    assert!(
        unknown.error().starts_with("ERR ALGORITHM: ") && unknown.error().contains("TOKEN_BUCKET"),
        "{unknown:?}"
    );
    assert_eq!(client.call("TG.PEEK KEY a").get("remaining").integer(), 100, "nothing was taken");
}

#[test]
fn version_3_replies_with_maps_and_booleans() {
    let (_server, mut client) = with("");
    let hello = client.call("HELLO 3 SETNAME app");
    assert!(matches!(hello, Reply::Map(_)), "{hello:?}");
    assert_eq!((hello.get("server").text(), hello.get("proto").integer()), ("tollgate", 3));
    assert_eq!(client.call("CLIENT GETNAME").text(), "app");
    let reply = client.call("TG.CHECK KEY a");
    assert!(matches!(reply, Reply::Map(_)), "{reply:?}");
    assert_eq!(*reply.get("allowed"), Reply::Bool(true));
    assert_eq!(client.call("CL.THROTTLE a 15 30 60").integers().len(), 5);
    assert_eq!(client.call("TG.CHECK path /").get("rule"), &Reply::Null);
    assert_eq!(client.call("HELLO 2").get("proto").integer(), 2);
    assert_eq!(client.call("HELLO 4").error(), "NOPROTO unsupported protocol version");
    assert_eq!(client.call("HELLO 3 FOO").error(), "ERR Syntax error in HELLO option 'FOO'");
    assert_eq!(client.call("HELLO").get("proto").integer(), 2, "a wrong HELLO changes nothing");
}

#[test]
fn commands_that_clients_send_at_connect_are_answered() {
    let (_server, mut client) = with("");
    let simple = |text: &str| Reply::Simple(text.to_owned());
    for (words, expected) in [
        ("PING", simple("PONG")),
        ("ping hi", Reply::Text("hi".to_owned())),
        ("ECHO hi", Reply::Text("hi".to_owned())),
        ("SELECT 0", simple("OK")),
        ("CLIENT SETINFO LIB-NAME redis-py", simple("OK")),
        ("CLIENT SETNAME app", simple("OK")),
        ("CLIENT NO-EVICT on", simple("OK")),
        ("COMMAND COUNT", Reply::Integer(14)),
        ("COMMAND INFO nothing", Reply::List(vec![Reply::Null])),
        ("RESET", simple("RESET")),
        ("CLIENT GETNAME", Reply::Null),
    ] {
        assert_eq!(client.call(words), expected, "{words}");
    }
    assert!(client.call("CLIENT ID").integer() > 0);
    for words in ["CLIENT INFO", "CLIENT LIST"] {
        assert!(client.call(words).text().contains("addr=127.0.0.1:"), "{words}");
    }
    assert!(client.call("INFO server").text().contains("\r\nloading:0\r\n"));
    let Reply::List(info) = client.call("COMMAND INFO cl.throttle") else { panic!("not a list") };
    assert!(matches!(&info[0], Reply::List(entry) if entry.len() == 6));
    assert!(client.call("COMMAND DOCS").names().contains(&"cl.throttle".to_owned()));
    for (words, why) in [
        ("FOO a b", "ERR unknown command 'FOO', with args beginning with: 'a' 'b' "),
        ("GET", "ERR unknown command 'GET', with args beginning with: "),
        ("ECHO", "ERR wrong number of arguments for 'echo' command"),
        ("CLIENT SETNAME", "ERR wrong number of arguments for 'client|setname' command"),
        ("SELECT 1", "ERR DB index is out of range; there is only database 0"),
        (
            "AUTH secret",
            "ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?",
        ),
    ] {
        assert_eq!(client.call(words).error(), why, "{words}");
    }
    let unknown = client.call("CLIENT KILL");
    assert!(
        unknown.error().starts_with("ERR unknown subcommand 'KILL'; accepted by CLIENT: SETNAME"),
        "{unknown:?}"
    );
    let named = client.call_words(&["CLIENT", "SETNAME", "two words"]);
    assert_eq!(named.error(), "ERR Client names cannot contain spaces, newlines or special characters.");
    assert_eq!(client.call("QUIT"), simple("OK"));
    assert!(client.is_closed());
}

#[test]
fn inline_commands_are_answered() {
    let (_server, mut client) = with("");
    client.send(b"PING\r\n\r\nCL.THROTTLE \"user 1\" 15 30 60\r\n");
    assert_eq!(client.reply(), Reply::Simple("PONG".to_owned()));
    assert_eq!(client.reply().integers(), [0, 16, 15, -1, 2]);
    assert_eq!(client.call_words(&["CL.THROTTLE", "user 1", "15", "30", "60"]).integers()[2], 14);
}

#[test]
fn a_pipeline_is_answered_in_its_order() {
    let (_server, mut client) = with("");
    let mut bytes = Vec::new();
    for number in 0..1_000 {
        let key = format!("key:{}", number % 50);
        bytes.extend(command(&["CL.THROTTLE", &key, "9", "1", "60"]));
        if number % 100 == 99 {
            bytes.extend(command(&["ECHO", &number.to_string()]));
        }
    }
    client.send(&bytes);
    for number in 0..1_000_i64 {
        let left = 9 - number / 50;
        let reply = client.reply().integers();
        assert_eq!((reply[0], reply[2]), (i64::from(left < 0), left.max(0)), "command {number}");
        if number % 100 == 99 {
            assert_eq!(client.reply().text(), number.to_string());
        }
    }
}

#[test]
fn decisions_are_counted() {
    let (server, mut client) = with("");
    for _ in 0..3 {
        client.call("CL.THROTTLE a 0 1 60");
        client.call("TG.CHECK KEY b ALGORITHM FIXED_WINDOW");
    }
    client.call("CL.THROTTLE a 0 1 60 0");
    let metrics = server.get("/actuator/prometheus").body;
    let count = |algorithm: &str, allowed: bool| {
        let labels = format!("algorithm=\"{algorithm}\",allowed=\"{allowed}\",basis=\"exact\"");
        let line =
            metrics.lines().find(|it| it.starts_with("rate_limiter_requests_total") && it.contains(&labels));
        line.unwrap_or_else(|| panic!("{labels} in {metrics}")).rsplit(' ').next().unwrap().to_owned()
    };
    assert_eq!((count("TOKEN_BUCKET", true), count("TOKEN_BUCKET", false)), ("1".to_owned(), "2".to_owned()));
    assert_eq!(count("FIXED_WINDOW", true), "3");
}
