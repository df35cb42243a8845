//! A policy: which limits a request is checked against, and whose they are.
//!
//! Pure: from what is known of a request to the checks that decide on it. LocalLease the states and asking them is the engine's work.

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
pub use self::subject::{KeyPart, KeySpec};
pub use self::tier::Family;
use crate::limit::Limit;
use crate::time::{Micros, Timestamp};

/// Limits that one request may be checked against together: one call to a store stays within a few kilobytes, and few locks are
/// held at once. Where more apply, those that are only counted are left out first. A request that more enforced limits apply to is
/// refused: leaving some out would let it through.
pub const CHECKS_MAX: usize = 32;

/// The [`Limit::work`] of all limits of one request: a call to a store takes well under a millisecond of it.
pub const WORK_MAX: usize = 64;

/// All keys of a rule, in ten-thousandths.
pub const ALL_KEYS: u64 = 10_000;

/// A limit of a rule, and the name under which its states are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleLimit {
    /// `ALGORITHM:RULE`, with what else tells it from the rule's other limits.
    pub scope: Box<str>,
    /// The limit.
    pub limit: Limit,
    /// A limit to be tried out beside this one, by number: it is counted and never enforced.
    pub candidate: Option<usize>,
}

/// The limits of a rule, by number in [`Policy::limits`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Limits {
    /// Everything goes.
    Unlimited,
    /// All of these together.
    All(Vec<usize>),
}

/// Which limits a rule has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuleLimits {
    /// Its own, the same for everybody.
    Own(Limits),
    /// Those of the tier that the request has in a family.
    OfTier {
        /// The family, by number.
        family: usize,
        /// By tier.
        tiers: Vec<Limits>,
        /// Further ones of their own for endpoints: number of the endpoint, and by tier.
        factors: Vec<(usize, Vec<Limits>)>,
    },
}

/// A rule: for which requests, counted by what, with which limits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    /// In keys, answers and metrics.
    pub name: Box<str>,
    /// Which requests it is for.
    pub matching: Match,
    /// What it counts by.
    pub key: KeySpec,
    /// Its limits.
    pub limits: RuleLimits,
    /// Permits that a request takes, for each that it asks for.
    pub cost: u64,
    /// A delay up to this long instead of a denial.
    pub max_wait: Option<Micros>,
    /// Whether the rules after it are left out where it applies.
    pub stop: bool,
    /// The status of the refusal if the request has none of the keys. None: the rule is left out then.
    pub deny_empty_key: Option<u16>,
    /// For how many of its keys, in ten-thousandths, it is enforced. For the others it is counted only.
    pub enforced: u64,
    /// In refusals, in place of the one that the key has.
    pub code: Option<Box<str>>,
}

/// A name for requests: for factors, metrics and reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// The name.
    pub name: Box<str>,
    /// Which requests are meant.
    pub matching: Match,
}

/// All parts of a policy. Numbers that refer to other parts must be in range.
#[derive(Clone, Debug, Default)]
pub struct PolicyParts {
    /// Requests that no rule is for.
    pub exclusions: Vec<Match>,
    /// In order.
    pub rules: Vec<Rule>,
    /// For requests that none of the rules applies to.
    pub default: Option<Rule>,
    /// Whether only the first rule applies that a request matches.
    pub first_match: bool,
    /// All limits of all rules.
    pub limits: Vec<RuleLimit>,
    /// Tiers.
    pub families: Vec<Family>,
    /// Named requests.
    pub endpoints: Vec<Endpoint>,
    /// How many bits of an IPv6 address are one client.
    pub ipv6_prefix: u8,
    /// Whether paths that differ only in the case of ASCII letters are one.
    pub ignore_case: bool,
}

/// A policy that answers quickly, however many rules it has.
#[derive(Clone, Debug)]
pub struct Policy {
    parts: PolicyParts,
    /// Exclusions and then rules.
    index: Index,
    endpoint_index: Index,
}

/// What becomes of a check's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// It decides.
    Enforced,
    /// It is counted: what would it have decided?
    Shadow,
}

/// One limit that a request is checked against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RuleCheck {
    /// The rule, by number; the default rule's is the number of rules.
    pub rule: usize,
    /// Which of the rule's keys it is.
    pub key: usize,
    /// The limit, by number.
    pub limit: usize,
    /// Whose limit it is, by number in [`Selection::subjects`].
    pub subject: usize,
    /// Permits that it takes.
    pub cost: u64,
    /// The delay that is accepted.
    pub wait: Option<Micros>,
    /// What becomes of the answer.
    pub role: Role,
    /// Whether it is a limit that is tried out beside another.
    pub is_candidate: bool,
}

/// A request that is refused without a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// A rule wants a key that the request does not have.
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

/// What a policy says of a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Selection {
    /// Limits that it is checked against; none: it may go ahead.
    pub checks: SmallVec<[RuleCheck; 4]>,
    /// Whose limits they are, each in braces.
    pub subjects: SmallVec<[String; 2]>,
    /// Why it is refused before any check.
    pub refusal: Option<Refusal>,
    /// Rules whose conditions hold, whether or not they apply, by number.
    pub matched: SmallVec<[usize; 4]>,
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

    /// Makes every log keep what the longer windows of its scope need, and for a while what those of `earlier` limits need: a key whose
    /// window gets longer, or comes back, finds what was consumed in it.
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
        selection.unknown_tier = tier::is_unknown(&self.parts.families, request);
        selection
    }

    /// The first endpoint that a request is one of.
    pub fn endpoint(&self, request: &Descriptors<'_>) -> Option<&Endpoint> {
        let path = RequestPath::new(request.path, self.parts.ignore_case);
        let first = self.endpoints(request, &path.segments()).first().copied()?;
        self.parts.endpoints.get(first)
    }

    /// The rules that a request does not match, each with the first condition that it does not meet. It tries every rule: for
    /// explanations, not for requests.
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
    /// Tiers that were looked up, by family.
    tiers: SmallVec<[(usize, usize); 2]>,
    endpoints: Option<SmallVec<[usize; 4]>>,
    /// Keys whose subjects are known, with the numbers of these. Keys with parameters of a path are not among them: each rule reads its own.
    formed: SmallVec<[(&'p [KeyPart], usize); 4]>,
}

/// What became of a rule whose conditions hold.
#[derive(PartialEq)]
enum Applied {
    /// It does not apply: the request has none of its keys, or a path that it must not free of limits.
    Not,
    /// It is counted only.
    Counted,
    /// It decides, and so do the other rules and the default: it counts by the address of an unverified API key.
    Beside,
    /// It decides.
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
            // What is only counted leaves everything else as it is. So does an unverified API key: a client must not get rid
            // of its other limits by inventing one.
            if self.apply(number, rule, &met.parameters) != Applied::Enforced {
                continue;
            }
            applied = true;
            // A rule that only some readings of the path match is one more limit. The rules for the other readings apply as well.
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

    /// Whether conditions may free a request of limits: a path that servers can read in different ways frees it of none.
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
            // In a queue everybody waits for a turn, however many other limits there are.
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

    /// The number of a rule's subject; rules that count by the same share it.
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
    /// The code of a refusal by this rule, where it counts by the key of this number: `IP_LIMIT`, `USER_IP_LIMIT`.
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
