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
use tollgate::rules::Refusal;
use tollgate::{Basis, PolicyOutcome, PolicyVerdict};

pub(super) use self::answer::{explanation, verdict_response};
pub(super) use self::ask::{Asked, NotVerified};
use super::problem::Problem;
use super::rest::Rest;
use crate::address::{client, is_from_proxy};
use crate::live::Loaded;

impl Rest {
    /// `POST /api/v1/check`.
    pub(super) async fn check_policy(&self, peer: IpAddr, headers: &HeaderMap, body: &Value) -> Answer {
        let asked = self.described_in(peer, headers, body)?;
        let policy = self.policy.current();
        let verdict = self.judge(&policy, peer, headers, &asked).await?;
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
        let mut asked = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            asked.push(self.described_in(peer, headers, item).map_err(|problem| problem.in_item(index))?);
        }
        let policy = self.policy.current();
        let checks = asked.iter().map(|asked| async {
            let verdict = self.judge(&policy, peer, headers, asked).await?;
            Ok(answer::body(&policy, &verdict, asked.not_verified))
        });
        join_all(checks).await.into_iter().collect()
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
        let address = client(&self.client_address, peer, headers).ip();
        let mut request = asked.descriptors(address);
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

    async fn judge(
        &self,
        policy: &Loaded,
        peer: IpAddr,
        headers: &HeaderMap,
        asked: &Asked<'_>,
    ) -> Result<PolicyVerdict, Problem> {
        let start = Instant::now();
        let address = client(&self.client_address, peer, headers).ip();
        let mut request = asked.descriptors(address);
        let assigned = self.policy.assigned_to(policy, &request);
        request.assigned_tiers = &assigned;
        let verdict = policy.limiter.check(&request, asked.permits()).await;
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
        Ok(verdict)
    }
}

type Answer = Result<Response<Full<Bytes>>, Problem>;
