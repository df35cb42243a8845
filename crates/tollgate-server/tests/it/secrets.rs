//! Settings that are secrets, and mistakes in the environment.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use tollgate_server::config::{self, Config, ConfigErrors, Store};
use tollgate_testkit::{RedisServer, wait_until};

use crate::server::{connect, exchange};

fn load(yaml: &str, variables: &[(&str, &str)]) -> Result<Config, ConfigErrors> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), yaml).unwrap();
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    config::load(Some(file.path()), variables, Vec::new())
}

/// Secrets that mean something else in YAML.
const SECRETS: [&str; 10] =
    ["0123456789", "1e5", "a # b", "'quoted'", "\"quoted\"", "~", "true", "{a: b}", "[a]", "&anchor *alias"];

#[test]
fn secrets_from_the_environment_are_taken_verbatim() {
    for secret in SECRETS {
        let variables = [
            ("TOLLGATE_STORE", "redis://h"),
            ("TOLLGATE_REDIS__PASSWORD", secret),
            ("TOLLGATE_REDIS__USERNAME", secret),
            ("TOLLGATE_REDIS__SENTINEL_USERNAME", secret),
        ];
        let Store::Redis { config, .. } = load("", &variables).unwrap().store else { panic!("no store") };
        assert_eq!(config.password.as_deref(), Some(secret));
        assert_eq!(config.username.as_deref(), Some(secret));
        assert_eq!(config.sentinel_username.as_deref(), Some(secret));
    }
}

#[test]
fn a_store_takes_a_password_of_digits_from_the_environment() {
    let password = "00420042";
    let store = RedisServer::build().tcp().start();
    store.cli(&["CONFIG", "SET", "requirepass", password]);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    let url = format!("redis://{}", store.tcp_address());
    command.args(["--listen", &address.to_string(), "--store", &url]).env("TOLLGATE_REDIS__DEADLINE", "5s");
    command.env("TOLLGATE_REDIS__PASSWORD", password);
    let _node = tollgate_testkit::Process::start(&command);
    wait_until("the node listens", || std::net::TcpStream::connect(address).is_ok());
    let request =
        "GET /api/v1/rate-limit/check?key=a HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    wait_until("the store decides", || exchange(connect(address), request).json()["basis"] == "exact");
}

#[test]
fn a_secret_is_never_echoed() {
    for (yaml, variables) in [
        ("redis: { password: 31337313 }", vec![]),
        ("redis: { password: [31337313] }", vec![]),
        ("redis: { password: { a: 31337313 } }", vec![]),
        ("redis: 31337313", vec![]),
        ("store: 31337313", vec![]),
        ("", vec![("TOLLGATE_REDIS", "31337313")]),
        ("", vec![("TOLLGATE_STORE", "31337313")]),
        ("", vec![("TOLLGATE_STORE", "redis://:31337313@h:x")]),
        ("", vec![("TOLLGATE_REDIS__PASSWORD__X", "31337313")]),
        ("", vec![("TOLLGATE_REDIS__PASSWORD", "31337313"), ("TOLLGATE_REDIS__DEADLINE", "x")]),
    ] {
        let mistakes = load(yaml, &variables).unwrap_err().to_string();
        assert!(!mistakes.contains("31337313"), "{yaml} {variables:?}: {mistakes}");
    }
    let config =
        load("", &[("TOLLGATE_STORE", "redis://h"), ("TOLLGATE_REDIS__PASSWORD", "31337313")]).unwrap();
    assert!(!format!("{config:?}").contains("31337313"));
}

