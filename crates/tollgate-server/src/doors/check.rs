//! The API of the policy: a request described in, a verdict on it out.

mod answer;
mod ask;

use std::net::IpAddr;
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, Response};
use http_body_util::Full;
use serde_json::Value;
use tollgate::rules::{Refusal, Selection};
use tollgate::{Basis, PolicyOutcome, PolicyVerdict};

pub(super) use self::answer::{explanation, verdict_response};
pub(super) use self::ask::{Asked, NotVerified};
use super::problem::Problem;
use super::rest::Rest;
use crate::address::is_from_proxy;
use crate::live::Loaded;

impl Rest {
    /// `POST /api/v1/check`.
    pub(super) async fn check_policy(&self, peer: IpAddr, headers: &HeaderMap, body: &Value) -> Answer {
        let asked = self.described_in(peer, headers, body)?;
        let policy = self.policy.current();
        let selection = self.select(&policy, &asked)?;
        let verdict = self.judge(&policy, &asked, selection).await;
        if verdict.basis() == Basis::Closed && !verdict.is_admitted() && self.closed_status == 503 {
            return Err(Problem::closed());
        }
        Ok(verdict_response(&policy, &verdict, asked.not_verified))
    }

    /// `POST /api/v1/check/batch`: independent checks, decided in order.
    pub(super) async fn check_policy_batch(
        &self,
        peer: IpAddr,
        headers: &HeaderMap,
        items: &[Value],
    ) -> Result<Vec<Value>, Problem> {
        let policy = self.policy.current();
        let mut asked = Vec::with_capacity(items.len());
        // A mistake in any item is found before the first one is decided.
        for (index, item) in items.iter().enumerate() {
            let in_item = |problem: Problem| problem.in_item(index);
            let item = self.described_in(peer, headers, item).map_err(in_item)?;
            let selection = self.select(&policy, &item).map_err(in_item)?;
            asked.push((item, selection));
        }
        let checks = asked.iter_mut().map(|(asked, selection)| async {
            let verdict = self.judge(&policy, asked, std::mem::take(selection)).await;
            answer::body(&policy, &verdict, asked.not_verified)
        });
        Ok(join_all(checks).await)
    }

    /// `POST /api/v1/explain`: the same without taking anything, and why.
    pub(super) async fn explain_policy(
        &self,
        peer: IpAddr,
        headers: &HeaderMap,
        body: &Value,
    ) -> Result<Value, Problem> {
        let asked = self.described_in(peer, headers, body)?;
        let policy = self.policy.current();
        let mut request = asked.descriptors();
        let assigned = self.policy.assigned_to(&policy, &request);
        request.assigned_tiers = &assigned;
        let verdict = policy.limiter.explain(&request, asked.permits()).await;
        Ok(explanation(&policy, &request, &verdict, asked.not_verified))
    }

    /// A request as its caller describes it, and who is asking.
    fn described_in<'a>(
        &self,
        peer: IpAddr,
        headers: &HeaderMap,
        body: &'a Value,
    ) -> Result<Asked<'a>, Problem> {
        let now_secs = self.clock.now().as_micros() / 1_000_000;
        let caller_is_proxy = is_from_proxy(&self.client_address, peer, headers);
        let asked = Asked::from_json(body, &self.identity, caller_is_proxy, now_secs)?;
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

    async fn judge(&self, policy: &Loaded, asked: &Asked<'_>, selection: Selection) -> PolicyVerdict {
        let start = Instant::now();
        let request = asked.descriptors();
        let verdict = policy.limiter.decide(selection).await;
        policy.count(&verdict);
        self.metrics.judged(&verdict, start.elapsed());
        tracing::debug!(
            path = request.path,
            method = request.method,
            allowed = verdict.is_admitted(),
            basis = verdict.basis().as_str(),
            "checked by the policy"
        );
        if let PolicyOutcome::Refused(Refusal::TooManyChecks) = verdict.outcome() {
            tracing::warn!(path = request.path, "refused: more limits apply than can be checked together");
        }
        verdict
    }
}

type Answer = Result<Response<Full<Bytes>>, Problem>;
