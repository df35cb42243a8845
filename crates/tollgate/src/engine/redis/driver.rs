//! The one task of a Redis engine: it runs the connections, and the calls whose callers have left.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::{CancellationToken, DropGuard};

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Before a task that has panicked is started again: one that panics at once must not keep a core busy.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// Runs an engine's connections and the calls whose callers have left. The engine answers only while this runs.
#[must_use = "the engine answers only while its driver runs"]
pub struct RedisDriver {
    tasks: mpsc::UnboundedReceiver<Task>,
    stop: CancellationToken,
}

/// Where tasks are handed over. Bounded by what hands over: a task for each connection, and one for each key that has a
/// call in flight.
#[derive(Clone)]
pub(super) struct Tasks {
    send: mpsc::UnboundedSender<Task>,
    panics: Arc<AtomicU64>,
}

/// Tasks, who runs them, and what ends that when it is dropped.
pub(super) fn driver() -> (Tasks, RedisDriver, DropGuard) {
    let (send, receive) = mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let tasks = Tasks { send, panics: Arc::default() };
    (tasks, RedisDriver { tasks: receive, stop: stop.clone() }, stop.drop_guard())
}

impl Tasks {
    /// Lets the driver run a task. A panic in it is counted and ends this task alone. Without a driver the task is dropped.
    pub(super) fn hand_over(&self, task: impl Future<Output = ()> + Send + 'static) {
        let panics = Arc::clone(&self.panics);
        self.send(async move {
            caught(&panics, task).await;
        });
    }

    /// Lets the driver run a task that must not end by a panic: it is started again.
    pub(super) fn keep_running<F>(&self, task: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let panics = Arc::clone(&self.panics);
        self.send(async move {
            while caught(&panics, task()).await.is_none() {
                sleep(RESTART_PAUSE).await;
            }
        });
    }

    /// How many tasks have panicked.
    pub(super) fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    /// Whether the driver is gone.
    pub(super) fn is_stopped(&self) -> bool {
        self.send.is_closed()
    }

    fn send(&self, task: impl Future<Output = ()> + Send + 'static) {
        // Without a driver the task is dropped, and its waiters find that out.
        let _ = self.send.send(Box::pin(task));
    }
}

/// Runs a task. None: it has panicked, which is counted.
async fn caught(panics: &AtomicU64, task: impl Future<Output = ()>) -> Option<()> {
    let ended = AssertUnwindSafe(task).catch_unwind().await;
    if ended.is_err() {
        panics.fetch_add(1, Ordering::Relaxed);
        tracing::error!("a task of the Redis engine has panicked; this is a defect of Tollgate");
    }
    ended.ok()
}

impl RedisDriver {
    /// Runs until all limiters and the engine are gone.
    pub async fn run(mut self) {
        let mut running = FuturesUnordered::new();
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                Some(task) = self.tasks.recv() => running.push(task),
                Some(()) = running.next(), if !running.is_empty() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn a_panic_is_counted_and_ends_no_other_task() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime").block_on(async {
            let (tasks, driver, _stop) = driver();
            let driver = tokio::spawn(driver.run());
            tasks.hand_over(async { panic!("once") });
            let (started, mut starts) = mpsc::unbounded_channel();
            tasks.keep_running(move || {
                let started = started.clone();
                async move {
                    started.send(()).expect("the test waits");
                    panic!("each time")
                }
            });
            for _ in 0..3 {
                starts.recv().await.expect("a task that panics is started again");
            }
            let (answer, answered) = oneshot::channel();
            tasks.hand_over(async { answer.send(7).expect("the test waits") });
            assert_eq!(answered.await, Ok(7));
            assert!(tasks.panics() >= 3 && !driver.is_finished());
        });
    }
}
