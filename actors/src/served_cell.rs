use std::collections::BTreeSet;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use bytes::{Bytes, BytesMut};
use connex_protocol::step::{Receiver, ReceiverConfig, ReceiverInput, ReceiverOutput};
use connex_protocol::wire::hello::Lane;
use connex_protocol::wire::{self, ErrorCode, Frame, Heartbeat, Outcome, Reply, Seal, Slot, StepError};
use connex_protocol::{Incarnation, Instant, LogicalId, Machine, ReplicaNo, StepId};
use connex_transport::{Op, OpId, RefusedWhy, RegionSlice};
use tokio::sync::watch;

use crate::Core;
use crate::core::Fetch;
use crate::serve::{Busy, Inbox, StepContext, StepFlag, Work};

/// The receiving side of a served endpoint: its machine, and the queue to its engine's thread. It outlives the actor
/// and the thread that serve it.
pub struct ServedCell {
    core: Weak<Core>,
    lid: LogicalId,
    state: Mutex<State>,
    inbox: Arc<Inbox>,
    busy: Busy,
    ready: AtomicBool,
    /// There is an engine, or the first one is being made.
    manned: AtomicBool,
    /// The node has ended: nothing is heard and nothing is answered any more.
    closed: AtomicBool,
    /// Sent `true` when a fence is complete.
    quiet: watch::Sender<bool>,
}

struct State {
    receiver: Receiver,
    flags: HashMap<StepId, Arc<StepFlag>>,
}

impl ServedCell {
    pub(crate) fn new(core: Weak<Core>, lid: LogicalId, config: ReceiverConfig) -> Arc<Self> {
        Arc::new(ServedCell {
            core,
            lid,
            state: Mutex::new(State { receiver: Receiver::new(config), flags: HashMap::new() }),
            inbox: Arc::default(),
            busy: Busy::default(),
            ready: AtomicBool::new(true),
            manned: AtomicBool::new(true),
            closed: AtomicBool::new(false),
            quiet: watch::Sender::new(false),
        })
    }

    /// The endpoint.
    pub fn lid(&self) -> &LogicalId {
        &self.lid
    }

    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// How its work goes, as heartbeats carry it.
    pub fn heartbeat(&self) -> Heartbeat {
        let (accepted, completed) = self.state.lock().expect("no holder panics").receiver.progress();
        let busy_ms = match (self.busy.since(), self.core.upgrade()) {
            (0, _) | (_, None) => 0,
            (since, Some(core)) => {
                let nanos = core.clock().now().as_nanos().saturating_sub(since);
                u32::try_from(nanos / 1_000_000).unwrap_or(u32::MAX)
            }
        };
        Heartbeat { seq: 0, accepted, completed, busy_ms, ready: self.is_ready(), draining: false }
    }