#[test]
fn token_files_may_have_comments_and_must_have_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens");
    let load = |text: &str| {
        std::fs::write(&file, text).unwrap();
        load(&format!("api: {{ token_file: {} }}", file.display()), &[])
    };
    let config = load("# who may name keys\n\n  # more\nfirst-token-of-24-characters\n").unwrap();
    assert_eq!(config.token_digests.len(), 1, "a comment is no token");
    for empty in ["", "\n\n", "# nothing but a comment that is long enough\n"] {
        let mistakes = load(empty).unwrap_err().to_string();
        assert!(mistakes.contains("api.token_file") && mistakes.contains("holds no token"), "{mistakes}");
    }
    let mistakes = load("# comment\nfirst-token-of-24-characters\nshort\n").unwrap_err().to_string();
    assert!(mistakes.contains("line 3") && !mistakes.contains("short"), "{mistakes}");
}

/// Starts the program with a variable that is no UTF-8. Returns its exit code and what it says.
fn run_with(name: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(arguments).env(name, OsStr::from_bytes(b"secret-\xff"));
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn variables_that_are_no_utf8_get_a_clear_message() {
    let (code, said) = run_with("TOLLGATE_REDIS__PASSWORD", &["--listen", "127.0.0.1:0"]);
    assert_eq!((code, said.trim()), (Some(2), "TOLLGATE_REDIS__PASSWORD: the value is not UTF-8"));
    let (code, said) = run_with("TOLLGATE_TOKEN", &["check", "a", "--url", "http://127.0.0.1:9"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("TOLLGATE_TOKEN: the value is not UTF-8"), "{said}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["check", "a", "--url", "http://127.0.0.1:9"]).env("TOLLGATE_TOKEN", "secret-token\n");
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(said.contains("TOLLGATE_TOKEN: ") && said.contains("line end"), "{said}");
    assert!(!said.contains("secret-token"), "{said}");
    // Other programs' variables are not looked at: this one fails for its file only.
    let (code, said) = run_with("LESSOPEN", &["--config", "/nowhere.yaml"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("/nowhere.yaml: cannot be read"), "{said}");
}

#[test]
fn settings_that_cannot_be_get_a_clear_message() {
    for (yaml, mistake) in [
        ("memory: { max_keys: 18446744073709551615 }", "memory.max_keys: at least 1, at most 1000000000"),
        ("memory: { max_keys: 0 }", "memory.max_keys: at least 1, at most 1000000000"),
        ("store: redis://h?db=3", "store: has a ?, which only redis+unix:///PATH?db=NUMBER takes"),
        ("log: { level: verbose }", "log.level: accepted: error, warn, info"),
        ("log: { level: tollgate_server=loud }", "log.level: accepted: error, warn, info"),
    ] {
        let mistakes = load(yaml, &[]).unwrap_err().to_string();
        assert!(mistakes.contains(mistake), "{yaml}: {mistakes}");
    }
}

#[test]
fn a_password_of_a_later_layer_wins_over_a_password_file_of_an_earlier_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    std::fs::write(&file, "from-file\n").unwrap();
    let file = file.display().to_string();
    let password = |yaml: &str, variables: &[(&str, &str)]| match load(yaml, variables).unwrap().store {
        Store::Redis { config, .. } => config.password,
        Store::Memory(_) => None,
    };
    let by_file = format!("store: redis://h\nredis: {{ password_file: {file} }}\n");
    let by_text = "store: redis://h\nredis: { password: from-text }\n";
    let variable = ("TOLLGATE_REDIS__PASSWORD", "from-variable");
    let variable_file = ("TOLLGATE_REDIS__PASSWORD_FILE", file.as_str());
    assert_eq!(password(&by_file, &[]).as_deref(), Some("from-file"));
    assert_eq!(password(&by_file, &[variable]).as_deref(), Some("from-variable"));
    assert_eq!(password(by_text, &[variable_file]).as_deref(), Some("from-file"));
    let both = format!("redis: {{ password: a, password_file: {file} }}\n");
    for (yaml, variables) in [(both.as_str(), &[][..]), ("", &[variable, variable_file])] {
        let mistakes = load(yaml, variables).unwrap_err().to_string();
        assert!(mistakes.contains("redis.password_file: redis.password is set, too"), "{mistakes}");
    }
}
