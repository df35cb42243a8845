//! `TG.CHECK`, `TG.PEEK`, `TG.RESET` and `TG.EXPLAIN`: of a request by the policy, or of one key by a limit of the plain API.

use std::borrow::Cow;
use std::sync::Arc;

use tollgate::rules::Selection;
use tollgate::{AlgorithmName, Ask};

use super::RespDoor;
use super::conversation::Pending;
use super::descriptors::{self, permits, wrong};
use super::frame::Argument;
use super::reply::Reply;
use super::throttle::{key_of, text};
use crate::answer::{Explanation, KeyAnswer, RemainingAnswer, RequestAnswer, ResetAnswer};
use crate::limiter::ExceedsLimit;
use crate::live::Loaded;
use crate::request::{Described, Target};

/// What a client asks about.
#[expect(
    clippy::large_enum_variant,
    reason = "one value on the stack for each command; a box would be an allocation"
)]
enum Asked<'a> {
    /// `KEY key [ALGORITHM a] [PERMITS n]`
    Key { algorithm: AlgorithmName, key: Cow<'a, str>, permits: u64 },
    /// Pairs of name and value, and the policy that reads them.
    Request(Arc<Loaded>, Described<'a>),
}

impl RespDoor {
    /// Starts a check.
    pub(super) fn check_request<'a>(&'a self, arguments: &mut [Argument<'a>]) -> Result<Pending<'a>, Reply> {
        match self.asked(arguments)? {
            Asked::Key { algorithm, key, permits } => {
                let selection = self.select_key(algorithm, key, permits)?;
                let rules = &self.limiter.builtin;
                Ok(Box::pin(async move {
                    let verdict = self.limiter.decide(rules, selection, &Target::default()).await;
                    Reply::of(&KeyAnswer::new(rules, &verdict))
                }))
            }
            Asked::Request(policy, request) => {
                let selection = self.select(&policy, &request)?;
                let (target, not_verified) = (request.target(), request.not_verified);
                Ok(Box::pin(async move {
                    let verdict = self.limiter.decide(&policy, selection, &target).await;
                    Reply::of(&RequestAnswer::new(&policy, &verdict, not_verified))
                }))
            }
        }
    }

    /// Shows the answer that a check would get now, or the permits that a key has left.
    pub(super) async fn peek(&self, arguments: &mut [Argument<'_>]) -> Result<Reply, Reply> {
        match self.asked(arguments)? {
            Asked::Key { algorithm, key, .. } => {
                let rules = &self.limiter.builtin;
                let selection = self.select_key(algorithm, key, 0)?;
                let verdict = self.limiter.peek(rules, selection).await;
                Ok(Reply::of(&RemainingAnswer::new(rules, &verdict)))
            }
            Asked::Request(policy, request) => {
                let selection = self.select(&policy, &request)?;
                let verdict = self.limiter.peek(&policy, selection).await;
                Ok(Reply::of(&RequestAnswer::new(&policy, &verdict, request.not_verified)))
            }
        }
    }

    /// Resets the limit of a key, or all limits that apply to a request.
    pub(super) async fn reset(&self, arguments: &mut [Argument<'_>]) -> Result<Reply, Reply> {
        let not_done =
            |_| Reply::error("the limit was not reset: the store gave no answer; try again in a second");
        match self.asked(arguments)? {
            Asked::Key { algorithm, key, .. } => {
                let selection = self.select_key(algorithm, key.clone(), 0)?;
                self.limiter.reset(&self.limiter.builtin, &selection).await.map_err(not_done)?;
                let (algorithm, message) = (algorithm.as_str(), "Rate limit reset");
                Ok(Reply::of(&ResetAnswer { key: &key, algorithm, message }))
            }
            Asked::Request(policy, request) => {
                let selection = self.select(&policy, &request)?;
                self.limiter.reset(&policy, &selection).await.map_err(not_done)?;
                Ok(Reply::OK)
            }
        }
    }

    /// Explains the answer that a request would get now, as JSON.
    pub(super) async fn explain(&self, arguments: &mut [Argument<'_>]) -> Result<Reply, Reply> {
        let Asked::Request(policy, request) = self.asked(arguments)? else {
            return Err(Reply::error(format_args!(
                "TG.EXPLAIN explains requests, not keys; accepted: {}",
                descriptors::ACCEPTED
            )));
        };
        let verdict = self.limiter.explain(&policy, &request).await;
        let mut described = request.descriptors();
        let assigned = self.limiter.live.assigned_to(&policy, &described);
        described.assigned_tiers = &assigned;
        let explanation = Explanation::new(&policy, &described, &verdict, request.not_verified);
        serde_json::to_vec(&explanation).map(Reply::Bytes).map_err(Reply::error)
    }

    fn asked<'a>(&self, arguments: &mut [Argument<'a>]) -> Result<Asked<'a>, Reply> {
        match arguments {
            [] | [_] => Err(Reply::error(format_args!(
                "expected descriptors as pairs of name and value, or KEY key; accepted: {}",
                descriptors::ACCEPTED
            ))),
            [_, first, rest @ ..] if first.eq_ignore_ascii_case(b"KEY") => key_check(rest),
            [_, pairs @ ..] => {
                let policy = self.limiter.policy();
                let is_read = |name: &str| self.limiter.reads_header(&policy, name);
                let mut request = descriptors::parse(pairs, &is_read, &self.limiter.identity)?;
                self.limiter.identify(&mut request, false);
                Ok(Asked::Request(policy, request))
            }
        }
    }

    fn select(&self, policy: &Loaded, request: &Described<'_>) -> Result<Selection, Reply> {
        self.limiter.select(policy, request).map_err(exceeds_limit)
    }

    fn select_key(
        &self,
        algorithm: AlgorithmName,
        key: Cow<'_, str>,
        permits: u64,
    ) -> Result<Selection, Reply> {
        self.limiter.select_builtin(algorithm, key.into_owned(), Ask::of(permits)).map_err(exceeds_limit)
    }
}

/// Reads what stands behind `KEY`.
fn key_check<'a>(arguments: &mut [Argument<'a>]) -> Result<Asked<'a>, Reply> {
    let [key, options @ ..] = arguments else {
        return Err(Reply::error("KEY: expected KEY key [ALGORITHM algorithm] [PERMITS permits]"));
    };
    let key = key_of(std::mem::take(key))?;
    let (mut algorithm, mut cost) = (AlgorithmName::TokenBucket, 1);
    for option in options.chunks_mut(2) {
        let name = text("the name of an option", std::mem::take(&mut option[0]))?;
        let value = option.get_mut(1).map(std::mem::take).ok_or_else(|| wrong(&name, "has no value"))?;
        let value = text(&name, value)?;
        if name.eq_ignore_ascii_case("ALGORITHM") {
            algorithm = value.to_ascii_uppercase().parse().map_err(|why| wrong("ALGORITHM", why))?;
        } else if name.eq_ignore_ascii_case("PERMITS") {
            cost = permits(&value)?;
        } else {
            return Err(wrong(&name, "no such option; accepted behind KEY key: ALGORITHM, PERMITS"));
        }
    }
    Ok(Asked::Key { algorithm, key, permits: cost })
}

fn exceeds_limit(ExceedsLimit { most, rule }: ExceedsLimit) -> Reply {
    let limit = rule.map_or("the limit".to_owned(), |rule| format!("the limit of the rule {rule}"));
    wrong("permits", format_args!("must be a whole number from 1 to {most}, {limit}"))
}
