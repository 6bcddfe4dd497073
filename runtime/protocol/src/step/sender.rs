use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use bytes::Bytes;

use crate::wire::{Completed, Control, ErrorCode, Item, Outcome, Payload, Reply, Step, StepError, StepState};
use crate::{Evidence, Incarnation, Instant, Machine, ReplicaNo, StepId};

/// A frame names at most this many finished steps above the lowest unfinished one; the rest are named later.
const COMPLETED_ABOVE_MAX: usize = 64;

/// One life of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// The replica.
    pub replica: ReplicaNo,
    /// Its life.
    pub incarnation: Incarnation,
}

/// Picks replicas for a [`Sender`]; the group machine is one.
pub trait Choose {
    /// A routable replica: the preferred one if it is routable, never the one to avoid unless it is the only one.
    fn pick(&mut self, prefer: Option<ReplicaNo>, avoid: Option<ReplicaNo>) -> Option<Target>;
    /// A step was placed on the replica.
    fn started(&mut self, target: Target);
    /// A step left the replica.
    fn finished(&mut self, target: Target);
}

/// The limits of a sender.
#[derive(Clone, Debug)]
pub struct SenderConfig {
    /// Unfinished steps of this origin that may be placed at once (P-4); `None` at a hop that forwards for others.
    pub k: Option<usize>,
    /// Steps that may be accepted and unfinished at once.
    pub mailbox: usize,
    /// How many own steps of this group a step may run ahead of the lowest unfinished one: receivers remember no more.
    pub window: u64,
    /// After this long without a word on a step that was sent, its replica is asked (P-11).
    pub ask_after: Duration,
    /// How long an answer is waited for once a deadline has passed.
    pub ask_grace: Duration,
    /// After this long without a routable replica a step fails as unavailable.
    pub unavailable_after: Duration,
    /// How soon a refused send is tried again.
    pub retry_after: Duration,
    /// How often one step may be moved or sent again before it fails.
    pub attempts: u32,
    /// The bytes of items that one streaming step may bring.
    pub items_bytes: usize,
}

impl Default for SenderConfig {
    fn default() -> Self {
        SenderConfig {
            k: Some(4),
            mailbox: 1024,
            window: 1024,
            ask_after: Duration::from_secs(1),
            ask_grace: Duration::from_millis(250),
            unavailable_after: Duration::from_secs(30),
            retry_after: Duration::from_millis(1),
            attempts: 64,
            items_bytes: 64 << 20,
        }
    }
}

/// What to do with a submission for which there is no credit now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It waits in the mailbox; a full mailbox hands it back.
    Wait,
    /// It is handed back.
    Refuse,
}

/// A step to be submitted.
#[derive(Clone, Debug)]
pub struct Submission {
    /// Its identity.
    pub id: StepId,
    /// The replica to prefer at this group, then at each later stage.
    pub route: Vec<ReplicaNo>,
    /// For another origin's step, what that origin has said to be finished; `None` for one's own.
    pub completed: Option<Completed>,
    /// When it ends as [`ErrorCode::DeadlineExceeded`].
    pub deadline: Option<Instant>,
    /// It yields items.
    pub streaming: bool,
    /// Items that its submitter already has.
    pub resume: Vec<Bytes>,
    /// The application's metadata.
    pub meta: Bytes,
    /// The payload, immutable until the step's end (P-6).
    pub payload: Bytes,
    /// What to do without credit.
    pub when_full: WhenFull,
}

/// What happens to a sender.
#[derive(Clone, Debug)]
pub enum SenderInput {
    /// A new step.
    Submit(Submission),
    /// The group's routable set changed, or a pause ended: try to place what waits.
    Pump,
    /// A life of a replica is over or out of reach: its unfinished steps move (P-8).
    Handover {
        /// Whose steps.
        from: Target,
        /// On what evidence.
        evidence: Evidence,
    },
    /// One of two links to this life was lost: what is unanswered there is sent again.
    Relinked(Incarnation),
    /// Hold back what is queued for this replica (a migration's fence).
    Pause(ReplicaNo),
    /// The pause is over.
    Resume(ReplicaNo),
    /// A reply.
    Reply {
        /// From which life.
        from: Incarnation,
        /// The reply.
        reply: Reply,
    },
    /// An item of a streaming step.
    Item {
        /// From which life.
        from: Incarnation,
        /// The item.
        item: Item,
    },
    /// Acks, answers and the like; others are ignored.
    Control {
        /// From which life.
        from: Incarnation,
        /// The message.
        control: Control,
    },
    /// The driver could not send this attempt now (a full queue, a full ring, no link).
    Unsent {
        /// The step.
        id: StepId,
        /// The attempt.
        attempt: u32,
    },
    /// The submitter no longer wants the step (P-12).
    Cancel(StepId),
    /// Every step of this origin is finished: it is gone for good (P-3).
    OriginGone(Incarnation),
    /// A word to the replica's application, delivered at least while that life lasts.
    Notice {
        /// To which life.
        to: Target,
        /// The application's bytes.
        body: Bytes,
    },
    /// Time passed.
    Tick,
}

