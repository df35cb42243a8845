//! The rows of the matrix, each a fault and what is promised of it.

mod cancelled; // clients that leave
mod clock; // clocks that jump
mod cluster; // primaries and slots of a cluster
mod hot; // one key, far more often than it can be admitted
mod lease; // nodes that borrow
mod network; // links that are slow, silent or gone
mod node; // the nodes themselves
mod overload; // more work than can be done
mod policy; // policies that change
mod sentinel; // primaries that change
mod server; // one server that dies, stands still, refuses or forgets

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Finding;
use crate::judge::{Cause, Judge};
pub use crate::rig::Pace;
use crate::rig::{Rig, Setup};

/// A fault, and how it is brought about and judged. `None`: it cannot be brought about on this machine.
pub struct Row {
    /// Its number in the matrix, with a letter where it has several parts.
    pub id: &'static str,
    /// What is done.
    pub fault: &'static str,
    run: fn(Pace, u64) -> Option<Judge>,
}

impl Row {
    /// Brings the fault about under load that a seed draws, and judges every decision. Where only speed was missed while a timer
    /// of this process was late, that was the machine: the row runs once more, and its finding says so.
    pub fn run(&self, pace: Pace, seed: u64) -> Option<Finding> {
        let timer = LateTimer::start();
        let finding = self.run_once(pace, seed)?;
        let late = timer.stop();
        if late < LATE || !finding.misses_speed_only() {
            return Some(finding);
        }
        eprintln!("row {}: a timer was {} ms late; once more", self.id, late.as_millis());
        let again = self.run_once(pace, seed)?;
        Some(Finding { repeated_after: Some(late.as_millis() as u64), ..again })
    }

    fn run_once(&self, pace: Pace, seed: u64) -> Option<Finding> {
        let played = std::panic::catch_unwind(|| (self.run)(pace, seed));
        let judge = played.unwrap_or_else(|_| {
            // A store that does not do what it is told to: the row was not run, and that is a failure too.
            let mut judge = Judge::bare(seed);
            judge.decision("the fault is brought about", "the rig has failed: see above", false);
            Some(judge)
        });
        Some(judge?.finish(self.id, self.fault))
    }
}

/// A timer that is later than this says that the machine was busy with other work: half a deadline.
const LATE: Duration = Duration::from_millis(5);

/// A thread that waits for a millisecond, again and again, and notes how late it is woken.
struct LateTimer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl LateTimer {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let wait = Duration::from_millis(1);
            let mut latest = Duration::ZERO;
            while !stopped.load(Ordering::Relaxed) {
                let start = Instant::now();
                std::thread::sleep(wait);
                latest = latest.max(start.elapsed().saturating_sub(wait));
            }
            latest
        });
        Self { stop, thread }
    }

    fn stop(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// The row of that name.
pub fn row(id: &str) -> Option<&'static Row> {
    ALL.iter().find(|row| row.id == id)
}

macro_rules! rows {
    ($($id:literal $fault:literal $run:expr;)*) => {
        &[$(Row { id: $id, fault: $fault, run: $run }),*]
    };
}

