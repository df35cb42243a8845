//! Keyed hashes of keys and scopes.

use std::sync::LazyLock;

use xxhash_rust::xxh3::xxh3_128_with_secret;

/// 128 keyed bits of a text. Two keys with the same hash would share a state, so 64 bits would be too few to promise.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Hash {
    /// Sorts the slots of the memory engine.
    pub(crate) high: u64,
    /// Chooses a stripe or a connection.
    pub(crate) low: u64,
}

impl Hash {
    /// The hash of a text.
    #[inline]
    pub(crate) fn of(text: &str) -> Self {
        let hash = xxh3_128_with_secret(text.as_bytes(), &*SECRET);
        Self { high: (hash >> 64) as u64, low: hash as u64 }
    }

    /// The hash of a scope. It is rotated by a bit, so that a key and a scope with the same text do not cancel out.
    pub(crate) fn of_scope(scope: &str) -> Self {
        let Self { high, low } = Self::of(scope);
        Self { high: high.rotate_left(1), low: low.rotate_left(1) }
    }

    /// The hash of a key within a scope.
    #[inline]
    pub(crate) const fn within(self, scope: Self) -> Self {
        Self { high: self.high ^ scope.high, low: self.low ^ scope.low }
    }
}

/// The default length of a secret of XXH3.
const SECRET_BYTES: usize = 192;

/// Random bytes that every hash is keyed with. They are unknown outside this process, so clients cannot choose keys with equal hashes.
static SECRET: LazyLock<[u8; SECRET_BYTES]> = LazyLock::new(|| {
    let mut secret = [7; SECRET_BYTES];
    // Replaying an interleaving requires that nothing else is random.
    if !cfg!(feature = "shuttle") {
        getrandom::fill(&mut secret).expect("the operating system gives random numbers");
    }
    secret
});
