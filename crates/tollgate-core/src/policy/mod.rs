//! A policy: selects the limits that a request is checked against, and their subjects.
//!
//! The selection is pure: descriptors in, checks out. The engine holds the states and decides.

mod example;
mod index;
mod matching;
mod path;
mod pattern;
mod request;
mod retention;
mod subject;
mod tier;

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use smallvec::SmallVec;

pub use self::example::Crowd;
use self::index::Index;
use self::matching::Met;
pub use self::matching::{Match, Network, Source, Unmet, ValueCondition};
pub use self::path::RequestPath;
use self::path::Segments;
use self::pattern::Parameters;
pub use self::pattern::{Glob, PathPattern, PatternError, SEGMENTS_MAX, is_name};
pub use self::request::{Descriptors, Fields, IdentityKind};
pub use self::subject::{KeyPart, KeySpec, subject_of_attributes};
pub use self::tier::Family;
use crate::decision::Ask;
use crate::limit::Limit;
use crate::time::{Micros, Timestamp};

/// The most checks of one request: one call to a store stays within a few kilobytes, and few locks are held at once. If more limits
/// apply, checks that are only counted are left out first. A request with more enforced limits is refused, because leaving some out
/// would let it through.
pub const CHECKS_MAX: usize = 32;

/// The most [`Limit::work`] of one request: its call takes well under a millisecond of the store.
pub const WORK_MAX: usize = 64;

/// All keys of a rule, in ten-thousandths.
pub const ALL_KEYS: u64 = 10_000;

/// A limit of a rule, and the scope of its states.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleLimit {
    /// `ALGORITHM:RULE`, with a suffix if the rule has several limits.
    pub scope: Box<str>,
    /// The limit.
    pub limit: Limit,
    /// A candidate beside this limit, by number: it is counted and never enforced.
    pub candidate: Option<usize>,
}

/// The limits of a rule, by number in [`Policy::limits`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Limits {
    /// No limit.
    Unlimited,
    /// All of these together.
    All(Vec<usize>),
}

/// Which limits a rule has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuleLimits {
    /// Limits of the rule, the same for all requests.
    Own(Limits),
    /// The limits of the request's tier in a family.
    OfTier {
        /// The family, by number.
        family: usize,
        /// By tier.
        tiers: Vec<Limits>,
        /// More limits for endpoints: the number of the endpoint, and its limits by tier.
        factors: Vec<(usize, Vec<Limits>)>,
    },
}

/// A rule: its conditions, its key and its limits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    /// Its name in keys, answers and metrics.
    pub name: Box<str>,
    /// Its conditions.
    pub matching: Match,
    /// The key that it counts by.
    pub key: KeySpec,
    /// Its limits.
    pub limits: RuleLimits,
    /// Permits that a request takes for each permit that it asks for.
    pub cost: u64,
    /// The longest delay instead of a denial.
    pub max_wait: Option<Micros>,
    /// Whether later rules are skipped if it applies.
    pub stop: bool,
    /// The status of the refusal if the request has none of the keys. `None`: the rule is skipped then.
    pub deny_empty_key: Option<u16>,
    /// The share of its keys, in ten-thousandths, for which it is enforced. For other keys it is only counted.
    pub enforced: u64,
    /// The code in refusals, instead of the code of the key.
    pub code: Option<Box<str>>,
}

/// A named set of requests, for factors, metrics and reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// The name.
    pub name: Box<str>,
    /// Its conditions.
    pub matching: Match,
}

/// All parts of a policy. Numbers that refer to other parts must be in range.
#[derive(Clone, Debug, Default)]
pub struct PolicyParts {
    /// Conditions of requests that the policy excludes.
    pub exclusions: Vec<Match>,
    /// The rules, in order.
    pub rules: Vec<Rule>,
    /// The rule for requests that no other rule applies to.
    pub default: Option<Rule>,
    /// Whether only the first matching rule applies.
    pub first_match: bool,
    /// Pairs of rules, by number: where the first one matches, the second one does not apply.
    pub replacements: Vec<(usize, usize)>,
    /// All limits of all rules.
    pub limits: Vec<RuleLimit>,
    /// The families of tiers.
    pub families: Vec<Family>,
    /// The named sets of requests.
    pub endpoints: Vec<Endpoint>,
    /// How many leading bits of an IPv6 address identify a client.
    pub ipv6_prefix: u8,
    /// Whether paths that differ only in the case of ASCII letters are equal.
    pub ignore_case: bool,
}

