//! A network of its own for a test: namespaces on a bridge, whose links can be cut. Root only.

use std::fs;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Once};

use crate::random::Random;

/// Places in one network. Everyone is told the hardware addresses of all of them beforehand, so they are few.
const PLACES_MAX: u8 = 32;

/// The last byte of the test's own address in a network, and of the first place's.
const HOST: u8 = 1;
const FIRST_PLACE: u8 = 2;

/// The last byte of an unused hardware address.
const NOBODY: u8 = 0xff;

/// A bridge in a private range of its own. The test itself is on it, too. It goes with the last of its places.
#[derive(Debug)]
pub struct Network {
    bridge: Arc<Bridge>,
    places: AtomicU32,
}

/// A machine of its own, as far as the network goes: it has an address and sees no ports of other machines. It is taken down with
/// the last clone of this, and a server that runs in it keeps one.
#[derive(Clone, Debug)]
pub struct Place(Arc<Namespace>);

#[derive(Debug)]
struct Bridge {
    name: String,
    range: Range,
}

#[derive(Debug)]
struct Namespace {
    name: String,
    /// The end of its link at the bridge.
    link: String,
    number: u8,
    bridge: Arc<Bridge>,
}

impl Network {
    /// Whether networks can be made here: for root, where there is `ip` and the system allows it. It is tried once.
    pub fn is_available() -> bool {
        static IS_AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
            let tried = Bridge::new().and_then(|bridge| Namespace::new(&Arc::new(bridge), FIRST_PLACE));
            tried.is_ok()
        });
        *IS_AVAILABLE
    }

    /// Makes a network with the test as its only member.
    ///
    /// # Panics
    /// If it cannot be made.
    #[expect(clippy::new_without_default, reason = "a bridge must not be created by default")]
    pub fn new() -> Self {
        let bridge = Bridge::new().unwrap_or_else(|why| panic!("cannot make a network: {why}"));
        Self { bridge: Arc::new(bridge), places: AtomicU32::new(0) }
    }

    /// The test's own address, by which places reach it.
    pub fn host_ip(&self) -> Ipv4Addr {
        self.bridge.range.ip(HOST)
    }

    /// One more place, connected to all others and to the test.
    ///
    /// # Panics
    /// If there are too many, or it cannot be made.
    pub fn place(&self) -> Place {
        let count = self.places.fetch_add(1, Ordering::Relaxed);
        let number =
            u8::try_from(count).ok().filter(|count| *count < PLACES_MAX).expect("there are few places");
        let namespace = Namespace::new(&self.bridge, FIRST_PLACE + number);
        Place(Arc::new(namespace.unwrap_or_else(|why| panic!("cannot make a place: {why}"))))
    }

    /// Partitions two places from each other by dropping packets. Both still reach all other places.
    ///
    /// # Panics
    /// If one was destroyed.
    pub fn cut_between(&self, a: &Place, b: &Place) {
        self.cut_one_way(a, b);
        self.cut_one_way(b, a);
    }

    /// Undoes [`Self::cut_between`]. TCP takes up again when it next tries: some seconds after a long cut.
    ///
    /// # Panics
    /// If one was destroyed.
    pub fn heal_between(&self, a: &Place, b: &Place) {
        self.heal_one_way(a, b);
        self.heal_one_way(b, a);
    }

    /// What one place sends to another is lost. The other way, all arrives.
    ///
    /// # Panics
    /// If the place that sends was destroyed.
    pub fn cut_one_way(&self, from: &Place, to: &Place) {
        from.0.direct([to.0.number], |_| NOBODY);
    }

    /// Undoes [`Self::cut_one_way`].
    ///
    /// # Panics
    /// If the place that sends was destroyed.
    pub fn heal_one_way(&self, from: &Place, to: &Place) {
        from.0.direct([to.0.number], |number| number);
    }
}

impl Place {
    /// Its address.
    pub fn ip(&self) -> Ipv4Addr {
        self.0.bridge.range.ip(self.0.number)
    }

