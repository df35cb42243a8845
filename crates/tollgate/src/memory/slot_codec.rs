//! Holds a state in the 112 bits that a slot has for it, or in the heap if they are too few.

use smallvec::smallvec;
use tollgate_core::algorithm::{
    Algorithm, BucketState, CalendarQuota, CalendarState, CounterState, FixedWindow, IntervalBucket,
    IntervalState, LeakyBucket, LogState, SlidingCounter, SlidingLog, TokenBucket, WindowState,
};
use tollgate_core::{Limit, PlainState, State, Status, Timestamp, with_algorithm};

use super::LimitNumber;

/// 59 bits of amounts, and above them 53 bits of time. The algorithm of the slot's limit gives the amounts their meaning.
pub(super) type Bits = u128;

/// Bits of a slot for a state.
pub(super) const STATE_BITS: u32 = AMOUNT_BITS + TIME_BITS;
/// Bits of a signed amount. Limits have at most 2^51 units and debts twice that, so an amount needs at most 54.
const AMOUNT_BITS: u32 = 59;
/// Bits of a time or a window number, as many as [`Timestamp::MAX`] has.
const TIME_BITS: u32 = 53;
/// Set if the other bits are an index into [`Heap`].
const IN_HEAP: Bits = 1 << (AMOUNT_BITS - 1);

/// An algorithm whose states fit into a slot or the heap.
pub(super) trait SlotCodec: Algorithm<State: PlainState> {
    /// The data from which a status is computed after the stripe is released: a copy of a small state, or the status.
    type Snapshot;

    /// Taken while the stripe is locked.
    fn snapshot(&self, state: &Self::State, now: Timestamp) -> Self::Snapshot;

    /// Computed after the stripe is released.
    fn status_of(&self, snapshot: Self::Snapshot, now: Timestamp) -> Status;

    /// The state that the bits hold.
    fn load(&self, bits: Bits, heap: &Heap) -> Self::State;

    /// Reads the state that the bits hold.
    fn look<R>(&self, bits: Bits, heap: &Heap, look: impl FnOnce(&Self::State) -> R) -> R {
        look(&self.load(bits, heap))
    }

    /// Runs `change` on the state that the bits hold, and stores the new state.
    fn update<R>(&self, bits: &mut Bits, heap: &mut Heap, change: impl FnOnce(&mut Self::State) -> R) -> R;

    /// The bits for a new state.
    fn store(&self, state: Self::State, heap: &mut Heap) -> Bits;
}

/// States that do not fit into a slot.
#[derive(Default)]
pub(super) struct Heap {
    states: Vec<Heavy>,
    free: Vec<u32>,
}

enum Heavy {
    Free,
    Log(LogState),
    Counter(CounterState),
    /// A state with data beside it, and the number of its limit. The slot says only that it is here.
    Carried(LimitNumber, State),
}

impl Heap {
    fn insert(&mut self, state: Heavy) -> Bits {
        let index = match self.free.pop() {
            Some(index) => {
                self.states[index as usize] = state;
                index
            }
            None => {
                self.states.push(state);
                self.states.len() as u32 - 1
            }
        };
        IN_HEAP | Bits::from(index)
    }

    fn get(&self, bits: Bits) -> &Heavy {
        self.states.get(bits as u32 as usize).unwrap_or(&Heavy::Free)
    }

    /// The bits for a carried state.
    pub(super) fn insert_carried(&mut self, id: LimitNumber, state: State) -> Bits {
        self.insert(Heavy::Carried(id, state))
    }

    /// A carried state, and the number of its limit.
    pub(super) fn carried(&self, bits: Bits) -> Option<(LimitNumber, &State)> {
        match self.get(bits) {
            Heavy::Carried(id, state) => Some((*id, state)),
            Heavy::Log(_) | Heavy::Counter(_) | Heavy::Free => None,
        }
    }

    /// Frees the heap entry of the bits of a `limit`, if they have one.
    pub(super) fn release(&mut self, limit: &Limit, bits: Bits) {
        let heavy = match limit {
            Limit::SlidingLog(_) => true,
            Limit::SlidingCounter(_) => bits & IN_HEAP != 0,
            Limit::TokenBucket(_)
            | Limit::IntervalBucket(_)
            | Limit::LeakyBucket(_)
            | Limit::FixedWindow(_)
            | Limit::CalendarQuota(_) => false,
        };
        if heavy {
            self.remove(bits);
        }
    }