    /// Takes new work.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed) && self.manned.load(Ordering::Relaxed)
    }

    /// Its engine is there; or it could not be made, and what waits for it goes back to its submitters.
    pub(crate) fn set_manned(&self, manned: bool) {
        self.manned.store(manned, Ordering::Relaxed);
        if !manned {
            for step in self.inbox.steps() {
                step.give_back();
            }
        }
    }

    /// The lives whose steps are remembered, and those that sent them.
    pub fn submitters(&self) -> BTreeSet<Incarnation> {
        self.state.lock().expect("no holder panics").receiver.submitters()
    }

    /// Steps executing, here or further down.
    pub fn executing(&self) -> usize {
        self.state.lock().expect("no holder panics").receiver.executing()
    }

    /// Starts nothing more, and waits until nothing executes. What had not begun goes back to its submitters.
    pub async fn fence(self: &Arc<Self>) {
        let mut quiet = self.quiet.subscribe();
        self.quiet.send_replace(false);
        self.ready.store(false, Ordering::Relaxed);
        self.drive(ReceiverInput::Fence);
        // The sender is this cell's own field, so it can't be gone.
        let _ = quiet.wait_for(|quiet| *quiet).await;
    }

    /// Serves again.
    pub fn unfence(self: &Arc<Self>) {
        self.drive(ReceiverInput::Unfence);
        self.ready.store(true, Ordering::Relaxed);
    }

    /// The node has ended. Its steps get no answers from here: their submitters see it go, and move them.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.inbox.close();
    }

    pub(crate) fn now(&self) -> Instant {
        self.core.upgrade().map_or(Instant::ZERO, |core| core.clock().now())
    }

    pub(crate) fn mark_busy(&self) {
        if let Some(core) = self.core.upgrade() {
            self.busy.set(core.clock().now().as_nanos());
        }
    }

    pub(crate) fn mark_idle(&self) {
        self.busy.set(0);
    }

    pub(crate) fn item(self: &Arc<Self>, id: StepId, body: Bytes) {
        self.drive(ReceiverInput::Item { id, body });
    }

    pub(crate) fn done(self: &Arc<Self>, id: StepId, later: &[ReplicaNo], result: Result<Bytes, StepError>) {
        let mut route = Vec::with_capacity(1 + later.len());
        route.push(self.lid.replica());
        route.extend_from_slice(later);
        self.drive(ReceiverInput::Done { id, route, result });
    }

    /// Takes one input and performs what comes of it.
    pub(crate) fn drive(self: &Arc<Self>, input: ReceiverInput) {
        let Some(core) = self.core.upgrade() else { return };
        if self.closed.load(Ordering::SeqCst) {
            return;
        }
        let mut state = self.state.lock().expect("no holder panics");
        if let ReceiverInput::Done { id, .. } = &input {
            state.flags.remove(id);
        }
        state.receiver.handle(core.clock().now(), input);
        while let Some(output) = state.receiver.poll() {
            self.perform(&core, &mut state, output);
        }
    }

    fn perform(self: &Arc<Self>, core: &Arc<Core>, state: &mut State, output: ReceiverOutput) {
        match output {
            ReceiverOutput::Execute(job) => {
                let flag = Arc::new(StepFlag::default());
                state.flags.insert(job.id, flag.clone());
                self.inbox.push(Work::Execute(StepContext::new(job, self.clone(), flag)));
            }
            ReceiverOutput::Abort { id, code } => {
                if let Some(flag) = state.flags.get(&id) {
                    flag.cancel();
                }
                self.inbox.push(Work::Abort(id, code));
            }
            ReceiverOutput::Reply { to, reply } => {
                let id = reply.id;
                answer(core, to, id, &Frame::Reply(reply));
            }
            ReceiverOutput::Item { to, item } => {
                let id = item.id;
                answer(core, to, id, &Frame::Item(item));
            }
            ReceiverOutput::Control { to, control } => core.send(to, &Frame::Control(control)),
            ReceiverOutput::Notice { from, body } => self.inbox.push(Work::Notice(from, body)),
            ReceiverOutput::Forget(origin) => self.inbox.push(Work::Forget(origin)),
            ReceiverOutput::Quiet => {
                self.quiet.send_replace(true);
            }
            ReceiverOutput::Fetch { id, from, attempt, slot, seal } => {
                if !self.fetch(core, id, from, attempt, slot, seal) {
                    let failed = ReceiverInput::Fetched { id, from, attempt, payload: None };
                    state.receiver.handle(core.clock().now(), failed);
                }
            }
        }
    }

    fn fetch(
        self: &Arc<Self>,
        core: &Arc<Core>,
        id: StepId,
        from: Incarnation,
        attempt: u32,
        slot: Slot,
        seal: Seal,
    ) -> bool {
        let limit = core.config().payload_max;
        let Ok(len) = usize::try_from(slot.len) else { return false };
        if len > limit {
            return false;
        }
        let op = core.begin_fetch(Fetch { served: self.clone(), id, from, attempt });
        let read = Op::Read {
            id: OpId(op),
            to: from,
            from: RegionSlice { key: slot.region, offset: slot.offset, len: slot.len },
            seal: Some(seal),
            crc: slot.crc,
            into: BytesMut::with_capacity(len),
            deadline: core.config().fetch_deadline(len),
        };
        let posted = core.transport().post(read).is_ok();
        if !posted {
            core.end_fetch(op);
        }
        posted
    }
}

/// Sends an answer. A refused one is not lost: the submitter asks again, and is answered from the cache. But one that
/// no frame holds is refused every time, so the step ends with that.
fn answer(core: &Core, to: Incarnation, id: StepId, frame: &Frame) {
    let Err(refused) = core.transport().post(encode(core, to, frame)) else { return };
    if refused.why != RefusedWhy::TooLarge {
        return tracing::debug!(peer = %to, step = %id, why = %refused.why, "an answer was not sent");
    }
    let text = "its result is larger than a frame holds: yield it in several items";
    let error = StepError::new(ErrorCode::TooLarge, Outcome::Ran, text);
    core.send(to, &Frame::Reply(Reply { id, route: Vec::new(), items: 0, result: Err(error) }));
}

/// A frame from this node to a peer, encoded.
pub(crate) fn encode(core: &Core, to: Incarnation, frame: &Frame) -> Op {
    Op::Message { to, lane: Lane::Control, frame: wire::encode(core.me().incarnation, to, frame) }
}
