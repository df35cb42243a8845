//! Many nodes whose requests have one to four limits, some shared and some their own: every request is decided again, by the algorithms
//! themselves, on the store's own clock.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tollgate::algorithm::Algorithm;
use tollgate::{Ask, Backend, Check, Limit, Micros, State, Timestamp};
use tollgate_testkit::{Cluster, Random, RedisServer, SentinelTrio};

use crate::limits::{LIMITS, named_limit};
use crate::worker::{Worker, patient_engine, told, write_seen};

const NODES: usize = 4;
const TASKS: u64 = 32;
/// Subjects that a node shares with the others, and those of its own.
const SHARED: u64 = 2;
const OWN: u64 = 3;

/// One limit of a request, as a worker saw it.
#[derive(Clone, Copy, Debug)]
struct Part {
    limit: usize,
    subject: u64,
    cost: u64,
    /// The store's time, and whether it was admitted; or it was not asked.
    decided: Option<(u64, bool)>,
}

/// A request, as a worker saw it.
#[derive(Clone, Debug)]
struct Seen {
    at: u64,
    admitted: bool,
    parts: Vec<Part>,
}

impl Seen {
    fn line(&self) -> String {
        let part = |it: &Part| {
            let (at, word) = it.decided.map_or((0, 2), |(at, admitted)| (at, u8::from(admitted)));
            format!(" {} {} {} {at} {word}", it.limit, it.subject, it.cost)
        };
        format!("{} {}{}", self.at, u8::from(self.admitted), self.parts.iter().map(part).collect::<String>())
    }

    fn read(numbers: &[u64]) -> Self {
        let part = |it: &[u64]| Part {
            limit: it[0] as usize,
            subject: it[1],
            cost: it[2],
            decided: (it[4] != 2).then_some((it[3], it[4] == 1)),
        };
        let parts = numbers[2..].chunks(5).map(part).collect();
        Self { at: numbers[0], admitted: numbers[1] == 1, parts }
    }
}

/// The limits of the test: small ones, so that each of them denies.
fn limit(number: usize) -> Limit {
    let small = named_limit(LIMITS[number]);
    match small {
        Limit::TokenBucket(_) => {
            Limit::TokenBucket(tollgate::TokenBucket::new(300, tollgate::Rate::per_second(400)).unwrap())
        }
        other => other,
    }
}

/// Subjects of one slot, or of any.
fn subject(number: u64, in_one_slot: bool) -> String {
    if in_one_slot { format!("{{all}}:{number}") } else { format!("{{{number}}}") }
}

/// Only in a process that was started for it.
#[test]
fn hammer_sets() {
    let Some([url, number, slots, output]) = told() else { return };
    let (number, in_one_slot) = (number.parse().unwrap(), slots == "one slot");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let seen = runtime.block_on(hammer(&url, number, in_one_slot));
    write_seen(&output, seen.map(|seen| seen.iter().map(Seen::line).collect()));
}

