//! One stripe of the table: slots of 32 bytes, in the order of their hashes, with gaps.
//!
//! A hash, read as a fraction, points at a pair of slots, which is one cache line. Its key is there or a little to the
//! right, and all keys are in the order of their hashes. Most look-ups touch that line only. Growing, shrinking and
//! dropping full keys are one walk from left to right.
//!
//! The memory for all slots is allocated once, zeroed. The system provides pages when they are touched, and only slots in
//! use are touched, so a stripe grows in place and leaves no holes.

mod whole;

use parking_lot::RwLock;
use tollgate_core::algorithm::Algorithm;
use tollgate_core::{Limit, PlainState, State, Timestamp};

use super::numbers::{CARRIED, LimitNumber, Limits};
use super::slot_codec::{self, Bits, Heap, STATE_BITS, SlotCodec};
use crate::hash::Hash;

/// The most slots of a stripe. A walk over all of them takes about a third of a millisecond, the longest that a request waits.
/// Smaller stripes would be faster to walk, but their heads would push hot keys out of the nearest caches.
const SLOTS_MAX: usize = 16_384;
/// The mean number of keys of a stripe. A stripe rarely gets more keys than it has slots.
pub(super) const FILL_MEAN: usize = SLOTS_MAX * FILL_MIN_PERCENT / 100;
/// The share of slots in use before and after a stripe grows. In a fuller stripe look-ups would touch more lines. In an
/// emptier one a key would cost more than 48 bytes. With a smaller difference, stripes would grow too often.
const FILL_MAX_PERCENT: usize = 77;
const FILL_MIN_PERCENT: usize = 68;
/// Slots in a cache line. A look-up compares them at once.
const PAIR: usize = 2;
/// Slots that no hash points at, for keys that are pushed beyond the right end.
const OVERHANG: usize = 64;
/// Neighbours that are compared when a full stripe must take a new key. Hashes sort them, so they are a random sample.
const VICTIMS: usize = 16;
/// The most slots that are read to find a key of a scope that holds more than its part. In a stripe that 64 scopes share, such a scope is
/// missed once in ten million times.
const LOOKED_MAX: usize = 1_024;

/// The stripe of a hash, of `count` stripes.
#[inline]
pub(super) const fn stripe_of(hash: Hash, count: usize) -> usize {
    point(hash.low, count)
}

/// The first of the pair of slots that a hash points at, of `pointed` slots.
#[inline]
const fn home(hash: Hash, pointed: usize) -> usize {
    PAIR * point(hash.high, pointed / PAIR)
}

/// The place that a number, read as a fraction, points at, of `count` places.
#[inline]
const fn point(number: u64, count: usize) -> usize {
    ((number as u128 * count as u128) >> 64) as usize
}

/// A key's hash and state.
#[derive(Clone, Copy)]
struct Slot {
    hash: Hash,
    /// The number of the limit above [`STATE_BITS`] of state.
    word: u128,
}

impl Slot {
    const EMPTY: Self = Self { hash: Hash { high: 0, low: 0 }, word: 0 };

    #[inline]
    fn id(&self) -> Option<LimitNumber> {
        LimitNumber::new((self.word >> STATE_BITS) as u16)
    }

    #[inline]
    fn bits(&self) -> Bits {
        self.word & ((1 << STATE_BITS) - 1)
    }
}

/// The request for a state: key, limit and time.
#[derive(Clone, Copy)]
pub(super) struct Asker<'a> {
    pub(super) hash: Hash,
    /// The number of its limit.
    pub(super) id: LimitNumber,
    pub(super) limit: &'a Limit,
    pub(super) now: Timestamp,
    pub(super) limits: &'a RwLock<Limits>,
}

#[inline]
fn word(id: LimitNumber, bits: Bits) -> u128 {
    u128::from(id.get()) << STATE_BITS | bits
}

/// Words of a slot: the hash, then the state.
const WORDS: usize = 4;