/// What a sender wants done.
#[derive(Clone, Debug)]
pub enum SenderOutput {
    /// Send this step. The payload is inline; the driver may put it into a slot.
    Send {
        /// To whom.
        to: Target,
        /// The step.
        step: Step,
    },
    /// Send this message.
    Control {
        /// To whom.
        to: Incarnation,
        /// The message.
        control: Control,
    },
    /// The next item of a streaming step, each once and in order.
    Item {
        /// The step.
        id: StepId,
        /// The item.
        body: Bytes,
    },
    /// The step ended (P-1), exactly once.
    Done {
        /// The step.
        id: StepId,
        /// The replicas that served it, from this group on; empty if none did.
        route: Vec<ReplicaNo>,
        /// How it ended.
        result: Result<Bytes, StepError>,
    },
    /// There was no room: here it is back.
    Refused(Submission),
    /// The slot of this attempt may be reused.
    Release {
        /// The step.
        id: StepId,
        /// Every attempt up to this one.
        attempt: u32,
    },
    /// Steps moved.
    HandedOver {
        /// From which life.
        from: Target,
        /// To which life; `None` while there is no successor.
        to: Option<Target>,
        /// Which, in order.
        steps: Vec<StepId>,
        /// On what evidence.
        evidence: Evidence,
    },
}

#[derive(Clone, Debug)]
struct Entry {
    order: u64,
    own: bool,
    route: Vec<ReplicaNo>,
    deadline: Option<Instant>,
    streaming: bool,
    items: Vec<Bytes>,
    items_bytes: usize,
    meta: Bytes,
    payload: Bytes,
    place: Place,
    attempt: u32,
    moves: u32,
    /// A replica may have begun it.
    may_have_run: bool,
    avoid: Option<ReplicaNo>,
    /// This life gave it back; it is not offered to it again unless it resumes.
    refused_by: Option<Incarnation>,
    /// When this step next needs a look: a question to its replica, or its end for want of one.
    look: Instant,
    /// Its deadline passed and its replica was asked.
    expiring: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Waiting,
    Queued(Target),
    Sent(Target),
}

#[derive(Clone, Debug, Default)]
struct Mailbox {
    incarnation: Option<Incarnation>,
    paused: bool,
    /// The last send was refused: nothing more goes out before the retry.
    blocked: bool,
    notices: VecDeque<(u64, Bytes)>,
    notice_seq: u64,
    notices_sent: u64,
}

/// The upstream side of a hop: accepted, unfinished steps of one group, and where each of them is.
#[derive(Clone, Debug)]
pub struct Sender<C> {
    config: SenderConfig,
    me: Incarnation,
    choose: C,
    entries: BTreeMap<StepId, Entry>,
    /// By order of submission: what waits, what is queued and what is sent (P-7).
    order: BTreeMap<u64, StepId>,
    next_order: u64,
    mailboxes: BTreeMap<ReplicaNo, Mailbox>,
    placed_own: usize,
    /// Own steps: the highest number seen, and the unfinished ones.
    top_seq: u64,
    open: BTreeSet<u64>,
    finished_above: BTreeSet<u64>,
    /// Other origins' words on what is finished.
    origins: BTreeMap<Incarnation, Completed>,
    retry_at: Option<Instant>,
    notices_at: Option<Instant>,
    wake: Option<Instant>,
    outputs: VecDeque<SenderOutput>,
}

