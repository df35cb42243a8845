//! The API of the policy: a request described in, a verdict on it out.

mod answer;
mod ask;

use std::time::Instant;

use bytes::Bytes;
use http::Response;
use http_body_util::Full;
use serde_json::Value;
use serde_json::value::RawValue;
use tollgate::rules::{Refusal, Selection};
use tollgate::{Basis, PolicyOutcome, PolicyVerdict};

pub(super) use self::answer::{explanation, verdict_response};
pub(super) use self::ask::{Asked, NotVerified};
use super::json;
use super::pace::Pace;
use super::problem::Problem;
use super::rest::answer::json_response;
use super::rest::{Caller, Rest};
use crate::address::is_proxy;
use crate::live::Loaded;

impl Rest {
    /// `POST /api/v1/check`.
    pub(super) async fn check_policy(&self, caller: Caller, body: &[u8]) -> Answer {
        let policy = self.policy.current();
        let body = self.description(&policy, body)?;
        let asked = self.described_in(&policy, caller, &body)?;
        let selection = self.select(&policy, &asked)?;
        let verdict = self.judge(&policy, asked.target(), selection).await;
        if verdict.basis() == Basis::Closed && !verdict.is_admitted() && self.closed_status == 503 {
            return Err(Problem::closed());
        }
        Ok(verdict_response(&policy, &verdict, asked.not_verified))
    }

    /// `POST /api/v1/check/batch`: independent checks, decided in order. The answer to one that cannot be decided is its problem, and the
    /// others are decided.
    pub(super) async fn check_policy_batch(&self, caller: Caller, items: &[&RawValue]) -> Answer {
        let pace = Pace::new();
        let pace = &pace;
        let policy = self.policy.current();
        let policy = &policy;
        let answers = pace.keep(async {
            let mut selected = Vec::with_capacity(items.len());
            for item in items {
                pace.turn().await;
                // Each is read and let go before the next one: values in memory are many times as large as their text.
                selected.push(self.selected(policy, caller, item));
            }
            let checks = selected.into_iter().map(|selected| async move {
                let selected = selected?;
                let target = (selected.path.as_str(), selected.method.as_str());
                Ok((self.judge(policy, target, selected.selection).await, selected.not_verified))
            });
            let mut answers = Vec::with_capacity(items.len());
            for judged in pace.all(checks).await {
                pace.turn().await;
                answers.push(match judged {
                    Ok((verdict, not_verified)) => {
                        answer::body(policy, &verdict, not_verified).to_string().into_bytes()
                    }
                    Err(problem) => Problem::to_json(&problem),
                });
            }
            answers
        });
        Ok(json_response(json::list(&answers.await)))
    }

    /// `POST /api/v1/explain`: the same without taking anything, and why.
    pub(super) async fn explain_policy(&self, caller: Caller, body: &[u8]) -> Result<Value, Problem> {
        let policy = self.policy.current();
        let body = self.description(&policy, body)?;
        let asked = self.described_in(&policy, caller, &body)?;
        let mut request = asked.descriptors();
        let assigned = self.policy.assigned_to(&policy, &request);
        request.assigned_tiers = &assigned;
        let verdict = policy.limiter.explain(&request, asked.permits()).await;
        Ok(explanation(&policy, &request, &verdict, asked.not_verified))
    }

    /// Reads the description of a request.
    fn description(&self, policy: &Loaded, body: &[u8]) -> Result<Value, Problem> {
        json::parse_described(body, &|name| self.reads_header(policy, name))
    }

    /// Whether a header can change what is decided.
    fn reads_header(&self, policy: &Loaded, name: &str) -> bool {
        policy.reads_header(name) || self.identity.reads_header(name)
    }

    /// The limits that apply to a request of a batch.
    fn selected(&self, policy: &Loaded, caller: Caller, item: &RawValue) -> Result<Selected, Problem> {
        let item = self.description(policy, item.get().as_bytes())?;
        let asked = self.described_in(policy, caller, &item)?;
        let selection = self.select(policy, &asked)?;
        let (path, method) = asked.target();
        let (path, method) = (path.to_owned(), method.to_owned());
        Ok(Selected { selection, path, method, not_verified: asked.not_verified })
    }

    /// A request as its caller describes it, and who is asking.
    fn described_in<'a>(
        &self,
        policy: &Loaded,
        caller: Caller,
        body: &'a Value,
    ) -> Result<Asked<'a>, Problem> {
        let now_secs = self.clock.now().as_micros() / 1_000_000;
        let caller_is_proxy = is_proxy(&self.client_address, caller.client);
        let is_read = |name: &str| self.reads_header(policy, name);
        let asked = Asked::from_json(body, &is_read, &self.identity, caller_is_proxy, now_secs)?;
        if let Some(why) = asked.not_verified.token {
            self.metrics.unverified(why);
        }
        Ok(asked)
    }

    /// The limits that apply to a request. One that asks for more permits than a limit can ever admit is a mistake of the caller.
    fn select(&self, policy: &Loaded, asked: &Asked<'_>) -> Result<Selection, Problem> {
        let mut request = asked.descriptors();
        let assigned = self.policy.assigned_to(policy, &request);
        request.assigned_tiers = &assigned;
        let rules = policy.limiter.policy();
        let selection = rules.select(&request, asked.permits());
        if let Some(Refusal::ExceedsLimit { rule, limit }) = selection.refusal
            && let Some(rule) = rules.rule(rule)
        {
            let most = rules.limits()[limit].limit.size() / rule.cost.max(1);
            return Err(Problem::exceeds_limit(most, format_args!("the limit of the rule {}", rule.name)));
        }
        Ok(selection)
    }

    /// Decides. `path` and `method` are for the log.
    async fn judge(
        &self,
        policy: &Loaded,
        (path, method): (&str, &str),
        selection: Selection,
    ) -> PolicyVerdict {
        let start = Instant::now();
        let verdict = policy.limiter.decide(selection).await;
        policy.count(&verdict);
        self.metrics.judged(&verdict, start.elapsed());
        tracing::debug!(
            path = without_fragment(path),
            method,
            allowed = verdict.is_admitted(),
            basis = verdict.basis().as_str(),
            "checked by the policy"
        );
        policy.log_denial(&verdict, without_fragment(path), method);
        if let PolicyOutcome::Refused(Refusal::TooManyChecks) = verdict.outcome() {
            let path = without_fragment(path);
            tracing::warn!(path, "refused: more limits apply than can be checked together");
        }
        verdict
    }
}

/// A request of a batch whose limits are known.
struct Selected {
    selection: Selection,
    path: String,
    method: String,
    not_verified: NotVerified,
}

/// A path as it is logged: fragments, like queries, can hold what should not be in a log, such as tokens.
fn without_fragment(path: &str) -> &str {
    path.split('#').next().unwrap_or_default()
}

type Answer = Result<Response<Full<Bytes>>, Problem>;
