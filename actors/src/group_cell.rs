use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use bytes::Bytes;
use connex_protocol::cutover::{Submitter, SubmitterInput, SubmitterOutput};
use connex_protocol::group::{self, GroupInput, GroupOutput};
use connex_protocol::step::{Sender, SenderConfig, SenderInput, SenderOutput, Submission, Target};
use connex_protocol::wire::directory::Route;
use connex_protocol::wire::{ErrorCode, Frame, Heartbeat, Outcome, Payload, Reply, Step, StepError};
use connex_protocol::{
    Address, Epoch, Evidence, Group, Incarnation, Instant, LogicalId, Machine, Peer, ReplicaNo, StepId,
};
use connex_transport::RefusedWhy;
use tokio::sync::Notify;

use crate::send_slots::SendSlots;
use crate::served_cell::encode;
use crate::sink::{StepEnd, StepSink};
use crate::{Core, NodeEvent};

/// One replica as a group sees it.
#[derive(Clone, Debug)]
pub struct ReplicaStatus {
    /// Its endpoint and life.
    pub peer: Peer,
    /// Where it is reached.
    pub address: Address,
    /// May be chosen.
    pub routable: bool,
    /// Unfinished steps that are on it.
    pub steps: usize,
}

/// What an endpoint's actor is to do about its peer.
#[derive(Clone, Debug)]
pub(crate) enum Duty {
    /// Keep a connection to this life at this address.
    Connect { peer: Peer, address: Address },
    /// This life is over or out of reach: end, so that the supervisor hands its steps over.
    Down { peer: Peer, evidence: Evidence },
    /// These steps came to this life by a handover: watch over them until they end.
    Adopt { to: Incarnation, steps: Vec<StepId> },
    /// A step that had moved ended.
    Ended { on: Option<Incarnation>, step: StepId },
}

/// The sending side of one group: its membership, its mailboxes, and who waits for which step. It outlives the
/// actors that supervise it, so that a panic of any of them loses nothing.
pub struct GroupCell {
    core: Weak<Core>,
    group: Group,
    state: Mutex<State>,
    /// When the group's actor will next tick the machines, in nanoseconds; `u64::MAX` when it won't.
    armed: AtomicU64,
    /// Endpoint actors that watch over this group's replicas now.
    endpoints: AtomicUsize,
    /// Rung when a mailbox may have room again.
    room: Notify,
    /// Rung when a replica became routable.
    ready: Notify,
}

struct State {
    /// The node has ended: a step ends as it comes.
    closed: bool,
    sender: Sender<group::Group>,
    sinks: HashMap<StepId, Box<dyn StepSink>>,
    slots: SendSlots,
    /// Steps that moved, and to which life.
    moved: HashMap<StepId, Option<Incarnation>>,
    duties: VecDeque<Duty>,
    joined: HashSet<Incarnation>,
    /// Which mailboxes are held back for a migration.
    submitter: Submitter,
}

impl State {
    fn deadline(&self) -> Option<Instant> {
        [self.sender.deadline(), self.submitter.deadline()].into_iter().flatten().min()
    }
}

impl GroupCell {
    pub(crate) fn new(core: Weak<Core>, group: Group, config: SenderConfig) -> Arc<Self> {
        let me = core.upgrade().map(|core| core.me().incarnation);
        let me = me.expect("a group is made by its node");
        let sender = Sender::new(me, config, group::Group::new(group.clone()));
        Arc::new(GroupCell {
            core,
            group,
            state: Mutex::new(State {
                closed: false,
                sender,
                sinks: HashMap::new(),
                slots: SendSlots::default(),
                moved: HashMap::new(),
                duties: VecDeque::new(),
                joined: HashSet::new(),
                submitter: Submitter::default(),
            }),
            armed: AtomicU64::new(u64::MAX),
            endpoints: AtomicUsize::new(0),
            room: Notify::new(),
            ready: Notify::new(),
        })
    }

    /// The group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Submits a step; its items and its end go to `sink`. Handed back when there is no room for it.
    pub fn submit(
        &self,
        submission: Submission,
        sink: Box<dyn StepSink>,
    ) -> Result<(), (Submission, Box<dyn StepSink>)> {
        let Some(core) = self.core.upgrade() else { return Err((submission, sink)) };
        let id = submission.id;
        let mut state = self.state.lock().expect("no holder panics");
        if state.closed {
            drop(state);
            sink.done(ended(Outcome::NotStarted));
            return Ok(());
        }
        state.sinks.insert(id, sink);
        let mut refused = None;
        self.run(&core, &mut state, SenderInput::Submit(submission), &mut refused);
        match refused {
            None => {
                if id.origin == core.me().incarnation {
                    core.count_submitted();
                }
                Ok(())
            }
            Some(submission) => {
                let sink = state.sinks.remove(&id).expect("it was just put there");
                Err((submission, sink))
            }
        }
    }

