//! A directory and its clients in virtual time, each on a clock of its own, over links that delay and break.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use crate::directory::{
    Client, ClientConfig, ClientInput, ClientOutput, Registrant, Registry, RegistryConfig, RegistryInput,
    RegistryOutput,
};
use crate::wire::directory::{Change, Message, Request, Route};
use crate::{Address, Epoch, Group, Incarnation, Instant, LogicalId, Machine};

pub(super) const TTL_MS: u64 = 2000;

/// The transport gives a connection up after this long.
const HANDSHAKE_MS: u64 = 2000;

#[derive(Clone, Debug)]
enum Parcel {
    Hello {
        node: usize,
        link: u64,
    },
    Linked {
        node: usize,
        link: u64,
    },
    GaveUp {
        node: usize,
        link: u64,
    },
    ToDirectory {
        node: usize,
        link: u64,
        message: Message,
    },
    ToNode {
        node: usize,
        link: u64,
        message: Message,
    },
    /// One side's news that the link ended.
    DirectoryDown {
        node: usize,
        life: Incarnation,
    },
    NodeDown {
        node: usize,
    },
}

impl Parcel {
    /// Which process takes it: a node, or the directory.
    fn taker(&self) -> Option<usize> {
        match self {
            Parcel::Hello { .. } | Parcel::ToDirectory { .. } | Parcel::DirectoryDown { .. } => None,
            Parcel::Linked { node, .. }
            | Parcel::GaveUp { node, .. }
            | Parcel::ToNode { node, .. }
            | Parcel::NodeDown { node, .. } => Some(*node),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    None,
    Asking(u64),
    Up(u64),
}

pub(super) struct Node {
    pub(super) lid: LogicalId,
    pub(super) incarnation: Incarnation,
    pub(super) client: Client,
    pub(super) alive: bool,
    pub(super) frozen: bool,
    /// Can't reach the directory.
    pub(super) cut: bool,
    /// The changes it was told of, applied one after the other to an empty map.
    pub(super) replayed: BTreeMap<LogicalId, Route>,
    pub(super) log: Vec<(u64, ClientOutput)>,
    link: Link,
    offset: u64,
    /// Parts per thousand of real time.
    rate: u64,
}

impl Node {
    pub(super) fn count(&self, what: impl Fn(&ClientOutput) -> bool) -> usize {
        self.log.iter().filter(|(_, output)| what(output)).count()
    }

    pub(super) fn lost(&self) -> bool {
        self.count(|output| *output == ClientOutput::Lost) > 0
    }

    pub(super) fn left(&self) -> bool {
        self.count(|output| *output == ClientOutput::Left) > 0
    }

    pub(super) fn removals(&self) -> usize {
        self.count(|output| matches!(output, ClientOutput::Change(Change::Remove { .. })))
    }

    pub(super) fn epoch_granted(&self) -> Option<Epoch> {
        self.log.iter().rev().find_map(|(_, output)| match output {
            ClientOutput::Registered(epoch) => Some(*epoch),
            _ => None,
        })
    }
}

pub(super) struct World {
    /// Real time, in milliseconds.
    pub(super) now: u64,
    pub(super) registry: Option<Registry>,
    pub(super) nodes: Vec<Node>,
    pub(super) frozen: bool,
    pub(super) delay_max: u64,
    /// When each renewal or registration reached the directory.
    pub(super) asked_at: Vec<u64>,
    life: Incarnation,
    parcels: BTreeMap<(u64, u64), Parcel>,
    held_back: VecDeque<Parcel>,
    last_at: BTreeMap<(usize, bool), u64>,
    next: u64,
    random: u64,
    highest: BTreeMap<LogicalId, Epoch>,
}

pub(super) fn lid(replica: u32) -> LogicalId {
    Group::new("m", "pp", 0).replica(replica)
}

pub(super) fn config() -> RegistryConfig {
    RegistryConfig { ttl: Duration::from_millis(TTL_MS), first: true, ..RegistryConfig::default() }
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut world = World {
            now: 0,
            registry: None,
            nodes: Vec::new(),
            frozen: false,
            delay_max: 3,
            asked_at: Vec::new(),
            life: Incarnation::from_bits(1),
            parcels: BTreeMap::new(),
            held_back: VecDeque::new(),
            last_at: BTreeMap::new(),
            next: 1,
            random: seed,
            highest: BTreeMap::new(),
        };
        world.start_directory(1000, config());
        world
    }

    /// A directory and `nodes` registered nodes.
    pub(super) fn settled(seed: u64, nodes: u32) -> Self {
        let mut world = World::new(seed);
        for replica in 0..nodes {
            world.add(lid(replica), false, None);
        }
        let granted = |world: &World| world.nodes.iter().all(|node| node.epoch_granted().is_some());
        world.run_until(TTL_MS, |world| world.is_settled() && granted(world));
        world
    }

    pub(super) fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) % below.max(1)
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn start_directory(&mut self, boot: u64, config: RegistryConfig) {
        let bits = self.random(u64::MAX);
        self.life = Incarnation::from_bits(bits);
        self.frozen = false;
        self.registry = Some(Registry::new(self.directory_clock(), self.life, boot, config));
    }

