//! The checks: of one key by one of the five algorithms, and of a request by the policy.

use std::borrow::Cow;

use http::Request;
use tollgate::rules::Selection;
use tollgate::{Ask, Basis, PolicyVerdict};

use super::answer::{json_list, json_response, verdict_response};
use super::caller::Caller;
use super::input::{self, Algorithm, KeyCheck, KeyOnly, KeyText, RequestCheck};
use super::pace::Pace;
use super::problem::Problem;
use super::{Answer, ApiDoor};
use crate::answer::{Explanation, KeyAnswer, RemainingAnswer, RequestAnswer, ResetAnswer};
use crate::live::Loaded;
use crate::request::{Described, NotVerified, Target};

impl ApiDoor {
    /// Checks one key.
    pub(super) async fn check(&self, caller: Caller, check: KeyCheck<'_>) -> Answer {
        let selection = self.select_key(caller, &check)?;
        let rules = &self.limiter.builtin;
        let verdict = self.limiter.decide(rules, selection, &Target::default()).await;
        self.refuse_closed(&verdict)?;
        Ok(verdict_response(rules, &verdict, &KeyAnswer::new(rules, &verdict)))
    }

    /// Checks keys in order, each by itself. A check that cannot be decided gets its problem as its answer. A key that the caller may not
    /// name is a mistake of the caller, not of one of its clients: then nothing is decided.
    pub(super) async fn check_batch(&self, caller: Caller, body: &[u8]) -> Answer {
        let pace = &Pace::new();
        let answers = pace.keep(async {
            let items = input::batch(body)?;
            let mut selected = Vec::with_capacity(items.len());
            for (index, item) in items.into_iter().enumerate() {
                pace.turn().await;
                let check = input::parse::<KeyCheck<'_>>(item);
                if let Ok(KeyCheck { key: Some(_), .. }) = &check
                    && caller.authorize().is_err()
                {
                    return Err(Problem::key_not_allowed().in_item(index));
                }
                selected.push(check.and_then(|check| self.select_key(caller, &check)));
            }
            let rules = &self.limiter.builtin;
            let checks = selected.into_iter().map(|selection| async move {
                let verdict = self.limiter.decide(rules, selection?, &Target::default()).await;
                Ok(to_json(&KeyAnswer::new(rules, &verdict)))
            });
            // All at once: a store is asked about different keys together, and about the same key in this order.
            Ok(pace.all(checks).await)
        });
        Ok(json_list(&answers.await?.into_iter().map(or_problem).collect::<Vec<_>>()))
    }

    /// Shows what is left of a key's limit.
    pub(super) async fn remaining<B>(&self, caller: Caller, request: &Request<B>) -> Answer {
        let (_, _, selection) = self.select_named(caller, request)?;
        let rules = &self.limiter.builtin;
        let verdict = self.limiter.peek(rules, selection).await;
        if verdict.basis() == Basis::Closed {
            return Err(Problem::closed());
        }
        Ok(verdict_response(rules, &verdict, &RemainingAnswer::new(rules, &verdict)))
    }

    /// Resets a key's limit.
    pub(super) async fn reset<B>(&self, caller: Caller, request: &Request<B>) -> Answer {
        let (Algorithm(algorithm), key, selection) = self.select_named(caller, request)?;
        let reset = self.limiter.reset(&self.limiter.builtin, &selection).await;
        reset.map_err(|_| Problem::not_done("the limit was not reset"))?;
        let message = "Rate limit reset";
        Ok(json_response(&ResetAnswer { key: &key, algorithm: algorithm.as_str(), message }))
    }

    fn select_key(&self, caller: Caller, check: &KeyCheck<'_>) -> Result<Selection, Problem> {
        let key = own_or_named(caller, check.key.as_ref())?.into_owned();
        Ok(self.limiter.select_builtin(check.algorithm.0, key, check.ask())?)
    }

    /// The limit that the query names, for a caller who may name keys.
    fn select_named<B>(
        &self,
        caller: Caller,
        request: &Request<B>,
    ) -> Result<(Algorithm, String, Selection), Problem> {
        caller.authorize()?;
        let asked: KeyOnly<'_> = input::parse_query(request.uri().query())?;
        let key = own_or_named(caller, asked.key.as_ref())?.into_owned();
        let selection = self.limiter.select_builtin(asked.algorithm.0, key.clone(), Ask::of(0))?;
        Ok((asked.algorithm, key, selection))
    }

