use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use connex_protocol::step::{ReceiverInput, SenderInput};
use connex_protocol::wire::hello::Reject;
use connex_protocol::wire::{self, Control, Frame, cutover};
use connex_protocol::{Evidence, Incarnation, Peer};
use connex_transport::{Completion, Event, Handler};

use crate::supervision::LivenessMsg;
use crate::{Core, GroupCell, NodeEvent, ServedCell};

/// The transport's handler: takes each event to the machine that it concerns, on the progress thread.
pub struct Dispatch {
    core: Weak<Core>,
    /// When a refused caller was last told of.
    refused: Mutex<Option<Instant>>,
}

/// Callers that are refused again and again are told of once in this time.
const REFUSED_AGAIN: Duration = Duration::from_secs(1);

impl Dispatch {
    /// A handler for this node.
    pub fn new(core: &Arc<Core>) -> Arc<Self> {
        Arc::new(Dispatch { core: Arc::downgrade(core), refused: Mutex::new(None) })
    }

    fn on_up(&self, core: &Core, peer: Peer) {
        core.link(peer.clone());
        if let Some(cell) = core.find_group(peer.lid.group()) {
            cell.on_up(&peer);
        }
        core.doors().on_link(&peer, true, None);
        core.tell_liveness(LivenessMsg::Up(peer));
    }

    fn on_down(&self, core: &Core, peer: Peer, evidence: Evidence) {
        core.unlink(peer.incarnation);
        if let Some(cell) = core.find_group(peer.lid.group()) {
            cell.on_down(&peer, evidence);
        }
        core.doors().on_link(&peer, false, Some(evidence));
        core.tell_liveness(LivenessMsg::Down(peer));
    }

    fn on_message(&self, core: &Arc<Core>, from: Incarnation, frame: Bytes) {
        let envelope = match wire::decode(frame) {
            Ok(envelope) if envelope.from == from && envelope.to == core.me().incarnation => envelope,
            Ok(_) => {
                tracing::warn!(peer = %from, "a frame names another connection's lives: the session ends");
                core.transport().disconnect(from);
                return;
            }
            Err(error) => {
                tracing::warn!(peer = %from, %error, "a frame could not be read: the session ends");
                core.transport().disconnect(from);
                return;
            }
        };
        match envelope.frame {
            Frame::Step(step) => match core.served() {
                Some(served) => served.drive(ReceiverInput::Step { from, step }),
                None => {
                    tracing::warn!(peer = %from, step = %step.id, "a step for a node that serves nothing")
                }
            },
            Frame::Reply(reply) => to_group(core, from, SenderInput::Reply { from, reply }),
            Frame::Item(item) => to_group(core, from, SenderInput::Item { from, item }),
            Frame::Control(control) => self.on_control(core, from, control),
        }
    }

    fn on_refused(&self, core: &Core, reject: &Reject) {
        let mut refused = self.refused.lock().expect("no holder panics");
        if refused.is_none_or(|at| at.elapsed() >= REFUSED_AGAIN) {
            *refused = Some(Instant::now());
            tracing::warn!(%reject, "a caller was refused");
            core.emit(NodeEvent::CallerRefused { why: reject.to_string() });
        }
    }

    fn on_control(&self, core: &Arc<Core>, from: Incarnation, control: Control) {
        match control {
            Control::Ack { .. }
            | Control::Refetch { .. }
            | Control::Answer { .. }
            | Control::NoticeAck { .. } => {
                to_group(core, from, SenderInput::Control { from, control });
            }
            Control::Cancel { .. } | Control::Ask { .. } | Control::Notice { .. } => {
                let takes = |served: &Arc<ServedCell>| {
                    !matches!(control, Control::Notice { .. }) || served.inbox().takes_notices()
                };
                if let Some(served) = core.served().filter(takes) {
                    served.drive(ReceiverInput::Control { from, control });
                }
            }
            Control::Heartbeat(heartbeat) => {
                if let Some(linked) = core.linked(from)
                    && let Some(cell) = core.find_group(linked.lid.group())
                {
                    cell.on_heartbeat(&linked, heartbeat);
                }
                if core.heard().heartbeat(from, heartbeat) {
                    core.tell_liveness(LivenessMsg::Heard);
                }
            }
            Control::Nudge if core.heard().nudge(from) => core.tell_liveness(LivenessMsg::Heard),
            // It waits with what is already there.
            Control::Nudge => {}
            // The transport ends the link with `Left` on its own; there is nothing to add here.
            Control::Goodbye => {}
            // What follows from it the directory says: that the identity is lost, or held on.
            Control::Fenced => tracing::warn!(peer = %from, "a peer has fenced this life"),
            Control::Directory(message) => core.doors().on_directory(from, message),
            Control::Cutover(message) => self.on_cutover(core, from, message),
        }
    }

    /// A source's word to its submitters concerns its group's mailboxes; the rest is between the two sides.
    fn on_cutover(&self, core: &Core, from: Incarnation, message: cutover::Message) {
        let linked = core.linked(from);
        let cell = linked.as_ref().and_then(|linked| core.find_group(linked.lid.group()));
        match (&message, linked, cell) {
            (cutover::Message::Pausing { .. }, Some(linked), Some(cell)) => cell.on_pausing(&linked),
            (cutover::Message::Pausing { .. }, ..) => {}
            // Every answer in front of it has been taken by now.
            (cutover::Message::Quiet { epoch, fence }, ..) => {
                let seen = cutover::Message::Seen { epoch: *epoch, fence: *fence };
                core.send(from, &Frame::Control(Control::Cutover(seen)));
            }
            (cutover::Message::Abort { .. }, Some(linked), Some(cell)) => {
                cell.on_abort(&linked);
                core.doors().on_cutover(from, message);
            }
            _ => core.doors().on_cutover(from, message),
        }
    }

    fn on_completed(&self, core: &Core, completion: Completion) {
        let Some(fetch) = core.end_fetch(completion.id.0) else { return };
        let payload = match completion.result {
            Ok(buffer) => Some(buffer.freeze()),
            Err(error) => {
                tracing::debug!(step = %fetch.id, %error, "a payload could not be read");
                None
            }
        };
        let input =
            ReceiverInput::Fetched { id: fetch.id, from: fetch.from, attempt: fetch.attempt, payload };
        fetch.served.drive(input);
    }
}

/// A frame about steps that this node submitted: it concerns the group of the life that sent it.
fn to_group(core: &Core, from: Incarnation, input: SenderInput) {
    let cell: Option<Arc<GroupCell>> =
        core.linked(from).and_then(|linked| core.find_group(linked.lid.group()));
    match cell {
        Some(cell) => cell.drive(input),
        None => tracing::debug!(peer = %from, "an answer from a group that is not in use"),
    }
}

impl Handler for Dispatch {
    fn handle(&self, event: Event) {
        let Some(core) = self.core.upgrade() else { return };
        match event {
            Event::Up { peer, epoch: _ } => self.on_up(&core, peer),
            Event::Relinked { peer } => {
                if let Some(cell) = core.find_group(peer.lid.group()) {
                    cell.drive(SenderInput::Relinked(peer.incarnation));
                }
            }
            Event::Down { peer, evidence } => self.on_down(&core, peer, evidence),
            Event::Message { from, lane: _, frame } => self.on_message(&core, from, frame),
            Event::Completed(completion) => self.on_completed(&core, completion),
            Event::Refused { reject } => self.on_refused(&core, &reject),
        }
    }

    fn progress_failed(&self, panic: String) {
        if let Some(core) = self.core.upgrade() {
            core.doors().progress_failed(panic);
        }
    }
}
