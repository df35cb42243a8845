//! `/admin/*`: the policy in force and the tiers that are assigned, for whoever runs the service.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{ETAG, IF_MATCH, ORIGIN};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};
use tollgate::rules::KeyPart;
use tollgate::{AssignedTier, HistoryEntry, StoreError};

use super::actuator::Actuator;
use super::body::{BodyMemory, Buffered, Payer};
use super::json;
use super::problem::Problem;
use super::rest::answer::json_response;
use crate::access::AdminAccess;
use crate::config::{CheckedPolicy, ConfigErrors};
use crate::identity::IdentityConfig;
use crate::live::{AskedBy, LivePolicy, Loaded, NotChanged};
use crate::loopback::LoopbackCheck;
use crate::metrics::SharedMetrics;
use crate::serve::{Door, Received};

/// Bytes of a policy.
const POLICY_BYTES_MAX: usize = 1024 * 1024;
/// Bytes of anything else.
const BODY_BYTES_MAX: usize = 16 * 1024;
/// Bytes of the name of a member.
const MEMBER_BYTES_MAX: usize = 256;

/// Everything for whoever runs the service: the actuator, and what changes it while it runs.
pub(crate) struct Admin {
    pub(crate) actuator: Actuator,
    pub(crate) policy: Arc<LivePolicy>,
    pub(crate) identity: Arc<IdentityConfig>,
    pub(crate) body_timeout: Duration,
    pub(crate) body_memory: Arc<BodyMemory>,
    pub(crate) metrics: SharedMetrics,
}

/// The same on a listener of its own. The pages that only show something are open to every client that can reach it.
pub(crate) struct AdminDoor {
    pub(crate) admin: Arc<Admin>,
    pub(crate) access: AdminAccess,
    /// For a loopback listener without tokens.
    pub(crate) loopback: Option<LoopbackCheck>,
}

type Answer = Result<Response<Full<Bytes>>, Problem>;

impl Door for AdminDoor {
    async fn answer(&self, request: Request<Received>, _: IpAddr) -> Response<Full<Bytes>> {
        let answer = self.route(request).await;
        answer.unwrap_or_else(|problem| problem.counted(&self.admin.metrics).into_response())
    }
}

impl AdminDoor {
    async fn route(&self, request: Request<Received>) -> Answer {
        if let Some(loopback) = &self.loopback {
            loopback.check(&request)?;
        }
        if !Admin::is_admin(request.uri().path()) {
            return Ok(self.admin.show(&request).await);
        }
        let name = self.access.admit(request.headers())?;
        self.admin.change(request, name).await
    }
}

impl Admin {
    /// Whether a path is one of its own.
    pub(super) fn knows(path: &str) -> bool {
        path.starts_with("/actuator/") || Self::is_admin(path)
    }

    /// Whether a path is one of those that change something.
    pub(super) fn is_admin(path: &str) -> bool {
        path == "/admin" || path.starts_with("/admin/")
    }

