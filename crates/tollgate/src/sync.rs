//! The lock of a stripe: a spin lock or, with the `shuttle` feature, a lock whose interleavings can be explored.
//!
//! A stripe is locked for well under a microsecond. A lock that puts threads to sleep must look for sleepers when it is
//! released, with an atomic exchange that stalls the processor. This lock is released by a plain store, so the processor
//! can already load the memory that the next request needs.

#[cfg(feature = "shuttle")]
use shuttle::sync::{Mutex, MutexGuard};
#[cfg(not(feature = "shuttle"))]
use spin::mutex::{SpinMutex as Mutex, SpinMutexGuard as MutexGuard};

pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    #[cfg(not(feature = "shuttle"))]
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.try_lock().unwrap_or_else(|| self.wait())
    }

    /// Waits twice as long each time, up to about a microsecond. Then it lets other threads run, one of which may hold the lock.
    #[cfg(not(feature = "shuttle"))]
    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        const SPINS_MAX: u32 = 64;
        let mut spins = 1;
        loop {
            for _ in 0..spins {
                std::hint::spin_loop();
            }
            if let Some(guard) = self.0.try_lock() {
                return guard;
            }
            if spins < SPINS_MAX {
                spins *= 2;
            } else {
                std::thread::yield_now();
            }
        }
    }

    #[cfg(feature = "shuttle")]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("no thread of a test panics while it holds a stripe")
    }
}
