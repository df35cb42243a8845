//! Commands to a server and its answers.
//!
//! Each algorithm has a script and a codec of the same name: `bucket.lua` beside `bucket.rs`. A script decides on plain states only: written
//! under the limit that asks, by this server, without reservations and carried debts. It answers with the state as it was before, and the
//! questions are evaluated on that state in Rust, by the same arithmetic. Any other state is answered as it is stored: then Rust computes the
//! next state, and a compare-and-set writes it (`set.lua`).

mod bucket;
mod calendar_quota;
mod command;
mod control;
mod fields;
mod fixed_window;
mod interval_bucket;
mod numbers;
mod scripts;
mod sliding_counter;
mod sliding_log;
mod state;

use tollgate_core::{Ask, Limit, Micros, Timestamp};

pub(super) use self::command::{
    Command, Computed, Kind, ask, ask_sets, change, commit, commit_sets, forget, is_lending, live, read,
    wanted, wire,
};
pub(super) use self::control::{VersionedChange, all_fields, change_versioned, fields, time};
pub(super) use self::fields::{Difference, Fields, Snapshots};
pub(super) use self::numbers::{Reader, Reply};
pub(super) use self::scripts::{SCRIPTS, Script};
pub(super) use self::sliding_log::{LogView, Starts};
pub(super) use self::state::{Stored, parameters, plain_state, stored_state, write};
use crate::backend::LeaseRequest;
use crate::redis::limit::StoredLimit;
use crate::redis::server::ServerContext;

/// A question that a call answers. Kept small: thousands may wait.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Question {
    /// Takes permits.
    Take(Ask),
    /// Peeks without taking permits.
    Peek(Ask),
    /// Takes permits, and borrows others.
    Borrow(Ask, Box<LeaseRequest>),
}

impl Question {
    pub(super) const fn ask(&self) -> Ask {
        let (Self::Take(ask) | Self::Peek(ask) | Self::Borrow(ask, _)) = self;
        *ask
    }

    /// Whether it takes permits.
    pub(super) const fn takes(&self) -> bool {
        !matches!(self, Self::Peek(_))
    }
}

/// A change without a decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    Refund {
        permits: u64,
        at: Timestamp,
    },
    Charge {
        permits: u64,
    },
    /// Gives back lent permits. It counts once, as return number `number`.
    Return {
        permits: u64,
        at: Timestamp,
        number: u64,
        /// Whether it was counted as out.
        counted: bool,
    },
}

/// The distrust of a key: writes before a server took over may be lost, among them leases with this life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FailoverGuard {
    pub(super) since: Timestamp,
    pub(super) life: Micros,
}

impl FailoverGuard {
    /// The distrust of the keys of a server, for a limit with a failover guard.
    pub(super) fn of(limit: &StoredLimit, server: ServerContext) -> Option<Self> {
        let life = limit.distrust?;
        // The sub-bucket of a counter without others counts until two windows later.
        let matters = limit.limit.horizon().get().saturating_mul(2).saturating_add(life.get());
        let since = server.failover?.within(Micros::new(matters))?;
        Some(Self { since, life })
    }
}

/// Whether the store is asked: a cost of 0 is always admitted, and a cost above the size never.
pub(super) fn is_sent(limit: &Limit, ask: Ask) -> bool {
    ask.cost > 0 && ask.cost <= limit.size()
}
