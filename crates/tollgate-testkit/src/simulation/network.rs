//! The network between the nodes and the store: calls and replies take time, are lost, late or doubled, and overtake each other.
//!
//! All draws and the order of events follow from the identity of a call (its node, its state, its number), never from the order in which
//! tasks run: production code may walk its tables in an order that differs from process to process.

use std::collections::BTreeMap;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::oneshot;
use tollgate::{LeaseRequest, Micros, Outcome, StoreError, Timestamp};

use super::Flaw;
use super::clock::NodeClock;
use super::judge::Denial;
use super::scenario::Scenario;
use super::world::{Inside, World};
use crate::Random;
use crate::fake_store::{Asked, Call, Link, Reply};

/// Messages under way, by when they arrive.
#[derive(Default)]
pub(super) struct Network {
    queue: BTreeMap<Arrival, Message>,
    /// How many calls of one kind a node has sent about one state.
    sent: BTreeMap<(usize, u64, usize), u64>,
}

/// When a message arrives, in microseconds, and its identity.
type Arrival = (u64, u64, u64);

enum Message {
    /// A call reaches the store.
    Call(Arc<Flight>),
    /// A reply reaches its node.
    Reply(Arc<Flight>, Heard),
}

/// A call, from when it is sent until all of its doubles have arrived.
struct Flight {
    identity: u64,
    holder: usize,
    call: Call,
    waiter: std::sync::Mutex<Waiter>,
}

struct Waiter {
    answer: Option<oneshot::Sender<Heard>>,
    random: Random,
    executed: u64,
    /// How often permits were taken back by it.
    returns: u64,
}

/// A reply, and what the judge knows of it.
struct Heard {
    reply: Reply,
    executed_us: u64,
    loan: Option<usize>,
    /// How often the state of each check had become better than it promised.
    generations: Vec<u64>,
}

impl Network {
    /// When the next message arrives.
    pub(super) fn next_us(&self) -> Option<u64> {
        self.queue.first_key_value().map(|((at_us, ..), _)| *at_us)
    }
}

impl Inside {
    /// Lets everything arrive that is due.
    pub(super) fn arrive(&mut self, scenario: &Scenario, now_us: u64) {
        while let Some(first) = self.network.queue.first_entry() {
            let at_us = first.key().0;
            if at_us > now_us {
                return;
            }
            match first.remove() {
                Message::Call(flight) => self.execute(scenario, at_us, &flight),
                Message::Reply(flight, heard) => {
                    self.tell(at_us, || format!("node {} hears {:?}", flight.holder, heard.reply));
                    let answer = crate::fake_store::lock(&flight.waiter).answer.take();
                    if let Some(answer) = answer {
                        // The caller may have stopped waiting.
                        drop(answer.send(heard));
                    }
                }
            }
        }
    }

    fn send(
        &mut self,
        scenario: &Scenario,
        holder: usize,
        call: Call,
        now_us: u64,
    ) -> oneshot::Receiver<Heard> {
        let (kind, place) = (kind(&call), self.place_of(&call));
        let count = self.network.sent.entry((holder, kind, place)).or_default();
        *count += 1;
        let identity = (holder as u64) << 48 | (place as u64) << 40 | kind << 32 | *count;
        let mut random = Random::new(scenario.seed ^ identity.wrapping_mul(0x2545_f491_4f6c_dd1d));
        random.number();
        let call = match call {
            Call::Borrow(asked, wanted) if scenario.adversarial && wanted.permits > 0 => {
                let permits = 1 + random.below(2 * asked.place.limit.limit.size());
                Call::Borrow(asked, LeaseRequest { permits, parts: 1, ..wanted })
            }
            call => call,
        };
        self.tell(now_us, || format!("node {holder} sends {call:?}"));
        if let Call::Return { lease, .. } = &call {
            self.judge.given_up(holder, place, lease);
        }
        let (answer, answered) = oneshot::channel();
        // Calls that charge or refund are never repeated.
        let may_double = !matches!(call, Call::Charge { .. } | Call::Refund { .. });
        let is_bad = scenario.bad_network && !self.is_calm;
        let arrivals =
            arrivals(&mut random, scenario, is_bad, may_double, matches!(call, Call::Return { .. }));
        let waiter = Waiter { answer: Some(answer), random, executed: 0, returns: 0 };
        let flight = Arc::new(Flight { identity, holder, call, waiter: std::sync::Mutex::new(waiter) });
        for (copy, late_us) in arrivals.into_iter().enumerate() {
            let arrival = (now_us + late_us, identity, copy as u64);
            self.network.queue.insert(arrival, Message::Call(Arc::clone(&flight)));
        }
        answered
    }