    /// Checks a request by the policy.
    pub(super) async fn check_request(&self, caller: Caller, body: &[u8]) -> Answer {
        let policy = self.limiter.policy();
        let request = self.described(&policy, caller, body)?;
        let selection = self.limiter.select(&policy, &request)?;
        let verdict = self.limiter.decide(&policy, selection, &request.target()).await;
        self.refuse_closed(&verdict)?;
        let answer = RequestAnswer::new(&policy, &verdict, request.not_verified);
        Ok(verdict_response(&policy, &verdict, &answer))
    }

    /// Checks requests in order, each by itself. A request that cannot be decided gets its problem as its answer.
    pub(super) async fn check_request_batch(&self, caller: Caller, body: &[u8]) -> Answer {
        let items = input::batch(body)?;
        let pace = &Pace::new();
        let policy = &self.limiter.policy();
        let answers = pace.keep(async {
            let mut selected = Vec::with_capacity(items.len());
            for item in items {
                pace.turn().await;
                // Only the selection is kept: descriptions in memory are several times as large as their text.
                selected.push(self.selected(policy, caller, item));
            }
            let checks = selected.into_iter().map(|selected| async move {
                let Selected { selection, target, not_verified } = selected?;
                Ok((self.limiter.decide(policy, selection, &target).await, not_verified))
            });
            let mut answers = Vec::new();
            for decided in pace.all(checks).await {
                pace.turn().await;
                answers.push(or_problem(decided.map(|(verdict, not_verified)| {
                    to_json(&RequestAnswer::new(policy, &verdict, not_verified))
                })));
            }
            answers
        });
        Ok(json_list(&answers.await))
    }

    /// Explains the answer that a request would get now. Takes no permits.
    pub(super) async fn explain(&self, caller: Caller, body: &[u8]) -> Answer {
        let policy = self.limiter.policy();
        let request = self.described(&policy, caller, body)?;
        let verdict = self.limiter.explain(&policy, &request).await;
        let mut descriptors = request.descriptors();
        let assigned = self.limiter.live.assigned_to(&policy, &descriptors);
        descriptors.assigned_tiers = &assigned;
        Ok(json_response(&Explanation::new(&policy, &descriptors, &verdict, request.not_verified)))
    }

    fn selected<'a>(&self, policy: &Loaded, caller: Caller, item: &'a [u8]) -> Result<Selected<'a>, Problem> {
        let request = self.described(policy, caller, item)?;
        let selection = self.limiter.select(policy, &request)?;
        Ok(Selected { selection, target: request.target(), not_verified: request.not_verified })
    }

    /// Reads a request and finds out who sent it.
    fn described<'a>(
        &self,
        policy: &Loaded,
        caller: Caller,
        body: &'a [u8],
    ) -> Result<Described<'a>, Problem> {
        let is_read = |name: &str| self.limiter.reads_header(policy, name);
        let mut request = RequestCheck::parse(body)?.described(&is_read, &self.limiter.identity)?;
        self.limiter.identify(&mut request, caller.is_proxy);
        Ok(request)
    }

    /// Answers 503 to a check that is refused because the store gives no decision, unless 429 is configured for that.
    pub(super) fn refuse_closed(&self, verdict: &PolicyVerdict) -> Result<(), Problem> {
        match verdict.basis() == Basis::Closed && !verdict.is_admitted() && self.closed_status == 503 {
            true => Err(Problem::closed()),
            false => Ok(()),
        }
    }
}

/// A request of a batch whose limits are known.
struct Selected<'a> {
    selection: Selection,
    target: Target<'a>,
    not_verified: NotVerified,
}

/// The key that was named, if the caller may name one; without one, the client's address.
fn own_or_named<'a>(caller: Caller, key: Option<&'a KeyText<'_>>) -> Result<Cow<'a, str>, Problem> {
    match key {
        Some(KeyText(key)) if caller.authorize().is_ok() => Ok(Cow::Borrowed(key)),
        Some(_) => Err(Problem::key_not_allowed()),
        None => Ok(Cow::Owned(format!("ip:{}", caller.client))),
    }
}

fn to_json(body: &impl serde::Serialize) -> Vec<u8> {
    // Texts and numbers: this does not fail.
    serde_json::to_vec(body).unwrap_or_default()
}

fn or_problem(answer: Result<Vec<u8>, Problem>) -> Vec<u8> {
    answer.unwrap_or_else(|problem| problem.to_json())
}
