//! The clock of an engine: wall time read once, then time since boot, so that it never runs backwards.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use tollgate_core::{Micros, Timestamp};

/// The clock that an engine reads.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    /// Microseconds from the epoch to the zero of [`boot_time_ns`], and the cycle counter.
    System {
        anchor_us: u64,
        counter: quanta::Clock,
    },
    Manual(Arc<AtomicU64>),
    Derived(Derived),
}

/// A function that computes the time.
#[derive(Clone)]
struct Derived(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl std::fmt::Debug for Derived {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Derived").field(&(self.0)()).finish()
    }
}

/// How long the cycle counter replaces the real clock, which takes more than twice as long to read. If its rate is wrong by
/// one in a hundred thousand, the error is ten nanoseconds when the clock is read again.
const COUNTED_NS_MAX: u64 = 1_000_000;

thread_local! {
    /// The last reading of the real clock by this thread: cycles, and nanoseconds since boot.
    static READING: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

impl Clock {
    /// The current wall time, continued by the time since boot. Windows align to the epoch. Setting the wall clock later changes
    /// nothing. Suspended time counts.
    pub fn system() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let anchor_us = Micros::from(wall).get().saturating_sub(boot_time_ns() / 1_000);
        Self(Source::System { anchor_us, counter: quanta::Clock::new() })
    }

    /// A clock that stands still until it is moved, for tests and replays. Clones share the time.
    pub fn manual(start: Timestamp) -> Self {
        Self(Source::Manual(Arc::new(AtomicU64::new(start.as_micros()))))
    }

    /// A clock whose time is computed by a function at each reading: a clock that drifts, or the virtual time of a simulation.
    pub fn derived(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Source::Derived(Derived(Arc::new(now))))
    }

    /// The time on this clock.
    #[inline]
    pub fn now(&self) -> Timestamp {
        self.read(counted_ns)
    }

    /// The time on this clock, without the cycle counter: correct right after the machine was suspended too.
    #[inline]
    pub(crate) fn exact_now(&self) -> Timestamp {
        self.read(|_| boot_time_ns())
    }

    #[inline]
    fn read(&self, since_boot_ns: impl FnOnce(&quanta::Clock) -> u64) -> Timestamp {
        Timestamp::from_micros(match &self.0 {
            Source::System { anchor_us, counter } => anchor_us + since_boot_ns(counter) / 1_000,
            Source::Manual(us) => us.load(Ordering::Acquire),
            Source::Derived(Derived(now)) => return now(),
        })
    }

    /// Whether it is a manual clock.
    pub fn is_manual(&self) -> bool {
        matches!(self.0, Source::Manual(_))
    }

    /// Moves a manual clock, forwards or backwards. Other clocks cannot be moved.
    pub fn set(&self, now: Timestamp) {
        if let Source::Manual(us) = &self.0 {
            us.store(now.as_micros(), Ordering::Release);
        }
    }

    /// Moves a manual clock forwards.
    pub fn advance(&self, by: Micros) {
        self.set(self.now().after(by));
    }
}

/// Nanoseconds since boot: the last reading of the real clock and the cycles since.
#[inline]
fn counted_ns(counter: &quanta::Clock) -> u64 {
    let cycles = counter.raw();
    let (read_cycles, read_ns) = READING.get();
    // For a counter that was set back, or that belongs to another clock, `delta_as_nanos` is 0.
    let since = counter.delta_as_nanos(read_cycles, cycles);
    if since < COUNTED_NS_MAX && cycles >= read_cycles {
        return read_ns + since;
    }
    let ns = boot_time_ns();
    READING.set((cycles, ns));
    ns
}

/// Nanoseconds since boot, suspended time included.
#[cfg(target_os = "linux")]
fn boot_time_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Nanoseconds since the first call: the standard library's clock, which may stop while the machine is suspended.
#[cfg(not(target_os = "linux"))]
fn boot_time_ns() -> u64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_clock_shows_wall_time_and_never_runs_backwards() {
        let clock = Clock::system();
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros() as u64;
        assert!(clock.now().as_micros().abs_diff(wall) < 60_000_000);
        let times: Vec<_> = (0..1_000).map(|_| clock.now()).collect();
        assert!(times.is_sorted());
    }

    #[test]
    fn derived_clock_computes_its_time_at_each_reading() {
        let real = Clock::manual(Timestamp::from_micros(1_000_000));
        let source = real.clone();
        let slow = Clock::derived(move || Timestamp::from_micros(source.now().as_micros() / 2));
        assert_eq!(
            (slow.now(), slow.exact_now()),
            (Timestamp::from_micros(500_000), Timestamp::from_micros(500_000))
        );
        real.advance(Micros::from_secs(1));
        assert_eq!(slow.now(), Timestamp::from_micros(1_000_000));
        assert!(!slow.is_manual());
    }

    #[test]
    fn manual_clock_moves_only_by_set_and_advance() {
        let clock = Clock::manual(Timestamp::from_micros(7));
        let same = clock.clone();
        clock.advance(Micros::from_secs(1));
        assert_eq!(same.now(), Timestamp::from_micros(1_000_007));
        same.set(Timestamp::from_micros(3));
        assert_eq!(clock.now(), Timestamp::from_micros(3));
    }
}
