//! Deadlines that are fair to an answer which is there: a process that was itself held up finds its timer and its answer at the
//! same time, and the answer counts.

use std::future::Future;
use std::pin::pin;

use futures_util::FutureExt;
use tokio::task::yield_now;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};

/// Tasks that an answer may still have to go through: the connection's, and the driver's.
const HANDS: usize = 2;

/// What comes before the deadline, or was there before it was noticed to be over.
pub(super) async fn within<F: Future>(deadline: Instant, future: F) -> Result<F::Output, Elapsed> {
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