    pub(super) fn remove(&mut self, bits: Bits) {
        let index = bits as u32;
        if let Some(state) = self.states.get_mut(index as usize) {
            *state = Heavy::Free;
            self.free.push(index);
        }
        if self.free.len() == self.states.len() {
            *self = Self::default();
        }
    }

    /// Bytes allocated.
    pub(super) fn bytes(&self) -> usize {
        let beyond = |state: &Heavy| match state {
            Heavy::Free => 0,
            Heavy::Log(log) => log.entries().len() * size_of::<tollgate_core::algorithm::LogEntry>(),
            Heavy::Counter(counter) => {
                let spilled = if counter.counts.spilled() { counter.counts.capacity() } else { 0 };
                spilled * size_of::<i64>()
                    + counter.waiting.capacity() * size_of::<tollgate_core::algorithm::Waiting>()
            }
            Heavy::Carried(_, State::Carried(carried)) => {
                size_of::<tollgate_core::Carried>()
                    + carried.beside.forgone.capacity() * size_of::<tollgate_core::Forgone>()
            }
            Heavy::Carried(..) => 0,
        };
        self.states.capacity() * size_of::<Heavy>()
            + self.free.capacity() * size_of::<u32>()
            + self.states.iter().map(beyond).sum::<usize>()
    }
}

/// A signed amount and a time, side by side.
#[inline]
const fn pack(amount: i64, time: i64) -> Bits {
    const MASK: u64 = (1 << AMOUNT_BITS) - 1;
    (time as Bits) << AMOUNT_BITS | (amount as u64 & MASK) as Bits
}

#[inline]
const fn unpack(bits: Bits) -> (i64, i64) {
    // The shift to the top and back extends the sign.
    const ABOVE: u32 = i64::BITS - AMOUNT_BITS;
    ((bits as i64) << ABOVE >> ABOVE, (bits >> AMOUNT_BITS) as i64)
}

/// Implements the codec of states that are two numbers.
macro_rules! two_numbers {
    ($algorithm:ty, $state:ident { $amount:ident, $time:ident }) => {
        impl SlotCodec for $algorithm {
            type Snapshot = $state;

            #[inline]
            fn snapshot(&self, state: &$state, _: Timestamp) -> $state {
                *state
            }

            #[inline]
            fn status_of(&self, snapshot: $state, now: Timestamp) -> Status {
                self.status(&snapshot, now)
            }

            #[inline]
            fn load(&self, bits: Bits, _: &Heap) -> $state {
                let ($amount, $time) = unpack(bits);
                $state { $amount, $time }
            }

            #[inline]
            fn update<R>(
                &self,
                bits: &mut Bits,
                heap: &mut Heap,
                change: impl FnOnce(&mut $state) -> R,
            ) -> R {
                let mut state = self.load(*bits, heap);
                let result = change(&mut state);
                *bits = pack(state.$amount, state.$time);
                result
            }

            #[inline]
            fn store(&self, state: $state, _: &mut Heap) -> Bits {
                pack(state.$amount, state.$time)
            }
        }
    };
}

two_numbers!(TokenBucket, BucketState { level, at });
two_numbers!(LeakyBucket, BucketState { level, at });
two_numbers!(IntervalBucket, IntervalState { tokens, last });
two_numbers!(FixedWindow, WindowState { count, window });
two_numbers!(CalendarQuota, CalendarState { count, end });

impl SlotCodec for SlidingLog {
    type Snapshot = Status;

    fn snapshot(&self, state: &Self::State, now: Timestamp) -> Status {
        self.status(state, now)
    }

    fn status_of(&self, snapshot: Status, _: Timestamp) -> Status {
        snapshot
    }

    fn load(&self, bits: Bits, heap: &Heap) -> LogState {
        match heap.get(bits) {
            Heavy::Log(log) => log.clone(),
            Heavy::Counter(_) | Heavy::Carried(..) | Heavy::Free => LogState::default(),
        }
    }

    /// Reads the log without a copy: it may have 100,000 entries.
    fn look<R>(&self, bits: Bits, heap: &Heap, look: impl FnOnce(&LogState) -> R) -> R {
        match heap.get(bits) {
            Heavy::Log(log) => look(log),
            Heavy::Counter(_) | Heavy::Carried(..) | Heavy::Free => look(&LogState::default()),
        }
    }

