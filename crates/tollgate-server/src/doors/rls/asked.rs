//! What a call asks for: the limits and the permits of each descriptor.

use std::borrow::Cow;

use tollgate::Micros;
use tollgate::rules::{Refusal, RuleCheck, Selection, subject_of_attributes};
use tonic::Status;
use tonic_reflection::server::v1::ServerReflection;

use super::RlsDoor;
use super::proto::rate_limit_descriptor::{Entry, RateLimitOverride};
use super::proto::{RateLimitDescriptor, RateLimitRequest, RateLimitUnit};
use crate::limiter::{OverrideTerms, OverrideWindow, Part};
use crate::live::Loaded;
use crate::request::{Described, Values};

/// Descriptors of a call. Each can have several limits, of which at most as many are decided together.
const DESCRIPTORS_MAX: usize = 32;
/// Entries of a descriptor. Every condition of the policy is compared with them.
const ENTRIES_MAX: usize = 32;
/// The attribute that holds the domain.
const DOMAIN: &str = "domain";

/// What one descriptor asks for.
pub(super) struct Asked {
    /// The limits. None for a limit of no permits at all, which the proxy names itself.
    pub(super) part: Option<Part>,
    pub(super) hits: Hits,
    /// The limit that the proxy names itself.
    pub(super) named: Option<RateLimitOverride>,
}

/// What becomes of the permits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hits {
    Take(u64),
    /// Nothing is taken: would one permit be admitted?
    Look,
    GiveBack(u64),
}

impl Hits {
    fn new(request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> Self {
        let permits = descriptor.hits_addend.unwrap_or_else(|| u64::from(request.hits_addend.max(1)));
        match permits {
            0 => Self::Look,
            permits if descriptor.is_negative_hits => Self::GiveBack(permits),
            permits => Self::Take(permits),
        }
    }

    /// The permits that are asked for.
    const fn permits(self) -> u64 {
        match self {
            Self::Take(permits) | Self::GiveBack(permits) => permits,
            Self::Look => 1,
        }
    }
}

impl<R: ServerReflection> RlsDoor<R> {
    /// Reads a call. Nothing is taken for a call that cannot be read.
    pub(super) fn read(&self, request: &RateLimitRequest) -> Result<Vec<Asked>, Status> {
        if request.domain.is_empty() {
            return Err(Status::invalid_argument("domain: must not be empty"));
        }
        let count = request.descriptors.len();
        if !(1..=DESCRIPTORS_MAX).contains(&count) {
            let expected = format!("descriptors: expected 1 to {DESCRIPTORS_MAX}, got {count}");
            return Err(Status::invalid_argument(expected));
        }
        let policy = self.limiter.policy();
        let read = |(number, descriptor): (usize, &RateLimitDescriptor)| -> Result<Asked, Status> {
            check_entries(number, descriptor)?;
            let hits = Hits::new(request, descriptor);
            let attributes = attributes(request, descriptor);
            let part = match descriptor.limit {
                Some(named) => self.named_limit(number, named, &attributes, hits)?,
                None => {
                    let described = Described { attributes, permits: hits.permits(), ..Described::default() };
                    let selection = self.select(number, &policy, &described)?;
                    Some(Part { policy: policy.clone(), selection })
                }
            };
            Ok(Asked { part, hits, named: descriptor.limit })
        };
        let mut asked = request.descriptors.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
        leave_out_replaced(&mut asked);
        Ok(asked)
    }

    /// The limits of the policy for a descriptor.
    fn select(&self, number: usize, policy: &Loaded, request: &Described<'_>) -> Result<Selection, Status> {
        let mut selection = self.limiter.select_any(policy, request);
        if selection.refusal == Some(Refusal::TooManyChecks) {
            return Err(Status::failed_precondition(format!(
                "descriptors[{number}]: more limits of the policy apply than can be checked together"
            )));
        }
        // A proxy does not hold requests back, so nothing is admitted with a delay.
        for check in &mut selection.checks {
            check.wait = check.wait.map(|_| Micros::ZERO);
        }
        Ok(selection)
    }

