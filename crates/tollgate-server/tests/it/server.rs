//! A service in this process on a free port, and a client that says exactly what it is told to.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tollgate::{Clock, Timestamp};
use tollgate_server::app::App;
use tollgate_server::config;
use tollgate_testkit::RedisServer;

/// A Sunday evening, half a minute into its minute.
pub(crate) const NOW_SECS: u64 = 1_763_237_430;

/// Stops when dropped. Its time stands still unless it is moved.
pub(crate) struct Server {
    pub(crate) clock: Clock,
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
    /// Where Redis clients connect, if it was configured.
    pub(crate) resp: Option<SocketAddr>,
    /// Where gRPC listens, if it does.
    pub(crate) grpc: Option<SocketAddr>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
    /// What holds its state, if it is not in memory.
    pub(crate) store: Option<RedisServer>,
}

impl Server {
    /// With the defaults, on loopback.
    pub(crate) fn start() -> Self {
        Self::with("")
    }

    /// With the settings of a file.
    pub(crate) fn with(yaml: &str) -> Self {
        Self::on(None, yaml)
    }

    /// With its state in a store of its own.
    pub(crate) fn on_redis(yaml: &str) -> Self {
        Self::on(Some(RedisServer::start()), yaml)
    }

    fn on(store: Option<RedisServer>, yaml: &str) -> Self {
        let redis =
            store.as_ref().map(|store| format!("store: {}\nredis: {{ deadline: 10s }}\n", store.url()));
        let yaml = &format!("{}{yaml}", redis.unwrap_or_default());
        let file = tempfile::NamedTempFile::new().unwrap();
        let has_listen = yaml.lines().any(|line| line.starts_with("listen:"));
        let listen = if has_listen { "" } else { "listen: 127.0.0.1:0\n" };
        // With tokens there is an admin port, and each test needs one of its own.
        let needs_admin_port = yaml.contains("token_file:") && !yaml.contains("admin:");
        let admin = if needs_admin_port { "admin: { listen: 127.0.0.1:0 }\n" } else { "" };
        std::fs::write(file.path(), format!("{listen}{admin}log: {{ level: error }}\n{yaml}")).unwrap();
        let config = config::load(Some(file.path()), std::iter::empty(), Vec::new()).unwrap();
        let (send, receive) = std::sync::mpsc::channel();
        let stop = CancellationToken::new();
        let clock = Clock::manual(Timestamp::from_micros(NOW_SECS * 1_000_000));
        let (stopped, its_clock) = (stop.clone(), clock.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let app = App::bind(config, its_clock).await.unwrap();
                let (resp, grpc) = (app.resp_address().unwrap(), app.grpc_address().unwrap());
                send.send((app.address().unwrap(), app.admin_address().unwrap(), resp, grpc)).unwrap();
                app.run(stopped).await.unwrap();
            });
        });
        let (address, admin, resp, grpc) = receive.recv().unwrap();
        Self { clock, address, admin, resp, grpc, stop, thread: Some(thread), store }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        connect(self.address)
    }

    pub(crate) fn get(&self, target: &str) -> Response {
        self.ask("GET", target, "", "")
    }

    pub(crate) fn post(&self, target: &str, body: &str) -> Response {
        self.ask("POST", target, "", body)
    }

    /// `headers` are whole lines, each with its end.
    pub(crate) fn ask(&self, method: &str, target: &str, headers: &str, body: &str) -> Response {
        let length =
            if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
        let request = format!(
            "{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}{length}\r\n{body}"
        );
        exchange(self.connect(), &request)
    }

    /// Tells the service to stop, without waiting for it.
    pub(crate) fn tell_to_stop(&self) {
        self.stop.cancel();
    }

    /// Waits until it has stopped.
    pub(crate) fn wait(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

/// Sends all of a request and reads until the server closes.
pub(crate) fn exchange(mut stream: TcpStream, request: &str) -> Response {
    stream.write_all(request.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    Response::parse(&String::from_utf8(bytes).unwrap())
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn parse(text: &str) -> Self {
        let (head, body) =
            text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no HTTP response: {text:?}"));
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(n, v)| (n.to_owned(), v.to_owned()))
            .collect();
        Self { status, headers, body: body.to_owned() }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn number(&self, name: &str) -> u64 {
        self.header(name).unwrap_or_else(|| panic!("no {name} in {self:?}")).parse().unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|why| panic!("{why}: {self:?}"))
    }
}