    /// Submits an own step under a fresh number, which is drawn under the group's lock so that numbers and order of
    /// submission agree.
    pub fn submit_own(
        &self,
        make: impl FnOnce(StepId) -> Submission,
        sink: Box<dyn StepSink>,
    ) -> Result<StepId, (Submission, Box<dyn StepSink>)> {
        let core = self.core.upgrade().expect("the node outlives its submitters");
        let mut state = self.state.lock().expect("no holder panics");
        if state.closed {
            drop(state);
            sink.done(ended(Outcome::NotStarted));
            return Ok(core.next_step());
        }
        let submission = make(core.next_step());
        let id = submission.id;
        state.sinks.insert(id, sink);
        let mut refused = None;
        self.run(&core, &mut state, SenderInput::Submit(submission), &mut refused);
        match refused {
            None => {
                core.count_submitted();
                Ok(id)
            }
            Some(submission) => {
                let sink = state.sinks.remove(&id).expect("it was just put there");
                Err((submission, sink))
            }
        }
    }

    /// The node has ended: so does every step of this group that has not, and every later one.
    pub(crate) fn close(&self) {
        let Some(core) = self.core.upgrade() else { return };
        let mut state = self.state.lock().expect("no holder panics");
        let sinks = std::mem::take(&mut state.sinks);
        // What is forwarded for others is not this node's to cancel: the hop in front moves it (P-8).
        for id in sinks.keys().filter(|id| id.origin == core.me().incarnation) {
            self.run(&core, &mut state, SenderInput::Cancel(*id), &mut None);
        }
        state.closed = true;
        drop(state);
        // Outside the lock: a step's end may be another step's beginning.
        for sink in sinks.into_values() {
            sink.done(ended(Outcome::MayHaveRun));
        }
        self.room.notify_waiters();
        self.ready.notify_waiters();
    }

    /// Waits until the mailbox may have room, or the node has ended.
    pub async fn room(&self) {
        let notified = self.room.notified();
        {
            let state = self.state.lock().expect("no holder panics");
            if state.closed || state.sender.has_room() {
                return;
            }
        }
        notified.await;
    }

    /// Waits until a replica can take a step, or the node has ended: a step that is submitted then ends at once.
    pub async fn ready(&self) {
        loop {
            let notified = self.ready.notified();
            {
                let state = self.state.lock().expect("no holder panics");
                if state.closed || !state.joined.is_empty() {
                    return;
                }
            }
            notified.await;
        }
    }

    /// Whether a replica can take a step now.
    pub fn is_ready(&self) -> bool {
        !self.state.lock().expect("no holder panics").joined.is_empty()
    }

    /// Endpoint actors that watch over this group's replicas now.
    pub fn endpoints(&self) -> usize {
        self.endpoints.load(Ordering::Relaxed)
    }

    pub(crate) fn set_endpoints(&self, count: usize) {
        self.endpoints.store(count, Ordering::Relaxed);
    }

    /// Accepted steps that have not ended.
    pub fn unfinished(&self) -> usize {
        self.state.lock().expect("no holder panics").sender.unfinished()
    }

    /// The replicas, as this group sees them.
    pub fn replicas(&self) -> Vec<ReplicaStatus> {
        let state = self.state.lock().expect("no holder panics");
        let members = state.sender.choose().members();
        members
            .into_iter()
            .map(|member| ReplicaStatus {
                routable: state.joined.contains(&member.peer.incarnation),
                steps: state.sender.on_replica(member.peer.lid.replica()),
                address: member.address,
                peer: member.peer,
            })
            .collect()
    }

    /// Takes one input and performs what comes of it.
    pub fn drive(&self, input: SenderInput) {
        let Some(core) = self.core.upgrade() else { return };
        let mut state = self.state.lock().expect("no holder panics");
        self.run(&core, &mut state, input, &mut None);
    }

    /// Sends a word to the application of a replica's present life; it is sent again until acknowledged.
    pub fn notice(&self, replica: ReplicaNo, body: Bytes) {
        let lid = self.group.replica(replica);
        let current = {
            let state = self.state.lock().expect("no holder panics");
            state.sender.choose().current(&lid)
        };
        // The state of a life that is gone needs no word.
        if let Some(peer) = current {
            let to = Target { replica, incarnation: peer.incarnation };
            self.drive(SenderInput::Notice { to, body });
        }
    }

