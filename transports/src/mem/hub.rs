//! The hub: one lock over the network, and whoever delivers from it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use connex_protocol::wire::hello::Lane;
use connex_protocol::wire::{self, Control, Frame, RegionKey};
use connex_protocol::{Address, Epoch, Evidence, Incarnation};
use tokio::sync::oneshot;

use super::MemConfig;
use super::net::{Answer, Delivery, Item, Net, Node, NodeNo};
use crate::{ConnectError, Handler, Identity, Op, RefusedWhy, Region, RegionError};

pub(super) struct Shared {
    config: MemConfig,
    net: Mutex<Net>,
    /// Something was queued, or a node is no longer being delivered to.
    changed: Condvar,
}

impl Shared {
    pub(super) fn new(config: MemConfig) -> Self {
        Shared { config, net: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Net> {
        self.net.lock().expect("handlers run outside this lock, and nothing under it panics")
    }

    /// Runs `change`, and lets whoever delivers look again.
    fn change<T>(&self, change: impl FnOnce(&mut Net) -> T) -> T {
        let mut net = self.lock();
        let out = change(&mut net);
        drop(net);
        self.changed.notify_all();
        out
    }

    pub(super) fn stop(&self) {
        self.change(|net| net.stop = true);
    }

    /// The hub thread's work: deliver to any node until the hub stops.
    pub(super) fn run(&self) {
        let mut net = self.lock();
        while !net.stop {
            let now = Instant::now();
            if let Some(no) = net.ready(now, None) {
                net = self.deliver_one(net, no, now).0;
                continue;
            }
            net = match net.next_due(None) {
                None => self.changed.wait(net).expect("nothing under this lock panics"),
                Some(due) => {
                    let wait = due.saturating_duration_since(now);
                    self.changed.wait_timeout(net, wait).expect("nothing under this lock panics").0
                }
            };
        }
    }

    pub(super) fn progress(&self, no: NodeNo, wait: Duration) -> bool {
        let until = Instant::now() + wait;
        let mut net = self.lock();
        match net.nodes.get_mut(&no) {
            Some(node) if node.delivering.is_none() && !node.borrowed && !node.failed => node.borrowed = true,
            _ => return false,
        }
        loop {
            let now = Instant::now();
            let mut handled = false;
            while net.ready(now, Some(no)).is_some() {
                let (guard, was_event) = self.deliver_one(net, no, now);
                net = guard;
                handled |= was_event;
            }
            let gone = net.nodes.get(&no).is_none_or(|node| node.failed);
            if handled || gone || now >= until {
                break;
            }
            let wake = net.next_due(Some(no)).map_or(until, |due| due.min(until));
            let wait = wake.saturating_duration_since(now);
            net = self.changed.wait_timeout(net, wait).expect("nothing under this lock panics").0;
        }
        if let Some(node) = net.nodes.get_mut(&no) {
            node.borrowed = false;
        }
        drop(net);
        self.changed.notify_all();
        true
    }

    /// Lets one thing happen at a node that is ready; says whether its handler was called.
    fn deliver_one<'a>(
        &'a self,
        mut net: MutexGuard<'a, Net>,
        no: NodeNo,
        now: Instant,
    ) -> (MutexGuard<'a, Net>, bool) {
        let node = net.nodes.get_mut(&no).expect("a ready node exists");
        let Some(delivery) = node.deliveries.pop_front() else {
            if let Some(due) = node.queue.first_entry().filter(|entry| entry.key().0 <= now) {
                let item = due.remove();
                net.happen(no, item);
            }
            return (net, false);
        };
        let event = match delivery {
            Delivery::Event(event) => event,
            Delivery::Connected(answer, peer) => {
                let _ = answer.send(Ok(peer));
                return (net, false);
            }
            Delivery::Remove(done) => {
                let node = net.remove(no);
                drop(net);
                // Dropped outside the lock: the handler may own transports, whose drop takes it.
                drop(node);
                let _ = done.send(());
                return (self.lock(), false);
            }
        };
        node.delivering = Some(thread::current().id());
        let handler = node.handler.clone();
        drop(net);
        let outcome = catch_unwind(AssertUnwindSafe(|| handler.handle(event)));
        self.change(|net| {
            if let Some(node) = net.nodes.get_mut(&no) {
                node.delivering = None;
                node.failed |= outcome.is_err();
            }
        });
        if let Err(panic) = outcome {
            let text = crate::panic_text(panic.as_ref());
            // A panic in the report itself has nobody left to report to.
            let _ = catch_unwind(AssertUnwindSafe(|| handler.progress_failed(text)));
        }
        drop(handler);
        (self.lock(), true)
    }

    pub(super) fn start(&self, name: &str, identity: Identity, handler: Arc<dyn Handler>) -> Option<NodeNo> {
        let mut net = self.lock();
        if net.names.contains_key(name) {
            return None;
        }
        let no = net.next();
        net.names.insert(name.into(), no);
        net.nodes.insert(no, Node::new(name, identity, handler));
        Some(no)
    }

    pub(super) fn cut(&self, a: &str, b: &str) {
        self.change(|net| net.cuts.insert((a.into(), b.into())));
    }

    pub(super) fn heal(&self, a: &str, b: &str) {
        self.change(|net| {
            net.cuts.remove(&(a.into(), b.into()));
            net.cuts.remove(&(b.into(), a.into()));
            net.reset_half_links(a);
            net.reset_half_links(b);
        });
    }

    pub(super) fn sever(&self, a: &str, b: &str) {
        self.change(|net| {
            let ends: Vec<_> = net
                .nodes
                .iter()
                .flat_map(|(no, node)| node.links.values().map(move |link| (*no, &node.name, link)))
                .filter(|(_, name, link)| (*name == a && link.name == b) || (*name == b && link.name == a))
                .map(|(no, _, link)| (no, link.peer.incarnation))
                .collect();
            for (no, peer) in ends {
                net.end_here(no, peer, Evidence::ConnectionReset);
            }
        });
    }

    pub(super) fn delay(&self, a: &str, b: &str, by: Duration) {
        self.change(|net| {
            for pair in [(a.into(), b.into()), (b.into(), a.into())] {
                if by.is_zero() {
                    net.delays.remove(&pair);
                } else {
                    net.delays.insert(pair, by);
                }
            }
        });
    }

    pub(super) fn crash_name(&self, name: &str) {
        let no = self.lock().names.get(name).copied();
        if let Some(no) = no {
            self.crash(no);
        }
    }

    pub(super) fn crash(&self, no: NodeNo) {
        let mut net = self.lock();
        if let Some(node) = net.nodes.get_mut(&no) {
            node.failed = true;
        }
        // The handler may be running: wait for it, unless this is its own thread.
        let busy = |net: &Net| net.nodes.get(&no).and_then(|node| node.delivering);
        while busy(&net).is_some_and(|thread| thread != thread::current().id()) {
            net = self.changed.wait(net).expect("nothing under this lock panics");
        }
        if let Some(node) = net.nodes.get_mut(&no) {
            // The kernel closes a stopped process's connections too; what its threads had not sent is lost.
            node.frozen = false;
            node.held.clear();
        }
        net.close_links(no, Evidence::ConnectionClosed);
        let node = net.remove(no);
        drop(net);
        self.changed.notify_all();
        // Dropped here: the handler may own transports, whose drop takes the lock.
        drop(node);
    }

    pub(super) fn freeze(&self, name: &str, frozen: bool) {
        self.change(|net| {
            let Some(no) = net.names.get(name).copied() else { return };
            let Some(node) = net.nodes.get_mut(&no) else { return };
            node.frozen = frozen;
            if !frozen {
                for (to, item) in std::mem::take(&mut node.held) {
                    net.send(no, to, item);
                }
            }
        });
    }

    pub(super) fn set_epoch(&self, no: NodeNo, epoch: Epoch) {
        if let Some(node) = self.lock().nodes.get_mut(&no) {
            node.epoch = epoch;
        }
    }

    pub(super) fn connect(
        &self,
        no: NodeNo,
        name: &str,
        address: &Address,
        expects: Option<Incarnation>,
        answer: Answer,
    ) {
        let deadline = Instant::now() + self.config.handshake_deadline;
        self.change(|net| {
            let target = net.names.get(name).copied();
            let dial = net.next();
            let timer = (deadline, net.next());
            let Some(node) = net.nodes.get_mut(&no) else { return };
            let mut known = node.links.values().filter(|link| match expects {
                Some(expects) => link.peer.incarnation == expects,
                None => link.name == name,
            });
            if let Some(link) = known.next() {
                let peer = link.peer.clone();
                // Behind the link's own `Up`, which may not have been handled yet.
                node.deliveries.push_back(Delivery::Connected(answer, peer));
                return;
            }
            let refusal = match target {
                None => Some(ConnectError::Io {
                    address: address.clone(),
                    source: std::io::ErrorKind::ConnectionRefused.into(),
                }),
                Some(target) if target == no => Some(ConnectError::Address {
                    address: address.clone(),
                    why: "this is the process itself".into(),
                }),
                Some(_) => None,
            };
            if let Some(refusal) = refusal {
                let _ = answer.send(Err(refusal));
                return;
            }
            node.dials.insert(dial, (address.clone(), answer));
            node.queue.insert(timer, Item::DialTimeout { dial, waited: self.config.handshake_deadline });
            net.send(no, target.expect("checked above"), Item::Dial { from: no, dial, expects });
        });
    }

    pub(super) fn disconnect(&self, no: NodeNo, peer: Incarnation) {
        self.change(|net| {
            net.tell_end(no, peer, Evidence::Left);
            net.end_here(no, peer, Evidence::Left);
        });
    }

    pub(super) fn fence(&self, no: NodeNo, peer: Incarnation) {
        self.change(|net| {
            let Some(node) = net.nodes.get_mut(&no) else { return };
            node.fenced.insert(peer);
            let Some(link) = node.links.get(&peer) else { return };
            let own = node.identity.peer.incarnation;
            let frame = wire::encode(own, peer, &Frame::Control(Control::Fenced)).to_frame();
            let (to, link) = (link.node, link.id);
            net.send(no, to, Item::Frame { from: no, link, peer: own, lane: Lane::Control, frame });
            net.tell_end(no, peer, Evidence::ConnectionClosed);
            net.end_here(no, peer, Evidence::Superseded);
        });
    }

    pub(super) fn register(&self, no: NodeNo, region: Arc<Region>) -> Result<(), RegionError> {
        if let Some(node) = self.lock().nodes.get_mut(&no) {
            node.regions.insert(region.key().id, region);
        }
        Ok(())
    }

    /// Operations on regions run under the network's lock, so none is under way when this has it.
    pub(super) fn deregister(&self, no: NodeNo, key: RegionKey) {
        if let Some(node) = self.lock().nodes.get_mut(&no) {
            node.regions.remove(&key.id);
        }
    }

    pub(super) fn post(&self, no: NodeNo, op: Op) -> Result<(), (Op, RefusedWhy)> {
        self.change(|net| net.post(no, op, &self.config))
    }

    pub(super) fn failed(&self, no: NodeNo) -> bool {
        self.lock().nodes.get(&no).is_some_and(|node| node.failed)
    }

    pub(super) fn restart(&self, no: NodeNo) {
        self.change(|net| {
            if let Some(node) = net.nodes.get_mut(&no) {
                node.failed = false;
            }
        });
    }

    pub(super) fn backlog(&self, no: NodeNo, peer: Incarnation) -> usize {
        let net = self.lock();
        let link = net.nodes.get(&no).and_then(|node| node.links.get(&peer));
        link.map_or(0, |link| link.queued.iter().sum())
    }

    pub(super) fn shutdown(&self, no: NodeNo, done: oneshot::Sender<()>) {
        let mut removed = None;
        self.change(|net| {
            let key = (Instant::now(), net.next());
            let Some(node) = net.nodes.get_mut(&no) else { return };
            if node.frozen || node.failed {
                net.close_links(no, Evidence::Left);
                removed = net.remove(no);
            } else {
                node.queue.insert(key, Item::Shutdown { done });
            }
        });
        drop(removed);
    }
}
