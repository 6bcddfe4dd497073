//! The network's state: nodes, links, and what is in flight between them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use connex_protocol::wire::hello::{Lane, Reject};
use connex_protocol::wire::{self, RegionKey, Seal};
use connex_protocol::{Address, Epoch, Evidence, Incarnation, Peer};
use tokio::sync::oneshot;

use super::MemConfig;
use crate::{
    Completion, ConnectError, Event, Handler, Identity, Op, OpError, OpId, RefusedWhy, Region, RegionError,
    RegionSlice,
};

/// Names a node within its hub; never reused.
pub(super) type NodeNo = u64;

pub(super) type Answer = oneshot::Sender<Result<Peer, ConnectError>>;

#[derive(Default)]
pub(super) struct Net {
    pub(super) nodes: BTreeMap<NodeNo, Node>,
    pub(super) names: HashMap<String, NodeNo>,
    pub(super) cuts: HashSet<(String, String)>,
    pub(super) delays: HashMap<(String, String), Duration>,
    /// Numbers nodes, links, operations and queued items.
    pub(super) counter: u64,
    pub(super) stop: bool,
}

pub(super) struct Node {
    pub(super) name: String,
    pub(super) identity: Identity,
    pub(super) epoch: Epoch,
    pub(super) handler: Arc<dyn Handler>,
    /// What will happen at this node, by the moment it is due and the order of its making.
    pub(super) queue: BTreeMap<(Instant, u64), Item>,
    /// What the handler gets next.
    pub(super) deliveries: VecDeque<Delivery>,
    /// What a frozen node's threads have sent.
    pub(super) held: VecDeque<(NodeNo, Item)>,
    pub(super) frozen: bool,
    pub(super) failed: bool,
    /// Which thread calls the handler just now.
    pub(super) delivering: Option<ThreadId>,
    /// A caller of `progress` waits to deliver: the hub's thread keeps off.
    pub(super) borrowed: bool,
    pub(super) links: HashMap<Incarnation, Link>,
    pub(super) operations: HashMap<u64, Pending>,
    pub(super) dials: HashMap<u64, (Address, Answer)>,
    pub(super) regions: HashMap<u64, Arc<Region>>,
    pub(super) fenced: BTreeSet<Incarnation>,
    /// When the last item from a node is due, so that a shorter delay overtakes nothing.
    pub(super) last_due: HashMap<NodeNo, Instant>,
}

pub(super) struct Link {
    pub(super) id: u64,
    pub(super) peer: Peer,
    pub(super) node: NodeNo,
    pub(super) name: String,
    /// The peer said goodbye.
    pub(super) left: bool,
    /// Bytes of frames on their way to the peer, by lane.
    pub(super) queued: [usize; 2],
}

pub(super) enum Pending {
    Read { id: OpId, peer: Incarnation, into: BytesMut, crc: Option<u32>, timer: (Instant, u64) },
    Write { id: OpId, peer: Incarnation, timer: (Instant, u64) },
}

/// What travels to a node, or waits there for its time.
pub(super) enum Item {
    Dial { from: NodeNo, dial: u64, expects: Option<Incarnation> },
    DialTimeout { dial: u64, waited: Duration },
    Frame { from: NodeNo, link: u64, peer: Incarnation, lane: Lane, frame: Bytes },
    Read { from: NodeNo, peer: Incarnation, op: u64, slice: RegionSlice, seal: Option<Seal> },
    Write { from: NodeNo, peer: Incarnation, op: u64, at: RegionSlice, data: Bytes, signal: Option<Bytes> },
    Done { from: NodeNo, op: u64, result: Result<Bytes, OpError> },
    OpTimeout { op: u64 },
    Ended { from: NodeNo, link: u64, peer: Incarnation, evidence: Evidence },
    Shutdown { done: oneshot::Sender<()> },
}

pub(super) enum Delivery {
    Event(Event),
    Connected(Answer, Peer),
    Remove(oneshot::Sender<()>),
}

fn lane_no(lane: Lane) -> usize {
    match lane {
        Lane::Control => 0,
        Lane::Bulk => 1,
    }
}

