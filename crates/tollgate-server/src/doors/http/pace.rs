//! Long work in turns, so that no request keeps a worker from the others for long.

use std::future::{poll_fn, ready};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::future::{Either, join_all};

/// How long a batch works before others get their turn: a tenth of what a request may keep a worker busy.
const TURN: Duration = Duration::from_millis(2);

/// Paces the work of one request.
pub(super) struct Pace {
    start: Instant,
    /// When the turn under way began, in microseconds after the start.
    began: AtomicU64,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), began: AtomicU64::new(0) }
    }

    /// Runs work that calls [`Pace::turn`] before each of its steps.
    pub(super) async fn keep<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|cx| {
            self.began.store(self.now(), Ordering::Relaxed);
            work.as_mut().poll(cx)
        })
        .await
    }

    /// Waits for the next turn if this one is over.
    pub(super) async fn turn(&self) {
        while self.now() - self.began.load(Ordering::Relaxed) >= TURN.as_micros() as u64 {
            tokio::task::yield_now().await;
        }
    }

    /// Starts all of these in their order, a few each turn, and waits for them next to each other.
    pub(super) async fn all<F: Future>(&self, futures: impl Iterator<Item = F>) -> Vec<F::Output> {
        let mut started = Vec::new();
        for future in futures {
            self.turn().await;
            let mut future = Box::pin(future);
            let first = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
            started.push(match first {
                Poll::Ready(output) => Either::Left(ready(output)),
                Poll::Pending => Either::Right(future),
            });
        }
        join_all(started).await
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }
}
