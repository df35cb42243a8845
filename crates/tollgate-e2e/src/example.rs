//! Configurations that users copy, with their default ports replaced by free ones.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A folder of configuration files and the addresses to replace in them.
///
/// ```no_run
/// # use tollgate_e2e::{Example, Proxy, Tollgate, Upstream, free_address};
/// let (tollgate, upstream, listen) = (Tollgate::start(""), Upstream::start(), free_address());
/// let nginx = Example::new("nginx")
///     .port("127.0.0.1:8080", tollgate.address)
///     .port("127.0.0.1:9000", upstream.address)
///     .port(8000, listen.port())
///     .start(Proxy::Nginx, listen);
/// ```
pub struct Example {
    folder: PathBuf,
    ports: Vec<(String, String)>,
}

impl Example {
    /// Names a folder below `/examples` in the repository.
    pub fn new(name: &str) -> Self {
        Self::at(&crate::root().join("examples").join(name))
    }

    /// Names a folder anywhere.
    pub fn at(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), ports: Vec::new() }
    }

    /// Replaces a default port, with or without its host (`8080`, `127.0.0.1:8080`), in all files. A longer number that contains
    /// it is not changed.
    pub fn port(mut self, default: impl Display, actual: impl Display) -> Self {
        self.ports.push((default.to_string(), actual.to_string()));
        self
    }

    /// Writes the files with the ports replaced to a temporary folder.
    ///
    /// # Panics
    /// If a default port is in none of the files, or the files cannot be copied.
    pub fn fill(&self) -> TempDir {
        let filled = tempfile::tempdir().expect("a temporary folder can be made");
        let mut is_used = vec![false; self.ports.len()];
        let entries = fs::read_dir(&self.folder)
            .unwrap_or_else(|why| panic!("cannot read the example {}: {why}", self.folder.display()));
        for entry in entries {
            let path = entry.expect("an entry of the folder can be read").path();
            let text = fs::read_to_string(&path)
                .unwrap_or_else(|why| panic!("{} is not a text file: {why}", path.display()));
            let name = path.file_name().expect("an entry of a folder has a name");
            fs::write(filled.path().join(name), replace(&text, &self.ports, &mut is_used))
                .expect("the temporary folder can be written");
        }
        for ((default, _), is_used) in self.ports.iter().zip(is_used) {
            assert!(is_used, "no file in {} contains {default}", self.folder.display());
        }
        filled
    }
}

/// Replaces every pair in one pass, so that a replaced port is not replaced again, and notes which pairs were found. Earlier pairs
/// win.
fn replace(text: &str, pairs: &[(String, String)], is_used: &mut [bool]) -> String {
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let is_inside_number = replaced.ends_with(|last: char| last.is_ascii_digit());
        let found = pairs.iter().position(|(default, _)| {
            let after = rest.strip_prefix(default.as_str());
            let continues = |after: &str| after.starts_with(|next: char| next.is_ascii_digit());
            !is_inside_number && after.is_some_and(|after| !continues(after))
        });
        match found {
            Some(index) => {
                let (default, actual) = &pairs[index];
                is_used[index] = true;
                replaced += actual;
                rest = &rest[default.len()..];
            }
            None => {
                replaced.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(text: &str, example: impl Fn(Example) -> Example) -> String {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("proxy.conf"), text).unwrap();
        let filled = example(Example::at(folder.path())).fill();
        fs::read_to_string(filled.path().join("proxy.conf")).unwrap()
    }

    #[test]
    fn ports_are_replaced_once_and_only_as_whole_numbers() {
        let text = "listen 80; to 127.0.0.1:8080; to 127.0.0.1:80; 18080 8081 80801 8080";
        let filled = fill(text, |example| example.port(8080, 8081).port(8081, 9).port("127.0.0.1:80", "h:7"));
        assert_eq!(filled, "listen 80; to 127.0.0.1:8081; to h:7; 18080 9 80801 8081");
    }

    #[test]
    #[should_panic(expected = "contains 9000")]
    fn a_default_port_that_no_file_contains_is_an_error() {
        fill("listen 8080;", |example| example.port(8080, 1).port(9000, 2));
    }
}