/// Slots, each half a cache line and never across two.
#[derive(Default)]
struct Slots {
    /// Plain numbers, so that they come zeroed without being touched.
    memory: Box<[u64]>,
    /// Where in `memory` a cache line begins.
    first: usize,
}

impl Slots {
    fn new(count: usize) -> Self {
        let memory = vec![0_u64; WORDS * (count + PAIR)].into_boxed_slice();
        let first = memory.as_ptr().addr().wrapping_neg() % 64 / size_of::<u64>();
        Self { memory, first }
    }

    #[inline]
    fn words(&self, at: usize, count: usize) -> &[u64] {
        let from = self.first + WORDS * at;
        &self.memory[from..from + WORDS * count]
    }

    #[inline]
    fn pair(&self, at: usize) -> [&[u64; WORDS]; PAIR] {
        let (left, right) = self.words(at, PAIR).split_at(WORDS);
        [left, right].map(|words| words.try_into().expect("as long as asked for"))
    }

    #[inline]
    fn words_mut(&mut self, at: usize) -> &mut [u64; WORDS] {
        let from = self.first + WORDS * at;
        (&mut self.memory[from..from + WORDS]).try_into().expect("as long as asked for")
    }

    #[inline]
    fn get(&self, at: usize) -> Slot {
        let words = self.words(at, 1);
        let word = u128::from(words[3]) << 64 | u128::from(words[2]);
        Slot { hash: Hash { high: words[0], low: words[1] }, word }
    }

    #[inline]
    fn set(&mut self, at: usize, slot: Slot) {
        *self.words_mut(at) = [slot.hash.high, slot.hash.low, slot.word as u64, (slot.word >> 64) as u64];
    }

    /// Whether there is a key: then the number of its limit is not zero.
    #[inline]
    fn is_used(&self, at: usize) -> bool {
        self.words(at, 1)[3] != 0
    }

    /// Moves the slots from `at` to before `end` by one to the right, over the one at `end`.
    fn shift_right(&mut self, at: usize, end: usize) {
        let from = self.first + WORDS * at;
        self.memory.copy_within(from..self.first + WORDS * end, from + WORDS);
    }

    /// Moves the slots after `at` up to before `end` by one to the left, over the one at `at`.
    fn shift_left(&mut self, at: usize, end: usize) {
        let from = self.first + WORDS * at;
        self.memory.copy_within(from + WORDS..self.first + WORDS * end, from);
    }
}

/// The value of a key. The least valuable key is evicted first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Worth {
    /// Whether its scope holds no more than its part of the stripe.
    is_within_part: bool,
    /// How much of its limit it has used, in 65,536ths.
    used_share: u32,
    full_at: Timestamp,
}

/// A state, converted to the limit that asks.
struct Found {
    state: State,
    /// Whether it was another limit's before.
    is_changed: bool,
}

/// A part of the table, behind one lock. What every look-up reads comes first: one cache line, with the lock.
#[repr(C)]
pub(super) struct Stripe {
    slots: Slots,
    /// Slots that hashes point at.
    pointed: usize,
    len: usize,
    /// Keys it may hold.
    len_max: usize,
    heap: Heap,
    evicted: u64,
    parts: Parts,
}

/// How many keys each scope has in a stripe, by the number of its part.
#[derive(Default)]
struct Parts {
    keys: Vec<u16>,
    /// Scopes that have any.
    used: usize,
}

impl Parts {
    fn add(&mut self, part: u16) {
        let part = usize::from(part);
        if part >= self.keys.len() {
            self.keys.resize(part + 1, 0);
        }
        self.used += usize::from(self.keys[part] == 0);
        self.keys[part] += 1;
    }

    fn remove(&mut self, part: u16) {
        if let Some(keys) = self.keys.get_mut(usize::from(part)).filter(|keys| **keys > 0) {
            *keys -= 1;
            self.used -= usize::from(*keys == 0);
        }
    }

    /// Keys that a scope may hold in a full stripe of `len_max` keys before it is the first to lose some.
    fn each(&self, len_max: usize) -> usize {
        len_max / self.used.max(1)
    }