    pub(super) fn stop_directory(&mut self) {
        self.registry = None;
        self.held_back.clear();
        for node in 0..self.nodes.len() {
            self.break_link(node);
        }
    }

    pub(super) fn add(&mut self, lid: LogicalId, shadow: bool, guardian: Option<Incarnation>) -> usize {
        let incarnation = Incarnation::from_bits(self.random(u64::MAX));
        let (random, offset, rate) = (self.random(u64::MAX), self.random(1_000_000), 990 + self.random(21));
        let address = Address::new(&alloc::format!("mem://{incarnation}"));
        let registrant = Registrant { lid: lid.clone(), incarnation, address, shadow, guardian };
        self.nodes.push(Node {
            lid,
            incarnation,
            client: Client::new(ClientConfig::default(), Some(registrant), random),
            alive: true,
            frozen: false,
            cut: false,
            replayed: BTreeMap::new(),
            log: Vec::new(),
            link: Link::None,
            offset,
            rate,
        });
        let node = self.nodes.len() - 1;
        self.tell(node, ClientInput::Start);
        node
    }

    pub(super) fn kill(&mut self, node: usize) {
        self.break_link(node);
        self.nodes[node].alive = false;
    }

    fn directory_clock(&self) -> Instant {
        Instant::from_nanos(self.now * 1_000_000)
    }

    fn clock(&self, node: usize) -> Instant {
        let node = &self.nodes[node];
        Instant::from_nanos(node.offset * 1_000_000 + self.now * node.rate * 1000)
    }

    /// Both ends learn of it a little later, if they can.
    pub(super) fn break_link(&mut self, node: usize) {
        if self.nodes[node].link != Link::None {
            self.nodes[node].link = Link::None;
            self.send_after(0, Parcel::NodeDown { node });
            self.send_after(0, Parcel::DirectoryDown { node, life: self.life });
        }
    }

    fn send_after(&mut self, extra: u64, parcel: Parcel) {
        let delay = 1 + extra + self.random(self.delay_max);
        let key = match parcel {
            Parcel::GaveUp { .. } => None,
            _ => Some(match parcel.taker() {
                Some(node) => (node, true),
                None => match &parcel {
                    Parcel::Hello { node, .. }
                    | Parcel::ToDirectory { node, .. }
                    | Parcel::DirectoryDown { node, .. } => (*node, false),
                    _ => unreachable!(),
                },
            }),
        };
        let mut at = self.now + delay;
        if let Some(key) = key {
            // In order, each way.
            let last = self.last_at.entry(key).or_default();
            at = at.max(*last);
            *last = at;
        }
        let number = self.fresh();
        self.parcels.insert((at, number), parcel);
    }

    pub(super) fn tell(&mut self, node: usize, input: ClientInput) {
        let now = self.clock(node);
        self.nodes[node].client.handle(now, input);
        while let Some(output) = self.nodes[node].client.poll() {
            match &output {
                ClientOutput::Connect => self.on_connect(node),
                ClientOutput::Disconnect => self.break_link(node),
                ClientOutput::Send(message) => {
                    if let Link::Up(link) = self.nodes[node].link
                        && !self.nodes[node].cut
                    {
                        let message = message.clone();
                        self.send_after(0, Parcel::ToDirectory { node, link, message });
                    }
                }
                ClientOutput::Change(Change::Put(route)) => {
                    self.nodes[node].replayed.insert(route.lid.clone(), route.clone());
                }
                ClientOutput::Change(Change::Remove { lid, incarnation, .. }) => {
                    let replayed = &mut self.nodes[node].replayed;
                    if replayed.get(lid).is_some_and(|route| route.incarnation == *incarnation) {
                        replayed.remove(lid);
                    }
                }
                _ => {}
            }
            let now = self.now;
            if !matches!(output, ClientOutput::Send(_)) {
                self.nodes[node].log.push((now, output));
            }
        }
    }

    fn on_connect(&mut self, node: usize) {
        let link = self.fresh();
        self.nodes[node].link = Link::Asking(link);
        if self.registry.is_none() {
            self.send_after(0, Parcel::GaveUp { node, link });
            return;
        }
        self.send_after(HANDSHAKE_MS, Parcel::GaveUp { node, link });
        if !self.nodes[node].cut {
            self.send_after(0, Parcel::Hello { node, link });
        }
    }

    fn directory(&mut self, input: RegistryInput) {
        let now = self.directory_clock();
        let Some(registry) = &mut self.registry else { return };
        registry.handle(now, input);
        let mut sends = Vec::new();
        while let Some(RegistryOutput::Send { to, message }) = registry.poll() {
            sends.push((to, message));
        }
        for (to, message) in sends {
            let Some(node) = self.nodes.iter().position(|node| node.incarnation == to) else { continue };
            if let Link::Up(link) = self.nodes[node].link
                && !self.nodes[node].cut
            {
                self.send_after(0, Parcel::ToNode { node, link, message });
            }
        }
    }

