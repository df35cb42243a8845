//! Redis clients of other languages. Each sets a key in a real Redis and reads it.

use std::process::Command;

use tollgate_e2e::{node, python};
use tollgate_testkit::RedisServer;

/// Runs a script with the store's port as its argument and returns the text that it prints.
fn run(mut command: Command, port: u16) -> String {
    let output = command.arg(port.to_string()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} ended with {}:\n{errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn python_client_talks_to_redis() {
    let store = RedisServer::build().tcp().start();
    let script = "
import redis, sys
client = redis.Redis(port=int(sys.argv[1]), decode_responses=True)
client.set('key', 'from python')
print(client.get('key'))
";
    let mut command = python();
    command.args(["-c", script]);
    assert_eq!(run(command, store.tcp_address().port()), "from python\n");
}

#[test]
fn node_client_talks_to_redis() {
    let store = RedisServer::build().tcp().start();
    let script = "
const { createClient } = require('redis');
(async () => {
  const client = createClient({ url: `redis://127.0.0.1:${process.argv[1]}` });
  await client.connect();
  await client.set('key', 'from node');
  console.log(await client.get('key'));
  await client.close();
})();
";
    let mut command = node();
    command.args(["-e", script]);
    assert_eq!(run(command, store.tcp_address().port()), "from node\n");
}
