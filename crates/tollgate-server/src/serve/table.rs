//! The open connections of a listener: how many there are, and which one gives way when a new one finds no place.
//!
//! Clients that hold connections open without using them must not keep others out, least of all a probe that asks for the
//! health of the node. So when the table is full, the connection that has waited for its client for longest is closed: for a
//! request, or for the rest of a body. A connection whose request is being answered is never closed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// How long a connection may wait for its client before it can be closed for another one. The first request of an honest client
/// is there by then.
const IDLE_LEAST: Duration = Duration::from_millis(100);
/// How long to wait for a place before one more connection is closed: the last one may have got a request meanwhile.
const CLOSE_AGAIN: Duration = Duration::from_millis(20);
/// Connections to close that are found in one walk over the table, so that a flood of new ones does not cause a walk for each.
const FOUND_MAX: usize = 64;

/// The open connections of a listener.
pub(super) struct Table {
    places: Arc<Semaphore>,
    started: Instant,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    last_number: u64,
    seats: HashMap<u64, Arc<Seat>>,
    /// Connections to close, the one that has waited for longest last, and their progress when they were found.
    found: Vec<(Arc<Seat>, u32)>,
}

impl Table {
    pub(super) fn new(places: usize) -> Arc<Self> {
        let places = Arc::new(Semaphore::new(places));
        Arc::new(Self { places, started: Instant::now(), open: Mutex::default() })
    }

    /// A place for one more connection. If there is none, connections that wait for their clients are closed until there is.
    pub(super) async fn place(&self) -> OwnedSemaphorePermit {
        loop {
            if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
                return place;
            }
            self.close_longest_waiting();
            let freed = Arc::clone(&self.places).acquire_owned();
            if let Ok(Ok(place)) = tokio::time::timeout(CLOSE_AGAIN, freed).await {
                return place;
            }
        }
    }

    /// Enters a connection that has a place.
    pub(super) fn enter(self: &Arc<Self>, place: OwnedSemaphorePermit) -> Seated {
        let seat = Arc::new(Seat::new(self.started));
        let mut open = self.open();
        open.last_number += 1;
        let number = open.last_number;
        open.seats.insert(number, Arc::clone(&seat));
        Seated { table: Arc::clone(self), number, seat, _place: place }
    }

    fn close_longest_waiting(&self) {
        let mut open = self.open();
        if open.found.is_empty() {
            let now = self.started.elapsed();
            open.found = longest_waiting(open.seats.values(), now);
        }
        while let Some((seat, seen)) = open.found.pop() {
            if seat.now().0 == seen {
                seat.give_way.notify_one();
                return;
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock()
    }
}

/// Connections without a request, or with a body that has not all arrived, the one that has waited for longest last. Those that
/// have begun a head, and do not go on, come after all others.
fn longest_waiting<'a>(seats: impl Iterator<Item = &'a Arc<Seat>>, now: Duration) -> Vec<(Arc<Seat>, u32)> {
    let mut waiting = Vec::new();
    for seat in seats {
        let (seen, phase) = seat.now();
        let since = Duration::from_micros(seat.waits_since_us.load(Ordering::Relaxed));
        if phase != Phase::Answering && now.saturating_sub(since) >= IDLE_LEAST {
            waiting.push((phase == Phase::Head, since, seat, seen));
        }
    }
    waiting.sort_unstable_by_key(|(has_begun, since, ..)| (*has_begun, *since));
    waiting.into_iter().take(FOUND_MAX).rev().map(|(_, _, seat, seen)| (Arc::clone(seat), seen)).collect()
}

/// A connection in the table, which leaves it when this is dropped.
pub(super) struct Seated {
    table: Arc<Table>,
    number: u64,
    pub(super) seat: Arc<Seat>,
    _place: OwnedSemaphorePermit,
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.table.open().seats.remove(&self.number);
    }
}

/// What a connection is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Phase {
    /// Between two requests.
    Idle = 0,
    /// In the head of a request.
    Head = 1,
    /// A request is being answered.
    Answering = 2,
    /// The rest of a request's body has not arrived yet. It has a timeout of its own.
    Body = 3,
}

/// The phase of a connection, and a number that changes with it.
pub(crate) struct Seat {
    progress: AtomicU32,
    /// Since when the connection waits for its client, by the clock of the table. Parts of a body do not change it, or a client could
    /// keep its place by sending single bytes.
    waits_since_us: AtomicU64,
    table_started: Instant,
    give_way: Notify,
}

impl Seat {
    const PHASES: u32 = 4;

    fn new(table_started: Instant) -> Self {
        let seat = Self {
            progress: AtomicU32::new(0),
            waits_since_us: AtomicU64::new(0),
            table_started,
            give_way: Notify::new(),
        };
        seat.enter(Phase::Idle);
        seat
    }

    pub(crate) fn enter(&self, phase: Phase) {
        if matches!(phase, Phase::Idle | Phase::Body) {
            let since = u64::try_from(self.table_started.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.waits_since_us.store(since, Ordering::Relaxed);
        }
        let now = self.progress.load(Ordering::Relaxed);
        let next = (now / Self::PHASES).wrapping_add(1).wrapping_mul(Self::PHASES);
        self.progress.store(next.wrapping_add(phase as u32), Ordering::Relaxed);
    }

    pub(crate) fn now(&self) -> (u32, Phase) {
        let now = self.progress.load(Ordering::Relaxed);
        let phase = match now % Self::PHASES {
            0 => Phase::Idle,
            1 => Phase::Head,
            2 => Phase::Answering,
            _ => Phase::Body,
        };
        (now, phase)
    }

    /// Waits until the connection is to be closed for another one. It stays if its request is being answered meanwhile.
    pub(super) async fn is_to_give_way(&self) {
        loop {
            self.give_way.notified().await;
            if self.now().1 != Phase::Answering {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_tells_a_new_request_from_the_same_one() {
        let seat = Seat::new(Instant::now());
        let before = seat.now();
        seat.enter(Phase::Head);
        seat.enter(Phase::Answering);
        seat.enter(Phase::Idle);
        assert_eq!(seat.now().1, before.1);
        assert_ne!(seat.now().0, before.0);
    }

    #[test]
    fn the_longest_waiting_connection_is_found_first_and_one_that_is_answered_never() {
        let started = Instant::now();
        let seat = |since_us: u64, phase| {
            let seat = Seat::new(started);
            seat.enter(phase);
            seat.waits_since_us.store(since_us, Ordering::Relaxed);
            Arc::new(seat)
        };
        let seats = [
            seat(30, Phase::Idle),
            seat(0, Phase::Answering),
            seat(10, Phase::Head),
            seat(20, Phase::Idle),
            seat(900_000, Phase::Idle),
            seat(25, Phase::Body),
        ];
        let found = longest_waiting(seats.iter(), Duration::from_millis(950));
        let order: Vec<_> =
            found.iter().rev().map(|(seat, _)| seats.iter().position(|it| Arc::ptr_eq(it, seat))).collect();
        assert_eq!(order, [Some(3), Some(5), Some(0), Some(2)]);
    }
}