impl Net {
    pub(super) fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// A node where something can happen now, and no other thread is at it.
    pub(super) fn ready(&self, now: Instant, only: Option<NodeNo>) -> Option<NodeNo> {
        let can = |node: &Node| {
            node.may_run(only.is_some())
                && (!node.deliveries.is_empty()
                    || node.queue.first_key_value().is_some_and(|((due, _), _)| *due <= now))
        };
        match only {
            Some(no) => self.nodes.get(&no).is_some_and(can).then_some(no),
            None => self.nodes.iter().find(|(_, node)| can(node)).map(|(no, _)| *no),
        }
    }

    pub(super) fn next_due(&self, only: Option<NodeNo>) -> Option<Instant> {
        let due = |node: &Node| {
            let first = node.queue.first_key_value().map(|((due, _), _)| *due);
            first.filter(|_| node.may_run(only.is_some()))
        };
        match only {
            Some(no) => self.nodes.get(&no).and_then(due),
            None => self.nodes.values().filter_map(due).min(),
        }
    }

    fn is_cut(&self, from: &str, to: &str) -> bool {
        !self.cuts.is_empty() && self.cuts.contains(&(from.into(), to.into()))
    }

    /// Puts an item on its way; a cut swallows it, a frozen sender holds it back.
    pub(super) fn send(&mut self, from: NodeNo, to: NodeNo, item: Item) {
        let seq = self.next();
        let Some(sender) = self.nodes.get_mut(&from) else { return };
        if sender.frozen {
            sender.held.push_back((to, item));
            return;
        }
        let from_name = sender.name.clone();
        let linked = sender.links.values().find(|link| link.node == to).map(|link| link.name.clone());
        let to_name =
            linked.or_else(|| self.nodes.get(&to).map(|node| node.name.clone())).unwrap_or_default();
        let pair = (from_name, to_name);
        if self.cuts.contains(&pair) {
            return self.vanish(from, &item);
        }
        let delay = self.delays.get(&pair).copied().unwrap_or_default();
        let Some(receiver) = self.nodes.get_mut(&to) else {
            self.vanish(from, &item);
            return self.reset_half_links(&pair.0);
        };
        let due =
            (Instant::now() + delay).max(receiver.last_due.get(&from).copied().unwrap_or(Instant::now()));
        receiver.last_due.insert(from, due);
        receiver.queue.insert((due, seq), item);
    }

    /// Takes a lost frame off its sender's account.
    fn vanish(&mut self, from: NodeNo, item: &Item) {
        if let Item::Frame { link, lane, frame, .. } = item {
            self.discount(from, *link, *lane, frame.len());
        }
    }

    fn discount(&mut self, from: NodeNo, link: u64, lane: Lane, len: usize) {
        let Some(sender) = self.nodes.get_mut(&from) else { return };
        if let Some(link) = sender.links.values_mut().find(|known| known.id == link) {
            link.queued[lane_no(lane)] = link.queued[lane_no(lane)].saturating_sub(len);
        }
    }

    pub(super) fn post(&mut self, no: NodeNo, op: Op, config: &MemConfig) -> Result<(), (Op, RefusedWhy)> {
        let (wire_op, timer_seq) = (self.next(), self.next());
        let Some(node) = self.nodes.get_mut(&no) else { return Err((op, RefusedWhy::ShutDown)) };
        let (Op::Message { to, .. } | Op::Read { to, .. } | Op::Write { to, .. }) = &op;
        let own = node.identity.peer.incarnation;
        let full = node.operations.len() >= config.operations_max;
        let Some(link) = node.links.get_mut(to) else { return Err((op, RefusedWhy::NotConnected)) };
        let (to_node, link_id) = (link.node, link.id);
        if let Op::Message { lane, frame, .. } = &op {
            let max = if *lane == Lane::Control { config.control_frame_max } else { config.bulk_frame_max };
            let len = frame.len() - wire::LENGTH_PREFIX;
            let queued = &mut link.queued[lane_no(*lane)];
            if len > max {
                return Err((op, RefusedWhy::TooLarge));
            }
            if *queued + len > config.queue_max {
                return Err((op, RefusedWhy::Full));
            }
            *queued += len;
            let item =
                Item::Frame { from: no, link: link_id, peer: own, lane: *lane, frame: frame.to_frame() };
            self.send(no, to_node, item);
            return Ok(());
        }
        if full {
            return Err((op, RefusedWhy::Full));
        }
        let item = match op {
            Op::Read { id, to, from, seal, crc, into, deadline } => {
                let timer = (Instant::now() + deadline, timer_seq);
                node.queue.insert(timer, Item::OpTimeout { op: wire_op });
                node.operations.insert(wire_op, Pending::Read { id, peer: to, into, crc, timer });
                Item::Read { from: no, peer: own, op: wire_op, slice: from, seal }
            }
            Op::Write { id, to, at, data, signal, deadline } => {
                let timer = (Instant::now() + deadline, timer_seq);
                node.queue.insert(timer, Item::OpTimeout { op: wire_op });
                node.operations.insert(wire_op, Pending::Write { id, peer: to, timer });
                let signal = signal.map(|frame| frame.to_frame());
                Item::Write { from: no, peer: own, op: wire_op, at, data, signal }
            }
            Op::Message { .. } => unreachable!("handled above"),
        };
        self.send(no, to_node, item);
        Ok(())
    }