    /// The directory's word on a replica.
    pub(crate) fn on_route(&self, route: Route) {
        let current = || self.state.lock().expect("no holder panics").sender.choose().current(&route.lid);
        let before = current();
        self.tell_group(GroupInput::Route(route.clone()));
        // The group does not take a word that comes late, as one may that was read while a newer one was given.
        let taken = current().is_some_and(|now| now.incarnation == route.incarnation);
        if let Some(old) = before.filter(|old| taken && old.incarnation != route.incarnation) {
            self.on_superseded(&old, &route);
        }
    }

    /// The directory says that a life is over.
    pub(crate) fn on_removed(
        &self,
        lid: &LogicalId,
        incarnation: Incarnation,
        epoch: Epoch,
        evidence: Evidence,
    ) {
        self.tell_group(GroupInput::Removed { lid: lid.clone(), incarnation, epoch, evidence });
        self.owe(Duty::Down { peer: Peer { lid: lid.clone(), incarnation }, evidence });
    }

    pub(crate) fn on_up(&self, peer: &Peer) {
        self.tell_group(GroupInput::Up { incarnation: peer.incarnation });
    }

    pub(crate) fn on_down(&self, peer: &Peer, evidence: Evidence) {
        self.tell_group(GroupInput::Down { incarnation: peer.incarnation, evidence });
        self.owe(Duty::Down { peer: peer.clone(), evidence });
    }

    pub(crate) fn on_heartbeat(&self, peer: &Peer, heartbeat: Heartbeat) {
        self.tell_group(GroupInput::Heartbeat { incarnation: peer.incarnation, heartbeat });
    }

    pub(crate) fn on_suspect(&self, peer: &Peer, evidence: Evidence) {
        self.tell_group(GroupInput::Suspected { incarnation: peer.incarnation, evidence });
        self.emit(NodeEvent::Suspected { peer: peer.clone(), evidence });
    }

    pub(crate) fn on_cleared(&self, peer: &Peer) {
        self.tell_group(GroupInput::Cleared { incarnation: peer.incarnation });
        // It may have been given up for its silence although its link never ended.
        if self.core.upgrade().is_some_and(|core| core.is_linked(peer.incarnation)) {
            self.tell_group(GroupInput::Up { incarnation: peer.incarnation });
        }
        self.emit(NodeEvent::Cleared { peer: peer.clone() });
    }

    /// The identity moves to a new life: what is on the old one goes there, and nothing else is disturbed.
    fn on_superseded(&self, old: &Peer, route: &Route) {
        // While what is newer is still held back: all of it is sent in one order.
        let from = Target { replica: old.lid.replica(), incarnation: old.incarnation };
        self.drive(SenderInput::Handover { from, evidence: Evidence::Superseded });
        self.tell_submitter(SubmitterInput::Moved { replica: old.lid.replica(), to: route.incarnation });
        let mut state = self.state.lock().expect("no holder panics");
        state.joined.remove(&old.incarnation);
        drop(state);
        self.owe(Duty::Down { peer: old.clone(), evidence: Evidence::Superseded });
    }

    /// The source of a migration asks that what is for it be held back.
    pub(crate) fn on_pausing(&self, source: &Peer) {
        let holder = self.state.lock().expect("no holder panics").sender.choose().current(&source.lid);
        self.tell_submitter(SubmitterInput::Pausing {
            from: source.incarnation,
            replica: source.lid.replica(),
            holder: holder.map(|peer| peer.incarnation),
        });
    }

    /// The source called the migration off.
    pub(crate) fn on_abort(&self, source: &Peer) {
        let (from, replica) = (source.incarnation, source.lid.replica());
        self.tell_submitter(SubmitterInput::Abort { from, replica });
    }

    fn tell_submitter(&self, input: SubmitterInput) {
        let Some(core) = self.core.upgrade() else { return };
        let mut state = self.state.lock().expect("no holder panics");
        self.run_submitter(&core, &mut state, input);
    }