impl<C: Choose> Sender<C> {
    /// A sender of the life `me`.
    pub fn new(me: Incarnation, config: SenderConfig, choose: C) -> Self {
        Sender {
            config,
            me,
            choose,
            entries: BTreeMap::new(),
            order: BTreeMap::new(),
            next_order: 0,
            mailboxes: BTreeMap::new(),
            placed_own: 0,
            top_seq: 0,
            open: BTreeSet::new(),
            finished_above: BTreeSet::new(),
            origins: BTreeMap::new(),
            retry_at: None,
            notices_at: None,
            wake: None,
            outputs: VecDeque::new(),
        }
    }

    /// The chooser.
    pub fn choose(&self) -> &C {
        &self.choose
    }

    /// The chooser, to be told of changes; follow it with [`SenderInput::Pump`].
    pub fn choose_mut(&mut self) -> &mut C {
        &mut self.choose
    }

    /// Accepted steps that have not ended.
    pub fn unfinished(&self) -> usize {
        self.entries.len()
    }

    /// Unfinished steps that are queued for or sent to a replica.
    pub fn on_replica(&self, replica: ReplicaNo) -> usize {
        self.entries.values().filter(|entry| entry.place.replica() == Some(replica)).count()
    }

    /// The lives that unfinished steps are queued for or were sent to.
    pub fn targets(&self) -> BTreeSet<Target> {
        self.entries.values().filter_map(|entry| entry.place.target()).collect()
    }

    /// Whether one more submission would be accepted rather than handed back.
    pub fn has_room(&self) -> bool {
        self.entries.len() < self.config.mailbox
    }

    fn on_submit(&mut self, now: Instant, submission: Submission) {
        let own = submission.completed.is_none();
        let id = submission.id;
        if let Some(completed) = &submission.completed {
            self.learn(id.origin, completed);
        }
        if let Some(entry) = self.entries.get_mut(&id) {
            // A hop's own upstream sent the step again while this one is on its way: it waits for the same reply.
            debug_assert!(!entry.own, "an origin numbers its steps uniquely");
            return;
        }
        let no_credit = own && self.config.k.is_some_and(|k| self.placed_own >= k);
        let refuse = submission.when_full == WhenFull::Refuse && no_credit;
        if refuse || !self.has_room() {
            self.outputs.push_back(SenderOutput::Refused(submission));
            return;
        }
        if own {
            self.top_seq = self.top_seq.max(id.seq);
            self.open.insert(id.seq);
        }
        let order = self.next_order;
        self.next_order += 1;
        self.order.insert(order, id);
        self.entries.insert(
            id,
            Entry {
                order,
                own,
                route: submission.route,
                deadline: submission.deadline,
                streaming: submission.streaming,
                items_bytes: submission.resume.iter().map(Bytes::len).sum(),
                items: submission.resume,
                meta: submission.meta,
                payload: submission.payload,
                place: Place::Waiting,
                attempt: 0,
                moves: 0,
                may_have_run: false,
                avoid: None,
                refused_by: None,
                look: now + self.config.unavailable_after,
                expiring: false,
            },
        );
        // Only the new step can have become sendable, and only if nothing waits before it.
        if self.order.len() == 1 || !self.something_waits_before(order) {
            self.place(now, id);
        }
    }

    fn something_waits_before(&self, order: u64) -> bool {
        self.order.range(..order).any(|(_, id)| self.entries[id].place == Place::Waiting)
    }

    /// Places waiting steps and sends queued ones, in order.
    fn pump(&mut self, now: Instant) {
        let waiting: Vec<StepId> = self
            .order
            .values()
            .filter(|id| !matches!(self.entries[*id].place, Place::Sent(_)))
            .copied()
            .collect();
        for id in waiting {
            match self.entries[&id].place {
                Place::Waiting => self.place(now, id),
                Place::Queued(target) => self.send_queued(now, id, target),
                Place::Sent(_) => unreachable!("sent steps were filtered out, and none is sent twice"),
            }
        }
        let replicas: Vec<ReplicaNo> = self.mailboxes.keys().copied().collect();
        for replica in replicas {
            self.send_notices(replica);
        }
    }

