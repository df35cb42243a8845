//! Deadlines that accept an answer which has arrived: a process that was delayed itself sees its timer and its answer at the same
//! time, and the answer counts.

use std::future::Future;
use std::pin::pin;

use futures_util::FutureExt;
use tokio::task::yield_now;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};

/// Tasks that an answer may still have to pass: the connection and the driver.
const HANDS: usize = 2;

/// The output of a future, if it is ready before the deadline is noticed.
pub(crate) async fn within<F: Future>(deadline: Instant, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let late = match timeout_at(deadline, &mut future).await {
        Ok(output) => return Ok(output),
        Err(late) => late,
    };
    for _ in 0..HANDS {
        yield_now().await;
        if let Some(output) = (&mut future).now_or_never() {
            return Ok(output);
        }
    }
    Err(late)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::sleep_until;

    use super::*;

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime").block_on(test);
    }

    #[test]
    fn answer_that_arrived_while_the_process_was_delayed_counts() {
        run(async {
            let (answer, answered) = oneshot::channel();
            let start = Instant::now();
            let other = tokio::spawn(async move {
                sleep_until(start + Duration::from_millis(5)).await;
                answer.send(7)
            });
            let asked = tokio::spawn(within(start + Duration::from_millis(10), answered));
            let held_up = tokio::spawn(async { std::thread::sleep(Duration::from_millis(30)) });
            let (asked, ..) = tokio::join!(asked, held_up, other);
            assert_eq!(asked.expect("no panic"), Ok(Ok(7)));
        });
    }

    #[test]
    fn future_without_output_times_out() {
        run(async {
            let (_answer, answered) = oneshot::channel::<()>();
            assert!(within(Instant::now() + Duration::from_millis(5), answered).await.is_err());
        });
    }
}