    fn run_submitter(&self, core: &Core, state: &mut State, input: SubmitterInput) {
        state.submitter.handle(core.clock().now(), input);
        while let Some(output) = state.submitter.poll() {
            match output {
                SubmitterOutput::Pause(replica) => {
                    self.run(core, state, SenderInput::Pause(replica), &mut None);
                }
                SubmitterOutput::Resume { replica, moved } => {
                    self.run(core, state, SenderInput::Resume(replica), &mut None);
                    let lid = self.group.replica(replica);
                    if let (Some((from, paused)), Some(to)) = (moved, state.sender.choose().current(&lid)) {
                        core.emit(NodeEvent::Migrated { lid, from, to: to.incarnation, paused });
                    }
                }
            }
        }
        self.arm(core, state);
    }

    /// Moves what is on a life that ended, and says how long it took since `reported`.
    pub(crate) fn hand_over(&self, peer: &Peer, evidence: Evidence) {
        let from = Target { replica: peer.lid.replica(), incarnation: peer.incarnation };
        self.drive(SenderInput::Handover { from, evidence });
        // The source of a migration died in it: nothing is to be waited for. What was held back has moved by now, and is
        // not sent to the dead.
        self.tell_submitter(SubmitterInput::Down(peer.incarnation));
    }

    /// The lives that hold unfinished steps and are not linked: what an actor that starts anew has to hand over.
    pub(crate) fn orphaned(&self) -> Vec<Peer> {
        let Some(core) = self.core.upgrade() else { return Vec::new() };
        let targets = self.state.lock().expect("no holder panics").sender.targets();
        targets
            .into_iter()
            .filter(|target| !core.is_linked(target.incarnation))
            .map(|target| Peer { lid: self.group.replica(target.replica), incarnation: target.incarnation })
            .collect()
    }

    /// Takes what the group's actor is to do.
    pub(crate) fn duties(&self) -> Vec<Duty> {
        self.state.lock().expect("no holder panics").duties.drain(..).collect()
    }

    /// The connections that this group wants, for an actor that starts anew.
    pub(crate) fn wanted(&self) -> Vec<(Peer, Address)> {
        let state = self.state.lock().expect("no holder panics");
        state.sender.choose().members().into_iter().map(|member| (member.peer, member.address)).collect()
    }

    /// Ticks the machines if it is time, and says when to come again.
    pub(crate) fn tick(&self) -> Option<Instant> {
        let core = self.core.upgrade()?;
        let mut state = self.state.lock().expect("no holder panics");
        let now = core.clock().now();
        if state.submitter.deadline().is_some_and(|at| at <= now) {
            self.run_submitter(&core, &mut state, SubmitterInput::Tick);
        }
        if state.sender.deadline().is_some_and(|at| at <= now) {
            self.run(&core, &mut state, SenderInput::Tick, &mut None);
        }
        let next = state.deadline();
        self.armed.store(next.map_or(u64::MAX, Instant::as_nanos), Ordering::Relaxed);
        next
    }

    fn emit(&self, event: NodeEvent) {
        if let Some(core) = self.core.upgrade() {
            core.emit(event);
        }
    }

    fn owe(&self, duty: Duty) {
        self.state.lock().expect("no holder panics").duties.push_back(duty);
        if let Some(core) = self.core.upgrade() {
            core.doors().group_duty(&self.group);
        }
    }

    fn tell_group(&self, input: GroupInput) {
        let Some(core) = self.core.upgrade() else { return };
        let mut state = self.state.lock().expect("no holder panics");
        let now = core.clock().now();
        state.sender.choose_mut().handle(now, input);
        let (mut changed, mut owed) = (false, false);
        let mut ready = Vec::new();
        while let Some(output) = state.sender.choose_mut().poll() {
            match output {
                GroupOutput::Connect { peer, address } => {
                    state.duties.push_back(Duty::Connect { peer, address });
                    owed = true;
                }
                GroupOutput::Routable { peer, epoch } => {
                    changed = true;
                    ready.push(peer.clone());
                    if state.joined.insert(peer.incarnation) {
                        core.emit(NodeEvent::Joined { peer, epoch });
                    }
                }
                GroupOutput::Unroutable { peer, evidence } => {
                    if state.joined.remove(&peer.incarnation)
                        && let Some(evidence) = evidence
                    {
                        core.emit(NodeEvent::Down { peer, evidence });
                    }
                }
            }
        }
        for peer in ready {
            let (from, replica) = (peer.incarnation, peer.lid.replica());
            self.run_submitter(&core, &mut state, SubmitterInput::Ready { from, replica });
        }
        if changed {
            self.ready.notify_waiters();
            self.run(&core, &mut state, SenderInput::Pump, &mut None);
        }
        drop(state);
        if owed {
            core.doors().group_duty(&self.group);
        }
    }