    fn update<R>(&self, bits: &mut Bits, heap: &mut Heap, change: impl FnOnce(&mut LogState) -> R) -> R {
        match heap.states.get_mut(*bits as u32 as usize) {
            Some(Heavy::Log(log)) => change(log),
            Some(Heavy::Counter(_) | Heavy::Carried(..) | Heavy::Free) | None => {
                let mut log = LogState::default();
                let result = change(&mut log);
                *bits = self.store(log, heap);
                result
            }
        }
    }

    fn store(&self, state: LogState, heap: &mut Heap) -> Bits {
        heap.insert(Heavy::Log(state))
    }
}

/// Bits of a count in a slot: two of them fit below [`IN_HEAP`]. Larger counts go to the heap.
const COUNT_BITS: u32 = 29;

impl SlotCodec for SlidingCounter {
    type Snapshot = Status;

    fn snapshot(&self, state: &Self::State, now: Timestamp) -> Status {
        self.status(state, now)
    }

    fn status_of(&self, snapshot: Status, _: Timestamp) -> Status {
        snapshot
    }

    #[inline]
    fn load(&self, bits: Bits, heap: &Heap) -> CounterState {
        if bits & IN_HEAP == 0 {
            return unpack_counter(self, bits);
        }
        match heap.get(bits) {
            Heavy::Counter(counter) => counter.clone(),
            Heavy::Log(_) | Heavy::Carried(..) | Heavy::Free => self.fresh(Timestamp::default()),
        }
    }

    #[inline]
    fn update<R>(&self, bits: &mut Bits, heap: &mut Heap, change: impl FnOnce(&mut CounterState) -> R) -> R {
        if *bits & IN_HEAP != 0
            && let Some(Heavy::Counter(counter)) = heap.states.get_mut(*bits as u32 as usize)
        {
            let result = change(counter);
            if let Some(packed) = pack_counter(self, counter) {
                heap.remove(*bits);
                *bits = packed;
            }
            return result;
        }
        let mut state = self.load(*bits, heap);
        let result = change(&mut state);
        *bits = self.store(state, heap);
        result
    }

    #[inline]
    fn store(&self, state: CounterState, heap: &mut Heap) -> Bits {
        pack_counter(self, &state).unwrap_or_else(|| heap.insert(Heavy::Counter(state)))
    }
}

/// A counter of whole windows without reservations: the time, this window's count and the one before.
#[inline]
fn pack_counter(limit: &SlidingCounter, state: &CounterState) -> Option<Bits> {
    let current = state.seen / limit.horizon().get() as i64;
    if limit.sub_buckets() != 1 || state.tail != state.seen {
        return None;
    }
    let mut counts = [0_i64; 2];
    for (count, index) in state.counts.iter().zip(state.first..) {
        match index - current {
            -1 => counts[0] = *count,
            0 => counts[1] = *count,
            _ if *count == 0 => {}
            _ => return None,
        }
    }
    let fits = counts.iter().all(|count| *count >> COUNT_BITS == 0);
    fits.then(|| pack(counts[0] << COUNT_BITS | counts[1], state.seen))
}

#[inline]
fn unpack_counter(limit: &SlidingCounter, bits: Bits) -> CounterState {
    const COUNT: i64 = (1 << COUNT_BITS) - 1;
    let (counts, seen) = unpack(bits);
    let first = seen / limit.horizon().get() as i64 - 1;
    let counts = smallvec![counts >> COUNT_BITS & COUNT, counts & COUNT];
    CounterState { seen, tail: seen, first, counts, waiting: Vec::new() }
}

/// The state that the bits of a `limit` hold.
pub(super) fn load(limit: &Limit, bits: Bits, heap: &Heap) -> State {
    with_algorithm!(limit, |it| it.load(bits, heap).into())
}

/// The instant from which a slot decides like an empty one.
pub(super) fn full_at(limit: &Limit, bits: Bits, heap: &Heap) -> Timestamp {
    with_algorithm!(limit, |it| it.look(bits, heap, |state| it.full_at(state)))
}

/// The permits that a key of a `limit` could still take.
pub(super) fn remaining(limit: &Limit, bits: Bits, heap: &Heap, now: Timestamp) -> u64 {
    with_algorithm!(limit, |it| it.look(bits, heap, |state| it.status(state, now).remaining))
}