    /// Lets an item happen at a node.
    pub(super) fn happen(&mut self, no: NodeNo, item: Item) {
        let node = self.nodes.get(&no).expect("the caller holds a ready node");
        if let Some(from) = item.sender() {
            let lost = self.nodes.get(&from).is_some_and(|sender| self.is_cut(&sender.name, &node.name));
            if lost {
                return self.vanish(from, &item);
            }
        }
        match item {
            Item::Dial { from, dial, expects } => self.on_dial(no, from, dial, expects),
            Item::DialTimeout { dial, waited } => {
                if let Some((address, answer)) = self.node(no).dials.remove(&dial) {
                    let waited_ms = waited.as_millis() as u64;
                    let _ = answer.send(Err(ConnectError::NoAnswer { address, waited_ms }));
                }
            }
            Item::Frame { from, link, peer, lane, frame } => {
                self.discount(from, link, lane, frame.len());
                let node = self.node(no);
                if let Some(known) = node.links.get_mut(&peer).filter(|known| known.id == link) {
                    known.left |= crate::is_goodbye(&frame);
                    node.deliver(Event::Message { from: peer, lane, frame });
                }
            }
            Item::Read { from, peer, op, slice, seal } => {
                if let Some(node) = self.linked(no, peer) {
                    let result = node
                        .region(slice.key)
                        .and_then(|region| region.read(slice.offset, slice.len, seal).map_err(op_error));
                    self.send(no, from, Item::Done { from: no, op, result });
                }
            }
            Item::Write { from, peer, op, at, data, signal } => {
                if let Some(node) = self.linked(no, peer) {
                    let region = node.region(at.key);
                    let result = region.and_then(|region| region.write(at.offset, &data).map_err(op_error));
                    if let (Ok(()), Some(frame)) = (&result, signal) {
                        node.deliver(Event::Message { from: peer, lane: Lane::Bulk, frame });
                    }
                    self.send(no, from, Item::Done { from: no, op, result: result.map(|()| Bytes::new()) });
                }
            }
            Item::Done { op, result, .. } => self.node(no).complete(op, result),
            Item::OpTimeout { op } => self.node(no).complete(op, Err(OpError::TimedOut)),
            Item::Ended { link, peer, evidence, .. } => {
                if self.node(no).links.get(&peer).is_some_and(|known| known.id == link) {
                    self.node(no).end(peer, evidence);
                }
            }
            Item::Shutdown { done } => {
                let peers = self.close_links(no, Evidence::Left);
                for peer in peers {
                    self.node(no).end(peer, Evidence::Left);
                }
                self.node(no).deliveries.push_back(Delivery::Remove(done));
            }
        }
    }

    fn node(&mut self, no: NodeNo) -> &mut Node {
        self.nodes.get_mut(&no).expect("the caller holds a node that exists")
    }

    /// The node, if it has a link to that life: a request of an ended link is not served.
    fn linked(&mut self, no: NodeNo, peer: Incarnation) -> Option<&mut Node> {
        self.nodes.get_mut(&no).filter(|node| node.links.contains_key(&peer))
    }