    /// Chooses a replica for a waiting step, if it has credit and there is one.
    fn place(&mut self, now: Instant, id: StepId) {
        let entry = &self.entries[&id];
        if entry.own && self.held_back(id.seq) {
            return;
        }
        let Some(target) = self.choose.pick(entry.route.first().copied(), entry.avoid) else { return };
        if entry.refused_by == Some(target.incarnation) {
            return;
        }
        self.choose.started(target);
        let entry = self.entries.get_mut(&id).expect("the id was just looked up");
        entry.place = Place::Queued(target);
        self.placed_own += usize::from(entry.own);
        self.mailbox(target);
        self.send_queued(now, id, target);
    }

    /// Whether an own step waits for credit (P-4), or for the lowest unfinished one to end.
    fn held_back(&self, seq: u64) -> bool {
        if self.config.k.is_some_and(|k| self.placed_own >= k) {
            return true;
        }
        let first = self.open.first().copied().unwrap_or(seq);
        // An origin's numbers are shared by its groups, so that most of those in between may be no steps of this one.
        seq.saturating_sub(first) >= self.config.window
            && (self.open.range(..seq).count() + self.finished_above.range(..seq).count()) as u64
                >= self.config.window
    }

    fn mailbox(&mut self, target: Target) -> &mut Mailbox {
        let mailbox = self.mailboxes.entry(target.replica).or_default();
        if mailbox.incarnation != Some(target.incarnation) {
            // The state that old notices speak of died with the old life.
            *mailbox = Mailbox {
                incarnation: Some(target.incarnation),
                paused: mailbox.paused,
                ..Mailbox::default()
            };
        }
        mailbox
    }

    fn send_queued(&mut self, now: Instant, id: StepId, target: Target) {
        let mailbox = self.mailbox(target);
        if mailbox.paused || mailbox.blocked {
            return;
        }
        self.send(now, id, target);
    }

    fn send(&mut self, now: Instant, id: StepId, target: Target) {
        let completed = self.completed(id.origin);
        let ask_after = self.config.ask_after;
        let entry = self.entries.get_mut(&id).expect("only unfinished steps are sent");
        entry.attempt += 1;
        entry.place = Place::Sent(target);
        entry.may_have_run = true;
        entry.look = now + ask_after;
        let deadline_ms =
            entry.deadline.map(|deadline| u32::try_from(deadline.since(now).as_millis()).unwrap_or(u32::MAX));
        let step = Step {
            id,
            attempt: entry.attempt,
            route: entry.route.get(1..).unwrap_or_default().to_vec(),
            completed,
            deadline_ms,
            streaming: entry.streaming,
            resume: entry.items.clone(),
            meta: entry.meta.clone(),
            payload: Payload::Inline(entry.payload.clone()),
        };
        self.outputs.push_back(SenderOutput::Send { to: target, step });
    }

    fn completed(&self, origin: Incarnation) -> Completed {
        if origin != self.me {
            return self.origins.get(&origin).cloned().unwrap_or_default();
        }
        Completed {
            below: self.open.first().copied().unwrap_or(self.top_seq + 1),
            above: self.finished_above.iter().take(COMPLETED_ABOVE_MAX).copied().collect(),
        }
    }

