use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};
use std::time::Duration;

use connex_protocol::detect::DetectConfig;
use connex_protocol::ring::Ring;
use connex_protocol::step::{ReceiverConfig, SenderConfig, SenderInput};
use connex_protocol::wire::directory::{Change, Route};
use connex_protocol::wire::{Control, Frame, RegionKey, directory};
use connex_protocol::{Evidence, Group, Incarnation, LogicalId, Peer, StepId};
use connex_transport::{Region, Transport};
use tokio::sync::{Notify, broadcast};

use crate::served_cell::{self, ServedCell};
use crate::supervision::{Doors, Heard, LivenessMsg};
use crate::{Clock, GroupCell, NodeEvent};

/// A node's limits and habits.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// The sending side of every group; its `k` is this origin's.
    pub sender: SenderConfig,
    /// The receiving side.
    pub receiver: ReceiverConfig,
    /// Payloads up to this many bytes travel in the step's own frame.
    pub inline_max: usize,
    /// The largest payload that is accepted, in bytes.
    pub payload_max: usize,
    /// The registered send ring, in bytes.
    pub ring_bytes: u64,
    /// Payloads in slots carry a CRC-32C.
    pub payload_crc: bool,
    /// How often peers hear from this node.
    pub heartbeat: Duration,
    /// How their silence is judged; its interval is `heartbeat`.
    pub detect: DetectConfig,
    /// After this long without a connection an origin that the directory does not know is gone for good. It has to
    /// outlast what a live origin takes to notice that its side of a link leads nowhere, and to make another.
    pub origin_grace: Duration,
    /// Events that a slow watcher may fall behind before it misses some.
    pub events: usize,
}

impl Default for CoreConfig {
    fn default() -> Self {
        CoreConfig {
            sender: SenderConfig::default(),
            receiver: ReceiverConfig::default(),
            inline_max: 32 << 10,
            payload_max: 256 << 20,
            ring_bytes: 64 << 20,
            payload_crc: true,
            heartbeat: Duration::from_millis(50),
            detect: DetectConfig::default(),
            origin_grace: Duration::from_secs(10),
            events: 1024,
        }
    }
}

impl CoreConfig {
    /// How long the read of a payload may take: a floor, and time for its size at 10 MB/s.
    pub fn fetch_deadline(&self, len: usize) -> Duration {
        Duration::from_secs(5) + Duration::from_micros(len as u64 / 10)
    }
}

/// A read of a payload that is under way.
pub(crate) struct Fetch {
    pub(crate) served: Arc<ServedCell>,
    pub(crate) id: StepId,
    pub(crate) from: Incarnation,
    pub(crate) attempt: u32,
}

/// What a node is: everything that outlives its actors.
pub struct Core {
    weak: Weak<Core>,
    clock: Clock,
    me: Peer,
    config: CoreConfig,
    transport: OnceLock<Arc<dyn Transport>>,
    seq: AtomicU64,
    groups: RwLock<HashMap<Group, Arc<GroupCell>>>,
    served: RwLock<Option<Arc<ServedCell>>>,
    linked: RwLock<HashMap<Incarnation, Peer>>,
    unlinked: Notify,
    routes: RwLock<BTreeMap<LogicalId, Route>>,
    ring: Mutex<Ring>,
    region: Arc<Region>,
    fetches: Mutex<HashMap<u64, Fetch>>,
    next_op: AtomicU64,
    events: broadcast::Sender<NodeEvent>,
    doors: Doors,
    heard: Heard,
    takes_over: AtomicBool,
    submitted: AtomicU64,
    completed: AtomicU64,
    failed: AtomicU64,
}

impl Core {
    /// A node's core, not yet connected to anything.
    pub fn new(me: Peer, config: CoreConfig) -> Arc<Self> {
        let region = Region::slots(RegionKey { owner: me.incarnation, id: 0 }, config.ring_bytes);
        Arc::new_cyclic(|weak| Core {
            weak: weak.clone(),
            clock: Clock::start(),
            me,
            transport: OnceLock::new(),
            seq: AtomicU64::new(0),
            groups: RwLock::default(),
            served: RwLock::default(),
            linked: RwLock::default(),
            unlinked: Notify::new(),
            routes: RwLock::default(),
            ring: Mutex::new(Ring::new(config.ring_bytes)),
            region: Arc::new(region),
            fetches: Mutex::default(),
            next_op: AtomicU64::new(1),
            events: broadcast::Sender::new(config.events),
            doors: Doors::default(),
            heard: Heard::default(),
            takes_over: AtomicBool::new(false),
            submitted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            config,
        })
    }

