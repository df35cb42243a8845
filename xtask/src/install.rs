//! Programs that tests and benchmarks talk to, installed by the system's package manager where they are missing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// A program from the system's packages.
#[derive(Clone, Copy)]
pub(crate) enum Program {
    RedisServer,
    RedisCli,
    RedisBenchmark,
    Faketime,
    Iproute,
    Pip,
    Venv,
    Npm,
    Curl,
    Nginx,
    HaProxy,
    Protoc,
    Valgrind,
    H2load,
}

impl Program {
    const fn command(self) -> &'static str {
        match self {
            Self::RedisServer => "redis-server",
            Self::RedisCli => "redis-cli",
            Self::RedisBenchmark => "redis-benchmark",
            Self::Faketime => "faketime",
            Self::Iproute => "ip",
            Self::Pip | Self::Venv => "python3",
            Self::Npm => "npm",
            Self::Curl => "curl",
            Self::Nginx => "nginx",
            Self::HaProxy => "haproxy",
            Self::Protoc => "protoc",
            Self::Valgrind => "valgrind",
            Self::H2load => "h2load",
        }
    }

    /// The package that holds it: for apt-get, dnf, brew.
    const fn packages(self) -> [&'static str; 3] {
        match self {
            Self::RedisServer => ["redis-server", "redis", "redis"],
            Self::RedisCli | Self::RedisBenchmark => ["redis-tools", "redis", "redis"],
            Self::Faketime => ["faketime", "libfaketime", "libfaketime"],
            Self::Iproute => ["iproute2", "iproute", "iproute2mac"],
            Self::Pip => ["python3-pip", "python3-pip", "python3"],
            Self::Venv => ["python3-venv", "python3", "python3"],
            Self::Npm => ["npm", "npm", "node"],
            Self::Curl => ["curl", "curl", "curl"],
            Self::Nginx => ["nginx-light", "nginx", "nginx"],
            Self::HaProxy => ["haproxy", "haproxy", "haproxy"],
            Self::Protoc => ["protobuf-compiler", "protobuf-compiler", "protobuf"],
            Self::Valgrind => ["valgrind", "valgrind", "valgrind"],
            Self::H2load => ["nghttp2-client", "nghttp2", "nghttp2"],
        }
    }

    /// What makes it say its version, and nothing else.
    const fn version_arguments(self) -> &'static [&'static str] {
        match self {
            Self::Nginx | Self::HaProxy => &["-v"],
            Self::Iproute => &["-V"],
            Self::Pip => &["-m", "pip", "--version"],
            // Debian keeps this module in a package of its own.
            Self::Venv => &["-c", "import ensurepip"],
            Self::RedisServer
            | Self::RedisCli
            | Self::RedisBenchmark
            | Self::Faketime
            | Self::Npm
            | Self::Curl
            | Self::Protoc
            | Self::Valgrind
            | Self::H2load => &["--version"],
        }
    }

    fn is_there(self) -> bool {
        // Debian keeps servers out of the path of ordinary users.
        ["", "/usr/sbin/", "/usr/local/sbin/"]
            .iter()
            .any(|directory| succeeds(&format!("{directory}{}", self.command()), self.version_arguments()))
    }
}

fn runs(program: &str) -> bool {
    succeeds(program, &["--version"])
}

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let run = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    run.is_ok_and(|status| status.success())
}

/// Installs those that are missing.
pub(crate) fn programs(wanted: &[Program]) -> Result<()> {
    let missing: Vec<_> = wanted.iter().copied().filter(|program| !program.is_there()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names = |manager: usize| missing.iter().map(move |program| program.packages()[manager]);
    let managers: [(&str, &[&str]); 3] =
        [("apt-get", &["install", "-y", "-q"]), ("dnf", &["install", "-y"]), ("brew", &["install"])];
    let Some(index) = managers.iter().position(|(manager, _)| runs(manager)) else {
        let missing: Vec<_> = missing.iter().map(|program| program.command()).collect();
        bail!("please install {}: there is no apt-get, dnf or brew to do it with", missing.join(", "));
    };
    let (manager, install) = managers[index];
    println!("installing {} with {manager}", names(index).collect::<Vec<_>>().join(", "));
    if manager == "apt-get" {
        // Completes an installation that was interrupted; apt-get refuses to work before that.
        as_root("dpkg", &["--configure", "-a"])?;
        as_root(manager, &["update", "-q"])?;
    }
    let arguments: Vec<_> = install.iter().copied().chain(names(index)).collect();
    if manager == "brew" {
        quietly(Command::new(manager).args(arguments))
    } else {
        as_root(manager, &arguments)
    }?;
    match missing.iter().find(|program| !program.is_there()) {
        Some(program) => bail!("{} is still missing", program.command()),
        None => Ok(()),
    }
}

/// Runs a command as root: with sudo, where there is one and it is needed.
fn as_root(program: &str, arguments: &[&str]) -> Result<()> {
    let mut command = if runs("sudo") { Command::new("sudo") } else { Command::new("env") };
    quietly(command.env("DEBIAN_FRONTEND", "noninteractive").arg(program).args(arguments))
}

pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}

/// Runs a command whose output matters only if it fails.
pub(crate) fn quietly(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        output.status.success(),
        "{command:?} ended with {}:\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    Ok(())
}

