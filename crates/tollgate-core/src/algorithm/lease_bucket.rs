//! Leases: permits of a token bucket that are granted ahead of use, and spent elsewhere without asking again.
//!
//! What is out counts: while a lease lives, its permits take room in the bucket. So what is left here and what may still be spent
//! elsewhere never exceed the capacity together, at any instant, and everything that is admitted anywhere keeps the bucket's own
//! bound. A lease lives for the length of an epoch, from its grant: whatever is out was granted in this epoch or in the one before
//! it, and two numbers are all that must be known of all leases.

use super::{Algorithm, BucketState, TokenBucket, accepted_wait, admit_by};
use crate::decision::{Ask, Outcome, Status};
use crate::lease::Grant;
use crate::migrate::CarriedDebt;
use crate::time::{Micros, Timestamp};

/// A token bucket some of whose permits are out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LeaseBucket(pub TokenBucket);

/// What one key remembers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseState {
    /// The bucket's own: what is left here.
    pub bucket: BucketState,
    /// How long a lease lives, and an epoch lasts, in ticks; at least one.
    pub life: i64,
    /// The number, since the beginning of time, of the epoch that `out` was granted in.
    pub epoch: i64,
    /// Permits granted in that epoch and not given back.
    pub out: u64,
    /// Permits granted in the one before it and not given back.
    pub out_before: u64,
}

impl LeaseState {
    /// A state with leases that were granted in the epoch that began at `since`, and in the one before. Where another limit has
    /// cut time otherwise, they count for longer, never for shorter.
    pub fn new(
        bucket: &TokenBucket,
        state: BucketState,
        life: Micros,
        since: Timestamp,
        out: [u64; 2],
    ) -> Self {
        let life = life.get().div_ceil(bucket.tick()).clamp(1, i64::MAX as u64) as i64;
        let epoch = since.as_micros().div_ceil(bucket.tick()).div_ceil(life as u64) as i64;
        let [out, out_before] = out;
        Self { bucket: state, life, epoch, out, out_before }
    }

    /// Whether nobody holds a lease.
    const fn is_home(&self) -> bool {
        self.out() == 0
    }

    /// Permits that are out.
    const fn out(&self) -> u64 {
        self.out + self.out_before
    }
}

impl LeaseBucket {
    /// How long a lease lives, and an epoch lasts.
    pub const fn life(&self, state: &LeaseState) -> Micros {
        Micros::of(self.0.us(state.life))
    }

    /// When the epoch began that `out` was granted in.
    pub const fn since(&self, state: &LeaseState) -> Timestamp {
        Timestamp::at(self.0.us(state.epoch * state.life))
    }

    /// Lends as many of the `wanted` permits as are left, but no more than one part of that in `parts`: others come too. They may be
    /// spent for `life`, rounded down to the bucket's ticks, or for as long as those that are out already.
    pub fn lend(
        &self,
        state: &mut LeaseState,
        now: Timestamp,
        wanted: u64,
        parts: u64,
        life: Micros,
    ) -> Grant {
        let mut next = self.advance(*state, now);
        let life = (life.get() / self.0.tick()).clamp(1, i64::MAX as u64) as i64;
        if next.is_home() || life > next.life {
            // Those that are out live less long: as if they were granted now, they count for long enough.
            (next.out, next.out_before) = (next.out + next.out_before, 0);
            (next.life, next.epoch) = (life, self.0.ticks(now) / life);
        }
        let permits = wanted.min(self.left(&next).div_ceil(parts.max(1)));
        next.bucket.level -= self.0.units(permits);
        next.out += permits;
        // As with every denial: only that a clock was set back is kept.
        if permits > 0 {
            *state = next;
        } else if wanted > 0 {
            *state = self.redate(*state, now);
        }
        Grant { permits, at: self.since(&next), life: self.life(&next) }
    }

