//! The leases that one node holds of one key: spends them, and decides when to ask the state for more.

use smallvec::SmallVec;

use super::demand::Demand;
use super::{Grant, LeaseTerms};
use crate::time::{Micros, Timestamp};

/// The clock of the node may run slower than that of the state by one part in this many, so leases end that much earlier.
const DRIFT_PARTS: u64 = 5_000;
/// Leases of one key at a time: one being spent, one fetched ahead, and the rest of older ones.
const LEASES_MAX: usize = 4;
/// The fewest permits that are worth a lease. For fewer, asking for each request is as cheap.
const WORTH_PERMITS: u64 = 3;
/// How long before the held permits run out more are fetched, at most.
const LEAD_MAX: Micros = Micros::from_millis(10);
/// The longest pause before a state with too few permits is asked again. Every node asks this often.
const PACE_MAX: Micros = Micros::from_millis(50);
/// How long a denial is cached, at most. Refunds and resets by other nodes are seen after this.
const BELIEVED_MAX: Micros = Micros::from_millis(80);

/// Permits that may be spent until an instant of the node's own clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lease {
    /// How many are left.
    pub left: u64,
    /// Identifies the grant to the state.
    pub at: Timestamp,
    /// When they end.
    pub ends: Timestamp,
}

/// A cached denial by the state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Denied {
    /// The cost that was denied.
    pub cost: u64,
    /// When the permits will be available, on the node's clock.
    pub until: Timestamp,
    /// Until when the denial is cached.
    pub believed: Timestamp,
}

/// The decision of a node on a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Move {
    /// It is admitted with held permits.
    Spend {
        /// How many permits to fetch meanwhile; 0 for none.
        fetch: u64,
    },
    /// It is denied: the state has too few permits, or is not asked for a moment.
    Deny {
        /// Time until the state is asked again.
        retry: Micros,
    },
    /// The state decides.
    Ask {
        /// How many more permits to ask for; 0 for none.
        ahead: u64,
    },
}

/// Permits spent on one request, by lease.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Spent(SmallVec<[Lease; 1]>);

impl Spent {
    /// The number of permits.
    pub fn permits(&self) -> u64 {
        self.0.iter().map(|lease| lease.left).sum()
    }
}

/// The leases that one node holds of one key.
#[derive(Clone, Debug, Default)]
pub struct LocalLease {
    leases: SmallVec<[Lease; 2]>,
    demand: Demand,
    /// Whether a request for more permits is under way.
    asking: bool,
    /// The state is not asked for more before this.
    paced: Timestamp,
    denied: Option<Denied>,
    /// The size of the last grant, and when it arrived.
    granted: u64,
    granted_at: Timestamp,
    /// The time of the last request.
    used_at: Timestamp,
    /// How long the state took to answer lately.
    trip: Micros,
}

impl LocalLease {
    /// Decides on a request, at the node's time. `parts` is [`LeaseTerms::parts`] for all nodes. A caller that accepts a wait is not
    /// denied here, because only the state knows the wait. `spent` records the permits, if they may have to be put back.
    #[inline]
    pub fn decide(
        &mut self,
        now: Timestamp,
        cost: u64,
        waits: bool,
        terms: &LeaseTerms,
        parts: Option<u64>,
        spent: Option<&mut Spent>,
    ) -> Move {
        self.demand.note(now, cost);
        self.used_at = now;
        if self.spend(now, cost, spent) {
            return Move::Spend { fetch: self.fetch(now, terms, parts) };
        }
        // While a slow state is being asked, its last denial holds. Otherwise every request would ask it.
        let is_far = self.asking && self.trip > LEAD_MAX;
        if let Some(denied) = self.denied.filter(|denied| cost >= denied.cost && !waits)
            && (now < denied.until.min(denied.believed).max(self.paced) || (is_far && now < denied.until))
        {
            return Move::Deny { retry: denied.until.max(self.paced).since(now) };
        }
        let ahead = match parts {
            Some(_) if !self.asking && now >= self.paced => self.wish(now, terms),
            Some(_) | None => 0,
        };
        self.asking |= ahead > 0;
        Move::Ask { ahead }
    }