    /// The limit that the proxy names itself, for all attributes of the descriptor. None for a limit of no permits.
    fn named_limit(
        &self,
        number: usize,
        named: RateLimitOverride,
        attributes: &Values<'_>,
        hits: Hits,
    ) -> Result<Option<Part>, Status> {
        let window = window(named.unit()).ok_or_else(|| {
            let expected = "expected SECOND, MINUTE, HOUR, DAY, MONTH or YEAR";
            Status::invalid_argument(format!(
                "descriptors[{number}].limit.unit: {expected}, got {}",
                named.unit
            ))
        })?;
        if named.requests_per_unit == 0 {
            return Ok(None);
        }
        let terms = OverrideTerms { permits: named.requests_per_unit, window };
        let subject = subject_of_attributes(attributes.iter().map(|(name, value)| (&**name, &**value)));
        let part = self.limiter.overrides.select(terms, subject, hits.permits());
        let mut part = part.map_err(|why| Status::resource_exhausted(why.to_string()))?;
        if hits.permits() > u64::from(named.requests_per_unit) {
            let exceeded = part.selection.checks.first().copied();
            part.selection.refusal =
                exceeded.map(|RuleCheck { rule, limit, .. }| Refusal::ExceedsLimit { rule, limit });
        }
        Ok(Some(part))
    }
}

/// Leaves rules of the policy out that a rule for any descriptor of the call replaces.
fn leave_out_replaced(asked: &mut [Asked]) {
    let selections = asked.iter().filter_map(|it| Some(&it.part.as_ref()?.selection));
    let replaced: Vec<usize> = selections.flat_map(|it| it.replaced.iter().copied()).collect();
    if replaced.is_empty() {
        return;
    }
    // Limits that the proxy names itself belong to no rule of the policy.
    for Asked { part, .. } in asked.iter_mut().filter(|asked| asked.named.is_none()) {
        part.iter_mut().for_each(|part| part.selection.leave_out(&replaced));
    }
}

fn check_entries(number: usize, descriptor: &RateLimitDescriptor) -> Result<(), Status> {
    let count = descriptor.entries.len();
    if !(1..=ENTRIES_MAX).contains(&count) {
        let expected = format!("descriptors[{number}].entries: expected 1 to {ENTRIES_MAX}, got {count}");
        return Err(Status::invalid_argument(expected));
    }
    match descriptor.entries.iter().position(|entry| entry.key.is_empty()) {
        Some(entry) => Err(Status::invalid_argument(format!(
            "descriptors[{number}].entries[{entry}].key: must not be empty"
        ))),
        None => Ok(()),
    }
}

/// The domain and the entries as attributes. Of several with the same name the first one counts, so no entry replaces the domain.
fn attributes<'a>(request: &'a RateLimitRequest, descriptor: &'a RateLimitDescriptor) -> Values<'a> {
    let domain = (Cow::Borrowed(DOMAIN), Cow::Borrowed(&*request.domain));
    let entry = |Entry { key, value }: &'a Entry| (Cow::Borrowed(&**key), Cow::Borrowed(&**value));
    std::iter::once(domain).chain(descriptor.entries.iter().map(entry)).collect()
}

const fn window(unit: RateLimitUnit) -> Option<OverrideWindow> {
    match unit {
        RateLimitUnit::Unknown => None,
        RateLimitUnit::Second => Some(OverrideWindow::Second),
        RateLimitUnit::Minute => Some(OverrideWindow::Minute),
        RateLimitUnit::Hour => Some(OverrideWindow::Hour),
        RateLimitUnit::Day => Some(OverrideWindow::Day),
        RateLimitUnit::Month => Some(OverrideWindow::Month),
        RateLimitUnit::Year => Some(OverrideWindow::Year),
    }
}
