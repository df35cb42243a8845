//! `/admin/*`: the policy in force and the tiers that are assigned, for operators.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{ETAG, IF_MATCH, ORIGIN};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use schemars::JsonSchema;
use serde::Serialize;
use tollgate::rules::{Family, KeyPart};
use tollgate::{AssignedTier, HistoryEntry, StoreError};

use super::Answer;
use super::actuator::Actuator;
use super::answer::json_response;
use super::body::{BodyMemory, Buffered, Payer};
use super::input::{self, Text, TierChange};
use super::problem::Problem;
use super::routes::{Audience, Operation, Routed, route};
use crate::access::AdminAccess;
use crate::config::{CheckedPolicy, ConfigErrors};
use crate::identity::IdentityConfig;
use crate::live::{AskedBy, LivePolicy, Loaded, NotChanged, RefusedChange};
use crate::loopback::LoopbackCheck;
use crate::metrics::SharedMetrics;
use crate::serve::{Door, Received};

/// Bytes of a policy.
const POLICY_BYTES_MAX: usize = 1024 * 1024;
/// Bytes of anything else.
const BODY_BYTES_MAX: usize = 16 * 1024;
/// Bytes of the name of a member.
const MEMBER_BYTES_MAX: usize = 256;

/// All pages for operators: the actuator, and what changes the service while it runs.
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
        let path = request.uri().path().to_owned();
        // Before the path is looked up: without a token nothing is said of what is below `/admin`.
        let name = match path == "/admin" || path.starts_with("/admin/") {
            true => self.access.admit(request.headers())?,
            false => "",
        };
        let routed = route(request.method(), &path)?;
        match routed.operation.audience() {
            Audience::Admins => self.admin.change(routed, request, name).await,
            Audience::Probes | Audience::Readers => {
                self.admin.actuator.show(routed.operation, request.headers()).await
            }
            Audience::Clients => {
                Err(Problem::new(StatusCode::NOT_FOUND, "this path is on the API port (listen)"))
            }
        }
    }
}

impl Admin {
    /// An operation below `/admin/`, for a caller who may use it. `name` is the caller's in the audit log.
    pub(super) async fn change(&self, routed: Routed<'_>, request: Request<Received>, name: &str) -> Answer {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let operation = routed.operation;
        let answer = self.changing(routed, request, name).await;
        if method != Method::GET && operation != Operation::CheckPolicy {
            let status = answer.as_ref().map_or_else(Problem::status, Response::status).as_u16();
            tracing::info!(admin = name, %method, path, status, "admin request");
        }
        answer
    }

