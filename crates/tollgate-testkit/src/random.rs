//! Seeded randomness for tests: SplitMix64, the same numbers everywhere.

/// A source of numbers that a seed replays.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub const fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is above zero.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// True in one of `of` cases.
    pub const fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }
}
