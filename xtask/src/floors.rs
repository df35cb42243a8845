//! Versions of dependencies below which weaknesses are known, held against `Cargo.lock`.

use std::cmp::Ordering;

/// A crate, and the first version without a known weakness that matters here.
const FLOORS: [(&str, &str); 12] = [
    ("h2", "0.4.16"),
    ("tonic", "0.12.3"),
    ("rustls", "0.23.18"),
    ("rustls-webpki", "0.103.13"),
    ("tokio", "1.44.2"),
    ("bytes", "1.11.1"),
    ("tracing-subscriber", "0.3.20"),
    ("jsonwebtoken", "10.3.0"),
    ("crossbeam-epoch", "0.9.20"),
    ("crossbeam-channel", "0.5.15"),
    ("dashmap", "5.1.0"),
    ("pingora", "0.9.0"),
];

/// A package of a lock file.
struct Package {
    name: String,
    version: String,
    dependencies: Vec<String>,
}

/// Reads a lock file, whose layout cargo keeps to the letter.
fn packages(lock: &str) -> Vec<Package> {
    let quoted = |line: &str| line.trim().trim_matches([',', '"']).to_owned();
    let package = |text: &str| {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
            Some(quoted(line))
        };
        let dependencies = text.lines().filter(|line| line.starts_with(" \"")).map(quoted).collect();
        Some(Package { name: field("name")?, version: field("version")?, dependencies })
    };
    lock.split("[[package]]").filter_map(package).collect()
}

/// Compares releases by their numbers. What comes before a release (`1.0.0-rc.1`) counts as the release before it.
fn compare(one: &str, other: &str) -> Ordering {
    let numbers = |version: &str| -> Vec<u64> {
        let plain = version.split(['-', '+']).next().unwrap_or_default();
        plain.split('.').filter_map(|number| number.parse().ok()).collect()
    };
    let is_release = |version: &str| !version.split('+').next().unwrap_or_default().contains('-');
    numbers(one).cmp(&numbers(other)).then(is_release(one).cmp(&is_release(other)))
}

#[test]
fn dependencies_are_at_or_above_the_versions_with_known_weaknesses_fixed() {
    let lock = crate::root().expect("xtask lies in the workspace").join("Cargo.lock");
    let packages = packages(&std::fs::read_to_string(lock).expect("the workspace has a lock file"));
    assert!(packages.len() > 50, "only {} packages were read", packages.len());
    for Package { name, version, dependencies } in packages {
        if let Some((_, floor)) = FLOORS.iter().find(|(known, _)| *known == name) {
            assert_ne!(compare(&version, floor), Ordering::Less, "{name} {version} is below {floor}");
        }
        // Its decompression has a weakness of its own.
        let brotli = dependencies.iter().find(|it| it.starts_with("brotli"));
        assert!(name != "rustls" || brotli.is_none(), "rustls is built with {brotli:?}");
    }
}

#[test]
fn versions_compare_by_number() {
    for (one, other, expected) in [
        ("1.11.1", "1.9.12", Ordering::Greater),
        ("0.103.13", "0.103.13", Ordering::Equal),
        ("10.3.0-rc.1", "10.3.0", Ordering::Less),
        ("1.5.7+zstd.1", "1.5.7", Ordering::Equal),
        ("0.4.9", "0.4.16", Ordering::Less),
    ] {
        assert_eq!(compare(one, other), expected, "{one} and {other}");
    }
}
