//! The one task of a Redis engine: it runs what must go on when its caller is gone.

use std::future::Future;
use std::pin::Pin;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs an engine's connections and the calls whose callers have left. The engine answers only while this runs.
#[must_use = "the engine answers only while its driver runs"]
pub struct RedisDriver {
    tasks: mpsc::UnboundedReceiver<Task>,
    stop: CancellationToken,
}

/// Where tasks are handed over. Bounded by what hands over: a task for each connection, and one for each key that has a
/// call in flight.
#[derive(Clone)]
pub(super) struct Tasks(mpsc::UnboundedSender<Task>);

/// Tasks, who runs them, and what ends that when it is dropped.
pub(super) fn driver() -> (Tasks, RedisDriver, DropGuard) {
    let (send, receive) = mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    (Tasks(send), RedisDriver { tasks: receive, stop: stop.clone() }, stop.drop_guard())
}

impl Tasks {
    /// Lets the driver run a task. Without a driver it is dropped, and whoever waits for it finds that out.
    pub(super) fn hand_over(&self, task: impl Future<Output = ()> + Send + 'static) {
        // Nobody is left to be told.
        let _ = self.0.send(Box::pin(task));
    }
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
