//! What makes the policy change while the service runs: its file, a signal, the store.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::live::{AskedBy, LivePolicy};

/// How often the file is looked at. Looking is a system call; being told of changes would need watches on every folder that a link
/// leads through, and is not to be had on network file systems.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How often the store is asked for what other nodes were told.
const HEAR_EVERY: Duration = Duration::from_millis(200);

/// What tells a file from what it was: where it is and when it was written, links followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Mark {
    device: u64,
    inode: u64,
    size: u64,
    written: (i64, i64),
}

impl Mark {
    fn of(path: &Path) -> Option<Self> {
        let it = std::fs::metadata(path).ok()?;
        let written = (it.mtime(), it.mtime_nsec());
        Some(Self { device: it.dev(), inode: it.ino(), size: it.size(), written })
    }
}

/// Whether a file has changed and is complete: it is another one than was read, and the same as at the last look.
#[derive(Debug)]
struct Watch {
    read: Option<Mark>,
    seen: Option<Mark>,
}

impl Watch {
    fn new(mark: Option<Mark>) -> Self {
        Self { read: mark, seen: mark }
    }

    fn look(&mut self, mark: Option<Mark>) -> bool {
        let is_settled = self.seen == mark;
        self.seen = mark;
        let has_changed = is_settled && mark.is_some() && self.read != mark;
        if has_changed {
            self.read = mark;
        }
        has_changed
    }
}

/// Tells of SIGHUP. Without it the process would end.
pub(crate) fn hangups() -> Result<Signal> {
    Ok(signal(SignalKind::hangup())?)
}

/// Keeps the policy up to date until told to stop.
pub(crate) async fn keep_up(policy: Arc<LivePolicy>, mut hangups: Signal, stop: CancellationToken) {
    let file = policy.file();
    let mark = || file.as_deref().and_then(Mark::of);
    // What was read at start may have changed before anybody looked.
    let mut watch = Watch::new(None);
    let (mut looks, mut news) = (interval(LOOK_EVERY), interval(HEAR_EVERY));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    news.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = hangups.recv() => {
                watch = Watch::new(mark());
                let _ = policy.reload(AskedBy::Node).await;
            }
            // The outcome is logged and counted, and nobody waits for it.
            _ = looks.tick(), if file.is_some() => if watch.look(mark()) {
                let _ = policy.reload(AskedBy::Node).await;
            },
            _ = news.tick() => {
                policy.poll().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_when_it_has_changed_and_stays_as_it_is() {
        let mark = |inode| Some(Mark { device: 1, inode, size: 1, written: (0, 0) });
        let mut watch = Watch::new(mark(1));
        let looks =
            [mark(1), mark(2), mark(3), mark(3), mark(3), None, mark(3), mark(4), None, mark(4), mark(4)];
        let read: Vec<_> = looks.into_iter().map(|mark| watch.look(mark)).collect();
        let expected = [false, false, false, true, false, false, false, false, false, false, true];
        assert_eq!(read, expected);
    }
}