    /// Takes another origin's word; it only grows (P-3).
    fn learn(&mut self, origin: Incarnation, completed: &Completed) {
        let known = self.origins.entry(origin).or_default();
        if completed.below >= known.below {
            known.clone_from(completed);
        }
        // Steps that their origin knows to be finished are wanted by nobody.
        let over: Vec<StepId> = self
            .entries
            .range(StepId { origin, seq: 0 }..=StepId { origin, seq: u64::MAX })
            .filter(|(id, _)| completed.contains(id.seq))
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            self.on_cancel(id);
        }
    }

    /// Moves what is queued for or sent to a life that ended, in order, to its successors (P-7, P-8).
    fn on_handover(&mut self, now: Instant, from: Target, evidence: Evidence) {
        let moved: Vec<StepId> = self
            .order
            .values()
            .filter(|id| matches!(self.entries[*id].place, Place::Queued(at) | Place::Sent(at) if at == from))
            .copied()
            .collect();
        let mut runs: Vec<(Option<Target>, Vec<StepId>)> = Vec::new();
        for id in moved {
            self.unplace(now, id);
            let entry = self.entries.get_mut(&id).expect("it was just listed");
            // An identity that moved keeps its steps; otherwise a replica that just died is the last choice.
            if evidence == Evidence::Superseded {
                entry.avoid = None;
                match entry.route.first_mut() {
                    Some(first) => *first = from.replica,
                    None => entry.route.push(from.replica),
                }
            } else {
                entry.avoid = Some(from.replica);
            }
            entry.moves += 1;
            if entry.moves > self.config.attempts {
                self.fail(
                    id,
                    ErrorCode::Unavailable,
                    "it was moved too often: the group's replicas keep failing",
                );
                continue;
            }
            self.place(now, id);
            let to = self.entries[&id].place.target();
            match runs.last_mut() {
                Some((last, steps)) if *last == to => steps.push(id),
                _ => runs.push((to, alloc::vec![id])),
            }
        }
        if self
            .mailboxes
            .get(&from.replica)
            .is_some_and(|mailbox| mailbox.incarnation == Some(from.incarnation))
        {
            let paused = self.mailboxes[&from.replica].paused;
            self.mailboxes.insert(from.replica, Mailbox { paused, ..Mailbox::default() });
        }
        for (to, steps) in runs {
            self.outputs.push_back(SenderOutput::HandedOver { from, to, steps, evidence });
        }
        self.pump(now);
    }

    /// Takes a step off its replica; it waits again. Its slot is free: the reader's life is over, or it said that it
    /// does not want the bytes.
    fn unplace(&mut self, now: Instant, id: StepId) {
        let entry = self.entries.get_mut(&id).expect("only unfinished steps are placed");
        let Some(target) = entry.place.target() else { return };
        entry.place = Place::Waiting;
        entry.look = now + self.config.unavailable_after;
        self.placed_own -= usize::from(entry.own);
        let attempt = entry.attempt;
        self.choose.finished(target);
        if attempt > 0 {
            self.outputs.push_back(SenderOutput::Release { id, attempt });
        }
    }

    fn on_resume(&mut self, now: Instant, replica: ReplicaNo) {
        let mailbox = self.mailboxes.entry(replica).or_default();
        mailbox.paused = false;
        // Whose life that was may be forgotten with a link that was lost. Offered to another that gave it back, a step
        // is given back again.
        for entry in self.entries.values_mut() {
            entry.refused_by = None;
        }
        self.pump(now);
    }

    fn on_relinked(&mut self, now: Instant, incarnation: Incarnation) {
        for (id, target) in self.sent_to(incarnation) {
            self.send(now, id, target);
        }
        for mailbox in self.mailboxes.values_mut() {
            if mailbox.incarnation == Some(incarnation) {
                mailbox.notices_sent = 0;
            }
        }
        self.pump(now);
    }

    fn sent_to(&self, incarnation: Incarnation) -> Vec<(StepId, Target)> {
        self.order
            .values()
            .filter_map(|id| match self.entries[id].place {
                Place::Sent(target) if target.incarnation == incarnation => Some((*id, target)),
                _ => None,
            })
            .collect()
    }

    fn on_reply(&mut self, now: Instant, from: Incarnation, reply: Reply) {
        let id = reply.id;
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let from_assignee = matches!(entry.place, Place::Sent(at) if at.incarnation == from);
        if let Err(error) = &reply.result {
            let moves_on = matches!(error.code, ErrorCode::Draining | ErrorCode::PayloadLost);
            if moves_on && !from_assignee {
                return;
            }
            if moves_on {
                self.on_not_taken(now, id, error.clone());
                return;
            }
        }
        if reply.result.is_ok() && entry.streaming && (reply.items as usize) > entry.items.len() {
            // Items are missing in front of it (a lost link swallowed them): the replica sends them again when asked.
            if from_assignee {
                self.resend(now, id);
            }
            return;
        }
        // The first reply is the step's end, whoever sent it (P-5). A second executor is told to stop.
        if let (Some(at), false) = (entry.place.target(), from_assignee)
            && matches!(entry.place, Place::Sent(_))
        {
            self.outputs
                .push_back(SenderOutput::Control { to: at.incarnation, control: Control::Cancel { id } });
        }
        self.end(id, reply.route, reply.result);
        self.pump(now);
    }

    /// The assignee says that it did not and will not execute the step: it goes elsewhere, or there again.
    fn on_not_taken(&mut self, now: Instant, id: StepId, error: StepError) {
        let entry = self.entries.get_mut(&id).expect("the caller looked it up");
        let Some(target) = entry.place.target() else { return };
        entry.moves += 1;
        if entry.moves > self.config.attempts {
            self.end(id, Vec::new(), Err(error));
            return;
        }
        if error.code == ErrorCode::Draining {
            // A step that its replica gave back has not run there, or was stopped there on purpose.
            entry.refused_by = Some(target.incarnation);
            if self.mailboxes.get(&target.replica).is_some_and(|mailbox| mailbox.paused) {
                // The identity is moving: the step keeps its place in the mailbox and goes to the new address.
                entry.place = Place::Queued(target);
                let attempt = entry.attempt;
                self.outputs.push_back(SenderOutput::Release { id, attempt });
                return;
            }
        }
        self.unplace(now, id);
        self.pump(now);
    }

    fn resend(&mut self, now: Instant, id: StepId) {
        let entry = self.entries.get_mut(&id).expect("only unfinished steps are sent again");
        let Place::Sent(target) = entry.place else { return };
        entry.moves += 1;
        if entry.moves > self.config.attempts {
            self.fail(id, ErrorCode::PayloadLost, "it was sent too often without being received whole");
            return;
        }
        self.send(now, id, target);
    }

    fn on_item(&mut self, now: Instant, from: Incarnation, item: Item) {
        let ask_after = self.config.ask_after;
        let items_bytes_max = self.config.items_bytes;
        let Some(entry) = self.entries.get_mut(&item.id) else { return };
        if item.index as usize != entry.items.len() {
            // An earlier one again, or one behind a gap: the reply's count tells of gaps.
            return;
        }
        if matches!(entry.place, Place::Sent(at) if at.incarnation == from) {
            entry.look = now + ask_after;
        }
        entry.items_bytes += item.body.len();
        if entry.items_bytes > items_bytes_max {
            let text = "its items are more than the submitter keeps";
            self.stop_executor(item.id);
            self.fail(item.id, ErrorCode::TooLarge, text);
            return;
        }
        entry.items.push(item.body.clone());
        self.outputs.push_back(SenderOutput::Item { id: item.id, body: item.body });
    }

    fn on_control(&mut self, now: Instant, from: Incarnation, control: Control) {
        match control {
            Control::Ack { id, attempt } => {
                let ask_after = self.config.ask_after;
                if let Some(entry) = self.entries.get_mut(&id)
                    && matches!(entry.place, Place::Sent(at) if at.incarnation == from)
                {
                    entry.look = now + ask_after;
                    self.outputs.push_back(SenderOutput::Release { id, attempt });
                }
            }
            Control::Refetch { id, attempt }
                if self.entries.get(&id).is_some_and(|entry| {
                    entry.attempt == attempt
                        && matches!(entry.place, Place::Sent(at) if at.incarnation == from)
                }) =>
            {
                self.resend(now, id);
            }
            Control::Answer { id, state } => self.on_answer(now, from, id, state),
            Control::NoticeAck { seq } => {
                for mailbox in self.mailboxes.values_mut() {
                    if mailbox.incarnation == Some(from) {
                        mailbox.notices.retain(|(at, _)| *at > seq);
                    }
                }
            }
            _ => {}
        }
    }

    fn on_answer(&mut self, now: Instant, from: Incarnation, id: StepId, state: StepState) {
        let ask_after = self.config.ask_after;
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if !matches!(entry.place, Place::Sent(at) if at.incarnation == from) {
            return;
        }
        if entry.expiring {
            // The reply of a finished step follows its answer; anything else is too late (P-11).
            if state != StepState::Finished {
                let outcome =
                    if state == StepState::Unseen { Outcome::NotStarted } else { Outcome::MayHaveRun };
                self.stop_executor(id);
                self.end(id, Vec::new(), Err(deadline_exceeded(outcome)));
                self.pump(now);
            }
            return;
        }
        entry.look = now + ask_after;
        if state == StepState::Unseen {
            self.resend(now, id);
        }
    }

    fn on_unsent(&mut self, now: Instant, id: StepId, attempt: u32) {
        let retry = now + self.config.retry_after;
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let Place::Sent(target) = entry.place else { return };
        if entry.attempt != attempt {
            return;
        }
        entry.place = Place::Queued(target);
        self.mailbox(target).blocked = true;
        self.retry_at = Some(self.retry_at.map_or(retry, |at| at.min(retry)));
    }

    /// Tells the replica that may be executing the step to stop.
    fn stop_executor(&mut self, id: StepId) {
        if let Some(Place::Sent(target)) = self.entries.get(&id).map(|entry| entry.place) {
            self.outputs
                .push_back(SenderOutput::Control { to: target.incarnation, control: Control::Cancel { id } });
        }
    }

    fn on_cancel(&mut self, id: StepId) {
        if self.entries.contains_key(&id) {
            self.stop_executor(id);
            self.fail(id, ErrorCode::Cancelled, "it was cancelled by its submitter");
        }
    }

    fn fail(&mut self, id: StepId, code: ErrorCode, why: &str) {
        let ran = self.entries.get(&id).is_some_and(|entry| entry.may_have_run);
        let outcome = if ran { Outcome::MayHaveRun } else { Outcome::NotStarted };
        self.end(id, Vec::new(), Err(StepError::new(code, outcome, alloc::format!("step {id}: {why}"))));
    }

    /// The one place where a step ends (P-1).
    fn end(&mut self, id: StepId, route: Vec<ReplicaNo>, result: Result<Bytes, StepError>) {
        let Some(entry) = self.entries.remove(&id) else { return };
        self.order.remove(&entry.order);
        if let Some(target) = entry.place.target() {
            self.choose.finished(target);
            self.placed_own -= usize::from(entry.own);
        }
        if entry.attempt > 0 {
            self.outputs.push_back(SenderOutput::Release { id, attempt: entry.attempt });
        }
        if entry.own {
            self.open.remove(&id.seq);
            let below = self.open.first().copied().unwrap_or(self.top_seq + 1);
            if id.seq > below {
                self.finished_above.insert(id.seq);
            }
            self.finished_above = self.finished_above.split_off(&below);
        }
        self.outputs.push_back(SenderOutput::Done { id, route, result });
    }

    fn on_origin_gone(&mut self, now: Instant, origin: Incarnation) {
        let gone: Vec<StepId> = self
            .entries
            .range(StepId { origin, seq: 0 }..=StepId { origin, seq: u64::MAX })
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            self.on_cancel(id);
        }
        self.origins.remove(&origin);
        self.pump(now);
    }

    fn on_notice(&mut self, to: Target, body: Bytes) {
        let limit = self.config.mailbox;
        let mailbox = self.mailbox(to);
        if mailbox.notices.len() >= limit {
            // A replica that acknowledges nothing for this long is about to be found dead; its state goes with it.
            mailbox.notices.pop_front();
        }
        mailbox.notice_seq += 1;
        let seq = mailbox.notice_seq;
        mailbox.notices.push_back((seq, body));
        self.send_notices(to.replica);
    }

    /// The control lane of a mailbox: sent before data, and again after a lost link until acknowledged.
    fn send_notices(&mut self, replica: ReplicaNo) {
        let Some(mailbox) = self.mailboxes.get_mut(&replica) else { return };
        let (Some(to), false) = (mailbox.incarnation, mailbox.paused) else { return };
        for (seq, body) in mailbox.notices.iter().filter(|(seq, _)| *seq > mailbox.notices_sent) {
            self.outputs.push_back(SenderOutput::Control {
                to,
                control: Control::Notice { seq: *seq, body: body.to_vec() },
            });
        }
        mailbox.notices_sent = mailbox.notice_seq;
    }

    fn on_tick(&mut self, now: Instant) {
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            for mailbox in self.mailboxes.values_mut() {
                mailbox.blocked = false;
            }
            self.pump(now);
        }
        let due: Vec<StepId> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.look.min(entry.deadline.unwrap_or(entry.look)) <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.on_due(now, id);
        }
        if self.notices_at.is_some_and(|at| at <= now) {
            for mailbox in self.mailboxes.values_mut() {
                mailbox.notices_sent = 0;
            }
            let replicas: Vec<ReplicaNo> = self.mailboxes.keys().copied().collect();
            for replica in replicas {
                self.send_notices(replica);
            }
            self.notices_at = None;
        }
    }

    fn on_due(&mut self, now: Instant, id: StepId) {
        let config = &self.config;
        let entry = self.entries.get_mut(&id).expect("it was just listed");
        let expired = entry.deadline.is_some_and(|deadline| deadline <= now);
        match entry.place {
            Place::Sent(target) if expired && !entry.expiring => {
                entry.expiring = true;
                entry.deadline = None;
                entry.look = now + config.ask_grace;
                self.outputs.push_back(SenderOutput::Control {
                    to: target.incarnation,
                    control: Control::Ask { id },
                });
            }
            Place::Sent(_) if entry.expiring => {
                self.stop_executor(id);
                self.end(id, Vec::new(), Err(deadline_exceeded(Outcome::MayHaveRun)));
                self.pump(now);
            }
            Place::Sent(target) => {
                entry.look = now + config.ask_after;
                self.outputs.push_back(SenderOutput::Control {
                    to: target.incarnation,
                    control: Control::Ask { id },
                });
            }
            Place::Waiting | Place::Queued(_) if expired || entry.expiring => {
                let outcome = if entry.may_have_run { Outcome::MayHaveRun } else { Outcome::NotStarted };
                self.end(id, Vec::new(), Err(deadline_exceeded(outcome)));
            }
            Place::Waiting | Place::Queued(_) => {
                let look = now + config.unavailable_after;
                let queued = matches!(entry.place, Place::Queued(_));
                if queued || entry.own && self.held_back(id.seq) {
                    self.entries.get_mut(&id).expect("it was found above").look = look;
                } else {
                    self.fail(id, ErrorCode::Unavailable, "no replica of the group could take it in time");
                }
            }
        }
    }

    fn refresh_wake(&mut self, now: Instant) {
        if self.mailboxes.values().all(|mailbox| mailbox.notices.is_empty()) {
            self.notices_at = None;
        } else if self.notices_at.is_none() {
            self.notices_at = Some(now + self.config.ask_after);
        }
        let steps =
            self.entries.values().map(|entry| entry.look.min(entry.deadline.unwrap_or(entry.look))).min();
        self.wake = [steps, self.retry_at, self.notices_at].into_iter().flatten().min();
    }
}