    /// The node's clock.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Who this node is.
    pub fn me(&self) -> &Peer {
        &self.me
    }

    /// Its limits.
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// Gives the core its transport, once, before anything else is done with it.
    pub fn set_transport(&self, transport: Arc<dyn Transport>) {
        if self.transport.set(transport).is_err() {
            unreachable!("a core is started once");
        }
    }

    /// The transport.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        self.transport.get().expect("the transport is set before the core is used")
    }

    /// The memory that peers read payloads from.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub(crate) fn ring(&self) -> &Mutex<Ring> {
        &self.ring
    }

    /// Where the node's actors and other protocols are reached.
    pub fn doors(&self) -> &Doors {
        &self.doors
    }

    /// The node takes its identity over from a life that hands it over by agreement.
    pub fn take_over(&self) {
        self.takes_over.store(true, Ordering::Relaxed);
    }

    /// Whether the endpoint that begins now is the first of a node that takes over: it lacks its predecessor's state
    /// by plan. One that begins after a failure lacks it by that failure.
    pub(crate) fn begins_taking_over(&self) -> bool {
        self.takes_over.swap(false, Ordering::Relaxed)
    }

    /// Watches what happens from now on.
    pub fn events(&self) -> broadcast::Receiver<NodeEvent> {
        self.events.subscribe()
    }

    /// Tells the watchers.
    pub fn emit(&self, event: NodeEvent) {
        tracing::debug!(?event, "node event");
        // Nobody watching is no fault.
        let _ = self.events.send(event);
    }

    /// A new step's identity.
    pub fn next_step(&self) -> StepId {
        StepId { origin: self.me.incarnation, seq: self.seq.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    pub(crate) fn count_submitted(&self) {
        self.submitted.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_ended(&self, well: bool) {
        let counter = if well { &self.completed } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// This node's own steps since its start: submitted, completed with a reply, ended with an error.
    pub fn step_counts(&self) -> (u64, u64, u64) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (read(&self.submitted), read(&self.completed), read(&self.failed))
    }

    /// The cell of a group, made at its first use. `k` is this node's limit as an origin; `None` at a hop that
    /// forwards other origins' steps.
    pub fn group(&self, group: &Group, k: Option<usize>) -> Arc<GroupCell> {
        if let Some(cell) = self.groups.read().expect("no holder panics").get(group) {
            return cell.clone();
        }
        let cell = {
            let mut groups = self.groups.write().expect("no holder panics");
            if let Some(cell) = groups.get(group) {
                return cell.clone();
            }
            let config = SenderConfig { k, ..self.config.sender.clone() };
            let cell = GroupCell::new(self.weak.clone(), group.clone(), config);
            groups.insert(group.clone(), cell.clone());
            cell
        };
        self.doors.ensure_group(&cell);
        for route in self.routes_of(group) {
            cell.on_route(route);
        }
        cell
    }

    /// Every group that is in use.
    pub fn groups(&self) -> Vec<Arc<GroupCell>> {
        self.groups.read().expect("no holder panics").values().cloned().collect()
    }

    pub(crate) fn find_group(&self, group: &Group) -> Option<Arc<GroupCell>> {
        self.groups.read().expect("no holder panics").get(group).cloned()
    }

    /// Starts to receive steps for this node's own endpoint.
    pub fn serve(&self) -> Arc<ServedCell> {
        let mut served = self.served.write().expect("no holder panics");
        served
            .get_or_insert_with(|| {
                ServedCell::new(self.weak.clone(), self.me.lid.clone(), self.config.receiver.clone())
            })
            .clone()
    }

    /// The served endpoint's cell, if this node serves one.
    pub fn served(&self) -> Option<Arc<ServedCell>> {
        self.served.read().expect("no holder panics").clone()
    }

    /// The node has ended: its engine's thread and its helpers end with it, and what it had submitted ends as an error
    /// (P-1). Whoever still holds the core holds the memory of a node, and no node.
    pub(crate) fn close(&self) {
        self.doors.close();
        if let Some(served) = self.served() {
            served.close();
        }
        for cell in self.groups() {
            cell.close();
        }
    }

    /// Takes the directory's word on a route, in the order in which it was given.
    pub fn on_change(&self, change: Change) {
        match change {
            Change::Put(route) => {
                let before = {
                    let mut routes = self.routes.write().expect("no holder panics");
                    routes.insert(route.lid.clone(), route.clone())
                };
                let before = before.filter(|before| before.incarnation != route.incarnation);
                // The group hears of the successor before the link to its predecessor ends: what is on the old life
                // goes to the new one, as it would not if that end came first.
                if let Some(cell) = self.find_group(route.lid.group()) {
                    cell.on_route(route);
                }
                if let Some(before) = before {
                    self.fence(before.incarnation);
                }
            }
            Change::Remove { lid, incarnation, epoch, evidence } => {
                {
                    let mut routes = self.routes.write().expect("no holder panics");
                    if routes.get(&lid).is_some_and(|route| route.incarnation == incarnation) {
                        routes.remove(&lid);
                    }
                }
                // The group hears why before the link ends, which would be another reason.
                if let Some(cell) = self.find_group(lid.group()) {
                    cell.on_removed(&lid, incarnation, epoch, evidence);
                }
                if evidence != Evidence::Left {
                    self.fence(incarnation);
                }
                self.origin_gone(incarnation);
            }
        }
    }

    /// A life is over: nothing it sends is heard any more, and what it had asked for is finished (P-3).
    fn fence(&self, incarnation: Incarnation) {
        if incarnation == self.me.incarnation {
            return;
        }
        if let Some(transport) = self.transport.get() {
            transport.fence(incarnation);
        }
        self.origin_gone(incarnation);
    }

    /// An origin is finished as a whole (P-3).
    pub fn origin_gone(&self, origin: Incarnation) {
        if origin == self.me.incarnation {
            return;
        }
        if let Some(served) = self.served() {
            served.drive(connex_protocol::step::ReceiverInput::OriginGone(origin));
        }
        for cell in self.groups() {
            cell.drive(SenderInput::OriginGone(origin));
        }
    }

    /// The routes of one group, as last heard from the directory.
    pub fn routes_of(&self, group: &Group) -> Vec<Route> {
        let routes = self.routes.read().expect("no holder panics");
        routes.values().filter(|route| route.lid.group() == group).cloned().collect()
    }

    /// Every known route.
    pub fn routes(&self) -> Vec<Route> {
        self.routes.read().expect("no holder panics").values().cloned().collect()
    }

    /// Sends a frame on the control lane. A refusal is dropped: whoever needs an answer asks again.
    pub fn send(&self, to: Incarnation, frame: &Frame) {
        if let Err(refused) = self.transport().post(served_cell::encode(self, to, frame)) {
            tracing::debug!(peer = %to, why = %refused.why, "a frame was not sent");
        }
    }

    /// Sends a message of the directory's protocol.
    pub fn send_directory(&self, to: Incarnation, message: directory::Message) {
        self.send(to, &Frame::Control(Control::Directory(message)));
    }

    pub(crate) fn begin_fetch(&self, fetch: Fetch) -> u64 {
        let op = self.next_op.fetch_add(1, Ordering::Relaxed);
        self.fetches.lock().expect("no holder panics").insert(op, fetch);
        op
    }

    pub(crate) fn end_fetch(&self, op: u64) -> Option<Fetch> {
        self.fetches.lock().expect("no holder panics").remove(&op)
    }

    pub(crate) fn link(&self, peer: Peer) {
        self.linked.write().expect("no holder panics").insert(peer.incarnation, peer);
    }

    pub(crate) fn unlink(&self, incarnation: Incarnation) {
        self.linked.write().expect("no holder panics").remove(&incarnation);
        self.unlinked.notify_waiters();
    }

    /// Waits until none of these peers is linked any more.
    pub async fn parted_from(&self, peers: &[Peer]) {
        loop {
            let changed = self.unlinked.notified();
            if !peers.iter().any(|peer| self.is_linked(peer.incarnation)) {
                return;
            }
            changed.await;
        }
    }

    pub(crate) fn linked(&self, incarnation: Incarnation) -> Option<Peer> {
        self.linked.read().expect("no holder panics").get(&incarnation).cloned()
    }

    /// Whether a link to this life is up.
    pub fn is_linked(&self, incarnation: Incarnation) -> bool {
        self.linked.read().expect("no holder panics").contains_key(&incarnation)
    }

    /// The peers to which a link is up.
    pub fn peers(&self) -> Vec<Peer> {
        self.linked.read().expect("no holder panics").values().cloned().collect()
    }

    /// What peers have said that the liveness actor has not taken.
    pub(crate) fn heard(&self) -> &Heard {
        &self.heard
    }

    pub(crate) fn tell_liveness(&self, msg: LivenessMsg) {
        self.doors.liveness(msg);
    }
}
