//! Keys and the order in which they are asked for, the same for every contender.

/// How often each key is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Popularity {
    /// The k-th key with a share of 1/k: a few hot ones and a long tail.
    Zipf,
    /// All keys alike, so that caches do not help.
    Uniform,
}

impl Popularity {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Zipf => "zipf",
            Self::Uniform => "uniform",
        }
    }
}

/// SplitMix64: small, seeded, the same in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The keys, in an order that has nothing to do with their popularity.
pub(crate) fn keys(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("user:{:016x}", Random(n as u64).next())).collect()
}

/// Indices of keys, as requests ask for them.
pub(crate) fn sequence(keys: usize, len: usize, popularity: Popularity, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    match popularity {
        Popularity::Uniform => (0..len).map(|_| (random.next() % keys as u64) as u32).collect(),
        Popularity::Zipf => {
            let mut shares = Vec::with_capacity(keys);
            let mut sum = 0.0;
            for rank in 1..=keys {
                sum += 1.0 / rank as f64;
                shares.push(sum);
            }
            (0..len)
                .map(|_| {
                    let at = random.unit() * sum;
                    shares.partition_point(|share| *share < at).min(keys - 1) as u32
                })
                .collect()
        }
    }
}