    fn keys(&self, part: u16) -> usize {
        self.keys.get(usize::from(part)).map_or(0, |keys| usize::from(*keys))
    }
}

impl Stripe {
    /// A stripe for about `keys` keys, with room for an uneven spread.
    pub(super) fn new(keys: usize) -> Self {
        // Six standard deviations above the mean: one stripe in a billion gets more keys.
        let unlucky = (6 * keys.isqrt()).max(keys / 8);
        Self {
            slots: Slots::default(),
            pointed: 0,
            len: 0,
            len_max: keys + unlucky,
            heap: Heap::default(),
            evicted: 0,
            parts: Parts::default(),
        }
    }

    /// Forgets all keys, and gives their memory back.
    pub(super) fn clear(&mut self) {
        (self.slots, self.pointed, self.len, self.heap) = (Slots::default(), 0, 0, Heap::default());
        self.parts = Parts::default();
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Bytes in use. Memory that was never touched costs nothing.
    pub(super) fn bytes(&self) -> usize {
        self.pointed * size_of::<Slot>() + self.heap.bytes() + self.parts.keys.capacity() * size_of::<u16>()
    }

    /// Reads the state of a key, converted from another limit if needed, or a fresh one.
    pub(super) fn look<A: SlotCodec, R>(
        &self,
        asker: Asker<'_>,
        algorithm: &A,
        look: impl FnOnce(&A::State) -> R,
    ) -> R {
        let Some(slot) = self.find(asker.hash).map(|at| self.slots.get(at)) else {
            return look(&algorithm.fresh(asker.now));
        };
        if slot.id() == Some(asker.id) {
            return algorithm.look(slot.bits(), &self.heap, look);
        }
        let found = self.carried_over(slot, asker);
        match found.as_ref().and_then(|it| A::State::of(it.state.plain())) {
            Some(state) => look(state),
            None => look(&algorithm.fresh(asker.now)),
        }
    }

    /// Converts a slot of another limit, or with data beside it, to the limit that asks.
    fn carried_over(&self, slot: Slot, asker: Asker<'_>) -> Option<Found> {
        let limits = asker.limits.read();
        let (id, state) = match slot.id()? {
            CARRIED => self.heap.carried(slot.bits()).map(|(id, state)| (id, state.clone()))?,
            id => (id, slot_codec::load(limits.get(id)?, slot.bits(), &self.heap)),
        };
        let state = asker.limit.migrate(limits.get(id)?, state, asker.now);
        Some(Found { state, is_changed: id != asker.id })
    }

    /// Runs `change` on the state of a key, or on a fresh one, which is stored unless it is full afterwards.
    #[inline]
    pub(super) fn update<A: SlotCodec, R>(
        &mut self,
        asker: Asker<'_>,
        algorithm: &A,
        takes: impl FnOnce() -> bool,
        change: impl FnOnce(&mut A::State) -> R,
    ) -> R {
        let Asker { hash, id, .. } = asker;
        if let Some(at) = self.find(hash) {
            let slot = self.slots.get(at);
            let mut bits = slot.word ^ word(id, 0);
            if bits >> STATE_BITS == 0 {
                let result = algorithm.update(&mut bits, &mut self.heap, change);
                self.slots.set(at, Slot { hash, word: word(id, bits) });
                return result;
            }
            return self.go_on(at, asker, algorithm, takes(), change);
        }
        self.begin(asker, algorithm, change)
    }

    /// Runs `change` on the state of a key that has none yet.
    #[cold]
    #[inline(never)]
    fn begin<A: SlotCodec, R>(
        &mut self,
        asker: Asker<'_>,
        algorithm: &A,
        change: impl FnOnce(&mut A::State) -> R,
    ) -> R {
        let mut state = algorithm.fresh(asker.now);
        let result = change(&mut state);
        if algorithm.full_at(&state) > asker.now {
            self.insert(asker, algorithm, state);
        }
        result
    }

    /// Runs `change` on a state of another limit, or with data beside it. A caller that `takes` gets a wait under its own limit, so the
    /// state is stored under that limit, even after a denial.
    #[cold]
    #[inline(never)]
    fn go_on<A: SlotCodec, R>(
        &mut self,
        at: usize,
        asker: Asker<'_>,
        algorithm: &A,
        takes: bool,
        change: impl FnOnce(&mut A::State) -> R,
    ) -> R {
        let slot = self.slots.get(at);
        // A log can be large, and is the same under every limit, so it is updated in place.
        if slot
            .id()
            .is_some_and(|id| asker.limits.read().get(id).is_some_and(|it| asker.limit.understands(it)))
        {
            let mut bits = slot.bits();
            let result = algorithm.update(&mut bits, &mut self.heap, change);
            self.replace(at, Slot { hash: asker.hash, word: word(asker.id, bits) }, &asker.limits.read());
            return result;
        }
        self.update_whole(asker, algorithm, takes, |state| {
            asker.limit.with_beside(state, asker.now, |own| whole::as_own(own, algorithm, asker, change))
        })
    }

    /// Puts a slot in the place of another one of the same key.
    fn replace(&mut self, at: usize, slot: Slot, limits: &Limits) {
        self.parts.remove(self.part(self.slots.get(at), limits));
        self.slots.set(at, slot);
        self.parts.add(self.part(slot, limits));
    }

    /// The part of the table that a slot counts towards: that of the scope of its limiter.
    fn part(&self, slot: Slot, limits: &Limits) -> u16 {
        self.limit_number(slot).map_or(0, |id| limits.part(id))
    }

    /// The number of the limit of a slot.
    fn limit_number(&self, slot: Slot) -> Option<LimitNumber> {
        match slot.id() {
            Some(CARRIED) => self.heap.carried(slot.bits()).map(|(id, _)| id),
            id => id,
        }
    }

    /// Forgets a key.
    pub(super) fn remove(&mut self, hash: Hash, limits: &RwLock<Limits>) {
        if let Some(at) = self.find(hash) {
            self.take_out(at, &limits.read());
        }
    }

    /// Drops the keys that are full again, and frees memory, if they are at least an eighth of all keys.
    pub(super) fn sweep(&mut self, limits: &RwLock<Limits>, now: Timestamp) {
        if self.len == 0 {
            return;
        }
        let limits = limits.read();
        let full = (0..self.slots_end())
            .filter(|at| self.full_at(self.slots.get(*at), &limits).is_some_and(|full_at| full_at <= now));
        if full.count() * 8 >= self.len {
            self.rebuild(&limits, now);
        }
    }

    /// Drops the keys that are full again, and marks the limits of the others.
    pub(super) fn note_limits(&mut self, limits: &RwLock<Limits>, now: Timestamp, noted: &mut [bool]) {
        if self.len == 0 {
            return;
        }
        self.rebuild(&limits.read(), now);
        for at in 0..self.slots_end() {
            let slot = self.slots.get(at);
            let id = self.limit_number(slot);
            if let Some(noted) = id.and_then(|id| noted.get_mut(usize::from(id.get()))) {
                *noted = true;
            }
        }
    }

    /// The instant from which a slot decides like an empty one. `None` for an empty slot.
    fn full_at(&self, slot: Slot, limits: &Limits) -> Option<Timestamp> {
        match slot.id()? {
            CARRIED => {
                let (id, state) = self.heap.carried(slot.bits())?;
                Some(limits.get(id)?.full_at(state))
            }
            id => Some(slot_codec::full_at(limits.get(id)?, slot.bits(), &self.heap)),
        }
    }

    /// How much of its limit a slot has used, in 65,536ths, rounded up.
    fn used_share(&self, slot: Slot, limits: &Limits, now: Timestamp) -> Option<u32> {
        let (size, remaining) = match slot.id()? {
            CARRIED => {
                let (id, state) = self.heap.carried(slot.bits())?;
                let limit = limits.get(id)?;
                (limit.size(), limit.status(state, now).remaining)
            }
            id => {
                let limit = limits.get(id)?;
                (limit.size(), slot_codec::remaining(limit, slot.bits(), &self.heap, now))
            }
        };
        let used = u128::from(size - remaining) << 16;
        Some(used.div_ceil(u128::from(size)) as u32)
    }

    /// Frees the heap entry of a slot, if it has one.
    fn release(&mut self, slot: Slot, limits: &Limits) {
        match slot.id() {
            Some(CARRIED) => self.heap.remove(slot.bits()),
            Some(id) => {
                if let Some(limit) = limits.get(id) {
                    self.heap.release(limit, slot.bits());
                }
            }
            None => {}
        }
    }

    /// Where a hash points.
    #[inline]
    fn home(&self, hash: Hash) -> usize {
        home(hash, self.pointed)
    }

    /// The slot of a key.
    #[inline]
    fn find(&self, hash: Hash) -> Option<usize> {
        if self.pointed == 0 {
            return None;
        }
        let mut at = self.home(hash);
        loop {
            let [left, right] = self.slots.pair(at);
            // No branch between the two, because the processor cannot predict which one it is.
            let in_left = (left[0] ^ hash.high | left[1] ^ hash.low) == 0;
            let in_right = (right[0] ^ hash.high | right[1] ^ hash.low) == 0;
            if in_left | in_right {
                // An empty slot does not match a key: a hash is all zeros once in 2^128.
                return Some(at + usize::from(in_right));
            }
            if right[3] == 0 || right[0] > hash.high {
                return None;
            }
            at += PAIR;
        }
    }

    /// The first slot from `from` on that is empty or holds this hash or a larger one. The last slot is always empty.
    fn position(&self, hash: Hash, from: usize) -> usize {
        let mut at = from;
        while self.slots.is_used(at) && self.slots.get(at).hash < hash {
            at += 1;
        }
        at
    }

    /// Puts in a key that has no state of this limit yet.
    fn insert<A: SlotCodec>(&mut self, asker: Asker<'_>, algorithm: &A, state: A::State) {
        let Asker { hash, id, now, .. } = asker;
        let limits = asker.limits.read();
        if let Some(at) = self.find(hash) {
            self.take_out(at, &limits);
        }
        if self.len >= self.len_max {
            self.parts.add(limits.part(id));
            self.make_room(self.position(hash, self.home(hash)), &limits, now);
            self.parts.remove(limits.part(id));
        }
        // In a fuller stripe too many keys would be outside their own line.
        if (self.len + 1) * 100 > self.pointed * FILL_MAX_PERCENT {
            self.rebuild(&limits, now);
        }
        let bits = algorithm.store(state, &mut self.heap);
        self.place(Slot { hash, word: word(id, bits) });
        self.parts.add(limits.part(id));
    }

    /// Puts a slot where it belongs.
    fn place(&mut self, slot: Slot) {
        loop {
            let at = self.position(slot.hash, self.home(slot.hash));
            let gap = (at..).find(|at| !self.slots.is_used(*at)).unwrap_or(at);
            if gap < self.slots_end() - 1 {
                self.slots.shift_right(at, gap);
                self.slots.set(at, slot);
                self.len += 1;
                return;
            }
            // The overhang is full: too many hashes are at the right end.
            self.spread(self.pointed + PAIR);
        }
    }

    /// One beyond the last slot.
    fn slots_end(&self) -> usize {
        self.pointed + OVERHANG
    }

    /// Frees a slot, and moves the slots behind it up to their places.
    fn take_out(&mut self, at: usize, limits: &Limits) {
        let slot = self.slots.get(at);
        self.parts.remove(self.part(slot, limits));
        self.release(slot, limits);
        let mut end = at + 1;
        while self.slots.is_used(end) && self.home(self.slots.get(end).hash) < end {
            end += 1;
        }
        self.slots.shift_left(at, end);
        self.slots.set(end - 1, Slot::EMPTY);
        self.len -= 1;
    }

    /// Makes room in a full stripe for a key that is already counted in the part of its scope.
    ///
    /// Drops every neighbour of the newcomer that is full again. If there is none, evicts one key: of a scope that holds more than
    /// its part, the key that has used the least of its limit, and of equal ones the key that is full again soonest. So a flood of
    /// new keys cannot evict keys of a scope that holds no more than its part, nor keys that are at their limit for longer.
    fn make_room(&mut self, first: usize, limits: &Limits, now: Timestamp) {
        let before = self.len;
        let part_max = self.parts.each(self.len_max);
        let mut victim: Option<(Worth, usize)> = None;
        let mut at = first;
        for looked in 0..LOOKED_MAX.min(before) {
            let is_neighbour = looked < VICTIMS;
            if !is_neighbour && (self.len < before || victim.is_some_and(|(worth, _)| !worth.is_within_part))
            {
                break;
            }
            at = self.next_used(at);
            let slot = self.slots.get(at);
            let is_within_part = self.parts.keys(self.part(slot, limits)) <= part_max;
            if is_neighbour || !is_within_part {
                let Some(full_at) = self.full_at(slot, limits) else { break };
                if full_at <= now {
                    // The slots behind it move up, so the next one is here.
                    self.take_out(at, limits);
                    continue;
                }
                let Some(used_share) = self.used_share(slot, limits, now) else { break };
                let worth = Worth { is_within_part, used_share, full_at };
                if victim.is_none_or(|(least, _)| worth < least) {
                    victim = Some((worth, at));
                }
            }
            at += 1;
        }
        if self.len == before
            && let Some((_, at)) = victim
        {
            self.take_out(at, limits);
            self.evicted += 1;
        }
    }

    /// The first slot in use from `at` on, going round.
    fn next_used(&self, at: usize) -> usize {
        let end = self.slots_end();
        let at = at.min(end);
        (at..end).chain(0..at).find(|at| self.slots.is_used(*at)).unwrap_or(0)
    }

    /// Drops the keys that are full again and gives the others the room they need.
    fn rebuild(&mut self, limits: &Limits, now: Timestamp) {
        for at in 0..if self.pointed == 0 { 0 } else { self.slots_end() } {
            let slot = self.slots.get(at);
            if self.full_at(slot, limits).is_some_and(|full_at| full_at <= now) {
                self.parts.remove(self.part(slot, limits));
                self.release(slot, limits);
                self.slots.set(at, Slot::EMPTY);
                self.len -= 1;
            }
        }
        let pointed = ((self.len + 1) * 100).div_ceil(FILL_MIN_PERCENT).min(self.pointed_max());
        self.spread(pointed.next_multiple_of(PAIR));
    }

    /// The slots that are pointed at when the stripe holds all keys that it may.
    fn pointed_max(&self) -> usize {
        (self.len_max + 1) * 100 / FILL_MAX_PERCENT + PAIR
    }

    /// Spreads all keys over `pointed` slots, or over more if too many of them are at the right end.
    fn spread(&mut self, mut pointed: usize) {
        let used = if self.pointed == 0 { 0 } else { self.slots_end() };
        let kept: Vec<Slot> = (0..used).map(|at| self.slots.get(at)).filter(|slot| slot.word != 0).collect();
        let last = |pointed| kept.iter().fold(0, |next, slot| home(slot.hash, pointed).max(next) + 1);
        while last(pointed) >= pointed + OVERHANG {
            pointed = (pointed + pointed / 8 + PAIR).next_multiple_of(PAIR);
        }
        // Memory for all keys that may come. A stripe that has lost most of its keys frees the memory that they touched.
        if (pointed + OVERHANG) * WORDS > self.slots.memory.len() || pointed * 4 < self.pointed {
            self.slots = Slots::new(pointed.max(self.pointed_max()) + OVERHANG);
        } else {
            (0..used).for_each(|at| self.slots.set(at, Slot::EMPTY));
        }
        self.pointed = pointed;
        let mut next = 0;
        for slot in kept {
            let at = self.home(slot.hash).max(next);
            self.slots.set(at, slot);
            next = at + 1;
        }
    }
}