    fn take(&mut self, parcel: Parcel) {
        match parcel {
            Parcel::Hello { node, link }
                if self.registry.is_some() && self.nodes[node].link == Link::Asking(link) =>
            {
                self.nodes[node].link = Link::Up(link);
                self.send_after(0, Parcel::Linked { node, link });
            }
            Parcel::Linked { node, link } if self.nodes[node].link == Link::Up(link) => {
                self.tell(node, ClientInput::Up);
            }
            Parcel::GaveUp { node, link } if self.nodes[node].link == Link::Asking(link) => {
                self.nodes[node].link = Link::None;
                self.tell(node, ClientInput::Down);
            }
            Parcel::ToDirectory { node, link, message } if self.nodes[node].link == Link::Up(link) => {
                if let Message::Request {
                    request: Request::Register { .. } | Request::Renew { .. }, ..
                } = &message
                {
                    self.asked_at.push(self.now);
                }
                let from = self.nodes[node].incarnation;
                self.directory(RegistryInput::Message { from, message });
            }
            Parcel::ToNode { node, link, message } if self.nodes[node].link == Link::Up(link) => {
                self.tell(node, ClientInput::Message(message));
            }
            Parcel::NodeDown { node, .. } if self.nodes[node].link == Link::None => {
                self.tell(node, ClientInput::Down);
            }
            Parcel::DirectoryDown { node, life, .. } if life == self.life => {
                let linked = matches!(self.nodes[node].link, Link::Up(_));
                let incarnation = self.nodes[node].incarnation;
                if !linked {
                    self.directory(RegistryInput::Gone(incarnation));
                }
            }
            _ => {}
        }
    }

    pub(super) fn step(&mut self) {
        self.now += 1;
        let held_back: Vec<Parcel> = self.held_back.drain(..).collect();
        let later = self.parcels.split_off(&(self.now + 1, 0));
        let due = core::mem::replace(&mut self.parcels, later);
        for parcel in held_back.into_iter().chain(due.into_values()) {
            let stopped = match parcel.taker() {
                None => self.frozen,
                Some(node) if !self.nodes[node].alive => continue,
                Some(node) => self.nodes[node].frozen,
            };
            if stopped {
                self.held_back.push_back(parcel);
            } else {
                self.take(parcel);
            }
        }
        let now = self.directory_clock();
        if !self.frozen && self.registry.as_ref().and_then(Machine::deadline).is_some_and(|at| at <= now) {
            self.directory(RegistryInput::Tick);
        }
        for node in 0..self.nodes.len() {
            let Node { alive, frozen, client, .. } = &self.nodes[node];
            if *alive && !*frozen && client.deadline().is_some_and(|at| at <= self.clock(node)) {
                self.tell(node, ClientInput::Tick);
            }
        }
        self.check();
    }

    /// What must hold at every moment, whatever fails.
    fn check(&mut self) {
        let mut valid: BTreeMap<&LogicalId, usize> = BTreeMap::new();
        for (number, node) in self.nodes.iter().enumerate() {
            if node.client.epoch(self.clock(number)).is_some() {
                *valid.entry(&node.lid).or_default() += 1;
            }
        }
        for (lid, count) in valid {
            assert!(count <= 1, "{count} lives hold {lid} at {} ms", self.now);
        }
        if let Some(registry) = &self.registry {
            for route in registry.routes() {
                let highest = self.highest.entry(route.lid.clone()).or_default();
                assert!(route.epoch >= *highest, "{} went from {highest} back to {}", route.lid, route.epoch);
                *highest = route.epoch;
            }
        }
    }

    pub(super) fn run(&mut self, ms: u64) {
        for _ in 0..ms {
            self.step();
        }
    }

    /// Runs until `done`, and says after how many milliseconds; panics after `most`.
    #[track_caller]
    pub(super) fn run_until(&mut self, most: u64, done: impl Fn(&World) -> bool) -> u64 {
        let start = self.now;
        while !done(self) {
            assert!(self.now - start < most, "not within {most} ms");
            self.step();
        }
        self.now - start
    }

    pub(super) fn live(&self) -> BTreeMap<LogicalId, Incarnation> {
        let serves = |node: &&Node| node.alive && !node.lost() && !node.left();
        self.nodes.iter().filter(serves).map(|node| (node.lid.clone(), node.incarnation)).collect()
    }

    pub(super) fn registered(&self) -> BTreeMap<LogicalId, Incarnation> {
        let routes = self.registry.iter().flat_map(Registry::routes);
        routes.map(|route| (route.lid.clone(), route.incarnation)).collect()
    }

    /// The registry names exactly the live ones, and every watcher knows exactly what the registry knows.
    pub(super) fn is_settled(&self) -> bool {
        let Some(registry) = &self.registry else { return false };
        let truth: BTreeMap<LogicalId, Route> =
            registry.routes().map(|route| (route.lid.clone(), route.clone())).collect();
        self.registered() == self.live()
            && self.nodes.iter().filter(|node| node.alive && !node.frozen && !node.cut).all(|node| {
                let known = node.client.routes().map(|route| (route.lid.clone(), route.clone())).collect();
                truth == known && truth == node.replayed
            })
    }
}