async fn hammer(url: &str, node: u64, in_one_slot: bool) -> Result<Vec<Seen>, String> {
    let engine = patient_engine(url)?;
    let limiters: Vec<_> = (0..LIMITS.len()).map(|it| engine.limiter(LIMITS[it], limit(it))).collect();
    let end = Instant::now() + Duration::from_millis(1_500);
    let tasks = (0..TASKS).map(|task| {
        let (engine, limiters) = (engine.clone(), limiters.clone());
        tokio::spawn(async move {
            let mut random = Random::new(node * 1_000 + task);
            let mut seen = Vec::new();
            while Instant::now() < end {
                let parts = parts(&mut random, node);
                let subjects: Vec<_> = parts.iter().map(|it| subject(it.subject, in_one_slot)).collect();
                let checks: Vec<_> = parts
                    .iter()
                    .zip(&subjects)
                    .map(|(it, subject)| Check::new(limiters[it.limit].id(), subject, it.cost))
                    .collect();
                let decisions = engine.decide(&checks).await.map_err(|why| why.to_string())?;
                let decided = parts.into_iter().zip(&decisions).map(|(it, decision)| Part {
                    decided: decision.map(|it| (it.decision.at.as_micros(), it.is_admitted())),
                    ..it
                });
                let parts: Vec<_> = decided.collect();
                let at = parts.iter().filter_map(|it| Some(it.decided?.0)).max().unwrap_or_default();
                let admitted = parts.iter().all(|it| it.decided.is_some_and(|(_, admitted)| admitted));
                seen.push(Seen { at, admitted, parts });
                // Denials may be answered at once; without a breath one task would keep the others from asking.
                if !admitted {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            Ok::<_, String>(seen)
        })
    });
    let mut all = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        all.extend(task.await.map_err(|why| why.to_string())??);
    }
    Ok(all)
}

/// One to four different limits. Half of the requests come in a few shapes, so that equal ones meet.
fn parts(random: &mut Random, node: u64) -> Vec<Part> {
    let shape = if random.one_in(2) { Some(random.below(3)) } else { None };
    let mut chosen = Random::new(shape.unwrap_or_else(|| 1_000 + random.below(1 << 40)));
    let count = 1 + chosen.below(4);
    let mut parts: Vec<Part> = Vec::new();
    while (parts.len() as u64) < count {
        let limit = chosen.below(LIMITS.len() as u64) as usize;
        if parts.iter().all(|it| it.limit != limit) {
            let is_shared = chosen.one_in(2);
            let own = SHARED + node * OWN + chosen.below(OWN);
            let subject = if is_shared { chosen.below(SHARED) } else { own };
            parts.push(Part { limit, subject, cost: 1 + chosen.below(2), decided: None });
        }
    }
    parts
}

fn hammered(url: &str, slots: &str) -> Vec<Seen> {
    let directory = tempfile::tempdir().unwrap();
    let workers: Vec<_> = (0..NODES)
        .map(|number| {
            let told = format!("{url}\n{number}\n{slots}");
            Worker::start_as("exact_sets::hammer_sets", directory.path(), number, &told, 0)
        })
        .collect();
    let lines = workers.into_iter().flat_map(Worker::finish_lines);
    let mut seen: Vec<_> = lines.map(|line| Seen::read(&line)).collect();
    seen.sort_by_key(|it| it.at);
    seen
}

#[derive(Default)]
struct Judge {
    states: HashMap<(usize, u64), State>,
}

impl Judge {
    fn decide(&mut self, part: &Part, at: Timestamp) -> bool {
        let limit = limit(part.limit);
        let state = self.states.entry((part.limit, part.subject)).or_insert_with(|| limit.fresh(at));
        limit.decide(state, at, Ask::of(part.cost).within(Micros::ZERO)).is_admitted()
    }

    fn would_admit(&mut self, part: &Part, at: Timestamp) -> bool {
        let limit = limit(part.limit);
        let state = self.states.entry((part.limit, part.subject)).or_insert_with(|| limit.fresh(at));
        limit.peek(state, at, Ask::of(part.cost).within(Micros::ZERO)).is_admitted()
    }
}

/// Requests of one call have one time, and an order that only the call knows. All that were admitted must fit, and each that was denied must
/// be denied by a limit that says so, after them.
fn judge(what: &str, seen: &[Seen]) {
    let mut judge = Judge::default();
    let (mut admitted, mut denied, mut known_only) = (0, 0, 0);
    for call in seen.chunk_by(|one, other| one.at == other.at) {
        let at = Timestamp::from_micros(call[0].at);
        for it in call.iter().filter(|it| it.admitted) {
            admitted += 1;
            for part in &it.parts {
                assert!(judge.decide(part, at), "{what}: {it:?} was admitted beyond a limit");
            }
        }
        for it in call.iter().filter(|it| !it.admitted) {
            denied += 1;
            known_only += usize::from(it.parts.iter().any(|part| part.decided.is_none()));
            // What is remembered with a denial is dated earlier: it was so then.
            let denies = |part: &&Part| part.decided == Some((it.at, false));
            let by: Vec<_> = it.parts.iter().filter(denies).collect();
            assert!(!by.is_empty(), "{what}: {it:?} was denied by no limit");
            for part in by {
                assert!(!judge.would_admit(part, at), "{what}: {it:?} was denied although {part:?} fits");
            }
        }
    }
    println!(
        "{what}: {} requests, {admitted} admitted, {denied} denied, {known_only} of them by one known limit",
        seen.len()
    );
    assert!(admitted > 1_000 && denied > 100, "{what}: {admitted} admitted, {denied} denied");
}

/// How long a take that is given back may be under way, and how long a denial is cached, with room for a slow machine.
const UNDER_WAY_US: u64 = 1_000_000;

/// Nothing is over a limit, in whichever order the slots were asked; and a denial of what would fit is explained by takes of other requests
/// that were under way, and given back because another slot denied them.
fn judge_apart(what: &str, seen: &[Seen]) {
    let (mut takes, mut denials) = (Vec::new(), Vec::new());
    let mut given_back: HashMap<(usize, u64), Vec<(u64, u64)>> = HashMap::new();
    for it in seen {
        for part in &it.parts {
            match part.decided {
                Some((at, true)) if it.admitted => takes.push((at, *part)),
                Some((at, true)) => {
                    given_back.entry((part.limit, part.subject)).or_default().push((at, part.cost));
                }
                Some((at, false)) => denials.push((at, *part)),
                None => {}
            }
        }
    }
    takes.sort_by_key(|(at, _)| *at);
    denials.sort_by_key(|(at, _)| *at);
    let mut judge = Judge::default();
    let (mut next, mut extra) = (0, 0);
    for (at, part) in &denials {
        while let Some((taken_at, taken)) = takes.get(next).filter(|(taken_at, _)| taken_at <= at) {
            let fits = judge.decide(taken, Timestamp::from_micros(*taken_at));
            assert!(fits, "{what}: {taken:?} at {taken_at} is over its limit");
            next += 1;
        }
        if !judge.would_admit(part, Timestamp::from_micros(*at)) {
            continue;
        }
        extra += 1;
        let under_way = given_back.get(&(part.limit, part.subject)).into_iter().flatten();
        // What flowed into a bucket while a take was under way does not come back with it, and is missing until the bucket is full.
        let is_bucket = matches!(limit(part.limit), Limit::TokenBucket(_) | Limit::LeakyBucket(_));
        let counts = |(taken_at, _): &&(u64, u64)| {
            at.abs_diff(*taken_at) <= UNDER_WAY_US || (is_bucket && taken_at < at)
        };
        let permits: u64 = under_way.filter(counts).map(|(_, cost)| cost).sum();
        let more = Part { cost: part.cost + permits, ..*part };
        assert!(
            permits > 0 && !judge.would_admit(&more, Timestamp::from_micros(*at)),
            "{what}: {part:?} was denied at {at} although it fits, and only {permits} were under way"
        );
    }
    for (at, part) in &takes[next..] {
        assert!(
            judge.decide(part, Timestamp::from_micros(*at)),
            "{what}: {part:?} at {at} is over its limit"
        );
    }
    println!(
        "{what}: {} requests, {} takes, {} denials, {extra} of them by takes under way",
        seen.len(),
        takes.len(),
        denials.len()
    );
    assert!(takes.len() > 500 && denials.len() > 100);
}

#[test]
fn on_one_server() {
    let server = RedisServer::start();
    judge("standalone", &hammered(&server.url(), "any slot"));
}

#[test]
fn on_a_primary_that_sentinels_know() {
    let trio = SentinelTrio::start();
    judge("Sentinel", &hammered(&trio.url(), "any slot"));
}

#[test]
fn in_one_slot_of_a_cluster() {
    let cluster = Cluster::start();
    judge("Cluster, one slot", &hammered(&cluster.url(), "one slot"));
}

#[test]
fn in_several_slots_of_a_cluster() {
    let cluster = Cluster::start();
    judge_apart("Cluster, several slots", &hammered(&cluster.url(), "any slot"));
}
