//! A bound on the new subjects of a rule: beyond it, unknown subjects share one bucket.
//!
//! A flood of invented subjects (addresses, API keys) would otherwise fill the store with one state for each. No client escapes its limit by
//! this: states are not touched, so a subject that returns from the shared bucket finds the permits that it has consumed. In any interval a
//! client gets at most the permits of its own limit and of the shared one, which is common to all clients.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;

use parking_lot::Mutex;
use tollgate_core::Timestamp;

/// The subject of the bucket that unknown subjects share. Every other subject has a name and a value, or is `{global}`.
pub const SHARED_SUBJECT: &str = "{shared}";

/// Subjects in each of two generations: as many as fit into a hash table of 1.2 MB. A subject is forgotten after at least this many other
/// subjects have come since its last request.
const GENERATION_MAX: usize = 114_688;

/// The subjects of one rule that this node knows.
#[derive(Default)]
pub(crate) struct Newcomers {
    /// Keyed, so that clients cannot choose subjects with equal hashes. A subject with the hash of a known one counts as known.
    hasher: RandomState,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// Hashes of the subjects of this generation.
    recent: HashSet<u64>,
    /// Hashes of the subjects of the previous generation.
    before: HashSet<u64>,
    /// The second in which new subjects were last counted, and how many there were.
    second: u64,
    new: u32,
}

/// Where a subject of a rule is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// Under its own name.
    Own,
    /// In the shared bucket.
    Shared,
}

impl Newcomers {
    /// Decides where a subject is counted, and remembers it if that is under its own name.
    pub(crate) fn place(&self, subject: &str, per_second: NonZeroU32, now: Timestamp) -> Place {
        let hash = self.hasher.hash_one(subject);
        let mut known = self.known.lock();
        if known.recent.contains(&hash) {
            return Place::Own;
        }
        if !known.before.contains(&hash) {
            if known.new_in(now) >= per_second.get() {
                return Place::Shared;
            }
            known.new += 1;
        }
        known.remember(hash);
        Place::Own
    }

    /// The answer that [`Newcomers::place`] would give, without remembering anything.
    pub(crate) fn look(&self, subject: &str, per_second: NonZeroU32, now: Timestamp) -> Place {
        let hash = self.hasher.hash_one(subject);
        let mut known = self.known.lock();
        let is_known = known.recent.contains(&hash) || known.before.contains(&hash);
        if is_known || known.new_in(now) < per_second.get() { Place::Own } else { Place::Shared }
    }
}

impl Known {
    /// How many subjects were new in the second of `now`. If another thread has read a later time, that second counts.
    fn new_in(&mut self, now: Timestamp) -> u32 {
        let second = now.as_micros() / 1_000_000;
        if second > self.second {
            (self.second, self.new) = (second, 0);
        }
        self.new
    }

    fn remember(&mut self, hash: u64) {
        if self.recent.len() >= GENERATION_MAX {
            self.before = std::mem::take(&mut self.recent);
        }
        self.recent.insert(hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newcomers_are_bounded_and_keep_subjects_in_use() {
        let (newcomers, all) = (Newcomers::default(), NonZeroU32::MAX);
        let at = Timestamp::from_micros(1_763_000_000_000_000);
        let one = NonZeroU32::MIN;
        for n in 0..4 * GENERATION_MAX {
            assert_eq!(newcomers.place(&format!("{{ip:{n}}}"), all, at), Place::Own);
            if n % (GENERATION_MAX / 2) == 0 {
                assert_eq!(newcomers.place("{user:alice}", if n == 0 { all } else { one }, at), Place::Own);
            }
        }
        let known = newcomers.known.lock();
        assert!(known.recent.len() <= GENERATION_MAX && known.before.len() <= GENERATION_MAX);
        assert!(known.recent.capacity() <= 131_072, "{}", known.recent.capacity());
        drop(known);
        assert_eq!(
            newcomers.place("{ip:0}", one, at),
            Place::Shared,
            "a subject without requests is forgotten"
        );
    }
}
