//! Timers that are right to a tenth of a millisecond. The runtime's own have ticks of a whole one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::Notify;

/// A thread that sleeps until the next alarm and rings its bell. It ends when this and all timers are gone.
#[derive(Debug)]
pub(super) struct Alarms {
    alarms: Option<Sender<Alarm>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Alarm {
    at: Instant,
    bell: Arc<Notify>,
}

impl Alarms {
    pub(super) fn start() -> Self {
        let (alarms, inbox) = channel();
        Self { alarms: Some(alarms), thread: Some(std::thread::spawn(move || ring(&inbox))) }
    }

    pub(super) fn timer(&self) -> Timer {
        let alarms = self.alarms.clone().expect("alarms are there until they are dropped");
        Timer { alarms, bell: Arc::default(), set_for: None }
    }
}

impl Drop for Alarms {
    fn drop(&mut self) {
        self.alarms = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn ring(inbox: &Receiver<Alarm>) {
    // By their times. The number tells apart those of the same instant.
    let mut alarms: BTreeMap<(Instant, u64), Arc<Notify>> = BTreeMap::new();
    for number in 0.. {
        let next = loop {
            let Some(first) = alarms.first_entry() else {
                break inbox.recv().map_err(|_| RecvTimeoutError::Disconnected);
            };
            let left = first.key().0.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                break inbox.recv_timeout(left);
            }
            first.remove().notify_one();
        };
        match next {
            Ok(alarm) => _ = alarms.insert((alarm.at, number), alarm.bell),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// One wait at a time.
#[derive(Debug)]
pub(super) struct Timer {
    alarms: Sender<Alarm>,
    bell: Arc<Notify>,
    set_for: Option<Instant>,
}

impl Timer {
    /// Waits until an instant. A wait that is dropped and begun again for the same instant costs nothing.
    pub(super) async fn until(&mut self, at: Instant) {
        // The bell may ring for an earlier wait, too.
        while Instant::now() < at {
            if self.set_for != Some(at) {
                let alarm = Alarm { at, bell: Arc::clone(&self.bell) };
                self.alarms.send(alarm).expect("alarms ring as long as there are timers");
                self.set_for = Some(at);
            }
            self.bell.notified().await;
        }
    }
}
