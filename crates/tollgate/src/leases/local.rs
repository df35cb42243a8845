//! Decides on requests with held permits: from all of their leased limits, or from none.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use tollgate_core::lease::Spent;
use tollgate_core::{Decision, Timestamp};

use super::table::Moved;
use super::{Inner, Leased};
use crate::backend::Store;
use crate::by_limit::Table;
use crate::check::{Check, HashedKey};
use crate::verdict::{Basis, Verdict, Verdicts};

/// The part of a request that the store has to decide.
pub(crate) enum Rest<'a, B: Store> {
    /// All of it: none of its limits is leased.
    All,
    /// The check of its only limit, which has no permits to spend, and the number of permits to borrow.
    One(Arc<Leased<B>>, u64),
    /// Some of its limits.
    Part(Box<Part<'a, B>>),
}

/// A request some of whose limits need the store.
pub(crate) struct Part<'a, B: Store> {
    /// The verdicts made here, in the order of the checks.
    pub(super) verdicts: Verdicts,
    pub(super) spent: SpentHere<'a, B>,
    /// The other checks, and their numbers.
    pub(super) rest: SmallVec<[Check<'a>; 4]>,
    pub(super) numbers: SmallVec<[usize; 4]>,
    /// The leased limits among them, which have no permits to spend.
    pub(super) asked: SmallVec<[(usize, Arc<Leased<B>>); 4]>,
}

/// Permits spent on a request. They are put back when this is dropped, unless the request is admitted; also if its caller leaves.
pub(super) struct SpentHere<'a, B: Store>(SmallVec<[SpentOf<'a, Arc<Leased<B>>>; 4]>);

/// Permits spent of one limit.
struct SpentOf<'a, L> {
    leased: L,
    key: HashedKey<'a>,
    spent: Spent,
}

impl<B: Store> SpentHere<'_, B> {
    /// Keeps the permits spent: the request is admitted.
    pub(super) fn keep(mut self) {
        self.0.clear();
    }
}

impl<B: Store> Drop for SpentHere<'_, B> {
    fn drop(&mut self) {
        for SpentOf { leased, key, spent } in self.0.drain(..) {
            leased.table.unspend(key, &spent, leased.now());
        }
    }
}

impl<B: Store> Inner<B> {
    /// Decides on a request with held permits, as far as they suffice. Leased limits come first; if one of them denies, nothing is taken.
    #[inline]
    pub(super) fn decide_locally<'a>(&self, checks: &[Check<'a>]) -> Result<Verdicts, Rest<'a, B>> {
        let limits = self.limits.read();
        if limits.is_empty() || self.closed.load(Ordering::Relaxed) {
            return Err(Rest::All);
        }
        match checks {
            [check] => decide_one(&limits, check),
            _ => decide_set(&limits, checks, self.backend.clock().exact_now()),
        }
    }
}

/// The leased limit of a check, if permits can pay for the check.
#[inline]
fn leased_of<'t, B: Store>(limits: &'t Table<Leased<B>>, check: &Check<'_>) -> Option<&'t Arc<Leased<B>>> {
    limits.get(&check.limit).filter(|it| check.ask.cost > 0 && check.ask.cost <= it.limit.size())
}

const fn leased(decision: Decision) -> Option<Verdict> {
    Some(Verdict { decision, basis: Basis::Leased })
}

#[inline]
fn decide_one<'a, B: Store>(limits: &Table<Leased<B>>, check: &Check<'a>) -> Result<Verdicts, Rest<'a, B>> {
    let Some(it) = leased_of(limits, check) else { return Err(Rest::All) };
    match it.table.decide(check, it.now(), &it.limit, &it.terms, it.parts(), None) {
        Moved::Spent { decision, fetch } => {
            if fetch > 0 {
                it.fetch(check.key, fetch);
            }
            Ok(Verdicts::from_iter([leased(decision)]))
        }
        Moved::Denied(decision) => Ok(Verdicts::from_iter([leased(decision)])),
        Moved::Ask { ahead } => Err(Rest::One(Arc::clone(it), ahead)),
    }
}

fn decide_set<'a, B: Store>(
    limits: &Table<Leased<B>>,
    checks: &[Check<'a>],
    now: Timestamp,
) -> Result<Verdicts, Rest<'a, B>> {
    let mut verdicts = Verdicts::from_elem(None, checks.len());
    let mut spent: SmallVec<[SpentOf<'a, &Arc<Leased<B>>>; 4]> = SmallVec::new();
    let (mut numbers, mut asked) = (SmallVec::<[usize; 4]>::new(), SmallVec::new());
    let mut is_any_leased = false;
    for (number, check) in checks.iter().enumerate() {
        let Some(it) = leased_of(limits, check) else {
            numbers.push(number);
            continue;
        };
        is_any_leased = true;
        let mut permits = Spent::default();
        match it.table.decide(check, now, &it.limit, &it.terms, it.parts(), Some(&mut permits)) {
            Moved::Spent { decision, fetch } => {
                if fetch > 0 {
                    it.fetch(check.key, fetch);
                }
                verdicts[number] = leased(decision);
                spent.push(SpentOf { leased: it, key: check.key, spent: permits });
            }
            Moved::Denied(decision) if check.enforced => {
                for SpentOf { leased, key, spent } in spent {
                    leased.table.unspend(key, &spent, now);
                }
                let mut verdicts = Verdicts::from_elem(None, checks.len());
                verdicts[number] = leased(decision);
                return Ok(verdicts);
            }
            Moved::Denied(decision) => verdicts[number] = leased(decision),
            Moved::Ask { ahead } => {
                // In a call of its own, because the store decides on the request together with the other limits.
                if ahead > 0 {
                    it.fetch(check.key, ahead);
                }
                asked.push((number, Arc::clone(it)));
                numbers.push(number);
            }
        }
    }
    if !is_any_leased {
        return Err(Rest::All);
    }
    // Checks that are only counted never delay a request that is decided here.
    if numbers.iter().all(|number| !checks[*number].enforced) {
        return Ok(verdicts);
    }
    let rest = numbers.iter().map(|number| checks[*number]).collect();
    let own = |it: SpentOf<'a, &Arc<Leased<B>>>| SpentOf {
        leased: Arc::clone(it.leased),
        key: it.key,
        spent: it.spent,
    };
    let spent = spent.into_iter().map(own).collect();
    Err(Rest::Part(Box::new(Part { verdicts, spent: SpentHere(spent), rest, numbers, asked })))
}
