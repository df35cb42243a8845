//! The API of the policy: a request described in, a verdict on it out.

mod answer;
mod ask;

use std::net::IpAddr;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, Response};
use http_body_util::Full;
use serde_json::Value;
use serde_json::value::RawValue;
use tollgate::rules::Refusal;
use tollgate::{Basis, PolicyOutcome, PolicyVerdict};

pub(super) use self::answer::{explanation, verdict_response};
pub(super) use self::ask::Asked;
use super::pace::Pace;
use super::problem::Problem;
use super::rest::answer::json_response;
use super::rest::{Rest, json_items};
use crate::address::client;
use crate::live::Loaded;

impl Rest {
    /// `POST /api/v1/check`.
    pub(super) async fn check_policy(&self, peer: IpAddr, headers: &HeaderMap, body: &Value) -> Answer {
        let asked = self.described_in(body)?;
        let policy = self.policy.current();
        let verdict = self.judge(&policy, peer, headers, &asked).await?;
        if verdict.basis() == Basis::Closed && !verdict.is_admitted() && self.closed_status == 503 {
            return Err(Problem::closed());
        }
        Ok(verdict_response(&policy, &verdict, asked.unverified))
    }

    /// `POST /api/v1/check/batch`: independent checks, decided in order. A mistake in any of them is found before the first one is
    /// decided.
    pub(super) async fn check_policy_batch(
        &self,
        peer: IpAddr,
        headers: &HeaderMap,
        items: &[&RawValue],
    ) -> Answer {
        let pace = Pace::new();
        let pace = &pace;
        let answers = pace.keep(async {
            let values = json_items(pace, items).await?;
            let mut asked = Vec::with_capacity(values.len());
            for (index, value) in values.iter().enumerate() {
                pace.turn().await;
                asked.push(self.described_in(value).map_err(|problem| problem.in_item(index))?);
            }
            let policy = self.policy.current();
            let checks = asked.iter().map(|asked| self.judge(&policy, peer, headers, asked));
            let mut answers = vec![b'['];
            for (index, verdict) in pace.all(checks).await.into_iter().enumerate() {
                pace.turn().await;
                let answer = answer::body(&policy, &verdict?, asked[index].unverified);
                if index > 0 {
                    answers.push(b',');
                }
                answers.extend_from_slice(answer.to_string().as_bytes());
            }
            answers.push(b']');
            Ok::<_, Problem>(answers)
        });
        Ok(json_response(answers.await?))
    }

    /// `POST /api/v1/explain`: the same without taking anything, and why.
    pub(super) async fn explain_policy(
        &self,
        peer: IpAddr,
        headers: &HeaderMap,
        body: &Value,
    ) -> Result<Value, Problem> {
        let asked = self.described_in(body)?;
        let policy = self.policy.current();
        let address = client(&self.client_address, peer, headers).ip();
        let mut request = asked.descriptors(address);
        let assigned = self.policy.assigned_to(&policy, &request);
        request.assigned_tiers = &assigned;
        let verdict = policy.limiter.explain(&request, asked.permits()).await;
        Ok(explanation(&policy, &request, &verdict, asked.unverified))
    }

    /// A request as its caller describes it, and who is asking.
    fn described_in<'a>(&self, body: &'a Value) -> Result<Asked<'a>, Problem> {
        let now_secs = self.clock.now().as_micros() / 1_000_000;
        let asked = Asked::from_json(body, &self.identity, now_secs)?;
        if let Some(why) = asked.unverified {
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
            path = without_query(request.path),
            method = request.method,
            allowed = verdict.is_admitted(),
            basis = verdict.basis().as_str(),
            "checked by the policy"
        );
        if let PolicyOutcome::Refused(Refusal::TooManyChecks) = verdict.outcome() {
            let path = without_query(request.path);
            tracing::warn!(path, "refused: more limits apply than can be checked together");
        }
        Ok(verdict)
    }
}

/// A path as it is logged: queries hold what should not be in a log, such as tokens.
fn without_query(path: &str) -> &str {
    path.split(['?', '#']).next().unwrap_or_default()
}

type Answer = Result<Response<Full<Bytes>>, Problem>;