/// A policy with an index of its rules.
#[derive(Clone, Debug)]
pub struct Policy {
    parts: PolicyParts,
    /// Exclusions and then rules.
    index: Index,
    endpoint_index: Index,
}

/// Whether a check is enforced or only counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// A denial denies the request.
    Enforced,
    /// The decision is only counted.
    Shadow,
}

/// One limit that a request is checked against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RuleCheck {
    /// The rule, by number; the default rule's is the number of rules.
    pub rule: usize,
    /// The key of the rule, by number.
    pub key: usize,
    /// The limit, by number.
    pub limit: usize,
    /// The subject, by number in [`Selection::subjects`].
    pub subject: usize,
    /// Permits that it takes.
    pub cost: u64,
    /// The delay that is accepted.
    pub wait: Option<Micros>,
    /// Whether it is enforced.
    pub role: Role,
    /// Whether its limit is a candidate.
    pub is_candidate: bool,
}

/// A request that is refused without a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// A rule requires a key that the request does not have.
    EmptyKey {
        /// The rule, by number.
        rule: usize,
        /// The status to answer with.
        status: u16,
    },
    /// More than [`CHECKS_MAX`] enforced limits apply, or more than [`WORK_MAX`] of work.
    TooManyChecks,
    /// The request takes more permits than a limit can ever admit.
    ExceedsLimit {
        /// The rule, by number.
        rule: usize,
        /// The limit, by number.
        limit: usize,
    },
}

/// The checks that a policy selects for a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Selection {
    /// The checks. Empty: the request is admitted.
    pub checks: SmallVec<[RuleCheck; 4]>,
    /// The subjects of the checks, each in braces.
    pub subjects: SmallVec<[String; 2]>,
    /// Why it is refused without a check.
    pub refusal: Option<Refusal>,
    /// Rules whose conditions hold, by number, also if they do not apply.
    pub matched: SmallVec<[usize; 4]>,
    /// Rules that do not apply because another rule replaces them, by number, whether or not the request matches them.
    pub replaced: SmallVec<[usize; 2]>,
    /// Rules that were skipped because the request has none of their keys, by number.
    pub skipped: SmallVec<[usize; 4]>,
    /// Checks in shadow and of candidates that were left out because of [`CHECKS_MAX`] or [`WORK_MAX`].
    pub uncounted: usize,
    /// Whether no rule applies, and no default.
    pub unmatched: bool,
    /// Whether the request is excluded from the policy.
    pub excluded: bool,
    /// Whether a tier was named that no family has.
    pub unknown_tier: bool,
}

impl Selection {
    /// The selection of one limit for a subject, by the numbers of the rule and of the limit.
    pub fn of_rule(rule: usize, limit: usize, subject: String, ask: Ask) -> Self {
        let Ask { cost, wait } = ask;
        let role = Role::Enforced;
        let check = RuleCheck { rule, key: 0, limit, subject: 0, cost, wait, role, is_candidate: false };
        Self {
            checks: SmallVec::from_slice(&[check]),
            subjects: SmallVec::from_iter([subject]),
            ..Self::default()
        }
    }

    /// Whose limit a check asks, without the braces that a store needs around it.
    pub fn key(&self, check: &RuleCheck) -> &str {
        self.subjects[check.subject].trim_start_matches('{').trim_end_matches('}')
    }

    /// Leaves rules out that are replaced by this request, or by another one that is decided together with it.
    pub fn leave_out(&mut self, replaced: &[usize]) {
        self.checks.retain(|check| !replaced.contains(&check.rule));
        self.refusal = self.refusal.filter(|refusal| match refusal {
            Refusal::EmptyKey { rule, .. } | Refusal::ExceedsLimit { rule, .. } => !replaced.contains(rule),
            Refusal::TooManyChecks => true,
        });
    }
}

impl Policy {
    /// A policy of these parts.
    pub fn new(mut parts: PolicyParts) -> Self {
        if parts.ignore_case {
            lower_paths(&mut parts);
        }
        let matches = parts.exclusions.iter().chain(parts.rules.iter().map(|rule| &rule.matching));
        let index = Index::new(matches);
        let endpoint_index = Index::new(parts.endpoints.iter().map(|endpoint| &endpoint.matching));
        Self { index, endpoint_index, parts }
    }

    /// The parts.
    pub fn parts(&self) -> &PolicyParts {
        &self.parts
    }

