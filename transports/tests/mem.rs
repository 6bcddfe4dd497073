//! The verbs that break a [`MemHub`]'s network.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use connex_protocol::wire::RegionKey;
use connex_protocol::wire::hello::Lane;
use connex_protocol::{Address, Evidence, Incarnation};
use connex_transport::conformance::{Recorder, block_on, frame, fresh_incarnation, identity};
use connex_transport::mem::MemConfig;
use connex_transport::{
    ConnectError, MemHub, MemTransport, Op, OpError, OpId, RefusedWhy, Region, RegionSlice, Transport,
};
use std::sync::Arc;

struct Node {
    transport: Arc<MemTransport>,
    seen: Arc<Recorder>,
    life: Incarnation,
}

fn start(hub: &MemHub, name: &str) -> Node {
    let (seen, life) = (Arc::new(Recorder::default()), fresh_incarnation());
    let transport = hub.start(name, identity(name, life), seen.clone()).unwrap();
    Node { transport, seen, life }
}

fn pair() -> (MemHub, Node, Node) {
    let hub =
        MemHub::new(MemConfig { handshake_deadline: Duration::from_millis(50), ..MemConfig::default() });
    let (a, b) = (start(&hub, "a"), start(&hub, "b"));
    block_on(a.transport.connect(&b.transport.local(), Some(b.life))).unwrap();
    (hub, a, b)
}

impl Node {
    fn send(&self, to: Incarnation, seq: u64) -> Result<(), RefusedWhy> {
        let frame = frame(self.life, to, seq, Bytes::new());
        self.transport.post(Op::Message { to, lane: Lane::Control, frame }).map_err(|refused| refused.why)
    }

    fn heard(&self, from: Incarnation) -> Vec<u64> {
        self.seen.look(|seen| seen.steps(from, Lane::Control).into_iter().map(|(seq, _)| seq).collect())
    }

    /// Waits for a frame with this number, and returns the numbers of all.
    fn hear(&self, from: Incarnation, last: u64) -> Vec<u64> {
        let is_last = |steps: Vec<(u64, Bytes)>| steps.last().is_some_and(|(seq, _)| *seq == last);
        self.seen.wait_for("a frame", |seen| is_last(seen.steps(from, Lane::Control)));
        self.heard(from)
    }

    fn read(&self, id: u64, to: Incarnation, deadline: Duration) {
        let from = RegionSlice { key: RegionKey { owner: to, id: 1 }, offset: 0, len: 8 };
        let op = Op::Read { id: OpId(id), to, from, seal: None, crc: None, into: BytesMut::new(), deadline };
        self.transport.post(op).unwrap();
    }
}

#[test]
fn a_cut_swallows_frames_one_way_and_the_link_stays() {
    let (hub, a, b) = pair();
    hub.cut_one_way("a", "b");
    a.send(b.life, 1).unwrap();
    b.send(a.life, 1).unwrap();
    assert_eq!(a.hear(b.life, 1), [1], "the other way is open");
    a.read(1, b.life, Duration::from_millis(20));
    assert_eq!(a.seen.result(OpId(1)), Err(OpError::TimedOut));
    assert_eq!(a.transport.backlog(b.life), 0, "what vanished is not queued");
    hub.heal("a", "b");
    a.send(b.life, 2).unwrap();
    assert_eq!(b.hear(a.life, 2), [2], "what vanished stays lost");
    assert!(a.seen.look(|seen| seen.down(b.life).is_empty()));
}

#[test]
fn nobody_connects_across_a_cut() {
    let (hub, a, _b) = pair();
    let c = start(&hub, "c");
    hub.cut("a", "c");
    let error = block_on(a.transport.connect(&c.transport.local(), None)).unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer { .. }), "{error}");
    hub.heal("a", "c");
    assert!(block_on(a.transport.connect(&c.transport.local(), None)).is_ok());
}

#[test]
fn a_severed_link_is_reset_on_both_sides() {
    let (hub, a, b) = pair();
    hub.sever("b", "a");
    a.seen.wait_for("the reset", |seen| seen.down(b.life) == [Evidence::ConnectionReset]);
    b.seen.wait_for("the reset", |seen| seen.down(a.life) == [Evidence::ConnectionReset]);
    assert_eq!(a.send(b.life, 1), Err(RefusedWhy::NotConnected));
    block_on(a.transport.connect(&b.transport.local(), None)).unwrap();
    a.send(b.life, 2).unwrap();
    b.hear(a.life, 2);
}

