//! The commands: which there are, which arguments they take, and the replies to those that every Redis client sends.

use super::RespDoor;
use super::conversation::{Pending, Session};
use super::frame::Argument;
use super::reply::{Reply, Version};
use crate::access::Refused;

/// A command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Command {
    Check(Check),
    Peek,
    Reset,
    Explain,
    Ping,
    Echo,
    Hello,
    Auth,
    Client,
    Table,
    Select,
    Info,
    ResetSession,
    Quit,
    /// The beginning of an HTTP request: a web page makes a browser send one to this port.
    HttpRequest,
}

/// A command that takes permits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Check {
    Throttle,
    Request,
}

/// A command as `COMMAND` lists it.
struct Listed {
    name: &'static str,
    command: Command,
    /// Arguments with the name; negative: at least so many.
    arity: i64,
    flags: &'static [&'static str],
    summary: &'static str,
}

const fn listed(
    name: &'static str,
    command: Command,
    arity: i64,
    flags: &'static [&'static str],
    summary: &'static str,
) -> Listed {
    Listed { name, command, arity, flags, summary }
}

/// All commands that clients may send, the most frequent ones first.
const LISTED: [Listed; 14] = [
    listed(
        "cl.throttle",
        Command::Check(Check::Throttle),
        -5,
        &["write", "fast"],
        "Takes permits from a limit that the caller names",
    ),
    listed(
        "tg.check",
        Command::Check(Check::Request),
        -3,
        &["write", "fast"],
        "Checks a request by the policy, or one key",
    ),
    listed(
        "tg.peek",
        Command::Peek,
        -3,
        &["readonly", "fast"],
        "Shows the answer of a check without taking permits",
    ),
    listed(
        "tg.reset",
        Command::Reset,
        -3,
        &["write", "fast"],
        "Resets the limits of a request, or of one key",
    ),
    listed(
        "tg.explain",
        Command::Explain,
        -3,
        &["readonly"],
        "Explains the answer that a request would get, as JSON",
    ),
    listed("ping", Command::Ping, -1, &["fast"], "Replies PONG, or its argument"),
    listed("echo", Command::Echo, 2, &["fast"], "Replies its argument"),
    listed("hello", Command::Hello, -1, &["no_auth", "fast"], "Chooses the version of the protocol"),
    listed("auth", Command::Auth, -2, &["no_auth", "fast"], "Shows a token"),
    listed("client", Command::Client, -2, &["fast"], "Names the connection, and shows its name and number"),
    listed("command", Command::Table, -1, &["fast"], "Lists the commands"),
    listed("select", Command::Select, 2, &["fast"], "Accepts database 0, the only one"),
    listed("info", Command::Info, -1, &["fast"], "Shows the version"),
    listed("reset", Command::ResetSession, 1, &["no_auth", "fast"], "Begins the session anew"),
];

/// Bytes of a client's name.
const NAME_BYTES_MAX: usize = 256;
/// Bytes of arguments that are repeated in the reply to an unknown command.
const REPEATED_BYTES_MAX: usize = 128;
/// The release of Redis whose basic commands these are. Some clients refuse servers that do not state one.
const REDIS_VERSION: &str = "7.2.0";

impl Command {
    /// The command of a name, in any case.
    pub(super) fn find(name: &[u8]) -> Option<Self> {
        let is_named = |known: &str| name.eq_ignore_ascii_case(known.as_bytes());
        let found = LISTED.iter().find(|listed| is_named(listed.name)).map(|listed| listed.command);
        found.or_else(|| match () {
            () if is_named("quit") => Some(Self::Quit),
            () if is_named("post") || is_named("host:") => Some(Self::HttpRequest),
            () => None,
        })
    }
}

/// The reply to a command, if there is one, and whether the connection ends after it.
pub(super) struct Answer {
    pub(super) reply: Option<Reply>,
    pub(super) is_last: bool,
}

