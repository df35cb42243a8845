//! Finds the rules that a request may match without trying all of them.
//!
//! A rule is indexed by its most selective condition: a path, a host, a named value, a network. Only rules without such a condition are
//! tried for every request.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use smallvec::SmallVec;

use super::matching::{Match, Network, Source};
use super::path::Segments;
use super::pattern::{PathPattern, Segment};
use super::request::Descriptors;

/// Numbers of rules.
pub(super) type Numbers = SmallVec<[u32; 16]>;

/// Rules by the text that they require.
type ByText = BTreeMap<Box<str>, Vec<u32>>;

#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    paths: Node,
    hosts: ByText,
    values: BTreeMap<(Source, Box<str>), ByText>,
    networks: BTreeMap<Network, Vec<u32>>,
    /// The prefix lengths of networks.
    prefixes: Vec<u8>,
    always: Vec<u32>,
}

/// A place in the tree of paths.
#[derive(Clone, Debug, Default)]
struct Node {
    literals: BTreeMap<Box<str>, Node>,
    /// Behind a segment of any text.
    any: Option<Box<Node>>,
    /// Rules whose path ends here.
    ending: Vec<u32>,
    /// Rules that match every path below this place, or that the tree cannot tell apart.
    passing: Vec<u32>,
}

impl Index {
    pub(super) fn new<'r>(matches: impl Iterator<Item = &'r Match>) -> Self {
        let mut index = Self::default();
        for (number, it) in (0..).zip(matches) {
            index.file(number, it);
        }
        index
    }

    fn file(&mut self, number: u32, it: &Match) {
        if it.paths.iter().any(PathPattern::is_telling) && it.paths.iter().all(PathPattern::is_telling) {
            it.paths.iter().for_each(|path| self.paths.file(path.segments(), number));
        } else if let Some(hosts) = literals(&it.hosts) {
            hosts.for_each(|host| self.hosts.entry(host.into()).or_default().push(number));
        } else if let Some((condition, values)) =
            it.values.iter().find_map(|condition| Some((condition, literals(&condition.any_of)?)))
        {
            let by_value = self.values.entry((condition.source, condition.name.clone())).or_default();
            values.for_each(|value| by_value.entry(value.into()).or_default().push(number));
        } else if !it.networks.is_empty() {
            for network in &it.networks {
                self.networks.entry(*network).or_default().push(number);
                if !self.prefixes.contains(&network.prefix) {
                    self.prefixes.push(network.prefix);
                }
            }
        } else {
            self.always.push(number);
        }
    }

    /// The rules that the request may match, in order.
    pub(super) fn candidates(&self, request: &Descriptors<'_>, paths: &[Segments<'_>]) -> Numbers {
        let mut found = Numbers::new();
        found.extend_from_slice(&self.always);
        paths.iter().for_each(|path| self.paths.find(path, &mut found));
        let mut add =
            |numbers: Option<&Vec<u32>>| found.extend_from_slice(numbers.map_or(&[], Vec::as_slice));
        if !self.hosts.is_empty() {
            add(self.hosts.get(request.host));
        }
        for ((source, name), by_value) in &self.values {
            add(source.value(request, name).and_then(|value| by_value.get(value)));
        }
        if let Some(ip) = request.ip {
            let longest = if ip.is_ipv4() { 32 } else { 128 };
            for prefix in self.prefixes.iter().filter(|prefix| **prefix <= longest) {
                add(self.networks.get(&Network::around(ip, *prefix)));
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// The texts of a list of patterns, if none of them has a wildcard.
fn literals(globs: &[super::pattern::Glob]) -> Option<impl Iterator<Item = &str>> {
    let all = !globs.is_empty() && globs.iter().all(|glob| glob.literal().is_some());
    all.then(|| globs.iter().filter_map(|glob| glob.literal()))
}

impl Node {
    fn file(&mut self, segments: &[Segment], number: u32) {
        let Some((first, rest)) = segments.split_first() else {
            self.ending.push(number);
            return;
        };
        match first {
            Segment::Literal(text) => self.literals.entry(text.clone()).or_default().file(rest, number),
            Segment::Glob(_) | Segment::Parameter(_) => self.any.get_or_insert_default().file(rest, number),
            Segment::Rest => self.passing.push(number),
        }
    }

    fn find(&self, path: &[&str], found: &mut Numbers) {
        found.extend_from_slice(&self.passing);
        let Some((first, rest)) = path.split_first() else {
            found.extend_from_slice(&self.ending);
            return;
        };
        if let Some(node) = self.literals.get(*first) {
            node.find(rest, found);
        }
        if let Some(node) = &self.any {
            node.find(rest, found);
        }
    }
}

impl PathPattern {
    /// Whether it excludes some paths.
    fn is_telling(&self) -> bool {
        self.segments().iter().any(|segment| matches!(segment, Segment::Literal(_)))
    }
}