#[test]
fn a_delay_holds_frames_back_and_keeps_their_order() {
    let (hub, a, b) = pair();
    let delay = Duration::from_millis(60);
    hub.delay("a", "b", delay);
    let began = Instant::now();
    a.send(b.life, 1).unwrap();
    hub.delay("a", "b", Duration::ZERO);
    a.send(b.life, 2).unwrap();
    assert_eq!(b.hear(a.life, 2), [1, 2], "a shorter delay overtakes nothing");
    assert!(began.elapsed() >= delay);
}

#[test]
fn a_crash_is_closed_connections_and_a_silent_handler() {
    let (hub, a, b) = pair();
    let (old, address) = (b.life, b.transport.local());
    for seq in 0..100 {
        a.send(old, seq).unwrap();
        b.send(a.life, seq).unwrap();
    }
    hub.crash("b");
    let handled = b.seen.look(|seen| seen.events.len());
    a.seen.wait_for("the death", |seen| seen.down(old) == [Evidence::ConnectionClosed]);
    assert_eq!(a.heard(old).len(), 100, "what was sent before the death arrives");
    assert_eq!(b.send(a.life, 1), Err(RefusedWhy::ShutDown));
    let again = start(&hub, "b");
    assert_eq!(block_on(a.transport.connect(&address, None)).unwrap().incarnation, again.life);
    a.send(again.life, 7).unwrap();
    again.hear(a.life, 7);
    assert_eq!(b.seen.look(|seen| seen.events.len()), handled, "the dead one's handler hears nothing more");
}

#[test]
fn a_death_behind_a_cut_shows_when_it_heals() {
    let (hub, a, b) = pair();
    hub.cut("a", "b");
    hub.crash("b");
    a.send(b.life, 1).expect("nothing has told it yet");
    assert!(a.seen.look(|seen| seen.down(b.life).is_empty()));
    hub.heal("a", "b");
    a.seen.wait_for("the reset", |seen| seen.down(b.life) == [Evidence::ConnectionReset]);
}

#[test]
fn a_frozen_node_neither_handles_nor_sends_until_it_thaws() {
    let (hub, a, b) = pair();
    hub.freeze("b");
    a.send(b.life, 1).unwrap();
    b.send(a.life, 1).unwrap();
    a.read(1, b.life, Duration::from_millis(30));
    assert_eq!(a.seen.result(OpId(1)), Err(OpError::TimedOut), "it serves no read");
    assert!(b.heard(a.life).is_empty() && a.heard(b.life).is_empty());
    assert!(a.seen.look(|seen| seen.down(b.life).is_empty()), "its links stay up");
    let stranger = start(&hub, "c");
    let error = block_on(stranger.transport.connect(&b.transport.local(), None)).unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer { .. }), "{error}");
    hub.thaw("b");
    assert_eq!((b.hear(a.life, 1), a.hear(b.life, 1)), (vec![1], vec![1]));
    hub.freeze("b");
    b.send(a.life, 2).unwrap();
    hub.crash("b");
    a.seen.wait_for("the death", |seen| seen.down(b.life) == [Evidence::ConnectionClosed]);
    assert_eq!(a.heard(b.life), [1], "what a stopped process had not sent dies with it");
}

#[test]
fn a_name_is_taken_once_and_free_again_after_its_end() {
    let (hub, a, b) = pair();
    let again = || hub.start("b", identity("b", fresh_incarnation()), Arc::new(Recorder::default()));
    let error = again().err().expect("the name is taken").to_string();
    assert!(error.contains("mem://b"), "{error}");
    block_on(b.transport.shutdown());
    assert!(again().is_ok());
    let nobody = block_on(a.transport.connect(&Address::new("mem://nobody"), None)).unwrap_err();
    assert!(matches!(nobody, ConnectError::Io { .. }), "{nobody}");
}

#[test]
fn the_hub_outlives_its_handle_as_long_as_a_node_is_there() {
    let (hub, a, b) = pair();
    drop(hub);
    a.send(b.life, 1).unwrap();
    b.hear(a.life, 1);
    let region = Arc::new(Region::plain(RegionKey { owner: b.life, id: 1 }, 8));
    region.write(0, &[5; 8]).unwrap();
    block_on(b.transport.register(region)).unwrap();
    a.read(1, b.life, Duration::from_secs(10));
    assert!(a.seen.result(OpId(1)).unwrap() == [5; 8][..]);
}
