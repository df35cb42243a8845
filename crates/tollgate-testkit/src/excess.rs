//! How far all processes together have gone beyond a limit.

/// What a limit promises: in any closed interval of length t, at most the burst and the rate times t.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Permits that may be taken at once.
    pub burst: u64,
    /// Permits that flow back in a period.
    pub permits: u64,
    /// The length of the period, above zero.
    pub period_us: u64,
}

/// The interval in which the most was admitted beyond a bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Excess {
    /// Permits beyond the bound, rounded up: a part of a permit too many is one. Zero if the bound was kept.
    pub permits: u64,
    /// The beginning of the interval. If the bound was kept, the interval is the one that came nearest to it.
    pub from_us: u64,
    /// The end of the interval, which belongs to it.
    pub to_us: u64,
    /// All permits that were admitted in the interval.
    pub admitted: u64,
}

impl Bound {
    /// Looks at all intervals, in one pass over the admissions, which are sorted by their times: each is a time in
    /// microseconds and a number of permits. The clock must be one that all processes share.
    pub fn excess(&self, admissions: &mut [(u64, u64)]) -> Excess {
        admissions.sort_unstable_by_key(|(at_us, _)| *at_us);
        // The unit is a part of a permit, of which a period's length makes one, so that what flows back in a microsecond
        // is a whole number.
        let unit = i128::from(self.period_us);
        let flowed = |at_us: u64| i128::from(self.permits) * i128::from(at_us);
        let burst = i128::from(self.burst) * unit;

        let mut worst: Option<(i128, Excess)> = None;
        // The best beginning for any interval that ends later: the most that has flowed, with the least admitted before.
        let mut beginning: Option<(i128, u64, u64)> = None;
        let mut total = 0_u64;
        for (at_us, permits) in admissions.iter().copied() {
            let headroom = flowed(at_us) - i128::from(total) * unit;
            if beginning.is_none_or(|(best, ..)| headroom > best) {
                beginning = Some((headroom, at_us, total));
            }
            total += permits;
            let Some((headroom, from_us, before)) = beginning else { continue };
            let beyond = i128::from(total) * unit - flowed(at_us) + headroom - burst;
            if worst.is_none_or(|(most, _)| beyond > most) {
                let permits = u64::try_from((beyond + unit - 1).max(0) / unit).unwrap_or(u64::MAX);
                worst = Some((beyond, Excess { permits, from_us, to_us: at_us, admitted: total - before }));
            }
        }
        worst.map_or_else(Excess::default, |(_, excess)| excess)
    }
}