/// Runs an installation below `target/programs`, unless it was completed from the same pins before. `install` gets the path to fill.
pub(crate) fn once(
    root: &Path,
    name: &str,
    pins: &str,
    install: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let place = root.join("target/programs");
    let (path, stamp) = (place.join(name), place.join(format!("{name}.pins")));
    if path.exists() && fs::read_to_string(&stamp).is_ok_and(|installed| installed == pins) {
        return Ok(());
    }
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    println!("installing {name} in {}", place.display());
    install(&path).with_context(|| format!("cannot install {name}"))?;
    // Written last, so that an interrupted installation starts again.
    fs::write(&stamp, pins).with_context(|| format!("cannot write {}", stamp.display()))
}

/// A peer, measured beside Tollgate.
#[derive(Clone, Copy)]
pub(crate) enum Peer {
    /// A program from the crates registry.
    ThrottlecrabServer,
    /// A library from the crates registry, and a program in `peers/` that drives it.
    Limitador,
}

/// Builds a peer below the target directory, once, and says where its program is.
pub(crate) fn peer(peer: Peer, root: &Path) -> Result<PathBuf> {
    let name = match peer {
        Peer::ThrottlecrabServer => "throttlecrab-server",
        Peer::Limitador => "limitador-peer",
    };
    let place = root.join("target/peers");
    let program = place.join("bin").join(name);
    if !program.exists() {
        println!("building {name} (some minutes, once)");
        let mut install = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        install.args(["install", "--locked", "--root"]).arg(&place);
        // Without it, cargo builds a package in its own folder.
        install.arg("--target-dir").arg(place.join("build"));
        match peer {
            Peer::ThrottlecrabServer => install.args([name, "--version", "0.4.40"]),
            Peer::Limitador => install.arg("--path").arg(root.join("peers/limitador")),
        };
        run(&mut install)?;
    }
    Ok(program)
}

/// The node program, built against two versions of the library.
pub(crate) struct Nodes {
    /// Of the working tree.
    pub(crate) now: PathBuf,
    /// Of [`BEFORE`].
    pub(crate) before: PathBuf,
}

/// The commit that the working tree is measured against.
const BEFORE: &str = "f129c2f7904142ed2320ca5820810bfcc6c7895c";

/// Builds `peers/node` below the target directory, against the working tree and against the sources of [`BEFORE`].
pub(crate) fn nodes(root: &Path) -> Result<Nodes> {
    let place = root.join("target/peers");
    let sources = place.join(BEFORE);
    if !sources.exists() {
        extract(root, &place, &sources)
            .with_context(|| format!("cannot take {BEFORE} from the history: is this a full clone?"))?;
    }
    let (program, copy) = (root.join("peers/node"), sources.join("peers/node"));
    fs::create_dir_all(copy.join("src"))?;
    for file in ["Cargo.toml", "Cargo.lock", "src/main.rs"] {
        copy_if_changed(&program.join(file), &copy.join(file))?;
    }
    Ok(Nodes {
        now: build(&program, &place.join("node"), &[])?,
        before: build(&copy, &place.join("node-before"), &["--features", "before"])?,
    })
}

/// Writes the sources of [`BEFORE`] to a directory.
fn extract(root: &Path, place: &Path, sources: &Path) -> Result<()> {
    fs::create_dir_all(place)?;
    // The last step is a rename, so an interrupted extraction is never taken for a complete one.
    let directory = tempfile::tempdir_in(place)?;
    let (archive, whole) = (directory.path().join("sources.tar"), directory.path().join("sources"));
    run(Command::new("git").arg("-C").arg(root).args(["archive", "--output"]).arg(&archive).arg(BEFORE))?;
    fs::create_dir(&whole)?;
    run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&whole))?;
    fs::rename(&whole, sources)?;
    Ok(())
}

/// Copies a file unless both are equal: a newer file would be compiled again.
fn copy_if_changed(from: &Path, to: &Path) -> Result<()> {
    let wanted = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    if fs::read(to).ok().as_ref() != Some(&wanted) {
        fs::write(to, wanted).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

/// Builds the node program of a directory. Cargo does nothing where neither it nor the library has changed.
fn build(program: &Path, target: &Path, features: &[&str]) -> Result<PathBuf> {
    let mut cargo = crate::cargo(&["build", "--release", "--manifest-path"]);
    cargo.arg(program.join("Cargo.toml")).args(features).arg("--target-dir").arg(target);
    crate::succeed(&mut cargo)?;
    Ok(target.join("release/node"))
}

/// The release of cargo-deny that checks the dependencies. Another one may find other things, so it is pinned.
const CARGO_DENY: &str = "0.20.2";

/// Builds cargo-deny below the target directory, once for each pinned release, and says where it is. No registry of prebuilt programs
/// holds a release that knows today's licences; without optimizations the build takes a minute and a half on two cores.
pub(crate) fn cargo_deny(root: &Path) -> Result<PathBuf> {
    let place = root.join("target/tools").join(format!("cargo-deny-{CARGO_DENY}"));
    let program = place.join("bin/cargo-deny");
    if !program.exists() {
        println!("building cargo-deny {CARGO_DENY} (some minutes, once)");
        let mut install = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        install.args(["install", "cargo-deny", "--version", CARGO_DENY, "--locked", "--profile", "dev"]);
        run(install.arg("--root").arg(&place))?;
    }
    Ok(program)
}