    /// The held leases, in the order of their ends.
    pub fn leases(&self) -> &[Lease] {
        &self.leases
    }

    /// Held permits that may still be spent.
    pub fn left(&self, now: Timestamp) -> u64 {
        self.leases.iter().filter(|lease| now < lease.ends).map(|lease| lease.left).sum()
    }

    /// Records the answer to a call that was sent at `sent` and asked for `ahead` more permits. The state may have denied the request that
    /// came with it. Returns how many permits have expired meanwhile.
    pub fn answered(
        &mut self,
        now: Timestamp,
        sent: Timestamp,
        ahead: u64,
        grant: Option<Grant>,
        denied: Option<(u64, Micros)>,
        terms: &LeaseTerms,
    ) -> u64 {
        self.denied = denied.map(|(cost, retry)| Denied {
            cost,
            until: sent.after(retry),
            believed: sent.after(BELIEVED_MAX).max(now.after(self.trip.min(BELIEVED_MAX))),
        });
        if ahead == 0 {
            return 0;
        }
        // Slower answers count at once, faster ones gradually.
        self.trip = now.since(sent).max(Micros::new(self.trip.get() * 7 / 8));
        self.asking = false;
        let permits = grant.map_or(0, |grant| grant.permits);
        if permits < ahead {
            // Other nodes want the same permits. Without a pause, this node would ask for every permit that comes back.
            self.paced = now.after(Self::pace(terms));
        }
        let Some(grant) = grant.filter(|grant| grant.permits > 0) else { return 0 };
        (self.granted, self.granted_at) = (grant.permits, now);
        // The state counts the life from a later instant than the request.
        let life = grant.life.get().saturating_sub(grant.life.get().div_ceil(DRIFT_PARTS));
        let lease = Lease { left: grant.permits, at: grant.at, ends: sent.after(Micros::new(life)) };
        // Spent leases make room: a key may spend faster than the sweep runs.
        let ended = self.drop_ended(now);
        if now >= lease.ends {
            return ended + permits;
        }
        self.insert(lease);
        ended
    }

    fn insert(&mut self, lease: Lease) {
        let place = self.leases.partition_point(|other| other.ends <= lease.ends);
        self.leases.insert(place, lease);
    }

    /// Records that the state has not answered. Its grant is lost, and its last denial is dropped, so that requests for more than is held
    /// reach the state.
    pub fn failed(&mut self, now: Timestamp, terms: &LeaseTerms) {
        (self.asking, self.denied) = (false, None);
        self.paced = now.after(Self::pace(terms));
    }

    /// Forgets leases and denials of a key that was reset.
    pub fn forget(&mut self) {
        self.forget_denial();
        self.leases.clear();
    }

    /// Forgets a denial: permits were given back.
    pub fn forget_denial(&mut self) {
        (self.denied, self.paced) = (None, Timestamp::default());
    }

    /// Drops leases that have ended. Returns their permits.
    pub fn drop_ended(&mut self, now: Timestamp) -> u64 {
        let mut ended = 0;
        self.leases.retain(|lease| {
            let lives = now < lease.ends;
            ended += if lives { 0 } else { lease.left };
            lives && lease.left > 0
        });
        ended
    }

    /// Whether the key is idle, so that its permits are better given back.
    pub fn is_idle(&self, now: Timestamp, terms: &LeaseTerms) -> bool {
        now.since(self.used_at).get() > terms.life().get() / 2
    }

    /// Gives up all live leases. They are not spent any more.
    pub fn give_up(&mut self, now: Timestamp) -> SmallVec<[Lease; 2]> {
        let mut given_up = core::mem::take(&mut self.leases);
        given_up.retain(|lease| now < lease.ends && lease.left > 0);
        given_up
    }

