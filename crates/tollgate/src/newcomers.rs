//! A bound on the new subjects of a rule: beyond it, subjects that are not known share one bucket.
//!
//! A flood of invented subjects (addresses, API keys) would otherwise fill the store with one state for each. Whatever is forgotten here,
//! no client escapes its limit: states are not touched, so a subject that is sent to the shared bucket and comes back finds what it has
//! consumed. In any interval a client gets at most what its own limit and the shared one admit, and the shared one is common to all.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;

use parking_lot::Mutex;
use tollgate_core::Timestamp;

/// The subject of the bucket that unknown subjects share. Every other subject names what it counts by and a value, or is `{global}`.
pub const SHARED_SUBJECT: &str = "{shared}";

/// Subjects in one of the two generations that are remembered: all that fit into a hash table of 1.2 MB. A subject is forgotten when
/// at least so many others have come since it was last asked about.
const GENERATION_MAX: usize = 114_688;

/// The subjects of one rule that this node knows.
#[derive(Default)]
pub(crate) struct Newcomers {
    /// Keyed, so that nobody can choose subjects that meet. A subject whose hash meets that of a known one is taken for known.
    hasher: RandomState,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// Hashes of subjects that were asked about since the last turn.
    recent: HashSet<u64>,
    /// Those of the turn before.
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
    /// How many subjects were new in the second of `now`. A clock that another thread has read earlier counts with the later one.
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
    fn memory_is_bounded_and_subjects_in_use_are_never_forgotten() {
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
        assert_eq!(newcomers.place("{ip:0}", one, at), Place::Shared, "nobody has asked about it for long");
    }
}