    /// A rule by its number; the default rule comes behind the others.
    pub fn rule(&self, number: usize) -> Option<&Rule> {
        self.parts.rules.get(number).or(self.parts.default.as_ref())
    }

    /// All limits of all rules.
    pub fn limits(&self) -> &[RuleLimit] {
        &self.parts.limits
    }

    /// Makes every log keep the entries that longer windows of its scope need, and for a while those of `earlier` limits. A key whose
    /// window gets longer, or comes back, finds the permits consumed in it.
    pub fn retain_logs(&mut self, earlier: &[RuleLimit], now: Timestamp) {
        retention::retain(&mut self.parts.limits, earlier, now);
    }

    /// The limits that a request is checked against.
    pub fn select(&self, request: &Descriptors<'_>, permits: u64) -> Selection {
        let path = RequestPath::new(request.path, self.parts.ignore_case);
        let readings = path.segments();
        let mut selecting = Selecting {
            policy: self,
            request: *request,
            readings: &readings,
            path_is_plain: path.is_plain(),
            permits,
            selection: Selection::default(),
            tiers: SmallVec::new(),
            formed: SmallVec::new(),
            endpoints: None,
        };
        selecting.run();
        let mut selection = selecting.selection;
        for (rule, replaced) in &self.parts.replacements {
            if selection.matched.contains(rule) && !selection.skipped.contains(rule) {
                selection.replaced.push(*replaced);
            }
        }
        if !selection.replaced.is_empty() {
            let replaced = selection.replaced.clone();
            selection.leave_out(&replaced);
        }
        selection.unknown_tier = tier::is_unknown(&self.parts.families, request);
        selection
    }

    /// The first endpoint that a request matches.
    pub fn endpoint(&self, request: &Descriptors<'_>) -> Option<&Endpoint> {
        let path = RequestPath::new(request.path, self.parts.ignore_case);
        let first = self.endpoints(request, &path.segments()).first().copied()?;
        self.parts.endpoints.get(first)
    }

    /// The rules that a request does not match, each with the first unmet condition. Tries every rule, so it is for explanations only.
    pub fn unmatched(&self, request: &Descriptors<'_>) -> Vec<(&Rule, Unmet<'_>)> {
        let path = RequestPath::new(request.path, self.parts.ignore_case);
        let readings = path.segments();
        let mut unmatched = Vec::new();
        for rule in &self.parts.rules {
            let unmet = rule.matching.first_unmet(request, &readings, |family| self.tier(family, request));
            unmatched.extend(unmet.map(|unmet| (rule, unmet)));
        }
        unmatched
    }

    /// The tier that a request has in each family.
    pub fn tiers(&self, request: &Descriptors<'_>) -> impl Iterator<Item = (&str, &str)> {
        let families = self.parts.families.iter();
        families.map(|family| (&*family.name, &*family.tiers[family.tier_of(request)]))
    }

    fn endpoints(&self, request: &Descriptors<'_>, readings: &[Segments<'_>]) -> SmallVec<[usize; 4]> {
        let candidates =
            self.endpoint_index.candidates(request, readings).into_iter().map(|number| number as usize);
        let is_one = |number: &usize| {
            let matching = &self.parts.endpoints[*number].matching;
            matching.met(request, readings, |family| self.tier(family, request)).is_some()
        };
        candidates.filter(is_one).collect()
    }

    fn tier(&self, family: usize, request: &Descriptors<'_>) -> Option<usize> {
        Some(self.parts.families.get(family)?.tier_of(request))
    }
}

/// Lowers the paths of all conditions.
fn lower_paths(parts: &mut PolicyParts) {
    let rules = parts.rules.iter_mut().map(|rule| &mut rule.matching);
    let endpoints = parts.endpoints.iter_mut().map(|endpoint| &mut endpoint.matching);
    for matching in parts.exclusions.iter_mut().chain(rules).chain(endpoints) {
        matching.paths.iter_mut().for_each(|path| *path = path.lowered());
    }
}

