//! `LEAKY_BUCKET`: each request pours in water, which drains evenly. A request that would overflow the bucket is denied.
//!
//! The water is the missing level of a token bucket, so the state is the state of a token bucket, and a meter is a token bucket.
//! In a queue, an admitted request is delayed until all water ahead of it has drained.

use super::{Algorithm, BucketState, TokenBucket, accepted_wait};
use crate::decision::{Ask, Outcome, Status};
use crate::limit::LimitError;
use crate::rate::Rate;
use crate::time::{Micros, Timestamp};

/// Whether the bucket only measures, or spaces its callers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LeakyMode {
    /// Admitted requests start at once.
    Meter,
    /// Admitted requests start one after another, at a constant outflow.
    Queue,
}

/// At most `size` permits of water, draining at a rate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LeakyBucket {
    room: TokenBucket,
    mode: LeakyMode,
}

impl LeakyBucket {
    /// A bucket that holds `size` permits of water and drains at `outflow`.
    pub fn new(size: u64, outflow: Rate, mode: LeakyMode) -> Result<Self, LimitError> {
        Ok(Self { room: TokenBucket::new(size, outflow)?, mode })
    }

    /// Whether admitted requests are spaced.
    pub const fn mode(&self) -> LeakyMode {
        self.mode
    }

    /// The token bucket of free room. The water is its missing level.
    pub const fn room(&self) -> &TokenBucket {
        &self.room
    }

    /// The same with another bucket.
    pub(crate) const fn with_room(&self, room: TokenBucket) -> Self {
        Self { room, mode: self.mode }
    }

    fn enqueue(&self, state: &mut BucketState, now: Timestamp, ask: Ask) -> Outcome {
        *state = self.room.redate(*state, now);
        let BucketState { level, at } = self.room.advance(*state, now);
        let cost = self.room.units(ask.cost);
        let until_flowed = |units: i64| {
            if units <= 0 { 0 } else { (self.room.us(at + self.room.ticks_for(units)) - now.us()).max(0) }
        };
        let turn = until_flowed(self.room.full() - level);
        let wait = match ask.wait {
            Some(_) => accepted_wait(ask, self.room.horizon().us()),
            None => i64::MAX,
        };
        if cost <= level && turn <= wait {
            *state = BucketState { level: level - cost, at };
            return Outcome::Admitted { delay: Micros::of(turn) };
        }
        // No caller waits for a full queue. It retries when there is room and its turn is near enough.
        let room = until_flowed(cost - level);
        Outcome::Denied { retry: Micros::of(room.max(turn.saturating_sub(wait))) }
    }

    fn leave_queue(&self, state: &mut BucketState, now: Timestamp, cost: u64, at: Timestamp) {
        let advanced = self.room.advance(*state, now);
        let cost = self.room.units(cost.min(self.size()));
        let ahead = self.room.full() - advanced.level - cost;
        let start = self.room.ticks(at);
        // Only the newest request can leave, and only before it starts: requests behind it would move up unnoticed.
        if cost > 0 && ahead >= 0 && start > advanced.at && start == advanced.at + self.room.ticks_for(ahead)
        {
            *state = BucketState { level: advanced.level + cost, at: advanced.at };
        }
    }
}

impl Algorithm for LeakyBucket {
    type State = BucketState;

    fn size(&self) -> u64 {
        self.room.size()
    }

    fn horizon(&self) -> Micros {
        self.room.horizon()
    }

    #[inline]
    fn fresh(&self, now: Timestamp) -> BucketState {
        self.room.fresh(now)
    }

    #[inline]
    fn take(&self, state: &mut BucketState, now: Timestamp, ask: Ask) -> Outcome {
        match self.mode {
            LeakyMode::Meter => self.room.take(state, now, ask),
            LeakyMode::Queue => self.enqueue(state, now, ask),
        }
    }

    #[inline]
    fn status(&self, state: &BucketState, now: Timestamp) -> Status {
        self.room.status(state, now)
    }

    fn refund(&self, state: &mut BucketState, now: Timestamp, cost: u64, at: Timestamp) {
        match self.mode {
            LeakyMode::Meter => self.room.refund(state, now, cost, at),
            LeakyMode::Queue => self.leave_queue(state, now, cost, at),
        }
    }

    fn charge(&self, state: &mut BucketState, now: Timestamp, cost: u64) {
        self.room.charge(state, now, cost);
    }

    #[inline]
    fn full_at(&self, state: &BucketState) -> Timestamp {
        self.room.full_at(state)
    }
}
