//! Leases: permits of a token bucket that are granted ahead of use, and spent elsewhere without asking again.
//!
//! While a lease lives, its permits take room in the bucket. So the permits left here and the permits on leases together never
//! exceed the capacity, and all admissions together keep the bound of the bucket. A lease lives for the length of an epoch, from its
//! grant. Every live lease was granted in this epoch or in the one before it, so two counts describe all leases.

use super::{Algorithm, BucketState, TokenBucket, accepted_wait, admit_by};
use crate::decision::{Ask, Outcome, Status};
use crate::lease::Grant;
use crate::migrate::CarriedDebt;
use crate::time::{Micros, Timestamp};

/// A token bucket with permits out on leases.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LeaseBucket(pub TokenBucket);

/// The state of one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseState {
    /// The bucket itself, with the permits left here.
    pub bucket: BucketState,
    /// How long a lease lives, and an epoch lasts, in ticks; at least one.
    pub life: i64,
    /// The number of the epoch that `out` was granted in, counted from the beginning of time.
    pub epoch: i64,
    /// Permits granted in that epoch and not given back.
    pub out: u64,
    /// Permits granted in the one before it and not given back.
    pub out_before: u64,
}

impl LeaseState {
    /// A state with leases granted in the epoch that began at `since`, and in the one before. If another limit had epochs of another
    /// length, the leases count for longer, never for shorter.
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

    /// Whether no lease is out.
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

    /// Lends as many of the `wanted` permits as are left, but at most one of `parts` parts of them, so that other nodes get some. They
    /// may be spent for `life`, rounded down to the bucket's ticks, or for as long as the leases that are out already.
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
            // The leases that are out have a shorter life. Counted as granted now, they count for long enough.
            (next.out, next.out_before) = (next.out + next.out_before, 0);
            (next.life, next.epoch) = (life, self.0.ticks(now) / life);
        }
        let permits = wanted.min(self.left(&next).div_ceil(parts.max(1)));
        next.bucket.level -= self.0.units(permits);
        next.out += permits;
        // As with every denial, the state changes only if the clock was set back.
        if permits > 0 {
            *state = next;
        } else if wanted > 0 {
            *state = self.redate(*state, now);
        }
        Grant { permits, at: self.since(&next), life: self.life(&next) }
    }

    /// Takes back unspent permits of a lease that has not ended. Of a lease that may have ended, nothing comes back.
    pub fn take_back(&self, state: &mut LeaseState, now: Timestamp, permits: u64, at: Timestamp) {
        let mut advanced = self.advance(*state, now);
        let epoch = self.0.ticks(at) / advanced.life;
        let permits = permits.min(advanced.out());
        if epoch < advanced.epoch - 1 || permits == 0 {
            return;
        }
        // The earlier epoch gives first, whichever epoch granted them: then leases count for too long, never for too short. After a
        // clock was set back, the number of an epoch does not tell which one it was.
        let early = permits.min(advanced.out_before);
        advanced.out_before -= early;
        advanced.out -= permits - early;
        // While a reservation is waiting, only room comes back: more permits would change its start. After the limit was lowered, no
        // more comes back than there is room for.
        let room = self.0.units(permits.min(self.0.size()));
        let level = advanced.bucket.level.saturating_add(room).min(self.cap(&advanced));
        if advanced.bucket.level >= 0 && level > advanced.bucket.level {
            advanced.bucket.level = level;
        }
        *state = advanced;
    }

    /// Whole permits left in an advanced state.
    fn left(&self, state: &LeaseState) -> u64 {
        if state.bucket.level <= 0 { 0 } else { state.bucket.level as u64 / self.0.unit() }
    }

    /// How full the bucket may be with these leases out. After the limit was lowered, more may be out than it holds.
    fn cap(&self, state: &LeaseState) -> i64 {
        self.0.full() - self.0.units(state.out().min(self.0.size()))
    }

    /// Converts a state of another limit. Leases stay out, and are not consumed a second time.
    pub(crate) fn migrate(
        &self,
        from: &Self,
        state: LeaseState,
        debt: CarriedDebt,
        now: Timestamp,
    ) -> (LeaseState, CarriedDebt) {
        let advanced = from.advance(state, now);
        let debt = from.debt_after(debt, state, &advanced);
        let consumed = from.0.consumed_below(from.cap(&advanced), advanced.bucket, debt);
        let (bucket, debt) = self.0.resume(&consumed, advanced.out());
        let out = [advanced.out, advanced.out_before];
        (LeaseState::new(&self.0, bucket, from.life(&advanced), from.since(&advanced), out), debt)
    }

    /// The carried debt of an advanced state. While permits are out, nothing is paid. Permits that were out beyond the capacity took no
    /// room in the bucket, so they become carried debt when their lease ends.
    pub(crate) fn debt_after(
        &self,
        debt: CarriedDebt,
        before: LeaseState,
        advanced: &LeaseState,
    ) -> CarriedDebt {
        if before.is_home() {
            return self.0.debt_after(debt, before.bucket, advanced.bucket.at);
        }
        let within = |state: &LeaseState| state.out().min(self.0.size());
        let (ended, freed) = (before.out() - advanced.out(), within(&before) - within(advanced));
        CarriedDebt { permits: debt.permits + (ended - freed) as i64, ..debt }
    }

    /// The state after a check of the clock. If it was set back, the bucket is exhausted, and all leases count as granted now.
    fn redate(&self, state: LeaseState, now: Timestamp) -> LeaseState {
        let state = LeaseState { bucket: self.0.redate(state.bucket, now), ..state };
        let epoch = self.0.ticks(now) / state.life;
        if epoch >= state.epoch {
            return state;
        }
        LeaseState { epoch, out: state.out + state.out_before, out_before: 0, ..state }
    }

    /// The state at `now`.
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

    /// Advances to the end of the epoch. Only then has its oldest lease surely ended, so until then leases take room.
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

    /// The state at the first tick at which `cost` units are left, if no other request comes and nothing is given back.
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

    fn size(&self) -> u64 {
        self.0.size()
    }

    fn horizon(&self) -> Micros {
        self.0.horizon()
    }

    fn fresh(&self, now: Timestamp) -> LeaseState {
        let bucket = self.0.fresh(now);
        LeaseState { bucket, life: 1, epoch: bucket.at, out: 0, out_before: 0 }
    }

    fn take(&self, state: &mut LeaseState, now: Timestamp, ask: Ask) -> Outcome {
        *state = self.redate(*state, now);
        let advanced = self.advance(*state, now);
        let cost = self.0.units(ask.cost);
        if cost <= advanced.bucket.level {
            *state = advanced;
            state.bucket.level -= cost;
            return Outcome::NOW;
        }
        let start = self.when_left(&advanced, cost).bucket;
        let wait = accepted_wait(ask, self.0.horizon().us());
        if wait == 0 {
            return Outcome::Denied { retry: Micros::of(self.0.us(start.at) - now.us()) };
        }
        let outcome = admit_by(self.0.us(start.at), now, wait);
        if outcome.is_admitted() {
            // The debit is due at the start of the request. Until then the bucket refills as without it.
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

    /// When the bucket is full and no lease is out.
    fn full_at(&self, state: &LeaseState) -> Timestamp {
        self.0.full_at(&self.when_left(state, self.0.full()).bucket)
    }
}