    /// A program that will run there. Files are those of the test: only the network is another.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(ip_program());
        // `ip` becomes the program, so the number of the process is the program's.
        command.args(["netns", "exec", &self.0.name]).arg(program);
        command
    }

    /// Partitions it from all others, including the test, by dropping packets: connections stay open, and nothing arrives.
    ///
    /// # Panics
    /// If it was destroyed.
    pub fn cut(&self) {
        must(&["link", "set", &self.0.link, "nomaster"]);
    }

    /// Undoes [`Self::cut`]. TCP takes up again when it next tries: some seconds after a long cut.
    ///
    /// # Panics
    /// If it was destroyed.
    pub fn heal(&self) {
        must(&["link", "set", &self.0.link, "master", &self.0.bridge.name]);
    }

    /// What it sends is lost, to whomever, the test included. What others send to it arrives.
    ///
    /// # Panics
    /// If it was destroyed.
    pub fn cut_outgoing(&self) {
        self.0.direct(all_places(), |_| NOBODY);
    }

    /// Undoes [`Self::cut_outgoing`] and every cut from here to another place.
    ///
    /// # Panics
    /// If it was destroyed.
    pub fn heal_outgoing(&self) {
        self.0.direct(all_places(), |number| number);
    }

    /// Takes it off the network for good, as if its power had failed, without closing connections. Programs that run there go on
    /// alone, and no other can be started.
    pub fn destroy(&self) {
        self.0.remove();
    }
}

impl Bridge {
    fn new() -> Result<Self, String> {
        static TIDY: Once = Once::new();
        TIDY.call_once(remove_stale);
        // Made first, so that whatever fails after it is undone when it is dropped.
        let bridge = Self { name: unique_name('s'), range: Range::free()? };
        let (name, range) = (&bridge.name, bridge.range);
        // An address of its own: else it would be that of a place, and change as places come and go.
        ip(&["link", "add", name, "address", &range.hardware(HOST), "type", "bridge"])?;
        ip(&["address", "add", &format!("{}/24", range.ip(HOST)), "dev", name])?;
        ip(&["link", "set", name, "up"])?;
        ip_batch(&["-batch", "-"], &neighbours(range, name, all_places(), |number| number))?;
        Ok(bridge)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        // It may never have come to be.
        let _ = ip(&["link", "delete", &self.name]);
    }
}

impl Namespace {
    fn new(bridge: &Arc<Bridge>, number: u8) -> Result<Self, String> {
        let (name, link) = (unique_name('n'), unique_name('v'));
        let namespace = Self { name, link, number, bridge: Arc::clone(bridge) };
        let (name, link, range) = (&namespace.name, &namespace.link, bridge.range);
        ip(&["netns", "add", name])?;
        let near = ["link", "add", link, "type", "veth", "peer", "name", "eth0"];
        ip(&[&near[..], &["address", &range.hardware(number), "netns", name]].concat())?;
        // While the link is off the bridge, its near end is one of the test's own, by which the test would answer whoever
        // looks for it.
        fs::write(format!("/proc/sys/net/ipv4/conf/{link}/arp_ignore"), "8")
            .map_err(|why| why.to_string())?;
        ip(&["link", "set", link, "master", &bridge.name, "up"])?;
        ip(&["-netns", name, "address", "add", &format!("{}/24", range.ip(number)), "dev", "eth0"])?;
        ip(&["-netns", name, "link", "set", "eth0", "up"])?;
        ip(&["-netns", name, "link", "set", "lo", "up"])?;
        namespace.try_direct(all_places(), |number| number)?;
        Ok(namespace)
    }

    /// Says to which hardware address it sends what is meant for others.
    fn direct(&self, others: impl IntoIterator<Item = u8>, to: impl Fn(u8) -> u8) {
        self.try_direct(others, to).unwrap_or_else(|why| panic!("cannot direct what is sent: {why}"));
    }

    /// Because it is told, it never asks. Else a place that is gone would soon be reported as unreachable by the nearest
    /// machine, as on one cable; behind a router, and here, there is silence.
    fn try_direct(&self, others: impl IntoIterator<Item = u8>, to: impl Fn(u8) -> u8) -> Result<(), String> {
        let others = others.into_iter().filter(|number| *number != self.number);
        let lines = neighbours(self.bridge.range, "eth0", others, to);
        ip_batch(&["-netns", &self.name, "-batch", "-"], &lines).map(drop)
    }

