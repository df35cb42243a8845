//! The module map of ARCHITECTURE.md names every module at the top of a crate, and nothing else.

use std::collections::BTreeSet;
use std::path::Path;

/// The entries of each folder in the map: lines that begin with a path, and below them indented names.
fn mapped(text: &str) -> Vec<(String, BTreeSet<String>)> {
    let map =
        text.split("## Module map").nth(1).and_then(|rest| rest.split("```").nth(1)).unwrap_or_default();
    let mut folders: Vec<(String, BTreeSet<String>)> = Vec::new();
    for line in map.lines().skip(1) {
        let is_path = |word: &&str| word.ends_with('/') || word.ends_with(".rs");
        let names = line.split_whitespace().take_while(is_path).map(str::to_owned);
        match (line.starts_with(' '), folders.last_mut()) {
            (true, Some((_, entries))) => entries.extend(names),
            _ => folders.extend(names.map(|name| (name, BTreeSet::new()))),
        }
    }
    folders
}

/// What a source folder has: files and folders, without those that every crate has.
fn found(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).expect("a folder of the map exists");
    let names = entries.map(|entry| {
        let entry = entry.expect("an entry can be read");
        let name = entry.file_name().into_string().expect("names are UTF-8");
        if entry.path().is_dir() { format!("{name}/") } else { name }
    });
    names.filter(|name| !matches!(name.as_str(), "lib.rs" | "mod.rs" | "main.rs")).collect()
}

#[test]
fn the_module_map_of_architecture_md_matches_the_tree() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = std::fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md can be read");
    assert!(text.lines().count() <= 150, "ARCHITECTURE.md has at most 150 lines");
    let folders = mapped(&text);
    assert!(folders.len() > 5, "the map was found: {folders:?}");
    for (folder, mut entries) in folders {
        let place = root.join(&folder);
        assert!(place.is_dir(), "{folder} is in the map and not in the tree");
        entries.remove("main.rs");
        if !entries.is_empty() {
            assert_eq!(entries, found(&place), "{folder}");
        }
    }
}
