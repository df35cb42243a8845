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
use tollgate::rules::{Refusal, Selection};
use tollgate::{Basis, PolicyOutcome, PolicyVerdict};

pub(super) use self::answer::{explanation, verdict_response};
pub(super) use self::ask::{Asked, NotVerified};
use super::pace::Pace;
use super::problem::Problem;
use super::rest::answer::json_response;
use super::rest::{Rest, json_items};
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
            let policy = self.policy.current();
            let (mut asked, mut selections) =
                (Vec::with_capacity(values.len()), Vec::with_capacity(values.len()));
            for (index, value) in values.iter().enumerate() {
                pace.turn().await;
                let in_item = |problem: Problem| problem.in_item(index);
                let item = self.described_in(peer, headers, value).map_err(in_item)?;
                selections.push(self.select(&policy, &item).map_err(in_item)?);
                asked.push(item);
            }
            let checks = asked.iter().zip(selections);
            let checks = checks.map(|(asked, selection)| self.judge(&policy, asked, selection));
            let mut answers = vec![b'['];
            for (index, verdict) in pace.all(checks).await.into_iter().enumerate() {
                pace.turn().await;
                let answer = answer::body(&policy, &verdict, asked[index].not_verified);
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
        verdict
    }
}

/// A path as it is logged: queries hold what should not be in a log, such as tokens.
fn without_query(path: &str) -> &str {
    path.split(['?', '#']).next().unwrap_or_default()
}

type Answer = Result<Response<Full<Bytes>>, Problem>;