    fn remove(&self) {
        // Either may be gone already. The link goes first: the name of a namespace can be deleted, but the namespace
        // stays as long as programs run in it.
        let _ = ip(&["link", "delete", &self.link]);
        let _ = ip(&["netns", "delete", &self.name]);
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The addresses 10.x.y.0 to 10.x.y.255.
#[derive(Clone, Copy, Debug)]
struct Range(u8, u8);

impl Range {
    /// A range without addresses on this machine. It is chosen at random, so that tests that run side by side seldom want
    /// the same one at the same time.
    fn free() -> Result<Self, String> {
        use std::hash::{BuildHasher, RandomState};
        let taken = ip(&["-4", "-oneline", "address"])?;
        let mut random = Random::new(RandomState::new().hash_one(0));
        let mut byte = || random.number().to_be_bytes()[0];
        let ranges = std::iter::repeat_with(|| Self(byte(), byte())).take(100);
        let mut free = ranges.filter(|range| !taken.contains(&format!(" 10.{}.{}.", range.0, range.1)));
        free.next().ok_or_else(|| "all ranges are taken".to_owned())
    }

    fn ip(self, number: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, self.0, self.1, number)
    }

    /// It follows from the address. The first byte says that it was made up.
    fn hardware(self, number: u8) -> String {
        format!("02:10:{:02x}:{:02x}:00:{number:02x}", self.0, self.1)
    }
}

/// The test and all places that there may ever be.
fn all_places() -> std::ops::Range<u8> {
    HOST..FIRST_PLACE + PLACES_MAX
}

/// Commands that say under which hardware addresses others are reached.
fn neighbours(
    range: Range,
    device: &str,
    others: impl IntoIterator<Item = u8>,
    to: impl Fn(u8) -> u8,
) -> String {
    let line = |number| {
        let (ip, hardware) = (range.ip(number), range.hardware(to(number)));
        format!("neighbour replace {ip} lladdr {hardware} nud permanent dev {device}\n")
    };
    others.into_iter().map(line).collect()
}

/// A name that tells whose it is: `tg`, the number of this process, what it names (a letter that is no digit), and a
/// number. The system allows 15 characters.
fn unique_name(kind: char) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("tg{:x}{kind}{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The process that has made what has this name.
fn owner(name: &str) -> Option<u32> {
    let (id, _) = name.strip_prefix("tg")?.split_once(['n', 's', 'v'])?;
    u32::from_str_radix(id, 16).ok()
}

/// Removes what processes have left that were killed, or had the number of this one.
fn remove_stale() {
    // A dead process that has not been waited for has no program any more.
    let is_dead = |id: u32| fs::read_link(format!("/proc/{id}/exe")).is_err();
    let is_stale = |name: &str| owner(name).is_some_and(|id| id == std::process::id() || is_dead(id));
    let first_word = |line: &str| line.split_whitespace().next().unwrap_or_default().to_owned();
    let namespaces = ip(&["netns", "list"]).unwrap_or_default();
    for name in namespaces.lines().map(first_word).filter(|name| is_stale(name)) {
        let _ = ip(&["netns", "delete", &name]);
    }
    let links = ip(&["-brief", "link"]).unwrap_or_default();
    for link in links.lines().map(first_word) {
        let name = link.split('@').next().unwrap_or_default();
        if is_stale(name) {
            let _ = ip(&["link", "delete", name]);
        }
    }
}

fn must(arguments: &[&str]) {
    ip(arguments).unwrap_or_else(|why| panic!("{why}"));
}

/// Runs `ip` and gives back what it printed, or why it failed.
fn ip(arguments: &[&str]) -> Result<String, String> {
    ip_batch(arguments, "")
}

/// Like [`ip`], with lines to read.
fn ip_batch(arguments: &[&str], lines: &str) -> Result<String, String> {
    let failed = |why: &dyn std::fmt::Display| format!("ip {}: {why}", arguments.join(" "));
    let mut command = Command::new(ip_program());
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|why| failed(&why))?;
    // It is dropped at once, so that the program sees the end. One that reads nothing may be gone already.
    let _ = child.stdin.take().map(|mut input| input.write_all(lines.as_bytes()));
    let output = child.wait_with_output().map_err(|why| failed(&why))?;
    if !output.status.success() {
        return Err(failed(&String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Debian keeps it out of the path of ordinary users.
fn ip_program() -> &'static str {
    let places = ["/usr/sbin/ip", "/sbin/ip"];
    places.into_iter().find(|program| Path::new(program).exists()).unwrap_or("ip")
}
