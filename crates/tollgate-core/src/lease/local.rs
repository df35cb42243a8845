//! What one node holds of one key: leases, what they are spent at, and when the state is asked for more.

use smallvec::SmallVec;

use super::demand::Demand;
use super::{Grant, LeaseTerms};
use crate::time::{Micros, Timestamp};

/// The node's clock may run slower than the state's by this part: leases end so much earlier.
const DRIFT_PARTS: u64 = 5_000;
/// Leases of one key at a time: one being spent, one fetched ahead, and what is left of older ones.
const LEASES_MAX: usize = 4;
/// Fewer requests than this before a lease is spent: asking for each is as cheap.
const WORTH_PERMITS: u64 = 3;
/// More is fetched so long before what is held runs out.
const LEAD_MAX: Micros = Micros::from_millis(10);
/// A state that has too little is asked again after this long: every node comes, and each of them this often.
const PACE_MAX: Micros = Micros::from_millis(50);
/// A denial is believed for this long at most: what others give back, and what is reset elsewhere, is seen by then.
const BELIEVED_MAX: Micros = Micros::from_millis(80);

/// Permits that may be spent until an instant of the node's own clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lease {
    /// How many are left.
    pub left: u64,
    /// What the state knows them by.
    pub at: Timestamp,
    /// When they end.
    pub ends: Timestamp,
}

/// What the state has said: that so much cannot be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Denied {
    /// For how many permits.
    pub cost: u64,
    /// When they can be had, on the node's clock.
    pub until: Timestamp,
    /// Until when that is believed.
    pub believed: Timestamp,
}

/// What a node does with a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Move {
    /// It is admitted by what is held.
    Spend {
        /// How many permits are to be fetched meanwhile; 0 for none.
        fetch: u64,
    },
    /// It is denied: the state would have too little for it, or is left alone for a moment.
    Deny {
        /// How long until the state is asked again.
        retry: Micros,
    },
    /// The state decides.
    Ask {
        /// How many permits more are asked for; 0 for none.
        ahead: u64,
    },
}

/// Permits that were spent on one request, by the leases that they were taken from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Spent(SmallVec<[Lease; 1]>);

impl Spent {
    /// How many permits.
    pub fn permits(&self) -> u64 {
        self.0.iter().map(|lease| lease.left).sum()
    }
}

/// What one node holds of one key.
#[derive(Clone, Debug, Default)]
pub struct LocalLease {
    leases: SmallVec<[Lease; 2]>,
    demand: Demand,
    /// Whether the state is being asked for more.
    asking: bool,
    /// Not to be asked for more before this.
    paced: Timestamp,
    denied: Option<Denied>,
    /// The size of the last grant, and when it came.
    granted: u64,
    granted_at: Timestamp,
    /// When something was last asked for.
    used_at: Timestamp,
    /// How long the last answers of the state took.
    trip: Micros,
}

impl LocalLease {
    /// Decides on a request, at the node's time. `parts` is what [`LeaseTerms::parts`] says for all nodes. A caller who is ready to
    /// wait is not denied here: the state knows for how long.
    #[inline]
    pub fn decide(
        &mut self,
        now: Timestamp,
        cost: u64,
        waits: bool,
        terms: &LeaseTerms,
        parts: Option<u64>,
    ) -> Move {
        self.decide_spending(now, cost, waits, terms, parts, None)
    }

    /// The same, and notes what was spent if it may have to be taken back.
    #[inline]
    pub fn decide_spending(
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
        // While a state that is far away is being asked, what it said last is believed: every request would ask it otherwise.
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

    /// What is held, those that end first before others.
    pub fn leases(&self) -> &[Lease] {
        &self.leases
    }

    /// Whether the state is left alone for a moment, although it may have something.
    pub fn is_paced(&self, now: Timestamp) -> bool {
        now < self.paced
    }

    /// Permits that are held and may still be spent.
    pub fn left(&self, now: Timestamp) -> u64 {
        self.leases.iter().filter(|lease| now < lease.ends).map(|lease| lease.left).sum()
    }

    /// The state has answered a call that was sent at `sent` and asked for `ahead` permits more: it has granted some, and may have
    /// denied the request that came with it. Says how many permits have ended meanwhile.
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
        // Slower answers count at once, faster ones by and by.
        self.trip = now.since(sent).max(Micros::new(self.trip.get() * 7 / 8));
        self.asking = false;
        let permits = grant.map_or(0, |grant| grant.permits);
        if permits < ahead {
            // Others want the same. Whoever asks for every permit that comes back asks for nothing else.
            self.paced = now.after(Self::pace(terms));
        }
        let Some(grant) = grant.filter(|grant| grant.permits > 0) else { return 0 };
        (self.granted, self.granted_at) = (grant.permits, now);
        // The state has counted from a later instant than when it was asked.
        let life = grant.life.get().saturating_sub(grant.life.get().div_ceil(DRIFT_PARTS));
        let lease = Lease { left: grant.permits, at: grant.at, ends: sent.after(Micros::new(life)) };
        // Those that are spent make room: a key that spends faster than anybody sweeps holds no more of them.
        let ended = self.drop_ended(now);
        if now >= lease.ends {
            return ended + permits;
        }
        let place = self.leases.partition_point(|other| other.ends <= lease.ends);
        self.leases.insert(place, lease);
        ended
    }