    fn execute(&mut self, scenario: &Scenario, at_us: u64, flight: &Arc<Flight>) {
        let mut waiter = crate::fake_store::lock(&flight.waiter);
        waiter.executed += 1;
        // A node that was told "not your turn" says it again with another number. It relies on a connection that carries the first call
        // once, so its double does not come later: only what was done may be done again.
        if waiter.executed > 1 && matches!(flight.call, Call::Return { .. }) && waiter.returns == 0 {
            return;
        }
        let generations = asked(&flight.call).iter().map(|asked| self.generation(asked)).collect();
        let reply = self.server.execute(at_us, &flight.call);
        self.tell(at_us, || format!("the store answers node {}: {reply:?}", flight.holder));
        let returned = match &flight.call {
            Call::Return { lease, .. } => Some((lease, waiter.returns > 0)),
            _ => None,
        };
        let (loan, has_returned) = self.note(scenario, at_us, flight.holder, returned);
        waiter.returns += u64::from(has_returned);
        // A connection carries the answer to a call, not to its double.
        if waiter.executed > 1 {
            return;
        }
        let is_bad = scenario.bad_network && !self.is_calm;
        let heard = Heard { reply, executed_us: at_us, loan, generations };
        if let Some(late_us) = arrivals(&mut waiter.random, scenario, is_bad, false, false).first() {
            let arrival = (at_us + late_us, flight.identity, 2);
            self.network.queue.insert(arrival, Message::Reply(Arc::clone(flight), heard));
        }
    }

    fn place_of(&mut self, call: &Call) -> usize {
        let place = match call {
            Call::Decide(asked) => &asked[0].place,
            Call::Peek(asked) | Call::Borrow(asked, _) => &asked.place,
            Call::Return { place, .. }
            | Call::Charge { place, .. }
            | Call::Refund { place, .. }
            | Call::Reset(place) => place,
        };
        self.server.place(&place.limit.scope, &place.key)
    }

    fn generation(&mut self, asked: &Asked) -> u64 {
        let place = self.server.place(&asked.place.limit.scope, &asked.place.key);
        self.better[place]
    }

    /// A node has heard a reply: what it knows from now on.
    fn has_heard(&mut self, link: &NodeLink, call: &Call, sent_us: u64, now_us: u64, heard: &Heard) {
        let holder = link.holder;
        if let Some(loan) = heard.loan {
            self.judge.received(loan, link.clock.at(sent_us));
        }
        for (number, asked) in asked(call).iter().enumerate() {
            let place = self.server.place(&asked.place.limit.scope, &asked.place.key);
            let outcome = match &heard.reply {
                Reply::Decided(decisions) => decisions[number].outcome,
                Reply::LeaseGrant(decision, _) => decision.outcome,
                Reply::Returned(_) | Reply::Done => continue,
            };
            let is_borrowed = matches!(call, Call::Borrow(..));
            let is_noted = asked.ask.wait.is_none_or(|wait| wait == Micros::ZERO && !is_borrowed);
            if matches!(outcome, Outcome::Denied { .. }) && is_noted {
                let denial = Denial { executed_us: heard.executed_us, generation: heard.generations[number] };
                self.judge.heard_denial(holder, place, denial);
            }
        }
        if let (Call::Borrow(asked, wanted), Reply::LeaseGrant(_, grant)) = (call, &heard.reply)
            && grant.map_or(0, |grant| grant.permits) < wanted.permits
        {
            let place = self.server.place(&asked.place.limit.scope, &asked.place.key);
            self.judge.paces(holder, place, now_us);
        }
    }
}

