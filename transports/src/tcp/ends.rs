//! How links end: on purpose from this side, by their peer, or with a connection.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use connex_protocol::wire::hello::Lane as LaneKind;
use connex_protocol::wire::{self, Control, Frame};
use connex_protocol::{Evidence, Incarnation};
use mio::Token;
use tokio::sync::oneshot;

use super::Shared;
use super::driver::{Driver, Phase};
use super::link::{Link, Pending};
use super::reader::{Outcome, Sink};
use crate::{Completion, Event, OpError};

/// How long a connection that was closed on purpose waits for its peer to close too.
const LINGER: Duration = Duration::from_secs(1);

/// How long the control connection may take to follow the bulk one into its end.
const GRACE: Duration = Duration::from_millis(50);

impl Driver {
    pub(super) fn shut_down(&mut self, shared: &Shared, done: oneshot::Sender<()>) {
        if let Some((_, waiting)) = &mut self.closing {
            return waiting.push(done);
        }
        self.listener = None;
        let peers: Vec<Incarnation> =
            shared.peers.read().expect("nothing under this lock panics").keys().copied().collect();
        for peer in peers {
            for link in links_of(shared, peer) {
                self.part(shared, &link, &Control::Goodbye, Evidence::Left);
            }
        }
        self.closing = Some((Instant::now() + LINGER / 2, vec![done]));
    }

    /// Ends a link from this side: a last word, then no more; the sockets close when the peer has read it.
    pub(super) fn part(&mut self, shared: &Shared, link: &Arc<Link>, word: &Control, evidence: Evidence) {
        let frame = wire::encode(link.own, link.peer.incarnation, &Frame::Control(word.clone()));
        let _ = link.control.post(frame, usize::MAX);
        let until = Instant::now() + LINGER;
        for lane in [&link.control, &link.bulk] {
            lane.finish();
            if let Some(conn) = self.conns.get_mut(&lane.token) {
                let sink = std::mem::replace(&mut conn.sink, Sink::Closed);
                conn.phase = Phase::Lingering;
                conn.deadline = Some(until);
                conn.carry.clear();
                self.at(until);
                self.schedule(lane.token);
                self.put_back(link, sink);
            }
        }
        self.end_link(shared, link, evidence);
    }

    /// A read whose bytes were arriving is among its link's operations again.
    fn put_back(&self, link: &Link, sink: Sink) {
        if let Sink::Read { no, pending, .. } = sink {
            link.operations().table.insert(no, pending);
        }
    }

    /// A connection is at its end.
    pub(super) fn conn_ended(&mut self, shared: &Shared, token: Token, evidence: Evidence) {
        let Some(conn) = self.conns.remove(&token) else { return };
        let link = match conn.phase {
            Phase::Up(link) => link,
            Phase::Connecting { dial }
            | Phase::Greeting { dial: Some(dial) }
            | Phase::Half { dial: Some(dial), .. } => {
                return self.dial_lost(shared, dial);
            }
            Phase::Half { dial: None, hello } => {
                self.halves.remove(&(hello.peer.incarnation, hello.link));
                return;
            }
            Phase::Greeting { dial: None } | Phase::Lingering => return,
        };
        conn.lane.close();
        self.put_back(&link, conn.sink);
        let mut evidence = match evidence {
            Evidence::ConnectionClosed if conn.lane.was_reset() => Evidence::ConnectionReset,
            evidence => evidence,
        };
        if evidence == Evidence::ProtocolViolation {
            return self.end_link(shared, &link, evidence);
        }
        // What arrived before the end is still handled: frames, completions, and a goodbye.
        let other = if conn.kind == LaneKind::Control { link.bulk.token } else { link.control.token };
        if let Some(mut last) = self.conns.remove(&other) {
            let outcome = loop {
                match self.read(shared, &mut last) {
                    Outcome::More => {}
                    outcome => break outcome,
                }
            };
            let open = outcome == Outcome::Drained;
            if let Outcome::Ended(Evidence::ConnectionReset) = outcome {
                evidence = Evidence::ConnectionReset;
            }
            if open && last.kind == LaneKind::Control && !link.left.load(Ordering::Acquire) {
                // Its goodbye may be a moment behind.
                let until = Instant::now() + GRACE;
                last.deadline = Some(until);
                self.at(until);
                self.conns.insert(other, last);
                return;
            }
            self.put_back(&link, std::mem::replace(&mut last.sink, Sink::Closed));
        }
        self.end_link(shared, &link, link.evidence(evidence));
    }

    /// Ends a link: its operations complete, then the handler hears of it.
    pub(super) fn end_link(&mut self, shared: &Shared, link: &Arc<Link>, evidence: Evidence) {
        for lane in [&link.control, &link.bulk] {
            let lingers =
                self.conns.get(&lane.token).is_some_and(|conn| matches!(conn.phase, Phase::Lingering));
            if lingers {
                continue;
            }
            if let Some(conn) = self.conns.remove(&lane.token) {
                self.put_back(link, conn.sink);
            }
            lane.close();
        }
        let life = link.peer.incarnation;
        let mut peers = shared.peers.write().expect("nothing under this lock panics");
        let mut known = false;
        let mut others = false;
        if let Some(links) = peers.get_mut(&life) {
            let before = links.len();
            links.retain(|other| !Arc::ptr_eq(other, link));
            known = links.len() < before;
            others = !links.is_empty();
        }
        if known && !others {
            peers.remove(&life);
        }
        drop(peers);
        let pending = link.operations().close();
        for Pending { id, .. } in pending {
            let result = Err(OpError::LinkDown(evidence));
            self.emit(shared, Event::Completed(Completion { id, peer: life, result }));
        }
        let peer = link.peer.clone();
        if known && others {
            self.emit(shared, Event::Relinked { peer });
        } else if known {
            shared.known.lock().expect("nothing under this lock panics").retain(|_, known| *known != life);
            self.emit(shared, Event::Down { peer, evidence });
        }
    }
}

pub(super) fn links_of(shared: &Shared, peer: Incarnation) -> Vec<Arc<Link>> {
    let peers = shared.peers.read().expect("nothing under this lock panics");
    peers.get(&peer).cloned().unwrap_or_default()
}
