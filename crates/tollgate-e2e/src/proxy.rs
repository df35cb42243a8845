//! Proxies that run with the configuration of an example.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use crate::{Example, Program, free_address, http, installed};

/// The path of requests that ask whether a proxy is ready. [`Upstream`](crate::Upstream) does not count them.
pub const PROBE: &str = "/.probe";

/// A proxy. Its configuration has the file name that the proxy's own documentation uses.
#[derive(Clone, Copy, Debug)]
pub enum Proxy {
    /// Envoy, with `envoy.yaml`.
    Envoy,
    /// nginx, with `nginx.conf`.
    Nginx,
    /// HAProxy, with `haproxy.cfg`.
    HaProxy,
    /// Traefik, with `traefik.yaml`, which may name further files in its folder. It listens before it has loaded its routes and
    /// answers 404 until then, so the fixture requests [`PROBE`] until the answer is another one. The last of these requests passes
    /// through the limits of the example.
    Traefik,
    /// Caddy, with `Caddyfile`.
    Caddy,
}

impl Example {
    /// Starts a proxy with this configuration and waits until it listens on an address.
    ///
    /// # Panics
    /// If the proxy does not start. The message has its log.
    pub fn start(&self, proxy: Proxy, listen: SocketAddr) -> Program {
        let folder = self.fill();
        let mut program = Program::start(proxy.command(folder.path()), folder);
        program.wait_for_listener(listen);
        if matches!(proxy, Proxy::Traefik) {
            program.wait_until("has loaded its routes", |_| {
                (http::get(listen, PROBE).status != 404).then_some(())
            });
        }
        program
    }
}

impl Proxy {
    /// The command that runs the proxy as a single process in the foreground, so that killing it leaves no worker behind.
    fn command(self, folder: &Path) -> Command {
        match self {
            Self::Envoy => {
                let mut command = Command::new(installed("envoy"));
                // Hot restarts share memory by a number that only one Envoy of a machine can have.
                command.args(["--config-path", "envoy.yaml", "--disable-hot-restart", "--concurrency", "1"]);
                command
            }
            Self::Nginx => {
                // Debian installs it outside of the search path of ordinary users.
                let mut command = Command::new("/usr/sbin/nginx");
                let settings = "daemon off; master_process off; pid nginx.pid;";
                command.arg("-p").arg(folder).args(["-c", "nginx.conf", "-e", "stderr", "-g", settings]);
                command
            }
            Self::HaProxy => {
                let mut command = Command::new("/usr/sbin/haproxy");
                command.args(["-db", "-f", "haproxy.cfg"]);
                command
            }
            Self::Traefik => {
                let mut command = Command::new(installed("traefik"));
                command.arg("--configFile=traefik.yaml");
                command
            }
            Self::Caddy => {
                let mut command = Command::new(installed("caddy"));
                command.args(["run", "--config", "Caddyfile"]);
                // Each Caddy needs its own admin port, and writes certificates and its last configuration to its folder.
                command.env("CADDY_ADMIN", free_address().to_string());
                command.env("XDG_DATA_HOME", folder).env("XDG_CONFIG_HOME", folder);
                command
            }
        }
    }
}