    async fn changing(&self, routed: Routed<'_>, request: Request<Received>, name: &str) -> Answer {
        // A page in a browser on this machine could reach it, too; browsers say where a page came from.
        if request.headers().contains_key(ORIGIN) {
            return Err(Problem::new(StatusCode::FORBIDDEN, "not for pages in browsers"));
        }
        match routed.operation {
            Operation::GetPolicy => Ok(self.policy_answer(&self.policy.current(), true)),
            Operation::PutPolicy => {
                let replaced = replaced(request.headers())?;
                let text = self.text(request).await?;
                self.changed(self.policy.push(Some(text), name, replaced.as_deref()).await)
            }
            Operation::DeletePolicy => {
                let replaced = replaced(request.headers())?;
                self.changed(self.policy.push(None, name, replaced.as_deref()).await)
            }
            Operation::CheckPolicy => {
                let text = self.text(request).await?;
                let summary = self.policy.check(text, CheckedAnswer::new).await;
                Ok(json_response(&summary.map_err(|why| mistakes(&why))?))
            }
            Operation::ReloadPolicy => self.changed(self.policy.reload(AskedBy::Admin).await),
            Operation::PolicyHistory => self.history().await,
            Operation::PushedPolicy => {
                let text = self.pushed_text(routed.parameter("number")).await?;
                Ok(json_response(&PushedAnswer { text }))
            }
            Operation::RollBackPolicy => {
                let replaced = replaced(request.headers())?;
                let text = self.pushed_text(routed.parameter("number")).await?;
                let text = Some(text).filter(|text| !text.is_empty());
                self.changed(self.policy.push(text, name, replaced.as_deref()).await)
            }
            Operation::GetTier | Operation::PutTier | Operation::DeleteTier => {
                self.tier(routed, request).await
            }
            _ => Ok(json_response(&self.tiers())),
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
            Ok(loaded) => Ok(self.policy_answer(&loaded, false)),
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
        let entry = |it: HistoryEntry| PushAnswer {
            number: it.number,
            version: Some(it.label).filter(|label| !label.is_empty()),
            author: it.author,
            at_epoch_seconds: it.at_secs,
        };
        Ok(json_response(&HistoryAnswer { pushed: history.into_iter().map(entry).collect() }))
    }

    /// The policy in force, its version as an entity tag, which `If-Match` can name.
    fn policy_answer(&self, loaded: &Loaded, with_text: bool) -> Response<Full<Bytes>> {
        let text = with_text.then(|| loaded.text.to_string());
        let summary = PolicySummary { text, ..PolicySummary::new(&self.policy, loaded) };
        let mut response = json_response(&summary);
        // Hexadecimal digits: this does not fail.
        if let Ok(tag) = HeaderValue::from_str(&format!("\"{}\"", loaded.version)) {
            response.headers_mut().insert(ETAG, tag);
        }
        response
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

    /// The tiers that were assigned, sorted by family and member.
    fn tiers(&self) -> TiersAnswer {
        let mut tiers = self.policy.all_assigned();
        tiers.sort_by(|a, b| (&a.family, &a.member).cmp(&(&b.family, &b.member)));
        let tier =
            |it: AssignedTier| TierAnswer { family: it.family, member: it.member, tier: Some(it.tier) };
        TiersAnswer { tiers: tiers.into_iter().map(tier).collect() }
    }

    async fn tier(&self, routed: Routed<'_>, request: Request<Received>) -> Answer {
        let policy = self.policy.current();
        // A name that cannot be decoded is no family's name.
        let family = decoded(routed.parameter("family")).unwrap_or_default();
        let known = known_family(&policy, &family)?;
        let member = decoded(routed.parameter("member"))?;
        let member = match known.member {
            KeyPart::ApiKey => self.identity.api_key_member_id(&member).ok_or_else(wrong_member)?,
            _ => member,
        };
        let tier = match routed.operation {
            Operation::GetTier => {
                let tier = self.policy.assigned(&family, &member).map(|tier| tier.to_string());
                return Ok(json_response(&TierAnswer { family, member, tier }));
            }
            Operation::PutTier => Some(self.tier_of(known, request).await?),
            _ => None,
        };
        self.assign(family, member, tier).await
    }

    /// The tier that the body names.
    async fn tier_of(&self, family: &Family, request: Request<Received>) -> Result<String, Problem> {
        let body = self.read(request, BODY_BYTES_MAX).await?;
        let TierChange { tier: Text(tier) } = input::parse(&body)?;
        match family.number(&tier) {
            Some(_) => Ok(tier.into_owned()),
            None => Err(Problem::parameter("tier", format_args!("one of {}", family.tiers.join(", ")))),
        }
    }

    async fn assign(&self, family: String, member: String, tier: Option<String>) -> Answer {
        let assigned = AssignedTier {
            family: family.clone(),
            member: member.clone(),
            tier: tier.clone().unwrap_or_default(),
        };
        match self.policy.assign(assigned).await {
            Ok(true) => {
                match &tier {
                    Some(tier) => tracing::info!(family, member, tier, "tier assigned"),
                    None => tracing::info!(family, member, "tier withdrawn"),
                }
                Ok(json_response(&TierAnswer { family, member, tier }))
            }
            Ok(false) => Err(Problem::new(
                StatusCode::INSUFFICIENT_STORAGE,
                format!("at most {} members can have a tier assigned", tollgate::ASSIGNED_MAX),
            )),
            Err(why) => Err(not_stored("the tier was not assigned", &why)),
        }
    }
}

/// The family of tiers with this name.
fn known_family<'p>(policy: &'p Loaded, name: &str) -> Result<&'p Family, Problem> {
    let families = &policy.limiter.policy().parts().families;
    families.iter().find(|known| *known.name == *name).ok_or_else(|| {
        let names: Vec<_> = families.iter().map(|family| &*family.name).collect();
        let detail = match names.is_empty() {
            true => "the policy has no families of tiers".to_owned(),
            false => format!("no such family; the policy has: {}", names.join(", ")),
        };
        Problem::new(StatusCode::NOT_FOUND, detail)
    })
}

