//! Who is let in with TLS.

use std::process::Command;

use tollgate_testkit::{RedisServer, TlsFiles};

#[test]
fn only_clients_of_the_same_authority_are_let_in() {
    let files = TlsFiles::generate();
    let strangers = TlsFiles::generate();
    let server = RedisServer::build().tls(&files).start();
    assert_eq!(ping(&server, &files, Some(&files)), "PONG\n");
    assert_eq!(ping(&server, &files, None), "");
    assert_eq!(ping(&server, &files, Some(&strangers)), "");
    assert_eq!(ping(&server, &strangers, Some(&files)), "");
}

#[test]
fn a_server_by_another_name_is_of_the_same_authority() {
    let files = TlsFiles::generate();
    let server = RedisServer::build().tls_by_wrong_name(&files).start();
    // `redis-cli` looks at the signature, not at the name.
    assert_eq!(ping(&server, &files, Some(&files)), "PONG\n");
}

#[test]
fn a_server_keeps_its_files_for_a_restart() {
    let files = TlsFiles::generate();
    let mut server = RedisServer::build().tls(&files).start();
    drop(files);
    server.restart();
}

/// What `redis-cli` prints for a ping, if it trusts one authority and has the certificate of another.
fn ping(server: &RedisServer, trusted: &TlsFiles, own: Option<&TlsFiles>) -> String {
    let mut command = Command::new("redis-cli");
    command.args(["-h", "127.0.0.1", "-p", &server.tls_address().port().to_string(), "--tls", "--cacert"]);
    command.arg(trusted.authority());
    if let Some(client) = own.map(TlsFiles::client) {
        command.arg("--cert").arg(client.certificate).arg("--key").arg(client.key);
    }
    let output = command.arg("PING").output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}