    /// The pages that only show something.
    pub(super) async fn show<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        self.actuator.route(request.method(), request.uri().path(), request.headers()).await
    }

    /// A path below `/admin/`, for a caller who may use it. `name` is the caller's in the audit log.
    pub(super) async fn change(&self, request: Request<Received>, name: &str) -> Answer {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let answer = self.changing(request, name).await;
        if method != Method::GET && path != "/admin/policy/check" {
            let status = answer.as_ref().map_or_else(Problem::status, Response::status).as_u16();
            tracing::info!(admin = name, %method, path, status, "admin request");
        }
        answer
    }

    async fn changing(&self, request: Request<Received>, name: &str) -> Answer {
        // A page in a browser on this machine could reach it, too; browsers say where a page came from.
        if request.headers().contains_key(ORIGIN) {
            return Err(Problem::new(StatusCode::FORBIDDEN, "not for pages in browsers"));
        }
        let path = request.uri().path().to_owned();
        match (path.as_str(), request.method().clone()) {
            ("/admin/policy", Method::GET) => {
                let loaded = self.policy.current();
                let mut body = described(&self.policy, &loaded);
                body["text"] = json!(&*loaded.text);
                Ok(with_version(answered(&body), &loaded))
            }
            ("/admin/policy", Method::PUT) => {
                let replaced = replaced(request.headers())?;
                let text = self.text(request).await?;
                self.changed(self.policy.push(Some(text), name, replaced.as_deref()).await)
            }
            ("/admin/policy", Method::DELETE) => {
                let replaced = replaced(request.headers())?;
                self.changed(self.policy.push(None, name, replaced.as_deref()).await)
            }
            ("/admin/policy", _) => Err(Problem::method("GET, PUT, DELETE")),
            ("/admin/policy/check", Method::POST) => {
                let text = self.text(request).await?;
                let summary = self.policy.check(text, looked_over).await;
                Ok(answered(&summary.map_err(|why| mistakes(&why))?))
            }
            ("/admin/policy/reload", Method::POST) => self.changed(self.policy.reload(AskedBy::Admin).await),
            ("/admin/policy/check" | "/admin/policy/reload", _) => Err(Problem::method("POST")),
            ("/admin/policy/history", Method::GET) => self.history().await,
            ("/admin/policy/history", _) => Err(Problem::method("GET")),
            ("/admin/tiers", Method::GET) => Ok(answered(&self.tiers())),
            ("/admin/tiers", _) => Err(Problem::method("GET")),
            (path, method) if path.starts_with("/admin/policy/history/") => {
                let text = self.pushed_text(&path["/admin/policy/history/".len()..]).await?;
                match method {
                    Method::GET => Ok(answered(&json!({ "text": text }))),
                    _ => Err(Problem::method("GET")),
                }
            }
            (path, method) if path.starts_with("/admin/policy/rollback/") => {
                if method != Method::POST {
                    return Err(Problem::method("POST"));
                }
                let replaced = replaced(request.headers())?;
                let text = self.pushed_text(&path["/admin/policy/rollback/".len()..]).await?;
                let text = Some(text).filter(|text| !text.is_empty());
                self.changed(self.policy.push(text, name, replaced.as_deref()).await)
            }
            (path, method) => {
                match path.strip_prefix("/admin/tiers/").and_then(|rest| rest.split_once('/')) {
                    Some((family, member)) => self.tier(&method, family, member, request).await,
                    None => Err(Problem::new(
                        StatusCode::NOT_FOUND,
                        "no such path; there are /admin/policy, /admin/policy/check, /admin/policy/reload, /admin/policy/history, /admin/policy/rollback/NUMBER, /admin/tiers and /admin/tiers/FAMILY/MEMBER",
                    )),
                }
            }
        }
    }

    async fn text(&self, request: Request<Received>) -> Result<String, Problem> {
        let text = self.read(request, POLICY_BYTES_MAX).await?.into_text();
        text.ok_or_else(|| Problem::new(StatusCode::BAD_REQUEST, "a policy is text in UTF-8"))
    }

    async fn read(&self, request: Request<Received>, most: usize) -> Result<Buffered<'_>, Problem> {
        self.body_memory.read(request.into_body(), most, self.body_timeout, Payer::Trusted).await
    }

    fn changed(&self, outcome: Result<Arc<Loaded>, NotChanged>) -> Answer {
        match outcome {
            Ok(loaded) => Ok(with_version(answered(&described(&self.policy, &loaded)), &loaded)),
            Err(why @ NotChanged::OtherVersion(_)) => {
                Err(Problem::new(StatusCode::PRECONDITION_FAILED, why.to_string()))
            }
            Err(NotChanged::Mistakes(why)) => Err(mistakes(&why)),
            Err(why @ NotChanged::TooManyLimits(_)) => {
                Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, why.to_string()))
            }
            Err(why @ (NotChanged::Pushed | NotChanged::Inline | NotChanged::NoPolicy)) => {
                Err(Problem::new(StatusCode::CONFLICT, why.to_string()))
            }
            Err(NotChanged::Store(why)) => Err(not_stored("the policy was not pushed", &why)),
        }
    }

    /// What was pushed last, the newest first.
    async fn history(&self) -> Answer {
        let history = self.policy.history().await;
        let history = history.map_err(|why| not_stored("the history was not read", &why))?;
        let entry = |it: &HistoryEntry| {
            json!({
                "number": it.number,
                "version": Some(&it.label).filter(|label| !label.is_empty()),
                "author": it.author,
                "atEpochSeconds": it.at_secs,
            })
        };
        Ok(answered(&json!({ "pushed": history.iter().map(entry).collect::<Vec<_>>() })))
    }

    /// The text of a policy that was pushed; empty for a withdrawal.
    async fn pushed_text(&self, number: &str) -> Result<String, Problem> {
        let missing = || {
            Problem::new(
                StatusCode::NOT_FOUND,
                "no such number; GET /admin/policy/history lists those that are kept",
            )
        };
        let number = number.parse().map_err(|_| missing())?;
        let text = self.policy.pushed_text(number).await;
        text.map_err(|why| not_stored("the history was not read", &why))?.ok_or_else(missing)
    }

    /// The tiers that were assigned, sorted, by family and member.
    fn tiers(&self) -> Value {
        let mut tiers = self.policy.all_assigned();
        tiers.sort_by(|a, b| (&a.family, &a.member).cmp(&(&b.family, &b.member)));
        let tier = |it: &AssignedTier| json!({ "family": it.family, "member": it.member, "tier": it.tier });
        json!({ "tiers": tiers.iter().map(tier).collect::<Vec<_>>() })
    }

    async fn tier(&self, method: &Method, family: &str, member: &str, request: Request<Received>) -> Answer {
        let policy = self.policy.current();
        let families = &policy.limiter.policy().parts().families;
        let Some(known) = families.iter().find(|known| *known.name == *family) else {
            let names: Vec<_> = families.iter().map(|family| &*family.name).collect();
            let detail = match names.is_empty() {
                true => "the policy has no families of tiers".to_owned(),
                false => format!("no such family; the policy has: {}", names.join(", ")),
            };
            return Err(Problem::new(StatusCode::NOT_FOUND, detail));
        };
        let member = decoded(member)?;
        let id = match known.member {
            KeyPart::ApiKey => self.identity.api_key_member_id(&member).ok_or_else(wrong_member)?,
            _ => member,
        };
        let tier = match *method {
            Method::GET => {
                let tier = self.policy.assigned(family, &id);
                return Ok(answered(&json!({ "family": family, "member": id, "tier": tier.as_deref() })));
            }
            Method::PUT => {
                let body = json::parse(&self.read(request, BODY_BYTES_MAX).await?)?;
                let tier = body["tier"].as_str().filter(|tier| known.number(tier).is_some());
                let names = || known.tiers.join(", ");
                let why =
                    || Problem::parameter("tier", format_args!("one of {}: {{\"tier\":\"...\"}}", names()));
                tier.ok_or_else(why)?.to_owned()
            }
            Method::DELETE => String::new(),
            _ => return Err(Problem::method("GET, PUT, DELETE")),
        };
        let told = (!tier.is_empty()).then(|| tier.clone());
        let assigned = AssignedTier { family: family.to_owned(), member: id.clone(), tier };
        match self.policy.assign(assigned).await {
            Ok(true) => {
                match &told {
                    Some(tier) => tracing::info!(family, member = id, tier, "tier assigned"),
                    None => tracing::info!(family, member = id, "tier withdrawn"),
                }
                Ok(answered(&json!({ "family": family, "member": id, "tier": told })))
            }
            Ok(false) => Err(Problem::new(
                StatusCode::INSUFFICIENT_STORAGE,
                format!("at most {} members can have a tier assigned", tollgate::ASSIGNED_MAX),
            )),
            Err(why) => Err(not_stored("the tier was not assigned", &why)),
        }
    }
}

