//! Leases: permits of a token bucket that are granted ahead of use, and spent elsewhere without asking again.
//!
//! What is out counts: while a lease lives, its permits take room in the bucket. So what is left here and what may still be spent
//! elsewhere never exceed the capacity together, at any instant, and everything that is admitted anywhere keeps the bucket's own
//! bound. A lease lives for the length of an epoch, from its grant: whatever is out was granted in this epoch or in the one before
//! it, and two numbers are all that must be known of all leases.

use super::{BucketState, TokenBucket};
use crate::decision::{Outcome, Standing};
use crate::limit::LimitError;
use crate::time::{Micros, Timestamp};

/// A token bucket that lends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LeaseBucket {
    bucket: TokenBucket,
    /// How long a lease lives, in ticks.
    life: i64,
}

/// What one key remembers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseState {
    /// The bucket's own: what is left here.
    pub bucket: BucketState,
    /// The epoch that `out` was granted in.
    pub epoch: i64,
    /// Permits granted in that epoch and not given back.
    pub out: u64,
    /// Permits granted in the one before it and not given back.
    pub out_before: u64,
}

/// Permits that may be spent for the life of a lease, counted from when they were asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// How many.
    pub permits: u64,
    /// In which epoch: whoever gives some back says so.
    pub epoch: i64,
}

impl LeaseBucket {
    /// A bucket whose leases live for `life`, rounded down to the bucket's ticks.
    pub fn new(bucket: TokenBucket, life: Micros) -> Result<Self, LimitError> {
        let life = (life.get() / bucket.tick()).min(i64::MAX as u64) as i64;
        if life < 1 {
            return Err(LimitError::Empty);
        }
        Ok(Self { bucket, life })
    }

    /// The bucket.
    pub const fn bucket(&self) -> &TokenBucket {
        &self.bucket
    }

    /// How long a lease lives.
    pub const fn life(&self) -> Micros {
        Micros::of(self.bucket.us(self.life))
    }

    /// The state of a key that was never used.
    pub fn fresh(&self, now: Timestamp) -> LeaseState {
        let at = self.bucket.ticks(now);
        let bucket = BucketState { level: self.bucket.full(), at };
        LeaseState { bucket, epoch: at / self.life, out: 0, out_before: 0 }
    }

    /// Lends as many of the `wanted` permits as are left.
    pub fn grant(&self, state: &mut LeaseState, now: Timestamp, wanted: u64) -> Grant {
        *state = self.settle(*state, now);
        let permits = wanted.min(self.left(state));
        state.bucket.level -= self.bucket.units(permits);
        state.out += permits;
        Grant { permits, epoch: state.epoch }
    }

    /// Takes permits to be spent at once, or says when they could be had if nobody else asked.
    pub fn take(&self, state: &mut LeaseState, now: Timestamp, cost: u64) -> Outcome {
        if cost > self.bucket.capacity() {
            return Outcome::Impossible;
        }
        let settled = self.settle(*state, now);
        if cost == 0 {
            return Outcome::NOW;
        }
        if cost <= self.left(&settled) {
            *state = settled;
            state.bucket.level -= self.bucket.units(cost);
            return Outcome::NOW;
        }
        Outcome::Denied { retry: self.wait(&settled, now, cost) }
    }

    /// Takes back permits of a grant that were not spent, whose lease has not ended yet. From one that may have ended meanwhile,
    /// nothing comes back.
    pub fn give_back(&self, state: &mut LeaseState, now: Timestamp, grant: Grant) {
        *state = self.settle(*state, now);
        if grant.epoch < state.epoch - 1 {
            return;
        }
        // From the earlier ones first, whichever it was: then the others are counted for too long, never for too short. After a
        // clock was set back, an epoch's number does not tell.
        let permits = grant.permits.min(state.out + state.out_before);
        let early = permits.min(state.out_before);
        state.out_before -= early;
        state.out -= permits - early;
        state.bucket.level += self.bucket.units(permits);
    }

    /// Permits left here, and the time until all are.
    pub fn standing(&self, state: &LeaseState, now: Timestamp) -> Standing {
        let settled = self.settle(*state, now);
        let reset = Micros::of(self.full_at(&settled).us() - now.us());
        Standing { remaining: self.left(&settled), reset }
    }

    /// The instant from which the state is as good as none: full, and nothing out.
    pub fn full_at(&self, state: &LeaseState) -> Timestamp {
        let mut state = *state;
        for _ in 0..2 {
            if state.out + state.out_before > 0 {
                self.next_epoch(&mut state);
            }
        }
        let missing = self.bucket.full() - state.bucket.level;
        Timestamp::at(self.bucket.us(state.bucket.at + self.bucket.ticks_for(missing)))
    }

    /// Whole permits left in a state that is settled.
    fn left(&self, state: &LeaseState) -> u64 {
        if state.bucket.level <= 0 { 0 } else { state.bucket.level as u64 / self.bucket.unit() }
    }

    /// How full the bucket may be with so much out.
    fn cap(&self, state: &LeaseState) -> i64 {
        self.bucket.full() - self.bucket.units(state.out) - self.bucket.units(state.out_before)
    }

    /// The state as it is at `now`.
    fn settle(&self, state: LeaseState, now: Timestamp) -> LeaseState {
        let mut state = LeaseState { bucket: self.bucket.redate(state.bucket, now), ..state };
        let tick = self.bucket.ticks(now);
        let epoch = tick / self.life;
        if epoch < state.epoch {
            // The clock was set back: everything that is out counts as granted now.
            (state.out, state.out_before) = (state.out + state.out_before, 0);
        }
        while state.epoch < epoch && state.out + state.out_before > 0 {
            self.next_epoch(&mut state);
        }
        state.epoch = epoch;
        self.refill(&mut state, tick);
        state
    }

    /// To the end of the epoch. Only there is its oldest lease surely over: what flows until then finds the room taken.
    fn next_epoch(&self, state: &mut LeaseState) {
        let end = (state.epoch + 1) * self.life;
        self.refill(state, end);
        (state.out_before, state.out, state.epoch) = (state.out, 0, state.epoch + 1);
    }

    fn refill(&self, state: &mut LeaseState, tick: i64) {
        if tick <= state.bucket.at {
            return;
        }
        let flowed = (tick - state.bucket.at).saturating_mul(self.bucket.flow() as i64);
        let missing = self.cap(state) - state.bucket.level;
        if missing > 0 {
            state.bucket.level += flowed.min(missing);
        }
        state.bucket.at = tick;
    }

    /// Until `cost` is left, if nobody asks meanwhile and nothing is given back.
    fn wait(&self, settled: &LeaseState, now: Timestamp, cost: u64) -> Micros {
        let mut state = *settled;
        let cost = self.bucket.units(cost);
        loop {
            let at = state.bucket.at + self.bucket.ticks_for((cost - state.bucket.level).max(0));
            let is_last = state.out + state.out_before == 0;
            if is_last || cost <= self.cap(&state) && at <= (state.epoch + 1) * self.life {
                return Micros::of(self.bucket.us(at) - now.us());
            }
            self.next_epoch(&mut state);
        }
    }
}