impl RespDoor {
    /// Starts a command that takes permits.
    pub(super) fn check<'a>(&'a self, check: Check, arguments: &mut [Argument<'a>]) -> Pending<'a> {
        let started = match check {
            Check::Throttle => self.throttle(arguments),
            Check::Request => self.check_request(arguments),
        };
        started.unwrap_or_else(|reply| Box::pin(std::future::ready(reply)))
    }

    /// Answers a command that is not a check, or one of a client that has yet to show a token.
    pub(super) async fn run<'a>(
        &'a self,
        command: Option<Command>,
        session: &mut Session,
        arguments: &mut [Argument<'a>],
    ) -> Answer {
        let reply = match command {
            // A web page can make a browser send HTTP requests to this port.
            Some(Command::HttpRequest) => return closed_for_http(session),
            None if arguments.last().is_some_and(|last| last.starts_with(b"HTTP/")) => {
                return closed_for_http(session);
            }
            Some(Command::Quit) => return Answer { reply: Some(Reply::OK), is_last: true },
            Some(Command::Hello) => self.hello(session, arguments),
            Some(Command::Auth) => self.auth(session, arguments),
            Some(Command::ResetSession) => {
                session.reset();
                Ok(Reply::Simple("RESET"))
            }
            _ if !session.is_authorized() => {
                self.limiter.metrics.refused(Refused::KeyNotAllowed);
                Err(Reply::Error("NOAUTH Authentication required.".to_owned()))
            }
            Some(Command::Check(check)) => Ok(self.check(check, arguments).await),
            Some(Command::Peek) => self.peek(arguments).await,
            Some(Command::Reset) => self.reset(arguments).await,
            Some(Command::Explain) => self.explain(arguments).await,
            Some(Command::Ping) => ping(arguments),
            Some(Command::Echo) => echo(arguments),
            Some(Command::Client) => client(session, arguments),
            Some(Command::Table) => command_table(arguments),
            Some(Command::Select) => select(arguments),
            Some(Command::Info) => Ok(info()),
            None => Err(unknown(arguments)),
        };
        Answer { reply: Some(reply.unwrap_or_else(|error| error)), is_last: false }
    }

    /// `AUTH [user] token`. The token says who it is; the user name is for clients that always send one.
    fn auth(&self, session: &mut Session, arguments: &[Argument<'_>]) -> Result<Reply, Reply> {
        match arguments {
            [_, token] | [_, _, token] => self.show_token(session, token).map(|()| Reply::OK),
            _ => Err(wrong_arity("auth")),
        }
    }

    fn show_token(&self, session: &mut Session, token: &[u8]) -> Result<(), Reply> {
        if !self.access.has_tokens() {
            let why = "AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?";
            return Err(Reply::error(why));
        }
        if !self.access.is_token(token) {
            self.limiter.metrics.refused(Refused::WrongToken);
            return Err(Reply::Error(
                "WRONGPASS invalid username-password pair or user is disabled.".to_owned(),
            ));
        }
        session.authorize();
        Ok(())
    }

    /// `HELLO [version [AUTH user token] [SETNAME name]]`. Nothing is changed if a part of it is wrong.
    fn hello(&self, session: &mut Session, arguments: &[Argument<'_>]) -> Result<Reply, Reply> {
        let mut version = session.version;
        let mut name = None;
        let mut token = None;
        if let [_, wanted, options @ ..] = arguments {
            version = match &**wanted {
                b"2" => Version::Resp2,
                b"3" => Version::Resp3,
                _ => return Err(Reply::Error("NOPROTO unsupported protocol version".to_owned())),
            };
            let mut options = options;
            while let [option, rest @ ..] = options {
                options = match rest {
                    [_, shown, rest @ ..] if option.eq_ignore_ascii_case(b"AUTH") => {
                        token = Some(shown);
                        rest
                    }
                    [wanted, rest @ ..] if option.eq_ignore_ascii_case(b"SETNAME") => {
                        name = Some(client_name(wanted)?);
                        rest
                    }
                    _ => {
                        let option = option.escape_ascii();
                        return Err(Reply::error(format_args!("Syntax error in HELLO option '{option}'")));
                    }
                };
            }
        }
        match token {
            Some(token) => self.show_token(session, token)?,
            None if session.is_authorized() => {}
            None => {
                let why = "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time";
                return Err(Reply::Error(why.to_owned()));
            }
        }
        session.version = version;
        session.name = name.unwrap_or_else(|| std::mem::take(&mut session.name));
        let text = |text: &'static str| Reply::text(text);
        let members = [
            ("server", text("tollgate")),
            ("version", text(env!("CARGO_PKG_VERSION"))),
            ("proto", Reply::Integer(version.number())),
            ("id", number(session.id)),
            ("mode", text("standalone")),
            ("role", text("master")),
            ("modules", Reply::List(Vec::new())),
        ];
        Ok(Reply::Map(members.map(|(name, value)| (name.into(), value)).into()))
    }
}

fn closed_for_http(session: &Session) -> Answer {
    tracing::info!(peer = %session.peer, "closed: an HTTP request on the port for Redis clients");
    Answer { reply: None, is_last: true }
}

fn number(number: u64) -> Reply {
    Reply::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

fn ping(arguments: &[Argument<'_>]) -> Result<Reply, Reply> {
    match arguments {
        [_] => Ok(Reply::Simple("PONG")),
        [_, text] => Ok(Reply::Bytes(text.to_vec())),
        _ => Err(wrong_arity("ping")),
    }
}

fn echo(arguments: &[Argument<'_>]) -> Result<Reply, Reply> {
    match arguments {
        [_, text] => Ok(Reply::Bytes(text.to_vec())),
        _ => Err(wrong_arity("echo")),
    }
}

fn select(arguments: &[Argument<'_>]) -> Result<Reply, Reply> {
    match arguments {
        [_, database] if **database == *b"0" => Ok(Reply::OK),
        [_, _] => Err(Reply::error("DB index is out of range; there is only database 0")),
        _ => Err(wrong_arity("select")),
    }
}

/// What clients ask `INFO` for: the version, and whether the server is ready.
fn info() -> Reply {
    let version = env!("CARGO_PKG_VERSION");
    Reply::text(format!(
        "# Server\r\nredis_version:{REDIS_VERSION}\r\ntollgate_version:{version}\r\nredis_mode:standalone\r\n\r\n\
         # Persistence\r\nloading:0\r\n\r\n# Replication\r\nrole:master\r\n"
    ))
}

fn client(session: &mut Session, arguments: &[Argument<'_>]) -> Result<Reply, Reply> {
    let [_, action, rest @ ..] = arguments else { return Err(wrong_arity("client")) };
    let action = String::from_utf8_lossy(action).to_ascii_lowercase();
    match (action.as_str(), rest) {
        ("setname", [name]) => {
            session.name = client_name(name)?;
            Ok(Reply::OK)
        }
        ("getname", []) if session.name.is_empty() => Ok(Reply::Null),
        ("getname", []) => Ok(Reply::text(session.name.clone())),
        ("id", []) => Ok(number(session.id)),
        ("info" | "list", []) => Ok(Reply::text(client_line(session))),
        ("setinfo", [_, _]) | ("no-evict" | "no-touch", [_]) => Ok(Reply::OK),
        ("setname" | "getname" | "id" | "info" | "list" | "setinfo" | "no-evict" | "no-touch", _) => {
            Err(wrong_arity(&format!("client|{action}")))
        }
        _ => Err(unknown_part(
            &arguments[1],
            "CLIENT: SETNAME, GETNAME, ID, INFO, LIST, SETINFO, NO-EVICT, NO-TOUCH",
        )),
    }
}

fn client_name(name: &[u8]) -> Result<String, Reply> {
    let is_visible = name.iter().all(u8::is_ascii_graphic);
    if !is_visible {
        return Err(Reply::error("Client names cannot contain spaces, newlines or special characters."));
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(Reply::error(format_args!("Client names have at most {NAME_BYTES_MAX} characters.")));
    }
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// The connection itself. Clients are not shown the connections of others.
fn client_line(session: &Session) -> String {
    let Session { id, peer, name, since, version, .. } = session;
    format!(
        "id={id} addr={peer} name={name} age={} db=0 resp={}\n",
        since.elapsed().as_secs(),
        version.number()
    )
}

/// `COMMAND [COUNT | DOCS [name ...] | INFO [name ...] | LIST]`
fn command_table(arguments: &[Argument<'_>]) -> Result<Reply, Reply> {
    let (action, names) = match arguments {
        [_, action, names @ ..] => (String::from_utf8_lossy(action).to_ascii_lowercase(), names),
        _ => (String::new(), &[][..]),
    };
    let is_wanted = |listed: &&Listed| {
        names.is_empty() || names.iter().any(|name| name.eq_ignore_ascii_case(listed.name.as_bytes()))
    };
    match action.as_str() {
        "" => Ok(Reply::List(LISTED.iter().map(entry).collect())),
        "count" => Ok(number(LISTED.len() as u64)),
        "list" => Ok(Reply::List(LISTED.iter().map(|listed| Reply::text(listed.name)).collect())),
        "docs" => {
            Ok(Reply::Map(LISTED.iter().filter(is_wanted).map(|it| (it.name.into(), docs(it))).collect()))
        }
        "info" if names.is_empty() => Ok(Reply::List(LISTED.iter().map(entry).collect())),
        "info" => {
            let found =
                |name: &Argument<'_>| LISTED.iter().find(|it| name.eq_ignore_ascii_case(it.name.as_bytes()));
            Ok(Reply::List(names.iter().map(|name| found(name).map_or(Reply::Null, entry)).collect()))
        }
        _ => Err(unknown_part(&arguments[1], "COMMAND: COUNT, DOCS, INFO, LIST")),
    }
}

/// Name, arity, flags, and the positions of the first and the last key with the step between keys.
fn entry(listed: &Listed) -> Reply {
    let key = i64::from(listed.command == Command::Check(Check::Throttle));
    let flags = listed.flags.iter().map(|flag| Reply::Simple(flag)).collect();
    let [first, last, step] = [key; 3].map(Reply::Integer);
    Reply::List(vec![
        Reply::text(listed.name),
        Reply::Integer(listed.arity),
        Reply::List(flags),
        first,
        last,
        step,
    ])
}

fn docs(listed: &Listed) -> Reply {
    let group = if listed.name.contains('.') { "module" } else { "connection" };
    let members = [("summary", listed.summary), ("since", env!("CARGO_PKG_VERSION")), ("group", group)];
    Reply::Map(members.map(|(name, value)| (name.into(), Reply::text(value))).into())
}

fn wrong_arity(name: &str) -> Reply {
    Reply::error(format_args!("wrong number of arguments for '{name}' command"))
}

fn unknown_part(part: &[u8], accepted: &str) -> Reply {
    let part = &part[..part.len().min(REPEATED_BYTES_MAX)];
    Reply::error(format_args!("unknown subcommand '{}'; accepted by {accepted}", part.escape_ascii()))
}

/// The reply of Redis to a command that it does not know.
fn unknown(arguments: &[Argument<'_>]) -> Reply {
    let cut =
        |bytes: &[u8], most: usize| String::from_utf8_lossy(&bytes[..bytes.len().min(most)]).into_owned();
    let mut shown = String::new();
    for argument in arguments.iter().skip(1) {
        if shown.len() >= REPEATED_BYTES_MAX {
            break;
        }
        shown += &format!("'{}' ", cut(argument, REPEATED_BYTES_MAX - shown.len()));
    }
    let name = arguments.first().map(|name| cut(name, REPEATED_BYTES_MAX)).unwrap_or_default();
    Reply::error(format_args!("unknown command '{name}', with args beginning with: {shown}"))
}
