//! Requests that Schemathesis generates from the OpenAPI document, and the responses that the document promises.

use tollgate_e2e::{Tollgate, python};

/// Test cases for each operation and phase. A run with them takes some ten seconds.
const MAX_EXAMPLES: &str = "100";

/// Statuses of requests that are valid by the document and cannot be carried out: a policy with mistakes (422), another version than
/// `If-Match` names (412), a denied check (429), and those that are expected by default. `If-Match` is compared before the body is read.
const SETTINGS: &str = r#"
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 401, 403, 404, 409, 412, 422, 429]
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 409, 412, 413, 422]
"#;

/// Runs all phases of Schemathesis on the document of a server.
fn conforms(server: &Tollgate, options: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = python();
    // It writes to the folder that it runs in.
    command.current_dir(folder.path());
    std::fs::write(folder.path().join("schemathesis.toml"), SETTINGS).unwrap();
    command.args(["-m", "schemathesis.cli", "run", &format!("http://{}/openapi.json", server.address)]);
    // The same test cases in every run.
    command.args(["--generation-deterministic", "--max-examples", MAX_EXAMPLES]);
    command.args(["--workers", "1", "--request-timeout", "10"]);
    command.args(["--phases", "examples,coverage,fuzzing,stateful", "--continue-on-failure"]);
    // Failures in full: the values that it hides by default are made up.
    command.args(["--no-color", "--output-truncate", "false", "--output-sanitize", "false"]).args(options);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "Schemathesis ended with {}:\n{text}{errors}", output.status);
    println!("{text}");
}

#[test]
fn responses_conform_to_the_document_without_tokens() {
    conforms(&Tollgate::start(""), &[]);
}

#[test]
fn responses_conform_to_the_document_with_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, line: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, line).unwrap();
        path.display().to_string()
    };
    let (tokens, admin_tokens) =
        (file("tokens", "api-token-of-the-test\n"), file("admin", "test:admin-token-of-the-test\n"));
    let server = Tollgate::start(&format!(
        "api: {{ token_file: {tokens} }}\nadmin: {{ listen: 127.0.0.1:0, token_file: {admin_tokens} }}\n"
    ));
    conforms(&server, &["--header", "Authorization: Bearer api-token-of-the-test"]);
}
