//! Python and Node packages that the end-to-end tests run, installed below `target/programs` from lists that pin them by hash.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::install;

/// Makes a virtual environment with the packages of `crates/tollgate-e2e/python/requirements.txt`.
pub(crate) fn python(root: &Path) -> Result<()> {
    let list = root.join("crates/tollgate-e2e/python/requirements.txt");
    install::once(root, "python", &read(&list)?, |place| {
        install::quietly(Command::new("python3").args(["-m", "venv", "--clear"]).arg(place))?;
        let pip = ["-m", "pip", "install", "--require-hashes", "--only-binary=:all:", "--requirement"];
        install::quietly(Command::new(place.join("bin/python3")).args(pip).arg(&list))
    })
}

/// Installs the packages of `crates/tollgate-e2e/node/package-lock.json`.
pub(crate) fn node(root: &Path) -> Result<()> {
    let lists = root.join("crates/tollgate-e2e/node");
    install::once(root, "node", &read(&lists.join("package-lock.json"))?, |place| {
        fs::create_dir_all(place)?;
        for list in ["package.json", "package-lock.json"] {
            fs::copy(lists.join(list), place.join(list))?;
        }
        // It begins by removing the packages of an earlier installation.
        install::quietly(Command::new("npm").args(["ci", "--ignore-scripts"]).current_dir(place))
    })
}

fn read(list: &Path) -> Result<String> {
    fs::read_to_string(list).with_context(|| format!("cannot read {}", list.display()))
}