/// A selection under way.
struct Selecting<'p, 'r> {
    policy: &'p Policy,
    request: Descriptors<'r>,
    readings: &'p [Segments<'r>],
    path_is_plain: bool,
    permits: u64,
    selection: Selection,
    /// Tiers found so far, by family.
    tiers: SmallVec<[(usize, usize); 2]>,
    endpoints: Option<SmallVec<[usize; 4]>>,
    /// Keys whose subjects are known, with the numbers of the subjects. Keys with path parameters are not among them: each rule has its own.
    formed: SmallVec<[(&'p [KeyPart], usize); 4]>,
}

/// How a matching rule applies.
#[derive(PartialEq)]
enum Applied {
    /// It does not apply: the request has none of its keys, or a path that must not lift limits.
    Not,
    /// It is only counted.
    Counted,
    /// It is enforced beside the other rules and the default: it counts by the address of an unverified API key.
    Beside,
    /// It is enforced.
    Enforced,
}

impl<'p, 'r> Selecting<'p, 'r> {
    fn run(&mut self) {
        let parts = &self.policy.parts;
        let exclusions = parts.exclusions.len();
        let (mut applied, mut settled) = (false, false);
        for number in self.policy.index.candidates(&self.request, self.readings) {
            let number = number as usize;
            if let Some(exclusion) = parts.exclusions.get(number) {
                if self.may_free(exclusion) && self.met(exclusion).is_some() {
                    self.selection.excluded = true;
                    return;
                }
                continue;
            }
            let number = number - exclusions;
            let rule = &parts.rules[number];
            let Some(met) = self.met(&rule.matching) else { continue };
            self.selection.matched.push(number);
            // A rule that is only counted does not affect other rules. Neither does an unverified API key: a client must not
            // escape its other limits by inventing one.
            if self.apply(number, rule, &met.parameters) != Applied::Enforced {
                continue;
            }
            applied = true;
            // A rule that matches only some readings of the path is one more limit. The rules for the other readings apply too.
            settled |= met.in_every_reading;
            let stops = met.in_every_reading && (rule.stop || parts.first_match);
            if stops || self.selection.refusal.is_some() {
                break;
            }
        }
        if let Some(rule) = parts.default.as_ref().filter(|_| !settled && self.selection.refusal.is_none()) {
            let number = parts.rules.len();
            self.selection.matched.push(number);
            applied |= self.apply(number, rule, &Parameters::new()) == Applied::Enforced;
        }
        self.selection.unmatched = !applied;
    }

    fn met<'m>(&mut self, matching: &'m Match) -> Option<Met<'m, 'r>> {
        let (request, readings) = (self.request, self.readings);
        matching.met(&request, readings, |family| self.tier(family))
    }

    /// Whether conditions may lift limits: a path that servers can read in different ways lifts none.
    fn may_free(&self, matching: &Match) -> bool {
        self.path_is_plain || matching.paths.is_empty()
    }

    /// Adds the checks of a rule.
    fn apply(&mut self, number: usize, rule: &'p Rule, parameters: &Parameters<'_, 'r>) -> Applied {
        if rule.limits == RuleLimits::Own(Limits::Unlimited) {
            return match rule.enforced > 0 {
                true if self.may_free(&rule.matching) => Applied::Enforced,
                true => Applied::Not,
                false => Applied::Counted,
            };
        }
        let Some(key) = rule.key.choose(&self.request, parameters) else {
            let Some(status) = rule.deny_empty_key.filter(|_| rule.enforced > 0) else {
                self.selection.skipped.push(number);
                return Applied::Not;
            };
            self.selection.refusal.get_or_insert(Refusal::EmptyKey { rule: number, status });
            return Applied::Enforced;
        };
        let subject = self.subject(rule, key, parameters);
        let is_enforced = rule.enforced >= ALL_KEYS
            || rule.enforced > 0
                && subject::part_of(&rule.name, &self.selection.subjects[subject], ALL_KEYS) < rule.enforced;
        let template = RuleCheck {
            rule: number,
            key,
            limit: 0,
            subject,
            cost: rule.cost.saturating_mul(self.permits),
            wait: rule.max_wait,
            role: if is_enforced { Role::Enforced } else { Role::Shadow },
            is_candidate: false,
        };
        match &rule.limits {
            RuleLimits::Own(limits) => self.add(limits, template),
            RuleLimits::OfTier { family, tiers, factors } => {
                let Some(tier) = self.tier(*family) else { return Applied::Not };
                if tiers.get(tier) == Some(&Limits::Unlimited) && !self.may_free(&rule.matching) {
                    return Applied::Not;
                }
                let of_endpoints: SmallVec<[&Vec<Limits>; 2]> = factors
                    .iter()
                    .filter(|(endpoint, _)| self.is_at(*endpoint))
                    .map(|(_, tiers)| tiers)
                    .collect();
                for tiers in core::iter::once(tiers).chain(of_endpoints) {
                    if let Some(limits) = tiers.get(tier) {
                        self.add(limits, template);
                    }
                }
            }
        }
        match is_enforced {
            true if rule.key.is_of_unverified_api_key(key) => Applied::Beside,
            true => Applied::Enforced,
            false => Applied::Counted,
        }
    }

    fn add(&mut self, limits: &Limits, template: RuleCheck) {
        let Limits::All(limits) = limits else { return };
        for limit in limits {
            // In a queue every request waits for its turn, whatever other limits there are.
            let turn = self.policy.parts.limits.get(*limit).and_then(|it| it.limit.queue_length());
            let template = RuleCheck { wait: template.wait.or(turn), ..template };
            self.push(RuleCheck { limit: *limit, ..template });
            if let Some(candidate) = self.policy.parts.limits.get(*limit).and_then(|it| it.candidate) {
                self.push(RuleCheck { limit: candidate, role: Role::Shadow, is_candidate: true, ..template });
            }
        }
    }

    fn push(&mut self, check: RuleCheck) {
        let RuleCheck { rule, limit, role, .. } = check;
        let Selection { checks, refusal, uncounted, .. } = &mut self.selection;
        let size = self.policy.parts.limits.get(limit).map_or(u64::MAX, |it| it.limit.size());
        if role == Role::Enforced && check.cost > size {
            refusal.get_or_insert(Refusal::ExceedsLimit { rule, limit });
        }
        let limits = &self.policy.parts.limits;
        let work_of = |check: &RuleCheck| limits.get(check.limit).map_or(1, |it| it.limit.work());
        loop {
            let work: usize = checks.iter().chain([&check]).map(work_of).sum();
            if checks.len() < CHECKS_MAX && work <= WORK_MAX {
                checks.push(check);
                return;
            }
            let last_counted = checks.iter().rposition(|it| it.role == Role::Shadow);
            match (role, last_counted) {
                (Role::Shadow, _) => {
                    *uncounted += 1;
                    return;
                }
                (Role::Enforced, Some(last)) => {
                    checks.remove(last);
                    *uncounted += 1;
                }
                (Role::Enforced, None) => {
                    refusal.get_or_insert(Refusal::TooManyChecks);
                    return;
                }
            }
        }
    }

    /// The number of the subject of a rule. Rules with equal subjects share it.
    fn subject(&mut self, rule: &'p Rule, key: usize, parameters: &Parameters<'_, 'r>) -> usize {
        let parts = rule.key.0.get(key).map_or(&[][..], Vec::as_slice);
        if let Some((_, known)) = self.formed.iter().find(|(formed, _)| *formed == parts) {
            return *known;
        }
        let number = self.new_subject(rule, key, parameters);
        if !parts.iter().any(|part| matches!(part, KeyPart::Path(_))) {
            self.formed.push((parts, number));
        }
        number
    }

    fn new_subject(&mut self, rule: &Rule, key: usize, parameters: &Parameters<'_, 'r>) -> usize {
        let subject = rule.key.subject(key, &self.request, parameters, self.policy.parts.ipv6_prefix);
        let subjects = &mut self.selection.subjects;
        subjects.iter().position(|known| *known == subject).unwrap_or_else(|| {
            subjects.push(subject);
            subjects.len() - 1
        })
    }

    fn tier(&mut self, family: usize) -> Option<usize> {
        if let Some((_, tier)) = self.tiers.iter().find(|(known, _)| *known == family) {
            return Some(*tier);
        }
        let tier = self.policy.tier(family, &self.request)?;
        self.tiers.push((family, tier));
        Some(tier)
    }

    fn is_at(&mut self, endpoint: usize) -> bool {
        let (policy, request, readings) = (self.policy, &self.request, self.readings);
        self.endpoints.get_or_insert_with(|| policy.endpoints(request, readings)).contains(&endpoint)
    }
}

impl Rule {
    /// The code of a refusal by this rule and the key with this number: `IP_LIMIT`, `USER_IP_LIMIT`.
    pub fn code(&self, key: usize) -> String {
        if let Some(code) = &self.code {
            return (**code).into();
        }
        let mut code = String::new();
        for part in self.key.0.get(key).into_iter().flatten() {
            code.push_str(part.code());
            code.push('_');
        }
        code + "LIMIT"
    }
}