/// The way of one node to the store and back.
pub(super) struct NodeLink {
    pub(super) world: Arc<World>,
    pub(super) node: usize,
    pub(super) holder: usize,
    pub(super) clock: NodeClock,
}

impl Link for Arc<NodeLink> {
    fn carry(&self, call: Call) -> Pin<Box<dyn Future<Output = Result<Reply, StoreError>> + Send>> {
        let link = Self::clone(self);
        Box::pin(async move {
            let world = &link.world;
            let sent_us = world.now_us();
            let mut borrowing = Borrowing { link: &link, call: &call, is_answered: false };
            link.reach()?;
            let answered = world.inside().send(&world.scenario, link.holder, call.clone(), sent_us);
            world.wake.notify_one();
            let Ok(heard) = answered.await else { return pending().await };
            borrowing.is_answered = true;
            world.inside().has_heard(&link, &call, sent_us, world.now_us(), &heard);
            Ok(heard.reply)
        })
    }

    fn reach(&self) -> Result<(), StoreError> {
        if self.world.now_us() < self.world.inside().unreachable_until_us[self.node] {
            return Err(StoreError::Unreachable { server: "the store".into(), why: "no route".into() });
        }
        Ok(())
    }

    fn nodes(&self) -> Option<u32> {
        self.world.scenario.known_nodes
    }

    fn asked_at(&self, sent: Timestamp, now: Timestamp) -> Timestamp {
        if self.world.scenario.flaw == Some(Flaw::LifeFromReceipt) { now } else { sent }
    }
}

/// A call that borrows. If it has no answer, its node leaves the state alone for a moment.
struct Borrowing<'a> {
    link: &'a NodeLink,
    call: &'a Call,
    is_answered: bool,
}

impl Drop for Borrowing<'_> {
    fn drop(&mut self) {
        if let (Call::Borrow(asked, _), false) = (self.call, self.is_answered) {
            let (world, holder) = (&self.link.world, self.link.holder);
            let mut inside = world.inside();
            let place = inside.server.place(&asked.place.limit.scope, &asked.place.key);
            inside.judge.paces(holder, place, world.now_us());
        }
    }
}

const fn kind(call: &Call) -> u64 {
    match call {
        Call::Decide(_) => 0,
        Call::Peek(_) => 1,
        Call::Borrow(..) => 2,
        Call::Return { .. } => 3,
        Call::Charge { .. } => 4,
        Call::Reset(_) => 5,
        Call::Refund { .. } => 6,
    }
}

fn asked(call: &Call) -> &[Asked] {
    match call {
        Call::Decide(asked) => asked,
        Call::Peek(asked) | Call::Borrow(asked, _) => std::slice::from_ref(asked),
        Call::Return { .. } | Call::Charge { .. } | Call::Refund { .. } | Call::Reset(_) => &[],
    }
}

/// How long a call, or a reply, is under way. Nothing: it is lost. Twice: a doubled call.
fn arrivals(
    random: &mut Random,
    scenario: &Scenario,
    is_bad: bool,
    may_double: bool,
    is_return: bool,
) -> Vec<u64> {
    let usual = |random: &mut Random| scenario.latency_us + random.below(scenario.latency_us);
    if !is_bad {
        return vec![usual(random)];
    }
    // Long enough that leases end, epochs pass and deadlines are missed on the way.
    let horizon_us = scenario.limits[0].now.limit().horizon().get();
    let life_us = scenario.life_us().max(1_000);
    let late = |random: &mut Random| match random.below(20) {
        // A store that hangs does later what it was told.
        0..5 if is_return => random.below(life_us + horizon_us),
        0 if random.one_in(8) => random.below(life_us + horizon_us),
        0 => random.below(life_us + life_us / 2 + scenario.deadlines.wait.as_micros() as u64),
        1 | 2 => scenario.latency_us * (1 + random.below(12)),
        _ => usual(random),
    };
    // Something arrives later than it was sent.
    let late = |random: &mut Random| 1 + late(random);
    match random.below(40) {
        0 => Vec::new(),
        1 | 2 if may_double && scenario.doubles => vec![late(random), late(random)],
        _ => vec![late(random)],
    }
}