impl Place {
    fn target(self) -> Option<Target> {
        match self {
            Place::Waiting => None,
            Place::Queued(target) | Place::Sent(target) => Some(target),
        }
    }

    fn replica(self) -> Option<ReplicaNo> {
        self.target().map(|target| target.replica)
    }
}

fn deadline_exceeded(outcome: Outcome) -> StepError {
    StepError::new(ErrorCode::DeadlineExceeded, outcome, "the step's deadline passed before its reply came")
}

impl<C: Choose> Machine for Sender<C> {
    type Input = SenderInput;
    type Output = SenderOutput;

    fn handle(&mut self, now: Instant, input: SenderInput) {
        match input {
            SenderInput::Submit(submission) => self.on_submit(now, submission),
            SenderInput::Pump => self.pump(now),
            SenderInput::Handover { from, evidence } => self.on_handover(now, from, evidence),
            SenderInput::Relinked(incarnation) => self.on_relinked(now, incarnation),
            SenderInput::Pause(replica) => self.mailboxes.entry(replica).or_default().paused = true,
            SenderInput::Resume(replica) => self.on_resume(now, replica),
            SenderInput::Reply { from, reply } => self.on_reply(now, from, reply),
            SenderInput::Item { from, item } => self.on_item(now, from, item),
            SenderInput::Control { from, control } => self.on_control(now, from, control),
            SenderInput::Unsent { id, attempt } => self.on_unsent(now, id, attempt),
            SenderInput::Cancel(id) => {
                self.on_cancel(id);
                self.pump(now);
            }
            SenderInput::OriginGone(origin) => self.on_origin_gone(now, origin),
            SenderInput::Notice { to, body } => self.on_notice(to, body),
            SenderInput::Tick => self.on_tick(now),
        }
        self.refresh_wake(now);
        assert!(self.entries.len() <= self.config.mailbox, "the mailbox is bounded");
        debug_assert_eq!(self.entries.len(), self.order.len());
        debug_assert!(self.config.k.is_none_or(|k| self.placed_own <= k), "K is enforced (P-4)");
    }

    fn poll(&mut self) -> Option<SenderOutput> {
        self.outputs.pop_front()
    }

    fn deadline(&self) -> Option<Instant> {
        self.wake
    }
}