/// What an operator must know of a change that the store has not taken in.
fn not_stored(what: &str, why: &StoreError) -> Problem {
    let doubt = if why.may_have_run() { "it is not known whether " } else { "" };
    let what = if why.may_have_run() { what.replace("was not", "was") } else { what.to_owned() };
    tracing::warn!("{doubt}{what}: {why}");
    Problem::not_stored(format!("{doubt}{what}: {why}"))
}

fn answered(body: &Value) -> Response<Full<Bytes>> {
    json_response(body.to_string().into_bytes())
}

/// Adds the version as an entity tag, which `If-Match` can name.
fn with_version(mut response: Response<Full<Bytes>>, loaded: &Loaded) -> Response<Full<Bytes>> {
    // Hexadecimal digits: this does not fail.
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{}\"", loaded.version)) {
        response.headers_mut().insert(ETAG, tag);
    }
    response
}

/// The version that a change is to replace, by `If-Match`; none if any.
fn replaced(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut values = headers.get_all(IF_MATCH).iter();
    let (value, more) = (values.next(), values.next());
    let Some(value) = value else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    let version = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    match version {
        _ if text == "*" && more.is_none() => Ok(None),
        Some(version) if more.is_none() && !version.contains('"') => Ok(Some(version.to_owned())),
        Some(_) | None => Err(Problem::new(
            StatusCode::BAD_REQUEST,
            "If-Match: one version in quotes, as ETag has it, or *",
        )),
    }
}

fn epoch_seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The policy in force, in a few words, and the change that was refused last.
pub(super) fn described(live: &LivePolicy, loaded: &Loaded) -> Value {
    let policy = loaded.limiter.policy();
    let refused = live.refused();
    let refused = refused.map(|it| json!({ "atEpochSeconds": epoch_seconds(it.at), "why": it.why }));
    json!({
        "version": loaded.version,
        "origin": loaded.origin,
        "sinceEpochSeconds": epoch_seconds(loaded.since),
        "rules": policy.parts().rules.len(),
        "limits": policy.limits().len(),
        "remarks": loaded.notes(NOTES_MAX),
        "refusedChange": refused,
    })
}

fn looked_over(checked: &CheckedPolicy) -> Value {
    json!({
        "version": checked.version,
        "rules": checked.policy.parts().rules.len(),
        "limits": checked.policy.limits().len(),
        "remarks": checked.notes(NOTES_MAX),
    })
}

/// Warnings and remarks in one answer. A policy of thousands of rules has thousands; `tollgate policy check` prints all of them.
const NOTES_MAX: usize = 100;

/// The mistakes, each with its place.
fn mistakes(why: &ConfigErrors) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, format!("nothing was changed:\n{why}"))
}

/// The name of a member as it stands in a path.
fn decoded(text: &str) -> Result<String, Problem> {
    let text = percent_encoding::percent_decode_str(text).decode_utf8().map_err(|_| wrong_member())?;
    if text.is_empty() || text.len() > MEMBER_BYTES_MAX || text.chars().any(char::is_control) {
        return Err(wrong_member());
    }
    Ok(text.into_owned())
}

fn wrong_member() -> Problem {
    let why =
        format!("1 to {MEMBER_BYTES_MAX} bytes without control characters; an API key is of visible ASCII");
    Problem::parameter("member", why)
}