    /// The state has not answered. Whatever it has granted is lost, and what it said before is not believed any more: whoever asks
    /// for more than is held finds out that it does not answer.
    pub fn failed(&mut self, now: Timestamp, terms: &LeaseTerms) {
        (self.asking, self.denied) = (false, None);
        self.paced = now.after(Self::pace(terms));
    }

    /// Forgets a denial: the key was made as good as new.
    pub fn forget(&mut self) {
        (self.denied, self.paced) = (None, Timestamp::default());
        self.leases.clear();
    }

    /// Takes away what has ended, and says how many permits that were.
    pub fn drop_ended(&mut self, now: Timestamp) -> u64 {
        let mut ended = 0;
        self.leases.retain(|lease| {
            let lives = now < lease.ends;
            ended += if lives { 0 } else { lease.left };
            lives && lease.left > 0
        });
        ended
    }

    /// Whether nobody has asked for so long that what is held is better given back.
    pub fn is_idle(&self, now: Timestamp, terms: &LeaseTerms) -> bool {
        now.since(self.used_at).get() > terms.life().get() / 2
    }

    /// Gives up everything that has not ended. Nobody spends it from now on.
    pub fn give_up(&mut self, now: Timestamp) -> SmallVec<[Lease; 2]> {
        let mut given_up = core::mem::take(&mut self.leases);
        given_up.retain(|lease| now < lease.ends && lease.left > 0);
        given_up
    }

    /// Whether nothing is held, nothing under way, and nobody has asked for so long: it may be forgotten.
    pub fn is_over(&self, now: Timestamp, after: Micros) -> bool {
        self.leases.is_empty() && !self.asking && now.since(self.used_at) > after
    }

    /// When something was last asked for.
    pub const fn used_at(&self) -> Timestamp {
        self.used_at
    }

    /// Takes permits, those that end first before others; all or none.
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

    /// Takes back what was spent on a request that is not admitted after all. Each permit goes back to its own lease, and says how many have
    /// ended meanwhile.
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
                let place = self.leases.partition_point(|other| other.ends <= part.ends);
                self.leases.insert(place, *part);
            }
        }
        ended
    }

    /// How many permits to fetch before what is held runs out.
    #[inline]
    fn fetch(&mut self, now: Timestamp, terms: &LeaseTerms, parts: Option<u64>) -> u64 {
        if self.asking || now < self.paced || parts.is_none() || self.leases.len() >= LEASES_MAX {
            return 0;
        }
        // Twice as long as the state takes to answer, where it is far away.
        let near = LEAD_MAX.min(Micros::new(terms.life().get() / 4));
        let lead = near.max(Micros::new((self.trip.get() * 2).min(terms.life().get() / 4 * 3)));
        if self.left(now.after(lead)) > self.demand.expected(now, lead) {
            return 0;
        }
        let wish = self.wish(now, terms);
        self.asking = wish > 0;
        wish
    }

    /// How many permits to ask for: what will be spent in half the life of a lease, and until it comes. None if that is not worth it.
    fn wish(&self, now: Timestamp, terms: &LeaseTerms) -> u64 {
        let half = Micros::new(terms.life().get() / 2);
        let expected = self.demand.expected(now, Micros::new(half.get() + self.trip.get().min(half.get())));
        if expected < WORTH_PERMITS {
            return 0;
        }
        // Spent in half the time that it was meant for: demand is ahead of what is known of it.
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
