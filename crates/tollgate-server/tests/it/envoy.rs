//! Files of envoyproxy/ratelimit: which are imported, with the answers that the reference would give, and which are refused.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tollgate::Limit;
use tollgate::rules::{Descriptors, Refusal, Role, Selection};
use tollgate_server::config::{self, CheckedPolicy, PolicyContext};

use crate::cli::run;
use crate::rls_client::proto::rate_limit_response::{DescriptorStatus, rate_limit::Unit};
use crate::rls_client::{Client, descriptor, request};
use crate::server::Server;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/envoy")
}

fn read(path: &Path) -> Value {
    let name = path.display().to_string();
    config::read_yaml(&name, &std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The entries of a descriptor in the order of the file, which a JSON object does not keep: `{ kind: a, recipient: b }`.
fn entries(text: &str) -> Vec<(String, String)> {
    let inner = text.trim().trim_start_matches('{').trim_end_matches('}');
    let entry = |entry: &str| {
        let (key, value) = entry.trim().split_once(": ").unwrap_or_else(|| panic!("no entry: {entry}"));
        (key.to_owned(), value.to_owned())
    };
    inner.split(',').map(entry).collect()
}

/// One request of an expectations file: a line `- { [domain: D, ]descriptors: [{ k: v }, ...], answers: [...] }`.
struct Step {
    domain: Option<String>,
    descriptors: Vec<Vec<(String, String)>>,
    answers: Vec<String>,
}

fn steps(path: &Path) -> Vec<Step> {
    let text = std::fs::read_to_string(path).unwrap();
    let parsed = read(path);
    let lines = text.lines().filter(|line| line.starts_with("- "));
    let step = |(line, value): (&str, &Value)| {
        let list = line.split_once("descriptors: [").unwrap().1.split_once(']').unwrap().0;
        let answers = value["answers"].as_array().unwrap().iter().map(|it| it.as_str().unwrap().to_owned());
        Step {
            domain: value["domain"].as_str().map(str::to_owned),
            descriptors: list.split("},").map(entries).collect(),
            answers: answers.collect(),
        }
    };
    lines.zip(parsed.as_array().unwrap()).map(step).collect()
}

/// Counts what a policy admits, all in one window.
struct Counting {
    checked: CheckedPolicy,
    used: HashMap<(usize, String), u64>,
}

impl Counting {
    /// The answers to the descriptors of one request, in their order.
    fn answers(&mut self, domain: &str, descriptors: &[Vec<(String, String)>]) -> Vec<String> {
        let select = |entries: &Vec<(String, String)>| {
            let mut attributes = vec![("domain".to_owned(), domain.to_owned())];
            attributes.extend(entries.iter().cloned());
            self.checked.policy.select(&Descriptors { attributes: &attributes, ..Descriptors::default() }, 1)
        };
        let mut selections: Vec<Selection> = descriptors.iter().map(select).collect();
        let replaced: Vec<usize> = selections.iter().flat_map(|it| it.replaced.iter().copied()).collect();
        selections.iter_mut().for_each(|it| it.leave_out(&replaced));
        let looks: Vec<Look> = selections.iter().map(|it| self.look(it)).collect();
        if !looks.iter().any(|look| look.code == "OVER_LIMIT") {
            looks.iter().filter(|look| look.fits).for_each(|look| {
                let (key, _) = look.limit.as_ref().unwrap();
                *self.used.entry(key.clone()).or_default() += 1;
            });
        }
        looks.iter().map(|look| self.in_words(look)).collect()
    }

    fn look(&self, selection: &Selection) -> Look {
        if matches!(selection.refusal, Some(Refusal::EmptyKey { status: 429, .. })) {
            return Look { code: "OVER_LIMIT", fits: false, limit: None };
        }
        assert_eq!(selection.refusal, None);
        let check = match &selection.checks[..] {
            [] => return Look { code: "OK", fits: false, limit: None },
            [check] => check,
            more => panic!("one limit for each descriptor: {more:?}"),
        };
        let limit = self.checked.policy.limits()[check.limit].limit;
        let key = (check.limit, selection.subjects[check.subject].clone());
        let fits = self.used.get(&key).is_none_or(|used| *used < limit.size());
        let code = if fits || check.role == Role::Shadow { "OK" } else { "OVER_LIMIT" };
        Look { code, fits, limit: Some((key, limit)) }
    }

    fn in_words(&self, look: &Look) -> String {
        let Some((key, limit)) = &look.limit else { return look.code.to_owned() };
        let left = limit.size() - self.used.get(key).copied().unwrap_or_default();
        format!("{} {left} of {} per {}s", look.code, limit.size(), limit.horizon().get() / 1_000_000)
    }
}

/// The answer to one descriptor, before permits are taken.
struct Look {
    code: &'static str,
    fits: bool,
    limit: Option<((usize, String), Limit)>,
}

fn import(file: &Path) -> (Option<i32>, String, String) {
    run(&["policy", "import", "--from", "envoy", file.to_str().unwrap()])
}

#[test]
fn imported_files_answer_as_the_reference_does() {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let expectations: Vec<_> =
        files.iter().filter(|it| it.to_str().unwrap().ends_with(".expect.yaml")).collect();
    assert!(expectations.len() >= 10 && files.len() == 2 * expectations.len(), "{files:?}");
    for expected in expectations {
        let file = PathBuf::from(expected.to_str().unwrap().replace(".expect.yaml", ".yaml"));
        let (code, policy, err) = import(&file);
        assert_eq!(code, Some(0), "{err}");
        let checked = config::read_policy("imported", &policy, &PolicyContext::default());
        let checked = checked.unwrap_or_else(|why| panic!("{}: {why}\n{policy}", file.display()));
        let domain = read(&file)["domain"].as_str().unwrap().to_owned();
        let mut counting = Counting { checked, used: HashMap::new() };
        for (number, step) in (1..).zip(steps(expected)) {
            let domain = step.domain.as_deref().unwrap_or(&domain);
            let answers = counting.answers(domain, &step.descriptors);
            assert_eq!(answers, step.answers, "{}, step {number}\n{policy}", expected.display());
        }
    }
}

/// A status in the words of the expectations.
fn in_words(status: &DescriptorStatus) -> String {
    let code = status.code().as_str_name();
    let Some(limit) = &status.current_limit else { return code.to_owned() };
    let seconds = match limit.unit() {
        Unit::Unknown => panic!("no unit: {status:?}"),
        Unit::Second => 1,
        Unit::Minute => 60,
        Unit::Hour => 3_600,
        Unit::Day => 86_400,
        Unit::Week => 7 * 86_400,
        Unit::Month => 30 * 86_400,
        Unit::Year => 365 * 86_400,
    };
    format!("{code} {} of {} per {seconds}s", status.limit_remaining, limit.requests_per_unit)
}

#[test]
fn imported_files_answer_over_grpc_as_the_reference_does() {
    for entry in std::fs::read_dir(folder()).unwrap() {
        let expected = entry.unwrap().path();
        let Some(file) = expected.to_str().unwrap().strip_suffix(".expect.yaml") else { continue };
        let file = PathBuf::from(format!("{file}.yaml"));
        let (_, policy, _) = import(&file);
        let policy: String = policy.lines().map(|line| format!("  {line}\n")).collect();
        let server = Server::with(&format!("grpc: {{ listen: \"127.0.0.1:0\" }}\npolicy:\n{policy}"));
        let client = Client::new(server.grpc.unwrap());
        let domain = read(&file)["domain"].as_str().unwrap().to_owned();
        for (number, step) in (1..).zip(steps(&expected)) {
            let descriptors = step.descriptors.iter().map(|entries| {
                let entries: Vec<_> = entries.iter().map(|(key, value)| (&**key, &**value)).collect();
                descriptor(&entries)
            });
            let response = client.ask(request(step.domain.as_deref().unwrap_or(&domain), descriptors));
            let answers: Vec<_> = response.statuses.iter().map(in_words).collect();
            assert_eq!(answers, step.answers, "{}, step {number}", expected.display());
        }
    }
}

#[test]
fn files_that_the_reference_does_not_load_are_refused_with_line_and_column() {
    let limit = "rate_limit: { unit: second, requests_per_unit: 1 }";
    let one = |fields: &str| format!("domain: d\ndescriptors:\n  - key: a\n    {fields}\n");
    let cases = [
        ("descriptors: []\n".to_owned(), ":1:1: domain: is missing"),
        ("domain: ''\ndescriptors: []\n".to_owned(), ":1:1: domain: is missing"),
        ("- key: a\n".to_owned(), ":1:1: expected `domain:` and `descriptors:`"),
        (
            format!("domain: d\ndescriptors:\n  - value: x\n    {limit}\n"),
            ":3:5: descriptors.0.key: is empty",
        ),
        (
            format!(
                "domain: d\ndescriptors:\n  - {{ key: a, value: x, {limit} }}\n  - {{ key: a, value: x }}\n"
            ),
            ":4:5: descriptors.1: a x: a descriptor of this level has the same key and value",
        ),
        ("domain: d\ndescriptors:\n  - key: a\n  - key: a\n".to_owned(), ":4:5: descriptors.1: "),
        (
            one("ratelimit: { unit: second, requests_per_unit: 1 }"),
            ":4:5: descriptors.0.ratelimit: no such field (did you mean `rate_limit`?)",
        ),
        (
            one("rate_limit: { unit: second, request_per_unit: 1 }"),
            ":4:33: descriptors.0.rate_limit.request_per_unit: no such field (did you mean `requests_per_unit`?)",
        ),
        (
            one("rate_limit: { unit: fortnight, requests_per_unit: 1 }"),
            ":4:19: descriptors.0.rate_limit.unit: expected second, minute, hour, day, week, month or year",
        ),
        (one("rate_limit: { requests_per_unit: 1 }"), "descriptors.0.rate_limit.unit: expected second"),
        (one("rate_limit: { unit: second }"), "descriptors.0.rate_limit.requests_per_unit: is missing"),
        (
            one("rate_limit: { unlimited: true, unit: second }"),
            ":4:36: descriptors.0.rate_limit.unit: goes without `unlimited: true`",
        ),
        (
            one("rate_limit: { unlimited: true, requests_per_unit: 1 }"),
            ":4:36: descriptors.0.rate_limit.requests_per_unit: goes without `unlimited: true`",
        ),
        (
            one("rate_limit: { unit: second, requests_per_unit: 1, replaces: [{ name: '' }] }"),
            "descriptors.0.rate_limit.replaces.0: is empty",
        ),
        (
            one("rate_limit: { unit: second, requests_per_unit: 1, name: n, replaces: [{ name: n }] }"),
            "descriptors.0.rate_limit.replaces.0: names the limit itself",
        ),
        (
            one(&format!("descriptors: [{{ key: a, {limit} }}]")),
            "descriptors.0.descriptors.0.key: a cannot be",
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("envoy.yaml");
    for (text, why) in cases {
        std::fs::write(&file, &text).unwrap();
        let (code, out, err) = import(&file);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{text}");
        assert!(
            err.contains(&format!("envoy.yaml{}", if why.starts_with(':') { why } else { ":" })),
            "{text}{err}"
        );
        assert!(err.contains(why), "{text}{err}");
    }
}