    /// Takes back permits of a grant that were not spent, whose lease has not ended yet. From one that may have ended meanwhile,
    /// nothing comes back.
    pub fn take_back(&self, state: &mut LeaseState, now: Timestamp, permits: u64, at: Timestamp) {
        let mut advanced = self.advance(*state, now);
        let epoch = self.0.ticks(at) / advanced.life;
        let permits = permits.min(advanced.out());
        if epoch < advanced.epoch - 1 || permits == 0 {
            return;
        }
        // From the earlier ones first, whichever it was: then the others are counted for too long, never for too short. After a
        // clock was set back, an epoch's number does not tell.
        let early = permits.min(advanced.out_before);
        advanced.out_before -= early;
        advanced.out -= permits - early;
        // While somebody waits for a start that was promised, only room comes back: more would flow until then than was foreseen.
        // Under a limit that was made smaller meanwhile, no more than there is room for.
        let room = self.0.units(permits.min(self.0.capacity()));
        let level = advanced.bucket.level.saturating_add(room).min(self.cap(&advanced));
        if advanced.bucket.level >= 0 && level > advanced.bucket.level {
            advanced.bucket.level = level;
        }
        *state = advanced;
    }

    /// Whole permits left in a state that is settled.
    fn left(&self, state: &LeaseState) -> u64 {
        if state.bucket.level <= 0 { 0 } else { state.bucket.level as u64 / self.0.unit() }
    }

    /// How full the bucket may be with so much out. Under a limit that was made smaller meanwhile, more may be out than it holds.
    fn cap(&self, state: &LeaseState) -> i64 {
        self.0.full() - self.0.units(state.out().min(self.0.capacity()))
    }

    /// A state that was written under another limit. What is out stays out, and is not consumed a second time.
    pub(crate) fn migrate(
        &self,
        from: &Self,
        state: LeaseState,
        carried_debt: CarriedDebt,
        now: Timestamp,
    ) -> (LeaseState, CarriedDebt) {
        let advanced = from.advance(state, now);
        let carried_debt = from.carried_debt_after(carried_debt, state, &advanced);
        let consumed = from.0.consumed_below(from.cap(&advanced), advanced.bucket, carried_debt);
        let (bucket, carried_debt) = self.0.resume(&consumed, advanced.out());
        let out = [advanced.out, advanced.out_before];
        (LeaseState::new(&self.0, bucket, from.life(&advanced), from.since(&advanced), out), carried_debt)
    }

    /// What lies over in a state once it is settled. While permits are out, nothing is paid. What was out beyond what the bucket can
    /// hold has taken no room there, so when its time is over it has nothing to fall back on, and lies over.
    pub(crate) fn carried_debt_after(
        &self,
        carried_debt: CarriedDebt,
        before: LeaseState,
        advanced: &LeaseState,
    ) -> CarriedDebt {
        if before.is_home() {
            return self.0.carried_debt_after(carried_debt, before.bucket, advanced.bucket.at);
        }
        let within = |state: &LeaseState| state.out().min(self.0.capacity());
        let (ended, freed) = (before.out() - advanced.out(), within(&before) - within(advanced));
        CarriedDebt { permits: carried_debt.permits + (ended - freed) as i64, ..carried_debt }
    }

    /// As good as the clock's time allows: a clock that was set back leaves an exhausted bucket behind, and everything that is out
    /// counts as granted now.
    fn redate(&self, state: LeaseState, now: Timestamp) -> LeaseState {
        let state = LeaseState { bucket: self.0.redate(state.bucket, now), ..state };
        let epoch = self.0.ticks(now) / state.life;
        if epoch >= state.epoch {
            return state;
        }
        LeaseState { epoch, out: state.out + state.out_before, out_before: 0, ..state }
    }

    /// The state as it is at `now`.
    pub(crate) fn advance(&self, state: LeaseState, now: Timestamp) -> LeaseState {
        let mut state = self.redate(state, now);
        let tick = self.0.ticks(now);
        let epoch = tick / state.life;
        while state.epoch < epoch && !state.is_home() {
            self.next_epoch(&mut state);
        }
        state.epoch = epoch;
        self.refill(&mut state, tick);
        state
    }