    /// Whether the key may be forgotten: no lease, no call under way, and no request for longer than `after`.
    pub fn is_over(&self, now: Timestamp, after: Micros) -> bool {
        self.leases.is_empty() && !self.asking && now.since(self.used_at) > after
    }

    /// The time of the last request.
    pub const fn used_at(&self) -> Timestamp {
        self.used_at
    }

    /// Spends permits, the earliest ending lease first; all or none.
    #[inline]
    fn spend(&mut self, now: Timestamp, cost: u64, spent: Option<&mut Spent>) -> bool {
        let first = self.leases.iter_mut().find(|lease| now < lease.ends && lease.left > 0);
        match first {
            Some(lease) if lease.left >= cost => {
                lease.left -= cost;
                if let Some(spent) = spent {
                    spent.0.push(Lease { left: cost, ..*lease });
                }
                true
            }
            Some(_) => self.spend_of_several(now, cost, spent),
            None => cost == 0,
        }
    }

    fn spend_of_several(&mut self, now: Timestamp, cost: u64, mut spent: Option<&mut Spent>) -> bool {
        if self.left(now) < cost {
            return false;
        }
        let mut missing = cost;
        for lease in self.leases.iter_mut().filter(|lease| now < lease.ends && lease.left > 0) {
            let taken = missing.min(lease.left);
            lease.left -= taken;
            missing -= taken;
            if let Some(spent) = &mut spent {
                spent.0.push(Lease { left: taken, ..*lease });
            }
            if missing == 0 {
                break;
            }
        }
        true
    }

    /// Puts back permits spent on a request that is not admitted after all, each to its own lease. Returns how many have expired meanwhile.
    pub fn unspend(&mut self, spent: &Spent, now: Timestamp) -> u64 {
        let mut ended = 0;
        for part in &spent.0 {
            if now >= part.ends {
                ended += part.left;
            } else if let Some(lease) =
                self.leases.iter_mut().find(|lease| lease.at == part.at && lease.ends == part.ends)
            {
                lease.left += part.left;
            } else {
                self.insert(*part);
            }
        }
        ended
    }

    /// How many permits to fetch before the held ones run out.
    #[inline]
    fn fetch(&mut self, now: Timestamp, terms: &LeaseTerms, parts: Option<u64>) -> u64 {
        if self.asking || now < self.paced || parts.is_none() || self.leases.len() >= LEASES_MAX {
            return 0;
        }
        // Twice the time that a slow state takes to answer.
        let near = LEAD_MAX.min(Micros::new(terms.life().get() / 4));
        let lead = near.max(Micros::new((self.trip.get() * 2).min(terms.life().get() / 4 * 3)));
        if self.left(now.after(lead)) > self.demand.expected(now, lead) {
            return 0;
        }
        let wish = self.wish(now, terms);
        self.asking = wish > 0;
        wish
    }

    /// How many permits to ask for: the demand in half the life of a lease, and until it arrives. 0 if a lease is not worth it.
    fn wish(&self, now: Timestamp, terms: &LeaseTerms) -> u64 {
        let half = Micros::new(terms.life().get() / 2);
        let expected = self.demand.expected(now, Micros::new(half.get() + self.trip.get().min(half.get())));
        if expected < WORTH_PERMITS {
            return 0;
        }
        // The last grant was spent in half its time, so demand is above the estimate.
        let left = self.left(now);
        let was_small =
            self.granted > 0 && left <= self.granted / 4 && now.since(self.granted_at).get() < half.get() / 2;
        let grown = if was_small { self.granted.saturating_mul(2) } else { 0 };
        expected.max(grown).min(terms.ceiling().saturating_sub(left))
    }

    fn pace(terms: &LeaseTerms) -> Micros {
        PACE_MAX.min(Micros::new(terms.life().get() / 4))
    }
}