    /// Drives the sender and performs its outputs, in order, under the lock.
    fn run(&self, core: &Core, state: &mut State, input: SenderInput, refused: &mut Option<Submission>) {
        let started = core.clock().now();
        if state.closed {
            return;
        }
        let had_room = state.sender.has_room();
        state.sender.handle(started, input);
        while let Some(output) = state.sender.poll() {
            match output {
                SenderOutput::Send { to, step } => self.send(core, state, to, step),
                SenderOutput::Control { to, control } => core.send(to, &Frame::Control(control)),
                SenderOutput::Item { id, body } => {
                    if let Some(sink) = state.sinks.get_mut(&id) {
                        sink.item(body);
                    }
                }
                SenderOutput::Done { id, route, result } => {
                    if let Some(on) = state.moved.remove(&id) {
                        state.duties.push_back(Duty::Ended { on, step: id });
                        core.doors().group_duty(&self.group);
                    }
                    if id.origin == core.me().incarnation {
                        core.count_ended(result.is_ok());
                    }
                    if let Some(sink) = state.sinks.remove(&id) {
                        sink.done(StepEnd { route, result });
                    }
                }
                SenderOutput::Refused(submission) => *refused = Some(submission),
                SenderOutput::Release { id, attempt } => state.slots.release(core, id, attempt),
                SenderOutput::HandedOver { from, to, steps, evidence } => {
                    let now = core.clock().now();
                    let on = to.map(|to| to.incarnation);
                    state.moved.extend(steps.iter().map(|id| (*id, on)));
                    if let Some(to) = on {
                        state.duties.push_back(Duty::Adopt { to, steps: steps.clone() });
                        core.doors().group_duty(&self.group);
                    }
                    let peer = |target: Target| Peer {
                        lid: self.group.replica(target.replica),
                        incarnation: target.incarnation,
                    };
                    core.emit(NodeEvent::HandedOver {
                        from: peer(from),
                        to: to.map(peer),
                        steps,
                        evidence,
                        took: now.since(started),
                    });
                }
            }
        }
        if !had_room && state.sender.has_room() {
            self.room.notify_waiters();
        }
        self.arm(core, state);
    }

    /// Has the group's actor look at the clock again if something is due earlier than it knows.
    fn arm(&self, core: &Core, state: &State) {
        let next = state.deadline().map_or(u64::MAX, Instant::as_nanos);
        if next < self.armed.load(Ordering::Relaxed) {
            self.armed.store(next, Ordering::Relaxed);
            core.doors().group_duty(&self.group);
        }
    }

    fn send(&self, core: &Core, state: &mut State, to: Target, mut step: Step) {
        let (id, attempt) = (step.id, step.attempt);
        if let Payload::Inline(payload) = &step.payload
            && payload.len() > core.config().inline_max
        {
            match state.slots.publish(core, to.incarnation, (id, attempt), payload) {
                Some(slot) => step.payload = Payload::Slot(slot),
                None => {
                    // The ring is full: the step keeps its place and is tried again.
                    let now = core.clock().now();
                    state.sender.handle(now, SenderInput::Unsent { id, attempt });
                    return;
                }
            }
        }
        if let Err(refused) = core.transport().post(encode(core, to.incarnation, &Frame::Step(step))) {
            tracing::debug!(step = %id, why = %refused.why, "a step was not sent");
            state.slots.release(core, id, attempt);
            let again = match refused.why {
                // Nor does it the next time: the step ends as if the replica had said so.
                RefusedWhy::TooLarge => {
                    let text =
                        "its metadata, or the items that it is to go on after, are more than a frame holds";
                    let error = StepError::new(ErrorCode::TooLarge, Outcome::NotStarted, text);
                    let reply = Reply { id, route: Vec::new(), items: 0, result: Err(error) };
                    SenderInput::Reply { from: to.incarnation, reply }
                }
                _ => SenderInput::Unsent { id, attempt },
            };
            state.sender.handle(core.clock().now(), again);
        }
    }

    /// How long the group's actor may sleep before it ticks.
    pub(crate) fn next_tick(&self, now: Instant) -> Option<Duration> {
        match self.armed.load(Ordering::Relaxed) {
            u64::MAX => None,
            nanos => Some(Instant::from_nanos(nanos).since(now)),
        }
    }
}

/// How a step ends whose node does.
fn ended(outcome: Outcome) -> StepEnd {
    let text = "the node was shut down before the step's end";
    StepEnd { route: Vec::new(), result: Err(StepError::new(ErrorCode::Internal, outcome, text)) }
}

#[cfg(test)]
mod tests;
