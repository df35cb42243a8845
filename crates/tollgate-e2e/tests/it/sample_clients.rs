//! The clients in `examples/clients`, over REST with a real server and over RESP with scripted replies.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use tollgate_e2e::Tollgate;

fn folder(language: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/clients").join(language)
}

fn run(mut command: Command) -> String {
    let output = command.output().unwrap_or_else(|why| panic!("{command:?} cannot be run: {why}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} ended with {}:\n{errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Answers the two commands of a client as the RESP listener does, and returns the commands.
fn scripted_resp() -> (SocketAddr, std::thread::JoinHandle<Vec<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let replies = [
            "*5\r\n:0\r\n:100\r\n:99\r\n:-1\r\n:1\r\n",
            "*6\r\n$7\r\nallowed\r\n:1\r\n$4\r\nrule\r\n$-1\r\n$7\r\nmessage\r\n$15\r\nRequest allowed\r\n",
        ];
        replies
            .map(|reply| {
                let command = read_command(&mut reader);
                (&stream).write_all(reply.as_bytes()).unwrap();
                command
            })
            .to_vec()
    });
    (address, thread)
}

/// Reads a command: an array of bulk strings.
fn read_command(reader: &mut impl BufRead) -> Vec<String> {
    let words = read_length(reader, '*');
    let mut read_word = || {
        let mut word = vec![0; read_length(reader, '$') + 2];
        reader.read_exact(&mut word).unwrap();
        String::from_utf8(word).unwrap().trim_end().to_owned()
    };
    (0..words).map(|_| read_word()).collect()
}

fn read_length(reader: &mut impl BufRead, kind: char) -> usize {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    line.trim_end().strip_prefix(kind).unwrap().parse().unwrap()
}

fn assert_resp_commands(commands: &[Vec<String>]) {
    assert_eq!(commands[0], ["CL.THROTTLE", "user:1", "99", "100", "60"]);
    assert_eq!(commands[1], ["TG.CHECK", "user", "alice", "path", "/api/items"]);
}

#[test]
fn go_client_checks_over_rest_and_resp() {
    let server = Tollgate::start("");
    let (resp, commands) = scripted_resp();
    let mut command = Command::new("go");
    command.current_dir(folder("go")).args(["run", ".", "-url", &format!("http://{}", server.address)]);
    command.args(["-resp", &resp.to_string()]);
    let printed = run(command);
    assert_eq!(
        printed,
        "REST key: allowed=true remaining=99\nREST request: allowed=true retryAfterSeconds=0\n\
         RESP CL.THROTTLE: [0 100 99 -1 1]\nRESP TG.CHECK: [allowed 1 rule <nil> message Request allowed]\n"
    );
    assert_resp_commands(&commands.join().unwrap());
}

#[test]
fn java_client_checks_over_rest_and_resp() {
    let server = Tollgate::start("");
    let (resp, commands) = scripted_resp();
    let mut command = Command::new("java");
    command.current_dir(folder("java")).arg("Client.java");
    command.args([format!("http://{}", server.address), resp.to_string()]);
    let printed = run(command);
    for part in [
        "REST key: Answer[allowed=true, retryAfterSeconds=0, json={\"allowed\":true",
        "REST request: Answer[allowed=true, retryAfterSeconds=0",
        "RESP CL.THROTTLE: [0, 100, 99, -1, 1]\n",
        "RESP TG.CHECK: [allowed, 1, rule, null, message, Request allowed]\n",
    ] {
        assert!(printed.contains(part), "{part} is not in {printed}");
    }
    assert_resp_commands(&commands.join().unwrap());
}