    fn on_dial(&mut self, no: NodeNo, from: NodeNo, dial: u64, expects: Option<Incarnation>) {
        let (Some(dialler), Some(node)) = (self.nodes.get(&from), self.nodes.get(&no)) else { return };
        if self.is_cut(&node.name, &dialler.name) {
            return;
        }
        let (us, them) = (node.identity.peer.clone(), dialler.identity.peer.clone());
        let refusal = if node.identity.deployment != dialler.identity.deployment {
            Some(Reject::Deployment { theirs: node.identity.deployment.clone() })
        } else if node.fenced.contains(&them.incarnation) {
            Some(Reject::Fenced)
        } else if expects.is_some_and(|expects| expects != us.incarnation) {
            Some(Reject::Unexpected { found: us.incarnation })
        } else {
            None
        };
        let stranger = dialler.identity.deployment.clone();
        let fenced_there = dialler.fenced.contains(&us.incarnation);
        let linked = node.links.contains_key(&them.incarnation);
        if refusal.is_none() && !fenced_there && !linked {
            let (our_name, our_epoch) = (node.name.clone(), node.epoch);
            let (their_name, their_epoch) = (dialler.name.clone(), dialler.epoch);
            let id = self.next();
            // Both sides at once, so that crossing dials find one link.
            self.node(no).up(Link::new(id, them, from, their_name), their_epoch);
            self.node(from).up(Link::new(id, us.clone(), no, our_name), our_epoch);
        }
        let dialler = self.node(from);
        let Some((address, answer)) = dialler.dials.remove(&dial) else { return };
        if let Some(reject) = refusal {
            let foreign = matches!(reject, Reject::Deployment { .. });
            let _ = answer.send(Err(ConnectError::Rejected { address, reject }));
            if foreign {
                let reject = Reject::Deployment { theirs: stranger };
                self.node(no).deliver(Event::Refused { reject });
            }
        } else if fenced_there {
            let _ = answer.send(Err(ConnectError::Fenced { address, found: us.incarnation }));
        } else {
            dialler.deliveries.push_back(Delivery::Connected(answer, us));
        }
    }

    /// Sends the news of a link's end to its other side.
    pub(super) fn tell_end(&mut self, no: NodeNo, peer: Incarnation, evidence: Evidence) {
        let Some(node) = self.nodes.get(&no) else { return };
        let Some(link) = node.links.get(&peer) else { return };
        let own = node.identity.peer.incarnation;
        let (to, link) = (link.node, link.id);
        self.send(no, to, Item::Ended { from: no, link, peer: own, evidence });
    }

    /// Ends a link on this side.
    pub(super) fn end_here(&mut self, no: NodeNo, peer: Incarnation, evidence: Evidence) {
        if let Some(node) = self.nodes.get_mut(&no) {
            node.end(peer, evidence);
        }
    }

    /// Tells every peer of a node that its link ends, and returns them.
    pub(super) fn close_links(&mut self, no: NodeNo, evidence: Evidence) -> Vec<Incarnation> {
        let Some(node) = self.nodes.get(&no) else { return Vec::new() };
        let peers: Vec<_> = node.links.keys().copied().collect();
        for peer in &peers {
            self.tell_end(no, *peer, evidence);
        }
        peers
    }

    /// Takes a node out of the network; its name is free again.
    pub(super) fn remove(&mut self, no: NodeNo) -> Option<Node> {
        let node = self.nodes.remove(&no)?;
        self.names.retain(|_, known| *known != no);
        for other in self.nodes.values_mut() {
            other.last_due.remove(&no);
        }
        Some(node)
    }

    /// Lets a node notice that peers behind an ended cut are gone: its next packet to them is answered by a reset.
    pub(super) fn reset_half_links(&mut self, name: &str) {
        let Some(no) = self.names.get(name).copied() else { return };
        let Some(node) = self.nodes.get(&no) else { return };
        let gone: Vec<_> = node
            .links
            .values()
            .filter(|link| !self.nodes.contains_key(&link.node) && !self.is_cut(name, &link.name))
            .map(|link| link.peer.incarnation)
            .collect();
        for peer in gone {
            self.end_here(no, peer, Evidence::ConnectionReset);
        }
    }
}