/// What an operator must know of a change that the store has not taken in.
fn not_stored(what: &str, why: &StoreError) -> Problem {
    let doubt = if why.may_have_run() { "it is not known whether " } else { "" };
    let what = if why.may_have_run() { what.replace("was not", "was") } else { what.to_owned() };
    tracing::warn!("{doubt}{what}: {why}");
    Problem::not_stored(format!("{doubt}{what}: {why}"))
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

/// The policy in force.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct PolicySummary {
    /// The version: a digest of the text.
    version: String,
    /// Where the policy came from: a file, the configuration, the admin API.
    origin: String,
    /// When it came into force.
    since_epoch_seconds: u64,
    /// How many rules it has.
    rules: usize,
    /// How many limits it has.
    limits: usize,
    /// Warnings and remarks; at most 100.
    remarks: Vec<String>,
    /// The last change that was refused, if none has come into force since.
    refused_change: Option<RefusedAnswer>,
    /// The text of the policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

impl PolicySummary {
    pub(super) fn new(live: &LivePolicy, loaded: &Loaded) -> Self {
        let policy = loaded.limiter.policy();
        Self {
            version: loaded.version.clone(),
            origin: loaded.origin.clone(),
            since_epoch_seconds: epoch_seconds(loaded.since),
            rules: policy.parts().rules.len(),
            limits: policy.limits().len(),
            remarks: loaded.notes(NOTES_MAX),
            refused_change: live.refused().map(RefusedAnswer::from),
            text: None,
        }
    }
}

/// A change of the policy that was refused.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct RefusedAnswer {
    /// When.
    at_epoch_seconds: u64,
    /// The mistakes, each with its place.
    why: String,
}

impl From<RefusedChange> for RefusedAnswer {
    fn from(RefusedChange { at, why }: RefusedChange) -> Self {
        Self { at_epoch_seconds: epoch_seconds(at), why }
    }
}

/// A policy that was checked and not put in force.
#[derive(Serialize, JsonSchema)]
pub(super) struct CheckedAnswer {
    /// The version that it would have.
    version: String,
    /// How many rules it has.
    rules: usize,
    /// How many limits it has.
    limits: usize,
    /// Warnings and remarks; at most 100.
    remarks: Vec<String>,
}

impl CheckedAnswer {
    fn new(checked: &CheckedPolicy) -> Self {
        Self {
            version: checked.version.clone(),
            rules: checked.policy.parts().rules.len(),
            limits: checked.policy.limits().len(),
            remarks: checked.notes(NOTES_MAX),
        }
    }
}

/// The policies that were pushed last.
#[derive(Serialize, JsonSchema)]
pub(super) struct HistoryAnswer {
    /// The newest first; at most 20.
    pushed: Vec<PushAnswer>,
}

/// A policy that was pushed.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct PushAnswer {
    /// The number by which it can be read or rolled back to.
    number: u64,
    /// The version; null for a withdrawal.
    version: Option<String>,
    /// The name of the admin token.
    author: String,
    /// When it was pushed.
    at_epoch_seconds: u64,
}

/// The text of a policy that was pushed.
#[derive(Serialize, JsonSchema)]
pub(super) struct PushedAnswer {
    /// Empty for a withdrawal.
    text: String,
}

/// The tiers that were assigned.
#[derive(Serialize, JsonSchema)]
pub(super) struct TiersAnswer {
    /// Sorted by family and member.
    tiers: Vec<TierAnswer>,
}

/// The tier of a member.
#[derive(Serialize, JsonSchema)]
pub(super) struct TierAnswer {
    /// The family of tiers.
    family: String,
    /// The member: a user, or the identifier of an API key.
    member: String,
    /// The tier; null if none is assigned.
    tier: Option<String>,
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
