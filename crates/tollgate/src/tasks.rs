//! Background tasks of an engine: connections, and calls whose callers have left.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::{CancellationToken, DropGuard};

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The pause before a task that has panicked is started again, so that a task that panics at once does not keep a core busy.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// The most workers of a driver. Each can keep one core busy; the servers of a store could not answer more.
const WORKERS_MAX: usize = 8;

/// Runs an engine's connections and the calls whose callers have left. The engine answers only while this runs.
#[must_use = "the engine answers only while its driver runs"]
pub struct Driver {
    workers: Vec<mpsc::UnboundedReceiver<Task>>,
    stop: CancellationToken,
}

/// Hands tasks to a driver. The callers bound their number: one task for each connection, and one for each key with a call
/// under way.
#[derive(Clone)]
pub struct Tasks(Arc<Queues>);

struct Queues {
    /// One for each worker of the driver.
    workers: Vec<mpsc::UnboundedSender<Task>>,
    /// Tasks handed over so far. They go to the workers in turn.
    handed_over: AtomicUsize,
    panics: AtomicU64,
}

impl Tasks {
    /// A queue for tasks, the driver that runs them, and a guard that stops the driver when it is dropped.
    pub fn new() -> (Self, Driver, DropGuard) {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Self::with_workers(cores.min(WORKERS_MAX))
    }

    /// The same with a number of workers that does not depend on the machine; at least one.
    pub fn with_workers(count: usize) -> (Self, Driver, DropGuard) {
        let (send, receive) = (0..count.max(1)).map(|_| mpsc::unbounded_channel()).unzip();
        let stop = CancellationToken::new();
        let queues = Queues { workers: send, handed_over: AtomicUsize::new(0), panics: AtomicU64::new(0) };
        let driver = Driver { workers: receive, stop: stop.clone() };
        (Self(Arc::new(queues)), driver, stop.drop_guard())
    }

    /// Lets the driver run a task. A panic in it is counted and ends this task alone. Without a driver the task is dropped.
    pub(crate) fn hand_over(&self, task: impl Future<Output = ()> + Send + 'static) {
        let queues = Arc::clone(&self.0);
        self.send(async move {
            caught(&queues.panics, task).await;
        });
    }

    /// Lets the driver run a task that is started again after a panic.
    pub(crate) fn keep_running<F>(&self, task: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let queues = Arc::clone(&self.0);
        self.send(async move {
            while caught(&queues.panics, task()).await.is_none() {
                sleep(RESTART_PAUSE).await;
            }
        });
    }

    /// How many tasks have panicked.
    pub(crate) fn panics(&self) -> u64 {
        self.0.panics.load(Ordering::Relaxed)
    }

    /// Whether the driver is gone.
    pub(crate) fn is_stopped(&self) -> bool {
        self.0.workers.iter().all(mpsc::UnboundedSender::is_closed)
    }

    fn send(&self, task: impl Future<Output = ()> + Send + 'static) {
        let workers = &self.0.workers;
        let next = self.0.handed_over.fetch_add(1, Ordering::Relaxed) % workers.len();
        // Without a driver the task is dropped, and its channels are closed.
        let _ = workers[next].send(Box::pin(task));
    }
}

/// Runs a task. `None`: it has panicked, and the panic was counted.
async fn caught(panics: &AtomicU64, task: impl Future<Output = ()>) -> Option<()> {
    let ended = AssertUnwindSafe(task).catch_unwind().await;
    if ended.is_err() {
        panics.fetch_add(1, Ordering::Relaxed);
        tracing::error!("a background task has panicked; this is a defect of Tollgate");
    }
    ended.ok()
}

impl Driver {
    /// Runs until all limiters and the engine are gone. The work is spread over several tasks of the runtime.
    pub async fn run(mut self) {
        // A single worker runs in the driver's own task.
        if self.workers.len() == 1
            && let Some(tasks) = self.workers.pop()
        {
            self.stop.run_until_cancelled(work(tasks)).await;
            return;
        }
        let mut workers = JoinSet::new();
        for tasks in self.workers {
            workers.spawn(work(tasks));
        }
        // Workers end only when they are dropped, which stops them.
        self.stop.cancelled().await;
    }
}

async fn work(mut tasks: mpsc::UnboundedReceiver<Task>) {
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            // In a fixed order, so that a simulation can be replayed. New tasks cannot starve the others, because `recv` yields.
            biased;
            Some(task) = tasks.recv() => running.push(task),
            Some(()) = running.next(), if !running.is_empty() => {}
            else => return,
        }
    }
}

/// A call that goes on with the driver if its caller leaves, because other requests may be waiting for it.
pub(crate) struct Leading<F: Future<Output = T> + Send + 'static, T: Send + 'static> {
    call: Option<Pin<Box<F>>>,
    tasks: Tasks,
    /// Set while the call is polled. It stays set after a panic.
    is_polled: bool,
}

impl<F: Future<Output = T> + Send + 'static, T: Send + 'static> Leading<F, T> {
    pub(crate) fn new(call: F, tasks: Tasks) -> Self {
        Self { call: Some(Box::pin(call)), tasks, is_polled: false }
    }
}

impl<F: Future<Output = T> + Send + 'static, T: Send + 'static> Future for Leading<F, T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let this = self.get_mut();
        let Some(call) = this.call.as_mut() else { return Poll::Pending };
        this.is_polled = true;
        let answer = call.as_mut().poll(context);
        this.is_polled = false;
        if answer.is_ready() {
            this.call = None;
        }
        answer
    }
}

impl<F: Future<Output = T> + Send + 'static, T: Send + 'static> Drop for Leading<F, T> {
    fn drop(&mut self) {
        // A call that panicked must not be polled again. Dropping it frees its key.
        if let Some(call) = self.call.take().filter(|_| !self.is_polled) {
            self.tasks.hand_over(async {
                call.await;
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn panic_is_counted_and_ends_no_other_task() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime").block_on(async {
            let (tasks, driver, _stop) = Tasks::new();
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