/// All rows, in the order of the table.
pub const ALL: &[Row] = rows! {
    "1" "kill -9 of the store, restarted empty" server::killed;
    "2" "SIGSTOP of the store, then SIGCONT" server::paused;
    "3" "restart with an append-only file that takes long to load" server::loading;
    "4" "kill -9 of the primary, Sentinel" sentinel::killed;
    "4b" "five seconds of failing writes before Sentinel acts" sentinel::late;
    "5" "SENTINEL FAILOVER, the old primary lives on" sentinel::switched;
    "6a" "the replica hears nothing, the primary dies, the replica takes over" lease::writes_lost;
    "6b" "the same, with the failover guard" lease::writes_lost_guarded;
    "7a" "split brain: a node stays with the old primary" lease::split_brain;
    "7b" "the same, and the old primary wants a replica (min-replicas-max-lag 1)" lease::split_brain_with_lag;
    "8a" "kill -9 of a cluster's primary, full coverage not required" cluster::killed;
    "8b" "the same, full coverage required" cluster::killed_with_full_coverage;
    "9" "slots of hot keys moved to and fro" cluster::moved;
    "10" "two of three primaries killed" cluster::majority_lost;
    "11" "SCRIPT FLUSH every 10 ms" server::flushed;
    "12" "maxmemory 1, noeviction (OOM)" server::out_of_memory;
    "12b" "a flood of new keys fills the store, noeviction" overload::filled;
    "13" "a script that does not end (BUSY)" server::busy;
    "14a" "the user loses a privilege" server::without_privilege;
    "14b" "the password is another one, connections are closed" server::with_another_password;
    "15a" "snapshots fail (MISCONF)" server::disk_full;
    "15b" "too few replicas (NOREPLICAS)" server::without_replicas;
    "16a" "+5 ms latency" network::slower_by_5_ms;
    "16b" "+20 ms latency" network::slower_by_20_ms;
    "16c" "+100 ms latency" network::slower_by_100_ms;
    "16d" "+1000 ms latency" network::slower_by_1000_ms;
    "16e" "2 ms latency, 0 to 10 ms jitter" network::jittery;
    "16f" "1% of packets wait 200 ms" network::stalling;
    "16g" "answers drip byte by byte" network::dripping;
    "16h" "connections are reset" network::resetting;
    "16i" "half-open: what is sent is swallowed" network::swallowing;
    "17" "the link is cut, packets vanish" network::cut;
    "18" "the store's machine is gone without a word" network::powered_off;
    "19" "one of three nodes with leases cannot reach the store" lease::cut_off;
    "20a" "the store's clock jumps back by 1 s" clock::back_a_second;
    "20b" "the store's clock jumps back by 1 h" clock::back_an_hour;
    "20c" "the store's clock jumps ahead by 1 s" clock::ahead_a_second;
    "20d" "the store's clock jumps ahead by 1 h" clock::ahead_an_hour;
    "21" "the nodes' wall clocks jump by an hour, to and fro" clock::of_nodes;
    "22a" "kill -9 of a node with leases" lease::killed;
    "22b" "SIGSTOP of a node with leases, for two lease times" lease::stopped;
    "23" "64 files for each node, and 200 idle connections" node::out_of_files;
    "26" "one key asked at 60% of the rate that this machine can do" hot::asked;
    "27" "100 policies pushed under load, every fifth with a mistake" policy::pushed;
    "28a" "SIGTERM of a node under load" node::terminated;
    "28b" "SIGTERM twice" node::terminated_twice;
    "28c" "SIGTERM, then kill -9" node::killed_while_stopping;
    "28d" "SIGTERM of nodes with leases" lease::given_back;
    "31a" "eight nodes with leases, one killed, two stopped for a while" lease::eight_lease;
    "31b" "the same with lease_fast" lease::eight_lease_fast;
    "32a" "a client makes more checks than the store can decide" overload::flooded;
    "32b" "seven processes keep the machine's two cores busy" overload::saturated;
    "33" "clients leave while limits in three slots are being taken from" cancelled::disconnected;
    "34" "the store loses all data five times, with a pushed policy" policy::lost;
};

/// When the parts of a run began.
struct Parts {
    begun: u64,
    fault: u64,
    /// When mending began: from here on the store may answer.
    mending: u64,
    /// When it was known to answer.
    healed: u64,
}

/// A run: as it is without a fault, with it, and after it. What is broken and mended is `thing`. Mending ends when the store
/// answers again.
fn play<T>(
    store: &str,
    setup: Setup,
    pace: Pace,
    thing: &mut T,
    break_it: (&str, impl FnOnce(&mut T, &mut Rig)),
    mend_it: (&str, impl FnOnce(&mut T, &mut Rig)),
) -> (Judge, Parts) {
    let mut rig = Rig::start(store, setup);
    let begun = rig.mark("baseline");
    rig.wait(pace.baseline);
    let fault = rig.mark(break_it.0);
    (break_it.1)(thing, &mut rig);
    rig.wait(pace.fault);
    let mending = rig.mark("mending");
    (mend_it.1)(thing, &mut rig);
    let healed = rig.mark(mend_it.0);
    rig.wait(pace.recovery);
    (Judge::of(rig.finish()), Parts { begun, fault, mending, healed })
}

/// The promises if the store is unavailable to all nodes for this cause. `excess` is the cost of its own losses.
fn judge_outage(mut judge: Judge, cause: Cause, parts: &Parts, excess: u64, why: &str) -> Judge {
    judge.outage(cause, parts.fault, parts.mending);
    judge.excess(excess, why);
    judge.latency(parts.begun, parts.fault, parts.healed);
    judge.recovered(parts.healed);
    judge.no_leak();
    judge
}

/// The promises if the fault must not be noticed.
fn judge_unnoticed(mut judge: Judge, parts: &Parts, excess: u64, why: &str) -> Judge {
    judge.unnoticed(parts.fault, parts.healed);
    judge.excess(excess, why);
    judge.latency(parts.begun, parts.fault, parts.healed);
    judge.no_leak();
    judge
}