impl Item {
    /// The node that it came from; `None` for a timer.
    fn sender(&self) -> Option<NodeNo> {
        match self {
            Item::Dial { from, .. }
            | Item::Frame { from, .. }
            | Item::Read { from, .. }
            | Item::Write { from, .. }
            | Item::Done { from, .. }
            | Item::Ended { from, .. } => Some(*from),
            Item::DialTimeout { .. } | Item::OpTimeout { .. } | Item::Shutdown { .. } => None,
        }
    }
}

impl Link {
    fn new(id: u64, peer: Peer, node: NodeNo, name: String) -> Self {
        Link { id, peer, node, name, left: false, queued: [0; 2] }
    }
}

impl Node {
    pub(super) fn new(name: &str, identity: Identity, handler: Arc<dyn Handler>) -> Self {
        Node {
            name: name.into(),
            identity,
            epoch: Epoch::default(),
            handler,
            queue: BTreeMap::new(),
            deliveries: VecDeque::new(),
            held: VecDeque::new(),
            frozen: false,
            failed: false,
            delivering: None,
            borrowed: false,
            links: HashMap::new(),
            operations: HashMap::new(),
            dials: HashMap::new(),
            regions: HashMap::new(),
            fenced: BTreeSet::new(),
            last_due: HashMap::new(),
        }
    }

    fn may_run(&self, borrower: bool) -> bool {
        !self.frozen && !self.failed && self.delivering.is_none() && (borrower || !self.borrowed)
    }

    fn deliver(&mut self, event: Event) {
        self.deliveries.push_back(Delivery::Event(event));
    }

    fn up(&mut self, link: Link, epoch: Epoch) {
        let peer = link.peer.clone();
        self.links.insert(peer.incarnation, link);
        self.deliver(Event::Up { peer, epoch });
    }

    fn region(&self, key: RegionKey) -> Result<Arc<Region>, OpError> {
        let known = self.regions.get(&key.id).filter(|region| region.key() == key);
        known.cloned().ok_or(OpError::UnknownRegion)
    }

    /// Ends an operation, once: one that ended before is unknown here.
    fn complete(&mut self, op: u64, result: Result<Bytes, OpError>) {
        let Some(pending) = self.operations.remove(&op) else { return };
        let (id, peer, timer, result) = match pending {
            Pending::Write { id, peer, timer } => (id, peer, timer, result.map(|_| BytesMut::new())),
            Pending::Read { id, peer, mut into, crc, timer } => {
                let result = result.and_then(|bytes| {
                    if crc.is_some_and(|crc| crc32c::crc32c(&bytes) != crc) {
                        return Err(OpError::Checksum);
                    }
                    into.clear();
                    into.extend_from_slice(&bytes);
                    Ok(into)
                });
                (id, peer, timer, result)
            }
        };
        self.queue.remove(&timer);
        self.deliver(Event::Completed(Completion { id, peer, result }));
    }

    /// Ends the link to a peer: its operations first, then the news.
    fn end(&mut self, peer: Incarnation, evidence: Evidence) {
        let Some(link) = self.links.remove(&peer) else { return };
        let mut broken: Vec<u64> =
            self.operations.iter().filter(|(_, op)| op.peer() == peer).map(|(op, _)| *op).collect();
        broken.sort_unstable();
        for op in broken {
            self.complete(op, Err(OpError::LinkDown(evidence)));
        }
        let evidence = if link.left { Evidence::Left } else { evidence };
        self.deliver(Event::Down { peer: link.peer, evidence });
    }
}

impl Pending {
    fn peer(&self) -> Incarnation {
        let (Pending::Read { peer, .. } | Pending::Write { peer, .. }) = self;
        *peer
    }
}

fn op_error(error: RegionError) -> OpError {
    match error {
        RegionError::OutOfBounds => OpError::OutOfBounds,
        RegionError::SealMismatch => OpError::SealMismatch,
        RegionError::Unsupported | RegionError::Full => OpError::UnknownRegion,
    }
}