    /// To the end of the epoch. Only there is its oldest lease surely over: what flows until then finds the room taken.
    fn next_epoch(&self, state: &mut LeaseState) {
        let end = (state.epoch + 1) * state.life;
        self.refill(state, end);
        (state.out_before, state.out, state.epoch) = (state.out, 0, state.epoch + 1);
    }

    fn refill(&self, state: &mut LeaseState, tick: i64) {
        if tick <= state.bucket.at {
            return;
        }
        let flowed = (tick - state.bucket.at).saturating_mul(self.0.flow() as i64);
        let missing = self.cap(state) - state.bucket.level;
        if missing > 0 {
            state.bucket.level += flowed.min(missing);
        }
        state.bucket.at = tick;
    }

    /// The state at the first tick at which `cost` units are left, if nobody asks meanwhile and nothing is given back.
    fn when_left(&self, advanced: &LeaseState, cost: i64) -> LeaseState {
        let mut state = *advanced;
        loop {
            let at = state.bucket.at + self.0.ticks_for((cost - state.bucket.level).max(0));
            if state.is_home() || cost <= self.cap(&state) && at <= (state.epoch + 1) * state.life {
                self.refill(&mut state, at);
                return state;
            }
            self.next_epoch(&mut state);
        }
    }
}

impl Algorithm for LeaseBucket {
    type State = LeaseState;

    fn fresh(&self, now: Timestamp) -> LeaseState {
        let bucket = self.0.fresh(now);
        LeaseState { bucket, life: 1, epoch: bucket.at, out: 0, out_before: 0 }
    }

    fn decide(&self, state: &mut LeaseState, now: Timestamp, ask: Ask) -> Outcome {
        if ask.cost > self.0.capacity() {
            return Outcome::Impossible;
        }
        if ask.cost == 0 {
            return Outcome::NOW;
        }
        *state = self.redate(*state, now);
        let advanced = self.advance(*state, now);
        let cost = self.0.units(ask.cost);
        if cost <= advanced.bucket.level {
            *state = advanced;
            state.bucket.level -= cost;
            return Outcome::NOW;
        }
        let start = self.when_left(&advanced, cost).bucket;
        let wait = accepted_wait(ask, self.0.time_to_full().us());
        if wait == 0 {
            return Outcome::Denied { retry: Micros::of(self.0.us(start.at) - now.us()) };
        }
        let outcome = admit_by(self.0.us(start.at), now, wait);
        if outcome.is_admitted() {
            // The debit falls due at the start of the request: what flows until then finds as much room as without it.
            let flows = (start.at - advanced.bucket.at).saturating_mul(self.0.flow() as i64);
            *state = advanced;
            state.bucket.level = start.level - cost - flows;
        }
        outcome
    }

    fn status(&self, state: &LeaseState, now: Timestamp) -> Status {
        let advanced = self.advance(*state, now);
        let is_full = advanced.is_home() && advanced.bucket.level == self.0.full();
        let reset = if is_full { 0 } else { self.full_at(&advanced).us() - now.us() };
        Status { remaining: self.left(&advanced), reset: Micros::of(reset) }
    }

    fn refund(&self, state: &mut LeaseState, now: Timestamp, cost: u64, at: Timestamp) {
        let advanced = self.advance(*state, now);
        let mut refunded = advanced.bucket;
        self.0.refund(&mut refunded, now, cost, at);
        refunded.level = refunded.level.min(self.cap(&advanced));
        if refunded.level > advanced.bucket.level {
            *state = LeaseState { bucket: refunded, ..advanced };
        }
    }

    fn charge(&self, state: &mut LeaseState, now: Timestamp, cost: u64) {
        if cost > 0 {
            *state = self.advance(*state, now);
            self.0.charge(&mut state.bucket, now, cost);
        }
    }

    /// Full, and nothing out.
    fn full_at(&self, state: &LeaseState) -> Timestamp {
        self.0.full_at(&self.when_left(state, self.0.full()).bucket)
    }
}
