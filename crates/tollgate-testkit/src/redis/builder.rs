//! What a test's server should be like, and its start.

use std::fs;
use std::process::Command;

use tempfile::TempDir;

use super::{LOG, Ports, RedisServer, ip_of};
use crate::clock::SteppedClock;
use crate::network::Place;
use crate::port::free_port;
use crate::process::Process;
use crate::program::ServerProgram;
use crate::tls::{CertificateFiles, TlsFiles};

/// How often other ports are chosen when some other program was quicker. Once is rare.
const STARTS_MAX: usize = 5;

/// What a server should be like. [`Self::start`] starts it.
#[derive(Clone, Debug)]
#[must_use]
pub struct RedisServerBuilder {
    program: ServerProgram,
    role: Role,
    tcp: bool,
    tls: Option<(TlsFiles, CertificateFiles)>,
    users: Option<String>,
    append_only: bool,
    place: Option<Place>,
    clock: Option<SteppedClock>,
    arguments: Vec<String>,
}

/// What the server does among others.
#[derive(Clone, Debug)]
enum Role {
    Store,
    ClusterNode,
    /// With its first configuration, which it rewrites as it learns.
    Sentinel(String),
}

impl Default for RedisServerBuilder {
    fn default() -> Self {
        Self {
            program: ServerProgram::Redis,
            role: Role::Store,
            tcp: false,
            tls: None,
            users: None,
            append_only: false,
            place: None,
            clock: None,
            arguments: Vec::new(),
        }
    }
}

impl RedisServerBuilder {
    /// Another program than the system's Redis.
    pub fn program(mut self, program: ServerProgram) -> Self {
        self.program = program;
        self
    }

    /// Listens on a free port of 127.0.0.1, too.
    pub fn tcp(mut self) -> Self {
        self.tcp = true;
        self
    }

    /// Listens with TLS on a free port of 127.0.0.1, as `localhost`, for clients with a certificate.
    pub fn tls(mut self, files: &TlsFiles) -> Self {
        self.tls = Some((files.clone(), files.server()));
        self
    }

    /// Like [`Self::tls`], but with the certificate of `wrong.example`.
    pub fn tls_by_wrong_name(mut self, files: &TlsFiles) -> Self {
        self.tls = Some((files.clone(), files.wrong_server()));
        self
    }

    /// Knows these users: lines such as `user alice on >secret ~* +@all`. Unless a line speaks of `default`, that user
    /// stays on and needs no password.
    pub fn users(mut self, acl_lines: &[&str]) -> Self {
        self.users = Some(acl_lines.join("\n") + "\n");
        self
    }

    /// Writes every change to disk before it answers, so that a killed server comes back with all it has promised.
    pub fn append_only(mut self) -> Self {
        self.append_only = true;
        self
    }

    /// Runs in this place and listens there on TCP, on all its addresses.
    pub fn place(mut self, place: &Place) -> Self {
        self.place = Some(place.clone());
        self.tcp()
    }

    /// Takes the time of day from this clock.
    pub fn clock(mut self, clock: &SteppedClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// One more word on the command line.
    pub fn arg(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// More words on the command line.
    pub fn args(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }

    pub(crate) fn cluster_node(mut self) -> Self {
        self.role = Role::ClusterNode;
        self
    }

    pub(crate) fn sentinel(mut self, configuration: String) -> Self {
        self.role = Role::Sentinel(configuration);
        self
    }

    /// Starts it and waits until it answers.
    ///
    /// # Panics
    /// If the program is missing, or ends at once, with the end of its log.
    pub fn start(self) -> RedisServer {
        let mut log = String::new();
        for _ in 0..STARTS_MAX {
            let mut server = self.spawn();
            match server.wait_until_ready() {
                Ok(()) => return server,
                Err(end) => log = end,
            }
            // With other ports it may start. Anything else would fail again.
            if !log.contains("Address already in use") {
                break;
            }
        }
        panic!("{:?} did not start:\n{log}", self.program);
    }

    fn spawn(&self) -> RedisServer {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let ports = Ports {
            tcp: self.tcp.then(free_port),
            tls: self.tls.is_some().then(free_port),
            bus: self.has_bus_port().then(free_port),
        };
        let command = self.command(&directory, ports);
        RedisServer {
            process: Process::start_with_log(&command, &directory.path().join(LOG)),
            command,
            ports,
            directory,
            place: self.place.clone(),
            _tls: self.tls.as_ref().map(|(files, _)| files.clone()),
            _clock: self.clock.clone(),
        }
    }

    /// Redis 6.2 cannot be told: its bus is 10,000 above its port.
    fn has_bus_port(&self) -> bool {
        matches!(self.role, Role::ClusterNode) && self.program != ServerProgram::Redis62
    }

    fn command(&self, directory: &TempDir, ports: Ports) -> Command {
        let mut command = match &self.place {
            Some(place) => place.command(self.program.path()),
            None => Command::new(self.program.path()),
        };
        if let Some(clock) = &self.clock {
            command.envs(clock.environment());
        }
        command.current_dir(directory.path());
        let write = |name: &str, text: &str| {
            fs::write(directory.path().join(name), text)
                .expect("a file in the temporary directory can be written");
        };
        if let Role::Sentinel(configuration) = &self.role {
            write("sentinel.conf", configuration);
            command.args(["sentinel.conf", "--sentinel"]);
        }
        command.arg("--dir").arg(directory.path());
        command.args(["--unixsocket", "redis.sock", "--save", ""]);
        let ip = ip_of(self.place.as_ref()).to_string();
        command.args(["--bind", &ip, "--port", &ports.tcp.unwrap_or(0).to_string()]);
        if self.place.is_some() {
            // Without passwords, it would otherwise answer only programs of its own place.
            command.args(["--protected-mode", "no"]);
        }
        // A replica's first copy would otherwise wait five seconds for others to share it.
        command.args(["--repl-diskless-sync-delay", "0"]);
        if self.append_only {
            command.args(["--appendonly", "yes", "--appendfsync", "always"]);
        } else {
            command.args(["--appendonly", "no"]);
        }
        if let Some((files, own)) = &self.tls {
            command.args(["--tls-port", &ports.tls.unwrap_or(0).to_string(), "--tls-auth-clients", "yes"]);
            command.arg("--tls-ca-cert-file").arg(files.authority());
            command.arg("--tls-cert-file").arg(&own.certificate);
            command.arg("--tls-key-file").arg(&own.key);
        }
        if let Some(users) = &self.users {
            write("users.acl", users);
            command.args(["--aclfile", "users.acl"]);
        }
        if let Some(bus) = ports.bus {
            command.args(["--cluster-port", &bus.to_string()]);
        }
        command.args(&self.arguments);
        command
    }
}
